"""A fake torch over numpy, with the functions that python_paths.py and the connectors use. Memory of
"cuda", streams and events are those of the fake driver (ffi-tests/cuda/fake.c), which must be loadable
as libcuda.so.1. If the driver detects an error, the process exits with 9. With KVTIER_EARLY=1 events
are signaled at once, before earlier work on their stream is done."""

import atexit
import contextlib
import ctypes
import math
import os
import sys
import threading
import time
import types
import weakref

import numpy as np

__version__ = "0.0-stand-in"
_driver = ctypes.CDLL("libcuda.so.1")
_driver.fake_words.restype = ctypes.c_char_p
_EARLY = os.environ.get("KVTIER_EARLY") == "1"
_mine = threading.local()


def _status_of(name, *arguments):
    if not getattr(_mine, "entered", False):
        context = ctypes.c_void_p()
        _driver.cuInit(0)
        _driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        _driver.cuCtxPushCurrent_v2(context)
        _mine.entered = True
    return getattr(_driver, name)(*arguments)


def _call(name, *arguments):
    code = _status_of(name, *arguments)
    if code:
        raise RuntimeError(f"{name}: {code}")


@atexit.register
def _check_driver():
    if _driver.fake_wrong():
        print("the fake driver: " + _driver.fake_words().decode(), file=sys.stderr, flush=True)
        os._exit(9)


class dtype:
    def __init__(self, name):
        self.name, self.numpy = name, np.dtype(name)

    def __repr__(self):
        return f"torch.{self.name}"


uint8, int8, int16, int64, float32 = (
    dtype(name) for name in ("uint8", "int8", "int16", "int64", "float32"))
_TYPES = {one.name: one for one in (uint8, int8, int16, int64, float32)}


class device:
    def __init__(self, kind):
        self.type, self.index = kind, 0 if kind == "cuda" else None

    def __repr__(self):
        return self.type if self.index is None else f"{self.type}:{self.index}"


class _Handle:
    """A driver object that is identified by a pointer."""

    def __init__(self, call, flags):
        self._handle = ctypes.c_void_p()
        _call(call, ctypes.byref(self._handle), flags)


class Event(_Handle):
    def __init__(self, enable_timing=False):
        super().__init__("cuEventCreate", 3)

    def record(self, stream=None):
        _call("cuEventRecord", self._handle,
              Stream()._handle if _EARLY else (stream or current_stream())._handle)

    def synchronize(self):
        end = time.monotonic() + 600
        while _status_of("cuEventQuery", self._handle):
            assert time.monotonic() < end, "an event was not signaled in 600 s"
            time.sleep(0)

    cuda_event = property(lambda self: self._handle.value)


class Stream(_Handle):
    def __init__(self):
        super().__init__("cuStreamCreate", 1)
        _streams.append(self)

    def synchronize(self):
        event = Event()
        _call("cuEventRecord", event._handle, self._handle)
        event.synchronize()

    cuda_stream = property(lambda self: self._handle.value)


_streams = []


def current_stream():
    if not hasattr(_mine, "stream"):
        _mine.stream = Stream()
    return _mine.stream


@contextlib.contextmanager
def _on(stream):
    before, _mine.stream = current_stream(), stream
    yield
    _mine.stream = before


def _synchronize():
    for stream in list(_streams):
        stream.synchronize()


def _sleep(cycles):
    # Enough work that code that does not wait for it runs before its end.
    scratch = _Storage(2, "cuda")
    _scratch.append(scratch)
    at = scratch.data_ptr()
    for _ in range(2000):
        _call("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(at), ctypes.c_uint64(at + 1),
              ctypes.c_size_t(1), current_stream()._handle)


_scratch = []
cuda = types.SimpleNamespace(
    is_available=lambda: True, Event=Event, Stream=Stream, stream=_on,
    current_stream=current_stream, synchronize=_synchronize, _sleep=_sleep)
distributed = types.SimpleNamespace(is_available=lambda: False)


class _Storage:
    """Bytes in host or device memory."""

    def __init__(self, nbytes, where, array=None):
        self.where = where
        if where == "cuda" and nbytes:
            at = ctypes.c_uint64()
            _call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(nbytes))
            array = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(at.value), np.uint8)
            weakref.finalize(self, _free, at.value)
        self.bytes = np.zeros(nbytes, np.uint8) if array is None else array

    def data_ptr(self):
        return self.bytes.__array_interface__["data"][0]

    def nbytes(self):
        return self.bytes.nbytes


