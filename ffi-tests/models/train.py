#!/usr/bin/env python3
"""Trains the two small models of the reference engine offline, and writes their weights and fixtures.

    python3 ffi-tests/models/train.py gqa          # tests/data/models/gqa.kvm, gqa.logits
    python3 ffi-tests/models/train.py mla
    python3 ffi-tests/models/train.py gqa --fixture    # only the logits, of existing weights
    python3 ffi-tests/models/train.py gqa --check      # the quality of the weights

It needs torch, one core, and about 15 minutes per model. The seed is fixed: the same torch on the same
kind of CPU gives the same weights. Nothing is downloaded, because texts are generated here.
docs/internals/reference-engine.md describes them; `crates/lab/src/reference/text.rs` generates the same ones.

Weights file: 16 little-endian u32 (magic, version, kind, then sizes, see `HEADER`), then all tensors in
the order of `tensors`, rows of outputs, as f16. Logits file: four u32 (tokens, rows, and what `fixture`
masks), the tokens as bytes, then the logits of the last tokens as f32, with all keys and with few.
"""

import argparse
import math
import struct
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

OUT = Path(__file__).resolve().parents[2] / "tests" / "data" / "models"
MAGIC = 0x4D52564B  # "KVRM"
HEADER = "vocab layers width hidden heads key_heads nope rope value latent theta".split()

# Symbols: letters, then these, then 32 keys and 32 values.
SPACE, STOP, PAIR, ASK, BEGIN = 26, 27, 28, 29, 30
KEYS, VALUES, VOCAB = 32, 64, 96
VERBS = "sees takes finds makes holds sends wants gives calls loses opens keeps turns needs tells meets".split()
LOOKS = "old new red low big sad raw dry hot shy odd dim wet fat mad calm".split()
THINGS = "door lamp boat coin road tree song book wall ring rope field clock stone glass river".split()

KINDS = {
    # Like Llama: rotary keys; groups of query heads share a key head.
    "gqa": dict(vocab=VOCAB, layers=3, width=64, hidden=160, heads=4, key_heads=2,
                nope=0, rope=32, value=32, latent=0, theta=20000),
    # Latent attention: all heads share a row of `latent` numbers and `rope` rotated ones.
    "mla": dict(vocab=VOCAB, layers=3, width=64, hidden=160, heads=4, key_heads=1,
                nope=32, rope=16, value=32, latent=48, theta=20000),
}


def letters(word):
    return [ord(c) - ord("a") for c in word]


def text(rng, length):
    """`length` symbols of sentences about a few names, and the positions where words begin."""
    names = [list(rng.integers(0, 26, 4)) for _ in range(6)]
    out, starts = [], []
    while len(out) < length:
        pick = rng.integers(0, [6, 16, 16, 16, 6])
        words = [names[pick[0]], letters(VERBS[pick[1]]), letters("the"), letters(LOOKS[pick[2]]),
                 letters(THINGS[pick[3]]), letters("of"), names[pick[4]]]
        for word in words:
            starts.append(len(out))
            out += word
            out.append(SPACE)
        out[-1] = STOP
    return out[:length], [s for s in starts if s < length]


