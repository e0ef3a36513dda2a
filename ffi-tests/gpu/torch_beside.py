#!/usr/bin/env python3
"""Compares this library's kernels with torch's attention:  torch_beside.py KVTIER_BENCH

Runs `KVTIER_BENCH device --json`, then the same shapes with torch's flash attention, and prints table
rows: this library's time, torch's time, and the speedup over torch. Without torch or a GPU it prints a
row with the reason. It never fails: errors are printed in rows.
"""

import json
import re
import statistics
import subprocess
import sys

QUERY_HEADS, KEY_HEADS, DIM = 32, 8, 128
ROUNDS = 7
COPY_BYTES = 1 << 30
#: The key under which `ours` returns the rates of copies, by bar.
RATES = "copies"
# Goal: speedup of sparse prefill with 30 % of the keys over dense prefill.
GOAL = 2.0


def row(what, *columns):
    print("| " + " | ".join([what, *columns]) + " |", flush=True)


def ours(kvtier):
    """Bars by name: speedup over all keys, number of tokens, and rate with all keys."""
    command = [kvtier, "device", "--json"]
    output = subprocess.run(command, stdout=subprocess.PIPE, timeout=400, check=True).stdout.decode()
    found, rates = {}, {}
    for line in output.splitlines():
        bar = json.loads(line)
        if bar.get("value") and bar.get("baseline_value"):
            rates[bar["bar"]] = bar["value"] * bar["baseline_value"]
        words = re.match(r"(\d+) tokens, all keys at ([\d.]+) ", bar.get("note") or "")
        if words and bar.get("value"):
            found[bar["bar"]] = (bar["value"], int(words.group(1)), float(words.group(2)))
    if {"h2d_pinned", "d2h_pinned", "both_ways"} <= set(rates):
        found[RATES] = rates
    return found


