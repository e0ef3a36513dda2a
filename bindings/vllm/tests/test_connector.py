"""KvtierConnector on a miniature of its base class."""

from connector_cases import *  # noqa: F403
