"""Tensors without the buffer protocol: which are accepted without a copy, and which rejected."""

from __future__ import annotations

import array
import gc
import weakref
from typing import Any, Callable, List, Tuple

import kvtier
import numpy as np
import pytest
from gate import HANG_S
from kvtier import Group, Identity, View, _tensor, kernels
from kvtier._pybuffer import described
from kvtier._view import export

TOKENS, HEADS, DIM = 8, 2, 8
RUN = DIM * 2


class FakeDevice:
    """A stand-in for torch.device."""

    def __init__(self, name: str) -> None:
        self.name, self.type = name, name.split(":")[0]

    def __str__(self) -> str:
        return self.name


class Tensor:
    """The part of torch.Tensor that kvtier uses, without torch."""

    def __init__(self, address: int, shape: Tuple[int, ...], dtype: str = "bfloat16",
                 itemsize: int = 2, device: str = "cpu", kept: Any = None) -> None:
        self._address, self.shape, self._itemsize, self._kept = address, shape, itemsize, kept
        self.dtype, self.device, self.layout = f"torch.{dtype}", FakeDevice(device), "torch.strided"

    @classmethod
    def of(cls, numbers: Any, dtype: str) -> "Tensor":
        return cls(numbers.ctypes.data, numbers.shape, dtype, numbers.itemsize, kept=numbers)

    def data_ptr(self) -> int:
        return self._address

    def element_size(self) -> int:
        return self._itemsize

    def stride(self) -> List[int]:
        return [int(np.prod(self.shape[at + 1:])) for at in range(len(self.shape))]


class OnCuda:
    """The interface of CuPy and numba arrays."""

    def __init__(self, address: int, shape: Tuple[int, ...], typestr: str) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": shape,
                                         "typestr": typestr, "strides": None, "version": 3}


class OnlyDlpack:
    """The interface of JAX arrays."""

    def __init__(self, numbers: Any) -> None:
        self.numbers = numbers

    def __dlpack__(self) -> Any:
        return self.numbers.__dlpack__()


def namespace_of(store: kvtier.Store, dtype: str = "bf16", run: int = RUN) -> kvtier.Namespace:
    group = Group([0], HEADS * run, HEADS * run, dtype, HEADS)
    return store.namespace(Identity(model=dtype.encode()), chunk_tokens=4, groups=[group])


def put_and_get(store: kvtier.Store, put: Any, get: Any, run: int, dtype: str) -> None:
    with namespace_of(store, dtype, run) as namespace, namespace.session() as session:
        session.append(list(range(TOKENS)))
        session.put([View(put[0], run, HEADS)], [View(put[1], run, HEADS)]).result(HANG_S)
        session.get([View(get[0], run, HEADS)], [View(get[1], run, HEADS)]).result(HANG_S)


@pytest.mark.parametrize("name, size", [("bfloat16", 2), ("float8_e4m3fn", 1), ("float32", 4)])
def test_tensors_are_transferred_without_a_copy(runtime: kvtier.Runtime, name: str,
                                                size: int) -> None:
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[size]
    numbers = np.random.default_rng(3).integers(0, 255, (2, TOKENS, HEADS, DIM)).astype(kind)
    back = np.zeros_like(numbers)
    with kvtier.Store(runtime, "store(host=1MiB)") as store:
        put_and_get(store, [Tensor.of(one, name) for one in numbers],
                       [Tensor.of(one, name) for one in back], DIM * size,
                       _tensor._NAMES[name])
    assert np.array_equal(numbers, back)


