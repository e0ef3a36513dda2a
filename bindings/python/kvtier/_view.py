"""Views: the planes of an engine's tensors, in Python objects or in device memory."""

from __future__ import annotations

import array
import ctypes
from dataclasses import dataclass
from typing import Any, List, Optional, Sequence, Union

from . import _abi
from ._buffer import Buffer
from ._errors import make
from ._lib import u32, u64
from ._pybuffer import Export


class MemoryRange:
    """A range of memory without a Python object, for `View` and `Pool`. It is host memory, or
    device memory (`on_device=True`).

    Nothing checks the address: the caller keeps the memory valid until the ops on it are
    released. The range and its ops hold `kept`.
    `DeviceMemory` and `UnitLease` are memory ranges, too.

    >>> import ctypes, kvtier
    >>> memory = ctypes.create_string_buffer(8192)
    >>> around = kvtier.MemoryRange(ctypes.addressof(memory), 8192, kept=memory)
    >>> kvtier.Pool(around, 4096).count
    2
    """

    #: The address of the first byte.
    address: int
    nbytes: int
    #: Whether only a device can access the memory.
    on_device: bool

    def __init__(self, address: int, nbytes: int, *, on_device: bool = False,
                 kept: Any = None) -> None:
        if not u64(address) or u64(nbytes) > 2**64 - address:
            raise _invalid(f"{nbytes} bytes at address {address:#x} are no valid memory: the "
                           "address must not be 0, and the end must not exceed 2**64")
        self.address, self.nbytes, self.on_device = address, nbytes, on_device
        self._kept = kept

    def _check(self, writable: bool) -> None:
        """Raises if the memory is known to be freed, or is read-only and `writable` is set."""


def _invalid(text: str) -> Exception:
    return make(_abi.KVT_E_INVALID, text)


@dataclass(frozen=True)
class View:
    """One plane of one layer: tokens from `offset` on, or in pages that begin at offsets.

    `source` is a contiguous object (bytearray, numpy array, torch tensor, kvtier.Buffer), device
    memory (kvtier.DeviceMemory, kvtier.UnitLease, a CUDA tensor), or any other memory
    (kvtier.MemoryRange). A stride of 0 means no gap between tokens, or heads. Calls check that the
    view lies inside the object.

    >>> import kvtier
    >>> plane = bytearray(64 * 32)                      # 64 tokens of 2 heads of 16 bytes
    >>> view = kvtier.View(plane, run_bytes=16, heads=2)
    >>> late = kvtier.View(plane, run_bytes=16, heads=2, offset=32 * 32)   # from token 32 on
    """

    source: Any
    run_bytes: int
    heads: int = 1
    offset: int = 0
    token_stride: int = 0
    head_stride: int = 0
    pages: Optional[Sequence[int]] = None
    page_tokens: int = 0


def export(source: Any, writable: bool, kept: List[Any]) -> Union[Export, MemoryRange]:
    """Returns the memory of an object, which `kept` holds."""
    if isinstance(source, MemoryRange):
        source._check(writable)
        kept.append(source)
        return source
    exported = Export(source.view() if isinstance(source, Buffer) else source, writable=writable,
                      on_device=True)
    kept.append(exported)
    return exported


def kind_of(memory: Union[Export, MemoryRange]) -> int:
    """Returns the KVT_MEMORY_* of exported memory."""
    return _abi.KVT_MEMORY_DEVICE if memory.on_device else _abi.KVT_MEMORY_HOST


def fill(row: Any, view: View, writable: bool, kept: List[Any]) -> None:
    """Fills a view for C, checked against the memory that it refers to."""
    memory = export(view.source, writable, kept)
    row.memory = kind_of(memory)
    run, heads = u64(view.run_bytes), max(1, u32(view.heads))
    head_stride = u64(view.head_stride) or run
    token_stride = u64(view.token_stride) or run * heads
    if run == 0 or token_stride >= 1 << 63:
        raise _invalid(f"run_bytes is {run} and the token stride {token_stride}: run_bytes must "
                       "be at least 1, the stride below 2**63")
    token = (heads - 1) * head_stride + run
    row.run_bytes, row.heads = run, heads
    row.token_stride_bytes, row.head_stride_bytes = token_stride, head_stride
    if view.pages is None:
        room = memory.nbytes - u64(view.offset) - token
        if room < 0:
            raise _invalid(f"a token of {token} bytes at offset {view.offset} does not fit into "
                           f"memory of {memory.nbytes} bytes")
        row.address = memory.address + view.offset
        row.tokens = min(room // token_stride + 1, 2**32 - 1)
        return
    each = u32(view.page_tokens)
    end = (each - 1) * token_stride + token
    if each == 0 or any(not 0 <= p + view.offset <= memory.nbytes - end for p in view.pages):
        raise _invalid(f"pages of {each} tokens do not fit into memory of {memory.nbytes} bytes: "
                       "page_tokens must be at least 1, and each page inside the memory")
    pages = array.array("Q", [memory.address + page + view.offset for page in view.pages])
    kept.append(pages)
    row.pages = ctypes.cast(ctypes.c_void_p(pages.buffer_info()[0]),
                            ctypes.POINTER(ctypes.c_void_p))
    row.page_count, row.page_tokens = len(pages), each
