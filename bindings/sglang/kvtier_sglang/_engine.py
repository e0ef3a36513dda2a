"""The versions of SGLang that this package supports."""

from __future__ import annotations

from kvtier._probe import Engine

from ._interfaces import INTERFACES

ENGINE = Engine(name="SGLang", tested=("0.5.23",), oldest="0.5.22", package="kvtier_sglang",
                install="sglang==0.5.23", modules=("sglang", "torch", "numpy"))


def require(part: str) -> None:
    """Raises an error unless the installed SGLang has the interfaces of a part: "storage" or
    "linker". ImportError if SGLang or another module is missing."""
    ENGINE.needs.check()
    from sglang.version import __version__ as version

    ENGINE.check_version(version)  # before any other of its modules is imported
    ENGINE.check(version, INTERFACES[part])
