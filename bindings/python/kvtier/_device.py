"""Devices: who copies between your memory and the library's."""

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
from ._view import Place, View, fill, kind_of, lend

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
    """What a device is and can do."""

    #: "host", "cuda", "simulated" or "custom".
    kind: str
    #: Work goes on after a call has returned.
    asynchronous: bool
    #: It sums what it copies.
    sums: bool
    #: It has memory that only it reaches.
    has_memory: bool
    #: Host memory that copies use is to be made known: `Device.register_host`.
    wants_pinned: bool
    #: How many it has: work on one is in order.
    streams: int
    #: Numbers of the kernels it has, `abi.KVT_DEVICE_KERNEL_*`.
    kernels: Tuple[int, ...]
    #: What it has left to give; None where it does not know.
    free_bytes: Optional[int]


class Check(NamedTuple):
    """Something that a device was put to."""

    name: str
    #: "passed", "skipped" or "failed".
    verdict: str
    why: str


class Conformance(NamedTuple):
    """How a device did."""

    passed: int
    skipped: int
    failed: int
    checks: List[Check]


@dataclass(frozen=True)
class DeviceCopy:
    """A copy between tokens as you have them (`view`, which has to fit) and a plane: the same
    tokens, heads and numbers without gaps, from `plane_offset` on in an object or in
    `DeviceMemory`."""

    view: View
    plane: Any
    #: From the plane into the view; else from the view into the plane.
    scatter: bool = False
    first_token: int = 0
    #: 0 = all that the view has.
    tokens: int = 0
    plane_offset: int = 0
    #: Its checksum is wanted, of devices that sum.
    sum: bool = False


class DeviceJob(_reaper.Job):
    """Closes a device; busy while a store or a streamer has it."""

    __slots__ = ()

    def attempt(self) -> int:
        return int(lib.kvt_device_close(byref(self.handle), _reaper.slice_deadline(), None))


class _MemoryJob(_reaper.Job):
    """Gives memory of a device back. Its handle is the device's."""

    __slots__ = ("memory",)

    def __init__(self, device: int, memory: Any) -> None:
        super().__init__(_abi.kvt_device_p(device), _reaper.RANK_BUFFER)
        self.memory = memory

    def attempt(self) -> int:
        return int(lib.kvt_device_free(self.handle, byref(self.memory), None))


class _EventJob(_reaper.Job):
    """Forgets an event that has ended, and then what its copies use."""

    __slots__ = ("number", "kept", "owned")

    def __init__(self, device: int, number: int, kept: List[Any]) -> None:
        super().__init__(_abi.kvt_device_p(device), _reaper.RANK_OP)
        self.number, self.kept, self.owned = number, kept, True

    def attempt(self) -> int:
        if self.owned:
            one = ctypes.c_uint64(self.number)
            return int(lib.kvt_device_release(self.handle, byref(one), 1, None))
        # Somebody else forgets it, who waits until it has ended.
        status = int(lib.kvt_device_query(self.handle, self.number))
        return _abi.KVT_E_BUSY if status == _abi.KVT_E_AGAIN else _abi.KVT_OK

    def done(self) -> None:
        self.kept = []
        super().done()


class _PromiseJob(_EventJob):
    """Keeps a promise that was let go of, and forgets it."""

    __slots__ = ()

    def attempt(self) -> int:
        lib.kvt_device_signal_event(self.handle, self.number, None)
        return super().attempt()


