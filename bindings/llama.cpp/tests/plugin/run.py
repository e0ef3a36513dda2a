#!/usr/bin/env python3
"""The plugin in a program that does not know it: the same bits in less memory, or a refusal in words.

    run.py CASE --stock PROGRAM --plugin LIBRARY --models DIRECTORY --other-api LIBRARY --other-ggml LIBRARY
           --far LIBRARY
"""

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile

SKIP = 77
RUN_SECONDS = 600
# Quantised, f16, sliding window, experts, latent attention, recurrent, hybrid.
MODELS = ["smollm2", "gemma3", "tiny-llama-f16", "tiny-swa", "tiny-moe", "tiny-mla", "tiny-mamba",
          "tiny-hybrid"]


class Run:
    """What one run of the program printed."""

    def __init__(self, done):
        self.status = done.returncode
        self.errors = done.stderr
        lines = done.stdout.splitlines()
        self.devices = lines[0].split()[1:] if lines and lines[0].startswith("devices") else []
        self.memory_kib = {}
        self.step_ns = 0
        for line in lines:
            if line.startswith("memory "):
                words = line.split()
                self.memory_kib = {"anonymous": int(words[1]), "all": int(words[2])}
            if line.startswith("time "):
                self.step_ns = int(line.split()[1])
        self.texts = [line for line in lines[1:] if not line.startswith(("memory ", "time "))]
        self.stats = {}
        self.far_stats = {}
        for line in done.stderr.splitlines():
            if line.startswith("kvtier: {"):
                self.stats = json.loads(line[len("kvtier: "):])
            if line.startswith("far: {"):
                self.far_stats = json.loads(line[len("far: "):])


class Bench:
    """Programs and models, and what is checked of them."""

    def __init__(self, options):
        self.options = options
        self.plains = {}

    def model(self, name):
        return os.path.join(self.options.models, name + ".gguf")

    def present(self, names):
        return [name for name in names if self.options.models and os.path.exists(self.model(name))]

    def run(self, model, *arguments, plugin=None, limits=None, **variables):
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("KVTIER_", "GGML_", "FAR_"))}
        if plugin:
            environment["GGML_BACKEND_PATH"] = plugin
            environment["KVTIER_STATS"] = "1"
        environment.update({k: str(v) for k, v in variables.items()})
        path = model if os.path.sep in model else self.model(model)
        command = [self.options.stock, path, *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS,
                              check=False, **(limits or {}))
        return Run(done)

    def plain(self, name, *arguments):
        """Without the plugin; the same is not run twice."""
        key = (name, arguments)
        if key not in self.plains:
            # Streamed weights are in the layout of their file; the processor's own is another sum.
            run = self.run(name, "-r", 0, *arguments)
            expect(run.status == 0 and run.devices == ["CPU"], f"{name} runs without us", run)
            self.plains[key] = run
        return self.plains[key]

    def ours(self, name, *arguments, **variables):
        return self.run(name, *arguments, plugin=self.options.plugin, **variables)

    def far(self, name, *arguments, **variables):
        """On the device whose memory the processor cannot follow, without the plugin."""
        return self.run(name, "-r", 0, "--load", self.options.far, "--device", "FAR0", *arguments,
                        FAR_STATS=1, **variables)

    def under(self, name, *arguments, **variables):
        """The plugin above that device."""
        return self.ours(name, "-r", 0, "--load", self.options.far, "--device", "KVTIER", *arguments,
                         KVTIER_UNDER="FAR0!", FAR_STATS=1, **variables)

    def same(self, name, *arguments, **variables):
        """A run with the plugin that has to be, bit for bit, what it is without."""
        ours = self.ours(name, *arguments, **variables)
        expect(ours.status == 0, f"{name} {arguments} {variables} runs", ours)
        expect("KVTIER" in ours.devices, "the device is there", ours)
        same = ours.texts == self.plain(name, *arguments).texts
        expect(same, f"{name} {arguments} {variables}: same bits", ours)
        return ours

    def least_budget(self, stats):
        """What a run needs, by its own figures; a page for rounding."""
        parts = ["resident_bytes", "floor_bytes", "kv_bytes", "other_bytes"]
        return sum(stats[part] for part in parts) + 4096


