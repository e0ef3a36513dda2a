"""From which pages are there to which prefixes can be had."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Sequence, Tuple

import numpy as np

from ._config import unsupported

Found = Callable[[str], bytes]


def leading(found: bytes) -> int:
    """How many from the first on are there."""
    gap = found.find(0)
    return len(found) if gap < 0 else gap


def _ends(found: bytes, pages: int, transfer: Any) -> Tuple[int, List[int]]:
    """At which prefix lengths a pool is complete: the longest, and all of them."""
    policy = str(getattr(transfer.hit_policy, "value", transfer.hit_policy))
    if policy == "all_pages":
        longest = leading(found[:pages])
        return longest, list(range(1, longest + 1))
    if policy != "trailing_pages":
        raise unsupported(f"pool {transfer.name}: hit policy {policy!r} is one that SGLang's own "
                          "backends refuse, too")
    window = max(1, len(transfer.keys) if transfer.keys else 1)
    there = np.frombuffer(found[:pages], np.uint8) != 0
    before = np.concatenate(([0], np.cumsum(there)))
    ends = np.arange(1, pages + 1)
    starts = np.maximum(0, ends - window)
    whole = ends[before[ends] - before[starts] == ends - starts]
    return (int(whole[-1]) if whole.size else 0), [int(one) for one in whole]


def fold(pages: int, transfers: Sequence[Any], found: Found, kv: Any
         ) -> Tuple[int, Dict[Any, int], List[int]]:
    """What `PoolTransferResult` has, for `pages` leading pages of KV: the longest prefix that
    all pools can serve, what each could serve by itself, and all such prefixes."""
    hits: Dict[Any, int] = {kv: pages} if pages else {}
    able = list(range(1, pages + 1))
    for transfer in transfers:
        if not able:
            break
        longest, ends = _ends(found(transfer.name), pages, transfer)
        if longest:
            hits[transfer.name] = longest
        those = set(ends)
        able = [one for one in able if one in those]
    return (able[-1] if able else 0), hits, able
