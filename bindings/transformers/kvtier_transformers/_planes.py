"""torch memory as kvtier sees it: [batch, heads, tokens, dim], a row at a time, by address."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch
from kvtier import Op, View

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


def view(buffer: torch.Tensor, row: int, slot: int) -> View:
    """A row of a buffer in host memory without gaps, from a slot on. No copy, any dtype."""
    _, heads, room, dim = buffer.shape
    run = dim * buffer.element_size()
    source = buffer.detach().reshape(-1).view(torch.uint8).numpy()
    return View(source, run, heads, offset=(row * heads * room + slot) * run, token_stride=run,
                head_stride=room * run)


class Transfer:
    """A move under way, its tensors, and what is to be done when it has come."""

    def __init__(self, op: Op, landed: Optional[Callable[[], None]] = None) -> None:
        self.op = op
        self._landed = landed

    @property
    def done(self) -> bool:
        """It needs no waiting."""
        return self.op.info().released

    def wait(self) -> Tuple[int, Any]:
        """Waits; how many tokens came without a gap, and the error or None."""
        self.op.wait()
        info = self.op.info()
        error = self.op.error()
        if self._landed is not None:
            self._landed()
            self._landed = None
        self.op.close()
        return info.value, error


def to_store(session: Any, layers: Sequence[Placed], row: int, *, first_layer: int,
             first_token: int, tokens: int, level: int) -> Transfer:
    """Puts tokens of a row. Where a buffer is not in host memory torch moves them there first."""
    k: List[View] = []
    v: List[View] = []
    for *pair, slot in layers:
        for buffer, views in zip(pair, (k, v)):
            if buffer.device.type in HOST:
                views.append(view(buffer, row, slot))
                continue
            piece = buffer[row:row + 1, :, slot:slot + tokens].detach().to("cpu").contiguous()
            views.append(view(piece, 0, 0))
    return Transfer(session.put(k, v, first_layer=first_layer, first_token=first_token,
                                tokens=tokens, level=level))


def from_store(session: Any, layers: Sequence[Placed], row: int, *, first_layer: int,
               first_token: int, tokens: int) -> Transfer:
    """Gets tokens of a row into the buffers; those that are not in host memory get them from
    torch, once they have come."""
    k: List[View] = []
    v: List[View] = []
    staged: List[Tuple[torch.Tensor, torch.Tensor]] = []
    for *pair, slot in layers:
        for buffer, views in zip(pair, (k, v)):
            if buffer.device.type in HOST:
                views.append(view(buffer, row, slot))
                continue
            there = buffer[row:row + 1, :, slot:slot + tokens]
            piece = torch.zeros(there.shape, dtype=buffer.dtype)
            staged.append((there, piece))
            views.append(view(piece, 0, 0))

    def landed() -> None:
        for there, piece in staged:
            there.copy_(piece)

    op = session.get(k, v, first_layer=first_layer, first_token=first_token, tokens=tokens)
    return Transfer(op, landed if staged else None)
