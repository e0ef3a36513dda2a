"""KvtierConnector on stubs of vLLM."""

from connector_cases import *  # noqa: F403
