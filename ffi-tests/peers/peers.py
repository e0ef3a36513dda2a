#!/usr/bin/env python3
"""Compares kvtier with other systems on cells of 1 MiB, in one run.

    peers.py DIR [--quick]     DIR is on the disk to be measured

All systems use the same sizes, directory and bytes, and rounds alternate. Prints one JSON object per
line, as `kvtier-bench` does: kvtier's rate divided by the peer's, the median of the rounds. A peer
that is not installed or does not start has no value and a note with the reason. KVTIER_LIBRARY names
the library; `run.sh` installs the peers and runs this script.
"""

import argparse
import contextlib
import ctypes
import importlib
import json
import mmap
import os
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import time

CELL = 1 << 20
TOKENS = 256
RUN = CELL // TOKENS // 2
DEPTH = 100
# Warm-up rounds: until memory is full and mapped.
WARM = 5
ROUNDS = 7


def line(bar, ours=None, theirs=None, baseline="", note=""):
    out = {"group": "peers", "bar": bar, "value": None, "unit": "x", "baseline": baseline,
           "baseline_value": None, "goal": 1.0, "better": "higher", "ok": None}
    if ours and theirs:
        value = statistics.median(b / a for a, b in zip(ours, theirs))
        out |= {"value": round(value, 3), "baseline_value": 1.0, "ok": value >= 1.0}
    if note:
        out["note"] = note
    print(json.dumps(out), flush=True)


def memory(cells):
    """Page-aligned, mapped memory with random bytes."""
    area = mmap.mmap(-1, cells * CELL)
    area.write(os.urandom(CELL) * cells)
    return area


def address(area):
    return ctypes.addressof(ctypes.c_char.from_buffer(area))


def recent(number):
    """A document that is still in memory: one of the last two that were put."""
    return WARM + ROUNDS - 1 - number % 2


def timed(act):
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


class Kvtier:
    """A store; without a path it has host memory only. A document has `cells` chunks of one cell."""

    def __init__(self, path, cells):
        self.kvtier, self.cells = importlib.import_module("kvtier"), cells
        self.path = path
        self.runtime = self.kvtier.Runtime()
        self.area = memory(cells)
        self.store = None
        self.open()

    def open(self):
        host = (3 * self.cells + 64) * CELL
        spec = f"store(host={host}B, policy=lru, chunks=65536"
        if self.path:
            disk = (14 * self.cells + 512) * CELL
            spec += f', disk=disk(path="{self.path}", bytes={disk}B)'
        spec += ")"
        self.store = self.kvtier.Store(self.runtime, spec)
        group = self.kvtier.Group(layers=[0], k_bytes=RUN, v_bytes=RUN, dtype="f16", kv_heads=1)
        identity = self.kvtier.Identity(model=b"peers")
        self.namespace = self.store.namespace(identity, chunk_tokens=TOKENS, groups=[group])

    def close(self):
        self.namespace.close()
        self.store.close()

    def views(self):
        half, whole = len(self.area) // 2, memoryview(self.area)
        view = self.kvtier.View
        return [view(whole[:half], RUN)], [view(whole[half:], RUN)]

    def session(self, number):
        import numpy as np

        session = self.namespace.session()
        first = number << 22
        session.append(np.arange(first, first + self.cells * TOKENS, dtype=np.uint32))
        return session

    def put(self, number, level):
        with self.session(number) as session:
            return timed(lambda: session.put(*self.views(), level=level).result(120))

    def get(self, number):
        with self.session(number) as session:
            op = None

            def act():
                nonlocal op
                op = session.get(*self.views())
                op.result(120)

            took = timed(act)
            assert op.result(1).value == self.cells * TOKENS, "the get did not return all tokens"
            return took

    def put_ram(self, number):
        return self.put(number, self.kvtier.LEVEL_RAM)

    def put_durable(self, number):
        return self.put(number, self.kvtier.LEVEL_DURABLE)

    def get_ram(self, number):
        return self.get(recent(number))

    def get_cold(self, number):
        self.close()
        self.open()
        return self.get(number)


class Nixl:
    """One file with all cells, read and written by the POSIX plugin with O_DIRECT."""

    def __init__(self, path, cells):
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self.area = memory(cells)
        self.agent = nixl_agent("peers", nixl_agent_config(backends=[]))
        self.agent.create_backend("POSIX", {"use_uring": "true"})
        path.mkdir(parents=True, exist_ok=True)
        self.file = os.open(path / "cells", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.file, 0, cells * CELL)
        base = address(self.area)
        ram = [(base + i * CELL, CELL, 0, "") for i in range(cells)]
        disk = [(i * CELL, CELL, self.file, "") for i in range(cells)]
        self.agent.register_memory(ram, "DRAM", backends=["POSIX"])
        self.agent.register_memory(disk, "FILE", backends=["POSIX"])
        self.batches = [
            (self.agent.get_xfer_descs([d[:3] for d in ram[i:i + DEPTH]], "DRAM"),
             self.agent.get_xfer_descs([d[:3] for d in disk[i:i + DEPTH]], "FILE"))
            for i in range(0, cells, DEPTH)
        ]

    def transfer(self, direction):
        for ram, disk in self.batches:
            handle = self.agent.initialize_xfer(direction, ram, disk, "peers")
            state = self.agent.transfer(handle)
            while state not in ("DONE", "ERR"):
                state = self.agent.check_xfer_state(handle)
            self.agent.release_xfer_handle(handle)
            assert state == "DONE", state

    def put_durable(self, number):
        return timed(lambda: (self.transfer("WRITE"), os.fdatasync(self.file)))

    def get_cold(self, number):
        return timed(lambda: self.transfer("READ"))

    def close(self):
        os.close(self.file)


