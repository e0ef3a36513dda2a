#!/usr/bin/env python3
"""Model files written by the packages gguf and safetensors, and their contents as these packages read
them: tests/data/stream/*, with which tests/stream/oracle.rs compares the library.

    models.py --write DIR    writes the files and models.json
    models.py --check DIR    reads the files in DIR and compares with models.json

The library's tests do not need this program. Packages: gguf==0.19.0 safetensors==0.8.0 numpy ml_dtypes
"""

import argparse
import hashlib
import importlib.metadata
import json
import pathlib
import random
import struct
import sys

try:
    import gguf
    import ml_dtypes
    import numpy as np
    import safetensors
    import safetensors.numpy
except ImportError as error:
    print(f"SKIP: the oracle of model files needs the packages gguf and safetensors: {error}")
    sys.exit(0)

KINDS = gguf.GGMLQuantizationType


def digest(data):
    """64-bit FNV-1a: short in any language, and sufficient to distinguish places."""
    value = 0xCBF29CE484222325
    for byte in bytes(data):
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{value:016x}"


def noise(name, count):
    """Bytes that depend only on a name."""
    return np.frombuffer(hashlib.shake_256(name.encode()).digest(count), dtype=np.uint8)


# ---- GGUF

def add(writer, name, kind, shape):
    """Adds a tensor; the outermost dimension of its shape comes first."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows = [*shape[:-1], shape[-1] // block * size]
    data = noise(name, int(np.prod(rows))).reshape(rows)
    plain = {KINDS.F32: np.float32, KINDS.F16: np.float16, KINDS.F64: np.float64, KINDS.I8: np.int8,
             KINDS.I16: np.int16, KINDS.I32: np.int32, KINDS.I64: np.int64}  # fmt: skip
    if kind in plain:
        writer.add_tensor(name, data.view(plain[kind]))
    else:
        writer.add_tensor(name, data, raw_dtype=kind)


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def describe(writer, layers, experts=0):
    writer.add_block_count(layers)
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_token_list([f"word {n}" for n in range(20)])
    writer.add_token_scores([0.5] * 20)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)


def layer(writer, n, experts):
    add(writer, f"blk.{n}.attn_norm.weight", KINDS.F32, [32])
    add(writer, f"blk.{n}.attn_q.weight", KINDS.Q8_0, [32, 32])
    add(writer, f"blk.{n}.attn_k.weight", KINDS.F16, [16, 32])
    if experts:
        add(writer, f"blk.{n}.ffn_gate_inp.weight", KINDS.F32, [experts, 32])
        add(writer, f"blk.{n}.ffn_up_exps.weight", KINDS.Q4_0, [experts, 3, 32])
        add(writer, f"blk.{n}.ffn_down_exps.weight", KINDS.Q8_0, [experts, 2, 32])
        add(writer, f"blk.{n}.ffn_down_exps.bias", KINDS.F32, [experts, 2])
        add(writer, f"blk.{n}.ffn_up_shexp.weight", KINDS.Q4_0, [3, 32])
    else:
        add(writer, f"blk.{n}.ffn_up.weight", KINDS.BF16, [24, 32])


def ends(writer):
    add(writer, "output_norm.weight", KINDS.F32, [32])
    add(writer, "output.weight", KINDS.Q8_0, [20, 32])
    add(writer, "rope_freqs.weight", KINDS.F32, [4])


def gguf_dense(folder):
    writer = gguf.GGUFWriter(folder / "dense.gguf", "llama")
    describe(writer, 2)
    writer.add_custom_alignment(64)
    writer.add_array("test.bools", [True, False, True])
    writer.add_array("test.floats", [0.5, 1.5])
    writer.add_int64("test.negative", -7)
    writer.add_float64("test.float", 2.5)
    writer.add_key_value("test.nested", [[1, 2], [3]], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.ARRAY)
    add(writer, "token_embd.weight", KINDS.F16, [20, 32])
    for n in range(2):
        layer(writer, n, 0)
    ends(writer)
    finish(writer)
    return ["dense.gguf"]


def gguf_split(folder):
    writer = gguf.GGUFWriter(folder / "moe.gguf", "llama", split_max_tensors=6)
    describe(writer, 2, experts=3)
    add(writer, "token_embd.weight", KINDS.F16, [20, 32])
    for n in range(2):
        layer(writer, n, 3)
    ends(writer)
    finish(writer)
    return sorted(path.name for path in folder.glob("moe-*.gguf"))


def gguf_types(folder):
    """A three-dimensional tensor of every type."""
    writer = gguf.GGUFWriter(folder / "types.gguf", "none")
    for kind in KINDS:
        # The package has 40 bytes for a block of Q8_1. ggml has 36, since its sums have 16 bits.
        if kind != KINDS.Q8_1:
            add(writer, f"of {kind.name}", kind, [2, 1, gguf.GGML_QUANT_SIZES[kind][0] * 2])
    finish(writer)
    return ["types.gguf"]


def gguf_mla(folder):
    """Compressed keys, and numbers of heads that differ between layers."""
    writer = gguf.GGUFWriter(folder / "mla.gguf", "deepseek2")
    describe(writer, 1)
    writer.add_kv_lora_rank(12)
    writer.add_key_length(16)
    writer.add_key_length_mla(10)
    writer.add_value_length(12)
    writer.add_rope_dimension_count(4)
    add(writer, "token_embd.weight", KINDS.F16, [20, 32])
    finish(writer)
    writer = gguf.GGUFWriter(folder / "mixed.gguf", "jamba")
    writer.add_head_count([4, 8, 4])
    writer.add_head_count_kv([0, 2, 0])
    writer.add_embedding_length(64)
    writer.add_vocab_size(77)
    add(writer, "token_embd.weight", KINDS.F16, [20, 32])
    finish(writer)
    return ["mla.gguf"], ["mixed.gguf"]


def gguf_big_endian(folder):
    writer = gguf.GGUFWriter(folder / "big.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    add(writer, "t", KINDS.F32, [2])
    finish(writer)


def contents_of_gguf(folder, names):
    tensors, facts = [], None
    for number, name in enumerate(names):
        reader = gguf.GGUFReader(folder / name)
        for tensor in reader.tensors:
            data = np.ascontiguousarray(tensor.data).view(np.uint8)
            stacked = "_exps" in tensor.name and len(tensor.data) > 1
            tensors.append({
                "name": tensor.name, "dtype": tensor.tensor_type.name, "dims": [int(d) for d in tensor.shape],
                "file": number, "offset": int(tensor.data_offset), "bytes": int(tensor.n_bytes),
                "digest": digest(data), "experts": [digest(row.tobytes()) for row in tensor.data] if stacked else [],
            })  # fmt: skip
        if number == 0:
            facts = facts_of_gguf(reader)
    return {"format": "gguf", "files": names, "tensors": tensors, "facts": facts}


def facts_of_gguf(reader):
    def value(key):
        field = reader.get_field(key)
        return None if field is None else field.contents()

    arch = value("general.architecture")

    def most(key):
        found = value(f"{arch}.{key}") or 0
        return max(found) if isinstance(found, list) else found

    facts = {"architecture": arch, "layers": most("block_count"), "hidden": most("embedding_length"),
             "heads": most("attention.head_count"), "context": most("context_length"),
             "experts": most("expert_count"), "experts_used": most("expert_used_count")}  # fmt: skip
    words = value("tokenizer.ggml.tokens")
    facts["vocabulary"] = len(words) if words else most("vocab_size")
    facts["kv_heads"] = most("attention.head_count_kv")
    return facts


def numbers_of(folder):
    """Numbers that the package dequantizes from noise, and bytes that it quantizes from numbers."""
    found = {}
    for tensor in gguf.GGUFReader(folder / "types.gguf").tensors:
        if tensor.tensor_type.name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"):
            with np.errstate(all="ignore"):
                numbers = gguf.quants.dequantize(np.asarray(tensor.data), tensor.tensor_type)
            bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32).flatten()
            # NaN has many bit patterns.
            bits[np.isnan(bits.view(np.float32))] = 0x7FC00000
            found[tensor.tensor_type.name] = digest(bits.tobytes())
    plain = ((np.arange(512) * 7919 % 2003).astype(np.float32) - 1001) / 640
    made = {kind.name: digest(gguf.quants.quantize(plain.reshape(2, 256), kind).tobytes())
            for kind in (KINDS.F32, KINDS.F16, KINDS.BF16, KINDS.Q8_0, KINDS.Q4_0)}  # fmt: skip
    return {"found": found, "made": made}


# ---- safetensors

def crafted(header, data=b""):
    header = header if isinstance(header, bytes) else header.encode()
    return struct.pack("<Q", len(header)) + header + data


def layer_hf(n, experts, stacked):
    tensors = {f"model.layers.{n}.input_layernorm.weight": ((16,), np.float32),
               f"model.layers.{n}.self_attn.q_proj.weight": ((16, 16), ml_dtypes.bfloat16)}  # fmt: skip
    if stacked:
        tensors[f"model.layers.{n}.mlp.experts.gate_up_proj"] = ((experts, 16, 8), np.float16)
        tensors[f"model.layers.{n}.mlp.experts.down_proj"] = ((experts, 4, 16), np.float16)
    else:
        for e in range(experts):
            tensors[f"model.layers.{n}.mlp.experts.{e}.down_proj.weight"] = ((16, 4), ml_dtypes.float8_e4m3fn)
    return tensors


def filled(tensors):
    out = {}
    for name, (shape, kind) in tensors.items():
        count = int(np.prod(shape)) * np.dtype(kind).itemsize
        data = noise(name, count)
        # A bool must be 0 or 1.
        out[name] = (data & 1).view(np.bool_).reshape(shape) if kind == np.bool_ else data.view(kind).reshape(shape)
    return out


CONFIG = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4,
          "num_key_value_heads": 2, "num_experts": 3, "num_experts_per_tok": 2, "vocab_size": 10,
          "max_position_embeddings": 512}  # fmt: skip


def whole(stacked):
    tensors = {"model.embed_tokens.weight": ((10, 16), ml_dtypes.bfloat16)}
    for n in range(2):
        tensors |= layer_hf(n, 3, stacked)
    return tensors | {"model.norm.weight": ((16,), np.float32), "lm_head.weight": ((10, 16), ml_dtypes.bfloat16)}


def sharded(folder):
    tensors, names, weights = whole(False), [], {}
    for number in range(3):
        name = f"model-{number + 1:05}-of-00003.safetensors"
        some = dict(list(tensors.items())[number::3])
        safetensors.numpy.save_file(filled(some), folder / name, metadata={"format": "np"})
        names.append(name)
        weights |= {tensor: name for tensor in some}
    index = {"metadata": {"total_size": 1}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return names


def one_file(folder):
    safetensors.numpy.save_file(filled(whole(True)), folder / "stacked.safetensors", metadata={"format": "np"})
    kinds = [np.bool_, np.uint8, np.int8, np.int16, np.uint16, np.float16, np.int32, np.uint32, np.float32,
             np.float64, np.int64, np.uint64, np.complex64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn,
             ml_dtypes.float8_e5m2]  # fmt: skip
    tensors = {f"of {np.dtype(kind).name}": ((2, 3), kind) for kind in kinds}
    tensors |= {"a number": ((), np.float32), "nothing": ((0, 5), np.float32)}
    safetensors.numpy.save_file(filled(tensors), folder / "types.safetensors")
    return ["stacked.safetensors"], ["types.safetensors"]


def contents_of_safetensors(folder, names):
    tensors = []
    for number, name in enumerate(names):
        data = (folder / name).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        for tensor, info in safetensors.deserialize(data):
            content = bytes(info["data"])
            stacked = "experts." in tensor and len(info["shape"]) == 3
            each = len(content) // info["shape"][0] if stacked else 0
            tensors.append({
                "name": tensor, "dtype": info["dtype"], "dims": info["shape"][::-1], "file": number,
                "offset": 8 + length + json.loads(data[8 : 8 + length])[tensor]["data_offsets"][0],
                "bytes": len(content), "digest": digest(content),
                "experts": [digest(content[at : at + each]) for at in range(0, len(content), each)] if each else [],
            })  # fmt: skip
    # The package returns them in varying order.
    tensors.sort(key=lambda tensor: (tensor["file"], tensor["offset"], tensor["name"]))
    return {"format": "safetensors", "files": names, "tensors": tensors, "facts": None}


def headers():
    """Valid and invalid headers, each with the size of its data."""
    random.seed(7)
    kinds = ["BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ",
             "F8_E5M2FNUZ", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64",
             "F128", "I4", "u8"]  # fmt: skip
    found = []
    for kind in kinds:
        for count, size in [(8, 4), (8, 6), (8, 8), (8, 16), (8, 32), (8, 64), (3, 2)]:
            found.append((f'{{"t":{{"dtype":"{kind}","shape":[{count}],"data_offsets":[0,{size}]}}}}', size))
    base = '{"__metadata__":{"k":"v"},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},' \
           '"b":{"dtype":"F16","shape":[1,2],"data_offsets":[2,6]}}'  # fmt: skip
    found += [(base, n) for n in range(4, 9)]
    letters = ' {}[]",:0123456789-.eU8F16ab\\u'
    for _ in range(400):
        text = list(base)
        for _ in range(random.choice([1, 1, 1, 2, 3])):
            at = random.randrange(len(text))
            kind_of_edit = random.randrange(3)
            if kind_of_edit == 0:
                text[at] = random.choice(letters)
            elif kind_of_edit == 1:
                text.insert(at, random.choice(letters))
            else:
                del text[at]
        found.append(("".join(text), 6))
    for _ in range(60):
        text = list(base)
        for _ in range(random.choice([1, 2, 3])):
            at = random.choice([n for n, letter in enumerate(text) if letter in "{}[]:,"])
            text.insert(at + random.randrange(2), random.choice(" \t\n\r"))
        found.append(("".join(text), 6))
    return found


def verdicts(headers):
    """The names of the tensors that the package finds, or None if it refuses the header."""
    out = []
    for header, size in headers:
        try:
            names = sorted(name for name, _ in safetensors.deserialize(crafted(header, b"\7" * size)))
        except safetensors.SafetensorError:
            names = None
        out.append([header, size, names])
    return out


# ---- all

def contents(folder, headers):
    models = {name: contents_of_gguf(folder, files) for name, files in [
        ("dense", ["dense.gguf"]), ("types", ["types.gguf"]), ("mla", ["mla.gguf"]), ("mixed", ["mixed.gguf"]),
        ("split", sorted(path.name for path in folder.glob("moe-*.gguf")))]}  # fmt: skip
    shards = sorted(path.name for path in folder.glob("model-*.safetensors"))
    for name, files in [("sharded", shards), ("stacked", ["stacked.safetensors"]), ("kinds", ["types.safetensors"])]:
        models[name] = contents_of_safetensors(folder, files)
    sizes = [[int(kind), kind.name, *gguf.GGML_QUANT_SIZES[kind]] for kind in KINDS]
    versions = {name: importlib.metadata.version(name) for name in ("gguf", "safetensors")}
    return {"versions": versions, "sizes": sizes, "models": models, "verdicts": verdicts(headers),
            "numbers": numbers_of(folder)}  # fmt: skip


def text(found):
    """One line per model and verdict, so that a diff shows changes."""
    def short(value):
        return json.dumps(value, separators=(",", ":"))

    models = ",\n".join(f"{short(name)}:{short(model)}" for name, model in found["models"].items())
    lines = ",\n".join(short(verdict) for verdict in found["verdicts"])
    numbers = short(found["numbers"])
    head = f'"versions":{short(found["versions"])},\n"sizes":{short(found["sizes"])}'
    return f'{{{head},\n"models":{{\n{models}}},\n"verdicts":[\n{lines}],\n"numbers":{numbers}}}\n'


def main():
    parser = argparse.ArgumentParser(description="model files by the packages gguf and safetensors")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=pathlib.Path)
    what.add_argument("--check", type=pathlib.Path)
    args = parser.parse_args()
    if args.write:
        args.write.mkdir(parents=True, exist_ok=True)
        for make in (gguf_dense, gguf_split, gguf_types, gguf_mla, gguf_big_endian, sharded, one_file):
            make(args.write)
        (args.write / "models.json").write_text(text(contents(args.write, headers())))
        return 0
    committed = json.loads((args.check / "models.json").read_text())
    tested = [(header, size) for header, size, _ in committed["verdicts"]]
    current = json.loads(text(contents(args.check, tested)))
    versions = current.pop("versions")
    if committed.pop("versions") != versions:
        print(f"models.json was made with other versions; installed are {versions}")
    for key in current:
        if current[key] != committed[key]:
            print(f"'{key}' of models.json differs from the packages' results; run --write")
            return 1
    print(f"{len(current['models'])} models and {len(current['verdicts'])} headers agree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
