"""The window of transformers' versions, and interfaces that have changed."""

from __future__ import annotations

import warnings
from typing import Any

import kvtier
import pytest

transformers = pytest.importorskip("transformers", minversion="5.22",
                                   reason="needs transformers 5.22 or newer")
pytest.importorskip("torch", reason="needs torch")

from kvtier import _probe  # noqa: E402
from kvtier_transformers import _engine  # noqa: E402
from transformers import cache_utils  # noqa: E402


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the version of transformers."""
    monkeypatch.setattr(_probe, "_warned", set())
    return lambda text: monkeypatch.setattr(transformers, "__version__", text)


@pytest.mark.parametrize("text", ["4.57.1", "5.21.9", "6.0.0", "6.0.0.dev0"])
def test_versions_outside_of_the_window_are_rejected(version: Any, text: str) -> None:
    version(text)
    with pytest.raises(kvtier.UnsupportedError, match="5.22 and newer, before 6.*pip install"):
        _engine.require()


@pytest.mark.parametrize("text", ["5.22.2", "5.24.0.dev0", "5.30.0"])
def test_untested_versions_with_the_same_interfaces_give_a_warning(version: Any, text: str) -> None:
    version(text)
    with pytest.warns(UserWarning, match=f"transformers {text} .* transformers 5.23") as caught:
        _engine.require()
        _engine.require()
    assert len(caught) == 1


def test_the_tested_version_gives_no_warning(version: Any) -> None:
    version("5.23.1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _engine.require()


def test_a_renamed_parameter_is_rejected_by_name(version: Any, monkeypatch: pytest.MonkeyPatch
                                                 ) -> None:
    version("5.30.0")
    monkeypatch.setattr(cache_utils.DynamicLayer, "crop", lambda self, max_length: None)
    with pytest.raises(kvtier.UnsupportedError, match="DynamicLayer.crop takes .max_length., this"):
        _engine.require()


def test_a_missing_method_is_rejected_by_name(version: Any, monkeypatch: pytest.MonkeyPatch
                                              ) -> None:
    version("5.30.0")
    monkeypatch.delattr(cache_utils.Cache, "batch_select_indices")
    with pytest.raises(kvtier.UnsupportedError, match="Cache has no method batch_select_indices"):
        _engine.require()


def test_a_missing_attribute_is_rejected_by_name(version: Any, monkeypatch: pytest.MonkeyPatch
                                                 ) -> None:
    version("5.30.0")
    monkeypatch.setattr(cache_utils.DynamicSlidingWindowLayer, "__init__",
                        lambda self, sliding_window: None)
    with pytest.raises(kvtier.UnsupportedError, match="SlidingWindowLayer has no cumulative_leng"):
        _engine.require()
