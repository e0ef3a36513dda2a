#!/usr/bin/env python3
"""Misses of libCacheSim: the oracle of tests/policy/oracle.rs.

    libcachesim_misses.py             writes libcachesim_misses.txt beside this file
    libcachesim_misses.py --check     compares with that file instead
    libcachesim_misses.py --traces D  writes the block sequences of the mooncake
                                      traces in KVTIER_TRACE_DIR and their misses
                                      into folder D; run the Rust test with
                                      KVTIER_LIBCACHESIM_DIR=D

Needs the package libcachesim, and zstandard for --traces. The sequences are computed with integers
only (xorshift64*, tables of integer weights), so that the Rust test generates the same ones; a
checksum in the file proves that.
"""

import argparse
import bisect
import json
import os
import pathlib
import sys

import libcachesim as lcs

MASK = (1 << 64) - 1
NEVER = (1 << 63) - 1
SIZES = [40, 100, 250, 600, 1000]
POLICIES = {
    "lru": lcs.LRU,
    "fifo": lcs.FIFO,
    "lfu": lcs.LFU,
    "arc": lcs.ARC,
    "sieve": lcs.Sieve,
    "s3fifo": lcs.S3FIFO,
    "2q": lcs.TwoQ,
    "slru": lcs.SLRU,
    "wtinylfu": lcs.WTinyLFU,
    "belady": lcs.Belady,
}


class Random:
    """xorshift64*."""

    def __init__(self, seed):
        self.state = seed

    def next(self):
        x = self.state
        x ^= x >> 12
        x = (x ^ (x << 25)) & MASK
        x ^= x >> 27
        self.state = x
        return (x * 0x2545F4914F6CDD1D) & MASK

    def below(self, limit):
        return (self.next() >> 32) * limit >> 32


class Zipf:
    """Ids 0 to n - 1 with weights 2^30 / (id + 1), rounded down."""

    def __init__(self, n):
        self.ends = []
        total = 0
        for i in range(n):
            total += (1 << 30) // (i + 1)
            self.ends.append(total)

    def next(self, random):
        at = (random.next() >> 16) % self.ends[-1]
        return bisect.bisect_right(self.ends, at)


def zipf(random, requests):
    """Constant popularity."""
    table = Zipf(4000)
    return [table.next(random) for _ in range(requests)]


def mixed(random, requests):
    """Phases: a loop, popular ids, a scan, other popular ids."""
    table, out, fresh = Zipf(2000), [], 1_000_000
    for i in range(requests):
        phase = i // 500 % 4
        if phase == 0:
            out.append(10_000 + i % 300)
        elif phase == 2:
            out.append(fresh)
            fresh += 1
        else:
            out.append(table.next(random) + 500 * (phase // 2))
    return out


def drift(random, requests):
    """Popularity that drifts; a fifth of the ids are used once."""
    table, out = Zipf(1500), []
    for i in range(requests):
        if random.below(5) == 0:
            out.append(2_000_000 + i)
        else:
            out.append(table.next(random) + i // 20)
    return out


SEQUENCES = [("zipf", 11, 30_000, zipf), ("mixed", 12, 30_000, mixed), ("drift", 13, 30_000, drift)]


def checksum(ids):
    """FNV-1a over the ids as 64-bit words."""
    value = 0xCBF29CE484222325
    for one in ids:
        value = ((value ^ one) * 0x100000001B3) & MASK
    return value


def next_uses(ids):
    """For each request, the position of the id's next use."""
    seen, out = {}, [NEVER] * len(ids)
    for at in range(len(ids) - 1, -1, -1):
        out[at] = seen.get(ids[at], NEVER)
        seen[ids[at]] = at
    return out


def misses(policy, size, ids, nexts):
    cache = POLICIES[policy](cache_size=size)
    request = lcs.Request()
    request.obj_size = 1
    count = 0
    for at, one in enumerate(ids):
        request.obj_id = one
        request.clock_time = at
        request.next_access_vtime = nexts[at]
        count += not cache.get(request)
    return count


def rows(name, ids, sizes):
    nexts = next_uses(ids)
    for policy in POLICIES:
        for size in sizes:
            yield f"misses {name} {policy} {size} {misses(policy, size, ids, nexts)}"


def generated():
    yield "# Misses of libCacheSim 0.3.5 (Python package), objects of one unit, default parameters."
    yield "# sequence NAME SEED REQUESTS CHECKSUM / misses SEQUENCE POLICY SIZE MISSES"
    for name, seed, requests, make in SEQUENCES:
        ids = make(Random(seed), requests)
        yield f"sequence {name} {seed} {requests} {checksum(ids):016x}"
        yield from rows(name, ids, SIZES)


def mooncake(path):
    import zstandard

    with open(path, "rb") as file:
        text = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(file).read()
    return [block for line in text.splitlines() for block in json.loads(line)["hash_ids"]]


def write_traces(folder):
    source = pathlib.Path(os.environ["KVTIER_TRACE_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for path in sorted(source.glob("mooncake_*.jsonl.zst")):
        name, ids = path.name.split("_trace")[0], mooncake(path)
        unique = len(set(ids))
        (folder / f"{name}.ids").write_text("\n".join(map(str, ids)))
        lines.append(f"trace {name} {len(ids)} {checksum(ids):016x}")
        lines += rows(name, ids, [unique // 100, unique // 20, unique // 10])
        print("\n".join(lines[-len(POLICIES) * 3 - 1 :]), flush=True)
    (folder / "misses.txt").write_text("\n".join(lines) + "\n")


def main():
    parser = argparse.ArgumentParser(description="misses of libCacheSim")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--traces", type=pathlib.Path)
    args = parser.parse_args()
    if args.traces:
        return write_traces(args.traces)
    golden = pathlib.Path(__file__).with_suffix(".txt")
    text = "\n".join(generated()) + "\n"
    if args.check:
        same = golden.read_text() == text
        print("same" if same else f"the misses differ from {golden}")
        sys.exit(not same)
    golden.write_text(text)


if __name__ == "__main__":
    main()
