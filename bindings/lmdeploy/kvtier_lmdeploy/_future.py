"""What is known of a request's future when it has ended."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional, Tuple, Union

import kvtier

STOPS: Dict[str, int] = {"end_turn": kvtier.STOP_END_TURN, "length": kvtier.STOP_LENGTH,
                         "cancelled": kvtier.STOP_CANCELLED}

#: Of a stop: the seconds after which KV is wanted again, or that it never is.
Lifetimes = Mapping[str, Union[int, float, str]]
NEVER = "never"


def stop_of(request: Any) -> str:
    """Why a request ended, as its tokens say: the engine's seam does not. One that neither said
    a stop word nor came to its length was ended from outside."""
    if not request.num_new_tokens:
        return "cancelled" if request.sampling_param.max_new_tokens else "length"
    if int(request.generated_ids[-1]) in (request.sampling_param.stop_words or ()):
        return "end_turn"
    full = request.num_new_tokens >= request.sampling_param.max_new_tokens
    return "length" if full else "cancelled"


def expected(stop: str, lifetimes: Lifetimes) -> Tuple[Optional[float], bool]:
    """In how many seconds KV of such a request is wanted again, and whether it never is."""
    said = lifetimes.get(stop)
    if said is None or isinstance(said, str):
        return None, said == NEVER
    return float(said), False
