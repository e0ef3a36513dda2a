"""KV events in vLLM's schema: published, repeated, decoded by vLLM, and used by the router."""

import logging
import os
import random
import socket
import struct
import sys
import threading
import time
from http.server import ThreadingHTTPServer
from pathlib import Path

import kvtier
import kvtier.events
import pytest
from gate import HANG_S
from kvtier import _residency
from kvtier.events import Block, Publisher

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
msgspec = pytest.importorskip("msgspec", reason="msgspec is not installed")

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples" / "router"))
from router import EventIndex, Subscriber, View, event_router  # noqa: E402
from test_events import Engine, request, serve, until  # noqa: E402

BLOCK, NODE = 4096, "http://engine"


@pytest.fixture
def places(tmp_path):
    """Endpoints for events and replay."""
    return f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"


class Blocks:
    """A store's blocks, named by numbers."""

    def __init__(self, store):
        self.blocks = kvtier.Blocks(store, kvtier.Identity(model=b"m"), [BLOCK])
        self.pool = kvtier.Pool(bytearray(BLOCK * 256), BLOCK)

    @staticmethod
    def names(numbers):
        return [b"block %d" % number for number in numbers]

    def put(self, numbers, level=kvtier.LEVEL_RAM):
        self.blocks.put(self.names(numbers), self.pool.at([n % 256 for n in numbers]),
                        level=level).result(timeout=HANG_S)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.blocks.close()

    def keys(self, numbers):
        data = self.blocks.keys(self.names(numbers))
        return [data[at: at + 32] for at in range(0, len(data), 32)]


@pytest.fixture
def store(runtime):
    with kvtier.Store(runtime, "store(host=4MiB)") as store:
        yield store


@pytest.fixture
def blocks(store):
    with Blocks(store) as made:
        yield made


class Router:
    """The router's subscriber, in a thread."""

    def __init__(self, places, keys=None):
        self.index = EventIndex({NODE: places}, keys)
        self.subscriber = Subscriber(self.index, NODE, *places)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.subscriber.run, args=(self.stop,), daemon=True)
        self.thread.start()

    def view(self):
        with self.index._lock:
            return {name: {medium for medium, _ in where}
                    for name, where in self.index.views[NODE].media.items()}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()


def resident(store):
    """What the store says is resident, by media."""
    found = {}
    for entry in store.residents():
        if entry.tier in kvtier.events.MEDIA:
            found.setdefault(entry.key, set()).add(kvtier.events.MEDIA[entry.tier])
    return found


def replay(endpoint, start=0):
    """The answer to a request for a replay: numbers and decoded batches."""
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(endpoint)
        socket.send_multipart((b"", start.to_bytes(8, "big")))
        batches = []
        while True:
            assert socket.poll(HANG_S * 1000), "no answer"
            *_, number, payload = socket.recv_multipart()
            if not payload:
                assert number == b"\xff" * 8
                return batches
            batches.append((int.from_bytes(number, "big"), payload))


def view_of(batches):
    view = View()
    for _, payload in batches:
        view.apply(msgspec.msgpack.decode(payload)[1])
    return {name: {medium for medium, _ in where} for name, where in view.media.items()}


def settled(publisher, store):
    """Waits until the publisher has published all events of the store."""
    end = store.events(2**64 - 1, 0).cursor
    until("all events are published", lambda: publisher._follower.cursor >= end)
    until("the last step has ended", lambda: publisher.stats()["snapshots"] > 0)


def test_residents_are_what_exists(store, blocks):
    blocks.put(range(300))
    first = {entry.key: entry for entry in store.residents()}
    assert set(first) == set(blocks.keys(range(300)))
    assert {entry.tier for entry in first.values()} == {kvtier.TIER_HOST}
    assert {entry.kind for entry in first.values()} == {kvtier.STORE_EVENT_STORED}
    assert {entry.number for entry in first.values()} == {store.events(2**64 - 1, 0).cursor}
    blocks.blocks.clear()
    assert not list(store.residents())


