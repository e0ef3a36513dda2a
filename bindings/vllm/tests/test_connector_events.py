"""A connector's KV events: what several ranks have, with a small model of vLLM's schema."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, List

import kvtier
import mini
import pytest
from kvtier import _residency
from kvtier.events import Follower
from kvtier_vllm.connector_events import BlockLabel, KvEvents, RankChange
from kvtier_vllm.connector_scheduler import Scheduler
from kvtier_vllm.connector_worker import Worker


def stored(**fields: Any) -> Any:
    return "stored", fields["block_hashes"][0], fields["medium"]


def removed(**fields: Any) -> Any:
    return "removed", fields["block_hashes"][0], fields["medium"]


@pytest.fixture
def events() -> KvEvents:
    made: Any = object.__new__(KvEvents)
    made._schema = SimpleNamespace(BlockStored=stored, BlockRemoved=removed)
    made._utils = SimpleNamespace(
        maybe_convert_block_hash=lambda value: value, to_event_extra_keys=lambda keys: None,
        generate_block_hash_extra_keys=lambda request, start, end, at: (None, 0))
    made._block, made._all_ranks, made._kind = 4, 3, "full_attention"
    made._ranks, made._events, made._has_warned = {}, [], False
    return made


def change(rank: int, is_stored: bool, name: bytes, medium: str = "CPU") -> RankChange:
    return RankChange(rank, is_stored, medium, BlockLabel(name, None, b"", None, None))


def test_a_block_is_announced_while_all_ranks_have_it(events: KvEvents) -> None:
    events.apply([change(0, True, b"a"), change(0, True, b"b"), change(1, True, b"a")])
    assert events.take() == [("stored", b"a", "CPU")]
    events.apply([change(0, True, b"a", "STORAGE"), change(1, False, b"a"), change(0, False, b"a"),
                  change(1, True, b"a", "STORAGE"), change(0, False, b"b")])
    assert events.take() == [("removed", b"a", "CPU"), ("stored", b"a", "STORAGE")]
    assert list(events._ranks) == [(b"a", "STORAGE")]


def request(tokens: int, hashes: List[bytes]) -> Any:
    return SimpleNamespace(block_hashes=hashes, all_token_ids=list(range(tokens)),
                           lora_request=SimpleNamespace(adapter_id=3, name="adapter"))


def test_labels_have_the_tokens_and_the_hash_before(events: KvEvents) -> None:
    first, second = events.labels(request(9, [b"a", b"b"]), 0, 5)
    assert (first.hash, first.parent, second.parent) == (b"a", None, b"a")
    assert memoryview(second.tokens).cast("q").tolist() == [4, 5, 6, 7]
    assert first.lora == (3, "adapter")
    assert events.labels(request(9, [b"a", b"b"]), 2, 5) == []


def test_hashes_of_parts_of_blocks_switch_events_off_in_words(
        events: KvEvents, caplog: pytest.LogCaptureFixture) -> None:
    assert events.labels(request(9, [b"a", b"b", b"c", b"d"]), 0, 2) == []
    assert events.labels(request(9, [b"a", b"b"]), 0, 2) == []
    assert caplog.text.count("no KV events") == 1


class Broken:
    """A store whose events can be read until `error` is set."""

    def __init__(self) -> None:
        self.error: Any = None

    def _events_raw(self, cursor: int, most: int) -> Any:
        if self.error is not None:
            raise self.error
        return b"", 0, 0

    def _residents_raw(self, page: int) -> Any:
        for number in (1, 2):
            key = number.to_bytes(32, "big")
            yield _residency._EVENT.pack(0, 0, kvtier.STORE_EVENT_STORED, kvtier.TIER_HOST, 16, 0,
                                         key, key, key)

    def fail(self) -> None:
        self.error = kvtier.ClosedError("closed", kvtier.abi.KVT_E_CLOSED, "KVT_E_CLOSED")


KEYS = [number.to_bytes(32, "big") for number in (1, 2)]


def test_a_worker_whose_events_fail_retracts_its_blocks_once(
        caplog: pytest.LogCaptureFixture) -> None:
    store: Any = Broken()
    worker: Any = object.__new__(Worker)
    worker._shard, worker._follower = (0, 1), Follower(store, labelled=True)
    worker._follower.wait()
    assert worker._changes() == []
    worker._follower.label(KEYS, ["a", "b"])
    stored = [RankChange(0, True, "CPU", label) for label in ("a", "b")]
    assert worker._changes() == stored
    store.fail()
    assert worker._changes() == [change._replace(stored=False) for change in stored]
    assert worker._changes() == [] and caplog.text.count("KV events end") == 1


def test_offloaded_blocks_are_retracted_once_when_events_fail() -> None:
    from kvtier_vllm.offload_events import OffloadEvents
    from vllm.v1.kv_offload.base import Medium

    store: Any = Broken()
    events: Any = OffloadEvents(store, Medium.CPU)
    events._follower.wait()
    assert events.take() == []
    events._follower.label(KEYS, ["a", "b"])
    assert [(one.removed, one.keys) for one in events.take()] == [(False, ["a", "b"])]
    store.fail()
    assert [(one.removed, one.keys) for one in events.take()] == [(True, ["a", "b"])]
    assert events.take() == []


def test_blocks_of_a_long_request_are_described_in_batches() -> None:
    """Each description computes the keys of all blocks before it, too."""
    described = SimpleNamespace(labels=lambda request, first, end: list(range(first, end)))
    scheduler = Scheduler("e", 16, layerwise=False, save_decode=True, use_hints=False,
                          events=described)  # type: ignore[arg-type]
    request: Any = mini.Request("r", range(20_000))
    scheduler.on_new_request(request)
    state = scheduler._requests["r"]
    for end in range(16_000, 20_000):
        scheduler._extend_session(state, end)
    calls = scheduler._next_meta.described
    assert (calls[0].first, len(calls[0].labels)) == (0, 1000), "the prompt's at once"
    assert len(calls) == 1 + 249 // 63 and all(len(one.labels) >= 63 for one in calls)
    scheduler.finished(request)
    known = [at for one in calls for at in one.labels]
    assert known == list(range(1249)), "the rest at its end"
    scheduler.shutdown()
