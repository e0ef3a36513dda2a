"""Errors of this package: kvtier's classes and statuses, with words on what to do."""

from __future__ import annotations

import kvtier
from kvtier import abi
from kvtier._errors import make


def invalid(text: str) -> kvtier.Error:
    """An argument is wrong."""
    return make(abi.KVT_E_INVALID, text)


def state(text: str) -> kvtier.Error:
    """It cannot be done now."""
    return make(abi.KVT_E_STATE, text)


def unsupported(text: str) -> kvtier.Error:
    """It cannot be done with this model."""
    return make(abi.KVT_E_UNSUPPORTED, text)


def with_advice(error: kvtier.Error) -> kvtier.Error:
    """The same error, and what to do about it."""
    advice = {
        abi.KVT_E_CLOSED: "the store (or Tiers) of this cache was closed while it is in use: close "
                          "it after the last forward pass, or go on without it: cache.detach()",
        abi.KVT_E_HANDLE: "what this cache was opened on is gone: close Tiers after its caches",
        abi.KVT_E_FORKED: "a forked child has no store: start workers with the spawn method, and "
                          "make a Tiers in each of them",
        abi.KVT_E_BUDGET: "the store has no room: give it more host= bytes, or a disk=",
        abi.KVT_E_UNAVAILABLE: "a store without disk= keeps nothing beyond its process: "
                               'level="ram", or a spec with disk=disk(path=..., bytes=...)',
    }.get(error.status)
    if advice is None:
        return error
    return make(error.status, f"{error.message}; {advice}", error.offset, error.errno)
