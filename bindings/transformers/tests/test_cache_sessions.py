"""Saving and resuming sessions by their tokens."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import List, Optional

import pytest
from cache_models import MAKERS, Counter, ids, make, no_leaked_handles, step  # noqa: F401

import kvtier
import torch
from kvtier_transformers import Tiers, fingerprint, fingerprint_files
from transformers import DynamicCache

STORE = "store(host=32MiB)"
MODES = [None, 2]


def disk(path: Path, host: str = "4MiB") -> str:
    return f'store(host={host}, disk=disk(path="{path}/kv", bytes=64MiB, segment=1MiB))'


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MAKERS)
def test_resumed_session_equals_an_uninterrupted_one(
        name: str, dtype: torch.dtype, mode: Optional[int], tmp_path: Path) -> None:
    """With equal passes, split at a chunk boundary, logits are equal bit for bit."""
    model = make(name, dtype, num_hidden_layers=4)
    tokens = ids(64 + 20, rows=2, seed=1)
    stock = DynamicCache(config=model.config)
    with Tiers(model, disk(tmp_path)) as tiers:
        first = tiers.cache(resident_layers=mode)
        step(model, first, tokens[:, :64]), step(model, stock, tokens[:, :64])
        assert first.save() == [64, 64]
    with Tiers(model, disk(tmp_path)) as tiers, Counter(model) as counter:  # after a restart
        cache = tiers.cache(resident_layers=mode)
        assert cache.resume(tokens) == 64 == cache.get_seq_length()
        for at in range(64, 84, 4):
            piece = tokens[:, at:at + 4]
            assert torch.equal(step(model, cache, piece), step(model, stock, piece))
        assert counter.passes == [4] * 10 and cache.unknown == ""
        assert cache.save() == [80, 80]
        assert tiers.lookup(tokens[1]) == 80


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MAKERS)
def test_generate_continues_from_a_saved_prefix(name: str, mode: Optional[int]) -> None:
    model, prompt = make(name), ids(75, seed=2)
    want = model.generate(prompt, max_new_tokens=30, do_sample=False)
    with Tiers(model, STORE) as tiers:
        model.generate(prompt, max_new_tokens=5, do_sample=False, past_key_values=(
            first := tiers.cache(resident_layers=mode)))
        first.save()
        cache = tiers.cache(resident_layers=mode)
        assert cache.resume(prompt) == 64
        with Counter(model) as counter:
            got = model.generate(prompt, max_new_tokens=30, do_sample=False,
                                 past_key_values=cache)
        assert counter.passes == [11] + [1] * 29
        assert torch.equal(got, want)
        # The next turn finds all full chunks of the answer.
        cache.save(got)
        longer = torch.cat([got, ids(9, seed=3)], 1)
        turn = tiers.cache(resident_layers=mode)
        assert turn.resume(longer) == 96


@pytest.mark.parametrize("name", MAKERS)
def test_split_prefill_is_close_to_a_whole_one(name: str) -> None:
    """Different passes round differently: at most 1e-5 in f32 on these models."""
    model, tokens = make(name), ids(83, seed=4)
    with Tiers(model, STORE) as tiers:
        step(model, first := tiers.cache(), tokens[:, :70])
        first.save()
        cache = tiers.cache()
        assert cache.resume(tokens) == 64
        whole = step(model, DynamicCache(config=model.config), tokens)
        assert torch.allclose(step(model, cache, tokens[:, 64:]), whole[:, 64:], atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_plan_loads_only_if_faster_than_computing(name: str, mode: Optional[int]) -> None:
    model, tokens = make(name), ids(90, rows=2, seed=11)
    with Tiers(model, STORE) as tiers:
        step(model, first := tiers.cache(), tokens)
        assert first.save() == [80, 80]
        stock = DynamicCache(config=model.config)
        whole = [step(model, stock, piece) for piece in (tokens[:, :80], tokens[:, 80:])][1]
        for token_ns, expected in ((0.0, 0), (1e9, 80)):
            tiers.namespace.set_prefill_cost((0.0, token_ns))
            cache = tiers.cache(resident_layers=mode)
            assert cache.resume(tokens, plan=True) == expected == cache.get_seq_length()
            rest = step(model, cache, tokens[:, expected:])
            assert torch.allclose(rest[:, 80 - expected:], whole, atol=1e-5)
            assert cache.unknown == "" and cache.save() == [80, 80]
            assert tiers.cache().resume(tokens) == 80
        tiers.namespace.set_prefill_cost(None)
        for _ in range(200):  # 30 s for 16 tokens
            tiers.observe_prefill(0, 16, 30.0)
        assert tiers.cache(resident_layers=mode).resume(tokens, plan=True) == 80
        beta = tiers.namespace.prefill_cost().beta_ns
        assert beta > 1e9 and tiers.namespace.prefill_cost().observed == 200
        padded = torch.cat([torch.zeros_like(tokens[:, :7]), tokens], 1)
        mask = (padded != 0).long()
        want = 87 if name == "llama" and mode is None else 0
        assert tiers.cache(resident_layers=mode).resume(padded, mask, plan=True) == want


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_last_token_is_always_computed(name: str) -> None:
    model, tokens = make(name), ids(64, seed=5)
    with Tiers(model, STORE) as tiers:
        a = step(model, first := tiers.cache(), tokens)
        assert first.save() == [64]
        cache = tiers.cache()
        assert cache.resume(tokens) == 63
        assert torch.allclose(step(model, cache, tokens[:, 63:])[:, -1], a[:, -1], atol=1e-5)
        assert cache.save() == [64]


def test_rows_resume_at_the_same_slot() -> None:
    model, tokens = make("gemma3"), ids(80, rows=2, seed=6)
    with Tiers(model, STORE) as tiers:
        for row, n in ((0, 80), (1, 50)):
            step(model, one := tiers.cache(), tokens[row:row + 1, :n])
            one.save()
        cache = tiers.cache()
        assert cache.resume(tokens) == 48
        whole = step(model, DynamicCache(config=model.config), tokens)
        assert torch.allclose(step(model, cache, tokens[:, 48:]), whole[:, 48:], atol=1e-5)


def test_padded_rows_are_stored_without_padding() -> None:
    model, long, short = make("llama"), ids(60, seed=7), ids(41, seed=8)
    batch = torch.cat([long, torch.cat([torch.zeros_like(long[:, :19]), short], 1)])
    mask = torch.ones_like(batch)
    mask[1, :19] = 0
    how = {"max_new_tokens": 12, "do_sample": False, "attention_mask": mask}
    want = model.generate(batch, **how)
    with Tiers(model, STORE) as tiers:
        cache = tiers.cache()
        got = model.generate(batch, **how, past_key_values=cache)
        assert torch.equal(got, want) and cache.unknown == ""
        assert cache.save() == [64, 48]
        assert tiers.lookup(torch.cat([short, got[1:, 60:]], 1)) == 48
        again = tiers.cache()
        more = torch.ones((2, 72), dtype=torch.long)
        more[1, :19] = 0
        assert again.resume(got, more) == 64  # the shorter row has 19 + 48 slots, the other 64
        out = model.generate(got, max_new_tokens=4, do_sample=False, attention_mask=more,
                             past_key_values=again)
        assert torch.equal(out, model.generate(got, max_new_tokens=4, do_sample=False,
                                               attention_mask=more))
        alone = tiers.cache()
        assert alone.resume(torch.cat([short, ids(9)], 1)) == 32
        a = step(model, alone, short[:, 32:])
        b = step(model, DynamicCache(config=model.config), short)
        assert torch.allclose(a, b[:, 32:], atol=1e-5)
        with pytest.raises(kvtier.StateError, match="padded"):
            model.generate(batch, **how, past_key_values=tiers.cache(resident_layers=2))


@pytest.mark.parametrize("mode", MODES)
def test_small_host_tier_causes_only_recomputation(mode: Optional[int]) -> None:
    """Evicted chunks, and chunks whose puts failed, are computed again."""
    model = make("llama", num_hidden_layers=4, hidden_size=512, head_dim=128,
                 num_attention_heads=4, num_key_value_heads=4)
    prompts = [ids(160, seed=seed) for seed in range(4)]
    with Tiers(model, "store(host=1MiB)") as tiers:
        for prompt in prompts + prompts[::-1]:
            cache, stock = tiers.cache(resident_layers=mode), DynamicCache(config=model.config)
            done = cache.resume(prompt)
            a = step(model, cache, prompt[:, done:])
            b = step(model, stock, prompt)
            assert torch.allclose(a, b[:, done:], atol=1e-4)
            for _ in range(40):
                tokens = b[:, -1:].argmax(-1)
                a, b = step(model, cache, tokens), step(model, stock, tokens)
                assert torch.allclose(a, b, atol=1e-4)
        cache.settle()  # counts failed puts
        assert tiers.stats()["evicted_chunks"] > 0 or cache.stats()["failed_puts"] > 0


@pytest.mark.parametrize("mode", MODES)
def test_checksum_mismatch_is_a_miss(mode: Optional[int], tmp_path: Path) -> None:
    model, tokens = make("deepseek_v3"), ids(100, seed=9)
    with Tiers(model, disk(tmp_path)) as tiers:
        step(model, first := tiers.cache(), tokens)
        assert first.save() == [96]
    for file in (tmp_path / "kv").glob("seg-*"):
        data = bytearray(file.read_bytes())
        for at in range(2 * 4096 + 7, len(data), 4 * 4096):  # one byte in every fourth page
            data[at] ^= 0x40
        file.write_bytes(data)
    with Tiers(model, disk(tmp_path)) as tiers:
        cache = tiers.cache(resident_layers=mode)
        done = cache.resume(tokens)
        assert done < 96
        whole = step(model, DynamicCache(config=model.config), tokens)
        assert torch.allclose(step(model, cache, tokens[:, done:]), whole[:, done:], atol=1e-5)
        assert cache.save() == [96]


def test_concurrent_generations_do_not_interfere() -> None:
    model = make("gemma3")
    prompts = [ids(70, seed=seed) for seed in (20, 21)]
    want = [model.generate(p, max_new_tokens=24, do_sample=False) for p in prompts]
    wrong: List[object] = []
    with Tiers(model, STORE) as tiers:
        def run(number: int) -> None:
            try:
                for mode in (None, 2, None):
                    cache = tiers.cache(resident_layers=mode)
                    cache.resume(prompts[number])
                    got = model.generate(prompts[number], max_new_tokens=24, do_sample=False,
                                         past_key_values=cache)
                    assert torch.equal(got, want[number])
                    assert cache.save(got) == [80]
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=run, args=(n % 2,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_other_weights_and_salts_do_not_share_kv(tmp_path: Path) -> None:
    model, tokens = make("llama"), ids(40)
    with Tiers(model, STORE) as tiers:
        step(model, cache := tiers.cache(), tokens)
        cache.save()
        assert tiers.lookup(tokens) == 32
        before = fingerprint(model)
        other = Tiers(model, tiers.store, salt=b"tenant")
        assert other.lookup(tokens) == 0
        other.close()
        with torch.no_grad():
            model.lm_head.weight[0, 0] += 1  # one element of one weight
        assert fingerprint(model) != before
        other = Tiers(model, tiers.store)
        assert other.lookup(tokens) == 0
        other.close()
        model.save_pretrained(tmp_path)
        assert len(fingerprint_files(tmp_path)) == 32
        with pytest.raises(kvtier.InvalidError, match="safetensors"):
            fingerprint_files(tmp_path / "nothing")
