"""What blocks of tokens are called: the same for the same tokens after the same tokens."""

from __future__ import annotations

import hashlib
import struct
from typing import Any, List, Sequence

import numpy as np

NAME_BYTES = 32
_ROOT = b"kvtier lmdeploy block 1\0"


def extend(names: List[bytes], tokens: Any, block_tokens: int, adapter: str,
           blocks: int) -> None:
    """Goes on with a sequence's names until there are so many; `tokens` are all from its start
    on."""
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
        raise ValueError(f"{blocks} blocks of {block_tokens} tokens, of {first} blocks and "
                         f"{len(data) // 8} tokens")
    for at in range(0, len(data), each):
        digest = hashlib.sha256(before)
        digest.update(data[at:at + each])
        before = digest.digest()
        names.append(before)


def numbers(names: Sequence[bytes]) -> List[int]:
    """Blocks as policies know them."""
    return [int.from_bytes(name[:8], "little") for name in names]
