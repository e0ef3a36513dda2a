"""Where the shim's store is configured, in the order in which it counts:

1. `configure(...)`, or the options of `python -m kvtier_mooncake`;
2. `KVTIER_MOONCAKE_SPEC`, a store's spec, and `KVTIER_MOONCAKE_CONFIG`, JSON or a file of it;
3. `"kvtier": {...}` in the engine's own Mooncake configuration file;
4. the arguments of `setup`: `global_segment_size` bytes of memory.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields, replace
from typing import Any, Dict, Mapping, Optional, Tuple

from kvtier import (
    LEVEL_DISK,
    LEVEL_DURABLE,
    LEVEL_RAM,
    LEVEL_REMOTE,
    abi,
)
from kvtier._errors import make

LEVELS: Dict[str, int] = {"ram": LEVEL_RAM, "disk": LEVEL_DISK, "durable": LEVEL_DURABLE,
                          "remote": LEVEL_REMOTE}

#: Longer than this no call waits for a remote's answer.
MOST_ASK_S = 3600

#: A store has 64 layouts at most; the catalogue is one, and some are of shapes that were closed.
MOST_SHAPES = 60

#: The engines' own configuration files, which may have a part of ours.
ENGINE_FILES = ("MOONCAKE_CONFIG_PATH", "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH")

#: Who says which process of several this is.
RANKS = ("KVTIER_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "LOCAL_RANK")


@dataclass(frozen=True)
class Settings:
    """What a store is opened with. `spec` and `disk_path` may say `{rank}`, which comes from
    `rank` or the environment, or `{slot}`, the first number whose directory is free."""

    spec: str = ""
    host_bytes: int = 0
    disk_path: str = ""
    disk_bytes: int = 0
    policy: str = ""
    disk_policy: str = ""
    write: str = ""
    #: When a put is answered: "ram", "disk", "durable" or "remote".
    level: str = "ram"
    #: Calls wait so many seconds, at most, for what the store's remote says; 0: it is not asked.
    ask_s: float = 0.5
    #: Which model and weights the objects are of: those of another are not found.
    model: str = ""
    #: "" for host memory alone, or "cuda", "cuda:1": who copies what is registered there.
    device: str = ""
    rank: Optional[int] = None
    workers: int = 0
    #: How many kinds of objects (tuples of buffer sizes) are open at once.
    max_shapes: int = 48
    #: A line of the log for each eviction.
    log_evictions: bool = False

    def place(self) -> Tuple[str, str]:
        """The texts that say where the store is."""
        return self.spec, self.disk_path

    def with_number(self, name: str, number: int) -> "Settings":
        """The same with a placeholder filled in."""
        hole = "{%s}" % name
        return replace(self, spec=self.spec.replace(hole, str(number)),
                       disk_path=self.disk_path.replace(hole, str(number)))

    def wants(self, name: str) -> bool:
        """Whether a placeholder is in it."""
        return any("{%s}" % name in text for text in self.place())


_NAMES = {field.name for field in fields(Settings)}
_configured: Optional[Settings] = None


def _invalid(text: str) -> Exception:
    return make(abi.KVT_E_INVALID, text)


def from_mapping(given: Mapping[str, Any], whence: str) -> Settings:
    """Settings from JSON; a name that is none is refused."""
    unknown = sorted(set(given) - _NAMES)
    if unknown:
        raise _invalid(f"{whence}: {', '.join(unknown)}: there are {', '.join(sorted(_NAMES))}")
    for name, value in given.items():
        usual = getattr(Settings(), name)
        wanted = int if usual is None else type(usual)
        kinds = (int, float) if wanted is float else (wanted,)
        if not (isinstance(value, kinds) or value is usual) or (
                isinstance(value, bool) and wanted is not bool):
            raise _invalid(f"{whence}: {name}: {value!r} is no {wanted.__name__}")
    settings = Settings(**given)
    if settings.level not in LEVELS:
        raise _invalid(f"{whence}: level {settings.level!r} is none of {', '.join(LEVELS)}")
    if not 0 <= settings.ask_s <= MOST_ASK_S:
        raise _invalid(f"{whence}: ask_s {settings.ask_s!r} is no time from 0 to {MOST_ASK_S} s")
    if not 1 <= settings.max_shapes <= MOST_SHAPES:
        raise _invalid(f"{whence}: max_shapes {settings.max_shapes} is not in 1 to {MOST_SHAPES}")
    return settings


def configure(settings: Optional[Settings] = None, **given: Any) -> None:
    """Says how stores are opened from now on, whatever environment and files say.
    `configure()` forgets that."""
    global _configured
    if settings is None and given:
        settings = from_mapping(given, "configure")
    _configured = settings


def _from_text(text: str, whence: str) -> Settings:
    data = text.strip()
    try:
        if not data.startswith("{"):
            with open(data, encoding="utf-8") as file:
                data = file.read()
        given = json.loads(data)
    except (OSError, ValueError) as error:
        raise _invalid(f"{whence}: {error}") from error
    if not isinstance(given, dict):
        raise _invalid(f"{whence}: not a JSON object")
    return from_mapping(given, whence)


def _from_engine() -> Optional[Settings]:
    for name in ENGINE_FILES:
        path = os.environ.get(name)
        if not path:
            continue
        try:
            with open(path, encoding="utf-8") as file:
                part = json.load(file).get("kvtier")
        except (OSError, ValueError, AttributeError):
            continue  # the engine reads the file too, and says what is wrong with it
        if isinstance(part, dict):
            return from_mapping(part, f"'kvtier' in {path}")
    return None


def current() -> Settings:
    """What is configured, without what `setup` says."""
    if _configured is not None:
        return _configured
    spec, config = (os.environ.get(f"KVTIER_MOONCAKE_{name}", "") for name in ("SPEC", "CONFIG"))
    found = _from_text(config, "KVTIER_MOONCAKE_CONFIG") if config else _from_engine()
    settings = found or Settings()
    return replace(settings, spec=spec) if spec else settings


def rank_of(settings: Settings) -> Optional[int]:
    """Which process of several this is, if anyone says so."""
    if settings.rank is not None:
        return settings.rank
    for name in RANKS:
        text = os.environ.get(name, "")
        if text.isdigit():
            return int(text)
    return None
