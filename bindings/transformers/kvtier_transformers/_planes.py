"""torch memory as kvtier sees it: [batch, heads, tokens, dim], a row at a time, by address."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch
from kvtier import Device, DeviceEvent, Op, View

from ._shapes import LayerShape

Pair = Tuple[torch.Tensor, torch.Tensor]
#: Devices whose memory kvtier reads and writes by address.
HOST: Tuple[str, ...] = ("cpu",)
#: Buffers of K and V, and the slot that has the first token of a move.
Placed = Tuple[torch.Tensor, torch.Tensor, int]


def empty(like: torch.Tensor, room: int) -> torch.Tensor:
    """Memory for `room` tokens, shaped as `like` otherwise. Never an inference tensor, which
    could not be written to in a later call without inference mode."""
    batch, heads, _, dim = like.shape
    with torch.inference_mode(False):
        return torch.empty((batch, heads, room, dim), dtype=like.dtype, device=like.device)


def blank(shape: LayerShape, batch: int, room: int, zero: bool = False) -> Pair:
    """Buffers of a layer."""
    make = torch.zeros if zero else torch.empty
    with torch.inference_mode(False):
        k, v = (make((batch, heads, room, dim), dtype=shape.dtype, device=shape.device)
                for heads, dim in ((shape.k_heads, shape.k_dim), (shape.v_heads, shape.v_dim)))
    return k, v


class Gpu:
    """A store's device, and the GPU that it is of: moves of KV that is there need no copy of
    torch's."""

    def __init__(self, device: Device, ordinal: int) -> None:
        self.device, self.ordinal = device, ordinal

    def reaches(self, buffer: torch.Tensor) -> bool:
        """Whether the device reads and writes this memory."""
        return buffer.device.type == "cuda" and (buffer.device.index or 0) == self.ordinal

    def source(self, flat: torch.Tensor) -> Any:
        """The bytes of a buffer, as a view takes them."""
        return flat

    def now(self) -> DeviceEvent:
        """What torch was told to do there until now: it writes what is put, and may still read
        what a get writes over."""
        event: Any = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.ordinal))
        return self.device.import_event(event.cuda_event, event)


def view(buffer: torch.Tensor, row: int, slot: int, gpu: Optional[Gpu] = None) -> View:
    """A row of a buffer without gaps, from a slot on. No copy, any dtype."""
    _, heads, room, dim = buffer.shape
    run = dim * buffer.element_size()
    flat = buffer.detach().reshape(-1).view(torch.uint8)
    return View(flat.numpy() if gpu is None else gpu.source(flat), run, heads,
                offset=(row * heads * room + slot) * run, token_stride=run,
                head_stride=room * run)


class Transfer:
    """A move under way, what it waits for, and what is to be done when it has come."""

    def __init__(self, op: Op, after: Optional[DeviceEvent] = None,
                 landed: Optional[Callable[[], None]] = None) -> None:
        self.op = op
        self._after, self._landed = after, landed
        self._end: Optional[Tuple[int, Any]] = None

    @property
    def done(self) -> bool:
        """It needs no waiting."""
        return self._end is not None or self.op.info().released

    def rest(self) -> None:
        """Waits until its memory is left alone; what became of it is for others to see."""
        if self._end is None:
            self.op.wait()

    def wait(self) -> Tuple[int, Any]:
        """Waits; how many tokens came without a gap, and the error or None. Where that is broken
        off, or is asked again, it says so all the same."""
        if self._end is None:
            self.op.wait()
            if self._landed is not None:
                self._landed()
                self._landed = None
            self._end = self.op.info().value, self.op.error()
        self.op.close()
        if self._after is not None:
            self._after.close()
        return self._end


class _Views:
    """What a move leads from or to."""

    def __init__(self, gpu: Optional[Gpu]) -> None:
        self.k: List[View] = []
        self.v: List[View] = []
        self._gpu, self._straight = gpu, False

    def takes(self, plane: List[View], buffer: torch.Tensor, row: int, slot: int) -> bool:
        """Adds a row of a buffer, where that needs no copy of torch's."""
        gpu = None
        if buffer.device.type not in HOST:
            gpu = self._gpu
            if gpu is None or not gpu.reaches(buffer):
                return False
            self._straight = True
        plane.append(view(buffer, row, slot, gpu))
        return True

    def submit(self, call: Callable[..., Op], landed: Optional[Callable[[], None]] = None,
               **what: int) -> Transfer:
        """Begins the move, behind what torch does with the GPU's memory."""
        after = self._gpu.now() if self._gpu is not None and self._straight else None
        try:
            return Transfer(call(self.k, self.v, after=after, **what), after, landed)
        except BaseException:
            if after is not None:
                after.close()
            raise


def to_store(session: Any, layers: Sequence[Placed], row: int, gpu: Optional[Gpu] = None, *,
             first_layer: int, first_token: int, tokens: int, level: int) -> Transfer:
    """Puts tokens of a row. Where nobody but torch reaches a buffer, torch moves them to host
    memory first."""
    views = _Views(gpu)
    for *pair, slot in layers:
        for buffer, plane in zip(pair, (views.k, views.v)):
            if views.takes(plane, buffer, row, slot):
                continue
            piece = buffer[row:row + 1, :, slot:slot + tokens].detach().to("cpu").contiguous()
            plane.append(view(piece, 0, 0))
    return views.submit(session.put, first_layer=first_layer, first_token=first_token,
                        tokens=tokens, level=level)


def from_store(session: Any, layers: Sequence[Placed], row: int, gpu: Optional[Gpu] = None, *,
               first_layer: int, first_token: int, tokens: int) -> Transfer:
    """Gets tokens of a row into the buffers; those that nobody but torch reaches get them from
    torch, once they have come."""
    views = _Views(gpu)
    staged: List[Tuple[torch.Tensor, torch.Tensor]] = []
    for *pair, slot in layers:
        for buffer, plane in zip(pair, (views.k, views.v)):
            if views.takes(plane, buffer, row, slot):
                continue
            there = buffer[row:row + 1, :, slot:slot + tokens]
            piece = torch.zeros(there.shape, dtype=buffer.dtype)
            staged.append((there, piece))
            plane.append(view(piece, 0, 0))

    def landed() -> None:
        for there, piece in staged:
            there.copy_(piece)

    return views.submit(session.get, landed if staged else None, first_layer=first_layer,
                        first_token=first_token, tokens=tokens)
