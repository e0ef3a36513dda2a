"""The options in the engine's JSON, validated, and the store that they describe."""

from __future__ import annotations

import dataclasses
import difflib
import os
from dataclasses import dataclass
from typing import Any, Dict, Mapping, Optional, Tuple

import kvtier
from kvtier import _abi
from kvtier._errors import make

LEVELS: Dict[str, int] = {
    "ram": kvtier.LEVEL_RAM, "disk": kvtier.LEVEL_DISK, "durable": kvtier.LEVEL_DURABLE,
    "remote": kvtier.LEVEL_REMOTE,
}
#: Keys of the same JSON that belong to the engine.
ENGINE_KEYS = frozenset({
    "backend_name", "module_path", "class_name", "interface_v1", "extra_backend_tag",
    "tp_lcm_size", "prefetch_threshold", "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token", "hicache_storage_pass_prefix_keys",
})


def invalid(text: str) -> Exception:
    """`kvtier.InvalidError`."""
    return make(_abi.KVT_E_INVALID, text)


def unsupported(text: str) -> Exception:
    """`kvtier.UnsupportedError`."""
    return make(_abi.KVT_E_UNSUPPORTED, text)


@dataclass(frozen=True)
class Settings:
    """kvtier's keys of the JSON, with their defaults."""

    #: The store's spec; `{rank}` in it is replaced by the rank's name.
    spec: str = "store"
    #: The next six override the options inside the spec. 0 and "" = the spec's value.
    host_bytes: int = 0
    disk_path: str = ""
    disk_bytes: int = 0
    policy: str = ""
    disk_policy: str = ""
    write: str = ""
    #: The level at which a write completes: "ram", "disk", "durable" or "remote".
    level: str = "ram"
    #: Log evictions (logger `kvtier_sglang`, INFO) whenever the engine reads metrics.
    log_evictions: bool = False
    tenant: int = 0
    priority: Optional[int] = None
    #: Threads of the runtime; 0 = the library chooses.
    workers: int = 0
    #: Seconds until a transfer ends without the pages that are unfinished; None = no limit.
    timeout_s: Optional[float] = None
    #: Seconds that a lookup waits at most for the store's remote; 0 = no remote lookup.
    remote_lookup_s: float = 0.5
    #: The same for the linker's lookups, which block the engine's scheduler.
    linker_remote_lookup_s: float = 0.0
    #: Pass hints about the next use of pages on to the policies.
    hints: bool = True
    #: Endpoints of KV events, and of their replay; "" = none.
    events: str = ""
    events_replay: str = ""
    #: Let each rank keep a copy of KV that is equal on all ranks (MLA).
    mla_copies: bool = False
    #: Part of the identity: pages with another tag are not found.
    tag: str = ""

    @classmethod
    def of(cls, config: Optional[Mapping[str, Any]]) -> "Settings":
        """Reads the engine's `extra_config`. Raises an error for unknown keys."""
        fields = {field.name: field for field in dataclasses.fields(cls) if field.name != "tag"}
        values: Dict[str, Any] = {}
        for name, value in (config or {}).items():
            if name in ENGINE_KEYS:
                continue
            if name not in fields:
                near = difflib.get_close_matches(name, [*fields, *ENGINE_KEYS], 1)
                suggestion = (f"; did you mean {near[0]!r}?" if near else
                              f"; the known keys are {sorted(fields)}")
                raise invalid(f"the extra config has the unknown key {name!r}{suggestion}")
            values[name] = _checked(name, str(fields[name].type), value)
        values["tag"] = str((config or {}).get("extra_backend_tag") or "")
        settings = cls(**values)
        if settings.level not in LEVELS:
            raise invalid(f"level {settings.level!r} is unknown: use one of {', '.join(LEVELS)}")
        return settings


def _checked(name: str, kind: str, value: Any) -> Any:
    if value is None and "Optional" in kind:
        return None
    wanted: Tuple[type, ...] = (str,)
    if "bool" in kind:
        wanted = (bool,)
    elif "int" in kind:
        wanted = (int,)
    elif "float" in kind:
        wanted = (int, float)
    # JSON's true is an int to Python, and would become a budget of one byte.
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        raise invalid(f"extra config: {name} is {value!r}, but must be of type "
                      f"{wanted[-1].__name__}")
    return value


def rank_name(config: Any) -> str:
    """The name of a rank, which is unique in the server: part of its directory's path."""
    return (f"dp{config.dp_rank}-tp{config.tp_rank}of{config.tp_size}"
            f"-pp{config.pp_rank}of{config.pp_size}"
            f"-cp{config.attn_cp_rank}of{config.attn_cp_size}")


def is_single_rank(config: Any) -> bool:
    """Whether the configuration has a single rank."""
    return bool(config.tp_size * config.pp_size * config.attn_cp_size == 1
                and config.dp_rank == 0)


def shard(config: Any) -> Tuple[int, int]:
    """The part of a page that a rank has: its index and the number of parts."""
    index = (config.tp_rank * config.pp_size + config.pp_rank) * config.attn_cp_size
    count = config.tp_size * config.pp_size * config.attn_cp_size
    return index + config.attn_cp_rank, count


def open_store(settings: Settings, config: Any, device: Optional[int] = None
               ) -> Tuple[kvtier.Runtime, kvtier.Store]:
    """Opens the rank's own store, because ranks cannot share a directory. `device` is the number
    of the GPU whose memory holds the pages; None for host memory."""
    name, path = rank_name(config), settings.disk_path
    spec = settings.spec.replace("{rank}", name)
    if path:
        path = os.path.join(path, name)
        os.makedirs(path, mode=0o700, exist_ok=True)
    elif "path=" in spec and spec == settings.spec and not is_single_rank(config):
        raise invalid(
            "the spec names one directory for several ranks, and each rank needs its own: set "
            "disk_path beside the spec (each rank makes a directory in it), or write {rank} into "
            "the spec's path")
    runtime = kvtier.Runtime(workers=settings.workers, name="kvt-sglang")
    try:
        gpu = None if device is None else kvtier.Device(runtime, "cuda", ordinal=device)
        return runtime, kvtier.Store(
            runtime, spec, device=gpu, host_bytes=settings.host_bytes, disk_path=path,
            disk_bytes=settings.disk_bytes, policy=settings.policy,
            disk_policy=settings.disk_policy, write=settings.write)
    except kvtier.BusyError as error:
        runtime.close()
        raise make(error.status, f"{error.message}: another rank or server uses this directory; "
                   "give each process a disk_path of its own") from error
    except BaseException:
        runtime.close()
        raise
