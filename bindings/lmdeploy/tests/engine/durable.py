"""Child process of `test_disk_outlives_the_process`: FOLDER shutdown | kill | exit | resume."""

from __future__ import annotations

import os
import signal
import sys

import conftest  # noqa: F401: makes lmdeploy importable
from harness import BLOCK, Engine, bytes_of, fill, prompt, spoil


def main(folder: str, how: str) -> None:
    """Saves blocks, then ends as `how` says; "resume" loads the saved blocks."""
    extra = {"host_bytes": 64 << 20, "disk_path": folder, "disk_bytes": 256 << 20,
             "level": "durable", "lookup_async": False}
    engine = Engine(extra)
    if how == "resume":
        spoil(engine.caches[0])
    sequence = engine.admit(0, prompt(4))
    table = engine.table(sequence)[:4]
    if how == "resume":
        got = bytes_of(engine.caches[0], table)
        fill(engine.caches[0], table, 1)
        print(sequence.num_history_ids, got == bytes_of(engine.caches[0], table))
        engine.close()
        return
    fill(engine.caches[0], table, 1)
    engine.step([sequence], (4 * BLOCK,))
    if how != "shutdown":  # the saves complete, nothing is closed
        engine.end(0)
        engine.settle()
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return
    engine.close()  # while saves are in progress


main(*sys.argv[1:])
