"""Results of lookups and plans, reports and events of a store."""

from __future__ import annotations

import ctypes
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

from . import _abi
from ._errors import make
from ._lib import check_err, lib, u64
from ._resource import new_error

#: No tier.
TIER_NONE = _abi.KVT_TIER_NONE
#: States of a range of a lookup.
RANGE_MISS = _abi.KVT_RANGE_MISS
RANGE_HIT = _abi.KVT_RANGE_HIT
RANGE_PENDING = _abi.KVT_RANGE_PENDING
RANGE_UNNEEDED = _abi.KVT_RANGE_UNNEEDED
#: Kinds of a step of a plan.
PLAN_RESIDENT = _abi.KVT_PLAN_RESIDENT
PLAN_LOAD = _abi.KVT_PLAN_LOAD
PLAN_RECOMPUTE = _abi.KVT_PLAN_RECOMPUTE
#: Bits of `Namespace.exists`, beside `1 << TIER_*`.
EXISTS_WHOLE = _abi.KVT_EXISTS_WHOLE
#: Kinds of `StoreEvent`.
STORE_EVENT_STORED = _abi.KVT_STORE_EVENT_STORED
STORE_EVENT_REMOVED = _abi.KVT_STORE_EVENT_REMOVED
STORE_EVENT_CLEARED = _abi.KVT_STORE_EVENT_CLEARED


class Range(NamedTuple):
    """Consecutive tokens with the same state in a lookup."""

    first_token: int
    tokens: int
    #: RANGE_*.
    state: int
    #: The slowest tier that the range is loaded from, or TIER_NONE.
    tier: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    remote_bytes: int
    #: Bytes in flight to the store.
    pending_bytes: int
    load_ns: int


class Lookup(NamedTuple):
    """How far a sequence is reusable."""

    ranges: List[Range]
    tokens: int
    #: The longest prefix that is reusable now.
    reusable_tokens: int
    #: The longest prefix that is reusable after the transfers in flight.
    reusable_soon_tokens: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    remote_bytes: int
    pending_bytes: int
    #: Includes the queued work before the load.
    load_ns: int


class PlanStep(NamedTuple):
    """Consecutive tokens that are resident, loaded or recomputed together."""

    first_token: int
    tokens: int
    #: PLAN_*.
    kind: int
    #: The slowest tier that the step is loaded from, or TIER_NONE.
    tier: int
    host_bytes: int
    disk_bytes: int
    remote_bytes: int
    predicted_ns: int
    device_bytes: int


class Plan(NamedTuple):
    """The steps to make all tokens of a session available, and their predicted times."""

    steps: List[PlanStep]
    tokens: int
    resident_tokens: int
    load_tokens: int
    recompute_tokens: int
    total_ns: int
    load_ns: int
    compute_ns: int
    #: The time to compute all tokens.
    without_ns: int


class PrefillCost(NamedTuple):
    """The cost of computing n tokens after l tokens of context:
    n * beta_ns + alpha_ns * (n * l + n * n / 2)."""

    alpha_ns: float
    beta_ns: float
    observed: int
    fixed: bool


class ClearReport(NamedTuple):
    """The outcome of a removal of chunks."""

    removed_chunks: int
    #: Not removed: referenced by sessions, transfers or pins, or ancestors of kept chunks.
    referenced_chunks: int
    #: Not removed: in transfer between tiers; try again.
    transferring_chunks: int


class DemoteReport(NamedTuple):
    """The outcome of a demotion of chunks in host memory."""

    #: Freed at once, because they were also on disk.
    freed_chunks: int
    #: Freed as soon as they are on disk.
    pending_chunks: int
    #: Not demoted, because the store has no disk.
    kept_chunks: int


class Tenant(NamedTuple):
    """The traffic of a tenant."""

    tenant: int
    #: True: the sum of all tenants without a row of their own.
    is_rest: bool
    put_bytes: int
    got_bytes: int
    hit_cells: int
    missed_cells: int
    #: Puts rejected because the tenant would exceed its quota (`Store.set_quota`).
    rejected_puts: int
    #: Bytes of its chunks in host memory and on disk; 0 without a quota.
    host_bytes: int
    disk_bytes: int
    #: The quotas; 0 = none.
    host_quota_bytes: int
    disk_quota_bytes: int


