"""The interfaces of vLLM that each class of this package uses. `_engine.require` compares them
with the installed vLLM."""

from __future__ import annotations

from typing import Dict

from kvtier._probe import Interface, Interfaces

_BASE = "vllm.v1.kv_offload.base"
_TIERING = "vllm.v1.kv_offload.tiering.base"
_POLICIES = "vllm.v1.kv_offload.cpu.policies.base"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"

_CONTEXT = Interface(has=("req_id", "kv_transfer_params"),
                     calls={"get_state": "cls", "set_state": "val"})
_LOOKUP = Interface(has=("HIT", "MISS", "RETRY"))
#: What `identity.for_offloading` and the classes read of the engine's configuration.
_CONFIG: Dict[str, Interface] = {
    "OffloadingConfig": Interface(has=("groups", "extra_config", "engine_id", "model", "cache",
                                       "parallel", "kv_cache_layout", "canonical_layout",
                                       "replicated_layout")),
    "OffloadingGroupConfig": Interface(has=("tokens_per_block", "layer_names", "group_id")),
    "OffloadingModelConfig": Interface(has=("name", "dtype")),
    "OffloadingCacheConfig": Interface(has=("tokens_per_hash", "blocks_per_chunk")),
    "OffloadingParallelConfig": Interface(has=("world_size", "tp_size", "pp_size", "pcp_size",
                                               "dcp_size", "is_parallelism_agnostic")),
}
_EVENTS: Dict[str, Interface] = {
    "OffloadingEvent": Interface(calls={
        "": "*, keys, medium, removed, locality, ownership, removal_expected"}),
    "OffloadingKVEventsConfig": Interface(has=("enable_kv_cache_events",)),
}

_TIER: Interfaces = {
    _BASE: {
        **_EVENTS, "LookupResult": _LOOKUP, "ReqContext": _CONTEXT,
        "Medium": Interface(has=("STORAGE",)), "Locality": Interface(calls={"": "locality, /"}),
        "OffloadingCounterMetadata": Interface(calls={"": "*, documentation, labelnames"}),
        "OffloadingGaugeMetadata": Interface(calls={"": "*, documentation, labelnames"}),
        "OffloadingSpec": Interface(has=("config", "kv_events_config")),
        "RequestOffloadingContext": Interface(calls={"": ""}),
    },
    "vllm.v1.kv_offload.config": _CONFIG,
    _TIERING: {
        "TransferJob": Interface(has=("job_id", "keys", "chunk_ids", "req_context")),
        "JobResult": Interface(calls={"": "job_id, success, successful_keys, *, transfer_bytes"}),
        "SecondaryTierManager": Interface(
            has=("block_size_bytes", "locality", "medium", "tier_type"),
            calls={"__init__": "offloading_spec, primary_kv_view, tier_type, "
                               "backpressure_detector"},
            overrides={
                "on_new_request": "req_context", "on_request_finished": "req_context",
                "lookup": "key, req_context", "submit_store": "job_metadata",
                "submit_load": "job_metadata", "get_finished_jobs": "", "take_events": "",
                "drain_jobs": "", "on_schedule_end": "context", "get_stats": "", "shutdown": "",
                "build_metric_definitions": "extra_config", "touch": "keys, req_context"}),
    },
    f"{_CONNECTOR}.offloading.metrics": {
        "OffloadingConnectorStats": Interface(calls={
            "": "", "set_gauge": "gauge_name, gauge_value, labelvalues",
            "increase_counter": "counter_name, counter_increase_value, labelvalues"}),
    },
}

_POLICY: Interfaces = {
    _BASE: {"ReqContext": Interface(has=_CONTEXT.has, calls={
        **_CONTEXT.calls, "get_offload_key_position": "key"})},
    _POLICIES: {
        "order_request_keys": Interface(calls={"": "key_groups, req_context"}),
        "ChunkStatus": Interface(has=("ref_cnt",)),
        "CachePolicy": Interface(
            has=("cache_capacity",), calls={"__init__": "cache_capacity"},
            overrides={
                "get": "key", "insert": "key, chunk, req_context=", "remove": "key",
                "touch": "keys, req_context", "on_store_miss": "keys, req_context",
                "on_request_finished": "key_groups, insertion_only_keys, reused_keys, req_context",
                "evict": "n, protected", "clear": "", "mark_evictable": "key",
                "mark_non_evictable": "key"}),
    },
}

_SPEC: Interfaces = {
    _BASE: {
        **_EVENTS, "ReqContext": Interface(has=("req_id",)),
        "Medium": Interface(has=("CPU",)),
        "LookupResult": Interface(has=("HIT", "MISS", "RETRY", "HIT_PENDING")),
        "get_offload_group_idx": Interface(calls={"": "key"}),
        "GPULoadStoreSpec": Interface(has=("block_ids", "group_sizes")),
        "LoadStoreSpec": Interface(),
        "PrepareStoreOutput": Interface(calls={"": "keys_to_store, store_spec, evicted_keys"}),
        "RequestOffloadingContext": Interface(calls={"": ""}),
        "TransferResult": Interface(calls={"": "job_id, success, transfer_size, transfer_time"}),
        "CanonicalKVCaches": Interface(has=("tensors", "group_data_refs")),
        "CanonicalKVCacheTensor": Interface(has=("tensor",)),
        "CanonicalKVCacheRef": Interface(has=("tensor_idx", "page_size_bytes")),
        "OffloadingWorker": Interface(overrides={
            "submit_store": "job_id, src_spec, dst_spec",
            "submit_load": "job_id, src_spec, dst_spec, expedited=", "get_finished": "",
            "wait": "job_ids", "shutdown": ""}),
        "OffloadingSpec": Interface(
            has=("extra_config", "blocks_per_chunk", "config", "kv_events_config"),
            calls={"__init__": "config"},
            overrides={"get_manager": "", "get_worker": "kv_caches"}),
        "OffloadingManager": Interface(overrides={
            "on_new_request": "req_context", "on_request_finished": "req_context",
            "lookup": "key, req_context", "on_schedule_end": "context", "has_pending_work": "",
            "prepare_load": "keys, req_context", "complete_load": "keys, req_context",
            "prepare_store": "keys, req_context",
            "complete_store": "keys, req_context, success=", "take_events": "",
            "reset_cache": "", "shutdown": ""}),
    },
    "vllm.v1.kv_offload.config": _CONFIG,
}

