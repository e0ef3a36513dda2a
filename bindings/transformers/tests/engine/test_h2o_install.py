"""Installing and removing eviction: a model's results without it, with a full budget, after it."""

from __future__ import annotations

import copy
import gc
import threading

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if not transformers.__version__.startswith("5.23."):
    pytest.skip("needs transformers 5.23", allow_module_level=True)

import kvtier  # noqa: E402
from h2o_classes import ExpandedAttention, LatentAttention, replace_attention  # noqa: E402
from h2o_models import MODELS, Spy, make_model, tokens  # noqa: E402
from kvtier_transformers import h2o  # noqa: E402
from kvtier_transformers.h2o import (  # noqa: E402
    AttentionAdapter,
    install_kv_eviction,
    register_attention,
    remove_kv_eviction,
    reset_eviction_scores,
)
from test_h2o_kept import check_kept, references_for, run  # noqa: E402
from transformers import DynamicCache, StaticCache  # noqa: E402

register_attention(ExpandedAttention, AttentionAdapter(latent=False))
register_attention(LatentAttention, AttentionAdapter(
    latent=True, interface=False, weights_keyword="output_attentions"))


def generate(model, ids, count=12, **more):
    return model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False,
                          output_scores=True, return_dict_in_generate=True, **more)


def assert_equal(one, other):
    assert (one.sequences == other.sequences).all()
    assert all(torch.equal(a, b) for a, b in zip(one.scores, other.scores))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", sorted(set(MODELS) - {"gemma2"}))
