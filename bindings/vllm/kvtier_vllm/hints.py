"""What requests say of themselves: `kv_transfer_params={"kvtier": {...}}`."""

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


def number(text: str) -> int:
    """64 bits that stand for a text, which a client may have written: also half a character."""
    return int.from_bytes(hashlib.blake2b(
        text.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def moment(seconds: Optional[float]) -> int:
    """When that is, counted from now, by the clock of the policies; 0: not said."""
    return 0 if seconds is None else time.monotonic_ns() + int(seconds * 1e9)


@dataclass(frozen=True)
class Told:
    """A request's own words."""

    tenant: int = 0
    priority: Optional[int] = None
    #: Requests of one conversation say the same.
    session: str = ""
    #: Why it will have stopped, and when its KV is wanted again.
    stop: int = kvtier.STOP_UNKNOWN
    next_use_s: Optional[float] = None
    done: bool = False

    @property
    def has_future(self) -> bool:
        """Whether it says something of what is to come."""
        return self.done or self.next_use_s is not None or self.stop != kvtier.STOP_UNKNOWN


NOTHING = Told()


def take(params: Optional[Mapping[str, Any]]) -> Told:
    """What a request says. Nonsense is passed over: a client must not end the engine."""
    said = (params or {}).get("kvtier")
    if said is None:
        return NOTHING
    try:
        priority, use = said.get("priority"), said.get("next_use_s")
        told = Told(int(said.get("tenant", 0)), None if priority is None else int(priority),
                    str(said.get("session", "")), STOPS[str(said.get("stop", ""))],
                    None if use is None else float(use), flag(said, "done", False))
        if not 0 <= told.tenant < 1 << 32 or not 0 <= (told.priority or 0) < 256:
            raise ValueError("tenant and priority out of range")
        if told.next_use_s is not None and not 0 <= told.next_use_s < 1e9:
            raise ValueError("next_use_s out of range")
        return told
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError,
            kvtier.InvalidError) as error:
        logger.warning("kvtier hints of a request are passed over: %r: %s", said, str(error))
        return NOTHING


def of(context: Any) -> Told:
    """Those of a `ReqContext`, read once a request."""
    told = context.get_state(Told)
    if not isinstance(told, Told):
        told = take(context.kv_transfer_params)
        context.set_state(told)
    return told
