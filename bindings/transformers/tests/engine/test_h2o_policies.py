"""Other eviction policies, and custom policies."""

from __future__ import annotations

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if not transformers.__version__.startswith("5.23."):
    pytest.skip("needs transformers 5.23", allow_module_level=True)

import kvtier  # noqa: E402
from h2o_models import Spy, make_model, tokens  # noqa: E402
from kvtier_transformers import attention, attention_sums  # noqa: E402
from kvtier_transformers.h2o import install_kv_eviction  # noqa: E402
from transformers import DynamicCache  # noqa: E402


def forward(model, cache, ids):
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits[:, -1:]


def weights_of(query, key, scale, count):
    """Returns probabilities of the last `count` queries, [heads, queries, keys], in float64."""
    query, key = query[:, -count:].double().numpy(), key.double().numpy()
    key = np.repeat(key, query.shape[0] // key.shape[0], 0)
    logits = query @ key.swapaxes(1, 2) * scale
    last = key.shape[1] - count + np.arange(count)
    logits = np.where(np.arange(key.shape[1]) > last[:, None], -np.inf, logits)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_tova_evicts_the_least_attended_tokens(implementation):
    model, cache = make_model("llama", implementation), DynamicCache()
    install_kv_eviction(model, 12, policy="tova")
    kept, seen, ids = {at: [] for at in range(3)}, 0, tokens(30)
    with Spy(model, implementation) as spy:
        for _ in range(12):
            spy.calls.clear()
            logits = forward(model, cache, ids)
            for at, query, key, scale in spy.calls:
                rows = kept[at] + list(range(seen, seen + ids.shape[1]))
                sums = weights_of(query[0], key[0], scale, 1).sum((0, 1))
                order = sorted(range(len(rows) - 1), key=lambda row: (sums[row], row))
                victims = set(order[:max(len(rows) - 12, 0)])
                kept[at] = [one for row, one in enumerate(rows) if row not in victims]
                assert cache.layers[at].evictor.kept(0) == [kept[at]]
            seen, ids = seen + ids.shape[1], logits.argmax(-1)


def test_snapkv_keeps_the_tokens_attended_by_its_window():
    model, cache = make_model("llama"), DynamicCache()
    install_kv_eviction(model, policy="snapkv(budget=20,window=8,kernel=5)")
    with Spy(model, "sdpa") as spy:
        logits = forward(model, cache, tokens(60))
        calls = list(spy.calls)
    for at, query, key, scale in calls:
        got = weights_of(query[0], key[0], scale, 8)[:, :, :52].sum(1)
        got = got.reshape(2, 2, 52).mean(1)
        pooled = np.stack([np.convolve(one, np.full(5, 0.2), "same") for one in got])
        want = [sorted(np.argsort(one)[-12:].tolist()) + list(range(52, 60)) for one in pooled]
        assert cache.layers[at].evictor.kept(0) == want
    for _ in range(5):
        logits = forward(model, cache, logits.argmax(-1))
    assert [layer.keys.shape[2] for layer in cache.layers] == [25] * 3


def test_streaming_keeps_sinks_and_recent_tokens():
    model, cache = make_model("llama"), DynamicCache()
    install_kv_eviction(model, n_sink=4, n_recent=10, policy="streaming")
    logits = forward(model, cache, tokens(30))
    for end in range(31, 45):
        logits = forward(model, cache, logits.argmax(-1))
        assert cache.layers[2].evictor.kept(0) == [[0, 1, 2, 3, *range(end - 10, end)]]
    assert cache.get_seq_length() == 44


@pytest.mark.parametrize("name", ["llama", "deepseek"])
def test_knorm_evicts_the_largest_key_norms(name):
    model, cache = make_model(name), DynamicCache()
    install_kv_eviction(model, policy="knorm(budget=12)")
    forward(model, cache, tokens(12))
    layer = cache.layers[1]
    rows = torch.cat([layer.keys, layer.values], -1) if name == "deepseek" else layer.keys
    norms = [rows[0].double().norm(dim=-1).numpy()]
    forward(model, cache, tokens(1))
    assert [len(one) for one in layer.evictor.kept(0)] == [12] * rows.shape[1]
    for head, kept in enumerate(layer.evictor.kept(0)):
        evicted = set(range(13)) - set(kept)
        assert evicted == {int(norms[0][head].argmax())} or evicted == {12}


def check_visible_rows(module, frame):
    """Each query head attends to the rows that its key head had, and to the new one."""
    seen = attention.visible(frame.mask).sum(-1)[:, :, 0].tolist()
    for row, counts in enumerate(seen):
        assert [counts[0], counts[2]] == [counts[1], counts[3]]
        for count, kept in zip(counts[::2], frame.layer.evictor.kept(row)):
            assert count - len(kept) in (0, 1)


@pytest.mark.parametrize("policy", ["adakv(budget=24,window=8)",
                                    'duo(alpha=".9 .1 .2 .8 .3 .7",sink=2,recent=8)'])
def test_heads_may_keep_different_numbers_of_tokens(policy):
    ends, full = [], DynamicCache()
    forward(make_model("llama"), full, torch.cat([tokens(50, 2), torch.full((2, 4), 7)], 1))
    for implementation in ("sdpa", "eager"):
        model, cache = make_model("llama", implementation), DynamicCache()
        eviction = install_kv_eviction(model, policy=policy)
        logits = forward(model, cache, tokens(50, 2))
        eviction.watch = check_visible_rows
        for _ in range(4):
            logits = forward(model, cache, torch.full((2, 1), 7))
        for row, head in [(0, 0), (0, 1), (1, 0), (1, 1)]:
            layer = cache.layers[0]  # its keys do not depend on evicted tokens
            kept = layer.evictor.kept(row)[head]
            torch.testing.assert_close(layer.keys[row, head, -len(kept):],
                                       full.layers[0].keys[row, head, kept])
        ends.append(logits)
        lengths = {len(one) for layer in cache.layers for one in layer.evictor.kept(0)}
        assert len(lengths) > 1
    torch.testing.assert_close(*ends, rtol=1e-3, atol=1e-3)
    if policy.startswith("adakv"):
        with pytest.raises(kvtier.UnsupportedError, match="in one piece"):
            forward(model, cache, tokens(5, 2))


@pytest.mark.parametrize("policy", ["keydiff", "pyramidkv", "snapkv", "adakv"])
def test_named_policies_bound_the_cache(policy):
    model = make_model("llama")
    install_kv_eviction(model, 80, policy=policy)
    out = model.generate(tokens(160), max_new_tokens=6, do_sample=False,
                         return_dict_in_generate=True)
    assert all(layer.keys.shape[2] < 150 for layer in out.past_key_values.layers)


class Middle:
    """A custom policy that evicts the token in the middle."""

    traits = kvtier.SparseTraits(
        kvtier.SparseCaps.EVICT_PREFILL | kvtier.SparseCaps.EVICT_DECODE,
        granularity=kvtier.SparseGranularity.TOKEN)

    def __init__(self):
        self.kept, self.next = [], 0

    def evict(self, layer, at):
        self.kept += range(self.next, at.tokens)
        self.next = at.tokens
        if len(self.kept) <= 10:
            return None
        return kvtier.kernels.TokenLists.of([self.kept[:5] + self.kept[-5:]])

    def evicted(self, layer, keep):
        self.kept = keep.lists()[0]


def test_custom_policy_decides_what_is_kept():
    model, cache = make_model("llama"), DynamicCache()
    install_kv_eviction(model, policy=Middle)
    logits = forward(model, cache, tokens(30))
    for _ in range(3):
        logits = forward(model, cache, logits.argmax(-1))
    assert cache.layers[0].evictor.kept(0) == [[0, 1, 2, 3, 4, 28, 29, 30, 31, 32]]


@pytest.mark.parametrize("by_head", [True, False])
def test_device_sums_equal_the_kernel(by_head):
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(4, 150, 24, generator=generator)
    key = torch.randn(2, 200, 24, generator=generator)
    for count in (150, 1):
        one, queries = attention_sums.from_keys(query, key, 0.3, count, by_head, 1)
        other = attention_sums._on_device(query[:, -count:], key, 0.3, by_head)
        assert queries == count and abs(one - other.numpy()).max() < 1e-4
        want = weights_of(query, key, 0.3, count).sum(1)
        assert abs(one - (want if by_head else want.sum(0))).max() < 1e-4
