#!/usr/bin/env python3
"""Makes models as vLLM takes them:

    models.py gguf FILE.gguf FOLDER     a real model, from GGUF (transformers reads it)
    models.py tiny FOLDER               models of random weights below FOLDER, one of each kind of cache

Needs torch, transformers, gguf, accelerate and safetensors.
"""

import sys
from pathlib import Path
from typing import Any, Dict

import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


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
    folder.mkdir(parents=True, exist_ok=True)
    AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(folder)
    save(AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name), folder)


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] == "gguf":
        from_gguf(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        sys.exit(__doc__)
