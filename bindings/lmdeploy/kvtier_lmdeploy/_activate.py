"""Has lmdeploy build our connector, without a file of it changed.

Its factory knows one connector. Two functions of the factory are replaced as its module is
imported, so whoever takes them from there has ours; what had taken them before is told. For every
other connector's name they do what they did.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

from kvtier import abi
from kvtier._errors import make

#: What `kv_connector` is to say.
CONNECTOR = "KvtierConnector"

#: Versions whose seam this package was written for.
SUPPORTED = ("0.18.0",)

_FACTORY = "lmdeploy.pytorch.kv_connector.factory"
#: Who takes the factory's functions by name.
_TAKERS = ("lmdeploy.pytorch.kv_connector", "lmdeploy.pytorch.engine.engine",
           "lmdeploy.pytorch.engine.model_agent.agent")
_FUNCTIONS = ("build_kv_connector", "prepare_kv_connector_config")

_originals: Dict[str, Callable[..., Any]] = {}
_finder: "Optional[_Finder]" = None


def version() -> str:
    """lmdeploy's; "" where it is not installed."""
    try:
        return importlib.metadata.version("lmdeploy")
    except importlib.metadata.PackageNotFoundError:
        return ""


def activate() -> None:
    """From now on this process's engines know the connector; again, it does nothing. Another
    version of lmdeploy than those supported is refused, unless KVTIER_LMDEPLOY_ANY is 1."""
    global _finder
    if _finder is not None:
        return
    check_version()
    _finder = _Finder()
    sys.meta_path.insert(0, _finder)
    module = sys.modules.get(_FACTORY)
    if module is not None:
        _replace(module)


def activated() -> bool:
    """Whether it is."""
    return _finder is not None


def deactivate() -> None:
    """Puts the factory's own functions back; connectors that were built stay."""
    global _finder
    if _finder is None:
        return
    sys.meta_path.remove(_finder)
    _finder = None
    ours = {name: getattr(sys.modules.get(_FACTORY), name, None) for name in _originals}
    for name, original in _originals.items():
        for module in _holders():
            if getattr(module, name, None) is ours[name]:
                setattr(module, name, original)
    _originals.clear()


def check_version() -> None:
    """Refuses a seam that may be another."""
    found = version()
    if found in SUPPORTED or os.environ.get("KVTIER_LMDEPLOY_ANY") == "1":
        return
    if not found:
        raise make(abi.KVT_E_UNAVAILABLE, "lmdeploy is not installed: pip install lmdeploy==0.18.0")
    raise make(abi.KVT_E_UNSUPPORTED,
               f"lmdeploy {found}: this connector is for {', '.join(SUPPORTED)}. Install that, or "
               "set KVTIER_LMDEPLOY_ANY=1 to try it all the same")


class Activation:
    """Travels with an engine's configuration: a process that reads it is activated, too."""

    def __reduce__(self) -> Tuple[Any, ...]:
        return _arrived, ()


def _arrived() -> Activation:
    activate()
    return Activation()


class _Finder(importlib.abc.MetaPathFinder):
    """Sees the factory being imported; finds nothing itself."""

    def __init__(self) -> None:
        self._asking = False

    def find_spec(self, name: str, path: Optional[Sequence[str]],
                  target: Optional[ModuleType] = None) -> Optional[importlib.machinery.ModuleSpec]:
        """The spec that others find, with a loader that goes on with ours."""
        if name != _FACTORY or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Executes the factory's module, then replaces its functions."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Optional[ModuleType]:
        """As the module's own loader does."""
        made: Optional[ModuleType] = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """As it does, and one step more."""
        self._loader.exec_module(module)
        if activated():
            _replace(module)


def _holders() -> Tuple[ModuleType, ...]:
    names = (_FACTORY, *_TAKERS)
    return tuple(sys.modules[name] for name in names if name in sys.modules)


def _replace(factory: ModuleType) -> None:
    missing = [name for name in _FUNCTIONS if not callable(getattr(factory, name, None))]
    if missing:
        raise make(abi.KVT_E_UNSUPPORTED, f"lmdeploy {version()} has no {', '.join(missing)} in "
                   f"{_FACTORY}: its seam is another one")
    for name, ours in (("build_kv_connector", build), ("prepare_kv_connector_config", prepare)):
        original = getattr(factory, name)
        _originals[name] = original
        for module in _holders():
            if getattr(module, name, None) is original:
                setattr(module, name, ours)


def _is_ours(cache_config: Any) -> bool:
    transfer = cache_config.kv_transfer_config
    return transfer is not None and bool(transfer.is_kv_transfer_instance) \
        and transfer.kv_connector == CONNECTOR


def prepare(cache_config: Any, **given: Any) -> None:
    """In the engine's process, before its configuration goes to the workers."""
    if not _is_ours(cache_config):
        _originals["prepare_kv_connector_config"](cache_config, **given)
        return
    from ._prepare import prepare_engine

    prepare_engine(cache_config, Activation(), **given)


def build(role: Any, cache_config: Any, **given: Any) -> Any:
    """A connector of ours, or what the factory makes."""
    if not _is_ours(cache_config):
        return _originals["build_kv_connector"](role, cache_config, **given)
    from ._connector import KvtierConnector

    return KvtierConnector(role, cache_config, **given)
