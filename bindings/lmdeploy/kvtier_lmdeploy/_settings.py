"""What `kv_connector_extra_config` may say."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Dict, Mapping, Optional

from kvtier import LEVEL_DISK, LEVEL_DURABLE, LEVEL_RAM, LEVEL_REMOTE, abi
from kvtier._errors import make

from ._future import NEVER, STOPS, Lifetimes

LEVELS: Dict[str, int] = {"ram": LEVEL_RAM, "disk": LEVEL_DISK, "durable": LEVEL_DURABLE,
                          "remote": LEVEL_REMOTE}

#: What `activate` adds for the workers of an engine.
INTERNAL = "kvtier_engine"

#: What a name ends with that says a number of bytes or seconds: it must be a number.
_NUMBERS = ("_bytes", "_s", "workers", "max_sessions")


def invalid(text: str) -> Exception:
    """An argument that is none, with what to do instead."""
    return make(abi.KVT_E_INVALID, text)


@dataclass(frozen=True)
class Settings:
    """The store of each worker, and how the connector uses it."""

    #: A store's spec; with several workers its path must say `{rank}`.
    spec: str = ""
    host_bytes: int = 0
    #: Each worker has the directory `rank-N` in it.
    disk_path: str = ""
    disk_bytes: int = 0
    policy: str = ""
    disk_policy: str = ""
    write: str = ""
    #: When a save is acknowledged: "ram", "disk", "durable" or "remote".
    level: str = "ram"
    #: "" takes the device of the cache's tensors.
    device: str = ""
    workers: int = 0
    #: What else makes KV other KV: the model, a fingerprint of its weights, whose it is.
    model: str = ""
    weights: str = ""
    salt: str = ""
    #: Adapters by name: their folder, or a text that changes with them. KV of others is found
    #: again in the same engine alone.
    adapters: Mapping[str, str] = field(default_factory=dict)
    #: Whether an engine wakes with the weights that it slept with; else KV from before its
    #: sleep is not found any more.
    sleep_keeps_weights: bool = False
    #: True, False, or None: answered at once where the worker is in this process.
    lookup_async: Optional[bool] = None
    lookup_timeout_s: float = 5.0
    #: A lookup waits that long, at most, for what the store's remote says; 0: it is not asked.
    #: Where lookups are not asynchronous the engine's scheduler waits with it.
    ask_s: float = 0.0
    #: How many sessions the policies tell apart.
    max_sessions: int = 256
    #: A line of the log for each eviction.
    log_evictions: bool = False
    #: Whether `advice` is kept: a policy beside the store's that sees the same lookups.
    advice: bool = True
    #: Whether the policies are told why requests ended.
    hints: bool = True
    #: By why a request ended ("end_turn", "length", "cancelled"): the seconds after which its KV
    #: is wanted again, or "never".
    lifetimes: Lifetimes = field(default_factory=dict)
    #: How long a shutdown waits for saves and loads that are under way.
    drain_s: float = 60.0

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> "Settings":
        """From the engine's configuration; a name that is none is refused."""
        given = {name: value for name, value in extra.items() if name != INTERNAL}
        kinds = {one.name: str(one.type) for one in fields(cls)}
        unknown = sorted(set(given) - set(kinds))
        if unknown:
            raise invalid(f"kv_connector_extra_config: {', '.join(unknown)}: there are "
                          f"{', '.join(sorted(kinds))}")
        for name, value in given.items():
            if name.endswith(_NUMBERS) and (isinstance(value, bool)
                                            or not isinstance(value, (int, float))
                                            or not 0 <= value < math.inf):
                raise invalid(f"{name}: {value!r} is no number from 0 on")
            if kinds[name] == "str" and not isinstance(value, str):
                raise invalid(f"{name}: {value!r} is no text")
            # The text "false" would count as true.
            if "bool" in kinds[name] and not isinstance(value, bool) and not (
                    value is None and "Optional" in kinds[name]):
                raise invalid(f"{name}: {value!r}: true or false, without quotes")
        adapters = given.get("adapters", {})
        if not isinstance(adapters, dict) or not all(
                isinstance(one, str) for pair in adapters.items() for one in pair):
            raise invalid("adapters: names, and of each its folder or a text that changes with it")
        lifetimes = given.get("lifetimes", {})
        if not isinstance(lifetimes, dict) or not all(
                _is_lifetime(stop, said) for stop, said in lifetimes.items()):
            raise invalid(f"lifetimes: of {', '.join(STOPS)}: a number of seconds, or {NEVER!r}")
        settings = cls(**given)
        if settings.level not in LEVELS:
            raise invalid(f"level {settings.level!r} is none of {', '.join(LEVELS)}")
        if not (settings.spec or settings.host_bytes or settings.disk_bytes):
            raise invalid("a store of no size: say spec, or host_bytes, or disk_path and "
                          "disk_bytes, in kv_connector_extra_config")
        return settings

    def store_of(self, rank: int, world: int) -> Dict[str, Any]:
        """The arguments of a worker's store."""
        if world > 1 and "path=" in self.spec and "{rank}" not in self.spec:
            raise invalid("a directory is one worker's, and there are several: say {rank} in the "
                          "spec's path, or use disk_path")
        path = f"{self.disk_path.rstrip('/')}/rank-{rank}" if self.disk_path else ""
        return {"spec": self.spec.replace("{rank}", str(rank)) or "store",
                "host_bytes": int(self.host_bytes), "disk_bytes": int(self.disk_bytes),
                "disk_path": path, "policy": self.policy, "disk_policy": self.disk_policy,
                "write": self.write}


def _is_lifetime(stop: Any, said: Any) -> bool:
    if stop not in STOPS or isinstance(said, bool):
        return False
    return said == NEVER or (isinstance(said, (int, float)) and 0 <= said < 1e9)


def refuse_hybrid(cache_config: Any) -> None:
    """Models whose KV of a block is not all that going on after it needs."""
    advice = "start the engine without a kv_transfer_config for this model"
    if getattr(cache_config, "states_shapes", None):
        raise make(abi.KVT_E_UNSUPPORTED, "a model with states (linear attention, SSM): the "
                   f"engine's connectors see blocks of KV alone; {advice}")
    if getattr(cache_config, "window_size", -1) > 1:
        raise make(abi.KVT_E_UNSUPPORTED, "a model with sliding windows: the engine keeps no "
                   f"prefix of it that could be loaded; {advice}")
    if getattr(cache_config, "num_cpu_blocks", 0) > 0:
        raise make(abi.KVT_E_UNSUPPORTED, "CPU paging beside the connector: set num_cpu_blocks=0, "
                   "memory is the store's (host_bytes)")
