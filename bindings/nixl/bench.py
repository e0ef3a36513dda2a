#!/usr/bin/env python3
"""The plugin beside NIXL's POSIX plugin, in one process, on one disk:

    bench.py PLUGINS DIR [--rounds N]     PLUGINS has libplugin_KVTIER.so; DIR is on the disk to measure

Each round transfers 64 objects of 1 MiB on each side, in an order that rotates, with bytes that no round
before had: a WRITE, then a READ that is compared. POSIX writes a file through the page cache. kvtier writes to
host memory (and checks sums), to a disk with O_DIRECT (level disk), and to a shared directory (level remote).
Its READs are from host memory but for `remote`, whose reader is another store without the objects. Prints JSON, a
line for each side and op: the median of MiB/s, and the median of the rounds' ratios to POSIX."""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import sys
import time

OBJECTS, BYTES = 64, 1 << 20
TOTAL_MIB = OBJECTS * BYTES >> 20


def use_plugins(folder: pathlib.Path, work: pathlib.Path) -> None:
    """Restarts this program with a folder that has NIXL's plugins as well as kvtier's."""
    import nixl

    site = pathlib.Path(nixl._pkg.__file__).parents[1]
    libraries = next(site.glob(".nixl_*.mesonpy.libs"))
    both = work / "plugins"
    both.mkdir(parents=True)
    for file in [*(libraries / "plugins").iterdir(), folder / "libplugin_KVTIER.so"]:
        (both / file.name).symlink_to(file.resolve())
    paths = [str(libraries), *map(str, site.glob("nixl_*.libs"))]
    os.environ.update(NIXL_PLUGIN_DIR=str(both), LD_LIBRARY_PATH=":".join(paths))
    os.execv(sys.executable, [sys.executable, *sys.argv])


class Side:
    def __init__(self, name, plugin, params, kind, memory):
        from nixl._api import nixl_agent, nixl_agent_config

        self.name, self.kind, self.memory = name, kind, memory
        self.agent = nixl_agent(name, nixl_agent_config(backends=[]))
        self.agent.create_backend(plugin, params)
        self.agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
        self.local = self.agent.get_xfer_descs(
            [(memory.ctypes.data + at * BYTES, BYTES, 0) for at in range(OBJECTS)], "DRAM")

    def transfer(self, op, number):
        if self.kind == "FILE":
            where = [(at * BYTES, BYTES, self.file, "") for at in range(OBJECTS)]
        else:
            where = [(0, BYTES, number * OBJECTS + at + 1, f"{number}/{at}") for at in range(OBJECTS)]
        registered = self.agent.register_memory(where, self.kind)
        handle = self.agent.initialize_xfer(op, self.local, registered.trim(), self.name)
        start = time.perf_counter()
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        took = time.perf_counter() - start
        self.agent.release_xfer_handle(handle)
        self.agent.deregister_memory(registered)
        if state != "DONE":
            raise RuntimeError(f"{self.name}: a transfer ended as {state}")
        return took


def measure(sides, memory, rounds):
    import numpy as np

    times = {(name, op): [] for name, _, _ in sides for op in ("WRITE", "READ")}
    draw = np.random.default_rng(1)
    for number in range(rounds + 1):
        turn = number % len(sides)
        for name, writer, reader in sides[turn:] + sides[:turn]:
            want = draw.integers(0, 256, memory.nbytes, dtype=np.uint8)
            memory[:] = want
            took = {"WRITE": writer.transfer("WRITE", number)}
            memory[:] = 0
            took["READ"] = reader.transfer("READ", number)
            if not (memory == want).all():
                raise RuntimeError(f"{name}: wrong bytes")
            for op, seconds in took.items() if number else ():
                times[name, op].append(seconds)
    return times


def main():
    parser = argparse.ArgumentParser(description="the plugin beside NIXL's POSIX plugin")
    parser.add_argument("plugins", type=pathlib.Path)
    parser.add_argument("dir", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    work = args.dir / "nixl-bench"
    if os.environ.get("NIXL_PLUGIN_DIR") != str(work / "plugins"):
        shutil.rmtree(work, ignore_errors=True)
        use_plugins(args.plugins, work)
    import numpy as np

    memory = np.zeros(OBJECTS * BYTES, np.uint8)
    (work / "shared").mkdir()
    remote = f'store(host=1GiB, remote=dir(path="{work}/shared", timeout=600000))'
    disk = f'store(host=1GiB, disk=disk(path="{work}/disk", bytes=4GiB))'
    posix = Side("POSIX", "POSIX", {}, "FILE", memory)
    posix.file = os.open(work / "file", os.O_RDWR | os.O_CREAT, 0o600)
    sides = [("POSIX", posix, posix)]
    for name, spec, level in (("kvtier ram", "store(host=1GiB)", "ram"), ("kvtier disk", disk, "disk"),
                              ("kvtier remote", remote, "remote")):
        side = Side(name, "KVTIER", {"spec": spec, "level": level}, "OBJ", memory)
        # Other parameters: a store of its own.
        other = {"spec": spec, "level": level, "lookup_s": "60"}
        reader = Side(name + " reader", "KVTIER", other | {"spec": spec.replace("1GiB", "1025MiB", 1)},
                      "OBJ", memory) if level == "remote" else side
        sides.append((name, side, reader))
    try:
        times = measure(sides, memory, args.rounds)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    for (name, op), took in times.items():
        ratios = [base / one for base, one in zip(times["POSIX", op], took)]
        print(json.dumps({
            "side": name, "op": op, "MiB/s": round(TOTAL_MIB / statistics.median(took)),
            "ratio": round(statistics.median(ratios), 2),
            "spread": [round(min(ratios), 2), round(max(ratios), 2)]}), flush=True)


if __name__ == "__main__":
    main()
