#!/usr/bin/env python3
"""Writes one tiny model of random weights for each architecture of the engine that generates text.

    archs.py DIRECTORY PROGRAM            arch-NAME.gguf for all names, and arch-without.txt
    archs.py DIRECTORY PROGRAM llama      some of them

PROGRAM is built from tensors.cpp. It asks its engine for the tensors of an architecture, so only the
hyperparameters stand here. arch-without.txt has a line "NAME: REASON" for each architecture without a model.

The same arguments and the same engine make the same files. Needs the packages numpy and gguf.
"""

import argparse
import os
import pathlib
import re
import subprocess

import numpy

from make import Model, Wide, time_steps

# A model has the keys of COMMON and of its groups, and its own keys, which come last. The engine ignores the
# keys that an architecture does not read.
LAYERS = 4
COMMON = {
    "context_length": 4096,
    "embedding_length": 128,
    "block_count": LAYERS,
    "feed_forward_length": 256,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
    "logit_scale": 1.0,
    "use_parallel_residual": False,
}
MOE = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_shared_count": 1,
    "expert_feed_forward_length": 96,
    "expert_shared_feed_forward_length": 96,
    "expert_gating_func": 2,
    "expert_weights_scale": 1.0,
    "expert_weights_norm": True,
    "leading_dense_block_count": 1,
    "interleave_moe_layer_step": 2,
    "moe_every_n_layers": 2,
}
WINDOW = {"attention.sliding_window": 64}
# Either the distance between layers of full attention, or one flag for each layer.
SWA = WINDOW | {"attention.sliding_window_pattern": 2}
SWA_FLAGS = WINDOW | {"attention.sliding_window_pattern": [1, 0, 1, 0]}
# A latent cache: K of 64 + 32 rotated elements for all heads, V its first 64.
MLA = {
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": 64,
    "attention.kv_lora_rank": 64,
    "attention.key_length": 96,
    "attention.value_length": 64,
    "attention.key_length_mla": 64,
    "attention.value_length_mla": 32,
    "rope.dimension_count": 32,
}
INDEXER = {
    "attention.indexer.head_count": 4,
    "attention.indexer.key_length": 64,
    "attention.indexer.top_k": 64,
    "attention.indexer.block_size": 4,
    "attention.indexer.local_blocks": 1,
    "attention.indexer.kpool": 4,
    "attention.indexer.kpool_select_tail": True,
    "attention.indexer.types": [1] * LAYERS,
}
SSM = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 256,
    "ssm.state_size": 32,
    "ssm.time_step_rank": 8,
    "ssm.group_count": 4,
    "full_attention_interval": 2,
}
# Layers without KV heads are recurrent.
HYBRID = SSM | {"attention.head_count_kv": [0, 2, 0, 2]}
KDA = SSM | MLA | {
    "attention.head_count_kv": [0, 1, 0, 1],
    "kda.head_dim": 32,
    "kda.safe_gate": True,
    "kda.gate_lower_bound": -5.0,
}
NO_HEADS = {"attention.head_count": 0, "feed_forward_length": 0}
WKV = {
    "attention.head_count": 0,
    "attention.head_count_kv": 0,
    "wkv.head_size": 32,
    "time_mix_extra_dim": 16,
    "time_decay_extra_dim": 32,
    "attention.decay_lora_rank": 16,
    "attention.iclr_lora_rank": 16,
    "attention.value_residual_mix_lora_rank": 16,
    "attention.gate_lora_rank": 32,
    "token_shift_count": 2,
}
# Hyper connections: four residual streams.
HYPER = {
    "hyper_connection.count": 4,
    "hyper_connection.sinkhorn_iterations": 4,
    "hyper_connection.epsilon": 1e-6,
    "hyper_connection.low_rank": 8,
    "hyper_connection.magnitude": 2.0,
    "swiglu_clamp_exp": 10.0,
}
# As many KV heads as heads.
EQUAL = {"attention.head_count_kv": 4}
# K and V are computed from a latent, but cached for all heads.
LATENT = EQUAL | {
    "attention.q_lora_rank": 64,
    "attention.kv_lora_rank": 64,
    "attention.key_length": 64,
    "attention.value_length": 32,
    "rope.dimension_count": 32,
}
# A layer is recurrent, or has attention, or has a feed-forward part.
EITHER = SSM | {
    "attention.head_count_kv": [0, 0, 2, 0],
    "feed_forward_length": [0, 256, 0, 0],
}
SECTIONS = {"rope.dimension_sections": [4, 6, 6, 0]}

