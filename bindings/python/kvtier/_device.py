"""Devices: copy engines between the caller's memory and the library's."""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Iterable, List, NamedTuple, Optional, Sequence
from typing import Tuple, Union

from . import _abi, _callbacks, _reaper
from ._errors import make
from ._lib import check, check_err, deadline_after, lib, text_pointer, u32, u64
from ._own_device import table_for_c
from ._resource import Closing, Resource, byref, new_error, refuse_fork
from ._view import MemoryRange, View, export, fill, kind_of

if TYPE_CHECKING:
    from ._op import Op
    from ._runtime import Runtime

_KINDS = {"host": _abi.KVT_DEVICE_KIND_HOST, "cuda": _abi.KVT_DEVICE_KIND_CUDA,
          "simulated": _abi.KVT_DEVICE_KIND_SIMULATED}
_NAMES = {**{kind: name for name, kind in _KINDS.items()}, _abi.KVT_DEVICE_KIND_CUSTOM: "custom"}
_VERDICTS = {_abi.KVT_VERDICT_PASSED: "passed", _abi.KVT_VERDICT_SKIPPED: "skipped",
             _abi.KVT_VERDICT_FAILED: "failed"}
_MOST_EVENTS = 65_536


class DeviceInfo(NamedTuple):
    """Kind and capabilities of a device."""

    #: "host", "cuda", "simulated" or "custom".
    kind: str
    #: Work continues after a call has returned.
    asynchronous: bool
    #: The device computes checksums of copies.
    checksums: bool
    #: The device has memory that the CPU cannot access.
    has_memory: bool
    #: The caller should register host memory that copies use: `Device.register_host`.
    wants_pinned: bool
    #: The number of streams; work on one stream runs in order.
    streams: int
    #: The kinds of kernels that the device can launch, `abi.KVT_DEVICE_KERNEL_*`.
    kernels: Tuple[int, ...]
    #: Free device memory; None if unknown.
    free_bytes: Optional[int]


class ConformanceCheck(NamedTuple):
    """The result of one conformance check."""

    name: str
    #: "passed", "skipped" or "failed".
    verdict: str
    why: str


class ConformanceReport(NamedTuple):
    """The results of the conformance suite."""

    passed: int
    skipped: int
    failed: int
    checks: List[ConformanceCheck]


@dataclass(frozen=True)
class DeviceCopy:
    """A copy between an engine's tensor (`view`) and a plane, which has the same tokens and heads
    without gaps. The plane begins at `plane_offset` in an object or in `DeviceMemory`, and must
    fit."""

    view: View
    plane: Any
    #: True: from the plane into the view. False: from the view into the plane.
    scatter: bool = False
    first_token: int = 0
    #: 0 = all tokens of the view.
    tokens: int = 0
    plane_offset: int = 0
    #: Computes a checksum of the copy, on devices with `checksums`.
    checksum: bool = False


class DeviceJob(_reaper.Job):
    """Closes a device; busy while a store or a streamer uses it."""

    __slots__ = ()

    def attempt(self) -> int:
        return int(lib.kvt_device_close(byref(self.handle), _reaper.slice_deadline(), None))


class _MemoryJob(_reaper.Job):
    """Frees device memory. The job's handle is the device's."""

    __slots__ = ("memory",)

    def __init__(self, device: int, memory: Any) -> None:
        super().__init__(_abi.kvt_device_p(device), _reaper.RANK_BUFFER)
        self.memory = memory

    def attempt(self) -> int:
        return int(lib.kvt_device_free(self.handle, byref(self.memory), None))


