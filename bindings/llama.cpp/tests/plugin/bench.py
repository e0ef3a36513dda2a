#!/usr/bin/env python3
"""Measures the cost of streaming: a token with a budget of a quarter of the model, against its lower bound.

    bench.py --stock PROGRAM --plugin LIBRARY --models DIRECTORY [--pairs 5] [--experts NAME...] [--share 0.25]

With --experts, models with experts (models/make.py --kind moe) in a share of their size, also against a memory
map in the same memory cgroup.

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


class Cgroup:
    """A memory cgroup of version 1 or 2."""

    def __init__(self, limit):
        root = "/sys/fs/cgroup"
        is_second = os.path.exists(root + "/cgroup.controllers")
        self.path = f"{root}{'' if is_second else '/memory'}/kvtier-bench-{os.getpid()}"
        os.mkdir(self.path)
        with open(self.path + ("/memory.max" if is_second else "/memory.limit_in_bytes"), "w") as file:
            file.write(str(limit))

    def enter(self):
        with open(self.path + "/cgroup.procs", "w") as file:
            file.write(str(os.getpid()))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.rmdir(self.path)


def drop_cache(path):
    """Pages that another process cached are not charged to the cgroup."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_experts(bench, name, pairs, share):
    path = bench.model(name)
    size = os.path.getsize(path)
    decode, prompt = ("-n", 40, "-t", 1, "-c", 128, "-s", "-p", 4), ("-n", 1, "-t", 1, "-c", 128, "-p", 64)
    budget = int(size * share)
    # What the engine owns: buffers, heap and the libraries' pages.
    limit_bytes = budget + (96 << 20)
    runs = {key: [] for key in ["plain", "bound", "guessed", "unguessed", "mapped", "inside", "batch", "single"]}
    for _ in range(pairs):
        plain = bench.run(name, "-r", 0, *decode)
        rate = raw_bytes_per_s(path)
        guessed = bench.with_plugin(name, *decode, KVTIER_BUDGET=budget)
        bytes_a_token = guessed.stats["read_bytes"] / guessed.stats["passes"]
        runs["plain"].append(plain.step_ns)
        runs["bound"].append(max(plain.step_ns, 1e9 * bytes_a_token / rate))
        runs["guessed"].append(guessed.step_ns)
        unguessed = bench.with_plugin(name, *decode, KVTIER_BUDGET=budget, KVTIER_PREDICT=0)
        runs["unguessed"].append(unguessed.step_ns)
        assert guessed.texts == unguessed.texts == plain.texts, "the bits differ"
        few = ("-n", 6, *decode[2:])
        for key, plugin in [("mapped", None), ("inside", bench.options.plugin)]:
            with Cgroup(limit_bytes) as group:
                drop_cache(path)
                run = bench.run(name, *(() if plugin else ("-r", 0)), *few, plugin=plugin,
                                limits={"preexec_fn": group.enter}, KVTIER_BUDGET=budget)
                assert run.status == 0, run.errors
                runs[key].append(run.step_ns)
        runs["batch"].append(bench.with_plugin(name, *prompt, KVTIER_BUDGET=budget).total_ns)
        runs["single"].append(bench.with_plugin(name, "-u", 1, *prompt, KVTIER_BUDGET=budget).total_ns)
    stats = guessed.stats
    misses = stats["expert_misses"]
    median = {key: round(statistics.median(values)) for key, values in runs.items()}

    def bar(what, above, below, baseline, goal):
        ratio = statistics.median(a / b for a, b in zip(runs[above], runs[below]))
        line(f"experts_{what}_{name}_{share:g}", ratio, baseline, median[below], goal)

    bar("token", "guessed", "bound", "max(compute, bytes / raw bandwidth), ns", 1.15)
    bar("mmap", "inside", "mapped", "a memory map in the same cgroup, ns", 0.333)
    bar("predict", "guessed", "unguessed", "without predictions, ns", 1.03)
    bar("prefill", "batch", "single", "token by token, ns", 0.5)
    needed = stats["guessed_needed"]
    line(f"experts_uncovered_{name}_{share:g}", 1 - needed / max(1, misses), "all misses", misses, 0.54)
    line(f"experts_wasted_{name}_{share:g}", (stats["guessed_reads"] - needed) / max(1, needed),
         "useful reads ahead", needed, 0.4)


def main():
    parser = argparse.ArgumentParser()
    for name in ["stock", "plugin", "models"]:
        parser.add_argument("--" + name, required=True)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--experts", nargs="*", default=[])
    parser.add_argument("--share", type=float, default=0.25)
    options = parser.parse_args()
    bench = Bench(options)
    for name in bench.present(options.experts):
        measure_experts(bench, name, options.pairs, options.share)
    if options.experts:
        return
    for name in bench.present(["smollm2", "gemma3"]):
        measure(bench, name, options.pairs)


if __name__ == "__main__":
    main()
