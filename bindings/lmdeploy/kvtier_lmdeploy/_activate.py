"""Makes lmdeploy build our connector without changing a file of lmdeploy.

lmdeploy's connector factory knows one connector. An import hook replaces two functions of the
factory when its module is imported. Modules that imported these functions earlier are patched too.
Other connectors' names still go to the original functions.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

from kvtier._probe import changes

from ._engine import ENGINE, check_version, require, version
from ._interfaces import FACTORY

#: Value of `kv_connector` that selects this connector.
CONNECTOR = "KvtierConnector"

_FACTORY = "lmdeploy.pytorch.kv_connector.factory"
#: Modules that import the factory's functions by name.
_IMPORTERS = ("lmdeploy.pytorch.kv_connector", "lmdeploy.pytorch.engine.engine",
           "lmdeploy.pytorch.engine.model_agent.agent")

_originals: Dict[str, Callable[..., Any]] = {}
_finder: "Optional[_Finder]" = None


def activate() -> None:
    """Makes the connector known to the engines of this process. A second call does nothing.

    Raises if lmdeploy is missing or too old. Interfaces that have changed are errors when an engine
    is created, because this function imports nothing of lmdeploy."""
    global _finder
    if _finder is not None:
        return
    check_version()
    _finder = _Finder()
    sys.meta_path.insert(0, _finder)
    module = sys.modules.get(_FACTORY)
    if module is not None:
        try:
            _replace(module)
        except BaseException:
            deactivate()
            raise


def activated() -> bool:
    """Whether `activate` is in effect in this process."""
    return _finder is not None


def deactivate() -> None:
    """Restores the factory's own functions. Connectors that were already built stay."""
    global _finder
    if _finder is None:
        return
    sys.meta_path.remove(_finder)
    _finder = None
    ours = {name: getattr(sys.modules.get(_FACTORY), name, None) for name in _originals}
    for name, original in _originals.items():
        for module in _loaded_importers():
            if getattr(module, name, None) is ours[name]:
                setattr(module, name, original)
    _originals.clear()


class Activation:
    """Marker in an engine's configuration: a process that unpickles it activates the connector."""

    def __reduce__(self) -> Tuple[Any, ...]:
        return _activate_on_unpickle, ()


def _activate_on_unpickle() -> Activation:
    activate()
    return Activation()


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps the loader of the factory's module. It finds no modules of its own."""

    def __init__(self) -> None:
        self._searching = False

    def find_spec(self, name: str, path: Optional[Sequence[str]],
                  target: Optional[ModuleType] = None) -> Optional[importlib.machinery.ModuleSpec]:
        """Returns the spec of the other finders with its loader wrapped in `_Loader`."""
        if name != _FACTORY or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Executes the factory's module, then replaces its functions."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Optional[ModuleType]:
        """Delegates to the module's own loader."""
        made: Optional[ModuleType] = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Executes the module, then replaces the factory's functions."""
        self._loader.exec_module(module)
        if activated():
            _replace(module)


def _loaded_importers() -> Tuple[ModuleType, ...]:
    names = (_FACTORY, *_IMPORTERS)
    return tuple(sys.modules[name] for name in names if name in sys.modules)


def _replace(factory: ModuleType) -> None:
    changed = list(changes(_FACTORY, factory, FACTORY))
    if changed:
        raise ENGINE.rejected(version(), "; ".join(changed))
    for name, ours in (("build_kv_connector", build), ("prepare_kv_connector_config", prepare)):
        original = getattr(factory, name)
        _originals[name] = original
        for module in _loaded_importers():
            if getattr(module, name, None) is original:
                setattr(module, name, ours)


def _is_ours(cache_config: Any) -> bool:
    transfer = cache_config.kv_transfer_config
    return transfer is not None and bool(transfer.is_kv_transfer_instance) \
        and transfer.kv_connector == CONNECTOR


def prepare(cache_config: Any, **given: Any) -> None:
    """Replaces `prepare_kv_connector_config`: runs in the engine's process, before the workers
    receive the configuration."""
    if not _is_ours(cache_config):
        _originals["prepare_kv_connector_config"](cache_config, **given)
        return
    require()
    from ._prepare import prepare_engine

    prepare_engine(cache_config, Activation(), **given)


def build(role: Any, cache_config: Any, **given: Any) -> Any:
    """Replaces `build_kv_connector`: builds our connector, or delegates to the original."""
    if not _is_ours(cache_config):
        return _originals["build_kv_connector"](role, cache_config, **given)
    from ._connector import KvtierConnector

    return KvtierConnector(role, cache_config, **given)
