"""kvtier: tiered KV-cache storage for LLM inference engines.

Everything is opened on a `Runtime`. Handles are closed by `close`, by leaving
a `with`, or when the last reference goes. See the package's README for the
rules of memory, asyncio, threads and fork.
"""

from __future__ import annotations

from . import _abi as abi
from ._budget import (
    TIER_DEVICE,
    TIER_DISK,
    TIER_HOST,
    TIER_PINNED,
    TIER_REMOTE,
    Account,
    Budget,
    BudgetReport,
    Held,
    TierReport,
)
from ._buffer import Buffer, BufferInfo
from ._errors import (
    AbiError,
    AgainError,
    BudgetError,
    BusyError,
    CancelledError,
    ClosedError,
    CorruptError,
    Error,
    ForkedError,
    HandleError,
    InvalidError,
    IoError,
    LimitError,
    NoMemoryError,
    NotFoundError,
    PanicError,
    PinQuotaError,
    ReentrantError,
    SpecError,
    StateError,
    TimeoutError,
    UnavailableError,
    UnsupportedError,
)
from ._misc import Feature, checksum, feature, features, log_to, spec_check, version
from ._op import ISSUED, RELEASED, RESOLVED, ItemOutcome, Op, OpInfo, Result
from ._queue import Completion, Queue, QueueStats
from ._runtime import (
    PRIORITY_BACKGROUND,
    PRIORITY_DEMAND,
    PRIORITY_PREFETCH,
    CloseReport,
    Runtime,
    RuntimeStats,
    Work,
)

__version__ = f"{abi.KVT_VERSION_MAJOR}.{abi.KVT_VERSION_MINOR}.{abi.KVT_VERSION_PATCH}"

__all__ = [
    "AbiError", "Account", "AgainError", "Budget", "BudgetError", "BudgetReport", "Buffer",
    "BufferInfo", "BusyError", "CancelledError", "CloseReport", "ClosedError", "Completion",
    "CorruptError", "Error", "Feature", "ForkedError", "HandleError", "Held", "ISSUED",
    "InvalidError", "IoError", "ItemOutcome", "LimitError", "NoMemoryError", "NotFoundError",
    "Op", "OpInfo", "PRIORITY_BACKGROUND", "PRIORITY_DEMAND", "PRIORITY_PREFETCH",
    "PanicError", "PinQuotaError", "Queue", "QueueStats", "RELEASED", "RESOLVED",
    "ReentrantError", "Result", "Runtime", "RuntimeStats", "SpecError", "StateError",
    "TIER_DEVICE", "TIER_DISK", "TIER_HOST", "TIER_PINNED", "TIER_REMOTE", "TierReport",
    "TimeoutError", "UnavailableError", "UnsupportedError", "Work", "abi", "checksum",
    "feature", "features", "log_to", "spec_check", "version",
]
