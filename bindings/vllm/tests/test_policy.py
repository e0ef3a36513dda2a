"""kvtier policies as vLLM's CachePolicy."""

from __future__ import annotations

from typing import Any, List, Optional

import kvtier
import pytest


def key(n: int) -> bytes:
    return n.to_bytes(32, "little") + bytes(4)


class Cache:
    """A policy with the calls that vLLM's manager makes."""

    def __init__(self, name: str, capacity: int) -> None:
        from kvtier_vllm import policy
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

        found = getattr(policy, name)
        assert issubclass(found, CachePolicy)
        self.policy, self.chunk = found(cache_capacity=capacity), ChunkStatus
        self.context: Any = ReqContext("r")

    def add(self, *numbers: int, pinned: bool = False) -> None:
        for n in numbers:
            self.policy.insert(key(n), self.chunk(n), self.context)
        for n in numbers:
            if not pinned:
                self.policy.get(key(n)).ref_cnt = 0
                self.policy.mark_evictable(key(n))

    def evict(self, n: int, *protected: int) -> Optional[List[int]]:
        victims = self.policy.evict(n, {key(one) for one in protected})
        return None if victims is None else [chunk.chunk_id for _, chunk in victims]


def test_pinned_and_protected_chunks_are_not_evicted() -> None:
    cache = Cache("kvtier:lru", 8)
    cache.add(1, 2, 3, 4)
    cache.add(5, pinned=True)
    assert cache.policy.get(key(9)) is None and cache.policy.get(key(5)).chunk_id == 5
    cache.policy.touch([key(1)], cache.context)
    assert cache.evict(0) == []
    assert cache.evict(5) is None and cache.evict(4, 2) is None
    assert cache.evict(1, 2) == [3]
    cache.policy.mark_non_evictable(key(2))
    assert cache.evict(1) == [4]
    cache.policy.mark_evictable(key(2))
    assert cache.evict(2) == [2, 1]
    assert cache.evict(1) is None  # 5 is still pinned
    cache.policy.remove(key(5))
    assert cache.policy.get(key(5)) is None
    assert cache.policy.policy.stats()["objects"] == 0


def test_a_path_is_evicted_from_its_end() -> None:
    cache = Cache("kvtier:lru", 8)
    for n in (1, 2, 3):
        cache.context.set_offload_key_position(key(n), 16 * n)
    cache.add(1, 2, 3)
    assert cache.evict(2) == [3, 2]


def test_a_miss_on_a_ghost_adapts_the_policy() -> None:
    cache = Cache("kvtier:arc", 4)
    cache.add(1, 2, 3, 4)
    assert cache.evict(2) == [1, 2]
    assert cache.policy.policy.gauges()["arc_b1"] == 2
    cache.policy.on_store_miss([key(1)], cache.context)
    cache.add(1)
    assert cache.policy.policy.gauges()["arc_p"] >= 1  # the ghost hit has changed its target
    assert cache.policy.policy.stats()["evicted_references"] == 1


def test_clear_empties_the_cache_and_switch_changes_the_policy() -> None:
    from kvtier_vllm import policy

    cache = Cache("kvtier:sieve", 4)
    cache.add(1, 2)
    cache.policy.clear()
    assert cache.policy.get(key(1)) is None and cache.policy.policy.spec.startswith("sieve")
    cache.add(1, 2)
    assert policy.switch("lru") >= 1 and cache.policy in policy.live()
    cache.policy.touch([key(1)], cache.context)
    assert cache.evict(1) == [2]
    with pytest.raises(kvtier.SpecError):
        cache.policy.switch("nonsense")


def test_chunks_with_equal_hashes_get_different_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier_vllm import policy

    monkeypatch.setattr(policy, "_chunk_id", lambda key: 2**64 - 1)
    cache = Cache("kvtier:fifo", 4)
    cache.add(1, 2, 3)
    assert [cache.policy.get(key(n)).chunk_id for n in (1, 2, 3)] == [1, 2, 3]
    assert sorted(cache.evict(3) or []) == [1, 2, 3]


def test_hints_reach_the_policy() -> None:
    cache = Cache("kvtier:predictive", 4)
    cache.context.kv_transfer_params = {"kvtier": {"next_use_s": 60, "stop": "tool_use",
                                                   "tenant": 1, "priority": 2}}
    cache.add(1, 2)
    cache.policy.on_request_finished([[key(1), key(2)]], {key(1)}, {key(2)}, cache.context)
    assert cache.policy.policy.stats()["name"] == "predictive"
    assert len(cache.evict(2) or []) == 2
    assert cache.policy.policy.log()


def test_unknown_policies_are_rejected() -> None:
    from kvtier_vllm import policy

    with pytest.raises(AttributeError):
        policy.Nothing
    with pytest.raises(kvtier.SpecError, match="s3fifo"):
        Cache("kvtier:s3fif", 4)
