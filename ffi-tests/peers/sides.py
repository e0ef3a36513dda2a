"""What the comparisons of kvtier with other systems share: memory, rounds in turn, output.

A side has `versions`, and calls that take the number of a round and return seconds. All
lines are JSON objects with `group`, `name`, `side`, `value`, `unit`, `ratio` and `versions`; `ratio`
is the side's rate divided by the baseline's, the median of the rounds. A side that cannot be
measured has no value, and the reason as `skip`.
"""

import contextlib
import ctypes
import importlib.metadata
import json
import mmap
import os
import pathlib
import statistics
import subprocess
import sys
import time


#: Units of rates.
UNITS = {"GiB/s": 1 << 30, "Gflop/s": 1e9}


def version(*packages):
    """The installed versions of packages."""
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def line(group, name, side, value=None, unit="GiB/s", ratio=None, versions=None, **others):
    out = {"group": group, "name": name, "side": side, "value": value and round(value, 3),
           "unit": unit, "ratio": ratio and round(ratio, 3), "versions": versions or {}}
    print(json.dumps(out | others), flush=True)


def memory(nbytes):
    """Mapped memory of huge pages where possible, with random bytes."""
    area = mmap.mmap(-1, nbytes)
    area.madvise(mmap.MADV_HUGEPAGE)
    piece = os.urandom(1 << 20)
    for at in range(0, nbytes, len(piece)):
        part = piece[:nbytes - at]
        area[at:at + len(part)] = part
        # No two pieces are equal.
        area[at:at + 8] = at.to_bytes(8, "little")
    return area


def address(area):
    return ctypes.addressof(ctypes.c_char.from_buffer(area))


def timed(act):
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


class Check:
    """Whether gets returned the bytes that were put."""

    def __init__(self, area):
        self.area, self.whole = area, bytes(area)

    def clear(self):
        ctypes.memset(address(self.area), 0, len(self.area))

    def verify(self, side):
        if self.area[:] != self.whole:
            raise RuntimeError(f"{side} returned wrong bytes")


def opened(makes):
    """Opens named sides; the name of one that cannot be opened is returned with the reason."""
    sides, skipped = [], []
    for name, make in makes:
        try:
            side = make()
            side.name = name
            sides.append(side)
        except Exception as error:
            print(f"SKIP {name}: {error}", file=sys.stderr)
            skipped.append((name, f"{type(error).__name__}: {error}"[:300]))
    return sides, skipped


def play(sides, ops, warm, rounds):
    """The seconds of each side and op, of rounds in which the order of the sides rotates."""
    times = {(side.name, op): [] for side in sides for op in ops}
    failed = {}
    for number in range(warm + rounds):
        turn = number % len(sides)
        for side in sides[turn:] + sides[:turn]:
            for op in ops if side.name not in failed else ():
                try:
                    took = getattr(side, op)(number)
                except Exception as error:
                    print(f"{side.name}, {op}: {error}", file=sys.stderr)
                    failed[side.name] = f"{type(error).__name__}: {error}"[:300]
                    break
                if number >= warm:
                    times[side.name, op].append(took)
    return times, failed


def contest(group, makes, phases, work, warm, rounds, unit="GiB/s", **dims):
    """Measures all sides in turn; the first one is the baseline. `work` is what each op does, in
    bytes or flop. The ops of a phase follow each other in each round; phases follow each other."""
    sides, skipped = opened(makes)
    for ops in phases:
        times, failed = play(sides, ops, warm, rounds)
        show(group, (sides, skipped, failed), times, work / UNITS[unit], unit, dims)
    for side in sides:
        with contextlib.suppress(Exception):
            side.close()


def show(group, all_sides, times, work, unit, dims):
    sides, skipped, failed = all_sides
    for op in dict.fromkeys(op for _, op in times):
        base = times[sides[0].name, op]
        for side in sides:
            name, took = op.replace("_", " "), times[side.name, op]
            if side.name in failed or not took:
                line(group, name, side.name, versions=side.versions, **dims,
                     skip=failed.get(side.name, "no round was measured"))
                continue
            ratios = [raw / one for raw, one in zip(base, took)]
            line(group, name, side.name, work / statistics.median(took), unit,
                 statistics.median(ratios), side.versions, **dims,
                 spread=[round(min(ratios), 2), round(max(ratios), 2)])
        for name, why in skipped:
            line(group, op.replace("_", " "), name, skip=why, **dims)


def kvtier_versions(kvtier):
    root = pathlib.Path(__file__).resolve().parent
    commit = subprocess.run(["git", "describe", "--always", "--dirty=+", "--exclude=*"], cwd=root,
                            capture_output=True, text=True).stdout.strip()
    return {"kvtier": f"{kvtier.version()} {commit}".strip()}
