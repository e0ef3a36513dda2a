#!/usr/bin/env python3
"""Runs an unmodified program with the plugin: the same bits in less memory, or a refusal with a message.

    run.py CASE --stock PROGRAM --plugin LIBRARY --models DIRECTORY --other-api LIBRARY --other-ggml LIBRARY
           --fake-gpu LIBRARY
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
MODELS = ["smollm2", "gemma3", "tiny-llama-f16", "tiny-swa", "tiny-moe", "tiny-oss", "tiny-mla", "tiny-mamba",
          "tiny-hybrid"]


class Run:
    """The output of one run of the program."""

    def __init__(self, done):
        self.status = done.returncode
        self.errors = done.stderr
        lines = done.stdout.splitlines()
        self.devices = lines[0].split()[1:] if lines and lines[0].startswith("devices") else []
        self.memory_kib = {}
        self.step_ns = self.prompt_ns = self.total_ns = 0
        for line in lines:
            if line.startswith("memory "):
                words = line.split()
                self.memory_kib = {"anonymous": int(words[1]), "all": int(words[2])}
            if line.startswith("prompt "):
                self.prompt_ns = int(line.split()[1])
            if line.startswith("total "):
                self.total_ns = int(line.split()[1])
            if line.startswith("time "):
                self.step_ns = int(line.split()[1])
        self.texts = [line for line in lines[1:] if not line.startswith(("memory ", "prompt ", "total ", "time "))]
        self.stats = {}
        self.fake_gpu_stats = {}
        for line in done.stderr.splitlines():
            if line.startswith("kvtier: {"):
                self.stats = json.loads(line[len("kvtier: "):])
            if line.startswith("fake: {"):
                self.fake_gpu_stats = json.loads(line[len("fake: "):])


class Bench:
    """Programs and models, and runs of them."""

    def __init__(self, options):
        self.options = options
        self.plain_runs = {}

    def model(self, name):
        return os.path.join(self.options.models, name + ".gguf")

    def present(self, names):
        return [name for name in names if self.options.models and os.path.exists(self.model(name))]

    def run(self, model, *arguments, plugin=None, limits=None, **variables):
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("KVTIER_", "GGML_", "FAKE_"))}
        if plugin:
            environment["GGML_BACKEND_PATH"] = plugin
            environment["KVTIER_STATS"] = "1"
        environment.update({k: str(v) for k, v in variables.items()})
        path = model if os.path.sep in model else self.model(model)
        command = [self.options.stock, path, *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS,
                              check=False, **(limits or {}))
        return Run(done)

    def without_plugin(self, name, *arguments):
        """A run without the plugin; equal runs are cached."""
        key = (name, arguments)
        if key not in self.plain_runs:
            # -r 0: streamed weights have the layout of the file; repacked weights give other sums.
            run = self.run(name, "-r", 0, *arguments)
            expect(run.status == 0 and run.devices == ["CPU"], f"{name} runs without the plugin", run)
            self.plain_runs[key] = run
        return self.plain_runs[key]

    def with_plugin(self, name, *arguments, **variables):
        return self.run(name, *arguments, plugin=self.options.plugin, **variables)

    def on_fake_gpu(self, name, *arguments, **variables):
        """A run on the fake GPU, without the plugin."""
        return self.run(name, "-r", 0, "--load", self.options.fake_gpu, "--device", "FAKE0", *arguments,
                        FAKE_STATS=1, **variables)

    def over_fake_gpu(self, name, *arguments, **variables):
        """A run with the plugin, which computes on the fake GPU."""
        return self.with_plugin(name, "-r", 0, "--load", self.options.fake_gpu, "--device", "KVTIER",
                                *arguments, KVTIER_UNDER="FAKE0!", FAKE_STATS=1, **variables)

    def same(self, name, *arguments, **variables):
        """A run with the plugin, whose output must equal the run without it bit for bit."""
        run = self.with_plugin(name, *arguments, **variables)
        expect(run.status == 0, f"{name} {arguments} {variables} runs", run)
        expect("KVTIER" in run.devices, "the device KVTIER exists", run)
        same = run.texts == self.without_plugin(name, *arguments).texts
        expect(same, f"{name} {arguments} {variables}: same bits", run)
        return run

    def smallest_budget(self, stats):
        """The smallest budget that a run needs, from its statistics, plus a page for rounding."""
        parts = ["resident_bytes", "floor_bytes", "kv_bytes", "other_bytes"]
        return sum(stats[part] for part in parts) + 4096


def expect(condition, what, run=None):
    if condition:
        return
    print(f"FAILED: {what}")
    if run:
        print(f"status {run.status}\n{run.texts}\n{run.stats}\n{run.errors[-3000:]}")
    sys.exit(1)


def case_streamed_weights_give_the_same_bits(bench):
    """For each model: the same bits with a budget for all weights, and with the smallest budget."""
    for name in bench.present(MODELS):
        resident = bench.same(name)
        expect(resident.stats["streamed_graphs"] > 0 and resident.stats["models"] == 1,
               "weights were streamed", resident)
        expect(resident.stats["kv_bytes"] > 0, "the plugin holds the KV", resident)
        expect(resident.stats["materialised"] == 0, "no weight had to stay in memory", resident)
        least = bench.same(name, KVTIER_BUDGET=bench.smallest_budget(resident.stats))
        units = resident.stats["units"]
        expect(least.stats["home_units"] + least.stats["expert_slots"] < units or units <= 2,
               "fewer units are in memory", least)
        expect(least.stats["peak_bytes"] <= least.stats["budget_bytes"],
               "the peak is within the budget", least)
        again = bench.same(name, "-l", 0, KVTIER_BUDGET=bench.smallest_budget(resident.stats))
        expect(again.stats["materialised"] == 0, "weights passed as copies are found in the file, too", again)
        print(name, resident.stats["streamed_bytes"], "bytes in", least.stats["peak_bytes"])


def case_experts_come_one_by_one(bench):
    """Experts have units of their own. Each is read at most once for a batch, however few fit in memory."""
    names = bench.present(["tiny-moe", "tiny-oss", "tiny-mla"])
    for name in names:
        resident = bench.same(name)
        least = bench.smallest_budget(resident.stats)
        half = least + resident.stats["streamed_bytes"] // 2
        for arguments in [("-n", 1, "-p", 48), ("-n", 20), ("-u", 5), ("-t", 2, "-p", 40), ("-o", "-n", 3),
                          ("-a", "-n", 2), ("-x", 3, "-n", 4)]:
            once = bench.same(name, *arguments).stats
            expect(once["expert_misses"] <= once["expert_slots"], "all experts stay in memory", resident)
            for budget in [half, least + 2 * once["kv_bytes"]]:
                run = bench.same(name, *arguments, KVTIER_BUDGET=budget)
                expect(run.stats["peak_bytes"] <= budget, "the peak is within the budget", run)
                expect(run.stats["expert_uses"] == once["expert_uses"], "the same experts are used", run)
                if arguments[:2] == ("-n", 1):
                    # Whole pages are read, and layers once more.
                    most = 1.6 * resident.stats["streamed_bytes"] + 8192 * resident.stats["units"]
                    expect(run.stats["read_bytes"] < most, f"{name}: each expert is read once", run)
        few = bench.same(name, KVTIER_BUDGET=least)
        expect(few.stats["expert_slots"] == 2, "two experts are enough", few)
        # An expert that cannot be read fails the decode.
        with tempfile.TemporaryDirectory() as folder:
            copy = os.path.join(folder, name + ".gguf")
            shutil.copyfile(bench.model(name), copy)
            run = bench.run(copy, "-l", 0, "-d", copy, 3, plugin=bench.options.plugin, KVTIER_BUDGET=least)
            expect(run.status == 3 and "at step 3" in run.texts[0], "a truncated file fails the decode", run)
            before = run.texts[0].split("failed")[0].split()
            expect(before == bench.without_plugin(name).texts[0].split()[:3], "the bits before are right", run)
    if names:
        run = bench.with_plugin(name, KVTIER_BUDGET=least - 16384)
        expect(run.status == 5 and "raise KVTIER_BUDGET" in run.errors, "a smaller budget is refused", run)
    return 0 if names else SKIP


def trace_read(path):
    """The experts of each layer of a routing trace, and its uses: layer, tokens, used and guessed experts."""
    with open(path, encoding="ascii") as file:
        lines = [line.split() for line in file.read().splitlines()]
    layers = {tuple(line[1:3]): int(line[3]) for line in lines if line[0] == "layer"}
    uses = [(int(line[2]), int(line[3]), *[set(map(int, ids.split(","))) for ids in line[4:6]])
            for line in lines if line[0] == "use"]
    expect(lines[0] == ["kvtier-routing", "1"], f"{path} has a head line")
    return layers, uses


def case_routing_is_traced_and_predicted(bench):
    """The trace has each layer's choice in each batch. Predictions change reads, never bits."""
    names = bench.present(["tiny-moe", "tiny-oss", "tiny-mla"])
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            path = os.path.join(folder, "trace")
            arguments = ("-n", 24, "-p", 8, "-s")
            run = bench.same(name, *arguments, KVTIER_ROUTING_TRACE=path)
            layers, uses = trace_read(path)
            used = {"tiny-moe": 2, "tiny-oss": 4, "tiny-mla": 2}[name]
            expect(len(uses) == 24 * len(layers), f"{name}: one line for each layer and batch")
            expect(sum(len(use[2]) for use in uses) == run.stats["expert_uses"], "all uses are traced", run)
            for layer, tokens, chosen, *guessed in uses:
                count = layers[("1", str(layer))]
                expect(max(chosen) < count and (len(chosen) == used or tokens > 1), f"{name}: {chosen}")
                expect(all(max(guess) < count for guess in guessed), f"{name}: {guessed}")
            first = min(use[0] for use in uses)
            is_guessed = [len(use) == 4 for use in uses[len(layers):] if use[0] != first]
            expect(all(is_guessed), f"{name}: each layer after the first is predicted")
            expect(run.stats["expert_misses"] <= sum(layers.values()),
                   "each expert is read once if all fit", run)
            # Room for most experts: predictions need some slots.
            budget = bench.smallest_budget(run.stats) + run.stats["streamed_bytes"] * 2 // 3
            few = bench.same(name, *arguments, KVTIER_BUDGET=budget)
            blind = bench.same(name, *arguments, KVTIER_BUDGET=budget, KVTIER_PREDICT=0,
                               KVTIER_EXPERT_POLICY="lru")
            expect(blind.stats["guessed_reads"] == 0 and few.stats["expert_uses"] == blind.stats["expert_uses"],
                   "KVTIER_PREDICT=0 predicts nothing", blind)
        if names:
            run = bench.with_plugin(name, KVTIER_EXPERT_POLICY="oldest")
            expect(run.status == 3 and "oldest" in run.errors, "an unknown policy is refused", run)
            check_refused(bench, name, "cannot be written",
                          KVTIER_ROUTING_TRACE=os.path.join(folder, "no", "file"))
    return 0 if names else SKIP


