"""Layer-wise offload: a session's KV passes through a ring of buffers, by sparse policies."""

from __future__ import annotations

import ctypes
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional, Tuple, Union

from . import _abi, _reaper
from ._columns import Column, Columns
from ._errors import make
from ._lib import check, check_err, lib, text_pointer, u32
from ._op import Op
from ._pybuffer import Export, described
from ._resource import Resource, byref, new_error
from ._runtime import PRIORITY_DEMAND, submit_opts
from ._store import DTYPES, LEVEL_RAM
from ._view import MemoryRange, View, fill

if TYPE_CHECKING:
    from ._device import After, DeviceMemory
    from ._queue import Queue
    from ._store import Session

#: Format codes of memoryviews, and their bytes. Half-precision types are exposed as bits: use
#: numpy's `.view(np.float16)`, or torch's `.view(torch.bfloat16)`.
_CODES: Dict[str, Tuple[str, int]] = {
    "f32": ("f", 4), "f16": ("H", 2), "bf16": ("H", 2), "int8": ("b", 1), "fp8_e4m3": ("B", 1),
    "fp8_e5m2": ("B", 1), "bytes": ("B", 1),
}
#: The dtype of rows, by the type of their object.
_ROWS: Dict[str, int] = {
    "f32": _abi.KVT_DTYPE_F32, "f16": _abi.KVT_DTYPE_F16, "bf16": _abi.KVT_DTYPE_BF16,
    "u16": _abi.KVT_DTYPE_BF16,
}


def _invalid(text: str) -> Exception:
    return make(_abi.KVT_E_INVALID, text)


@dataclass(frozen=True)
class Attention:
    """The shape of a model's attention. A latent has one key head, whose first `value_dim` numbers
    are the values."""

    layers: int
    query_heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    block_tokens: int
    max_tokens: int
    latent: bool = False
    #: 0 = 1 / sqrt(key_dim).
    scale: float = 0.0


class SparseContext(NamedTuple):
    """The position of queries in a sequence. `tokens` includes the tokens of the queries."""

    tokens: int
    first_query: int = 0
    is_prefill: bool = False
    part: int = 0
    parts: int = 1


class OffloadTokens(NamedTuple):
    """The number of a layer's tokens in the store, and in the tail after them."""

    stored: int
    tail: int


class DevicePlane(MemoryRange):
    """K or V of a buffer in device memory: its address, for kernels and `View`."""

    on_device = True

    def __init__(self, address: int, shape: Tuple[int, int, int], nbytes: int,
                 owner: object) -> None:
        self.address, self.shape, self.nbytes = address, shape, nbytes
        self._owner = owner  # keeps the memory while this plane exists

    def _check(self, writable: bool) -> None:
        if writable:
            raise _invalid("an offload's buffer is read-only: copy the plane to other memory to "
                           "change it")


class LayerKV(NamedTuple):
    """K and V in a buffer of the ring, [tokens, heads, dim], read-only. They are the memory itself
    and valid until the buffer is given back. `v` is None for a latent."""

    k: Union[memoryview, DevicePlane]
    v: Optional[Union[memoryview, DevicePlane]]
    tokens: int
    tail_tokens: int
    blocks: int
    buffer: int


class OffloadJob(_reaper.Job):
    """Closes an offload, and then drops the caller's device memory that it used."""

    __slots__ = ("memory",)

    def __init__(self, handle: Any, rank: int) -> None:
        super().__init__(handle, rank)
        self.memory: "Optional[DeviceMemory]" = None

    def attempt(self) -> int:
        return int(lib.kvt_offload_close(byref(self.handle)))

    def done(self) -> None:
        self.memory = None
        super().done()


class _Memory:
    """The owner of the ring's memory. The offload and its views hold it; the last one frees it."""


def attention_for_c(a: Attention) -> Any:
    """Converts a model's attention for C."""
    return _abi.kvt_attention_t(
        layers=u32(a.layers), query_heads=u32(a.query_heads), key_heads=u32(a.key_heads),
        key_dim=u32(a.key_dim), value_dim=u32(a.value_dim),
        kind=_abi.KVT_ATTENTION_LATENT if a.latent else _abi.KVT_ATTENTION_SPLIT,
        block_tokens=u32(a.block_tokens), max_tokens=u32(a.max_tokens), scale=a.scale)


