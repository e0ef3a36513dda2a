"""Shared fixtures and helpers of the cache tests."""

from __future__ import annotations

import gc
import time
from typing import Any, Iterator, List

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", minversion="5.22", reason="needs transformers 5.22 or newer")

import torch
from kvtier import _reaper
from tiny_models import MAKERS, ids, make

__all__ = ["MAKERS", "Counter", "ids", "make", "no_leaked_handles", "step"]


@pytest.fixture(autouse=True)
def no_leaked_handles() -> Iterator[None]:
    """Uses one thread, so that equal work gives equal bits, and checks for leaked handles."""
    torch.set_num_threads(1)
    yield
    end = time.monotonic() + 600.0
    while True:
        gc.collect()
        assert _reaper.flush(600.0)
        if not any(job.handle.value for job in list(_reaper._live.values())):
            return
        assert time.monotonic() < end, "a test leaked handles"
        time.sleep(0.01)


class Counter:
    """Records the number of tokens of each forward pass of a model."""

    def __init__(self, model: Any) -> None:
        self.passes: List[int] = []
        self._hook = model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, _model: Any, _args: Any, kwargs: Any) -> None:
        self.passes.append(kwargs["input_ids"].shape[1])

    def __enter__(self) -> "Counter":
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()


def step(model: Any, cache: Any, tokens: torch.Tensor, **more: Any) -> torch.Tensor:
    """Runs a forward pass and returns its logits."""
    with torch.no_grad():
        return model(input_ids=tokens, past_key_values=cache, **more).logits