def case_a_quarter_of_the_model_is_enough(bench):
    """A budget of a quarter of the model gives the same bits, for all ways to use the engine."""
    for name in bench.present(["smollm2", "gemma3"]):
        quarter = os.path.getsize(bench.model(name)) // 4
        for arguments in [(), ("-u", 8), ("-t", 2, "-p", 40), ("-o", "-n", 3), ("-k", 1), ("-g", 7)]:
            if name == "gemma3" and arguments not in [(), ("-u", 8)]:
                continue
            run = bench.same(name, *arguments, KVTIER_BUDGET=quarter)
            expect(run.stats["peak_bytes"] <= quarter, "the peak is within the budget", run)
        run = bench.same(name, KVTIER_BUDGET=quarter, KVTIER_RING=4)
        expect(run.stats["peak_bytes"] <= quarter, "the peak is within the budget with more slots", run)
    one = bench.present(["smollm2"])
    if one:
        run = bench.with_plugin(one[0], "-t", 2, "-p", 40, KVTIER_BUDGET="24M", KVTIER_THREADS=1)
        expect(run.texts == bench.without_plugin(one[0], "-t", 1, "-p", 40).texts,
               "KVTIER_THREADS sets the threads", run)


def case_a_smaller_budget_uses_less_memory(bench):
    """Anonymous memory shrinks as much as the budget."""
    for name in bench.present(["smollm2", "gemma3"]):
        size = os.path.getsize(bench.model(name))
        copied = bench.without_plugin(name, "-l", 0)
        resident, quarter = bench.same(name), bench.same(name, KVTIER_BUDGET=size // 4)
        saved_kib = resident.memory_kib["anonymous"] - quarter.memory_kib["anonymous"]
        expected_kib = (resident.stats["peak_bytes"] - quarter.stats["peak_bytes"]) / 1024
        mapped = bench.without_plugin(name)
        print(name, "anonymous KiB:", "copied", copied.memory_kib, "mapped", mapped.memory_kib,
              "all in", resident.memory_kib, "quarter", quarter.memory_kib)
        expect(saved_kib > 0.9 * expected_kib > 0, f"saved {saved_kib} of {expected_kib} KiB", quarter)
        is_less = quarter.memory_kib["anonymous"] < copied.memory_kib["anonymous"]
        expect(is_less, "less memory than a copy of the weights", quarter)


def check_refused(bench, name, message, plugin=None, **variables):
    run = bench.run(name, plugin=plugin or bench.options.plugin, **variables)
    expect("KVTIER" not in run.devices, f"{variables}: no device", run)
    expect(message in run.errors, f"{variables}: the message has '{message}'", run)
    is_same = run.status == 0 and run.texts == bench.without_plugin(name).texts
    expect(is_same, "the program runs as without the plugin", run)


def case_invalid_settings_are_refused(bench):
    """Invalid values and other versions: no device. Small budgets: no model. Each with a message."""
    names = bench.present(["tiny-llama-f16", "smollm2"])
    if not names:
        return SKIP
    name = names[0]
    check_refused(bench, name, "incompatible API version (backend: 99", plugin=bench.options.other_api)
    check_refused(bench, name, "was compiled against 0.0.1", plugin=bench.options.other_ggml)
    for variable, value, message in [
            ("KVTIER_BUDGET", "12 elephants", "is not a size"), ("KVTIER_BUDGET", "0", "is not a size"),
            ("KVTIER_BUDGET", "-5M", "is not a size"), ("KVTIER_BUDGET", "99999999999T", "is not a size"),
            ("KVTIER_RING", "1", "from 2 to 64"), ("KVTIER_RING", "x", "from 2 to 64"),
            ("KVTIER_THREADS", "0", "from 1 to 512"), ("KVTIER_STATS", "yes", "from 0 to 1"),
            ("KVTIER_MODEL", "/nonexistent.gguf", "is not a file"),
            ("KVTIER_DIR", "/nonexistent", "is not a directory"),
            ("KVTIER_SPILL", "1", "needs KVTIER_DIR"),
            ("KVTIER_UNDER", "CUDA7", "is not a device of this engine")]:
        check_refused(bench, name, message, **{variable: value})
    resident = bench.same(name)
    least = bench.smallest_budget(resident.stats)
    for budget, status in [(4096, 4), (resident.stats["resident_bytes"] + 4096, 4), (least - 8192, 5)]:
        run = bench.with_plugin(name, KVTIER_BUDGET=budget)
        is_refused = run.status == status and "raise KVTIER_BUDGET" in run.errors
        expect(is_refused, f"a budget of {budget} is refused", run)
        expect(run.stats["peak_bytes"] <= budget, "the peak is within the budget", run)
    bench.same(name, KVTIER_MODEL=bench.model(name))
    run = bench.with_plugin(name, KVTIER_MODEL=sys.argv[0])
    is_same = run.status == 0 and run.texts == bench.without_plugin(name).texts
    expect(is_same, "a wrong KVTIER_MODEL is not used", run)
    return 0


def case_a_truncated_file_fails_the_decode(bench):
    """A file truncated during use fails the decode with a message. No logits come from the rest."""
    names = bench.present(["smollm2", "tiny-llama-f16"])
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            copy = os.path.join(folder, name + ".gguf")
            shutil.copyfile(bench.model(name), copy)
            least = bench.smallest_budget(bench.same(name).stats)
            # -l 0: the file is not mapped, so that the plugin's reads find the end.
            run = bench.run(copy, "-l", 0, "-d", copy, 3, plugin=bench.options.plugin,
                            KVTIER_BUDGET=least)
            has_failed = run.status == 3 and "failed" in run.texts[0] and "at step 3" in run.texts[0]
            expect(has_failed, "decoding fails", run)
            before = run.texts[0].split("failed")[0].split()
            expect(before == bench.without_plugin(name).texts[0].split()[:3],
                   "earlier steps have the right bits", run)
            expect("kvtier: " in run.errors and "file" in run.errors, "the message names the file", run)
            shutil.copyfile(bench.model(name), copy)
            with open(copy, "r+b") as file:
                file.truncate(os.path.getsize(copy) // 2)
            run = bench.run(copy, plugin=bench.options.plugin)
            expect(run.status == 4, "a truncated file is refused at load", run)
    return 0 if names else SKIP


def no_large_files():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))


