"""The overhead of the backend over kvtier.Blocks, and its speed against SGLang's file backend.

    python bench.py [--pages 1000] [--pairs 25] [--file DIR] [--file-pairs 5]

It prints a JSON line per result, with medians of interleaved pairs. The comparison with the file
backend needs `--file` and KVTIER_ENGINES=1 with SGLang; otherwise stubs replace the engine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "tests")]
if os.environ.get("KVTIER_ENGINES") != "1":
    sys.path.insert(0, str(HERE / "tests" / "stubs"))

import kvtier  # noqa: E402
import numpy as np  # noqa: E402
from kvtier_sglang import KvtierStorage  # noqa: E402
from mini import MiniPool, config, names  # noqa: E402

Call = Callable[[], None]


def seconds(call: Call) -> float:
    """The wall-clock seconds of a call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class Pairs:
    """Median times of two calls that alternate, each first in every other turn: the wall clock,
    and the CPU time of the calling thread, which other load does not change."""

    def __init__(self, count: int, before: Call, ours: Call, theirs: Call) -> None:
        wall: Dict[Call, List[float]] = {ours: [], theirs: []}
        own: Dict[Call, List[float]] = {ours: [], theirs: []}
        for turn in range(count + 2):  # two to warm up
            for call in (ours, theirs) if turn % 2 else (theirs, ours):
                before()
                began = time.thread_time()
                wall[call].append(seconds(call))
                own[call].append(time.thread_time() - began)
        self.ratio = statistics.median(a / b for a, b in list(zip(wall[ours], wall[theirs]))[2:])
        self.ours, self.theirs = (statistics.median(wall[one][2:]) for one in (ours, theirs))
        mine, other = (statistics.median(own[one][2:]) for one in (ours, theirs))
        self.more = mine - other

    def describe(self, nbytes: int) -> str:
        """Both medians as text."""
        return (f"{self.ours * 1e3:.2f} ms ({nbytes / self.ours / 1e9:.2f} GB/s) against "
                f"{self.theirs * 1e3:.2f} ms ({nbytes / self.theirs / 1e9:.2f} GB/s), the calling "
                f"thread {self.more * 1e6:+.0f} us")


def print_result(bar: str, value: float, baseline: str, goal: Optional[float], better: str,
                 note: str) -> None:
    """Prints a result as a JSON line."""
    ok = None if goal is None else value <= goal if better == "lower" else value >= goal
    print(json.dumps({
        "group": "sglang", "bar": bar, "value": round(value, 4), "unit": "ratio",
        "baseline": baseline, "baseline_value": 1.0, "goal": goal, "better": better, "ok": ok,
        "note": note}), flush=True)


def opened(pool: Any, **extra: Any) -> KvtierStorage:
    """Makes a backend for a pool."""
    backend = KvtierStorage(config(extra, enable_storage_metrics=False), {})
    backend.register_mem_pool_host(pool)
    return backend


def compare_with_blocks(pool: MiniPool, keys: List[str], rounds: int) -> None:
    """Measures the overhead of the backend's names, slots, checks and results."""
    nbytes = len(keys) * len(pool.bytes_of(0))
    backend = opened(pool, host_bytes=2 * nbytes + (128 << 20))
    blocks = backend._pools["kv"].blocks
    encoded = [key.encode() for key in keys]
    slots = pool.slots(np.random.default_rng(1).permutation(len(keys)))
    first = slots.numpy()[::pool.page_size].astype(np.uint64)
    meta = pool.get_page_buffer_meta(pool.slots([0]))[0]
    step = pool.get_page_buffer_meta(pool.slots([1]))[0][0] - meta[0]
    addresses = np.uint64(meta[0]) + first // np.uint64(pool.page_size) * np.uint64(step)
    shifts = [one - meta[0] for one in meta]

    def bare(move: Any) -> None:
        op = move(encoded, kvtier.BlockAddresses(addresses, shifts, kept=pool))
        op.wait()
        assert op.failed() == []
        op.close()

    def clear() -> None:
        backend.clear()

    assert all(backend.batch_set_v1(keys, slots))
    for bar, before, ours, move in (
            ("get_over_blocks", lambda: None, backend.batch_get_v1, blocks.get),
            ("set_over_blocks", clear, backend.batch_set_v1, blocks.put)):
        measured = Pairs(rounds, before, lambda: ours(keys, slots) and None, lambda: bare(move))
        print_result(f"{bar}_{pool.layout}", measured.ratio, "kvtier.Blocks", 1.05, "lower",
                     f"{len(keys)} pages: {measured.describe(nbytes)}")
        print_result(f"{bar}_{pool.layout}_own", 1 + measured.more / measured.theirs,
                     "kvtier.Blocks", 1.05, "lower",
                     "the same from the calling thread's CPU time: its extra CPU time over the "
                     "bare call, added to the bare call's time, without the effect of other load")
    backend.close()


