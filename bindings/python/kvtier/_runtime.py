"""The runtime: the root object, which owns the threads."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple, Union

from . import _abi, _callbacks, _reaper
from ._buffer import Buffer, MemoryOption
from ._budget import Budget
from ._lib import check, check_err, deadline_after, lib, text_pointer, u32, u64
from ._op import RELEASED, Op
from ._queue import Completion, Queue
from ._resource import Closing, byref, new_error

PRIORITY_DEMAND = _abi.KVT_PRIORITY_DEMAND
PRIORITY_PREFETCH = _abi.KVT_PRIORITY_PREFETCH
PRIORITY_BACKGROUND = _abi.KVT_PRIORITY_BACKGROUND

#: Called at the start of every thread of a runtime, and of its stores and streamers. Arguments
#: are "worker", "notifier", "store" or "streamer", and the thread's number. The hook must not call
#: the library.
ThreadHook = Callable[[str, int], object]

_ROLES = {_abi.KVT_THREAD_WORKER: "worker", _abi.KVT_THREAD_NOTIFIER: "notifier",
          _abi.KVT_THREAD_STORE: "store", _abi.KVT_THREAD_STREAMER: "streamer"}


@dataclass(frozen=True)
class Work:
    """One item of work on up to two buffers, created by the functions below.

    >>> import kvtier
    >>> with kvtier.Runtime() as runtime, runtime.wrap(bytearray(b"kv")) as buffer:
    ...     checksum = runtime.submit(kvtier.Work.checksum(buffer)).result().value
    ...     runtime.submit(kvtier.Work.verify(buffer, checksum)).result().value == checksum
    True
    """

    kind: int
    nbytes: int
    dst: Optional[Buffer] = None
    dst_offset: int = 0
    src: Optional[Buffer] = None
    src_offset: int = 0
    expect: int = 0

    @staticmethod
    def copy(dst: Buffer, src: Buffer, nbytes: Optional[int] = None, *, dst_offset: int = 0,
             src_offset: int = 0, checksum: bool = False, expect: Optional[int] = None) -> "Work":
        """Copies bytes. With `checksum` the op's value is the source's checksum. With `expect` it
        fails with `CorruptError` if the checksum differs."""
        kind = _abi.KVT_ITEM_COPY | (_abi.KVT_ITEM_CHECKSUM if checksum else 0)
        kind |= 0 if expect is None else _abi.KVT_ITEM_VERIFY
        size = len(src) - src_offset if nbytes is None else nbytes
        return Work(kind, size, dst, dst_offset, src, src_offset, expect or 0)

    @staticmethod
    def checksum(src: Buffer, nbytes: Optional[int] = None, *, src_offset: int = 0) -> "Work":
        """Computes a checksum, which becomes the op's value."""
        size = len(src) - src_offset if nbytes is None else nbytes
        return Work(_abi.KVT_ITEM_CHECKSUM, size, src=src, src_offset=src_offset)

    @staticmethod
    def verify(src: Buffer, expect: int, nbytes: Optional[int] = None, *,
               src_offset: int = 0) -> "Work":
        """Fails with `CorruptError` if the checksum is not `expect`."""
        size = len(src) - src_offset if nbytes is None else nbytes
        return Work(_abi.KVT_ITEM_VERIFY, size, src=src, src_offset=src_offset, expect=expect)

    @staticmethod
    def prefault(dst: Buffer, nbytes: Optional[int] = None, *, dst_offset: int = 0) -> "Work":
        """Faults pages in; their contents stay."""
        size = len(dst) - dst_offset if nbytes is None else nbytes
        return Work(_abi.KVT_ITEM_PREFAULT, size, dst, dst_offset)


class RuntimeStats(NamedTuple):
    """Counters of a runtime."""

    ops_submitted: int
    ops_open: int
    ops_live: int
    ops_queued: int
    ops_rejected: int
    workers: int
    poisoned: bool


class CloseReport(NamedTuple):
    """The number of objects that were open when a runtime was closed."""

    queues: int
    buffers: int
    budgets: int
    accounts: int
    ops: int
    stores: int = 0
    namespaces: int = 0
    sessions: int = 0
    offloads: int = 0
    streamers: int = 0
    devices: int = 0


class RuntimeJob(_reaper.Job):
    """Closes a runtime."""

    __slots__ = ()

    def attempt(self) -> int:
        return int(lib.kvt_runtime_close(byref(self.handle), _reaper.slice_deadline(), None, None))


