"""Throughput of the kvtier tier against `kvtier.Blocks`, vLLM's file tier and LMCache's disk.

    python bindings/vllm/bench.py [--quick] [--json] [--dir DIR]

Needs the installed vLLM, and LMCache for its row. Each number is the median of interleaved pairs
on the same blocks; a ratio above 1 means that kvtier is faster. A comparison that cannot run
prints the reason, with "ok": null.
"""

from __future__ import annotations

import argparse
import json
import mmap
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "tests" / "engine")]
import absent  # noqa: E402
import kvtier  # noqa: E402
import numpy as np  # noqa: E402

BATCH = 128
#: Warm-up turns that do not count: they touch memory first and create files.
WARM = 6


class Side:
    """One side of a comparison: stores and loads rows under names."""

    def store(self, names: List[bytes], rows: List[int]) -> None:
        raise NotImplementedError

    def load(self, names: List[bytes], rows: List[int]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Releases the resources of the side."""


class Tier(Side):
    """A secondary tier, called as vLLM's manager calls it."""

    def __init__(self, kind: Any, rows: np.ndarray, row: int, options: Dict[str, Any]) -> None:
        from vllm.v1.kv_offload import config as c
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.base import TransferJob

        config = c.OffloadingConfig(
            (c.OffloadingGroupConfig(16, ("layer",), 0),), row, False, {}, "bench",
            c.OffloadingModelConfig("bench", "bfloat16"), c.OffloadingCacheConfig(16, 1),
            c.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False))
        spec = SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=SimpleNamespace(
            enable_kv_cache_events=False))
        self._view = memoryview(rows)
        self.tier = kind(offloading_spec=spec, primary_kv_view=self._view, tier_type="bench",
                         **options)
        self._context, self._job, self._count = ReqContext("r"), TransferJob, 0

    def _run(self, names: List[bytes], rows: List[int], load: bool) -> None:
        job = self._job(self._count, names, np.array(rows, np.int32), load, self._context)
        self._count += 1
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        self.tier.drain_jobs()
        (done,) = self.tier.get_finished_jobs()
        assert done.success, "a job failed"

    def store(self, names: List[bytes], rows: List[int]) -> None:
        self._run(names, rows, False)

    def load(self, names: List[bytes], rows: List[int]) -> None:
        self._run(names, rows, True)

    def close(self) -> None:
        self.tier.shutdown()


class Library(Side):
    """`kvtier.Blocks` alone: one call of the C library per batch."""

    def __init__(self, rows: np.ndarray, row: int, options: Dict[str, Any], level: int) -> None:
        self._runtime = kvtier.Runtime()
        self._store = kvtier.Store(self._runtime, "store", **options)
        self._blocks = kvtier.Blocks(self._store, kvtier.Identity(model=b"bench"), [row])
        self._pool, self._level = kvtier.Pool(memoryview(rows), row), level

    def store(self, names: List[bytes], rows: List[int]) -> None:
        with self._blocks.put(names, self._pool.at(rows), level=self._level) as op:
            op.result()

    def load(self, names: List[bytes], rows: List[int]) -> None:
        with self._blocks.get(names, self._pool.at(rows)) as op:
            op.result()

    def close(self) -> None:
        self._store.close()
        self._runtime.close()


def names_of(first: int) -> List[bytes]:
    """A batch of offload keys."""
    return [n.to_bytes(32, "big") + bytes(4) for n in range(first, first + BATCH)]


