"""Layer-wise offload: buffers contain the stored KV, and views do not copy it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any, Iterator, Tuple

import kvtier
import numpy as np
import pytest
from gate import HANG_S
from kvtier import Attention, SparseContext, Group, Identity, Offload, View

LAYERS, BLOCK, HEADS, QUERY_HEADS, DIM = 3, 16, 2, 4, 8
SHAPE = Attention(LAYERS, QUERY_HEADS, HEADS, DIM, DIM, BLOCK, 512)
RUN = DIM * 4
QUEST = "quest(budget=48,page=16,dense=1)"


class Model:
    """An engine's session, and the KV that it has computed."""

    def __init__(self, store: kvtier.Store, **opts: Any) -> None:
        group = Group([0, 1, 2], HEADS * RUN, HEADS * RUN, "f32")
        self.namespace = store.namespace(Identity(model=b"m"), chunk_tokens=BLOCK, groups=[group])
        self.session = self.namespace.session()
        self.offload = Offload(self.session, SHAPE, "f32", buffers=2, buffer_tokens=256, **opts)
        numbers = np.random.default_rng(5)
        self.kv = numbers.standard_normal((2, LAYERS, 512, HEADS, DIM)).astype(np.float32)
        self.tokens = 0

    def append(self, count: int, first: int = 0) -> None:
        self.session.append(list(range(first + self.tokens, first + self.tokens + count)))

    def put(self, layer: int, count: int) -> None:
        at = self.tokens * HEADS * RUN
        k, v = (View(self.kv[i, layer], RUN, HEADS, offset=at) for i in range(2))
        op = self.offload.put(layer, self.tokens, count, k, v)
        if op is not None:
            op.result(HANG_S)

    def put_all(self, count: int) -> None:
        self.append(count)
        for layer in range(LAYERS):
            self.put(layer, count)
        self.tokens += count

    def check(self, layer: int, kv: kvtier.LayerKV, tokens: int) -> None:
        at = [b * BLOCK + i for b in self.offload.blocks(kv.buffer) for i in range(BLOCK)]
        at += range(tokens - kv.tail_tokens, tokens)
        assert kv.tokens == len(at) and kv.v is not None
        assert np.array_equal(np.asarray(kv.k), self.kv[0, layer, at])
        assert np.array_equal(np.asarray(kv.v), self.kv[1, layer, at])
        assert self.offload.rows(kv.buffer, at) == list(range(len(at)))

    def close(self) -> None:
        self.offload.close()
        self.session.close()
        self.namespace.close()


@pytest.fixture
def store(runtime: kvtier.Runtime) -> Iterator[kvtier.Store]:
    with kvtier.Store(runtime, "store(host=4MiB)") as store:
        yield store


def test_prefill_and_decode_load_the_stored_kv(store: kvtier.Store) -> None:
    model = Model(store, decode=QUEST)
    offload = model.offload
    model.put_all(120)
    assert offload.tokens(1) == (112, 8)
    prompt = SparseContext(120, is_prefill=True)
    assert offload.load(1, 2, prompt, blocks=[1, 4]) == 2
    with pytest.raises(kvtier.BusyError):
        offload.load(1, 2, prompt)
    model.check(2, offload.wait(1), 120)
    offload.release(1)
    assert offload.load(1, 2, prompt, blocks=[]) == 0
    assert offload.wait(1).tokens == 0
    offload.release(1)
    for some in ([0, 3, 6], []):
        assert offload.load(1, 2, prompt, blocks=some, chosen=True) == len(some)
        assert offload.blocks(1) == some
        kv = offload.wait(1)
        assert kv.tail_tokens == 8
        model.check(2, kv, 120)
        offload.release(1)
    with pytest.raises(kvtier.InvalidError):
        offload.load(1, 2, prompt, chosen=True)
    numbers = np.random.default_rng(1)
    for _ in range(20):
        model.append(1)
        offload.begin(SparseContext(model.tokens + 1, model.tokens))
        for layer in range(LAYERS):
            model.put(layer, 1)
            query = numbers.standard_normal((1, QUERY_HEADS, DIM)).astype(np.float32)
            model.check(layer, offload.take(layer, query), model.tokens + 1)
            offload.give_back(layer)
        model.tokens += 1
    stats = offload.stats()
    assert stats["selections"] > 0 and stats["saved_bytes"] > 0 and stats["failed_loads"] == 0
    offload.truncate(70)
    model.session.truncate(70)
    model.tokens = 70
    model.put_all(10)
    offload.load(0, 1, SparseContext(80))
    model.check(1, offload.wait(0), 80)
    model.close()