class Latency(NamedTuple):
    """The latency of one kind of operation, in nanoseconds."""

    #: The number of timed operations.
    timed: int
    mean_ns: int
    #: The median, with a precision of a quarter of its value.
    p50_ns: int
    p99_ns: int
    max_ns: int


class StoreEvent(NamedTuple):
    """A change in a store."""

    number: int
    at_ns: int
    #: STORE_*.
    kind: int
    tier: int
    tokens: int
    position: int
    key: bytes
    parent: bytes
    #: The namespace's key.
    namespace: bytes


class StoreEvents(NamedTuple):
    """Events, the number of missed events, and the cursor for the next call."""

    events: List[StoreEvent]
    missed: int
    cursor: int


def values(row: Any, like: Any) -> Tuple[Any, ...]:
    """Returns the fields of a C struct in the order of a NamedTuple, arrays as bytes."""
    names = {"namespace": "namespace_key", "timed": "count"}
    wanted = [names[name] if name in names else name for name in like._fields]
    found = (getattr(row, name) for name in wanted if hasattr(row, name))
    return tuple(bytes(x) if isinstance(x, ctypes.Array) else x for x in found)


def all_rows(kind: Any, call: Callable[..., int]) -> List[Any]:
    """Returns all rows of a call that reports their count: `call(rows, capacity, stride, count,
    err)`."""
    count, capacity = ctypes.c_uint64(), 16
    while True:
        rows, err = (kind * capacity)(), new_error()
        status = call(rows, capacity, ctypes.sizeof(kind), ctypes.byref(count), ctypes.byref(err))
        if status != _abi.KVT_E_TOO_SMALL:
            check_err(status, err)
            return list(rows[: count.value])
        lib.kvt_error_free(ctypes.byref(err))
        capacity = count.value + 8  # the count may grow until the next call


def sequence(tokens: Any, count: int, media: "Sequence[Tuple[int, bytes]]") -> Tuple[Any, Any]:
    """Converts tokens and the media that start in them for C. Returns the struct, and an object
    that must be kept during the call."""
    rows = (_abi.kvt_media_t * len(media))()
    for row, (token, digest) in zip(rows, media):
        if len(digest) != len(row.digest):
            raise make(_abi.KVT_E_INVALID, f"a media digest has {len(digest)} bytes: it must have "
                                           f"{len(row.digest)}")
        row.token = u64(token)
        row.digest[:] = digest
    c = _abi.kvt_sequence_t(token_count=count, media_count=len(rows))
    c.tokens, c.media = tokens, rows
    c.media_stride_bytes = ctypes.sizeof(_abi.kvt_media_t)
    return c, rows


def key_bytes(keys: Any) -> Tuple[Any, int]:
    """Returns contiguous keys for C and their count, from one `bytes` object or a list."""
    joined = keys if isinstance(keys, (bytes, bytearray)) else b"".join(keys)
    count, rest = divmod(len(joined), _abi.KVT_KEY_BYTES)
    if rest:
        raise make(_abi.KVT_E_INVALID, f"keys have {len(joined)} bytes: each key must have "
                                       f"{_abi.KVT_KEY_BYTES}")
    return (ctypes.c_uint8 * len(joined)).from_buffer_copy(joined), count


def terms(overlap: bool, wait: bool, priority: int,
          cost: "Optional[Tuple[float, float]]") -> Any:
    """Converts the options of a plan for C."""
    c = _abi.kvt_plan_terms_t(priority=priority)
    c.flags = (0 if overlap else _abi.KVT_PLAN_NO_OVERLAP) | (
        0 if wait else _abi.KVT_PLAN_NO_WAIT)
    if cost is not None:
        c.flags |= _abi.KVT_PLAN_COST
        c.alpha_ns, c.beta_ns = float(cost[0]), float(cost[1])
    return c