def test_torch_tensors_are_accepted_without_conversion(runtime: kvtier.Runtime) -> None:
    torch = pytest.importorskip("torch", reason="needs torch", exc_type=ImportError)
    with kvtier.Store(runtime, "store(host=1MiB)") as store:
        for dtype, name in ((torch.bfloat16, "bf16"), (torch.float8_e4m3fn, "fp8_e4m3"),
                            (torch.float8_e5m2, "fp8_e5m2"), (torch.float16, "f16")):
            full = torch.randn(2, TOKENS, HEADS, DIM).to(dtype)
            back = torch.zeros_like(full)
            put_and_get(store, full, back, DIM * full.element_size(), name)
            assert torch.equal(full.view(torch.uint8), back.view(torch.uint8))
    q, k = torch.randn(3, 4, DIM).bfloat16(), torch.randn(3, HEADS, DIM).bfloat16()
    bits = [one.view(torch.int16).numpy().view(np.uint16) for one in (q, k)]
    ours = kernels.prefill(q, k, k)
    assert np.array_equal(np.asarray(ours.out),
                          np.asarray(kernels.prefill(bits[0], bits[1], bits[1]).out))
    # Every second token of a larger tensor, with results in a tensor.
    wide = torch.zeros(6, HEADS, DIM, dtype=torch.bfloat16)
    wide[::2] = k
    out = torch.empty(3, 4, DIM)
    kernels.prefill(q, wide[::2], wide[::2], out=out)
    assert np.array_equal(out.numpy(), np.asarray(ours.out))
    with pytest.raises(kvtier.InvalidError, match=r"\.contiguous\(\)"):
        kvtier.checksum(wide[::2])
    with pytest.raises(kvtier.InvalidError, match="i64.*must have type u64"):
        kvtier.Policy("lru", max_objects=4).touch(torch.arange(3))
    assert kvtier.checksum(k) == kvtier.checksum(bits[1])
    with pytest.raises(kvtier.InvalidError, match="meta"):
        kvtier.checksum(torch.empty(3, device="meta"))
    with pytest.raises(TypeError):
        kvtier.checksum(torch.eye(3).to_sparse())
    wrapped = runtime.wrap(k)
    assert runtime.submit(kvtier.Work.checksum(wrapped)).result(HANG_S).value == kvtier.checksum(k)


def test_a_wrapped_tensor_is_held_until_its_buffer_is_freed(runtime: kvtier.Runtime) -> None:
    tensor = Tensor.of(np.ones(64, np.uint8), "uint8")
    reference = weakref.ref(tensor)
    with runtime.wrap(tensor) as buffer:
        del tensor
        gc.collect()
        assert reference() is not None and bytes(buffer.view()) == b"\1" * 64
    del buffer
    gc.collect()
    assert reference() is None


def test_device_tensors_need_a_store_with_a_device(runtime: kvtier.Runtime) -> None:
    with kvtier.Device(runtime, "simulated", memory_bytes=1 << 20) as device:
        with kvtier.Store(runtime, "store(host=1MiB)", device=device) as store:
            with device.alloc(1 << 12) as memory:
                plane = TOKENS * HEADS * RUN
                at = [memory.address + i * plane for i in range(4)]
                shape, bits = (TOKENS, HEADS, DIM), np.arange(2 * plane, dtype=np.uint8)
                with device.upload(bits, memory) as event:
                    event.wait(HANG_S)
                put_and_get(store, [Tensor(one, shape, device="cuda:0") for one in at[:2]],
                               [OnCuda(one, shape, "<f2") for one in at[2:]], RUN, "bf16")
                back = np.zeros_like(bits)
                with device.download(memory, back, offset=2 * plane) as event:
                    event.wait(HANG_S)
                assert np.array_equal(bits, back)
    cuda = Tensor(1 << 40, (TOKENS, HEADS, DIM), device="cuda:0")
    with kvtier.Store(runtime, "store(host=1MiB)") as store, namespace_of(store) as namespace:
        with namespace.session() as session, pytest.raises(kvtier.UnavailableError, match="device"):
            session.append(list(range(TOKENS)))
            session.put([View(cuda, RUN, HEADS)], [View(cuda, RUN, HEADS)])
    for use in (lambda: kvtier.checksum(cuda), lambda: runtime.wrap(cuda),
                lambda: kernels.prefill(cuda, cuda, cuda),
                lambda: kvtier.checksum(OnCuda(1 << 40, (4,), "<f4"))):
        with pytest.raises(kvtier.InvalidError, match=r"\.cpu\(\)"):
            use()
    with pytest.raises(kvtier.InvalidError, match="xpu:1"):
        kvtier.checksum(Tensor(1, (4,), device="xpu:1"))


def test_dlpack_memory_is_read_only() -> None:
    numbers = np.arange(12, dtype=np.uint64).reshape(3, 4)
    assert kvtier.checksum(OnlyDlpack(numbers)) == kvtier.checksum(numbers)
    with pytest.raises(kvtier.InvalidError, match="gaps"):
        kvtier.checksum(OnlyDlpack(numbers[:, ::2]))
    with kvtier.Policy("lru", max_objects=16) as policy:
        policy.insert([1, 2])
        assert policy.touch(OnlyDlpack(numbers[0])) == 2
        with pytest.raises(kvtier.InvalidError, match="u64"):
            policy.touch(OnlyDlpack(numbers[0].astype(np.int32)))
    with kvtier.Runtime(workers=1) as runtime, pytest.raises(kvtier.InvalidError, match="written"):
        runtime.wrap(OnlyDlpack(numbers))


