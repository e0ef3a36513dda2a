"""Installs this package as the module `mooncake.store`."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any, Optional

from kvtier import abi
from kvtier._errors import make

from ._config import Settings, configure


def install(settings: Optional[Settings] = None, *, force: bool = False, **given: Any) -> None:
    """Makes `from mooncake.store import MooncakeDistributedStore` import this package's class.
    It raises an error if the real module is imported already, unless `force` is true; names that
    were imported before do not change. The other arguments are those of `configure`."""
    if settings is not None or given:
        configure(settings, **given)
    current = sys.modules.get("mooncake.store")
    if current is not None and not _is_shim(current) and not force:
        raise make(abi.KVT_E_STATE, "the real mooncake.store is imported already: call install() "
                   "before that, or start the program with python -m "
                   "kvtier_mooncake -m ...")
    import kvtier_mooncake

    package = sys.modules.get("mooncake") or types.ModuleType("mooncake")
    if not hasattr(package, "__path__"):
        package.__path__ = []
        package.__spec__ = importlib.machinery.ModuleSpec("mooncake", None, is_package=True)
    module = types.ModuleType("mooncake.store", kvtier_mooncake.__doc__)
    module.__spec__ = importlib.machinery.ModuleSpec("mooncake.store", None)
    for name in ("MooncakeDistributedStore", "ReplicateConfig", "MooncakeHostMemAllocator"):
        setattr(module, name, getattr(kvtier_mooncake, name))
    setattr(module, "__kvtier__", True)
    setattr(package, "store", module)
    sys.modules["mooncake"], sys.modules["mooncake.store"] = package, module


def uninstall() -> None:
    """Removes the module again. Names that were imported from it do not change."""
    current = sys.modules.get("mooncake.store")
    if current is None or not _is_shim(current):
        return
    del sys.modules["mooncake.store"]
    package = sys.modules.get("mooncake")
    if package is not None and getattr(package, "store", None) is current:
        delattr(package, "store")
        if not package.__path__:
            del sys.modules["mooncake"]


def _is_shim(module: types.ModuleType) -> bool:
    return bool(getattr(module, "__kvtier__", False))
