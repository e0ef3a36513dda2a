"""What this package is for, and how its interface is imported."""

from __future__ import annotations

from typing import ContextManager

from kvtier._needs import Needs

from ._config import TESTED, unsupported

NEEDS = Needs("kvtier_sglang", f"SGLang {TESTED}", f"sglang=={TESTED}",
              ("sglang", "torch", "numpy"))


def imports() -> ContextManager[None]:
    """Around imports of SGLang's: a version that has not what is imported is refused as such."""
    return NEEDS.imports(_refuse_other)


def _refuse_other() -> None:
    from sglang.version import __version__ as found

    if found != TESTED:
        raise unsupported(f"SGLang {found} has not the interface that kvtier_sglang is for, "
                          f"that of {TESTED}: pip install sglang=={TESTED}")