def test_a_routers_view_equals_what_is_resident(runtime, places, tmp_path):
    """Random puts, evictions and removals, with few kept events, so that some are lost."""
    chance = random.Random(7)
    with kvtier.Store(runtime, "store(events=64)", host_bytes=1 << 18, disk_bytes=64 << 20,
                      disk_path=str(tmp_path / "disk")) as store, Blocks(store) as blocks:
        with Publisher(store, places[0], replay_endpoint=places[1], heartbeat_s=0.05) as publisher:
            with Router(places) as router:
                for turn in range(60):
                    first = chance.randrange(400)
                    numbers = range(first, first + chance.randrange(1, 40))
                    if turn % 20 == 15:
                        blocks.blocks.clear()
                    elif chance.random() < 0.2:
                        blocks.blocks.drop(blocks.names(numbers))
                    else:
                        blocks.put(numbers, chance.choice((kvtier.LEVEL_RAM, kvtier.LEVEL_DISK)))
                    if turn % 10 == 0:
                        until("the router knows what is resident",
                              lambda: router.view() == resident(store))
                until("the router knows what is resident",
                      lambda: router.view() == resident(store))
                assert router.view()
            assert view_of(replay(places[1])) == resident(store)
            assert publisher.stats()["batches"] > 0


def test_lost_events_clear_the_view_and_publish_all(runtime, places, caplog):
    with kvtier.Store(runtime, "store(host=4MiB, events=1)") as store, Blocks(store) as blocks:
        blocks.put([1])
        with Publisher(store, places[0], replay_endpoint=places[1]) as publisher:
            with Router(places) as router, caplog.at_level(logging.WARNING, "kvtier.events"):
                until("the first block is known", lambda: len(router.view()) == 1)
                blocks.put(range(200))
                until("all blocks are known", lambda: set(router.view()) == set(
                    blocks.keys(range(200))))
            stats = publisher.stats()
            assert stats["missed"] > 0 and stats["snapshots"] >= 2
            assert "events of the store were lost" in caplog.text
            kinds = [event["type"] for _, payload in replay(places[1])
                     for event in msgspec.msgpack.decode(payload)[1]]
            cleared = [at for at, kind in enumerate(kinds) if kind == "AllBlocksCleared"]
            assert len(cleared) >= 2 and kinds[cleared[-1] + 1:].count("BlockStored") == 200


def test_a_gap_is_repaired_by_a_replay(store, blocks, places):
    with Publisher(store, places[0], replay_endpoint=places[1]) as publisher, Router(places) as one:
        blocks.put([1])
        until("a block is known", lambda: len(one.view()) == 1)
        until("a message was seen", lambda: one.subscriber._seen is not None)
        # The subscriber misses what is published while it is not connected.
        until("all is applied", lambda: one.subscriber._last == publisher._next - 1)
        one.stop.set()
        one.thread.join()
        blocks.put([2, 3])
        settled(publisher, store)
        until("they are published", lambda: len(view_of(replay(places[1]))) == 3)
        index, last = one.index, one.subscriber._last
        again = Subscriber(index, NODE, *places)
        again._seen = again._last = last
        index.stale.clear()
        stop = threading.Event()
        thread = threading.Thread(target=again.run, args=(stop,), daemon=True)
        thread.start()
        number = iter(range(100, 10_000))
        def put_more():
            blocks.put([next(number)])
            time.sleep(0.01)
            return again.gaps > 0
        until("the gap is noticed", put_more)
        until("all is known", lambda: one.view() == resident(store))
        stop.set()
        thread.join()


def test_a_replay_from_before_the_kept_batches_is_all_that_is_resident(store, blocks, places):
    with Publisher(store, places[0], replay_endpoint=places[1], buffer_steps=3) as publisher:
        for number in range(20):
            blocks.put([number])
            settled(publisher, store)
        blocks.blocks.drop(blocks.names([0, 1]))
        until("the view is the store's",
              lambda: view_of(replay(places[1])) == resident(store))
        until("the answer is of now", lambda: len(replay(places[1])) == 1)
        first = replay(places[1])
        newest = first[0][0]
        assert [number for number, _ in replay(places[1], newest)] == [newest]
        assert replay(places[1], newest + 1) == []
        assert len(replay(places[1], newest - 2)) == 3
        assert len(publisher._buffer) == 3


