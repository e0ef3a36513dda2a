"""Token eviction on numpy arrays: a test of kvtier.h2o that needs no torch."""

from __future__ import annotations

import copy
import dataclasses
import doctest
import sys
import types
import warnings

import kvtier
import kvtier.h2o
import numpy as np
import pytest
from h2o_reference import Reference
from kvtier.h2o import ArrayLayer, Evictor, spec

HEADS, DIM = 4, 8


class Pair:
    """A layer, with a reference model for each of its sequences."""

    def __init__(self, sink=4, recent=6, budget=8, every=1, per_head=False, key_heads=2, batch=1,
                 latent=False):
        text = spec("h2o", budget, sink, recent, every, per_head)
        self.layer = ArrayLayer(text, HEADS, latent=latent)
        self.of = [Reference(sink, recent, budget, every, per_head) for _ in range(batch)]
        self.key_heads, self.random = key_heads, np.random.default_rng(5)

    def step(self, count, real=None):
        shape = len(self.of), HEADS, count, DIM
        queries = self.random.standard_normal(shape).astype(np.float32)
        keys = self.random.standard_normal(shape).astype(np.float32)[:, :self.key_heads]
        self.layer.step(queries, keys, keys[..., :5] + 1, real)
        for row, reference in enumerate(self.of):
            valid = np.ones(count, bool) if real is None else np.asarray(real[row])
            if valid.any():
                reference.step(queries[row][:, valid], keys[row][:, valid], DIM ** -0.5)

    def agree(self):
        for row, reference in enumerate(self.of):
            assert self.layer.evictor.kept(row) == reference.kept
            for head in range(self.key_heads):
                at = head if len(reference.kept) > 1 else 0
                ids = self.layer.evictor.ids[row, min(at, self.layer.evictor.ids.shape[1] - 1)]
                rows = self.layer.keys[row, head][ids >= 0]
                assert (rows == reference.keys[head][reference.kept[at]]).all()
                assert (self.layer.values[row, head][ids >= 0] == rows[:, :5] + 1).all()


def test_docstring_examples_run():
    assert doctest.testmod(kvtier.h2o).failed == 0


@pytest.mark.filterwarnings("ignore:n_sink")
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("sink, recent, budget, every", [
    (4, 6, 8, 1), (4, 6, 8, 4), (0, 0, 3, 1), (0, 1, 1, 2), (2, 20, 5, 3), (4, 4, 30, 1)])
def test_kept_tokens_match_the_reference(sink, recent, budget, every, key_heads, per_head):
    pair = Pair(sink, recent, budget, every, per_head, key_heads)
    for count in (20, 9, *[1] * 30, 7, *[1] * 5):
        pair.step(count)
        pair.agree()
        assert pair.layer.keys.shape[2] <= sink + recent + budget + every - 1
    assert pair.layer.evictor.seen == 71
    assert pair.layer.evictor.observed == 71


def test_latent_rows_have_one_list():
    pair = Pair(key_heads=1, latent=True)
    for count in (25, 1, 1, 4, 1):
        pair.step(count)
        pair.agree()
    with pytest.raises(kvtier.SpecError, match="latent rows serve all heads"):
        Pair(key_heads=1, latent=True, per_head=True).step(3)


@pytest.mark.parametrize("per_head", [False, True])
def test_padding_is_not_kept(per_head):
    """With padding on the left, on the right or between, a row keeps what it keeps alone."""
    pair = Pair(batch=4, per_head=per_head)
    real = np.ones((4, 30), bool)
    real[1, :13], real[2, 17:], real[3, 3:20] = False, False, False
    pair.step(30, real)
    pair.agree()
    for _ in range(12):
        pair.step(1)
        pair.agree()
    assert pair.layer.keys.shape[2] == 18
    assert pair.layer.evictor.counts.tolist() == [42, 29, 29, 25]
    assert pair.layer.evictor.kept(1)[0][:4] == [0, 1, 2, 3]


def test_row_with_padding_only_is_allowed():
    pair = Pair(batch=2)
    real = np.ones((2, 24), bool)
    real[1] = False
    pair.step(24, real)
    assert pair.layer.evictor.kept(1) == [[]] and pair.layer.keys.shape[2] == 18
    for _ in range(20):
        pair.step(1)
        pair.agree()


def test_beams_keep_their_scores():
    pair = Pair(batch=3)
    for beams in ([0, 0, 2], [2, 1, 1], [1, 1, 1], [2, 0, 1]) * 3:
        pair.step(5)
        pair.layer.evictor.select(beams)
        pair.layer.keys, pair.layer.values = pair.layer.keys[beams], pair.layer.values[beams]
        pair.of = [copy.deepcopy(pair.of[beam]) for beam in beams]
        pair.agree()


def test_truncate_removes_resident_tokens():
    layer = ArrayLayer(spec("h2o", 8, n_recent=6), HEADS)
    rows = np.random.default_rng(1).standard_normal((3, 2, HEADS, 30, DIM)).astype(np.float32)
    layer.step(*rows)
    before = layer.evictor.kept(0)
    layer.keys = layer.keys[:, :, layer.evictor.truncate(28)[0, 0]]
    assert layer.evictor.kept(0) == [[one for one in before[0] if one < 28]]
    assert layer.evictor.seen == 28 and layer.keys.shape[2] == 16
    evictor = Evictor(layer.evictor.shape, spec("h2o", 100), batch=2)
    evictor.extend(4, [[False, True, True, True], [True] * 4])
    assert evictor.truncate(2).shape == (2, 1, 2) and evictor.counts.tolist() == [1, 2]
    assert evictor.whole and evictor.columns[0, 0].tolist() == [0, 1]


