"""The layout of KV caches: the attributes that a connector reads."""

from typing import Any


class FullAttentionSpec:
    block_size: Any
    sliding_window: Any


class MLAAttentionSpec(FullAttentionSpec):
    pass


class KVCacheGroupSpec:
    layer_names: Any
    kv_cache_spec: Any
    is_eagle_group: Any
    host_resident: Any
    enable_kv_transfer: Any


class KVCacheConfig:
    kv_cache_groups: Any
    num_blocks: Any
    kv_cache_layout: Any
