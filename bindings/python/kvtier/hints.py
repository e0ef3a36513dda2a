"""Hints about the future of KV that clients of engines send with a request.

`parse` reads the dialects that clients use, from one mapping (in vLLM: `kv_transfer_params`):

    {"kvtier": {"tenant": 3, "priority": 2, "session": "chat-17", "stop": "tool_use",
                "tool": "run_tests", "next_use_s": 4.5, "done": false, "keep_s": 600, "ttl_s": 900},
     "kv_cache_ttl_seconds": 600,
     "cache_control": {"type": "ephemeral", "ttl": "1h"},
     "prompt_cache_retention": "24h",
     "prompt_cache_key": "chat-17"}

Where two give the same fact, the first one in this order counts. A part that is malformed is
ignored with a warning, since a client must not be able to fail a request or end the engine.

>>> from kvtier import hints
>>> hints.parse({"cache_control": {"type": "ephemeral", "ttl": "1h"}}).keep_s
3600.0
>>> hints.parse({"kv_cache_ttl_seconds": 600, "prompt_cache_retention": "24h"}).keep_s
600.0
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import math
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from ._policy import STOP_CANCELLED, STOP_END_TURN, STOP_LENGTH, STOP_TOOL_USE, STOP_UNKNOWN

_logger = logging.getLogger("kvtier")

#: Reasons why a request stops, by the names that clients use.
STOPS = {"": STOP_UNKNOWN, "tool_use": STOP_TOOL_USE, "tool_calls": STOP_TOOL_USE,
         "end_turn": STOP_END_TURN, "stop": STOP_END_TURN, "stop_sequence": STOP_END_TURN,
         "length": STOP_LENGTH, "max_tokens": STOP_LENGTH, "cancelled": STOP_CANCELLED}
#: Most seconds that KV can be kept, or lives: 30 days.
MAX_SECONDS = 30 * 86400.0
#: Most characters of a name.
MAX_NAME = 1024
#: Most seconds until the next use.
_MAX_NEXT_USE_S = 1e9
#: Lifetimes of Anthropic's `cache_control`, and of OpenAI's `prompt_cache_retention`, in seconds.
#: None: as long as the eviction policy keeps it.
_CACHE_CONTROL_S = {"5m": 300.0, "1h": 3600.0}
_RETENTION_S: Dict[str, Optional[float]] = {"in_memory": None, "in-memory": None, "24h": 86400.0}
#: Most breakpoints of a `cache_control` list; Anthropic allows 4.
_MAX_BREAKPOINTS = 64
#: Most fields of `"kvtier"`: each unknown one costs a search for the nearest name and a log line.
_MAX_FIELDS = 32


@dataclass(frozen=True)
class Hints:
    """The hints of one request."""

    tenant: int = 0
    priority: Optional[int] = None
    #: Name of the conversation: requests of one conversation give the same name.
    session: str = ""
    #: Why the request will stop, and the seconds from its end until its KV is used again.
    stop: int = STOP_UNKNOWN
    next_use_s: Optional[float] = None
    done: bool = False
    #: Name of the tool that the client will call when the request has stopped.
    tool: str = ""
    #: Seconds from the request's end for which its KV is pinned.
    keep_s: Optional[float] = None
    #: Seconds from its last use after which the KV that the request stores is removed.
    ttl_s: Optional[float] = None

    @property
    def has_future(self) -> bool:
        """Whether any hint is about the future use of the KV."""
        return (self.done or self.next_use_s is not None or self.stop != STOP_UNKNOWN
                or self.keep_s is not None)


NONE = Hints()


class Malformed(ValueError):
    """A hint that cannot be used. The text says what is accepted."""


def _show(value: Any) -> str:
    """A value for a message. Clients may send long ones."""
    if isinstance(value, int) and not -10**18 < value < 10**18:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_NAME:
        raise Malformed(f"{name} is {_show(value)}: give a text of at most {MAX_NAME} characters")
    return value


def _whole(name: str, value: Any, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise Malformed(f"{name} is {_show(value)}: give an integer from 0 to {most}")
    return value


def _seconds(name: str, value: Any, least: float, most: float) -> float:
    """Seconds above `least`, or from it on if it is 0."""
    good = not isinstance(value, bool) and isinstance(value, (int, float)) and (
        least <= value <= most) and math.isfinite(value)
    if not good:
        raise Malformed(f"{name} is {_show(value)}: give a number of seconds from {least:g} to "
                        f"{most:g}, without quotes")
    return float(value)


def _lifetime(name: str, value: Any) -> float:
    return _seconds(name, value, 0.001, MAX_SECONDS)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):  # Python takes "false" as true
        raise Malformed(f"{name} is {_show(value)}: give true or false, without quotes")
    return value


def _choice(name: str, value: Any, choices: Mapping[str, Any]) -> Any:
    if not isinstance(value, str) or value not in choices:
        raise Malformed(f"{name} is {_show(value)}: use one of "
                        f"{', '.join(repr(one) for one in choices if one)}")
    return choices[value]


#: The fields of `"kvtier"`, with their readers.
_FIELDS: Dict[str, Callable[[str, Any], Any]] = {
    "tenant": lambda name, value: _whole(name, value, 2**32 - 1),
    "priority": lambda name, value: _whole(name, value, 255),
    "session": _text,
    "stop": lambda name, value: _choice(name, value, STOPS),
    "next_use_s": lambda name, value: _seconds(name, value, 0, _MAX_NEXT_USE_S),
    "done": _flag,
    "tool": _text,
    "keep_s": _lifetime,
    "ttl_s": _lifetime,
}


def fields(given: Mapping[str, Any], unknown: Callable[[str], None]) -> Hints:
    """Reads the fields of `"kvtier"`. Raises `Malformed`; calls `unknown` with a text for fields
    that do not exist, which are ignored."""
    if len(given) > _MAX_FIELDS:
        raise Malformed(f"{len(given)} fields: give at most {_MAX_FIELDS}")
    found: Dict[str, Any] = {}
    for name, value in given.items():
        read = _FIELDS.get(name) if isinstance(name, str) else None
        if read is None:
            near = difflib.get_close_matches(str(name)[:MAX_NAME], _FIELDS, 1)
            unknown(f"there is no hint {_show(name)}" + (
                f"; did you mean {near[0]!r}?" if near else f" among {', '.join(_FIELDS)}"))
        elif value is not None:
            found[name] = read(name, value)
    if found.get("tool") and not found.get("stop"):
        found["stop"] = STOP_TOOL_USE
    return Hints(**found)


def _kvtier(value: Any, unknown: Callable[[str], None]) -> Hints:
    if not isinstance(value, Mapping):
        raise Malformed(f"the value is {_show(value)}: give an object with the fields "
                        f"{', '.join(_FIELDS)}")
    return fields(value, unknown)


def _cache_control(value: Any, unknown: Callable[[str], None]) -> Hints:
    """Anthropic's: one breakpoint, or a list of them, of which the longest lifetime counts."""
    all_of = value if isinstance(value, list) else [value]
    if not 1 <= len(all_of) <= _MAX_BREAKPOINTS:
        raise Malformed(f"{len(all_of)} breakpoints: give 1 to {_MAX_BREAKPOINTS}")
    longest = 0.0
    for one in all_of:
        if not isinstance(one, Mapping) or one.get("type") != "ephemeral":
            raise Malformed(f"{_show(one)}: use {{\"type\": \"ephemeral\", \"ttl\": \"5m\"}}")
        ttl = one.get("ttl")
        longest = max(longest, _choice("ttl", "5m" if ttl is None else ttl, _CACHE_CONTROL_S))
    return Hints(keep_s=longest)


