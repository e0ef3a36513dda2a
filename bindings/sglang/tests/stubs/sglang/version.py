"""The version whose interfaces are stubbed."""

__version__ = "0.5.23"
