"""The options of a store, and the stores that are open in this process."""

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
#: The secrets of a remote, and the environment variables that have them.
_SECRETS = {"password": "KVTIER_REMOTE_PASSWORD", "s3.key": "KVTIER_REMOTE_S3_KEY",
            "s3.secret": "KVTIER_REMOTE_S3_SECRET", "s3.token": "KVTIER_REMOTE_S3_TOKEN",
            "seal": "KVTIER_REMOTE_SEAL"}
#: Most seconds that a request may wait for a remote lookup.
_MAX_SECONDS = 60.0


def invalid(text: str) -> Error:
    """The error for an invalid configuration or call."""
    return make(abi.KVT_E_INVALID, text)


def unsupported(text: str) -> Error:
    """The error for an unsupported configuration; its text names an alternative."""
    return make(abi.KVT_E_UNSUPPORTED, text)


def size(name: str, value: Any) -> int:
    """Bytes, from a number or a text such as "8GiB". `name` is for the error."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    found = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None or found[2].lower() not in _UNITS:
        raise invalid(f"{name}={value!r} is no size: give a number of bytes, or a text such as "
                      "\"8GiB\"")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def _seconds(name: str, value: Any) -> float:
    """Seconds, from 0 to `_MAX_SECONDS`, that a request may wait."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (
            0 <= value <= _MAX_SECONDS):
        raise invalid(f"{name}={value!r} is out of range: give seconds from 0 to "
                      f"{_MAX_SECONDS:.0f}")
    return float(value)


def _secrets() -> Dict[str, bytes]:
    """The secrets of the remote, which must not be in a configuration that engines log."""
    return {name: os.environ[variable].encode() for name, variable in _SECRETS.items()
            if os.environ.get(variable)}


def flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """A boolean option. Texts are rejected, because Python takes "false" as true."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise invalid(f"{name}={value!r} is no boolean: give true or false, without quotes")
    return value


def reject_unknown(config: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises an error for an option that is not known, for example a misspelt one."""
    for name in config:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise invalid(f"there is no option {name!r}" + (
                f"; did you mean {near[0]!r}?" if near else
                f" among {', '.join(sorted(known))}"))


@dataclass(frozen=True)
class Settings:
    """The options of a store. Options beside `spec` override those inside it."""

    spec: str = ""
    host_bytes: int = 0
    disk_path: str = ""
    disk_bytes: int = 0
    policy: str = ""
    disk_policy: str = ""
    write: str = ""
    #: Fingerprint of the weights: part of the identity, next to the model's name.
    weights: str = ""
    #: When a put completes: "ram", "disk", "durable" or "remote". "" means "disk" for a store
    #: with a disk, else "ram".
    level: str = ""
    #: Most evictions of a tier that are logged at once; 0 = none.
    log_evictions: int = 0
    #: Seconds that a request waits at most for a remote lookup of KV that local tiers lack;
    #: 0 = no remote lookup.
    remote_lookup_s: float = 0.5

    @classmethod
    def names(cls) -> List[str]:
        """The names of the options."""
        return [field.name for field in dataclasses.fields(cls)]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Settings":
        """Reads the options of a store from a configuration, and ignores other keys."""
        given = {name: config[name] for name in cls.names() if config.get(name) is not None}
        for name in ("host_bytes", "disk_bytes", "log_evictions"):
            if name in given:
                given[name] = size(name, given[name])
        given["remote_lookup_s"] = _seconds(
            "remote_lookup_s", given.get("remote_lookup_s", cls.remote_lookup_s))
        for name, value in given.items():
            if name not in ("host_bytes", "disk_bytes", "log_evictions", "remote_lookup_s") and (
                    not isinstance(value, (str, os.PathLike) if name == "disk_path" else str)):
                raise invalid(f"{name}={value!r} is a {type(value).__name__}: give a text")
        if "disk_path" in given:
            given["disk_path"] = os.path.abspath(os.path.expanduser(given["disk_path"]))
        if given.get("level", "") not in ("", *_LEVELS):
            raise invalid(f"level={given['level']!r} is unknown: use one of {', '.join(_LEVELS)}")
        settings = cls(**given)
        if settings.level in ("disk", "durable") and not settings.has_disk:
            raise invalid(f"level={settings.level!r} needs a store with a disk: give disk_path and "
                          "disk_bytes, or use level=\"ram\"")
        return settings

    @property
    def has_disk(self) -> bool:
        """Whether the store has a disk tier."""
        return bool(self.disk_path) or "disk(" in self.spec

    def put_level(self) -> int:
        """The level at which a put completes, as the C constant."""
        name = self.level or ("disk" if self.has_disk else "ram")
        return _LEVELS[name]

    def under(self, folder: str) -> "Settings":
        """The same options for one process of several: the disk is in a subfolder, and `{rank}` in
        `spec` is its name, because each process needs a directory and a control socket of its own.
        """
        path = os.path.join(self.disk_path, folder) if self.disk_path else ""
        return dataclasses.replace(self, spec=self.spec.replace("{rank}", folder), disk_path=path)


