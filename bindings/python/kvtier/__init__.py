"""kvtier: tiered KV-cache storage for LLM inference engines.

Most objects are opened on a `Runtime`. `close`, the end of a `with` block, or the loss of the
last reference closes a handle. The README documents the rules of memory, asyncio, threads and
fork.
"""

from __future__ import annotations

from . import _abi as abi
from . import _kernels as kernels
from ._advisor import Advisor
from ._blocks import At, Blocks, Each, Hold, Names, Pool
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
from ._device import (
    Check,
    Conformance,
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
from ._event import Event
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
from ._offload import Attention, Context, DevicePlane, LayerKV, Offload, OffloadTokens
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
    STORE_CLEARED,
    STORE_REMOVED,
    STORE_STORED,
    TIER_NONE,
    ClearReport,
    DemoteReport,
    Latency,
    Lookup,
    Plan,
    Prefill,
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
    Pick,
    Policy,
    PolicyInfo,
    Row,
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
    Namespace,
    Session,
    SessionInfo,
    Store,
)
from ._stream import (
    ROLE_EMBEDDING,
    ROLE_EXPERT,
    ROLE_HEAD,
    ROLE_LAYER,
    ROLE_NORM,
    ROLE_OTHER,
    LayerCount,
    Model,
    ModelInfo,
    ModelUnit,
    Part,
    StreamMark,
    StreamMemory,
    StreamTerms,
    StreamUnit,
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
from ._view import Place, View

__version__ = f"{abi.KVT_VERSION_MAJOR}.{abi.KVT_VERSION_MINOR}.{abi.KVT_VERSION_PATCH}"

__all__ = [
    "AbiError", "Account", "Advice", "Advisor", "AgainError", "At", "Attended", "Attention", "Blocks",
    "Budget", "BudgetError", "BudgetReport", "Buffer", "BufferError", "BufferInfo", "BusyError",
    "CancelledError", "Check", "ClearReport", "CloseReport", "ClosedError", "Comparison",
    "Completion", "Conformance", "Context", "CopyRows", "CorruptError", "Decoded", "DemoteReport",
    "Device", "DeviceCopy", "DeviceEvent", "DeviceInfo", "DeviceMemory", "DevicePlane",
    "UserEvent", "EXISTS_WHOLE", "Each", "Error", "Event", "Eviction", "Feature",
    "ForkedError", "Group", "HINTS_NONE", "HINTS_STOP", "HINTS_THINK", "HandleError", "Held",
    "Hold", "IO_NONE", "IO_THREADS", "IO_URING", "ISSUED", "Identity", "Index", "IndexHead",
    "IndexKind", "InvalidError", "IoError", "ItemOutcome", "TokenLists", "LEVEL_DISK", "LEVEL_DURABLE", "LEVEL_RAM", "LEVEL_REMOTE",
    "Lab", "LabRow", "LabRun", "LabTable", "Latency", "LayerCount", "LayerKV", "LimitError",
    "LogEntry", "Lookup", "Model", "ModelInfo", "ModelUnit", "Names", "Namespace", "NoMemoryError",
    "NotFoundError", "Offload", "OffloadTokens", "Op", "OpInfo", "PLAN_LOAD", "PLAN_RECOMPUTE",
    "PLAN_RESIDENT", "PRIORITY_BACKGROUND", "PRIORITY_DEMAND", "PRIORITY_PREFETCH", "PanicError",
    "Part", "Pick", "PinQuotaError", "Place", "BlockPlacement", "Plan", "Policy", "PolicyInfo", "Pool",
    "Prefill", "Queue", "QueueStats", "RANGE_HIT", "RANGE_MISS", "RANGE_PENDING", "RANGE_UNNEEDED",
    "RELEASED", "RESOLVED", "ROLE_EMBEDDING", "ROLE_EXPERT", "ROLE_HEAD", "ROLE_LAYER",
    "ROLE_NORM", "ROLE_OTHER", "RULE_FULL", "RULE_STATE", "RULE_WINDOW", "Range",
    "ReentrantError", "Replay", "Result", "Row", "Rows", "Runtime", "RuntimeStats",
    "STOP_CANCELLED", "STOP_END_TURN", "STOP_LENGTH", "STOP_TOOL_USE", "STOP_UNKNOWN",
    "STORE_CLEARED", "STORE_REMOVED", "STORE_STORED", "PlanStep", "Selection", "Session",
    "SessionInfo", "Sparse", "SparseCaps", "SparseGranularity", "SparseNeeds", "SparseScope",
    "SparseTraits", "SpecError", "StateError", "Store", "StoreEvent", "StoreEvents", "StreamMark",
    "StreamMemory", "StreamTerms", "StreamUnit", "Streamer", "TIER_DEVICE", "TIER_DISK",
    "TIER_HOST", "TIER_NONE", "TIER_PINNED", "TIER_REMOTE", "Tenant", "Tensor", "TierReport",
    "TimeoutError", "Trace", "TraceInfo", "UnavailableError", "UnitEntry", "UnsupportedError",
    "Victim", "View", "PolicyContext", "Work", "abi", "checksum", "feature", "features", "kernels",
    "log_to", "policies", "sparse_policies", "spec_check", "version",
]
