"""Mooncake's replication options, which are accepted and have no effect."""

from __future__ import annotations

from typing import List


class ReplicateConfig:
    """The fields that engines set. kvtier keeps one copy of an object, in its own tiers."""

    def __init__(self) -> None:
        self.replica_num = 1
        self.with_soft_pin = False
        self.with_hard_pin = False
        self.preferred_segment = ""
        self.preferred_segments: List[str] = []
        self.prefer_alloc_in_same_node = False
        self.group_ids: List[str] = []
        self.session_ids: List[str] = []

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"ReplicateConfig({fields})"
