#!/usr/bin/env python3
"""A tiny router: sends each request to the engine that has the longest part of its prompt.

    router.py --redis HOST:PORT --space space.json [--prefix kvt] [--listen 127.0.0.1:8080]

Engines tell a Redis stream what their stores have (docs/remote.md, "Events"): their stores are
opened with `remote=redis(url=..., events="http://engine-0:8000")`, and what they call themselves
there is where they are asked. A request is a POST with a JSON body whose `prompt` is a list of
tokens; it is passed on as it is, and the answer comes back with `X-Engine`. `GET /` says what is
known.

space.json says what is hashed into keys, as the engines say it:

    {"identity": {"model": "llama-3-8b", "weights": "sha256:..."}, "chunk_tokens": 16,
     "groups": [{"layers": [0, 1, 2], "k_bytes": 2048, "v_bytes": 2048}]}

Needs the package kvtier, and nothing else.
"""

import argparse
import http.client
import json
import socket
import struct
import sys
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import kvtier

EVENT = struct.Struct("<4I32s32s32s")
STORED, REMOVED, CLEARED = 1, 2, 3
TIER_REMOTE = 3
MOST_KEYS = 4_000_000
MOST_BODY = 64 << 20


class Places:
    """Who has which chunks. What engines share at the remote is no reason to prefer one."""

    def __init__(self):
        self._lock = threading.Lock()
        self._has = {}  # engine -> {key: bits of tiers}
        self._spaces = {}  # engine -> {namespace: its keys}
        self._runs = {}
        self._busy = {}

    def take(self, fields):
        """An entry of the stream, as bytes by names."""
        if fields.get(b"v") != b"1":
            return
        node, run = fields[b"node"].decode(), fields[b"run"]
        with self._lock:
            if self._runs.get(node) != run or fields[b"stage"] == b"closed":
                self._has.pop(node, None)
                self._spaces.pop(node, None)
            self._runs[node] = run
            if fields[b"stage"] == b"closed":
                del self._runs[node]
                return
            has, spaces = self._has.setdefault(node, {}), self._spaces.setdefault(node, {})
            for kind, tier, _, _, key, _, space in EVENT.iter_unpack(fields[b"events"]):
                if kind == CLEARED:
                    for gone in spaces.pop(space, ()):
                        has.pop(gone, None)
                elif tier == TIER_REMOTE:
                    continue
                elif kind == STORED and len(has) < MOST_KEYS:
                    has[key] = has.get(key, 0) | 1 << tier
                    spaces.setdefault(space, set()).add(key)
                elif kind == REMOVED and key in has:
                    has[key] &= ~(1 << tier)
                    if not has[key]:
                        del has[key]
                        spaces.get(space, set()).discard(key)

    def choose(self, keys, but=()):
        """The engine with most of these chunks from the first on, of several the least busy; and
        how many it has."""
        with self._lock:
            def length(node):
                has = self._has.get(node, {})
                return next((at for at, key in enumerate(keys) if key not in has), len(keys))

            nodes = [node for node in self._runs if node not in but]
            if not nodes:
                return None, 0
            best = max(nodes, key=lambda node: (length(node), -self._busy.get(node, 0)))
            return best, length(best)

    def busy(self, node, by):
        with self._lock:
            self._busy[node] = self._busy.get(node, 0) + by

    def known(self):
        with self._lock:
            return {node: len(self._has.get(node, {})) for node in self._runs}


class Redis:
    """As much of the protocol as reading a stream takes."""

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
            raise ConnectionError("the server has ended the connection")
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
        raise ConnectionError("this is no Redis server")

    def close(self):
        self._socket.close()


