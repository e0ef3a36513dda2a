#!/usr/bin/env python3
"""Writes GGUF models of random weights, for tests of the adapters. Their output is meaningless, but they load
and decode as real models do.

    make.py DIRECTORY                      all tiny models, for tests: 1 to 5 MB each
    make.py DIRECTORY tiny-moe tiny-mla    some of them
    make.py FILE.gguf --kind llama --layers 32 --width 1024 --type q8_0
                                           one model of a given size, for benchmarks

    tiny-llama-f16   Llama, 4 layers, 4 heads on 2, f16
    tiny-swa         Gemma 3, sliding window 64, full attention in every third layer
    tiny-moe         Qwen 3 MoE, 2 of 8 experts used
    tiny-oss         gpt-oss, 4 of 8 experts used, with biases, odd sizes of experts
    tiny-mla         DeepSeek 2: a latent cache without V
    tiny-mamba       Mamba: a recurrent state and no cells
    tiny-hybrid      Granite 4: recurrent and attention layers alternate

archs.py writes one tiny model for each architecture of the engine.

The same arguments make the same file. Needs the packages numpy and gguf.
"""

import argparse
import os
import pathlib
import sys
import zlib

import gguf
import numpy

# ChatML in the shape that llama_chat_apply_template recognises.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ["<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Pairs that become one token, so that not all tokens are single bytes. Both halves are earlier tokens.
MERGES = ["t h", "th e", "i n", "e r", "a n", "o n", "Ġ t", "Ġ a", "Ġ s", "r e", "Ġt he", "in g", "an d"]
WINDOW = 64


