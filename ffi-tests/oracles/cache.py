#!/usr/bin/env python3
"""Compares the cost of a get, and of an insert with eviction, with libCacheSim, in one run.

    cache.py TOOL          TOOL is kvtier-bench, a release build
    cache.py TOOL --quick --policies lru,s3fifo

The loads are those of `kvtier-bench cache`: 1,000,000 entries, Zipf 1.0. `get` requests 900,000
keys that are all cached. `mix` requests 4,000,000 keys; misses are inserted, and most of them evict.
Prints one JSON object per line, as `kvtier-bench` does: kvtier's time divided by libCacheSim's, with
the goal 1. Both read the same records in one thread, in turn, and are timed by the CPU time of that
thread. libCacheSim's table is tried with 2^24 buckets (its default) and with 2^21; the faster one
counts. The misses of single requests must be equal. Needs the package libcachesim, and numpy, which
libcachesim installs.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ENTRIES = 1_000_000
LOADS = {"get": 900_000, "mix": 4_000_000}
POLICIES = {"lru": "LRU", "sieve": "Sieve", "s3fifo": "S3FIFO", "fifo": "FIFO"}
POWERS = (24, 21)


def skip(why):
    print(json.dumps({"group": "cache", "bar": "libcachesim", "value": None, "ok": None,
                      "note": why}))
    sys.exit(0)


def spread(ranks):
    """Maps ranks to ids that are not adjacent."""
    import numpy as np

    return ranks.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) & np.uint64((1 << 63) - 1)


def zipf(rng, keys, count):
    import numpy as np

    ends = np.cumsum(1.0 / np.arange(1, keys + 1))
    return spread(np.searchsorted(ends, rng.random(count) * ends[-1], side="right") + 1)


def write(path, ids):
    import numpy as np

    kind = np.dtype([("at", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
    records = np.zeros(len(ids), kind)
    records["at"], records["id"], records["size"], records["next"] = range(len(ids)), ids, 1, -2
    path.write_bytes(records.tobytes())


def theirs(lcs, name, warm, timed, count, power):
    """Nanoseconds per request, and misses."""
    cache = getattr(lcs, POLICIES[name])(ENTRIES, hashpower=power)
    cache.process_trace(lcs.TraceReader(str(warm), lcs.TraceType.ORACLE_GENERAL_TRACE))
    reader = lcs.TraceReader(str(timed), lcs.TraceType.ORACLE_GENERAL_TRACE)
    start = time.thread_time_ns()
    ratio, _ = cache.process_trace(reader)
    return (time.thread_time_ns() - start) / count, round(ratio * count)


def ours(tool, name, path, warm):
    """Nanoseconds per request and the note, by bar."""
    names = {"KVTIER_BENCH_TRACE": str(path), "KVTIER_BENCH_OBJECTS": str(ENTRIES),
             "KVTIER_BENCH_SPEC": name, "KVTIER_BENCH_WARM": str(warm)}
    command = [tool, "lab", "--quick", "--json"]
    done = subprocess.run(command, env={**os.environ, **names}, capture_output=True, check=True)
    lines = map(json.loads, done.stdout.splitlines())
    return {b["bar"]: (1e3 / b["value"], b["note"]) for b in lines
            if b["bar"].startswith("replay_lru")}


def compare(lcs, tool, load, name, paths, sizes, rounds):
    """Prints one line per bar; returns whether the misses agree."""
    (warm, timed, both), (before, count) = paths, sizes
    ratios, speeds, same = {}, [], True
    for _ in range(rounds):
        own = ours(tool, name, both, before)
        took, missed = min(theirs(lcs, name, warm, timed, count, power) for power in POWERS)
        speeds.append(took)
        for bar, (spent, note) in own.items():
            ratios.setdefault("64" if bar.endswith("_64") else "1", []).append(spent / took)
            if bar == "replay_lru" and f" {missed} missed" not in note:
                print(f"{load} {name}: libCacheSim misses {missed}, kvtier {note}", file=sys.stderr)
                same = False
    for batch, values in ratios.items():
        ratio = statistics.median(values)
        print(json.dumps({
            "group": "cache", "bar": f"{load}_{name}_by_{batch}_libcachesim",
            "value": round(ratio, 3), "unit": "x", "baseline": f"libCacheSim's {POLICIES[name]}",
            "baseline_value": 1.0, "goal": 1.0, "better": "lower", "ok": ratio <= 1.0,
            "note": f"({statistics.median(speeds):.0f} ns there, {count} requests)",
        }), flush=True)
    return same


def main():
    parser = argparse.ArgumentParser(description="get and insert compared with libCacheSim")
    parser.add_argument("tool")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--policies", default=",".join(POLICIES))
    args = parser.parse_args()
    names = args.policies.split(",")
    if unknown := set(names) - set(POLICIES):
        parser.error(f"unknown policy {', '.join(sorted(unknown))}: use {', '.join(POLICIES)}")
    try:
        import libcachesim as lcs
        import numpy as np
    except ImportError as why:
        skip(f"install the package libcachesim: {why}")
    rounds, count = (1, 1_000_000) if args.quick else (7, 4_000_000)
    rng, same = np.random.default_rng(11), True
    with tempfile.TemporaryDirectory() as folder:
        paths = [pathlib.Path(folder) / name for name in ("warm", "timed", "both")]
        for load, keys in LOADS.items():
            every = spread(rng.permutation(keys) + 1)
            before = every if load == "get" else zipf(rng, keys, keys)
            ids = zipf(rng, keys, count)
            for path, part in zip(paths, (before, ids, np.concatenate([before, ids]))):
                write(path, part)
            for name in names:
                sizes = (len(before), count)
                same &= compare(lcs, args.tool, load, name, paths, sizes, rounds)
    sys.exit(not same)


if __name__ == "__main__":
    main()
