"""Devices: copies, memory and events, and a custom device in Python."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import struct
import threading
import weakref
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import kvtier
import numpy as np
import pytest
from gate import HANG_S
from kvtier import DeviceCopy, Group, Identity, View, abi

SOON = HANG_S


def _runs(table: int, count: int) -> List[Tuple[int, int, int]]:
    """Decodes a table of KVT_DEVICE_KERNEL_MOVE to sources, targets and sizes."""
    pieces = struct.iter_unpack("<QQqqII", ctypes.string_at(table, 40 * count))
    return [(source + i * source_stride, target + i * target_stride, nbytes)
            for source, target, source_stride, target_stride, nbytes, runs in pieces
            for i in range(runs)]


class Accelerator:
    """A custom device with a thread per stream, whose memory is allocated by ctypes. Streams run
    concurrently, except for events."""

    streams = 2
    has_memory = True
    kernels = (abi.KVT_DEVICE_KERNEL_MOVE,)
    size = 64 << 20

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queues: Dict[int, List[Tuple[int, int, Any]]] = {0: [], 1: []}
        self._ended: Dict[int, bool] = {}
        self._memory: Dict[int, Any] = {}
        self._last = self._used = 0
        self._over = False
        self.pinned: Dict[int, int] = {}
        #: Events of `stream_wait`, which the library does not release.
        self.held: List[int] = []
        #: The exceptions of the next call, and of the next query.
        self.next_error: Any = None
        self.next_query_error: Any = None
        self._threads = [threading.Thread(target=self._serve, args=(stream,), daemon=True)
                         for stream in self._queues]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(SOON)
            assert not thread.is_alive()
        for event in self.held:
            self.release(event)
        assert not self._ended and not self._memory

    def create_event(self) -> int:
        """Creates an event of the engine."""
        with self._changed:
            self._last += 1
            self._ended[self._last] = False
            return self._last

    def complete(self, event: int) -> None:
        with self._changed:
            if event in self._ended:
                self._ended[event] = True
            self._changed.notify_all()

    def _raise(self) -> None:
        error, self.next_error = self.next_error, None
        if error is not None:
            raise error

    def _put(self, stream: int, after: int, work: Any) -> int:
        self._raise()
        with self._changed:
            if after and after not in self._ended:
                raise kvtier.HandleError("no such event", abi.KVT_E_HANDLE, "KVT_E_HANDLE")
            self._last += 1
            self._ended[self._last] = False
            self._queues[stream].append((self._last, after, work))
            self._changed.notify_all()
            return self._last

    def _serve(self, stream: int) -> None:
        queue = self._queues[stream]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over or queue)
                if not queue:
                    return
                event, after, work = queue[0]
                self._changed.wait_for(lambda: self._over or self._ended.get(after, True))
            for source, target, nbytes in work() if callable(work) else work:
                ctypes.memmove(target, source, nbytes)
            with self._changed:
                queue.pop(0)
            self.complete(event)

    def submit(self, stream: int, after: int, copies: List[kvtier.CopyRows]) -> int:
        return self._put(stream, after, [
            (c.source + i * c.source_stride, c.target + i * c.target_stride, c.run_bytes)
            for c in copies for i in range(c.runs)])

    def launch(self, stream: int, after: int, kernels: List[Any]) -> int:
        tables = [(k.table, k.count) for k in kernels]
        # Tables are read when the kernel runs.
        return self._put(stream, after, lambda: [run for at, n in tables for run in _runs(at, n)])

    def query(self, event: int) -> bool:
        error, self.next_query_error = self.next_query_error, None
        if error is not None:
            raise error
        with self._changed:
            return self._ended[event]

    def wait(self, event: int, deadline_ns: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended[event], 0.01)

    def release(self, event: int) -> None:
        with self._changed:
            self._ended.pop(event, None)

    def allocate(self, nbytes: int) -> int:
        self._raise()
        with self._changed:
            if nbytes > self.size - self._used:
                raise MemoryError
            memory = ctypes.create_string_buffer(nbytes + 256)
            address = -(-ctypes.addressof(memory) // 256) * 256
            self._memory[address] = memory
            self._used += nbytes
            return address

    def free(self, address: int, nbytes: int) -> None:
        with self._changed:
            del self._memory[address]
            self._used -= nbytes

    def free_bytes(self) -> int:
        return self.size - self._used

    def register_host(self, address: int, nbytes: int) -> None:
        if nbytes:
            self.pinned[address] = nbytes
        elif self.pinned.pop(address, None) is None:
            raise kvtier.NotFoundError("not pinned", abi.KVT_E_NOT_FOUND, "KVT_E_NOT_FOUND")

    def import_event(self, raw: int) -> int:
        return self._put(1, raw, [])

    def stream_wait(self, raw_stream: int, event: int) -> None:
        self.held.append(self._put(raw_stream, event, []))

    def signal_event(self, event: int) -> None:
        self.complete(event)


@pytest.fixture
def engine() -> Any:
    engine = Accelerator()
    yield engine
    engine.stop()


@pytest.fixture
def device(runtime: kvtier.Runtime, engine: Accelerator) -> Any:
    with kvtier.Device(runtime, engine) as device:
        yield device


def noise(seed: int, nbytes: int) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def test_a_custom_device_passes_the_conformance_suite(device: kvtier.Device) -> None:
    info = device.info
    assert (info.kind, info.streams, info.kernels) == ("custom", 2, (abi.KVT_DEVICE_KERNEL_MOVE,))
    assert info.asynchronous and info.has_memory and not info.checksums
    assert info.free_bytes == Accelerator.size
    assert "custom" in device.describe()
    report = device.conformance(seed=3, rounds=2)
    assert [check for check in report.checks if check.verdict == "failed"] == []
    assert report.failed == 0 and report.passed >= 10
    assert len(report.checks) == report.passed + report.skipped


def test_the_conformance_suite_fails_a_wrong_device(runtime: kvtier.Runtime,
                                                    engine: Accelerator) -> None:
    class Wrong(Accelerator):
        def submit(self, stream: int, after: int, copies: List[kvtier.CopyRows]) -> int:
            return super().submit(stream, after, [c._replace(runs=c.runs - 1) if c.runs > 1
                                                  else c for c in copies])
    wrong = Wrong()
    with kvtier.Device(runtime, wrong) as device:
        report = device.conformance(rounds=1)
        assert report.failed > 0
        assert all(check.why for check in report.checks if check.verdict == "failed")
    wrong.stop()


def test_copies_and_kernels_transfer_exact_bytes(device: kvtier.Device) -> None:
    tokens, heads, run, gap = 33, 2, 48, 16
    step, plane = heads * run + gap, tokens * heads * run
    source = np.frombuffer(noise(1, tokens * step), dtype=np.uint8)
    image = source.reshape(tokens, step)[:, : heads * run].tobytes()
    view = View(source, run, heads, token_stride=step)
    with device.alloc(plane) as memory, device.alloc(plane) as other:
        assert memory.on_device and memory.address % 256 == 0 and len(memory) == plane
        gathered = device.copy([DeviceCopy(view, memory)])
        back = bytearray(plane)
        with device.download(memory, back, stream=1, after=gathered) as downloaded:
            downloaded.wait(SOON)
            assert bytes(back) == image and downloaded.done and gathered.done
        table = struct.pack("<QQqqII", memory.address, other.address, 0, 0, plane, 1)
        pieces = ctypes.create_string_buffer(table)
        kernel = abi.kvt_kernel_t(kind=abi.KVT_DEVICE_KERNEL_MOVE, table=ctypes.addressof(pieces), count=1)
        moved = device.launch([kernel])
        again = np.zeros(tokens * step, dtype=np.uint8)
        to = View(again, run, heads, token_stride=step)
        device.copy([DeviceCopy(to, other, scatter=True, first_token=1, tokens=tokens - 2)],
                    after=moved.number).close(SOON)
        rows = again.reshape(tokens, step)
        assert rows[1 : tokens - 1, : heads * run].tobytes() == image[: (tokens - 2) * heads * run]
        assert not rows[0].any() and not rows[-1].any() and not rows[:, heads * run :].any()
        with pytest.raises(kvtier.InvalidError):
            device.copy([DeviceCopy(view, memory, plane_offset=1)])
        with pytest.raises(kvtier.InvalidError):
            device.copy([DeviceCopy(View(memory, run, offset=plane), back)])
        with pytest.raises(kvtier.InvalidError):
            device.upload(back, memory, stream=9)
        kernel.kind = abi.KVT_DEVICE_KERNEL_DECODE
        with pytest.raises(kvtier.UnsupportedError):
            device.launch([kernel])
        for event in (gathered, moved):
            event.close(SOON)
    assert memory.closed
    with pytest.raises(kvtier.ClosedError):
        device.upload(back, memory)
    with pytest.raises(kvtier.ClosedError):
        device.copy(after=gathered)


def test_copies_wait_for_an_imported_event(device: kvtier.Device, engine: Accelerator) -> None:
    data, back = noise(2, 5000), bytearray(5000)
    memory = device.alloc(5000)
    computed = engine.create_event()
    imported = device.import_event(computed)
    uploaded = device.upload(data, memory, after=imported)
    device.stream_wait(1, uploaded)
    downloaded = device.download(memory, back, stream=1)
    assert not (imported.done or uploaded.done or downloaded.done)
    with pytest.raises(kvtier.TimeoutError):
        downloaded.wait(0.02)
    with pytest.raises(kvtier.BusyError):
        downloaded.close(0.0)
    engine.complete(computed)
    downloaded.wait(SOON)
    assert bytes(back) == data
    completed = device.poll()
    assert uploaded.number in completed and downloaded.number in completed
    engine.release(computed)
    with device.create_event() as user_event:
        back[:] = bytes(5000)
        again = device.download(memory, back, after=user_event)
        assert not (user_event.done or again.done)
        user_event.signal()
        again.wait(SOON)
        assert bytes(back) == data
    with device.create_event() as user_event:
        again = device.download(memory, back, after=user_event)
    again.wait(SOON)
    with pytest.raises(kvtier.HandleError):
        device.import_event(1 << 40)
    device.register_host(memory.address, 4096)
    assert engine.pinned == {memory.address: 4096}
    device.unregister_host(memory.address)
    with pytest.raises(kvtier.NotFoundError):
        device.unregister_host(memory.address)


def test_a_dropped_event_keeps_its_objects_until_it_completes(device: kvtier.Device,
                                                              engine: Accelerator) -> None:
    memory, data = device.alloc(9000), noise(4, 9000)
    computed = engine.create_event()
    device.upload(bytearray(data), memory, after=device.import_event(computed))
    gc.collect()
    engine.complete(computed)
    back = bytearray(9000)
    device.download(memory, back).close(SOON)
    assert bytes(back) == data
    engine.release(computed)


def test_an_exception_of_a_custom_device_becomes_a_status(device: kvtier.Device,
                                                          engine: Accelerator,
                                                          unraisable: List[Any]) -> None:
    memory = device.alloc(64)
    engine.next_error = ZeroDivisionError("in the engine")
    with pytest.raises(kvtier.StateError):
        device.upload(b"x" * 64, memory)
    assert [type(error) for error in unraisable] == [ZeroDivisionError]
    engine.next_error = kvtier.IoError("the link", abi.KVT_E_IO, "KVT_E_IO")
    with pytest.raises(kvtier.IoError):
        device.upload(b"x" * 64, memory)
    with pytest.raises(kvtier.NoMemoryError):
        device.alloc(Accelerator.size)
    assert len(unraisable) == 1
    back = bytearray(64)
    device.upload(b"y" * 64, memory).close(SOON)
    device.download(memory, back).close(SOON)
    assert bytes(back) == b"y" * 64
    with pytest.raises(kvtier.InvalidError):
        device.alloc(0)


def test_an_event_is_queried_again_after_an_exception(device: kvtier.Device, engine: Accelerator,
                                                      unraisable: List[Any]) -> None:
    memory, back = device.alloc(64), bytearray(64)
    for error in (KeyboardInterrupt(), MemoryError()):
        device.upload(b"z" * 64, memory).close(SOON)
        downloaded = device.download(memory, back)
        engine.next_query_error = error
        downloaded.wait(SOON)
        assert engine.next_query_error is None and bytes(back) == b"z" * 64
        downloaded.close(SOON)
    assert [type(error) for error in unraisable] == [KeyboardInterrupt, MemoryError]


def test_a_store_transfers_device_memory(runtime: kvtier.Runtime, device: kvtier.Device) -> None:
    tokens, run = 16, 64
    plane = tokens * run
    image, empty, found = noise(5, 4 * plane), bytes(4 * plane), bytearray(4 * plane)
    groups = [Group(layers=[0, 1], k_bytes=run, v_bytes=run)]
    cache = device.alloc(4 * plane)
    k, v = ([View(cache, run, offset=(2 * layer + part) * plane) for layer in range(2)]
            for part in range(2))
    with kvtier.Store(runtime, host_bytes=1 << 20, device=device) as store:
        with pytest.raises(kvtier.BusyError):
            device.close(0.1)
        namespace = store.namespace(Identity(model=b"m"), chunk_tokens=4, groups=groups)
        with namespace, namespace.session() as session:
            session.append(list(range(tokens)))
            device.upload(image, cache).close(SOON)
            assert session.put(k, v).result(SOON).value == tokens
            device.upload(empty, cache).close(SOON)
            assert session.get(k, v).result(SOON).value == tokens
            device.download(cache, found).close(SOON)
    assert bytes(found) == image


def test_an_op_keeps_the_event_that_it_waits_for(runtime: kvtier.Runtime,
                                                 device: kvtier.Device) -> None:
    tokens, run = 8, 64
    cache, groups = device.alloc(tokens * run), [Group(layers=[0], k_bytes=run)]

    def check(begin: Callable[[kvtier.UserEvent], List[kvtier.Op]]) -> None:
        event = device.create_event()
        reference, ops = weakref.ref(event), begin(event)
        del event
        gc.collect()
        kept = reference()
        assert kept is not None and not any(op.info().released for op in ops)
        kept.signal()
        del kept
        for op in ops:
            op.result(SOON)
            assert reference() is not None
            op.close()
        gc.collect()
        assert reference() is None

    with kvtier.Store(runtime, host_bytes=1 << 20, device=device) as store:
        namespace = store.namespace(Identity(model=b"m"), chunk_tokens=4, groups=groups)
        with namespace, namespace.session() as session:
            session.append(list(range(tokens)))
            views = [View(cache, run)]
            check(lambda event: [session.put(views, after=event)])
            check(lambda event: [session.get(views, after=event)])
            check(lambda event: session.get_each(views, after=event))
        with kvtier.Blocks(store, Identity(model=b"b"), [run]) as blocks:
            pool, names = kvtier.Pool(cache, run), [b"one", b"two"]
            check(lambda event: [blocks.put(names, pool.at([0, 1]), after=event)])
            check(lambda event: [blocks.get(names, pool.at([2, 3]), after=event)])
    cache.close()


def test_a_streamer_loads_units_to_device_memory(runtime: kvtier.Runtime, device: kvtier.Device,
                                                 engine: Accelerator, tmp_path: Path) -> None:
    units, nbytes = 5, 40960
    image = noise(6, units * nbytes)
    path = tmp_path / "weights"
    path.write_bytes(image)
    entries = [kvtier.UnitEntry(f"layer {i}", [(0, i * nbytes, nbytes)],
                                role=kvtier.ROLE_LAYER, layer=i) for i in range(units)]
    terms = kvtier.StreamTerms(device_ceiling_bytes=3 * nbytes, device_safety_bytes=0,
                               kv_bytes=0, host_reserve_bytes=0)
    view = bytearray(nbytes)
    with kvtier.Model.table([path], entries) as model, \
            kvtier.Streamer(runtime, model, terms, device=device) as streamer:
        for number in range(2 * units):
            unit = streamer.acquire(number % units, SOON, submitted=True)
            assert unit.on_device
            with pytest.raises(kvtier.UnsupportedError):
                unit.data
            device.download(unit, view, after=unit.event).close(SOON)
            start = unit.unit * nbytes
            assert bytes(view) == image[start : start + nbytes]
            computed = engine.create_event()
            unit.release(device.import_event(computed))
            assert unit.released
            engine.complete(computed)
            engine.release(computed)
            with pytest.raises(kvtier.StateError):
                unit.release(device.copy())
            with pytest.raises(kvtier.StateError):
                device.download(unit, view)


def test_host_and_simulated_devices_copy_and_sum(runtime: kvtier.Runtime) -> None:
    with kvtier.Device(runtime) as host:
        assert host.info.kind == "host" and host.info.checksums and not host.info.asynchronous
        source, target = noise(7, 5000), bytearray(5000)
        event = host.copy([DeviceCopy(View(source, 100), target, checksum=True)])
        assert event.done and bytes(target) == source
        assert event.checksums == [kvtier.checksum(source)]
        assert host.copy().checksums == []
    with kvtier.Device(runtime, "simulated", memory_bytes=1 << 20, latency_ns=100_000) as one:
        assert one.info.free_bytes == 1 << 20
        with pytest.raises(kvtier.NoMemoryError):
            one.alloc(1 << 21)
        memory, back = one.alloc(5000), bytearray(5000)
        uploaded = one.upload(source, memory)
        one.download(memory, back, stream=1, after=uploaded).close(SOON)
        assert bytes(back) == source
        event = one.copy([DeviceCopy(View(memory, 5000), source, scatter=True, tokens=1,
                                     checksum=True)])
        event.wait(SOON)
        assert event.checksums == [None], "the device was opened without verify"
        # Without a wait: the event keeps its objects, and the device waits when it closes.
        one.upload(source, memory)
    with kvtier.Device(runtime, "simulated", verify=True) as one:
        memory = one.alloc(5000)
        plain = DeviceCopy(View(memory, 5000), source, scatter=True, tokens=1)
        summed = dataclasses.replace(plain, checksum=True)
        with one.copy([plain, summed]) as event:
            assert one.info.checksums and event.checksums == [None, None]
            event.wait(SOON)
            assert event.checksums == [None, kvtier.checksum(source)]
    with pytest.raises(kvtier.ClosedError):
        one.info
    with pytest.raises(kvtier.UnavailableError):
        kvtier.Device(runtime, "cuda", library="/nowhere/libcuda.so.1")
    with pytest.raises(kvtier.InvalidError):
        kvtier.Device(runtime, "abacus")
    with pytest.raises(kvtier.InvalidError):
        kvtier.Device(runtime, "host", seed=1)
    with pytest.raises(kvtier.InvalidError):
        kvtier.Device(runtime, object())


def test_pack_index_encodes_heads_starts_and_items() -> None:
    """Heads, starts and items are contiguous; an unaligned address is rejected."""
    lines = kvtier.IndexHead(kvtier.IndexKind.LINES, first=0, lists=2)
    index = kvtier.Index.of([lines], [[0, 5], [0]])
    kernel = abi.kvt_kernel_t(kind=abi.KVT_DEVICE_KERNEL_PREFILL, query_heads=4, key_heads=2,
                              query_count=10, first=54, tokens=64)
    content = kvtier.kernels.pack_index(index, kernel, 0x1000)
    assert struct.unpack("<6I", content[:24])[:3] == (int(kvtier.IndexKind.LINES), 0, 2)
    assert struct.unpack("<3I3I", content[24:]) == (0, 2, 3, 0, 5, 0)
    assert (kernel.count, kernel.numbers, kernel.counts) == (1, 0x1000, 0x1018)
    assert (kernel.index, kernel.scratch_bytes) == (0x1024, 12 * (64 // 32 + 8))
    with pytest.raises(kvtier.InvalidError):
        kvtier.kernels.pack_index(index, kernel, 0x1001)
    assert kvtier.kernels.pack_index(kvtier.Index(), kernel, 0x1000) == b"" and kernel.count == 0