def test_replays_of_all_that_is_resident_share_a_batch(store, blocks, places, monkeypatch):
    """Anybody may request replays, and each would build all that is resident."""
    monkeypatch.setattr(kvtier.events, "_STATE_S", 3600.0)
    made = []
    with Publisher(store, places[0], replay_endpoint=places[1], buffer_steps=8,
                   heartbeat_s=3600) as publisher:
        all_stored = publisher._all_stored
        monkeypatch.setattr(publisher, "_all_stored", lambda: made.append(1) or all_stored())
        for number in range(20):
            blocks.put([number])
            settled(publisher, store)
        until("all is published", lambda: publisher.stats()["events"] >= 21)
        made.clear()
        first = replay(places[1])
        for _ in range(10):
            assert replay(places[1]) == first and len(made) == 1
        blocks.put([20])
        until("it is published", lambda: publisher.stats()["events"] >= 22)
        again = replay(places[1])
        assert again[:1] == first and len(made) == 1
        assert [number for number, _ in again] == [first[0][0], first[0][0] + 1]
        assert view_of(again) == resident(store)


def test_descriptions_that_are_dropped_are_counted(store, blocks, places, monkeypatch, caplog):
    monkeypatch.setattr(kvtier.events, "_DESCRIPTIONS", 1)
    with Publisher(store, places[0], described=True) as publisher:
        until("it follows", lambda: publisher.stats()["snapshots"] == 1)
        entered, go = threading.Event(), threading.Event()
        kept = publisher._follower.poll

        def poll():
            entered.set()
            assert go.wait(HANG_S)
            return kept()

        monkeypatch.setattr(publisher._follower, "poll", poll)
        assert entered.wait(HANG_S)
        for number in range(4):
            publisher.describe(blocks.keys([number]), [Block(number)])
        assert publisher.stats()["dropped_descriptions"] == 3
        go.set()
        until("the publisher warns", lambda: "3 descriptions of blocks were dropped" in caplog.text)


def test_a_wake_after_the_end_writes_to_no_other_file(store, places):
    publisher = Publisher(store, places[0])
    publisher.close()
    with open(os.devnull, "wb") as other:  # takes the number of the pipe, or a lower one
        assert other.fileno() >= 0 and publisher._wake_write == -1
        publisher.describe([], [])


class Moves:
    """A store's events for a `Follower`, which the test writes."""

    def __init__(self):
        self.events, self.resident, self.missed, self.error = [], [], 0, None

    @staticmethod
    def event(kind, number, tier=kvtier.TIER_HOST):
        key = number.to_bytes(32, "big")
        return _residency._EVENT.pack(0, 0, kind, tier, 16, number, key, key, key)

    def stored(self, *numbers):
        self.events += [self.event(kvtier.STORE_EVENT_STORED, number) for number in numbers]

    def removed(self, *numbers):
        self.events += [self.event(kvtier.STORE_EVENT_REMOVED, number) for number in numbers]

    def _events_raw(self, cursor, most):
        if self.error is not None:
            raise self.error
        end = len(self.events)
        if cursor > end:
            return b"", 0, end
        missed, self.missed = self.missed, 0
        found = self.events[cursor: cursor + most]
        return b"".join(found), missed, cursor + len(found)

    def _residents_raw(self, page):
        yield b"".join(self.event(kvtier.STORE_EVENT_STORED, number) for number in self.resident)


@pytest.fixture
def moves():
    return Moves()


def followed(moves, *described):
    follower = kvtier.events.Follower(moves, labelled=True)
    follower.wait()
    follower.poll()
    follower.label([number.to_bytes(32, "big") for number in described], described)
    return follower


def changed(changes):
    return [(change.stored, change.label) for change in changes]


def test_a_description_survives_a_removal_that_was_not_read(moves):
    moves.resident = [1]
    follower = followed(moves, 1)
    assert changed(follower.poll()) == [(True, 1)]
    moves.removed(1)
    moves.stored(1)
    follower.label([(1).to_bytes(32, "big")], [1])  # its old residency is still what is known
    assert changed(follower.poll()) == [(False, 1), (True, 1)]
    assert follower.media_of(follower.named[(1).to_bytes(32, "big")]) == ["CPU"]


def test_labels_of_chunks_that_are_gone_are_bounded(moves, monkeypatch):
    monkeypatch.setattr(_residency, "_MAX_WAITING", 10)
    moves.resident = list(range(100))
    follower = followed(moves, *range(100))
    moves.removed(*range(100))
    follower.poll()
    assert list(follower._waiting.values()) == list(range(90, 100)) and not follower.named


