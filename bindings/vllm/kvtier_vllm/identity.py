"""What makes KV other KV, and how rows are cut."""

from __future__ import annotations

import json
from typing import Any, Dict, List

import kvtier

#: The tag under which the engine's own terms are part of the identity.
TERMS = 0x80000001
#: A part of a row is a cell of the store: not so large that it would need a segment alone.
PART_BYTES = 4 << 20


def parts(row_bytes: int) -> List[int]:
    """The parts of a row of so many bytes: equal ones, as few as may be."""
    count = -(-row_bytes // PART_BYTES)
    each = -(-row_bytes // count)
    return [each] * (count - 1) + [row_bytes - each * (count - 1)]


def of(model: str, weights: str, terms: Dict[str, Any], **more: Any) -> kvtier.Identity:
    """An identity: the model, its weights' fingerprint, and what else the bytes depend on."""
    text = json.dumps(terms, sort_keys=True, separators=(",", ":")).encode()
    return kvtier.Identity(model=model.encode(), weights=weights.encode() or None,
                           extra={TERMS: text}, **more)


def of_offloading(config: Any, weights: str, seam: str, row: List[int],
                  again: str = "") -> kvtier.Identity:
    """That of vLLM's offloading: its block hashes say what the tokens are, this all else.
    `again` is another text after each reset of what is stored."""
    parallel = config.parallel
    terms: Dict[str, Any] = {
        "engine": "vllm", "seam": seam, "row": row, "dtype": str(config.model.dtype),
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "groups": [[group.tokens_per_block, list(group.layer_names)] for group in config.groups],
        "layout": config.kv_cache_layout, "canonical": config.canonical_layout,
        "replicated": config.replicated_layout,
    }
    if again:
        terms["reset"] = again
    if not (parallel.is_parallelism_agnostic or config.replicated_layout):
        terms["parallel"] = [parallel.tp_size, parallel.pp_size, parallel.pcp_size,
                             parallel.dcp_size]
    return of(config.model.name, weights, terms)
