"""The identity of stored KV, and how rows are split into parts."""

from __future__ import annotations

import json
from typing import Any, Dict, List

import kvtier

#: Tag of the identity's extra field that holds the engine's own terms.
TERMS = 0x80000001
#: Most bytes of a part. A part is one cell of the store, and several fit into a segment.
PART_BYTES = 4 << 20


def parts(row_bytes: int) -> List[int]:
    """Splits a row into the fewest parts of at most `PART_BYTES`; only the last may be shorter."""
    count = -(-row_bytes // PART_BYTES)
    part_bytes = -(-row_bytes // count)
    return [part_bytes] * (count - 1) + [row_bytes - part_bytes * (count - 1)]


def build(model: str, weights: str, terms: Dict[str, Any], **more: Any) -> kvtier.Identity:
    """An identity of the model, the weights' fingerprint, and the other terms of the bytes."""
    text = json.dumps(terms, sort_keys=True, separators=(",", ":")).encode()
    return kvtier.Identity(model=model.encode(), weights=weights.encode() or None,
                           extra={TERMS: text}, **more)


def for_offloading(config: Any, weights: str, seam: str, row: List[int],
                   epoch: str = "") -> kvtier.Identity:
    """The identity of KV of vLLM's offloading. Its block hashes cover the tokens, and this
    identity covers everything else. `epoch` is a new text after each `reset_cache`."""
    parallel = config.parallel
    terms: Dict[str, Any] = {
        "engine": "vllm", "seam": seam, "row": row, "dtype": str(config.model.dtype),
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "groups": [[group.tokens_per_block, list(group.layer_names)] for group in config.groups],
        "layout": config.kv_cache_layout, "canonical": config.canonical_layout,
        "replicated": config.replicated_layout,
    }
    if epoch:
        terms["reset"] = epoch
    if not (parallel.is_parallelism_agnostic or config.replicated_layout):
        terms["parallel"] = [parallel.tp_size, parallel.pp_size, parallel.pcp_size,
                             parallel.dcp_size]
    return build(config.model.name, weights, terms)