def test_the_end_of_a_follower_retracts_what_it_has_reported(moves):
    moves.resident = [1, 2, 3]
    follower = followed(moves, 1, 2)
    assert changed(follower.poll()) == [(True, 1), (True, 2)]
    moves.removed(1)
    kept = moves._events_raw

    def fails_later(cursor, most):
        if cursor == len(moves.events):
            raise kvtier.ClosedError("it is closed", kvtier.abi.KVT_E_CLOSED, "KVT_E_CLOSED")
        return kept(cursor, most)

    moves._events_raw = fails_later
    with pytest.raises(kvtier.ClosedError):
        follower.poll()
    assert changed(follower.end()) == [(False, 1), (False, 2)], "also what was read before"
    assert follower.end() == []


@pytest.mark.parametrize("labelled", [False, True])
def test_lost_events_report_the_differences(moves, labelled):
    chance = random.Random(3)
    follower = kvtier.events.Follower(moves, labelled=labelled)
    seen, now = set(), set()
    for turn in range(50):
        moves.resident = sorted(now)
        if turn % 7 == 3:
            moves.missed = 1
        follower.wait()
        for change in follower.poll() + (follower.wait() or follower.poll()):
            assert change.stored == (change.key not in seen)
            seen.symmetric_difference_update([change.key])
        if labelled:
            described = chance.sample(range(40), 20)
            follower.label([number.to_bytes(32, "big") for number in described], described)
        after = set(chance.sample(range(40), 20))
        moves.removed(*(now - after))
        moves.stored(*(after - now))
        now = after
    moves.resident = sorted(now)
    for _ in range(3):
        for change in follower.wait() or follower.poll():
            seen.symmetric_difference_update([change.key])
    expected = {number.to_bytes(32, "big") for number in now}
    assert seen == ({key for key in expected if key in follower.named} if labelled else expected)
    assert len(seen) > 10 and set(follower.chunks) == expected


def test_a_snapshot_visits_only_described_chunks_in_the_engines_step(moves, monkeypatch):
    moves.resident = list(range(1000))
    visited = []
    kept = kvtier.events.Follower._set
    monkeypatch.setattr(kvtier.events.Follower, "_set",
                        lambda self, key, *more: visited.append(key) or kept(self, key, *more))
    follower = kvtier.events.Follower(moves, labelled=True)
    follower.wait()
    follower.label([(5).to_bytes(32, "big")], ["five"])
    assert changed(follower.poll()) == [(True, "five")]
    assert len(visited) == 1 and len(follower.chunks) == 1000


def test_a_new_publisher_is_noticed(store, blocks, places):
    with Router(places) as router:
        with Publisher(store, places[0], replay_endpoint=places[1], heartbeat_s=0.05):
            blocks.put([1, 2])
            until("both are known", lambda: router.view() == resident(store))
            until("it is connected", lambda: router.subscriber._seen is not None)
        until("the end clears the view", lambda: not router.view())
        blocks.blocks.drop(blocks.names([1]))
        blocks.put([3])
        with Publisher(store, places[0], replay_endpoint=places[1], heartbeat_s=0.05):
            until("the new one is followed", lambda: router.view() == resident(store) != {})
        assert router.subscriber.gaps > 0


def rss_bytes():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_subscriber_that_never_reads_stops_nothing(store, blocks, places):
    with zmq.Context.instance().socket(zmq.SUB) as deaf:
        deaf.setsockopt(zmq.RCVHWM, 1)
        deaf.setsockopt(zmq.LINGER, 0)
        deaf.setsockopt(zmq.SUBSCRIBE, b"")
        with Publisher(store, places[0], replay_endpoint=places[1], hwm=2,
                       buffer_bytes=1 << 20) as publisher, zmq.Context.instance().socket(
                           zmq.DEALER) as silent:
            deaf.connect(places[0])
            silent.setsockopt(zmq.LINGER, 0)
            silent.connect(places[1])
            before = rss_bytes()
            for turn in range(100):
                blocks.put(range(200))
                blocks.blocks.drop(blocks.names(range(200)))
                # It asks for replays, and does not read them either.
                silent.send_multipart((b"", bytes(8)))
            settled(publisher, store)
            assert publisher._buffered <= 1 << 20
            assert rss_bytes() - before < 256 << 20
            blocks.put([1])
            until("others are served", lambda: view_of(replay(places[1])) == resident(store))


