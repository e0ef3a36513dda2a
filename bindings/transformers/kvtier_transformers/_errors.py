"""Errors of this package: kvtier's error classes, with advice."""

from __future__ import annotations

import kvtier
from kvtier import abi
from kvtier._errors import make


def invalid(text: str) -> kvtier.Error:
    """Returns the error for a wrong argument."""
    return make(abi.KVT_E_INVALID, text)


def state(text: str) -> kvtier.Error:
    """Returns the error for a call that the present state does not allow."""
    return make(abi.KVT_E_STATE, text)


def unsupported(text: str) -> kvtier.Error:
    """Returns the error for an unsupported model, version or option."""
    return make(abi.KVT_E_UNSUPPORTED, text)


def with_advice(error: kvtier.Error) -> kvtier.Error:
    """Returns the same error with advice appended to its message."""
    advice = {
        abi.KVT_E_CLOSED: "the store or Tiers of this cache was closed during use: close it after "
                          "the last forward pass, or call cache.detach() to continue without it",
        abi.KVT_E_HANDLE: "the Tiers of this cache no longer exists: close Tiers after its caches",
        abi.KVT_E_FORKED: "a forked child cannot use the store: start workers with the spawn "
                          "method, and create a Tiers in each of them",
        abi.KVT_E_BUDGET: "the store's budget is exhausted: give it more host= bytes, or a disk=",
        abi.KVT_E_UNAVAILABLE: "a store without disk= loses its KV when the process ends: use "
                               'level="ram", or a spec with disk=disk(path=..., bytes=...)',
    }.get(error.status)
    if advice is None:
        return error
    return make(error.status, f"{error.message}; {advice}", error.offset, error.errno)
