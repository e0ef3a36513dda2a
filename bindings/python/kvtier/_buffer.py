"""Buffers: host memory that ops read and write, shared with Python without a copy."""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any, Dict, NamedTuple, Optional, Tuple, Union

from . import _abi, _callbacks, _reaper
from ._lib import check, check_err, lib, status_error, u64
from ._pybuffer import Export
from ._resource import Resource, byref, new_error, refuse_fork

if TYPE_CHECKING:
    from ._budget import Account
    from ._runtime import Runtime

_PAGES = {
    _abi.KVT_PAGES_NORMAL: "normal",
    _abi.KVT_PAGES_TRANSPARENT: "transparent",
    _abi.KVT_PAGES_HUGETLB: "hugetlb",
    _abi.KVT_PAGES_FOREIGN: "foreign",
}

#: The values of `pin` and `huge`: False, True (required), or "try" (if available).
MemoryOption = Union[bool, str]


class BufferInfo(NamedTuple):
    """Address, sizes and kind of a buffer's memory."""

    address: int
    nbytes: int
    charged_bytes: int
    in_flight: int
    pinned: bool
    pages: str


class BufferJob(_reaper.Job):
    """Frees a buffer; busy while an op uses it."""

    __slots__ = ()
    nonblocking = True

    def attempt(self) -> int:
        return int(lib.kvt_buffer_free(byref(self.handle)))


class _Memory(Resource):
    """The handle of a buffer. The buffer and every view hold it; the last holder frees it."""

    _type_name = "buffer"

    def __init__(self, handle: _abi.kvt_buffer_p, runtime: "Runtime",
                 account: "Optional[Account]") -> None:
        # The runtime and the account must stay open longer than the memory.
        self._runtime, self._account = runtime, account
        address, nbytes = ctypes.c_void_p(), ctypes.c_uint64()
        check(lib.kvt_buffer_address(handle, byref(address), byref(nbytes)))
        self.address: int = address.value or 0
        self.nbytes: int = nbytes.value
        self._own(BufferJob(handle, _reaper.RANK_BUFFER))

    def close(self) -> None:
        check(lib.kvt_buffer_free(byref(self._job.handle)))
        self._released()


def _flag(value: MemoryOption, required: int, preferred: int, name: str) -> int:
    if value == "try":
        return preferred
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}: it must be True, False or 'try'")
    return required if value else 0


class Buffer:
    """A range of host memory.

    `view()` (from Python 3.12 on also `memoryview(buffer)`) is the memory itself. Closing never
    frees memory that a view uses: the memory lives until the last view is gone. From the submit
    of an op to its release only the library may use the bytes.

    >>> import kvtier
    >>> with kvtier.Runtime() as runtime, runtime.buffer(4096) as buffer:
    ...     view = buffer.view()
    ...     view[:2] = b"kv"
    >>> buffer.closed, bytes(view[:2])    # the last view frees the memory
    (True, b'kv')
    """

    def __init__(self, runtime: "Runtime", nbytes: int, *, align_bytes: int = 0,
                 account: "Optional[Account]" = None, pin: MemoryOption = False,
                 huge: MemoryOption = False, prefault: bool = False) -> None:
        opts = _abi.kvt_buffer_opts_t(bytes=u64(nbytes), align_bytes=u64(align_bytes))
        opts.flags = (
            _flag(pin, _abi.KVT_BUFFER_PIN, _abi.KVT_BUFFER_TRY_PIN, "pin")
            | _flag(huge, _abi.KVT_BUFFER_HUGETLB, _abi.KVT_BUFFER_TRY_HUGE, "huge")
            | (_abi.KVT_BUFFER_PREFAULT if prefault else 0)
        )
        if account is not None:
            opts.account = account._raw.value
        handle, err = _abi.kvt_buffer_p(), new_error()
        check_err(lib.kvt_buffer_alloc(runtime._raw, byref(opts), byref(handle), byref(err)), err)
        self._adopt(_Memory(handle, runtime, account))

    @classmethod
    def wrap(cls, runtime: "Runtime", source: Any) -> "Buffer":
        """Wraps the memory of a writable, contiguous object (a bytearray, a numpy array, an
        mmap) for ops. The object is held until the buffer is freed and no op uses it."""
        raw = runtime._raw
        export = Export(source, writable=True)
        number = _callbacks.register(export)
        handle, err = _abi.kvt_buffer_p(), new_error()
        status = lib.kvt_buffer_wrap(raw, export.address, export.nbytes, number,
                                     _callbacks.on_destroy, byref(handle), byref(err))
        if status != _abi.KVT_OK:
            _callbacks.forget(number)
            export.release()
        check_err(status, err)
        self = cls.__new__(cls)
        self._adopt(_Memory(handle, runtime, None))
        return self

    def _adopt(self, memory: _Memory) -> None:
        self._memory: Optional[_Memory] = memory
        self._array: "Optional[weakref.ref[Any]]" = None

    def _open(self) -> _Memory:
        memory = self._memory
        if memory is None:
            raise status_error(_abi.KVT_E_CLOSED, "this buffer is closed")
        refuse_fork()  # a forked child does not have the memory
        return memory

    @property
    def _raw(self) -> Any:
        return self._open()._raw

    @property
    def closed(self) -> bool:
        """Whether the buffer was closed. Views may still keep the memory."""
        return self._memory is None

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self._open().nbytes

    def __len__(self) -> int:
        return self.nbytes

    @property
    def address(self) -> int:
        """The address of the first byte, valid until the buffer is closed."""
        return self._open().address

    @property
    def exported(self) -> bool:
        """Whether views exist; each of them keeps the memory."""
        return self._array is not None and self._array() is not None

    def view(self) -> memoryview:
        """Returns a writable view of the memory."""
        memory = self._open()
        array = self._array() if self._array is not None else None
        if array is None:
            array = (ctypes.c_ubyte * memory.nbytes).from_address(memory.address)
            setattr(array, "kvtier_memory", memory)
            self._array = weakref.ref(array)
        return memoryview(array).cast("B")

    def __buffer__(self, flags: int) -> memoryview:
        return self.view()

    @property
    def __array_interface__(self) -> Dict[str, Any]:
        # numpy finds the memory this way before Python 3.12. It gets a view instead of an
        # address, so that the array keeps the memory alive.
        shape: Tuple[int, ...] = (self.nbytes,)
        return {"version": 3, "typestr": "|u1", "shape": shape, "data": self.view()}

    def info(self) -> BufferInfo:
        """Returns address, sizes and kind of the memory."""
        info = _abi.kvt_buffer_info_t()
        check(lib.kvt_buffer_info(self._raw, byref(info)))
        return BufferInfo(info.address or 0, info.bytes, info.charged_bytes, info.in_flight,
                          bool(info.pinned), _PAGES.get(info.pages, str(info.pages)))

    def close(self) -> None:
        """Closes the buffer; raises `BusyError` while an op uses it. The memory is freed now, or
        with the last view."""
        if self._memory is None:
            return
        if self.info().in_flight:
            raise status_error(_abi.KVT_E_BUSY, "an op in flight uses this buffer: wait for its "
                                                "release before you close the buffer")
        self._memory = None

    def __enter__(self) -> "Buffer":
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        # Allowed with an op in flight: the release of that op then frees the memory.
        self._memory = None

    def __repr__(self) -> str:
        memory = self._memory
        state = "closed" if memory is None else f"{memory.nbytes} bytes"
        return f"<kvtier.Buffer {state}>"
