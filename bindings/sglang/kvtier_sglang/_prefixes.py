"""Derives the prefixes that can be loaded from the pages that are stored."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Sequence, Tuple

import numpy as np

from ._config import unsupported

Found = Callable[[str], bytes]


def leading(found: bytes) -> int:
    """The number of pages before the first missing one."""
    gap = found.find(0)
    return len(found) if gap < 0 else gap


def _complete_prefixes(found: bytes, pages: int, transfer: Any) -> Tuple[int, List[int]]:
    """The prefix lengths for which a pool has the pages it needs: the longest, and all."""
    policy = str(getattr(transfer.hit_policy, "value", transfer.hit_policy))
    if policy == "all_pages":
        longest = leading(found[:pages])
        return longest, list(range(1, longest + 1))
    if policy != "trailing_pages":
        raise unsupported(f"pool {transfer.name}: hit policy {policy!r} is not supported, as in "
                          "SGLang's own backends: use all_pages or trailing_pages")
    window = max(1, len(transfer.keys) if transfer.keys else 1)
    found_pages = np.frombuffer(found[:pages], np.uint8) != 0
    before = np.concatenate(([0], np.cumsum(found_pages)))
    ends = np.arange(1, pages + 1)
    starts = np.maximum(0, ends - window)
    complete = ends[before[ends] - before[starts] == ends - starts]
    return (int(complete[-1]) if complete.size else 0), [int(end) for end in complete]


def loadable_prefixes(pages: int, transfers: Sequence[Any], found: Found, kv: Any
                      ) -> Tuple[int, Dict[Any, int], List[int]]:
    """The fields of `PoolTransferResult` for `pages` leading pages of KV: the longest prefix that
    all pools can serve, the longest of each pool by itself, and all prefixes of all pools."""
    hits: Dict[Any, int] = {kv: pages} if pages else {}
    usable = list(range(1, pages + 1))
    for transfer in transfers:
        if not usable:
            break
        longest, ends = _complete_prefixes(found(transfer.name), pages, transfer)
        if longest:
            hits[transfer.name] = longest
        complete = set(ends)
        usable = [length for length in usable if length in complete]
    return (usable[-1] if usable else 0), hits, usable