def expect(condition, what, run=None):
    if condition:
        return
    print(f"FAILED: {what}")
    if run:
        print(f"status {run.status}\n{run.texts}\n{run.stats}\n{run.errors[-3000:]}")
    sys.exit(1)


def case_text(bench):
    """The same bits whatever the model, where all of it fits and where hardly any does."""
    for name in bench.present(MODELS):
        all_in = bench.same(name)
        expect(all_in.stats["streamed_graphs"] > 0 and all_in.stats["models"] == 1, "it was streamed", all_in)
        expect(all_in.stats["kv_bytes"] > 0, "KV is ours", all_in)
        expect(all_in.stats["materialised"] == 0, "nothing has to stay", all_in)
        least = bench.same(name, KVTIER_BUDGET=bench.least_budget(all_in.stats))
        units = all_in.stats["units"]
        expect(least.stats["home_units"] < units or units <= 2, "less stays", least)
        expect(least.stats["peak_bytes"] <= least.stats["budget_bytes"], "no more than the budget", least)
        again = bench.same(name, "-l", 0, KVTIER_BUDGET=bench.least_budget(all_in.stats))
        expect(again.stats["materialised"] == 0, "what is handed over as a copy is known, too", again)
        print(name, all_in.stats["streamed_bytes"], "bytes in", least.stats["peak_bytes"])


def case_budget(bench):
    """A quarter of the model is enough for weights and KV; other ways to use it give the same bits."""
    for name in bench.present(["smollm2", "gemma3"]):
        quarter = os.path.getsize(bench.model(name)) // 4
        for arguments in [(), ("-u", 8), ("-t", 2, "-p", 40), ("-o", "-n", 3), ("-k", 1), ("-g", 7)]:
            if name == "gemma3" and arguments not in [(), ("-u", 8)]:
                continue
            run = bench.same(name, *arguments, KVTIER_BUDGET=quarter)
            expect(run.stats["peak_bytes"] <= quarter, "no more than the budget", run)
        run = bench.same(name, KVTIER_BUDGET=quarter, KVTIER_RING=4)
        expect(run.stats["peak_bytes"] <= quarter, "no more than the budget with more slots", run)
    one = bench.present(["smollm2"])
    if one:
        run = bench.ours(one[0], "-t", 2, "-p", 40, KVTIER_BUDGET="24M", KVTIER_THREADS=1)
        expect(run.texts == bench.plain(one[0], "-t", 1, "-p", 40).texts, "KVTIER_THREADS is obeyed", run)


