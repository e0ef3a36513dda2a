"""The location of each layer's blocks in vLLM's KV caches."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import kvtier

from .settings import invalid, unsupported


class Layer(NamedTuple):
    """The KV cache of a layer: blocks without gaps, `stride_bytes` apart."""

    name: str
    source: Any
    #: Offset of the first block in `source`, and its address.
    offset: int
    address: int
    block_bytes: int
    stride_bytes: int
    #: Number of the CUDA device; None in host memory.
    ordinal: Optional[int]

    def view(self, blocks: Sequence[int], block_tokens: int) -> kvtier.View:
        """A view of some of its blocks, in order. A block's bytes are divided evenly among its
        tokens: any order inside a block works, because a load restores each byte in place."""
        return kvtier.View(self.source, self.block_bytes // block_tokens, offset=self.offset,
                           pages=[block * self.stride_bytes for block in blocks],
                           page_tokens=block_tokens)


def _without_gaps(tensor: Any) -> bool:
    """Whether the elements of one block fill a contiguous range, in any order."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride()[1:], tensor.shape[1:])):
        if length != 1:
            if stride != expected:
                return False
            expected *= length
    return True


def layer(name: str, tensor: Any, blocks: int) -> Layer:
    """The layer of a tensor, whose first dimension counts blocks, or equal parts of blocks."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise unsupported(f"the cache of {name} is {type(tensor).__name__}, not one tensor: models "
                          "with states beside attention are not supported here; use "
                          "OffloadingConnector with the kvtier tier")
    if tensor.device.type not in ("cpu", "cuda"):
        raise unsupported(f"the cache of {name} is on {tensor.device.type}: only host memory and "
                          "CUDA memory are supported; use OffloadingConnector with the kvtier tier")
    if blocks <= 0 or tensor.dim() < 2 or tensor.shape[0] % blocks:
        raise invalid(f"the cache of {name} has shape {tuple(tensor.shape)}: its first dimension "
                      f"must be a multiple of the {blocks} blocks, with a second one behind it")
    parts: Any = tensor  # torch's type stubs lack some of its methods
    if tensor.shape[0] != blocks:
        parts = parts.unflatten(0, (blocks, -1))
    element_bytes = tensor.element_size()
    size, stride = parts[0].numel() * element_bytes, parts.stride(0) * element_bytes
    if not _without_gaps(parts) or stride < size:
        raise unsupported(f"a block of {name} has gaps (strides {tuple(parts.stride())}): set "
                          "VLLM_KV_CACHE_LAYOUT=NHD or HND, or use OffloadingConnector")
    offset = int(parts.storage_offset()) * element_bytes
    cuda = tensor.device.type == "cuda"
    flat: Any = torch.empty(0, dtype=torch.uint8)
    storage = tensor.untyped_storage()
    source: Any = flat.set_(storage).numpy() if not cuda else kvtier.MemoryRange(
        storage.data_ptr(), storage.nbytes(), on_device=True, kept=storage)
    return Layer(name, source, offset, tensor.data_ptr(), size, stride,
                 (tensor.device.index or 0) if cuda else None)


def layers(caches: Dict[str, Any], names: Sequence[str], blocks: int) -> List[Layer]:
    """The layers of a model, in the order of `names`."""
    missing = [name for name in names if name not in caches]
    if missing:
        raise invalid(f"no cache of layer {missing[0]} was registered: register the caches of all "
                      f"{len(names)} layers")
    found = [layer(name, caches[name], blocks) for name in names]
    if len({layer_.ordinal for layer_ in found}) > 1:
        raise unsupported("the layers of one worker are on several devices: keep them on one, or "
                          "use OffloadingConnector with the kvtier tier")
    return found


def stream_event(device: Optional[kvtier.Device]) -> Optional[kvtier.DeviceEvent]:
    """An event after all work that the engine's stream has now: transfers wait for it."""
    if device is None:
        return None
    import torch

    kind: Any = torch.cuda.Event
    event = kind()
    event.record()
    return device.import_event(event.cuda_event, event)
