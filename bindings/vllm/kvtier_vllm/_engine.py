"""Which vLLM this is for."""

from __future__ import annotations

import importlib.metadata
import sys

from kvtier import abi
from kvtier._errors import make
from kvtier._needs import Needs

#: The release lines whose interfaces these classes implement; the last is the newest.
SUPPORTED = ("0.32", "0.33")

_NEWEST = SUPPORTED[-1]
_NEEDS = Needs("kvtier_vllm", f"vLLM {_NEWEST}", f"'vllm=={_NEWEST}.*'", ("vllm",))


def version() -> str:
    """The installed engine's version; empty where it cannot be told."""
    found = getattr(sys.modules.get("vllm"), "__version__", None)
    if isinstance(found, str):
        return found
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return ""


def require() -> None:
    """Refuses an engine whose interfaces may be others: they change from release to release,
    and what is called with other arguments would fail in the middle of a request. ImportError
    where there is none."""
    _NEEDS.check()
    found = version()
    if any(found == line or found.startswith(line + ".") for line in SUPPORTED):
        return
    raise make(abi.KVT_E_UNSUPPORTED,
               f"kvtier_vllm is for vLLM {' and '.join(SUPPORTED)}, and this is "
               f"{found or 'unknown'}: install 'vllm=={_NEWEST}.*', or the kvtier that was made "
               "for yours")