def case_memory(bench):
    """Memory that is really there: as much less as the budget is."""
    for name in bench.present(["smollm2", "gemma3"]):
        size = os.path.getsize(bench.model(name))
        copied = bench.plain(name, "-l", 0)
        all_in, quarter = bench.same(name), bench.same(name, KVTIER_BUDGET=size // 4)
        saved_kib = all_in.memory_kib["anonymous"] - quarter.memory_kib["anonymous"]
        due_kib = (all_in.stats["peak_bytes"] - quarter.stats["peak_bytes"]) / 1024
        print(name, "anonymous KiB:", "copied", copied.memory_kib, "mapped", bench.plain(name).memory_kib,
              "all in", all_in.memory_kib, "quarter", quarter.memory_kib)
        expect(saved_kib > 0.9 * due_kib > 0, f"saved {saved_kib} of {due_kib} KiB", quarter)
        is_less = quarter.memory_kib["anonymous"] < copied.memory_kib["anonymous"]
        expect(is_less, "less than a copy takes", quarter)


def refused(bench, name, words, plugin=None, **variables):
    run = bench.run(name, plugin=plugin or bench.options.plugin, **variables)
    expect("KVTIER" not in run.devices, f"{variables}: no device", run)
    expect(words in run.errors, f"{variables}: says why ({words})", run)
    is_same = run.status == 0 and run.texts == bench.plain(name).texts
    expect(is_same, "and the program runs as without us", run)


def case_refusals(bench):
    """What cannot be meant, engines of other versions: no device. Budgets: no model. And why."""
    names = bench.present(["tiny-llama-f16", "smollm2"])
    if not names:
        return SKIP
    name = names[0]
    refused(bench, name, "incompatible API version (backend: 99", plugin=bench.options.other_api)
    refused(bench, name, "was compiled against 0.0.1", plugin=bench.options.other_ggml)
    for variable, value, words in [
            ("KVTIER_BUDGET", "12 elephants", "is not a size"), ("KVTIER_BUDGET", "0", "is not a size"),
            ("KVTIER_BUDGET", "-5M", "is not a size"), ("KVTIER_BUDGET", "99999999999T", "is not a size"),
            ("KVTIER_RING", "1", "from 2 to 64"), ("KVTIER_RING", "x", "from 2 to 64"),
            ("KVTIER_THREADS", "0", "from 1 to 512"), ("KVTIER_STATS", "yes", "from 0 to 1"),
            ("KVTIER_MODEL", "/nonexistent.gguf", "is not a file"),
            ("KVTIER_DIR", "/nonexistent", "is not a directory"),
            ("KVTIER_SPILL", "1", "needs KVTIER_DIR"),
            ("KVTIER_UNDER", "CUDA7", "is no device of this engine")]:
        refused(bench, name, words, **{variable: value})
    all_in = bench.same(name)
    least = bench.least_budget(all_in.stats)
    for bytes_there, status in [(4096, 4), (all_in.stats["resident_bytes"] + 4096, 4), (least - 8192, 5)]:
        run = bench.ours(name, KVTIER_BUDGET=bytes_there)
        is_refused = run.status == status and "raise KVTIER_BUDGET" in run.errors
        expect(is_refused, f"{bytes_there} is too little", run)
        expect(run.stats["peak_bytes"] <= bytes_there, "no more than the budget", run)
    bench.same(name, KVTIER_MODEL=bench.model(name))
    run = bench.ours(name, KVTIER_MODEL=sys.argv[0])
    is_same = run.status == 0 and run.texts == bench.plain(name).texts
    expect(is_same, "a wrong KVTIER_MODEL is not believed", run)
    return 0


def case_damage(bench):
    """A file that is cut while it is used ends decoding, in words; numbers are never made of what is left."""
    names = bench.present(["smollm2", "tiny-llama-f16"])
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            copy = os.path.join(folder, name + ".gguf")
            shutil.copyfile(bench.model(name), copy)
            least = bench.least_budget(bench.same(name).stats)
            # Nothing of ours is mapped, so that it is our reads that see it: -l 0.
            run = bench.run(copy, "-l", 0, "-d", copy, 3, plugin=bench.options.plugin,
                            KVTIER_BUDGET=least)
            has_failed = run.status == 3 and "failed" in run.texts[0] and "at step 3" in run.texts[0]
            expect(has_failed, "decoding fails", run)
            before = run.texts[0].split("failed")[0].split()
            expect(before == bench.plain(name).texts[0].split()[:3], "what came before is right", run)
            expect("kvtier: " in run.errors and "file" in run.errors, "says why", run)
            shutil.copyfile(bench.model(name), copy)
            with open(copy, "r+b") as file:
                file.truncate(os.path.getsize(copy) // 2)
            run = bench.run(copy, plugin=bench.options.plugin)
            expect(run.status == 4, "a damaged file is no model", run)
    return 0 if names else SKIP


def no_large_files():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))


