"""Hints of clients: every dialect, its limits, precedence, and tools."""

from __future__ import annotations

import logging
import math
from typing import Any, Dict

import pytest

import kvtier
from kvtier import hints

#: Values that no number of seconds may have.
NO_SECONDS = (0, -1, 2592001, 10**400, math.inf, math.nan, "600", True, [], {})


@pytest.mark.parametrize("params, expected", [
    (None, {}), ([], {}), ({}, {}), ({"do_remote_decode": True}, {}),
    ({"kv_cache_ttl_seconds": 600}, {"keep_s": 600.0, "ttl_s": 600.0}),
    ({"kv_cache_ttl_seconds": 0.5}, {"keep_s": 0.5, "ttl_s": 0.5}),
    ({"prompt_cache_retention": "24h"}, {"keep_s": 86400.0}),
    ({"prompt_cache_retention": "in_memory"}, {}),
    ({"prompt_cache_retention": "in-memory"}, {}),
    ({"prompt_cache_key": "chat-17"}, {"session": "chat-17"}),
    ({"cache_control": {"type": "ephemeral"}}, {"keep_s": 300.0}),
    ({"cache_control": {"type": "ephemeral", "ttl": "5m"}}, {"keep_s": 300.0}),
    ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, {"keep_s": 3600.0}),
    ({"cache_control": [{"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}]},
     {"keep_s": 3600.0}),
    ({"kvtier": {"tenant": 3, "priority": 0, "session": "s", "stop": "end_turn", "next_use_s": 4,
                 "done": True, "tool": None, "keep_s": 60, "ttl_s": 90.5}},
     {"tenant": 3, "priority": 0, "session": "s", "stop": kvtier.STOP_END_TURN, "next_use_s": 4.0,
      "done": True, "keep_s": 60.0, "ttl_s": 90.5}),
    ({"kvtier": {"stop": "tool_calls"}}, {"stop": kvtier.STOP_TOOL_USE}),
    ({"kvtier": {"stop": "max_tokens"}}, {"stop": kvtier.STOP_LENGTH}),
    ({"kvtier": {"tool": "bash"}}, {"tool": "bash", "stop": kvtier.STOP_TOOL_USE}),
])
def test_dialects_are_parsed(params: Any, expected: Dict[str, Any],
                             caplog: pytest.LogCaptureFixture) -> None:
    assert hints.parse(params) == hints.Hints(**expected)
    assert not caplog.text


@pytest.mark.parametrize("key, values", [
    ("kv_cache_ttl_seconds", NO_SECONDS),
    ("prompt_cache_retention", ("48h", "", "24H", 24, None.__class__, [], {"ttl": "24h"}, True)),
    ("prompt_cache_key", (7, [], "x" * 1025, True)),
    ("cache_control", ("ephemeral", 5, [], {}, {"type": "persistent"}, [{"type": "ephemeral"}] * 65,
                       {"type": "ephemeral", "ttl": "2h"}, {"type": "ephemeral", "ttl": 300},
                       [{"type": "ephemeral"}, 3])),
    ("kvtier", (7, [], "x",
                *({name: wrong} for name in ("keep_s", "ttl_s") for wrong in NO_SECONDS),
                {"tenant": "3"}, {"tenant": -1}, {"tenant": 2**32}, {"tenant": True},
                {"tenant": 1.0}, {"priority": 256}, {"session": 3}, {"session": "x" * 1025},
                {"stop": "never"}, {"stop": []}, {"next_use_s": -1}, {"next_use_s": "1"},
                {"next_use_s": True}, {"next_use_s": math.nan}, {"done": 1}, {"done": "false"},
                {"tool": ["bash"]})),
])
def test_malformed_parts_are_ignored_with_a_warning(key: str, values: Any,
                                                    caplog: pytest.LogCaptureFixture) -> None:
    for value in values:
        caplog.clear()
        # The other parts of the request count all the same.
        other = "kv_cache_ttl_seconds" if key != "kv_cache_ttl_seconds" else "cache_control"
        good = 60 if other == "kv_cache_ttl_seconds" else {"type": "ephemeral"}
        parsed = hints.parse({key: value, other: good})
        assert parsed == hints.parse({other: good}) and parsed.keep_s
        assert f"{key} hints of a request are ignored" in caplog.text, value
        assert len(caplog.text) < 600, "a client must not fill the log"


def test_unknown_fields_are_named_and_the_others_count(caplog: pytest.LogCaptureFixture) -> None:
    parsed = hints.parse({"kvtier": {"tenent": 3, "priority": 2, "zebra" * 1000: 1, 5: 6}})
    assert parsed == hints.Hints(priority=2)
    assert "'tenent'; did you mean 'tenant'?" in caplog.text and "zebra" in caplog.text
    assert len(caplog.records) == 3 and all(len(one.getMessage()) < 300 for one in caplog.records)


def test_many_unknown_fields_are_refused_with_one_message(caplog: pytest.LogCaptureFixture) -> None:
    assert hints.parse({"kvtier": {f"x{n}": n for n in range(100_000)}}) == hints.NONE
    assert len(caplog.records) == 1 and "100000 fields: give at most 32" in caplog.text


def test_precedence_is_by_dialect() -> None:
    everything = {"kvtier": {"keep_s": 1, "session": "a", "priority": 2},
                  "kv_cache_ttl_seconds": 2, "cache_control": {"type": "ephemeral", "ttl": "1h"},
                  "prompt_cache_retention": "24h", "prompt_cache_key": "b"}
    expected = [(1.0, None, "a"), (2.0, 2.0, "b"), (3600.0, None, "b"), (86400.0, None, "b"),
                (None, None, "b"), (None, None, "")]
    for keep_s, ttl_s, session in expected:
        parsed = hints.parse(everything)
        assert (parsed.keep_s, parsed.ttl_s, parsed.session) == (keep_s, ttl_s, session)
        everything.pop(next(iter(everything)), None) if everything else None


def test_nested_values_are_refused_and_not_followed(caplog: pytest.LogCaptureFixture) -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert hints.parse({key: deep for key in hints.KEYS}) == hints.NONE
    assert len(caplog.records) == len(hints.KEYS)


def test_a_caller_may_name_its_logger(caplog: pytest.LogCaptureFixture) -> None:
    hints.parse({"kvtier": 3}, logging.getLogger("mine"))
    assert caplog.records[0].name == "mine"


def test_the_gaps_of_tools_are_learned_and_bounded() -> None:
    gaps = hints.ToolGaps()
    for turn, gap in enumerate((2, 100, 3, 4, 5)):
        gaps.ended("chat", "search", turn * 1000)
        gaps.began("chat", turn * 1000 + gap)
        assert (gaps.expected("search") is None) == (turn < 2)
    assert gaps.expected("search") == 4.0, "one slow call counts little"
    gaps.began("chat", 9000)  # nothing waits
    gaps.ended("", "search", 0)
    gaps.ended("chat", "", 0)
    assert not gaps._waiting
    for n in range(gaps.MOST_SESSIONS + 500):
        gaps.ended(f"s{n}", f"tool{n}", 0)
    for n in range(gaps.MOST_SESSIONS + 500):
        gaps.began(f"s{n}", 1)
    assert not gaps._waiting and len(gaps._gaps) == gaps.MOST_TOOLS
