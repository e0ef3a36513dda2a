#!/usr/bin/env python3
"""kvtier's attention on the processor beside torch's and ggml's, each with one thread.

    attention.py [--quick] [--torch] [--ggml DIR]     DIR has libggml.so, built for this processor

Decode is one token with 32 query heads over 16,384 tokens of 8 heads; its rate counts the bytes of
keys and values. Prefill is a causal prompt of 4,096 tokens of 2 heads; its rate counts the
multiply-adds of visible keys, two operations each. Heads have 128 numbers. All sides take turns in one
process; times are processor times. Results are compared with numpy in binary64. kvtier is the
baseline. Prints JSON (sides.py).

Rows are [tokens, heads, numbers], as kvtier and llama.cpp store them, or [heads, tokens, numbers],
which torch prefers. torch gets the queries of a group as heads (enable_gqa), or as rows of one head.
ggml has its fast paths for f32 and f16, so instead of bf16 it also gets f16. torch's
flex_attention is compiled before the rounds that count.
"""

import argparse
import ctypes
import pathlib
import time

import kvtier
import numpy as np
from sides import address, contest, kvtier_versions, memory, version

DIM = 128
#: Largest difference from binary64: outputs of bf16 are rounded to 8 bits.
TOLERANCE = {"f32": 1e-5, "bf16": 1e-2}


class Case:
    """Queries, keys and values, and the right answer for some of the queries."""

    def __init__(self, dtype, queries, keys, heads, key_heads):
        random = np.random.default_rng(1)
        self.dtype, self.heads, self.key_heads = dtype, heads, key_heads
        self.tokens, self.first = keys, keys - queries
        wide = [random.uniform(-1, 1, (count, of, DIM)).astype(np.float32)
                for count, of in ((queries, heads), (keys, key_heads), (keys, key_heads))]
        if dtype == "bf16":
            # What bf16 can represent, in f32.
            wide = [(one.view(np.uint32) & 0xFFFF0000).view(np.float32) for one in wide]
        # Sharper than random keys would make it, so that weights differ.
        wide[0] *= 4
        self.wide = wide
        self.checked = sorted({0, queries // 3, queries - 1})
        self.expected = self.reference()

    def reference(self):
        queries, keys, values = (one.astype(np.float64) for one in self.wide)
        group, out = self.heads // self.key_heads, []
        for at in self.checked:
            seen = self.first + at + 1
            grouped = queries[at].reshape(self.key_heads, group, DIM)
            scores = np.einsum("hgd,thd->hgt", grouped, keys[:seen]) / DIM ** 0.5
            weights = np.exp(scores - scores.max(axis=2, keepdims=True))
            weights /= weights.sum(axis=2, keepdims=True)
            out.append(np.einsum("hgt,thd->hgd", weights, values[:seen]).reshape(self.heads, DIM))
        return np.stack(out)

    def rows(self, dtype=None):
        """Queries, keys and values of a type in memory of huge pages: f32, f16, or bf16 as uint16."""
        kinds = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}
        out = []
        for one in self.wide:
            kind = np.dtype(kinds[dtype or self.dtype])
            area = memory(one.size * kind.itemsize)
            rows = np.frombuffer(area, kind).reshape(one.shape)
            rows[:] = one.view(np.uint32) >> 16 if kind == np.uint16 else one
            out.append(rows)
        return out

    def verify(self, side, out):
        wrong = np.abs(out[self.checked] - self.expected).max()
        if not wrong <= TOLERANCE[self.dtype]:
            raise RuntimeError(f"{side} is off by {wrong:.2g}")


class Side:
    """A way to compute a case: `attend` returns outputs, `numbers` turns them into f32 rows."""

    versions = {}

    def __init__(self, case):
        self.case = case

    def decode(self, number):
        start = time.process_time()
        out = self.attend()
        took = time.process_time() - start
        if number == 0:
            self.case.verify(self.name, self.numbers(out))
        return took

    prefill = decode


class Kvtier(Side):
    versions = kvtier_versions(kvtier)

    def __init__(self, case):
        super().__init__(case)
        self.rows = case.rows()
        self.call = kvtier.kernels.prefill if case.first == 0 else kvtier.kernels.decode

    def attend(self):
        return self.call(*self.rows, first_query=self.case.first).out

    def numbers(self, out):
        return np.asarray(out)


class Torch(Side):
    """scaled_dot_product_attention, or flex_attention compiled for the shape."""

    def __init__(self, case, is_head_major, form):
        import torch

        super().__init__(case)
        self.torch, self.versions = torch, version("torch")
        torch.set_num_threads(1)
        self.is_causal, self.form = case.first == 0, form
        self.rows = [self.tensor(one, is_head_major) for one in case.rows()]
        if form == "rows":
            self.rows[0] = self.rows[0].reshape(1, case.key_heads, -1, DIM)
        self.call = self.flex() if form == "flex" else self.dense()

    def tensor(self, rows, is_head_major):
        kind = {"f32": self.torch.float32, "bf16": self.torch.bfloat16}[self.case.dtype]
        if is_head_major:
            rows.ravel()[:] = rows.transpose(1, 0, 2).ravel()
            rows = rows.reshape(rows.shape[1], rows.shape[0], DIM)
        tensor = self.torch.from_numpy(rows).view(kind)
        return (tensor if is_head_major else tensor.transpose(0, 1))[None]

    def dense(self):
        call, gqa = self.torch.nn.functional.scaled_dot_product_attention, self.form == "heads"
        return lambda *rows: call(*rows, is_causal=self.is_causal, enable_gqa=gqa)

    def flex(self):
        from torch.nn.attention import flex_attention as flex

        call, count = self.torch.compile(flex.flex_attention), self.case.tokens
        mask = None
        if self.is_causal:
            mask = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, count, count, "cpu")
        return lambda *rows: call(*rows, block_mask=mask, enable_gqa=True)

    def attend(self):
        with self.torch.inference_mode():
            return self.call(*self.rows)

    def numbers(self, out):
        out = out.reshape(self.case.heads, -1, DIM).transpose(0, 1)
        return out.to(self.torch.float32).numpy()


