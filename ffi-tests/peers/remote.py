#!/usr/bin/env python3
"""Compares a kvtier store with LMCache's Redis connectors: chunks of 256 KiB to a Redis server and
back.

    remote.py [--quick]

Starts a redis-server. Both systems start and end with an engine's rows. kvtier puts rows at the
remote level, and another store gets them, with two copies and two checks. LMCache uses its own
memory objects, without further copies or checks. Rounds alternate. Prints one JSON object per line,
as `kvtier-bench` does: kvtier's rate divided by the peer's, the median of the rounds. Needs kvtier
(KVTIER_LIBRARY, PYTHONPATH), numpy, and an interpreter with lmcache, torch and redis;
`ffi-tests/run --engines vllm` creates one. Of resp:// only LMCache's native client is used, without
its connector for asyncio: the module lmcache_redis suffices for that.
"""

import argparse
import asyncio
import importlib.util
import json
import select
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import kvtier
import numpy as np

CELL, TOKENS = 256 << 10, 16
RUN = CELL // TOKENS


def timed(act):
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


class Kvtier:
    """A store that puts, and another one that gets. A document has one chunk of one cell per row."""

    def __init__(self, port, rows):
        self.rows, self.back = rows, np.zeros_like(rows)
        self.runtime = kvtier.Runtime()
        spec = (f'store(host={3 * rows.nbytes}B, chunks=65536, remote=redis('
                f'url="redis://127.0.0.1:{port}", write=never, lookup=explicit, timeout=10000))')
        self.stores = [kvtier.Store(self.runtime, spec) for _ in range(2)]
        group = kvtier.Group(layers=[0], k_bytes=RUN)
        self.namespaces = [store.namespace(kvtier.Identity(model=b"peers"), chunk_tokens=TOKENS,
                                       groups=[group]) for store in self.stores]

    def session(self, which, number):
        session = self.namespaces[which].session()
        count = len(self.rows) * TOKENS
        session.append(np.arange(number << 20, (number << 20) + count, dtype=np.uint32))
        return session

    def put(self, number):
        with self.session(0, number) as session:
            view = kvtier.View(self.rows.reshape(-1), RUN)
            return timed(lambda: session.put([view], level=kvtier.LEVEL_REMOTE).result(120))

    def get(self, number):
        view = kvtier.View(self.back.reshape(-1), RUN)
        with self.session(1, number) as session:
            def act():
                assert session.remote_lookup().result(120).value == len(self.rows) * TOKENS
                session.get([view]).result(120)

            return timed(act)

    def check(self):
        assert (self.back == self.rows).all(), "the get returned wrong bytes"
        self.back[:] = 0

    def close(self):
        for one in (*self.namespaces, *self.stores, self.runtime):
            one.close()


class Native:
    """LMCache's native client for RESP, with eight threads."""

    def __init__(self, port, rows):
        try:
            from lmcache import lmcache_redis
        except ImportError:
            import lmcache_redis

        self.rows, self.back = rows, np.zeros_like(rows)
        self.client = lmcache_redis.LMCacheRedisClient("127.0.0.1", port, 8)

    def run(self, submit, number, rows):
        keys = [f"peers@1@0@{(number << 20) + at:x}@bfloat16" for at in range(len(rows))]
        views = [memoryview(row) for row in rows]

        def act():
            submitted = submit(keys, views)
            while True:
                select.select([self.client.event_fd()], [], [])
                for number, is_ok, error, _ in self.client.drain_completions():
                    assert is_ok, error
                    if number == submitted:
                        return

        return timed(act)

    def put(self, number):
        return self.run(self.client.submit_batch_set, number, self.rows)

    def get(self, number):
        return self.run(self.client.submit_batch_get, number, self.back)

    def check(self):
        assert (self.back == self.rows).all(), "LMCache returned wrong bytes"
        self.back[:] = 0

    def close(self):
        self.client.close()


