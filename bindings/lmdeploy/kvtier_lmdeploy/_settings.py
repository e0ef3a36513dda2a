"""Settings of the connector: the entries of `kv_connector_extra_config`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Dict, Mapping, Optional

from kvtier import LEVEL_DISK, LEVEL_DURABLE, LEVEL_RAM, LEVEL_REMOTE, abi
from kvtier._errors import make

from ._future import NEVER, STOPS, Lifetimes

LEVELS: Dict[str, int] = {"ram": LEVEL_RAM, "disk": LEVEL_DISK, "durable": LEVEL_DURABLE,
                          "remote": LEVEL_REMOTE}

#: Entry that `prepare_engine` adds for the workers of an engine.
INTERNAL = "kvtier_engine"

#: Ends of the names whose values must be numbers: bytes, seconds, counts.
_NUMBERS = ("_bytes", "_s", "workers", "max_sessions")


def invalid(text: str) -> Exception:
    """Returns a KVT_E_INVALID error; `text` names the value, what is accepted, and the remedy."""
    return make(abi.KVT_E_INVALID, text)


@dataclass(frozen=True)
class Settings:
    """Each worker's store, and how the connector uses it."""

    #: Spec of the store. With several workers its disk path must contain `{rank}`.
    spec: str = ""
    host_bytes: int = 0
    #: Each worker uses the directory `rank-N` inside.
    disk_path: str = ""
    disk_bytes: int = 0
    policy: str = ""
    disk_policy: str = ""
    write: str = ""
    #: When a save completes: "ram", "disk", "durable" or "remote".
    level: str = "ram"
    #: "cuda:N", ...; default "": the device of the cache's tensors.
    device: str = ""
    #: Threads of the runtime; 0: the library's choice.
    workers: int = 0
    #: Identity of the KV: the model, a fingerprint of its weights, a salt that isolates tenants.
    model: str = ""
    weights: str = ""
    salt: str = ""
    #: Adapter names to their folder, or to a text that changes with the adapter. KV under an
    #: adapter that is not listed is found by the same engine only.
    adapters: Mapping[str, str] = field(default_factory=dict)
    #: Whether a sleep keeps the weights. If not, KV from before the sleep is not found again.
    sleep_keeps_weights: bool = False
    #: Whether lookups are asynchronous; None: only for workers in other processes.
    lookup_async: Optional[bool] = None
    #: Seconds until a worker that does not answer counts as having no blocks.
    lookup_timeout_s: float = 5.0
    #: Most seconds that a lookup waits for the store's remote; 0: no remote lookup. The engine's
    #: scheduler waits too, unless lookups are asynchronous.
    remote_lookup_s: float = 0.0
    #: Sessions that the policies distinguish.
    max_sessions: int = 256
    #: Whether each eviction is logged.
    log_evictions: bool = False
    #: Whether to run the policy behind `advice`; it sees the store's lookups and saves.
    advice: bool = True
    #: Whether the policies receive a hint when a request ends.
    hints: bool = True
    #: Stop reason ("end_turn", "length", "cancelled") to seconds until the request's KV is used
    #: again, or to "never".
    lifetimes: Lifetimes = field(default_factory=dict)
    #: Most seconds that a shutdown waits for saves and loads in progress.
    drain_s: float = 60.0

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> "Settings":
        """Reads the engine's configuration. Raises for unknown names and wrong values."""
        given = {name: value for name, value in extra.items() if name != INTERNAL}
        kinds = {one.name: str(one.type) for one in fields(cls)}
        unknown = sorted(set(given) - set(kinds))
        if unknown:
            raise invalid(f"kv_connector_extra_config has unknown names {', '.join(unknown)}: use "
                          f"{', '.join(sorted(kinds))}")
        for name, value in given.items():
            if name.endswith(_NUMBERS) and (isinstance(value, bool)
                                            or not isinstance(value, (int, float))
                                            or not 0 <= value < math.inf):
                raise invalid(f"{name} is {value!r}: it must be a finite number, 0 or greater")
            if kinds[name] == "str" and not isinstance(value, str):
                raise invalid(f"{name} is {value!r}: it must be a string")
            # Python would take the string "false" as true.
            if "bool" in kinds[name] and not isinstance(value, bool) and not (
                    value is None and "Optional" in kinds[name]):
                raise invalid(f"{name} is {value!r}: it must be true or false, without quotes")
        adapters = given.get("adapters", {})
        if not isinstance(adapters, dict) or not all(
                isinstance(one, str) for pair in adapters.items() for one in pair):
            raise invalid(f"adapters is {adapters!r}: it must map each adapter's name to its "
                          "folder, or to a text that changes with the adapter")
        lifetimes = given.get("lifetimes", {})
        if not isinstance(lifetimes, dict) or not all(
                _is_lifetime(stop, lifetime) for stop, lifetime in lifetimes.items()):
            raise invalid(f"lifetimes is {lifetimes!r}: it must map {', '.join(STOPS)} to seconds "
                          f"from 0 to below 1e9, or to {NEVER!r}")
        settings = cls(**given)
        if settings.level not in LEVELS:
            raise invalid(f"level {settings.level!r} is unknown: use one of {', '.join(LEVELS)}")
        if not (settings.spec or settings.host_bytes or settings.disk_bytes):
            raise invalid("the store has no size: set spec, or host_bytes, or disk_path and "
                          "disk_bytes, in kv_connector_extra_config")
        return settings

    def store_of(self, rank: int, world: int) -> Dict[str, Any]:
        """Returns the arguments that open the store of worker `rank` of `world`."""
        if world > 1 and "path=" in self.spec and "{rank}" not in self.spec:
            raise invalid(f"spec {self.spec!r} gives {world} workers the same directory: put "
                          "{rank} into its path, or use disk_path")
        path = f"{self.disk_path.rstrip('/')}/rank-{rank}" if self.disk_path else ""
        return {"spec": self.spec.replace("{rank}", str(rank)) or "store",
                "host_bytes": int(self.host_bytes), "disk_bytes": int(self.disk_bytes),
                "disk_path": path, "policy": self.policy, "disk_policy": self.disk_policy,
                "write": self.write}


def _is_lifetime(stop: Any, lifetime: Any) -> bool:
    if stop not in STOPS or isinstance(lifetime, bool):
        return False
    return lifetime == NEVER or (isinstance(lifetime, (int, float)) and 0 <= lifetime < 1e9)


def refuse_hybrid(cache_config: Any) -> None:
    """Raises for models that need more than a prefix's KV blocks to resume, and for CPU paging."""
    remedy = "start the engine without a kv_transfer_config for this model"
    if getattr(cache_config, "states_shapes", None):
        raise make(abi.KVT_E_UNSUPPORTED, "the model has states (linear attention, SSM), but the "
                   f"engine passes KV blocks only to connectors: {remedy}")
    window = getattr(cache_config, "window_size", -1)
    if window > 1:
        raise make(abi.KVT_E_UNSUPPORTED, f"the model has sliding windows (window_size {window}), "
                   f"so the engine keeps no whole prefixes: {remedy}")
    blocks = getattr(cache_config, "num_cpu_blocks", 0)
    if blocks > 0:
        raise make(abi.KVT_E_UNSUPPORTED, f"num_cpu_blocks is {blocks}: set num_cpu_blocks=0. The "
                   "connector's store replaces CPU paging; size it with host_bytes")