def compare_with_file(keys: List[str], rounds: int, place: str) -> None:
    """Compares with SGLang's file backend, on the same pages of SGLang's own pool."""
    sys.path.insert(0, str(HERE / "tests" / "engine"))
    import pools
    import torch
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolName, PoolTransfer

    torch.set_num_threads(1)  # torch's threads would wait for each other under other load
    pool = pools.mha("page_first", layers=8, dim=128, page=32, tokens=16 * len(keys))
    pools.fill(pool, 2)
    nbytes = len(keys) * 2 * 8 * 32 * 2 * 128 * 2
    slots = torch.arange(32 * len(keys))
    file = HiCacheFile(config({}), os.path.join(place, "file"))
    file.register_mem_host_pool_v2(pool, PoolName.KV)
    move = PoolTransfer(PoolName.KV, slots, None, keys)
    disk = {"disk_path": os.path.join(place, "kvtier"), "disk_bytes": 4 * nbytes + (1 << 30)}
    backend = opened(pool, host_bytes=2 * nbytes + (128 << 20), level="disk", **disk)

    def clear() -> None:
        backend.clear()
        file.clear()

    def ours(call: Any) -> None:
        assert all(call(keys, slots))

    def theirs(call: Any) -> None:
        assert all(call([move])[PoolName.KV])

    measured = Pairs(rounds, clear, lambda: ours(backend.batch_set_v1),
                     lambda: theirs(file.batch_set_v2))
    print_result("set_speed_beside_file", 1 / measured.ratio, "HiCacheFile", 1.0, "higher",
                 f"written to disk, neither synced: {measured.describe(nbytes)}")
    ours(backend.batch_set_v1)
    theirs(file.batch_set_v2)
    measured = Pairs(rounds, lambda: None, lambda: ours(backend.batch_get_v1),
                     lambda: theirs(file.batch_get_v2))
    print_result("get_speed_beside_file", 1 / measured.ratio, "HiCacheFile", 1.0, "higher",
                 f"kvtier from its memory, files from the page cache: {measured.describe(nbytes)}")
    cold: List[float] = []
    warm: List[float] = []
    for _ in range(max(3, rounds // 3)):
        backend.close()
        backend = opened(pool, host_bytes=2 * nbytes + (128 << 20), **disk)
        cold.append(seconds(lambda: ours(backend.batch_get_v1)))
        warm.append(seconds(lambda: theirs(file.batch_get_v2)))
    mine, other = statistics.median(cold), statistics.median(warm)
    print_result("get_after_restart_beside_file", other / mine, "HiCacheFile", None, "higher",
                 "kvtier from its disk, files from the page cache as they were just written: "
                 f"{mine * 1e3:.0f} ms against {other * 1e3:.0f} ms")
    backend.close()
    file.clear()


def main() -> None:
    """Runs all comparisons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=1000)
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--file-pairs", type=int, default=5)
    parser.add_argument("--file", help="a directory for SGLang's file backend and kvtier's disk")
    given = parser.parse_args()
    keys = names(given.pages)
    for layout in ("page_first", "layer_first"):
        # 256 KiB a page: 8 layers, 2 heads of 128 halves, 32 tokens, K and V.
        pool = MiniPool(layout, pages=given.pages, layers=8, page_size=32, dim=128)
        pool.fill(1)
        compare_with_blocks(pool, keys, given.pairs)
    if given.file and os.environ.get("KVTIER_ENGINES") == "1":
        with tempfile.TemporaryDirectory(dir=given.file) as place:
            compare_with_file(keys, given.file_pairs, place)


if __name__ == "__main__":
    main()
