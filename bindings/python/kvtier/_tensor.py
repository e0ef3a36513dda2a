"""Tensors without the buffer protocol: torch, CuPy, JAX, numpy with bf16. This module reads their
address, shape and type, and imports none of these packages."""

from __future__ import annotations

import ctypes
import math
import re
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple

from . import _abi
from ._errors import BufferError, make

#: Type names of other packages, and the names that kvtier uses.
_NAMES: Dict[str, str] = {
    "float64": "f64", "double": "f64", "float32": "f32", "float": "f32", "float16": "f16",
    "half": "f16", "bfloat16": "bf16", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2",
    "int8": "int8", "uint8": "u8", "bool": "u8", "int16": "i16", "uint16": "u16", "int32": "i32",
    "uint32": "u32", "int64": "i64", "uint64": "u64",
}
#: The same by codes of the struct module. "i" and "u" get their size appended.
_CODES: Dict[str, str] = {
    "d": "f64", "f": "f32", "e": "f16", "b": "int8", "B": "u8", "?": "u8", "c": "u8", "h": "i16",
    "H": "u16", "i": "i32", "I": "u32", "l": "i", "L": "u", "q": "i64", "Q": "u64", "n": "i64",
    "N": "u64",
}
#: The same by the first letter of numpy's typestr.
_KINDS = {"f": "f", "i": "i", "u": "u", "b": "u"}
#: The same by codes of DLPack. "i", "u", "f" and "bf" get their size appended.
_DLPACK = {0: "i", 1: "u", 2: "f", 4: "bf", 6: "u", 10: "fp8_e4m3", 12: "fp8_e5m2"}
_DLPACK_HOSTS, _DLPACK_CUDA = (1, 3), (2, 13)


class Tensor(NamedTuple):
    """The location, shape and type of a tensor's numbers."""

    address: int
    shape: Tuple[int, ...]
    #: In bytes.
    strides: Tuple[int, ...]
    #: kvtier's name of the type if it has one.
    dtype: str
    itemsize: int
    readonly: bool
    #: "cpu", or the owner's name of the device.
    device: str
    #: The object that keeps the memory alive.
    kept: Any

    @property
    def nbytes(self) -> int:
        """The size of all numbers in bytes."""
        return math.prod(self.shape) * self.itemsize

    @property
    def on_host(self) -> bool:
        """Whether the CPU can access the memory."""
        return self.device == "cpu"

    @property
    def contiguous(self) -> bool:
        """Whether the numbers have no gaps and are in C order."""
        step = self.itemsize
        for many, stride in zip(reversed(self.shape), reversed(self.strides)):
            if many > 1 and stride != step:
                return 0 in self.shape
            step *= many
        return True


def dtype_of_code(code: str, itemsize: int) -> str:
    """Returns kvtier's name of a buffer's format code."""
    return _sized(_CODES.get(code.lstrip("@=<"), code), itemsize)


def _sized(name: str, itemsize: int) -> str:
    if name == "i" and itemsize == 1:
        return "int8"
    return f"{name}{8 * itemsize}" if name in ("i", "u", "f", "bf") else name


def _dense(shape: Sequence[int], itemsize: int) -> Tuple[int, ...]:
    strides, step = [], itemsize
    for many in reversed(shape):
        strides.append(step)
        step *= many
    return tuple(reversed(strides))


def unusable(text: str) -> BufferError:
    """Returns the exception for memory that cannot be used directly."""
    error = make(_abi.KVT_E_INVALID, text)
    return BufferError(error.message, error.status, error.name)


def tensor_of(source: Any) -> Optional[Tensor]:
    """Returns an object's description of its numbers; None if it is no tensor."""
    if hasattr(source, "data_ptr") and hasattr(source, "stride"):  # excludes torch storages
        return _of_torch(source)
    if hasattr(source, "__cuda_array_interface__"):
        return _of_interface(source, source.__cuda_array_interface__, "cuda")
    # Before DLPack, which declares neither numpy's bf16 nor whether the memory is writable.
    if hasattr(source, "__array_interface__"):
        return _of_interface(source, source.__array_interface__, "cpu")
    if hasattr(source, "__dlpack__"):
        return _of_dlpack(source)
    return None


def _of_torch(source: Any) -> Optional[Tensor]:
    if str(getattr(source, "layout", "torch.strided")) != "torch.strided":
        return None
    # A lazy view has the unchanged memory of another tensor.
    if any(getattr(source, lazy, bool)() for lazy in ("is_neg", "is_conj")):
        raise unusable("the tensor is a lazy negation or conjugation of another one: pass "
                       ".resolve_neg().resolve_conj()")
    itemsize = int(source.element_size())
    name = str(source.dtype).rpartition(".")[2]
    kind = str(getattr(source.device, "type", source.device))
    device = "cpu" if kind == "cpu" else str(source.device)
    strides = tuple(int(step) * itemsize for step in source.stride())
    return Tensor(int(source.data_ptr()), tuple(int(n) for n in source.shape), strides,
                  _NAMES.get(name, name), itemsize, False, device, source)


def _of_interface(source: Any, interface: Any, device: str) -> Optional[Tensor]:
    # Rejects ">", which is big-endian, and masks, which exclude numbers.
    found = re.fullmatch(r"[<|=]?([a-zA-Z])(\d+)", interface["typestr"])
    if (found is None or not isinstance(interface.get("data"), tuple)
            or interface.get("mask") is not None):
        return None
    itemsize, shape = int(found[2]), tuple(interface["shape"])
    # Types of other packages have an opaque typestr in numpy, but a name.
    name = _NAMES.get(str(getattr(source, "dtype", "")), "")
    dtype = name or _sized(_KINDS.get(str(found[1]), str(interface["typestr"])), itemsize)
    address, readonly = interface["data"]
    strides = interface.get("strides") or _dense(shape, itemsize)
    return Tensor(int(address or 0), shape, tuple(strides), dtype, itemsize, bool(readonly),
                  device, source)


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)
_pointer_of.restype = ctypes.c_void_p


def _of_dlpack(source: Any) -> Optional[Tensor]:
    # The capsule is never renamed to "used_dltensor", so its destructor frees the memory.
    capsule = source.__dlpack__()
    found = _DLTensor.from_address(_pointer_of(capsule, b"dltensor") or 0)
    if found.bits % 8 or found.lanes != 1:
        return None
    itemsize, shape = found.bits // 8, tuple(found.shape[: found.ndim])
    strides = _dense(shape, itemsize)
    if found.strides:
        strides = tuple(step * itemsize for step in found.strides[: found.ndim])
    if found.device_type in _DLPACK_HOSTS:
        device = "cpu"
    else:
        kind = "cuda" if found.device_type in _DLPACK_CUDA else f"device kind {found.device_type}"
        device = f"{kind}:{found.device_id}"
    dtype = _sized(_DLPACK.get(found.code, f"code {found.code}"), itemsize)
    return Tensor((found.data or 0) + found.byte_offset, shape, strides, dtype, itemsize, True,
                  device, capsule)
