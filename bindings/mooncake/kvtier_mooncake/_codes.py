"""Mooncake's return codes, which engines get instead of exceptions."""

from __future__ import annotations

from typing import Dict

import kvtier
from kvtier import abi

OK = 0
NO_AVAILABLE_HANDLE = -200
INVALID_PARAMS = -600
OBJECT_NOT_FOUND = -704
#: A failure inside the library. Engines read this code as "no transfer is underway any more",
#: which is true of every result here. After other failure codes, vLLM's embedding store abandons
#: its store and keeps the buffers forever.
RPC_FAIL = -900
UNAVAILABLE_IN_CURRENT_STATUS = -1010

_OF_STATUS: Dict[int, int] = {
    abi.KVT_OK: OK,
    abi.KVT_E_INVALID: INVALID_PARAMS,
    abi.KVT_E_LIMIT: INVALID_PARAMS,
    abi.KVT_E_SPEC: INVALID_PARAMS,
    abi.KVT_E_BUDGET: NO_AVAILABLE_HANDLE,
    abi.KVT_E_NOMEM: NO_AVAILABLE_HANDLE,
    abi.KVT_E_AGAIN: NO_AVAILABLE_HANDLE,
    abi.KVT_E_NOT_FOUND: OBJECT_NOT_FOUND,
    # A checksum mismatch is a miss.
    abi.KVT_E_CORRUPT: OBJECT_NOT_FOUND,
    abi.KVT_E_CLOSED: UNAVAILABLE_IN_CURRENT_STATUS,
    abi.KVT_E_HANDLE: UNAVAILABLE_IN_CURRENT_STATUS,
    abi.KVT_E_BUSY: UNAVAILABLE_IN_CURRENT_STATUS,
}


def of_status(status: int) -> int:
    """The return code for a status of the C library."""
    return _OF_STATUS.get(status, RPC_FAIL)


def of_error(error: kvtier.Error) -> int:
    """The return code for an exception of the kvtier package."""
    return of_status(error.status)
