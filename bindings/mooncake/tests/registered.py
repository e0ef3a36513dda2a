"""Registered memory for the tests' puts and gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List

import numpy as np

HERE = Path(__file__).resolve().parent
HOST = "store(host=64MiB)"


class Memory:
    """Registered arrays, one per row, with some blocks each."""

    def __init__(self, store: Any, blocks: int = 16, sizes: Any = (4096, 4096)) -> None:
        self.sizes = list(sizes)
        self.rows = [np.random.default_rng(at).integers(0, 256, (blocks, size), dtype=np.uint8)
                     for at, size in enumerate(self.sizes)]
        for row in self.rows:
            assert store.register_buffer(row.ctypes.data, row.nbytes) == 0

    def at(self, *blocks: int) -> List[List[int]]:
        return [[row.ctypes.data + block * size for row, size in zip(self.rows, self.sizes)]
                for block in blocks]

    def bytes(self, block: int) -> bytes:
        return b"".join(row[block].tobytes() for row in self.rows)

    def overwrite(self) -> None:
        for row in self.rows:
            row[:] = 0xEE
