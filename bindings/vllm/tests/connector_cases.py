"""Tests of KvtierConnector, for the stubbed and for the installed vLLM."""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterator, List

import kvtier
import mini
import pytest
from kvtier._errors import make as make_error

HOST = {"host_bytes": "64MiB"}


def drop_tokens(worker: Any, tokens: List[int], first: int) -> None:
    """Drops tokens from a worker's store, once no transfer uses their chunks."""
    with next(iter(worker._namespaces.values())).session() as session:
        session.append(tokens)
        end = time.monotonic() + 600
        while session.drop(first, len(tokens) - first).transferring_chunks:
            assert time.monotonic() < end
            time.sleep(0.001)


@pytest.fixture
def make() -> Callable[..., Any]:
    """Makes connectors, with vLLM's factory where vLLM is installed."""
    from kvtier_vllm.connector import KvtierConnector

    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError:
        KVConnectorFactory = None  # type: ignore[assignment,misc]

    def made(config: Any, role: Any, cache: Any, rank: int) -> Any:
        from kvtier_vllm import connector

        before, connector._rank = connector._rank, lambda parallel: rank
        try:
            if KVConnectorFactory is not None:
                return KVConnectorFactory.create_connector(config, role, cache)
            return KvtierConnector(config, role, cache)
        finally:
            connector._rank = before

    return made


@pytest.fixture
def roles() -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    return KVConnectorRole


@pytest.fixture(params=["between", "layerwise"])
def layerwise(request: Any) -> bool:
    return bool(request.param == "layerwise")


