"""The lab: several traces, sizes in parts, rows and their table."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List

import kvtier
import pytest
from kvtier import Lab, Trace

TEN_MINUTES = 600 * 10**9
DATA = Path(__file__).resolve().parents[3] / "tests" / "data"


def test_rows_are_the_replays_of_each() -> None:
    with Trace.generate("chat", duration_ns=TEN_MINUTES, rate=0.2) as mine:
        with Lab("agent", named={"mine": mine}, duration_ns=TEN_MINUTES, rate=0.1) as lab:
            assert list(lab) == ["agent", "mine"] and lab.traces["mine"] is mine
            table = lab.compare(["lru", "horizon"], ["5%", 40], timed=False)
            assert [(row.trace, row.policy, row.size) for row in table] == [
                (trace, policy, size) for trace in ("agent", "mine")
                for policy in ("lru", "horizon") for size in ("5%", "40")]
            for row in table:
                trace = lab.traces[row.trace]
                if row.size == "5%":
                    assert row.capacity_blocks == -(-trace.info.blocks * 5 // 100)
                alone = trace.replay(row.policy, row.capacity_blocks)
                assert row.replay[:13] == alone[:13]
                assert row.token_miss_ratio == 1 - alone.token_hit_rate
                assert row.as_dict()["hits"] == alone.hits
            assert table.dicts() == [row.as_dict() for row in table]
            lines = str(table).splitlines()
            assert len(lines) == 1 + len(table) and lines[0].split()[:3] == [
                "trace", "policy", "size"]
            assert f"{100 * table[0].token_miss_ratio:.2f} %" in lines[1]
            best = table.best()
            assert len(best) == 4
            assert all(one.token_miss_ratio <= row.token_miss_ratio for one in best
                       for row in table if (one.trace, one.size) == (row.trace, row.size))
        assert lab.closed and not mine.closed and mine.info.requests
        for use in (lambda: lab.compare(), lambda: list(lab), lab.__enter__):
            with pytest.raises(kvtier.ClosedError):
                use()


def test_progress_of_a_comparison() -> None:
    seen: List[Any] = []
    with Lab("chat", duration_ns=TEN_MINUTES, rate=1.0) as lab:
        lab.compare("lru", ["5%", "50%"], progress=lambda *told: seen.append(told))
        assert {run.number for run, *_ in seen} == {0, 1} and seen[-1][0].runs == 2
        assert seen[-1][1] == seen[-1][2] == lab.traces["chat"].info.requests
        with pytest.raises(kvtier.CancelledError):
            lab.compare("lru", 10, progress=lambda run, done, of: False)

        def fails(run: Any, done: int, of: int) -> None:
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            lab.compare("lru", 10, progress=fails)


@pytest.mark.skipif(not DATA.is_dir(), reason="the sources are elsewhere")
def test_files_are_called_by_their_names() -> None:
    with Lab(DATA / "chat.kvtrace", str(DATA / "agent.kvtrace")) as lab:
        assert list(lab) == ["chat", "agent"]
        assert repr(lab) == "<kvtier.Lab chat, agent>"


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(kvtier.InvalidError, match="at least one trace"):
        Lab()
    with pytest.raises(kvtier.SpecError, match="chat"):
        Lab("chta")
    with pytest.raises(kvtier.NotFoundError):
        Lab(tmp_path / "none.kvtrace")
    with pytest.raises(kvtier.NotFoundError):
        Lab("none.kvtrace")
    with pytest.raises(kvtier.InvalidError, match="named="):
        Lab("chat", "chat", duration_ns=TEN_MINUTES)
    with Lab("chat", duration_ns=TEN_MINUTES, rate=0.05) as lab:
        for size in ("all", "0%", "-1%", "nan%", "x%", "", -1):
            with pytest.raises(kvtier.InvalidError):
                lab.compare("lru", size)
        assert lab.compare("lru", "5")[0].capacity_blocks == 5
        with pytest.raises(kvtier.SpecError):
            lab.compare("horizn")
