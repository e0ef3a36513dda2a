#!/usr/bin/env python3
"""A small router: forwards each request to the engine that has the longest prefix of its prompt.

    router.py --engine http://engine-0:8000=tcp://engine-0:5557,tcp://engine-0:5558 ...
    router.py --redis HOST:PORT --namespace namespace.json [--prefix kvt] [--listen 127.0.0.1:8080]

`--engine` names the URL that requests are forwarded to, the address of the engine's KV events
(vLLM's --kv-events-config, SGLang's --kv-events-config, or kvtier.events.Publisher), and the
address of their replay socket. The router follows one such address per URL. It knows the blocks by the tokens in the events. With
`--namespace` it takes the hashes in the events for kvtier's keys, and computes those of a prompt.
It needs the packages pyzmq and msgspec.

With `--redis` the engines publish the events of their stores to a Redis stream
(docs/reference/events.md). They open their stores with `remote=redis(url=...,
events="http://engine-0:8000")`; the value of `events` is the URL that requests are forwarded to.

A request is a POST with a JSON body whose `prompt` is a list of tokens. The router forwards it
unchanged, and adds `X-Engine` to the response. `GET /` returns the number of blocks of each engine.

namespace.json has the namespace's identity and layout, equal to those of the engines:

    {"identity": {"model": "llama-3-8b", "weights": "sha256:..."}, "chunk_tokens": 16,
     "groups": [{"layers": [0, 1, 2], "k_bytes": 2048, "v_bytes": 2048}]}
"""

import argparse
import http.client
import json
import socket
import struct
import sys
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

EVENT = struct.Struct("<4I32s32s32s")
STORED, REMOVED, CLEARED = 1, 2, 3
TIER_REMOTE = 3
MAX_KEYS = 4_000_000
MAX_BODY_BYTES = 64 << 20
#: What a block in a medium is worth, compared with one in the engine's own cache.
WEIGHTS = {"GPU": 1.0, "CPU": 0.9, "CPU_PINNED": 0.9, "STORAGE": 0.6, "DISK": 0.6}
OTHER_WEIGHT = 0.3
REPLAY_S = 10.0


class Requests:
    """The number of requests in flight at each engine."""

    def __init__(self):
        self._lock = threading.RLock()
        self._requests = {}

    def count_request(self, node, change):
        """Adds `change` to the number of requests in flight at an engine."""
        with self._lock:
            self._requests[node] = self._requests.get(node, 0) + change


class ResidencyIndex(Requests):
    """The chunks that are resident at each engine. Chunks at the shared remote do not count."""

    def __init__(self, keys):
        super().__init__()
        self.keys = keys
        self._resident = {}  # engine -> {key: set of tiers as bits}
        self._namespaces = {}  # engine -> {namespace: its keys}
        self._runs = {}  # engine -> id of its current run

    def apply(self, fields):
        """Applies an entry of the stream, whose fields are bytes."""
        if fields.get(b"v") != b"1":
            return
        node, run = fields[b"node"].decode(), fields[b"run"]
        with self._lock:
            if self._runs.get(node) != run or fields[b"stage"] == b"closed":
                self._resident.pop(node, None)
                self._namespaces.pop(node, None)
            self._runs[node] = run
            if fields[b"stage"] == b"closed":
                del self._runs[node]
                return
            resident = self._resident.setdefault(node, {})
            namespaces = self._namespaces.setdefault(node, {})
            for kind, tier, _, _, key, _, namespace in EVENT.iter_unpack(fields[b"events"]):
                if kind == CLEARED:
                    for cleared in namespaces.pop(namespace, ()):
                        resident.pop(cleared, None)
                elif tier == TIER_REMOTE:
                    continue
                elif kind == STORED and len(resident) < MAX_KEYS:
                    resident[key] = resident.get(key, 0) | 1 << tier
                    namespaces.setdefault(namespace, set()).add(key)
                elif kind == REMOVED and key in resident:
                    resident[key] &= ~(1 << tier)
                    if not resident[key]:
                        del resident[key]
                        namespaces.get(namespace, set()).discard(key)

    def choose(self, tokens, excluded=()):
        """Returns the engine with the longest prefix of a prompt, and the prefix's length in
        chunks. Among equals it prefers the engine with the fewest requests in flight."""
        keys = self.keys.of(tokens)
        with self._lock:
            def prefix(node):
                resident = self._resident.get(node, {})
                return next((at for at, key in enumerate(keys) if key not in resident), len(keys))

            nodes = [node for node in self._runs if node not in excluded]
            if not nodes:
                return None, 0
            best = max(nodes, key=lambda node: (prefix(node), -self._requests.get(node, 0)))
            return best, prefix(best)

    def forget(self, node):
        """Keeps what is known: the stream says when a store is closed or opened."""

    def chunk_counts(self):
        """The number of resident chunks of each engine."""
        with self._lock:
            return {node: len(self._resident.get(node, {})) for node in self._runs}


