"""lmdeploy's paging scheduler with our connector: save, evict, load, resume."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, List

import pytest

harness = pytest.importorskip("harness")
import kvtier  # noqa: E402
from harness import BLOCK, Engine, bytes_of, fill, prompt, rows_of, spoil  # noqa: E402

HERE = Path(__file__).resolve().parent
HOST = {"host_bytes": 64 << 20}


def saved(engine: Any, session: int, tokens: Any, blocks: int, seed: int) -> Any:
    """Computes and saves a request. Returns its blocks' bytes on each worker."""
    sequence = engine.admit(session, tokens)
    table = engine.table(sequence)[:blocks]
    for rank, rows in enumerate(engine.caches):
        fill(rows, table, seed + rank)
    engine.step([sequence], (blocks * BLOCK,))
    want = [bytes_of(rows, table) for rows in engine.caches]
    engine.end(session)
    engine.settle()
    return want


def evict_all(engine: Any, session: int, blocks: int = 8) -> None:
    """Evicts all blocks from the engine's cache by a large request, then overwrites the cache."""
    engine.admit(session, [5] * (blocks * BLOCK - 1))
    engine.end(session)
    for rows in engine.caches:
        spoil(rows)


@pytest.mark.parametrize("asynchronous", [None, True])
@pytest.mark.parametrize("wide", [0, 24])
def test_evicted_blocks_are_loaded_on_resume(asynchronous: Any, wide: int) -> None:
    engine = Engine({**HOST, "lookup_async": asynchronous}, caches=[rows_of(8, 4, wide)])
    want = saved(engine, 0, prompt(4), 4, 1)
    evict_all(engine, 1)
    sequence = engine.admit(2, prompt(4, more=[9, 9, 9]))
    assert "WAITING_FOR_REMOTE_KVS" in engine.statuses
    assert (sequence.num_history_ids, sequence.num_all_ids) == (4 * BLOCK, 4 * BLOCK + 3)
    table = engine.table(sequence)[:4]
    assert [bytes_of(rows, table) for rows in engine.caches] == want
    # Loaded blocks are not saved again, and the computed rest is not a full block.
    fill(engine.caches[0], engine.table(sequence)[4:], 3)
    assert engine.step([sequence], (4 * BLOCK + 3,)) is None
    engine.end(2)
    engine.close()


def test_lease_keeps_blocks_until_saves_complete() -> None:
    engine = Engine({**HOST, "lookup_async": False})
    sequence = engine.admit(0, prompt(4))
    table = engine.table(sequence)[:4]
    fill(engine.caches[0], table, 1)
    before = bytes_of(engine.caches[0], table)
    meta = engine.scheduler.build_connector_meta([sequence], connector_token_lens=(4 * BLOCK,))
    engine.end(0)
    free = engine.scheduler.block_manager.get_num_free_gpu_blocks()
    assert free == 8 - 4  # leased, although the request is gone
    assert engine.scheduler.kv_save_coordinator.has_pending()
    meta = pickle.loads(pickle.dumps(meta))  # as it goes to a worker
    worker = engine.workers[0]
    worker.bind_connector_metadata(meta)
    worker.start_load_kv()
    worker.start_save_kv()
    engine.settle()
    assert engine.scheduler.block_manager.get_num_free_gpu_blocks() >= 4
    assert not engine.scheduler.kv_save_coordinator.has_pending()
    evict_all(engine, 1)
    again = engine.admit(2, prompt(4))
    assert bytes_of(engine.caches[0], engine.table(again)[:4]) == before
    engine.close()


def test_workers_load_the_common_prefix() -> None:
    engine = Engine({**HOST, "lookup_async": True}, workers=2)
    want = saved(engine, 0, prompt(4), 4, 11)
    assert want[0] != want[1]
    evict_all(engine, 1)
    sequence = engine.admit(2, prompt(4))
    assert [bytes_of(rows, engine.table(sequence)[:4]) for rows in engine.caches] == want
    engine.end(2)
    # One worker loses a block: the common prefix ends before it.
    blocks = engine.workers[1]._worker._blocks
    side = engine.connector._scheduler_side()
    engine.admit(3, prompt(4, first=9000))
    engine.end(3)
    evict_all(engine, 4)
    from kvtier_lmdeploy import _names

    names: List[bytes] = []
    _names.extend(names, prompt(4), BLOCK, "", 4)
    assert side.lookups._prefix(names) == 4
    blocks.drop(names[2:3])
    assert side.lookups._prefix(names) == 2
    sequence = engine.admit(5, prompt(4))
    assert sequence.num_history_ids == 2 * BLOCK
    engine.close()


