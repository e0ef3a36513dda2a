#!/usr/bin/env python3
"""kvtier's disk tier beside other systems: durable puts and cold gets of cells of 1 MiB.

    disk.py DIR [--quick] [--sides lmcache,nixl]     DIR is on the disk to be measured

Rounds put 300 cells (--quick: 100) until they are durable: by fdatasync, syncfs or
KVT_LEVEL_DURABLE. Then rounds get them back with O_DIRECT, kvtier from a store that was opened
again. Opening is not timed; the first touch of a new store's memory is. All sides take turns in one process. The baseline is eight threads that write
and read 1 MiB at a time with O_DIRECT into a file that was just created and allocated, as the next
segment of a log is. Prints JSON (sides.py).
"""

import argparse
import concurrent.futures
import ctypes
import functools
import os
import pathlib
import select
import shutil

import kvtier
import numpy as np
from sides import Check, address, contest, kvtier_versions, memory, timed, version

CELL, TOKENS, THREADS, DEPTH = 1 << 20, 256, 8, 100
RUN = CELL // TOKENS
WARM, ROUNDS = 2, 5


class Cells:
    """An engine's buffer with cells."""

    def __init__(self, count):
        self.count, self.area = count, memory(count * CELL)
        self.base, self.check = address(self.area), Check(self.area)
        self.view = memoryview(self.area)


def a_get(side, act):
    """Seconds of a get; the bytes are verified."""
    side.cells.check.clear()
    took = timed(act)
    side.cells.check.verify(side.name)
    return took


