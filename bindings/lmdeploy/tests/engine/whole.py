"""A process with a real lmdeploy PyTorch engine on the processor. It reads one JSON command per
line from stdin, and answers each with one line."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import time
import traceback
from typing import Any, Dict, List

import processor

processor.install()

import kvtier_lmdeploy  # noqa: E402
from lmdeploy.messages import GenerationConfig, KVTransferConfig, PytorchEngineConfig  # noqa: E402
from lmdeploy.pytorch.engine.engine import Engine  # noqa: E402


class Commands:
    """The commands of the test."""

    def __init__(self, model: str, connector: Any = None, **options: Any) -> None:
        if connector is not None:
            kvtier_lmdeploy.activate()
            options["kv_transfer_config"] = KVTransferConfig(
                "KvtierConnector", "kv_both", connector
            )
        self.engine = Engine.from_pretrained(
            model,
            PytorchEngineConfig(
                **{
                    "dtype": "bfloat16",
                    "block_size": 16,
                    "kernel_block_size": 16,
                    "num_gpu_blocks": 256,
                    "max_batch_size": 4,
                    "session_len": 2048,
                    "eager_mode": True,
                    "enable_prefix_caching": True,
                    "max_prefill_token_num": 2048,
                    **options,
                }
            ),
        )
        self.engine.start_loop()
        self.instance = self.engine.create_instance()
        self.digests: Dict[int, Any] = {}
        self.sessions = 0
        ended = self.engine.scheduler.end_session

        def digest_and_end(session: int) -> Any:
            """A session's blocks are complete when it ends."""
            if session in self.engine.scheduler.sessions:
                for sequence in self.engine.scheduler.sessions[session].sequences.values():
                    self.digests[session] = self._digest(sequence)
            return ended(session)

        self.engine.scheduler.end_session = digest_and_end

    def _digest(self, sequence: Any) -> str:
        """A digest of the KV of the prompt's full blocks, in all layers."""
        manager = self.engine.scheduler.block_manager
        full = (
            int(sequence.num_all_ids - sequence.num_new_tokens)
            // self.engine.cache_config.block_size
        )
        blocks = [int(one) for one in manager.get_block_table(sequence)[:full]]
        made = hashlib.sha256()
        for layer in self.engine.executor.model_agent.cache_engine.gpu_cache:
            for cache in layer:
                import torch

                made.update(cache[blocks].contiguous().view(torch.uint8).numpy().tobytes())
        return made.hexdigest()

    async def generate(self, prompts: List[List[int]], tokens: int = 8, abort: int = -1) -> Any:
        """Sends all requests at once. `abort` is the number of a request that is aborted when
        it has begun; it has no KV digest."""
        return await asyncio.gather(
            *(self._one(prompt, tokens, at == abort) for at, prompt in enumerate(prompts))
        )

    async def _one(self, prompt: List[int], tokens: int, abort: bool) -> Any:
        session, self.sessions = self.sessions, self.sessions + 1
        config = GenerationConfig(
            max_new_tokens=1000 if abort else tokens, ignore_eos=True, top_k=1
        )
        ids: List[int] = []
        last: Any = None
        async for last in self.instance.async_stream_infer(session, prompt, config):
            ids += last.token_ids
            if abort and ids:
                await self.instance.async_cancel(session)
                abort = False
        await self.instance.async_end(session)
        while session in self.engine.scheduler.sessions:
            await asyncio.sleep(0.001)
        metrics = last.req_metrics
        return {
            "ids": ids,
            "end": last.status.name,
            "kv": self.digests.pop(session, None),
            "cached": metrics.cached_tokens if metrics is not None else 0,
        }

    def _connector(self) -> Any:
        return self.engine.scheduler.kv_connector

    async def stats(self) -> Any:
        """The statistics of the worker's store."""
        return self._connector().stats()[0]

    async def saved(self) -> Any:
        """Waits until all saves have ended, and the disk has everything."""
        end = time.monotonic() + 900
        while time.monotonic() < end:
            found = self._connector().stats()[0]
            # Writes in flight are not unwritten bytes any more.
            if not (
                found["saving"]
                or found["unwritten_bytes"]
                or found["disk_limit_bytes"]
                and found["disk_cells"] < found["host_cells"]
                or self.engine.scheduler.kv_save_coordinator.has_pending()
            ):
                return True
            await asyncio.sleep(0.01)
        raise TimeoutError("the blocks were not saved")

    async def lose(self, blocks: int) -> Any:
        """Drops the blocks after the first `blocks` ones from the store after the next lookup,
        before the load."""
        side, worker = (
            self._connector()._scheduler_side(),
            self.engine.executor.model_agent.kv_connector._worker,
        )
        allocated = side.blocks_allocated

        def lost(request: Any, table: Any, tokens: int) -> None:
            allocated(request, table, tokens)
            if tokens > 0:
                worker._blocks.drop(side._state_of(request).names[blocks:])
                side.blocks_allocated = allocated

        side.blocks_allocated = lost
        return True

    async def policy(self, spec: str) -> Any:
        """Switches the store's policy."""
        self._connector().set_policy("host", spec)
        return True

    async def weights(self, version: str) -> Any:
        """Declares other weights."""
        self._connector().set_weights(version)
        return True

    async def sleep(self) -> Any:
        """Sleeps and wakes: the engine drops its cache, and builds another one."""
        await self.engine.sleep(1)
        self.engine.wakeup()
        return True

    async def close(self) -> Any:
        """Shuts the engine down as lmdeploy does."""
        loop = self.engine._loop_main
        self.engine.close()
        if loop is not None:
            await asyncio.wait([loop])
        return True


async def main() -> None:
    """Serves the commands until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the engine prints
    commands: Any = None
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        name = command.pop("do")
        try:
            if name == "start":
                commands = Commands(**command)
                result: Any = True
            else:
                result = await getattr(commands, name)(**command)
            answer = {"result": result}
        except BaseException as error:  # the test gets it
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


asyncio.run(main())
