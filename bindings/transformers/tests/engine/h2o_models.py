"""Tiny models with random weights, and a spy for the inputs of their attention."""

from __future__ import annotations

import pathlib
import sys

import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))  # h2o_reference

SMALL = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
             num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.35,
             max_position_embeddings=512, bos_token_id=1, eos_token_id=None, pad_token_id=0)
MOE = dict(moe_intermediate_size=24, num_experts_per_tok=2)
MODELS = {
    "llama": ("Llama", SMALL),
    "mistral": ("Mistral", {**SMALL, "sliding_window": None}),
    "mixtral": ("Mixtral", {**SMALL, "sliding_window": None, "num_local_experts": 4,
                            "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", SMALL),
    "qwen2moe": ("Qwen2Moe", {**SMALL, **MOE, "num_experts": 4,
                              "shared_expert_intermediate_size": 24}),
    "qwen3": ("Qwen3", SMALL),
    "qwen3moe": ("Qwen3Moe", {**SMALL, **MOE, "num_experts": 4}),
    "gemma": ("Gemma", SMALL),
    "gemma2": ("Gemma2", {**SMALL, "sliding_window": 9, "query_pre_attn_scalar": 8,
                          "layer_types": ["full_attention", "sliding_attention",
                                          "full_attention"]}),
    "gemma3": ("Gemma3", {**SMALL, "num_hidden_layers": 4, "sliding_window": 9,
                          "query_pre_attn_scalar": 8,
                          "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "deepseek": ("DeepseekV3", {**SMALL, **MOE, "num_key_value_heads": 4, "n_routed_experts": 4,
                                "q_lora_rank": 16, "kv_lora_rank": 10, "qk_nope_head_dim": 8,
                                "qk_rope_head_dim": 4, "v_head_dim": 6, "head_dim": 4,
                                "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
                                "n_shared_experts": 1}),
}


def make_model(name: str, implementation: str = "sdpa", seed: int = 0):
    """Creates a model by its name in MODELS."""
    family, numbers = MODELS[name]
    text = "Text" if family == "Gemma3" else ""
    config = getattr(transformers, f"{family}{text}Config")(**numbers)
    config._attn_implementation = implementation
    torch.manual_seed(seed)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def tokens(count: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    """Returns random tokens without padding."""
    return torch.randint(2, 97, (batch, count), generator=torch.Generator().manual_seed(seed))


class Spy:
    """Records queries and keys of each call of the attention function."""

    def __init__(self, model, implementation: str) -> None:
        self.calls: list[tuple[int, torch.Tensor, torch.Tensor, float | None]] = []
        self._module = sys.modules[type(model).__module__]
        self._implementation = implementation

    def _wrap(self, function):
        def spied(module, query, key, *args, **kwargs):
            self.calls.append((module.layer_idx, query.detach().clone(), key.detach().clone(),
                               kwargs.get("scaling")))
            return function(module, query, key, *args, **kwargs)
        return spied

    def __enter__(self) -> Spy:
        if self._implementation == "sdpa":
            ALL_ATTENTION_FUNCTIONS["sdpa"] = self._wrap(ALL_ATTENTION_FUNCTIONS["sdpa"])
        else:
            self._eager = self._module.eager_attention_forward
            self._module.eager_attention_forward = self._wrap(self._eager)
        return self

    def __exit__(self, *_: object) -> None:
        if self._implementation == "sdpa":
            del ALL_ATTENTION_FUNCTIONS["sdpa"]
        else:
            self._module.eager_attention_forward = self._eager
