"""kvtier for LMCache: a storage plugin, `KvtierBackend`. See the package's README.

This module itself does not import LMCache: the class is loaded when LMCache asks for it.
"""

from typing import Any

__all__ = ["KvtierBackend"]


def __getattr__(name: str) -> Any:
    if name == "KvtierBackend":
        from .backend import KvtierBackend
        return KvtierBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
