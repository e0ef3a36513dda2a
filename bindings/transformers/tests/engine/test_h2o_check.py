"""`check` reports nothing for a sound model, and each fault by its name."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if not transformers.__version__.startswith("5.23."):
    pytest.skip("needs transformers 5.23", allow_module_level=True)

import kvtier  # noqa: E402
import kvtier.h2o  # noqa: E402
from h2o_models import make_model  # noqa: E402
from kvtier.h2o import Evictor  # noqa: E402
from kvtier_transformers import h2o  # noqa: E402
from kvtier_transformers.h2o import install_kv_eviction  # noqa: E402
from kvtier_transformers.h2o_layer import EvictingLayer  # noqa: E402


def installed(implementation="sdpa", name="llama", **options):
    model = make_model(name, implementation)
    install_kv_eviction(model, **{"budget": 8, "n_recent": 6, **options})
    return model


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek", "qwen3moe"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_sound_models_pass(name, implementation, capsys):
    report = kvtier.h2o.check(installed(implementation, name, evict_every=3))
    assert report.ok, str(report)
    assert "BAD" not in capsys.readouterr().out
    assert all(rows <= 20 for rows, _ in report.layers.values())


@pytest.mark.parametrize("options", [
    {"policy": "streaming", "budget": None}, {"per_head": True},
    {"policy": "keydiff", "n_sink": 4}, {"policy": "h2o(budget=9,recent=5)", "budget": None,
                                         "n_recent": None}])
def test_other_policies_pass(options):
    report = kvtier.h2o.check(installed(**options), tokens=60, verbose=False)
    assert report.ok, str(report)


def wrong(model, **options):
    report = kvtier.h2o.check(model, verbose=False, **options)
    assert all(finding.advice for finding in report.findings)
    return report.wrong


def test_missing_eviction_is_reported(capsys):
    report = kvtier.h2o.check(make_model("llama"))
    assert report.wrong == ["installed"]
    assert "-> call install_kv_eviction" in capsys.readouterr().out


def test_evicted_sinks_are_reported():
    with pytest.warns(UserWarning, match="n_sink"):
        model = installed(n_sink=0)
    assert wrong(model) == ["sinks"]


def test_uncounted_scores_are_reported(monkeypatch):
    model, observe = installed(), Evictor.observe

    def only_prompts(self, sequence, sums, queries):
        if queries > 1:
            observe(self, sequence, sums, queries)

    monkeypatch.setattr(Evictor, "observe", only_prompts)
    assert wrong(model) == ["scores"]


def test_stale_scores_are_reported():
    class Drifts:
        traits = kvtier.SparseTraits(kvtier.SparseCaps.EVICT_PREFILL,
                                     granularity=kvtier.SparseGranularity.TOKEN)
        made = 0

        def __init__(self):
            Drifts.made += 1
            self.drop = 5 + Drifts.made // 4

        def evict(self, layer, at):
            return kvtier.kernels.TokenLists.of([[one for one in range(at.tokens) if one != self.drop]])

        def evicted(self, layer, keep):
            pass

    assert "scores" in wrong(installed(policy=Drifts, budget=None, n_recent=None))


def test_growing_cache_is_reported(monkeypatch):
    model = installed()
    monkeypatch.setattr(Evictor, "evict", lambda self, is_prefill: None)
    assert wrong(model) == ["growth"]


def test_restarted_positions_are_reported(monkeypatch):
    model = installed()
    monkeypatch.setattr(EvictingLayer, "get_seq_length",
                        lambda self: 0 if self.keys is None else int(self.keys.shape[-2]))
    assert "positions" in wrong(model)


def test_masks_of_wrong_length_are_reported(monkeypatch):
    model, narrow = installed(), h2o.narrow
    monkeypatch.setattr(h2o, "narrow", lambda mask, *more: mask)
    assert {"generation", "masks"} <= set(wrong(model))
    monkeypatch.setattr(h2o, "narrow", narrow)
    assert wrong(model) == []


@pytest.mark.parametrize("implementation, other", [("sdpa", "eager"), ("eager", "sdpa")])
def test_changed_implementation_is_reported(implementation, other):
    model = installed(implementation)
    model.set_attn_implementation(other)
    assert {"implementation", "generation"} <= set(wrong(model))


def test_differing_layers_are_reported(monkeypatch):
    model, evict = installed(), Evictor.evict
    monkeypatch.setattr(Evictor, "evict", lambda self, is_prefill: (
        None if self.layer == 1 else evict(self, is_prefill)))
    assert wrong(model) == ["growth", "layers"]
    eviction = h2o.eviction_of(model)
    eviction.modules[7] = eviction.modules[1]
    assert "layers" in wrong(model)
