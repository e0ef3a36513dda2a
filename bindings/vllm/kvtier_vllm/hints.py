"""Hints that a request carries about itself: `kv_transfer_params={"kvtier": {...}}`."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import Any, Mapping, Optional

import kvtier

from .settings import flag, logger

STOPS = {"": kvtier.STOP_UNKNOWN, "tool_use": kvtier.STOP_TOOL_USE,
         "end_turn": kvtier.STOP_END_TURN, "length": kvtier.STOP_LENGTH,
         "cancelled": kvtier.STOP_CANCELLED}


def hash64(text: str) -> int:
    """A 64-bit hash of a text. Text from clients may hold lone surrogates."""
    return int.from_bytes(hashlib.blake2b(
        text.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def clock_ns(seconds: Optional[float]) -> int:
    """The policies' clock, in ns, that many seconds from now; 0 (unknown) for None."""
    return 0 if seconds is None else time.monotonic_ns() + int(seconds * 1e9)


@dataclass(frozen=True)
class RequestHints:
    """The hints of one request."""

    tenant: int = 0
    priority: Optional[int] = None
    #: Name of the conversation: requests of one conversation give the same name.
    session: str = ""
    #: Why the request will stop, and the seconds from its end until its KV is used again.
    stop: int = kvtier.STOP_UNKNOWN
    next_use_s: Optional[float] = None
    done: bool = False

    @property
    def has_future(self) -> bool:
        """Whether any hint is about the future use of the KV."""
        return self.done or self.next_use_s is not None or self.stop != kvtier.STOP_UNKNOWN


NONE = RequestHints()


def parse(params: Optional[Mapping[str, Any]]) -> RequestHints:
    """Reads the hints of a request. Malformed hints are ignored with a warning, because a client
    must not be able to end the engine."""
    given = (params or {}).get("kvtier")
    if given is None:
        return NONE
    try:
        priority, next_use = given.get("priority"), given.get("next_use_s")
        parsed = RequestHints(
            int(given.get("tenant", 0)), None if priority is None else int(priority),
            str(given.get("session", "")), STOPS[str(given.get("stop", ""))],
            None if next_use is None else float(next_use), flag(given, "done", False))
        if not 0 <= parsed.tenant < 1 << 32 or not 0 <= (parsed.priority or 0) < 256:
            raise ValueError("tenant must be below 2**32, and priority below 256")
        if parsed.next_use_s is not None and not 0 <= parsed.next_use_s < 1e9:
            raise ValueError("next_use_s must be at least 0 and below 1e9 seconds")
        return parsed
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError,
            kvtier.InvalidError) as error:
        logger.warning("kvtier hints of a request are ignored: %r: %s", given, str(error))
        return NONE


def of_request(context: Any) -> RequestHints:
    """The hints of a `ReqContext`, read once per request."""
    parsed = context.get_state(RequestHints)
    if not isinstance(parsed, RequestHints):
        parsed = parse(context.kv_transfer_params)
        context.set_state(parsed)
    return parsed