def test_views_are_not_copied_and_outlive_the_offload(store: kvtier.Store) -> None:
    model = Model(store)
    model.put_all(40)
    model.offload.load(0, 1, SparseContext(40))
    kv = model.offload.wait(0)
    assert kv.k.readonly and kv.k.format == "f" and kv.k.shape == (40, HEADS, DIM)
    again = model.offload.wait(0)
    first, second = np.asarray(kv.k), np.asarray(again.k)
    assert first.ctypes.data == second.ctypes.data
    model.offload.close()
    assert model.offload.closed
    with pytest.raises(kvtier.ClosedError):
        model.offload.stats()
    assert np.array_equal(first, model.kv[0, 1, :40])
    del kv, again, second
    gc.collect()
    assert np.array_equal(first, model.kv[0, 1, :40])
    model.offload.close()
    model.close()


def test_a_fork_continues_independently(store: kvtier.Store) -> None:
    model = Model(store, decode=QUEST)
    model.put_all(100)
    with pytest.raises(kvtier.InvalidError):
        model.offload.fork(model.session)
    other = Model.__new__(Model)
    other.namespace, other.session = model.namespace, model.session.fork()
    other.offload = model.offload.fork(other.session)
    other.kv, other.tokens = model.kv.copy(), model.tokens
    other.kv[:, :, 100:] += 1
    model.append(50)
    other.append(50, first=1000)
    for one in (model, other):
        for layer in range(LAYERS):
            one.put(layer, 50)
        one.tokens = 150
    for layer in range(LAYERS):
        for one in (other, model):
            one.offload.load(0, layer, SparseContext(150))
            one.check(layer, one.offload.wait(0), 150)
            one.offload.release(0)
    model.offload.close()
    model.session.close()
    other.offload.truncate(70)
    other.session.truncate(70)
    other.tokens = 70
    other.put_all(3)
    other.offload.load(0, 2, SparseContext(73))
    other.check(2, other.offload.wait(0), 73)
    other.close()


def test_selections_are_audited(store: kvtier.Store) -> None:
    model = Model(store, decode=QUEST, audit_every=1)
    model.kv[0, :, 48:64] = 20
    model.put_all(120)
    query = np.ones((1, QUERY_HEADS, DIM), np.float32)
    at = SparseContext(120, 119)
    for block, part in ((3, 1_000_000), (2, 0)):
        before = model.offload.stats()
        model.offload.load(0, 1, at, blocks=[block], chosen=True, query=query)
        model.offload.release(0)
        after = model.offload.stats()
        grown = {name: after[name] - before[name] for name in after}
        assert grown["audited"] == grown["wanted"] == 1
        assert grown["found"] == (1 if part else 0) and grown["found_ppm"] == part
    assert model.offload.load(0, 1, at, query=query) < 7
    assert 3 in model.offload.blocks(0)
    assert model.offload.stats()["audited"] == 3
    model.close()


