"""Publishes what a store has, for routers that read the KV events of vLLM and SGLang.

The messages are those of vLLM's publisher: a ZMQ PUB socket with topic, sequence number and a
msgpack batch of `BlockStored`, `BlockRemoved` and `AllBlocksCleared`, and a ROUTER socket that
repeats the last batches. It needs the packages pyzmq and msgspec, which are not requirements of
kvtier.

    import kvtier.events

    with kvtier.events.Publisher(store, "tcp://*:5557", replay_endpoint="tcp://*:5558"):
        ...
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import importlib
import logging
import os
import threading
import time
from collections import deque
from typing import (
    TYPE_CHECKING,
    Any,
    Deque,
    Dict,
    Iterable,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

from . import _abi
from ._errors import AgainError, Error, make
from ._needs import Needs
from ._residency import MEDIA, Change, Chunk, Follower

if TYPE_CHECKING:
    from ._store import Store

__all__ = ["MEDIA", "Block", "Change", "Chunk", "Follower", "Publisher"]

logger = logging.getLogger("kvtier.events")

_NEEDS = Needs("kvtier.events.Publisher", "event subscribers", "pyzmq msgspec",
               ("zmq", "msgspec"))
_CLEARED: Dict[str, Any] = {"type": "AllBlocksCleared"}
#: The fields that tell where a block is, besides its medium.
_PLACE = ("group_idx", "locality", "ownership")
_END = (-1).to_bytes(8, "big", signed=True)
#: Most events of a batch, and most hashes of a removal.
_BATCH = 1024
#: Most requests for a replay that are answered before events are published again.
_REPLAYS = 16
_RETRY_S, _READING_S, _CLOSE_S = 1.0, 0.01, 60.0
#: Most calls of `describe` that wait for the publisher's thread.
_DESCRIPTIONS = 4096
#: Fewest seconds from one batch of all that is resident to the next, since anybody can request it,
#: and most seconds for which it is kept.
_STATE_S, _STATE_KEPT_S = 1.0, 60.0

Hash = Union[int, bytes]


class Block(NamedTuple):
    """What the engine knows about a block, for `Publisher.describe`. `hash` and `parent` are the
    engine's names of the block and of the one before it."""

    hash: Hash
    parent: Optional[Hash] = None
    tokens: Sequence[int] = ()
    lora_name: Optional[str] = None
    #: More fields of `BlockStored`, such as `group_idx`.
    extra: Mapping[str, Any] = {}


def _stored(key: bytes, chunk: Chunk, block: Optional[Block], medium: str) -> Dict[str, Any]:
    if block is None:
        first = chunk.parent == chunk.namespace
        block = Block(key, None if first else chunk.parent)
    return {"type": "BlockStored", "block_hashes": [block.hash],
            "parent_block_hash": block.parent, "token_ids": list(block.tokens),
            "block_size": chunk.tokens if not block.tokens else len(block.tokens),
            "lora_id": None, "medium": medium, "lora_name": block.lora_name, **block.extra}


def _events_of(changes: Iterable[Change]) -> List[Dict[str, Any]]:
    """Changes as events, in their order. Removals that follow each other are one event."""
    events: List[Dict[str, Any]] = []
    for change in changes:
        if change.stored:
            events.append(_stored(change.key, change.chunk, change.label, change.medium))
            continue
        block = change.label or Block(change.key)
        names: List[Hash] = [block.hash]
        removed: Dict[str, Any] = {"type": "BlockRemoved", "block_hashes": names,
                                   "medium": change.medium}
        removed.update((name, block.extra[name]) for name in _PLACE if name in block.extra)
        last: Dict[str, Any] = events[-1] if events else {}
        if last and {**last, "block_hashes": names} == removed and (
                len(last["block_hashes"]) < _BATCH):
            last["block_hashes"] += names
        else:
            events.append(removed)
    return events