class Torch:
    """Measurements with torch."""

    def __init__(self):
        import torch
        self.torch = torch
        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no GPU")

    def seconds(self, call):
        """The median time of some rounds, after three warm-up rounds."""
        cuda, times = self.torch.cuda, []
        for turn in range(ROUNDS + 3):
            began, ended = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            began.record()
            call()
            ended.record()
            ended.synchronize()
            if turn >= 3:
                times.append(began.elapsed_time(ended) / 1e3)
        return statistics.median(times)

    def flash(self):
        """A context that allows only flash attention; without it torch raises an error."""
        try:
            from torch.nn.attention import SDPBackend, sdpa_kernel
            return sdpa_kernel(SDPBackend.FLASH_ATTENTION)
        except ImportError:
            return self.torch.backends.cuda.sdp_kernel(
                enable_flash=True, enable_math=False, enable_mem_efficient=False)

    def attend(self, heads, queries, tokens, dtype, is_causal):
        torch = self.torch

        def made(count):
            return torch.randn(1, heads, count, DIM, device="cuda",
                               dtype=getattr(torch, dtype))
        q, k, v = made(queries), made(tokens), made(tokens)
        call = torch.nn.functional.scaled_dot_product_attention
        with torch.no_grad(), self.flash():
            return self.seconds(lambda: call(q, k, v, is_causal=is_causal))

    def copy(self):
        """Bytes per second that a copy within the device reads and writes."""
        torch = self.torch
        source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return 2 * COPY_BYTES / self.seconds(lambda: target.copy_(source))

    def bus(self):
        """Bytes per second to the device, from it, and in both directions at once; 256 MiB each."""
        torch, count = self.torch, COPY_BYTES // 4
        host = [torch.empty(count, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        device = [torch.empty(count, dtype=torch.uint8, device="cuda") for _ in range(2)]
        second, current = torch.cuda.Stream(), torch.cuda.current_stream()

        def both():
            second.wait_stream(current)
            device[0].copy_(host[0], non_blocking=True)
            with torch.cuda.stream(second):
                host[1].copy_(device[1], non_blocking=True)
            current.wait_stream(second)

        up = self.seconds(lambda: device[0].copy_(host[0], non_blocking=True))
        down = self.seconds(lambda: host[1].copy_(device[1], non_blocking=True))
        return count / up, count / down, 2 * count / self.seconds(both)


def prefill(torch, name, dtype, bars):
    times, tokens, rate = bars[name]
    dense = 2.0 * tokens**2 * QUERY_HEADS * DIM / (rate * 1e12)
    sparse = dense / times
    # torch gets as many key heads as query heads: prefill is compute-bound, so the work is equal.
    theirs = torch.attend(QUERY_HEADS, tokens, tokens, dtype, True)
    own = f"dense {dense * 1e3:.2f} ms, 30 % {sparse * 1e3:.2f} ms"
    ratio = f"dense {theirs / dense:.2f}x, 30 % {theirs / sparse:.2f}x"
    mark = "reached" if times >= GOAL else "**missed**"
    row(f"prefill {tokens} {dtype}", own, f"{theirs * 1e3:.2f} ms", ratio)
    row(f"prefill {tokens} {dtype}, 30 % beside our own dense", f"{times:.2f}x",
        f"goal {GOAL:.1f}x", mark)


def decode(torch, name, dtype, bars):
    times, tokens, rate = bars[name]
    dense = 4.0 * tokens * KEY_HEADS * DIM / (rate * 1e9)
    # Query heads that share keys become rows of one product, so torch reads no key twice.
    theirs = torch.attend(KEY_HEADS, QUERY_HEADS // KEY_HEADS, tokens, dtype, False)
    own = f"all {dense * 1e3:.3f} ms, a 16th {dense / times * 1e3:.3f} ms"
    ratio = f"all {theirs / dense:.2f}x, a 16th {theirs / dense * times:.2f}x"
    row(f"decode {tokens} {dtype}", own, f"{theirs * 1e3:.3f} ms", ratio)


def copied(torch, name, dtype, bars):
    times, tokens, rate = bars[name]
    ceiling = torch.copy() / 1e9
    row(f"decode {tokens} {dtype} beside a copy", f"{rate:.0f} GB/s read",
        f"{ceiling:.0f} GB/s read and written", f"{rate / ceiling:.2f}x")


def transferred(torch, name, _dtype, bars):
    own = [bars[name][bar] for bar in ("h2d_pinned", "d2h_pinned", "both_ways")]
    for what, rate, theirs in zip(("to the device", "from it", "both ways"), own, torch.bus()):
        row(f"pinned memory {what}", f"{rate:.1f} GB/s", f"{theirs / 1e9:.1f} GB/s",
            f"{rate * 1e9 / theirs:.2f}x")


MEASUREMENTS = [
    (prefill, "prefill_sparse_30", "bfloat16"),
    (prefill, "prefill_sparse_30_f16", "float16"),
    (decode, "decode_chosen_16th", "bfloat16"),
    (decode, "decode_chosen_16th_f16", "float16"),
    (copied, "decode_chosen_16th", "bfloat16"),
    (transferred, RATES, "bytes"),
]


def reason(error):
    return f"{type(error).__name__}: {error}".replace("|", "/").replace("\n", " ")[:160]


def main():
    row("beside torch", "kvtier", "torch", "speedup of kvtier")
    row("---", "---", "---", "---")
    try:
        torch = Torch()
    except Exception as error:  # a broken torch may raise any exception
        return row("SKIP", "", "", reason(error))
    try:
        bars = ours(sys.argv[1])
    except Exception as error:
        return row("SKIP", reason(error), "", "")
    version = getattr(torch.torch, "__version__", "?")
    row(f"torch {version}", "", "flash attention", "")
    for measure, name, dtype in MEASUREMENTS:
        if name not in bars:
            row(f"{measure.__name__} {dtype}", f"SKIP: no {name}", "", "")
            continue
        try:
            measure(torch, name, dtype, bars)
        except Exception as error:
            row(f"{measure.__name__} {dtype}", "", f"SKIP: {reason(error)}", "")


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        row("SKIP", "", "", reason(error))