def allocated(path, cells):
    """A new file with its space allocated, opened with O_DIRECT."""
    path.unlink(missing_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.posix_fallocate(file, 0, cells * CELL)
    os.fsync(file)
    return file


class Raw:
    versions = {}

    def __init__(self, cells, path, fresh):
        self.cells, self.fresh = cells, fresh
        self.path = path / f"raw-{fresh}"
        self.file = allocated(self.path, cells.count)
        self.pool = concurrent.futures.ThreadPoolExecutor(THREADS)

    def each(self, call):
        def act(at):
            if call(self.file, [self.cells.view[at:at + CELL]], at) != CELL:
                raise OSError("a short transfer")
        list(self.pool.map(act, range(0, self.cells.count * CELL, CELL)))

    def durable_put(self, number):
        if self.fresh:
            os.close(self.file)
            self.file = allocated(self.path, self.cells.count)
        return timed(lambda: (self.each(os.pwritev), os.fdatasync(self.file)))

    def cold_get(self, number):
        return a_get(self, lambda: self.each(os.preadv))

    def close(self):
        self.pool.shutdown()
        os.close(self.file)


class Kvtier:
    versions = kvtier_versions(kvtier)

    def __init__(self, cells, path):
        self.cells, self.path = cells, path / "kvtier"
        self.runtime, self.store = kvtier.Runtime(), None
        self.open()

    def open(self):
        host, disk = (2 * self.cells.count + 64) * CELL, (8 * self.cells.count + 512) * CELL
        spec = (f"store(host={host}B, policy=lru, chunks=65536, "
                f'disk=disk(path="{self.path}", bytes={disk}B))')
        self.store = kvtier.Store(self.runtime, spec)
        group = kvtier.Group(layers=[0], k_bytes=RUN)
        self.namespace = self.store.namespace(kvtier.Identity(model=b"peers"), chunk_tokens=TOKENS,
                                              groups=[group])

    def session(self, number):
        session = self.namespace.session()
        first = (number + 1) << 20
        session.append(np.arange(first, first + self.cells.count * TOKENS, dtype=np.uint32))
        return session

    def durable_put(self, number):
        with self.session(number) as session:
            return timed(lambda: session.put([kvtier.View(self.cells.view, RUN)],
                                             level=kvtier.LEVEL_DURABLE).result(120))

    def cold_get(self, number):
        self.close()
        self.open()
        with self.session(number) as session:
            return a_get(self, lambda: session.get([kvtier.View(self.cells.view, RUN)]).result(120))

    def close(self):
        self.namespace.close()
        self.store.close()


class Nixl:
    """The POSIX plugin with io_uring and O_DIRECT, in one file."""

    def __init__(self, cells, path, fresh):
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self.cells, self.fresh, self.versions = cells, fresh, version("nixl-cu12")
        self.path, self.file, self.disk = path / f"nixl-{fresh}", -1, None
        self.agent = nixl_agent(f"peers-{fresh}", nixl_agent_config(backends=[]))
        self.agent.create_backend("POSIX", {"use_uring": "true"})
        ram = [(cells.base + at * CELL, CELL, 0, "") for at in range(cells.count)]
        self.agent.register_memory(ram, "DRAM", backends=["POSIX"])
        self.ram = [self.agent.get_xfer_descs([one[:3] for one in ram[at:at + DEPTH]], "DRAM")
                    for at in range(0, cells.count, DEPTH)]
        self.allocate()

    def allocate(self):
        if self.disk is not None:
            self.agent.deregister_memory(self.disk, backends=["POSIX"])
            os.close(self.file)
        self.file = allocated(self.path, self.cells.count)
        rows = [(at * CELL, CELL, self.file, "") for at in range(self.cells.count)]
        self.disk = self.agent.register_memory(rows, "FILE", backends=["POSIX"])
        self.parts = [self.agent.get_xfer_descs([one[:3] for one in rows[at:at + DEPTH]], "FILE")
                      for at in range(0, self.cells.count, DEPTH)]

    def transfer(self, direction):
        for ram, disk in zip(self.ram, self.parts):
            handle = self.agent.initialize_xfer(direction, ram, disk, f"peers-{self.fresh}")
            state = self.agent.transfer(handle)
            while state not in ("DONE", "ERR"):
                state = self.agent.check_xfer_state(handle)
            self.agent.release_xfer_handle(handle)
            if state != "DONE":
                raise RuntimeError(f"a transfer ended as {state}")

    def durable_put(self, number):
        if self.fresh:
            self.allocate()
        return timed(lambda: (self.transfer("WRITE"), os.fdatasync(self.file)))

    def cold_get(self, number):
        return a_get(self, lambda: self.transfer("READ"))

    def close(self):
        os.close(self.file)


class Lmcache:
    """An L2 adapter of LMCache. A put ends with syncfs, since the adapter does not sync."""

    def __init__(self, cells, path, kind):
        import torch
        from lmcache.v1.distributed.api import ObjectKey
        from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

        self.cells, self.key, self.versions = cells, ObjectKey, version("lmcache", "torch")
        self.path, self.kind = path / f"lmcache-{kind}", kind
        self.path.mkdir()
        self.adapter = self.fs_native() if kind == "fs_native" else self.raw_block()
        self.folder = os.open(self.path, os.O_RDONLY)
        self.libc = ctypes.CDLL(None, use_errno=True)
        shape, whole = torch.Size([CELL]), torch.frombuffer(cells.area, dtype=torch.uint8)
        about = MemoryObjMetadata(shape, torch.uint8, 0, CELL, 1, 0, MemoryFormat.BINARY,
                                  shapes=[shape], dtypes=[torch.uint8])
        self.objects = [TensorMemoryObj(whole[at * CELL:(at + 1) * CELL], about, None)
                        for at in range(cells.count)]

    def fs_native(self):
        from lmcache.v1.distributed.l2_adapters import fs_native_l2_adapter as fs

        config = fs.FSNativeL2AdapterConfig(str(self.path), num_workers=THREADS, use_odirect=True)
        return fs._create_fs_native_l2_adapter(config)

    def raw_block(self):
        from lmcache.v1.distributed.l2_adapters import raw_block_l2_adapter as raw

        device, slots = self.path / "device", (WARM + ROUNDS + 1) * self.cells.count
        nbytes = (64 << 20) + slots * (CELL + 4096)
        with open(device, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        config = raw.RawBlockL2AdapterConfig(
            device_path=str(device), slot_bytes=CELL + 4096, capacity_bytes=nbytes,
            meta_total_bytes=64 << 20, io_engine="io_uring")
        return raw.RawBlockL2Adapter(config)

    def keys(self, number):
        return [self.key((number << 32 | at).to_bytes(32, "big"), "peers", 0)
                for at in range(self.cells.count)]

    def wait(self, event, query):
        while (found := query()) is None:
            select.select([event], [], [], 60)
            os.read(event, 8)
        return found

    def store(self, keys):
        task = self.adapter.submit_store_task(keys, self.objects)
        result = self.wait(self.adapter.get_store_event_fd(),
                           lambda: self.adapter.pop_completed_store_tasks().get(task))
        if not result.is_successful():
            raise RuntimeError("LMCache did not store all cells")
        if self.libc.syncfs(self.folder) != 0:
            raise OSError(ctypes.get_errno(), "syncfs")

    def load(self, keys):
        task = self.adapter.submit_load_task(keys, self.objects)
        self.wait(self.adapter.get_load_event_fd(), lambda: self.adapter.query_load_result(task))

    def durable_put(self, number):
        keys = self.keys(number)
        return timed(lambda: self.store(keys))

    def cold_get(self, number):
        keys = self.keys(number)
        return a_get(self, lambda: self.load(keys))

    def close(self):
        self.adapter.close()
        os.close(self.folder)


def main():
    parser = argparse.ArgumentParser(description="the disk tier beside other systems")
    parser.add_argument("dir", type=pathlib.Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sides", default="lmcache,nixl")
    args = parser.parse_args()
    path = args.dir / "disk"
    path.mkdir(parents=True)
    cells = Cells(100 if args.quick else 300)
    half, chosen = functools.partial, args.sides.split(",")
    sides = [("raw, fresh file", half(Raw, cells, path, True)),
             ("raw, written over", half(Raw, cells, path, False)),
             ("kvtier", half(Kvtier, cells, path))]
    if "nixl" in chosen:
        sides += [("NIXL, fresh file", half(Nixl, cells, path, True)),
                  ("NIXL, written over", half(Nixl, cells, path, False))]
    if "lmcache" in chosen:
        sides += [("LMCache fs_native, O_DIRECT, 8 workers", half(Lmcache, cells, path, "fs_native")),
                  ("LMCache raw_block, io_uring, on a file", half(Lmcache, cells, path, "raw_block"))]
    try:
        contest("disk", sides, [("durable_put",), ("cold_get",)], cells.count * CELL, WARM, ROUNDS)
    finally:
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main()