def test_full_budget_changes_no_bit(name, implementation):
    model, ids = make_model(name, implementation), tokens(25, 2)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    ways = [{}, {"attention_mask": mask}, {"num_beams": 3}, {"prefill_chunk_size": 8}]
    stock = [generate(model, ids, **way) for way in ways]
    install_kv_eviction(model, 1000)
    for way, before in zip(ways, stock):
        assert_equal(generate(model, ids, **way), before)
    remove_kv_eviction(model)
    for way, before in zip(ways, stock):
        assert_equal(generate(model, ids, **way), before)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_removal_restores_the_model(implementation):
    model = make_model("llama", implementation)
    before = {key: copy.copy(vars(module)) for key, module in model.named_modules()}
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    install_kv_eviction(model, 8, n_recent=6)
    generate(model, tokens(30))
    remove_kv_eviction(model)
    assert model.config._attn_implementation == implementation
    assert hooks == [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    assert {key: set(vars(module)) for key, module in model.named_modules()} == {
        key: set(of) for key, of in before.items()}
    with pytest.raises(kvtier.StateError, match="no eviction is installed"):
        remove_kv_eviction(model)
    install_kv_eviction(model, 8, n_recent=6)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_positions_count_evicted_tokens(implementation):
    """Positions and masks count evicted tokens; memory does not."""
    model = make_model("llama", implementation)
    eviction, seen = install_kv_eviction(model, 8, n_recent=6), []

    def watch(module, frame):
        if module.layer_idx == 0:
            seen.append(frame.positions.flatten().tolist())

    eviction.watch = watch
    out = generate(model, tokens(30), 20, use_cache=True)
    assert sum(seen, []) == list(range(49))
    cache = out.past_key_values
    assert cache.get_seq_length() == 49 and cache.get_query_offset() == 49
    assert cache.get_mask_sizes(1, 0) == (50, 0) and not cache.is_croppable
    assert [tuple(layer.keys.shape) for layer in cache.layers] == [(1, 2, 18, 8)] * 3
    assert cache.layers[0].keys.untyped_storage().nbytes() == 2 * 18 * 8 * 4


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_second_turn_continues_in_the_same_cache(name):
    """A second turn in one cache equals bare forward passes split at the turns."""
    model, seen = make_model(name), []
    eviction = install_kv_eviction(model, 8, n_recent=6)
    first = generate(model, tokens(30), 5)
    ids = torch.cat([first.sequences, tokens(9, seed=8)], 1)
    eviction.watch = lambda module, frame: seen.append(frame.positions.flatten().tolist())
    second = generate(model, ids, 5, past_key_values=first.past_key_values)
    assert seen[0] == list(range(34, 44)) and seen[-1] == [47]
    assert second.past_key_values.get_seq_length() == 48
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for part in (ids[:, :30], *ids[:, 30:34].split(1, 1)):
            model(part, past_key_values=cache)
        logits = model(ids[:, 34:], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(logits.float(), second.scores[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "deepseek"])
def test_beams_keep_their_scores(name):
    model, setting = make_model(name), (4, 5, 7, 2)
    references = references_for(range(3), 3, setting)
    install_kv_eviction(model, 7, 4, 5, 2)
    cache = DynamicCache(config=model.config)
    with Spy(model, "sdpa") as spy:
        run(model, cache, tokens(22, 3), spy, references, [0] * 3)
        for step, beams in enumerate([[0, 0, 2], [2, 1, 1], [1, 1, 1], [0, 1, 2]] * 4):
            cache.reorder_cache(torch.tensor(beams))
            references = {at: [copy.deepcopy(of[beam]) for beam in beams]
                          for at, of in references.items()}
            check_kept(cache, references)
            run(model, cache, tokens(1, 3, seed=step), spy, references, [0] * 3)
            check_kept(cache, references)
    one = generate(model, tokens(22), 20, num_beams=3, num_return_sequences=3)
    assert one.past_key_values.layers[0].keys.shape[2] <= 17


def test_batches_can_be_repeated_and_selected():
    model = make_model("llama")
    install_kv_eviction(model, 6, n_recent=4)
    cache = DynamicCache()
    with torch.no_grad():
        model(tokens(20, 2), past_key_values=cache)
        cache.batch_repeat_interleave(2)
        kept = [cache.layers[1].evictor.kept(row) for row in range(4)]
        assert kept[0] == kept[1] != kept[2] == kept[3]
        model(tokens(1, 4), past_key_values=cache)
        cache.batch_select_indices(torch.tensor([True, False, False, True]))
        kept = [cache.layers[1].evictor.kept(row) for row in range(2)]
        model(tokens(1, 2), past_key_values=cache)
    assert kept[0] != kept[1] and cache.get_seq_length() == 22


@pytest.mark.parametrize("cls, implementation", [
    (ExpandedAttention, "sdpa"), (ExpandedAttention, "eager"), (LatentAttention, "eager")])
def test_variants_of_latent_attention_keep_the_same_tokens(cls, implementation):
    stock = make_model("deepseek", implementation)
    model = replace_attention(make_model("deepseek", implementation), cls)
    install_kv_eviction(stock, 8, n_recent=6)
    install_kv_eviction(model, 8, n_recent=6)
    ids, caches, logits = tokens(30), [DynamicCache(), DynamicCache()], None
    with torch.no_grad():
        for _ in range(16):
            logits = [one(ids, past_key_values=cache).logits[:, -1]
                      for one, cache in zip((stock, model), caches)]
            torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)
            ids = logits[0].argmax(-1, keepdim=True)
            for mine, other in zip(caches[0].layers, caches[1].layers):
                assert mine.evictor.kept(0) == other.evictor.kept(0)
    shape = (1, 4, 18, 12) if cls is ExpandedAttention else (1, 1, 18, 10)
    assert caches[1].layers[0].keys.shape == shape


def test_expanded_keys_can_be_evicted_per_head():
    model = replace_attention(make_model("deepseek"), ExpandedAttention)
    setting, cache = (4, 6, 8, 1), DynamicCache()
    references = references_for(range(3), 1, setting, per_head=True)
    install_kv_eviction(model, 8, n_recent=6, per_head=True)
    with Spy(model, "sdpa") as spy:
        for count in (30, 1, 1, 3, 1):
            run(model, cache, tokens(count, seed=count), spy, references, [0])
            check_kept(cache, references)


def test_scores_are_reset_and_belong_to_the_cache():
    model = make_model("llama")
    eviction = install_kv_eviction(model, 6, n_recent=4)
    first = generate(model, tokens(30), 6)
    again = generate(model, tokens(30), 6)
    assert_equal(first, again)  # no state of the first generation remains
    cache = again.past_key_values
    kept = [layer.evictor.kept(0) for layer in cache.layers]
    reset_eviction_scores(model)
    assert kept == [layer.evictor.kept(0) for layer in cache.layers]
    with torch.no_grad():
        model(tokens(1), past_key_values=cache)
    assert kept != [layer.evictor.kept(0) for layer in cache.layers]
    del first, again, cache
    gc.collect()
    assert eviction.layers == []


def test_crop_removes_resident_tokens():
    model = make_model("llama")
    install_kv_eviction(model, 30, n_recent=4)
    caches = [DynamicCache(), DynamicCache()]
    with torch.no_grad():
        for cache in caches:
            model(tokens(20), past_key_values=cache)
        model(tokens(5, seed=4), past_key_values=caches[0])
        caches[0].crop(-5)
        ends = [model(tokens(3, seed=5), past_key_values=cache).logits for cache in caches]
    assert torch.equal(*ends) and caches[0].get_seq_length() == 23
    with torch.no_grad():
        model(tokens(60, seed=6), past_key_values=caches[0])
        assert caches[0].layers[0].keys.shape[2] == 38
        caches[0].crop(-2)
        assert caches[0].layers[0].keys.shape[2] == 36 and caches[0].get_seq_length() == 81
        model(tokens(2, seed=7), past_key_values=caches[0])
    assert caches[0].layers[0].evictor.kept(0)[0][-2:] == [81, 82]


def test_bfloat16_models_run_in_several_threads():
    model = make_model("llama").to(torch.bfloat16)
    install_kv_eviction(model, 8, n_recent=6, threads=2)
    alone = [generate(model, tokens(30, seed=seed)).sequences for seed in range(4)]
    found = [None] * 4

    def work(seed):
        found[seed] = generate(model, tokens(30, seed=seed)).sequences

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(alone, found))