class SharedStore:
    """A store that several users in this process share, and that the last one closes."""

    def __init__(self, settings: Settings, ordinal: Optional[int] = None) -> None:
        self.settings = settings
        #: Unique across processes.
        self.token = f"{os.getpid()}-{id(self):x}"
        self._next_numbers: Dict[int, int] = {}
        self.device: Optional[kvtier.Device] = None
        with contextlib.ExitStack() as resources:  # closes everything after an error
            self.runtime = resources.enter_context(kvtier.Runtime(name="kvt-vllm"))
            if ordinal is not None:
                self.device = resources.enter_context(
                    kvtier.Device(self.runtime, "cuda", ordinal=ordinal))
            if settings.disk_path:
                os.makedirs(os.path.dirname(settings.disk_path), exist_ok=True)
            self.store = resources.enter_context(kvtier.Store(
                self.runtime, settings.spec or "store", host_bytes=settings.host_bytes,
                disk_bytes=settings.disk_bytes, disk_path=settings.disk_path,
                policy=settings.policy, disk_policy=settings.disk_policy, write=settings.write,
                device=self.device, secrets=_secrets()))
            #: The policy of host memory, also where the spec or the default gives it.
            self.policy = settings.policy or kvtier.Advisor.policy_of(self.store)
            self._resources = resources.pop_all()

    def set_policy(self, spec: str, tier: int = kvtier.TIER_HOST) -> None:
        """Switches a tier to another policy while transfers run."""
        self.store.set_policy(tier, spec)
        if tier == kvtier.TIER_HOST:
            self.policy = spec

    def log_evictions(self) -> int:
        """Logs the evictions since the last call, and returns their number."""
        count = 0
        if not self.settings.log_evictions:
            return count
        tiers = (kvtier.TIER_HOST, kvtier.TIER_DISK) if self.settings.has_disk else (
            kvtier.TIER_HOST,)
        for tier in tiers:
            for eviction in self.store.evictions(tier, self.settings.log_evictions):
                if eviction.number < self._next_numbers.get(tier, 0):
                    continue
                self._next_numbers[tier] = eviction.number + 1
                count += 1
                logger.info("evicted from %s: %s", "memory" if tier == kvtier.TIER_HOST
                            else "disk", eviction)
        return count

    def close(self) -> None:
        """Closes the store, its device and its runtime, and waits for them."""
        self._resources.close()


_lock = threading.Lock()
_stores: Dict[Tuple[int, str], Tuple[SharedStore, int]] = {}


def acquire(key: str, settings: Settings, ordinal: Optional[int] = None) -> SharedStore:
    """The store of a key. The first caller opens it, and each caller calls `release`. So a
    scheduler and a worker in one process share one store."""
    slot = (os.getpid(), key)
    with _lock:
        if slot in _stores:
            shared, users = _stores[slot]
            if shared.settings != settings:
                raise invalid(f"the store of {key!r} is open with other options: give the same "
                              "options to all of its users, or another name or disk_path")
        else:
            shared, users = SharedStore(settings, ordinal), 0
        _stores[slot] = (shared, users + 1)
        return shared


def find(key: str) -> Optional[SharedStore]:
    """The store of a key, if it is open."""
    with _lock:
        found = _stores.get((os.getpid(), key))
        return found[0] if found else None


def release(key: str) -> None:
    """Gives up one use of a store; the last one closes it."""
    slot = (os.getpid(), key)
    with _lock:
        found = _stores.get(slot)
        if found is None:
            return
        shared, users = found
        if users > 1:
            _stores[slot] = (shared, users - 1)
            return
        del _stores[slot]
    shared.close()
