"""KV in device memory: the store's device transfers it directly if it can, else torch stages it."""

from __future__ import annotations

import ctypes
from typing import Any, Iterator, List, Optional, Tuple

import pytest
from cache_models import ids, make, no_leaked_handles, step  # noqa: F401

import kvtier
import torch
from kvtier_transformers import Tiers, _planes, cache, cache_layers, cache_offload
from transformers import DynamicCache


class Simulated(_planes.Gpu):
    """A simulated GPU. torch can access its memory directly, so its events are ready at once."""

    def __init__(self, device: kvtier.Device) -> None:
        super().__init__(device, 0)
        self.memories: List[kvtier.DeviceMemory] = []
        self.events = self.staged = 0

    def tensor(self, shape: Tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = dtype.itemsize * torch.Size(shape).numel()
        memory = self.device.alloc(count)
        self.memories.append(memory)
        raw = (ctypes.c_uint8 * count).from_address(memory.address)
        return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape)

    def _memory(self, tensor: torch.Tensor) -> Optional[kvtier.DeviceMemory]:
        return next((one for one in self.memories if one.address == tensor.data_ptr()), None)

    def reaches(self, buffer: torch.Tensor) -> bool:
        self.staged += self._memory(buffer) is None
        return self._memory(buffer) is not None

    def source(self, flat: torch.Tensor) -> Any:
        return self._memory(flat)

    def record_event(self) -> kvtier.DeviceEvent:
        self.events += 1
        event = self.device.create_event()
        event.signal()
        return event


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tuple[Simulated, kvtier.Store]]:
    """Allocates all buffers on the simulated device, and treats no memory as host memory."""
    with kvtier.Runtime() as runtime, \
            kvtier.Device(runtime, "simulated", memory_bytes=1 << 28, latency_ns=20_000) as device:
        gpu = Simulated(device)

        def empty(like: torch.Tensor, slots: int) -> torch.Tensor:
            return gpu.tensor((*like.shape[:2], slots, like.shape[3]), like.dtype)

        def blank(shape: Any, batch: int, slots: int, zero: bool = False) -> Any:
            return tuple(gpu.tensor((batch, heads, slots, dim), shape.dtype).zero_() for heads, dim
                         in ((shape.k_heads, shape.k_dim), (shape.v_heads, shape.v_dim)))

        monkeypatch.setattr(_planes, "HOST", ())
        monkeypatch.setattr(cache_layers, "_SMALL_BYTES", 0)
        monkeypatch.setattr(cache_layers, "empty", empty)
        for module in (cache, cache_offload):
            monkeypatch.setattr(module, "blank", blank)
        with kvtier.Store(runtime, "store(host=32MiB)", device=device) as store:
            yield gpu, store
        for memory in gpu.memories:
            memory.close()


@pytest.mark.parametrize("mode", [None, 2])
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3"])
def test_device_memory_is_transferred_without_staging(
        name: str, mode: Optional[int], gpu: Tuple[Simulated, kvtier.Store]) -> None:
    model, tokens, (device, store) = make(name, num_hidden_layers=4), ids(84, rows=2), gpu
    with Tiers(model, store) as tiers:
        tiers.gpu = device
        first, stock = tiers.cache(resident_layers=mode), DynamicCache(config=model.config)
        for cache_of in (first, stock):
            step(model, cache_of, tokens[:, :40])
        for at in range(40, 64):
            one = tokens[:, at:at + 1]
            assert torch.equal(step(model, first, one), step(model, stock, one))
        assert first.save() == [64, 64]
        again = tiers.cache(resident_layers=mode)
        assert again.resume(tokens) == 64
        for at in range(64, 84, 4):
            piece = tokens[:, at:at + 4]
            assert torch.equal(step(model, again, piece), step(model, stock, piece))
        assert again.save() == [80, 80] and again.unknown == ""
        assert device.events > 0 and device.staged == 0


def test_memory_that_the_device_cannot_access_is_staged(
        gpu: Tuple[Simulated, kvtier.Store], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_layers, "empty", _planes.empty)  # host memory
    model, tokens, (device, store) = make("llama"), ids(60), gpu
    with Tiers(model, store) as tiers:
        tiers.gpu = device
        step(model, first := tiers.cache(), tokens)
        assert first.save() == [48] and device.staged > 0 and device.events == 0
        again = tiers.cache()
        assert again.resume(tokens) == 48 and device.events > 0
        for a, b in zip(again.layers, first.layers):
            assert torch.equal(a.keys, b.keys[:, :, :48])


def test_device_accesses_memory_of_its_own_gpu_only() -> None:
    class OnDevice:
        def __init__(self, name: str) -> None:
            self.device = torch.device(name)

    one: Any = _planes.Gpu(None, 1)  # type: ignore[arg-type]
    assert [one.reaches(OnDevice(name)) for name in ("cuda:1", "cuda:0", "cuda", "cpu", "xpu:1")
            ] == [True, False, False, False, False]
    assert _planes.Gpu(None, 0).reaches(OnDevice("cuda"))  # type: ignore[arg-type]


def test_gpu_option_needs_a_cuda_device() -> None:
    model = make("llama")
    if not torch.cuda.is_available():
        with pytest.raises(kvtier.Error):
            Tiers(model, gpu=0)
    with kvtier.Runtime() as runtime, kvtier.Device(runtime) as host, \
            kvtier.Store(runtime, "store(host=1MiB)") as plain, \
            kvtier.Store(runtime, "store(host=1MiB)", device=host) as other:
        for store in (plain, other):
            with pytest.raises(kvtier.InvalidError, match="CUDA device"):
                Tiers(model, store, gpu=0)
