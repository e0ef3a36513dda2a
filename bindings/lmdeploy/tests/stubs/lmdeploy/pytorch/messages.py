"""Stand-in for the requests of lmdeploy 0.18.0: what the connector reads."""

from typing import Any


class SchedulerSequence:
    seq_id: int
    session_id: int
    adapter_name: Any
    all_ids: Any
    generated_ids: Any
    num_history_ids: int
    num_new_tokens: int
    num_valid_ids: int
    sampling_param: Any
    history_multimodals: Any
    history_embeddings: Any
    prefix_cache: Any

    def clamp_prefix_cache_match_step(self, step: int) -> int:
        return step