def byte_letters():
    """The letter that stands for each byte in GPT-2 vocabularies."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain}
    for byte in range(256):
        letters.setdefault(byte, chr(256 + len(letters) - len(plain)))
    return [letters[byte] for byte in range(256)]


class Wide(list):
    """An array of 64-bit integers in the metadata."""


def vocabulary():
    return byte_letters() + [merge.replace(" ", "") for merge in MERGES] + SPECIALS


class Model:
    """A file being written: its metadata, and its random weights."""

    def __init__(self, path, arch, shape, name=None):
        self.arch, self.shape = arch, shape
        self.vocab = vocabulary()
        self.draw = numpy.random.default_rng(zlib.crc32(f"{arch} {shape}".encode()))
        self.out = gguf.GGUFWriter(path, arch, use_temp_file=shape.large)
        quantized = shape.type == "q8_0"
        self.out.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if quantized else gguf.LlamaFileType.MOSTLY_F16)
        self.common(name or f"random {arch}")
        self.tokenizer()

    def key(self, name, value):
        """Adds metadata of the architecture. The engine reads the keys of xIELU without its name."""
        kinds = {float: self.out.add_float32, bool: self.out.add_bool, str: self.out.add_string,
                 list: self.out.add_array, Wide: self.wide}
        add = kinds.get(type(value), self.out.add_uint32)
        add(name if name.startswith("xielu.") else f"{self.arch}.{name}", value)

    def wide(self, name, values):
        self.out.add_key_value(name, values, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT64)

    def common(self, name):
        self.out.add_name(name)
        self.key("block_count", self.shape.layers)
        self.key("context_length", self.shape.context)
        self.key("embedding_length", self.shape.width)
        self.key("attention.layer_norm_rms_epsilon", 1e-5)

    def tokenizer(self):
        kinds = [gguf.TokenType.NORMAL] * (len(self.vocab) - len(SPECIALS))
        kinds += [gguf.TokenType.CONTROL] * len(SPECIALS)
        ids = {text: at for at, text in enumerate(self.vocab)}
        self.out.add_tokenizer_model("gpt2")
        self.out.add_tokenizer_pre("gpt-2")
        self.out.add_token_list(self.vocab)
        self.out.add_token_types(kinds)
        self.out.add_token_merges(MERGES)
        self.out.add_bos_token_id(ids["<|bos|>"])
        self.out.add_eos_token_id(ids["<|endoftext|>"])
        self.out.add_eot_token_id(ids["<|im_end|>"])
        self.out.add_add_bos_token(True)
        self.out.add_chat_template(CHAT_TEMPLATE)

    def plain(self, name, values):
        """Adds a tensor that stays f32: norms, biases, and others that the engine's kernels need as f32."""
        self.out.add_tensor(name, numpy.ascontiguousarray(values, dtype=numpy.float32))

    def ones(self, name, *dims):
        self.plain(name, numpy.ones(dims, dtype=numpy.float32))

    def weight(self, name, *dims, gain=1.0):
        """Adds a matrix [..., out, in] that preserves the magnitude of its input, times gain."""
        values = self.draw.standard_normal(dims, dtype=numpy.float32) * (gain / dims[-1] ** 0.5)
        self.matrix(name, values)

    def matrix(self, name, values):
        if self.shape.type == "q8_0" and values.shape[-1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            self.out.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            self.out.add_tensor(name, values.astype(numpy.float16))

    def embeddings(self, scale=1.0):
        width = self.shape.width
        rows = self.draw.standard_normal((len(self.vocab), width), dtype=numpy.float32)
        self.matrix("token_embd.weight", rows * scale)
        self.output(width)
        self.ones("output_norm.weight", width)

    def output(self, width):
        rows = self.draw.standard_normal((len(self.vocab), width), dtype=numpy.float32) * (3 / width**0.5)
        # Keeps generated text readable, and of the requested length.
        for at, text in enumerate(self.vocab):
            if at < 256 and not 32 <= at < 127:
                rows[at] *= 0.4
            elif text in SPECIALS:
                rows[at] = 0
        self.matrix("output.weight", rows)

    def heads(self, heads, kv_heads, head_width, key_width=None, rope=None):
        self.key("attention.head_count", heads)
        self.key("attention.head_count_kv", kv_heads)
        self.key("attention.key_length", key_width or head_width)
        self.key("attention.value_length", head_width)
        self.key("rope.dimension_count", rope or head_width)
        self.key("rope.freq_base", 10000.0)

    def attention(self, layer, heads, kv_heads, head_width):
        width, at = self.shape.width, f"blk.{layer}."
        # Gains above 1, so that attention affects the output.
        self.weight(at + "attn_q.weight", heads * head_width, width, gain=1.5)
        self.weight(at + "attn_k.weight", kv_heads * head_width, width, gain=1.5)
        self.weight(at + "attn_v.weight", kv_heads * head_width, width, gain=1.5)
        self.weight(at + "attn_output.weight", width, heads * head_width, gain=self.residual_gain())

    def residual_gain(self):
        return getattr(self.shape, "residual", 1.0)

    def head_norms(self, layer, head_width):
        self.ones(f"blk.{layer}.attn_q_norm.weight", head_width)
        self.ones(f"blk.{layer}.attn_k_norm.weight", head_width)

    def feed_forward(self, layer, hidden):
        width, at = self.shape.width, f"blk.{layer}."
        self.weight(at + "ffn_gate.weight", hidden, width)
        self.weight(at + "ffn_up.weight", hidden, width)
        self.weight(at + "ffn_down.weight", width, hidden)

    def experts(self, layer, count, hidden):
        width, at = self.shape.width, f"blk.{layer}."
        self.plain(at + "ffn_gate_inp.weight", self.draw.standard_normal((count, width)) / width**0.5)
        self.weight(at + "ffn_gate_exps.weight", count, hidden, width)
        self.weight(at + "ffn_up_exps.weight", count, hidden, width)
        self.weight(at + "ffn_down_exps.weight", count, width, hidden, gain=self.residual_gain())

    def biases(self, layer, **dims):
        for name, shape in dims.items():
            self.plain(f"blk.{layer}.{name}.bias", self.draw.standard_normal(shape) / 4)

    def norms(self, layer, *names):
        for name in names:
            self.ones(f"blk.{layer}.{name}.weight", self.shape.width)

    def write(self):
        self.out.write_header_to_file()
        self.out.write_kv_data_to_file()
        self.out.write_tensors_to_file()
        self.out.close()


def head_shape(shape):
    head_width = 32 if shape.width <= 512 else 64
    heads = shape.width // head_width
    return heads, max(1, heads // 2), head_width


def make_llama(path, shape):
    model = Model(path, "llama", shape)
    heads = head_shape(shape)
    model.heads(*heads)
    model.key("feed_forward_length", shape.hidden)
    model.embeddings()
    for layer in range(shape.layers):
        model.norms(layer, "attn_norm", "ffn_norm")
        model.attention(layer, *heads)
        model.feed_forward(layer, shape.hidden)
    model.write()


def make_swa(path, shape):
    model = Model(path, "gemma3", shape)
    heads = head_shape(shape)
    model.heads(*heads)
    model.key("feed_forward_length", shape.hidden)
    model.key("attention.sliding_window", WINDOW)
    model.key("attention.sliding_window_pattern", 3)
    model.embeddings(scale=shape.width**-0.5)
    for layer in range(shape.layers):
        model.norms(layer, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        model.attention(layer, *heads)
        model.head_norms(layer, heads[2])
        model.feed_forward(layer, shape.hidden)
    model.write()


def make_moe(path, shape):
    model = Model(path, "qwen3moe", shape)
    heads, count = head_shape(shape), getattr(shape, "experts", 8)
    model.heads(*heads)
    model.key("feed_forward_length", shape.hidden)
    model.key("expert_feed_forward_length", shape.hidden // 3)
    model.key("expert_count", count)
    model.key("expert_used_count", getattr(shape, "used", 2))
    model.embeddings()
    for layer in range(shape.layers):
        model.norms(layer, "attn_norm", "ffn_norm")
        model.attention(layer, *heads)
        model.head_norms(layer, heads[2])
        model.experts(layer, count, shape.hidden // 3)
    model.write()


def make_oss(path, shape):
    model = Model(path, "gpt-oss", shape)
    heads, kv_heads, head_width = head_shape(shape)
    # Not a multiple of a page: experts begin anywhere in a page.
    count, hidden = getattr(shape, "experts", 8), shape.hidden // 3 - 32
    model.heads(heads, kv_heads, head_width)
    model.key("attention.sliding_window", WINDOW)
    model.key("feed_forward_length", hidden)
    model.key("expert_feed_forward_length", hidden)
    model.key("expert_count", count)
    model.key("expert_used_count", getattr(shape, "used", 4))
    model.embeddings()
    for layer in range(shape.layers):
        model.norms(layer, "attn_norm", "post_attention_norm")
        model.attention(layer, heads, kv_heads, head_width)
        model.plain(f"blk.{layer}.attn_sinks.weight", model.draw.standard_normal(heads))
        model.experts(layer, count, hidden)
        model.biases(layer, attn_q=heads * head_width, attn_k=kv_heads * head_width,
                     attn_v=kv_heads * head_width, attn_output=shape.width, ffn_gate_inp=count,
                     ffn_gate_exps=(count, hidden), ffn_up_exps=(count, hidden),
                     ffn_down_exps=(count, shape.width))
    model.write()


def make_mla(path, shape):
    model = Model(path, "deepseek2", shape)
    heads, _, head_width = head_shape(shape)
    latent, rope, plain, q_rank = 2 * head_width, head_width, head_width, 2 * head_width
    model.heads(heads, 1, latent, latent + rope, rope)
    model.key("attention.key_length_mla", plain + rope)
    model.key("attention.value_length_mla", head_width)
    model.key("attention.q_lora_rank", q_rank)
    model.key("attention.kv_lora_rank", latent)
    model.key("feed_forward_length", shape.hidden)
    model.key("leading_dense_block_count", 1)
    model.key("expert_feed_forward_length", shape.hidden // 3)
    model.key("expert_count", 4)
    model.key("expert_used_count", 2)
    model.key("expert_shared_count", 1)
    model.embeddings()
    for layer in range(shape.layers):
        latent_attention(model, layer, heads, plain, rope, latent, q_rank, head_width)
        model.norms(layer, "attn_norm", "ffn_norm")
        if layer == 0:
            model.feed_forward(layer, shape.hidden)
            continue
        model.experts(layer, 4, shape.hidden // 3)
        for name in ("gate", "up"):
            model.weight(f"blk.{layer}.ffn_{name}_shexp.weight", shape.hidden // 3, shape.width)
        model.weight(f"blk.{layer}.ffn_down_shexp.weight", shape.width, shape.hidden // 3)
    model.write()


def latent_attention(model, layer, heads, plain, rope, latent, q_rank, v_width):
    width, at = model.shape.width, f"blk.{layer}."
    model.weight(at + "attn_q_a.weight", q_rank, width)
    model.ones(at + "attn_q_a_norm.weight", q_rank)
    model.weight(at + "attn_q_b.weight", heads * (plain + rope), q_rank, gain=1.5)
    model.weight(at + "attn_kv_a_mqa.weight", latent + rope, width, gain=1.5)
    model.ones(at + "attn_kv_a_norm.weight", latent)
    model.weight(at + "attn_k_b.weight", heads, latent, plain)
    model.weight(at + "attn_v_b.weight", heads, v_width, latent, gain=1.5)
    model.weight(at + "attn_output.weight", width, heads * v_width)


def time_steps(model, count):
    """Inverse softplus of steps from 0.001 to 0.1: a memory of about ten to a thousand tokens."""
    steps = numpy.exp(model.draw.uniform(numpy.log(1e-3), numpy.log(1e-1), count))
    return steps + numpy.log(-numpy.expm1(-steps))


def make_mamba(path, shape):
    model = Model(path, "mamba", shape)
    width, inner, state, kernel = shape.width, 2 * shape.width, 16, 4
    rank = max(8, width // 16)
    for name, value in (("conv_kernel", kernel), ("inner_size", inner), ("state_size", state),
                        ("time_step_rank", rank)):
        model.key("ssm." + name, value)
    model.key("attention.head_count", 0)
    model.key("feed_forward_length", 0)
    model.embeddings()
    for layer in range(shape.layers):
        at = f"blk.{layer}."
        model.norms(layer, "attn_norm")
        model.weight(at + "ssm_in.weight", 2 * inner, width)
        model.plain(at + "ssm_conv1d.weight", model.draw.standard_normal((inner, kernel)) / kernel**0.5)
        model.plain(at + "ssm_conv1d.bias", numpy.zeros(inner))
        model.weight(at + "ssm_x.weight", rank + 2 * state, inner, gain=2.0)
        model.weight(at + "ssm_dt.weight", inner, rank)
        model.plain(at + "ssm_dt.bias", time_steps(model, inner))
        model.plain(at + "ssm_a", -numpy.tile(numpy.arange(1, state + 1), (inner, 1)))
        model.ones(at + "ssm_d", inner)
        model.weight(at + "ssm_out.weight", width, inner, gain=2.0)
    model.write()


def make_hybrid(path, shape):
    model = Model(path, "granitehybrid", shape)
    width, inner, state, kernel, groups = shape.width, 2 * shape.width, 16, 4, 1
    heads, kv_heads, head_width = head_shape(shape)
    ssm_heads = inner // head_width
    model.heads(heads, [0 if layer % 2 == 0 else kv_heads for layer in range(shape.layers)], head_width)
    model.key("feed_forward_length", shape.hidden)
    for name, value in (("conv_kernel", kernel), ("inner_size", inner), ("state_size", state),
                        ("time_step_rank", ssm_heads), ("group_count", groups)):
        model.key("ssm." + name, value)
    model.embeddings()
    for layer in range(shape.layers):
        model.norms(layer, "attn_norm", "ffn_norm")
        model.feed_forward(layer, shape.hidden)
        if layer % 2 == 0:
            recurrent(model, layer, inner, state, kernel, groups, ssm_heads)
        else:
            model.attention(layer, heads, kv_heads, head_width)
    model.write()


def recurrent(model, layer, inner, state, kernel, groups, heads):
    width, at, channels = model.shape.width, f"blk.{layer}.", inner + 2 * groups * state
    model.weight(at + "ssm_in.weight", inner + channels + heads, width)
    model.plain(at + "ssm_conv1d.weight", model.draw.standard_normal((channels, kernel)) / kernel**0.5)
    model.plain(at + "ssm_conv1d.bias", numpy.zeros(channels))
    model.plain(at + "ssm_dt.bias", time_steps(model, heads))
    model.plain(at + "ssm_a", -model.draw.uniform(1, 8, (heads, 1)))
    model.ones(at + "ssm_d", heads, 1)
    model.ones(at + "ssm_norm.weight", groups, inner // groups)
    model.weight(at + "ssm_out.weight", width, inner)


KINDS = {"llama": make_llama, "swa": make_swa, "moe": make_moe, "oss": make_oss, "mla": make_mla,
         "mamba": make_mamba, "hybrid": make_hybrid}
# name -> kind, layers
TINY = {"tiny-llama-f16": ("llama", 4), "tiny-swa": ("swa", 6), "tiny-moe": ("moe", 4),
        "tiny-oss": ("oss", 4), "tiny-mla": ("mla", 4), "tiny-mamba": ("mamba", 4), "tiny-hybrid": ("hybrid", 4)}


def make(kind, path, shape):
    """Writes to a temporary name first, so that a file of the final name is complete."""
    new = path.with_suffix(".new")
    KINDS[kind](new, shape)
    os.replace(new, path)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("to", type=pathlib.Path, metavar="DIRECTORY|FILE")
    parser.add_argument("names", nargs="*", metavar="NAME")
    one = parser.add_argument_group("for one FILE, which ends with .gguf")
    one.add_argument("--kind", choices=KINDS, default="llama")
    one.add_argument("--layers", type=int, default=4)
    one.add_argument("--width", type=int, default=128, help="a multiple of 64 (default 128)")
    one.add_argument("--hidden", type=int, help="width of the feed-forward part (default 3 x width)")
    one.add_argument("--experts", type=int, help="experts of a layer (kinds moe and oss; default 8)")
    one.add_argument("--used", type=int, help="experts that a token uses (default 2, oss: 4)")
    one.add_argument("--residual", type=float, metavar="GAIN",
                     help="gain of what a layer adds to the hidden state (default 1): with 0.1 the next "
                          "layer's routing can be predicted, with 8 it cannot")
    one.add_argument("--context", type=int, default=4096)
    one.add_argument("--type", choices=["f16", "q8_0"], default="f16")
    shape = parser.parse_args(arguments)
    shape.one = shape.to.suffix == ".gguf"
    if not shape.one and any(word.startswith("--") for word in arguments):
        parser.error("the tiny models have fixed sizes: name a FILE that ends with .gguf to set sizes")
    if not 1 <= shape.layers <= 256 or not 64 <= shape.width <= 16384 or shape.width % 64:
        parser.error("--layers must be 1 to 256, --width 64 to 16384 and a multiple of 64")
    shape.hidden = shape.hidden or 3 * shape.width
    if not 96 <= shape.hidden <= 65536 or shape.hidden % 96:
        parser.error("--hidden must be 96 to 65536 and a multiple of 96")
    for name in ("experts", "used", "residual"):
        # Shapes without these keep their weights: the seed is the text of the shape.
        if getattr(shape, name) is None:
            delattr(shape, name)
    if not 1 <= getattr(shape, "used", 1) <= getattr(shape, "experts", 8) <= 1024:
        parser.error("--experts must be 1 to 1024, --used 1 to --experts")
    unknown = set(shape.names) - set(TINY)
    if unknown or (shape.names and shape.one):
        parser.error(f"unknown names, or names for a FILE: with a DIRECTORY use {' '.join(TINY)}")
    return shape


def main():
    shape = parse(sys.argv[1:])
    to, names, kind, one = shape.to, shape.names, shape.kind, shape.one
    del shape.to, shape.names, shape.kind, shape.one
    shape.large = shape.layers * shape.width**2 > 1 << 24
    if one:
        make(kind, to, shape)
        return
    to.mkdir(parents=True, exist_ok=True)
    for name in names or TINY:
        kind, shape.layers = TINY[name]
        make(kind, to / f"{name}.gguf", shape)


if __name__ == "__main__":
    main()
