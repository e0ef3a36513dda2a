#!/usr/bin/env python3
"""Compares the replay speed of LRU with libCacheSim, in turn, in one run.

    throughput.py TOOL          TOOL is kvtier-bench, a release build
    throughput.py TOOL --quick

Prints one JSON object per line, as `kvtier-bench` does. Both read the same file of oracleGeneral
records in one thread, and are timed by the CPU time of that thread, including the hashing of ids.
The misses must be equal. Needs the package libcachesim, and zstandard for the mooncake traces in
KVTIER_TRACE_DIR. A skewed sequence is always replayed.
"""

import argparse
import json
import os
import pathlib
import statistics
import struct
import subprocess
import sys
import tempfile
import time

GOAL = 1.5


def skip(why):
    line = {"group": "lab", "bar": "replay_lru", "value": None, "ok": None, "note": why}
    print(json.dumps(line))
    sys.exit(0)


def mooncake(path):
    import zstandard

    with open(path, "rb") as file:
        text = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(file).read()
    return [block for line in text.splitlines() for block in json.loads(line)["hash_ids"]]


def skewed(keys, count):
    """Ids with weights 1/rank, computed with integers only; ranks are spread over 63 bits."""
    state, ends, total = 88172645463325252, [], 0
    for rank in range(1, keys + 1):
        total += (1 << 32) // rank
        ends.append(total)
    import bisect

    for _ in range(count):
        state ^= state << 13 & (1 << 64) - 1
        state ^= state >> 7
        state ^= state << 17 & (1 << 64) - 1
        rank = bisect.bisect_right(ends, (state >> 11) % total)
        yield rank * 0x9E3779B97F4A7C15 & (1 << 63) - 1


def write(path, ids):
    record = struct.Struct("<IQIq")
    with open(path, "wb") as file:
        for at, one in enumerate(ids):
            file.write(record.pack(at, one, 1, -2))


def theirs(lcs, path, size, power):
    """CPU nanoseconds of the thread, and misses."""
    count = os.path.getsize(path) // 24
    reader = lcs.TraceReader(str(path), lcs.TraceType.ORACLE_GENERAL_TRACE)
    cache = lcs.LRU(size, hashpower=power)
    start = time.thread_time_ns()
    ratio, _ = cache.process_trace(reader)
    return time.thread_time_ns() - start, round(ratio * count)


def ours(tool, path, size):
    """Millions of requests per second, and misses, by bar."""
    names = {"KVTIER_BENCH_TRACE": str(path), "KVTIER_BENCH_OBJECTS": str(size)}
    command = [tool, "lab", "--quick", "--json"]
    done = subprocess.run(command, env={**os.environ, **names}, capture_output=True, check=True)
    lines = map(json.loads, done.stdout.splitlines())
    return {b["bar"]: (b["value"], b["note"]) for b in lines if b["bar"].startswith("replay_lru")}


def compare(lcs, tool, name, path, size, rounds):
    """Prints one line per bar; returns whether the misses agree."""
    count = os.path.getsize(path) // 24
    # The default table (2^24 buckets), and one that just holds the objects.
    tables = {"": 24, "_fitted": max(16, size.bit_length())}
    ratios, speeds, same = {}, {}, True
    for _ in range(rounds):
        own = ours(tool, path, size)
        for table, power in tables.items():
            took, missed = theirs(lcs, path, size, power)
            speeds.setdefault(table, []).append(count * 1e3 / took)
            for bar, (speed, note) in own.items():
                ratios.setdefault((bar, table), []).append(speed * took / count / 1e3)
                if bar == "replay_lru" and f" {missed} missed" not in note:
                    print(f"{name}: libCacheSim misses {missed}, kvtier {note}", file=sys.stderr)
                    same = False
    for (bar, table), values in ratios.items():
        ratio = statistics.median(values)
        speed = statistics.median(speeds[table])
        line = {
            "group": "lab",
            "bar": f"{bar}_{name}{table}",
            "value": round(ratio, 3),
            "unit": "x",
            "baseline": f"libCacheSim's LRU, per thread, hashpower {tables[table]}",
            "baseline_value": 1.0,
            "goal": GOAL,
            "better": "higher",
            "ok": ratio >= GOAL,
            "note": f"({speed:.2f} M/s there, {count} requests, {size} objects)",
        }
        print(json.dumps(line), flush=True)
    return same


def main():
    parser = argparse.ArgumentParser(description="replay speed compared with libCacheSim")
    parser.add_argument("tool")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    try:
        import libcachesim as lcs
    except ImportError as why:
        skip(f"install the package libcachesim: {why}")
    rounds = 3 if args.quick else 9
    same = True
    with tempfile.TemporaryDirectory() as folder:
        jobs = [("zipf", list(skewed(1_000_000, 1_000_000 if args.quick else 3_000_000)))]
        if source := os.environ.get("KVTIER_TRACE_DIR"):
            for path in sorted(pathlib.Path(source).glob("mooncake_*.jsonl.zst")):
                jobs.append((path.name.split("_")[1], mooncake(path)))
        for name, ids in jobs:
            path, unique = pathlib.Path(folder) / name, len(set(ids))
            write(path, ids)
            same &= compare(lcs, args.tool, name, path, max(64, unique // 20), rounds)
    sys.exit(not same)


if __name__ == "__main__":
    main()