@pytest.fixture(params=["local scheduler", "remote scheduler"])
def remote_scheduler(request: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the scheduler acts as if in another process than the worker. Then both exchange
    messages with each step only."""
    if request.param == "remote scheduler":
        from kvtier_vllm import connector_scheduler

        monkeypatch.setattr(connector_scheduler, "local_worker", lambda engine: None)
    return bool(request.param == "remote scheduler")


@pytest.fixture
def engine(make: Any, roles: Any, layerwise: bool, remote_scheduler: bool) -> Iterator[mini.Engine]:
    made = mini.Engine(make, roles, extra={**HOST, "layerwise": layerwise})
    yield made
    made.close()


def test_saved_prefixes_load_with_every_byte(engine: mini.Engine) -> None:
    prompt = list(range(100))
    assert engine.run(mini.Request("a", prompt)) == 0
    assert engine.run(mini.Request("b", prompt)) == 96
    assert engine.run(mini.Request("c", prompt[:50])) == 48
    assert engine.run(mini.Request("d", prompt[:64] + [7] * 40)) == 64
    assert engine.run(mini.Request("e", prompt[:32])) == 16  # one token is always computed
    assert engine.run(mini.Request("f", prompt), computed=32) == 64


@pytest.mark.parametrize("ranks", [1, 2])
def test_prefixes_of_other_engines_are_found_at_the_remote(make: Any, roles: Any, layerwise: bool,
                                                           remote_scheduler: bool, ranks: int,
                                                           tmp_path: Path) -> None:
    # The timeouts are long, so that slow machines pass.
    shared = {"spec": f'store(host=64MiB, remote=dir(path="{tmp_path}", timeout=600000))',
              "level": "remote", "layerwise": layerwise, "remote_lookup_s": 60}
    prompt = list(range(100))
    first = mini.Engine(make, roles, extra=shared, ranks=ranks)
    assert first.run(mini.Request("a", prompt)) == 0
    assert first.run(mini.Request("b", prompt)) == 96
    first.close()
    second = mini.Engine(make, roles, extra=shared, ranks=ranks)
    assert second.run(mini.Request("a", prompt[:64] + [7] * 40)) == 64
    assert second.run(mini.Request("b", prompt)) == 96
    assert second.run(mini.Request("c", [5] * 64)) == 0
    # A request that ends during its lookup.
    aborted = mini.Request("d", [9, *prompt])
    second.scheduler.on_new_request(aborted)
    # The lookup may be answered at once.
    assert second.scheduler.get_num_new_matched_tokens(aborted, 0)[0] in (None, 0)
    second.step()
    second.scheduler.request_finished(aborted, [])
    for _ in range(3):
        second.step()
    for one in second.workers:
        worker = one.worker
        assert not (worker._remote_lookups or worker._pending_lookups or worker._lookup_results)
    second.close()
    alone = mini.Engine(make, roles, extra={**shared, "remote_lookup_s": 0}, ranks=ranks)
    assert alone.run(mini.Request("a", prompt)) == 0
    alone.close()


def test_a_producer_loads_nothing_and_a_consumer_saves_nothing(make: Any, roles: Any,
                                                               layerwise: bool,
                                                               remote_scheduler: bool,
                                                               tmp_path: Path) -> None:
    shared = {"spec": f'store(host=64MiB, remote=dir(path="{tmp_path}", timeout=600000))',
              "level": "remote", "layerwise": layerwise, "remote_lookup_s": 60}
    prompt, other = list(range(100)), list(range(200, 300))
    producer = mini.Engine(make, roles, extra=shared, role="kv_producer")
    assert [producer.run(mini.Request(name, prompt)) for name in "ab"] == [0, 0]
    # Tokens that the engine still has in its cache are saved, too.
    assert producer.run(mini.Request("c", prompt + [5] * 20), computed=96) == 0
    producer.close()
    consumer = mini.Engine(make, roles, extra=shared, role="kv_consumer")
    assert consumer.run(mini.Request("a", prompt + [5] * 20), decode=40) == 112
    assert [consumer.run(mini.Request(name, other)) for name in "bc"] == [0, 0]
    assert "saved_tokens" not in consumer.workers[0].worker.counts
    consumer.close()
    both = mini.Engine(make, roles, extra=shared)
    assert both.run(mini.Request("a", other)) == 0
    assert both.run(mini.Request("b", other)) == 96
    both.close()


def test_local_prefixes_are_hits_when_the_remote_lookup_fails(make: Any, roles: Any,
                                                              remote_scheduler: bool,
                                                              monkeypatch: pytest.MonkeyPatch,
                                                              tmp_path: Path) -> None:
    # Remote lookups that time out before the remote can answer.
    options = {"spec": f'store(host=64MiB, remote=dir(path="{tmp_path}", timeout=600000))',
               "remote_lookup_s": 1e-6}
    prompt = list(range(64))
    late = mini.Engine(make, roles, extra=options)
    assert late.run(mini.Request("a", prompt)) == 0
    assert late.run(mini.Request("b", prompt + [7] * 40)) == 64
    # Remote lookups that cannot start.
    from kvtier_vllm import connector_worker

    def refuse(*_: Any) -> None:
        raise kvtier.BusyError("no room", kvtier.abi.KVT_E_BUSY, "KVT_E_BUSY")

    monkeypatch.setattr(connector_worker, "_RemoteLookup", refuse)
    assert late.run(mini.Request("c", prompt + [8] * 40)) == 64
    late.close()


def test_generated_tokens_are_saved_too(engine: mini.Engine) -> None:
    first = mini.Request("a", range(40))
    engine.run(first, decode=30)
    assert first.num_tokens == 70
    assert engine.run(mini.Request("b", first.all_token_ids + [5])) == 64


def test_lora_salt_and_media_separate_kv(engine: mini.Engine) -> None:
    prompt, lora = list(range(64)), SimpleNamespace(lora_name="l", lora_path="/l")
    engine.run(mini.Request("a", prompt))
    assert engine.run(mini.Request("b", prompt, salt="s")) == 0
    assert engine.run(mini.Request("c", prompt, lora=lora)) == 0
    assert engine.run(mini.Request("d", prompt, lora=lora)) == 48
    assert engine.run(mini.Request("e", prompt, salt="s")) == 48
    assert engine.run(mini.Request("f", prompt, media=[(20, "cat")]), decode=1) == 16
    assert engine.run(mini.Request("g", prompt, media=[(20, "dog")]), decode=1) == 16
    assert engine.run(mini.Request("h", prompt, media=[(20, "dog"), (40, "x")])) == 32
    assert engine.run(mini.Request("i", prompt, media=[(20, "cat")])) == 48


def test_lost_blocks_are_computed_and_saved_again(engine: mini.Engine) -> None:
    prompt = list(range(100))
    engine.run(mini.Request("a", prompt))
    worker, engine.expect_loss = engine.workers[0].worker, True
    engine.run(mini.Request("b", prompt), before_load=lambda: drop_tokens(worker, prompt[:96], 48))
    assert worker.counts["lost_blocks"] >= 1
    engine.expect_loss = False
    assert engine.run(mini.Request("c", prompt)) == 96  # the blocks were saved again


@pytest.mark.parametrize("late", [False, True])
def test_kv_computed_from_lost_blocks_is_not_saved(engine: mini.Engine, late: bool) -> None:
    prompt, engine.late_saves = list(range(100)), late
    engine.run(mini.Request("a", prompt))
    worker, engine.expect_loss = engine.workers[0].worker, True
    longer = prompt + list(range(500, 560))
    engine.run(mini.Request("b", longer), before_load=lambda: drop_tokens(worker, prompt[:96], 48))
    engine.expect_loss = False
    assert engine.run(mini.Request("c", longer)) == 144  # checked byte by byte
    # The combined message of two ranks has the results that both ranks know.
    from kvtier_vllm.connector_meta import KvtierWorkerMetadata

    # The lookup of one request has become longer meanwhile.
    results = {"a": (64, 32), "b": (16, 16), "c": (48, 48)}
    both = KvtierWorkerMetadata(2, results, 7).aggregate(
        KvtierWorkerMetadata(2, {"a": (64, 16), "c": (64, 64)}, 6))
    assert both == KvtierWorkerMetadata(2, {"a": (64, 16)}, 6)


def test_saves_wait_for_shared_blocks_that_are_loading(engine: mini.Engine) -> None:
    if not engine.layerwise:
        pytest.skip("loads complete between steps")
    first, second = mini.Request("a", range(64)), mini.Request("b", range(96))
    scheduler = engine.scheduler.scheduler
    for request in (first, second):
        scheduler.on_new_request(request)
    scheduler._load_starts["a"] = 0
    scheduler.allocated(first, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4],)), 48)
    new = SimpleNamespace(req_id="b", block_ids=([1, 2, 3, 5, 6, 7],), num_computed_tokens=48)
    none = SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[],
                           num_computed_tokens=[])
    meta = scheduler.build_meta(SimpleNamespace(
        scheduled_new_reqs=[new], scheduled_cached_reqs=none, num_scheduled_tokens={"b": 48}))
    assert len(meta.loads) == 1 and not meta.saves
    from kvtier_vllm.connector_meta import KvtierWorkerMetadata

    scheduler.on_worker_metadata(KvtierWorkerMetadata(0, {}, meta.step))
    again = SimpleNamespace(req_ids=["b"], resumed_req_ids=set(), new_block_ids=[None],
                            num_computed_tokens=[96])
    meta = scheduler.build_meta(SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=again,
                                                num_scheduled_tokens={"b": 1}))
    assert [move.length for move in meta.saves] == [96]


def test_requests_that_share_a_prefix_wait_for_one_load(engine: mini.Engine) -> None:
    if engine.layerwise:
        pytest.skip("loads end within their step")
    prompt = list(range(3, 3 + 4 * mini.BLOCK + 1))
    engine.run(mini.Request("first", prompt))
    loads, waits, other = (mini.Request(name, end) for name, end in (
        ("loads", prompt), ("waits", [*prompt, 1]), ("other", [9, *prompt])))
    asked = lambda request, computed=0: until(  # noqa: E731
        engine, lambda: engine.scheduler.get_num_new_matched_tokens(request, computed))
    found, later = asked(loads)
    assert found and later
    blocks = SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4, 5],))
    engine.scheduler.update_state_after_alloc(loads, blocks, found)
    loads.status = SimpleNamespace(name="WAITING_FOR_REMOTE_KVS")
    matched = engine.scheduler.get_num_new_matched_tokens
    for _ in range(3):
        assert matched(waits, 0) == (None, False)
        engine.step()
    assert asked(other) == (0, False), "another prefix does not wait"
    loads.status = SimpleNamespace(name="RUNNING")
    assert asked(waits, 4 * mini.BLOCK) == (0, False), "the engine's own cache has the blocks"
    # A load whose request is aborted lets the next one load.
    loads.status = SimpleNamespace(name="WAITING_FOR_REMOTE_KVS")
    assert matched(waits, 0) == (None, False)
    engine.scheduler.request_finished(loads, [])
    assert asked(waits)[0] == found


def until(engine: mini.Engine, ask: Callable[[], Any]) -> Any:
    """Asks once a step until there is an answer."""
    end = time.monotonic() + 600
    while True:
        found = ask()
        if found[0] is not None:
            return found
        assert time.monotonic() < end
        engine.step()


@pytest.mark.parametrize("what", ["namespace", "session", "append", "lookup"])
@pytest.mark.parametrize("status", ["LIMIT", "NOMEM", "AGAIN"])
def test_a_rejection_by_the_store_is_a_miss(engine: mini.Engine, what: str, status: str,
                                            caplog: pytest.LogCaptureFixture) -> None:
    """A rejection neither ends the engine nor affects other requests."""
    prompt, other = list(range(64)), [7] * 64
    engine.run(mini.Request("a", prompt))
    kind = {"namespace": kvtier.Store, "append": kvtier.Session}.get(what, kvtier.Namespace)
    worker = engine.workers[0].worker

    def refuse(*_: Any, **__: Any) -> None:
        raise make_error(getattr(kvtier.abi, f"KVT_E_{status}"), "refused")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, what, refuse)
        # A new salt needs a new namespace.
        assert engine.run(mini.Request("b", other, salt="s" if what == "namespace" else None)) == 0
    assert "refused" in caplog.text and any(
        worker.counts.get(name) for name in ("failed_lookups", "failed_sessions"))
    assert engine.run(mini.Request("c", prompt)) == 48
    if what != "lookup":
        assert engine.run(mini.Request("d", other)) == 0  # nothing of the request was stored
    assert engine.run(mini.Request("e", other)) == 48


def test_a_load_without_a_session_is_computed(engine: mini.Engine) -> None:
    prompt = list(range(100))
    engine.run(mini.Request("a", prompt))
    worker = engine.workers[0].worker
    if engine.layerwise:
        engine.expect_loss = True
    with pytest.MonkeyPatch.context() as patch:
        def refuse(*_: Any, **__: Any) -> None:
            raise make_error(kvtier.abi.KVT_E_NOMEM, "refused")

        patch.setattr(kvtier.Session, "append", refuse)
        engine.run(mini.Request("b", prompt))
    assert worker.counts["lost_blocks"] >= 6 and worker.counts["failed_sessions"] >= 1
    engine.expect_loss = False
    assert engine.run(mini.Request("c", prompt)) == 96


def test_an_interrupted_wait_keeps_track_of_saves(make: Any, roles: Any) -> None:
    """An interrupted wait must not let the engine overwrite blocks that are still read."""
    one = mini.Engine(make, roles, extra=HOST)
    worker = one.workers[0].worker
    with kvtier.ReadyEvent() as ready, pytest.MonkeyPatch.context() as patch:
        put, wait = kvtier.Session.put, kvtier.Op.wait
        patch.setattr(kvtier.Session, "put",
                      lambda self, *args, **more: put(self, *args, ready=ready, **more))

        def broken(*_: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(kvtier.Op, "wait", broken)
        with pytest.raises(KeyboardInterrupt):
            one.run(mini.Request("a", range(64)))
        patch.setattr(kvtier.Op, "wait", wait)
        saving = list(worker._saving)
        assert saving and not any(op.info().released for op in saving)
        ready.signal()
        one.close()
        assert all(op.closed for op in saving)


def test_reset_cache_makes_saved_kv_a_miss(engine: mini.Engine) -> None:
    prompt = list(range(64))
    engine.run(mini.Request("a", prompt))
    assert engine.scheduler.reset_cache()
    assert engine.run(mini.Request("b", prompt)) == 0
    assert engine.run(mini.Request("c", prompt)) == 48


def test_tenants_policies_and_stats_are_reported(engine: mini.Engine) -> None:
    params = {"kvtier": {"tenant": 5, "priority": 3, "stop": "tool_use", "next_use_s": 3}}
    engine.run(mini.Request("a", range(64), params=params))
    engine.run(mini.Request("b", range(64), params={"kvtier": 7}))
    worker = engine.workers[0]
    worker.worker.set_policy("arc")
    assert 5 in [tenant.tenant for tenant in worker.worker.store.tenants()]
    stats = worker.get_kv_connector_stats()
    assert stats.data["saved_tokens"] >= 64 and stats.data["loaded_tokens"] == 48
    assert worker.get_kv_connector_stats() is None
    both = type(worker).build_kv_connector_stats({"saved_tokens": 1}).aggregate(stats)
    assert both.reduce()["saved_tokens"] == stats.data["saved_tokens"] + 1
    assert engine.scheduler.get_kv_connector_stats().data["hit_tokens"] == 48


def test_next_use_counts_from_the_end_of_the_request(engine: mini.Engine,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    hints: List[Any] = []
    hint = kvtier.Session.hint
    monkeypatch.setattr(kvtier.Session, "hint", lambda self, **given: (
        hints.append(given), hint(self, **given)))
    before = time.monotonic_ns()
    engine.run(mini.Request("a", range(64), params={"kvtier": {"next_use_s": 3}}))
    engine.step()
    after = time.monotonic_ns()
    assert all(before + 3e9 <= one["next_use_ns"] <= after + 3e9 for one in hints) and hints


def test_the_scheduler_switches_policies_and_gives_advice(engine: mini.Engine,
                                                          caplog: pytest.LogCaptureFixture) -> None:
    scheduler, worker = engine.scheduler.scheduler, engine.workers[0].worker
    engine.run(mini.Request("first", range(64)))
    assert not scheduler._advisor.observes  # nothing is recorded before the first advice
    assert scheduler.advice(8).batch == 8
    policy = scheduler._advisor._policy
    policy.set_advice(shrink_above=0.1, window=8, patience=1)
    policy.set_capacity(4)
    scheduler._advisor._capacity = 4
    for turn in range(12):  # three prompts, but room for one
        engine.run(mini.Request(f"r{turn}", range(1000 * (turn % 3), 1000 * (turn % 3) + 65)))
    assert scheduler.advice(8).batch == 4
    with pytest.raises(kvtier.SpecError):
        scheduler.set_policy("arc(")
    scheduler.set_policy("arc")
    scheduler.set_policy("lru", kvtier.TIER_DISK)  # the store has no disk: a warning
    engine.step()
    assert 'tier="host",policy="arc"' in worker.store.metrics()
    assert "set_policy" in caplog.text
    assert policy.spec.startswith("arc")
    policy.close()  # an error in the advisor's policy disables advice only
    assert engine.run(mini.Request("last", range(64))) == 48
    assert scheduler.advice(8) is None


@pytest.mark.parametrize("ranks", [1, 2])
def test_advice_uses_the_policy_of_the_stores(make: Any, roles: Any, ranks: int) -> None:
    one = mini.Engine(make, roles, extra={**HOST, "spec": "store(policy=arc)"}, ranks=ranks)
    one.run(mini.Request("a", range(64)))
    scheduler = one.scheduler.scheduler
    assert scheduler.advice(8).batch == 8
    assert scheduler._advisor._policy.stats()["name"] == "arc"
    one.close()


def test_evictions_are_logged_once(make: Any, roles: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvtier_vllm")
    one = mini.Engine(make, roles, extra={"host_bytes": "1MiB", "policy": "lru",
                                          "log_evictions": 64})
    for turn in range(400):
        one.run(mini.Request(f"r{turn}", range(1000 * turn, 1000 * turn + 64)))
        if "evicted from memory" in caplog.text:
            break
    one.close()
    messages = [one.getMessage() for one in caplog.records if "evicted from" in one.getMessage()]
    assert messages and len(set(messages)) == len(messages)


def test_a_prefix_counts_as_far_as_all_ranks_have_it(make: Any, roles: Any, layerwise: bool,
                                                     tmp_path: Path) -> None:
    disk = {**HOST, "disk_path": str(tmp_path / "kv"), "disk_bytes": "256MiB", "write": "through",
            "layerwise": layerwise}
    first = mini.Engine(make, roles, extra=disk, ranks=2)
    assert first.run(mini.Request("a", range(64))) == 0
    assert first.run(mini.Request("b", range(64))) == 48
    drop_tokens(first.workers[1].worker, list(range(64)), 32)
    assert first.run(mini.Request("c", range(64)), decode=1) == 32  # rank 1 lacks the rest
    first.close()
    again = mini.Engine(make, roles, extra=disk, ranks=2)
    assert again.run(mini.Request("d", range(64))) == 48  # found on both disks
    again.close()


def test_shutdown_cancels_loads_and_finishes_saves(make: Any, roles: Any, tmp_path: Path) -> None:
    disk = {**HOST, "disk_path": str(tmp_path / "kv"), "disk_bytes": "256MiB", "level": "durable"}
    one = mini.Engine(make, roles, extra=disk)
    one.run(mini.Request("a", range(256)))
    request = mini.Request("b", range(256))
    found, _ = one.scheduler.get_num_new_matched_tokens(request, 0)
    holder = SimpleNamespace(get_block_ids=lambda: (list(range(16)),))
    one.scheduler.update_state_after_alloc(request, holder, found)
    one.step()
    one.close()
    with pytest.raises(kvtier.ClosedError):
        one.workers[0].worker.store
    again = mini.Engine(make, roles, extra=disk)
    assert again.run(mini.Request("c", range(256))) == 240
    again.close()


def test_another_order_inside_blocks_is_a_miss(make: Any, roles: Any, tmp_path: Path) -> None:
    import torch

    disk = {**HOST, "disk_path": str(tmp_path / "kv"), "disk_bytes": "256MiB"}
    one = mini.Engine(make, roles, extra=disk)
    one.run(mini.Request("a", range(64)))
    one.close()
    for turned, found in ((True, 0), (False, 48)):
        again = mini.Engine(make, roles, extra=disk)
        if turned:  # tokens before heads, with the same bytes in a block
            again.caches[0] = [torch.zeros((64, mini.BLOCK, 2, 8), dtype=torch.int16)
                               .transpose(1, 2) for _ in again.names]
            again.workers[0].register_kv_caches(dict(zip(again.names, again.caches[0])))
        matched = again.scheduler.get_num_new_matched_tokens(mini.Request("b", range(64)), 0)
        assert matched[0] == found
        again.close()


@pytest.mark.parametrize("change, text", [
    ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
    ({"decode_context_parallel_size": 2}, "decode_context_parallel_size")])
def test_unsupported_parallelism_is_rejected(make: Any, roles: Any, change: Dict[str, int],
                                             text: str) -> None:
    config, cache = mini.configs(HOST, **change)
    with pytest.raises(kvtier.UnsupportedError, match=text):
        make(config, roles.SCHEDULER, cache, 0)


def test_unsupported_models_and_options_are_rejected(make: Any, roles: Any) -> None:
    import torch

    config, cache = mini.configs(HOST)
    cache.kv_cache_groups.append(cache.kv_cache_groups[0])
    with pytest.raises(kvtier.UnsupportedError, match="hybrid"):
        make(config, roles.WORKER, cache, 0)
    config, cache = mini.configs(HOST)
    cache.kv_cache_groups[0].kv_cache_spec = mini.SlidingWindowSpec()
    with pytest.raises(kvtier.UnsupportedError, match="SlidingWindowSpec"):
        make(config, roles.WORKER, cache, 0)
    config, cache = mini.configs(HOST)
    cache.kv_cache_groups[0].is_eagle_group = True
    with pytest.raises(kvtier.UnsupportedError, match="draft"):
        make(config, roles.WORKER, cache, 0)
    config, cache = mini.configs({"host_byte": 1})
    with pytest.raises(kvtier.InvalidError, match="did you mean 'host_bytes'"):
        make(config, roles.WORKER, cache, 0)
    for name in ("layerwise", "save_decode", "hints"):
        config, cache = mini.configs({**HOST, name: "false"})
        for role in (roles.SCHEDULER, roles.WORKER):
            with pytest.raises(kvtier.InvalidError, match=f"{name}='false'"):
                make(config, role, cache, 0)
    config, cache = mini.configs(HOST, layers=1)
    worker = make(config, roles.WORKER, cache, 0)
    name = cache.kv_cache_groups[0].layer_names[0]
    for wrong, text in ((torch.zeros((64, 4, 16, 8))[:, :, :, ::2], "gaps"),
                        ([torch.zeros(1)], "not one tensor"), (torch.zeros((3, 4)), "shape"),
                        (torch.zeros((64, 4), device="meta"), "meta")):
        with pytest.raises(kvtier.Error, match=text):
            worker.register_kv_caches({name: wrong})
    with pytest.raises(kvtier.InvalidError, match="no cache"):
        worker.register_kv_caches({})
    worker.shutdown()


def test_interleaved_and_split_blocks_are_supported(make: Any, roles: Any) -> None:
    import torch

    config, cache = mini.configs(HOST, layers=2)
    worker = make(config, roles.WORKER, cache, 0)
    names = cache.kv_cache_groups[0].layer_names
    whole = torch.zeros((64, 2, 16, 2, 8), dtype=torch.int16)  # block, layer, token, head, number
    worker.register_kv_caches({name: whole[:, at].transpose(1, 2)
                               for at, name in enumerate(names)})
    parts = torch.zeros((128, 2, 8, 8))  # a block consists of two kernel blocks
    worker.register_kv_caches({name: parts.clone() for name in names})
    worker.shutdown()


def _stat(engine: mini.Engine, name: str) -> int:
    return int(engine.workers[0].worker.store.stats()[name])


@pytest.mark.parametrize("params", [
    {"kv_cache_ttl_seconds": 3600}, {"cache_control": {"type": "ephemeral", "ttl": "1h"}},
    {"prompt_cache_retention": "24h"}, {"kvtier": {"keep_s": 60}}])
def test_kept_requests_survive_pressure(make: Any, roles: Any, params: Dict[str, Any]) -> None:
    engine = mini.Engine(make, roles, extra={"host_bytes": "512KiB", "policy": "lru"})
    engine.run(mini.Request("kept", range(65), params=params))
    assert _stat(engine, "pins") == 4
    engine.run(mini.Request("other", range(1000, 1065)))
    for turn in range(12):  # more than the store has room for
        engine.run(mini.Request(f"r{turn}", range(2000 * turn, 2000 * turn + 320)))
    assert _stat(engine, "dropped_chunks") > 0
    assert engine.run(mini.Request("other again", range(1000, 1065))) == 0
    assert engine.run(mini.Request("kept again", range(65))) == 64
    engine.close()


def test_a_request_that_the_engines_cache_served_is_kept(engine: mini.Engine) -> None:
    engine.run(mini.Request("first", range(63)))
    assert _stat(engine, "pins") == 0
    engine.run(mini.Request("again", range(63), params={"kv_cache_ttl_seconds": 60}), computed=48)
    assert _stat(engine, "pins") == 3


def test_pins_have_a_share_and_rejections_are_counted(make: Any, roles: Any,
                                                      caplog: pytest.LogCaptureFixture) -> None:
    engine = mini.Engine(make, roles, extra={"spec": "store(host=512KiB, pins=0.2)"})
    for turn in range(4):
        engine.run(mini.Request(f"r{turn}", range(1000 * turn, 1000 * turn + 65),
                                params={"kv_cache_ttl_seconds": 3600}))
    counts = engine.workers[0].worker.counts
    assert counts["pinned_requests"] + counts["rejected_pins"] == 4 and counts["rejected_pins"] > 0
    assert "is not kept for 3600 s" in caplog.text and "pins=" in caplog.text
    engine.close()


@pytest.mark.parametrize("wrong", [0, -1, 1e12, "600", True, [], math.nan])
def test_a_wrong_lifetime_is_ignored_with_a_warning(engine: mini.Engine, wrong: Any,
                                                    caplog: pytest.LogCaptureFixture) -> None:
    engine.run(mini.Request("a", range(65), params={"kv_cache_ttl_seconds": wrong}))
    assert "kv_cache_ttl_seconds hints of a request are ignored" in caplog.text
    assert _stat(engine, "pins") == 0
    assert engine.run(mini.Request("b", range(65))) == 64


def test_kv_is_removed_at_its_end(make: Any, roles: Any) -> None:
    engine = mini.Engine(make, roles, extra={"host_bytes": "64MiB"})
    worker = engine.workers[0].worker
    sessions: List[Any] = []
    session = kvtier.Namespace.session

    def recorded(self: Any, *args: Any, **given: Any) -> Any:
        sessions.append(given["ttl"])
        # The clock of the store cannot be set: this lifetime is over at once.
        return session(self, *args, **{**given, "ttl": given["ttl"] and 1e-9})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvtier.Namespace, "session", recorded)
        engine.run(mini.Request("short", range(65), params={"kvtier": {"ttl_s": 60}}))
        engine.run(mini.Request("long", range(1000, 1065)))
    assert sessions == [60.0, None]
    end = time.monotonic() + 600
    while worker.store.stats()["expired_chunks"] < 4 and time.monotonic() < end:
        engine.step()  # chunks that a session references at their end are removed later
        engine.run(mini.Request("long again", range(1000, 1065)))
    assert engine.run(mini.Request("short again", range(65))) == 0
    assert engine.run(mini.Request("long again", range(1000, 1065))) == 64
    engine.close()


def test_a_tenants_quota_is_its_own(make: Any, roles: Any,
                                    caplog: pytest.LogCaptureFixture) -> None:
    engine = mini.Engine(make, roles, extra={"host_bytes": "64MiB", "policy": "lru"})
    store = engine.workers[0].worker.store
    engine.run(mini.Request("b", range(65), params={"kvtier": {"tenant": 2}}))
    store.set_quota(2, kvtier.TIER_HOST, 1 << 30)
    chunk = next(row.host_bytes for row in store.tenants() if row.tenant == 2) // 4
    store.set_quota(1, kvtier.TIER_HOST, 6 * chunk)

    def run(name: str, start: int, length: int = 65) -> int:
        return engine.run(mini.Request(name, range(start, start + length),
                                       params={"kvtier": {"tenant": 1}}))

    run("a1", 1000)
    run("a2", 2000)
    assert run("a1 again", 1000, 33) == 32, "the end of the older request was evicted"
    assert run("a3", 3000, 129) == 0 and run("a3 again", 3000, 129) == 0
    assert engine.workers[0].worker.counts["failed_saves"] == 2, "8 chunks are more than 6"
    assert "tenant 1" in caplog.text and "quota" in caplog.text
    assert engine.run(mini.Request("b again", range(65))) == 64
    row = next(row for row in store.tenants() if row.tenant == 1)
    assert row.rejected_puts == 2 and row.host_bytes <= row.host_quota_bytes == 6 * chunk
    engine.close()


def test_the_next_use_after_a_tool_is_learned(engine: mini.Engine,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = engine.scheduler.scheduler
    now = [0.0]
    scheduler._clock = lambda: now[0]
    ended: List[Any] = []
    end = scheduler.finished
    monkeypatch.setattr(scheduler, "finished", lambda request: (
        end(request), ended.append(scheduler._next_meta.ended[-1].next_use_s)))
    params = {"prompt_cache_key": "chat", "kvtier": {"tool": "search"}}
    for turn in range(5):
        engine.run(mini.Request(f"r{turn}", range(65), params=params))
        now[0] += 7
    assert ended == [None, None, None, 7.0, 7.0]
