"""The overhead of the shim and of lmdeploy's connector over the C calls that they make.

    python bindings/mooncake/bench.py [--quick] [--json]

It transfers a batch of 1,000 blocks of 16 rows, in memory, and prints medians of interleaved
pairs: prepared calls of the C functions, and calls of the binding as an engine makes them.
lmdeploy's connector runs without lmdeploy, on the stubs of the tests. The benchmark waits for its
ops, because engines choose by themselves when to poll them.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "lmdeploy", HERE.parent / "lmdeploy" / "tests" / "stubs"):
    sys.path.insert(0, str(folder))

import kvtier  # noqa: E402
import numpy as np  # noqa: E402
from kvtier import Blocks, abi  # noqa: E402
from kvtier._lib import lib  # noqa: E402

BLOCKS, ROWS = 1000, 16
GOAL = 1.05


class PreparedCall:
    """A C call with prepared arguments: submit, wait, free."""

    def __init__(self, blocks: Blocks, names: List[bytes], rows: "np.ndarray[Any, Any]",
                 call: Any) -> None:
        self._blocks, self._call = blocks, call
        self._names = kvtier.Names(names)
        self._c = abi.kvt_blocks_t()
        self._c.names = ctypes.pointer(self._names._c)
        each = rows.shape[2]
        first = np.arange(len(names), dtype=np.uint64) * np.uint64(each)
        self._tables = [first + np.uint64(row.ctypes.data) for row in rows]
        self._views = (abi.kvt_view_t * len(rows))()
        for view, table in zip(self._views, self._tables):
            view.pages = ctypes.cast(ctypes.c_void_p(table.ctypes.data),
                                     ctypes.POINTER(ctypes.c_void_p))
            view.page_count, view.page_tokens, view.run_bytes = len(names), 1, each
            view.memory = abi.KVT_MEMORY_HOST
        self._c.k, self._c.stride_bytes = self._views, ctypes.sizeof(abi.kvt_view_t)

    def __call__(self) -> None:
        handle = abi.kvt_op_p()
        status = self._call(self._blocks._session._raw, ctypes.byref(self._c), None,
                            ctypes.byref(handle), None)
        assert status == 0, status
        assert lib.kvt_op_wait(handle, abi.KVT_OP_RELEASED, 0) == 0
        assert lib.kvt_op_free(ctypes.byref(handle)) == 0


def seconds(call: Callable[[], Any]) -> float:
    """The wall-clock seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def pairs(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int,
          between: Callable[[], Any]) -> Tuple[float, float, float]:
    """The median ratio, and the medians of both."""
    a, b, ratios = [], [], []
    for turn in range(rounds):
        order = ((ours, a), (theirs, b))
        for call, into in order if turn % 2 else reversed(order):
            between()
            into.append(seconds(call))
        ratios.append(a[-1] / b[-1])
    return statistics.median(ratios), statistics.median(a), statistics.median(b)


def shim_calls(rows: "np.ndarray[Any, Any]", names: List[bytes]) -> Dict[str, Any]:
    """Calls of the shim's store, with the rows registered."""
    import kvtier_mooncake

    kvtier_mooncake.configure(spec=f"store(host={2 * rows.nbytes + (64 << 20)})")
    store = kvtier_mooncake.MooncakeDistributedStore()
    assert store.setup("localhost", "", 0) == 0
    for row in rows:
        assert store.register_buffer(row.ctypes.data, row.nbytes) == 0
    each = rows.shape[2]
    keys = [name.decode() for name in names]
    addresses = [[row.ctypes.data + block * each for row in rows] for block in range(len(keys))]
    sizes = [[each] * len(rows) for _ in keys]

    def put() -> None:
        assert store.batch_put_from_multi_buffers(keys, addresses, sizes) == [0] * len(keys)

    def get() -> None:
        assert min(store.batch_get_into_multi_buffers(keys, addresses, sizes)) > 0

    put()
    shapes = store._core.shapes("")  # type: ignore[union-attr]
    return {"put": put, "get": get, "blocks": shapes.of((each,) * len(rows)),
            "close": store.close}


def connector_calls(rows: "np.ndarray[Any, Any]", names: List[bytes]) -> Dict[str, Any]:
    """Steps of the worker side of lmdeploy's connector."""
    import stubs
    from kvtier_lmdeploy._meta import Load, Save, StepMeta

    cache = stubs.cache_config({"host_bytes": 2 * rows.nbytes + (64 << 20)}, len(names))
    worker = stubs.worker(cache, {f"row{at}": stubs.Tensor(row) for at, row in enumerate(rows)})
    every = tuple(range(len(names)))
    number = iter(range(1 << 30))

    def run_step(meta: Any) -> None:
        worker.bind_connector_metadata(meta)
        worker.start_load_kv()
        worker.start_save_kv()
        transfers = (*worker._worker._loads.values(), *worker._worker._saves.values())
        for _, op, _ in transfers:
            op.wait()
        output = worker.get_finished()
        assert not output.invalid_block_ids and (
            output.finished_receiving or output.completed_save_ids)

    def put() -> None:
        run_step(StepMeta(saves=(Save(next(number), 1, every, every, tuple(names)),)))

    def get() -> None:
        run_step(StepMeta(loads=(Load(next(number), 1, every, tuple(names)),)))

    put()
    return {"put": put, "get": get, "blocks": worker._worker._blocks, "close": worker.shutdown}


def main() -> None:
    """Prints a line for each result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rounds = 9 if options.quick else 31
    row_bytes = 16 << 10
    rows = np.random.default_rng(1).integers(0, 256, (ROWS, BLOCKS, row_bytes), dtype=np.uint8)
    names = [b"%032d" % at for at in range(BLOCKS)]
    for group, what, make in (("mooncake", "mooncake shim", shim_calls),
                              ("lmdeploy", "lmdeploy connector", connector_calls)):
        calls = make(rows, names)
        blocks = calls["blocks"]
        for verb, native in (("get", lib.kvt_session_get_blocks),
                             ("put", lib.kvt_session_put_blocks)):
            # A stored block is not stored again, so each put starts with an empty store.
            between = (lambda: blocks.drop(names)) if verb == "put" else (lambda: None)
            ratio, ours, theirs = pairs(calls[verb], PreparedCall(blocks, names, rows, native),
                                        rounds, between)
            line = {"group": group,
                    "bar": f"{what}: {verb} of {BLOCKS} blocks of {ROWS * row_bytes >> 10} KiB",
                    "value": round(ratio, 4), "unit": "ratio",
                    "baseline": "the C call with everything prepared, seconds",
                    "baseline_value": round(theirs, 6), "goal": GOAL, "better": "lower",
                    "ok": ratio <= GOAL}
            if options.json:
                print(json.dumps(line), flush=True)
            else:
                print(f"{line['bar']}: {ratio:.3f} ({ours * 1e3:.2f} ms over {theirs * 1e3:.2f} "
                      f"ms), goal {GOAL}", flush=True)
        calls["close"]()


if __name__ == "__main__":
    main()
