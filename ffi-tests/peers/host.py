#!/usr/bin/env python3
"""kvtier's host memory beside other systems: objects of 64 KiB, 256 KiB and 1 MiB.

    host.py DIR [--quick] [--sides mooncake,lmcache,nixl] [--sizes 64,256,1024]

Each round puts a batch of 96 MiB of objects (--quick: 32 MiB) from an engine's buffer, and gets it
back. All sides take turns in one process. The baseline is ctypes.memmove, one call an object. NIXL
moves bytes alone, without an index. Everything is warm: memory is touched in rounds that do not
count. DIR is where Mooncake's master runs. Prints JSON (sides.py).
"""

import argparse
import contextlib
import ctypes
import functools
import pathlib
import socket
import subprocess
import sys
import time

import kvtier
import numpy as np
from sides import Check, address, contest, kvtier_versions, memory, timed, version

# Batches that fit into each pool.
POOL = 3
TOKENS = 64


class Batch:
    """An engine's buffer with objects at equal distances."""

    def __init__(self, size, count):
        self.size, self.count, self.area = size, count, memory(size * count)
        self.base, self.check = address(self.area), None
        self.check = Check(self.area)

    def places(self):
        return range(self.base, self.base + self.size * self.count, self.size)


def a_get(side, act):
    """Seconds of a get; the bytes are verified."""
    side.batch.check.clear()
    took = timed(act)
    side.batch.check.verify(side.name)
    return took


class Memmove:
    versions = {}

    def __init__(self, batch):
        self.batch = batch
        self.pool = memory(batch.size * batch.count * POOL)

    def copy(self, number, get):
        nbytes = self.batch.size * self.batch.count
        pool = address(self.pool) + number % POOL * nbytes
        for at, place in zip(range(pool, pool + nbytes, self.batch.size), self.batch.places()):
            ctypes.memmove(*((place, at) if get else (at, place)), self.batch.size)

    def put(self, number):
        return timed(lambda: self.copy(number, False))

    def get(self, number):
        return a_get(self, lambda: self.copy(number, True))

    def close(self):
        self.pool = None


class Kvtier:
    """Puts and gets of kvtier, which `act` makes."""

    versions = kvtier_versions(kvtier)

    def put(self, number):
        return timed(self.act(number, "put"))

    def get(self, number):
        return a_get(self, self.act(number, "get"))


class Session(Kvtier):
    """Objects as chunks of a session: keys are derived from tokens."""

    def __init__(self, batch):
        self.batch = batch
        self.runtime = kvtier.Runtime()
        nbytes = batch.size * (batch.count * POOL + 64)
        self.store = kvtier.Store(self.runtime, f"store(host={nbytes}B, policy=lru, chunks=65536)")
        self.run = batch.size // TOKENS
        group = kvtier.Group(layers=[0], k_bytes=self.run)
        self.namespace = self.store.namespace(kvtier.Identity(model=b"peers"), chunk_tokens=TOKENS,
                                              groups=[group])

    def act(self, number, name):
        view = kvtier.View(memoryview(self.batch.area), self.run)
        first = (number + 1) << 20
        tokens = np.arange(first, first + self.batch.count * TOKENS, dtype=np.uint32)

        def act():
            with self.namespace.session() as session:
                session.append(tokens)
                op = getattr(session, name)([view])
                op.result(120)
        return act

    def close(self):
        for one in (self.namespace, self.store, self.runtime):
            one.close()


class Blocks(Kvtier):
    """Objects as blocks under names."""

    def __init__(self, batch):
        self.batch = batch
        self.runtime = kvtier.Runtime()
        nbytes = batch.size * (batch.count * POOL + 64)
        self.store = kvtier.Store(self.runtime, f"store(host={nbytes}B, policy=lru, chunks=65536)")
        self.blocks = kvtier.Blocks(self.store, kvtier.Identity(model=b"peers"), [batch.size])
        self.pool = kvtier.Pool(memoryview(batch.area), batch.size)

    def act(self, number, name):
        names = [f"{number}-{at}".encode() for at in range(self.batch.count)]
        places = self.pool.at(range(self.batch.count))
        return lambda: getattr(self.blocks, name)(names, places).result(120)

    def close(self):
        for one in (self.blocks, self.store, self.runtime):
            one.close()


class Mooncake:
    """A memory segment, with a master on this machine."""

    def __init__(self, batch, path):
        from mooncake.store import MooncakeDistributedStore

        self.batch, self.versions = batch, version("mooncake-transfer-engine-non-cuda")
        program = pathlib.Path(sys.executable).parent / "mooncake_master"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        words = [str(program), f"-rpc_port={port}", "-rpc_address=127.0.0.1", "-metrics_port=0",
                 "-enable_metric_reporting=false"]
        self.master = subprocess.Popen(words, cwd=path, stdout=subprocess.DEVNULL,
                                       stderr=subprocess.DEVNULL)
        self.store = MooncakeDistributedStore()
        nbytes = batch.size * batch.count
        for _ in range(50):
            time.sleep(0.1)  # until the master listens
            code = self.store.setup("127.0.0.1", "P2PHANDSHAKE", (POOL + 1) * nbytes + (64 << 20),
                                    64 << 20, "tcp", "", f"127.0.0.1:{port}")
            if code == 0:
                break
        else:
            self.master.kill()
            raise RuntimeError(f"MooncakeDistributedStore.setup returned {code}")
        if self.store.register_buffer(batch.base, nbytes) != 0:
            raise RuntimeError("MooncakeDistributedStore.register_buffer failed")

    def act(self, number, call):
        keys = [f"{number}-{at}" for at in range(self.batch.count)]
        places, sizes = list(self.batch.places()), [self.batch.size] * self.batch.count
        ends = call(keys, places, sizes)
        if any(end < 0 for end in ends):
            raise RuntimeError(f"Mooncake returned {min(ends)}")

    def put(self, number):
        # Making room is not timed.
        self.store.remove_by_regex(f"^{number - POOL + 1}-.*", True)
        return timed(lambda: self.act(number, self.store.batch_put_from))

    def get(self, number):
        return a_get(self, lambda: self.act(number, self.store.batch_get_into))

    def close(self):
        with contextlib.suppress(Exception):
            self.store.close()
        self.master.terminate()
        self.master.wait(20)


