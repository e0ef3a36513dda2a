"""A process with a real SGLang on the processor. It reads one JSON command per line from stdin,
and answers each with one line. SGLang starts its scheduler and its detokenizer as processes of
their own."""

from __future__ import annotations

import asyncio
import hashlib
import json
import multiprocessing
import os
import tempfile
from array import array
from pathlib import Path
from typing import Any, Dict, List

import processor
from processes import serve
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process


def report(self: Any, path: str, tokens: Any = None) -> None:
    """Runs in the scheduler's process. Writes the store's statistics and the work in progress,
    or a digest of the KV that the device pool has for these tokens, to a file."""
    cache = self.tree_cache
    if tokens is not None:
        answer: Any = digest(self, tokens)
    else:
        controller = getattr(cache, "cache_controller", None)
        backend = getattr(controller, "storage_backend", None)
        busy = bool(
            getattr(cache, "ongoing_write_through", None)
            or getattr(cache, "ongoing_backup", None)
            or getattr(cache, "ongoing_prefetch", None)
        )
        linker = getattr(cache, "linker", None)
        ours = backend if linker is None else linker.cache_linker
        busy = busy or bool(linker is not None and linker.pending_offloads)
        answer = {"busy": busy, "stats": ours.stats() if hasattr(ours, "stats") else {}}
    Path(path).write_text(json.dumps(answer), encoding="utf-8")


def digest(self: Any, tokens: List[int]) -> Any:
    """The number of cached tokens of a prefix, and a digest of their KV in all layers."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    found = self.tree_cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))
    slots = self.tree_cache.path_device_indices(found.last_device_node)
    pool, made = self.token_to_kv_pool_allocator.get_kvcache(), hashlib.sha256()
    for layer in range(pool.layer_num):
        for buffer in pool.get_kv_buffer(layer):
            made.update(buffer[slots].contiguous().numpy().tobytes())
    return [len(slots), made.hexdigest()]


def set_policy(self: Any, spec: str) -> None:
    """Runs in the scheduler's process. Switches the store's policy."""
    self.tree_cache.cache_controller.storage_backend.set_policy(spec)


def run_scheduler(*arguments: Any, **given: Any) -> Any:
    """The main function of the scheduler's process."""
    import torch

    processor.install()
    torch.set_num_threads(1)
    if "KVTIER_NO_SGLANG_HASH" not in os.environ:
        from sglang.srt.managers.cache_controller import get_storage_hash_str

        # SGLang compiles this function at its first call, in the thread that a flush waits 10 s
        # for.
        get_storage_hash_str(list(range(64)), None, page_size=16)
    Scheduler.kvtier_report, Scheduler.kvtier_policy = report, set_policy
    return run_scheduler_process(*arguments, **given)


class WholeEngine(Engine):
    """SGLang's engine, whose scheduler's process starts with `run_scheduler`."""

    run_scheduler_process_func = staticmethod(run_scheduler)


class Commands:
    """The commands of the test."""

    def __init__(self, options: Dict[str, Any]) -> None:
        options = {
            "device": "cpu",
            "attention_backend": "torch_native",
            "dtype": "float32",
            "page_size": 16,
            "skip_tokenizer_init": True,
            "mem_fraction_static": 0.8,
            "log_level": "info",
            "random_seed": 1,
            "watchdog_timeout": 3000,
            **options,
        }
        self.engine = WholeEngine(**options)
        self.folder = tempfile.mkdtemp()

    def generate(
        self, prompts: List[List[int]], tokens: int = 8, abort: int = -1, **more: Any
    ) -> Any:
        """Sends all requests at once. `abort` is the number of a request that is aborted when
        it has begun."""
        return self.engine.loop.run_until_complete(self._generate(prompts, tokens, abort, more))

    async def _generate(self, prompts: List[List[int]], tokens: int, abort: int, more: Any) -> Any:
        async def one(at: int, prompt: List[int]) -> Any:
            params = {
                "temperature": 0,
                "max_new_tokens": 2000 if at == abort else tokens,
                "ignore_eos": True,
            }
            request = GenerateReqInput(
                input_ids=prompt,
                sampling_params=params,
                stream=True,
                rid=f"r{os.urandom(8).hex()}",
                **more,
            )
            stream = self.engine.tokenizer_manager.generate_request(request, None)
            ids, last, stopped = [], None, False
            async for last in stream:
                ids = last["output_ids"]
                if at == abort and not stopped:
                    stopped = True
                    self.engine.tokenizer_manager.abort_request(last["meta_info"]["id"])
            meta = last["meta_info"]
            return {
                "ids": ids,
                "cached": meta["cached_tokens"],
                "from": meta["cached_tokens_details"],
                "end": meta["finish_reason"]["type"],
            }

        return await asyncio.gather(*(one(at, prompt) for at, prompt in enumerate(prompts)))

    def flush(self) -> bool:
        """Empties SGLang's own caches: device and host memory."""
        return bool(self.engine.flush_cache().success)

    def scheduler(self, method: str, **given: Any) -> Any:
        """Calls a function in the scheduler's process."""
        path = os.path.join(self.folder, "answer")
        if method == "kvtier_report":
            given["path"] = path
        self.engine.collective_rpc(method, **given)
        return json.loads(Path(path).read_text(encoding="utf-8")) if "path" in given else True

    def attach(self, config: str) -> Any:
        """Attaches a storage backend at run time."""
        return self._control(
            self.engine.tokenizer_manager.attach_hicache_storage(
                hicache_storage_backend="dynamic",
                hicache_storage_backend_extra_config_json=config,
                hicache_storage_prefetch_policy="wait_complete",
            )
        )

    def detach(self) -> Any:
        """Detaches the storage backend."""
        return self._control(self.engine.tokenizer_manager.detach_hicache_storage())

    def clear(self) -> Any:
        """Drops all pages from the storage backend."""
        return self._control(self.engine.tokenizer_manager.clear_hicache_storage())

    def _control(self, call: Any) -> Any:
        answer = self.engine.loop.run_until_complete(call)
        return [bool(answer.success), getattr(answer, "message", "")]


def fork_processes() -> None:
    """Lets SGLang fork its processes. It spawns them for CUDA, and then each imports everything
    again."""
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None


if __name__ == "__main__":
    fork_processes()
    commands = serve(lambda **options: Commands(options))
    if commands is not None:
        commands.engine.shutdown()