def _binds(endpoint: str) -> bool:
    """As vLLM decides: a wildcard, ipc and inproc are bound, other addresses are connected to."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


class Publisher:
    """Publishes the residency of a store's chunks in a thread of its own.

    `endpoint` is bound if it has a `*`, and connected to otherwise, as in vLLM. The batches of
    the last `buffer_steps`, of at most `buffer_bytes`, are repeated on request. A request from
    before gets all that is resident instead. `hwm` is the number of batches that wait for a slow
    subscriber; further ones are dropped for it. After `heartbeat_s` without a batch an empty one
    shows subscribers whether they missed any. `media` names the medium of each tier. Nothing here
    makes the store wait: a publisher that lost events clears the routers' view, and publishes all
    that is resident.

    Chunks are named by their keys, as `Namespace.chunk_keys` and `Blocks.keys` return them, or
    as `describe` says; with `described`, others are not published.

    Close it before the store. The end of a publisher clears the routers' view.
    """

    def __init__(self, store: "Store", endpoint: str = "tcp://*:5557", *,
                 replay_endpoint: Optional[str] = None, topic: str = "",
                 media: Mapping[int, str] = MEDIA, described: bool = False,
                 buffer_steps: int = 10_000, buffer_bytes: int = 64 << 20, hwm: int = 1_000,
                 heartbeat_s: float = 5.0, data_parallel_rank: Optional[int] = None) -> None:
        for name, value in (("buffer_steps", buffer_steps), ("buffer_bytes", buffer_bytes),
                            ("hwm", hwm), ("heartbeat_s", heartbeat_s)):
            if not value > 0:
                raise _invalid(f"{name}={value}: a number above 0 is accepted")
        _NEEDS.check()
        self._heartbeat_s, self._published_at = heartbeat_s, 0.0
        self._zmq: Any = importlib.import_module("zmq")
        self._encode = importlib.import_module("msgspec").msgpack.encode
        self._store, self._topic, self._rank = store, topic.encode(), data_parallel_rank
        self._buffer: Deque[Tuple[int, bytes]] = deque()
        self._steps, self._bytes_limit, self._buffered = buffer_steps, buffer_bytes, 0
        # Numbers of a later run follow those of an earlier one with a gap, so that subscribers
        # notice a restart.
        self._first = self._next = time.time_ns() // 1000
        self._counts = dict.fromkeys(("batches", "events", "missed", "snapshots", "replays",
                                      "bad_requests", "dropped_descriptions"), 0)
        self._described: Deque[Tuple[List[bytes], List[Block]]] = deque()
        self._reported_drops = False
        #: The last batch of all that is resident for replays: its number, its time, the events
        #: that were published before it, and its payload.
        self._state: Optional[Tuple[int, float, int, bytes]] = None
        self._unbound: List[Tuple[Any, str]] = []
        self._pub = self._socket(self._zmq.PUB, "endpoint", endpoint, hwm)
        self._replay: Any = None
        try:
            if replay_endpoint is not None:
                self._replay = self._socket(self._zmq.ROUTER, "replay_endpoint", replay_endpoint,
                                            2 * (buffer_steps + 1))
            self._follower = Follower(store, media, labelled=described)
            self._queue = store._runtime.queue()
        except BaseException:
            self._close_sockets()
            raise
        self._is_closing = False
        self._wake_lock = threading.RLock()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._run, name="kvtier-events", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _socket(self, kind: int, name: str, endpoint: str, hwm: int) -> Any:
        socket = self._zmq.Context.instance().socket(kind)
        socket.setsockopt(self._zmq.SNDHWM, hwm)
        try:
            if not isinstance(endpoint, str):
                raise _invalid(f"{name}={endpoint!r}: a text such as tcp://*:5557 is accepted")
            port = endpoint.rpartition(":")[2]
            if endpoint.startswith("tcp://") and port.isdigit() and int(port) > 65_535:
                raise _invalid(f"{name}={endpoint!r}: a port of at most 65535 is accepted")
            if kind == self._zmq.PUB and not _binds(endpoint):
                socket.connect(endpoint)
            else:
                self._bind(socket, endpoint)
        except self._zmq.ZMQError as error:
            socket.close(linger=0)
            raise _invalid(f"{name}={endpoint!r} cannot be used: {error}. An endpoint such as "
                           "tcp://*:5557 or ipc:///run/kv-events is accepted") from None
        except BaseException:
            socket.close(linger=0)
            raise
        return socket

    def _bind(self, socket: Any, endpoint: str) -> None:
        """Binds, now or, while the endpoint is in use, later."""
        try:
            socket.bind(endpoint)
        except self._zmq.ZMQError as error:
            if error.errno not in (self._zmq.EADDRINUSE, errno.EADDRINUSE):
                raise
            logger.warning("%s is in use: no events are sent there until its owner releases it; "
                           "trying again every %g s", endpoint, _RETRY_S)
            self._unbound.append((socket, endpoint))

    @property
    def endpoint(self) -> str:
        """The address of the PUB socket, with the port that was chosen for port 0."""
        return str(self._pub.getsockopt(self._zmq.LAST_ENDPOINT).rstrip(b"\0").decode())

    @property
    def replay_endpoint(self) -> Optional[str]:
        """The address of the ROUTER socket."""
        if self._replay is None:
            return None
        return str(self._replay.getsockopt(self._zmq.LAST_ENDPOINT).rstrip(b"\0").decode())

    def stats(self) -> Dict[str, int]:
        """Counts since the start: batches and events published, events of the store that were
        `missed`, `snapshots` of all that is resident, `replays`, `bad_requests` for them, and
        `dropped_descriptions` of blocks, because the publisher's thread was too slow for them."""
        return dict(self._counts)

    def describe(self, keys: Sequence[bytes], blocks: Sequence[Block]) -> None:
        """Says what the engine calls chunks, and which tokens they have. Never waits. Describe
        chunks when they are stored or found. Of chunks in no tier the last 65,536 descriptions
        are kept."""
        if len(keys) != len(blocks):
            raise _invalid(f"{len(keys)} keys for {len(blocks)} blocks: the numbers must be equal")
        if len(self._described) >= _DESCRIPTIONS:
            self._counts["dropped_descriptions"] += len(self._described.popleft()[0])
        self._described.append((list(keys), list(blocks)))
        self._wake()

    def _report_dropped(self) -> None:
        dropped = self._counts["dropped_descriptions"]
        if dropped and not self._reported_drops:
            self._reported_drops = True
            logger.warning("%d descriptions of blocks were dropped, because they came faster than "
                           "they could be published: routers do not see these blocks. Further "
                           "ones are only counted, in dropped_descriptions of stats()", dropped)

    def _wake(self) -> None:
        # The lock keeps the pipe open: a number that is closed may be another file's by now.
        with self._wake_lock, contextlib.suppress(BlockingIOError):  # it wakes anyway
            if self._wake_write >= 0:
                os.write(self._wake_write, b"\0")

    def close(self) -> None:
        """Publishes `AllBlocksCleared`, and ends the thread."""
        atexit.unregister(self.close)
        self._is_closing = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._publish([_CLEARED])
            self._serve()
        except Error as error:
            if error.status != _abi.KVT_E_CLOSED:
                logger.warning("the KV events of a store end, because the store failed: %s", error)
        except Exception:
            logger.exception("the KV events of a store end; the store goes on")
        finally:
            try:
                self._publish([_CLEARED])
            finally:
                self._queue.close()
                self._close_sockets()
                with self._wake_lock:
                    write, self._wake_write = self._wake_write, -1
                    os.close(write)
                os.close(self._wake_read)

    def _close_sockets(self) -> None:
        for socket in (self._pub, self._replay):
            if socket is not None:
                socket.close(linger=1000)

    def _serve(self) -> None:
        poller, watch, retry_at = self._zmq.Poller(), None, time.monotonic() + _RETRY_S
        for source in (self._queue.fileno(), self._wake_read, self._replay):
            if source is not None:
                poller.register(source, self._zmq.POLLIN)
        try:
            while not self._is_closing:
                self._step()
                timeout = _READING_S
                if watch is None and not self._follower.is_reading:
                    with contextlib.suppress(AgainError):  # too many watches: polls for now
                        watch = self._store.watch(self._follower.cursor, queue=self._queue)
                if watch is not None:
                    timeout = min(_RETRY_S, self._heartbeat_s)
                if time.monotonic() >= self._published_at + self._heartbeat_s:
                    self._publish_batch([])
                for source, _ in poller.poll(int(timeout * 1000)):
                    if source == self._wake_read:
                        os.read(self._wake_read, 4096)
                    elif source is self._replay:
                        self._answer_replays()
                if self._queue.poll():
                    watch = None
                if self._state is not None and time.monotonic() > self._state[1] + _STATE_KEPT_S:
                    self._state = None
                if self._unbound and time.monotonic() >= retry_at:
                    retry_at = time.monotonic() + _RETRY_S
                    self._bind_again()
        finally:
            if watch is not None:
                watch.cancel()
                watch.wait()
                watch.close()

    def _bind_again(self) -> None:
        unbound, self._unbound = self._unbound, []
        for socket, endpoint in unbound:
            try:
                socket.bind(endpoint)
                logger.warning("%s is bound now", endpoint)
            except self._zmq.ZMQError:
                self._unbound.append((socket, endpoint))

    def _step(self) -> None:
        """Publishes the changes since the last step."""
        follower = self._follower
        self._report_dropped()
        while self._described:
            follower.label(*self._described.popleft())
        missed, snapshots = follower.missed, follower.snapshots
        changes = follower.poll()
        self._counts["missed"], self._counts["snapshots"] = follower.missed, follower.snapshots
        if follower.missed != missed:
            logger.warning("%d events of the store were lost, because more happened than it "
                           "keeps: routers' views are cleared, and what is resident is published "
                           "again. A larger `events` in the store's spec avoids it",
                           follower.missed - missed)
            self._publish([_CLEARED])
        elif follower.snapshots != snapshots:
            self._publish(self._all_stored())
        elif not follower.is_reading:
            self._publish(_events_of(changes))

    def _all_stored(self) -> List[Dict[str, Any]]:
        """Events for all that is resident, the first chunks of sequences first."""
        follower = self._follower
        found = follower.named if follower._labelled else follower.chunks
        chunks = sorted(found.items(), key=lambda item: item[1].position)
        return [_stored(key, chunk, chunk.label, medium) for key, chunk in chunks
                for medium in follower.media_of(chunk)]

    def _batch(self, events: List[Dict[str, Any]]) -> bytes:
        # In parts, because encoding holds the interpreter's lock.
        parts = [b"\x93", self._encode(time.time()), b"\xdd", len(events).to_bytes(4, "big")]
        parts += [self._encode(event) for event in events]
        return b"".join((*parts, self._encode(self._rank)))

    def _publish(self, events: List[Dict[str, Any]]) -> None:
        for at in range(0, len(events), _BATCH):
            self._publish_batch(events[at: at + _BATCH])

    def _publish_batch(self, events: List[Dict[str, Any]]) -> None:
        payload, number = self._batch(events), self._next
        self._next, self._published_at = number + 1, time.monotonic()
        # A PUB socket never blocks: it drops for subscribers that are too slow.
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
        self._buffer.append((number, payload))
        self._buffered += len(payload)
        while len(self._buffer) > 1 and (len(self._buffer) > self._steps
                                         or self._buffered > self._bytes_limit):
            self._buffered -= len(self._buffer.popleft()[1])
        self._counts["batches"] += 1
        self._counts["events"] += len(events)

    def _answer_replays(self) -> None:
        for _ in range(_REPLAYS):
            try:
                frames = self._replay.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                self._counts["bad_requests"] += 1
                if self._counts["bad_requests"] == 1:
                    logger.warning("a bad request for a replay of %d frames, %r, is ignored: an "
                                   "empty frame and a number of 8 bytes are accepted. Further ones "
                                   "are only counted", len(frames), frames[-1][:32])
                continue
            self._answer_replay(frames[0], int.from_bytes(frames[2], "big"))

    def _answer_replay(self, client: bytes, start: int) -> None:
        """Sends the batches from a number on. If some of them are no longer kept, it sends what
        they lead to first, under the number of the last batch in it."""
        self._counts["replays"] += 1
        oldest = self._buffer[0][0]
        if start < oldest != self._first:
            number, payload = self._all_in_one()
            self._reply(client, self._topic, number.to_bytes(8, "big"), payload)
            start = number + 1
        for number, payload in self._buffer:
            if number >= start:
                self._reply(client, self._topic, number.to_bytes(8, "big"), payload)
        self._reply(client, b"", _END, b"")

    def _all_in_one(self) -> Tuple[int, bytes]:
        """A batch of all that is resident, and its number. It is made anew once a second at most,
        unless batches that follow the one before are no longer kept."""
        now, events = time.monotonic(), self._counts["events"]
        oldest, last = self._buffer[0][0], self._buffer[-1][0]
        if self._follower.is_reading:
            return last, self._batch([_CLEARED])
        if self._state is not None:
            number, made_at, events_before, payload = self._state
            if events_before == events:
                return last, payload
            if number >= oldest - 1 and now < made_at + _STATE_S:
                return number, payload
        payload = self._batch([_CLEARED, *self._all_stored()])
        self._state = last, now, events, payload
        return last, payload

    def _reply(self, *frames: bytes) -> None:
        # A ROUTER drops messages for a peer that is gone or does not read.
        client, *rest = frames
        self._replay.send_multipart((client, b"", *rest), self._zmq.NOBLOCK)


def _invalid(message: str) -> Error:
    return make(_abi.KVT_E_INVALID, message)