class DeviceMemory(Resource, Place):
    """Memory of a device (`Device.alloc`), given back when it is closed or let go of. What was
    submitted with it keeps it."""

    _noun = "memory of a device"

    def __init__(self, device: "Device", nbytes: int) -> None:
        memory, err = _abi.kvt_device_memory_t(), new_error()
        raw = device._raw
        check_err(lib.kvt_device_alloc(raw, u64(nbytes), byref(memory), byref(err)), err)
        self._device, self._memory = device, memory
        #: Where it starts: a multiple of 256.
        self.address: int = memory.address
        self.nbytes: int = memory.bytes
        self.on_device: bool = memory.memory == _abi.KVT_MEMORY_DEVICE
        self._own(_MemoryJob(raw.value, memory))

    def __len__(self) -> int:
        return self.nbytes

    def _check(self, writable: bool) -> None:
        self._raw  # noqa: B018: it is open, and this is no forked child

    def close(self) -> None:
        """Gives it back; `BusyError` while work under way is seen to use it."""
        if self.closed:
            return
        err = new_error()
        check_err(lib.kvt_device_free(self._raw, byref(self._memory), byref(err)), err)
        self._released()


class DeviceEvent(Closing):
    """A moment on a stream of a device. It keeps what its copies use until it has come."""

    _noun = "event of a device"

    def __init__(self, device: "Device", number: int, kept: List[Any],
                 sums: Sequence[Optional[int]] = (), wants: Sequence[bool] = ()) -> None:
        self._device = device
        self._wants = wants
        #: What it is called where an event is asked for.
        self.number: int = number
        #: The checksum of each copy that asked for it; of an asynchronous device they are there
        #: when it was waited for.
        self.sums: List[Optional[int]] = list(sums)
        self._own(self._job_of(device._raw.value, number, kept))

    def _job_of(self, device: int, number: int, kept: List[Any]) -> _EventJob:
        return _EventJob(device, number, kept)

    @property
    def done(self) -> bool:
        """Whether it has come; raises what its batch failed with."""
        status = lib.kvt_device_query(self._raw, self.number)
        if status == _abi.KVT_E_AGAIN:
            return False
        check(status)
        return True

    def wait(self, timeout: Optional[float] = None) -> None:
        """Until it has come; raises `TimeoutError`, or what its batch failed with."""
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
        told = iter(sums[: count.value])
        self.sums = [next(told, None) if want else None for want in self._wants]
        self._wants = ()

    def close(self, timeout: Optional[float] = None) -> None:
        """Waits until it has come, however that went, and forgets it; `BusyError` when time
        runs out, and then it can be tried again."""
        if self.closed:
            return
        raw, err, one = self._raw, new_error(), ctypes.c_uint64(self.number)
        end = deadline_after(time.monotonic_ns(), timeout)
        lib.kvt_device_wait(raw, self.number, end, None)
        check_err(lib.kvt_device_release(raw, byref(one), 1, byref(err)), err)
        self._released()

    def _taken_over(self) -> None:
        """Somebody else forgets it; what its copies use stays until it has come."""
        job = self._job
        job.owned = False
        self._finalizer.detach()
        rest = _EventJob(self._device._raw.value, job.number, job.kept)
        rest.owned = False
        self._released()
        _reaper.bury(rest)


#: An event, its number, or none.
class UserEvent(DeviceEvent):
    """An event that comes when `keep` says so. Closing it keeps it, too."""

    _noun = "promise of a device"

    def _job_of(self, device: int, number: int, kept: List[Any]) -> _EventJob:
        return _PromiseJob(device, number, kept)

    def signal(self) -> None:
        """It comes, if it has not."""
        err = new_error()
        check_err(lib.kvt_device_signal_event(self._raw, self.number, byref(err)), err)

    def close(self, timeout: Optional[float] = None) -> None:
        if not self.closed:
            self.signal()
        super().close(timeout)


After = Union[DeviceEvent, int, None]


def number_of(event: After, kept: Optional[List[Any]] = None) -> int:
    """What C calls an event; 0 = none. `kept` has it stay as long as what is behind it."""
    if isinstance(event, DeviceEvent):
        event._raw  # noqa: B018: a closed one is no event any more
        if kept is not None:
            kept.append(event)
        return event.number
    return u64(event or 0)


