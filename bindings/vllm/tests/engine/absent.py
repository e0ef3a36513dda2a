"""Importing parts of vLLM where its other requirements are not installed.

vLLM's package root imports the whole engine. Its offloading and connector modules need little of
that, but import chains lead to most of its requirements. Here the packages above them are empty
ones over the installed files, and modules that are named for their types alone are objects of
which anything can be asked; nothing of what is tested calls them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any


class _Anything(type):
    """Classes that may be derived from, called, indexed and asked for attributes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _thing(name)

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return Any

    def __ror__(cls, other: Any) -> Any:
        return Any

    def __iter__(cls) -> Any:
        return iter(())


def _made(cls: Any, *args: Any, **_: Any) -> Any:
    # As a decorator it leaves what it is given as it was.
    if len(args) == 1 and callable(args[0]) and cls.__module__ == "absent":
        return args[0]
    return object.__new__(cls)


def _asked(self: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _thing(name)


def _called(self: Any, *args: Any, **_: Any) -> Any:
    return args[0] if len(args) == 1 and callable(args[0]) else _thing("result")


def _thing(name: str) -> Any:
    return _Anything(name, (), {"__new__": _made, "__init__": lambda self, *a, **k: None,
                                "__getattr__": _asked, "__call__": _called,
                                "__module__": "absent"})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        thing = _thing(name)
        setattr(self, name, thing)
        return thing


#: Parts of the engine that are named in annotations of what is tested, and import all the rest.
REPLACED = (
    "vllm.config", "vllm.distributed.device_communicators.shm_broadcast", "vllm.platforms",
    "vllm.triton_utils", "vllm._custom_ops", "vllm.forward_context", "vllm.v1.attention.backend",
    "vllm.v1.outputs", "vllm.distributed.kv_events", "vllm.utils.torch_utils",
    "vllm.v1.core.sched.output", "vllm.v1.kv_cache_interface", "prometheus_client",
    "vllm.distributed.parallel_state", "vllm.config.kv_transfer", "vllm.platforms.interface",
    "vllm.multimodal.utils", "vllm.multimodal.inputs", "vllm.utils.system_utils",
    "vllm.v1.core.kv_cache_utils",
)
#: Packages whose own code is not run; what is in them is the engine's.
HOLLOW = ("vllm", "vllm.distributed", "vllm.distributed.kv_transfer", "vllm.utils", "vllm.v1",
          "vllm.distributed.device_communicators", "vllm.v1.attention", "vllm.v1.core",
          "vllm.v1.core.sched", "vllm.multimodal")


def engine() -> str:
    """Makes vLLM's modules importable; its version, or "" where it is not installed."""
    if "vllm" in sys.modules:
        return str(getattr(sys.modules["vllm"], "__version__", ""))
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return ""
    here = Path(next(iter(spec.submodule_search_locations)))
    for name in HOLLOW:
        package = types.ModuleType(name)
        package.__path__ = [str(here.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    for name in REPLACED:
        if name.startswith("vllm") or importlib.util.find_spec(name) is None:
            sys.modules[name] = _Module(name)
    version = importlib.metadata.version("vllm")
    setattr(sys.modules["vllm"], "__version__", version)
    return version