def test_lookup_can_be_pending_and_cancelled() -> None:
    engine = Engine({**HOST, "lookup_async": True})
    lookups = engine.connector._scheduler_side().lookups
    gate, started = threading.Event(), threading.Event()
    real = lookups._prefix

    def slow(names: Any) -> int:
        started.set()
        assert gate.wait(600)
        return real(names)

    lookups._prefix = slow
    sequence = engine.scheduler.add_session(0).add_sequence(harness.torch.tensor(prompt(4)))
    assert engine.scheduler.schedule(is_prefill=True).running == []
    assert engine.connector.is_lookup_pending(sequence.seq_id)
    assert engine.scheduler.last_schedule_had_pending_lookup
    assert started.wait(600)
    engine.scheduler.schedule(is_prefill=True)
    assert len(lookups._pending) == 1  # repeated calls share one query
    engine.end(0)  # cancels
    assert not engine.connector.is_lookup_pending(sequence.seq_id)
    gate.set()
    lookups._prefix = real
    engine.admit(1, prompt(4))
    engine.end(1)
    engine.close()


def test_failed_load_is_computed() -> None:
    engine = Engine({**HOST, "lookup_async": False})
    saved(engine, 0, prompt(4), 4, 1)
    evict_all(engine, 1)
    worker = engine.workers[0]._worker
    sequence = engine.scheduler.add_session(2).add_sequence(harness.torch.tensor(prompt(4)))
    engine.scheduler.schedule(is_prefill=True)
    assert sequence.status.name == "WAITING_FOR_REMOTE_KVS"
    worker._blocks.clear()  # the lookup found blocks that are dropped before the load
    end = time.monotonic() + 600
    while sequence not in engine.scheduler.schedule(is_prefill=True).running:
        assert time.monotonic() < end
        engine.step()
    assert sequence.num_history_ids == 0
    assert worker.failed_loads == 1
    # The computed blocks are saved, from the first one on.
    table = engine.table(sequence)[:4]
    fill(engine.caches[0], table, 5)
    meta = engine.step([sequence], (4 * BLOCK,))
    assert [len(save.names) for save in meta.saves] == [4]
    engine.settle()
    engine.close()


def test_blocks_evicted_from_the_store_are_saved_again() -> None:
    """A preempted request whose blocks the store dropped computes and saves them again."""
    engine = Engine({**HOST, "lookup_async": False})
    sequence = engine.admit(0, prompt(4))
    fill(engine.caches[0], engine.table(sequence)[:4], 1)
    engine.step([sequence], (4 * BLOCK,))
    engine.settle()
    engine.scheduler.stop_session(0)
    evict_all(engine, 1)
    assert sequence.num_blocks == 0
    engine.workers[0]._worker._blocks.clear()
    sequence.state.activate()
    assert sequence in engine.scheduler.schedule(is_prefill=True).running
    fill(engine.caches[0], engine.table(sequence)[:4], 1)
    meta = engine.step([sequence], (4 * BLOCK,))
    assert meta is not None and [len(save.names) for save in meta.saves] == [4]
    engine.end(0)
    engine.settle()
    engine.close()


def test_kv_of_changed_weights_is_neither_saved_nor_loaded() -> None:
    engine = Engine({**HOST, "lookup_async": False})
    saved(engine, 0, prompt(4), 4, 1)
    evict_all(engine, 1)
    running = engine.admit(2, prompt(2, first=900))
    loading = engine.scheduler.add_session(3).add_sequence(harness.torch.tensor(prompt(4)))
    engine.scheduler.schedule(is_prefill=True)
    assert loading.status.name == "WAITING_FOR_REMOTE_KVS"
    engine.connector.set_weights("2")
    meta = engine.step([running], (2 * BLOCK,))
    assert meta.saves == ()  # part of its KV is of the old weights
    end = time.monotonic() + 600
    while loading.status.name == "WAITING_FOR_REMOTE_KVS":
        assert time.monotonic() < end
        engine.step()
    assert loading.num_history_ids == 0
    engine.end(2)
    engine.end(3)
    evict_all(engine, 4)
    assert engine.admit(5, prompt(4)).num_history_ids == 0
    engine.end(5)
    engine.connector.set_weights("")
    evict_all(engine, 6)
    assert engine.admit(7, prompt(4)).num_history_ids == 4 * BLOCK
    engine.end(7)
    engine.close()


def test_shutdown_completes_saves_in_progress(tmp_path: Path) -> None:
    """The next engine finds the blocks whose saves the workers had started."""
    disk = {**HOST, "lookup_async": False, "disk_path": str(tmp_path), "disk_bytes": 256 << 20}
    engine = Engine(disk)
    sequence = engine.admit(0, prompt(4))
    table = engine.table(sequence)[:4]
    fill(engine.caches[0], table, 1)
    before = bytes_of(engine.caches[0], table)
    meta = engine.scheduler.build_connector_meta([sequence], connector_token_lens=(4 * BLOCK,))
    worker = engine.workers[0]
    worker.bind_connector_metadata(meta)
    worker.start_load_kv()
    worker.start_save_kv()
    engine.close()
    worker.shutdown()  # a second call does nothing
    assert not engine.scheduler.kv_save_coordinator.has_pending()
    after = Engine(disk)
    again = after.admit(0, prompt(4))
    assert again.num_history_ids == 4 * BLOCK
    assert bytes_of(after.caches[0], after.table(again)[:4]) == before
    after.close()