# name -> groups, own keys
ARCHS = {
    "llama": ([], {}),
    "qwen2vl": ([SECTIONS], {}),
    "qwen3": ([], {}),
    "qwen3moe": ([MOE], {}),
    "qwen3next": ([MOE, SSM], {}),
    "qwen3vl": ([SECTIONS], {}),
    "qwen3vlmoe": ([MOE, SECTIONS], {}),
    "qwen35": ([SSM, SECTIONS], {}),
    "qwen35moe": ([MOE, SSM, SECTIONS], {}),
    "gemma2": ([SWA], {}),
    "gemma3": ([SWA], {}),
    "gemma3n": ([SWA], {}),
    "gemma4": ([SWA_FLAGS, {"block_count": 6}], {
        "embedding_length_per_layer_input": 32,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "attention.key_length_swa": 32,
        "attention.value_length_swa": 32,
        "attention.shared_kv_layers": 2,
        "attention.sliding_window_pattern": [1, 1, 1, 0, 1, 0],
        "rope.dimension_count": 64,
        "rope.dimension_count_swa": 32,
        "final_logit_softcapping": 30.0,
    }),
    "gpt-oss": ([MOE, SWA], {}),
    "deepseek2": ([MOE, MLA], {}),
    "deepseek32": ([MOE, MLA, INDEXER], {}),
    "glm-dsa": ([MOE, MLA, INDEXER], {}),
    "deepseek4": ([MOE, INDEXER, HYPER], {
        # As long as the longest compressed keys, as in the released models.
        "attention.sliding_window": 128,
        "attention.head_count_kv": 1,
        # Not the indexer's length: the engine would rotate K of a cache without layers, and divide by zero.
        "attention.key_length": 128,
        "attention.value_length": 128,
        "attention.q_lora_rank": 64,
        "attention.output_group_count": 2,
        "attention.output_lora_rank": 32,
        "attention.compress_ratios": [0, 4, 128, 4],
        "attention.compress_rope_freq_base": 160000.0,
        "rope.dimension_count": 32,
        "hash_layer_count": 0,
        "expert_gating_func": 4,
    }),
    "mamba": ([SSM, NO_HEADS], {}),
    "mamba2": ([SSM, NO_HEADS], {}),
    "jamba": ([MOE, HYBRID], {}),
    "falcon-h1": ([SSM], {}),
    "lfm2": ([HYBRID], {"shortconv.l_cache": 3}),
    "lfm2moe": ([MOE, HYBRID], {"shortconv.l_cache": 3}),
    "granitehybrid": ([HYBRID], {}),
    "nemotron_h": ([EITHER], {}),
    "plamo2": ([HYBRID], {"ssm.group_count": 0}),
    "rwkv6": ([WKV], {}),
    "rwkv7": ([WKV], {}),
    "minimax-01": ([MOE, SSM], {"residual_scale": 1.0}),
    "minimax-m2": ([MOE], {}),
    # As many heads of the indexer as KV heads, which the engine demands in long batches.
    "minimax-m3": ([MOE, INDEXER], {"attention.indexer.head_count": 2}),
    "kimi-linear": ([MOE, KDA], {}),
    "kimi-k3": ([MOE, KDA], {
        "attn_res.block_size": 2,
        "activation.situ_beta": 4.0,
        "activation.situ_linear_beta": 25.0,
        "expert_latent_length": 64,
    }),
    "glm5-next": ([MOE, KDA, INDEXER, HYPER], {
        "attention.key_length": 64,
        "rope.dimension_count": 0,
    }),
    "qwen4exp": ([MOE, SSM, INDEXER, HYPER, SECTIONS], {
        "attention.compress_ratios": [0, 4, 0, 4],
        # Hashes of 2-grams and 3-grams, two heads each, in one table of rows.
        "ple.layers": [0],
        "ple.ngram_size": 3,
        "ple.heads_per_ngram": 2,
        "ple.conv_kernel": 4,
        "ple.eos_token_id": 257,
        "ple.layer_multipliers": Wide([1, 3, 5]),
        "ple.head_offsets": Wide([0, 61, 122, 183]),
        "ple.head_vocab_sizes": Wide([61] * 4),
        "embedding_length_per_layer_input": 32,
    }),
    "mistral3": ([], {}),
    "mistral4": ([MOE, MLA], {}),
    "mimo2": ([MOE, SWA_FLAGS], {}),
    "step35": ([MOE, SWA_FLAGS], {}),
    "smollm3": ([], {}),
    "cohere2": ([SWA], {}),
    "llama4": ([MOE, SWA], {}),
    "olmo2": ([SWA], {}),
    "phi3": ([], {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 1024}),
    "glm4": ([], {}),
    "glm4moe": ([MOE], {}),
    "ernie4_5-moe": ([MOE], {}),
    "hunyuan-moe": ([MOE], {}),
    "deci": ([], {}),
    "falcon": ([], {}),
    "grok": ([MOE], {}),
    "gpt2": ([], {}),
    "gptneox": ([], {}),
    "mpt": ([EQUAL], {}),
    "baichuan": ([], {}),
    "starcoder": ([], {}),
    "refact": ([], {}),
    "bloom": ([], {}),
    "stablelm": ([], {}),
    "qwen": ([], {}),
    "qwen2": ([], {}),
    "qwen2moe": ([MOE], {}),
    "phi2": ([], {}),
    "phimoe": ([MOE], {}),
    "plamo": ([], {}),
    "plamo3": ([SWA], {}),
    "codeshell": ([], {}),
    "orion": ([], {}),
    "internlm2": ([], {}),
    "minicpm": ([], {}),
    "minicpm3": ([LATENT], {}),
    "gemma": ([], {}),
    "starcoder2": ([], {}),
    "maple": ([MOE, SWA_FLAGS], {"swiglu_clamp_exp": 7.0}),
    "xverse": ([], {}),
    "command-r": ([], {}),
    "cohere2moe": ([MOE, SWA_FLAGS], {}),
    "dbrx": ([MOE], {"attention.clamp_kqv": 8.0}),
    "olmo": ([], {}),
    "olmoe": ([MOE, EQUAL], {}),
    "muse-glimmer": ([SWA_FLAGS], {}),
    "openelm": ([], {}),
    "arctic": ([MOE], {}),
    "deepseek": ([MOE], {}),
    "deepseek2-ocr": ([MOE, EQUAL], {}),
    "chatglm": ([], {}),
    "bitnet": ([], {}),
    "t5": ([EQUAL], {"attention.relative_buckets_count": 32}),
    "jais": ([], {}),
    "jais2": ([EQUAL], {}),
    "nemotron": ([], {}),
    "nemotron_h_moe": ([MOE, EITHER], {}),
    "exaone": ([], {}),
    "exaone4": ([SWA], {}),
    "exaone-moe": ([MOE, SWA], {}),
    "rwkv6qwen2": ([WKV], {"token_shift_count": 1}),
    "arwkv7": ([WKV], {"token_shift_count": 1}),
    "granite": ([], {}),
    "granitemoe": ([MOE], {}),
    "graniteswitch": ([], {
        "adapters.count": 2,
        "adapters.lora_rank": 8,
        "adapters.token_ids_activate": [20, 21],
        "adapters.token_ids_substitute": [22, 23],
    }),
    "granite_swa": ([MOE, SWA_FLAGS], {}),
    "plm": ([LATENT], {}),
    "bailingmoe": ([MOE], {}),
    "bailingmoe2": ([MOE], {}),
    "bailingmoe3": ([MOE, KDA], {}),
    "dots1": ([MOE, EQUAL], {}),
    "dots3note": ([MOE, SWA_FLAGS, MLA, INDEXER], {
        "attention.indexer.types": [0, 1, 0, 1],
        "attention.kv_lora_rank_swa": 64,
        "attention.key_length_mla_swa": 64,
        "attention.value_length_mla_swa": 32,
        "rope.freq_base_swa": 10000.0,
    }),
    "arcee": ([], {}),
    "afmoe": ([MOE, SWA], {}),
    "laguna": ([MOE, SWA], {}),
    "ernie4_5": ([MOE], {}),
    "hunyuan-dense": ([], {}),
    "hunyuan_vl": ([SECTIONS], {}),
    "hy_v3": ([MOE], {}),
    "hy_v4": ([MOE, MLA, INDEXER, HYPER], {}),
    "smallthinker": ([MOE, SWA], {}),
    "seed_oss": ([], {}),
    "grovemoe": ([MOE], {
        "expert_chunk_feed_forward_length": 32,
        "expert_group_scale": 0.5,
        "experts_per_group": 2,
    }),
    "apertus": ([], {"xielu.alpha_n": 1.0, "xielu.alpha_p": 1.0, "xielu.beta": 0.5, "xielu.eps": 1e-6}),
    "hrm_text": ([], {"block_count": 6, "hrm.layers_per_stack": 1, "hrm.h_cycles": 2, "hrm.l_cycles": 2}),
    "pangu-embedded": ([], {}),
    "paddleocr": ([MOE, SECTIONS], {}),
    "spark2_5": ([SWA_FLAGS], {}),
    "maincoder": ([], {}),
    "talkie": ([], {}),
    "mellum": ([MOE, SWA], {}),
    "nanbeige": ([], {}),
}
WITHOUT = {
    **dict.fromkeys(["bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2",
                     "jina-bert-v3", "eurobert", "t5encoder", "gemma-embedding", "llama-embed"],
                    "an encoder: it computes embeddings"),
    **dict.fromkeys(["dream", "llada", "llada-moe", "rnd1"], "diffusion: it keeps no state of tokens"),
    **dict.fromkeys(["eagle3", "dflash", "gemma4-assistant"], "it needs the hidden states of another model"),
    **dict.fromkeys(["wavtokenizer-dec", "qwen3tts", "pockettts"], "it generates speech"),
    "clip": "it encodes images",
    "clef": "it computes scores, not logits",
    "gptj": "the engine knows the name only",
    "cogvlm": "the engine gives the logits of the first token of a batch, whichever is asked for",
    "chameleon": "the engine needs a vocabulary of more than 8196 tokens",
}
# Architectures that multiply the embeddings, by the square root of their length or by a constant.
SCALED = {"gemma", "gemma2", "gemma3", "gemma3n", "gemma4", "grok", "minicpm", "minicpm3", "afmoe"}
# Tensors that no model gets: scales of quantized weights, and output matrices for other tasks.
NEVER = r"\.(input_)?scale$|^cls\.|^dense_"
# An optional tensor that makes the engine use the code of another architecture.
NEVER_IN = {"rwkv6qwen2": "time_mix_first"}
# Tensors of several dimensions that the engine's kernels need as f32.
PLAIN = r"norm|bias|conv|lerp|time_mix_first|ape\.|hc_|ssm_[ad]$|altup_|ffn_gate_inp"
ONES = r"norm\d*(\.weight)?$|^rope_|_scale|scales?$|scale\.weight|ssm_d$|time_mix_k_[ak]"


