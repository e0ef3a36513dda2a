"""Buffers: memory shared with Python, which lives until the last view is gone."""

from __future__ import annotations

import gc
import mmap
import sys
import weakref

import kvtier
import numpy as np
import pytest
from gate import HANG_S, Gate
from kvtier import _callbacks, _reaper


def test_views_share_the_memory(runtime: kvtier.Runtime) -> None:
    buffer = runtime.buffer(1 << 16)
    view = buffer.view()
    assert view.nbytes == len(buffer) == 1 << 16 and not view.readonly and view.format == "B"
    array = np.frombuffer(buffer.view(), np.float32)
    array[5] = 2.5
    assert view[20:24] == np.float32(2.5).tobytes()
    flat = np.asarray(buffer)
    assert flat.dtype == np.uint8 and flat.ctypes.data == buffer.address
    flat[0] = 77
    assert view[0] == 77
    view[1] = 88
    assert flat[1] == 88


@pytest.mark.skipif(sys.version_info < (3, 12), reason="__buffer__ is Python 3.12")
def test_a_buffer_has_the_buffer_protocol(runtime: kvtier.Runtime) -> None:
    buffer = runtime.buffer(4096)
    memoryview(buffer)[3] = 9  # type: ignore[arg-type]
    assert np.frombuffer(buffer, np.uint8)[3] == 9  # type: ignore[call-overload]


def test_torch_shares_the_memory(runtime: kvtier.Runtime) -> None:
    torch = pytest.importorskip("torch")
    buffer = runtime.buffer(4096)
    tensor = torch.frombuffer(buffer.view(), dtype=torch.float32)
    tensor[0] = 1.5
    assert np.frombuffer(buffer.view(), np.float32)[0] == 1.5


def test_the_library_writes_what_numpy_reads(runtime: kvtier.Runtime) -> None:
    source, target = runtime.buffer(1 << 20), runtime.buffer(1 << 20)
    np.asarray(source)[:] = np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8)
    runtime.copy(target, source).result(HANG_S)
    assert np.array_equal(np.asarray(source), np.asarray(target))


def test_views_keep_the_memory_of_a_closed_buffer(runtime: kvtier.Runtime) -> None:
    buffer = runtime.buffer(1 << 20)
    memory = weakref.ref(buffer._memory)
    array = np.asarray(buffer)
    half = array[1 << 19 :].view(np.uint64)
    assert buffer.exported
    buffer.close()
    assert buffer.closed and memory() is not None
    half[:] = 7
    assert array[1 << 19] == 7
    del array
    assert memory() is not None
    del half
    gc.collect()
    assert memory() is None


def test_memory_outlives_its_runtime() -> None:
    runtime = kvtier.Runtime(workers=1)
    view = runtime.buffer(4096).view()
    assert runtime.close().buffers == 1
    view[:] = b"x" * 4096
    assert bytes(view[:3]) == b"xxx"


def test_use_of_a_closed_buffer_raises_closed_error(runtime: kvtier.Runtime) -> None:
    buffer, other = runtime.buffer(4096), runtime.buffer(4096)
    buffer.close()
    buffer.close()
    for use in (buffer.view, buffer.info, lambda: len(buffer), lambda: buffer.address,
                lambda: np.asarray(buffer.view()), buffer.__enter__,
                lambda: runtime.copy(other, buffer, 16),
                lambda: runtime.copy(buffer, other)):
        with pytest.raises(kvtier.ClosedError, match="this buffer is closed"):
            use()  # type: ignore[no-untyped-call]
    assert "closed" in repr(buffer)


def test_a_buffer_in_flight_is_not_closed(single: kvtier.Runtime, gate: Gate) -> None:
    buffer = single.buffer(4096)
    op = single.submit([gate.work, kvtier.Work.prefault(buffer)])
    with pytest.raises(kvtier.BusyError):
        buffer.close()
    gate.open()
    op.result(HANG_S)
    buffer.close()


