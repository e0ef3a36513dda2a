"""The store: puts and gets in several layouts, also after a restart."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import List, Tuple

import kvtier
import numpy as np
import pytest
from gate import HANG_S, until
from kvtier import Group, Identity, View

LAYERS, CHUNK, HEADS, RUN = 3, 4, 2, 16
GROUPS = [
    Group(layers=[0, 2], k_bytes=HEADS * RUN, v_bytes=HEADS * RUN, dtype="f16", kv_heads=HEADS),
    Group(layers=[1], k_bytes=24, rule=kvtier.RULE_WINDOW, window_tokens=8),
]
IDENTITY = Identity(model=b"m", salt=b"", shard=(0, 2), extra={0x80000001: b"x"})
TOKENS = list(range(16))

Planes = Tuple[List[View], List[object]]


def plain(memory: np.ndarray) -> Planes:
    """[layer][K, V][token][head][byte], with the latent in place of K."""
    k, v = [], []
    each = memory.shape[2] * HEADS * RUN
    for layer in range(LAYERS):
        if layer == 1:
            k.append(View(memory, 24, offset=2 * layer * each))
            v.append(None)
            continue
        k.append(View(memory, RUN, HEADS, 2 * layer * each))
        v.append(View(memory, RUN, HEADS, (2 * layer + 1) * each))
    return k, v


def paged(memory: bytearray) -> Planes:
    """Pages of 3 tokens in reverse order, with K and V of a page side by side."""
    k, v = [], []
    page = 3 * 2 * HEADS * RUN
    for layer in range(LAYERS):
        pages = [(layer * 6 + 5 - p) * page for p in range(6)]
        run, heads = (24, 1) if layer == 1 else (RUN, HEADS)
        k.append(View(memory, run, heads, pages=pages, page_tokens=3))
        v.append(None if layer == 1
                 else View(memory, run, heads, page // 2, pages=pages, page_tokens=3))
    return k, v


def full(seed: int) -> np.ndarray:
    numbers = np.random.default_rng(seed)
    return numbers.integers(0, 256, (LAYERS, 2, 16, HEADS, RUN), dtype=np.uint8)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    latent = (1, 0)
    flat = [m[latent].reshape(-1)[: 16 * 24] for m in (a, b)]
    return bool((a[[0, 2]] == b[[0, 2]]).all() and (flat[0] == flat[1]).all())


def open_namespace(store: kvtier.Store, identity: Identity = IDENTITY) -> kvtier.Namespace:
    return store.namespace(identity, chunk_tokens=CHUNK, groups=GROUPS)


def test_stored_kv_survives_a_restart(runtime: kvtier.Runtime, tmp_path: Path) -> None:
    spec = f'store(host=1MiB, disk=disk(path="{tmp_path}/kv", bytes=16MiB, segment=1MiB))'
    memory = full(1)
    with kvtier.Store(runtime, spec) as store, open_namespace(store) as namespace:
        with namespace.session("one", tenant=2, priority=0) as session:
            session.append(np.array(TOKENS, dtype=np.uint32))
            op = session.put(*plain(memory), level=kvtier.LEVEL_DURABLE)
            assert op.result(HANG_S).value == 16
            assert session.info() == (16, 4, CHUNK, LAYERS)
            pages = bytearray(LAYERS * 6 * 3 * 2 * HEADS * RUN)
            assert session.get(*paged(pages)).result(HANG_S).value == 16
            with session.fork() as fork:
                fork.truncate(10)
                fork.append([7, 8])
                assert fork.info().tokens == 12
                fork.pin(priority=3, timeout=HANG_S)
                fork.hint(stop=kvtier.STOP_TOOL_USE)
            stats = store.stats()
            assert stats["stored_cells"] == 4 * LAYERS and isinstance(stats["puts"], int)
            assert isinstance(stats["lossy_error_max"], float)
        key = namespace.key
    with kvtier.Store(runtime, spec) as store, open_namespace(store) as namespace:
        assert namespace.key == key and store.stats()["recovered_cells"] == 4 * LAYERS
        with namespace.session() as session:
            session.append(TOKENS)
            assert session.prefetch().result(HANG_S).value == 16
            back = np.zeros_like(memory)
            ops = session.get_each(*plain(back))
            assert [op.result(HANG_S).value for op in ops] == [16] * LAYERS
            assert same(memory, back)
            assert "# TYPE kvtier_" in store.metrics()
            # The paged memory has the same KV.
            other = open_namespace(store, Identity(model=b"m"))
            with other, other.session() as second:
                second.append(TOKENS)
                assert second.put(*paged(pages)).result(HANG_S).value == 16
                again = np.zeros_like(memory)
                assert second.get(*plain(again)).result(HANG_S).value == 16
                assert same(memory, again)


def test_a_get_of_missing_kv_reports_the_loaded_tokens(runtime: kvtier.Runtime) -> None:
    with kvtier.Store(runtime, "store(host=1MiB)") as store, open_namespace(store) as namespace:
        with namespace.session() as session:
            session.append(TOKENS[:8])
            memory = full(2)
            session.put(*plain(memory)).result(HANG_S)
            session.append(TOKENS[8:])
            back = np.full_like(memory, 0xA5)
            op = session.get(*plain(back))
            with pytest.raises(kvtier.NotFoundError):
                op.result(HANG_S)
            assert op.info().value == 8
            assert (back[0, 0, 8:] == 0xA5).all() and (back[0, 0, :8] == memory[0, 0, :8]).all()
            with pytest.raises(kvtier.UnavailableError):
                session.put(*plain(memory), level=kvtier.LEVEL_DISK)


def test_memory_is_held_until_the_op_is_closed(runtime: kvtier.Runtime) -> None:
    with kvtier.Store(runtime, "store(host=1MiB)") as store, open_namespace(store) as namespace:
        with namespace.session() as session:
            session.append(TOKENS)
            memory = bytearray(LAYERS * 6 * 3 * 2 * HEADS * RUN)
            op = session.put(*paged(memory))
            with pytest.raises(BufferError):
                memory.extend(b"x")
            op.result(HANG_S)
            op.close()
            memory.extend(b"x")
            for _ in range(20):
                session.get(*plain(full(3)))  # dropped ops are cancelled and closed
            gc.collect()


def test_views_outside_of_their_object_are_rejected(runtime: kvtier.Runtime) -> None:
    with kvtier.Store(runtime, "store(host=1MiB)") as store, open_namespace(store) as namespace:
        with namespace.session() as session:
            session.append(TOKENS)
            short = full(4)[:, :, :15].copy()
            with pytest.raises(kvtier.InvalidError):
                session.put(*plain(short))
            k, v = plain(full(4))
            for bad in (View(bytearray(31), RUN, HEADS), View(bytearray(99), 0),
                        View(bytearray(99), RUN, HEADS, pages=[80], page_tokens=1),
                        View(bytearray(99), RUN, HEADS, pages=[-1], page_tokens=1),
                        View(bytearray(99), RUN, HEADS, token_stride=2**63)):
                with pytest.raises(kvtier.InvalidError):
                    session.put([bad, *k[1:]], v)
            with pytest.raises(kvtier.InvalidError):
                session.put(k, v[:2])
            with pytest.raises(kvtier.InvalidError):
                session.put([], None)
            with pytest.raises(kvtier.InvalidError):
                session.get(k, v, first_token=1)
            with pytest.raises(BufferError):
                session.get([View(bytes(4096), RUN, HEADS), *k[1:]], v)


def test_lookups_plans_and_events_report_the_state(runtime: kvtier.Runtime) -> None:
    with kvtier.Store(runtime, "store(host=1MiB)") as store, open_namespace(store) as namespace:
        assert store.events() == ([], 0, 0)
        later = store.events(2**64 - 1).cursor
        with namespace.session() as session:
            session.append(TOKENS[:8])
            session.put(*plain(full(6))).result(HANG_S)
            session.append(TOKENS[8:])
            found = namespace.lookup(np.array(TOKENS, dtype=np.uint32))
            assert (found.tokens, found.reusable_tokens, found.reusable_soon_tokens) == (16, 8, 8)
            assert [(r.first_token, r.tokens, r.state, r.tier) for r in found.ranges] == [
                (0, 8, kvtier.RANGE_HIT, kvtier.TIER_HOST),
                (8, 8, kvtier.RANGE_MISS, kvtier.TIER_NONE)]
            assert found.host_bytes == found.ranges[0].host_bytes > 0 and found.load_ns > 0

            news = store.events(later)
            assert [e.kind for e in news.events] == [kvtier.STORE_EVENT_STORED] * 2
            assert news.events[0].parent == news.events[0].namespace == namespace.key
            assert news.events[1].parent == news.events[0].key and news.missed == 0
            assert store.events(news.cursor).events == []
            keys = [e.key for e in news.events]
            assert namespace.exists([*keys, bytes(32)]) == bytes(
                [kvtier.EXISTS_WHOLE | 1 << kvtier.TIER_HOST] * 2 + [0])
            assert namespace.lookup_keys(b"".join(keys), 9).reusable_tokens == 8
            with pytest.raises(kvtier.InvalidError):
                namespace.exists(b"short")
            with pytest.raises(kvtier.InvalidError, match="2 keys"):
                namespace.lookup_keys(keys, 12)

            plan = session.plan(cost=(0, 1e9))
            assert [(s.kind, s.tokens) for s in plan.steps] == [
                (kvtier.PLAN_LOAD, 8), (kvtier.PLAN_RECOMPUTE, 8)]
            assert (plan.load_tokens, plan.recompute_tokens, plan.tokens) == (8, 8, 16)
            assert plan.compute_ns == 8 * 10**9 and plan.without_ns == 16 * 10**9
            namespace.set_prefill_cost((0.0, 0.0))
            assert session.plan(overlap=False, wait=False).recompute_tokens == 16
            assert namespace.prefill_cost().fixed
            namespace.set_prefill_cost(None)
            namespace.observe_prefill(0, 100, 10**6)
            assert namespace.prefill_cost().observed == 1 and not namespace.prefill_cost().fixed
            with pytest.raises(kvtier.InvalidError):
                session.plan(cost=(0, -1))

            session.pin()
            assert store.stats()["pins"] == 4
            session.unpin(0, 4)
            assert store.stats()["pins"] == 3
            session.unpin()
            assert session.drop(4).removed_chunks == 1
            assert namespace.clear(10) == (0, 1, 0)
        assert namespace.clear() == (1, 0, 0)
        last = store.events(news.cursor).events[-1]
        assert last.kind == kvtier.STORE_EVENT_CLEARED and last.namespace == namespace.key


def test_transfers_wait_for_their_ready_event(runtime: kvtier.Runtime) -> None:
    with kvtier.Store(runtime, "store(host=1MiB)") as store, open_namespace(store) as namespace:
        with namespace.session() as session, kvtier.ReadyEvent() as ready:
            session.append(TOKENS)
            memory, back = np.zeros_like(full(7)), np.full_like(full(7), 0xA5)
            op = session.put(*plain(memory), ready=ready)
            memory[:] = full(7)
            assert not ready.is_signalled and op.info().items_done == 0
            ready.signal()
            assert ready.is_signalled and op.result(HANG_S).value == 16
            assert session.get(*plain(back), ready=ready).result(HANG_S).value == 16
            assert same(memory, back)
            back[:] = 0xA5
            never = kvtier.ReadyEvent()
            ops = [session.get(*plain(back), ready=never), session.prefetch(ready=never),
                   *session.get_each(*plain(back), ready=never)]
            with pytest.raises(kvtier.TimeoutError):
                session.get(*plain(back), ready=never, timeout=0.01).result(HANG_S)
            del never
            gc.collect()
            for op in ops:
                with pytest.raises(kvtier.CancelledError):
                    op.result(HANG_S)
            assert (back == 0xA5).all()
        with pytest.raises(kvtier.ClosedError):
            ready.signal()


def test_invalid_options_are_rejected_and_close_ends_all_uses(runtime: kvtier.Runtime,
                                                              tmp_path: Path) -> None:
    with pytest.raises(kvtier.SpecError, match="host"):
        kvtier.Store(runtime, "store(hots=1GiB)")
    spec = f'store(disk=disk(path="{tmp_path}/kv", bytes=16MiB, segment=1MiB))'
    store = kvtier.Store(runtime, spec)
    with pytest.raises(kvtier.BusyError):
        kvtier.Store(runtime, spec)
    with pytest.raises(kvtier.InvalidError, match="dtype"):
        store.namespace(IDENTITY, chunk_tokens=4, groups=[Group([0], k_bytes=4, dtype="f64")])
    with pytest.raises(kvtier.InvalidError):
        store.namespace(IDENTITY, chunk_tokens=4, groups=[Group([1], k_bytes=4)])
    namespace = open_namespace(store)
    session = namespace.session()
    store.close()
    store.close()
    with pytest.raises(kvtier.ClosedError):
        session.append([1])
    with pytest.raises(kvtier.ClosedError):
        store.stats()
    kvtier.Store(runtime, spec).close()
    session.close()
    namespace.close()


def test_transfers_can_be_awaited(runtime: kvtier.Runtime) -> None:
    import asyncio

    async def main() -> None:
        queue = runtime.queue()
        queue.attach()
        with kvtier.Store(runtime, "store(host=1MiB)") as store, open_namespace(store) as namespace:
            with namespace.session() as session:
                session.append(TOKENS)
                memory, back = full(5), np.zeros_like(full(5))
                assert (await session.put(*plain(memory), queue=queue)).value == 16
                assert (await session.get(*plain(back), queue=queue)).value == 16
                assert same(memory, back)
        queue.close()

    asyncio.run(main())


def test_dropped_stores_and_sessions_are_closed() -> None:
    with kvtier.Runtime(workers=1) as runtime:
        store = kvtier.Store(runtime, "store(host=1MiB)")
        session = open_namespace(store).session()
        session.append([1, 2, 3])
        report = runtime.close()
        assert (report.stores, report.namespaces, report.sessions) == (1, 1, 1)
        del store, session


def test_other_media_are_other_sequences(runtime: kvtier.Runtime) -> None:
    cat, dog = (5, bytes([1]) * 32), (5, bytes([2]) * 32)
    with kvtier.Store(runtime, host_bytes=4 << 20) as store, open_namespace(store) as namespace:
        with namespace.session() as session, namespace.session() as other:
            session.append(TOKENS[:5])
            session.append(TOKENS[5:], [(0, cat[1])])
            other.append(TOKENS, [dog])
            session.put(*plain(full(1))).result(HANG_S)
            assert namespace.lookup(TOKENS, [cat]).reusable_tokens == 16
            assert namespace.lookup(TOKENS, [dog]).reusable_tokens == 4
            assert namespace.lookup(TOKENS).reusable_tokens == 4
            with pytest.raises(kvtier.NotFoundError):
                other.get(*plain(full(2))).result(HANG_S)
            for media in [[(16, cat[1])], [dog, cat], [(5, b"short")]]:
                with pytest.raises(kvtier.InvalidError):
                    other.append(TOKENS, media)
            assert other.info().tokens == 16


def test_demoted_kv_is_prefetched_and_reused(runtime: kvtier.Runtime, tmp_path: Path) -> None:
    store = kvtier.Store(runtime, "store(disk=disk(segment=1MiB), host=1GiB)",
                         host_bytes=4 << 20, disk_bytes=16 << 20, disk_path=tmp_path / "kv",
                         policy="lru", disk_policy="arc", write="never")
    with store, open_namespace(store) as namespace, namespace.session(tenant=7) as session:
        stats = store.stats()
        assert (stats["host_limit_bytes"], stats["disk_limit_bytes"]) == (4 << 20, 16 << 20)
        assert stats["disk_engine"] in (kvtier.IO_THREADS, kvtier.IO_URING)
        session.append(TOKENS)
        memory, back = full(3), np.zeros_like(full(3))
        session.put(*plain(memory)).result(HANG_S)
        assert session.demote() == (0, 4, 0)
        assert session.prefetch(needed_only=True).result(HANG_S).value == 16
        # The latent has a window of 8 tokens: earlier tokens of its layer are not loaded.
        assert session.get(*plain(back), needed_only=True).result(HANG_S).value == 16
        latent = [m[1, 0].reshape(-1)[: 16 * 24] for m in (memory, back)]
        assert (latent[0][8 * 24:] == latent[1][8 * 24:]).all() and not latent[1][: 8 * 24].any()
        assert (memory[[0, 2]] == back[[0, 2]]).all()
        for op in session.get_each(*plain(back), needed_only=True):
            op.result(HANG_S)
        times = store.latencies()
        assert len(times) == 15 and times["put_ram"].timed == 1
        assert times["get_disk"].timed + times["get_host"].timed > 0
        assert 0 < times["put_ram"].p50_ns <= times["put_ram"].p99_ns
        (row,) = store.tenants()
        assert (row.tenant, row.is_rest, row.missed_cells) == (7, False, 0)
        assert row.put_bytes == 16 * (2 * 2 * HEADS * RUN + 24) and row.hit_cells > 0

        store.set_policy(kvtier.TIER_HOST, "s3fifo")
        assert 'policy="s3fifo"' in store.metrics()
        with pytest.raises(kvtier.SpecError, match="s3fifo"):
            store.set_policy(kvtier.TIER_HOST, "s3fif")
        store.set_limit(kvtier.TIER_DISK, 20 << 20)
        assert store.stats()["disk_limit_bytes"] == 20 << 20
        with pytest.raises(kvtier.UnsupportedError):
            store.set_limit(kvtier.TIER_REMOTE, 1 << 20)
        assert store.evictions(kvtier.TIER_HOST) == []
    with pytest.raises(kvtier.InvalidError, match="through"):
        kvtier.Store(runtime, write="thru")
    with pytest.raises(kvtier.SpecError, match="bytes="):
        kvtier.Store(runtime, disk_path=tmp_path / "kv")


@pytest.mark.parametrize("kind", ["list", "tuple", "numpy", "memoryview"])
def test_selected_chunks_are_contiguous_in_the_views(runtime: kvtier.Runtime, tmp_path: Path,
                                                     kind: str) -> None:
    spec = f'store(host=4MiB, disk=disk(path="{tmp_path}/kv", bytes=16MiB, segment=1MiB))'
    with kvtier.Store(runtime, spec) as store, open_namespace(store) as namespace, \
            namespace.session() as session:
        session.append(TOKENS[:14])
        memory = full(9)
        session.put(*plain(memory)).result(HANG_S)
        numbers = np.array([1, 9, 3], dtype=np.uint32)
        make = {"list": list, "tuple": tuple, "numpy": lambda n: n, "memoryview": memoryview}
        picked = make[kind](numbers[::2].copy())
        tokens = [4, 5, 6, 7, 12, 13]

        def check(back: np.ndarray) -> None:
            for plane in ((0, 0), (0, 1), (2, 0), (2, 1)):
                assert (back[plane][:6] == memory[plane][tokens]).all()
                assert (back[plane][6:] == 0xA5).all()
            latent = [m[1, 0].reshape(-1)[: 16 * 24].reshape(16, 24) for m in (memory, back)]
            assert (latent[1][:6] == latent[0][tokens]).all() and (latent[1][6:] == 0xA5).all()

        back = np.full_like(memory, 0xA5)
        assert session.get(*plain(back), chunks=picked).result(HANG_S).value == 6
        check(back)
        back = np.full_like(memory, 0xA5)
        ops = session.get_each(*plain(back), chunks=picked)
        assert [op.result(HANG_S).value for op in ops] == [6] * LAYERS
        check(back)
        # Memory for the selected chunks is enough.
        small = np.full((LAYERS, 2, 6, HEADS, RUN), 0xA5, dtype=np.uint8)
        assert session.get(*plain(small), chunks=picked).result(HANG_S).value == 6
        assert (small[0, 1] == memory[0, 1, tokens]).all()
        with pytest.raises(kvtier.InvalidError):
            session.get(*plain(small))
        # Chunk numbers begin at `first_token`.
        back = np.full_like(memory, 0xA5)
        op = session.get(*plain(back), first_token=4, tokens=8, chunks=[1])
        assert op.result(HANG_S).value == 4
        assert (back[2, 0, :4] == memory[2, 0, 8:12]).all() and (back[2, 0, 4:] == 0xA5).all()

        session.demote()
        until(lambda: store.stats()["host_cells"] == 0)
        assert session.prefetch(chunks=picked).result(HANG_S).value == 6
        assert store.stats()["host_cells"] == 2 * LAYERS


def test_invalid_chunk_lists_are_rejected(runtime: kvtier.Runtime) -> None:
    with kvtier.Store(runtime, "store(host=1MiB)") as store, open_namespace(store) as namespace, \
            namespace.session() as session:
        session.append(TOKENS)
        memory, back = full(8), np.full_like(full(8), 0xA5)
        session.put(*plain(memory)).result(HANG_S)
        wrong: List[object] = [
            [], (), np.zeros(0, dtype=np.uint32), [1, 0], [1, 1], [4], [0, 2**32 - 1], [2**32],
            [-1], ["1"], 1, np.array([1], dtype=np.int64), np.zeros((1, 1), dtype=np.uint32)]
        for chunks in wrong:
            with pytest.raises(kvtier.InvalidError):
                session.get(*plain(back), chunks=chunks)
            with pytest.raises(kvtier.InvalidError):
                session.get_each(*plain(back), chunks=chunks)
            with pytest.raises(kvtier.InvalidError):
                session.prefetch(chunks=chunks)
        with pytest.raises(kvtier.InvalidError, match="KVT_TRANSFER_NEEDED_ONLY"):
            session.get(*plain(back), chunks=[1], needed_only=True)
        assert (back == 0xA5).all()
        assert session.drop(8).removed_chunks == 2
        op = session.get(*plain(back), chunks=[0, 2, 3])
        with pytest.raises(kvtier.NotFoundError):
            op.result(HANG_S)
        assert op.info().value == 4 and (back[0, 0, :4] == memory[0, 0, :4]).all()
        assert (back[0, 0, 4:8] == 0xA5).all()


def test_evictions_are_logged(runtime: kvtier.Runtime) -> None:
    with kvtier.Store(runtime, "store(host=256KiB, policy=lru)") as store:
        with open_namespace(store) as namespace:
            for i in range(100):
                with namespace.session() as session:
                    session.append([i * 100 + t for t in TOKENS])
                    session.put(*plain(full(i))).result(HANG_S)
        entries = store.evictions(kvtier.TIER_HOST, 8)
        assert len(entries) == 8 and {entry.policy for entry in entries} == {"lru"}
        numbers = [entry.number for entry in entries]
        assert numbers == list(range(numbers[0], numbers[0] + 8))
