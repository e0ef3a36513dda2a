"""Policies: objects in the library's table, candidates as columns, callables."""

from __future__ import annotations

import array
import gc
import math
import random
from typing import Any, Dict, List, Optional, Sequence, Tuple

import kvtier
import numpy as np
import pytest
from kvtier import Policy, PolicyObject, PolicyContext, _callbacks


def small(spec: str = "lru", **options: Any) -> Policy:
    return Policy(spec, max_objects=64, remember=64, log_entries=4, **options)


def test_objects_are_inserted_touched_and_evicted() -> None:
    with small() as policy:
        policy.insert([PolicyObject(1, 2), PolicyObject(2, 2, parent=1),
                       PolicyObject(3, 2, parent=2), 9])
        context = PolicyContext(session=4, tokens_each=16, priority=0)
        assert policy.lookup([1, 2, 3, 4], context) == 3
        assert policy.found([1, 4], context) == [True, False]
        assert policy.touch([9, 10]) == 1
        assert policy.record([9, 10], units=[7, 8]) == 1
        assert policy.hint([1, 2], context, stop=kvtier.STOP_END_TURN, done=True) == 2
        policy.pin([9])
        policy.acquire(array.array("Q", [3]))
        assert [v.id for v in policy.preview(100).victims] == [10]
        policy.unpin([9])
        policy.release(np.array([3], dtype=np.uint64))
        policy.resize([9], [3])
        out = policy.evict(2)
        assert out.victims == [kvtier.Victim(3, 2)] and out.decided_by == "lru"
        assert policy.evict(0) == kvtier.Eviction([], 0, 0, 0, "lru")
        assert policy.evict(100, most=1).shortfall_units > 0
        log = policy.log()
        assert [e.number for e in log] == [1, 2] and log[0].session == 4
        assert log[0].policy == "lru"
        policy.remove([9])
        stats = policy.stats()
        assert stats["name"] == "lru" and stats["evictions"] == 2 and stats["references"] == 6
        assert 0 <= stats["re_prefill_rate"] <= 1
        policy.switch("fifo")
        assert policy.spec == "fifo"
        policy.set_capacity(7)
        assert policy.stats()["capacity_units"] == 7
        policy.set_advice(max_batch=4, grow_below=0)
        assert policy.advise(100).batch == 4
    with pytest.raises(kvtier.ClosedError):
        policy.stats()
    assert "lru" in [info.name for info in kvtier.policies()]


def test_rejected_calls_change_nothing() -> None:
    with pytest.raises(kvtier.SpecError, match="lru"):
        Policy("lrv")
    with pytest.raises(kvtier.InvalidError):
        Policy("custom")
    with pytest.raises(kvtier.InvalidError):
        Policy(alpha=math.nan, beta=1.0)
    with small() as policy:
        policy.insert([1, 2], now_ns=100)
        for rows in ([3, 1], [PolicyObject(3, 0)], [PolicyObject(3, 1 << 40)],
                     [PolicyObject(3, cost=math.nan)], [3, 3]):
            with pytest.raises(kvtier.InvalidError):
                policy.insert(rows, now_ns=100)
        with pytest.raises(kvtier.LimitError):
            policy.record(range(100, 200), now_ns=100)
        with pytest.raises(kvtier.InvalidError):
            policy.touch([1], now_ns=99)
        with pytest.raises(kvtier.InvalidError):
            policy.touch([1], now_ns=math.nan)  # type: ignore[arg-type]
        with pytest.raises(kvtier.InvalidError):
            policy.touch([-1])
        with pytest.raises(kvtier.InvalidError):
            policy.touch([1.5])
        with pytest.raises(kvtier.InvalidError):
            policy.touch(np.array([1.0]))
        with pytest.raises(kvtier.NotFoundError):
            policy.remove([1, 404], now_ns=100)
        with pytest.raises(kvtier.StateError):
            policy.release([1])
        with pytest.raises(kvtier.InvalidError):
            policy.hint([1], confidence=math.nan)
        with pytest.raises(kvtier.NotFoundError):
            policy.gauge("nonsense")
        with pytest.raises(kvtier.SpecError, match="fifo"):
            policy.switch("fifa")
        assert policy.stats()["objects"] == 2


def reference(ids: Sequence[int], last: Sequence[int], blocks: Sequence[int],
              need: int) -> List[Tuple[int, int]]:
    """Takes the oldest candidates until enough is free, then returns unneeded ones, from the last
    one on."""
    taken: List[Tuple[int, int]] = []
    for _, name, size in sorted(zip(last, ids, blocks)):
        if sum(s for _, s in taken) >= need:
            break
        taken += [(name, size)] if size else []
    for candidate in reversed(list(taken)):
        if sum(s for _, s in taken) - candidate[1] >= need:
            taken.remove(candidate)
    return taken


