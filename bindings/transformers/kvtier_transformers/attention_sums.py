"""Sums of the attention that keys receive: from probabilities, or from queries and keys."""

from __future__ import annotations

from typing import Any

import torch
from kvtier import _abi, kernels
from kvtier._errors import make
from kvtier.h2o import column_sums

from .attention import visible

#: Queries of one step on a device.
_STEP = 128


def from_weights(weights: torch.Tensor, queries: Any, keys: Any, wanted: int,
                 by_head: bool) -> tuple[Any, int]:
    """Sums a sequence's probabilities, [heads, queries, rows], over the last `wanted` queries.
    Returns the sums and the number of queries."""
    chosen = weights[:, queries][:, :, keys][:, -wanted:].float()
    sums = chosen.sum(1) if by_head else chosen.sum((0, 1))
    return sums.detach().cpu().numpy(), int(chosen.shape[1])


def from_keys(query: torch.Tensor, key: torch.Tensor, scaling: float | None, wanted: int,
              by_head: bool, threads: int) -> tuple[Any, int]:
    """Computes the same sums from queries [heads, tokens, dim] and the resident keys."""
    query = query[:, -wanted:].detach()
    key = key.detach()
    if key.device.type != "cpu":
        return _on_device(query, key, scaling, by_head).cpu().numpy(), int(query.shape[1])
    sums = column_sums(rows(query), rows(key), scaling or 0.0, by_head, threads)
    return sums, int(query.shape[1])


def rows(tensor: torch.Tensor) -> kernels.Rows:
    """Converts [heads, tokens, dim] for kernels. Copies only if strides or dtype require it."""
    if tensor.stride(-1) != 1 or min(tensor.stride()) <= 0:
        tensor = tensor.contiguous()
    tensor = tensor.detach().cpu().transpose(0, 1)
    if tensor.dtype == torch.bfloat16:
        return kernels.Rows(tensor.view(torch.int16).numpy(), "bf16")
    if tensor.dtype in (torch.float32, torch.float16):
        return kernels.Rows(tensor.numpy())
    return kernels.Rows(tensor.float().numpy())


def _on_device(query: torch.Tensor, key: torch.Tensor, scaling: float | None,
               by_head: bool) -> torch.Tensor:
    """Computes the sums on the keys' device, in steps of _STEP queries."""
    heads, count, dim = query.shape
    total = key.shape[1]
    scale = dim ** -0.5 if scaling is None else scaling
    wide = key.float().transpose(1, 2).unsqueeze(1)
    groups = query.float().view(key.shape[0], heads // key.shape[0], count, dim)
    sums = torch.zeros((heads, total), device=key.device)
    columns = torch.arange(total, device=key.device)
    for first in range(0, count, _STEP):
        part = groups[:, :, first:first + _STEP]
        last = torch.arange(part.shape[2], device=key.device) + (total - count + first)
        scores = (part @ wide) * scale
        scores = scores.masked_fill(columns > last[:, None], float("-inf"))
        sums += torch.softmax(scores, -1).sum(2).view(heads, total)
    return sums if by_head else sums.sum(0)


def check_causal(mask: torch.Tensor | None, evictor: Any, count: int) -> None:
    """Raises unless a mask hides exactly padding and later tokens. For other masks the sums from
    queries and keys would differ from the model's attention."""
    if mask is None:
        return
    shown = visible(mask)
    for sequence in range(evictor.batch):
        new = evictor.new_rows(sequence, count)
        found = shown[min(sequence, shown.shape[0] - 1)][:, new]
        queries, heads = found.shape[1], found.shape[0]
        resident = int((evictor.ids[sequence, 0] >= 0).sum())
        want = heads * (queries * (resident - queries) + queries * (queries + 1) // 2)
        if int(found.sum()) != want:
            raise make(_abi.KVT_E_UNSUPPORTED,
                       "the attention_mask is neither causal nor padding, so sdpa cannot tell "
                       "how much attention keys receive: load the model with "
                       'attn_implementation="eager"')
