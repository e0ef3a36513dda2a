"""What a configuration says of a store, and the stores of this process."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import logging
import os
import re
import threading
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import kvtier
from kvtier import abi
from kvtier._errors import Error, make

logger = logging.getLogger("kvtier_vllm")

_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
          "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")


_LEVELS = {"ram": kvtier.LEVEL_RAM, "disk": kvtier.LEVEL_DISK, "durable": kvtier.LEVEL_DURABLE,
           "remote": kvtier.LEVEL_REMOTE}
#: Longer than any request waits for a lookup.
_MOST_SECONDS = 60.0


def invalid(text: str) -> Error:
    """A configuration that cannot be meant."""
    return make(abi.KVT_E_INVALID, text)


def unsupported(text: str) -> Error:
    """What this binding does not do, with what does."""
    return make(abi.KVT_E_UNSUPPORTED, text)


def size(name: str, value: Any) -> int:
    """Bytes, from a number or a text such as "8GiB"."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    found = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None or found[2].lower() not in _UNITS:
        raise invalid(f"{name}={value!r}: a number of bytes, or a text such as \"8GiB\"")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def _seconds(name: str, value: Any) -> float:
    """Seconds that a request may wait."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (
            0 <= value <= _MOST_SECONDS):
        raise invalid(f"{name}={value!r}: seconds, from 0 to {_MOST_SECONDS:.0f}")
    return float(value)


def flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """An option that is true or false. The text "false" would count as true."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise invalid(f"{name}={value!r}: true or false, without quotes")
    return value


def reject_unknown(config: Mapping[str, Any], known: Sequence[str]) -> None:
    """A misspelt option must not be passed over in silence."""
    for name in config:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise invalid(f"there is no option {name!r}"
                          + (f"; did you mean {near[0]!r}?" if near else ""))


@dataclass(frozen=True)
class Settings:
    """A store, as configurations name it. What is beside `spec` counts instead of what that
    says."""

    spec: str = ""
    host_bytes: int = 0
    disk_path: str = ""
    disk_bytes: int = 0
    policy: str = ""
    disk_policy: str = ""
    write: str = ""
    #: The weights' fingerprint: KV of other weights under the same name is other KV.
    weights: str = ""
    #: "ram", "disk", "durable" or "remote"; "" is "disk" where there is one.
    level: str = ""
    #: How many evictions are told to the log at once; 0 = none.
    log_evictions: int = 0
    #: Seconds for which the store's remote is asked for what is not here, while a request waits;
    #: 0 = never.
    ask_s: float = 0.5

    @classmethod
    def names(cls) -> List[str]:
        """The options."""
        return [field.name for field in dataclasses.fields(cls)]

    @classmethod
    def take(cls, config: Mapping[str, Any]) -> "Settings":
        """Those options of a configuration that are a store's."""
        given = {name: config[name] for name in cls.names() if config.get(name) is not None}
        for name in ("host_bytes", "disk_bytes", "log_evictions"):
            if name in given:
                given[name] = size(name, given[name])
        given["ask_s"] = _seconds("ask_s", given.get("ask_s", cls.ask_s))
        for name, value in given.items():
            if name not in ("host_bytes", "disk_bytes", "log_evictions", "ask_s") and (
                    not isinstance(value, (str, os.PathLike) if name == "disk_path" else str)):
                raise invalid(f"{name}={value!r} is no text")
        if "disk_path" in given:
            given["disk_path"] = os.path.abspath(os.path.expanduser(given["disk_path"]))
        if given.get("level", "") not in ("", *_LEVELS):
            raise invalid(f"level={given['level']!r} is none of {', '.join(_LEVELS)}")
        settings = cls(**given)
        if settings.level in ("disk", "durable") and not settings.has_disk:
            raise invalid(f"level={settings.level!r} without a disk: give disk_path and disk_bytes")
        return settings

    @property
    def has_disk(self) -> bool:
        """Whether there is a tier below memory."""
        return bool(self.disk_path) or "disk(" in self.spec

    def put_level(self) -> int:
        """When a put has ended."""
        name = self.level or ("disk" if self.has_disk else "ram")
        return _LEVELS[name]

    def under(self, folder: str) -> "Settings":
        """The same with its disk in a folder below: a directory belongs to one process."""
        if not self.disk_path:
            return self
        return dataclasses.replace(self, disk_path=os.path.join(self.disk_path, folder))


