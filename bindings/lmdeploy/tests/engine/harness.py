"""A minimal engine loop around lmdeploy's scheduler and a connector, with a cache of tensors."""

from __future__ import annotations

import time
from typing import Any, Dict, List, Optional, Sequence, Tuple

import kvtier_lmdeploy
import torch
from lmdeploy.messages import KVTransferConfig
from lmdeploy.pytorch.config import CacheConfig, SchedulerConfig
from lmdeploy.pytorch.kv_connector import KVConnectorOutputAggregator, KVConnectorRole
from lmdeploy.pytorch.messages import SequenceMeta
from lmdeploy.pytorch.paging.scheduler import Scheduler
from lmdeploy.pytorch.strategies.ar.sequence import ARSequenceStrategy

BLOCK = 16


def cache_config(extra: Dict[str, Any], blocks: int = 8, connector: str = "KvtierConnector",
                 **more: Any) -> Any:
    """Returns the engine's CacheConfig with a connector."""
    return CacheConfig(
        max_batches=4, block_size=BLOCK, num_cpu_blocks=0, num_gpu_blocks=blocks,
        enable_prefix_caching=True,
        kv_transfer_config=KVTransferConfig(connector, "kv_both", extra), **more)


def rows_of(blocks: int, rows: int = 4, wide: int = 0) -> Dict[str, Any]:
    """Returns a cache of `rows` tensors, plus one of width `wide` unless that is 0."""
    caches = {f"cache_pool.0.row.{at}": torch.zeros(blocks, BLOCK, 2, 8, dtype=torch.float16)
              for at in range(rows)}
    if wide:
        caches["cache_pool.1.row.0"] = torch.zeros(blocks, BLOCK, wide, dtype=torch.uint8)
    return caches


class Engine:
    """A scheduler and workers, with the engine's calls between them."""

    def __init__(self, extra: Dict[str, Any], *, blocks: int = 8, workers: int = 1,
                 model: str = "model-a", build: Any = None, caches: Any = None,
                 connector: str = "KvtierConnector") -> None:
        from lmdeploy.pytorch.kv_connector import factory

        if connector == "KvtierConnector":
            extra = {"weights": f"of {model}", **extra}
        self.config = cache_config(extra, blocks, connector)
        factory.prepare_kv_connector_config(self.config, model_path=model)
        self.caches = caches or [rows_of(blocks) for _ in range(workers)]
        make = build or factory.build_kv_connector
        self.workers = [make(KVConnectorRole.WORKER, self.config, global_rank=rank, tp_rank=rank,
                             tp_size=workers) for rank in range(workers)]
        for worker, rows in zip(self.workers, self.caches):
            worker.register_kv_caches(rows)
        self.connector = make(KVConnectorRole.SCHEDULER, self.config, tp_size=workers)
        self.scheduler = Scheduler(
            scheduler_config=SchedulerConfig(max_batches=4, max_session_len=512,
                                             max_request_output_len=64),
            cache_config=self.config, kv_connector=self.connector,
            seq_meta=SequenceMeta(BLOCK, strategy=ARSequenceStrategy()))
        self.together = KVConnectorOutputAggregator(workers)
        self.statuses: List[str] = []

    def step(self, running: Sequence[Any] = (), lengths: Tuple[int, ...] = ()) -> Any:
        """Runs one step: sends metadata to the workers, and passes their output back."""
        meta = self.scheduler.build_connector_meta(list(running), connector_token_lens=lengths)
        if meta is None:
            return None
        for worker in self.workers:
            worker.bind_connector_metadata(meta)
            worker.start_load_kv()
        for worker in self.workers:
            worker.start_save_kv()
        outputs = []
        for worker in self.workers:
            outputs.append(worker.get_finished())
            worker.clear_connector_metadata()
        self.scheduler.update_connector_output(self.together.aggregate(outputs))
        return meta

    def admit(self, session: int, tokens: Sequence[int], seconds: float = 600.0) -> Any:
        """Adds a request, and steps until the scheduler runs it."""
        sequence = self.scheduler.add_session(session).add_sequence(torch.tensor(list(tokens)))
        end = time.monotonic() + seconds
        while sequence not in self.scheduler.schedule(is_prefill=True).running:
            assert time.monotonic() < end, sequence.status
            self.statuses.append(sequence.status.name)
            self.step()
            time.sleep(0.001)
        return sequence

    def table(self, sequence: Any) -> List[int]:
        """Returns a sequence's block ids."""
        return [int(one) for one in self.scheduler.block_manager.get_block_table(sequence)]

    def settle(self, seconds: float = 600.0) -> None:
        """Steps until no transfer is in progress."""
        end = time.monotonic() + seconds
        while self.step() is not None:
            assert time.monotonic() < end
            time.sleep(0.001)

    def end(self, session: int) -> None:
        """Stops and ends a session."""
        self.scheduler.stop_session(session)
        self.scheduler.end_session(session)

    def drained(self) -> None:
        """Tells the scheduler that the workers have no transfers any more."""
        name = "finish_kv_transfers_after_worker_drain"  # another name before 0.18
        if not hasattr(self.scheduler, name):
            name = "finish_deferred_kv_transfers_after_worker_drain"
        getattr(self.scheduler, name)()

    def close(self, drain: bool = True) -> None:
        """Shuts down as the engine does: workers first."""
        for worker in self.workers:
            worker.shutdown()
        if drain:
            self.drained()
        self.scheduler.shutdown()


def fill(rows: Dict[str, Any], blocks: Sequence[int], seed: int) -> None:
    """Writes random bytes into blocks, as a forward pass would."""
    made = torch.Generator().manual_seed(seed)
    for row in rows.values():
        flat = row.view(torch.uint8).view(row.shape[0], -1)
        for block in blocks:
            flat[block] = torch.randint(0, 256, (flat.shape[1],), generator=made,
                                        dtype=torch.uint8)


def bytes_of(rows: Dict[str, Any], blocks: Sequence[int]) -> List[bytes]:
    """Returns the bytes of blocks in all rows."""
    return [row.view(torch.uint8).view(row.shape[0], -1)[block].numpy().tobytes()
            for row in rows.values() for block in blocks]


def spoil(rows: Dict[str, Any]) -> None:
    """Overwrites all rows."""
    for row in rows.values():
        row.view(torch.uint8).fill_(0xEE)


def prompt(blocks: int, first: int = 100, more: Optional[List[int]] = None) -> List[int]:
    """Returns the tokens of `blocks` full blocks, followed by `more` tokens."""
    return [first + at for at in range(blocks * BLOCK)] + (more if more is not None else [7])


kvtier_lmdeploy.activate()
