"""What a user says in the engine's JSON, checked."""

from __future__ import annotations

import dataclasses
import difflib
import os
from dataclasses import dataclass
from typing import Any, Dict, Mapping, Optional, Tuple

import kvtier
from kvtier import _abi
from kvtier._errors import make

#: The version of SGLang whose interface this package was written and tested against.
TESTED = "0.5.23"

LEVELS: Dict[str, int] = {
    "ram": kvtier.LEVEL_RAM, "disk": kvtier.LEVEL_DISK, "durable": kvtier.LEVEL_DURABLE,
    "remote": kvtier.LEVEL_REMOTE,
}
#: Keys of the same JSON that are the engine's own, and are left to it.
ENGINES = frozenset({
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
    """The keys of the JSON that are ours, with what counts where they are missing."""

    #: Of the store; `{rank}` in it stands for the rank's name.
    spec: str = "store"
    #: These count instead of what the spec says.
    host_bytes: int = 0
    disk_path: str = ""
    disk_bytes: int = 0
    policy: str = ""
    disk_policy: str = ""
    write: str = ""
    #: When a write has ended: "ram", "disk", "durable" or "remote".
    level: str = "ram"
    #: Evictions are logged (logger `kvtier_sglang`, INFO) whenever metrics are asked for.
    log_evictions: bool = False
    tenant: int = 0
    priority: Optional[int] = None
    #: Threads of the runtime; 0: as many as it thinks right.
    workers: int = 0
    #: After so many seconds a transfer ends, without what it has not done by then.
    timeout_s: Optional[float] = None
    #: A lookup waits so many seconds, at most, for what the store's remote says; 0: it is not asked.
    ask_s: float = 0.5
    #: The same for the linker's lookups, with which the engine's scheduler waits.
    linker_ask_s: float = 0.0
    #: What is known of the future of pages is told to the policies.
    hints: bool = True
    #: KV that all ranks have alike (MLA) is kept by each rank for itself.
    mla_copies: bool = False
    #: Goes on with another version of SGLang than the tested one, named here.
    sglang_version: str = ""
    #: Part of who the KV belongs to: what has another tag is not found.
    tag: str = ""

    @classmethod
    def of(cls, given: Optional[Mapping[str, Any]]) -> "Settings":
        """From the engine's `extra_config`; what it does not know it refuses."""
        fields = {field.name: field for field in dataclasses.fields(cls) if field.name != "tag"}
        values: Dict[str, Any] = {}
        for name, value in (given or {}).items():
            if name in ENGINES:
                continue
            if name not in fields:
                near = difflib.get_close_matches(name, [*fields, *ENGINES], 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known are {sorted(fields)}"
                raise invalid(f"extra config has the unknown key {name!r}{hint}")
            values[name] = _checked(name, str(fields[name].type), value)
        values["tag"] = str((given or {}).get("extra_backend_tag") or "")
        settings = cls(**values)
        if settings.level not in LEVELS:
            raise invalid(f"level {settings.level!r} is none of {', '.join(LEVELS)}")
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
    # JSON's true is an int to Python, which would be a budget of one byte.
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        raise invalid(f"extra config: {name} is {value!r}, wanted is {wanted[-1].__name__}")
    return value


def check_version(settings: Settings) -> None:
    """`kvtier.UnsupportedError` unless SGLang is the tested one, or was allowed by name."""
    try:
        from sglang.version import __version__ as found
    except ImportError as error:
        raise unsupported(f"SGLang is not installed here: pip install sglang=={TESTED}"
                          ) from error
    if found in (TESTED, settings.sglang_version):
        return
    raise unsupported(
        f"SGLang {found} is not the version that kvtier_sglang was tested with ({TESTED}): "
        f"install that one, or take the risk with \"sglang_version\": \"{found}\" in the extra "
        "config, after bindings/sglang/tests/engine have passed with it")


def rank_name(config: Any) -> str:
    """What tells a rank's directory from those of the others."""
    return (f"dp{config.dp_rank}-tp{config.tp_rank}of{config.tp_size}"
            f"-pp{config.pp_rank}of{config.pp_size}"
            f"-cp{config.attn_cp_rank}of{config.attn_cp_size}")


def alone(config: Any) -> bool:
    """Whether no other rank is known of."""
    return bool(config.tp_size * config.pp_size * config.attn_cp_size == 1
                and config.dp_rank == 0)


def shard(config: Any) -> Tuple[int, int]:
    """Which part of a page a rank has: index and count."""
    index = (config.tp_rank * config.pp_size + config.pp_rank) * config.attn_cp_size
    count = config.tp_size * config.pp_size * config.attn_cp_size
    return index + config.attn_cp_rank, count


def open_store(settings: Settings, config: Any, device: Optional[int] = None
               ) -> Tuple[kvtier.Runtime, kvtier.Store]:
    """A store of the rank's own: a directory has one owner, so ranks cannot share one. `device`
    is the number of the GPU whose memory pages are in."""
    name, path = rank_name(config), settings.disk_path
    spec = settings.spec.replace("{rank}", name)
    if path:
        path = os.path.join(path, name)
        os.makedirs(path, mode=0o700, exist_ok=True)
    elif "path=" in spec and spec == settings.spec and not alone(config):
        raise invalid(
            "the spec names one directory, and there are several ranks, each of which needs its "
            "own: say disk_path beside the spec (each rank then has a directory in it), or "
            "write {rank} into the spec's path")
    runtime = kvtier.Runtime(workers=settings.workers, name="kvt-sglang")
    try:
        gpu = None if device is None else kvtier.Device(runtime, "cuda", ordinal=device)
        return runtime, kvtier.Store(
            runtime, spec, device=gpu, host_bytes=settings.host_bytes, disk_path=path,
            disk_bytes=settings.disk_bytes, policy=settings.policy,
            disk_policy=settings.disk_policy, write=settings.write)
    except kvtier.BusyError as error:
        runtime.close()
        raise make(error.status, f"{error.message}: another rank or server has this directory; "
                   "each process needs a disk_path of its own") from error
    except BaseException:
        runtime.close()
        raise
