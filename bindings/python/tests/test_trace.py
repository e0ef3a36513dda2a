"""Traces: generated, read, replayed, compared; progress functions that stop, raise, or close."""

from __future__ import annotations

import gc
import math
import threading
from pathlib import Path
from typing import Any, List, Tuple

import kvtier
import pytest
from kvtier import Trace

DATA = Path(__file__).resolve().parents[3] / "tests" / "data"
TEN_MINUTES = 600 * 10**9


def chat(rate: float = 1.0) -> Trace:
    return Trace.generate("chat", duration_ns=TEN_MINUTES, rate=rate)


def outcome(replay: kvtier.Replay) -> Tuple[Any, ...]:
    """All fields except the times."""
    return replay[:13]


def test_replays_are_reproducible_and_consistent() -> None:
    with chat() as trace:
        info = trace.info
        assert info.requests > 600 and info.block_tokens == 512
        everything = trace.replay("lru", info.blocks)
        assert everything.evictions == 0 and everything.hit_tokens == info.known_tokens
        assert 0 < everything.token_hit_rate < 1 and 0 < everything.cost_hit_rate < 1
        some = trace.replay("horizon", info.blocks // 8, timed=False, hints=kvtier.HINTS_NONE)
        assert some.evictions > 0 and some.decision_max_ns == 0
        assert some.inserts - some.evictions <= info.blocks // 8
        assert trace.replay("lru", 100, warm_up=info.requests).requests == 0
        assert trace.replay("lru", info.blocks, layers=2, holes=True,
                            alpha=0.001).hit_tokens == info.known_tokens
    with pytest.raises(kvtier.ClosedError):
        trace.info
    trace.close()
    assert outcome(chat().replay("lru", 100)) == outcome(chat().replay("lru", 100))


def test_comparison_rows_equal_single_replays() -> None:
    with chat(0.2) as trace:
        sizes = [trace.info.blocks // 8, trace.info.blocks // 4]
        rows = trace.compare(["lru", "horizon"], iter(sizes), timed=False)
        assert [(row.spec, row.capacity_blocks) for row in rows] == [
            (spec, size) for spec in ("lru", "horizon") for size in sizes]
        for row in rows:
            alone = trace.replay(row.spec, row.capacity_blocks)
            assert outcome(alone) == outcome(row.replay)


@pytest.mark.skipif(not DATA.is_dir(), reason="the sources are elsewhere")
def test_trace_files_of_the_repository_can_be_read() -> None:
    files = sorted(DATA.glob("*.kvtrace"))
    assert files
    for path in files:
        with Trace.open(path) as trace, Trace.open(str(path), flat=True) as flat:
            assert trace.info.references == flat.info.requests > 0


def test_invalid_arguments_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        Trace()
    for kind in ("chta", ""):
        with pytest.raises(kvtier.SpecError, match="chat"):
            Trace.generate(kind)
    for rate in (math.nan, math.inf, -1.0, "x", 10**400):
        with pytest.raises(kvtier.InvalidError):
            Trace.generate("chat", rate=rate)  # type: ignore[arg-type]
    with pytest.raises(kvtier.LimitError):
        Trace.generate("chat", duration_ns=1 << 62)
    for wrong in (-1, 1 << 63):
        with pytest.raises(kvtier.InvalidError):
            Trace.generate("chat", duration_ns=wrong)
    with pytest.raises(kvtier.NotFoundError):
        Trace.open(tmp_path / "none")
    with pytest.raises(kvtier.SpecError, match="mooncake"):
        Trace.open(tmp_path / "none", "moncake")
    with pytest.raises(kvtier.InvalidError):
        Trace.open("/\udcff")
    with pytest.raises(kvtier.InvalidError):
        Trace.open(b"/tmp/x")  # type: ignore[arg-type]
    bad = tmp_path / "bad"
    bad.write_bytes(b"KVTTRACE\x01" + bytes(64))
    with pytest.raises(kvtier.CorruptError, match="bad"):
        Trace.open(bad)
    with chat(0.05) as trace:
        for size in (0, 1 << 40):
            with pytest.raises(kvtier.LimitError):
                trace.replay("lru", size)
        with pytest.raises(kvtier.SpecError, match="horizon"):
            trace.replay("horizn", 10)
        with pytest.raises(kvtier.InvalidError):
            trace.replay("custom", 10)
        for options in ({"alpha": math.nan}, {"hints": 9}, {"layers": -1}, {"warm_up": 1 << 64}):
            with pytest.raises(kvtier.InvalidError):
                trace.replay("lru", 10, **options)  # type: ignore[arg-type]


def test_progress_can_stop_raise_and_close(unraisable: List[Any]) -> None:
    seen: List[Tuple[int, int]] = []
    with chat() as trace:
        requests = trace.info.requests
        trace.replay("lru", 100, progress=lambda *at: seen.append(at))
        assert len(seen) >= 3 and seen[-1] == (requests, requests) and seen == sorted(seen)
        with pytest.raises(kvtier.CancelledError):
            trace.replay("lru", 100, progress=lambda done, total: False)

        def raises(done: int, total: int) -> None:
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            trace.replay("lru", 100, progress=raises)

        def nests(done: int, total: int) -> None:
            with pytest.raises(kvtier.ReentrantError):
                trace.replay("lru", 100)
            assert trace.info.requests == total

        trace.replay("lru", 100, progress=nests)
        before = outcome(trace.replay("lru", 100))
        after = trace.replay("lru", 100, progress=lambda done, total: trace.close())
        assert outcome(after) == before and trace.closed
    assert not unraisable


def test_threads_share_a_dropped_trace() -> None:
    trace = chat()
    results: List[Tuple[Any, ...]] = []

    def run(mine: Trace) -> None:
        results.append(outcome(mine.replay("horizon", 500)))

    threads = [threading.Thread(target=run, args=(trace,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    del trace
    gc.collect()
    for thread in threads:
        thread.join()
    assert len(results) == 3 and len(set(results)) == 1


def test_gauges_are_found_by_name() -> None:
    with kvtier.Policy("arc", max_objects=16) as policy:
        gauges = policy.gauges()
        assert "arc_p" in gauges
        assert all(policy.gauge(name) == value for name, value in gauges.items())
        policy.switch("lru")
        assert "arc_p" not in policy.gauges()
