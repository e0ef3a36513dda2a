"""Numbers for C without a copy where there is an array of the right kind, and
with one where there is a list."""

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
#: What stands for a pointer to numbers: a cast would take five times as long.
_POINTERS: Dict[str, Any] = {kind: number * 0 for kind, number in _C.items()}
_AT = ctypes.c_ubyte * 0
#: How buffers of u64 call themselves.
_U64 = frozenset(("Q", "L", "N", "@Q", "@L", "@N", "=Q", "<Q"))
#: array.array's codes; those of 64 bits are the same on every 64-bit Linux.
_CODE = {"u8": "B", "u32": "I", "u64": "Q", "i64": "q", "f32": "f", "f64": "d"}
_FORMATS = {"u8": "B?", "u32": "IL", "u64": "QLN", "i64": "qln", "f32": "f", "f64": "d"}


_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view.restype = ctypes.py_object
_READ, _WRITE = 0x100, 0x200


def view(kind: str, pointer: Any, rows: int, writable: bool = False) -> Any:
    """A column of C's as a memoryview, read-only unless said otherwise, for as long as C keeps
    it."""
    address = ctypes.cast(pointer, ctypes.c_void_p).value
    nbytes = rows * ctypes.sizeof(_C[kind])
    return _view(address, nbytes, _WRITE if writable else _READ).cast(_CODE[kind])


def _invalid(text: str) -> Exception:
    return make(_abi.KVT_E_INVALID, text)


def ids_of(name: str, values: Any) -> Tuple[Any, int, Any]:
    """One column of u64, for calls that come very often: the pointer, the length, and what is to
    be released after the call."""
    try:
        seen = memoryview(values)
        if type(values) is array.array and values.typecode == "Q":
            return (*values.buffer_info(), seen)
        if seen.format in _U64 and seen.ndim == 1:
            # It refuses what is read-only, or has gaps.
            return ctypes.addressof(_AT.from_buffer(seen)), len(seen), seen
    except (TypeError, ValueError, BufferError):
        pass
    columns = Columns()
    return (*columns.take(name, "u64", values), columns)


class Columns:
    """Columns of a call, kept where they are until it is over."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        #: Each has a `release`, but for arrays that nobody else knows.
        self._kept: List[Any] = []

    def __enter__(self) -> "Columns":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """The call is over."""
        for one in self._kept:
            if type(one) is not array.array:
                one.release()

    def take(self, name: str, kind: str, values: Any) -> Tuple[Any, int]:
        """The pointer and the length of a column; None is an absent one."""
        if values is None:
            return None, 0
        if isinstance(values, (list, tuple, range)):
            return self._copied(name, kind, values)
        try:
            seen = memoryview(values)
        except (TypeError, ValueError, BufferError) as error:
            return self._taken(name, kind, values, error)
        size, formats = _SIZES[kind], _FORMATS[kind]
        if seen.itemsize != size or seen.format.lstrip("@=<") not in formats or seen.ndim != 1:
            raise _invalid(f"column {name} has type '{seen.format}' in {seen.ndim} dimensions, "
                           f"wanted is '{formats[0]}' ({kind}) in one: convert it")
        if not seen.contiguous:
            return self._copied(name, kind, seen.tolist())
        if seen.readonly:
            export = Export(values, writable=False)
            self._kept.append(export)
            return _POINTERS[kind].from_address(export.address), export.nbytes // size
        self._kept.append(seen)  # while it is there, the object neither moves nor resizes
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

    def _taken(self, name: str, kind: str, values: Any, error: Exception) -> Tuple[Any, int]:
        """A tensor's."""
        try:
            seen = described(values)
        except TypeError:
            raise _invalid(f"column {name} is neither a list nor an array") from error
        if seen.dtype != kind or len(seen.shape) != 1:
            raise _invalid(f"column {name} has {seen.dtype} in {len(seen.shape)} dimensions, "
                           f"wanted is {kind} in one: convert it")
        export = Export(values, writable=False)
        self._kept.append(export)
        return _POINTERS[kind].from_address(export.address), seen.shape[0]