def case_spilled_weights_give_the_same_bits(bench):
    """KVTIER_SPILL=1 writes the weights to a file in KVTIER_DIR and streams them from it."""
    names = bench.present(["smollm2", "tiny-swa"])
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            least = bench.smallest_budget(bench.same(name).stats)
            run = bench.same(name, KVTIER_DIR=folder, KVTIER_SPILL=1, KVTIER_BUDGET=least + least // 4)
            expect(run.stats["models"] == 1 and run.stats["read_bytes"] > 0, "weights were streamed", run)
            run = bench.same(name, "-l", 0, KVTIER_DIR=folder, KVTIER_SPILL=1,
                             KVTIER_BUDGET=least + least // 4)
            expect(os.listdir(folder) == [], "the file has no name", run)
        if names:
            run = bench.with_plugin(names[0], KVTIER_DIR="/proc/self", KVTIER_SPILL=1)
            expect(run.status == 4 and "cannot create a file" in run.errors,
                   "a directory in which no file can be created", run)
        for name in names:
            # The file may not grow: unwritten weights stay in memory if the budget allows.
            limit = {"preexec_fn": no_large_files, "restore_signals": False}
            run = bench.same(name, limits=limit, KVTIER_DIR=folder, KVTIER_SPILL=1)
            expect(run.stats["resident_bytes"] > os.path.getsize(bench.model(name)) // 2,
                   "weights stay in memory", run)
            run = bench.with_plugin(name, limits=limit, KVTIER_DIR=folder, KVTIER_SPILL=1,
                                    KVTIER_BUDGET=least)
            expect(run.status == 4 and "resident weights" in run.errors, "a small budget is refused", run)
    return 0 if names else SKIP


def case_contexts_share_the_budget(bench):
    """Several contexts and models share the budget, and give the same bits."""
    names = bench.present(["smollm2", "tiny-moe", "tiny-hybrid"])
    for name in names:
        stats = bench.same(name, "-x", 3, "-n", 5).stats
        least = bench.smallest_budget(stats)
        for _ in range(2):
            run = bench.same(name, "-x", 3, "-n", 5, KVTIER_BUDGET=least)
            expect(run.stats["peak_bytes"] <= least, "the peak is within the budget", run)
    # A later context takes memory from resident layers.
    for name in bench.present(["smollm2"]):
        arguments = ("-x", 4, "-z", "-n", 3)
        run = bench.same(name, *arguments)
        one_kv = run.stats["kv_bytes"] // 4
        budget = bench.smallest_budget(run.stats) + one_kv
        run = bench.same(name, *arguments, KVTIER_BUDGET=budget)
        expect(budget - one_kv < run.stats["peak_bytes"] <= budget, "resident weights shrink for KV", run)
        run = bench.with_plugin(name, *arguments, KVTIER_BUDGET=budget - 2 * one_kv)
        expect(run.status == 5 and "KV needs" in run.errors, "the last context is refused", run)
    # Two models, as in speculative decoding.
    pair = bench.present(["smollm2", "tiny-llama-f16"])
    if len(pair) == 2:
        arguments = ("-x", 2, "-n", 4, "-y", bench.model(pair[1]))
        for more in [(), ("-z",)]:
            run = bench.same(pair[0], *arguments, *more)
            expect(run.stats["models"] == 2, "both are streamed", run)
            least = bench.smallest_budget(run.stats)
            bench.same(pair[0], *arguments, *more, KVTIER_BUDGET=least)
    return 0 if names else SKIP


def case_the_fake_gpu_gives_the_same_bits(bench):
    """The fake GPU without the plugin gives the bits of the CPU."""
    names = bench.present(["smollm2", "tiny-llama-f16", "tiny-moe", "tiny-swa", "tiny-mamba"])
    for name in names:
        # All on the device, some layers, KV on the CPU, all nodes observed, more threads and contexts.
        ways = [(), ("-g", 2, "-u", 8), ("-k", 1, "-n", 3), ("-o", "-n", 3), ("-t", 2, "-x", 3)]
        for arguments in ways if bench.is_long or name.startswith("tiny") else ways[:2]:
            run = bench.on_fake_gpu(name, *arguments)
            expect(run.status == 0 and run.devices == ["CPU", "FAKE0"], f"{name} {arguments} runs", run)
            same = run.texts == bench.without_plugin(name, *arguments).texts
            expect(same, f"{name} {arguments}: same bits", run)
            stats = run.fake_gpu_stats
            is_used = stats["graphs"] > 0 and 0 < stats["set_bytes"]
            expect(is_used and stats["buffers"] == 0, f"{name} {arguments}: {stats}", run)
        whole = bench.on_fake_gpu(name).fake_gpu_stats["peak_bytes"]
        expect(bench.on_fake_gpu(name, FAKE_BYTES=whole).status == 0, f"{name} in {whole} bytes")
        run = bench.on_fake_gpu(name, FAKE_BYTES=whole - 1)
        expect(run.status in (4, 5) and "fake: no" in run.errors,
               f"{name}: the limit of its memory holds", run)
        print(name, whole, "bytes")
    return 0 if names else SKIP


def case_the_plugin_over_a_gpu_gives_the_same_bits(bench):
    """The plugin over a device with own memory: the same bits from device memory, host memory and disk."""
    names = bench.present(MODELS)
    for name in names:

        def same(*arguments, **variables):
            run = bench.over_fake_gpu(name, *arguments, **variables)
            what = f"{name} {arguments} {variables}"
            expect(run.status == 0, f"{what} runs", run)
            expect(run.texts == bench.without_plugin(name, *arguments).texts, f"{what}: same bits", run)
            expect(run.fake_gpu_stats["buffers"] == 0 and run.stats["materialised"] == 0,
                   f"{what}: all buffers are freed", run)
            limit_bytes = run.stats["peak_bytes"] + run.stats["compute_bytes"]
            expect(0 < run.fake_gpu_stats["peak_bytes"] <= limit_bytes,
                   f"{what}: the statistics cover all memory", run)
            expect(run.stats["peak_bytes"] <= run.stats["budget_bytes"],
                   f"{what}: the peak is within the budget", run)
            return run

        resident = same()
        units, streamed = resident.stats["units"], resident.stats["streamed_bytes"]
        expect(resident.stats["home_units"] == units, "all units are resident on the device", resident)
        expect(resident.stats["read_bytes"] <= streamed + units * 8192, "each unit is read once", resident)
        least = bench.smallest_budget(resident.stats)
        # -a: logits of all tokens, so that a product in pieces has gaps between its rows.
        ways = [(), ("-g", 2, "-u", 8), ("-a", "-n", 2), ("-k", 1, "-n", 3), ("-o", "-n", 3)]
        # -k 1 makes the engine disable flash attention for hybrids, which changes bits.
        ways = ways[:3] if name in ("gemma3", "tiny-hybrid") else ways
        for arguments in ways if bench.is_long or name.startswith("tiny") else ways[:1]:
            few = same(*arguments, KVTIER_DEVICE_BUDGET=least)
            expect(few.stats["home_units"] < units or units <= 2, "fewer units are resident", few)
        if name.startswith("tiny"):
            same("-t", 2, "-x", 3, KVTIER_DEVICE_BUDGET=least + 2 * resident.stats["kv_bytes"])
        slot = resident.stats["slot_bytes"]
        disk = same(KVTIER_DEVICE_BUDGET=least, KVTIER_BUDGET=slot * 2 + (2 << 20))
        if name in ("smollm2", "gemma3"):
            expect(disk.stats["read_bytes"] > 3 * streamed, "weights are read from the file repeatedly", disk)
        run = bench.over_fake_gpu(name, KVTIER_DEVICE_BUDGET=least // 2)
        expect(run.status != 0 and "KVTIER_DEVICE_BUDGET" in run.errors,
               "a small device budget is refused with a message", run)
        run = bench.over_fake_gpu(name, FAKE_BYTES=resident.stats["kv_bytes"] // 2)
        expect(run.status != 0 and run.status > 0,
               "a device with less memory than it reports fails cleanly", run)
        print(name, least, "bytes on the device")
    return 0 if names else SKIP


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("case")
    for name in ["stock", "plugin", "models", "other-api", "other-ggml", "fake-gpu"]:
        parser.add_argument("--" + name, default="")
    options = parser.parse_args()
    bench = Bench(options)
    if not bench.present(MODELS):
        print("SKIP: no models: set KVTIER_LLAMA_MODELS to the folder of models.sh")
        return SKIP
    case, _, long = options.case.partition("-")
    bench.is_long = long == "long"
    status = globals()["case_" + case](bench)
    if status == SKIP:
        print("SKIP: the models of this case are absent")
    return status or 0


if __name__ == "__main__":
    sys.exit(main())
