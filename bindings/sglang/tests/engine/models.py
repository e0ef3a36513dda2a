"""Makes small models of random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COMMON = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    # Large weights, so that each text depends on all of its prompt.
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def save(model: Any, folder: Path) -> Path:
    """Saves a model as SGLang and lmdeploy read it."""
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    return folder


def llama(folder: Path, **changed: Any) -> Path:
    """A Llama with four layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    return save(LlamaForCausalLM(LlamaConfig(**{**COMMON, **changed})).float(), folder)
