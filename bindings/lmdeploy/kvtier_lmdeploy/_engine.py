"""The versions of lmdeploy that this package supports."""

from __future__ import annotations

import importlib.metadata

from kvtier import abi
from kvtier._errors import make
from kvtier._probe import Engine

from ._interfaces import interfaces

ENGINE = Engine(name="lmdeploy", tested=("0.17", "0.18"), oldest="0.17", package="kvtier_lmdeploy",
                install="lmdeploy==0.18.0", modules=("lmdeploy", "numpy"))


def version() -> str:
    """Returns lmdeploy's version, or "" if lmdeploy is not installed."""
    try:
        return importlib.metadata.version("lmdeploy")
    except importlib.metadata.PackageNotFoundError:
        return ""


def check_version() -> None:
    """Raises if lmdeploy is missing or older than the window. Imports nothing of lmdeploy."""
    found = version()
    if not found:
        raise make(abi.KVT_E_UNAVAILABLE,
                   f"lmdeploy is not installed: run pip install {ENGINE.install}")
    ENGINE.check_version(found)


def require() -> None:
    """Raises an error unless the installed lmdeploy has the interfaces that the connector uses.
    ImportError if lmdeploy or another module is missing."""
    ENGINE.needs.check()
    check_version()
    ENGINE.check(version(), interfaces())