class Lmcache:
    """LMCache's L1: its index and its pool; the caller copies."""

    def __init__(self, batch):
        import torch
        from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
        from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
        from lmcache.v1.distributed.l1_manager import L1Manager

        self.batch, self.key, self.versions = batch, ObjectKey, version("lmcache", "torch")
        nbytes = batch.size * batch.count * (POOL + 1)
        pool = L1MemoryManagerConfig(size_in_bytes=nbytes, use_lazy=False, shm_name="")
        self.manager = L1Manager(L1ManagerConfig(memory_config=pool))
        self.layout = MemoryLayoutDesc([torch.Size([batch.size])], [torch.uint8])

    def keys(self, number):
        return [self.key((number << 32 | at).to_bytes(32, "big"), "peers", 0)
                for at in range(self.batch.count)]

    def store(self, keys):
        found = self.manager.reserve_write(keys, [False] * len(keys), self.layout)
        for key, place in zip(keys, self.batch.places()):
            ctypes.memmove(found[key][1].data_ptr, place, self.batch.size)
        self.manager.finish_write(keys)

    def load(self, keys):
        found = self.manager.reserve_read(keys)
        for key, place in zip(keys, self.batch.places()):
            ctypes.memmove(place, found[key][1].data_ptr, self.batch.size)
        self.manager.finish_read(keys)

    def put(self, number):
        # Making room is not timed.
        self.manager.delete(self.keys(number - POOL + 1) if number >= POOL - 1 else [])
        keys = self.keys(number)
        return timed(lambda: self.store(keys))

    def get(self, number):
        keys = self.keys(number)
        return a_get(self, lambda: self.load(keys))

    def close(self):
        self.manager.close()


class Nixl:
    """UCX from memory to memory of one agent."""

    def __init__(self, batch):
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self.batch, self.versions = batch, version("nixl-cu12")
        self.agent = nixl_agent("peers", nixl_agent_config(backends=["UCX"]))
        nbytes = batch.size * batch.count
        self.pool = memory(nbytes * POOL)
        pool = address(self.pool)
        whole = [(batch.base, nbytes, 0, ""), (pool, nbytes * POOL, 0, "")]
        self.agent.register_memory(whole, "DRAM")
        self.rows = self.agent.get_xfer_descs([(at, batch.size, 0) for at in batch.places()],
                                              "DRAM")
        self.parts = [self.agent.get_xfer_descs(
            [(pool + part * nbytes + at, batch.size, 0) for at in range(0, nbytes, batch.size)],
            "DRAM") for part in range(POOL)]

    def transfer(self, direction, number):
        handle = self.agent.initialize_xfer(direction, self.rows, self.parts[number % POOL], "peers")
        state = self.agent.transfer(handle)
        while state not in ("DONE", "ERR"):
            state = self.agent.check_xfer_state(handle)
        self.agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"a transfer ended as {state}")

    def put(self, number):
        return timed(lambda: self.transfer("WRITE", number))

    def get(self, number):
        return a_get(self, lambda: self.transfer("READ", number))

    def close(self):
        self.agent = None


def main():
    parser = argparse.ArgumentParser(description="host memory beside other systems")
    parser.add_argument("dir", type=pathlib.Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sides", default="mooncake,lmcache,nixl")
    parser.add_argument("--sizes", default="64,256,1024", help="KiB of an object")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    nbytes, rounds = (32 << 20, 7) if args.quick else (96 << 20, 15)
    for kib in map(int, args.sizes.split(",")):
        batch = Batch(kib << 10, nbytes // (kib << 10))
        peers = {"mooncake": ("Mooncake", functools.partial(Mooncake, batch, args.dir)),
                 "lmcache": ("LMCache L1", functools.partial(Lmcache, batch)),
                 "nixl": ("NIXL", functools.partial(Nixl, batch))}
        makes = [("memmove", functools.partial(Memmove, batch)),
                 ("kvtier session", functools.partial(Session, batch)),
                 ("kvtier Blocks", functools.partial(Blocks, batch))]
        makes += [peers[name] for name in args.sides.split(",") if name in peers]
        size = f"{kib} KiB" if kib < 1024 else f"{kib >> 10} MiB"
        contest("host", makes, [("put", "get")], nbytes, 5, rounds, size=size)


if __name__ == "__main__":
    main()
