"""The interfaces of lmdeploy that the connector uses. `_engine.require` compares them with the
installed lmdeploy."""

from __future__ import annotations

from typing import Dict

from kvtier._probe import Interface, Interfaces

from . import _versions

#: Parameters of the factory's functions that `_activate` replaces.
FACTORY = Interface(overrides={
    "build_kv_connector": "role, cache_config, *, global_rank=, tp_rank=, tp_size=, "
                          "kv_head_replica_num=",
    "prepare_kv_connector_config": "cache_config, *, model_path=, dist_config=, "
                                   "distributed_executor_backend="})

_BASE: Dict[str, Interface] = {
    "KVConnectorRole": Interface(has=("SCHEDULER", "WORKER")),
    "KVConnectorMetadata": Interface(overrides={"get_save_block_leases": ""}),
    "KVSaveBlockLease": Interface(calls={"": "operation_id, logical_block_ids"}),
    "KVConnectorOutput": Interface(
        has=("completed_save_ids", "finished_receiving", "invalid_block_ids"), calls={"": ""}),
    "KVLoadResult": Interface(calls={"": "request_id, success"}),
    "KVConnectorResult": Interface(calls={"": "load_results, completed_save_ids"}),
    "KVConnectorBase": Interface(
        calls={"__init__": "role", "_get_connector_metadata": ""},
        overrides={
            "get_num_new_matched_tokens": "request, num_computed_tokens",
            "update_state_after_alloc": "request, block_ids, num_external_tokens",
            # lmdeploy passes it by position; its name has changed.
            "build_connector_meta": "step_input, /",
            "on_new_request": "request", "is_lookup_pending": "request_id",
            "cancel_lookup": "request_id", "update_connector_output": "connector_output",
            "finish_transfers_after_worker_drain": "", "request_finished": "request",
            "register_kv_caches": "kv_caches", "start_load_kv": "", "start_save_kv": "",
            "get_finished": "", "shutdown": ""}),
}
_MESSAGES: Dict[str, Interface] = {
    "SchedulerSequence": Interface(
        has=("seq_id", "session_id", "adapter_name", "all_ids", "generated_ids",
             "num_history_ids", "num_new_tokens", "sampling_param", "history_multimodals",
             "history_embeddings", "prefix_cache", "num_valid_ids"),
        calls={"clamp_prefix_cache_match_step": "step"}),
}
_CONFIG: Dict[str, Interface] = {
    "CacheConfig": Interface(has=("kv_transfer_config", "num_gpu_blocks", "block_size",
                                  "kernel_block_size", "quant_policy", "states_shapes",
                                  "window_size", "num_cpu_blocks")),
}
_STEP = Interface(has=("running", "connector_token_lens", "connector_block_ids",
                       "connector_logical_block_ids"))


def interfaces() -> Interfaces:
    """The interfaces that the connector uses of the installed version."""
    found: Dict[str, Dict[str, Interface]] = {
        "lmdeploy.pytorch.kv_connector.base": dict(_BASE),
        "lmdeploy.pytorch.messages": _MESSAGES, "lmdeploy.pytorch.config": _CONFIG}
    try:
        module, name = _versions.step_input()
        found.setdefault(module, {})[name] = _STEP
    except ModuleNotFoundError:
        pass  # the comparison names the module, or raises this error
    return found
