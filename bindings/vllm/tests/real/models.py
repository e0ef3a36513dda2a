#!/usr/bin/env python3
"""Makes models as vLLM takes them:

    models.py gguf FILE.gguf FOLDER     a real model, from GGUF (transformers reads it)
    models.py tiny FOLDER               models of random weights below FOLDER, one of each kind of cache

Needs torch, transformers, gguf, accelerate and safetensors.
"""

import contextlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any, Dict, Iterator

import safetensors.torch
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

#: What all models of random weights have. Weights are wide enough that texts do not repeat one token.
TINY: Dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "tie_word_embeddings": False, "initializer_range": 0.12}
EXPERTS: Dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
#: Folder, architecture, and what differs from TINY.
KINDS: Dict[str, Any] = {
    "gqa": ("llama", {}),
    "moe": ("qwen3_moe", {**EXPERTS, "num_experts": 8}),
    "mla": ("deepseek_v2", {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1,
                            "first_k_dense_replace": 4, "num_key_value_heads": 4, "q_lora_rank": None,
                            "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
                            "v_head_dim": 128}),
    "window": ("mistral", {"sliding_window": 128}),
    "mixed": ("gemma3_text", {"sliding_window": 128, "query_pre_attn_scalar": 64,
                              "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "hybrid": ("qwen3_next", {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 128,
                              "layer_types": ["linear_attention"] * 3 + ["full_attention"],
                              "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                              "linear_key_head_dim": 64, "linear_value_head_dim": 64}),
}


@contextlib.contextmanager
def complete(folder: Path) -> Iterator[Path]:
    """A new folder that gets its name when it is complete, in place of an old one."""
    new = folder.with_name(folder.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    yield new
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)


def save(model: Any, folder: Path) -> None:
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.save_pretrained(folder)
    tensors: Dict[str, torch.Tensor] = dict(model.state_dict())
    if getattr(config, "tie_word_embeddings", False):
        tensors.pop("lm_head.weight", None)
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def from_gguf(file: Path, folder: Path) -> None:
    with complete(folder) as new:
        AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(new)
        save(AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name), new)


def tiny(folder: Path) -> None:
    for name, (architecture, more) in KINDS.items():
        torch.manual_seed(7)
        config = CONFIG_MAPPING[architecture](**{**TINY, **more})
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        with complete(folder / name) as new:
            model.save_pretrained(new)
    with complete(folder / "lora") as new:
        adapter(new)


def adapter(folder: Path) -> None:
    """A LoRA of random weights for the model `gqa`."""
    torch.manual_seed(8)
    wide, rank = TINY["hidden_size"], 8
    heads = {"q_proj": TINY["num_attention_heads"], "v_proj": TINY["num_key_value_heads"]}
    tensors: Dict[str, torch.Tensor] = {}
    for layer in range(TINY["num_hidden_layers"]):
        for name, count in heads.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(rank, wide) * 0.2
            tensors[f"{at}.lora_B.weight"] = torch.randn(count * TINY["head_dim"], rank) * 0.2
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(heads),
        "bias": "none", "task_type": "CAUSAL_LM"}))


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "tiny":
        tiny(Path(sys.argv[2]))
    elif len(sys.argv) == 4 and sys.argv[1] == "gguf":
        from_gguf(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        sys.exit(__doc__)
