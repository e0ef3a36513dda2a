"""The options of the shim's store. The first of these sources that is present counts:

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

#: Most seconds that a call may wait for a remote lookup.
MAX_REMOTE_LOOKUP_S = 3600

#: Most open shapes. A store has at most 64 layouts: the catalogue needs one, and closed shapes
#: with objects need some.
MAX_SHAPES = 60

#: Variables that name the engines' own configuration files, which may have a key "kvtier".
ENGINE_FILES = ("MOONCAKE_CONFIG_PATH", "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH")

#: Variables that may give the rank of this process, in this order.
RANK_VARIABLES = ("KVTIER_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "LOCAL_RANK")


@dataclass(frozen=True)
class Settings:
    """The options of a store. `spec` and `disk_path` may contain `{rank}`, which comes from
    `rank` or the environment, or `{slot}`, the first number whose directory is free."""

    spec: str = ""
    host_bytes: int = 0
    disk_path: str = ""
    disk_bytes: int = 0
    policy: str = ""
    disk_policy: str = ""
    write: str = ""
    #: The level at which a put returns: "ram", "disk", "durable" or "remote".
    level: str = "ram"
    #: Seconds that a call waits at most for a remote lookup; 0 = no remote lookup.
    remote_lookup_s: float = 0.5
    #: Names the model and its weights: objects under another name are not found.
    model: str = ""
    #: The device of registered device memory: "cuda" or "cuda:1"; "" = host memory only.
    device: str = ""
    rank: Optional[int] = None
    workers: int = 0
    #: Most shapes (tuples of buffer sizes) that a tenant has open at once, 1 to 60.
    max_shapes: int = 48
    #: Log each eviction.
    log_evictions: bool = False

    def templates(self) -> Tuple[str, str]:
        """The options that may contain placeholders."""
        return self.spec, self.disk_path

    def fill_placeholder(self, name: str, number: int) -> "Settings":
        """The same options with a number in place of a placeholder."""
        placeholder = "{%s}" % name
        return replace(self, spec=self.spec.replace(placeholder, str(number)),
                       disk_path=self.disk_path.replace(placeholder, str(number)))

    def has_placeholder(self, name: str) -> bool:
        """Whether the options contain a placeholder."""
        return any("{%s}" % name in text for text in self.templates())


_NAMES = {field.name for field in fields(Settings)}
_configured: Optional[Settings] = None


def _invalid(text: str) -> Exception:
    return make(abi.KVT_E_INVALID, text)


def from_mapping(given: Mapping[str, Any], source: str) -> Settings:
    """Reads settings from a mapping. `source` names it in errors, for example for unknown names."""
    unknown = sorted(set(given) - _NAMES)
    if unknown:
        raise _invalid(f"{source}: unknown options {', '.join(unknown)}: the known options are "
                       f"{', '.join(sorted(_NAMES))}")
    for name, value in given.items():
        default = getattr(Settings(), name)
        expected = int if default is None else type(default)
        kinds = (int, float) if expected is float else (expected,)
        if not (isinstance(value, kinds) or value is default) or (
                isinstance(value, bool) and expected is not bool):
            raise _invalid(f"{source}: {name} is {value!r}, but must be of type "
                           f"{expected.__name__}")
    settings = Settings(**given)
    if settings.level not in LEVELS:
        raise _invalid(f"{source}: level {settings.level!r} is unknown: use one of "
                       f"{', '.join(LEVELS)}")
    if not 0 <= settings.remote_lookup_s <= MAX_REMOTE_LOOKUP_S:
        raise _invalid(f"{source}: remote_lookup_s {settings.remote_lookup_s!r} is out of range: "
                       f"give seconds from 0 to {MAX_REMOTE_LOOKUP_S}")
    if not 1 <= settings.max_shapes <= MAX_SHAPES:
        raise _invalid(f"{source}: max_shapes {settings.max_shapes} is out of range: give 1 to "
                       f"{MAX_SHAPES}")
    return settings


def configure(settings: Optional[Settings] = None, **given: Any) -> None:
    """Sets the options of the stores that are opened from now on, over environment and files.
    `configure()` without arguments removes them."""
    global _configured
    if settings is None and given:
        settings = from_mapping(given, "configure")
    _configured = settings


def _from_text(text: str, source: str) -> Settings:
    data = text.strip()
    try:
        if not data.startswith("{"):
            with open(data, encoding="utf-8") as file:
                data = file.read()
        given = json.loads(data)
    except (OSError, ValueError) as error:
        raise _invalid(f"{source} is neither JSON nor the path of a JSON file: {error}") from error
    if not isinstance(given, dict):
        raise _invalid(f"{source} is a JSON {type(given).__name__}: give a JSON object")
    return from_mapping(given, source)


def _from_engine() -> Optional[Settings]:
    for name in ENGINE_FILES:
        path = os.environ.get(name)
        if not path:
            continue
        try:
            with open(path, encoding="utf-8") as file:
                part = json.load(file).get("kvtier")
        except (OSError, ValueError, AttributeError):
            continue  # the engine reads the same file, and reports what is wrong with it
        if isinstance(part, dict):
            return from_mapping(part, f"'kvtier' in {path}")
    return None


def current() -> Settings:
    """The configured settings, without the arguments of `setup`."""
    if _configured is not None:
        return _configured
    spec, config = (os.environ.get(f"KVTIER_MOONCAKE_{name}", "") for name in ("SPEC", "CONFIG"))
    found = _from_text(config, "KVTIER_MOONCAKE_CONFIG") if config else _from_engine()
    settings = found or Settings()
    return replace(settings, spec=spec) if spec else settings


def rank_of(settings: Settings) -> Optional[int]:
    """The rank of this process, from the settings or the environment; None if unknown."""
    if settings.rank is not None:
        return settings.rank
    for name in RANK_VARIABLES:
        text = os.environ.get(name, "")
        if text.isdigit():
            return int(text)
    return None
