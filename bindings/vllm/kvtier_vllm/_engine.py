"""The vLLM versions that this package supports."""

from __future__ import annotations

import importlib.metadata
import sys

from kvtier import abi
from kvtier._errors import make
from kvtier._needs import Needs

#: The release lines whose interfaces these classes implement, the newest last.
SUPPORTED = ("0.32", "0.33")

_NEWEST = SUPPORTED[-1]
_NEEDS = Needs("kvtier_vllm", f"vLLM {_NEWEST}", f"'vllm=={_NEWEST}.*'", ("vllm",))


def version() -> str:
    """The installed engine's version; empty if unknown."""
    found = getattr(sys.modules.get("vllm"), "__version__", None)
    if isinstance(found, str):
        return found
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return ""


def require() -> None:
    """Raises an error unless a supported vLLM is installed; ImportError if there is none.
    vLLM's interfaces change from release to release, and another version would fail in the
    middle of a request."""
    _NEEDS.check()
    found = version()
    if any(found == line or found.startswith(line + ".") for line in SUPPORTED):
        return
    raise make(abi.KVT_E_UNSUPPORTED,
               f"kvtier_vllm supports vLLM {' and '.join(SUPPORTED)}, but the installed version is "
               f"{found or 'unknown'}: install 'vllm=={_NEWEST}.*', or a kvtier release for your "
               "version")
