"""The plugin's options in LMCache's `extra_config`, and the supported version of LMCache."""

from __future__ import annotations

import importlib.metadata
from typing import Any, Dict, Tuple

from kvtier._needs import Needs
from kvtier_vllm.settings import Settings, invalid, reject_unknown, unsupported

#: The version of LMCache that this package is tested with.
TESTED = "0.5.6"

NEEDS = Needs("kvtier_lmcache", f"LMCache {TESTED}", f"lmcache=={TESTED}", ("lmcache", "torch"))

#: Where LMCache finds the class.
CLASS_NAME = "KvtierBackend"
MODULES = ("kvtier_lmcache", "kvtier_lmcache.backend")
#: Keys of a plugin that LMCache reads itself.
ENGINE_KEYS = ("module_path", "class_name")


def version() -> str:
    """The installed LMCache's version; empty if unknown."""
    try:
        return importlib.metadata.version("lmcache")
    except importlib.metadata.PackageNotFoundError:
        return ""


def check_version(accepted: str = "") -> None:
    """Raises `kvtier.UnsupportedError` unless LMCache has the tested or the accepted version."""
    found = version()
    if found == TESTED or (accepted and found == accepted):
        return
    raise unsupported(
        f"LMCache {found or 'of an unknown version'} is not the version that kvtier_lmcache was "
        f"tested with ({TESTED}): install lmcache=={TESTED}, or accept yours with the option "
        f"\"lmcache_version\": \"{found}\", after bindings/lmcache/tests/engine have passed with "
        "it")


def read(config: Any) -> Tuple[Settings, str]:
    """The options `storage_plugin.NAME.*` of this plugin, and the accepted LMCache version.

    LMCache does not tell a plugin its own name, so the name is that of the plugin with this
    class."""
    extra: Dict[str, Any] = dict(config.extra_config or {})
    names = [name for name in dict.fromkeys(config.storage_plugins or ())
             if extra.get(f"storage_plugin.{name}.class_name") == CLASS_NAME
             and extra.get(f"storage_plugin.{name}.module_path") in MODULES]
    if len(names) != 1:
        raise invalid(f"storage_plugins names {len(names)} plugins with the class {CLASS_NAME} "
                      f"({', '.join(names) or 'none'}): name exactly one")
    prefix = f"storage_plugin.{names[0]}."
    given = {key[len(prefix):]: value for key, value in extra.items() if key.startswith(prefix)}
    reject_unknown(given, [*Settings.names(), "lmcache_version", *ENGINE_KEYS])
    accepted = given.get("lmcache_version") or ""
    if not isinstance(accepted, str):
        raise invalid(f"lmcache_version={accepted!r} is a {type(accepted).__name__}: give a text, "
                      f"such as \"{TESTED}\"")
    return Settings.from_config(given), accepted