class Unknown(Exception):
    """The engine is older than the architecture."""


def start(path, arch):
    """A model with its metadata, still without tensors."""
    groups, own = ARCHS[arch]
    keys = dict(COMMON)
    for group in (*groups, own):
        keys |= group
    shape = argparse.Namespace(layers=keys.pop("block_count"), width=keys.pop("embedding_length"),
                               context=keys.pop("context_length"), type="f16", large=False)
    del keys["attention.layer_norm_rms_epsilon"]
    # Some names make the engine expect the vocabulary of a known model.
    model = Model(path, arch, shape, name="random")
    for name, value in keys.items():
        model.key(name, value)
    return model


def values(model, name, dims):
    """Weights preserve the magnitude of signals. Decays give a memory of tens to hundreds of tokens."""
    draw = model.draw
    if re.search(ONES, name):
        return numpy.ones(dims)
    if "ssm_dt.bias" in name:
        return time_steps(model, dims)
    ranges = {"ssm_a": (-8, -1), "lerp": (0, 1), "time_mix_decay.": (-6, -1), "time_mix_w0": (-7, -2)}
    for part, (low, high) in ranges.items():
        if part in name:
            return draw.uniform(low, high, dims)
    # Gains above 1, so that attention affects the output.
    gain = 0.1 if name.endswith("bias") else 1.5 if re.search(r"attn_(q|k|v|qkv)\.", name) else 1.0
    return draw.standard_normal(dims, dtype=numpy.float32) * (gain / dims[-1] ** 0.5)


