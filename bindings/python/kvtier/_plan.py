"""What lookups and plans of a store come to, and what changed in it."""

from __future__ import annotations

import ctypes
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

from . import _abi
from ._errors import make
from ._lib import check_err, lib, u64
from ._resource import new_error

#: No tier.
TIER_NONE = _abi.KVT_TIER_NONE
#: What tokens are good for, in a lookup.
RANGE_MISS = _abi.KVT_RANGE_MISS
RANGE_HIT = _abi.KVT_RANGE_HIT
RANGE_PENDING = _abi.KVT_RANGE_PENDING
RANGE_UNNEEDED = _abi.KVT_RANGE_UNNEEDED
#: What is to be done with tokens, in a plan.
PLAN_RESIDENT = _abi.KVT_PLAN_RESIDENT
PLAN_LOAD = _abi.KVT_PLAN_LOAD
PLAN_RECOMPUTE = _abi.KVT_PLAN_RECOMPUTE
#: Bits of `Namespace.exists`, beside `1 << TIER_*`.
EXISTS_WHOLE = _abi.KVT_EXISTS_WHOLE
#: Kinds of `StoreEvent`.
STORE_STORED = _abi.KVT_STORE_EVENT_STORED
STORE_REMOVED = _abi.KVT_STORE_EVENT_REMOVED
STORE_CLEARED = _abi.KVT_STORE_EVENT_CLEARED


class Range(NamedTuple):
    """Tokens in a row of which the same can be said."""

    first_token: int
    tokens: int
    #: RANGE_*.
    state: int
    #: The farthest tier that something of them is loaded from, or TIER_NONE.
    tier: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    remote_bytes: int
    #: On their way into the store.
    pending_bytes: int
    load_ns: int


class Lookup(NamedTuple):
    """How far a sequence could go on with what is there."""

    ranges: List[Range]
    tokens: int
    #: The longest prefix that can be gone on from now.
    reusable_tokens: int
    #: The same, once what is on its way has come.
    reusable_soon_tokens: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    remote_bytes: int
    pending_bytes: int
    #: With what waits before it.
    load_ns: int


class PlanStep(NamedTuple):
    """Tokens in a row with which the same is to be done."""

    first_token: int
    tokens: int
    #: PLAN_*.
    kind: int
    #: The farthest tier that something of them is loaded from, or TIER_NONE.
    tier: int
    host_bytes: int
    disk_bytes: int
    remote_bytes: int
    predicted_ns: int
    device_bytes: int


class Plan(NamedTuple):
    """What it takes to have all tokens of a session."""

    steps: List[PlanStep]
    tokens: int
    resident_tokens: int
    load_tokens: int
    recompute_tokens: int
    total_ns: int
    load_ns: int
    compute_ns: int
    #: What computing all of it would take.
    without_ns: int


class Prefill(NamedTuple):
    """What computing costs: n tokens after l tokens of context take
    n * beta_ns + alpha_ns * (n * l + n * n / 2)."""

    alpha_ns: float
    beta_ns: float
    observed: int
    fixed: bool


class ClearReport(NamedTuple):
    """What became of chunks that were to go."""

    removed_chunks: int
    #: Sessions, moves or pins hold them, or others that stay continue them.
    referenced_chunks: int
    #: They were on their way between tiers: try again.
    transferring_chunks: int


class DemoteReport(NamedTuple):
    """What becomes of chunks in memory that are to go down."""

    #: They were on disk, too.
    freed_chunks: int
    #: Their memory is given back once they are on disk.
    pending_chunks: int
    #: They stay: there is no disk.
    kept_chunks: int


class Tenant(NamedTuple):
    """What a tenant has moved."""

    tenant: int
    #: All tenants together that are not told apart.
    is_rest: bool
    put_bytes: int
    got_bytes: int
    hit_cells: int
    missed_cells: int


class Latency(NamedTuple):
    """How long one kind of thing took, in nanoseconds."""

    #: How many were timed.
    timed: int
    mean_ns: int
    #: What half of them did not exceed, to a fourth.
    p50_ns: int
    p99_ns: int
    max_ns: int


class StoreEvent(NamedTuple):
    """Something that changed in a store."""

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
    """What changed, how much of it was missed, and where to go on."""

    events: List[StoreEvent]
    missed: int
    cursor: int


def values(row: Any, like: Any) -> Tuple[Any, ...]:
    """The fields of a C struct by the names of a NamedTuple, arrays as bytes."""
    names = {"namespace": "namespace_key", "timed": "count"}
    wanted = [names[name] if name in names else name for name in like._fields]
    found = (getattr(row, name) for name in wanted if hasattr(row, name))
    return tuple(bytes(x) if isinstance(x, ctypes.Array) else x for x in found)


def all_rows(kind: Any, call: Callable[..., int]) -> List[Any]:
    """Rows of which the library says how many there are: `call(rows, capacity, stride,
    count, err)`."""
    count, capacity = ctypes.c_uint64(), 16
    while True:
        rows, err = (kind * capacity)(), new_error()
        status = call(rows, capacity, ctypes.sizeof(kind), ctypes.byref(count), ctypes.byref(err))
        if status != _abi.KVT_E_TOO_SMALL:
            check_err(status, err)
            return list(rows[: count.value])
        lib.kvt_error_free(ctypes.byref(err))
        capacity = count.value + 8  # it may grow meanwhile


def sequence(tokens: Any, count: int, media: "Sequence[Tuple[int, bytes]]") -> Tuple[Any, Any]:
    """Tokens and the media that start in them, for C, and what has to be kept meanwhile."""
    rows = (_abi.kvt_media_t * len(media))()
    for row, (token, digest) in zip(rows, media):
        if len(digest) != len(row.digest):
            raise make(_abi.KVT_E_INVALID, f"a digest of {len(digest)} bytes: 32 are wanted")
        row.token = u64(token)
        row.digest[:] = digest
    c = _abi.kvt_sequence_t(token_count=count, media_count=len(rows))
    c.tokens, c.media = tokens, rows
    c.media_stride_bytes = ctypes.sizeof(_abi.kvt_media_t)
    return c, rows


def key_bytes(keys: Any) -> Tuple[Any, int]:
    """Keys in a row, and how many: one `bytes`, or a list of them."""
    joined = keys if isinstance(keys, (bytes, bytearray)) else b"".join(keys)
    count, rest = divmod(len(joined), _abi.KVT_KEY_BYTES)
    if rest:
        raise make(_abi.KVT_E_INVALID, f"{len(joined)} bytes are no keys of 32 bytes each")
    return (ctypes.c_uint8 * len(joined)).from_buffer_copy(joined), count


def terms(overlap: bool, wait: bool, priority: int,
          cost: "Optional[Tuple[float, float]]") -> Any:
    """How the engine will run, for C."""
    c = _abi.kvt_plan_terms_t(priority=priority)
    c.flags = (0 if overlap else _abi.KVT_PLAN_NO_OVERLAP) | (
        0 if wait else _abi.KVT_PLAN_NO_WAIT)
    if cost is not None:
        c.flags |= _abi.KVT_PLAN_COST
        c.alpha_ns, c.beta_ns = float(cost[0]), float(cost[1])
    return c
