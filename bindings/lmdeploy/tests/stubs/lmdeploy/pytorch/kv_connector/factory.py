"""Stand-in for lmdeploy's factory, which knows the Mooncake connector only."""

from typing import Any


def prepare_kv_connector_config(cache_config: Any, *, model_path: Any = None,
                                dist_config: Any = None,
                                distributed_executor_backend: Any = None) -> None:
    cache_config.prepared_by = "lmdeploy"


def build_kv_connector(role: Any, cache_config: Any, *, global_rank: int = 0, tp_rank: int = 0,
                       tp_size: int = 1, kv_head_replica_num: int = 1) -> Any:
    if cache_config.kv_transfer_config.kv_connector == "MooncakeStoreConnector":
        return "Mooncake's"
    raise ValueError(f"Unsupported KV connector: {cache_config.kv_transfer_config.kv_connector!r}")
