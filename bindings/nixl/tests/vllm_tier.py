"""vLLM's secondary tier `obj`, unchanged, as its scheduler drives it: vllm_tier.py store|load.

Prints JSON: whether the blocks were stored; which are found, and whether loads are right."""

from __future__ import annotations

import json
import os
import sys
import time
from types import SimpleNamespace
from typing import Any, List

import numpy as np

ROW, BLOCKS = 16384, 32
SECONDS = 300.0


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
    from vllm.v1.kv_offload.tiering.base import TransferJob
    from vllm.v1.kv_offload.tiering.obj.manager import ObjectStoreSecondaryTierManager

    group = SimpleNamespace(tokens_per_block=16, layer_names=["layer.0"])
    config = SimpleNamespace(
        groups=[group], canonical_layout=False, replicated_layout=False, kv_cache_layout=None,
        cache=SimpleNamespace(tokens_per_hash=16),
        model=SimpleNamespace(name="org/model", dtype="bfloat16"),
        parallel=SimpleNamespace(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0,
                                 is_parallelism_agnostic=True))
    rows = np.zeros((BLOCKS, ROW), np.uint8)
    tier = ObjectStoreSecondaryTierManager(
        SimpleNamespace(config=config), memoryview(rows), "obj",  # type: ignore[arg-type]
        store_config={"bucket": "kv", "endpoint_override": "unused:1"})

    def job(number: int, blocks: List[int], places: List[int], promotion: bool) -> Any:
        return TransferJob(job_id=number, keys=[key(n) for n in blocks], is_promotion=promotion,
                           chunk_ids=np.array(places, np.int32), req_context=context)

    def key(n: int) -> Any:
        return make_offload_key(n.to_bytes(32, "little"), 0)

    def row(n: int) -> Any:
        return np.random.default_rng(n).integers(0, 256, ROW, np.uint8)

    def finish(number: int) -> bool:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            for result in tier.get_finished_jobs():
                assert result.job_id == number
                return bool(result.success)
        raise TimeoutError

    context = ReqContext(req_id="r")
    answer: Any
    if sys.argv[1] == "store":
        for n in range(20):
            rows[n] = row(n)
        tier.submit_store(job(1, list(range(20)), list(range(20)), False))
        answer = finish(1)
    else:
        found = {}
        end = time.monotonic() + SECONDS
        while len(found) < 22 and time.monotonic() < end:
            for n in range(22):
                state = tier.lookup(key(n), context)
                if state is not LookupResult.RETRY:
                    found[n] = state is LookupResult.HIT
            tier.on_schedule_end(SimpleNamespace())  # type: ignore[arg-type]
        # Into other rows than those that they were stored from.
        tier.submit_load(job(2, list(range(20)), list(range(31, 11, -1)), True))
        loaded = finish(2)
        right = all(bool((rows[31 - n] == row(n)).all()) for n in range(20))
        tier.submit_load(job(3, [0, 21], [0, 1], True))
        answer = [[n for n in range(22) if found[n]], loaded, right, finish(3)]
    tier.shutdown()
    out.write(json.dumps(answer))
    out.flush()


if __name__ == "__main__":
    main()
