"""LMCache's local disk backend, as a side of the benchmark.

Its memory objects refer to the benchmark's rows, so there are no extra copies. It uses O_DIRECT
for its files, as kvtier does.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, List

import numpy as np


class Disk:
    """Stores and loads rows under names in LMCache's local disk."""

    def __init__(self, folder: Path, rows: np.ndarray) -> None:
        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

        self._key, self._torch, self._rows = CacheEngineKey, torch, rows
        self._object, self._metadata = TensorMemoryObj, MemoryObjMetadata
        self._format = MemoryFormat
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        folder.mkdir(parents=True, exist_ok=True)
        config = LMCacheEngineConfig.from_defaults(
            local_cpu=False, local_disk=str(folder), max_local_disk_size=16,
            extra_config={"use_odirect": True})
        self._next: List[int] = []
        memory = SimpleNamespace(
            allocate=lambda shape, dtype, fmt: self._memory_object(self._next.pop(0)))
        self._disk = LocalDiskBackend(config, self._loop, memory, "cpu")

    def _memory_object(self, row: int) -> Any:
        raw = self._torch.from_numpy(self._rows[row].view(np.uint8))
        shape = self._torch.Size([len(raw)])
        metadata = self._metadata(shape, self._torch.uint8, 0, len(raw), 1, 0, self._format.BINARY)
        return self._object(raw, metadata, None)

    def _names(self, names: List[bytes]) -> List[Any]:
        return [self._key("bench", 1, 0, int.from_bytes(name[:32], "big"), self._torch.uint8)
                for name in names]

    def store(self, names: List[bytes], rows: List[int]) -> None:
        left, done = [len(names)], threading.Event()
        lock = threading.Lock()

        def written(_: Any) -> None:
            with lock:
                left[0] -= 1
                if not left[0]:
                    done.set()

        for key, row in zip(self._names(names), rows):
            self._disk.submit_put_task(key, self._memory_object(row), on_complete_callback=written)
        assert done.wait(60), "LMCache did not store all rows within 60 s"

    def load(self, names: List[bytes], rows: List[int]) -> None:
        self._next = list(rows)
        got = self._disk.batched_get_blocking(self._names(names))
        assert all(one is not None for one in got), "LMCache did not load all rows"

    def close(self) -> None:
        self._disk.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
