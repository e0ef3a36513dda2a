"""The window of SGLang's versions, and interfaces that have changed."""

from __future__ import annotations

import dataclasses
import enum
import warnings
from typing import Any

import kvtier
import pytest
import sglang.version
from kvtier import _probe
from kvtier_sglang import _engine
from sglang.srt.mem_cache import hicache_storage
from sglang.srt.mem_cache.unified_cache import unified_cache_linker

PARTS = ("storage", "linker")


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the version of SGLang."""
    monkeypatch.setattr(_probe, "_warned", set())
    return lambda text: monkeypatch.setattr(sglang.version, "__version__", text)


@pytest.mark.parametrize("part", PARTS)
def test_untested_versions_with_the_same_interfaces_give_a_warning(version: Any, part: str) -> None:
    version("0.6.0")
    with pytest.warns(UserWarning, match="SGLang 0.6.0 .* SGLang 0.5.23") as caught:
        _engine.require(part)
        _engine.require(part)
    assert len(caught) == 1


@pytest.mark.parametrize("part", PARTS)
def test_the_tested_version_gives_no_warning(version: Any, part: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _engine.require(part)


@pytest.mark.parametrize("text", ["0.5.21", "0.5.21.post1", "0.4.9", ""])
@pytest.mark.parametrize("part", PARTS)
def test_versions_before_the_window_are_rejected(version: Any, part: str, text: str) -> None:
    version(text)
    with pytest.raises(kvtier.UnsupportedError, match="0.5.22 and newer.*sglang==0.5.23"):
        _engine.require(part)


def test_a_missing_method_is_rejected_by_name(version: Any, monkeypatch: pytest.MonkeyPatch
                                              ) -> None:
    """As in 0.5.22, whose linkers cannot be loaded by module path."""
    version("0.5.22")
    monkeypatch.delattr(unified_cache_linker.UnifiedCacheLinker, "record_offload_ready")
    with pytest.raises(kvtier.UnsupportedError, match="UnifiedCacheLinker has no method "
                                                      "record_offload_ready"):
        _engine.require("linker")


def test_a_renamed_parameter_is_rejected_by_name(version: Any, monkeypatch: pytest.MonkeyPatch
                                                 ) -> None:
    version("0.6.0")
    monkeypatch.setattr(hicache_storage.HiCacheStorage, "batch_get_v1",
                        lambda self, hashes, host_indices, extra_info=None: [])
    with pytest.raises(kvtier.UnsupportedError, match="batch_get_v1 takes .hashes, "):
        _engine.require("storage")


def test_a_missing_field_is_rejected_by_name(version: Any, monkeypatch: pytest.MonkeyPatch
                                             ) -> None:
    version("0.6.0")
    monkeypatch.setattr(hicache_storage, "PoolTransfer", dataclasses.make_dataclass(
        "PoolTransfer", ["name", "keys", "hit_policy"]))
    with pytest.raises(kvtier.UnsupportedError, match="PoolTransfer has no host_indices"):
        _engine.require("storage")


def test_a_missing_enum_member_is_rejected_by_name(version: Any, monkeypatch: pytest.MonkeyPatch
                                                   ) -> None:
    version("0.6.0")
    monkeypatch.setattr(hicache_storage, "PoolHitPolicy", enum.Enum("PoolHitPolicy", ["ALL_PAGES"]))
    with pytest.raises(kvtier.UnsupportedError, match="PoolHitPolicy has no TRAILING_PAGES"):
        _engine.require("storage")
