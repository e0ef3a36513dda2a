"""Hints about the next use of pages (`kvtier.hints`), which policies take into account."""

from __future__ import annotations

import logging
from typing import Any, Iterable, Optional, Sequence

import kvtier
from kvtier.hints import NONE, Hints, Malformed, clock_ns, fields
from kvtier.hints import parse as _parse

from ._config import invalid

logger = logging.getLogger("kvtier_sglang")


def of(**given: Any) -> Hints:
    """Reads the values of a hint. Raises an error for invalid ones."""
    try:
        return fields(given, lambda text: None)
    except Malformed as error:
        raise invalid(str(error)) from error


def send(hints: Hints, pools: Iterable[kvtier.Blocks], names: Sequence[bytes]) -> None:
    """Passes the hints about some pages on to the store, with one or two calls per pool."""
    ready = kvtier.Names(names)
    # The policies' clock; `next_use_s` counts from now.
    next_use_ns = clock_ns(hints.next_use_s)
    for blocks in pools:
        if hints.stop or hints.done or next_use_ns:
            blocks.hint(ready, stop=hints.stop, next_use_ns=next_use_ns, done=hints.done)
        if hints.keep_s is not None:
            blocks.pin(ready, priority=1 if hints.priority is None else hints.priority,
                       timeout=hints.keep_s)


def parse(extra_info: Any) -> Optional[Hints]:
    """The hints in a call's `HiCacheStorageExtraInfo`, if any. Malformed hints are ignored with a
    warning, because they must not fail the transfer."""
    hints = _parse(getattr(extra_info, "extra_info", None), logger)
    return None if hints == NONE else hints