class Mooncake:
    """A memory segment, with a master on this machine."""

    def __init__(self, path, cells):
        program = pathlib.Path(sys.executable).parent / "mooncake_master"
        from mooncake.store import MooncakeDistributedStore

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        words = [str(program), f"-rpc_port={port}", "-rpc_address=127.0.0.1", "-metrics_port=0",
                 "-enable_metric_reporting=false"]
        self.master = subprocess.Popen(words, cwd=path.parent, stdout=subprocess.DEVNULL,
                                       stderr=subprocess.DEVNULL)
        self.cells, self.area = cells, memory(cells)
        self.store = MooncakeDistributedStore()
        segment = (4 * cells + 64) * CELL
        for _ in range(50):
            time.sleep(0.1)  # until the master listens
            code = self.store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 64 << 20, "tcp", "",
                                    f"127.0.0.1:{port}")
            if code == 0:
                break
        else:
            raise RuntimeError(f"MooncakeDistributedStore.setup returned {code}")
        base = address(self.area)
        if self.store.register_buffer(base, cells * CELL) != 0:
            raise RuntimeError("MooncakeDistributedStore.register_buffer failed")
        self.places = [base + i * CELL for i in range(cells)]

    def batches(self, number, call):
        for i in range(0, self.cells, DEPTH):
            keys = [f"{number}-{j}" for j in range(i, min(i + DEPTH, self.cells))]
            ends = call(keys, self.places[i:i + DEPTH], [CELL] * len(keys))
            assert all(end >= 0 for end in ends), ends

    def put_ram(self, number):
        # Making room for the document is not timed.
        self.store.remove_by_regex(f"^{number - 3}-.*", True)
        return timed(lambda: self.batches(number, self.store.batch_put_from))

    def get_ram(self, number):
        number = recent(number)
        return timed(lambda: self.batches(number, self.store.batch_get_into))

    def close(self):
        with contextlib.suppress(Exception):
            self.store.close()
        self.master.terminate()
        self.master.wait(20)


def contest(name, peer_class, bars, path, cells, on_disk):
    """Measures rounds of both systems; their order alternates."""
    ours = theirs = None
    try:
        theirs = peer_class(path / name, cells)
        ours = Kvtier(path / "kvtier" if on_disk else None, cells)
        times = {bar: ([], []) for bar in bars}
        for bar, call in bars.items():
            one, other = getattr(ours, call), getattr(theirs, call)
            for number in range(WARM + ROUNDS):
                if number % 2:
                    took = (one(number), other(number))
                else:
                    late = other(number)
                    took = (one(number), late)
                if number >= WARM:
                    for all_of, t in zip(times[bar], took):
                        all_of.append(t)
        gib = cells * CELL / (1 << 30)
        for bar, (own, other) in times.items():
            rates = [gib / statistics.median(t) for t in (own, other)]
            line(f"{bar}_{name}", own, other, name,
                 f"({rates[0]:.2f} against {rates[1]:.2f} GiB/s)")
    except Exception as error:
        for bar in bars:
            line(f"{bar}_{name}", baseline=name, note=f"{type(error).__name__}: {error}"[:300])
    finally:
        for one in (ours, theirs):
            if one is not None:
                with contextlib.suppress(Exception):
                    one.close()
        shutil.rmtree(path / "kvtier", ignore_errors=True)
        shutil.rmtree(path / name, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir", type=pathlib.Path)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    importlib.import_module("kvtier")  # fail early without kvtier
    cells = 200 if args.quick else 1000
    args.dir.mkdir(parents=True, exist_ok=True)
    contest("nixl", Nixl, {"durable_put": "put_durable", "cold_get": "get_cold"},
            args.dir, cells, True)
    contest("mooncake", Mooncake, {"ram_put": "put_ram", "ram_get": "get_ram"},
            args.dir, cells, False)
    for bar in ("l1_put", "l1_get", "l2_put", "l2_get"):
        line(f"{bar}_lmcache", baseline="lmcache",
             note="not measured: it needs a torch built for CUDA, 6 GiB in all")


if __name__ == "__main__":
    main()
