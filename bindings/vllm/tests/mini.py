"""A small model of vLLM's scheduler and workers that calls a connector as vLLM does."""

from __future__ import annotations

import pickle
import time
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Optional, Sequence, Set

import numpy as np

BLOCK = 16


class FullAttentionSpec:
    """The fields of the engine's class that connectors read."""

    def __init__(self, block_size: int = BLOCK) -> None:
        self.block_size, self.sliding_window = block_size, None


class SlidingWindowSpec(FullAttentionSpec):
    """Another kind of spec, which the connector rejects."""


def configs(extra: Dict[str, Any], *, layers: int = 3, blocks: int = 64, tp: int = 1,
            engine: str = "e", role: str = "kv_both", **parallel: int) -> Any:
    """A VllmConfig and a KVCacheConfig."""
    transfer = SimpleNamespace(
        kv_connector="KvtierConnector", kv_connector_module_path="kvtier_vllm.connector",
        kv_connector_extra_config=extra, kv_role=role, engine_id=engine,
        is_kv_producer=role != "kv_consumer")
    config = SimpleNamespace(
        kv_transfer_config=transfer,
        model_config=SimpleNamespace(model="tiny", dtype="bfloat16", revision=None),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=BLOCK),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp, pipeline_parallel_size=1, data_parallel_index=0,
            decode_context_parallel_size=1, prefill_context_parallel_size=1))
    for name, value in parallel.items():
        setattr(config.parallel_config, name, value)
    group = SimpleNamespace(layer_names=[f"model.layers.{n}.attn" for n in range(layers)],
                            kv_cache_spec=FullAttentionSpec(), host_resident=False,
                            enable_kv_transfer=True)
    cache = SimpleNamespace(num_blocks=blocks, kv_cache_groups=[group], kv_cache_layout="LBHNC",
                            prefix_cacheable_group_ids=(0,))
    return config, cache


class Request:
    """The fields of the engine's request that connectors read."""

    def __init__(self, name: str, prompt: Sequence[int], *, salt: Optional[str] = None,
                 lora: Any = None, media: Sequence[Any] = (),
                 params: Optional[Dict[str, Any]] = None) -> None:
        self.request_id, self.prompt_token_ids = name, list(prompt)
        self.all_token_ids, self.num_prompt_tokens = list(prompt), len(prompt)
        self.lora_request, self.cache_salt, self.kv_transfer_params = lora, salt, params
        self.prompt_embeds = None
        self.mm_features = [SimpleNamespace(
            identifier=name, mm_position=SimpleNamespace(offset=at)) for at, name in media]
        self.status = SimpleNamespace(name="FINISHED_STOPPED")

    @property
    def num_tokens(self) -> int:
        """The number of prompt and generated tokens."""
        return len(self.all_token_ids)


def expected(layer: int, rank: int, request: Request, token: int) -> int:
    """The KV of a token, which depends on all tokens before it."""
    seen = hash((layer, rank, tuple(request.all_token_ids[: token + 1]), request.cache_salt,
                 request.lora_request and request.lora_request.lora_name))
    return seen & 0x7FFF