class View:
    """The blocks that an engine has, by its KV events."""

    def __init__(self):
        self.media = {}  # hash -> {(medium, KV cache group)}
        self._hashes = {}  # (hash before it, tokens) -> hash
        self._tokens = {}  # hash -> (hash before it, tokens)
        self._sizes = {}  # block size -> number of blocks with tokens

    def clear(self):
        self.__init__()

    def apply(self, events):
        for event in events:
            kind = event["type"]
            if kind == "AllBlocksCleared":
                self.clear()
            elif kind == "BlockStored":
                self._store(event)
            elif kind == "BlockRemoved":
                for name in event["block_hashes"]:
                    self._remove(name, (event.get("medium"), event.get("group_idx")))

    def _store(self, event):
        size, tokens = event["block_size"], event["token_ids"]
        # Blocks of a LoRA, of images or with a salt serve other requests than those forwarded here.
        is_plain = event.get("lora_name") is None and not any(event.get("extra_keys") or ())
        parent = event["parent_block_hash"]
        for at, name in enumerate(event["block_hashes"]):
            if name not in self.media and len(self.media) >= MAX_KEYS:
                return
            self.media.setdefault(name, set()).add((event.get("medium"), event.get("group_idx")))
            part = tuple(tokens[at * size: (at + 1) * size]) if size else ()
            if is_plain and 0 < size == len(part) and name not in self._tokens:
                self._tokens[name] = parent, part
                self._hashes[parent, part] = name
                self._sizes[size] = self._sizes.get(size, 0) + 1
            parent = name

    def _remove(self, name, place):
        places = self.media.get(name)
        if places is None:
            return
        places.discard(place)
        if places:
            return
        del self.media[name]
        found = self._tokens.pop(name, None)
        if found:
            if self._hashes.get(found) == name:  # else another block with these tokens
                del self._hashes[found]
            size = len(found[1])
            self._sizes[size] -= 1
            if not self._sizes[size]:
                del self._sizes[size]

    def prefix_of_tokens(self, tokens):
        """The media of each leading block of a prompt."""
        best = []
        for size in self._sizes:
            found, parent = [], None
            for at in range(0, len(tokens) - size + 1, size):
                parent = self._hashes.get((parent, tuple(tokens[at: at + size])))
                if parent is None:
                    break
                found.append(self.media[parent])
            best = max(best, found, key=len)
        return best

    def prefix_of_keys(self, keys):
        found = []
        for key in keys:
            if key not in self.media:
                break
            found.append(self.media[key])
        return found


def worth(prefix):
    """What leading blocks are worth: each counts by the fastest medium that has it."""
    return sum(max(WEIGHTS.get(medium, OTHER_WEIGHT) for medium, _ in places) for places in prefix)


