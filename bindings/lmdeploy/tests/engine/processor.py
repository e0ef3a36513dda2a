"""A processor as lmdeploy's device: what its PyTorch engine lacks there.

lmdeploy expects other devices to stand in for `torch.cuda`, as its own integrations do. Three
things are replaced:

- `torch.cuda`: streams and events do nothing, and tensors for the device "cuda" are in host memory.
- the operators: lmdeploy's own default ones, which are written with torch. Paged attention, for
  which it has GPU kernels only, is below.
- the check of the environment, which asks for a GPU.

Everything else is lmdeploy's: engine, request manager, scheduler, block trie, input maker, model
agent, cache engine, models, sampling.
"""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace
from typing import Any, Iterator

os.environ.setdefault("LMDEPLOY_ENABLE_CHECK_ENV", "0")
os.environ.setdefault("LMDEPLOY_SKIP_WARMUP", "1")

import torch  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402


class _Work:
    """A stream or an event."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def nothing(self, *_: Any, **__: Any) -> None:
        """The work has been done already."""

    wait = wait_event = wait_stream = record = synchronize = nothing

    def query(self) -> bool:
        """Whether the work is done."""
        return True

    def record_event(self, event: Any = None) -> Any:
        """An event, which is past."""
        return event or _Work()


_CURRENT = _Work()


@contextlib.contextmanager
def _stream(stream: Any) -> Iterator[None]:
    yield


def _here(value: Any) -> Any:
    """A device that is named "cuda" becomes the processor."""
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value


class HostTensors(TorchFunctionMode):
    """Makes tensors for the device "cuda" in host memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        kwargs = {
            name: _here(value) for name, value in (kwargs or {}).items() if name != "pin_memory"
        }
        return func(*(_here(value) for value in args), **kwargs)


def _paged_attention() -> Any:
    """The class of the attention."""
    from lmdeploy.pytorch.backends.attention import AttentionImpl

    class PagedAttention(AttentionImpl):  # type: ignore[misc]
        """Writes K and V of new tokens into the blocks of the cache, and attends to all of a
        request's blocks."""

        def forward(
            self,
            query: Any,
            key: Any,
            value: Any,
            k_cache: Any,
            v_cache: Any,
            attn_metadata: Any,
            **_: Any,
        ) -> Any:
            """See AttentionImpl."""
            size, outputs, start = k_cache.size(1), [], 0
            lengths = zip(attn_metadata.q_seqlens.tolist(), attn_metadata.kv_seqlens.tolist())
            for at, (new, all_) in enumerate(lengths):
                blocks = attn_metadata.block_offsets[at].long()
                slots = torch.arange(all_)
                blocks, slots = blocks[slots // size], slots % size
                k_cache[blocks[all_ - new :], slots[all_ - new :]] = key[start : start + new]
                v_cache[blocks[all_ - new :], slots[all_ - new :]] = value[start : start + new]
                seen = torch.ones(new, all_, dtype=torch.bool).tril(all_ - new)
                out = torch.nn.functional.scaled_dot_product_attention(
                    query[start : start + new].transpose(0, 1)[None],
                    k_cache[blocks, slots].transpose(0, 1)[None],
                    v_cache[blocks, slots].transpose(0, 1)[None],
                    attn_mask=seen,
                    scale=self.scale,
                    enable_gqa=True,
                )
                outputs.append(out[0].transpose(0, 1))
                start += new
            return torch.cat(outputs)

    return PagedAttention


def _backend() -> Any:
    """lmdeploy's default operators, with the attention above."""
    from lmdeploy.pytorch.backends.attention import AttentionMetadata, PagedAttentionBuildSpec
    from lmdeploy.pytorch.backends.default import DefaultOpsBackend

    attention = _paged_attention()

    class ProcessorBackend(DefaultOpsBackend):  # type: ignore[misc]
        """The operators of a processor."""

        @classmethod
        def build_op(cls, spec: Any, *, enable_deterministic: bool = False) -> Any:
            """See OpsBackend."""
            if isinstance(spec, PagedAttentionBuildSpec):
                return attention(
                    spec.num_heads, spec.head_dim, spec.scale, spec.num_kv_heads, spec.v_head_dim
                )
            return super().build_op(spec, enable_deterministic=enable_deterministic)

        @staticmethod
        def get_attention_metadata_cls() -> Any:
            """See OpsBackend."""
            return AttentionMetadata

        @classmethod
        def update_step_context(cls, step_context: Any) -> Any:
            """See OpsBackend."""
            step_context.attn_metadata = AttentionMetadata(
                is_decoding=step_context.is_decoding,
                block_offsets=step_context.block_offsets,
                q_start_loc=step_context.q_start_loc,
                q_seqlens=step_context.q_seqlens,
                kv_seqlens=step_context.kv_seqlens,
            )
            return step_context

    return ProcessorBackend


def install() -> None:
    """Replaces the three things, in this process and this thread."""
    from lmdeploy.pytorch.backends import selector

    free = 4 << 30
    for name, value in {
        "Stream": _Work,
        "Event": _Work,
        "stream": _stream,
        "current_stream": lambda *_: _CURRENT,
        "default_stream": lambda *_: _CURRENT,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "set_device": lambda *_: None,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_properties": lambda *_: SimpleNamespace(major=8, minor=0, total_memory=free),
        "mem_get_info": lambda *_: (free, free),
        "is_available": lambda: False,
    }.items():
        setattr(torch.cuda, name, value)
    backend = _backend()
    selector._get_backend = lambda: backend
    HostTensors().__enter__()
