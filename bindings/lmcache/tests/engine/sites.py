"""LMCache's storage manager with the plugin, as an engine's worker has it."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.event_manager import EventManager
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.storage_manager import StorageManager

#: Bytes of a chunk: 2 x 4 layers x 16 tokens x 128 x 2 bytes.
CHUNK_BYTES = 32 << 10


def metadata(**more: Any) -> LMCacheMetadata:
    """A model with 4 layers, and chunks of 16 tokens."""
    given: Dict[str, Any] = dict(
        model_name="m", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
        kv_dtype=torch.bfloat16, kv_shape=(4, 2, 16, 2, 64), chunk_size=16)
    return LMCacheMetadata(**{**given, **more})


def config(path: Any, engine: Optional[Dict[str, Any]] = None, **options: Any) -> Any:
    """LMCache's configuration with the plugin's options."""
    options = {"module_path": "kvtier_lmcache", "class_name": "KvtierBackend",
               "host_bytes": "32MiB", **options}
    if path is not None:
        options = {"disk_path": str(path), "disk_bytes": "256MiB", **options}
    return LMCacheEngineConfig.from_defaults(**{
        "chunk_size": 16, "local_cpu": False, "max_local_cpu_size": 0.0625,
        "storage_plugins": ["kvtier"],
        "extra_config": {f"storage_plugin.kvtier.{name}": value
                         for name, value in options.items()}, **(engine or {})})


def key(number: int, **more: Any) -> CacheEngineKey:
    """The key of a chunk."""
    given: Dict[str, Any] = dict(model_name="m", world_size=1, worker_id=0, chunk_hash=number,
                                 dtype=torch.bfloat16)
    return CacheEngineKey(**{**given, **more})


def bytes_of(obj: Any) -> bytes:
    """The bytes of a memory object."""
    return bytes(obj.byte_array)


class Site:
    """A storage manager and its plugin."""

    def __init__(self, path: Any, engine: Optional[Dict[str, Any]] = None,
                 meta: Optional[LMCacheMetadata] = None, **options: Any) -> None:
        self.metadata = meta or metadata()
        self.events = EventManager()
        self.manager = StorageManager(config(path, engine, **options), self.metadata, self.events)
        #: None if LMCache could not create it.
        self.backend: Any = self.manager.storage_backends.get("kvtier")

    def objects(self, numbers: Sequence[int], shapes: Any = None, dtypes: Any = None,
                **more: Any) -> List[Any]:
        """Memory objects with random bytes that depend on the number."""
        made = []
        for number in numbers:
            obj = self.manager.allocate(shapes or self.metadata.get_shapes(),
                                        dtypes or self.metadata.get_dtypes(), **more)
            assert obj is not None, "LMCache has no memory"
            size = obj.get_size()
            random = torch.Generator().manual_seed(number)
            obj.raw_tensor[:size] = torch.randint(0, 256, (size,), dtype=torch.uint8,
                                                  generator=random)
            made.append(obj)
        return made

    def put(self, numbers: Sequence[int], keys: Optional[List[Any]] = None, **more: Any
            ) -> List[bytes]:
        """Puts chunks, and waits until they are stored. Returns their bytes."""
        objects = self.objects(numbers, **more)
        content = [bytes_of(obj) for obj in objects]
        self.manager.batched_put(keys or [key(number) for number in numbers], objects)
        self.backend._puts.drain()
        return content

    def get(self, keys: List[Any]) -> List[Optional[bytes]]:
        """Loads chunks, and releases them."""
        found = []
        for obj in self.manager.batched_get(keys, location="kvtier"):
            found.append(None if obj is None else bytes_of(obj))
            if obj is not None:
                assert obj.get_ref_count() == 1 and not obj.is_pinned
                obj.ref_count_down()
        return found

    @property
    def used_bytes(self) -> int:
        """The bytes of LMCache's memory that are in use."""
        allocator = self.manager.allocator_backend.memory_allocator.pin_allocator
        return int(allocator.total_allocated_size)

    def close(self) -> None:
        """Closes the storage manager."""
        self.manager.close()
