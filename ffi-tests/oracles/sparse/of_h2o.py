"""Tokens that H2O's `H2OKVCache_LayerWise` keeps, step by step: the family of
tests/data/sparse/h2o.json. This class really drops tokens.

Only this class is extracted from the file, because the rest needs an old transformers. It gets the
attention of a prompt, then of one query at a time over the kept tokens. It has no groups: each query
head has its own keys.
"""

import ast
import contextlib
import hashlib
import os
import pathlib

import torch

from portable import Missing, attention, inputs, packed

NAME = "H2OKVCache_LayerWise"


def source():
    path = pathlib.Path(os.environ.get("KVTIER_H2O") or "none")
    if not path.is_file():
        raise Missing("modify_llama.py (h2o_hf/utils_real_drop) of FMInference/H2O (--h2o FILE)")
    text = path.read_text()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name == NAME:
            return ast.get_source_segment(text, node)
    raise Missing(f"{path} has no {NAME}")


def versions():
    # The file has no version, so the hash of the class identifies it.
    text = "\n".join(line.strip() for line in source().splitlines())
    return {NAME: hashlib.sha256(text.encode()).hexdigest()[:16], "torch": torch.__version__.split("+")[0]}


def cases():
    for n, (heads, tokens, heavy, recent) in enumerate(
        [(4, 130, 20, 20), (2, 100, 5, 40), (8, 80, 30, 1), (3, 60, 16, 29)]
    ):
        yield {"name": f"h2o {n}", "ask": "steps", "spec": f"h2o(sink=0,budget={heavy},recent={recent})",
               "heads": heads, "key_heads": heads, "dim": 16, "tokens": tokens, "prompt": tokens - 30,
               "gains": [4.0, 2.0, 6.0], "period": 0, "layers": 1, "layer": 0, "heavy": heavy,
               "recent": recent}  # fmt: skip


def run(case, watch):
    names = {"torch": torch}
    exec(compile(source(), NAME, "exec"), names)
    with contextlib.redirect_stdout(None):
        cache = names[NAME](hh_size=case["heavy"], recent_size=case["recent"])
    q, k = inputs(case)
    heads, prompt = case["heads"], case["prompt"]
    positions = torch.arange(case["tokens"], dtype=torch.float32)[None, None, :, None].expand_as(k)
    keys, kept = k[:, :, :prompt], positions[:, :, :prompt]
    new, out = q[:, :, :prompt], []
    for end in range(prompt, case["tokens"] + 1):
        with watch:
            keys, kept = cache((keys.contiguous(), kept.contiguous()), attention(new, keys))
        out.append([packed(kept[0, head, :, 0].tolist()) for head in range(heads)])
        if end < case["tokens"]:
            keys = torch.cat([keys, k[:, :, end : end + 1]], 2)
            kept = torch.cat([kept, positions[:, :, end : end + 1]], 2)
            new = q[:, :, end : end + 1]
    return {"steps": out}