class EventIndex(Requests):
    """What each engine has, by the KV events that it publishes."""

    def __init__(self, engines, keys=None):
        super().__init__()
        self.keys = keys
        self.views = {node: View() for node in engines}
        self.stale = set(engines)  # engines whose events must be read from the start

    def choose(self, tokens, excluded=()):
        """Returns the engine whose prefix of a prompt is worth most, and its length in blocks."""
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise ValueError("it is no list of integers")
        keys = self.keys.of(tokens) if self.keys else None
        with self._lock:
            best = None
            for node, view in self.views.items():
                if node in excluded:
                    continue
                prefix = view.prefix_of_keys(keys) if self.keys else view.prefix_of_tokens(tokens)
                rank = worth(prefix), -self._requests.get(node, 0)
                if best is None or rank > best[0]:
                    best = rank, node, len(prefix)
            return best[1:] if best else (None, 0)

    def chunk_counts(self):
        """The number of blocks of each engine."""
        with self._lock:
            return {node: len(view.media) for node, view in self.views.items()}

    def apply(self, node, batch):
        """Applies a decoded batch: its time, its events, and a rank."""
        with self._lock:
            self.views[node].apply(batch[1])

    def clear(self, node):
        with self._lock:
            self.views[node].clear()

    def forget(self, node):
        """Forgets an engine that did not answer, until its replay socket answers again."""
        self.clear(node)
        self.stale.add(node)


class Subscriber:
    """Follows the KV events of one engine. It repairs gaps in the numbers with the engine's replay
    socket; without one it forgets the engine's blocks."""

    def __init__(self, index, node, events, replay=None):
        import msgspec
        import zmq

        self._index, self._node, self._zmq = index, node, zmq
        self._decode = msgspec.msgpack.decode
        self._context, self._replay = zmq.Context.instance(), replay
        self._seen = self._last = None  # numbers of the last message, and of the last applied batch
        self.gaps, self._replay_at = 0, 0.0
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        try:
            self._sub.connect(events)
            if replay:
                with self._context.socket(zmq.DEALER) as socket:
                    socket.connect(replay)
        except zmq.ZMQError as error:
            raise SystemExit(f"cannot use {events} and {replay} of {node}: {error}") from None

    def run(self, stop):
        """Follows the events until `stop` is set. An error costs the view, not the thread."""
        while not stop.is_set():
            try:
                self._step(stop)
            except Exception as error:
                self._give_up(f"they cannot be followed: {error!r}")
                stop.wait(1)
        self._sub.close(linger=0)

    def _step(self, stop):
        stale = self._index.stale
        if self._replay and self._node in stale and time.monotonic() >= self._replay_at:
            stale.discard(self._node)
            if not self._start_again(stop):
                stale.add(self._node)
            # A replay may have a malformed batch, too.
            self._replay_at = time.monotonic() + REPLAY_S if self._node in stale else 0.0
        if self._sub.poll(200):
            self.receive(stop)

    def _give_up(self, what):
        """Forgets the engine's blocks until a replay tells them again."""
        self._complain(what)
        self._index.forget(self._node)

    def receive(self, stop):
        """Reads one message."""
        frames = self._sub.recv_multipart()
        if len(frames) != 3 or len(frames[1]) != 8:
            return self._complain(f"a message of {len(frames)} frames")
        number, before = int.from_bytes(frames[1], "big"), self._seen
        self._seen = number
        if self._last is not None and (before is None or number != before + 1):
            # A replay may have filled the gap already.
            if before is None or number <= before or number - 1 > self._last:
                self._repair(number, stop)
        if self._last is None or number > self._last:
            self._apply(number, frames[2])

    def _repair(self, number, stop):
        """Requests the batches between the last one that was applied and this one."""
        self.gaps += number != self._last + 1
        if number == self._last + 1:
            return
        if number <= self._last or not self._request_replay(self._last + 1, stop):
            # The engine was restarted, or cannot say what was missed.
            self._start_again(stop)

    def _start_again(self, stop):
        self._index.clear(self._node)
        self._last = None
        return self._request_replay(0, stop)

    def _apply(self, number, payload):
        try:
            self._index.apply(self._node, self._decode(payload))
        except Exception as error:
            # Without the rest of the batch the view may have blocks that the engine has evicted.
            self._give_up(f"the batch {number} is malformed: {error!r}")
        self._last = number

    def _request_replay(self, start, stop):
        """Applies the batches from a number on. Returns whether the engine has sent them all."""
        if not self._replay:
            return False
        with self._context.socket(self._zmq.DEALER) as socket:
            socket.setsockopt(self._zmq.LINGER, 0)
            socket.setsockopt(self._zmq.RCVHWM, 0)
            socket.connect(self._replay)
            socket.send_multipart((b"", start.to_bytes(8, "big")))
            is_first = True
            while not stop.is_set():
                if not socket.poll(REPLAY_S * 1000):
                    self._complain(f"no answer of {self._replay} within {REPLAY_S:g} s")
                    return False
                frames = socket.recv_multipart()
                if len(frames) < 2:
                    self._complain(f"an answer of {self._replay} has {len(frames)} frame")
                    return False
                number, payload = frames[-2:]
                if not payload:
                    return True
                number = int.from_bytes(number, "big")
                if is_first and number != start:
                    self._index.clear(self._node)  # it no longer has what was between
                is_first = False
                self._apply(number, payload)
        return False

    def _complain(self, what):
        print(f"KV events of {self._node}: {what}", file=sys.stderr)


