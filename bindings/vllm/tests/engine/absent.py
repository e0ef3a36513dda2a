"""Imports parts of vLLM where its other requirements are not installed.

vLLM's package root imports the whole engine. Its offloading and connector modules need little of
it, but their imports lead to most of the requirements. So the packages above them are replaced
by empty ones over the installed files. Modules that only provide types are replaced by
placeholders with any attribute; the tested code never calls these.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any


class _PermissiveMeta(type):
    """Metaclass of placeholder classes: any attribute, index, union and call works."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _placeholder(name)

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return Any

    def __ror__(cls, other: Any) -> Any:
        return Any

    def __iter__(cls) -> Any:
        return iter(())


def _new(cls: Any, *args: Any, **_: Any) -> Any:
    # As a decorator, a placeholder returns its argument unchanged.
    if len(args) == 1 and callable(args[0]) and cls.__module__ == "absent":
        return args[0]
    return object.__new__(cls)


def _getattr(self: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _placeholder(name)


def _call(self: Any, *args: Any, **_: Any) -> Any:
    return args[0] if len(args) == 1 and callable(args[0]) else _placeholder("result")


def _placeholder(name: str) -> Any:
    return _PermissiveMeta(name, (), {"__new__": _new, "__init__": lambda self, *a, **k: None,
                                      "__getattr__": _getattr, "__call__": _call,
                                      "__module__": "absent"})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        thing = _placeholder(name)
        setattr(self, name, thing)
        return thing


#: Modules that the tested code names in annotations, and that import most of the engine.
REPLACED = (
    "vllm.config", "vllm.config.ec_manager_config", "vllm.config.kv_transfer",
    "vllm.distributed.device_communicators.shm_broadcast", "vllm.platforms",
    "vllm.platforms.interface", "vllm.triton_utils", "vllm._custom_ops", "vllm.forward_context",
    "vllm.compilation", "vllm.compilation.cuda_graph", "vllm.pooling_params",
    "vllm.sampling_params", "vllm.v1.attention.backend", "vllm.v1.attention.backends",
    "vllm.v1.attention.backends.registry", "vllm.v1.engine", "vllm.v1.metrics.stats",
    "vllm.v1.structured_output", "vllm.v1.structured_output.request", "vllm.v1.utils",
    "vllm.distributed.kv_events", "vllm.utils.torch_utils", "prometheus_client",
    "vllm.distributed.parallel_state", "vllm.multimodal.utils", "vllm.multimodal.inputs",
    "vllm.utils.system_utils", "vllm.v1.core.kv_cache_utils",
)
#: Packages whose `__init__` is not run; the modules inside are the engine's.
EMPTY_PACKAGES = ("vllm", "vllm.distributed", "vllm.distributed.kv_transfer", "vllm.utils",
                  "vllm.v1",
                  "vllm.distributed.device_communicators", "vllm.v1.attention", "vllm.v1.core",
                  "vllm.v1.core.sched", "vllm.multimodal")
#: Names of these packages that modules import.
PACKAGE_NAMES = ("vllm.utils.length_from_prompt_token_ids_or_embeds",)


def engine() -> str:
    """Makes vLLM's modules importable. Returns its version, or "" if it is not installed."""
    if "vllm" in sys.modules:
        return str(getattr(sys.modules["vllm"], "__version__", ""))
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return ""
    root = Path(next(iter(spec.submodule_search_locations)))
    for name in EMPTY_PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    for name in REPLACED:
        if name.startswith("vllm") or importlib.util.find_spec(name) is None:
            sys.modules[name] = _Module(name)
    for name in PACKAGE_NAMES:
        package_name, _, name = name.rpartition(".")
        setattr(sys.modules[package_name], name, _placeholder(name))
    version = importlib.metadata.version("vllm")
    setattr(sys.modules["vllm"], "__version__", version)
    return version
