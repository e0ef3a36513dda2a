"""Advice on batch sizes, from a policy beside a store."""

from __future__ import annotations

import logging
import threading

import kvtier
import pytest


def thrash(advisor, names):
    for turn in range(12):
        some = names(turn % 3)
        advisor.looked_up(some)
        advisor.stored(some)


@pytest.mark.parametrize("names", [
    lambda of: [f"{of} {n}".encode() for n in range(8)], lambda of: list(range(8 * of, 8 * of + 8))])
@pytest.mark.parametrize("at_once", [False, True])
def test_advice_shrinks_the_batch_when_evicted_blocks_are_requested_again(names, at_once):
    with kvtier.Advisor("lru", capacity_blocks=8 if at_once else 0) as advisor:
        assert advisor.observes == at_once
        assert advisor.advise(8, 8).batch == 8 and advisor.observes
        advisor._policy.set_advice(shrink_above=0.1, window=8, patience=1)
        thrash(advisor, names)
        assert advisor._policy.stats()["units"] <= 8
        assert advisor.advise(8).batch == 4


def test_an_advisor_has_no_policy_before_the_first_advice():
    advisor = kvtier.Advisor("lru")
    thrash(advisor, lambda of: [b"a"])
    assert not advisor.observes
    advisor.resize(7)
    assert advisor.advise(8) is None and not advisor.observes  # the capacity is unknown
    advisor.switch("arc")
    assert advisor.advise(8, 100).batch == 8
    assert advisor._policy.spec.startswith("arc")
    advisor.resize(20)
    advisor.stored([b"%d" % n for n in range(50)])
    assert advisor._policy.stats()["units"] == 20
    advisor.close()
    advisor.close()
    assert advisor.advise(8, 100) is None and not advisor.observes
    with pytest.raises(kvtier.SpecError):
        kvtier.Advisor("arc(", capacity_blocks=1)


def test_an_error_of_the_policy_only_ends_advice(caplog):
    logger = logging.getLogger("some.engine")
    with kvtier.Advisor("lru", capacity_blocks=8, logger=logger) as advisor:
        advisor._policy.close()
        advisor.looked_up([b"a"])
        advisor.stored([b"a"])
        assert advisor.advise(8, 8) is None and not advisor.observes
    (record,) = caplog.records
    assert record.name == "some.engine" and "no advice" in record.getMessage()


def test_capacity_of_a_store_is_in_blocks(runtime):
    with kvtier.Store(runtime, "store(host=64MiB)") as store:
        assert kvtier.Advisor.capacity_of(store, 1 << 20) == 64


@pytest.mark.parametrize("spec, policy", [("store(host=64MiB)", "horizon"),
                                          ("store(host=64MiB, policy=s3fifo(small=0.2))", "s3fifo"),
                                          ("store(host=64MiB, policy=qos(inner=lru))", "qos")])
def test_policy_of_a_store_comes_from_its_metrics(runtime, tmp_path, spec, policy):
    disk = {"disk_path": tmp_path / "kv", "disk_bytes": 256 << 20, "disk_policy": "arc"}
    with kvtier.Store(runtime, spec, **disk) as store:
        assert kvtier.Advisor.policy_of(store) == policy
        with kvtier.Advisor(kvtier.Advisor.policy_of(store), capacity_blocks=8) as advisor:
            assert advisor._policy.stats()["name"] == policy
        store.set_policy(kvtier.TIER_HOST, "lru")
        assert kvtier.Advisor.policy_of(store) == "lru"


@pytest.mark.parametrize("at_once", [False, True])
def test_the_store_policy_applies_unless_the_caller_named_one(at_once):
    def chosen(advisor):
        advisor.advise(8, 8)
        return advisor._policy.stats()["name"]

    capacity = 8 if at_once else 0
    with kvtier.Advisor(capacity_blocks=capacity) as advisor:
        advisor.use_store_policy("")
        assert chosen(advisor) == "horizon"  # the default of stores
        advisor.use_store_policy("arc")
        assert chosen(advisor) == "arc"
    with kvtier.Advisor("lru", capacity_blocks=capacity) as advisor:
        advisor.use_store_policy("arc")
        assert chosen(advisor) == "lru"
    with kvtier.Advisor(capacity_blocks=capacity) as advisor:
        advisor.switch("s3fifo")
        advisor.use_store_policy("arc")
        assert chosen(advisor) == "s3fifo"


def test_an_advisor_is_thread_safe():
    advisor = kvtier.Advisor("lru", capacity_blocks=64)

    def work(of):
        for turn in range(200):
            advisor.stored([b"%d %d" % (of, turn + n) for n in range(4)])
            advisor.looked_up([b"%d %d" % (of, turn)])
            advisor.switch("arc" if turn % 2 else "lru")
            if of == 0 and turn == 150:
                advisor.close()
            advisor.advise(8, 64)

    threads = [threading.Thread(target=work, args=(of,)) for of in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not advisor.observes
