"""A request: the attributes that a connector reads."""

from typing import Any


class RequestStatus:
    FINISHED_STOPPED: Any
    FINISHED_LENGTH_CAPPED: Any
    FINISHED_ABORTED: Any


class Request:
    request_id: Any
    num_tokens: Any
    prompt_embeds: Any
    all_token_ids: Any
    num_prompt_tokens: Any
    lora_request: Any
    mm_features: Any
    cache_salt: Any
    kv_transfer_params: Any
    status: Any
