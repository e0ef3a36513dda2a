"""Tensors that are no buffers: torch's, CuPy's, JAX's, numpy's of bf16. They are asked where
they are and of what kind; nothing of theirs is imported."""

from __future__ import annotations

import ctypes
import math
import re
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple

from . import _abi
from ._errors import BufferError, make

#: What others call types of numbers, and what they are called here.
_NAMES: Dict[str, str] = {
    "float64": "f64", "double": "f64", "float32": "f32", "float": "f32", "float16": "f16",
    "half": "f16", "bfloat16": "bf16", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2",
    "int8": "int8", "uint8": "u8", "bool": "u8", "int16": "i16", "uint16": "u16", "int32": "i32",
    "uint32": "u32", "int64": "i64", "uint64": "u64",
}
#: Likewise by the codes of the struct module, with their bytes where C has several.
_CODES: Dict[str, str] = {
    "d": "f64", "f": "f32", "e": "f16", "b": "int8", "B": "u8", "?": "u8", "c": "u8", "h": "i16",
    "H": "u16", "i": "i32", "I": "u32", "l": "i", "L": "u", "q": "i64", "Q": "u64", "n": "i64",
    "N": "u64",
}
#: Likewise by the first letter of numpy's typestr.
_KINDS = {"f": "f", "i": "i", "u": "u", "b": "u"}
#: Likewise by DLPack's codes; what is not named by its bits has them behind.
_DLPACK = {0: "i", 1: "u", 2: "f", 4: "bf", 6: "u", 10: "fp8_e4m3", 12: "fp8_e5m2"}
_DLPACK_HOSTS, _DLPACK_CUDA = (1, 3), (2, 13)


class Tensor(NamedTuple):
    """Numbers somewhere in memory."""

    address: int
    shape: Tuple[int, ...]
    #: In bytes.
    strides: Tuple[int, ...]
    #: As kvtier calls it, where it does.
    dtype: str
    itemsize: int
    readonly: bool
    #: "cpu", or what others call where it is.
    device: str
    #: What has to be kept for the memory to stay.
    kept: Any

    @property
    def nbytes(self) -> int:
        """The bytes of all numbers."""
        return math.prod(self.shape) * self.itemsize

    @property
    def on_host(self) -> bool:
        """Whether the processor reaches it."""
        return self.device == "cpu"

    @property
    def contiguous(self) -> bool:
        """Whether numbers lie without gaps, the last index fastest."""
        step = self.itemsize
        for many, stride in zip(reversed(self.shape), reversed(self.strides)):
            if many > 1 and stride != step:
                return 0 in self.shape
            step *= many
        return True


def dtype_of_code(code: str, itemsize: int) -> str:
    """What a buffer's code of a number is called."""
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


def refused(text: str) -> BufferError:
    """The exception of memory that cannot be used as it is."""
    error = make(_abi.KVT_E_INVALID, text)
    return BufferError(error.message, error.status, error.name)


def tensor_of(source: Any) -> Optional[Tensor]:
    """What an object says of its numbers; None where it is no tensor."""
    if hasattr(source, "data_ptr") and hasattr(source, "stride"):  # not a storage of torch's
        return _of_torch(source)
    if hasattr(source, "__cuda_array_interface__"):
        return _of_interface(source, source.__cuda_array_interface__, "cuda")
    # numpy's own word before DLPack's: that says neither bf16 nor whether it may be written.
    if hasattr(source, "__array_interface__"):
        return _of_interface(source, source.__array_interface__, "cpu")
    if hasattr(source, "__dlpack__"):
        return _of_dlpack(source)
    return None


def _of_torch(source: Any) -> Optional[Tensor]:
    if str(getattr(source, "layout", "torch.strided")) != "torch.strided":
        return None
    # Such a view has the numbers of another one, and says that they count otherwise.
    if any(getattr(source, lazy, bool)() for lazy in ("is_neg", "is_conj")):
        raise refused("the tensor's numbers are another's, negated or conjugated: hand over "
                      ".resolve_neg().resolve_conj()")
    itemsize = int(source.element_size())
    name = str(source.dtype).rpartition(".")[2]
    kind = str(getattr(source.device, "type", source.device))
    device = "cpu" if kind == "cpu" else str(source.device)
    strides = tuple(int(step) * itemsize for step in source.stride())
    return Tensor(int(source.data_ptr()), tuple(int(n) for n in source.shape), strides,
                  _NAMES.get(name, name), itemsize, False, device, source)


def _of_interface(source: Any, told: Any, device: str) -> Optional[Tensor]:
    # Not ">": bytes the other way round. Not with a mask: numbers that do not count.
    found = re.fullmatch(r"[<|=]?([a-zA-Z])(\d+)", told["typestr"])
    if found is None or not isinstance(told.get("data"), tuple) or told.get("mask") is not None:
        return None
    itemsize, shape = int(found[2]), tuple(told["shape"])
    # Where numpy knows a type only by its bytes, its maker has named it.
    name = _NAMES.get(str(getattr(source, "dtype", "")), "")
    dtype = name or _sized(_KINDS.get(str(found[1]), str(told["typestr"])), itemsize)
    address, readonly = told["data"]
    strides = told.get("strides") or _dense(shape, itemsize)
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
    # Never marked as used: the capsule keeps the memory, and lets it go when it goes itself.
    capsule = source.__dlpack__()
    told = _DLTensor.from_address(_pointer_of(capsule, b"dltensor") or 0)
    if told.bits % 8 or told.lanes != 1:
        return None
    itemsize, shape = told.bits // 8, tuple(told.shape[: told.ndim])
    strides = _dense(shape, itemsize)
    if told.strides:
        strides = tuple(step * itemsize for step in told.strides[: told.ndim])
    if told.device_type in _DLPACK_HOSTS:
        device = "cpu"
    else:
        kind = "cuda" if told.device_type in _DLPACK_CUDA else f"device kind {told.device_type}"
        device = f"{kind}:{told.device_id}"
    dtype = _sized(_DLPACK.get(told.code, f"code {told.code}"), itemsize)
    return Tensor((told.data or 0) + told.byte_offset, shape, strides, dtype, itemsize, True,
                  device, capsule)