@pytest.mark.parametrize("seed", range(20))
def test_selections_match_a_sort(seed: int) -> None:
    rng = random.Random(seed)
    rows = rng.randrange(1, 300)
    ids = rng.sample(range(1 << 60), rows)
    last = [rng.randrange(-50, 50) for _ in ids]
    blocks = [rng.randrange(0, 9) for _ in ids]
    need = rng.randrange(0, 4 * rows)
    lists: Dict[str, Any] = {"ids": ids, "last_access_ns": last, "blocks": blocks}
    types = {"ids": np.uint64, "last_access_ns": np.int64, "blocks": np.uint64}
    arrays = {name: np.array(values, dtype=types[name]) for name, values in lists.items()}
    with small() as policy:
        got = policy.select(lists, need)
        assert [(p.id, p.freed_blocks) for p in got.victims] == reference(ids, last, blocks, need)
        assert policy.select(arrays, need).victims == got.victims
        assert got.shortfall_blocks == max(0, need - sum(blocks))
        every_other = {name: np.repeat(column, 2)[::2] for name, column in arrays.items()}
        assert policy.select(every_other, need).victims == got.victims
        tail = policy.select(arrays, need, allow_tail=True)
        assert tail.freed_blocks == min(need, sum(blocks))


def test_a_shared_block_is_freed_with_its_last_reference() -> None:
    candidates: Dict[str, Any] = {
        "ids": [1, 2, 3], "last_access_ns": [10, 20, 5], "block_offsets": [0, 3, 6, 7],
        "block_ids": [100, 101, 102, 100, 101, 103, 300], "block_refs": [2, 2, 1, 2, 2, 1, 2],
    }
    with small() as policy:
        out = policy.select(candidates, 2)
        assert [(p.id, p.block_ids) for p in out.victims] == [(1, (102,)), (2, (100, 101, 103))]
        assert policy.select(candidates, 100).shortfall_blocks == 96
        policy.record([2])
        policy.pin([2])
        assert policy.select(candidates, 2).shortfall_blocks == 1


def test_invalid_columns_are_rejected() -> None:
    with small() as policy:
        for candidates in (
            {}, {"ids": [1, 1]}, {"ids": [1], "blocks": [1, 2]}, {"ids": [1], "colour": [1]},
            {"ids": np.array([1], dtype=np.int32)}, {"ids": [1], "confidence": [math.nan]},
            {"ids": [1], "cost": [-1.0]}, {"ids": [1], "pinned": [300]}, {"ids": [[1]]},
            {"ids": [1], "block_offsets": [0, 2], "block_ids": [1]},
        ):
            with pytest.raises(kvtier.InvalidError):
                policy.select(candidates, 1)
        with pytest.raises(kvtier.LimitError):
            policy.select({"ids": [1], "blocks": [1 << 40]}, 1)
        assert policy.select({"ids": []}, 1).shortfall_blocks == 1
        assert policy.stats()["decisions"] == 1


def test_a_score_function_decides_and_a_predictor_is_called() -> None:
    seen: List[Any] = []

    def score(columns: Dict[str, Any], now_ns: int) -> Sequence[float]:
        seen.append((sorted(columns), now_ns))
        return [-float(name) for name in columns["ids"]]

    def predict(sequence: int, length: int, most: int) -> Optional[Tuple[float, float]]:
        seen.append(sequence)
        return None if sequence == 7 else (1.5, 0.95)

    with small("custom", score=score, predict=predict) as policy:
        policy.record([1, 2, 3], PolicyContext(session=6))
        assert seen == [6]
        out = policy.evict(1)
        assert out.victims[0].id == 3 and out.decided_by == "custom"
        assert policy.select({"ids": [7, 8]}, 1).victims[0].id == 8
        assert seen[-3:-1] == [7, 8]
        policy.switch("lru")
        assert policy.evict(1).victims[0].id == 2


def test_an_exception_of_a_score_function_is_the_cause(unraisable: List[Any]) -> None:
    answers: List[Any] = [[math.nan] * 2, [1.0], RuntimeError("not mine")]

    def score(columns: Dict[str, Any], now_ns: int) -> Any:
        answer = answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    with small("custom", score=score) as policy:
        policy.record([1, 2])
        for error, cause in ((kvtier.InvalidError, type(None)),
                             (kvtier.StateError, ValueError),
                             (kvtier.StateError, RuntimeError)):
            for call in (lambda: policy.evict(1), lambda: policy.preview(1),
                         lambda: policy.select({"ids": [1, 2]}, 1)):
                with pytest.raises(error) as caught:
                    call()
                assert type(caught.value.__cause__) is cause
                assert cause is type(None) or str(caught.value.__cause__) in str(caught.value)
            answers.pop(0)
        # The exception is not the cause of a later error.
        with pytest.raises(kvtier.NotFoundError) as caught:
            policy.pin([9])
        assert caught.value.__cause__ is None
        answers.append(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            policy.evict(1)
        assert policy.stats()["objects"] == 2
    assert not unraisable
    del score


def test_the_traceback_of_a_score_function_keeps_no_views() -> None:
    def score(columns: Dict[str, Any], now_ns: int) -> Any:
        ids = columns["ids"]
        raise RuntimeError(len(ids))

    with small("custom", score=score) as policy:
        policy.record([1, 2])
        with pytest.raises(kvtier.StateError) as caught:
            policy.evict(1)
        cause = caught.value.__cause__
        assert cause is not None
        frame = cause.__traceback__
        names = []
        while frame is not None:
            names.append(frame.tb_frame.f_code.co_name)
            assert "ids" not in frame.tb_frame.f_locals
            assert "views" not in frame.tb_frame.f_locals
            frame = frame.tb_next
        assert names[-1] == "score"
    del score


def test_a_dropped_policy_releases_its_callables() -> None:
    policy = small("custom", score=lambda columns, now_ns: [])
    assert _callbacks.live() == 1
    del policy
    gc.collect()
    assert _callbacks.live() == 0
