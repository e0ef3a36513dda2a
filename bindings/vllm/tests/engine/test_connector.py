"""KvtierConnector on the engine's own base class, made by its own factory."""

from connector_cases import *  # noqa: F403