def test_forget_resets_scores():
    pair = Pair()
    pair.step(40)
    kept = pair.layer.evictor.kept(0)
    pair.layer.evictor.forget()
    assert pair.layer.evictor.kept(0) == kept
    pair.of[0].scores = [dict.fromkeys(one, 0.0) for one in pair.of[0].scores]
    for _ in range(10):
        pair.step(1)
        pair.agree()


def test_large_budget_evicts_nothing():
    layer = ArrayLayer(spec("h2o", 5000), HEADS)
    rows = np.random.default_rng(1).standard_normal((3, 1, HEADS, 900, DIM)).astype(np.float32)
    for begin, end in ((0, 50), (50, 700), (700, 701), (701, 900)):
        layer.step(*rows[:, :, :, begin:end])
        assert layer.evictor.kept(0) == [list(range(end))]
    assert (layer.keys == rows[1]).all() and layer.evictor.whole


@pytest.mark.parametrize("policy, most", [
    ("tova(budget=12)", 12), ("keydiff(budget=12)", 12), ("knorm(budget=12)", 12),
    ("streaming(sinks=4,recent=8)", 12), ("snapkv(budget=12,window=4)", 12),
    ("pyramidkv(budget=12,window=4)", 12), ("adakv(budget=12,window=4)", 24)])
def test_other_policies_keep_their_budget(policy, most):
    layer = ArrayLayer(policy, HEADS, layers=2)
    random = np.random.default_rng(2)
    for count in (40, 1):
        queries, keys, values = random.standard_normal((3, 1, HEADS, count, DIM), np.float32)
        layer.step(queries, keys[:, :2], values[:, :2])
    assert layer.keys.shape[2] <= most + 1


def test_spec_of_arguments():
    assert spec("h2o", 8) == "h2o(sink=4,budget=8,evict_every=1,heads=all)"
    assert spec("h2o", 8, 5, 6, 3, True) == "h2o(sink=5,recent=6,budget=8,evict_every=3,heads=each)"
    assert spec("tova", 8) == "tova(budget=8)" and spec("tova(ratio=.5)") == "tova(ratio=.5)"
    with pytest.warns(UserWarning, match="first 4 tokens"):
        assert spec("h2o", 8, 3).startswith("h2o(sink=3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spec("h2o", 8, 4)
    for wrong in ({"policy": "quest", "budget": 8}, {"policy": "tova", "n_sink": 4},
                  {"policy": "h2o(budget=2)", "budget": 8}, {"policy": "tova", "evict_every": 2},
                  {"policy": "tova", "per_head": True}):
        with pytest.raises(kvtier.InvalidError):
            spec(**wrong)


def test_unsupported_policies_are_rejected():
    shape = kvtier.Attention(1, 4, 2, DIM, DIM, 16, 1000)
    for policy in ("quest", "full", "minference", "streaming(rotate=true)",
                   "snapkv(form=original)"):
        with pytest.raises(kvtier.UnsupportedError):
            Evictor(shape, policy)
    latent = dataclasses.replace(shape, key_heads=1, latent=True, value_dim=4)
    with pytest.raises(kvtier.UnsupportedError, match="latent"):
        Evictor(latent, "adakv")
    evictor = Evictor(shape, "h2o")
    with pytest.raises(kvtier.InvalidError, match="another batch"):
        evictor.extend(3, np.ones((2, 3), bool))
    evictor.extend(3)
    for sums in ([1.0, 2.0], [1.0, -1.0, 0.0], [1.0, np.nan, 0.0]):
        with pytest.raises(kvtier.InvalidError):
            evictor.observe(0, np.asarray(sums, np.float32), 1)
    with pytest.raises(kvtier.StateError, match="no token"):
        ArrayLayer("h2o", 4).evictor.seen


def test_check_is_forwarded_to_kvtier_transformers(monkeypatch):
    package, module = types.ModuleType("kvtier_transformers"), types.ModuleType("check")
    module.check = lambda model, **options: (model, options)
    monkeypatch.setitem(sys.modules, "kvtier_transformers", package)
    monkeypatch.setitem(sys.modules, "kvtier_transformers.check", module)
    assert kvtier.h2o.check("model", steps=3) == ("model", {"steps": 3})


def test_truncate_counts_evicted_tokens():
    """Truncated columns include those of evicted tokens: later tokens are numbered accordingly."""
    for padded in (None, [[False] * 3 + [True] * 22 + [False] * 2 + [True] * 3]):
        layer = ArrayLayer(spec("h2o", 2, n_recent=1), HEADS)
        rows = np.random.default_rng(1).standard_normal((3, 1, HEADS, 33, DIM)).astype(np.float32)
        layer.step(*rows[:, :, :, :30], padded)
        assert layer.evictor.counts.tolist() == [30 if padded is None else 25]
        layer.keys = layer.keys[:, :, layer.evictor.truncate(20)[0, 0]]
        layer.values = layer.values[:, :, -layer.keys.shape[2]:]
        left = 20 if padded is None else 17
        assert layer.evictor.counts.tolist() == [left]
        layer.step(*rows[:, :, :, 30:])
        assert layer.evictor.kept(0)[0][-1] == left + 2
        assert layer.evictor.columns[0, 0, -1] == 22 and layer.evictor.seen == 23


def test_fork_is_independent():
    pair = Pair(batch=2)
    pair.step(30)
    evictor = pair.layer.evictor.fork()
    before = [evictor.kept(row) for row in range(2)]
    pair.step(9)
    pair.agree()
    assert [evictor.kept(row) for row in range(2)] == before and evictor.seen == 30
