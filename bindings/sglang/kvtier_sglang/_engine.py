"""The version of SGLang that this package needs, and how its interface is imported."""

from __future__ import annotations

from typing import ContextManager

from kvtier._needs import Needs

from ._config import TESTED, unsupported

NEEDS = Needs("kvtier_sglang", f"SGLang {TESTED}", f"sglang=={TESTED}",
              ("sglang", "torch", "numpy"))


def imports() -> ContextManager[None]:
    """A context for imports from SGLang: names the version in the error if an import fails."""
    return NEEDS.imports(_reject_other_version)


def _reject_other_version() -> None:
    from sglang.version import __version__ as found

    if found != TESTED:
        raise unsupported(f"SGLang {found} does not have the interface of {TESTED}, which "
                          f"kvtier_sglang needs: pip install sglang=={TESTED}")
