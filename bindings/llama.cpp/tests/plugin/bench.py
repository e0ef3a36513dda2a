#!/usr/bin/env python3
"""What streaming costs: a token with a quarter of the model beside what it cannot be faster than.

    bench.py --stock PROGRAM --plugin LIBRARY --models DIRECTORY [--pairs 5]

Prints a line of JSON for each bar, from medians of interleaved runs.
"""

import argparse
import json
import mmap
import os
import statistics
import threading
import time

from run import Bench


def read_all(path, piece, readers):
    """Bytes a second past the page cache, into huge pages that are there already."""
    size = os.path.getsize(path)
    offsets = list(range(0, size - size % piece, piece))
    memory = mmap.mmap(-1, piece * (readers + 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory.write(bytes(len(memory)))
    rooms = memoryview(memory)

    def work(mine, reader):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        for offset in mine:
            os.preadv(fd, [rooms[reader * piece:(reader + 1) * piece]], offset)
        os.close(fd)

    threads = [threading.Thread(target=work, args=(offsets[i::readers], i)) for i in range(readers)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(offsets) * piece / (time.monotonic() - begin)


def raw_bytes_per_s(path):
    """What the disk gives: the better of few large reads and many small ones."""
    return max(read_all(path, 4 << 20, 8), read_all(path, 1 << 20, 16))


def line(bar, value, baseline, baseline_value, goal):
    is_good = None if goal is None else value <= goal
    print(json.dumps({"group": "llama", "bar": bar, "value": round(value, 3), "unit": "ratio",
                      "baseline": baseline, "baseline_value": baseline_value, "goal": goal,
                      "better": "lower", "ok": is_good}), flush=True)


def measure(bench, name, pairs):
    path = bench.model(name)
    arguments = ("-n", 24, "-t", 1)
    plain, whole, quarter, bounds = [], [], [], []
    for _ in range(pairs):
        plain.append(bench.run(name, "-r", 0, *arguments).step_ns)
        all_in = bench.ours(name, *arguments)
        whole.append(all_in.step_ns)
        rate = raw_bytes_per_s(path)
        run = bench.ours(name, *arguments, KVTIER_BUDGET=os.path.getsize(path) // 4)
        quarter.append(run.step_ns)
        bytes_a_pass = run.stats["read_bytes"] / run.stats["passes"]
        bounds.append(max(all_in.step_ns, 1e9 * bytes_a_pass / rate))
    ratios = [one / other for one, other in zip(quarter, bounds)]
    line(f"plugin_quarter_{name}", statistics.median(ratios), "max(compute, bytes / raw bandwidth), ns",
         round(statistics.median(bounds)), 1.15)
    ratios = [one / other for one, other in zip(whole, plain)]
    line(f"plugin_whole_{name}", statistics.median(ratios), "the engine without us, ns",
         round(statistics.median(plain)), None)


def main():
    parser = argparse.ArgumentParser()
    for name in ["stock", "plugin", "models"]:
        parser.add_argument("--" + name, required=True)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    bench = Bench(options)
    for name in bench.present(["smollm2", "gemma3"]):
        measure(bench, name, options.pairs)


if __name__ == "__main__":
    main()
