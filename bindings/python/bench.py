#!/usr/bin/env python3
"""Measures the cost of the binding over C: single calls, and a batch of blocks.

    bench.py [--quick] [--rounds N]

Prints one JSON object per line, with the keys of `kvtier-bench --json`.

- A Python call and the same call in a C loop are timed in alternation, on the same handles in one
  process. The value is the median of the differences. Without a C compiler, or the header, only
  the Python call is timed, without a verdict.
- A batch is timed beside the same native call with prepared structs. Of two consecutive rounds
  each side goes first once.

A missed bar is reported, and is no failure.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

HERE = Path(__file__).resolve().parent
if sys.path and Path(sys.path[0]).resolve() == HERE:
    del sys.path[0]  # times the installed package; the one beside this file has no library

import kvtier  # noqa: E402
from kvtier import _lib  # noqa: E402

OVERHEAD_NS = 2000.0
BATCH, BLOCK_BYTES = 1000, 64 << 10
BATCH_GOAL = 1.05


def line(bar: str, value: Optional[float], unit: str, baseline: str,
         baseline_value: Optional[float], goal: Optional[float], note: str = "") -> None:
    """Prints one bar; without a value or a baseline there is no verdict."""
    known = value is not None and baseline_value is not None and goal is not None
    shown: Dict[str, Any] = {
        "group": "python", "bar": bar, "value": value, "unit": unit, "baseline": baseline,
        "baseline_value": baseline_value, "goal": goal, "better": "lower",
        "ok": value <= goal if known and value is not None and goal is not None else None}
    if note:
        shown["note"] = note
    print(json.dumps(shown), flush=True)


class Call(NamedTuple):
    """A timed call: the Python function, and the C function with its arguments."""

    name: str
    python: Callable[[], object]
    native: str
    args: Tuple[Any, ...]


def native_library(where: Path) -> Tuple[Optional[ctypes.CDLL], str]:
    """Builds the C loops against the loaded library; returns them, or the reason for none."""
    compiler = shutil.which("cc")
    include = HERE.parent.parent / "include"
    if compiler is None or not (include / "kvtier" / "kvtier.h").exists():
        return None, "no C compiler, or no header"
    target = where / "bench_native.so"
    compiled = subprocess.run(
        [compiler, "-O2", "-shared", "-fPIC", f"-I{include}", str(HERE / "bench_native.c"),
         _lib.lib._name, "-o", str(target)], capture_output=True, text=True)
    if compiled.returncode:
        return None, f"the C compiler failed: {compiled.stderr.strip()[:200]}"
    return ctypes.CDLL(str(target)), ""


def calls(runtime: kvtier.Runtime) -> Iterator[Call]:
    """Yields frequent calls. The objects of a call live until the next call is requested."""
    yield Call("now", runtime.now_ns, "bench_now", (runtime._raw,))
    with runtime.buffer(4096) as buffer:
        op = runtime.submit(kvtier.Work.checksum(buffer))
        op.wait()
        yield Call("op_info", op.info, "bench_op_info", (op._raw,))
        op.close()
    with kvtier.ReadyEvent() as event:
        yield Call("event_query", lambda: event.is_signalled, "bench_event", (event._raw,))
    with kvtier.Policy("lru", max_objects=1024) as policy:
        policy.insert(list(range(1, 65)))
        ids = array.array("Q", range(1, 17))
        room = (ctypes.c_uint64 * len(ids))(*ids)
        given = (policy._raw, room, ctypes.c_uint64(len(ids)))
        yield Call("policy_touch_16", lambda: policy.touch(ids), "bench_touch", given)
        try:
            import numpy
        except ImportError:
            pass
        else:
            numbers = numpy.array(ids, dtype=numpy.uint64)
            yield Call("policy_touch_16_numpy", lambda: policy.touch(numbers), "bench_touch", given)
    with runtime.queue() as queue:
        yield Call("queue_poll", queue.poll, "bench_poll", (queue._raw,))


def timed(call: Callable[[], object], count: int) -> float:
    """Returns the nanoseconds per call, without those of the loop."""
    spins = range(count)
    begin = time.perf_counter_ns()
    for _ in spins:
        pass
    empty = time.perf_counter_ns() - begin
    begin = time.perf_counter_ns()
    for _ in spins:
        call()
    return (time.perf_counter_ns() - begin - empty) / count


def bench_calls(rounds: int, count: int) -> None:
    """Measures the cost of calls over the same calls in C."""
    with tempfile.TemporaryDirectory() as where, kvtier.Runtime(workers=1) as runtime:
        native, why = native_library(Path(where))
        for call in calls(runtime):
            python, c = [], []
            for _ in range(rounds):
                python.append(timed(call.python, count))
                if native is not None:
                    loop = getattr(native, call.native)
                    loop.restype = ctypes.c_double
                    spent = loop(*call.args, ctypes.c_uint64(count))
                    assert spent >= 0, (call.name, spent)
                    c.append(spent)
            if c:
                over = statistics.median(p - n for p, n in zip(python, c))
                line(f"call_{call.name}", round(over, 1), "ns over C", "the same call in C, ns",
                     round(statistics.median(c), 1), OVERHEAD_NS)
            else:
                line(f"call_{call.name}", round(statistics.median(python), 1), "ns",
                     "the same call in C, ns", None, OVERHEAD_NS, why)


class Batch:
    """A store with a batch of blocks, and the same batch prepared for C."""

    def __init__(self, runtime: kvtier.Runtime) -> None:
        room = 2 * BATCH * (BLOCK_BYTES + 4096)
        self.store = kvtier.Store(runtime, f"store(host={room})")
        self.blocks = kvtier.Blocks(self.store, kvtier.Identity(model=b"bench"), [BLOCK_BYTES])
        self.names = [f"{i:016x}".encode() for i in range(BATCH)]
        self.memory = bytearray(b"\5") * (BATCH * BLOCK_BYTES)
        self.pool = kvtier.Pool(self.memory, BLOCK_BYTES)
        self.order = list(range(BATCH))
        self.ready, self.places = kvtier.Names(self.names), self.pool.at(self.order)
        self.runtime = runtime

    def put(self) -> None:
        """Stores the batch through the binding."""
        with self.blocks.put(self.names, self.pool.at(self.order)) as op:
            assert op.result().value == BATCH

    def get(self) -> None:
        """Loads the batch through the binding."""
        with self.blocks.get(self.names, self.pool.at(self.order)) as op:
            assert op.result().value == BATCH

    def get_ready(self) -> None:
        """Loads the batch through the binding, with prepared names and addresses."""
        with self.blocks.get(self.ready, self.places) as op:
            assert op.result().value == BATCH

    def clear(self) -> None:
        """Removes the blocks, so that the next put stores all of them."""
        self.blocks.clear(10)

    def prepared(self) -> Tuple[Callable[[Any], Any], List[Any]]:
        """Returns a function that runs one native transfer with prepared structs, and the objects
        to keep."""
        abi = kvtier.abi
        names = kvtier.Names(self.names)
        first = ctypes.addressof(ctypes.c_ubyte.from_buffer(self.memory))
        table = (ctypes.c_void_p * BATCH)(*(first + i * BLOCK_BYTES for i in range(BATCH)))
        rows = (abi.kvt_view_t * 1)()
        rows[0].pages = ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p))
        rows[0].page_count, rows[0].page_tokens, rows[0].run_bytes = BATCH, 1, BLOCK_BYTES
        c = abi.kvt_blocks_t()
        c.names = ctypes.pointer(names._c)
        c.k, c.stride_bytes = rows, ctypes.sizeof(abi.kvt_view_t)
        opts, session = abi.kvt_submit_opts_t(), self.blocks._session._raw
        info = abi.kvt_op_info_t()

        def transfer(call: Any) -> None:
            op, err = abi.kvt_op_p(), abi.kvt_error_p()
            _lib.check_err(call(session, ctypes.byref(c), ctypes.byref(opts), ctypes.byref(op),
                                ctypes.byref(err)), err)
            _lib.check(_lib.lib.kvt_op_wait(op, abi.KVT_OP_RELEASED, 0))
            _lib.check(_lib.lib.kvt_op_info(op, ctypes.byref(info)))
            # The binding's side checks the same.
            assert info.status == abi.KVT_OK and info.value == BATCH
            _lib.check(_lib.lib.kvt_op_free(ctypes.byref(op)))

        return transfer, [names, table, rows, c, opts]

    def close(self) -> None:
        """Closes the blocks and the store."""
        self.blocks.close()
        self.store.close()


def once(call: Callable[[], object]) -> float:
    """Returns the time of one call in nanoseconds."""
    begin = time.perf_counter_ns()
    call()
    return float(time.perf_counter_ns() - begin)


def bench_batch(rounds: int) -> None:
    """Measures a batch through `Blocks` beside the same native call."""
    with kvtier.Runtime(workers=2) as runtime:
        batch = Batch(runtime)
        transfer, _kept = batch.prepared()
        lib = _lib.lib
        ways: Dict[str, Tuple[Callable[[], object], Callable[[], object]]] = {
            "put": (batch.put, lambda: transfer(lib.kvt_session_put_blocks)),
            "get": (batch.get, lambda: transfer(lib.kvt_session_get_blocks)),
            "get_ready": (batch.get_ready, lambda: transfer(lib.kvt_session_get_blocks))}
        found: Dict[str, List[Tuple[float, float]]] = {name: [] for name in ways}
        for turn in range(2 * rounds + 1):
            for name, both in ways.items():
                spent = [0.0, 0.0]
                # The order alternates, because the second call finds warm caches.
                for which in ((0, 1), (1, 0))[turn % 2]:
                    if name == "put":
                        batch.clear()
                    spent[which] = once(both[which])
                if turn:  # the first round warms up
                    found[name].append((spent[0], spent[1]))
        for name, pairs in found.items():
            # Pairs of rounds: each side goes first in one of them.
            ratio = statistics.median((a[0] + b[0]) / (a[1] + b[1])
                                      for a, b in zip(pairs[::2], pairs[1::2]))
            line(f"batch_{name}_{BATCH}", round(ratio, 4), "x",
                 f"the same native call, {BATCH} blocks of {BLOCK_BYTES >> 10} KiB, ms",
                 round(statistics.median(n for _, n in pairs) / 1e6, 3), BATCH_GOAL)
        batch.close()


def main() -> int:
    options = argparse.ArgumentParser(description="Measures the cost of the binding over C.")
    options.add_argument("--quick", action="store_true", help="takes less than a minute")
    options.add_argument("--rounds", type=int, default=0)
    given = options.parse_args()
    rounds = given.rounds or (9 if given.quick else 31)
    # Many short rounds: most of them end before the kernel schedules another process.
    bench_calls(40 * rounds, 250)
    bench_batch(rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
