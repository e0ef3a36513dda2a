"""Names of token blocks: a hash chain over a block's tokens and all tokens before them."""

from __future__ import annotations

import hashlib
import struct
from typing import Any, List, Sequence

import numpy as np

NAME_BYTES = 32
_ROOT = b"kvtier lmdeploy block 1\0"


def extend(names: List[bytes], tokens: Any, block_tokens: int, adapter: str,
           blocks: int) -> None:
    """Extends a sequence's `names` to `blocks` names. `tokens` begin at the sequence's start.

    Raises ValueError if there are fewer than `blocks` full blocks of tokens."""
    first = len(names)
    if first >= blocks:
        return
    if first == 0:
        text = adapter.encode()
        before = hashlib.sha256(
            _ROOT + struct.pack("<II", block_tokens, len(text)) + text).digest()
    else:
        before = names[-1]
    flat = np.ascontiguousarray(tokens[first * block_tokens:blocks * block_tokens], dtype="<i8")
    data, each = flat.view(np.uint8).data, 8 * block_tokens
    if len(data) != each * (blocks - first):
        raise ValueError(f"{blocks} blocks of {block_tokens} tokens need "
                         f"{(blocks - first) * block_tokens} tokens after block {first}; there are "
                         f"{len(data) // 8}")
    for at in range(0, len(data), each):
        digest = hashlib.sha256(before)
        digest.update(data[at:at + each])
        before = digest.digest()
        names.append(before)


def numbers(names: Sequence[bytes]) -> List[int]:
    """Returns the 64-bit object ids of blocks, as policies use them."""
    return [int.from_bytes(name[:8], "little") for name in names]
