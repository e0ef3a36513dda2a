#!/usr/bin/env python3
"""Measures the connector and the offloading spec in a real vLLM on the processor, interleaved with the engine alone:

    bench.py [--pairs 5] [--only restart,throughput,shared] [--interface connector,layerwise,spec]

Prints one line of JSON per bar. Needs the environment of the tests (`real_test.sh` provides it).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any, Dict, List

from harness import Engine, connector, spec
from test_stories import TEXTS

#: Bytes of one token of SmolLM2's KV.
TOKEN_BYTES = 23040
#: Tokens of a block in the restart bar. With vLLM's 128 on a processor, 86 of 1,750 tokens fill no block and are
#: computed in any case, which takes as long as loading the others.
BLOCK_TOKENS = 64


def line(bar: str, interface: str, value: float, baseline: str, goal: str, **more: Any) -> None:
    print(json.dumps({"group": "vllm-real", "bar": bar, "interface": interface,
                      "value": round(value, 3), "baseline": baseline, "goal": goal,
                      "load": round(os.getloadavg()[0], 1), **more}), flush=True)


def options_of(interface: str, disk: Path) -> Dict[str, Any]:
    if interface == "alone":
        return {}
    layerwise = interface == "layerwise"
    config = spec(disk) if interface == "spec" else connector(disk, layerwise=layerwise)
    return {"kv_transfer_config": config}


def first_token(engine: Engine, prompts: List[List[int]], tokens: int = 1) -> float:
    """Seconds until the last of the requests, which arrive at once, has its first token."""
    return float(max(engine.call("generate", prompts=prompts, tokens=tokens)["first"]))


def restart(interface: str, pairs: int, folder: Path) -> None:
    """The first token of a prompt of 1,750 tokens, after a restart."""
    options = {**options_of(interface, folder / "disk"), "block_size": BLOCK_TOKENS}
    prompts = [text[:1750] for text in TEXTS[:pairs]]
    prefill, restored, cached = [], [], []
    engine = Engine(folder / "log", **options)
    engine.texts([TEXTS[-1][:500]])
    for prompt in prompts:
        prefill.append(first_token(engine, [prompt]))
        # vLLM starts the stores of the offloading spec with the next step.
        engine.texts([TEXTS[-2][:200]])
        engine.call("saved")
    engine.close()
    for prompt in prompts:
        engine = Engine(folder / "log", **options)
        engine.texts([TEXTS[-1][500:1000]])
        result = engine.call("generate", prompts=[prompt], tokens=1)
        restored.append(float(result["first"][0]))
        cached.append(int(result["answers"][0]["cached"]))
        engine.close()
    line("first_token_restart", interface, statistics.median(prefill) / statistics.median(restored),
         "prefill", ">= 10", prefill_s=prefill, restored_s=restored, cached=cached)
    if any(got < 0.8 * len(prompt) for got, prompt in zip(cached, prompts)):
        raise SystemExit(f"{interface}: after the restart {cached} of 1,750 tokens each came from the cache, but at "
                         "least 80 % must: first_token_restart has measured misses")


def throughput(interface: str, pairs: int, folder: Path) -> None:
    """Prompts that share nothing, eight at once; each engine in turn."""
    drawn = random.Random(3)
    sides = {name: Engine(folder / f"log-{name}", **options_of(name, folder / "disk"))
             for name in ("alone", interface)}
    seconds: Dict[str, List[float]] = {name: [] for name in sides}
    for turn in range(pairs + 1):
        batch = [[drawn.randrange(1000, 40000) for _ in range(400)] for _ in range(8)]
        for name in sorted(sides, reverse=turn % 2 == 0):
            spent = sides[name].call("generate", prompts=batch, tokens=64)["seconds"]
            if turn:
                seconds[name].append(spent)
    for engine in sides.values():
        engine.close()
    ratios = [alone / ours for alone, ours in zip(seconds["alone"], seconds[interface])]
    line("throughput", interface, statistics.median(ratios), "the engine alone", ">= 0.99",
         pairs=[round(ratio, 3) for ratio in sorted(ratios)])


def shared(interface: str, pairs: int, folder: Path) -> None:
    """A prefix of 3,968 tokens on disk: what loading adds to one request, and to the last of fifty."""
    prefix = (TEXTS[0] + TEXTS[1])[:3968]
    options = {"max_model_len": 4200, **options_of(interface, folder / "disk")}
    engine = Engine(folder / "log", **options)
    engine.texts([prefix + [100]])
    engine.call("saved")
    engine.close()
    added: Dict[int, List[float]] = {1: [], 50: []}
    read: List[float] = []
    for turn in range(2 * pairs):
        count = (1, 50)[turn % 2]
        prompts = [prefix + [100 + i, 7] for i in range(count)]
        engine = Engine(folder / "log", **options)
        engine.texts([TEXTS[-1][:500]])
        before = engine.call("counts")["disk_read_bytes"]
        loaded = first_token(engine, prompts, 2)
        read.append((engine.call("counts")["disk_read_bytes"] - before) / (3968 * TOKEN_BYTES))
        warm = statistics.median(first_token(engine, [one[:-1] + [9 + n] for one in prompts], 2)
                                 for n in range(3))
        added[count].append(loaded - warm)
        engine.close()
    one, many = statistics.median(added[1]), statistics.median(added[50])
    line("shared_prefix_50", interface, many / one, "one request", "<= 1.1", one_s=added[1],
         fifty_s=added[50], prefixes_read=max(read))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", default="restart,throughput,shared")
    parser.add_argument("--interface", default="connector,spec")
    given = parser.parse_args()
    bars = {"restart": restart, "throughput": throughput, "shared": shared}
    for name in given.only.split(","):
        for interface in given.interface.split(","):
            with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
                bars[name](interface, given.pairs, Path(folder))


if __name__ == "__main__":
    main()
