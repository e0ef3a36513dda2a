"""Where an engine has a plane: in Python objects, or in memory of a device."""

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


class Place:
    """Memory that is no Python object's, wherever one with memory is taken (`View`, `Pool`): so
    many bytes from an address on, of the processor's or of the device's (`on_device=True`).
    Nothing checks the address: whoever gives it keeps what is there until the ops on it are
    released. `kept` is held as long as the place and what was submitted with it; memory of a
    `Device`, and units of a `Streamer`, are places of their own.

    >>> import ctypes, kvtier
    >>> memory = ctypes.create_string_buffer(8192)
    >>> place = kvtier.Place(ctypes.addressof(memory), 8192, kept=memory)
    >>> kvtier.Pool(place, 4096).count
    2
    """

    #: Where it starts.
    address: int
    nbytes: int
    #: Whether only a device reaches it.
    on_device: bool

    def __init__(self, address: int, nbytes: int, *, on_device: bool = False,
                 kept: Any = None) -> None:
        if not u64(address) or u64(nbytes) > 2**64 - address:
            raise _invalid(f"{nbytes} bytes at {address:#x}: there is no such memory")
        self.address, self.nbytes, self.on_device = address, nbytes, on_device
        self._kept = kept

    def _check(self, writable: bool) -> None:
        """Fails when it is known not to be there any more, or must not be written."""


def _invalid(text: str) -> Exception:
    return make(_abi.KVT_E_INVALID, text)


@dataclass(frozen=True)
class View:
    """One plane of one layer in a contiguous object (bytearray, numpy array, torch tensor,
    kvtier.Buffer), in memory of a device (kvtier.DeviceMemory, kvtier.StreamUnit, a CUDA tensor)
    or in any other (kvtier.Place): tokens from `offset` on, or in pages that begin at offsets.
    0 is no gap between tokens, or heads. Never leads out of the object.

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


def lend(source: Any, writable: bool, kept: List[Any]) -> Union[Export, Place]:
    """Where an object is, held by `kept`."""
    if isinstance(source, Place):
        source._check(writable)
        kept.append(source)
        return source
    export = Export(source.view() if isinstance(source, Buffer) else source, writable=writable,
                    on_device=True)
    kept.append(export)
    return export


def kind_of(there: Union[Export, Place]) -> int:
    """KVT_MEMORY_* of what was lent."""
    return _abi.KVT_MEMORY_DEVICE if there.on_device else _abi.KVT_MEMORY_HOST


def fill(row: Any, view: View, writable: bool, kept: List[Any]) -> None:
    """A view for C, checked against the object it leads into."""
    export = lend(view.source, writable, kept)
    row.memory = kind_of(export)
    run, heads = u64(view.run_bytes), max(1, u32(view.heads))
    head_stride = u64(view.head_stride) or run
    token_stride = u64(view.token_stride) or run * heads
    if run == 0 or token_stride >= 1 << 63:
        raise _invalid(f"runs of {run} bytes, {token_stride} bytes from token to token")
    token = (heads - 1) * head_stride + run
    row.run_bytes, row.heads = run, heads
    row.token_stride_bytes, row.head_stride_bytes = token_stride, head_stride
    if view.pages is None:
        room = export.nbytes - u64(view.offset) - token
        if room < 0:
            raise _invalid(f"a token at {view.offset} leads out of {export.nbytes} bytes")
        row.address = export.address + view.offset
        row.tokens = min(room // token_stride + 1, 2**32 - 1)
        return
    each = u32(view.page_tokens)
    end = (each - 1) * token_stride + token
    if each == 0 or any(not 0 <= p + view.offset <= export.nbytes - end for p in view.pages):
        raise _invalid(f"pages of {each} tokens lead out of {export.nbytes} bytes")
    pages = array.array("Q", [export.address + page + view.offset for page in view.pages])
    kept.append(pages)
    row.pages = ctypes.cast(ctypes.c_void_p(pages.buffer_info()[0]),
                            ctypes.POINTER(ctypes.c_void_p))
    row.page_count, row.page_tokens = len(pages), each
