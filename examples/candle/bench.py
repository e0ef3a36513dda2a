#!/usr/bin/env python3
"""Measures the first token of a conversation after a restart, against prefill.

    bench.py --program PROGRAM --model DIR [--disk DIR] [--tokens N] [--pairs N]

PROGRAM is target/release/kvtier-candle. Each pair is one process without a store, and one with it
whose KV an earlier process has stored. Prints a line of JSON for each run, and the medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile


def main() -> None:
    """Runs the pairs and prints the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--disk", help="an empty folder on the disk to measure; default: temporary")
    parser.add_argument("--tokens", type=int, default=1700, help="about so many of the prompt")
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.disk) as folder:
        measure(options, folder)


def measure(options: argparse.Namespace, folder: str) -> None:
    """Keeps the KV of a prompt, then runs the pairs."""
    prompt = os.path.join(folder, "prompt")
    # A sentence has 14 or 15 tokens in the vocabulary of SmolLM2.
    facts = (f"House number {i} has {i * 7 % 23} windows and {i * 5 % 7} doors."
             for i in range(options.tokens * 2 // 29))
    with open(prompt, "w", encoding="utf-8") as file:
        file.write(" ".join(facts))
    disk = ["--disk", os.path.join(folder, "kv")]

    def run(more: list[str]) -> tuple[str, dict[str, float]]:
        command = [options.program, "--model", options.model, "--prompt-file", prompt, "--json",
                   "--tokens", "4", *more]
        out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        text, line = out.rstrip("\n").rsplit("\n", 1)
        return text, json.loads(line)

    expected, _ = run(disk)
    first: dict[str, list[float]] = {"prefill": [], "restart": []}
    for pair in range(options.pairs):
        # The order alternates, so that neither is favoured by what the machine does meanwhile.
        for name in sorted(first, reverse=pair % 2 == 0):
            text, times = run(disk if name == "restart" else [])
            assert text == expected, f"{name}: the answer differs:\n{text}\n{expected}"
            first[name].append(times["first_token_ms"])
            print(json.dumps({"run": name, "load": os.getloadavg()[0], **times}), flush=True)
    medians = {name: statistics.median(times) for name, times in first.items()}
    ratios = [a / b for a, b in zip(first["prefill"], first["restart"], strict=True)]
    print(json.dumps({"first_token_ms": medians, "ratio": statistics.median(ratios),
                      "ratios": ratios}))


if __name__ == "__main__":
    main()