def test_numpy_bf16_arrays_are_accepted() -> None:
    kinds = pytest.importorskip("ml_dtypes", reason="needs ml_dtypes")
    keys = np.random.default_rng(2).standard_normal((4, HEADS, DIM)).astype(kinds.bfloat16)
    query = keys[:1]
    bits = keys.view(np.uint16)
    assert kvtier.checksum(keys) == kvtier.checksum(bits)
    assert np.array_equal(np.asarray(kernels.prefill(query, keys, keys).out),
                          np.asarray(kernels.prefill(bits[:1], bits, bits).out))


READ_ONLY = np.arange(4, dtype=np.uint8)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize("use, words", [
    (lambda r: r.wrap(READ_ONLY), "read-only"),
    (lambda r: r.wrap(b"bytes"), "writable"),
    (lambda r: r.wrap(np.zeros((4, 4))[:, ::2]), "contiguous"),
    (lambda r: kvtier.checksum(np.zeros((4, 4))[:, ::2]), "ascontiguousarray"),
    (lambda r: kvtier.checksum(memoryview(bytes(8))[::2]), "contiguous"),
    (lambda r: kernels.prefill(np.zeros((1, 2, 8)), np.zeros((1, 2, 8)), np.zeros((1, 2, 8))),
     "f64"),
])
def test_unusable_memory_raises_invalid_error(runtime: kvtier.Runtime,
                                              use: Callable[[kvtier.Runtime], Any],
                                              words: str) -> None:
    with pytest.raises(kvtier.InvalidError, match=words) as caught:
        use(runtime)
    assert caught.value.name == "KVT_E_INVALID"


def test_unusable_memory_raises_buffer_error() -> None:
    with kvtier.Runtime(workers=1) as runtime, pytest.raises(BufferError) as caught:
        runtime.wrap(b"read-only")
    assert isinstance(caught.value, kvtier.BufferError)
    with pytest.raises(TypeError):
        kvtier.checksum("text")


@pytest.mark.parametrize("make", [
    lambda n: n, lambda n: array.array("Q", n.tolist()), lambda n: n.tolist(), lambda n: tuple(n),
    lambda n: Tensor.of(n, "uint64"), OnlyDlpack, lambda n: memoryview(n), lambda n: n[::-1][::-1],
    lambda n: np.repeat(n, 2)[::2]])
def test_id_columns_may_be_lists_arrays_or_tensors(make: Callable[[Any], Any]) -> None:
    with kvtier.Policy("lru", max_objects=16) as policy:
        policy.insert([1, 2, 3])
        ids = make(np.array([1, 9, 3], np.uint64))
        assert policy.touch(ids) == 2 and policy.lookup(ids) == 1
        if isinstance(ids, array.array):
            ids.append(4)  # the array is released after a call, also after an error
            with pytest.raises(kvtier.InvalidError) as caught:
                policy.touch(ids, kvtier.PolicyContext(priority=99))
            ids.append(5)
            assert caught.value.status
    with pytest.raises(kvtier.ClosedError):
        policy.touch(ids)


class Interface:
    """An object with the array interface of numpy."""

    def __init__(self, array: np.ndarray, **more: Any) -> None:
        self.array, self.more = array, more

    @property
    def __array_interface__(self) -> Any:
        return {**self.array.__array_interface__, **self.more}


def test_lazy_masked_and_big_endian_tensors_are_rejected() -> None:
    assert described(Interface(np.ones(4, "<f4"))).dtype == "f32"
    for other in (Interface(np.ones(4, ">f4")),
                  Interface(np.ones(4, "<f4"), mask=Interface(np.ones(4, "?")))):
        with pytest.raises(TypeError):
            described(other)
    torch = pytest.importorskip("torch", reason="needs torch")
    ones = torch.ones(4)
    for lazy in (torch._neg_view(ones), torch.ones(4, dtype=torch.complex64).conj()):
        with pytest.raises(kvtier.BufferError, match="resolve"):
            kvtier.checksum(lazy)
        kvtier.checksum(lazy.resolve_neg().resolve_conj())
    with pytest.raises(TypeError):
        kvtier.checksum(ones.untyped_storage())


def test_a_tensor_with_freed_storage_is_rejected() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    freed = torch.ones(64)
    freed.untyped_storage().resize_(0)
    with pytest.raises(kvtier.BufferError, match="no memory"):
        export(freed, False, [])
