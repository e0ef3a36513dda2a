"""A process with a real vLLM for processors and LMCache's own connector for vLLM:
`engine.py MODEL DISK_PATH PROMPT...`. Prints one line of JSON for each prompt, a number of tokens.

LMCache's connector copies KV by kernels for GPUs. For the processor, which LMCache has none for,
this program brings a copy in torch; the rest is LMCache's, vLLM's and the plugin's own code.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update({
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"})
HERE = Path(__file__).resolve().parent
for folder in (HERE.parent.parent, HERE.parent.parent.parent / "vllm"):
    sys.path.insert(0, str(folder))

BLOCK_TOKENS = 64


def connector(metadata: Any) -> Any:
    """Copies KV between LMCache's chunks and the blocks of vLLM's caches."""
    from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface

    class ProcessorConnector(GPUConnectorInterface):
        """A block has its own order of bytes on the processor, so it is copied as a whole."""

        def initialize_kvcaches_ptr(self, **_: Any) -> None:
            """Each call brings the caches."""

        def get_shape(self, num_tokens: int) -> Any:
            return metadata.get_shapes(num_tokens)[0]

        def _blocks(self, obj: Any, start: int, end: int, caches: Any, slots: Any) -> Any:
            """Of each block and layer: the block in the cache, and its part of the chunk."""
            assert start % BLOCK_TOKENS == 0 and end % BLOCK_TOKENS == 0, (start, end)
            for first in range(start, end, BLOCK_TOKENS):
                assert slots[first] % BLOCK_TOKENS == 0
                block, at = int(slots[first]) // BLOCK_TOKENS, first - start
                for layer, cache in enumerate(caches):
                    yield first, cache[block], obj.tensor[:, layer, at:at + BLOCK_TOKENS]

        def from_gpu(self, memory_obj: Any, start: int, end: int, *, kvcaches: Any,
                     slot_mapping: Any, **_: Any) -> None:
            for _, block, part in self._blocks(memory_obj, start, end, kvcaches, slot_mapping):
                part.copy_(block.reshape(part.shape))

        def to_gpu(self, memory_obj: Any, start: int, end: int, *, kvcaches: Any,
                   slot_mapping: Any, vllm_cached_tokens: int = 0, **_: Any) -> None:
            for first, block, part in self._blocks(memory_obj, start, end, kvcaches,
                                                   slot_mapping):
                if first >= vllm_cached_tokens:
                    block.copy_(part.reshape(block.shape))

        def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **more: Any) -> None:
            for obj, start, end in zip(memory_objs, starts, ends):
                self.from_gpu(obj, start, end, **more)

        def batched_to_gpu(self, memory_objs: Any = None, starts: Any = None, ends: Any = None,
                           **more: Any) -> None:
            for obj, start, end in zip(memory_objs, starts, ends):
                self.to_gpu(obj, start, end, **more)

    return ProcessorConnector()


def bring_connector() -> None:
    """Gives LMCache a connector for the processor. LMCache is imported only when vLLM creates its
    connector: vLLM's start fails if certain modules were imported before."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    create = KVConnectorFactory.create_connector

    def patched(*args: Any, **more: Any) -> Any:
        from lmcache.v1 import gpu_connector
        gpu_connector.CreateGPUConnector = (
            lambda config, metadata, *_, **__: connector(metadata))
        return create(*args, **more)

    KVConnectorFactory.create_connector = patched


def options(path: str) -> Any:
    """vLLM's option that names LMCache and its plugin, as a user gives it."""
    if not path:
        return None
    plugin = {"module_path": "kvtier_lmcache", "class_name": "KvtierBackend", "disk_path": path,
              "disk_bytes": "1GiB", "host_bytes": "128MiB", "level": "durable"}
    return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.chunk_size": BLOCK_TOKENS, "lmcache.local_cpu": False,
                "lmcache.max_local_cpu_size": 0.5, "lmcache.storage_plugins": ["kvtier"],
                "lmcache.extra_config": {f"storage_plugin.kvtier.{name}": value
                                         for name, value in plugin.items()}}}


def main() -> None:
    model, path, *lengths = sys.argv[1:]
    from vllm import LLM, SamplingParams

    bring_connector()
    llm = LLM(model, enforce_eager=True, dtype="bfloat16", max_model_len=1024,
              block_size=BLOCK_TOKENS, kv_transfer_config=options(path))
    for length in lengths:
        prompt = {"prompt_token_ids": [100 + at * 7 % 900 for at in range(int(length))]}
        [out] = llm.generate([prompt], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
        print(json.dumps({"ids": list(out.outputs[0].token_ids), "cached": out.num_cached_tokens}),
              flush=True)
        llm.reset_prefix_cache()
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    try:
        main()
        status = 0
    except BaseException:
        import traceback
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    os._exit(status)  # LMCache's threads may keep a failed process alive
