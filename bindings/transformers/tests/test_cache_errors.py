"""Errors and their messages, and processes that fork, exit, or close the store too early."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cache_models import ids, make, no_leaked_handles, step  # noqa: F401

import kvtier
import torch
from kvtier_transformers import Tiers
from transformers import DynamicCache

STORE = "store(host=16MiB)"
HERE = Path(__file__).resolve().parent


def disk(path: Any) -> str:
    return f'store(host=4MiB, disk=disk(path="{path}/kv", bytes=64MiB, segment=1MiB))'


def resume_elsewhere(path: str) -> "tuple[int, bool]":
    """Runs in a child process."""
    torch.set_num_threads(1)
    model, tokens = make("gemma3"), ids(90, seed=1)
    stock = DynamicCache(config=model.config)
    step(model, stock, tokens[:, :80])
    with Tiers(model, disk(path)) as tiers:
        cache = tiers.cache()
        done = cache.resume(tokens)
        same = torch.equal(step(model, cache, tokens[:, 80:]), step(model, stock, tokens[:, 80:]))
        return done, same


def test_another_process_resumes_from_disk(tmp_path: Path) -> None:
    model, tokens = make("gemma3"), ids(90, seed=1)
    with Tiers(model, disk(tmp_path)) as tiers:
        step(model, cache := tiers.cache(), tokens[:, :80])
        assert cache.save() == [80]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(resume_elsewhere, (str(tmp_path),)) == (80, True)


def test_forked_child_gets_an_error() -> None:
    model, tokens = make("llama"), ids(20)
    with Tiers(model, STORE) as tiers:
        cache = tiers.cache()
        step(model, cache, tokens)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                tiers.cache().resume(tokens)
            except kvtier.ForkedError as error:
                code = 0 if "spawn" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert cache.save() == [16]


def test_store_closed_during_use_is_reported() -> None:
    model, tokens = make("llama"), ids(30)
    with kvtier.Runtime() as runtime:
        store = kvtier.Store(runtime, STORE)
        tiers = Tiers(model, store)
        cache = tiers.cache()
        step(model, cache, tokens)
        store.close()
        with pytest.raises(kvtier.ClosedError, match="detach"):
            step(model, cache, tokens)
        with pytest.raises(kvtier.ClosedError, match="detach"):
            cache.save()
        cache.detach()
        step(model, cache, tokens)
        with pytest.raises(kvtier.StateError, match="detached"):
            cache.save()
        tiers.close()


EXIT = """
import sys
sys.path.insert(0, {here!r})
from cache_models import ids, make, step
from kvtier_transformers import Tiers
model = make("llama")
tiers = Tiers(model, {store!r})
cache, more = tiers.cache(), tiers.cache(resident_layers=2)
step(model, cache, ids(64, seed=2))
assert cache.save() == [64]
step(model, cache, ids(640, seed=3))   # puts are in progress
step(model, more, ids(640, seed=4))
print("acknowledged", flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)", "import os; os._exit(0)"])
def test_exit_with_a_live_cache_keeps_saved_kv(end: str, tmp_path: Path) -> None:
    script = EXIT.format(here=str(HERE), store=disk(tmp_path), end=end)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                           timeout=600)
    assert ended.returncode == 0 and "acknowledged" in ended.stdout, ended.stderr
    model, tokens = make("llama"), ids(64, seed=2)
    with Tiers(model, disk(tmp_path)) as tiers:
        assert tiers.cache().resume(tokens) == 63


def test_unknown_tokens_are_not_stored() -> None:
    model, tokens = make("llama"), ids(40)
    with Tiers(model, STORE) as tiers, torch.no_grad():
        embeds = model.get_input_embeddings()(tokens)
        cache = tiers.cache()
        model(inputs_embeds=embeds, past_key_values=cache)
        assert "inputs_embeds" in cache.unknown and tiers.lookup(tokens) == 0
        with pytest.raises(kvtier.StateError, match="pass tokens="):
            cache.save()
        with pytest.raises(kvtier.StateError, match="inputs_embeds"):
            model(inputs_embeds=embeds, past_key_values=tiers.cache(resident_layers=2))
        cache = tiers.cache()
        model.model(input_ids=tokens, past_key_values=cache)
        assert "around" in cache.unknown
        assert cache.save(tokens) == [32] and tiers.lookup(tokens) == 32
        cache = tiers.cache()
        model(input_ids=ids(40, seed=5), past_key_values=cache,
              position_ids=torch.arange(40)[None] + 7)
        assert "position_ids" in cache.unknown and tiers.lookup(ids(40, seed=5)) == 0
        holes = torch.ones((1, 40), dtype=torch.long)
        holes[0, 20] = 0
        cache = tiers.cache()
        model(input_ids=ids(40, seed=6), past_key_values=cache, attention_mask=holes)
        assert "mask" in cache.unknown and tiers.lookup(ids(40, seed=6)) == 0


