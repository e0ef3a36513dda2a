"""Store events: watched, published at a remote, and used by a router."""

import http.client
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import kvtier
import numpy as np
import pytest
from gate import HANG_S
from processes import redis_server

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples" / "router"))

CHUNK, ROW, LAYERS = 16, 64, 2
NAMESPACE = {"identity": {"model": "m"}, "chunk_tokens": CHUNK,
             "groups": [{"layers": list(range(LAYERS)), "k_bytes": ROW}]}


def namespace_of(store):
    return store.namespace(kvtier.Identity(model=b"m"), chunk_tokens=CHUNK,
                           groups=[kvtier.Group(layers=range(LAYERS), k_bytes=ROW)])


def put(store, tokens):
    with namespace_of(store) as namespace, namespace.session() as session:
        session.append(tokens)
        rows = [np.zeros(len(tokens) * ROW, np.uint8) for _ in range(LAYERS)]
        session.put([kvtier.View(row, ROW) for row in rows]).result(timeout=HANG_S)


def prompt(first, chunks):
    return [first * 1000 + at for at in range(chunks * CHUNK)]


def until(condition, holds):
    end = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < end, f"not within {HANG_S} s: {condition}"
        time.sleep(0.01)


def test_a_watch_completes_with_the_next_event(runtime):
    with kvtier.Store(runtime, "store(host=4MiB)") as store, kvtier.Queue(runtime) as queue:
        watch = store.watch(queue=queue, tag="news")
        assert not watch.info().resolved
        tokens = prompt(1, 3)
        put(store, tokens)
        assert [done.tag for done in queue.wait(timeout=HANG_S)] == ["news"]
        changes = store.events()
        with namespace_of(store) as namespace:
            assert [event.key for event in changes.events] == namespace.chunk_keys(tokens + [1, 2])
        assert store.watch(1).result(timeout=HANG_S).value == 2
        dropped = store.watch(timeout=0.01)
        with pytest.raises(kvtier.TimeoutError):
            dropped.result(timeout=HANG_S)


class Engine(BaseHTTPRequestHandler):
    """An engine whose answer is its port."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        data = str(self.server.server_address[1]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def serve(server):
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return "http://127.0.0.1:%d" % server.server_address[1]


def request(router, tokens):
    client = http.client.HTTPConnection(*router.server_address[:2], timeout=HANG_S)
    client.request("POST", "/v1/completions", json.dumps({"prompt": tokens}))
    answer = client.getresponse()
    data = answer.read()
    client.close()
    return answer.status, answer.getheader("X-Engine"), answer.getheader("X-Chunks"), data


@pytest.fixture
def redis():
    with redis_server() as server:
        yield server.port


def test_the_router_selects_the_engine_with_the_longest_prefix(runtime, redis):
    from router import redis_router

    engines = [ThreadingHTTPServer(("127.0.0.1", 0), Engine) for _ in range(2)]
    names = [serve(engine) for engine in engines]
    spec = ('store(host=4MiB, remote=redis(url="redis://127.0.0.1:%d", write=never, '
            'events="%s", connect=600000, timeout=600000))')
    stores = [kvtier.Store(runtime, spec % (redis, name)) for name in names]
    router = redis_router(("127.0.0.1", 0), ("127.0.0.1", redis), "kvt/events", NAMESPACE)
    try:
        serve(router)
        put(stores[0], prompt(1, 4))
        put(stores[1], prompt(1, 2))
        put(stores[1], prompt(2, 3))
        until("the router knows all chunks",
              lambda: router.index.chunk_counts() == dict(zip(names, (4, 5))))
        assert request(router, prompt(1, 4) + [7])[:3] == (200, names[0], "4")
        assert request(router, prompt(2, 8))[:3] == (200, names[1], "3")
        # The longer prefix decides, by one chunk.
        assert request(router, prompt(1, 3))[:3] == (200, names[0], "3")
        assert request(router, "no tokens")[0] == 400
        # The router skips an engine that does not answer, and forgets one whose store is closed.
        engines[1].shutdown()
        engines[1].server_close()
        assert request(router, prompt(2, 8))[:3] == (200, names[0], "0")
        stores.pop().close()
        until("the router forgets the closed store",
              lambda: list(router.index.chunk_counts()) == names[:1])
        engines[0].shutdown()
        engines[0].server_close()
        assert request(router, prompt(1, 4))[0] == 503
    finally:
        router.shutdown()
        router.server_close()
        for store in stores:
            store.close()