class Engine:
    """A scheduler and its workers, each with caches of shape [blocks, heads, tokens, numbers]."""

    def __init__(self, make: Callable[..., Any], roles: Any, *, extra: Dict[str, Any],
                 layers: int = 3, blocks: int = 64, ranks: int = 1, engine: str = "e",
                 role: str = "kv_both") -> None:
        self.layerwise = bool(extra.get("layerwise"))
        self.layers, self.ranks, self.block_count = layers, ranks, blocks
        config, cache = configs(extra, layers=layers, blocks=blocks, engine=engine, tp=ranks,
                                role=role)
        self.names = list(cache.kv_cache_groups[0].layer_names)
        self.workers, self.caches = [], []  # type: List[Any], List[List[Any]]
        for rank in range(ranks):
            self.workers.append(make(config, roles.WORKER, cache, rank))
            self.caches.append([self._cache() for _ in range(layers)])
            self.workers[rank].register_kv_caches(dict(zip(self.names, self.caches[rank])))
        self.scheduler = make(config, roles.SCHEDULER, cache, 0)
        self.free = list(range(blocks))
        self.recved: Set[str] = set()
        self.steps = 0

    def _cache(self) -> Any:
        import torch

        return torch.zeros((self.block_count, 2, BLOCK, 8), dtype=torch.int16)

    def write(self, rank: int, layer: int, request: Request, blocks: List[int], first: int,
              end: int) -> None:
        """Computes the KV of a range of tokens."""
        for token in range(first, end):
            self.caches[rank][layer][blocks[token // BLOCK], :, token % BLOCK] = expected(
                layer, rank, request, token)

    def check(self, rank: int, layer: int, request: Request, blocks: List[int], first: int,
              end: int) -> None:
        """Asserts that the cache holds the KV of a range of tokens."""
        for token in range(first, end):
            cached = np.asarray(
                self.caches[rank][layer][blocks[token // BLOCK], :, token % BLOCK])
            assert (cached == expected(layer, rank, request, token)).all(), (layer, token)

    def spoil(self, rank: int, layer: int, blocks: List[int], first: int, end: int) -> None:
        """Writes the garbage that is computed from KV whose load has failed."""
        for token in range(first, end):
            self.caches[rank][layer][blocks[token // BLOCK], :, token % BLOCK] = -2 - self.steps

    def step(self, new: Sequence[Any] = (), cached: Sequence[Any] = (),
             tokens: Optional[Dict[str, int]] = None,
             forward: Callable[[int, int], None] = lambda rank, layer: None) -> Set[int]:
        """Runs one step, and returns the blocks whose load failed."""
        self.steps += 1
        output = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=r.request_id, block_ids=(list(b),),
                                                num_computed_tokens=n) for r, b, n in new],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[r.request_id for r, _, _ in cached], resumed_req_ids=set(),
                new_block_ids=[(list(b),) if b else None for _, b, _ in cached],
                num_computed_tokens=[n for _, _, n in cached]),
            num_scheduled_tokens=tokens or {}, finished_req_ids=set())
        meta = pickle.dumps(self.scheduler.build_connector_meta(output))
        metadata: List[Any] = []
        bad: Set[int] = set()
        recved: List[Set[str]] = []
        for rank, worker in enumerate(self.workers):
            worker.bind_connector_metadata(pickle.loads(meta))
            if self.layerwise:
                worker.start_load_kv(None)
            for layer, name in enumerate(self.names):
                worker.wait_for_layer_load(name)
                forward(rank, layer)
                worker.save_kv_layer(name, self.caches[rank][layer], None)
            if not self.layerwise:
                worker.start_load_kv(None)
            if not self.late_saves:
                worker.wait_for_save()
            recved.append(set(worker.get_transfer_results(set()).finished_recving))
            bad |= worker.get_block_ids_with_load_errors()
            metadata.append(worker.build_connector_worker_meta())
            if self.late_saves:
                worker.wait_for_save()
            worker.clear_connector_metadata()
        self.pending = [a | b for a, b in zip(getattr(self, "pending", [set()] * self.ranks),
                                              recved)]
        self.recved |= set.intersection(*self.pending)
        answer = metadata[0]
        for other in metadata[1:]:
            answer = answer.aggregate(other) if answer is not None else None
        self.scheduler.update_connector_output(SimpleNamespace(
            invalid_block_ids=bad, kv_connector_worker_meta=answer))
        return bad

    def run(self, request: Request, *, decode: int = 0, computed: int = 0,
            before_load: Callable[[], None] = lambda: None) -> int:
        """Runs a request to its end, and returns the number of tokens loaded from the store."""
        self.scheduler.on_new_request(request)
        while True:
            found, later = self.scheduler.get_num_new_matched_tokens(request, computed)
            if found is not None:
                break
            self.step()
        blocks = [self.free.pop(0) for _ in range(-(-(request.num_tokens + decode) // BLOCK))]
        for rank in range(self.ranks):
            for cache in self.caches[rank]:
                cache[blocks] = -1
        holder = SimpleNamespace(get_block_ids=lambda: (list(blocks),))
        self.scheduler.update_state_after_alloc(request, holder, found)
        before_load()
        bad: Set[int] = set()
        if later and found:
            assert not self.layerwise
            end = time.monotonic() + 600
            while request.request_id not in self.recved:
                bad |= self.step()
                assert time.monotonic() < end
        have = computed + found
        if bad:
            have = min(at for at, block in enumerate(blocks) if block in bad) * BLOCK
        total = request.num_tokens

        def forward(rank: int, layer: int) -> None:
            if self.layerwise and self.expect_loss:
                self.spoil(rank, layer, blocks, have, total)
                return
            self.check(rank, layer, request, blocks, computed, have)
            self.write(rank, layer, request, blocks, have, total)

        lost = self.step([(request, blocks, have)], tokens={request.request_id: total - have},
                         forward=forward)
        if lost:  # the engine computes these blocks and the later ones
            have = min(at for at, block in enumerate(blocks) if block in lost) * BLOCK
            self.step([(request, blocks, have)], tokens={request.request_id: total - have},
                      forward=lambda rank, layer: self.write(rank, layer, request, blocks, have,
                                                             total))
        for _ in range(decode):
            at = request.num_tokens
            request.all_token_ids.append(1000 + at)
            self.step(cached=[(request, [], at)], tokens={request.request_id: 1},
                      forward=lambda rank, layer: self.write(rank, layer, request, blocks, at,
                                                             at + 1))
        self.scheduler.request_finished(request, blocks)
        self.step()
        self.free.extend(blocks)
        self.recved.discard(request.request_id)
        for done in self.pending:
            done.discard(request.request_id)
        return have - computed

    expect_loss = False
    #: True: the engine waits for saves after it took the step's results (speculative decoding).
    late_saves = False

    def close(self) -> None:
        """Shuts down as the engine does."""
        for one in [*self.workers, self.scheduler]:
            one.shutdown()