def test_training_and_autocast_are_not_stored() -> None:
    model, tokens = make("llama"), ids(40)
    with Tiers(model, STORE) as tiers:
        cache = tiers.cache()
        model.train()
        step(model, cache, tokens)
        model.eval()
        assert "training" in cache.unknown and tiers.lookup(tokens) == 0
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cache = tiers.cache()
            step(model, cache, tokens)
            assert "autocast" in cache.unknown and tiers.lookup(tokens) == 0
            with pytest.raises(kvtier.StateError, match="autocast"):
                step(model, tiers.cache(resident_layers=2), tokens)
        cache = tiers.cache()
        step(model, cache, tokens)
        cache.hint(stop=kvtier.STOP_TOOL_USE)
        tiers.store.set_policy(kvtier.TIER_HOST, "arc")
        assert cache.save() == [32] and tiers.stats()["chunks"] == 2


def test_replaced_kv_is_not_stored() -> None:
    model, tokens = make("llama"), ids(40)
    with Tiers(model, STORE) as tiers:
        cache = tiers.cache()
        step(model, cache, tokens[:, :10])
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, 2:], layer.values[:, :, 2:]
        step(model, cache, tokens[:, 10:])
        assert "replaced" in cache.unknown and tiers.lookup(tokens) == 0
        assert cache.layers[0].get_seq_length() == 38
        with pytest.raises(kvtier.StateError, match="not stored"):
            cache.save(tokens)
        with pytest.raises(kvtier.StateError, match="cannot be replaced"):
            tiers.cache(resident_layers=2).layers[0].keys = torch.zeros(1, 2, 3, 4)


def test_invalid_arguments_are_rejected() -> None:
    model, tokens = make("llama"), ids(40)
    with Tiers(model, STORE) as tiers:
        cache = tiers.cache()
        step(model, cache, tokens)
        with pytest.raises(kvtier.StateError, match="reset"):
            cache.resume(tokens)
        with pytest.raises(kvtier.InvalidError, match="differs from the model's"):
            cache.save(tokens + 1)
        with pytest.raises(kvtier.InvalidError, match="39 tokens"):
            cache.save(tokens[:, :39])
        with pytest.raises(kvtier.InvalidError, match="one of ram"):
            cache.save(level="tape")
        with pytest.raises(kvtier.UnavailableError, match="disk="):
            cache.save(level="durable")
        with pytest.raises(kvtier.InvalidError, match="different lengths"):
            tiers.cache().resume([[1, 2], [3]])
        with pytest.raises(kvtier.InvalidError, match="zeros after ones"):
            tiers.cache().resume(tokens, [[1] * 20 + [0] * 20])
        with pytest.raises(kvtier.InvalidError, match="resident_layers"):
            tiers.cache(resident_layers=0)
        cache.reset()
        assert cache.resume(tokens) == 32
        assert cache.resume is not None and cache.get_seq_length() == 32
    with pytest.raises(kvtier.SpecError):
        Tiers(model, "shop(host=1MiB)")
    with pytest.raises(kvtier.InvalidError, match="chunks"):
        Tiers(model, STORE, chunk_tokens=0)


def test_models_with_states_are_rejected() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(vocab_size=99, hidden_size=16, num_hidden_layers=1,
                                      state_size=4)
    with pytest.raises(kvtier.UnsupportedError, match="stock cache"):
        Tiers(transformers.MambaForCausalLM(config), STORE)


def test_meta_weights_are_rejected() -> None:
    with torch.device("meta"):
        model = make("llama")
    with pytest.raises(kvtier.InvalidError, match="weights="):
        Tiers(model, STORE)
