"""Measures the cost of TieredCache against the stock cache: medians of interleaved runs.

    python bindings/transformers/bench.py [--quick] [MODEL...]

Prints JSON lines. The bar applies to wall time. On a busy machine each wake-up of a thread
preempts the generating one, so the CPU time of that thread and of the process are printed too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Callable, List, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parent / "tests"))

import torch
from kvtier_transformers import Tiers
from tiny_models import MAKERS, ids, make
from transformers import DynamicCache

GOAL = 1.03
PROMPT, WARM, WINDOWS, WINDOW = 128, 8, 2, 256
CLOCKS: List[Tuple[str, Callable[[], int]]] = [
    ("", time.perf_counter_ns), (", CPU time of the thread", time.thread_time_ns),
    (", CPU time of the process", time.process_time_ns)]


def line(bar: str, value: float, baseline_ns: float, goal: float) -> None:
    """Prints one bar: a ratio and its baseline in nanoseconds per token."""
    print(json.dumps({"group": "transformers", "bar": bar, "value": round(value, 4),
                      "unit": "ratio", "baseline": "DynamicCache, ns a token",
                      "baseline_value": round(baseline_ns), "goal": goal, "better": "lower",
                      "ok": value <= goal}), flush=True)


def pairs(name: str, rounds: int) -> Tuple[List[List[float]], List[List[float]]]:
    """Returns for each clock the ratios of our cache to the stock cache, and the stock cache's ns
    per token.

    The two caches take steps in turns. Each ratio covers as many tokens as one put, so that it
    includes the put's cost. Each chunk is new to the store."""
    model = make(name)
    ratios: List[List[float]] = [[] for _ in CLOCKS]
    stock_ns: List[List[float]] = [[] for _ in CLOCKS]
    with Tiers(model, "store(host=256MiB)") as tiers, torch.no_grad():
        for number in range(rounds):
            ours, stock = tiers.cache(), DynamicCache(config=model.config)
            tokens = ids(PROMPT + WARM + WINDOWS * WINDOW, seed=1000 + number)
            for cache in (ours, stock):
                model(input_ids=tokens[:, :PROMPT], past_key_values=cache)
            spent = [{id(ours): 0, id(stock): 0} for _ in CLOCKS]
            for step in range(WARM + WINDOWS * WINDOW):
                one = tokens[:, PROMPT + step:PROMPT + step + 1]
                for cache in (ours, stock) if step % 2 else (stock, ours):
                    begin = [clock() for _, clock in CLOCKS]
                    model(input_ids=one, past_key_values=cache)
                    for at, (_, clock) in enumerate(CLOCKS):
                        spent[at][id(cache)] += clock() - begin[at]
                if step >= WARM and (step - WARM) % WINDOW == WINDOW - 1:
                    for at, took in enumerate(spent):
                        ratios[at].append(took[id(ours)] / took[id(stock)])
                        stock_ns[at].append(took[id(stock)] / WINDOW)
                if step < WARM or (step - WARM) % WINDOW == WINDOW - 1:
                    spent = [{id(ours): 0, id(stock): 0} for _ in CLOCKS]
            assert ours.unknown == "" and ours.stats()["failed_puts"] == 0
    return ratios, stock_ns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("models", nargs="*", help=f"{', '.join(MAKERS)} (default: all)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {name: pairs(name, 2 if args.quick else 8) for name in args.models or MAKERS}
    for at, (clock, _) in enumerate(CLOCKS):
        for name, (ratios, stock_ns) in found.items():
            line(f"full-device decode, {name}{clock}", statistics.median(ratios[at]),
                 statistics.median(stock_ns[at]), GOAL)
        line(f"full-device decode, all models{clock}",
             statistics.median(one for ratios, _ in found.values() for one in ratios[at]),
             statistics.median(one for _, base in found.values() for one in base[at]), GOAL)


if __name__ == "__main__":
    main()