def _ttl(value: Any, unknown: Callable[[str], None]) -> Hints:
    seconds = _lifetime("the value", value)
    return Hints(keep_s=seconds, ttl_s=seconds)


#: The dialects, the one that takes precedence first.
_DIALECTS: Dict[str, Callable[[Any, Callable[[str], None]], Hints]] = {
    "kvtier": _kvtier,
    "kv_cache_ttl_seconds": _ttl,
    "cache_control": _cache_control,
    "prompt_cache_retention": lambda value, unknown: Hints(
        keep_s=_choice("the value", value, _RETENTION_S)),
    "prompt_cache_key": lambda value, unknown: Hints(session=_text("the value", value)),
}
#: The keys that `parse` reads.
KEYS: Tuple[str, ...] = tuple(_DIALECTS)


def parse(params: Any, logger: logging.Logger = _logger) -> Hints:
    """The hints in a request's parameters. Malformed parts are ignored with a warning."""
    if not isinstance(params, Mapping):
        return NONE
    found = NONE
    for key, read in _DIALECTS.items():
        value = params.get(key)
        if value is None:
            continue
        try:
            found = _merged(found, read(value, partial(
                logger.warning, "%s of a request: %s", key)))
        except (Malformed, RecursionError) as error:
            logger.warning("%s hints of a request are ignored: %s", key, error)
    return found


