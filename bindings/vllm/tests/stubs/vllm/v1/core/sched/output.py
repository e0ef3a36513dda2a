"""What the scheduler passes to a connector: the attributes that it reads."""

from typing import Any


class NewRequestData:
    req_id: Any
    block_ids: Any
    num_computed_tokens: Any


class CachedRequestData:
    req_ids: Any
    resumed_req_ids: Any
    new_block_ids: Any
    num_computed_tokens: Any


class SchedulerOutput:
    scheduled_new_reqs: Any
    scheduled_cached_reqs: Any
    num_scheduled_tokens: Any