def wanted(arch, path, program):
    """Asks the engine for the tensors that it wants: name -> dimensions, the innermost one last."""
    model = start(path, arch)
    model.write()
    asked = subprocess.run([program, path], capture_output=True, text=True)
    path.unlink()
    if asked.returncode != 0:
        if "unknown model architecture" in asked.stderr:
            raise Unknown("the engine does not know it")
        raise SystemExit(f"{arch}: the engine rejects the metadata:\n{asked.stderr}")
    lines = [line.split() for line in asked.stdout.splitlines()]
    return {name: [int(dim) for dim in reversed(dims)] for name, *dims in lines}


def make(arch, path, program):
    new = path.with_suffix(".new")
    tensors = wanted(arch, new, program)
    model = start(new, arch)
    for name, dims in tensors.items():
        if re.search(NEVER, name) or NEVER_IN.get(arch, " ") in name:
            continue
        if name == "output.weight":
            model.output(dims[-1])
        elif name == "token_embd.weight":
            scale = dims[-1] ** -0.5 if arch in SCALED else 1.0
            model.matrix(name, model.draw.standard_normal(dims, dtype=numpy.float32) * scale)
        elif len(dims) == 1 or re.search(PLAIN, name):
            model.plain(name, values(model, name, dims))
        else:
            model.matrix(name, values(model, name, dims))
    model.write()
    os.replace(new, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("to", type=pathlib.Path, metavar="DIRECTORY")
    parser.add_argument("program", type=pathlib.Path, metavar="PROGRAM")
    parser.add_argument("names", nargs="*", metavar="NAME")
    asked = parser.parse_args()
    unknown = set(asked.names) - set(ARCHS)
    if unknown:
        parser.error(f"no architecture {', '.join(sorted(unknown))}: use {' '.join(ARCHS)}")
    asked.to.mkdir(parents=True, exist_ok=True)
    without = dict(WITHOUT)
    for arch in asked.names or ARCHS:
        try:
            make(arch, asked.to / f"arch-{arch}.gguf", asked.program)
        except Unknown as reason:
            without[arch] = reason
    if not asked.names:
        lines = [f"{arch}: {reason}\n" for arch, reason in without.items()]
        (asked.to / "arch-without.txt").write_text("".join(lines))
    made = len(asked.names or ARCHS) - len(without) + len(WITHOUT)
    print(f"{asked.to}: models of {made} architectures")


if __name__ == "__main__":
    main()
