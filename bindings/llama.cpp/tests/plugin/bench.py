#!/usr/bin/env python3
"""Measures the cost of streaming: a token with a budget of a quarter of the model, against its lower bound.

    bench.py --stock PROGRAM --plugin LIBRARY --models DIRECTORY [--pairs 5]

Prints one line of JSON per bar, from medians of interleaved runs.
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
    """Bytes per second with O_DIRECT, into resident huge pages."""
    size = os.path.getsize(path)
    offsets = list(range(0, size - size % piece, piece))
    memory = mmap.mmap(-1, piece * (readers + 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory.write(bytes(len(memory)))
    buffers = memoryview(memory)

    def work(mine, reader):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        for offset in mine:
            os.preadv(fd, [buffers[reader * piece:(reader + 1) * piece]], offset)
        os.close(fd)

    threads = [threading.Thread(target=work, args=(offsets[i::readers], i)) for i in range(readers)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(offsets) * piece / (time.monotonic() - begin)


def raw_bytes_per_s(path):
    """Bandwidth of the disk: the better of few large reads and many small ones."""
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
        resident = bench.with_plugin(name, *arguments)
        whole.append(resident.step_ns)
        rate = raw_bytes_per_s(path)
        run = bench.with_plugin(name, *arguments, KVTIER_BUDGET=os.path.getsize(path) // 4)
        quarter.append(run.step_ns)
        bytes_a_pass = run.stats["read_bytes"] / run.stats["passes"]
        bounds.append(max(resident.step_ns, 1e9 * bytes_a_pass / rate))
    ratios = [one / other for one, other in zip(quarter, bounds)]
    line(f"plugin_quarter_{name}", statistics.median(ratios), "max(compute, bytes / raw bandwidth), ns",
         round(statistics.median(bounds)), 1.15)
    ratios = [one / other for one, other in zip(whole, plain)]
    line(f"plugin_whole_{name}", statistics.median(ratios), "the engine without the plugin, ns",
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