_CONNECTOR_PART: Interfaces = {
    f"{_CONNECTOR}.base": {
        "KVConnectorRole": Interface(has=("SCHEDULER", "WORKER")),
        "KVConnectorMetadata": Interface(),
        "KVConnectorWorkerMetadata": Interface(overrides={"aggregate": "other"}),
        "SupportsHMA": Interface(overrides={"request_finished_all_groups": "request, block_ids"}),
        "KVConnectorBase_V1": Interface(
            has=("_kv_cache_config", "requires_kv_delivery"),
            calls={"__init__": "vllm_config, role, kv_cache_config", "_get_connector_metadata": ""},
            overrides={
                "requires_piecewise_for_cudagraph": "extra_config",
                "supports_sleep_mode": "?kv_transfer_config",  # since 0.33
                "register_kv_caches": "kv_caches", "start_load_kv": "forward_context, **kwargs",
                "wait_for_layer_load": "layer_name",
                "save_kv_layer": "layer_name, kv_layer, attn_metadata, **kwargs",
                "wait_for_save": "", "get_finished": "finished_req_ids",
                "get_block_ids_with_load_errors": "", "build_connector_worker_meta": "",
                "get_kv_connector_stats": "", "build_kv_connector_stats": "data=", "shutdown": "",
                "on_new_request": "request",
                "get_num_new_matched_tokens": "request, num_computed_tokens",
                "update_state_after_alloc": "request, blocks, num_external_tokens",
                "build_connector_meta": "scheduler_output",
                "update_connector_output": "connector_output",
                "request_finished": "request, block_ids", "take_events": "", "reset_cache": ""}),
    },
    f"{_CONNECTOR}.metrics": {
        "KVConnectorStats": Interface(
            has=("data",), calls={"": "*, data"},
            overrides={"reset": "", "aggregate": "other", "reduce": "", "is_empty": ""}),
    },
    "vllm.v1.request": {
        "Request": Interface(has=(
            "request_id", "num_tokens", "prompt_embeds", "all_token_ids", "num_prompt_tokens",
            "lora_request", "mm_features", "cache_salt", "kv_transfer_params", "status")),
        "RequestStatus": Interface(has=("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED",
                                        "FINISHED_ABORTED")),
    },
    "vllm.v1.core.sched.output": {
        "SchedulerOutput": Interface(has=("scheduled_new_reqs", "scheduled_cached_reqs",
                                          "num_scheduled_tokens")),
        "NewRequestData": Interface(has=("req_id", "block_ids", "num_computed_tokens")),
        "CachedRequestData": Interface(has=("req_ids", "resumed_req_ids", "new_block_ids",
                                            "num_computed_tokens")),
    },
    "vllm.v1.outputs": {
        "KVConnectorOutput": Interface(has=("invalid_block_ids", "kv_connector_worker_meta")),
    },
    "vllm.v1.kv_cache_interface": {
        "KVCacheConfig": Interface(has=("kv_cache_groups", "num_blocks", "kv_cache_layout")),
        "KVCacheGroupSpec": Interface(has=("layer_names", "kv_cache_spec", "is_eagle_group",
                                           "host_resident", "enable_kv_transfer")),
        "FullAttentionSpec": Interface(has=("block_size", "sliding_window")),
        "MLAAttentionSpec": Interface(),
    },
}

#: What the connector needs besides, if the engine publishes KV events.
_KV_EVENTS: Interfaces = {
    "vllm.distributed.kv_events": {
        "BlockStored": Interface(calls={
            "": "*, block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, "
                "lora_name, extra_keys, group_idx, kv_cache_spec_kind"}),
        "BlockRemoved": Interface(calls={"": "*, block_hashes, medium, group_idx"}),
    },
    "vllm.v1.kv_cache_interface": {"get_kv_cache_spec_kind": Interface(calls={"": "spec, /"})},
    "vllm.v1.core.kv_cache_utils": {
        "maybe_convert_block_hash": Interface(calls={"": "hash, /"}),
        "generate_block_hash_extra_keys": Interface(calls={"": "request, start, end, mm, /"}),
        "to_event_extra_keys": Interface(calls={"": "extra_keys, /"}),
    },
}

INTERFACES: Dict[str, Interfaces] = {
    "tier": _TIER, "policy": _POLICY, "spec": _SPEC, "connector": _CONNECTOR_PART,
    "kv_events": _KV_EVENTS}
