"""Transfers between torch buffers [batch, heads, tokens, dim] and a store, one row at a time."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch
from kvtier import Device, DeviceEvent, Op, View

from ._shapes import LayerShape

Pair = Tuple[torch.Tensor, torch.Tensor]
#: torch device types whose memory kvtier accesses by address without a device.
HOST: Tuple[str, ...] = ("cpu",)
#: K buffer, V buffer, and the slot of the transfer's first token.
Placement = Tuple[torch.Tensor, torch.Tensor, int]


def empty(like: torch.Tensor, slots: int) -> torch.Tensor:
    """Allocates a buffer of `slots` tokens, otherwise shaped as `like`.

    The buffer is never an inference tensor: a later call without inference mode must write it."""
    batch, heads, _, dim = like.shape
    with torch.inference_mode(False):
        return torch.empty((batch, heads, slots, dim), dtype=like.dtype, device=like.device)


def blank(shape: LayerShape, batch: int, slots: int, zero: bool = False) -> Pair:
    """Allocates the K and V buffers of a layer, for `slots` tokens."""
    make = torch.zeros if zero else torch.empty
    with torch.inference_mode(False):
        k, v = (make((batch, heads, slots, dim), dtype=shape.dtype, device=shape.device)
                for heads, dim in ((shape.k_heads, shape.k_dim), (shape.v_heads, shape.v_dim)))
    return k, v


class Gpu:
    """A store's device and the ordinal of its GPU. The device transfers KV of this GPU without a
    staging copy by torch."""

    def __init__(self, device: Device, ordinal: int) -> None:
        self.device, self.ordinal = device, ordinal

    def reaches(self, buffer: torch.Tensor) -> bool:
        """Whether the device can access this buffer."""
        return buffer.device.type == "cuda" and (buffer.device.index or 0) == self.ordinal

    def source(self, flat: torch.Tensor) -> Any:
        """Returns a buffer's bytes in the form that `View` accepts."""
        return flat

    def record_event(self) -> DeviceEvent:
        """Records an event after the work that torch has queued on this GPU.

        That work writes the source of a put, and may still read the target of a get."""
        event: Any = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.ordinal))
        return self.device.import_event(event.cuda_event, event)


def view(buffer: torch.Tensor, row: int, slot: int, gpu: Optional[Gpu] = None) -> View:
    """Returns a view of one row of a contiguous buffer, from `slot` on. Copies nothing."""
    _, heads, slots, dim = buffer.shape
    run = dim * buffer.element_size()
    flat = buffer.detach().reshape(-1).view(torch.uint8)
    return View(flat.numpy() if gpu is None else gpu.source(flat), run, heads,
                offset=(row * heads * slots + slot) * run, token_stride=run,
                head_stride=slots * run)


class Transfer:
    """A put or get in progress, with its ready event and the copies to make on completion."""

    def __init__(self, op: Op, ready: Optional[DeviceEvent] = None,
                 on_complete: Optional[Callable[[], None]] = None) -> None:
        self.op = op
        self._ready, self._on_complete = ready, on_complete
        self._result: Optional[Tuple[int, Any]] = None

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._result is not None or self.op.info().released

    def wait_released(self) -> None:
        """Waits until the op no longer uses its memory. A later `wait` returns the result."""
        if self._result is None:
            self.op.wait()

    def wait(self) -> Tuple[int, Any]:
        """Waits for completion. Returns the number of contiguous tokens, and the error or None.

        After an interruption it can be called again; a repeated call returns the same result."""
        if self._result is None:
            self.op.wait()
            if self._on_complete is not None:
                self._on_complete()
                self._on_complete = None
            self._result = self.op.info().value, self.op.error()
        self.op.close()
        if self._ready is not None:
            self._ready.close()
        return self._result


class _Views:
    """The K and V views of a transfer."""

    def __init__(self, gpu: Optional[Gpu]) -> None:
        self.k: List[View] = []
        self.v: List[View] = []
        self._gpu, self._uses_gpu = gpu, False

    def add_direct(self, plane: List[View], buffer: torch.Tensor, row: int, slot: int) -> bool:
        """Adds a row of a buffer if kvtier can access it directly, without a staging copy."""
        gpu = None
        if buffer.device.type not in HOST:
            gpu = self._gpu
            if gpu is None or not gpu.reaches(buffer):
                return False
            self._uses_gpu = True
        plane.append(view(buffer, row, slot, gpu))
        return True

    def submit(self, call: Callable[..., Op], on_complete: Optional[Callable[[], None]] = None,
               **range_of: int) -> Transfer:
        """Submits the transfer; it waits for the work that torch has queued on the GPU."""
        ready = self._gpu.record_event() if self._gpu is not None and self._uses_gpu else None
        try:
            return Transfer(call(self.k, self.v, after=ready, **range_of), ready, on_complete)
        except BaseException:
            if ready is not None:
                ready.close()
            raise


def to_store(session: Any, layers: Sequence[Placement], row: int, gpu: Optional[Gpu] = None, *,
             first_layer: int, first_token: int, tokens: int, level: int) -> Transfer:
    """Puts tokens of a row. torch first copies buffers that kvtier cannot access to host memory."""
    views = _Views(gpu)
    for *pair, slot in layers:
        for buffer, plane in zip(pair, (views.k, views.v)):
            if views.add_direct(plane, buffer, row, slot):
                continue
            staging = buffer[row:row + 1, :, slot:slot + tokens].detach().to("cpu").contiguous()
            plane.append(view(staging, 0, 0))
    return views.submit(session.put, first_layer=first_layer, first_token=first_token,
                        tokens=tokens, level=level)


def from_store(session: Any, layers: Sequence[Placement], row: int, gpu: Optional[Gpu] = None, *,
               first_layer: int, first_token: int, tokens: int) -> Transfer:
    """Gets tokens of a row. On completion torch copies them from host memory into the buffers that
    kvtier cannot access."""
    views = _Views(gpu)
    staged: List[Tuple[torch.Tensor, torch.Tensor]] = []
    for *pair, slot in layers:
        for buffer, plane in zip(pair, (views.k, views.v)):
            if views.add_direct(plane, buffer, row, slot):
                continue
            target = buffer[row:row + 1, :, slot:slot + tokens]
            staging = torch.zeros(target.shape, dtype=buffer.dtype)
            staged.append((target, staging))
            plane.append(view(staging, 0, 0))

    def copy_staged() -> None:
        for target, staging in staged:
            target.copy_(staging)

    return views.submit(session.get, copy_staged if staged else None, first_layer=first_layer,
                        first_token=first_token, tokens=tokens)
