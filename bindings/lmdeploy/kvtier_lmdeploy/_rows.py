"""The rows of a worker's KV cache: tensors that hold one slice for each block, in order."""

from __future__ import annotations

import array
from dataclasses import dataclass
from typing import Any, Iterator, List, Mapping, Sequence, Tuple

from kvtier import BlockAddresses, PartAddresses, abi
from kvtier._errors import make

from ._settings import invalid

#: Supported element types: the last part of torch's or numpy's name.
DTYPES = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
          "float8_e5m2fnuz", "int8", "uint8", "int32", "uint32")


@dataclass(frozen=True)
class Row:
    """One tensor of the cache."""

    name: str
    dtype: str
    address: int
    #: Bytes of one block's slice.
    nbytes: int


class Rows:
    """All rows of a worker's cache, with the addresses of its blocks."""

    def __init__(self, rows: Sequence[Row], blocks: int, device: str, kept: Sequence[Any]) -> None:
        #: "cpu", or "cuda:1".
        self.device = device
        self.blocks = blocks
        self.parts = [row.nbytes for row in rows]
        self._rows = list(rows)
        # The tensors: their memory must stay allocated while a transfer uses it.
        self._kept = list(kept)
        self._first = min(row.address for row in rows)
        self._offsets = [row.address - self._first for row in rows]
        self._uniform = len(set(self.parts)) == 1

    def layout(self) -> str:
        """Text that identifies the rows; part of the identity of stored KV."""
        return ";".join(f"{row.name}:{row.dtype}:{row.nbytes}" for row in self._rows)

    def at(self, blocks: Sequence[int]) -> "BlockAddresses | PartAddresses":
        """Returns the addresses of `blocks`. Rows of one slice size share one address table."""
        if len(blocks) and not (0 <= min(blocks) and max(blocks) < self.blocks):
            raise invalid(f"block ids {min(blocks)} to {max(blocks)} are out of range: the cache "
                          f"has blocks 0 to {self.blocks - 1}")
        on_device = self.device != "cpu"
        if self._uniform:
            each, first = self.parts[0], self._first
            addresses = array.array("Q", [first + block * each for block in blocks])
            return BlockAddresses(addresses, self._offsets, on_device, self._kept)
        return PartAddresses(
            [array.array("Q", [row.address + block * row.nbytes for block in blocks])
             for row in self._rows], on_device, self._kept)


def read(caches: Mapping[str, Any], blocks: int) -> Rows:
    """Reads the rows that the engine registers; each entry is a tensor or a sequence of tensors.

    Raises for tensors that cannot be copied in place."""
    if blocks <= 0:
        raise invalid(f"the cache has {blocks} blocks (num_gpu_blocks): it must have at least 1")
    rows, kept, devices = [], [], set()
    for name, tensor in _tensors(caches):
        rows.append(_row(name, tensor, blocks))
        kept.append(tensor)
        devices.add(_device(tensor))
    if not rows:
        raise invalid("the engine registered no cache tensors: register at least one")
    if len(devices) != 1:
        raise make(abi.KVT_E_UNSUPPORTED, f"the cache is on {', '.join(sorted(devices))}: all its "
                   "tensors must be on one device")
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
        raise invalid(f"{name} is a {type(tensor).__name__}: it must be a tensor")
    dtype = str(tensor.dtype).rpartition(".")[2]
    if dtype not in DTYPES:
        raise make(abi.KVT_E_UNSUPPORTED, f"{name} has dtype {dtype}; supported are "
                   f"{', '.join(DTYPES)}. Use another quant_policy or KV dtype")
    if not tensor.is_contiguous():
        raise make(abi.KVT_E_UNSUPPORTED, f"{name} is not contiguous: its blocks must be adjacent "
                   "in memory. Register the cache tensor itself, not a view of a part")
    size = int(tensor.numel()) * int(tensor.element_size())
    each, rest = divmod(size, blocks)
    if each == 0 or rest:
        raise invalid(f"{name} has {size} bytes: they must divide into {blocks} blocks of equal "
                      "size (num_gpu_blocks)")
    if each >= 1 << 32:
        raise make(abi.KVT_E_LIMIT, f"{name} has blocks of {each} bytes; the limit is 4 GiB - 1. "
                   "Use a smaller block_size")
    return Row(name, dtype, int(tensor.data_ptr()), each)


def _device(tensor: Any) -> str:
    device = getattr(tensor, "device", "cpu")
    kind = str(getattr(device, "type", device))
    if kind == "cpu":
        return kind
    if kind != "cuda":
        raise make(abi.KVT_E_UNSUPPORTED, f"the cache is on device type {kind}: use cpu or cuda")
    return f"cuda:{int(getattr(device, 'index', 0) or 0)}"


def summary(rows: Rows) -> List[str]:
    """Describes the rows for the log."""
    return [f"{rows.blocks} blocks of {sum(rows.parts)} bytes", f"{len(rows.parts)} rows",
            f"on {rows.device}"]