class EverySecond:
    """A custom policy that selects every second block, and counts its calls."""

    def __init__(self) -> None:
        self.prefilled, self.decoded, self.queries = 0, 0, 0
        self.traits = kvtier.SparseTraits(
            caps=kvtier.SparseCaps.LOAD_DECODE,
            needs=kvtier.SparseNeeds.QUERIES | kvtier.SparseNeeds.KEYS,
            scope=kvtier.SparseScope.LAYER, granularity=kvtier.SparseGranularity.BLOCK,
            selects=True)

    def on_prefill_offload(self, block: int, layer: int, first: int, keys: Any) -> None:
        assert first == block * BLOCK
        self.prefilled += 1

    def on_decode_offload(self, block: int, first: int, keys: Any) -> None:
        assert len(keys) == LAYERS and first == block * BLOCK
        self.decoded += 1

    def select_blocks(self, layer: int, query: Any, candidates: Any, at: SparseContext) -> Any:
        self.queries += query is not None
        return [block for block in candidates if block % 2 == 0]


def test_a_custom_policy_selects_blocks(store: kvtier.Store) -> None:
    policy = EverySecond()
    model = Model(store, decode=policy)
    offload = model.offload
    model.put_all(90)
    assert (policy.prefilled, policy.decoded) == (5 * LAYERS, 0)
    for _ in range(6):
        model.append(1)
        offload.begin(SparseContext(model.tokens + 1, first_query=model.tokens))
        for layer in range(LAYERS):
            model.put(layer, 1)
            query = np.ones((1, QUERY_HEADS, DIM), np.float32)
            kv = offload.take(layer, query)
            blocks = offload.blocks(kv.buffer)
            assert all(block % 2 == 0 for block in blocks) and len(blocks) == 3
            model.check(layer, kv, model.tokens + 1)
            offload.give_back(layer)
        model.tokens += 1
    assert (policy.prefilled, policy.decoded, policy.queries) == (5 * LAYERS, 1, 6 * LAYERS)
    with pytest.raises(kvtier.InvalidError):
        Offload(model.session, SHAPE, "f32", buffers=0, buffer_tokens=256, decode=policy)
    model.close()


def test_h2o_keeps_heavy_hitters(store: kvtier.Store) -> None:
    model = Model(store, decode="h2o(sink=4,recent=20,budget=8,heads=all)")
    model.put_all(150)
    assert model.offload.retained(0) is None
    sums = np.full(150, 0.01, np.float32)
    sums[40:48] = 9
    model.offload.observe(0, 150, sums, 150)
    assert model.offload.evict(0, SparseContext(150, is_prefill=True))
    assert model.offload.retained(0) == [[*range(4), *range(40, 48), *range(130, 150)]]
    assert model.offload.stats()["evicted_tokens"] == 118
    model.offload.load(0, 0, SparseContext(150))
    assert model.offload.blocks(0) == [0, 2, 8]
    model.offload.release(0)
    model.close()


def test_scores_and_own_key_rows_select_blocks(store: kvtier.Store) -> None:
    model = Model(store, decode="external(topk=2)")
    model.put_all(100)
    model.offload.score(1, [0, 5, 1, 0, 7, 2])
    query = np.ones((1, QUERY_HEADS, DIM), np.float32)
    assert model.offload.load(0, 1, SparseContext(100, 99), query=query) == 2
    assert model.offload.blocks(0) == [1, 4]
    model.check(1, model.offload.wait(0), 100)
    model.close()
    model = Model(store, decode="dsa(topk=20,heads=2,dim=4,load=true,state=f32)")
    own = np.full((96, 1, 4), -0.1, np.float32)
    own[48:64, 0, 0] = 1
    for layer in range(LAYERS):
        model.offload.append_keys(layer, 0, own)
    model.put_all(96)
    asked = np.zeros((1, 2, 4), np.float32)
    asked[..., 0] = 1
    model.offload.score(0, [1.0, 1.0])
    assert model.offload.load(0, 0, SparseContext(96, 95), query=asked) < 6
    assert 3 in model.offload.blocks(0)
    model.close()


