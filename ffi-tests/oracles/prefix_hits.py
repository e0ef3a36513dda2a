#!/usr/bin/env python3
"""Compares prefix-token hit ratios of `kvtier lab` with the package kvcache-simulator.

    prefix_hits.py TOOL         TOOL is the kvtier program

Both replay the same jsonl traces: two generated from integers, and the mooncake traces if
KVTIER_TRACE_DIR names their folder. The ratio counts tokens of the leading blocks found, over the
last half of the requests. LRU must agree to four digits, because both define it alike: leaves are
evicted first, by the last use, and a request's blocks stay while it inserts its own. FIFO differs:
the simulator evicts in insertion order and may leave holes, kvtier evicts a block after its
successors. FIFO may differ by FIFO_TOLERANCE.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

DIGITS = 4
FIFO_TOLERANCE = 0.05
BLOCK = 512
SHARES = [1, 3, 5, 10]


class Random:
    """xorshift64."""

    def __init__(self, seed):
        self.state = seed

    def below(self, limit):
        x = self.state
        x ^= x << 13 & (1 << 64) - 1
        x ^= x >> 7
        x ^= x << 17 & (1 << 64) - 1
        self.state = x
        return (x >> 32) * limit >> 32


def sessions(seed, requests, prompts):
    """Sessions that start with one of `prompts` prompts and grow turn by turn."""
    random, fresh, live = Random(seed), 0, []
    starts = []
    for _ in range(prompts):
        count = 1 + random.below(12)
        starts.append(list(range(fresh, fresh + count)))
        fresh += count
    for at in range(requests):
        if len(live) < 40 or random.below(6) == 0:
            live.append(list(starts[random.below(random.below(prompts) + 1)]))
        # Recently active sessions continue more often.
        turn = live[max(random.below(len(live)), random.below(len(live)))]
        count = 1 + random.below(8)
        turn.extend(range(fresh, fresh + count))
        fresh += count
        tokens = len(turn) * BLOCK - random.below(BLOCK)
        yield {"timestamp": at * 250, "input_length": tokens, "output_length": 1, "hash_ids": list(turn)}
        if len(turn) > 120:
            live.remove(turn)


def traces(folder):
    for name, seed, prompts in [("few_prompts", 21, 4), ("many_prompts", 22, 300)]:
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in sessions(seed, 3000, prompts)))
        yield name, path
    if source := os.environ.get("KVTIER_TRACE_DIR"):
        import zstandard

        for packed in sorted(pathlib.Path(source).glob("mooncake_*.jsonl.zst")):
            path = folder / packed.name.removesuffix(".zst")
            unpack = zstandard.ZstdDecompressor(max_window_size=1 << 27)
            with open(packed, "rb") as file:
                path.write_bytes(unpack.stream_reader(file).read())
            yield packed.name.split("_")[1], path


def ours(tool, path, sizes, requests):
    """Token hit ratios by policy and size."""
    command = [tool, "lab", "compare", "--trace", str(path), "--format", "mooncake"]
    command += ["--policies", "lru,fifo", "--sizes", ",".join(map(str, sizes)), "--json"]
    command += ["--hints", "none", "--warm-up", str(requests // 2)]
    done = subprocess.run(command, capture_output=True, check=True)
    rows = map(json.loads, done.stdout.splitlines())
    return {(r["policy"], r["capacity_blocks"]): 1 - r["token_miss_ratio"] for r in rows}


def check(tool, name, path):
    """The number of ratios that differ by more than the tolerance."""
    from kvcache_sim.plan import build_execution_plan
    from kvcache_sim.policies import simulate_policy
    from kvcache_sim.trace import parse_trace_file

    plan = build_execution_plan(parse_trace_file(path, block_size=BLOCK), warmup_fraction=0.5)
    sizes = [max(1, plan.unique_blocks * share // 100) for share in SHARES]
    found, wrong = ours(tool, path, sizes, plan.request_count), 0
    for policy in ["lru", "fifo"]:
        for share, size in zip(SHARES, sizes):
            done = simulate_policy(plan, policy, size)
            if done.measurementMode != "fixed_window":
                print(f"{name:14} {policy:4} {share:3} % {size:7} blocks: not compared, the cache is not full after half of the requests")
                continue
            own = found[(policy, size)]
            difference = abs(own - done.hitRate)
            is_close = difference <= (0.5 * 10**-DIGITS if policy == "lru" else FIFO_TOLERANCE)
            wrong += not is_close
            verdict = "ok" if is_close else "DIFFERS"
            print(f"{name:14} {policy:4} {share:3} % {size:7} blocks: {own:.4f} {done.hitRate:.4f} {verdict}")
    return wrong


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        import kvcache_sim  # noqa: F401
    except ImportError as why:
        print(f"SKIP: install the package kvcache-simulator: {why}")
        return
    with tempfile.TemporaryDirectory() as folder:
        wrong = sum(check(sys.argv[1], *one) for one in traces(pathlib.Path(folder)))
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
