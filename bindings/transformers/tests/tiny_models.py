"""Tiny models with random weights, one of each kind of attention."""

from __future__ import annotations

from typing import Any, Dict

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB = 199
_COMMON: Dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 2048, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": None, "attn_implementation": "sdpa",
}


def llama(**more: Any) -> Any:
    return LlamaForCausalLM(LlamaConfig(**{**_COMMON, "num_hidden_layers": 3, **more}))


def qwen3_moe(**more: Any) -> Any:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{
        **_COMMON, "num_hidden_layers": 2, "head_dim": 16, "moe_intermediate_size": 32,
        "num_experts": 4, "num_experts_per_tok": 2, **more}))


def gemma3(**more: Any) -> Any:
    """Every other layer has a sliding window."""
    layers = more.setdefault("num_hidden_layers", 4)
    kinds = ["full_attention" if n % 2 else "sliding_attention" for n in range(layers)]
    return Gemma3ForCausalLM(Gemma3TextConfig(**{
        **_COMMON, "head_dim": 16, "sliding_window": 24, "layer_types": kinds, **more}))


def deepseek_v3(**more: Any) -> Any:
    return DeepseekV3ForCausalLM(DeepseekV3Config(**{
        **_COMMON, "num_hidden_layers": 2, "num_key_value_heads": 4, "q_lora_rank": 24,
        "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_shared_experts": 1, **more}))


MAKERS = {"llama": llama, "qwen3_moe": qwen3_moe, "gemma3": gemma3, "deepseek_v3": deepseek_v3}


def make(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """Creates a model whose weights are equal in every process."""
    torch.manual_seed(11)
    return MAKERS[name](**more).to(dtype).eval()


def ids(tokens: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    """Returns random token ids without padding."""
    numbers = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (rows, tokens), generator=numbers)
