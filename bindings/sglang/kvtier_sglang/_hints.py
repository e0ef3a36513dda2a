"""What is known of the future of pages, as policies are told it."""

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
class Told:
    """Why the request that used pages stopped, and when they are wanted again."""

    stop: int = kvtier.STOP_UNKNOWN
    next_use_s: Optional[float] = None
    done: bool = False

    @classmethod
    def of(cls, stop: Any = "", next_use_s: Any = None, done: Any = False) -> "Told":
        """From words; nonsense is refused."""
        if not isinstance(stop, str) or stop not in STOPS:
            raise invalid(f"stop {stop!r} is none of {', '.join(filter(None, STOPS))}")
        try:
            seconds = None if next_use_s is None else float(next_use_s)
        except (TypeError, ValueError) as error:
            raise invalid(f"next_use_s {next_use_s!r} is no number") from error
        except OverflowError as error:  # as JSON may have it, of any number of digits
            raise invalid("next_use_s is out of range") from error
        if seconds is not None and not 0 <= seconds < 1e9:
            raise invalid(f"next_use_s {next_use_s!r} is out of range")
        if not isinstance(done, bool) and done is not None:  # the text "false" would count as true
            raise invalid(f"done {done!r}: true or false, without quotes")
        return cls(STOPS[stop], seconds, bool(done))

    def tell(self, spaces: Iterable[kvtier.Blocks], names: Sequence[bytes]) -> None:
        """One call a pool."""
        ready = kvtier.Names(names)
        # The policies' clock: what is said counts from now.
        use = 0 if self.next_use_s is None else time.monotonic_ns() + int(self.next_use_s * 1e9)
        for blocks in spaces:
            blocks.hint(ready, stop=self.stop, next_use_ns=use, done=self.done)


def take(extra_info: Any) -> Optional[Told]:
    """What a call's `HiCacheStorageExtraInfo` says, if anything. Nonsense is passed over: it
    must not end a transfer."""
    said = (getattr(extra_info, "extra_info", None) or {}).get("kvtier")
    if said is None:
        return None
    try:
        if not isinstance(said, Mapping):
            raise invalid(f"{said!r} is no mapping")
        told = Told.of(said.get("stop", ""), said.get("next_use_s"), said.get("done", False))
        return None if told == Told() else told
    except kvtier.Error as error:
        logger.warning("hints of a call are passed over: %s", error)
        return None