class _EventJob(_reaper.Job):
    """Releases an event that has completed, and then the objects that its copies use."""

    __slots__ = ("number", "kept", "owned")

    def __init__(self, device: int, number: int, kept: List[Any]) -> None:
        super().__init__(_abi.kvt_device_p(device), _reaper.RANK_OP)
        self.number, self.kept, self.owned = number, kept, True

    def attempt(self) -> int:
        if self.owned:
            number = ctypes.c_uint64(self.number)
            return int(lib.kvt_device_release(self.handle, byref(number), 1, None))
        # Another owner releases the event after its completion.
        status = int(lib.kvt_device_query(self.handle, self.number))
        return _abi.KVT_E_BUSY if status == _abi.KVT_E_AGAIN else _abi.KVT_OK

    def done(self) -> None:
        self.kept = []
        super().done()


class _UserEventJob(_EventJob):
    """Signals a dropped user event, and releases it."""

    __slots__ = ()

    def attempt(self) -> int:
        lib.kvt_device_signal_event(self.handle, self.number, None)
        return super().attempt()


class DeviceMemory(Resource, MemoryRange):
    """Device memory (`Device.alloc`), freed when it is closed or dropped. Submitted work keeps
    it."""

    _type_name = "device memory"

    def __init__(self, device: "Device", nbytes: int) -> None:
        memory, err = _abi.kvt_device_memory_t(), new_error()
        raw = device._raw
        check_err(lib.kvt_device_alloc(raw, u64(nbytes), byref(memory), byref(err)), err)
        self._device, self._memory = device, memory
        #: The address of the first byte, a multiple of 256.
        self.address: int = memory.address
        self.nbytes: int = memory.bytes
        self.on_device: bool = memory.memory == _abi.KVT_MEMORY_DEVICE
        self._own(_MemoryJob(raw.value, memory))

    def __len__(self) -> int:
        return self.nbytes

    def _check(self, writable: bool) -> None:
        self._raw  # noqa: B018: raises if closed, or in a forked child

    def close(self) -> None:
        """Frees the memory; raises `BusyError` while known work in flight uses it."""
        if self.closed:
            return
        err = new_error()
        check_err(lib.kvt_device_free(self._raw, byref(self._memory), byref(err)), err)
        self._released()


class DeviceEvent(Closing):
    """A point on a device's stream. The event keeps the objects of its copies until it
    completes."""

    _type_name = "device event"

    def __init__(self, device: "Device", number: int, kept: List[Any],
                 sums: Sequence[Optional[int]] = (), wants: Sequence[bool] = ()) -> None:
        self._device = device
        self._wants = wants
        #: The event's number, for calls that take an event.
        self.number: int = number
        #: The checksum of each copy with `checksum`. Asynchronous devices provide it after `wait`.
        self.checksums: List[Optional[int]] = list(sums)
        self._own(self._job_of(device._raw.value, number, kept))

    def _job_of(self, device: int, number: int, kept: List[Any]) -> _EventJob:
        return _EventJob(device, number, kept)

    @property
    def done(self) -> bool:
        """Whether the event has completed; raises the error of its batch."""
        status = lib.kvt_device_query(self._raw, self.number)
        if status == _abi.KVT_E_AGAIN:
            return False
        check(status)
        return True

    def wait(self, timeout: Optional[float] = None) -> None:
        """Waits for completion; raises `TimeoutError`, or the error of the event's batch."""
        err = new_error()
        end = deadline_after(time.monotonic_ns(), timeout)
        check_err(lib.kvt_device_wait(self._raw, self.number, end, byref(err)), err)
        if any(self._wants):
            self._take_sums()

    def _take_sums(self) -> None:
        err, count = new_error(), ctypes.c_uint64()
        sums = (ctypes.c_uint64 * sum(self._wants))()
        check_err(lib.kvt_device_checksums(self._raw, self.number, sums, len(sums), byref(count),
                                      byref(err)), err)
        computed = iter(sums[: count.value])
        self.checksums = [next(computed, None) if want else None for want in self._wants]
        self._wants = ()

    def close(self, timeout: Optional[float] = None) -> None:
        """Waits for completion, successful or not, and releases the event. Raises `BusyError`
        after `timeout` seconds; then the call can be repeated."""
        if self.closed:
            return
        raw, err, number = self._raw, new_error(), ctypes.c_uint64(self.number)
        end = deadline_after(time.monotonic_ns(), timeout)
        lib.kvt_device_wait(raw, self.number, end, None)
        check_err(lib.kvt_device_release(raw, byref(number), 1, byref(err)), err)
        self._released()

    def _hand_over(self) -> None:
        """Leaves the release of the event to another owner. The objects of its copies stay until
        it completes."""
        job = self._job
        job.owned = False
        self._finalizer.detach()
        rest = _EventJob(self._device._raw.value, job.number, job.kept)
        rest.owned = False
        self._released()
        _reaper.close_later(rest)