class Lmcache:
    """LMCache's connector for redis:// with its own event loop."""

    def __init__(self, port, rows):
        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
        from lmcache.v1.storage_backend.connector import redis_connector

        self.torch, self.key = torch, CacheEngineKey
        self.object, self.about, self.format = TensorMemoryObj, MemoryObjMetadata, MemoryFormat
        self.rows, self.back, self.next = rows, np.zeros_like(rows), []
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.shape = torch.Size([2, 1, TOKENS, CELL // 4 // TOKENS])
        made = SimpleNamespace(chunk_size=TOKENS, extra_config=None)
        about = SimpleNamespace(use_mla=False, chunk_size=TOKENS, get_num_groups=lambda: 1,
                                get_shapes=lambda *_: [self.shape],
                                get_dtypes=lambda *_: [torch.bfloat16])
        backend = SimpleNamespace(config=made, metadata=about,
                                  allocate=lambda *_: self.of(self.back, self.next.pop(0)))
        url = f"redis://127.0.0.1:{port}"
        self.connector = redis_connector.RedisConnector(url, self.loop, backend)

    def of(self, rows, row):
        raw = self.torch.from_numpy(rows[row])
        about = self.about(self.shape, self.torch.bfloat16, 0, CELL, 1, 0, self.format.KV_2LTD,
                           shapes=[self.shape], dtypes=[self.torch.bfloat16])
        return self.object(raw, about, None)

    def keys(self, number):
        first = number << 20
        return [self.key("peers", 1, 0, first + at, self.torch.bfloat16)
                for at in range(len(self.rows))]

    def run(self, what):
        return asyncio.run_coroutine_threadsafe(what, self.loop).result(120)

    def put(self, number):
        keys, rows = self.keys(number), [self.of(self.rows, at) for at in range(len(self.rows))]
        return timed(lambda: self.run(self.connector.batched_put(keys, rows)))

    def get(self, number):
        keys, self.next = self.keys(number), list(range(len(self.rows)))

        async def all_of():
            return await asyncio.gather(*(self.connector.get(key) for key in keys))

        return timed(lambda: self.run(all_of()))

    def check(self):
        rows = np.sort(self.back.view(np.uint64)[:, 0])
        assert (rows == np.sort(self.rows.view(np.uint64)[:, 0])).all(), "LMCache returned wrong bytes"
        self.back[:] = 0

    def close(self):
        # The connector's close waits for jobs that never end. The loop's thread is a daemon, so it
        # ends with the process.
        self.loop.call_soon_threadsafe(self.loop.stop)


def line(bar, baseline, ours, theirs, nbytes):
    ratios = [b / a for a, b in zip(ours, theirs)]
    value = statistics.median(ratios)
    rate = nbytes / statistics.median(theirs) / (1 << 20)
    print(json.dumps({
        "group": "remote_peers", "bar": bar, "value": round(value, 3), "unit": "x",
        "baseline": baseline, "baseline_value": round(rate, 1), "goal": 1.0, "better": "higher",
        "ok": value >= 1.0, "note": f"{min(ratios):.2f} to {max(ratios):.2f}; the baseline in MiB/s",
    }), flush=True)


def compare(port, rows, rounds, kind):
    ours, theirs = Kvtier(port, rows), {"resp": Native, "redis": Lmcache}[kind](port, rows)
    server = socket.create_connection(("127.0.0.1", port))
    puts, gets = ([], []), ([], [])
    for number in range(1, rounds + 3):
        server.sendall(b"FLUSHALL\r\n")
        assert server.recv(64).startswith(b"+OK")
        # The order of the systems alternates.
        for at, side in sorted(enumerate((ours, theirs)), key=lambda one: (one[0] + number) % 2):
            took = side.put(number), side.get(number)
            side.check()
            if number > 2:
                puts[at].append(took[0])
                gets[at].append(took[1])
    server.close()
    ours.close()
    theirs.close()
    name = {"resp": "LMCache's native client, eight threads", "redis": "LMCache redis://"}[kind]
    line(f"put_{kind}", name, *puts, rows.nbytes)
    line(f"get_{kind}", name, *gets, rows.nbytes)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    if not shutil.which("redis-server"):
        sys.exit("redis-server is not installed: install it or extend PATH")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rows = np.random.default_rng(1).integers(0, 256, (64 if quick else 256, CELL), np.uint8)
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            while socket.socket().connect_ex(("127.0.0.1", port)):
                time.sleep(0.02)
            compare(port, rows, 5 if quick else 11, "resp")
            if importlib.util.find_spec("torch"):
                compare(port, rows, 5 if quick else 11, "redis")
            else:
                print("SKIP: redis://, since torch is not installed", file=sys.stderr)
        finally:
            server.kill()


if __name__ == "__main__":
    main()
