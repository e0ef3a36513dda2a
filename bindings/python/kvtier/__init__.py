"""kvtier: tiered KV-cache storage for LLM inference engines.

`kvtier.open` opens a store. Most other objects are opened on a `Runtime`, such as `store.runtime`.
`close`, the end of a `with` block, or the loss of the last reference closes a handle. The README
documents the rules of memory, asyncio, threads and fork.
"""

from __future__ import annotations

from . import _abi as abi
from . import _kernels as kernels
from ._advisor import Advisor
from ._blocks import BlockAddresses, Blocks, Hold, Names, PartAddresses, Pool
from ._budget import (
    TIER_DEVICE,
    TIER_DISK,
    TIER_HOST,
    TIER_PINNED,
    TIER_REMOTE,
    Account,
    Budget,
    BudgetReport,
    AccountBytes,
    TierReport,
)
from ._buffer import Buffer, BufferInfo
from ._device import (
    ConformanceCheck,
    ConformanceReport,
    Device,
    DeviceCopy,
    DeviceEvent,
    DeviceInfo,
    DeviceMemory,
    UserEvent,
)
from ._errors import (
    AbiError,
    AgainError,
    BudgetError,
    BufferError,
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
    LostError,
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
from ._event import ReadyEvent
from ._kernels import (
    Attended,
    BlockPlacement,
    Decoded,
    Index,
    IndexHead,
    IndexKind,
    Rows,
    TokenLists,
)
from ._lab import Lab, LabRow, LabRun, LabTable
from ._misc import Feature, checksum, feature, features, log_to, spec_check, version
from ._offload import Attention, SparseContext, DevicePlane, LayerKV, Offload, OffloadTokens
from ._op import ISSUED, RELEASED, RESOLVED, ItemOutcome, Op, OpInfo, Result
from ._own_device import CopyRows
from ._plan import (
    EXISTS_WHOLE,
    PLAN_LOAD,
    PLAN_RECOMPUTE,
    PLAN_RESIDENT,
    RANGE_HIT,
    RANGE_MISS,
    RANGE_PENDING,
    RANGE_UNNEEDED,
    STORE_EVENT_CLEARED,
    STORE_EVENT_REMOVED,
    STORE_EVENT_STORED,
    TIER_NONE,
    ClearReport,
    DemoteReport,
    Latency,
    Lookup,
    Plan,
    PrefillCost,
    Range,
    PlanStep,
    StoreEvent,
    StoreEvents,
    Tenant,
)
from ._policy import (
    STOP_CANCELLED,
    STOP_END_TURN,
    STOP_LENGTH,
    STOP_TOOL_USE,
    STOP_UNKNOWN,
    Advice,
    Eviction,
    LogEntry,
    SelectedVictim,
    Policy,
    PolicyInfo,
    PolicyObject,
    Selection,
    Victim,
    PolicyContext,
    policies,
)
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
from ._sparse import (
    Sparse,
    SparseCaps,
    SparseGranularity,
    SparseNeeds,
    SparseScope,
    SparseTraits,
    sparse_policies,
)
from ._store import (
    IO_NONE,
    IO_THREADS,
    IO_URING,
    LEVEL_DISK,
    LEVEL_DURABLE,
    LEVEL_REMOTE,
    LEVEL_RAM,
    RULE_FULL,
    RULE_STATE,
    RULE_WINDOW,
    Group,
    Identity,
    Layout,
    Namespace,
    Session,
    SessionInfo,
    Store,
    open,
)
from ._stream import (
    ROLE_EMBEDDING,
    ROLE_EXPERT,
    ROLE_HEAD,
    ROLE_LAYER,
    ROLE_NORM,
    ROLE_OTHER,
    ExpertStats,
    Model,
    ModelInfo,
    ModelUnit,
    Part,
    StreamSpan,
    StreamMemory,
    StreamTerms,
    UnitLease,
    Streamer,
    Tensor,
    UnitEntry,
)
from ._trace import (
    HINTS_NONE,
    HINTS_STOP,
    HINTS_THINK,
    Comparison,
    Replay,
    Trace,
    TraceInfo,
)
from ._view import MemoryRange, View

__version__ = f"{abi.KVT_VERSION_MAJOR}.{abi.KVT_VERSION_MINOR}.{abi.KVT_VERSION_PATCH}"

__all__ = [
    "AbiError", "Account", "AccountBytes", "Advice", "Advisor", "AgainError", "Attended",
    "Attention", "BlockAddresses", "BlockPlacement", "Blocks", "Budget", "BudgetError",
    "BudgetReport", "Buffer", "BufferError", "BufferInfo", "BusyError", "CancelledError",
    "ClearReport", "CloseReport", "ClosedError", "Comparison", "Completion", "ConformanceCheck",
    "ConformanceReport", "CopyRows", "CorruptError", "Decoded", "DemoteReport", "Device",
    "DeviceCopy", "DeviceEvent", "DeviceInfo", "DeviceMemory", "DevicePlane", "EXISTS_WHOLE",
    "Error", "Eviction", "ExpertStats", "Feature", "ForkedError", "Group", "HINTS_NONE",
    "HINTS_STOP", "HINTS_THINK", "HandleError", "Hold", "IO_NONE", "IO_THREADS", "IO_URING",
    "ISSUED", "Identity", "Index", "IndexHead", "IndexKind", "InvalidError", "IoError",
    "ItemOutcome", "LEVEL_DISK", "LEVEL_DURABLE", "LEVEL_RAM", "LEVEL_REMOTE", "Lab", "LabRow",
    "LabRun", "LabTable", "Latency", "LayerKV", "Layout", "LimitError", "LostError", "LogEntry", "Lookup",
    "MemoryRange", "Model", "ModelInfo", "ModelUnit", "Names", "Namespace", "NoMemoryError",
    "NotFoundError", "Offload", "OffloadTokens", "Op", "OpInfo", "PLAN_LOAD", "PLAN_RECOMPUTE",
    "PLAN_RESIDENT", "PRIORITY_BACKGROUND", "PRIORITY_DEMAND", "PRIORITY_PREFETCH",
    "PanicError", "Part", "PartAddresses", "PinQuotaError", "Plan", "PlanStep", "Policy",
    "PolicyContext", "PolicyInfo", "PolicyObject", "Pool", "PrefillCost", "Queue", "QueueStats",
    "RANGE_HIT", "RANGE_MISS", "RANGE_PENDING", "RANGE_UNNEEDED", "RELEASED", "RESOLVED",
    "ROLE_EMBEDDING", "ROLE_EXPERT", "ROLE_HEAD", "ROLE_LAYER", "ROLE_NORM", "ROLE_OTHER",
    "RULE_FULL", "RULE_STATE", "RULE_WINDOW", "Range", "ReadyEvent", "ReentrantError", "Replay",
    "Result", "Rows", "Runtime", "RuntimeStats", "STOP_CANCELLED", "STOP_END_TURN",
    "STOP_LENGTH", "STOP_TOOL_USE", "STOP_UNKNOWN", "STORE_EVENT_CLEARED",
    "STORE_EVENT_REMOVED", "STORE_EVENT_STORED", "SelectedVictim", "Selection", "Session",
    "SessionInfo", "Sparse", "SparseCaps", "SparseContext", "SparseGranularity", "SparseNeeds",
    "SparseScope", "SparseTraits", "SpecError", "StateError", "Store", "StoreEvent",
    "StoreEvents", "StreamMemory", "StreamSpan", "StreamTerms", "Streamer", "TIER_DEVICE",
    "TIER_DISK", "TIER_HOST", "TIER_NONE", "TIER_PINNED", "TIER_REMOTE", "Tenant", "Tensor",
    "TierReport", "TimeoutError", "TokenLists", "Trace", "TraceInfo", "UnavailableError",
    "UnitEntry", "UnitLease", "UnsupportedError", "UserEvent", "Victim", "View", "Work", "abi",
    "checksum", "feature", "features", "kernels", "log_to", "open", "policies",
    "sparse_policies", "spec_check", "version",
]