class UserEvent(DeviceEvent):
    """A device event that completes when the host calls `signal`. Closing signals it, too."""

    _type_name = "user event"

    def _job_of(self, device: int, number: int, kept: List[Any]) -> _EventJob:
        return _UserEventJob(device, number, kept)

    def signal(self) -> None:
        """Completes the event; a second call has no effect."""
        err = new_error()
        check_err(lib.kvt_device_signal_event(self._raw, self.number, byref(err)), err)

    def close(self, timeout: Optional[float] = None) -> None:
        if not self.closed:
            self.signal()
        super().close(timeout)


#: An event, its number, or None.
After = Union[DeviceEvent, int, None]


def number_of(event: After, kept: Optional[List[Any]] = None) -> int:
    """Returns the number of an event; 0 = none. `kept` keeps the event as long as the work that
    waits for it."""
    if isinstance(event, DeviceEvent):
        event._raw  # noqa: B018: raises if the event is closed
        if kept is not None:
            kept.append(event)
        return event.number
    return u64(event or 0)


def _lower(row: Any, copy: DeviceCopy, kept: List[Any]) -> None:
    """Fills a copy for C, checked against the memory that it uses."""
    fill(row.view, copy.view, copy.scatter, kept)
    view, plane = row.view, export(copy.plane, not copy.scatter, kept)
    row.plane_memory, row.first_token, row.tokens = (
        kind_of(plane), u32(copy.first_token), u32(copy.tokens))
    row.direction = _abi.KVT_COPY_SCATTER if copy.scatter else _abi.KVT_COPY_GATHER
    row.flags = _abi.KVT_COPY_CHECKSUM if copy.checksum else 0
    has = view.page_count * view.page_tokens if view.pages else view.tokens
    tokens = row.tokens or max(0, has - row.first_token)
    needed = tokens * view.heads * view.run_bytes
    if u64(copy.plane_offset) + needed > plane.nbytes:
        raise make(_abi.KVT_E_INVALID, f"the copy needs {needed} bytes from plane_offset "
                                       f"{copy.plane_offset} on: the plane has {plane.nbytes}")
    row.plane = plane.address + copy.plane_offset


