"""What workers return: the attributes that a connector reads."""

from typing import Any


class KVConnectorOutput:
    invalid_block_ids: Any
    kv_connector_worker_meta: Any
