"""Stores, namespaces and sessions: KV in tiers."""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import dataclass, field
from typing import (
    TYPE_CHECKING,
    Any,
    Dict,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

from . import _abi, _reaper
from ._columns import Column, Columns
from ._device import After, number_of
from ._errors import make
from ._lib import check, check_err, deadline_after, lib, text_pointer, u32, u64
from ._op import Op
from ._plan import (
    ClearReport,
    DemoteReport,
    Latency,
    Lookup,
    Plan,
    PrefillCost,
    Range,
    PlanStep,
    StoreEvent,
    StoreEvents,
    Tenant,
    all_rows,
    key_bytes,
    sequence,
    terms,
    values,
)
from ._policy import STOP_UNKNOWN, LogEntry, log_entries
from ._resource import Closing, Resource, byref, new_error
from ._runtime import PRIORITY_DEMAND, PRIORITY_PREFETCH, CloseReport, Runtime, submit_opts
from ._view import View, fill

if TYPE_CHECKING:
    from ._budget import Budget
    from ._device import Device
    from ._event import ReadyEvent
    from ._queue import Queue

#: The reuse rule of a layer: how many past tokens it needs.
RULE_FULL = _abi.KVT_RULE_FULL
RULE_WINDOW = _abi.KVT_RULE_WINDOW
RULE_STATE = _abi.KVT_RULE_STATE
#: The level at which a put completes.
LEVEL_RAM = _abi.KVT_LEVEL_RAM
LEVEL_DISK = _abi.KVT_LEVEL_DISK
LEVEL_DURABLE = _abi.KVT_LEVEL_DURABLE
#: After the remote's confirmation.
LEVEL_REMOTE = _abi.KVT_LEVEL_REMOTE

#: When cells are written to disk.
WRITES: Dict[str, int] = {
    "through": _abi.KVT_WRITE_THROUGH, "back": _abi.KVT_WRITE_BACK, "never": _abi.KVT_WRITE_NEVER,
    "behind": _abi.KVT_WRITE_BEHIND,
}
_EVENT_BYTES = ctypes.sizeof(_abi.kvt_store_event_t)
#: The engine of file access (`Store.stats()["disk_engine"]`).
IO_NONE = _abi.KVT_IO_NONE
IO_THREADS = _abi.KVT_IO_THREADS
IO_URING = _abi.KVT_IO_URING

#: Images and audio: the index of the first token of each, and a 32-byte hash.
Media = Sequence[Tuple[int, bytes]]

#: The types of a layer's numbers.
DTYPES: Dict[str, int] = {
    "bytes": _abi.KVT_DTYPE_BYTES, "f32": _abi.KVT_DTYPE_F32, "f16": _abi.KVT_DTYPE_F16,
    "bf16": _abi.KVT_DTYPE_BF16, "fp8_e4m3": _abi.KVT_DTYPE_F8_E4M3,
    "fp8_e5m2": _abi.KVT_DTYPE_F8_E5M2, "int8": _abi.KVT_DTYPE_I8, "int4": _abi.KVT_DTYPE_I4,
}


def _invalid(text: str) -> Exception:
    return make(_abi.KVT_E_INVALID, text)


@dataclass(frozen=True)
class Identity:
    """The fields that decide which sessions share KV. None means absent, which differs from
    empty."""

    model: Optional[bytes] = None
    weights: Optional[bytes] = None
    lora: Optional[bytes] = None
    media: Optional[bytes] = None
    salt: Optional[bytes] = None
    recipe: Optional[bytes] = None
    #: Index and count.
    shard: Optional[Tuple[int, int]] = None
    #: Further fields by tag, which is at least 0x80000000.
    extra: Dict[int, bytes] = field(default_factory=dict)
    #: The tenant in object names at a remote; 0 = shared by all. Not a part of the identity.
    remote_tenant: int = 0


@dataclass(frozen=True)
class Group:
    """Layers with the same dtype, sizes and reuse rule, for a `Layout` of a model whose layers
    differ."""

    layers: Sequence[int]
    k_bytes: int = 0
    v_bytes: int = 0
    dtype: str = "bytes"
    kv_heads: int = 0
    rule: int = RULE_FULL
    window_tokens: int = 0
    state_bytes: int = 0


@dataclass(frozen=True)
class Layout:
    """The length of chunks, and the KV of a token in each layer. `gqa`, `mla` and `window` create
    the layouts of most models; `Layout(chunk_tokens, groups)` is for the others.

    >>> import kvtier
    >>> layout = kvtier.Layout.gqa(layers=32, kv_heads=8, head_dim=128, dtype="bf16",
    ...                            chunk_tokens=64)
    >>> layout.k_bytes                                              # of a token and layer
    2048
    """

    chunk_tokens: int
    groups: Sequence[Group] = ()
    #: The rest describes layers that are alike, without `groups`: set by `gqa`, `mla`, `window`.
    layers: int = 0
    dtype: str = "bytes"
    kv_heads: int = 0
    #: The tokens that a layer with a window attends to; 0 = all layers attend to all tokens.
    window_tokens: int = 0
    #: With a window: each full_every-th layer attends to all tokens; 0 = no layer does.
    full_every: int = 0
    #: The first layer that does, below full_every.
    full_first: int = 0
    #: The bytes of K, or of the latent, per token and layer.
    k_bytes: int = 0
    #: The bytes of V per token and layer; 0 = V is part of K.
    v_bytes: int = 0

    @classmethod
    def gqa(cls, layers: int, kv_heads: int, head_dim: int, dtype: str,
            chunk_tokens: int) -> "Layout":
        """Returns the layout of grouped-query, multi-query or multi-head attention: K and V by
        head, all layers alike."""
        return cls._of(lib.kvt_layout_gqa, layers, kv_heads, head_dim, dtype, chunk_tokens)

    @classmethod
    def mla(cls, layers: int, latent_dim: int, rope_dim: int, dtype: str,
            chunk_tokens: int) -> "Layout":
        """Returns the layout of latent attention (MLA): one plane, K, with the latent and the
        rotated part of the key."""
        return cls._of(lib.kvt_layout_mla, layers, latent_dim, rope_dim, dtype, chunk_tokens)

    @classmethod
    def window(cls, layers: int, kv_heads: int, head_dim: int, dtype: str, chunk_tokens: int,
               window_tokens: int, full_every: int = 0) -> "Layout":
        """Returns the layout of layers that attend to the last `window_tokens` tokens only. Each
        full_every-th layer attends to all tokens: 6 for Gemma 3, 2 for gpt-oss, 0 = no layer.
        The first one is layer full_every - 1: `dataclasses.replace(layout, full_first=0)` moves
        it."""
        return cls._of(lib.kvt_layout_window, layers, kv_heads, head_dim, dtype, chunk_tokens,
                       u32(window_tokens), u32(full_every))

    @classmethod
    def _of(cls, call: Any, layers: int, first: int, second: int, dtype: str, chunk_tokens: int,
            *more: int) -> "Layout":
        c, err = _abi.kvt_layout_t(), new_error()
        check_err(call(byref(c), u32(layers), u32(first), u32(second), _dtype(dtype),
                       u32(chunk_tokens), *more, byref(err)), err)
        return cls(c.chunk_tokens, (), c.layers, dtype, c.kv_heads, c.window_tokens, c.full_every,
                   c.full_first, c.k_bytes, c.v_bytes)


class SessionInfo(NamedTuple):
    """The length of a session, and its layout."""

    tokens: int
    full_chunks: int
    chunk_tokens: int
    layers: int


class SessionJob(_reaper.Job):
    """Closes a session."""

    __slots__ = ()

    def attempt(self) -> int:
        return int(lib.kvt_session_close(byref(self.handle)))


class NamespaceJob(_reaper.Job):
    """Closes a namespace."""

    __slots__ = ()

    def attempt(self) -> int:
        return int(lib.kvt_namespace_close(byref(self.handle)))


class StoreJob(_reaper.Job):
    """Closes a store, and its runtime if the store opened one."""

    __slots__ = ()

    def attempt(self) -> int:
        status = int(lib.kvt_store_close(byref(self.handle), _reaper.slice_deadline(), None))
        if status == _abi.KVT_E_IO:  # the store is closed nevertheless: this call frees it
            return int(lib.kvt_store_close(byref(self.handle), 0, None))
        return status


def _bytes_of(c: Any, name: str, value: Optional[bytes], kept: List[Any]) -> None:
    if value is None:
        return
    text = ctypes.create_string_buffer(bytes(value))  # the NUL gives empty bytes an address
    kept.append(text)
    setattr(c, name, ctypes.addressof(text))
    setattr(c, f"{name}_bytes", len(value))


def _identity(given: Identity, kept: List[Any]) -> Any:
    c = _abi.kvt_identity_t()
    for name in ("model", "weights", "lora", "media", "salt", "recipe"):
        _bytes_of(c, name, getattr(given, name), kept)
    if given.shard is not None:
        c.shard_index, c.shard_count = u32(given.shard[0]), u32(given.shard[1])
        if c.shard_count == 0:
            raise _invalid(f"shard is {given.shard}: give (index, count) with a count of at least "
                           "1")
    rows = (_abi.kvt_identity_extra_t * len(given.extra))()
    for row, (tag, value) in zip(rows, given.extra.items()):
        row.tag = u32(tag)
        _bytes_of(row, "value", value, kept)
    kept.append(rows)
    c.extra, c.extra_count = rows, len(rows)
    c.extra_stride_bytes = ctypes.sizeof(_abi.kvt_identity_extra_t)
    c.remote_tenant = u64(given.remote_tenant)
    return c


def _dtype(name: str) -> int:
    if name not in DTYPES:
        raise _invalid(f"dtype {name!r} is unknown: it must be one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _layout(given: Layout, kept: List[Any]) -> Any:
    c = _abi.kvt_layout_t(dtype=_dtype(given.dtype), k_bytes=u64(given.k_bytes),
                          v_bytes=u64(given.v_bytes))
    for name in ("chunk_tokens", "layers", "kv_heads", "window_tokens", "full_every",
                 "full_first"):
        setattr(c, name, u32(getattr(given, name)))
    if not given.groups and given.layers:
        return c
    rows = (_abi.kvt_group_t * len(given.groups))()
    for row, group in zip(rows, given.groups):
        layers = (ctypes.c_uint16 * len(group.layers))(*(u64(n, 16) for n in group.layers))
        kept.append(layers)
        row.rule, row.dtype, row.kv_heads = (
            u32(group.rule), _dtype(group.dtype), u32(group.kv_heads))
        row.window_tokens, row.state_bytes = u32(group.window_tokens), u64(group.state_bytes)
        row.k_bytes, row.v_bytes = u64(group.k_bytes), u64(group.v_bytes)
        row.layers, row.layer_count = layers, len(layers)
    kept.append(rows)
    c.groups, c.group_count = rows, len(rows)
    c.stride_bytes = ctypes.sizeof(_abi.kvt_group_t)
    return c


def _views(views: Sequence[Optional[View]], writable: bool, kept: List[Any]) -> Any:
    rows = (_abi.kvt_view_t * len(views))()
    for row, view in zip(rows, views):
        if view is not None:
            fill(row, view, writable, kept)
    kept.append(rows)
    return rows


class Session(Resource):
    """A sequence of tokens with KV, opened by `Namespace.session`. Any thread may use it.

    >>> import kvtier
    >>> from kvtier import Group, Identity, View
    >>> plane = bytearray(64 * 32)                                  # K of 64 tokens, one layer
    >>> with kvtier.Runtime() as runtime, kvtier.Store(runtime, "store(host=16MiB)") as store:
    ...     namespace = store.namespace(Identity(model=b"m"), chunk_tokens=16,
    ...                                 groups=[Group(layers=[0], k_bytes=32)])
    ...     first, second = namespace.session("first"), namespace.session("second")
    ...     first.append(range(64))
    ...     stored = first.put([View(plane, run_bytes=32)]).result().value
    ...     second.append([*range(32), 7, 7])                       # shares a prefix of 32 tokens
    ...     steps = [(step.kind == kvtier.PLAN_RECOMPUTE, step.tokens)
    ...              for step in second.plan().steps]
    ...     loaded = second.get([View(plane, run_bytes=32)], tokens=32).result().value
    >>> stored, steps, loaded
    (64, [(False, 32), (True, 2)], 32)
    """

    _type_name = "session"

    def __init__(self, namespace: "Namespace", handle: _abi.kvt_session_p) -> None:
        self._namespace = namespace
        self._own(SessionJob(handle, _reaper.RANK_SESSION))

    def append(self, tokens: Column, media: Media = ()) -> None:
        """Appends tokens, a list or an array of 32-bit unsigned integers, and the media that
        start in them, by index."""
        err = new_error()
        with Columns() as columns:
            pointer, count = columns.take("tokens", "u32", tokens)
            c, _kept = sequence(pointer, count, media)
            check_err(lib.kvt_session_append_media(self._raw, byref(c), byref(err)), err)

    def truncate(self, tokens: int) -> None:
        """Truncates the session to `tokens` tokens."""
        err = new_error()
        check_err(lib.kvt_session_truncate(self._raw, u64(tokens), byref(err)), err)

    def fork(self, name: str = "", *, tenant: int = 0, priority: Optional[int] = None,
             max_tokens: int = 0, ttl: Optional[float] = None) -> "Session":
        """Returns another session that continues from here. For `ttl`, see `Namespace.session`."""
        opts, _text = _session_opts(name, tenant, priority, max_tokens, ttl)
        handle, err = _abi.kvt_session_p(), new_error()
        check_err(lib.kvt_session_fork(self._raw, byref(opts), byref(handle), byref(err)), err)
        return Session(self._namespace, handle)

    def pin(self, first_token: int = 0, tokens: int = 0, *, priority: int = 0,
            timeout: Optional[float] = None) -> None:
        """Pins chunks for `timeout` seconds, None for ever; 0 tokens: to the end. Raises
        `BudgetError` if pins would exceed their share of the last tier (`pins` of the spec)."""
        until = deadline_after(time.monotonic_ns(), timeout)
        err = new_error()
        check_err(lib.kvt_session_pin(self._raw, u64(first_token), u64(tokens), u32(priority),
                                      until, byref(err)), err)

    def unpin(self, first_token: int = 0, tokens: int = 0) -> None:
        """Removes all pins of chunks, also those of other sessions; 0 tokens: to the end."""
        err = new_error()
        check_err(lib.kvt_session_unpin(self._raw, u64(first_token), u64(tokens), byref(err)),
                  err)

    def drop(self, first_token: int = 0, tokens: int = 0) -> ClearReport:
        """Removes chunks that have no other references; 0 tokens: to the end."""
        report, err = _abi.kvt_clear_report_t(), new_error()
        check_err(lib.kvt_session_drop(self._raw, u64(first_token), u64(tokens), byref(report),
                                       byref(err)), err)
        return ClearReport(*values(report, ClearReport))

    def demote(self, first_token: int = 0, tokens: int = 0) -> DemoteReport:
        """Demotes chunks to disk; their host memory is freed once they are on disk. 0 tokens: to
        the end."""
        report, err = _abi.kvt_demote_report_t(), new_error()
        check_err(lib.kvt_session_demote(self._raw, u64(first_token), u64(tokens), byref(report),
                                         byref(err)), err)
        return DemoteReport(*values(report, DemoteReport))

    def plan(self, *, overlap: bool = True, wait: bool = True, priority: int = PRIORITY_DEMAND,
             cost: Optional[Tuple[float, float]] = None) -> Plan:
        """Returns the cheapest steps to make all tokens available, by loading or recomputing.
        `cost` is alpha_ns and beta_ns as in `PrefillCost`, by default the namespace's cost."""
        c, raw, plan = terms(overlap, wait, u32(priority), cost), self._raw, _abi.kvt_plan_t()
        rows = all_rows(_abi.kvt_plan_step_t, lambda rows, room, stride, count, err: (
            lib.kvt_session_plan(raw, byref(c), rows, room, stride, count, byref(plan), err)))
        return Plan([PlanStep(*values(row, PlanStep)) for row in rows], *values(plan, Plan))

    def hint(self, *, stop: int = STOP_UNKNOWN, next_use_ns: int = 0, confidence: float = 1.0,
             done: bool = False) -> None:
        """Gives the policies a hint about the session's future. `next_use_ns` is a time on the
        clock of `Runtime.now_ns`, not a duration."""
        flags = _abi.KVT_HINT_ZERO_CONFIDENCE | (_abi.KVT_HINT_DONE if done else 0)
        hint = _abi.kvt_policy_hint_t(flags=flags, stop=u32(stop), confidence=confidence,
                                      next_use_ns=u64(next_use_ns, 63))
        err = new_error()
        check_err(lib.kvt_session_hint(self._raw, byref(hint), byref(err)), err)

    def info(self) -> SessionInfo:
        """Returns the session's length and layout."""
        info = _abi.kvt_session_info_t()
        check(lib.kvt_session_info(self._raw, byref(info)))
        return SessionInfo(info.tokens, info.full_chunks, info.chunk_tokens, info.layers)

    def put(self, k: Sequence[View], v: Optional[Sequence[Optional[View]]] = None, *,
            first_token: int = 0, tokens: int = 0, first_layer: int = 0, level: int = LEVEL_RAM,
            queue: "Optional[Queue]" = None, tag: object = None,
            timeout: Optional[float] = None, priority: int = PRIORITY_DEMAND,
            ready: "Optional[ReadyEvent]" = None, after: After = None) -> Op:
        """Stores the layers that have views. The result's value is the number of tokens without a
        gap. The op holds the objects until it is closed. Copies wait for `after`, an event of the
        store's device, which the op holds too; do not close the event earlier."""
        transfer, kept = _transfer(k, v, first_token, tokens, first_layer, False, ready, after)
        transfer.level = u32(level)
        return self._submit(lib.kvt_session_put, transfer, kept, False, queue, tag, timeout,
                            priority)

    def get(self, k: Sequence[View], v: Optional[Sequence[Optional[View]]] = None, *,
            first_token: int = 0, tokens: int = 0, first_layer: int = 0, needed_only: bool = False,
            chunks: Optional[Column] = None, queue: "Optional[Queue]" = None,
            tag: object = None, timeout: Optional[float] = None,
            priority: int = PRIORITY_DEMAND, ready: "Optional[ReadyEvent]" = None,
            after: After = None) -> Op:
        """Loads KV into the views. The op ends with `NotFoundError` if some KV is missing; then
        `info().value` is the number of loaded tokens.

        With `needed_only` the call loads only what is needed to continue after the last token;
        windows and states need only their end. With `chunks`, ascending, it loads only these
        chunks. Chunk 0 contains `first_token`, and the tokens of the chunks are contiguous in the
        views. The op holds the objects until it is closed. A dropped op is cancelled."""
        transfer, kept = _transfer(k, v, first_token, tokens, first_layer, True, ready, after)
        with Columns() as columns:
            _restrict(transfer, needed_only, chunks, columns)
            return self._submit(lib.kvt_session_get, transfer, kept, True, queue, tag, timeout,
                                priority)

    def prefetch(self, *, first_token: int = 0, tokens: int = 0, first_layer: int = 0,
                 layers: int = 0, needed_only: bool = False, chunks: Optional[Column] = None,
                 queue: "Optional[Queue]" = None, tag: object = None,
                 timeout: Optional[float] = None, priority: int = PRIORITY_PREFETCH,
                 ready: "Optional[ReadyEvent]" = None) -> Op:
        """Brings KV to host memory before a get. A dropped op is cancelled."""
        transfer = _abi.kvt_transfer_t(first_token=u64(first_token), tokens=u64(tokens),
                                       first_layer=u32(first_layer), layers=u32(layers))
        _set_ready(transfer, ready)
        with Columns() as columns:
            _restrict(transfer, needed_only, chunks, columns)
            return self._submit(lib.kvt_session_prefetch, transfer, [], True, queue, tag, timeout,
                                priority)

    def remote_lookup(self, *, queue: "Optional[Queue]" = None, tag: object = None,
                      timeout: Optional[float] = None, priority: int = PRIORITY_DEMAND) -> Op:
        """Looks up how far the session is reusable with the store and the remote. The op's value
        is the number of tokens. A dropped op is cancelled."""
        def begin(opts: Any, handle: Any, err: Any) -> Any:
            return lib.kvt_session_remote_lookup(raw, opts, handle, err)

        runtime, raw = self._namespace._store._runtime, self._raw
        return _submit_op(runtime, begin, [], True, queue, tag, timeout, priority)

    def get_each(self, k: Sequence[View], v: Optional[Sequence[Optional[View]]] = None, *,
                 first_token: int = 0, tokens: int = 0, first_layer: int = 0,
                 needed_only: bool = False, chunks: Optional[Column] = None,
                 timeout: Optional[float] = None, priority: int = PRIORITY_DEMAND,
                 ready: "Optional[ReadyEvent]" = None, after: After = None) -> List[Op]:
        """Like `get`, with an op per layer: the engine can use the first layers during the load
        of the others."""
        transfer, kept = _transfer(k, v, first_token, tokens, first_layer, True, ready, after)
        with Columns() as columns:
            _restrict(transfer, needed_only, chunks, columns)
            return self._submit_each(lib.kvt_session_get, transfer, kept, True, timeout, priority)

    def put_each(self, k: Sequence[View], v: Optional[Sequence[Optional[View]]] = None, *,
                 first_token: int = 0, tokens: int = 0, first_layer: int = 0,
                 level: int = LEVEL_RAM, timeout: Optional[float] = None,
                 priority: int = PRIORITY_DEMAND,
                 ready: "Optional[ReadyEvent]" = None, after: After = None) -> List[Op]:
        """Like `put`, with an op per layer."""
        transfer, kept = _transfer(k, v, first_token, tokens, first_layer, False, ready, after)
        transfer.level = u32(level)
        return self._submit_each(lib.kvt_session_put, transfer, kept, False, timeout, priority)

    def _submit(self, call: Any, transfer: Any, kept: List[Any], cancel: bool,
                queue: "Optional[Queue]", tag: object, timeout: Optional[float],
                priority: int) -> Op:
        def begin(opts: Any, handle: Any, err: Any) -> Any:
            return call(raw, byref(transfer), opts, handle, err)

        runtime, raw = self._namespace._store._runtime, self._raw
        return _submit_op(runtime, begin, kept, cancel, queue, tag, timeout, priority)

    def _submit_each(self, call: Any, transfer: Any, kept: List[Any], cancel: bool,
                     timeout: Optional[float], priority: int) -> List[Op]:
        runtime, raw = self._namespace._store._runtime, self._raw
        transfer.flags |= _abi.KVT_TRANSFER_EACH_LAYER
        opts, _ = submit_opts(runtime, None, None, timeout, 0, priority)
        ops = [Op(runtime, None, layer, cancel) for layer in range(transfer.layers)]
        for op in ops:
            op._keep(kept)
        handles, err = (_abi.kvt_op_p * transfer.layers)(), new_error()
        status = call(raw, byref(transfer), byref(opts), handles, byref(err))
        if status != _abi.KVT_OK:
            for op in ops:
                op._submit_failed()
        check_err(status, err)
        for op, handle in zip(ops, handles):
            op._bind(handle.value)
        return ops

    def close(self) -> None:
        """Closes the session. Its chunks become evictable, and its ops continue."""
        if self.closed:
            return
        self._raw  # noqa: B018: not in a forked child
        check(lib.kvt_session_close(byref(self._job.handle)))
        self._released()


def _transfer(k: Sequence[View], v: Optional[Sequence[Optional[View]]], first_token: int,
              tokens: int, first_layer: int, writable: bool,
              ready: "Optional[ReadyEvent]", after: After) -> Tuple[Any, List[Any]]:
    kept: List[Any] = []
    if len(k) == 0 or (v is not None and len(v) != len(k)):
        raise _invalid(f"{len(k)} views of K and {len(v or [])} of V: give at least one view of "
                       "K, and one of V per view of K, or no V")
    transfer = _abi.kvt_transfer_t(first_token=u64(first_token), tokens=u64(tokens),
                                   first_layer=u32(first_layer), layers=len(k))
    transfer.k = _views(k, writable, kept)
    if v is not None:
        transfer.v = _views(v, writable, kept)
    transfer.stride_bytes = ctypes.sizeof(_abi.kvt_view_t)
    _set_ready(transfer, ready)
    transfer.after = number_of(after, kept)
    return transfer, kept


def _submit_op(runtime: Any, call: Any, kept: List[Any], cancel: bool, queue: "Optional[Queue]",
               tag: object, timeout: Optional[float], priority: int) -> Op:
    """Submits one op: `call` gets the options, and the addresses for the handle and the error."""
    op = Op(runtime, queue, tag, cancel)
    op._keep(kept)
    opts, _ = submit_opts(runtime, op, queue, timeout, 0, priority)
    handle, err = _abi.kvt_op_p(), new_error()
    status = call(byref(opts), byref(handle), byref(err))
    if status != _abi.KVT_OK:
        op._submit_failed()
    check_err(status, err)
    op._bind(handle.value)
    return op


def _restrict(transfer: Any, needed_only: bool, chunks: Optional[Column], columns: Columns) -> None:
    """Restricts a transfer to parts of its tokens. `columns` keeps the list of chunks during the
    call."""
    transfer.flags = _abi.KVT_TRANSFER_NEEDED_ONLY if needed_only else 0
    transfer.chunks, transfer.chunk_count = columns.take("chunks", "u32", chunks)
    if chunks is not None and transfer.chunk_count == 0:  # C takes a null address for all chunks
        raise _invalid("chunks is empty: name at least one chunk, or pass None for all")


def _events_of(data: bytes) -> List[StoreEvent]:
    rows = (_abi.kvt_store_event_t * (len(data) // _EVENT_BYTES)).from_buffer_copy(data)
    return [StoreEvent(*values(row, StoreEvent)) for row in rows]


def _set_ready(transfer: Any, ready: "Optional[ReadyEvent]") -> None:
    if ready is not None:
        transfer.ready = ready._raw.value


def _session_opts(name: str, tenant: int, priority: Optional[int], max_tokens: int,
                  ttl: Optional[float]) -> Tuple[Any, bytes]:
    text = name.encode()
    ttl_ns = 0 if ttl is None else max(1, u64(int(ttl * 1e9)))
    opts = _abi.kvt_session_opts_t(tenant=u32(tenant), max_tokens=u32(max_tokens), ttl_ns=ttl_ns)
    opts.name, opts.name_bytes = text_pointer(text, empty_is_none=True), len(text)
    if priority is not None:
        opts.flags, opts.priority = _abi.KVT_SESSION_PRIORITY, u32(priority)
    return opts, text


class Namespace(Resource):
    """The unit of sharing, opened by `Store.namespace`. It never contains KV of another model,
    adapter or salt. Any thread may use it.

    >>> import kvtier
    >>> from kvtier import Identity, Layout
    >>> layout = Layout.gqa(layers=2, kv_heads=2, head_dim=64, dtype="f16", chunk_tokens=16)
    >>> with kvtier.open("store(host=16MiB)") as store:
    ...     one = store.namespace(Identity(model=b"m"), layout)
    ...     same = store.namespace(Identity(model=b"m"), layout)
    ...     salted = store.namespace(Identity(model=b"m", salt=b"a tenant's"), layout)
    ...     one.key == same.key, one.key == salted.key
    (True, False)
    """

    _type_name = "namespace"

    def __init__(self, store: "Store", identity: Identity, layout: Layout,
                 holes: bool = False) -> None:
        self._store, self._chunk_tokens = store, layout.chunk_tokens
        kept: List[Any] = []
        fields, cells = _identity(identity, kept), _layout(layout, kept)
        flags = _abi.KVT_NAMESPACE_HOLES if holes else 0
        handle, err = _abi.kvt_namespace_p(), new_error()
        check_err(lib.kvt_namespace_open(store._raw, byref(fields), byref(cells), flags,
                                         byref(handle), byref(err)), err)
        self._own(NamespaceJob(handle, _reaper.RANK_NAMESPACE))

    @property
    def key(self) -> bytes:
        """The hash of the namespace's identity and layout."""
        key = (ctypes.c_uint8 * _abi.KVT_KEY_BYTES)()
        check(lib.kvt_namespace_key(self._raw, key))
        return bytes(key)

    def session(self, name: str = "", *, tenant: int = 0, priority: Optional[int] = None,
                max_tokens: int = 0, ttl: Optional[float] = None) -> Session:
        """Opens a session without tokens. Chunks that it stores first are removed from all tiers
        `ttl` seconds after the last put or get of them with a `ttl`; None: they have no end. A put
        without a `ttl` removes the end."""
        opts, _text = _session_opts(name, tenant, priority, max_tokens, ttl)
        handle, err = _abi.kvt_session_p(), new_error()
        check_err(lib.kvt_session_open(self._raw, byref(opts), byref(handle), byref(err)), err)
        return Session(self, handle)

    def lookup(self, tokens: Column, media: Media = ()) -> Lookup:
        """Returns how far a sequence is reusable. The call references nothing."""
        raw, found = self._raw, _abi.kvt_lookup_t()
        with Columns() as columns:
            pointer, length = columns.take("tokens", "u32", tokens)
            c, _kept = sequence(pointer, length, media)
            rows = all_rows(_abi.kvt_range_t, lambda rows, room, stride, count, err: (
                lib.kvt_namespace_lookup_media(raw, byref(c), rows, room, stride, count,
                                               byref(found), err)))
        return Lookup([Range(*values(row, Range)) for row in rows], *values(found, Lookup))

    def lookup_keys(self, keys: Any, tokens: int) -> Lookup:
        """Like `lookup`, by the keys of the full chunks: one `bytes` object with 32 bytes per
        key, or a list of keys."""
        raw, found = self._raw, _abi.kvt_lookup_t()
        data, length = key_bytes(keys)
        rows = all_rows(_abi.kvt_range_t, lambda rows, room, stride, count, err: (
            lib.kvt_namespace_lookup_keys(raw, data, length, u64(tokens), rows, room, stride,
                                          count, byref(found), err)))
        return Lookup([Range(*values(row, Range)) for row in rows], *values(found, Lookup))

    def chunk_keys(self, tokens: Column, media: Media = ()) -> List[bytes]:
        """Returns the keys of a sequence's full chunks in events, each 32 bytes.

        >>> import kvtier
        >>> from kvtier import Group, Identity
        >>> with kvtier.Runtime() as runtime, kvtier.Store(runtime, "store(host=1MiB)") as store:
        ...     groups = [Group(layers=[0], k_bytes=32)]
        ...     namespace = store.namespace(Identity(model=b"m"), chunk_tokens=16, groups=groups)
        ...     long, short = namespace.chunk_keys(range(40)), namespace.chunk_keys(range(33))
        ...     len(long), long == short, len(long[0])
        (2, True, 32)
        """
        raw, count, err = self._raw, ctypes.c_uint64(), new_error()
        each = _abi.KVT_KEY_BYTES
        with Columns() as columns:
            pointer, length = columns.take("tokens", "u32", tokens)
            c, _kept = sequence(pointer, length, media)
            most = length // self._chunk_tokens
            keys = (ctypes.c_uint8 * (most * each))()
            check_err(lib.kvt_namespace_chunk_keys(raw, byref(c), keys, most, byref(count),
                                                   byref(err)), err)
        data = bytes(keys)
        return [data[at * each:][:each] for at in range(count.value)]

    def exists(self, keys: Any) -> bytes:
        """Returns a byte per key: EXISTS_WHOLE, and `1 << TIER_*` for each tier that has all of
        the chunk."""
        data, length = key_bytes(keys)
        found = (ctypes.c_uint8 * length)()
        check(lib.kvt_namespace_exists(self._raw, data, length, found))
        return bytes(found)

    def observe_prefill(self, context_tokens: int, tokens: int, ns: int) -> None:
        """Reports that the engine took `ns` to compute `tokens` after a context. Plans use it."""
        err = new_error()
        check_err(lib.kvt_namespace_observe_prefill(self._raw, u64(context_tokens), u64(tokens),
                                                    u64(ns), byref(err)), err)

    def set_prefill_cost(self, cost: Optional[Tuple[float, float]]) -> None:
        """Fixes the cost of computation, alpha_ns and beta_ns; None: plans use observations."""
        err, c = new_error(), None
        if cost is not None:
            c = byref(_abi.kvt_prefill_cost_t(alpha_ns=float(cost[0]), beta_ns=float(cost[1])))
        check_err(lib.kvt_namespace_set_prefill_cost(self._raw, c, byref(err)), err)

    def prefill_cost(self) -> PrefillCost:
        """Returns the cost of computation that plans use now."""
        c = _abi.kvt_prefill_cost_t()
        check(lib.kvt_namespace_prefill_cost(self._raw, byref(c)))
        return PrefillCost(c.alpha_ns, c.beta_ns, c.observed, bool(c.fixed))

    def clear(self, timeout: Optional[float] = None) -> ClearReport:
        """Removes unreferenced chunks, and waits until they cannot come back after a restart."""
        end = deadline_after(time.monotonic_ns(), timeout)
        report, err = _abi.kvt_clear_report_t(), new_error()
        check_err(lib.kvt_namespace_clear(self._raw, end, byref(report), byref(err)), err)
        return ClearReport(*values(report, ClearReport))

    def close(self) -> None:
        """Closes the namespace. Its chunks and sessions stay."""
        if self.closed:
            return
        self._raw  # noqa: B018: not in a forked child
        check(lib.kvt_namespace_close(byref(self._job.handle)))
        self._released()


class _StoreRuntime(Runtime):
    """The runtime of a store that `kvtier.open` opened. Its job is the store's."""

    def __init__(self, job: StoreJob) -> None:
        self._handle = _abi.kvt_runtime_p()
        check(lib.kvt_store_runtime(job.handle, byref(self._handle)))
        self._own(job)

    @property
    def _raw(self) -> Any:
        if not self._job.handle.value or _reaper.in_child:
            super()._raw  # noqa: B018: raises the reason
        return self._handle

    def close(self, timeout: Optional[float] = None) -> CloseReport:
        """Raises `StateError` while the store is open."""
        if self.closed:
            return CloseReport(0, 0, 0, 0, 0)
        raise make(_abi.KVT_E_STATE, "this runtime belongs to a store: close the store")


class Store(Closing):
    """Keeps KV in tiers, as its spec defines:
    `store(host=8GiB, disk=disk(path="kv", bytes=200GiB))`. `kvtier.open` opens one with a runtime
    of its own.

    Arguments beside the spec override it. `write` is `behind`, `through`, `back` or `never`.
    `device` copies between the caller's memory and the store's. If it has memory of its own,
    views may refer to that memory. `secrets` are used for the server of the remote only:
    `{"password": b"..."}`.

    >>> import kvtier
    >>> from kvtier import Group, Identity, View
    >>> group = Group(layers=[0, 1], k_bytes=32, v_bytes=32)        # bytes of a token
    >>> with kvtier.Runtime() as runtime, kvtier.Store(runtime, "store(host=16MiB)") as store:
    ...     namespace = store.namespace(Identity(model=b"my model"), chunk_tokens=4,
    ...                                 groups=[group])
    ...     with namespace, namespace.session() as session:
    ...         session.append([11, 12, 13, 14, 15, 16, 17, 18])
    ...         k, v = [[bytearray(b"x" * 8 * 32) for layer in (0, 1)] for plane in "kv"]
    ...         views = [[View(layer, 32) for layer in plane] for plane in (k, v)]
    ...         stored = session.put(*views).result(timeout=5).value
    ...         reusable = namespace.lookup([11, 12, 13, 14, 99]).reusable_tokens
    >>> stored, reusable
    (8, 4)

    In an asyncio loop use `async with kvtier.Store(...)`, and
    `await session.get(..., queue=queue)`.
    """

    _type_name = "store"

    def __init__(self, runtime: Runtime, spec: str = "store", *,
                 budget: "Optional[Budget]" = None, host_bytes: int = 0, disk_bytes: int = 0,
                 disk_path: "Union[str, os.PathLike[str]]" = "", policy: str = "",
                 disk_policy: str = "", write: str = "",
                 device: "Optional[Device]" = None,
                 secrets: Optional[Dict[str, bytes]] = None) -> None:
        self._runtime, self._device = runtime, device
        if write not in ("", *WRITES):
            raise _invalid(f"write {write!r} is unknown: it must be one of {', '.join(WRITES)}")
        opts = _abi.kvt_store_opts_t(host_bytes=u64(host_bytes), disk_bytes=u64(disk_bytes),
                                     write=WRITES.get(write, 0))
        if device is not None:
            opts.device = device._raw.value
        texts = {"spec": spec, "disk_path": os.fspath(disk_path), "policy": policy,
                 "disk_policy": disk_policy}
        kept = {name: text.encode() for name, text in texts.items()}
        for name, text in kept.items():
            setattr(opts, name, text_pointer(text, empty_is_none=name != "spec"))
            setattr(opts, f"{name}_bytes", len(text))
        pairs = [(name.encode(), bytes(secret)) for name, secret in (secrets or {}).items()]
        rows = (_abi.kvt_secret_t * len(pairs))(*(
            _abi.kvt_secret_t(name=text_pointer(name), name_bytes=len(name),
                              secret=ctypes.cast(ctypes.c_char_p(secret), ctypes.c_void_p),
                              secret_bytes=len(secret)) for name, secret in pairs))
        if pairs:
            opts.secrets = ctypes.cast(rows, type(opts.secrets))
            opts.secret_count, opts.secret_stride_bytes = len(pairs), ctypes.sizeof(rows[0])
        budget_raw = None if budget is None else budget._raw
        handle, err = _abi.kvt_store_p(), new_error()
        check_err(lib.kvt_store_open(runtime._raw, budget_raw, byref(opts), byref(handle),
                                     byref(err)), err)
        self._own(StoreJob(handle, _reaper.RANK_STORE))

    @classmethod
    def _open(cls, spec: Optional[str]) -> "Store":
        _reaper.arm()
        text = None if spec is None else spec.encode()
        handle, err = _abi.kvt_store_p(), new_error()
        check_err(lib.kvt_open(text, len(text or b""), byref(handle), byref(err)), err)
        store = cls.__new__(cls)
        # At exit it is closed like a runtime, because its threads end only then.
        runtime = _StoreRuntime(StoreJob(handle, _reaper.RANK_RUNTIME))
        store._runtime, store._device = runtime, None
        # The finalizer is the runtime's: what was opened on the runtime keeps the store open, too.
        store._job, store._finalizer = runtime._job, runtime._finalizer
        return store

    @property
    def runtime(self) -> Runtime:
        """The runtime, for queues, buffers, budgets and devices. That of `kvtier.open` is closed
        with the store; its own `close` raises `StateError`."""
        return self._runtime

    def namespace(self, identity: Identity, layout: Optional[Layout] = None, *,
                  chunk_tokens: int = 0, groups: Sequence[Group] = (),
                  holes: bool = False) -> Namespace:
        """Opens a namespace, which may exist already. `chunk_tokens` and `groups` take the place
        of a layout: `Layout(chunk_tokens, groups)`."""
        if layout is None:
            layout = Layout(chunk_tokens, groups)
        elif chunk_tokens or groups:
            raise _invalid("namespace got a layout, and chunk_tokens or groups: give the layout "
                           "alone")
        return Namespace(self, identity, layout, holes)

    def stats(self) -> Dict[str, float]:
        """Returns counters and gauges, by the names of kvt_store_stats_t: integers, but for the
        errors of lossy codecs."""
        return self._counters(_abi.kvt_store_stats_t(), lib.kvt_store_stats)

    def remote_stats(self) -> Dict[str, int]:
        """Returns counters of the remote, by the names of kvt_remote_stats_t."""
        return self._counters(_abi.kvt_remote_stats_t(), lib.kvt_store_remote_stats)

    def _counters(self, stats: Any, call: Any) -> Dict[str, Any]:
        check(call(self._raw, byref(stats)))
        names = [name for name, *_ in stats._fields_ if name != "struct_size"]
        return {name: getattr(stats, name) for name in names}

    def set_policy(self, tier: int, spec: str) -> None:
        """Switches TIER_HOST or TIER_DISK to another policy."""
        text, err = spec.encode(), new_error()
        check_err(lib.kvt_store_set_policy(self._raw, u32(tier), text, len(text), byref(err)),
                  err)

    def set_limit(self, tier: int, limit: int) -> None:
        """Changes the limit of a tier in bytes; the excess is evicted over time."""
        err = new_error()
        check_err(lib.kvt_store_set_limit(self._raw, u32(tier), u64(limit), byref(err)), err)

    def set_quota(self, tenant: int, tier: int, limit: int) -> None:
        """Sets the most bytes that a tenant's chunks may have in a tier (`TIER_HOST` or
        `TIER_DISK`); 0 removes the quota, so that `quota` of the spec applies again. A put that
        would exceed the quota of host memory evicts the tenant's least recently used chunks. If
        they do not suffice, it raises `BudgetError`. A disk quota needs a disk
        (`UnsupportedError`)."""
        err = new_error()
        check_err(lib.kvt_store_set_quota(self._raw, u32(tenant), u32(tier), u64(limit),
                                          byref(err)), err)

    def evictions(self, tier: int, most: int = 256) -> List[LogEntry]:
        """Returns the last evictions of a tier, the oldest first."""
        entries, n = (_abi.kvt_policy_log_entry_t * most)(), ctypes.c_uint64()
        stride = ctypes.sizeof(_abi.kvt_policy_log_entry_t)
        check(lib.kvt_store_evictions(self._raw, u32(tier), entries, most, stride, byref(n)))
        return log_entries(entries[: n.value])

    def tenants(self) -> List[Tenant]:
        """Returns the traffic per tenant; the last row may be the sum of the rest."""
        raw = self._raw
        rows = all_rows(_abi.kvt_tenant_t, lambda rows, room, stride, count, err: (
            lib.kvt_store_tenants(raw, rows, room, stride, count)))
        return [Tenant(row.tenant, bool(row.is_rest), *values(row, Tenant)[2:]) for row in rows]

    def latencies(self) -> Dict[str, Latency]:
        """Returns latencies by kind: "get_host", "get_disk", "put_ram", ... (KVT_LATENCY_*)."""
        raw = self._raw
        rows = all_rows(_abi.kvt_latency_t, lambda rows, room, stride, count, err: (
            lib.kvt_store_latencies(raw, rows, room, stride, count)))
        names = {value: name[len("KVT_LATENCY_"):].lower()
                 for name, value in vars(_abi).items() if name.startswith("KVT_LATENCY_")}
        return {names.get(row.kind, str(row.kind)): Latency(*values(row, Latency))
                for row in rows}

    def events(self, cursor: int = 0, most: int = 256) -> StoreEvents:
        """Returns changes from a cursor on; 0 is the first event, 2**64 - 1 the next one."""
        data, missed, at = self._events_raw(cursor, most)
        return StoreEvents(_events_of(data), missed, at)

    def residents(self) -> Iterator[StoreEvent]:
        """Iterates over what is resident: a `STORE_EVENT_STORED` for each chunk and each tier that
        has all of it, in any order. First read the cursor of `events`: the events from there on
        update these entries.

        >>> import kvtier
        >>> with kvtier.Runtime() as runtime, kvtier.Store(runtime, "store(host=1MiB)") as store:
        ...     list(store.residents())
        []
        """
        self._raw  # noqa: B018: raises now if the store is closed
        return (event for data in self._residents_raw(1024) for event in _events_of(data))

    def _events_raw(self, cursor: int, most: int) -> Tuple[bytes, int, int]:
        """`events` as bytes of kvt_store_event_t, the number of missed ones, and the cursor."""
        rows, missed, at = (_abi.kvt_store_event_t * most)(), ctypes.c_uint64(), ctypes.c_uint64(
            u64(cursor))
        count = ctypes.c_uint64()
        check(lib.kvt_store_events(self._raw, byref(at), rows, most, _EVENT_BYTES, byref(count),
                                   byref(missed)))
        return ctypes.string_at(rows, count.value * _EVENT_BYTES), missed.value, at.value

    def _residents_raw(self, most: int) -> Iterator[bytes]:
        """`residents` as bytes of kvt_store_event_t, `most` entries at a time."""
        rows, at, count = (_abi.kvt_store_event_t * most)(), ctypes.c_uint64(), ctypes.c_uint64()
        while at.value != 2**64 - 1:
            check(lib.kvt_store_residents(self._raw, byref(at), rows, most, _EVENT_BYTES,
                                          byref(count)))
            yield ctypes.string_at(rows, count.value * _EVENT_BYTES)

    def watch(self, cursor: int = 2**64 - 1, *, queue: "Optional[Queue]" = None,
              tag: object = None, timeout: Optional[float] = None) -> Op:
        """Returns an op that completes when an event with this number, or a later one, exists; by
        default the next event. The op's value is the number of events from that one on. A dropped
        op is cancelled."""
        def begin(opts: Any, handle: Any, err: Any) -> Any:
            return lib.kvt_store_watch(raw, u64(cursor), opts, handle, err)

        raw = self._raw
        return _submit_op(self._runtime, begin, [], True, queue, tag, timeout, PRIORITY_DEMAND)

    def metrics(self) -> str:
        """Returns all metrics in the text format of Prometheus."""
        needed = ctypes.c_uint64()
        check(lib.kvt_store_metrics(self._raw, None, 0, byref(needed)))
        while True:
            room = ctypes.create_string_buffer(needed.value + 256)  # the text may grow
            status = lib.kvt_store_metrics(self._raw, room, len(room), byref(needed))
            if status != _abi.KVT_E_TOO_SMALL:
                check(status)
                return room.raw[: needed.value].decode()

    def close(self, timeout: Optional[float] = None) -> None:
        """Cancels open ops, waits for them, and unlocks the directory. Raises `BusyError` after
        `timeout` seconds; then the call can be repeated. Objects that were opened on the store
        raise `ClosedError` afterwards."""
        if self.closed:
            return
        self._raw  # noqa: B018: not in a forked child
        end = deadline_after(time.monotonic_ns(), timeout)
        err = new_error()
        check_err(lib.kvt_store_close(byref(self._job.handle), end, byref(err)), err)
        self._released()


def open(spec: Optional[str] = None) -> Store:
    """Opens a store with a runtime and a budget of its own; closing the store closes them, too.

    `spec` is "store(...)", or "kvtier(workers=4, budget=budget(host=8GiB), store=store(...))" with
    parameters of the runtime and the budget. None is "store(host=1GiB)". Stores with a device, or
    with secrets for their remote, need `Runtime` and `Store`.

    >>> import kvtier
    >>> from kvtier import Identity, Layout, View
    >>> layout = Layout.gqa(layers=2, kv_heads=1, head_dim=8, dtype="f16", chunk_tokens=4)
    >>> k, v = [[bytearray(b"x" * 8 * 16) for layer in (0, 1)] for plane in "kv"]
    >>> views = [[View(layer, 16) for layer in plane] for plane in (k, v)]
    >>> with kvtier.open("store(host=16MiB)") as store:
    ...     with store.namespace(Identity(model=b"my model"), layout).session() as session:
    ...         session.append(range(8))
    ...         session.put(*views).result().value, session.get(*views).result().value
    (8, 8)

    In an asyncio loop: `async with kvtier.open() as store, store.runtime.queue() as queue`.
    """
    return Store._open(spec)
