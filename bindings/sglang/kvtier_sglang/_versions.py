"""Where this package does something else for some versions of SGLang."""

from __future__ import annotations

from typing import Any


def dcp_size(config: Any) -> int:
    """The size of decode context parallelism, which storage has since 0.5.23."""
    return int(getattr(config, "dcp_size", 1))


def asks_later_who_writes(config: Any) -> bool:
    """Whether the controller reads which rank writes after it has created the storage. Before
    0.5.23 it did so earlier, and a storage could not let all ranks write."""
    return hasattr(config, "is_storage_writer")
