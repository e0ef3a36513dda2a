"""The rows of a cache: tensors with a slice for each block, one after the other."""

from __future__ import annotations

import array
from dataclasses import dataclass
from typing import Any, Iterator, List, Mapping, Sequence, Tuple

from kvtier import At, Each, abi
from kvtier._errors import make

from ._settings import invalid

#: What a cache's numbers may be, by the end of torch's (or numpy's) name.
DTYPES = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
          "float8_e5m2fnuz", "int8", "uint8", "int32", "uint32")


@dataclass(frozen=True)
class Row:
    """One of them."""

    name: str
    dtype: str
    address: int
    #: Of a block.
    nbytes: int


class Rows:
    """All rows of a worker's cache, and where its blocks are."""

    def __init__(self, rows: Sequence[Row], blocks: int, device: str, kept: Sequence[Any]) -> None:
        #: "cpu", or "cuda:1".
        self.device = device
        self.blocks = blocks
        self.parts = [row.nbytes for row in rows]
        self._rows = list(rows)
        # The tensors: their memory must not go while a move uses it.
        self._kept = list(kept)
        self._first = min(row.address for row in rows)
        self._shifts = [row.address - self._first for row in rows]
        self._even = len(set(self.parts)) == 1

    def layout(self) -> str:
        """What makes blocks of another cache other blocks, besides sizes."""
        return ";".join(f"{row.name}:{row.dtype}:{row.nbytes}" for row in self._rows)

    def at(self, blocks: Sequence[int]) -> "At | Each":
        """Where some blocks are. Rows with slices of one size share a table of addresses."""
        if len(blocks) and not (0 <= min(blocks) and max(blocks) < self.blocks):
            raise invalid(f"blocks {min(blocks)} to {max(blocks)} of a cache of {self.blocks}")
        on_device = self.device != "cpu"
        if self._even:
            each, first = self.parts[0], self._first
            addresses = array.array("Q", [first + block * each for block in blocks])
            return At(addresses, self._shifts, on_device, self._kept)
        return Each([array.array("Q", [row.address + block * row.nbytes for block in blocks])
                     for row in self._rows], on_device, self._kept)


def read(caches: Mapping[str, Any], blocks: int) -> Rows:
    """Rows from what the engine registers: each a tensor, or a sequence of them; what cannot be
    moved as it lies is refused."""
    if blocks <= 0:
        raise invalid(f"a cache of {blocks} blocks")
    rows, kept, devices = [], [], set()
    for name, tensor in _tensors(caches):
        rows.append(_row(name, tensor, blocks))
        kept.append(tensor)
        devices.add(_device(tensor))
    if not rows:
        raise invalid("a cache without rows")
    if len(devices) != 1:
        raise make(abi.KVT_E_UNSUPPORTED, "a cache on several devices: "
                   f"{', '.join(sorted(devices))}")
    return Rows(rows, blocks, devices.pop(), kept)


def _tensors(caches: Mapping[str, Any]) -> Iterator[Tuple[str, Any]]:
    for name, value in caches.items():
        if hasattr(value, "data_ptr"):
            yield name, value
        elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            for index, one in enumerate(value):
                yield f"{name}[{index}]", one
        else:
            yield name, value


def _row(name: str, tensor: Any, blocks: int) -> Row:
    if not hasattr(tensor, "data_ptr"):
        raise invalid(f"{name}: a {type(tensor).__name__} is no tensor")
    dtype = str(tensor.dtype).rpartition(".")[2]
    if dtype not in DTYPES:
        raise make(abi.KVT_E_UNSUPPORTED, f"{name}: {dtype} is none of {', '.join(DTYPES)}: use "
                   "another quant_policy, or kv dtype")
    if not tensor.is_contiguous():
        raise make(abi.KVT_E_UNSUPPORTED, f"{name}: not contiguous; blocks must follow each other "
                   "in its memory (a copy would not be the cache)")
    size = int(tensor.numel()) * int(tensor.element_size())
    each, rest = divmod(size, blocks)
    if each == 0 or rest:
        raise invalid(f"{name}: {size} bytes are no {blocks} blocks of one size")
    if each >= 1 << 32:
        raise make(abi.KVT_E_LIMIT, f"{name}: blocks of {each} bytes: use a smaller block_size")
    return Row(name, dtype, int(tensor.data_ptr()), each)


def _device(tensor: Any) -> str:
    device = getattr(tensor, "device", "cpu")
    kind = str(getattr(device, "type", device))
    if kind == "cpu":
        return kind
    if kind != "cuda":
        raise make(abi.KVT_E_UNSUPPORTED, f"a cache on {kind}: there are cpu and cuda")
    return f"cuda:{int(getattr(device, 'index', 0) or 0)}"


def summary(rows: Rows) -> List[str]:
    """For the log."""
    return [f"{rows.blocks} blocks of {sum(rows.parts)} bytes", f"{len(rows.parts)} rows",
            f"on {rows.device}"]
