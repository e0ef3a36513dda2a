#!/usr/bin/env python3
"""Runs an unmodified program under the library of `kvtier run`, and compares its logits bit for bit with those
of a run without it.

    run.py CASE --program PROGRAM --library LIBRARY --models DIRECTORY --other-version LIBRARY
           --missing-symbol LIBRARY
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile

SKIP = 77
RUN_SECONDS = 600
MODELS = ["tiny-llama-f16", "tiny-moe", "tiny-mla", "tiny-swa", "tiny-mamba", "tiny-hybrid"]
ALL = ["prompt", "branch", "turns", "together", "cells"]


class Run:
    def __init__(self, process, stats):
        self.output, self.errors = process.communicate(timeout=RUN_SECONDS)
        self.status = process.returncode
        self.lines = self.output.splitlines()
        self.notes = [line for line in self.errors.splitlines() if line.startswith("kvtier: ")]
        self.stats = []
        if os.path.exists(stats):
            with open(stats, encoding="utf-8") as file:
                self.stats = [json.loads(line) for line in file]
            os.remove(stats)

    def restored(self):
        return sum(one["restored_tokens"] for one in self.stats)

    def saved(self):
        return sum(one["saved_tokens"] for one in self.stats)


class Bench:
    def __init__(self, options, folder):
        self.options, self.folder = options, folder
        self.stats = os.path.join(folder, "stats")

    def models(self, *names):
        found = [(name, os.path.join(self.options.models, name + ".gguf")) for name in names]
        found = [(name, path) for name, path in found if os.path.exists(path)]
        if not found:
            print("SKIP: no models")
            sys.exit(SKIP)
        return found

    def start(self, model, *arguments, disk=None, store=None, library=None, **variables):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVTIER_")}
        if disk:
            store = f'store(host=64MiB, disk=disk(path="{os.path.join(self.folder, disk)}", bytes=1GiB))'
        if store:
            environment["LD_PRELOAD"] = library or self.options.library
            environment["KVTIER_RUN_STORE"] = store
            environment["KVTIER_RUN_STATS"] = self.stats
        environment.update(variables)
        return subprocess.Popen([self.options.program, model, *arguments], env=environment, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def run(self, model, *arguments, **settings):
        return Run(self.start(model, *arguments, **settings), self.stats)

    def plain(self, model, *arguments):
        run = self.run(model, *arguments)
        expect(run.status == 0, "the program runs without kvtier", run)
        return run


def expect(condition, what, run=None):
    if condition:
        return
    print(f"FAILED: {what}")
    if run:
        print(f"status {run.status}, {run.stats}\n{run.output}\n{run.errors}")
    sys.exit(1)


def same(bench, run, plain, what):
    expect(run.status == 0, f"{what}: it runs", run)
    for mine, theirs in zip(run.lines, plain.lines):
        expect(mine == theirs, f"{what}: '{mine}' equals '{theirs}'", run)
    expect(len(run.lines) == len(plain.lines), f"{what}: the same number of lines", run)


def a_second_run_restores_and_computes_the_same_bits(bench):
    for name, path in bench.models(*MODELS):
        for more in ([], ["--old"], ["--apart"]):
            plain = bench.plain(path, *more, *ALL)
            disk = name + "".join(more)
            first = bench.run(path, *more, *ALL, disk=disk)
            same(bench, first, plain, f"{name} {more} first run")
            expect(first.saved() > 90, f"{name} {more}: the first run saves", first)
            second = bench.run(path, *more, *ALL, disk=disk)
            same(bench, second, plain, f"{name} {more} second run")
            print(f"{name} {more}: {first.restored()} then {second.restored()} tokens restored")
            expect(second.restored() > 600, f"{name} {more}: the second run restores", second)
            expect(second.stats and second.stats[0]["tokens"] == first.stats[0]["tokens"],
                   f"{name} {more}: the program sees the same tokens", second)


def large_batches_are_cut_for_states_and_windows(bench):
    """Results depend on how a prompt is cut, so these are compared with those of the second run."""
    for name, path in bench.models("tiny-swa", "tiny-mamba", "tiny-hybrid"):
        arguments = ["--batch", "256", "prompt", "turns"]
        first = bench.run(path, *arguments, disk=name)
        second = bench.run(path, *arguments, disk=name)
        third = bench.run(path, *arguments, disk=name)
        expect(second.status == 0 and second.restored() > 300, f"{name}: the second run restores", second)
        same(bench, third, second, f"{name}: the third run")
        expect(first.saved() > 90, f"{name}: the first run saves", first)


def a_full_context_is_left_to_the_program(bench):
    for name, path in bench.models("tiny-llama-f16", "tiny-moe"):
        plain = bench.plain(path, "--cells", "512", "full")
        for turn in ("first", "second"):
            run = bench.run(path, "--cells", "512", "full", disk=name)
            expect(run.status == 0, f"{name}: it runs", run)
            wanted = [line for line in plain.lines if not line.startswith("held")]
            got = [line for line in run.lines if not line.startswith("held")]
            expect(wanted == got, f"{name} {turn}: the same as {plain.output}", run)


def a_killed_program_left_whole_chunks(bench):
    for name, path in bench.models("tiny-llama-f16", "tiny-hybrid"):
        plain = bench.plain(path, *ALL)
        for scenario in ALL[:3]:
            process = bench.start(path, "--pause", scenario, *ALL, disk=name)
            while process.stdout.readline() not in ("paused\n", ""):
                pass
            process.kill()
            process.communicate()
        same(bench, bench.run(path, *ALL, disk=name), plain, name)


def a_forked_child_is_left_alone(bench):
    for name, path in bench.models("tiny-llama-f16"):
        plain = bench.plain(path, "prompt", "fork")
        for _ in range(2):
            same(bench, bench.run(path, "prompt", "fork", disk=name), plain, name)


def keys_keep_models_and_tenants_apart(bench):
    (_, one), (_, two) = bench.models("tiny-llama-f16", "tiny-moe")
    bench.run(one, "prompt", disk="shared")
    run = bench.run(two, "prompt", disk="shared")
    same(bench, run, bench.plain(two, "prompt"), "another model")
    expect(run.restored() == 0, "another model restores nothing", run)
    run = bench.run(one, "prompt", disk="shared", KVTIER_RUN_SALT="another tenant")
    expect(run.restored() == 0, "another tenant restores nothing", run)
    run = bench.run(one, "prompt", disk="shared")
    expect(run.restored() == 288, "the same model and tenant restore", run)


def obstacles_are_told_and_the_program_goes_on(bench):
    (name, path), = bench.models("tiny-llama-f16")
    plain = bench.plain(path, "prompt", "cells")
    cases = {
        "is loaded, but kvtier's adapter was compiled against": dict(disk="d", library=bench.options.other_version),
        "the loaded libllama has no function llama_kvtier_test": dict(disk="d", library=bench.options.missing_symbol),
        "the store cannot be opened": dict(store='store(host=1MiB, disk=disk(path="/nowhere/kv", bytes=1GiB))'),
    }
    for text, settings in cases.items():
        run = bench.run(path, "prompt", "cells", **settings)
        same(bench, run, plain, text)
        expect(any(text in note for note in run.notes), f"the note '{text}'", run)
        expect(len(run.notes) <= 2, "one note", run)
    holder = bench.start(path, "--pause", "prompt", "prompt", disk="held")
    while holder.stdout.readline() not in ("paused\n", ""):
        pass
    run = bench.run(path, "prompt", "cells", disk="held")
    holder.kill()
    holder.communicate()
    same(bench, run, plain, "a directory in use")
    expect(any("in use" in note or "open already" in note for note in run.notes), "the note of a directory in use", run)


def a_small_store_evicts(bench):
    for name, path in bench.models("tiny-llama-f16", "tiny-swa", "tiny-hybrid"):
        plain = bench.plain(path, *ALL)
        store = f'store(host=1MiB, disk=disk(path="{bench.folder}/{name}", bytes=9MiB))'
        for _ in range(3):
            same(bench, bench.run(path, *ALL, store=store), plain, name)


def images_are_restored_with_the_text_after_them(bench):
    for name, path in bench.models("tiny-llama-f16", "arch-qwen2vl", "tiny-hybrid", "tiny-swa"):
        for more in ([], ["--old"]):
            plain = bench.plain(path, *more, "image")
            disk = name + "".join(more)
            for turn in ("first", "second"):
                run = bench.run(path, *more, "image", disk=disk)
                same(bench, run, plain, f"{name} {more} {turn} run")
                print(f"{name} {more} {turn}: {run.restored()} of {run.stats[0]['tokens']} tokens restored")
            # Of each of the three texts 192 tokens but the 8 between a chunk and the image.
            expect(run.restored() == 3 * 184, f"{name} {more}: the second run restores", run)


def a_program_that_opens_libllama_itself_is_left_alone(bench):
    environment = {**os.environ, "LD_PRELOAD": bench.options.library, "KVTIER_RUN_STORE": "store(host=1MiB)",
                   "LD_LIBRARY_PATH": os.path.dirname(bench.options.libllama)}
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "opened.py")
    done = subprocess.run([sys.executable, script, bench.options.libllama], env=environment, capture_output=True,
                          text=True, timeout=RUN_SECONDS, check=False)
    expect((done.returncode, done.stdout) == (0, "opened\n"), f"it ends well: {done.returncode} {done.stderr}")


def small_batches_are_left_alone(bench):
    for name, path in bench.models("tiny-llama-f16"):
        plain = bench.plain(path, "--limit", "4", "--batch", "4", "prompt")
        same(bench, bench.run(path, "--limit", "4", "--batch", "4", "prompt", disk=name), plain, name)


def a_control_vector_has_kv_of_its_own(bench):
    for name, path in bench.models("tiny-llama-f16"):
        plain = bench.plain(path, "vector")
        sums = [line.split()[1] for line in plain.lines]
        expect(sums[0] == sums[2] != sums[1], "the vector changes the logits", plain)
        for _ in range(2):
            run = bench.run(path, "vector", disk=name)
            same(bench, run, plain, name)
        # 96 tokens of each prompt: the last batch has an output.
        expect(run.restored() == 3 * 96, "each prompt is restored from KV of its own", run)


def machines_share_a_remote(bench):
    for name, path in bench.models("tiny-llama-f16", "tiny-hybrid"):
        plain = bench.plain(path, *ALL)
        shared = os.path.join(bench.folder, "remote-" + name)
        os.mkdir(shared)
        runs = [bench.run(path, *ALL, store=f'store(host=64MiB, remote=dir(path="{shared}"))') for _ in range(2)]
        for run in runs:
            same(bench, run, plain, name)
        expect(runs[1].restored() > 1600, f"{name}: the second machine restores", runs[1])


CASES = {one.__name__: one for one in (
    a_second_run_restores_and_computes_the_same_bits, large_batches_are_cut_for_states_and_windows,
    a_full_context_is_left_to_the_program, a_killed_program_left_whole_chunks, a_forked_child_is_left_alone,
    keys_keep_models_and_tenants_apart, obstacles_are_told_and_the_program_goes_on, a_small_store_evicts, machines_share_a_remote,
    images_are_restored_with_the_text_after_them, a_program_that_opens_libllama_itself_is_left_alone,
    small_batches_are_left_alone, a_control_vector_has_kv_of_its_own)}


@contextlib.contextmanager
def folder():
    path = tempfile.mkdtemp(prefix="kvtier-run-")
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    for name in ("program", "library", "models", "other-version", "missing-symbol", "libllama"):
        parser.add_argument("--" + name, required=True)
    options = parser.parse_args()
    with folder() as path:
        CASES[options.case](Bench(options, path))


if __name__ == "__main__":
    main()