def _lower(row: Any, copy: DeviceCopy, kept: List[Any]) -> None:
    """A copy for C, checked against the objects it uses."""
    fill(row.view, copy.view, copy.scatter, kept)
    view, plane = row.view, lend(copy.plane, not copy.scatter, kept)
    row.plane_memory, row.first_token, row.tokens = (
        kind_of(plane), u32(copy.first_token), u32(copy.tokens))
    row.direction = _abi.KVT_COPY_SCATTER if copy.scatter else _abi.KVT_COPY_GATHER
    row.flags = _abi.KVT_COPY_CHECKSUM if copy.sum else 0
    has = view.page_count * view.page_tokens if view.pages else view.tokens
    tokens = row.tokens or max(0, has - row.first_token)
    needed = tokens * view.heads * view.run_bytes
    if u64(copy.plane_offset) + needed > plane.nbytes:
        raise make(_abi.KVT_E_INVALID, f"{needed} bytes from {copy.plane_offset} on lead out of "
                                       f"a plane of {plane.nbytes}")
    row.plane = plane.address + copy.plane_offset


class Device(Closing):
    """PolicyContext copies between your memory and the library's: "host", "cuda", "simulated" (none at
    all, for tests: it takes its time and spoils what is not waited for), or one of your own.
    Stores and streamers are opened with one. Any thread may use it.

    A device of your own is any object with these methods, those after the first two where it
    has them; they are called from any thread, from several at once, and must not call the
    device they are of::

        submit(stream, after, copies) -> event      query(event) -> bool
        wait(event, deadline_ns)     release(event)     free_bytes() -> int
        allocate(nbytes) -> address  free(address, nbytes)
        register_host(address, nbytes)   (0 bytes: it goes)
        import_event(raw) -> event          stream_wait(raw_stream, event)
        launch(stream, after, kernels) -> event
        create_event() -> event           signal_event(event)   (it comes then)

    and with these attributes, where they are not as here: `streams = 1`, `has_memory = False`,
    `wants_pinned = False`, `kernels = ()`. Copies are a list of `CopyRows`, events any numbers
    but 0; `after` is 0 or an event that comes before. A `kvtier.Error` that is raised is the
    status; what else is raised is a `StateError`, and goes to `sys.unraisablehook`; of `query` it
    is no answer, and the event is asked for again. What is
    refused must not have begun. `release`, `allocate`, `free` and `free_bytes` must call
    nothing of the library and wait for nobody. `conformance` says whether all is as it should
    be.

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

    _noun = "device"

    def __init__(self, runtime: "Runtime", what: Union[str, Any] = "host", *, ordinal: int = 0,
                 context: int = 0, streams: Sequence[int] = (),
                 library: "Union[str, os.PathLike[str]]" = "", peers: Sequence[int] = (),
                 verify: bool = False, memory_bytes: int = 0,
                 seed: int = 0, latency_ns: int = 0, bytes_per_s: int = 0,
                 arena: int = 0, arena_bytes: int = 0,
                 cufile: "Union[str, os.PathLike[str]]" = "") -> None:
        """CUDA: the GPU `ordinal`, or of your `context`, with `streams` of that; `library` is
        the path of the driver's, `cufile` that of cuFile's; copies may name the memory of its
        `peers`, other ordinals, too; what it gives out comes from your memory at `arena`, if
        there is some. Simulated: `memory_bytes` to `bytes_per_s`. Both: with `verify` it sums
        what it copies, where it lies in its memory, and stores compare."""
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
        if not isinstance(what, str):
            table, number = table_for_c(what)
            opts.kind, opts.custom = _abi.KVT_DEVICE_KIND_CUSTOM, ctypes.pointer(table)
        elif what in _KINDS:
            opts.kind = _KINDS[what]
        else:
            raise make(_abi.KVT_E_INVALID, f"{what!r} is none of {', '.join(_KINDS)}")
        self._runtime = runtime
        handle, err = _abi.kvt_device_p(), new_error()
        status = lib.kvt_device_open(runtime._raw, byref(opts), byref(handle), byref(err))
        if status != _abi.KVT_OK and number:
            _callbacks.forget(number)
        check_err(status, err)
        self._own(DeviceJob(handle, _reaper.RANK_ACCOUNT))

    @property
    def info(self) -> DeviceInfo:
        """What it is and can do."""
        c = _abi.kvt_device_info_t()
        check(lib.kvt_device_info(self._raw, byref(c)))
        return DeviceInfo(
            _NAMES.get(c.kind, str(c.kind)), bool(c.flags & _abi.KVT_DEVICE_ASYNCHRONOUS),
            bool(c.flags & _abi.KVT_DEVICE_CHECKSUMS), bool(c.flags & _abi.KVT_DEVICE_HAS_MEMORY),
            bool(c.flags & _abi.KVT_DEVICE_WANTS_PINNED), c.streams,
            tuple(kind for kind in range(64) if c.kernels >> kind & 1),
            None if c.free_bytes == 2**64 - 1 else c.free_bytes)

    def describe(self) -> str:
        """The same for logs."""
        raw, room, n = self._raw, 256, ctypes.c_uint64()
        while True:
            to = ctypes.create_string_buffer(room)
            status = lib.kvt_device_describe(raw, to, room, byref(n))
            if status != _abi.KVT_E_TOO_SMALL:
                check(status)
                return to.raw[: n.value].decode()
            room = n.value

    def alloc(self, nbytes: int) -> DeviceMemory:
        """Sets memory aside."""
        return DeviceMemory(self, nbytes)

    def register_host(self, address: int, nbytes: int) -> None:
        """Copies will use this host memory again and again. Where CUDA cannot pin it, they are
        slower, and `describe` says so. The memory stays until `unregister_host`."""
        self._call(lambda raw, err: lib.kvt_device_register_host(raw, u64(address), u64(nbytes), err))

    def unregister_host(self, address: int) -> None:
        """Takes that back, before the memory goes."""
        self._call(lambda raw, err: lib.kvt_device_unregister_host(raw, u64(address), err))

    def copy(self, copies: Iterable[DeviceCopy] = (), *, stream: int = 0,
             after: After = None) -> DeviceEvent:
        """Puts copies on a stream, behind an event if one is given; the event of their end.
        Without copies it marks the place."""
        given = list(copies)
        kept: List[Any] = []
        rows = (_abi.kvt_copy_t * len(given))()
        for row, copy in zip(rows, given):
            _lower(row, copy, kept)
        event = self._event(lambda raw, out, err: lib.kvt_device_copy(
            raw, u32(stream), number_of(after), rows, len(given), ctypes.sizeof(_abi.kvt_copy_t),
            out, err))
        info = self.info if any(copy.sum for copy in given) else None
        wants = [bool(info and info.sums and copy.sum) for copy in given]
        if info and info.asynchronous:
            return DeviceEvent(self, event, kept, [None] * len(given), wants)
        return DeviceEvent(self, event, kept,
                           [row.sum if want else None for row, want in zip(rows, wants)])

    def upload(self, source: Any, memory: DeviceMemory, *, offset: int = 0, stream: int = 0,
               after: After = None) -> DeviceEvent:
        """Plain bytes of an object into memory, from `offset` on."""
        return self._plain(source, memory, offset, True, stream, after)

    def download(self, memory: Place, target: Any, *, offset: int = 0, stream: int = 0,
                 after: After = None) -> DeviceEvent:
        """Plain bytes of memory (or of a `StreamUnit`), from `offset` on, into a writable object,
        which they fill."""
        return self._plain(target, memory, offset, False, stream, after)

    def _plain(self, host: Any, memory: Place, offset: int, up: bool, stream: int,
               after: After) -> DeviceEvent:
        kept: List[Any] = []
        nbytes = lend(host, not up, kept).nbytes
        one = DeviceCopy(View(memory, nbytes, offset=offset), host, scatter=up, tokens=1)
        return self.copy([one], stream=stream, after=after)

    def launch(self, kernels: Sequence[Any], *, stream: int = 0,
               after: After = None) -> DeviceEvent:
        """Puts kernels (`abi.kvt_kernel_t`) on a stream. You keep the memory that they name
        until the event."""
        rows = (_abi.kvt_kernel_t * len(kernels))(*kernels)
        event = self._event(lambda raw, out, err: lib.kvt_device_launch(
            raw, u32(stream), number_of(after), rows, len(kernels),
            ctypes.sizeof(_abi.kvt_kernel_t), out, err))
        return DeviceEvent(self, event, [])

    def poll(self, most: int = 256) -> List[int]:
        """Numbers of events that have ended, well or not, each told once."""
        room, n = min(u64(most), _MOST_EVENTS), ctypes.c_uint64()
        events = (ctypes.c_uint64 * max(1, room))()
        check(lib.kvt_device_poll(self._raw, events, room, byref(n)))
        return list(events[: n.value])

    def import_event(self, raw_event: int, keep: object = None) -> DeviceEvent:
        """An event that comes with one of yours: for CUDA a CUevent that was recorded. Yours has
        to stay until then: `keep`, the object that it goes with, is held so long."""
        event = self._event(lambda raw, out, err: lib.kvt_device_import_event(
            raw, u64(raw_event), out, err))
        return DeviceEvent(self, event, [keep])

    def stream_wait(self, raw_stream: int, event: After) -> None:
        """A stream of yours (for CUDA a CUstream) goes on only when an event has come."""
        self._call(lambda raw, err: lib.kvt_device_stream_wait(
            raw, u64(raw_stream), number_of(event), err))

    def hold_op(self, raw_stream: int, op: Op) -> None:
        """A stream of yours goes on only when an op was released, well or not."""
        self._call(lambda raw, err: lib.kvt_device_stream_wait_op(
            raw, u64(raw_stream), op._raw, err))

    def create_event(self) -> UserEvent:
        """An event that comes when it is kept: what is behind it waits until then."""
        event = self._event(lambda raw, out, err: lib.kvt_device_create_event(raw, out, err))
        return UserEvent(self, event, [])

    def conformance(self, *, seed: int = 0, rounds: int = 0, patience: Optional[float] = None,
                    closes: bool = False) -> Conformance:
        """Puts it to the test; nothing else should use it meanwhile. `patience` is how many
        seconds an event may take, None = 30. `closes`: it is closed at the end."""
        opts = _abi.kvt_conformance_opts_t(
            flags=_abi.KVT_CONFORMANCE_CLOSES if closes else 0, seed=u64(seed),
            patience_ns=0 if patience is None else max(1, u64(int(patience * 1e9))),
            rounds=u32(rounds))
        heard: List[Check] = []
        number, count = _callbacks.register(heard), _abi.kvt_conformance_report_t()
        try:
            self._call(lambda raw, err: lib.kvt_device_conformance(
                raw, byref(opts), on_check, number, byref(count), err))
        finally:
            _callbacks.forget(number)
        return Conformance(count.passed, count.skipped, count.failed, heard)

    def _call(self, call: Callable[[Any, Any], int]) -> None:
        err = new_error()
        check_err(call(self._raw, byref(err)), err)

    def _event(self, call: Callable[[Any, Any, Any], int]) -> int:
        number = ctypes.c_uint64()
        self._call(lambda raw, err: call(raw, byref(number), err))
        return number.value

    def close(self, timeout: Optional[float] = None) -> None:
        """Refuses new work and waits for what is under way; `BusyError` while a store or a
        streamer has it, or when time runs out, and then it can be tried again."""
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
    _callbacks.find(number).append(Check(next(texts), _VERDICTS.get(verdict, "?"), next(texts)))


on_check = _abi.kvt_conformance_fn(_on_check)