class Redis:
    """The part of the Redis protocol that reading a stream needs."""

    def __init__(self, host, port):
        self._socket = socket.create_connection((host, port), timeout=10)
        self._file = self._socket.makefile("rb")

    def call(self, *words):
        words = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        parts = [b"*%d\r\n" % len(words)] + [b"$%d\r\n%s\r\n" % (len(w), w) for w in words]
        self._socket.sendall(b"".join(parts))
        return self._read()

    def _read(self):
        line = self._file.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionError("the Redis server closed the connection")
        kind, rest = line[:1], line[1:-2]
        if kind == b"-":
            raise ConnectionError(rest.decode(errors="replace"))
        if kind == b"+":
            return rest
        if kind == b":":
            return int(rest)
        if kind == b"$":
            return None if rest == b"-1" else self._file.read(int(rest) + 2)[:-2]
        if kind == b"*":
            return None if rest == b"-1" else [self._read() for _ in range(int(rest))]
        raise ConnectionError(f"unknown reply {line[:40]!r}: does --redis name a Redis server?")

    def close(self):
        self._socket.close()


def follow(index, host, port, stream, stop):
    """Applies the stream to the index until `stop` is set. After an error it reconnects and reads
    the stream from its beginning."""
    last, redis = b"0", None
    while not stop.is_set():
        try:
            redis = redis or Redis(host, port)
            for _, entries in redis.call("XREAD", "COUNT", 64, "BLOCK", 500, "STREAMS",
                                         stream, last) or ():
                for number, fields in entries:
                    last = number
                    try:
                        index.apply(dict(zip(fields[::2], fields[1::2])))
                    except (KeyError, ValueError, struct.error) as error:
                        print(f"skipped the malformed entry {number!r} of {stream}: {error!r}",
                              file=sys.stderr)
        except (OSError, ValueError) as error:
            print(f"cannot read {stream} from {host}:{port}, trying again in 1 s: {error}",
                  file=sys.stderr)
            if redis:
                redis.close()
            # A restarted server numbers its entries from the start.
            last, redis = b"0", None
            stop.wait(1)


