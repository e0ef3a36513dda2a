"""Where vLLM's KV caches have the blocks of a layer."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import kvtier

from .settings import invalid, unsupported


class Layer(NamedTuple):
    """The cache of a layer: blocks of so many bytes without gaps, at equal distances."""

    name: str
    source: Any
    #: Of the first block, and its address.
    offset: int
    address: int
    block_bytes: int
    stride_bytes: int
    #: None in host memory.
    ordinal: Optional[int]

    def view(self, blocks: Sequence[int], block_tokens: int) -> kvtier.View:
        """Some of its blocks, one after the other. Their bytes are cut evenly by tokens: what is
        stored comes back to the same places, whatever the order inside a block is."""
        return kvtier.View(self.source, self.block_bytes // block_tokens, offset=self.offset,
                           pages=[block * self.stride_bytes for block in blocks],
                           page_tokens=block_tokens)


def _without_gaps(tensor: Any) -> bool:
    """Whether the elements of one block fill a range, in whatever order."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride()[1:], tensor.shape[1:])):
        if length != 1:
            if stride != expected:
                return False
            expected *= length
    return True


def layer(name: str, tensor: Any, blocks: int) -> Layer:
    """A layer's tensor, whose first dimension is blocks, or an even part of them."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise unsupported(f"the cache of {name} is {type(tensor).__name__}, not one tensor: models "
                          "with states beside attention are not taken here; use "
                          "OffloadingConnector with the kvtier tier")
    if tensor.device.type not in ("cpu", "cuda"):
        raise unsupported(f"the cache of {name} is on {tensor.device.type}; memory of the "
                          "processor and of CUDA can be taken")
    if blocks <= 0 or tensor.dim() < 2 or tensor.shape[0] % blocks:
        raise invalid(f"the cache of {name} has shape {tuple(tensor.shape)} for {blocks} blocks")
    parts: Any = tensor  # its stubs know other methods than it has
    if tensor.shape[0] != blocks:
        parts = parts.unflatten(0, (blocks, -1))
    each = tensor.element_size()
    size, stride = parts[0].numel() * each, parts.stride(0) * each
    if not _without_gaps(parts) or stride < size:
        raise unsupported(f"a block of {name} has gaps (strides {tuple(parts.stride())}): set "
                          "VLLM_KV_CACHE_LAYOUT=NHD or HND, or use OffloadingConnector")
    offset = int(parts.storage_offset()) * each
    cuda = tensor.device.type == "cuda"
    flat: Any = torch.empty(0, dtype=torch.uint8)
    storage = tensor.untyped_storage()
    source: Any = flat.set_(storage).numpy() if not cuda else kvtier.Place(
        storage.data_ptr(), storage.nbytes(), on_device=True, kept=storage)
    return Layer(name, source, offset, tensor.data_ptr(), size, stride,
                 (tensor.device.index or 0) if cuda else None)


def layers(caches: Dict[str, Any], names: Sequence[str], blocks: int) -> List[Layer]:
    """The layers of a model, in the order of their names."""
    missing = [name for name in names if name not in caches]
    if missing:
        raise invalid(f"no cache of layer {missing[0]}")
    found = [layer(name, caches[name], blocks) for name in names]
    if len({one.ordinal for one in found}) > 1:
        raise unsupported("the layers of one worker are on several devices")
    return found


def stream_event(device: Optional[kvtier.Device]) -> Optional[kvtier.DeviceEvent]:
    """What was put on the engine's stream until now: moves of its memory come after that."""
    if device is None:
        return None
    import torch

    kind: Any = torch.cuda.Event
    event = kind()
    event.record()
    return device.import_event(event.cuda_event, event)
