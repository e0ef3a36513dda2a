"""Compares the stubs of SGLang's interfaces with the installed SGLang."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any, List

import present  # noqa: F401, I001: skips where there is no engine
import kvtier_sglang
import pytest
from kvtier_sglang.linker import KvtierLinker

STUBS = Path(__file__).resolve().parents[1] / "stubs"
CLASSES = {
    "sglang.srt.mem_cache.hicache_storage": [
        "HiCacheStorage", "HiCacheStorageConfig", "HiCacheStorageExtraInfo", "PoolName",
        "PoolHitPolicy", "PoolTransfer", "PoolTransferResult"],
    "sglang.srt.mem_cache.unified_cache.unified_cache_linker": [
        "UnifiedCacheLinker", "LayerWiseLoadCounter"],
    "sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler": [
        "DevicePoolEntry", "DevicePoolGroup"],
    "sglang.srt.observability.metrics_collector": ["StorageMetrics"],
}


def load_stub(name: str) -> Any:
    """Loads a module of the stubs next to the installed one."""
    path = STUBS.joinpath(*name.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location("stub_" + name.replace(".", "_"), path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def signature_of(function: Any) -> List[Any]:
    """The parameters of a function: name, kind and default."""
    return [(one.name, one.kind, one.default)
            for one in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("module, name", [
    (module, name) for module, all_of in CLASSES.items() for name in all_of])
def test_stubs_have_the_installed_signatures(module: str, name: str) -> None:
    ours, theirs = getattr(load_stub(module), name), getattr(importlib.import_module(module), name)
    if issubclass(ours, enum.Enum):
        assert all(theirs[one.name].value == one.value for one in ours)
        return
    if dataclasses.is_dataclass(ours):
        fields = [[(one.name, str(one.default), one.default_factory is dataclasses.MISSING)
                   for one in dataclasses.fields(both)] for both in (ours, theirs)]
        assert fields[0] == fields[1]
    if inspect.isabstract(theirs):
        assert ours.__abstractmethods__ == theirs.__abstractmethods__
    for method, function in vars(ours).items():
        if inspect.isfunction(function) and not method.startswith("_"):
            assert signature_of(function) == signature_of(getattr(theirs, method)), method
    if "__init__" in vars(ours) and not dataclasses.is_dataclass(ours):
        assert signature_of(ours.__init__) == signature_of(theirs.__init__)


def test_the_whole_interface_is_implemented() -> None:
    from sglang.srt.mem_cache import hicache_storage
    from sglang.srt.mem_cache.unified_cache import unified_cache_linker

    for theirs, ours, inherited in (
            (hicache_storage.HiCacheStorage, kvtier_sglang.KvtierStorage,
             {"on_host_pools_registered"}),
            (unified_cache_linker.UnifiedCacheLinker, KvtierLinker, {"record_offload_ready"})):
        for method, function in vars(theirs).items():
            if inspect.isfunction(function) and not method.startswith("_"):
                assert method in inherited or method in vars(ours), method
                assert [one[0] for one in signature_of(function)] == [
                    one[0] for one in signature_of(getattr(ours, method))], method
    assert not inspect.isabstract(kvtier_sglang.KvtierStorage)
    assert not inspect.isabstract(KvtierLinker)


def test_the_linker_factory_creates_the_kvtier_linker(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker

    seen: List[Any] = []
    monkeypatch.setattr(KvtierLinker, "__init__",
                        lambda self, *given, **named: seen.append((given, named)))
    linker = create_unified_cache_linker(
        "args", "params", backend="dynamic", components=set(),
        config={"linker": "KvtierLinker", "linker_module_path": "kvtier_sglang.linker",
                "linker_extra_config": {"host_bytes": 1}})
    assert isinstance(linker, KvtierLinker)
    assert seen == [(("args", "params"), {"components": set(), "extra_config": {"host_bytes": 1},
                                          "forward_stream": None})]