def submit_opts(runtime: "Runtime", op: Optional[Op], queue: Optional[Queue],
                timeout: Optional[float], notify: int, priority: int,
                tag: object = None) -> Tuple[Any, int]:
    """Returns the C options of one op, and its tag in the queue."""
    try:
        opts = _abi.kvt_submit_opts_t(priority=u32(priority))
        if timeout is not None:
            opts.deadline_ns = deadline_after(time.monotonic_ns(), timeout)
        serial = 0
        if queue is not None:
            opts.queue = queue._raw.value
            # The release is always posted: awaiting an op needs it.
            opts.notify = u32(notify | RELEASED)
            serial = queue._expect(op, tag)
    except BaseException:
        if op is not None:
            op._submit_failed()
        raise
    opts.tag = serial
    return opts, serial


def _fill(items: Any, work: Sequence[Work]) -> None:
    for item, piece in zip(items, work):
        item.kind, item.bytes, item.expect = u32(piece.kind), u64(piece.nbytes), u64(piece.expect)
        item.dst_offset, item.src_offset = u64(piece.dst_offset), u64(piece.src_offset)
        if piece.dst is not None:
            item.dst = piece.dst._raw.value
        if piece.src is not None:
            item.src = piece.src._raw.value


class Runtime(Closing):
    """The root object, which owns the threads. Any thread may use it.

    `faults` injects faults, for tests of the caller's error paths, such as
    "faults(worker=at(panic=3))".

    >>> import kvtier
    >>> with kvtier.Runtime(workers=2) as runtime:
    ...     source, target = runtime.wrap(bytearray(b"tokens")), runtime.buffer(6)
    ...     copied = runtime.copy(target, source).result(timeout=5).bytes_done
    ...     copied, bytes(target.view()), runtime.stats().workers
    (6, b'tokens', 2)

    In an asyncio loop::

        async with kvtier.Runtime() as runtime, runtime.queue() as queue:
            await runtime.copy(target, source, queue=queue)
    """

    _type_name = "runtime"

    def __init__(self, *, workers: int = 0, max_ops: int = 0, name: str = "", faults: str = "",
                 on_thread: Optional[ThreadHook] = None) -> None:
        _reaper.arm()
        name_text, faults_text = name.encode(), faults.encode()
        opts = _abi.kvt_runtime_opts_t(workers=u32(workers), max_ops=u32(max_ops))
        opts.name = text_pointer(name_text, empty_is_none=True)
        opts.name_bytes = len(name_text)
        opts.faults = text_pointer(faults_text, empty_is_none=True)
        opts.faults_bytes = len(faults_text)
        number = 0
        if on_thread is not None:
            number = _callbacks.register(on_thread)
            opts.on_thread, opts.destroy, opts.user_data = (
                on_thread_fn, _callbacks.on_destroy, number)
        handle, err = _abi.kvt_runtime_p(), new_error()
        status = lib.kvt_runtime_open(byref(opts), byref(handle), byref(err))
        if status != _abi.KVT_OK and number:
            _callbacks.forget(number)
        check_err(status, err)
        self._own(RuntimeJob(handle, _reaper.RANK_RUNTIME))

    def now_ns(self) -> int:
        """Returns the time on the clock of deadlines."""
        now = ctypes.c_uint64()
        check(lib.kvt_runtime_now(self._raw, byref(now)))
        return now.value

    def stats(self) -> RuntimeStats:
        """Returns counters, also of a poisoned runtime."""
        s = _abi.kvt_runtime_stats_t()
        check(lib.kvt_runtime_stats(self._raw, byref(s)))
        return RuntimeStats(s.ops_submitted, s.ops_open, s.ops_live, s.ops_queued,
                            s.ops_rejected, s.workers, bool(s.poisoned))

    def queue(self, capacity: int = 0,
              callback: Optional[Callable[[List[Completion]], object]] = None) -> Queue:
        """Opens a completion queue."""
        return Queue(self, capacity, callback)

    def budget(self, *, device_bytes: int = 0, host_bytes: Optional[int] = None,
               disk_bytes: int = 0, remote_bytes: int = 0, pinned_bytes: Optional[int] = None,
               reserve_bytes: Optional[int] = None, strict: bool = False) -> Budget:
        """Opens a budget."""
        return Budget(self, device_bytes=device_bytes, host_bytes=host_bytes,
                      disk_bytes=disk_bytes, remote_bytes=remote_bytes,
                      pinned_bytes=pinned_bytes, reserve_bytes=reserve_bytes, strict=strict)

    def buffer(self, nbytes: int, *, align_bytes: int = 0, account: Any = None,
               pin: MemoryOption = False, huge: MemoryOption = False,
               prefault: bool = False) -> Buffer:
        """Allocates a buffer."""
        return Buffer(self, nbytes, align_bytes=align_bytes, account=account, pin=pin,
                      huge=huge, prefault=prefault)

    def wrap(self, source: Any) -> Buffer:
        """Wraps a writable object's memory for ops."""
        return Buffer.wrap(self, source)

    def submit(self, work: Union[Work, Sequence[Work]], *, queue: Optional[Queue] = None,
               tag: object = None, timeout: Optional[float] = None, notify: int = 0,
               priority: int = PRIORITY_DEMAND) -> Op:
        """Submits work as one op, without waiting. After `timeout` seconds the op resolves with
        `TimeoutError`; its memory may be released later."""
        pieces = [work] if isinstance(work, Work) else list(work)
        items = (_abi.kvt_buffer_item_t * len(pieces))()
        _fill(items, pieces)
        op = Op(self, queue, tag, False)
        opts, serial = submit_opts(self, op, queue, timeout, notify, priority)
        handle = _abi.kvt_op_p()
        self._submit(opts, items, byref(handle), queue, [serial], [op])
        op._bind(handle.value)
        return op

    def submit_each(self, work: Sequence[Work], *, queue: Optional[Queue] = None,
                    tags: Optional[Sequence[object]] = None, timeout: Optional[float] = None,
                    notify: int = 0, priority: int = PRIORITY_DEMAND) -> List[Op]:
        """Submits each item of work as a separate op, all or none."""
        pieces = list(work)
        if tags is not None and len(tags) != len(pieces):
            raise ValueError(f"{len(tags)} tags for {len(pieces)} items of work: give one per "
                             "item")
        items = (_abi.kvt_buffer_item_t * len(pieces))()
        _fill(items, pieces)
        ops = [Op(self, queue, None if tags is None else tags[i], False)
               for i in range(len(pieces))]
        opts, _ = submit_opts(self, None, None, timeout, 0, priority)
        if queue is not None:
            opts.queue, opts.notify = queue._raw.value, notify | RELEASED
            for item, op in zip(items, ops):
                item.tag = queue._expect(op)
        opts.flags = _abi.KVT_SUBMIT_EACH
        handles = (_abi.kvt_op_p * len(pieces))()
        self._submit(opts, items, handles, queue, [], ops)
        for op, handle in zip(ops, handles):
            op._bind(handle.value)
        return ops

    def post(self, work: Union[Work, Sequence[Work]], queue: Queue, *, tag: object = None,
             timeout: Optional[float] = None, priority: int = PRIORITY_DEMAND) -> None:
        """Submits work without a handle: only the queue reports its completion."""
        pieces = [work] if isinstance(work, Work) else list(work)
        items = (_abi.kvt_buffer_item_t * len(pieces))()
        _fill(items, pieces)
        opts, serial = submit_opts(self, None, queue, timeout, 0, priority, tag)
        self._submit(opts, items, None, queue, [serial])

    def _submit(self, opts: Any, items: Any, ops_out: Any, queue: Optional[Queue],
                serials: Sequence[int], ops: Sequence[Op] = ()) -> None:
        err = new_error()
        stride = ctypes.sizeof(_abi.kvt_buffer_item_t)
        ok = False
        try:
            check_err(lib.kvt_buffer_submit(self._raw, byref(opts), items, len(items), stride,
                                            ops_out, byref(err)), err)
            ok = True
        finally:
            if not ok:
                for op in ops:
                    op._submit_failed()
            if not ok and queue is not None:
                for serial in serials:
                    queue._forget(serial)

    def copy(self, dst: Buffer, src: Buffer, nbytes: Optional[int] = None, *,
             dst_offset: int = 0, src_offset: int = 0, queue: Optional[Queue] = None,
             timeout: Optional[float] = None) -> Op:
        """Submits a copy."""
        work = Work.copy(dst, src, nbytes, dst_offset=dst_offset, src_offset=src_offset)
        return self.submit(work, queue=queue, timeout=timeout)

    def close(self, timeout: Optional[float] = None) -> CloseReport:
        """Rejects new work, cancels open ops, and waits for them and the threads. Raises
        `BusyError` after `timeout` seconds; then the call can be repeated. Returns the number of
        objects that were open. These objects remain usable where they need no thread."""
        if self.closed:
            return CloseReport(0, 0, 0, 0, 0)
        self._raw  # noqa: B018: not in a forked child
        end = deadline_after(time.monotonic_ns(), timeout)
        report, err = _abi.kvt_close_report_t(), new_error()
        status = lib.kvt_runtime_close(byref(self._job.handle), end, byref(report), byref(err))
        check_err(status, err)
        self._released()
        return CloseReport(report.queues, report.buffers, report.budgets, report.accounts,
                           report.ops, report.stores, report.namespaces, report.sessions,
                           report.offloads, report.streamers, report.devices)


def _on_thread(number: int, role: int, index: int) -> None:
    with _callbacks.Restricted():
        hook = _callbacks.find(number)
        if hook is not None:
            _callbacks.call(hook, _ROLES.get(role, str(role)), index)


on_thread_fn = _abi.kvt_thread_fn(_on_thread)
