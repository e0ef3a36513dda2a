"""How lmdeploy's interface is imported."""

from __future__ import annotations

from typing import ContextManager

from kvtier._needs import Needs

from ._activate import SUPPORTED, check_version

_NEEDS = Needs("kvtier_lmdeploy", f"lmdeploy {', '.join(SUPPORTED)}", f"lmdeploy=={SUPPORTED[-1]}",
               ("lmdeploy", "numpy"))


def imports() -> ContextManager[None]:
    """Around imports of it: a version that has not what is imported is refused as such."""
    return _NEEDS.imports(check_version)
