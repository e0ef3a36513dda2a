"""The kept tokens match an independent reference model at every step."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if not transformers.__version__.startswith("5.23."):
    pytest.skip("needs transformers 5.23", allow_module_level=True)

from h2o_models import MODELS, Spy, make_model, tokens  # noqa: E402
from h2o_reference import Reference  # noqa: E402
from kvtier_transformers import attention  # noqa: E402
from kvtier_transformers.h2o import install_kv_eviction, remove_kv_eviction  # noqa: E402
from transformers import DynamicCache  # noqa: E402

SETTINGS = [(4, 6, 8, 1), (4, 6, 8, 4), (0, 1, 1, 1), (2, 12, 3, 3)]


def run(model, cache, ids, spy, references, past, **more):
    """Runs a forward pass, and updates the references from its queries and keys."""
    spy.calls.clear()
    with torch.no_grad():
        out = model(ids, past_key_values=cache, use_cache=True, **more)
    for layer, query, key, scale in spy.calls:
        if layer in references:
            count = ids.shape[1]
            for row, (reference, pad) in enumerate(zip(references[layer], past)):
                start = min(pad, count)
                new = key[row][:, key.shape[2] - count + start:]
                if reference.keys is not None:
                    check_rows(key[row], count, reference)
                if start < count:
                    reference.step(query[row][:, start:].numpy(), new.numpy(),
                                   scale or query.shape[-1] ** -0.5)
    return out.logits


def evicting_layers(cache):
    return {at: layer for at, layer in enumerate(cache.layers) if hasattr(layer, "evictor")}


def check_kept(cache, references):
    for at, layer in evicting_layers(cache).items():
        for row, reference in enumerate(references[at]):
            assert layer.evictor.kept(row) == reference.kept, (at, row)


def check_rows(key, count, reference):
    """Checks that attention was computed with the keys of the kept tokens."""
    for head in range(key.shape[0]):
        kept = reference.kept[head if len(reference.kept) > 1 else 0]
        before = key.shape[1] - count
        have = key[head, before - len(kept):before]
        torch.testing.assert_close(have.double(), torch.from_numpy(reference.keys[head][kept]),
                                   rtol=1e-5, atol=1e-5)


def references_for(layers, batch, setting, per_head=False):
    sink, recent, budget, every = setting
    return {at: [Reference(sink, recent, budget, every, per_head) for _ in range(batch)]
            for at in layers}


def full_layers(model):
    types = getattr(model.config, "layer_types", None)
    count = model.config.num_hidden_layers
    return [at for at in range(count) if types is None or types[at] == "full_attention"]


def decode(model, implementation, setting, per_head=False, chunks=(40,), steps=24):
    sink, recent, budget, every = setting
    layers = full_layers(model)
    references = references_for(layers, 1, setting, per_head)
    install_kv_eviction(model, budget, sink, recent, every, per_head=per_head)
    cache = DynamicCache(config=model.config)
    ids, logits = tokens(sum(chunks)), None
    with Spy(model, implementation) as spy:
        for part in ids.split(list(chunks), 1):
            logits = run(model, cache, part, spy, references, [0])
            check_kept(cache, references)
        for _ in range(steps):
            logits = run(model, cache, logits[:, -1:].argmax(-1), spy, references, [0])
            check_kept(cache, references)
            most = sink + recent + budget + every - 1
            assert all(cache.layers[at].keys.shape[2] <= most for at in layers)
    assert cache.get_seq_length() == sum(chunks) + steps
    remove_kv_eviction(model)
    return [one for at in layers for one in references[at]], logits


@pytest.mark.filterwarnings("ignore:n_sink")
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "qwen3moe", "gemma3", "deepseek"])
def test_kept_tokens_match_the_reference(name, implementation, setting):
    decode(make_model(name, implementation), implementation, setting)


def test_each_known_class_has_a_test_model():
    found = {type(module).__name__ for name in MODELS
             for module in make_model(name, "eager").modules()
             if attention.adapter_of(module) is not None}
    assert found == set(attention._KNOWN)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["mistral", "mixtral", "qwen2", "qwen2moe", "qwen3", "gemma"])
def test_other_families_match_the_reference(name, implementation):
    decode(make_model(name, implementation), implementation, (4, 6, 8, 1))


def test_gemma2_matches_the_reference_under_eager():
    model = make_model("gemma2", "eager")
    model.config.attn_logit_softcapping = None
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    decode(model, "eager", (4, 6, 8, 1))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_per_head_sets_match_the_reference(name, implementation):
    decode(make_model(name, implementation), implementation, (4, 6, 8, 1), per_head=True)


@pytest.mark.parametrize("name", ["llama", "deepseek"])
def test_chunked_prompts_match_the_reference(name):
    decode(make_model(name), "sdpa", (4, 6, 8, 1), chunks=(16, 7, 1, 20))


def test_sdpa_and_eager_agree():
    both = [decode(make_model("llama", one), one, (4, 6, 8, 4)) for one in ("sdpa", "eager")]
    assert [one.kept for one in both[0][0]] == [one.kept for one in both[1][0]]
    torch.testing.assert_close(both[0][1], both[1][1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "deepseek", "gemma3"])
def test_padded_rows_keep_what_they_keep_alone(name, implementation):
    """A row of a batch keeps what it keeps alone, and padding is not counted."""
    model, setting = make_model(name, implementation), (4, 6, 8, 1)
    layers, pads = full_layers(model), [0, 11, 30]
    ids = tokens(36, 3)
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        ids[row, :pad], mask[row, :pad] = 0, 0
    together = references_for(layers, 3, setting)
    install_kv_eviction(model, 8, 4, 6)
    cache, steps = DynamicCache(config=model.config), 16
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    alone = [DynamicCache(config=model.config) for _ in pads]
    with Spy(model, implementation) as spy:
        logits = run(model, cache, ids, spy, together, pads, attention_mask=mask,
                     position_ids=positions)
        single = [run(model, one, ids[row:row + 1, pad:], spy, {}, [0])
                  for row, (one, pad) in enumerate(zip(alone, pads))]
        for step in range(steps):
            check_kept(cache, together)
            next_ids = logits[:, -1:].argmax(-1)
            for row, one in enumerate(single):
                torch.testing.assert_close(logits[row, -1], one[0, -1], rtol=2e-3, atol=2e-3)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            logits = run(model, cache, next_ids, spy, together, [0] * 3, attention_mask=mask,
                         position_ids=mask.sum(1, keepdim=True) - 1)
            single = [run(model, one, next_ids[row:row + 1], spy, {}, [0])
                      for row, one in enumerate(alone)]
    for row, one in enumerate(alone):
        for at, layer in evicting_layers(one).items():
            assert layer.evictor.kept(0) == cache.layers[at].evictor.kept(row)
            assert layer.keys.shape[2] <= 18 and cache.layers[at].keys.shape[2] <= 18
    remove_kv_eviction(model)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_padding_inside_a_row_is_ignored(implementation):
    """A row that is shorter than others is padded in the cache; the padding is masked."""
    model = make_model("llama", implementation)
    install_kv_eviction(model, 8, 4, 6)
    ids = tokens(30, 2)
    mask = torch.ones_like(ids)
    mask[1, 4:24] = 0
    cache, alone = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with torch.no_grad():
        both = model(ids, past_key_values=cache, attention_mask=mask,
                     position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
        one = model(ids[1:, mask[1] == 1], past_key_values=alone).logits
        for step in range(10):
            torch.testing.assert_close(both[1, -1], one[0, -1], rtol=2e-3, atol=2e-3)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            new = tokens(1, 2, seed=step)
            both = model(new, past_key_values=cache, attention_mask=mask,
                         position_ids=mask.sum(1, keepdim=True) - 1).logits
            one = model(new[1:], past_key_values=alone).logits
    for mine, other in zip(cache.layers, alone.layers):
        assert mine.evictor.kept(1) == other.evictor.kept(0) and mine.keys.shape[2] == 18
