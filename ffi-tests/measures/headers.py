#!/usr/bin/env python3
"""Measures how the C headers read:

    headers.py [--list] [--check]

    --list   prints the distance of each function to each struct it takes
    --check  exits 1 if a bar is missed

Distances are lines from a function's declaration to that of a struct it takes, over the headers in
the order of include/kvtier/kvtier.h.
"""

import json
import re
import statistics
import sys
from pathlib import Path

INCLUDE = Path(__file__).resolve().parents[2] / "include" / "kvtier"
#: What an engine reads that only keeps KV.
KV_ONLY = ["kvtier", "base", "runtime", "memory", "store", "session"]


def main():
    described = json.loads((INCLUDE / "kvtier.json").read_text(encoding="utf-8"))
    lines, places, start = {}, {}, 0
    comments = total = 0
    for header in described["headers"]:
        text = (INCLUDE / f"{header['name']}.h").read_text(encoding="utf-8").split("\n")
        lines[header["name"]] = len(text) - 1
        total += len(text) - 1
        comments += sum(1 for line in text if re.match(r"\s*(///|/\*)", line))
        for at, line in enumerate(text):
            if found := re.match(r"typedef struct (kvt_\w+) \{", line):
                places[found[1]] = start + at
            elif line and not line.startswith((" ", "/", "#", "typedef")) and (
                found := re.search(r"\b(kvt_\w+)\(", line)
            ):
                places[found[1]] = start + at
        start += len(text)
    pairs = []
    for item in (item for header in described["headers"] for item in header["items"]):
        if item["kind"] == "function":
            for param in item["params"]:
                if param["type"] in places:
                    distance = abs(places[item["name"]] - places[param["type"]])
                    pairs.append((distance, item["name"], param["type"]))
    if "--list" in sys.argv:
        for pair in sorted(pairs, reverse=True):
            print(*pair)
    lines["kvtier"] = (INCLUDE / "kvtier.h").read_text(encoding="utf-8").count("\n")
    functions = sum(
        item["kind"] == "function" for header in described["headers"] for item in header["items"]
    )
    kv_only = sum(lines[name] for name in KV_ONLY)
    median = statistics.median(pair[0] for pair in pairs)
    print("lines:", ", ".join(f"{name} {count}" for name, count in lines.items()))
    print(f"an engine that keeps KV reads {kv_only} lines (at most 3000)")
    print(f"{functions} functions, {total / functions:.1f} lines a function")
    print(f"comments: {comments / total:.0%} of the lines (at least 40 %)")
    print(f"from a function to a struct it takes: median {median:.0f} lines (at most 150), "
          f"{len(pairs)} pairs")
    missed = kv_only > 3000 or comments < 0.4 * total or median > 150 or len(pairs) < 100
    if missed and "--check" in sys.argv:
        sys.exit("headers: a bar is missed")


if __name__ == "__main__":
    main()
