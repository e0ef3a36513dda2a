"""Numbers for C without a copy where there is an array of the right kind, and
with one where there is a list."""

from __future__ import annotations

import array
import ctypes
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

from . import _abi
from ._errors import make
from ._pybuffer import Export

#: A column: a sequence of numbers, or anything with the buffer protocol (numpy
#: arrays, array.array, memoryviews) of the column's own type.
Column = Union[Sequence[Any], Any]

_C: Dict[str, Any] = {
    "u8": ctypes.c_uint8, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64,
    "i64": ctypes.c_int64, "f32": ctypes.c_float, "f64": ctypes.c_double,
}
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


class Columns:
    """Columns of a call, kept where they are until it is over."""

    def __init__(self) -> None:
        self._exports: List[Export] = []

    def __enter__(self) -> "Columns":
        return self

    def __exit__(self, *_: object) -> None:
        for export in self._exports:
            export.release()

    def take(self, name: str, kind: str, values: Optional[Column]) -> Tuple[Any, int]:
        """The pointer and the length of a column; None is an absent one."""
        if values is None:
            return None, 0
        size = ctypes.sizeof(_C[kind])
        if isinstance(values, (list, tuple, range)):
            try:
                values = array.array(_CODE[kind], values)
            except (TypeError, ValueError, OverflowError) as error:
                raise _invalid(f"column {name}: {error}") from error
        else:
            values = self._checked(name, kind, values, size)
        export = Export(values, writable=False)
        self._exports.append(export)
        pointer = ctypes.cast(ctypes.c_void_p(export.address), ctypes.POINTER(_C[kind]))
        return pointer, export.nbytes // size

    def _checked(self, name: str, kind: str, values: Any, size: int) -> Any:
        try:
            view = memoryview(values)
        except TypeError as error:
            raise _invalid(f"column {name} is neither a list nor an array") from error
        formats, code = _FORMATS[kind], view.format.lstrip("@=<")
        if view.itemsize != size or code not in formats or view.ndim != 1:
            raise _invalid(f"column {name} has type '{view.format}', wanted is '{formats[0]}' in "
                           "one dimension")
        if view.contiguous:
            return values
        copy = array.array(_CODE[kind])
        copy.extend(view.tolist())
        return copy