def test_bad_requests_are_ignored(store, blocks, places, caplog):
    with Publisher(store, places[0], replay_endpoint=places[1]) as publisher:
        blocks.put([1])
        garbage = ([b"x"], [b"", b"x"], [b"", bytes(9)], [b"", bytes(8), b"more"],
                   [b"full", bytes(8)], [b"", msgspec.msgpack.encode({"type": "BlockStored"})],
                   [b""] * 50, [b"\xc1" * 100_000])
        with caplog.at_level(logging.WARNING, "kvtier.events"), zmq.Context.instance().socket(
                zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(places[1])
            for frames in garbage:
                socket.send_multipart(frames)
            until("all are counted",
                  lambda: publisher.stats()["bad_requests"] == len(garbage))
        assert caplog.text.count("bad request for a replay") == 1
        until("it still answers", lambda: view_of(replay(places[1])) == resident(store))


@pytest.mark.parametrize("endpoint", ["", "tcp://*", "tcp://*:x", "tcp://*:99999", "udp:/nowhere",
                                      "nothing", "ipc:///nowhere/at/all/x", 7, None])
def test_malformed_endpoints_are_refused(store, endpoint):
    with pytest.raises(kvtier.InvalidError, match="endpoint=.*accepted"):
        Publisher(store, endpoint)


@pytest.mark.parametrize("option", ["buffer_steps", "buffer_bytes", "hwm", "heartbeat_s"])
def test_limits_must_be_above_zero(store, places, option):
    with pytest.raises(kvtier.InvalidError, match=f"{option}=0"):
        Publisher(store, places[0], **{option: 0})


def test_an_endpoint_in_use_is_bound_later(store, blocks, caplog):
    with zmq.Context.instance().socket(zmq.PUB) as other:
        other.setsockopt(zmq.LINGER, 0)
        other.bind("tcp://*:0")
        endpoint = other.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        port = endpoint.rpartition(":")[2]
        with caplog.at_level(logging.WARNING, "kvtier.events"):
            publisher = Publisher(store, f"tcp://*:{port}", heartbeat_s=0.05)
        assert f"tcp://*:{port} is in use" in caplog.text
    with publisher, zmq.Context.instance().socket(zmq.SUB) as reader:
        blocks.put([1])
        reader.setsockopt(zmq.LINGER, 0)
        reader.setsockopt(zmq.SUBSCRIBE, b"")
        reader.connect(f"tcp://127.0.0.1:{port}")
        assert reader.poll(HANG_S * 1000)


def test_a_store_that_closes_clears_the_view(runtime, places):
    store = kvtier.Store(runtime, "store(host=4MiB)")
    blocks = Blocks(store)
    with Publisher(store, places[0], replay_endpoint=places[1], heartbeat_s=0.05) as publisher:
        with Router(places) as router:
            blocks.put([1])
            until("it is known", lambda: router.view())
            until("it is connected", lambda: router.subscriber._seen is not None)
            blocks.blocks.close()
            store.close()
            publisher._thread.join(HANG_S)
            until("the view is clear", lambda: not router.view())


def test_descriptions_name_the_blocks(store, blocks, places):
    """The names and tokens of the engine reach the router, which finds a prompt by them."""
    with Publisher(store, places[0], replay_endpoint=places[1], described=True,
                   topic="kv") as publisher, Router(places) as router:
        blocks.put([0, 1, 2, 3])
        tokens = [[10 * n, 10 * n + 1] for n in range(3)]
        described = [Block(100 + n, 99 + n if n else None, tokens[n], extra={"group_idx": 0})
                     for n in range(3)]
        publisher.describe(blocks.keys([0, 1]), described[:2])
        until("two are known", lambda: set(router.view()) == {100, 101})
        publisher.describe(blocks.keys([2]), described[2:])
        until("three are known", lambda: set(router.view()) == {100, 101, 102})
        assert router.index.choose([0, 1, 10, 11, 20, 21, 5]) == (NODE, 3)
        assert router.index.choose([0, 1, 10, 12]) == (NODE, 1)
        blocks.blocks.drop(blocks.names([1]))
        until("one is gone", lambda: set(router.view()) == {100, 102})
        assert router.index.choose([0, 1, 10, 11, 20, 21]) == (NODE, 1)
        with pytest.raises(kvtier.InvalidError, match="1 keys for 2 blocks"):
            publisher.describe(blocks.keys([0]), described[:2])


def test_the_router_weighs_media():
    """Of equal prefixes the one in memory is chosen, but a longer one on disk is worth more."""
    index = EventIndex(["memory", "disk"])

    def stored(node, first, count, medium):
        index.apply(node, [0.0, [{"type": "BlockStored", "block_hashes": [first + at],
                                  "parent_block_hash": first + at - 1 if at else None,
                                  "token_ids": [at, at], "block_size": 2, "lora_id": None,
                                  "medium": medium} for at in range(count)], None])

    stored("memory", 10, 2, "CPU")
    stored("disk", 20, 2, "STORAGE")
    assert index.choose([0, 0, 1, 1, 2, 2, 3, 3]) == ("memory", 2)
    assert index.choose([0, 0, 1, 1], ["memory"]) == ("disk", 2)
    stored("disk", 20, 4, "STORAGE")
    assert index.choose([0, 0, 1, 1, 2, 2, 3, 3]) == ("disk", 4)
    assert index.choose([5, 5])[1] == 0


def stored(name, parent=None, tokens=(1, 2), medium="CPU"):
    return {"type": "BlockStored", "block_hashes": [name], "parent_block_hash": parent,
            "token_ids": list(tokens), "block_size": 2, "lora_id": None, "medium": medium}


def removed(name, medium="CPU"):
    return {"type": "BlockRemoved", "block_hashes": [name], "medium": medium}


def test_the_removal_of_a_block_leaves_another_with_its_tokens():
    view = View()
    view.apply([stored(1), stored(2), removed(1)])  # one prompt, two names
    assert view.prefix_of_tokens([1, 2]) == [{("CPU", None)}]
    view.apply([removed(2)])
    assert view.prefix_of_tokens([1, 2]) == [] and not view._hashes and not view._sizes


@pytest.mark.parametrize("events", [
    b"\xc1", msgspec.msgpack.encode([0.0]), msgspec.msgpack.encode(7),
    msgspec.msgpack.encode([0.0, [stored(2), {"type": "BlockRemoved"}, removed(1)], None]),
    msgspec.msgpack.encode([0.0, [stored([2]), removed(1)], None]), b"\x91" * 100_000])
def test_a_malformed_batch_costs_the_view_until_a_replay(events, places, capsys):
    index = EventIndex({NODE: places})
    index.stale.clear()
    subscriber = Subscriber(index, NODE, *places)
    subscriber._apply(1, msgspec.msgpack.encode([0.0, [stored(1)], None]))
    assert index.chunk_counts() == {NODE: 1} and not index.stale
    subscriber._apply(2, events)
    assert index.chunk_counts() == {NODE: 0} and index.stale == {NODE}
    assert "the batch 2 is malformed" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["_apply", "receive"])