class Params(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class Ggml(Side):
    """ggml_flash_attn_ext, with queries of f32, as llama.cpp calls it."""

    TYPES = {"f32": 0, "f16": 1, "bf16": 30}

    def __init__(self, case, library, dtype):
        super().__init__(case)
        for name in ("libggml-base.so", "libggml-cpu.so"):
            setattr(self, name[3:-3].replace("-", "_"),
                    ctypes.CDLL(str(library / name), mode=ctypes.RTLD_GLOBAL))
        base, cpu = self.ggml_base, self.ggml_cpu
        for call in (base.ggml_init, base.ggml_new_tensor_4d, base.ggml_permute, base.ggml_get_data,
                     base.ggml_flash_attn_ext, base.ggml_new_graph, cpu.ggml_backend_cpu_init):
            call.restype = ctypes.c_void_p
        base.ggml_version.restype = ctypes.c_char_p
        self.versions = {"ggml": base.ggml_version().decode()}
        queries, keys, values = case.rows("f32")[0], *case.rows(dtype)[1:]
        nbytes = sum(one.nbytes for one in (queries, queries, keys, values)) + 2 * case.tokens ** 2
        self.area = memory(nbytes + (8 << 20))
        self.context = ctypes.c_void_p(base.ggml_init(
            Params(len(self.area), ctypes.c_void_p(address(self.area)), False)))
        out = base.ggml_flash_attn_ext(
            self.context, self.tensor(queries, "f32"), self.tensor(keys, dtype),
            self.tensor(values, dtype), self.mask(), ctypes.c_float(DIM ** -0.5), ctypes.c_float(0),
            ctypes.c_float(0))
        self.graph = ctypes.c_void_p(base.ggml_new_graph(self.context))
        base.ggml_build_forward_expand(self.graph, ctypes.c_void_p(out))
        self.out = np.ctypeslib.as_array(
            ctypes.cast(base.ggml_get_data(ctypes.c_void_p(out)), ctypes.POINTER(ctypes.c_float)),
            queries.shape)
        self.backend = ctypes.c_void_p(cpu.ggml_backend_cpu_init())
        cpu.ggml_backend_cpu_set_n_threads(self.backend, 1)

    def filled(self, rows, dtype):
        sizes = [ctypes.c_int64(one) for one in (*reversed(rows.shape), 1, 1)[:4]]
        tensor = ctypes.c_void_p(
            self.ggml_base.ggml_new_tensor_4d(self.context, self.TYPES[dtype], *sizes))
        ctypes.memmove(self.ggml_base.ggml_get_data(tensor), rows.ctypes.data, rows.nbytes)
        return tensor

    def tensor(self, rows, dtype):
        """Rows as heads of tokens, in place."""
        tensor = self.filled(rows, dtype)
        return ctypes.c_void_p(self.ggml_base.ggml_permute(self.context, tensor, 0, 2, 1, 3))

    def mask(self):
        if self.case.first > 0:
            return None
        hidden = np.triu(np.full((self.case.tokens, self.case.tokens), -np.inf, np.float16), 1)
        return self.filled(hidden, "f16")

    def attend(self):
        status = self.ggml_base.ggml_backend_graph_compute(self.backend, self.graph)
        if status != 0:
            raise RuntimeError(f"ggml_backend_graph_compute returned {status}")
        return self.out

    def numbers(self, out):
        return out


def sides(case, has_torch, ggml):
    makes = [("kvtier", lambda: Kvtier(case))]
    if has_torch:
        makes += [("torch, heads", lambda: Torch(case, True, "heads")),
                  ("torch, heads, tokens first", lambda: Torch(case, False, "heads"))]
        if case.heads != case.key_heads:
            makes.append(("torch, rows", lambda: Torch(case, True, "rows")))
        makes.append(("torch, flex", lambda: Torch(case, True, "flex")))
    if ggml:
        makes += [(f"ggml, {kind}", lambda kind=kind: Ggml(case, ggml, kind))
                  for kind in (("f16", "bf16") if case.dtype == "bf16" else ("f32",))]
    return makes


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--ggml", type=pathlib.Path)
    args = parser.parse_args()
    for op, rounds, case in (("decode", 40, Case("bf16", 1, 16_384, 32, 8)),
                             ("prefill", 7, Case("f32", 4096, 4096, 2, 2)),
                             ("prefill", 7, Case("bf16", 4096, 4096, 2, 2))):
        work, unit = 4 * case.tokens * case.key_heads * DIM, "GiB/s"
        if op == "prefill":
            work, unit = 2 * DIM * case.heads * case.tokens * (case.tokens + 1), "Gflop/s"
        contest("attention", sides(case, args.torch, args.ggml), [[op]], work, 2,
                max(3, rounds // 3) if args.quick else rounds, unit, size=case.dtype)


main()
