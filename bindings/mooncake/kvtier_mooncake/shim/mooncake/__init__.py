"""Stands where Mooncake's package would: its store is kvtier's."""