class Shared:
    """A store of this process, for as long as somebody uses it."""

    def __init__(self, settings: Settings, ordinal: Optional[int] = None) -> None:
        self.settings = settings
        #: Tells it from those of other processes.
        self.token = f"{os.getpid()}-{id(self):x}"
        self._told: Dict[int, int] = {}
        self.device: Optional[kvtier.Device] = None
        with contextlib.ExitStack() as opened:  # what fails here leaves nothing open
            self.runtime = opened.enter_context(kvtier.Runtime(name="kvt-vllm"))
            if ordinal is not None:
                self.device = opened.enter_context(
                    kvtier.Device(self.runtime, "cuda", ordinal=ordinal))
            if settings.disk_path:
                os.makedirs(os.path.dirname(settings.disk_path), exist_ok=True)
            self.store = opened.enter_context(kvtier.Store(
                self.runtime, settings.spec or "store", host_bytes=settings.host_bytes,
                disk_bytes=settings.disk_bytes, disk_path=settings.disk_path,
                policy=settings.policy, disk_policy=settings.disk_policy, write=settings.write,
                device=self.device))
            #: Of memory, also where the spec says it, or nobody.
            self.policy = settings.policy or kvtier.Advisor.policy_of(self.store)
            self._opened = opened.pop_all()

    def set_policy(self, spec: str, tier: int = kvtier.TIER_HOST) -> None:
        """Goes on with another policy, while everything runs."""
        self.store.set_policy(tier, spec)
        if tier == kvtier.TIER_HOST:
            self.policy = spec

    def log_evictions(self) -> int:
        """Tells the log of evictions that it was not told of; how many."""
        count = 0
        if not self.settings.log_evictions:
            return count
        tiers = (kvtier.TIER_HOST, kvtier.TIER_DISK) if self.settings.has_disk else (
            kvtier.TIER_HOST,)
        for tier in tiers:
            for one in self.store.evictions(tier, self.settings.log_evictions):
                if one.number < self._told.get(tier, 0):
                    continue
                self._told[tier] = one.number + 1
                count += 1
                logger.info("evicted from %s: %s", "memory" if tier == kvtier.TIER_HOST
                            else "disk", one)
        return count

    def close(self) -> None:
        """Ends what is open, and waits for it."""
        self._opened.close()


_lock = threading.Lock()
_open: Dict[Tuple[int, str], Tuple[Shared, int]] = {}


def acquire(key: str, settings: Settings, ordinal: Optional[int] = None) -> Shared:
    """The store of a key: opened by the first that asks, given back with `release`. A scheduler
    and a worker in one process so have the same one."""
    place = (os.getpid(), key)
    with _lock:
        if place in _open:
            shared, users = _open[place]
            if shared.settings != settings:
                raise invalid(f"the store of {key!r} was opened with other options")
        else:
            shared, users = Shared(settings, ordinal), 0
        _open[place] = (shared, users + 1)
        return shared


def find(key: str) -> Optional[Shared]:
    """That store, if it is open."""
    with _lock:
        found = _open.get((os.getpid(), key))
        return found[0] if found else None


def release(key: str) -> None:
    """Closes it where nobody else uses it."""
    place = (os.getpid(), key)
    with _lock:
        found = _open.get(place)
        if found is None:
            return
        shared, users = found
        if users > 1:
            _open[place] = (shared, users - 1)
            return
        del _open[place]
    shared.close()