def context_for_c(at: SparseContext) -> Any:
    """Converts the position of queries for C."""
    return _abi.kvt_sparse_context_t(
        is_prefill=1 if at.is_prefill else 0, part=u32(at.part), parts=u32(at.parts),
        first_query=u32(at.first_query), tokens=u32(at.tokens))


def _rows(name: str, source: Any) -> Tuple[Any, Export]:
    """Converts an object with contiguous numbers [tokens, heads, dim] for C."""
    seen = described(source)
    shape = seen.shape
    if len(shape) != 3 or not seen.contiguous or seen.dtype not in _ROWS or 0 in shape:
        gaps = "" if seen.contiguous else ", with gaps"
        raise _invalid(f"{name} have shape {list(shape)} and type {seen.dtype}{gaps}: they must "
                       "be contiguous [tokens, heads, dim], not empty, of f32, f16, bf16, or "
                       "bf16's bits (uint16)")
    export = Export(source, writable=False)
    tokens, heads, dim = shape
    rows = _abi.kvt_rows_t(dtype=_ROWS[seen.dtype])
    rows.view.address = export.address
    rows.view.tokens, rows.view.heads = u32(tokens), u32(heads)
    rows.view.run_bytes = dim * seen.itemsize
    return rows, export


def _opts(session: "Session", attention: Attention, dtype: str, buffers: int,
          buffer_tokens: int) -> Any:
    if dtype not in _CODES:
        raise _invalid(f"dtype {dtype!r} is unknown: it must be one of {', '.join(_CODES)}")
    shape = attention_for_c(attention)
    opts = _abi.kvt_offload_opts_t(
        dtype=DTYPES[dtype], buffers=u32(buffers), buffer_tokens=u32(buffer_tokens))
    opts.session, opts.attention = session._raw.value, ctypes.pointer(shape)
    return opts