def follow(places, host, port, stream, stop):
    """Reads the stream from its beginning, for ever; again where a server was away or is another."""
    last, redis = b"0", None
    while not stop.is_set():
        try:
            redis = redis or Redis(host, port)
            for _, entries in redis.call("XREAD", "COUNT", 64, "BLOCK", 500, "STREAMS",
                                         stream, last) or ():
                for number, fields in entries:
                    last = number
                    try:
                        places.take(dict(zip(fields[::2], fields[1::2])))
                    except (KeyError, ValueError, struct.error) as error:
                        print(f"an entry is not understood: {error!r}", file=sys.stderr)
        except (OSError, ValueError) as error:
            print(f"the stream cannot be read, and is tried again: {error}", file=sys.stderr)
            if redis:
                redis.close()
            # What a new server calls its entries begins anew.
            last, redis = b"0", None
            stop.wait(1)


class Keys:
    """What the chunks of prompts are called."""

    def __init__(self, space):
        self._runtime = kvtier.Runtime(workers=1)
        self._store = kvtier.Store(self._runtime, "store(host=1MiB, chunks=64, events=1)")
        identity = {name: value.encode() for name, value in space["identity"].items()}
        groups = [kvtier.Group(**group) for group in space["groups"]]
        self._space = self._store.namespace(kvtier.Identity(**identity),
                                            chunk_tokens=space["chunk_tokens"], groups=groups)

    def of(self, tokens):
        return self._space.chunk_keys(tokens)

    def close(self):
        for one in (self._space, self._store, self._runtime):
            one.close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._answer(200, json.dumps(self.server.places.known()).encode())

    def do_POST(self):
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 < length <= MOST_BODY:
            return self._answer(413, b"the body is empty or too long")
        body = self.rfile.read(length)
        try:
            tokens = json.loads(body)["prompt"]
            keys = self.server.keys.of(tokens)
        except (ValueError, TypeError, KeyError, kvtier.Error) as error:
            return self._answer(400, f"prompt must be a list of tokens: {error}".encode())
        tried = []
        while True:
            node, chunks = self.server.places.choose(keys, tried)
            if node is None:
                return self._answer(503, b"no engine is known, or none answers")
            tried.append(node)
            self.server.places.busy(node, 1)
            try:
                return self._pass_on(node, chunks, body)
            except OSError as error:
                print(f"{node} does not answer: {error}", file=sys.stderr)
            finally:
                self.server.places.busy(node, -1)

    def _pass_on(self, node, chunks, body):
        where = urllib.parse.urlsplit(node)
        engine = http.client.HTTPConnection(where.hostname, where.port, timeout=600)
        try:
            engine.request("POST", self.path, body, {"Content-Type": "application/json"})
            answer = engine.getresponse()
            data = answer.read()
        except http.client.HTTPException as error:
            raise ConnectionError(error) from error
        finally:
            engine.close()
        self._answer(answer.status, data, {"X-Engine": node, "X-Chunks": str(chunks)})

    def _answer(self, status, data, headers=()):
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


class Router(ThreadingHTTPServer):
    """Serves until it is shut down."""

    daemon_threads = True

    def __init__(self, listen, redis, stream, space):
        super().__init__(listen, Handler)
        self.places, self.keys, self._stop = Places(), Keys(space), threading.Event()
        self._reader = threading.Thread(target=follow, daemon=True, args=(
            self.places, *redis, stream, self._stop))
        self._reader.start()

    def server_close(self):
        super().server_close()
        self._stop.set()
        self._reader.join()
        self.keys.close()


def address(text):
    host, _, port = text.rpartition(":")
    return host or "127.0.0.1", int(port)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--redis", type=address, required=True)
    parser.add_argument("--space", required=True)
    parser.add_argument("--prefix", default="kvt")
    parser.add_argument("--listen", type=address, default=("127.0.0.1", 8080))
    opts = parser.parse_args()
    with open(opts.space, encoding="utf-8") as file:
        space = json.load(file)
    router = Router(opts.listen, opts.redis, f"{opts.prefix}/events", space)
    print("http://%s:%d" % router.server_address[:2], flush=True)
    try:
        router.serve_forever()
    except KeyboardInterrupt:
        router.server_close()


if __name__ == "__main__":
    main()
