"""A process with a real vLLM. Reads one JSON command a line from stdin, and answers with one line."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any, Dict, List

sys.path.append(str(Path(__file__).resolve().parents[3] / "python" / "tests"))
from processes import serve  # noqa: E402

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# The engine runs in this process, so that the tests see the connector's store.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


class Engine:
    def __init__(self, options: Dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config.kv_events import KVEventsConfig

        if "kv_events_config" in options:
            options["kv_events_config"] = KVEventsConfig(**options["kv_events_config"])
        self.llm = LLM(enforce_eager=True, dtype="bfloat16", enable_prefix_caching=True, **options)
        self.engine = self.llm.llm_engine
        self.count = 0

    def params(self, tokens: int, n: int) -> Any:
        from vllm import SamplingParams

        # vLLM takes several answers with sampling only, and seeds only on GPUs.
        drawn = {"temperature": 0.01 if n > 1 else 0}
        return SamplingParams(max_tokens=tokens, ignore_eos=True, n=n, **drawn)

    def generate(self, prompts: List[List[int]], tokens: int = 8, n: int = 1, lora: str = "",
                 abort: int = -1, hints: Any = None, transfer: Any = None) -> Any:
        """Adds all requests at once. `abort`: the request that is aborted after two steps.
        `transfer`: the `kv_transfer_params`; `hints`: those below "kvtier"."""
        from vllm.lora.request import LoRARequest

        start = time.monotonic()
        names, out, first = [], {}, {}
        for prompt in prompts:
            self.count += 1
            names.append(f"r{self.count}")
            params = self.params(tokens, n)
            if hints is not None or transfer is not None:
                params.extra_args = {"kv_transfer_params": transfer or {"kvtier": hints}}
            adapter = LoRARequest("adapter", 1, lora) if lora else None
            self.engine.add_request(names[-1], {"prompt_token_ids": prompt}, params,
                                    lora_request=adapter)
        steps = 0
        while self.engine.has_unfinished_requests():
            if steps == 2 and abort >= 0:
                self.engine.abort_request([names[abort]])
            steps += 1
            for one in self.engine.step():
                now = time.monotonic() - start
                if any(part.token_ids for part in one.outputs):
                    first.setdefault(one.request_id, now)
                if one.finished:
                    out[one.request_id] = {
                        "ids": [list(part.token_ids) for part in one.outputs],
                        "cached": one.num_cached_tokens or 0}
        return {"seconds": time.monotonic() - start, "answers": [out.get(name) for name in names],
                "first": [first.get(name) for name in names], "steps": steps}

    def reset(self) -> Any:
        return bool(self.llm.reset_prefix_cache())

    def connector(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    def shared(self) -> Any:
        """The store that this process has open."""
        from kvtier_vllm import settings

        return next(iter(settings._stores.values()))[0]

    def counts(self) -> Any:
        stats = self.shared().store.stats()
        return {name: int(value) for name, value in stats.items() if isinstance(value, int)}

    def block(self) -> Any:
        """Tokens of a block."""
        return self.engine.vllm_config.cache_config.block_size

    def quota(self, tenant: int, tier: int, limit: int) -> Any:
        self.shared().store.set_quota(tenant, tier, limit)
        return True

    def tenants(self) -> Any:
        return {row.tenant: row._asdict() for row in self.shared().store.tenants()}

    def connector_counts(self) -> Any:
        return dict(self.connector().worker.counts)

    def saved(self) -> Any:
        """Waits until the disk has everything. Writes in flight are not unwritten bytes any more."""
        end = time.monotonic() + 600
        while time.monotonic() < end:
            found = self.counts()
            if not found["unwritten_bytes"] and (
                    not found["disk_limit_bytes"] or found["disk_cells"] >= found["host_cells"]):
                return True
            time.sleep(0.01)
        raise TimeoutError(f"not within 600 s: {found}")

    def policy(self, spec: str) -> Any:
        self.shared().set_policy(spec)
        return self.shared().policy

    def sleep(self) -> Any:
        self.llm.sleep(level=1)
        self.llm.wake_up()
        return True


if __name__ == "__main__":
    serve(lambda **options: Engine(options))
