"""Makes a small model of random weights, with a tokenizer of 512 words."""

from __future__ import annotations

from pathlib import Path


def llama(folder: Path, seed: int = 7) -> Path:
    """A Llama with four layers. Its weights are large, so that each text depends on all of its
    prompt."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=4096,
            initializer_range=0.25,
            bos_token_id=1,
            eos_token_id=2,
            tie_word_embeddings=False,
        )
    ).to(torch.bfloat16)
    model.config.architectures = ["LlamaForCausalLM"]
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{at}": at for at in range(512)}, unk_token="t0"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="t0", bos_token="t1", eos_token="t2"
    ).save_pretrained(folder)
    return folder
