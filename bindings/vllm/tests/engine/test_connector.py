"""KvtierConnector on vLLM's own base class, created by vLLM's factory."""

from connector_cases import *  # noqa: F403
