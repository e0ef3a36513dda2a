#!/usr/bin/env python3
"""A small router: forwards each request to the engine that has the longest prefix of its prompt.

    router.py --redis HOST:PORT --namespace namespace.json [--prefix kvt] [--listen 127.0.0.1:8080]

Engines publish the events of their stores to a Redis stream (docs/reference/events.md). They open
their stores with `remote=redis(url=..., events="http://engine-0:8000")`; the value of `events` is
the URL that requests are forwarded to.

A request is a POST with a JSON body whose `prompt` is a list of tokens. The router forwards it
unchanged, and adds `X-Engine` to the response. `GET /` returns the number of chunks of each engine.

namespace.json has the namespace's identity and layout, equal to those of the engines:

    {"identity": {"model": "llama-3-8b", "weights": "sha256:..."}, "chunk_tokens": 16,
     "groups": [{"layers": [0, 1, 2], "k_bytes": 2048, "v_bytes": 2048}]}

It needs the package kvtier and no other package.
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
MAX_KEYS = 4_000_000
MAX_BODY_BYTES = 64 << 20


class ResidencyIndex:
    """The chunks that are resident at each engine. Chunks at the shared remote do not count."""

    def __init__(self):
        self._lock = threading.Lock()
        self._resident = {}  # engine -> {key: set of tiers as bits}
        self._namespaces = {}  # engine -> {namespace: its keys}
        self._runs = {}  # engine -> id of its current run
        self._requests = {}  # engine -> number of requests in flight

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

    def choose(self, keys, excluded=()):
        """Returns the engine with the longest prefix of these chunks, and the prefix's length in
        chunks. Among equals it prefers the engine with the fewest requests in flight."""
        with self._lock:
            def prefix(node):
                resident = self._resident.get(node, {})
                return next((at for at, key in enumerate(keys) if key not in resident), len(keys))

            nodes = [node for node in self._runs if node not in excluded]
            if not nodes:
                return None, 0
            best = max(nodes, key=lambda node: (prefix(node), -self._requests.get(node, 0)))
            return best, prefix(best)

    def count_request(self, node, change):
        """Adds `change` to the number of requests in flight at an engine."""
        with self._lock:
            self._requests[node] = self._requests.get(node, 0) + change

    def chunk_counts(self):
        """The number of resident chunks of each engine."""
        with self._lock:
            return {node: len(self._resident.get(node, {})) for node in self._runs}


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
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 < length <= MAX_BODY_BYTES:
            return self._respond(413, f"the body has {length} bytes; 1 to {MAX_BODY_BYTES} are "
                                      "accepted".encode())
        body = self.rfile.read(length)
        try:
            tokens = json.loads(body)["prompt"]
            keys = self.server.keys.of(tokens)
        except (ValueError, TypeError, KeyError, kvtier.Error) as error:
            return self._respond(400, f"`prompt` must be a list of tokens: {error}".encode())
        tried = []
        while True:
            node, chunks = self.server.index.choose(keys, tried)
            if node is None:
                return self._respond(503, f"none of {len(tried)} engines answered; engines must "
                                          "publish events to be known".encode())
            tried.append(node)
            self.server.index.count_request(node, 1)
            try:
                return self._forward(node, chunks, body)
            except OSError as error:
                print(f"{node} did not answer, trying another engine: {error}", file=sys.stderr)
            finally:
                self.server.index.count_request(node, -1)

    def _forward(self, node, chunks, body):
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
        self._respond(response.status, data, {"X-Engine": node, "X-Chunks": str(chunks)})

    def _respond(self, status, data, headers=()):
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


class Router(ThreadingHTTPServer):
    """The HTTP server of the router, with a thread that follows the stream of events."""

    daemon_threads = True

    def __init__(self, listen, redis, stream, namespace):
        super().__init__(listen, Handler)
        self.index, self.keys = ResidencyIndex(), PromptKeys(namespace)
        self._stop = threading.Event()
        self._reader = threading.Thread(target=follow, daemon=True, args=(
            self.index, *redis, stream, self._stop))
        self._reader.start()

    def server_close(self):
        super().server_close()
        self._stop.set()
        self._reader.join()
        self.keys.close()


def address(text):
    """Splits HOST:PORT."""
    host, _, port = text.rpartition(":")
    return host or "127.0.0.1", int(port)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--redis", type=address, required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--prefix", default="kvt")
    parser.add_argument("--listen", type=address, default=("127.0.0.1", 8080))
    opts = parser.parse_args()
    with open(opts.namespace, encoding="utf-8") as file:
        namespace = json.load(file)
    router = Router(opts.listen, opts.redis, f"{opts.prefix}/events", namespace)
    print("http://%s:%d" % router.server_address[:2], flush=True)
    try:
        router.serve_forever()
    except KeyboardInterrupt:
        router.server_close()


if __name__ == "__main__":
    main()
