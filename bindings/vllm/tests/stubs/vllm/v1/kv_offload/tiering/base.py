"""Tiers below the CPU tier."""

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

TIER_LABEL = "tier"


@dataclass
class TransferJob:
    job_id: int
    keys: Any
    chunk_ids: Any
    is_promotion: bool
    req_context: Any
    submit_time: float = field(default_factory=time.monotonic)


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: Any = None
    transfer_bytes: Any = None


class SecondaryTierManager(ABC):
    medium = None
    tolerates_off_thread_polling = False

    def __init__(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector=None):
        self._offloading_spec, self._primary_kv_view = offloading_spec, primary_kv_view
        self._block_size_bytes = primary_kv_view.strides[0]
        self.tier_type, self.locality = tier_type, None
        self._bp_detector = backpressure_detector

    @property
    def block_size_bytes(self):
        return self._block_size_bytes

    @abstractmethod
    def lookup(self, key, req_context): ...

    @abstractmethod
    def submit_store(self, job_metadata): ...

    @abstractmethod
    def submit_load(self, job_metadata): ...

    @abstractmethod
    def get_finished_jobs(self): ...

    def has_pending_work(self):
        return False

    def take_events(self):
        return ()

    def touch(self, keys, req_context):
        return

    @abstractmethod
    def on_new_request(self, req_context): ...

    def on_request_finished(self, req_context):
        return

    def on_schedule_end(self, context):
        return

    @abstractmethod
    def drain_jobs(self): ...

    def shutdown(self):
        return

    @classmethod
    def build_metric_definitions(cls, extra_config):
        return {}

    def get_stats(self):
        return None
