"""The linker's interface, and the counter that the forward pass waits on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future

from sglang.srt.utils import get_device_module


class LayerWiseLoadCounter:
    def __init__(self, num_layers, on_layer_ready=None):
        self.num_layers, self.producer_index, self.consumer_index = num_layers, -1, -1
        self.futures = {}

    def update_producer(self):
        self.producer_index += 1
        self.futures[self.producer_index] = [Future() for _ in range(self.num_layers)]
        return self.producer_index

    def set_consumer(self, index):
        self.consumer_index = index

    def complete(self, index, layer):
        self.futures[index][layer].set_result(None)

    def fail(self, index, error):
        for one in self.futures.get(index, ()):
            if not one.done():
                one.set_exception(error)

    def wait_until(self, threshold):
        if self.consumer_index in self.futures:
            self.futures[self.consumer_index][threshold].exception()

    def finish(self, index):
        landed = all([one.exception() is None for one in self.futures.get(index, ())])
        self.futures.pop(index, None)
        return landed

    def reset(self):
        self.producer_index = self.consumer_index = -1
        self.futures.clear()


class UnifiedCacheLinker(ABC):
    layer_done_counter: object
    pools: dict
    forward_stream = None

    def record_offload_ready(self):
        event = get_device_module().Event()
        event.record()
        return [event]

    @abstractmethod
    def lookup(self, rid, transfers):
        ...

    @abstractmethod
    def load(self, rid, transfers):
        ...

    @abstractmethod
    def start_layer_wise_loading(self):
        ...

    @abstractmethod
    def finish_layer_wise_loading(self, counter_index):
        ...

    @abstractmethod
    def cancel_queued_load(self, rid):
        ...

    @abstractmethod
    def offload(self, transfers, session_id=None):
        ...

    @abstractmethod
    def num_completed_offloads(self):
        ...

    @abstractmethod
    def pop_completed_offload(self):
        ...

    @abstractmethod
    def reset(self):
        ...

    @abstractmethod
    def close(self):
        ...