def test_a_dropped_buffer_in_flight_is_freed_after_the_op(single: kvtier.Runtime,
                                                          gate: Gate) -> None:
    memory = bytearray(4096)
    with single.wrap(memory) as buffer:
        op = single.submit([gate.work, kvtier.Work.checksum(buffer)])
    del buffer
    with pytest.raises(BufferError):
        memory.append(1)  # the library still reads the memory
    gate.open()
    op.result(HANG_S)
    assert _reaper.flush(HANG_S)
    memory.append(1)


def test_wrap_holds_its_object_until_it_is_freed(runtime: kvtier.Runtime) -> None:
    class Array(np.ndarray):  # type: ignore[type-arg]
        pass

    array = np.zeros(8192, np.uint8).view(Array)
    reference = weakref.ref(array)
    buffer = kvtier.Buffer.wrap(runtime, array)
    assert buffer.address == array.ctypes.data and buffer.info().pages == "foreign"
    source = runtime.buffer(8192)
    source.view()[:] = b"\5" * 8192
    runtime.copy(buffer, source).result(HANG_S)
    assert (array == 5).all()
    del array
    gc.collect()
    assert reference() is not None and _callbacks.live() == 1
    buffer.close()
    assert reference() is None and _callbacks.live() == 0


def test_wrap_takes_what_is_writable_and_contiguous(runtime: kvtier.Runtime) -> None:
    with mmap.mmap(-1, 8192) as area:
        with runtime.wrap(area) as buffer:
            buffer.view()[0] = 1
            assert area[0] == 1
        with runtime.wrap(memoryview(area)[4096:]) as buffer:
            assert len(buffer) == 4096
    with pytest.raises(BufferError):
        runtime.wrap(b"read-only")
    with pytest.raises((BufferError, ValueError)):
        runtime.wrap(np.zeros((8, 8))[:, ::2])
    with pytest.raises(TypeError):
        runtime.wrap(5)


def test_a_failed_wrap_does_not_hold_the_object(runtime: kvtier.Runtime) -> None:
    memory = bytearray(16)
    closed = kvtier.Runtime(workers=1)
    closed.close()
    with pytest.raises(kvtier.ClosedError):
        closed.wrap(memory)
    with pytest.raises(kvtier.InvalidError):
        runtime.wrap(bytearray())
    memory.append(1)
    assert _callbacks.live() == 0


def test_memory_options_are_applied_or_rejected(runtime: kvtier.Runtime) -> None:
    buffer = runtime.buffer(100_000, align_bytes=1 << 16, pin="try", huge="try", prefault=True)
    info = buffer.info()
    assert info.address % (1 << 16) == 0 and info.nbytes == 100_000
    assert info.charged_bytes >= 100_000 and info.pages in ("normal", "transparent")
    with pytest.raises(kvtier.InvalidError):
        runtime.buffer(4096, align_bytes=5000)
    with pytest.raises(ValueError, match="pin is"):
        runtime.buffer(4096, pin="maybe")


def test_an_injected_allocation_failure_is_an_error() -> None:
    with kvtier.Runtime(workers=1, faults="faults(map=at(fail=1))") as runtime:
        with pytest.raises(kvtier.Error, match="injected failure") as caught:
            runtime.buffer(4096)
        assert caught.value.name in ("KVT_E_IO", "KVT_E_NOMEM")
        runtime.buffer(4096).close()


def test_ranges_outside_of_the_buffer_are_rejected(runtime: kvtier.Runtime) -> None:
    buffer = runtime.buffer(4096)
    for work in (kvtier.Work.checksum(buffer, 4097),
                 kvtier.Work.checksum(buffer, 1, src_offset=4096),
                 kvtier.Work.checksum(buffer, 10, src_offset=2**64 - 5)):
        with pytest.raises(kvtier.InvalidError, match="exceed the source"):
            runtime.submit(work)
    with pytest.raises(kvtier.InvalidError):
        runtime.submit([])
    assert buffer.info().in_flight == 0