def timed(call: Callable[[], None]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def filled(rows: np.ndarray, turn: int) -> np.ndarray:
    """The rows of a turn's batch."""
    return np.random.default_rng(turn).integers(-128, 128, rows[:BATCH].shape, np.int8)


def pairs(ours: Side, baseline: Side, rows: np.ndarray, turns: int, lag: int
          ) -> Tuple[Tuple[float, float], Tuple[float, float]]:
    """The median ratio and the baseline's median seconds, for stores and for loads. Loads read
    the batch of `lag` turns before, which a store with little memory has demoted to disk."""
    all_rows, back = list(range(BATCH)), list(range(BATCH, 2 * BATCH))
    stores: List[Tuple[float, float]] = []
    loads: List[Tuple[float, float]] = []
    for turn in range(turns + WARM):
        rows[:BATCH] = filled(rows, turn)
        sides = (ours, baseline) if turn % 2 else (baseline, ours)
        took = {side: timed(lambda s=side: s.store(names_of(turn * BATCH), all_rows))
                for side in sides}
        if turn >= WARM:
            stores.append((took[ours], took[baseline]))
        if turn < lag:
            continue
        names, expected = names_of((turn - lag) * BATCH), filled(rows, turn - lag)
        for side in sides:
            rows[BATCH:] = 0
            took[side] = timed(lambda s=side: s.load(names, back))
            assert (rows[BATCH:] == expected).all(), "wrong bytes"
        if turn >= WARM:
            loads.append((took[ours], took[baseline]))
    return tuple((statistics.median(b / a for a, b in one),  # type: ignore[return-value]
                  statistics.median(b for _, b in one)) for one in (stores, loads))


def result_row(bar: str, ratio: Optional[float], baseline: str, goal: float, rate: Optional[float],
               why: str = "") -> Dict[str, Any]:
    """A result in the form of all benchmarks of the project; `baseline_value` is in GiB/s."""
    result: Dict[str, Any] = {
        "group": "vllm", "bar": bar, "value": None if ratio is None else round(ratio, 3),
        "unit": "ratio", "baseline": baseline,
        "baseline_value": None if rate is None else round(rate, 3), "goal": goal,
        "better": "higher", "ok": None if ratio is None else bool(ratio >= goal)}
    if why:
        result["why"] = why
    return result


def compare(make: Callable[[], Side], ours: Callable[[], Side], rows: np.ndarray, turns: int,
            lag: int, label: str, baseline: str, goal: float) -> List[Dict[str, Any]]:
    """Compares stores and loads with one baseline."""
    one, baseline_side = ours(), None
    try:
        try:
            baseline_side = make()
        except Exception as error:  # noqa: B902: printed as the reason
            why = f"{type(error).__name__}: {error}"[:200]
            return [result_row(f"{label}_{what}", None, baseline, goal, None, why)
                    for what in ("store", "load")]
        nbytes = rows[:BATCH].nbytes / (1 << 30)
        return [result_row(f"{label}_{what}", ratio, baseline, goal, nbytes / theirs)
                for what, (ratio, theirs) in zip(("store", "load"),
                                                 pairs(one, baseline_side, rows, turns, lag))]
    finally:
        one.close()
        if baseline_side is not None:
            baseline_side.close()


def run(folder: Path, quick: bool) -> Iterator[Dict[str, Any]]:
    """Runs all comparisons."""
    if not absent.engine().startswith("0.33."):
        yield result_row("tier", None, "vllm", 1.0, None, "vLLM 0.33 is not installed")
        return
    from kvtier_vllm.tier import KvtierTier
    from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

    for row, turns in ((256 << 10, 5 if quick else 25), (1 << 20, 0 if quick else 11)):
        if not turns:
            continue
        # Page-aligned, as the CPU tier's region is, so that files are read and written in place.
        rows = np.frombuffer(mmap.mmap(-1, 2 * BATCH * row), np.int8).reshape(2 * BATCH, row)
        size = f"{row >> 10}KiB"
        disk = {"disk_bytes": 16 << 30, "host_bytes": max(64 << 20, 2 * BATCH * row)}
        memory = {"host_bytes": (WARM - 1) * BATCH * row}

        def tier(name: str, options: Dict[str, Any]) -> Callable[[], Side]:
            where = dict(options)
            if "disk_bytes" in options:
                where["disk_path"] = str(folder / name)
            return lambda: Tier(KvtierTier, rows, row, where)

        def library(name: str, options: Dict[str, Any], level: int) -> Callable[[], Side]:
            where = dict(options)
            if "disk_bytes" in options:
                where["disk_path"] = str(folder / name)
            return lambda: Library(rows, row, where, level)

        def files() -> Side:
            return Tier(FileSystemTierManager, rows, row, {"root_dir": str(folder / "fs")})

        def lmcache() -> Side:
            from bench_lmcache import Disk

            return Disk(folder / "lm", rows)

        against = (
            (library("", memory, kvtier.LEVEL_RAM), tier("", memory), 0,
             "tier_memory", "kvtier.Blocks, memory", 0.95),
            (library("alone", disk, kvtier.LEVEL_DISK), tier("tier", disk), 4,
             "tier_disk", "kvtier.Blocks, disk", 0.95),
            (files, tier("tier", disk), 4, "tier_against_fs", "vLLM's file tier", 1.0),
            (lmcache, tier("tier", disk), 4, "tier_against_lmcache", "LMCache's local disk", 1.0),
        )
        for make_baseline, ours, lag, label, baseline, goal in against:
            yield from compare(make_baseline, ours, rows, turns, lag, f"{label}_{size}", baseline,
                               goal)
            for name in folder.iterdir():
                shutil.rmtree(name, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer turns, one size")
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--dir", type=Path,
                        help="folder for the disk tiers; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        for result in run(Path(folder), options.quick):
            if options.json:
                print(json.dumps(result), flush=True)
            else:
                print(f"{result['bar']:36} {result['value']} of {result['baseline']} "
                      f"(goal {result['goal']}, {result['baseline_value']} GiB/s) "
                      f"{result.get('why', '')}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
