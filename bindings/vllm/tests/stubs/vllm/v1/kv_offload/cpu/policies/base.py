"""Eviction policies of the CPU tier."""

import ctypes
from abc import ABC, abstractmethod


def order_request_keys(key_groups, req_context):
    keys = [key for group in key_groups for key in group]
    ends = [req_context.get_offload_key_position(key) for key in keys]
    if None in ends:
        return keys
    return [key for _, _, key in sorted(zip(ends, range(len(keys)), keys))]


class ChunkStatus(ctypes.Structure):
    _fields_ = [("ref_cnt", ctypes.c_int32), ("chunk_id", ctypes.c_int64)]

    def __init__(self, chunk_id):
        super().__init__()
        self.ref_cnt, self.chunk_id = -1, chunk_id


class CachePolicy(ABC):
    def __init__(self, cache_capacity):
        self.cache_capacity = cache_capacity

    @abstractmethod
    def get(self, key): ...

    @abstractmethod
    def insert(self, key, chunk, req_context): ...

    @abstractmethod
    def remove(self, key): ...

    @abstractmethod
    def touch(self, keys, req_context): ...

    def on_store_miss(self, keys, req_context):
        self.touch(keys, req_context)

    def on_request_access(self, keys, req_context):
        return

    def on_request_finished(self, key_groups, insertion_only_keys, reused_keys, req_context):
        for keys in key_groups:
            self.touch(keys, req_context)

    @abstractmethod
    def evict(self, n, protected): ...

    @abstractmethod
    def clear(self): ...

    def mark_evictable(self, key):
        return

    def mark_non_evictable(self, key):
        return
