#!/usr/bin/env python3
"""Writes a vision encoder of random weights for a text model, as llama-server takes it with --mmproj:

    vision.py FILE.gguf --width WIDTH

WIDTH is the text model's. The shape is Gemma 3's: every image is 64 embeddings, which attend to one another.
The same arguments make the same file. Needs the packages numpy and gguf.
"""

import argparse
import os
import pathlib

import gguf
import numpy

LAYERS, INNER, HEADS, HIDDEN = 2, 64, 4, 128
IMAGE, PATCH, MERGE = 256, 8, 4


def layer_norm(out, name):
    out.add_tensor(name + ".weight", numpy.ones(INNER, numpy.float32))
    out.add_tensor(name + ".bias", numpy.zeros(INNER, numpy.float32))


def write(path, width):
    draw = numpy.random.default_rng(width)
    out = gguf.GGUFWriter(path, "clip")
    out.add_bool("clip.has_vision_encoder", True)
    out.add_bool("clip.use_gelu", True)
    out.add_string("clip.projector_type", "gemma3")
    sizes = {"embedding_length": INNER, "feed_forward_length": HIDDEN, "block_count": LAYERS,
             "projection_dim": width, "attention.head_count": HEADS, "image_size": IMAGE, "patch_size": PATCH,
             "projector.scale_factor": MERGE}
    for name, value in sizes.items():
        out.add_uint32("clip.vision." + name, value)
    out.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    out.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    out.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])

    def weight(name, *shape, kind=numpy.float16):
        out.add_tensor(name, (draw.standard_normal(shape) / shape[-1]**0.5).astype(kind))

    def linear(name, rows, columns):
        weight(name + ".weight", rows, columns)
        out.add_tensor(name + ".bias", numpy.zeros(rows, numpy.float32))

    weight("v.patch_embd.weight", INNER, 3, PATCH, PATCH)
    out.add_tensor("v.patch_embd.bias", numpy.zeros(INNER, numpy.float32))
    weight("v.position_embd.weight", (IMAGE // PATCH)**2, INNER, kind=numpy.float32)
    for layer in range(LAYERS):
        at = f"v.blk.{layer}."
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            linear(at + part, INNER, INNER)
        linear(at + "ffn_up", HIDDEN, INNER)
        linear(at + "ffn_down", INNER, HIDDEN)
        layer_norm(out, at + "ln1")
        layer_norm(out, at + "ln2")
    layer_norm(out, "v.post_ln")
    weight("mm.input_projection.weight", INNER, width)
    out.add_tensor("mm.soft_emb_norm.weight", numpy.ones(INNER, numpy.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("to", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--width", type=int, required=True)
    options = parser.parse_args()
    new = options.to.with_suffix(".new")
    write(new, options.width)
    os.replace(new, options.to)


if __name__ == "__main__":
    main()