class Offload(Resource):
    """Loads and stores a session's KV layer by layer, through a ring of buffers.

    Sparse policies choose the blocks to load from the store. Any thread may use an offload;
    calls are serialized. After `close` the last view frees the memory.

    >>> import kvtier
    >>> from kvtier import SparseContext, Group, Identity, View
    >>> shape = kvtier.Attention(layers=1, query_heads=1, key_heads=1, key_dim=4, value_dim=4,
    ...                          block_tokens=4, max_tokens=64)
    >>> with kvtier.Runtime() as runtime, kvtier.Store(runtime, "store(host=16MiB)") as store:
    ...     with store.namespace(Identity(), chunk_tokens=4,
    ...                          groups=[Group([0], 16, 16, "f32", 1)]) as namespace:
    ...         with namespace.session() as session:
    ...             session.append(range(6))
    ...             with kvtier.Offload(session, shape, "f32", buffer_tokens=16) as offload:
    ...                 k, v = (View(bytearray(6 * 16), 16) for plane in "kv")
    ...                 op = offload.put(0, 0, 6, k, v)
    ...                 done = op and op.result(timeout=5)
    ...                 offload.begin(SparseContext(7, 6))
    ...                 kv = offload.take(0)
    ...                 print(kv.tokens, kv.tail_tokens, kv.k.shape)
    ...                 offload.give_back(0)
    6 2 (6, 1, 4)
    """

    _type_name = "offload"

    def __init__(self, session: "Session", attention: Attention, dtype: str = "f16", *,
                 buffers: int = 2, buffer_tokens: int, level: int = LEVEL_RAM,
                 prefill: Optional[Union[str, Any]] = None,
                 decode: Optional[Union[str, Any]] = None, audit_every: int = 0,
                 on_device: bool = False, memory: "Optional[DeviceMemory]" = None) -> None:
        """`prefill` and `decode` are specs, or custom policies: see `help(kvtier.Sparse)`. With
        `on_device` the ring and the tails are in memory of the store's device. The device
        allocates it, or the caller provides `memory` of at least `memory_bytes` bytes, which
        belongs to the offload until it is closed."""
        opts = _opts(session, attention, dtype, buffers, buffer_tokens)
        opts.level, opts.audit_every = u32(level), u32(audit_every)
        opts.flags = _abi.KVT_OFFLOAD_ON_DEVICE if on_device else 0
        if memory is not None:
            memory._check(True)
            opts.memory, opts.memory_bytes = memory.address, memory.nbytes
        from . import _callbacks, _sparse  # here, because _sparse imports this module
        held: List[Any] = []
        numbers: List[int] = []
        for when, policy in (("prefill", prefill), ("decode", decode)):
            if isinstance(policy, str):
                text = policy.encode()
                held.append(text)
                setattr(opts, when, text_pointer(text))
                setattr(opts, when + "_bytes", len(text))
            elif policy is not None:
                custom, number = _sparse.custom_for_c(policy, attention)
                held.append(custom)
                numbers.append(number)
                setattr(opts, when + "_custom", ctypes.pointer(custom))
        handle, err = _abi.kvt_offload_p(), new_error()
        status = lib.kvt_offload_open(byref(opts), byref(handle), byref(err))
        if status != _abi.KVT_OK:
            for number in numbers:
                _callbacks.forget(number)
        check_err(status, err)
        self._begin(session, attention, dtype, handle)
        self._job.memory = memory

    @staticmethod
    def memory_bytes(session: "Session", attention: Attention, dtype: str = "f16", *,
                     buffers: int = 2, buffer_tokens: int) -> int:
        """Returns the bytes of the ring and the tails of an offload with these options."""
        opts = _opts(session, attention, dtype, buffers, buffer_tokens)
        nbytes, err = ctypes.c_uint64(), new_error()
        check_err(lib.kvt_offload_memory_bytes(byref(opts), byref(nbytes), byref(err)), err)
        return nbytes.value

    def set_ready_event(self, event: "After") -> None:
        """Makes later copies wait for an event of the store's device; None: for no event. The
        library uses the event until another one is set or the offload is closed, and all earlier
        copies have completed."""
        from ._device import number_of  # here, to avoid an import cycle
        err = new_error()
        check_err(lib.kvt_offload_set_ready_event(self._raw, number_of(event), byref(err)), err)

    def _begin(self, session: "Session", attention: Attention, dtype: str, handle: Any) -> None:
        self._session, self._attention, self._dtype = session, attention, dtype
        self._lock = threading.Lock()
        self._views: "List[weakref.ref[Any]]" = []
        self._memory: Optional[_Memory] = _Memory()
        self._job = OffloadJob(handle, _reaper.RANK_SESSION)
        self._finalizer = weakref.finalize(self._memory, _reaper.close_later, self._job)
        self._finalizer.atexit = False

    @property
    def closed(self) -> bool:
        """Whether the offload was closed."""
        return self._memory is None

    @property
    def _raw(self) -> Any:
        if self._memory is None:
            raise self._closed_error()
        return super()._raw

    def tokens(self, layer: int) -> OffloadTokens:
        """Returns how many tokens of a layer the offload has."""
        stored, tail = ctypes.c_uint32(), ctypes.c_uint32()
        check(lib.kvt_offload_tokens(self._raw, u32(layer), byref(stored), byref(tail)))
        return OffloadTokens(stored.value, tail.value)

    def stats(self) -> Dict[str, int]:
        """Returns counters, including wait times."""
        stats = _abi.kvt_offload_stats_t()
        check(lib.kvt_offload_stats(self._raw, byref(stats)))
        names = [name for name, *_ in stats._fields_ if name != "struct_size"]
        return {name: int(getattr(stats, name)) for name in names}

    def truncate(self, tokens: int) -> None:
        """Removes the tokens from this position on. Call it before `Session.truncate`."""
        err = new_error()
        check_err(lib.kvt_offload_truncate(self._raw, u32(tokens), byref(err)), err)

    def resume(self, tokens: int) -> None:
        """Resumes after `tokens` tokens, whole blocks, that are in the session and the store."""
        err = new_error()
        check_err(lib.kvt_offload_resume(self._raw, u32(tokens), byref(err)), err)

    def fork(self, session: "Session") -> "Offload":
        """Returns an offload for a session that was forked from this one's (`Session.fork`). Both
        share the blocks in the store; tails and policies are copied."""
        handle, err = _abi.kvt_offload_p(), new_error()
        check_err(lib.kvt_offload_fork(self._raw, session._raw, byref(handle), byref(err)), err)
        other = Offload.__new__(Offload)
        other._begin(session, self._attention, self._dtype, handle)
        return other

    def put(self, layer: int, first: int, tokens: int, k: View, v: Optional[View] = None, *,
            queue: "Optional[Queue]" = None, tag: object = None,
            timeout: Optional[float] = None, priority: int = PRIORITY_DEMAND) -> Optional[Op]:
        """Stores K and V of a layer's tokens; `v` is None for a latent. The op holds the objects
        until it is closed. A result of None means that the call has read the objects already:
        there is no op and no completion."""
        raw, runtime = self._raw, self._session._namespace._store._runtime
        layer, first, tokens = u32(layer), u32(first), u32(tokens)
        kept: List[Any] = []
        rows = (_abi.kvt_view_t * 2)()
        fill(rows[0], k, False, kept)
        if v is not None:
            fill(rows[1], v, False, kept)
        op = Op(runtime, queue, tag, False)
        op._keep(kept)
        opts, _ = submit_opts(runtime, op, queue, timeout, 0, priority)
        handle, err = _abi.kvt_op_p(), new_error()
        status = lib.kvt_offload_put(
            raw, layer, first, tokens, byref(rows[0]),
            None if v is None else byref(rows[1]), byref(opts), byref(handle), byref(err))
        if not handle.value:
            op._submit_failed()
        check_err(status, err)
        if not handle.value:
            return None
        op._bind(handle.value)
        return op

    def load(self, buffer: int, layer: int, at: SparseContext, *, blocks: Optional[Column] = None,
             chosen: bool = False, query: Optional[Any] = None) -> int:
        """Begins to load a layer into a buffer; returns how many blocks (`blocks()` lists them).

        Loads all blocks and the tail, or only `blocks`, ascending, without the tail. With a
        `query` the policy selects among them. `chosen`: loads exactly `blocks`, with the tail and
        without the policy."""
        if chosen and blocks is None:
            raise _invalid("chosen=True needs blocks: give the blocks to load")
        raw, c, count, err = self._raw, context_for_c(at), ctypes.c_uint32(), new_error()
        with Columns() as columns:
            ids, length = columns.take("blocks", "u32", blocks)
            if blocks is not None and length == 0 and not chosen:
                ids = (ctypes.c_uint32 * 1)()  # a null pointer would mean all blocks
            rows, export = (None, None) if query is None else _rows("queries", query)
            status = lib.kvt_offload_load(
                raw, u32(buffer), u32(layer), ids, length,
                _abi.KVT_OFFLOAD_LOAD_CHOSEN if chosen else 0, None if rows is None else byref(rows),
                byref(c), byref(count), byref(err))
            if export is not None:
                export.release()
        check_err(status, err)
        return count.value

    def wait(self, buffer: int) -> LayerKV:
        """Waits for the load of a buffer; returns its KV with the current tail."""
        kv, err = _abi.kvt_offload_kv_t(), new_error()
        with self._lock:
            check_err(lib.kvt_offload_wait(self._raw, u32(buffer), byref(kv), byref(err)), err)
            return self._layer(kv)

    def release(self, buffer: int) -> None:
        """Frees a buffer; a load in flight is abandoned."""
        err = new_error()
        check_err(lib.kvt_offload_release(self._raw, u32(buffer), byref(err)), err)

    def begin(self, at: SparseContext) -> None:
        """Begins a pass over all layers."""
        c, err = context_for_c(at), new_error()
        check_err(lib.kvt_offload_begin(self._raw, byref(c), byref(err)), err)

    def take(self, layer: int, query: Optional[Any] = None) -> LayerKV:
        """Returns the next layer of the pass."""
        kv, err = _abi.kvt_offload_kv_t(), new_error()
        rows, export = (None, None) if query is None else _rows("queries", query)
        with self._lock:
            try:
                status = lib.kvt_offload_take(self._raw, u32(layer),
                                              None if rows is None else byref(rows), byref(kv),
                                              byref(err))
            finally:
                if export is not None:
                    export.release()
            check_err(status, err)
            return self._layer(kv)

    def give_back(self, layer: int) -> None:
        """Returns the buffer of a taken layer to the ring."""
        err = new_error()
        check_err(lib.kvt_offload_give_back(self._raw, u32(layer), byref(err)), err)

    def blocks(self, buffer: int) -> List[int]:
        """Returns the blocks of a buffer, ascending."""
        return self._numbers(lambda raw, to, room, count: lib.kvt_offload_blocks(
            raw, u32(buffer), to, room, count))

    def rows(self, buffer: int, positions: Column) -> List[int]:
        """Returns the rows of a buffer that have these positions, both ascending. Positions that
        the buffer does not have are skipped."""
        raw, count = self._raw, ctypes.c_uint64()
        with Columns() as columns:
            given, length = columns.take("positions", "u32", positions)
            found = (ctypes.c_uint32 * (length + 1))()
            check(lib.kvt_offload_rows(raw, u32(buffer), given, length, found, byref(count)))
        return list(found[: count.value])

    def observe(self, layer: int, queries: int, sums: Column, tokens: int) -> None:
        """Passes attention sums of kept keys over `queries` queries to the policy: `tokens`
        numbers per query head, or once for all heads."""
        raw, err = self._raw, new_error()
        with Columns() as columns:
            given, length = columns.take("sums", "f32", sums)
            check_err(lib.kvt_offload_observe(raw, u32(layer), u32(queries), given, length,
                                              u32(tokens), byref(err)), err)

    def evict(self, layer: int, at: SparseContext) -> bool:
        """Lets the policy evict tokens if necessary; returns whether it evicted some."""
        c, evicted, err = context_for_c(at), ctypes.c_uint32(), new_error()
        check_err(lib.kvt_offload_evict(self._raw, u32(layer), byref(c), byref(evicted),
                                        byref(err)), err)
        return bool(evicted.value)

    def retained(self, layer: int) -> Optional[List[List[int]]]:
        """Returns the kept positions, a list per head or one for all heads; None: all are kept."""
        count, heads = ctypes.c_uint64(), ctypes.c_uint32()
        check(lib.kvt_offload_retained(self._raw, u32(layer), 0, None, 0, byref(count), byref(heads)))
        if heads.value == 0:
            return None
        return [self._numbers(lambda raw, to, room, n, head=head: lib.kvt_offload_retained(
            raw, u32(layer), head, to, room, n, None)) for head in range(heads.value)]

    def append_keys(self, layer: int, first: int, keys: Any) -> None:
        """Passes the policy's own key rows (`dsa`), [tokens, heads, dim], before the put of these
        tokens."""
        rows, export = _rows("keys", keys)
        err = new_error()
        with export:
            check_err(lib.kvt_offload_append_keys(self._raw, u32(layer), u32(first), byref(rows),
                                                byref(err)), err)

    def score(self, layer: int, scores: Column, *, is_prefill: bool = False) -> None:
        """Sets numbers for the next load of a layer: a score per loadable block (`external`), or
        a weight per query and head (`dsa`)."""
        raw, err = self._raw, new_error()
        with Columns() as columns:
            given, length = columns.take("scores", "f32", scores)
            check_err(lib.kvt_offload_score(raw, u32(layer), 1 if is_prefill else 0, given,
                                            length, byref(err)), err)

    def close(self) -> None:
        """Closes the offload. Stored KV stays in the store."""
        with self._lock:
            if self.closed:
                return
            self._raw  # noqa: B018: not in a forked child
            if all(view() is None for view in self._views):
                check(lib.kvt_offload_close(byref(self._job.handle)))
                self._released()
            self._memory = None

    def _layer(self, kv: Any) -> LayerKV:
        a = self._attention
        view = self._host_view if kv.memory == _abi.KVT_MEMORY_HOST else self._device_plane
        v = None if a.latent else view(kv.v, kv.tokens, a.key_heads, a.value_dim)
        return LayerKV(view(kv.k, kv.tokens, a.key_heads, a.key_dim), v, kv.tokens,
                       kv.tail_tokens, kv.blocks, kv.buffer)

    def _device_plane(self, address: Optional[int], tokens: int, heads: int,
                      dim: int) -> DevicePlane:
        nbytes = tokens * heads * dim * _CODES[self._dtype][1]
        plane = DevicePlane(address or 0, (tokens, heads, dim), nbytes, self._memory)
        self._track(plane)
        return plane

    def _track(self, view: object) -> None:
        self._views = [known for known in self._views if known() is not None]
        self._views.append(weakref.ref(view))

    def _host_view(self, address: Optional[int], tokens: int, heads: int,
                   dim: int) -> memoryview:
        code, size = _CODES[self._dtype]
        if tokens == 0 or not address:
            empty: Any = memoryview(b"")
            nothing: memoryview = empty.cast(code)
            return nothing
        memory: Any = (ctypes.c_ubyte * (tokens * heads * dim * size)).from_address(address)
        memory.owner = self._memory  # keeps the memory while a view exists
        self._track(memory)
        flat: Any = memoryview(memory).cast("B").toreadonly()
        shaped: memoryview = flat.cast(code, shape=[tokens, heads, dim])
        return shaped

    def _numbers(self, call: Any) -> List[int]:
        raw, count, room = self._raw, ctypes.c_uint64(), 64
        while True:
            to = (ctypes.c_uint32 * room)()
            status = call(raw, to, room, byref(count))
            if status != _abi.KVT_E_TOO_SMALL:
                check(status)
                return list(to[: count.value])
            room = count.value
