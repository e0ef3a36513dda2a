"""Copied models and caches, compiled models, failed passes, and chunked prompts."""

from __future__ import annotations

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if not transformers.__version__.startswith("5.23."):
    pytest.skip("needs transformers 5.23", allow_module_level=True)

import kvtier  # noqa: E402
from h2o_models import make_model, tokens  # noqa: E402
from kvtier_transformers.h2o import (  # noqa: E402
    eviction_of,
    install_kv_eviction,
    remove_kv_eviction,
)
from transformers import DynamicCache  # noqa: E402


def rows_of(model, ids):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return [layer.keys.shape[2] for layer in cache.layers], cache


@pytest.mark.parametrize("way", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copied_model_has_its_own_eviction(way):
    model = make_model("llama")
    install_kv_eviction(model, 8, n_recent=6)
    ids, (have, cache) = tokens(40), rows_of(model, tokens(40))
    twin = way(model)
    assert have == [18] * 3 and len(eviction_of(model).layers) == 3
    assert eviction_of(twin).layers == []
    rows, other = rows_of(twin, ids)
    assert rows == have and eviction_of(twin).layers == other.layers
    remove_kv_eviction(model)
    assert rows_of(twin, ids)[0] == have and rows_of(model, ids)[0] == [40] * 3
    remove_kv_eviction(twin)
    assert rows_of(twin, ids)[0] == [40] * 3


def test_copied_cache_is_independent():
    model = make_model("llama")
    eviction = install_kv_eviction(model, 8, n_recent=6)
    _, cache = rows_of(model, tokens(40, 2))
    copied = copy.deepcopy(cache)
    assert len(eviction.layers) == 6
    for seed in range(4):
        with torch.no_grad():
            model(tokens(9, 2, seed=seed + 20), past_key_values=copied)
    with torch.no_grad():
        again = rows_of(model, tokens(40, 2))[1]
        ends = [model(tokens(7, 2, seed=3), past_key_values=one).logits for one in (cache, again)]
    assert torch.equal(*ends) and cache.get_seq_length() == 47 and copied.get_seq_length() == 76
    assert [one.evictor.kept(1) for one in cache.layers] == [
        one.evictor.kept(1) for one in again.layers]


def test_pass_that_failed_between_layers_is_detected():
    model = make_model("llama")
    install_kv_eviction(model, 8, n_recent=6)
    _, cache = rows_of(model, tokens(30))

    def fail(*_):
        raise ValueError("no memory")

    with torch.no_grad():
        hook = model.model.layers[0].mlp.register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="no memory"):
            model(tokens(1), past_key_values=cache)
        hook.remove()
        with pytest.raises(kvtier.StateError, match="forward pass failed"):
            model(tokens(1), past_key_values=cache)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_prompt_chunks_may_be_padding_only(implementation):
    model = make_model("llama", implementation)
    install_kv_eviction(model, 8, n_recent=6)
    ids = tokens(40, 2)
    mask = torch.ones_like(ids)
    mask[1, :25] = 0
    both = model.generate(ids, attention_mask=mask, prefill_chunk_size=10, max_new_tokens=6,
                          do_sample=False)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():  # in the same chunks
        for part in ids[1:, 25:].split([5, 10], 1):
            logits = model(part, past_key_values=cache).logits
        for token in both[1, 40:]:
            assert int(logits[0, -1].argmax()) == int(token)
            logits = model(token[None, None], past_key_values=cache).logits


def test_deep_crop_counts_evicted_tokens():
    model = make_model("llama")
    install_kv_eviction(model, 2, n_recent=1)
    _, cache = rows_of(model, tokens(30))
    cache.crop(-10)
    with torch.no_grad():
        model(tokens(3), past_key_values=cache)
    for layer in cache.layers:
        assert layer.evictor.counts.tolist() == [23] and layer.evictor.kept(0)[0][-1] == 22


@pytest.mark.filterwarnings("ignore")
def test_compiled_model_equals_the_eager_one():
    model, one = make_model("llama"), tokens(1)
    install_kv_eviction(model, 8, n_recent=6)
    compiled = torch.compile(model, backend="eager")
    ends = []
    for runs in (model, compiled):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            runs(tokens(40), past_key_values=cache)
            ends.append(runs(one, past_key_values=cache).logits)
        assert [layer.keys.shape[2] for layer in cache.layers] == [18] * 3
    torch.testing.assert_close(*ends)
