"""Stand-in for lmdeploy's connector interface."""

from .base import KVConnectorBase, KVConnectorOutput, KVConnectorRole
from .factory import build_kv_connector, prepare_kv_connector_config

__all__ = ["KVConnectorBase", "KVConnectorOutput", "KVConnectorRole", "build_kv_connector",
           "prepare_kv_connector_config"]
