"""vLLM's own publisher sends the connector's KV events, and the example router follows them."""

from __future__ import annotations

import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import pytest
from harness import ANSWER_SECONDS, HERE, Engine, connector, spec
from test_stories import TEXTS, pytestmark

sys.path.insert(0, str(HERE.parents[3] / "examples" / "router"))
zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
msgspec = pytest.importorskip("msgspec", reason="msgspec is not installed")
from router import EventIndex, Subscriber  # noqa: E402

__all__ = ["pytestmark"]
BLOCK = 128


def ports(count: int) -> List[int]:
    every = [socket.socket() for _ in range(count)]
    for one in every:
        one.bind(("127.0.0.1", 0))
    found = [one.getsockname()[1] for one in every]
    for one in every:
        one.close()
    return found


class Routed:
    """Engines with KV events, and the router's index, which follows them in threads."""

    def __init__(self, log: Path, configs: Dict[str, Any], **options: Any) -> None:
        self.stop, self.engines = threading.Event(), {}  # type: Any, Dict[str, Engine]
        self.places: Dict[str, Tuple[str, str]] = {}
        for name, config in configs.items():
            events, replay = ports(2)
            self.places[name] = f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}"
            self.engines[name] = Engine(log, kv_transfer_config=config, kv_events_config={
                "enable_kv_cache_events": True, "publisher": "zmq",
                "endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}",
            }, **options)
        self.index = EventIndex(self.places)
        self.threads = [threading.Thread(target=Subscriber(self.index, name, *place).run,
                                         args=(self.stop,), daemon=True)
                        for name, place in self.places.items()]
        for thread in self.threads:
            thread.start()

    def media(self, name: str, prompt: List[int]) -> List[str]:
        """The media of the blocks of a prompt at an engine; a letter for each of a block's."""
        with self.index._lock:
            return ["".join(sorted({medium[0] for medium, _ in places})) for places in
                    self.index.views[name].prefix_of_tokens(prompt)]

    def close(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()
        for engine in self.engines.values():
            engine.close()


def until(what: str, holds: Callable[[], bool]) -> None:
    end = time.monotonic() + ANSWER_SECONDS
    while not holds():
        assert time.monotonic() < end, f"not within {ANSWER_SECONDS} s: {what}"
        time.sleep(0.05)


def test_the_router_finds_the_engine_that_has_the_prefix(tmp_path: Path) -> None:
    """Engine a has text 0 and b text 1. The engines' caches have room for one text, so that
    another one leaves the first in kvtier only."""
    log = tmp_path / "log"
    routed = Routed(log, {"a": connector(tmp_path / "a"), "b": connector()},
                    max_model_len=1024, num_gpu_blocks_override=12)
    a, b = routed.engines["a"], routed.engines["b"]
    first, second = TEXTS[0][:700], TEXTS[1][:700]
    a.texts([first])
    b.texts([second])
    until("both are known", lambda: (routed.index.choose(first), routed.index.choose(second)) == (
        ("a", 5), ("b", 5)))
    for text in TEXTS[2:5]:
        a.texts([text[:700]])
    a.call("saved")
    a.texts([[7] * 20])  # a step, in which events are published
    until("text 0 is in memory and on disk, and not in the engine's cache",
          lambda: routed.media("a", first) == ["CS"] * 5)
    assert routed.index.choose(first) == ("a", 5)
    answer = a.call("generate", prompts=[first])["answers"][0]
    assert answer["cached"] == 5 * BLOCK, "the router promised as much as the engine has"
    until("it is in the engine's cache again",
          lambda: routed.media("a", first) == ["CGS"] * 5)
    a.call("reset")
    a.texts([[8] * 20])
    until("a reset removes all", lambda: routed.index.choose(first)[1] == 0)
    assert routed.index.choose(second) == ("b", 5)
    routed.close()


def test_evictions_reach_the_router(tmp_path: Path) -> None:
    """The store has room for about two texts: what it evicts leaves the router's view."""
    routed = Routed(tmp_path / "log", {"a": connector(host_bytes="40MiB", policy="lru")},
                    max_model_len=1024, num_gpu_blocks_override=12)
    engine = routed.engines["a"]
    for text in TEXTS[:6]:
        engine.texts([text[:700]])
    engine.texts([[7] * 20])
    until("the newest is known", lambda: routed.index.choose(TEXTS[5][:700])[1] == 5)
    until("the oldest is not", lambda: routed.index.choose(TEXTS[0][:700])[1] == 0)
    view = routed.index.views["a"]
    chunks = engine.call("counts")["chunks"]
    until("the view has as many blocks as the store", lambda: chunks == sum(
        any(medium == "CPU" for medium, _ in places) for places in view.media.values()))
    routed.close()


def test_a_restarted_engine_announces_what_it_loads_from_disk(tmp_path: Path) -> None:
    config = connector(tmp_path / "disk")
    engine = Engine(tmp_path / "log", kv_transfer_config=config)
    engine.texts([TEXTS[0][:700]])
    engine.call("saved")
    engine.close()
    routed = Routed(tmp_path / "log", {"a": config})
    assert routed.engines["a"].call("generate", prompts=[TEXTS[0][:700]])["answers"][0][
        "cached"] == 5 * BLOCK
    routed.engines["a"].texts([[7] * 20])
    until("all media are known", lambda: routed.media("a", TEXTS[0][:700]) == ["CGS"] * 5)
    routed.close()


def test_the_spec_announces_its_blocks(tmp_path: Path) -> None:
    routed = Routed(tmp_path / "log", {"a": spec(tmp_path / "disk", self_describing_kv_events=True)},
                    max_model_len=1024, num_gpu_blocks_override=12)
    for text in TEXTS[:4]:
        routed.engines["a"].texts([text[:700]])
    routed.engines["a"].texts([[7] * 20])
    until("the first text is not in the engine's cache, and in the store",
          lambda: routed.media("a", TEXTS[0][:700]) == ["C"] * 5)
    routed.close()
