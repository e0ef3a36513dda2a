"""Hints that a request carries about itself in `kv_transfer_params` (`kvtier.hints`)."""

from __future__ import annotations

from typing import Any, Mapping, Optional

from kvtier.hints import NONE, Hints, ToolGaps, clock_ns, hash64
from kvtier.hints import parse as _parse

from .settings import logger

RequestHints = Hints

__all__ = ["NONE", "RequestHints", "ToolGaps", "clock_ns", "hash64", "of_request", "parse"]


def parse(params: Optional[Mapping[str, Any]]) -> RequestHints:
    """Reads the hints of a request. Malformed hints are ignored with a warning, because a client
    must not be able to end the engine."""
    return _parse(params, logger)


def of_request(context: Any) -> RequestHints:
    """The hints of a `ReqContext`, read once per request."""
    parsed = context.get_state(RequestHints)
    if not isinstance(parsed, RequestHints):
        parsed = parse(context.kv_transfer_params)
        context.set_state(parsed)
    return parsed