def test_resume_continues_after_a_restart(runtime: kvtier.Runtime, tmp_path: Path) -> None:
    spec = f'store(host=4MiB, disk=disk(path="{tmp_path}/kv", bytes=16MiB, segment=1MiB))'
    with kvtier.Store(runtime, spec) as store:
        model = Model(store)
        model.put_all(64)
        model.close()
    with kvtier.Store(runtime, spec) as store:
        model = Model(store, decode=QUEST)
        with pytest.raises(kvtier.InvalidError):
            model.offload.resume(64)
        model.append(64)
        model.offload.resume(64)
        model.tokens = 64
        model.put_all(6)
        model.offload.load(0, 2, SparseContext(70))
        model.check(2, model.offload.wait(0), 70)
        with pytest.raises(kvtier.BusyError):
            model.offload.resume(64)
        model.close()


def test_latent_rows_in_half_precision(store: kvtier.Store) -> None:
    group = Group([0], DIM * 2, 0, "f16")
    with store.namespace(Identity(), chunk_tokens=BLOCK, groups=[group]) as namespace:
        with namespace.session() as session:
            shape = Attention(1, QUERY_HEADS, 1, DIM, 6, BLOCK, 64, latent=True)
            with Offload(session, shape, buffer_tokens=64) as offload:
                rows = np.arange(20 * DIM, dtype=np.float16).reshape(20, 1, DIM)
                session.append(list(range(20)))
                op = offload.put(0, 0, 20, View(rows, DIM * 2))
                if op is not None:
                    op.result(HANG_S)
                offload.load(0, 0, SparseContext(20))
                kv = offload.wait(0)
                assert kv.v is None and (kv.blocks, kv.tail_tokens) == (1, 4)
                assert np.array_equal(np.asarray(kv.k).view(np.float16), rows)
                del kv


async def _wait_for(op: kvtier.Op) -> int:
    return (await op).value


def test_a_put_completes_in_its_queue(runtime: kvtier.Runtime, store: kvtier.Store) -> None:
    import asyncio

    async def main() -> None:
        model = Model(store)
        async with runtime.queue() as queue:
            model.append(40)
            k, v = (View(model.kv[i, 0], RUN, HEADS) for i in range(2))
            op = model.offload.put(0, 0, 40, k, v, queue=queue, tag="mine")
            assert op is not None and op.tag == "mine"
            await _wait_for(op)
            # Only to the tail, so that there is nothing to wait for.
            k, v = (View(model.kv[i, 1], RUN, HEADS) for i in range(2))
            assert model.offload.put(1, 0, 5, k, v, queue=queue) is None
        model.close()

    asyncio.run(main())


BAD: Tuple[Tuple[type, dict], ...] = (
    (kvtier.SpecError, {"decode": "questt"}),
    (kvtier.InvalidError, {"prefill": ""}),
    (kvtier.UnsupportedError, {"prefill": "quest"}),
    (kvtier.InvalidError, {"buffers": 0}),
    (kvtier.InvalidError, {"buffer_tokens": 1 << 40}),
    (kvtier.InvalidError, {"level": 9}),
    (kvtier.InvalidError, {"dtype": "f64"}),
    (kvtier.InvalidError, {"dtype": "f16"}),
)


def test_invalid_arguments_are_errors(store: kvtier.Store) -> None:
    model = Model(store)
    for kind, change in BAD:
        opts = {"dtype": "f32", "buffer_tokens": 64, **change}
        with pytest.raises(kind):
            Offload(model.session, SHAPE, **opts)
    offload, k = model.offload, View(model.kv[0, 0], RUN, HEADS)
    model.append(20)
    for args in [(3, 0, 4), (0, 1, 4), (0, 0, 0), (0, 0, 21)]:
        with pytest.raises(kvtier.InvalidError):
            offload.put(*args, k, k)
    with pytest.raises(kvtier.InvalidError):
        offload.put(0, 0, 4, k)
    for bad in (np.zeros((1, DIM), np.float32), np.zeros((1, 4, DIM)), np.zeros((0, 4, DIM), "f")):
        with pytest.raises(kvtier.InvalidError):
            offload.load(0, 0, SparseContext(1), query=bad)
    with pytest.raises(kvtier.InvalidError):
        offload.load(0, 0, SparseContext(1), blocks=[0])
    for call in (lambda: offload.wait(0), lambda: offload.take(0), lambda: offload.give_back(0)):
        with pytest.raises(kvtier.StateError):
            call()
    with pytest.raises(kvtier.UnsupportedError):
        offload.score(0, [1.0])
    with pytest.raises(kvtier.InvalidError):
        offload.rows(0, [2, 1])
    assert offload.tokens(0) == (0, 0)
    model.close()