def sample(rng, tokens, pairs, questions):
    """A text with pairs of keys and values between its words, then questions about some of them.

    Returns the symbols and the target behind each, -1 if it is unpredictable. Answers are not part
    of the text: a question follows a question."""
    body = tokens - 1 - 3 * pairs - 2 * questions
    chars, starts = text(rng, body)
    keys = rng.permutation(32)[:pairs]
    values = rng.integers(0, 32, pairs)
    places = np.sort(rng.choice(len(starts), pairs, replace=len(starts) < pairs))
    out, last = [BEGIN], 0
    for key, value, place in zip(keys, values, places):
        out += chars[last:starts[place]] + [PAIR, KEYS + key, VALUES + value]
        last = starts[place]
    out += chars[last:]
    questioned = [rng.permutation(pairs) for _ in range(-(-questions // pairs))]
    questioned = np.concatenate(questioned)[:questions]
    targets = [symbol if symbol <= STOP else -1 for symbol in out[1:]] + [-1]
    for place in questioned:
        out += [ASK, KEYS + keys[place]]
        targets += [-1, VALUES + values[place]]
    return out, targets


def batch(rng, count, tokens, pairs, questions, reach):
    rows = [sample(rng, tokens, pairs, questions) for _ in range(count)]
    symbols = torch.tensor(np.array([row[0] for row in rows]), dtype=torch.long)
    targets = torch.tensor(np.array([row[1] for row in rows]), dtype=torch.long)
    # Some positions jump, so that the model learns distances up to `reach` from shorter texts.
    steps = np.ones((count, tokens), dtype=np.int64)
    for row in steps:
        spare = rng.integers(0, max(1, reach - tokens))
        cuts = np.sort(rng.integers(0, spare + 1, 6))
        row[rng.integers(1, tokens, 6)] += np.diff(np.concatenate([cuts, [spare]]))
    return symbols, targets, torch.tensor(steps.cumsum(1) - 1)


class Norm(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.gain


def linear(inputs, outputs, scale=1.0):
    layer = torch.nn.Linear(inputs, outputs, bias=False)
    torch.nn.init.normal_(layer.weight, std=scale / math.sqrt(inputs))
    return layer


def turn(x, cos, sin):
    """Rotates the first half of the numbers with the second (rotary positions)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Layer(torch.nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        width, heads, last = c["width"], c["heads"], 1.0 / math.sqrt(2 * c["layers"])
        self.first, self.second = Norm(width), Norm(width)
        self.q = linear(width, heads * (c["nope"] + c["rope"]))
        if c["latent"]:
            self.down = linear(width, c["latent"])
            self.norm = Norm(c["latent"])
            self.pe = linear(width, c["rope"])
            self.up_k = linear(c["latent"], heads * c["nope"])
            self.up_v = linear(c["latent"], heads * c["value"])
        else:
            self.k = linear(width, c["key_heads"] * c["rope"])
            self.v = linear(width, c["key_heads"] * c["value"])
        self.o = linear(heads * c["value"], width, last)
        self.gate, self.up = linear(width, c["hidden"]), linear(width, c["hidden"])
        self.down_mlp = linear(c["hidden"], width, last)

    def attend(self, x, cos, sin):
        c, (b, t, _) = self.c, x.shape
        heads = lambda y, n: y.view(b, t, n, -1).transpose(1, 2)
        q = heads(self.q(x), c["heads"])
        if c["latent"]:
            latent = self.norm(self.down(x))
            pe = turn(heads(self.pe(x), 1), cos, sin).expand(-1, c["heads"], -1, -1)
            k = torch.cat([heads(self.up_k(latent), c["heads"]), pe], -1)
            v = heads(self.up_v(latent), c["heads"])
            q = torch.cat([q[..., :c["nope"]], turn(q[..., c["nope"]:], cos, sin)], -1)
            v = F.pad(v, (0, k.shape[-1] - v.shape[-1]))
        else:
            group = c["heads"] // c["key_heads"]
            q = turn(q, cos, sin)
            k = turn(heads(self.k(x), c["key_heads"]), cos, sin).repeat_interleave(group, 1)
            v = heads(self.v(x), c["key_heads"]).repeat_interleave(group, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., :c["value"]]
        return self.o(y.transpose(1, 2).reshape(b, t, -1))

    def forward(self, x, cos, sin):
        x = x + self.attend(self.first(x), cos, sin)
        y = self.second(x)
        return x + self.down_mlp(F.silu(self.gate(y)) * self.up(y))


class Model(torch.nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.symbols = torch.nn.Embedding(c["vocab"], c["width"])
        self.layers = torch.nn.ModuleList(Layer(c) for _ in range(c["layers"]))
        self.last = Norm(c["width"])
        self.out = linear(c["width"], c["vocab"])

    def forward(self, symbols, positions):
        half = self.c["rope"] // 2
        powers = torch.arange(half, dtype=torch.float64) / half
        angles = positions[:, None, :, None].double() * self.c["theta"] ** -powers
        cos, sin = angles.cos().to(self.out.weight.dtype), angles.sin().to(self.out.weight.dtype)
        x = self.symbols(symbols)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.out(self.last(x))


def tensors(model):
    """All weights in file order."""
    yield model.symbols.weight
    for layer in model.layers:
        yield layer.first.gain
        yield layer.q.weight
        if model.c["latent"]:
            yield from (layer.down.weight, layer.norm.gain, layer.pe.weight,
                        layer.up_k.weight, layer.up_v.weight)
        else:
            yield from (layer.k.weight, layer.v.weight)
        yield from (layer.o.weight, layer.second.gain, layer.gate.weight, layer.up.weight,
                    layer.down_mlp.weight)
    yield model.last.gain
    yield model.out.weight


class Muon(torch.optim.Optimizer):
    """The Muon optimizer for matrices: orthogonalized momentum (Jordan et al., 2024)."""

    def __init__(self, params):
        super().__init__(params, dict(lr=0.02, momentum=0.95))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                m = state.setdefault("m", torch.zeros_like(p))
                m.mul_(group["momentum"]).add_(p.grad)
                g = p.grad + group["momentum"] * m
                x = g.T if g.shape[0] > g.shape[1] else g
                x = x / (x.norm() + 1e-7)
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                x = x.T if g.shape[0] > g.shape[1] else x
                p.add_(x, alpha=-group["lr"] * max(1.0, g.shape[0] / g.shape[1]) ** 0.5)


def losses(logits, targets):
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none")
    is_answer = (targets >= VALUES).flatten()
    is_text = ((targets >= 0) & (targets < VALUES)).flatten()
    right = (logits.argmax(-1).flatten() == targets.flatten())[is_answer].float().mean()
    return each[is_text].mean(), each[is_answer].mean(), right


# Steps, rows of a step, symbols of a row, pairs, questions. The texts get longer.
STAGES = {
    "gqa": [(500, 64, 80, 8, 16), (700, 40, 128, 12, 24), (500, 20, 256, 16, 32),
            (300, 10, 512, 24, 48), (120, 5, 1024, 28, 56), (60, 3, 2048, 32, 64)],
    "mla": [(450, 64, 80, 8, 16), (500, 40, 128, 12, 24), (200, 20, 256, 16, 32),
            (120, 10, 512, 24, 48), (60, 5, 1024, 28, 56), (30, 3, 2048, 32, 64)],
}
REACH = 4096
# Fixture: rows of logits, and the visible keys of the masked run.
ROWS, SINKS, NEAR = 24, 4, 60


def train(model, rng, stages):
    matrices = [p for layer in model.layers for p in layer.parameters() if p.ndim == 2]
    known = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    fast = Muon(matrices)
    slow = torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.98), weight_decay=0.0)
    steps, step, start = sum(stage[0] for stage in stages), 0, time.time()
    for count, *sizes in stages:
        for _ in range(count):
            rate = min(1.0, (step + 1) / 50, 0.02 + 1.2 * (1 - step / steps))
            fast.param_groups[0]["lr"], slow.param_groups[0]["lr"] = 0.02 * rate, 4e-3 * rate
            symbols, targets, positions = batch(rng, *sizes, REACH)
            plain, questioned, right = losses(model(symbols, positions), targets)
            model.zero_grad(set_to_none=True)
            (plain + questioned).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            fast.step()
            slow.step()
            step += 1
            if step % 50 == 0 or step == 1:
                print(f"{step:5} of {steps}, {time.time() - start:5.0f} s: {sizes[1]:4} symbols, "
                      f"text {plain:.3f}, answers {questioned:.3f}, {100 * right:.1f} % right", flush=True)


def load(kind):
    data = (OUT / f"{kind}.kvm").read_bytes()
    header = struct.unpack("<16I", data[:64])
    assert header[:3] == (MAGIC, 1, list(KINDS).index(kind)), f"{kind}.kvm is not a weights file of this kind"
    model = Model(dict(zip(HEADER, header[3:])))
    numbers = torch.tensor(np.frombuffer(data[64:], dtype="<f2").astype(np.float32))
    for tensor in tensors(model):
        tensor.data = numbers[:tensor.numel()].reshape(tensor.shape)
        numbers = numbers[tensor.numel():]
    assert not len(numbers)
    return model


def save(kind, model):
    c = model.c
    header = [MAGIC, 1, list(KINDS).index(kind)] + [c[name] for name in HEADER]
    numbers = [t.detach().numpy().astype("<f2").tobytes() for t in tensors(model)]
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"{kind}.kvm").write_bytes(struct.pack("<16I", *header, *[0] * (16 - len(header))) + b"".join(numbers))


def fixture(kind):
    """Logits of a text with questions, computed in f64 with the weights of the file: once with all keys,
    once with the last rows seeing only the first `SINKS` keys, the `NEAR` before them, and themselves."""
    model, rng = load(kind).double(), np.random.default_rng(77)
    symbols, _ = sample(rng, 700, 20, 20)
    count, rows = len(symbols), ROWS
    hidden = torch.ones(count, count, dtype=torch.bool).tril()
    hidden[-rows:, SINKS:count - rows - NEAR] = False
    plain = F.scaled_dot_product_attention
    with torch.no_grad():
        args = torch.tensor([symbols]), torch.arange(count)[None]
        logits = model(*args)[0, -rows:]
        F.scaled_dot_product_attention = lambda q, k, v, is_causal: plain(q, k, v, attn_mask=hidden)
        blind = model(*args)[0, -rows:]
        F.scaled_dot_product_attention = plain
    (OUT / f"{kind}.logits").write_bytes(
        struct.pack("<4I", count, rows, SINKS, NEAR) + bytes(map(int, symbols))
        + torch.cat([logits, blind]).numpy().astype("<f4").tobytes())


def check(kind):
    """Prints the quality of the weights on texts that were not used in training."""
    model, rng = load(kind), np.random.default_rng(1234)
    with torch.no_grad():
        for tokens, pairs, rows in [(256, 16, 32), (512, 24, 16), (1024, 24, 16), (2048, 24, 10), (3072, 32, 8)]:
            symbols, targets, _ = batch(rng, rows, tokens, pairs, pairs, tokens)
            plain, questioned, right = losses(model(symbols, torch.arange(tokens).repeat(rows, 1)), targets)
            print(f"{tokens} symbols, {pairs} pairs: perplexity {plain.exp():.3f}, "
                  f"{100 * right:.1f} % of {rows * pairs} right", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--fixture", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    if not (args.fixture or args.check):
        model = Model(KINDS[args.kind])
        print(f"{sum(p.numel() for p in model.parameters())} numbers", file=sys.stderr)
        train(model, np.random.default_rng(1), STAGES[args.kind])
        save(args.kind, model)
    if not args.check:
        fixture(args.kind)
    if not args.fixture:
        check(args.kind)


if __name__ == "__main__":
    main()
