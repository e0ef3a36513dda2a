"""The interfaces of SGLang that each class of this package uses. `_engine.require` compares them
with the installed SGLang."""

from __future__ import annotations

from typing import Dict

from kvtier._probe import Interface, Interfaces

_STORAGE_MODULE = "sglang.srt.mem_cache.hicache_storage"
_TRANSFER = Interface(has=("name", "keys", "host_indices", "hit_policy"))

_STORAGE: Interfaces = {
    _STORAGE_MODULE: {
        "HiCacheStorageConfig": Interface(has=(
            "tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dp_rank",
            "is_mla_model", "enable_storage_metrics", "model_name", "should_split_heads",
            "extra_config")),
        "HiCacheStorageExtraInfo": Interface(has=("extra_info",)),
        "PoolName": Interface(has=("KV",)),
        "PoolHitPolicy": Interface(has=("ALL_PAGES", "TRAILING_PAGES")),
        "PoolTransfer": _TRANSFER,
        "PoolTransferResult": Interface(calls={
            "": "kv_hit_pages, extra_pool_hit_pages, restorable_prefix_pages"}),
        "HiCacheStorage": Interface(
            calls={"register_mem_host_pool_v2": "host_pool, host_pool_name"},
            overrides={
                "register_mem_pool_host": "mem_pool_host",
                "register_mem_host_pool_v2": "host_pool, host_pool_name",
                "batch_get_v1": "keys, host_indices, extra_info=",
                "batch_set_v1": "keys, host_indices, extra_info=",
                "batch_get_v2": "transfers, extra_info=", "batch_set_v2": "transfers, extra_info=",
                "batch_exists_v2": "keys, pool_transfers=, extra_info=",
                "exists": "key", "batch_exists": "keys, extra_info=",
                "get": "key, target_location=, target_sizes=",
                "batch_get": "keys, target_locations=, target_sizes=",
                "set": "key, value=, target_location=, target_sizes=",
                "batch_set": "keys, values=, target_locations=, target_sizes=",
                "clear": "", "get_stats": ""}),
    },
    "sglang.srt.observability.metrics_collector": {
        "StorageMetrics": Interface(calls={
            "": "*, prefetch_pgs, backup_pgs, prefetch_bandwidth, backup_bandwidth"}),
    },
}

_LINKER: Interfaces = {
    _STORAGE_MODULE: {
        "HiCacheStorageConfig": Interface(calls={
            "": "*, tp_rank, tp_size, pp_rank, pp_size, attn_cp_rank, attn_cp_size, is_mla_model, "
                "enable_storage_metrics, is_page_first_layout, model_name, dp_rank"}),
        "PoolName": Interface(has=("KV", "MAMBA")),
        "PoolTransfer": _TRANSFER,
    },
    "sglang.srt.mem_cache.unified_cache.unified_cache_linker": {
        "LayerWiseLoadCounter": Interface(calls={
            "": "num_layers", "update_producer": "", "complete": "index, layer",
            "fail": "index, error", "finish": "index", "reset": ""}),
        "UnifiedCacheLinker": Interface(
            has=("layer_done_counter", "pools", "forward_stream"),
            calls={"record_offload_ready": ""},
            overrides={
                "lookup": "rid, transfers", "load": "rid, transfers", "cancel_queued_load": "rid",
                "start_layer_wise_loading": "", "finish_layer_wise_loading": "counter_index",
                "offload": "transfers, session_id=", "num_completed_offloads": "",
                "pop_completed_offload": "", "reset": "", "close": ""}),
    },
    "sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler": {
        "DevicePoolEntry": Interface(
            has=("name", "layer_mapping", "buffer_meta", "page_size", "kv_buffer"),
            calls={"get_hybrid_pool_buffer": "", "prepare_locations": "indices"}),
        "DevicePoolGroup": Interface(
            has=("entry_map", "num_layers", "rank_replicated"),
            calls={"resolve_transfers": "transfers, *, allow_partial, allow_missing_kv"}),
        "resolve_hybrid_device_pool_group": Interface(calls={
            "": "*, kvcache, page_size, params, components"}),
    },
    "sglang.srt.runtime_context": {
        "get_model": Interface(calls={"": ""}), "get_parallel": Interface(calls={"": ""})},
    "sglang.srt.utils": {"get_device_module": Interface(calls={"": ""})},
}

INTERFACES: Dict[str, Interfaces] = {"storage": _STORAGE, "linker": _LINKER}