class PromptKeys:
    """Computes the chunk keys of prompts."""

    def __init__(self, namespace):
        import kvtier

        self._store = kvtier.open(
            "kvtier(workers=1, store=store(host=1MiB, chunks=64, events=1))")
        identity = {name: value.encode() for name, value in namespace["identity"].items()}
        groups = [kvtier.Group(**group) for group in namespace["groups"]]
        layout = kvtier.Layout(namespace["chunk_tokens"], groups)
        self._namespace = self._store.namespace(kvtier.Identity(**identity), layout)

    def of(self, tokens):
        return self._namespace.chunk_keys(tokens)

    def close(self):
        for handle in (self._namespace, self._store):
            handle.close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._respond(200, json.dumps(self.server.index.chunk_counts()).encode())

    def do_POST(self):
        given = self.headers.get("Content-Length") or "0"
        try:
            length = int(given)
        except ValueError:
            return self._respond(400, f"Content-Length is {given[:80]!r}: give the number of bytes "
                                      "of the body".encode())
        if not 0 < length <= MAX_BODY_BYTES:
            return self._respond(413, f"the body has {length} bytes; 1 to {MAX_BODY_BYTES} are "
                                      "accepted".encode())
        body = self.rfile.read(length)
        tried = []
        while True:
            try:
                node, chunks = self.server.index.choose(json.loads(body)["prompt"], tried)
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
                return self._respond(400, f"`prompt` must be a list of tokens: {error}".encode())
            if node is None:
                return self._respond(503, f"none of {len(tried)} engines answered; engines must "
                                          "publish events to be known".encode())
            tried.append(node)
            self.server.index.count_request(node, 1)
            try:
                status, data = self._forward(node, body)
            except OSError as error:
                print(f"{node} did not answer, trying another engine: {error}", file=sys.stderr)
                self.server.index.forget(node)
                continue
            finally:
                self.server.index.count_request(node, -1)
            return self._respond(status, data, {"X-Engine": node, "X-Chunks": str(chunks)})

    def _forward(self, node, body):
        """Returns the status and the body of an engine's answer. Raises OSError without one."""
        url = urllib.parse.urlsplit(node)
        engine = http.client.HTTPConnection(url.hostname, url.port, timeout=600)
        try:
            engine.request("POST", self.path, body, {"Content-Type": "application/json"})
            response = engine.getresponse()
            data = response.read()
        except http.client.HTTPException as error:
            raise ConnectionError(error) from error
        finally:
            engine.close()
        return response.status, data

    def _respond(self, status, data, headers=()):
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        try:
            self.end_headers()
            self.wfile.write(data)
        except OSError:  # the client hung up
            self.close_connection = True

    def log_message(self, *_):
        pass


class Router(ThreadingHTTPServer):
    """The HTTP server of the router, with threads that follow the events into an index."""

    daemon_threads = True

    def __init__(self, listen, index, followers):
        super().__init__(listen, Handler)
        self.index, self._stop = index, threading.Event()
        self._followers = [threading.Thread(target=follower, args=(self._stop,), daemon=True)
                           for follower in followers]
        for thread in self._followers:
            thread.start()

    def server_close(self):
        super().server_close()
        self._stop.set()
        for thread in self._followers:
            thread.join()
        if self.index.keys:
            self.index.keys.close()


def redis_router(listen, redis, stream, namespace):
    """A router that follows a stream of a Redis server."""
    index = ResidencyIndex(PromptKeys(namespace))
    return Router(listen, index, [lambda stop: follow(index, *redis, stream, stop)])


def event_router(listen, engines, namespace=None):
    """A router that follows the KV events of engines: {URL: (events, replay or None)}."""
    index = EventIndex(engines, PromptKeys(namespace) if namespace else None)
    return Router(listen, index, [Subscriber(index, node, *where).run
                                  for node, where in engines.items()])


def address(text):
    """Splits HOST:PORT."""
    host, _, port = text.rpartition(":")
    return host or "127.0.0.1", int(port)


def engine(text):
    """Splits URL=EVENTS[,REPLAY]."""
    url, _, where = text.partition("=")
    events, _, replay = where.partition(",")
    if not url.startswith("http://") or not events:
        raise argparse.ArgumentTypeError(f"{text!r} is not like http://HOST:PORT=tcp://HOST:PORT")
    return url, (events, replay or None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engine", type=engine, action="append", default=[],
                        metavar="URL=EVENTS[,REPLAY]")
    parser.add_argument("--redis", type=address)
    parser.add_argument("--namespace")
    parser.add_argument("--prefix", default="kvt")
    parser.add_argument("--listen", type=address, default=("127.0.0.1", 8080))
    opts = parser.parse_args()
    namespace = None
    if opts.namespace:
        with open(opts.namespace, encoding="utf-8") as file:
            namespace = json.load(file)
    if bool(opts.engine) == bool(opts.redis) or (opts.redis and not namespace):
        parser.error("give --engine for each engine, or --redis with --namespace")
    if len(dict(opts.engine)) < len(opts.engine):
        parser.error("two --engine have the same URL: give one events address for each")
    router = event_router(opts.listen, dict(opts.engine), namespace) if opts.engine else (
        redis_router(opts.listen, opts.redis, f"{opts.prefix}/events", namespace))
    print("http://%s:%d" % router.server_address[:2], flush=True)
    try:
        router.serve_forever()
    except KeyboardInterrupt:
        router.server_close()


if __name__ == "__main__":
    main()
