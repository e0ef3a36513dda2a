"""A connector's KV events: what several ranks have, with a small model of vLLM's schema."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, List

import pytest
from kvtier_vllm.connector_events import BlockLabel, KvEvents, RankChange


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
