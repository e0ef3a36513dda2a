#!/usr/bin/env python3
"""Throughput of the plugin against LMCache's own local disk and local CPU backends.

    python bindings/lmcache/bench.py [--quick] [--dir DIR] [--chunks 256,1024,4096]

Needs LMCache 0.5.6. All sides are behind LMCache's `StorageManager` and move the same chunks
between the same kind of memory objects: `batched_put`, until the chunks are stored, and
`batched_get`. Each number is the median of interleaved pairs; a ratio above 1 means that the
plugin is faster. Prints one JSON object per line. The disk side of LMCache reads and writes with
O_DIRECT, as kvtier does; neither side syncs. The load average is printed before and after.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "vllm", HERE / "tests" / "engine"):
    sys.path.insert(0, str(folder))

#: Bytes of a batch, and warm-up turns that do not count.
BATCH_BYTES, WARM = 32 << 20, 3


class Side:
    """A storage manager with one backend; the chunks have `kib` KiB."""

    def __init__(self, kib: int, engine: Dict[str, Any], location: str) -> None:
        import sites
        import torch
        from lmcache.v1.event_manager import EventManager
        from lmcache.v1.storage_backend.storage_manager import StorageManager

        self._key, self._torch, self.location = sites.key, torch, location
        # 2 x 4 layers x 16 tokens x hidden x 2 bytes
        self.shape = [torch.Size([2, 4, 16, kib * 4])]
        meta = sites.metadata(kv_shape=(4, 2, 16, 1, kib * 4))
        given = sites.config(None, {"chunk_size": 16, "max_local_cpu_size": 1.0, **engine})
        self.manager = StorageManager(given, meta, EventManager())
        self.backend = self.manager.storage_backends[location]

    def put(self, first: int, rows: Any) -> float:
        """Puts a batch, and waits until all of it is stored. Returns the seconds."""
        keys = [self._key(first + at) for at in range(len(rows))]
        objects = [self.manager.allocate(self.shape, [self._torch.bfloat16]) for _ in keys]
        for obj, row in zip(objects, rows):
            obj.raw_tensor[:obj.get_size()] = row
        begun = time.perf_counter()
        self.manager.batched_put(keys, objects, location=self.location)
        while any(map(self.backend.exists_in_put_tasks, keys[::-1])):
            time.sleep(0.0001)
        return time.perf_counter() - begun

    def get(self, first: int, rows: Any) -> float:
        """Gets a batch. Returns the seconds."""
        keys = [self._key(first + at) for at in range(len(rows))]
        begun = time.perf_counter()
        objects = self.manager.batched_get(keys, location=self.location)
        took = time.perf_counter() - begun
        for obj, row in zip(objects, rows):
            assert obj is not None, f"{self.location} lost a chunk"
            assert self._torch.equal(obj.raw_tensor[:obj.get_size()], row), "wrong bytes"
            obj.ref_count_down()
        return took

    def close(self) -> None:
        self.manager.close()


def sides_of(kib: int, folder: Path, disk: bool) -> List[Side]:
    """The plugin, and LMCache's own backend for the same tier."""
    plugin = {"module_path": "kvtier_lmcache", "class_name": "KvtierBackend"}
    if disk:  # little memory, so that gets come from the disk
        plugin.update(disk_path=str(folder / "kvtier"), disk_bytes="8GiB", host_bytes="128MiB")
        peer = {"local_disk": str(folder / "lmcache"), "max_local_disk_size": 8.0,
                "storage_plugins": None, "extra_config": {"use_odirect": True}}
    else:
        plugin.update(host_bytes="1GiB")
        peer = {"local_cpu": True, "storage_plugins": None}
    ours = {"extra_config": {f"storage_plugin.kvtier.{name}": value
                             for name, value in plugin.items()}}
    return [Side(kib, ours, "kvtier"),
            Side(kib, peer, "LocalDiskBackend" if disk else "LocalCPUBackend")]


def measure(kib: int, folder: Path, disk: bool, turns: int) -> None:
    """Measures pairs, and prints a line for puts and one for gets."""
    import torch
    sides, count = sides_of(kib, folder, disk), BATCH_BYTES // (kib << 10)
    lag = 8 if disk else 2
    took: Dict[str, List[List[float]]] = {"put": [], "get": []}

    def rows_of(turn: int) -> Any:
        return torch.randint(0, 256, (count, kib << 10), dtype=torch.uint8,
                             generator=torch.Generator().manual_seed(turn))

    before = os.getloadavg()[0]
    for turn in range(turns + lag + WARM):
        order = sides if turn % 2 else sides[::-1]
        rows = rows_of(turn)
        one = {side.location: side.put(turn * count, rows) for side in order}
        if turn >= lag + WARM:
            took["put"].append([one[side.location] for side in sides])
        if turn < lag:
            continue
        rows = rows_of(turn - lag)
        one = {side.location: side.get((turn - lag) * count, rows) for side in order}
        if turn >= lag + WARM:
            took["get"].append([one[side.location] for side in sides])
    for op, pairs in took.items():
        ours, peer = (statistics.median(column) for column in zip(*pairs))
        print(json.dumps({
            "bar": f"lmcache_{'disk' if disk else 'memory'}_{op}_{kib}KiB",
            "ratio": round(statistics.median(b / a for a, b in pairs), 3),
            "baseline": sides[1].location, "pairs": len(pairs),
            "gib_s": round(BATCH_BYTES / ours / 2**30, 2),
            "baseline_gib_s": round(BATCH_BYTES / peer / 2**30, 2),
            "load": [round(before, 1), round(os.getloadavg()[0], 1)]}), flush=True)
    for side in sides:
        side.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few turns")
    parser.add_argument("--dir", type=Path, help="directory on the disk to be measured")
    parser.add_argument("--chunks", default="256,1024,4096", help="KiB of a chunk")
    given = parser.parse_args()
    try:
        import lmcache.v1.storage_backend.storage_manager  # noqa: F401
    except ImportError as error:
        print(f"SKIP: LMCache is not installed: {error}")
        return 0
    logging.disable(logging.WARNING)
    for kib in map(int, given.chunks.split(",")):
        for disk in (True, False):
            folder = Path(tempfile.mkdtemp(dir=given.dir))
            try:
                measure(kib, folder, disk, 5 if given.quick else 21)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    # LMCache's threads may keep a failed process alive.
    try:
        status = main()
    except BaseException:
        import traceback
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    os._exit(status)
