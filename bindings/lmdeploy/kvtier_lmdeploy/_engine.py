"""Guards the imports of lmdeploy's connector interface."""

from __future__ import annotations

from typing import ContextManager

from kvtier._needs import Needs

from ._activate import SUPPORTED, check_version

_NEEDS = Needs("kvtier_lmdeploy", f"lmdeploy {', '.join(SUPPORTED)}", f"lmdeploy=={SUPPORTED[-1]}",
               ("lmdeploy", "numpy"))


def imports() -> ContextManager[None]:
    """Context manager for imports from lmdeploy. An unsupported version is reported as such, not
    as a missing name."""
    return _NEEDS.imports(check_version)
