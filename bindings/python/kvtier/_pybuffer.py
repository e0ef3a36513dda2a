"""Addresses of objects with the buffer protocol, also read-only ones, and of tensors."""

from __future__ import annotations

import builtins
import ctypes
from typing import Any

from ._tensor import Tensor, dtype_of_code, tensor_of, unusable

_WRITABLE = 0x1
_STRIDED = 0x8 | 0x10  # ND | STRIDES
_C_CONTIGUOUS = _STRIDED | 0x20  # C order


class _PyBuffer(ctypes.Structure):
    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


_get = ctypes.pythonapi.PyObject_GetBuffer
_get.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_get.restype = ctypes.c_int
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = (ctypes.POINTER(_PyBuffer),)
_release.restype = None
_is_buffer = ctypes.pythonapi.PyObject_CheckBuffer
_is_buffer.argtypes = (ctypes.py_object,)
_is_buffer.restype = ctypes.c_int


def _check(tensor: Tensor, writable: bool, strided: bool, on_device: bool) -> None:
    if not (strided or tensor.contiguous):
        raise unusable(f"a tensor of shape {list(tensor.shape)} has strides "
                       f"{list(tensor.strides)} in bytes, with gaps or not in C order: pass a "
                       "contiguous copy (torch: .contiguous(), numpy: numpy.ascontiguousarray), "
                       "or the whole memory and a kvtier.View with strides")
    if writable and tensor.readonly:
        raise unusable("the memory is read-only, or does not declare that it may be written: pass "
                       "a writable copy")
    if not (tensor.on_host or on_device and tensor.device.startswith("cuda")):
        raise unusable(f"the memory is on '{tensor.device}', which the CPU cannot access: pass "
                       ".cpu(), or use a store with a device, "
                       "kvtier.Store(..., device=kvtier.Device(runtime, 'cuda'))")
    if not tensor.address and tensor.nbytes:
        raise unusable("the tensor has no memory: it is only traced, or its storage was freed; "
                       "pass a tensor with data")


def described(source: Any) -> Tensor:
    """Returns shape, strides and type of an object's numbers, on any device."""
    view = None
    if _is_buffer(source):
        try:
            view = memoryview(source)
        except ValueError:  # numpy has no format code for types of other packages
            pass
    if view is not None:
        return Tensor(0, view.shape or (), view.strides or (),
                      dtype_of_code(view.format, view.itemsize), view.itemsize, view.readonly,
                      "cpu", view)
    tensor = tensor_of(source)
    if tensor is None:
        raise TypeError("a tensor, an array or another object with the buffer protocol is "
                        f"required, not '{type(source).__name__}'")
    return tensor


class Export:
    """Holds an object's bytes, so that they neither move nor resize. Tensors are an exception:
    `resize_` cannot be prevented. The bytes are contiguous unless `strided`."""

    __slots__ = ("_held", "_buffer", "_tensor", "address", "nbytes")

    def __init__(self, source: Any, writable: bool, strided: bool = False,
                 on_device: bool = False) -> None:
        self._held = False
        self._tensor: Any = None
        self._buffer = _PyBuffer()
        layout = _STRIDED if strided else _C_CONTIGUOUS
        flags = layout | (_WRITABLE if writable else 0)
        try:
            _get(source, ctypes.byref(self._buffer), flags)
        except (TypeError, ValueError, builtins.BufferError) as error:
            self._take_tensor(source, writable, strided, on_device, error)
            return
        self._held = True
        self.address: int = self._buffer.buf or 0
        self.nbytes: int = self._buffer.len

    def _take_tensor(self, source: Any, writable: bool, strided: bool, on_device: bool,
                     error: Exception) -> None:
        tensor = tensor_of(source)
        if tensor is None:
            if _is_buffer(source):
                raise unusable(str(error)) from error
            raise error
        _check(tensor, writable, strided, on_device)
        self._tensor = tensor
        self.address, self.nbytes = tensor.address, tensor.nbytes

    @property
    def on_device(self) -> bool:
        """Whether only a device can access the memory."""
        return self._tensor is not None and not self._tensor.on_host

    def release(self) -> None:
        """Releases the object."""
        self._tensor = None
        if self._held:
            self._held = False
            _release(ctypes.byref(self._buffer))

    def __enter__(self) -> "Export":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        # Attributes may be missing after a failed constructor, and globals at interpreter exit.
        if getattr(self, "_held", False) and ctypes is not None:
            self.release()
