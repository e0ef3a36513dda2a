"""kvtier policies in vLLM's own CPUOffloadingManager."""

from __future__ import annotations

import random
from typing import Any, Dict, List

import kvtier
import pytest
from kvtier_vllm import policy
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

MODULE = "kvtier_vllm.policy"


def key(n: int, group: int = 0) -> OffloadKey:
    return make_offload_key(n.to_bytes(32, "little"), group)


def manager(name: str, chunks: int) -> CPUOffloadingManager:
    return CPUOffloadingManager(chunks, name, MODULE if ":" in name else None)


class Driver:
    """A manager with the calls that a scheduler makes."""

    def __init__(self, name: str, chunks: int, positions: bool) -> None:
        self.manager, self.positions = manager(name, chunks), positions
        self.requests: Dict[int, ReqContext] = {}
        self.loading: List[Any] = []

    def context(self, number: int, keys: List[OffloadKey]) -> ReqContext:
        if number not in self.requests:
            self.requests[number] = ReqContext(req_id=str(number))
            self.manager.on_new_request(self.requests[number])
        if self.positions:
            for at, one in enumerate(keys):
                self.requests[number].set_offload_key_position(one, 16 * (at + 1))
        return self.requests[number]

    def store(self, number: int, keys: List[OffloadKey], success: bool) -> Any:
        context = self.context(number, keys)
        out = self.manager.prepare_store(keys, context)
        if out is None:
            return None
        self.manager.complete_store(out.keys_to_store, context, success)
        return out.keys_to_store, out.evicted_keys, list(out.store_spec.block_ids)

    def load(self, number: int, keys: List[OffloadKey], hold: bool) -> Any:
        context = self.context(number, keys)
        hits = [one for one in keys if self.manager.lookup(one, context) is LookupResult.HIT]
        where = list(self.manager.prepare_load(hits, context).block_ids)
        self.loading.append((hits, context))
        while self.loading and not hold:
            self.manager.complete_load(*self.loading.pop())
        return hits, where

    def finish(self, number: int) -> None:
        if number in self.requests:
            self.manager.on_request_finished(self.requests.pop(number))


def trace(seed: int, sequential: bool) -> List[Any]:
    rng, steps, number = random.Random(seed), [], 0
    for _ in range(400):
        if sequential:
            number += 1
        else:
            number = rng.randrange(6)
        root = rng.randrange(40) * 100
        keys = [root + n for n in range(rng.randint(1, 5))]
        kind = rng.random()
        if kind < 0.55:
            steps.append(("store", number, keys, rng.random() < 0.9))
        elif kind < 0.85:
            steps.append(("load", number, keys, rng.random() < 0.3))
        else:
            steps.append(("touch", number, keys, True))
        if sequential or rng.random() < 0.3:
            steps.append(("finish", number, keys, True))
    return steps


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("positions", [False, True])
def test_lru_decides_like_vllms_lru(seed: int, positions: bool) -> None:
    pair = [Driver(name, 24, positions) for name in ("lru", "kvtier:lru")]
    evicted = 0
    # With positions vLLM ranks concurrent requests by their start. For sequential requests the
    # order by start and the order by last use are the same.
    for what, number, raw, flag in trace(seed, positions):
        keys = [key(n) for n in raw]
        results = []
        for one in pair:
            if what == "store":
                results.append(one.store(number, keys, flag))
            elif what == "load":
                results.append(one.load(number, keys, flag))
            elif what == "touch":
                results.append(one.manager.touch(keys, one.context(number, keys)))
            else:
                results.append(one.finish(number))
        assert results[0] == results[1], (what, number, raw)
        if what == "store" and results[0]:
            evicted += len(results[0][1])
    assert evicted > 100


@pytest.mark.parametrize("spec", ["arc", "s3fifo", "horizon", "sieve", "lfu", "qos(inner=lru)",
                                  "gdsf", "auto", "2q", "wtinylfu", "predictive", "pensieve"])
def test_every_policy_obeys_the_managers_rules(spec: str) -> None:
    one = Driver(f"kvtier:{spec}", 24, True)
    inside = one.manager._policy
    present = set()
    for what, number, raw, flag in trace(3, False):
        keys = [key(n) for n in raw]
        if what == "store":
            pinned = {k for hits, _ in one.loading for k in hits}
            out = one.store(number, keys, flag)
            if out is None:
                continue
            stored, evicted, _ = out
            assert not set(evicted) & (pinned | set(keys))
            present -= set(evicted)
            present |= set(stored) if flag else set()
        elif what == "load":
            hits, _ = one.load(number, keys, flag)
            assert set(hits) == set(keys) & present
        elif what == "touch":
            one.manager.touch(keys, one.context(number, keys))
        else:
            one.finish(number)
        assert len(inside._entries) == inside.policy.stats()["objects"]
    one.manager.reset_cache()
    assert inside.get(key(1)) is None and inside.policy.stats()["objects"] == 0


def test_eviction_is_all_or_nothing() -> None:
    one = Driver("kvtier:lru", 4, False)
    assert one.store(1, [key(n) for n in range(4)], True)[1] == []
    one.load(1, [key(0), key(1)], True)
    assert one.store(2, [key(n) for n in range(10, 13)], True) is None
    assert len(one.manager._policy._entries) == 4
    assert one.manager._policy.evict(2, {key(2)}) is None
    assert one.store(2, [key(10), key(11)], True)[1] == [key(2), key(3)]
    one.load(3, [], False)


def test_policies_switch_live_and_take_hints() -> None:
    one = Driver("kvtier:lru", 8, True)
    for n in range(8):
        one.store(n, [key(n)], True)
        one.finish(n)
    assert policy.switch("fifo") >= 1
    assert one.manager._policy.policy.spec.startswith("fifo")
    one.load(9, [key(0)], False)
    one.finish(9)
    assert one.store(10, [key(50)], True)[1] == [key(0)]
    context = ReqContext("h", {"kvtier": {"tenant": 3, "priority": 7, "stop": "tool_use",
                                          "next_use_s": 2.5, "session": "s"}})
    one.requests[11] = context
    one.manager.on_new_request(context)
    one.store(11, [key(60)], True)
    one.finish(11)
    one.requests[12] = ReqContext("i", {"kvtier": {"tenant": "much", "stop": 4}})
    one.store(12, [key(61)], True)
    assert one.manager._policy.policy.advise(16).batch >= 1


def test_bad_specs_are_rejected_with_a_suggestion() -> None:
    with pytest.raises(kvtier.SpecError, match="arc"):
        manager("kvtier:ark", 4)
    with pytest.raises(AttributeError):
        CachePolicyFactory.get_cache_policy_cls("NoSuchPolicy", MODULE)
    assert CachePolicyFactory.get_cache_policy_cls("KvtierPolicy", MODULE).spec == "horizon"