def test_a_subscriber_recovers_by_a_replay(where, store, blocks, places, monkeypatch):
    with Publisher(store, places[0], replay_endpoint=places[1]), Router(places) as router:
        blocks.put([1, 2])
        until("both are known", lambda: router.view() == resident(store))
        until("it is connected", lambda: router.subscriber._seen is not None)
        kept, failed = getattr(router.subscriber, where), []

        def fails_once(*args):
            if failed:
                return kept(*args)
            failed.append(1)
            if where == "_apply":
                return kept(args[0], b"\xc1")
            raise ValueError("not enough values to unpack")

        monkeypatch.setattr(router.subscriber, where, fails_once)
        blocks.put([3])
        until("the error happened", lambda: failed)
        until("all is known again", lambda: len(router.view()) == 3 and not router.index.stale)
        assert router.view() == resident(store)


class Slow(Engine):
    """An engine that answers when the client is gone."""

    gone, asked = threading.Event(), 0

    def do_POST(self):
        Slow.asked += 1
        Slow.gone.wait(HANG_S)
        super().do_POST()


def test_a_client_that_hangs_up_costs_no_view(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    name = serve(server)
    router = event_router(("127.0.0.1", 0), {name: (f"ipc://{tmp_path}/events", None)})
    serve(router)
    try:
        router.index.apply(name, [0.0, [stored(1)], None])
        client = socket.create_connection(router.server_address[:2], timeout=HANG_S)
        body = b'{"prompt": [1, 2]}'
        client.sendall(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        until("the engine has the request", lambda: Slow.asked)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()  # a reset
        Slow.gone.set()
        until("the request has ended", lambda: router.index._requests == {name: 0})
        assert request(router, [1, 2])[:3] == (200, name, "1")
        assert router.index.chunk_counts() == {name: 1}
    finally:
        router.shutdown()
        router.server_close()
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("length", "body", "status"), [
    ("x", b"", 400), ("1e3", b"", 400), ("-5", b"", 413), (None, b"[" * 100_000, 400),
    (None, b'{"prompt": ' + b"[" * 100_000, 400), (None, b"[1]", 400), (None, b"{}", 400)])
def test_malformed_requests_are_answered_in_words(length, body, status, tmp_path):
    router = event_router(("127.0.0.1", 0), {NODE: (f"ipc://{tmp_path}/events", None)})
    serve(router)
    try:
        with socket.create_connection(router.server_address[:2], timeout=HANG_S) as client:
            client.sendall(b"POST / HTTP/1.0\r\nContent-Length: %s\r\n\r\n" % (
                length or str(len(body))).encode() + body)
            answer = client.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 %d" % status), answer
    finally:
        router.shutdown()
        router.server_close()


def test_vllm_decodes_the_batches(store, blocks, places):
    events = pytest.importorskip("vllm.distributed.kv_events", reason="vLLM is not installed")
    with Publisher(store, places[0], replay_endpoint=places[1], data_parallel_rank=3) as publisher:
        blocks.put([0, 1])
        publisher.describe(blocks.keys([0]), [Block(b"a", b"b", [1, 2, 3], "lora",
                                                    {"group_idx": 0, "locality": "LOCAL"})])
        blocks.blocks.drop(blocks.names([0, 1]))
        settled(publisher, store)
        until("all is gone", lambda: view_of(replay(places[1])) == {})
        decoder = msgspec.msgpack.Decoder(type=events.KVEventBatch)
        batches = [decoder.decode(payload) for _, payload in replay(places[1])]
    assert {batch.data_parallel_rank for batch in batches} == {3}
    all_events = [event for batch in batches for event in batch.events]
    assert {type(event) for event in all_events} == {
        events.BlockStored, events.BlockRemoved, events.AllBlocksCleared}
    stored = [event for event in all_events if isinstance(event, events.BlockStored)]
    assert {event.medium for event in stored} == {events.MEDIUM_CPU}
    assert kvtier.events.MEDIA[kvtier.TIER_DISK] == events.MEDIUM_STORAGE


def test_requests_go_to_the_engine_with_the_longest_prefix(runtime, tmp_path):
    """The longer prefix is chosen, and another engine when that one does not answer."""
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Engine) for _ in range(2)]
    names = [serve(server) for server in servers]
    places = {name: (f"ipc://{tmp_path}/events{n}", f"ipc://{tmp_path}/replay{n}")
              for n, name in enumerate(names)}
    stores = [kvtier.Store(runtime, "store", host_bytes=1 << 20, disk_bytes=64 << 20,
                           disk_path=str(tmp_path / f"disk{n}")) for n in range(2)]
    every = [Blocks(store) for store in stores]
    publishers = [Publisher(store, place[0], replay_endpoint=place[1], described=True)
                  for store, place in zip(stores, places.values())]
    router = event_router(("127.0.0.1", 0), places)
    serve(router)

    def put(engine, count):
        every[engine].put(range(count), kvtier.LEVEL_DISK)
        publishers[engine].describe(every[engine].keys(range(count)), [
            Block(n + 1, n or None, [n, n]) for n in range(count)])

    try:
        put(0, 4)
        put(1, 2)
        prompt = [token for n in range(6) for token in (n, n)]
        until("the router knows all", lambda: router.index.chunk_counts() == dict(
            zip(names, (4, 2))))
        assert request(router, prompt)[:3] == (200, names[0], "4")
        assert request(router, prompt[:2])[2] == "1"
        assert request(router, "text")[0] == 400
        servers[0].shutdown()
        servers[0].server_close()
        assert request(router, prompt)[:3] == (200, names[1], "2")
    finally:
        router.shutdown()
        router.server_close()
        servers[1].shutdown()
        servers[1].server_close()
        for publisher, blocks, store in zip(publishers, every, stores):
            publisher.close()
            blocks.blocks.close()
            store.close()
