#!/usr/bin/env python3
"""What the binding costs over C: calls, and a batch of blocks.

    bench.py [--quick] [--rounds N]

Prints an object a line, with the keys of `kvtier-bench --json`. A call of Python's is timed
beside the same call in a loop of C's, on the same handles in the same process, turn about: the
value is the median of the differences. Without a C compiler, or the header, the call alone is
timed, and there is no verdict. A batch is timed beside the same native call with structs that
were filled before, twice in a row, each going first once. Bars that are missed are told, and
fail nothing.
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
    del sys.path[0]  # what is installed is timed: the package beside this file has no library

import kvtier  # noqa: E402
from kvtier import _lib  # noqa: E402

OVERHEAD_NS = 2000.0
BATCH, BLOCK_BYTES = 1000, 64 << 10
BATCH_GOAL = 1.05


def line(bar: str, value: Optional[float], unit: str, baseline: str,
         baseline_value: Optional[float], goal: Optional[float], note: str = "") -> None:
    """One bar; without a value or a baseline there is no verdict."""
    known = value is not None and baseline_value is not None and goal is not None
    shown: Dict[str, Any] = {
        "group": "python", "bar": bar, "value": value, "unit": unit, "baseline": baseline,
        "baseline_value": baseline_value, "goal": goal, "better": "lower",
        "ok": value <= goal if known and value is not None and goal is not None else None}
    if note:
        shown["note"] = note
    print(json.dumps(shown), flush=True)


class Call(NamedTuple):
    """A call that is timed: here, and in C with its arguments."""

    name: str
    python: Callable[[], object]
    native: str
    args: Tuple[Any, ...]


def native_library(where: Path) -> Tuple[Optional[ctypes.CDLL], str]:
    """The loops of C, built beside the library that is loaded here; or why there are none."""
    compiler = shutil.which("cc")
    include = HERE.parent.parent / "include"
    if compiler is None or not (include / "kvtier" / "kvtier.h").exists():
        return None, "no C compiler, or no header"
    target = where / "bench_native.so"
    made = subprocess.run(
        [compiler, "-O2", "-shared", "-fPIC", f"-I{include}", str(HERE / "bench_native.c"),
         _lib.lib._name, "-o", str(target)], capture_output=True, text=True)
    if made.returncode:
        return None, f"the compiler said: {made.stderr.strip()[:200]}"
    return ctypes.CDLL(str(target)), ""


def calls(runtime: kvtier.Runtime) -> Iterator[Call]:
    """Hot calls, each with its objects, which stay until the next is asked for."""
    yield Call("now", runtime.now_ns, "bench_now", (runtime._raw,))
    with runtime.buffer(4096) as buffer:
        op = runtime.submit(kvtier.Work.checksum(buffer))
        op.wait()
        yield Call("op_info", op.info, "bench_op_info", (op._raw,))
        op.close()
    with kvtier.Event() as event:
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
    """Nanoseconds a call, less those of the loop."""
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
    """What a call costs over the same in C."""
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
    """A store with a batch of blocks in it, and the same batch as C wants it."""

    def __init__(self, runtime: kvtier.Runtime) -> None:
        room = 2 * BATCH * (BLOCK_BYTES + 4096)
        self.store = kvtier.Store(runtime, f"store(host={room})")
        self.blocks = kvtier.Blocks(self.store, kvtier.Identity(model=b"bench"), [BLOCK_BYTES])
        self.names = [f"{i:016x}".encode() for i in range(BATCH)]
        self.memory = bytearray(b"\5") * (BATCH * BLOCK_BYTES)
        self.pool = kvtier.Pool(self.memory, BLOCK_BYTES)
        self.order = list(range(BATCH))
        self.ready, self.there = kvtier.Names(self.names), self.pool.at(self.order)
        self.runtime = runtime

    def put(self) -> None:
        """Through the binding."""
        with self.blocks.put(self.names, self.pool.at(self.order)) as op:
            assert op.result().value == BATCH

    def get(self) -> None:
        """Through the binding."""
        with self.blocks.get(self.names, self.pool.at(self.order)) as op:
            assert op.result().value == BATCH

    def get_ready(self) -> None:
        """The same with names and places that were made ready before."""
        with self.blocks.get(self.ready, self.there) as op:
            assert op.result().value == BATCH

    def clear(self) -> None:
        """Leaves nothing for the next put to find."""
        self.blocks.clear(10)

    def prepared(self) -> Tuple[Callable[[Any], Any], List[Any]]:
        """A function that makes one native move and waits for it, with structs that stand."""
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

        def move(call: Any) -> None:
            op, err = abi.kvt_op_p(), abi.kvt_error_p()
            _lib.check_err(call(session, ctypes.byref(c), ctypes.byref(opts), ctypes.byref(op),
                                ctypes.byref(err)), err)
            _lib.check(_lib.lib.kvt_op_wait(op, abi.KVT_OP_RELEASED, 0))
            _lib.check(_lib.lib.kvt_op_info(op, ctypes.byref(info)))
            assert info.status == abi.KVT_OK and info.value == BATCH  # as the binding's side asks
            _lib.check(_lib.lib.kvt_op_free(ctypes.byref(op)))

        return move, [names, table, rows, c, opts]

    def close(self) -> None:
        """Closes all of it."""
        self.blocks.close()
        self.store.close()


def once(call: Callable[[], object]) -> float:
    """How long it takes, in nanoseconds."""
    begin = time.perf_counter_ns()
    call()
    return float(time.perf_counter_ns() - begin)


def bench_batch(rounds: int) -> None:
    """A batch through `Blocks`, beside the same native call."""
    with kvtier.Runtime(workers=2) as runtime:
        batch = Batch(runtime)
        move, _kept = batch.prepared()
        lib = _lib.lib
        ways: Dict[str, Tuple[Callable[[], object], Callable[[], object]]] = {
            "put": (batch.put, lambda: move(lib.kvt_session_put_blocks)),
            "get": (batch.get, lambda: move(lib.kvt_session_get_blocks)),
            "get_ready": (batch.get_ready, lambda: move(lib.kvt_session_get_blocks))}
        found: Dict[str, List[Tuple[float, float]]] = {name: [] for name in ways}
        for turn in range(2 * rounds + 1):
            for name, both in ways.items():
                spent = [0.0, 0.0]
                # Who goes first changes: the second finds caches warm.
                for which in ((0, 1), (1, 0))[turn % 2]:
                    if name == "put":
                        batch.clear()
                    spent[which] = once(both[which])
                if turn:  # the first warms up
                    found[name].append((spent[0], spent[1]))
        for name, pairs in found.items():
            # Of two turns at a time: each side went first in one of them.
            ratio = statistics.median((a[0] + b[0]) / (a[1] + b[1])
                                      for a, b in zip(pairs[::2], pairs[1::2]))
            line(f"batch_{name}_{BATCH}", round(ratio, 4), "x",
                 f"the same native call, {BATCH} blocks of {BLOCK_BYTES >> 10} KiB, ms",
                 round(statistics.median(n for _, n in pairs) / 1e6, 3), BATCH_GOAL)
        batch.close()


def main() -> int:
    options = argparse.ArgumentParser(description="What the binding costs over C.")
    options.add_argument("--quick", action="store_true", help="ends within a minute")
    options.add_argument("--rounds", type=int, default=0)
    given = options.parse_args()
    rounds = given.rounds or (9 if given.quick else 31)
    # Short turns, and many: most end before the kernel gives the core to somebody else.
    bench_calls(40 * rounds, 250)
    bench_batch(rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