@pytest.mark.parametrize("from_caller", [False, True])
def test_the_ring_may_be_in_device_memory(runtime: kvtier.Runtime, from_caller: bool) -> None:
    with kvtier.Device(runtime, "simulated") as device, \
            kvtier.Store(runtime, host_bytes=4 << 20, device=device) as store:
        group = Group([0, 1, 2], HEADS * RUN, HEADS * RUN, "f32")
        namespace = store.namespace(Identity(model=b"m"), chunk_tokens=BLOCK, groups=[group])
        session = namespace.session()
        sizes: Any = {"buffers": 2, "buffer_tokens": 256}
        nbytes = Offload.memory_bytes(session, SHAPE, "f32", **sizes)
        assert nbytes == (2 * (256 + BLOCK) + 2 * LAYERS * BLOCK) * 2 * HEADS * RUN
        memory = device.alloc(nbytes) if from_caller else None
        if from_caller:
            with pytest.raises(kvtier.Error) as refused, device.alloc(nbytes - 256) as small:
                Offload(session, SHAPE, "f32", on_device=True, memory=small, **sizes)
            assert refused.value.name == "KVT_E_TOO_SMALL"
        offload = Offload(session, SHAPE, "f32", on_device=True, memory=memory, **sizes)
        numbers = np.random.default_rng(8)
        kv = numbers.standard_normal((2, LAYERS, 70, HEADS, DIM)).astype(np.float32)
        session.append(list(range(70)))
        plane = 70 * HEADS * RUN
        with device.alloc(2 * plane) as there:
            for layer in range(LAYERS):
                # The put begins before the copies complete.
                copies = [kvtier.DeviceCopy(View(there, plane, offset=i * plane), kv[i, layer],
                                            scatter=True, tokens=1) for i in range(2)]
                event = device.copy(copies)
                offload.set_ready_event(event)
                k, v = (View(there, RUN, HEADS, offset=i * plane) for i in range(2))
                op = offload.put(layer, 0, 70, k, v)
                assert op is not None
                op.result(HANG_S)
                op.close()
                offload.set_ready_event(None)
                event.close()
            at = SparseContext(tokens=70, first_query=69)
            for layer in range(LAYERS):
                offload.load(0, layer, at)
                got = offload.wait(0)
                assert (got.tokens, got.tail_tokens) == (70, 6)
                for i, there_now in enumerate((got.k, got.v)):
                    assert isinstance(there_now, kvtier.DevicePlane)
                    assert there_now.shape == (70, HEADS, DIM)
                    back = np.zeros_like(kv[i, layer])
                    with device.copy([kvtier.DeviceCopy(View(there_now, plane), back)]) as event:
                        event.wait(HANG_S)
                    assert np.array_equal(back, kv[i, layer])
                with pytest.raises(kvtier.Error):
                    device.copy([kvtier.DeviceCopy(View(there_now, plane), back, scatter=True)])
                offload.release(0)
            del got, there_now
            with pytest.raises(kvtier.Error):
                offload.set_ready_event(1 << 60)
        assert offload.stats()["key_bytes"] == 0
        offload.close()
        assert offload.closed
        session.close()
        namespace.close()
        if memory is not None:
            memory.close()