def check_rejected(error, match, name="llama", implementation="sdpa", **options):
    model = make_model(name, implementation)
    with pytest.raises(error, match=match):
        install_kv_eviction(model, **{"budget": 8, **options})
    assert not hasattr(model, "_kvtier_eviction")


def test_unsupported_models_and_policies_are_rejected(monkeypatch):
    model = make_model("llama")
    install_kv_eviction(model, 8)
    with pytest.raises(kvtier.StateError, match="remove_kv_eviction first"):
        install_kv_eviction(model, 8)
    for name in ("flash_attention_2", "flex_attention", "paged|eager", "paged|sdpa"):
        other = make_model("llama")
        other.config._attn_implementation_internal = name
        with pytest.raises(kvtier.UnsupportedError, match="attn_implementation="):
            install_kv_eviction(other, 8)
    check_rejected(kvtier.SpecError, "latent rows serve all heads", "deepseek", per_head=True)
    check_rejected(kvtier.InvalidError, "takes no budget", policy="quest")
    check_rejected(kvtier.UnsupportedError, "evicts no tokens", policy="quest()", budget=None)
    check_rejected(kvtier.SpecError, "did you mean|nearest|h2o", policy="h3o()", budget=None)
    check_rejected(kvtier.UnsupportedError, "rotate", policy="streaming(rotate=true)", budget=None)
    check_rejected(kvtier.UnsupportedError, "kvpress", policy="snapkv(form=original)", budget=None)
    check_rejected(kvtier.InvalidError, "numbers already", policy="h2o(budget=8)")
    check_rejected(kvtier.InvalidError, "knows no n_recent", policy="tova", n_recent=4)
    check_rejected(kvtier.SpecError, "budget", budget=0)
    with pytest.warns(UserWarning, match="n_sink is 2"):
        install_kv_eviction(make_model("llama"), 8, n_sink=2)
    with pytest.raises(kvtier.UnsupportedError, match="porting.md"):
        install_kv_eviction(torch.nn.Linear(2, 2), 8)
    late = replace_attention(make_model("deepseek"), LatentAttention)
    with pytest.raises(kvtier.UnsupportedError, match='"eager"'):
        install_kv_eviction(late, 8)
    monkeypatch.setitem(MODELS, "window", ("Mistral", {**MODELS["mistral"][1],
                                                       "sliding_window": 16}))
    check_rejected(kvtier.UnsupportedError, "sliding window", "window")
    monkeypatch.setattr(h2o.transformers, "__version__", "4.57.1")
    check_rejected(kvtier.UnsupportedError, "transformers 4.57.1")


def test_unsupported_caches_are_rejected():
    model = make_model("llama")
    filled = generate(model, tokens(20)).past_key_values
    install_kv_eviction(model, 8, n_recent=6)
    with torch.no_grad():
        static = StaticCache(config=model.config, max_cache_len=64)
        with pytest.raises(kvtier.UnsupportedError, match="StaticCache"):
            model(tokens(9), past_key_values=static)
        with pytest.raises(kvtier.StateError, match="20 tokens|31 tokens"):
            model(tokens(1), past_key_values=filled)
        cache = DynamicCache()
        model(tokens(30), past_key_values=cache)
        with pytest.raises(kvtier.InvalidError, match="Masks count all tokens"):
            model(tokens(1), past_key_values=cache,
                  attention_mask=torch.ones(1, 1, 1, 19, dtype=torch.bool))
        with pytest.raises(kvtier.UnsupportedError, match="neither causal"):
            model(tokens(4), past_key_values=DynamicCache(),
                  attention_mask=torch.ones(1, 1, 4, 4, dtype=torch.bool))
    with pytest.raises(kvtier.StateError, match="eval"):
        model.train()(tokens(9), use_cache=True)
    model.eval()
    remove_kv_eviction(model)
    with torch.no_grad(), pytest.raises(kvtier.StateError, match="begin a new cache"):
        model(tokens(1), past_key_values=cache)
    generate(model, tokens(9))
    install_kv_eviction(model, 8)
    model.config._attn_implementation_internal = "eager"
    with pytest.raises(kvtier.StateError, match="set_attn_implementation"):
        generate(model, tokens(9))


def test_failed_pass_invalidates_its_cache(monkeypatch):
    model, cache = make_model("llama"), DynamicCache()
    install_kv_eviction(model, 8, n_recent=6)
    with torch.no_grad():
        model(tokens(30), past_key_values=cache)
        monkeypatch.setattr(h2o.attention_sums, "from_keys", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(tokens(1), past_key_values=cache)
        monkeypatch.undo()
        with pytest.raises(kvtier.StateError, match="forward pass failed"):
            model(tokens(1), past_key_values=cache)
        model(tokens(30), past_key_values=DynamicCache())


def test_other_model_with_the_same_configuration_is_unaffected():
    model = make_model("llama")
    other = type(model)(model.config).eval()
    before = generate(other, tokens(30))
    install_kv_eviction(model, 8, n_recent=6)
    after = generate(other, tokens(30))
    assert_equal(before, after)
    assert not isinstance(after.past_key_values.layers[0], h2o.EvictingLayer)
