"""Imports the factory's functions by name, as lmdeploy's module does."""

from lmdeploy.pytorch.kv_connector import build_kv_connector, prepare_kv_connector_config

__all__ = ["build_kv_connector", "prepare_kv_connector_config"]