@pytest.mark.parametrize("how", ["shutdown", "kill", "exit"])
def test_disk_outlives_the_process(how: str, tmp_path: Path) -> None:
    script = HERE / "durable.py"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    first = subprocess.run([sys.executable, str(script), str(tmp_path), how], env=env,
                           capture_output=True, text=True, timeout=600)
    assert first.returncode == (-signal.SIGKILL if how == "kill" else 0), first.stderr[-2000:]
    second = subprocess.run([sys.executable, str(script), str(tmp_path), "resume"], env=env,
                            capture_output=True, text=True, timeout=600)
    assert second.returncode == 0, second.stderr[-2000:]
    assert second.stdout.split() == ["64", "True"], second.stdout


@pytest.mark.parametrize("keeps", [False, True])
def test_sleep_drops_transfers_and_keeps_weights_on_request(keeps: bool, tmp_path: Path) -> None:
    """The engine shuts workers down and builds new ones. KV from before the sleep is found only if
    the sleep keeps the weights."""
    from lmdeploy.pytorch.kv_connector import KVConnectorRole, factory

    engine = Engine({**HOST, "disk_path": str(tmp_path), "disk_bytes": 256 << 20, "level": "disk",
                     "lookup_async": False, "sleep_keeps_weights": keeps})
    saved(engine, 0, prompt(4), 4, 1)
    engine.workers[0].shutdown()
    engine.drained()
    assert engine.connector.stats() == [None]
    sequence = engine.admit(1, prompt(4, first=500))  # no worker answers, so the request computes
    assert sequence.num_history_ids == 0
    engine.end(1)
    engine.workers = [factory.build_kv_connector(KVConnectorRole.WORKER, engine.config)]
    engine.workers[0].register_kv_caches(engine.caches[0])
    engine.settle()
    evict_all(engine, 5)
    assert engine.admit(6, prompt(4)).num_history_ids == (4 * BLOCK if keeps else 0)
    engine.end(6)
    engine.settle()
    saved(engine, 2, prompt(4, first=900), 4, 2)
    evict_all(engine, 3)
    assert engine.admit(4, prompt(4, first=900)).num_history_ids == 4 * BLOCK
    engine.close()


def test_policy_advice_metrics_and_evictions_are_available() -> None:
    engine = Engine({**HOST, "lookup_async": False, "policy": "lru", "log_evictions": True})
    connector = engine.connector
    saved(engine, 0, prompt(4), 4, 1)
    end = time.monotonic() + 600
    while (advice := connector.advice(4)) is None:
        assert time.monotonic() < end
        time.sleep(0.001)
    assert advice.batch == 4
    connector.set_policy("host", "arc")
    with pytest.raises(kvtier.SpecError):
        connector.set_policy("host", "arc(")
    with pytest.raises(kvtier.InvalidError):
        connector.set_policy("moon", "arc")
    saved(engine, 7, prompt(4, first=700), 4, 2)
    engine.settle()
    stats = connector.stats()[0]
    assert stats is not None and stats["puts"] >= 2 and stats["block_bytes"] == 4 * BLOCK * 32
    assert "kvtier" in (connector.metrics()[0] or "")
    assert connector.evictions("host") == [[]]
    engine.close()


def test_store_smaller_than_the_sessions_returns_correct_bytes() -> None:
    """With more prefixes than the store holds, loaded blocks are correct and others computed."""
    engine = Engine({"host_bytes": 40 << 20, "lookup_async": False, "max_sessions": 4},
                    caches=[{"row": harness.torch.zeros(8, 1 << 20, dtype=harness.torch.uint8)}])
    want = {}
    for turn in range(14):
        want[turn] = saved(engine, turn, prompt(4, first=1000 * turn), 4, turn)
    found = 0
    for turn in range(13, -1, -1):
        evict_all(engine, 100 + turn)
        sequence = engine.admit(200 + turn, prompt(4, first=1000 * turn))
        blocks = int(sequence.num_history_ids) // BLOCK
        table = engine.table(sequence)[:blocks]
        assert bytes_of(engine.caches[0], table) == want[turn][0][:blocks]
        found += blocks
        engine.end(200 + turn)
        engine.settle()
    assert 4 <= found < 14 * 4
    engine.close()


def test_statistics_can_be_queried_during_transfers() -> None:
    engine = Engine({**HOST, "lookup_async": True})
    stop = threading.Event()
    errors = []

    def query() -> None:
        while not stop.is_set():
            try:
                engine.connector.stats()
                engine.connector.metrics()
            except Exception as error:  # noqa: BLE001
                errors.append(error)
            time.sleep(0.001)

    threads = [threading.Thread(target=query) for _ in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(6):
        want = saved(engine, turn, prompt(4, first=1000 * turn), 4, turn)
        evict_all(engine, 100 + turn)
        sequence = engine.admit(200 + turn, prompt(4, first=1000 * turn))
        assert [bytes_of(engine.caches[0], engine.table(sequence)[:4])] == want
        engine.end(200 + turn)
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
    engine.close()
