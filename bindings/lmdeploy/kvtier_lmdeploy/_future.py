"""Predicts the next use of a request's KV from how the request ended."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional, Tuple, Union

import kvtier

STOPS: Dict[str, int] = {"end_turn": kvtier.STOP_END_TURN, "length": kvtier.STOP_LENGTH,
                         "cancelled": kvtier.STOP_CANCELLED}

#: Stop reason to seconds until the KV is used again, or to NEVER.
Lifetimes = Mapping[str, Union[int, float, str]]
NEVER = "never"


def stop_of(request: Any) -> str:
    """Returns why a request ended: a key of STOPS.

    The engine's interface does not pass the reason, so it is derived from the tokens. A request
    that reached neither a stop word nor its length limit was cancelled."""
    if not request.num_new_tokens:
        return "cancelled" if request.sampling_param.max_new_tokens else "length"
    if int(request.generated_ids[-1]) in (request.sampling_param.stop_words or ()):
        return "end_turn"
    full = request.num_new_tokens >= request.sampling_param.max_new_tokens
    return "length" if full else "cancelled"


def expected(stop: str, lifetimes: Lifetimes) -> Tuple[Optional[float], bool]:
    """Returns the seconds until KV of such a request is used again (None: unknown), and whether
    it is never used again."""
    lifetime = lifetimes.get(stop)
    if lifetime is None or isinstance(lifetime, str):
        return None, lifetime == NEVER
    return float(lifetime), False
