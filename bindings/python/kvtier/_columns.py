"""Columns of numbers for C: arrays of the right type are not copied, lists are."""

from __future__ import annotations

import array
import ctypes
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

from . import _abi
from ._errors import make
from ._pybuffer import Export, described

#: A column: a sequence of numbers, or anything with the buffer protocol (numpy
#: arrays, array.array, memoryviews), or a tensor, of the column's own type.
Column = Union[Sequence[Any], Any]

_C: Dict[str, Any] = {
    "u8": ctypes.c_uint8, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64,
    "i64": ctypes.c_int64, "f32": ctypes.c_float, "f64": ctypes.c_double,
}
#: The bytes of a number.
_SIZES = {kind: ctypes.sizeof(number) for kind, number in _C.items()}
#: Empty arrays that serve as pointers to numbers: a cast would take five times as long.
_POINTERS: Dict[str, Any] = {kind: number * 0 for kind, number in _C.items()}
_AT = ctypes.c_ubyte * 0
#: The formats of buffers of u64.
_U64 = frozenset(("Q", "L", "N", "@Q", "@L", "@N", "=Q", "<Q"))
#: The codes of array.array; the 64-bit codes are the same on every 64-bit Linux.
_CODE = {"u8": "B", "u32": "I", "u64": "Q", "i64": "q", "f32": "f", "f64": "d"}
_FORMATS = {"u8": "B?", "u32": "IL", "u64": "QLN", "i64": "qln", "f32": "f", "f64": "d"}


_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view.restype = ctypes.py_object
_READ, _WRITE = 0x100, 0x200


def view(kind: str, pointer: Any, rows: int, writable: bool = False) -> Any:
    """Returns a memoryview of a column in C, valid as long as C keeps the column. It is read-only
    unless `writable`."""
    address = ctypes.cast(pointer, ctypes.c_void_p).value
    nbytes = rows * ctypes.sizeof(_C[kind])
    return _view(address, nbytes, _WRITE if writable else _READ).cast(_CODE[kind])


def _invalid(text: str) -> Exception:
    return make(_abi.KVT_E_INVALID, text)


def ids_of(name: str, values: Any) -> Tuple[Any, int, Any]:
    """Returns one column of u64 for frequent calls: the pointer, the length, and an object that
    the caller releases after the call."""
    try:
        seen = memoryview(values)
        if type(values) is array.array and values.typecode == "Q":
            return (*values.buffer_info(), seen)
        if seen.format in _U64 and seen.ndim == 1:
            # from_buffer rejects read-only memory and memory with gaps.
            return ctypes.addressof(_AT.from_buffer(seen)), len(seen), seen
    except (TypeError, ValueError, BufferError):
        pass
    columns = Columns()
    return (*columns.take(name, "u64", values), columns)


class Columns:
    """The columns of one call. They neither move nor resize until the call is over."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        #: Objects with a `release` method, and private arrays, which need none.
        self._kept: List[Any] = []

    def __enter__(self) -> "Columns":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Releases the columns after the call."""
        for kept in self._kept:
            if type(kept) is not array.array:
                kept.release()

    def take(self, name: str, kind: str, values: Any) -> Tuple[Any, int]:
        """Returns the pointer and the length of a column; None is an absent column."""
        if values is None:
            return None, 0
        if isinstance(values, (list, tuple, range)):
            return self._copied(name, kind, values)
        try:
            seen = memoryview(values)
        except (TypeError, ValueError, BufferError) as error:
            return self._tensor(name, kind, values, error)
        size, formats = _SIZES[kind], _FORMATS[kind]
        if seen.itemsize != size or seen.format.lstrip("@=<") not in formats or seen.ndim != 1:
            raise _invalid(f"column {name} has type '{seen.format}' and {seen.ndim} dimensions: "
                           f"it must have type '{formats[0]}' ({kind}) and one dimension; "
                           "convert it")
        if not seen.contiguous:
            return self._copied(name, kind, seen.tolist())
        if seen.readonly:
            export = Export(values, writable=False)
            self._kept.append(export)
            return _POINTERS[kind].from_address(export.address), export.nbytes // size
        self._kept.append(seen)  # the object neither moves nor resizes while this view exists
        address = ctypes.addressof(_AT.from_buffer(seen))
        return _POINTERS[kind].from_address(address), len(seen)

    def _copied(self, name: str, kind: str, values: Sequence[Any]) -> Tuple[Any, int]:
        try:
            numbers = array.array(_CODE[kind], values)
        except (TypeError, ValueError, OverflowError) as error:
            raise _invalid(f"column {name}: {error}") from error
        self._kept.append(numbers)
        address, count = numbers.buffer_info()
        return _POINTERS[kind].from_address(address), count

    def _tensor(self, name: str, kind: str, values: Any, error: Exception) -> Tuple[Any, int]:
        """Takes the numbers of a tensor."""
        try:
            seen = described(values)
        except TypeError:
            raise _invalid(f"column {name} is a {type(values).__name__}: pass a list, an array "
                           "or a tensor") from error
        if seen.dtype != kind or len(seen.shape) != 1:
            raise _invalid(f"column {name} has type {seen.dtype} and {len(seen.shape)} "
                           f"dimensions: it must have type {kind} and one dimension; convert it")
        export = Export(values, writable=False)
        self._kept.append(export)
        return _POINTERS[kind].from_address(export.address), seen.shape[0]