def _free(at):
    _call("cuMemFree_v2", ctypes.c_uint64(at))


class Tensor:
    """An array in a storage, with torch's interface."""

    def __init__(self, array, storage):
        self._array, self._storage = array, storage
        self.device = device(storage.where)
        self.dtype = _TYPES[array.dtype.name]

    shape = property(lambda self: self._array.shape)
    nbytes = property(lambda self: self._array.nbytes)
    _on_gpu = property(lambda self: self._storage.where == "cuda")

    def dim(self):
        return self._array.ndim

    def numel(self):
        return self._array.size

    def element_size(self):
        return self._array.itemsize

    def stride(self, dim=None):
        steps = tuple(step // self._array.itemsize for step in self._array.strides)
        return steps if dim is None else steps[dim]

    def data_ptr(self):
        return self._array.__array_interface__["data"][0]

    def storage_offset(self):
        return (self.data_ptr() - self._storage.data_ptr()) // self._array.itemsize

    def untyped_storage(self):
        return self._storage

    def set_(self, storage):
        return Tensor(storage.bytes, storage)

    def is_contiguous(self):
        return self._array.flags.c_contiguous

    def unflatten(self, dim, sizes):
        array = self._array
        return Tensor(array.reshape(sizes[0], array.shape[0] // sizes[0], *array.shape[1:]),
                      self._storage)

    def numpy(self):
        assert not self._on_gpu, "numpy() of a tensor in GPU memory"
        return self._array

    def __len__(self):
        return len(self._array)

    def __getitem__(self, at):
        found = self._array[at]
        if found.base is None:  # a copy, as indexing with lists makes
            self._synchronize_read()
            return Tensor(self._array[at], _Storage(0, "cpu", found.reshape(-1).view(np.uint8)))
        return Tensor(found, self._storage)

    def __setitem__(self, at, value):
        self._synchronize_read()
        self._array[at] = value

    def _synchronize_read(self):
        if self._on_gpu:
            current_stream().synchronize()

    def fill_(self, value):
        self[:] = value
        return self

    def copy_(self, other, non_blocking=False):
        assert self.shape == other.shape and self.dtype is other.dtype
        if not (self._on_gpu or other._on_gpu):
            self._array[:] = other._array
            return self
        assert self.is_contiguous() and other.is_contiguous()
        call = {(True, True): "cuMemcpyDtoDAsync_v2", (True, False): "cuMemcpyHtoDAsync_v2",
                (False, True): "cuMemcpyDtoHAsync_v2"}[self._on_gpu, other._on_gpu]
        stream = current_stream()
        _call(call, ctypes.c_uint64(self.data_ptr()), ctypes.c_uint64(other.data_ptr()),
              ctypes.c_size_t(self.nbytes), stream._handle)
        if not (self._on_gpu and other._on_gpu) and not non_blocking:
            stream.synchronize()
        return self

    def clone(self):
        return empty(self.shape, self.dtype, self._storage.where).copy_(self)

    def to(self, where):
        return self if where == self._storage.where else empty(
            self.shape, self.dtype, where).copy_(self)

    def cpu(self):
        if not self._on_gpu:
            return self
        self._synchronize_read()
        return from_numpy(self._array.copy())


def from_numpy(array):
    return Tensor(array, _Storage(0, "cpu", np.ascontiguousarray(array).reshape(-1).view(np.uint8)))


def empty(shape, dtype=float32, device="cpu", pin_memory=False):
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    storage = _Storage(math.prod(shape) * dtype.numpy.itemsize, device)
    return Tensor(storage.bytes.view(dtype.numpy).reshape(shape), storage)


def zeros(shape, dtype=float32, device="cpu"):
    return empty(shape, dtype, device).fill_(0)


def randint(low, high, shape, dtype=int64):
    return from_numpy(np.random.default_rng(low + high).integers(low, high, shape).astype(
        dtype.numpy))


def cat(tensors):
    return from_numpy(np.concatenate([one.numpy() for one in tensors]))


def equal(one, other):
    return bool(np.array_equal(one.numpy(), other.numpy()))