def _merged(first: Hints, other: Hints) -> Hints:
    """The fields of `first`, and those that only `other` sets."""
    if first == NONE:
        return other
    missing = {name: value for name, value in vars(other).items()
               if value != getattr(NONE, name) and getattr(first, name) == getattr(NONE, name)}
    if first.keep_s is not None or first.ttl_s is not None:
        # A lifetime is one fact: it is not put together from two dialects.
        missing.pop("keep_s", None)
        missing.pop("ttl_s", None)
    return replace(first, **missing) if missing else first


def hash64(text: str) -> int:
    """A 64-bit hash of a text. Text from clients may hold lone surrogates."""
    return int.from_bytes(hashlib.blake2b(
        text.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def clock_ns(seconds: Optional[float]) -> int:
    """The policies' clock, in ns, that many seconds from now; 0 (unknown) for None."""
    return 0 if seconds is None else time.monotonic_ns() + int(seconds * 1e9)


class ToolGaps:
    """Learns how long each tool takes: from the end of a request that calls a tool to the next
    request of its session. The expectation is the median of a tool's last gaps.

    >>> gaps = ToolGaps()
    >>> for at in (0, 100, 200):
    ...     gaps.ended("chat", "search", at)
    ...     gaps.began("chat", at + 4)
    >>> gaps.expected("search"), gaps.expected("other")
    (4.0, None)
    """

    #: Most sessions and tools that are remembered, and gaps of each tool.
    MOST_SESSIONS, MOST_TOOLS, MOST_GAPS = 4096, 256, 16
    #: Fewest gaps of an expectation.
    LEAST_GAPS = 3

    def __init__(self) -> None:
        self._waiting: "OrderedDict[str, Tuple[str, float]]" = OrderedDict()
        self._gaps: "OrderedDict[str, List[float]]" = OrderedDict()

    def ended(self, session: str, tool: str, now_s: float) -> None:
        """A request of a session has ended, and its client calls a tool."""
        if session and tool:
            self._waiting[session] = tool, now_s
            self._waiting.move_to_end(session)
            if len(self._waiting) > self.MOST_SESSIONS:
                self._waiting.popitem(last=False)

    def began(self, session: str, now_s: float) -> None:
        """A request of a session has begun."""
        waiting = self._waiting.pop(session, None)
        if waiting is None:
            return
        tool, since_s = waiting
        gaps = self._gaps.setdefault(tool, [])
        self._gaps.move_to_end(tool)
        gaps.append(float(max(0.0, now_s - since_s)))
        del gaps[:-self.MOST_GAPS]
        if len(self._gaps) > self.MOST_TOOLS:
            self._gaps.popitem(last=False)

    def expected(self, tool: str) -> Optional[float]:
        """The seconds that a tool is expected to take; None while too little is known."""
        gaps = self._gaps.get(tool, [])
        return sorted(gaps)[len(gaps) // 2] if len(gaps) >= self.LEAST_GAPS else None