class Device(Closing):
    """A copy engine between the caller's memory and the library's. Any thread may use it.

    Kinds are "host", "cuda", "simulated", and custom devices. The simulated device is for tests:
    it delays its work, and corrupts data that is used before its event. Stores and streamers
    are opened with a device.

    A custom device is any object with the methods below; all but the first two are optional.
    The library calls them from any thread, also concurrently. They must not call their own
    device::

        submit(stream, after, copies) -> event      query(event) -> bool
        wait(event, deadline_ns)     release(event)     free_bytes() -> int
        allocate(nbytes) -> address  free(address, nbytes)
        register_host(address, nbytes)   (0 bytes: unregister)
        import_event(raw) -> event          stream_wait(raw_stream, event)
        launch(stream, after, kernels) -> event
        create_event() -> event           signal_event(event)   (completes it)

    Its optional attributes have these defaults: `streams = 1`, `has_memory = False`,
    `wants_pinned = False`, `kernels = ()`.

    - Copies are a list of `CopyRows`. Events are any numbers but 0. `after` is 0, or an event
      that the work waits for.
    - A raised `kvtier.Error` becomes the status of the call. Any other exception becomes a
      `StateError` and goes to `sys.unraisablehook`.
    - After an exception of `query` the library queries the event again.
    - A method that raises must not have begun its work.
    - `release`, `allocate`, `free` and `free_bytes` must not call the library and must not block.

    Run `conformance` on a custom device before using it.

    >>> import kvtier
    >>> with kvtier.Runtime() as runtime:
    ...     with kvtier.Device(runtime, "simulated", memory_bytes=1 << 20) as device:
    ...         with device.alloc(4096) as memory, device.upload(b"kv", memory) as up:
    ...             back = bytearray(2)
    ...             with device.download(memory, back, after=up) as down:
    ...                 down.wait(timeout=5)
    >>> back
    bytearray(b'kv')
    """

    _type_name = "device"

    def __init__(self, runtime: "Runtime", kind: Union[str, Any] = "host", *, ordinal: int = 0,
                 context: int = 0, streams: Sequence[int] = (),
                 library: "Union[str, os.PathLike[str]]" = "", peers: Sequence[int] = (),
                 verify: bool = False, memory_bytes: int = 0,
                 seed: int = 0, latency_ns: int = 0, bytes_per_s: int = 0,
                 arena: int = 0, arena_bytes: int = 0,
                 cufile: "Union[str, os.PathLike[str]]" = "") -> None:
        """`kind` is "host", "cuda", "simulated", or a custom device.

        CUDA: `ordinal` selects the GPU; a `context` of the caller, with its `streams`, replaces
        it. `library` and `cufile` are the paths of the driver's and of cuFile's library. Copies
        may also use memory of `peers`, which are other ordinals. Device memory is allocated from
        the caller's memory at `arena`, if given.

        Simulated: `memory_bytes`, `seed`, `latency_ns`, `bytes_per_s`.

        Both: with `verify` the device computes checksums of copies in its memory, and stores
        compare them."""
        opts = _abi.kvt_device_opts_t(
            ordinal=u32(ordinal), context=u64(context), stream_count=len(streams),
            memory_bytes=u64(memory_bytes), seed=u64(seed), latency_ns=u64(latency_ns),
            bytes_per_s=u64(bytes_per_s), arena=u64(arena), arena_bytes=u64(arena_bytes))
        opts.streams = (ctypes.c_uint64 * len(streams))(*(u64(stream) for stream in streams))
        opts.peers = (ctypes.c_uint32 * len(peers))(*(u32(peer) for peer in peers))
        opts.peer_count, opts.flags = len(peers), _abi.KVT_DEVICE_VERIFY if verify else 0
        path, number = os.fsencode(library), 0
        opts.library, opts.library_bytes = text_pointer(path, empty_is_none=True), len(path)
        reader = os.fsencode(cufile)
        opts.cufile, opts.cufile_bytes = text_pointer(reader, empty_is_none=True), len(reader)
        if not isinstance(kind, str):
            table, number = table_for_c(kind)
            opts.kind, opts.custom = _abi.KVT_DEVICE_KIND_CUSTOM, ctypes.pointer(table)
        elif kind in _KINDS:
            opts.kind = _KINDS[kind]
        else:
            raise make(_abi.KVT_E_INVALID, f"device kind {kind!r} is unknown: it must be one of "
                                           f"{', '.join(_KINDS)}, or a custom device")
        self._runtime = runtime
        handle, err = _abi.kvt_device_p(), new_error()
        status = lib.kvt_device_open(runtime._raw, byref(opts), byref(handle), byref(err))
        if status != _abi.KVT_OK and number:
            _callbacks.forget(number)
        check_err(status, err)
        self._own(DeviceJob(handle, _reaper.RANK_ACCOUNT))

    @property
    def info(self) -> DeviceInfo:
        """Kind and capabilities of the device."""
        c = _abi.kvt_device_info_t()
        check(lib.kvt_device_info(self._raw, byref(c)))
        return DeviceInfo(
            _NAMES.get(c.kind, str(c.kind)), bool(c.flags & _abi.KVT_DEVICE_ASYNCHRONOUS),
            bool(c.flags & _abi.KVT_DEVICE_CHECKSUMS), bool(c.flags & _abi.KVT_DEVICE_HAS_MEMORY),
            bool(c.flags & _abi.KVT_DEVICE_WANTS_PINNED), c.streams,
            tuple(kind for kind in range(64) if c.kernels >> kind & 1),
            None if c.free_bytes == 2**64 - 1 else c.free_bytes)

    def describe(self) -> str:
        """Returns a description for logs."""
        raw, room, n = self._raw, 256, ctypes.c_uint64()
        while True:
            to = ctypes.create_string_buffer(room)
            status = lib.kvt_device_describe(raw, to, room, byref(n))
            if status != _abi.KVT_E_TOO_SMALL:
                check(status)
                return to.raw[: n.value].decode()
            room = n.value

    def alloc(self, nbytes: int) -> DeviceMemory:
        """Allocates device memory."""
        return DeviceMemory(self, nbytes)

    def register_host(self, address: int, nbytes: int) -> None:
        """Registers host memory that copies will use repeatedly. If CUDA cannot pin it, copies
        are slower, and `describe` says so. The memory must stay valid until `unregister_host`."""
        self._call(lambda raw, err: lib.kvt_device_register_host(raw, u64(address), u64(nbytes), err))

    def unregister_host(self, address: int) -> None:
        """Unregisters host memory before it is freed."""
        self._call(lambda raw, err: lib.kvt_device_unregister_host(raw, u64(address), err))

    def copy(self, copies: Iterable[DeviceCopy] = (), *, stream: int = 0,
             after: After = None) -> DeviceEvent:
        """Submits copies to a stream, after the event `after` if given, and returns the event of
        their completion. Without copies the event marks the stream's current position."""
        given = list(copies)
        kept: List[Any] = []
        rows = (_abi.kvt_copy_t * len(given))()
        for row, copy in zip(rows, given):
            _lower(row, copy, kept)
        event = self._event(lambda raw, out, err: lib.kvt_device_copy(
            raw, u32(stream), number_of(after), rows, len(given), ctypes.sizeof(_abi.kvt_copy_t),
            out, err))
        info = self.info if any(copy.checksum for copy in given) else None
        wants = [bool(info and info.checksums and copy.checksum) for copy in given]
        if info and info.asynchronous:
            return DeviceEvent(self, event, kept, [None] * len(given), wants)
        return DeviceEvent(self, event, kept,
                           [row.sum if want else None for row, want in zip(rows, wants)])

    def upload(self, source: Any, memory: DeviceMemory, *, offset: int = 0, stream: int = 0,
               after: After = None) -> DeviceEvent:
        """Copies the bytes of an object into device memory, from `offset` on."""
        return self._plain(source, memory, offset, True, stream, after)

    def download(self, memory: MemoryRange, target: Any, *, offset: int = 0, stream: int = 0,
                 after: After = None) -> DeviceEvent:
        """Fills a writable object with the bytes of device memory, or of a `UnitLease`, from
        `offset` on."""
        return self._plain(target, memory, offset, False, stream, after)

    def _plain(self, host: Any, memory: MemoryRange, offset: int, up: bool, stream: int,
               after: After) -> DeviceEvent:
        kept: List[Any] = []
        nbytes = export(host, not up, kept).nbytes
        copy = DeviceCopy(View(memory, nbytes, offset=offset), host, scatter=up, tokens=1)
        return self.copy([copy], stream=stream, after=after)

    def launch(self, kernels: Sequence[Any], *, stream: int = 0,
               after: After = None) -> DeviceEvent:
        """Submits kernels (`abi.kvt_kernel_t`) to a stream. The caller keeps their memory valid
        until the returned event."""
        rows = (_abi.kvt_kernel_t * len(kernels))(*kernels)
        event = self._event(lambda raw, out, err: lib.kvt_device_launch(
            raw, u32(stream), number_of(after), rows, len(kernels),
            ctypes.sizeof(_abi.kvt_kernel_t), out, err))
        return DeviceEvent(self, event, [])

    def poll(self, most: int = 256) -> List[int]:
        """Returns the numbers of completed events, successful or not. Each is returned once."""
        room, n = min(u64(most), _MOST_EVENTS), ctypes.c_uint64()
        events = (ctypes.c_uint64 * max(1, room))()
        check(lib.kvt_device_poll(self._raw, events, room, byref(n)))
        return list(events[: n.value])

    def import_event(self, raw_event: int, keep: object = None) -> DeviceEvent:
        """Imports an event of the caller, for CUDA a recorded CUevent. The caller's event must
        exist until it completes; the import holds the object `keep` until then."""
        event = self._event(lambda raw, out, err: lib.kvt_device_import_event(
            raw, u64(raw_event), out, err))
        return DeviceEvent(self, event, [keep])

    def stream_wait(self, raw_stream: int, event: After) -> None:
        """Makes a stream of the caller (for CUDA a CUstream) wait for an event."""
        self._call(lambda raw, err: lib.kvt_device_stream_wait(
            raw, u64(raw_stream), number_of(event), err))

    def stream_wait_op(self, raw_stream: int, op: Op) -> None:
        """Makes a stream of the caller wait for the release of an op, successful or not."""
        self._call(lambda raw, err: lib.kvt_device_stream_wait_op(
            raw, u64(raw_stream), op._raw, err))

    def create_event(self) -> UserEvent:
        """Creates an event that completes when the caller signals it. Work after it waits."""
        event = self._event(lambda raw, out, err: lib.kvt_device_create_event(raw, out, err))
        return UserEvent(self, event, [])

    def conformance(self, *, seed: int = 0, rounds: int = 0, timeout: Optional[float] = None,
                    closes: bool = False) -> ConformanceReport:
        """Runs the conformance suite; nothing else should use the device meanwhile. `timeout`
        is the limit in seconds for an event, None = 30. `closes`: closes the device at the
        end."""
        opts = _abi.kvt_conformance_opts_t(
            flags=_abi.KVT_CONFORMANCE_CLOSES if closes else 0, seed=u64(seed),
            patience_ns=0 if timeout is None else max(1, u64(int(timeout * 1e9))),
            rounds=u32(rounds))
        checks: List[ConformanceCheck] = []
        number, count = _callbacks.register(checks), _abi.kvt_conformance_report_t()
        try:
            self._call(lambda raw, err: lib.kvt_device_conformance(
                raw, byref(opts), on_check, number, byref(count), err))
        finally:
            _callbacks.forget(number)
        return ConformanceReport(count.passed, count.skipped, count.failed, checks)

    def _call(self, call: Callable[[Any, Any], int]) -> None:
        err = new_error()
        check_err(call(self._raw, byref(err)), err)

    def _event(self, call: Callable[[Any, Any, Any], int]) -> int:
        number = ctypes.c_uint64()
        self._call(lambda raw, err: call(raw, byref(number), err))
        return number.value

    def close(self, timeout: Optional[float] = None) -> None:
        """Rejects new work and waits for work in flight. Raises `BusyError` while a store or a
        streamer uses the device, or after `timeout` seconds; then the call can be repeated."""
        if self.closed:
            return
        refuse_fork()
        end, err = deadline_after(time.monotonic_ns(), timeout), new_error()
        check_err(lib.kvt_device_close(byref(self._job.handle), end, byref(err)), err)
        self._released()


def _on_check(number: int, name: Any, name_bytes: int, verdict: int, why: Any,
              why_bytes: int) -> None:
    texts = (ctypes.string_at(text, length).decode("utf-8", "replace") if length else ""
             for text, length in ((name, name_bytes), (why, why_bytes)))
    check = ConformanceCheck(next(texts), _VERDICTS.get(verdict, "?"), next(texts))
    _callbacks.find(number).append(check)


on_check = _abi.kvt_conformance_fn(_on_check)
