"""Hints about the next use of pages, which policies take into account."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any, Iterable, Mapping, Optional, Sequence

import kvtier

from ._config import invalid

logger = logging.getLogger("kvtier_sglang")

STOPS = {"": kvtier.STOP_UNKNOWN, "tool_use": kvtier.STOP_TOOL_USE,
         "end_turn": kvtier.STOP_END_TURN, "length": kvtier.STOP_LENGTH,
         "cancelled": kvtier.STOP_CANCELLED}


@dataclass(frozen=True)
class Hints:
    """Why the request that used pages stopped, and when the pages are used again."""

    stop: int = kvtier.STOP_UNKNOWN
    next_use_s: Optional[float] = None
    done: bool = False

    @classmethod
    def of(cls, stop: Any = "", next_use_s: Any = None, done: Any = False) -> "Hints":
        """Reads the values of a hint. Raises an error for invalid ones."""
        if not isinstance(stop, str) or stop not in STOPS:
            raise invalid(f"stop {stop!r} is unknown: use one of {', '.join(filter(None, STOPS))}")
        try:
            seconds = None if next_use_s is None else float(next_use_s)
        except (TypeError, ValueError) as error:
            raise invalid(f"next_use_s {next_use_s!r} is no number: give seconds") from error
        except OverflowError as error:  # integers in JSON may have any number of digits
            raise invalid("next_use_s is too large: give seconds from 0 to 1e9") from error
        if seconds is not None and not 0 <= seconds < 1e9:
            raise invalid(f"next_use_s {next_use_s!r} is out of range: give seconds from 0 to 1e9")
        if not isinstance(done, bool) and done is not None:  # Python takes "false" as true
            raise invalid(f"done {done!r} is no boolean: give true or false, without quotes")
        return cls(STOPS[stop], seconds, bool(done))

    def send(self, pools: Iterable[kvtier.Blocks], names: Sequence[bytes]) -> None:
        """Passes the hint about some pages on to the store, with one call per pool."""
        ready = kvtier.Names(names)
        # The policies' clock; `next_use_s` counts from now.
        next_use_ns = 0
        if self.next_use_s is not None:
            next_use_ns = time.monotonic_ns() + int(self.next_use_s * 1e9)
        for blocks in pools:
            blocks.hint(ready, stop=self.stop, next_use_ns=next_use_ns, done=self.done)


def parse(extra_info: Any) -> Optional[Hints]:
    """The hints in a call's `HiCacheStorageExtraInfo`, if any. Malformed hints are ignored with a
    warning, because they must not fail the transfer."""
    given = (getattr(extra_info, "extra_info", None) or {}).get("kvtier")
    if given is None:
        return None
    try:
        if not isinstance(given, Mapping):
            raise invalid(f"the value {given!r} is no mapping")
        hints = Hints.of(given.get("stop", ""), given.get("next_use_s"), given.get("done", False))
        return None if hints == Hints() else hints
    except kvtier.Error as error:
        logger.warning("hints of a call are ignored: %s", error)
        return None