def case_spill(bench):
    """Weights in a file of our own, where they are to be."""
    names = bench.present(["smollm2", "tiny-swa"])
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            least = bench.least_budget(bench.same(name).stats)
            run = bench.same(name, KVTIER_DIR=folder, KVTIER_SPILL=1, KVTIER_BUDGET=least + least // 4)
            expect(run.stats["models"] == 1 and run.stats["read_bytes"] > 0, "it was streamed", run)
            run = bench.same(name, "-l", 0, KVTIER_DIR=folder, KVTIER_SPILL=1,
                             KVTIER_BUDGET=least + least // 4)
            expect(os.listdir(folder) == [], "no name is left behind", run)
        if names:
            run = bench.ours(names[0], KVTIER_DIR="/proc/self", KVTIER_SPILL=1)
            expect(run.status == 4 and "no file can be made" in run.errors, "a directory without files", run)
        for name in names:
            # A file that may not grow: what cannot be written to it stays, if there is room.
            limit = {"preexec_fn": no_large_files, "restore_signals": False}
            run = bench.same(name, limits=limit, KVTIER_DIR=folder, KVTIER_SPILL=1)
            expect(run.stats["resident_bytes"] > os.path.getsize(bench.model(name)) // 2, "it stays", run)
            run = bench.ours(name, limits=limit, KVTIER_DIR=folder, KVTIER_SPILL=1, KVTIER_BUDGET=least)
            expect(run.status == 4 and "weights that stay" in run.errors, "or is refused", run)
    return 0 if names else SKIP


def case_contexts(bench):
    """Several contexts of one model at once."""
    names = bench.present(["smollm2", "tiny-moe", "tiny-hybrid"])
    for name in names:
        stats = bench.same(name, "-x", 3, "-n", 5).stats
        least = bench.least_budget(stats)
        for _ in range(2):
            run = bench.same(name, "-x", 3, "-n", 5, KVTIER_BUDGET=least)
            expect(run.stats["peak_bytes"] <= least, "no more than the budget", run)
    # A context that comes late takes what layers have had until then.
    for name in bench.present(["smollm2"]):
        arguments = ("-x", 4, "-z", "-n", 3)
        run = bench.same(name, *arguments)
        one_kv = run.stats["kv_bytes"] // 4
        budget = bench.least_budget(run.stats) + one_kv
        run = bench.same(name, *arguments, KVTIER_BUDGET=budget)
        expect(budget - one_kv < run.stats["peak_bytes"] <= budget, "weights made room for KV", run)
        run = bench.ours(name, *arguments, KVTIER_BUDGET=budget - 2 * one_kv)
        expect(run.status == 5 and "KV needs" in run.errors, "no room for the last one", run)
    # Two models, as where one drafts for the other.
    pair = bench.present(["smollm2", "tiny-llama-f16"])
    if len(pair) == 2:
        arguments = ("-x", 2, "-n", 4, "-y", bench.model(pair[1]))
        for more in [(), ("-z",)]:
            run = bench.same(pair[0], *arguments, *more)
            expect(run.stats["models"] == 2, "both are streamed", run)
            least = bench.least_budget(run.stats)
            bench.same(pair[0], *arguments, *more, KVTIER_BUDGET=least)
    return 0 if names else SKIP


def case_far(bench):
    """The device that stands for a GPU is right by itself: the same bits as the processor's."""
    names = bench.present(["smollm2", "tiny-llama-f16", "tiny-moe", "tiny-swa", "tiny-mamba"])
    for name in names:
        # All of it there, or only layers, or KV on the other side; more threads; several contexts.
        ways = [(), ("-g", 2, "-u", 8), ("-k", 1, "-n", 3), ("-o", "-n", 3), ("-t", 2, "-x", 3)]
        for arguments in ways if bench.is_long or name.startswith("tiny") else ways[:2]:
            run = bench.far(name, *arguments)
            expect(run.status == 0 and run.devices == ["CPU", "FAR0"], f"{name} {arguments} runs", run)
            same = run.texts == bench.plain(name, *arguments).texts
            expect(same, f"{name} {arguments}: same bits", run)
            stats = run.far_stats
            is_used = stats["graphs"] > 0 and 0 < stats["set_bytes"]
            expect(is_used and stats["buffers"] == 0, f"{name} {arguments}: {stats}", run)
        whole = bench.far(name).far_stats["peak_bytes"]
        expect(bench.far(name, FAR_BYTES=whole).status == 0, f"{name} in {whole} bytes")
        run = bench.far(name, FAR_BYTES=whole - 1)
        expect(run.status in (4, 5) and "far: no" in run.errors, f"{name}: no more memory than said", run)
        print(name, whole, "bytes")
    return 0 if names else SKIP


def case_under(bench):
    """Another device computes, with memory of its own: the same bits, from its memory, from host memory, from disk."""
    names = bench.present(MODELS)
    for name in names:

        def same(*arguments, **variables):
            run = bench.under(name, *arguments, **variables)
            what = f"{name} {arguments} {variables}"
            expect(run.status == 0, f"{what} runs", run)
            expect(run.texts == bench.plain(name, *arguments).texts, f"{what}: same bits", run)
            expect(run.far_stats["buffers"] == 0 and run.stats["materialised"] == 0, f"{what}: nothing is left", run)
            most = run.stats["peak_bytes"] + run.stats["compute_bytes"]
            expect(0 < run.far_stats["peak_bytes"] <= most, f"{what}: all that is there was counted", run)
            expect(run.stats["peak_bytes"] <= run.stats["budget_bytes"], f"{what}: no more than the budget", run)
            return run

        all_in = same()
        units, streamed = all_in.stats["units"], all_in.stats["streamed_bytes"]
        expect(all_in.stats["home_units"] == units, "all of it stays on the device", all_in)
        expect(all_in.stats["read_bytes"] <= streamed + units * 8192, "and is read once", all_in)
        least = bench.least_budget(all_in.stats)
        # With logits of all tokens the rows of a product in pieces have gaps between them.
        ways = [(), ("-g", 2, "-u", 8), ("-a", "-n", 2), ("-k", 1, "-n", 3), ("-o", "-n", 3)]
        # Without flash attention, which the engine leaves out where a hybrid's KV is the processor's, bits differ.
        ways = ways[:3] if name in ("gemma3", "tiny-hybrid") else ways
        for arguments in ways if bench.is_long or name.startswith("tiny") else ways[:1]:
            few = same(*arguments, KVTIER_DEVICE_BUDGET=least)
            expect(few.stats["home_units"] < units or units <= 2, "less stays", few)
        if name.startswith("tiny"):
            same("-t", 2, "-x", 3, KVTIER_DEVICE_BUDGET=least + 2 * all_in.stats["kv_bytes"])
        slot = all_in.stats["slot_bytes"]
        disk = same(KVTIER_DEVICE_BUDGET=least, KVTIER_BUDGET=slot * 2 + (2 << 20))
        if name in ("smollm2", "gemma3"):
            expect(disk.stats["read_bytes"] > 3 * streamed, "it comes from the file again and again", disk)
        run = bench.under(name, KVTIER_DEVICE_BUDGET=least // 2)
        expect(run.status != 0 and "KVTIER_DEVICE_BUDGET" in run.errors, "too little is refused in words", run)
        run = bench.under(name, FAR_BYTES=all_in.stats["kv_bytes"] // 2)
        expect(run.status != 0 and run.status > 0, "a device that has not what it says is no crash", run)
        print(name, least, "bytes on the device")
    return 0 if names else SKIP


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("case")
    for name in ["stock", "plugin", "models", "other-api", "other-ggml", "far"]:
        parser.add_argument("--" + name, default="")
    options = parser.parse_args()
    bench = Bench(options)
    if not bench.present(MODELS):
        print("SKIP: no models: KVTIER_LLAMA_MODELS says where models.sh has put them")
        return SKIP
    case, _, long = options.case.partition("-")
    bench.is_long = long == "long"
    status = globals()["case_" + case](bench)
    if status == SKIP:
        print("SKIP: none of the models that this needs is there")
    return status or 0


if __name__ == "__main__":
    sys.exit(main())
