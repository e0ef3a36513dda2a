"""The address of any object with the buffer protocol, read-only ones too."""

from __future__ import annotations

import ctypes
from typing import Any

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


class Export:
    """An object's bytes, held: it can neither move nor resize meanwhile. Without gaps, unless
    the caller knows the strides."""

    def __init__(self, source: Any, writable: bool, strided: bool = False) -> None:
        self._held = False
        self._buffer = _PyBuffer()
        layout = _STRIDED if strided else _C_CONTIGUOUS
        flags = layout | (_WRITABLE if writable else 0)
        _get(source, ctypes.byref(self._buffer), flags)
        self._held = True
        self.address: int = self._buffer.buf or 0
        self.nbytes: int = self._buffer.len

    def release(self) -> None:
        """Lets the object go."""
        if self._held:
            self._held = False
            _release(ctypes.byref(self._buffer))

    def __enter__(self) -> "Export":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()
