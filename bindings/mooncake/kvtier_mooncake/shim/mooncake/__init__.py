"""Replaces Mooncake's package; its store is kvtier's."""
