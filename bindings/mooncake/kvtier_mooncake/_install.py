"""Answers to `mooncake.store`."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any, Optional

from kvtier import abi
from kvtier._errors import make

from ._config import Settings, configure


def install(settings: Optional[Settings] = None, *, force: bool = False, **given: Any) -> None:
    """From now on `from mooncake.store import MooncakeDistributedStore` is the one of this
    package. With the real one imported already it is refused, but with `force`: what was
    imported stays what it was. Other arguments are those of `configure`."""
    if settings is not None or given:
        configure(settings, **given)
    there = sys.modules.get("mooncake.store")
    if there is not None and not _ours(there) and not force:
        raise make(abi.KVT_E_STATE, "mooncake.store is imported already: install() earlier, or "
                                    "start with python -m kvtier_mooncake -m ...")
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
    """Takes the module away again; what was imported from it stays."""
    there = sys.modules.get("mooncake.store")
    if there is None or not _ours(there):
        return
    del sys.modules["mooncake.store"]
    package = sys.modules.get("mooncake")
    if package is not None and getattr(package, "store", None) is there:
        delattr(package, "store")
        if not package.__path__:
            del sys.modules["mooncake"]


def _ours(module: types.ModuleType) -> bool:
    return bool(getattr(module, "__kvtier__", False))
