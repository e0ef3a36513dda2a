"""Common code of the sparse oracles: inputs that Rust generates bit for bit, lists as text, and a
check of the margin of every selection.

Numbers come from splitmix64; the upper 24 bits become a number from -1 up to 1. A row of a query or
key head is `gain * (own + drift)` in binary32. `own` differs for every row; `period` consecutive
tokens share `drift`, so that blocks of tokens are similar (period 0: no drift). Each array of numbers
is a separate stream: queries use streams 1 and 2, keys use 3 and 4.
"""

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

GOLDEN = 0x9E3779B97F4A7C15


def numbers(seed, stream, count):
    """`count` numbers of a stream in binary32."""
    with np.errstate(over="ignore"):
        first = np.uint64(seed) + (np.uint64(stream) << np.uint64(32))
        z = first * np.uint64(GOLDEN) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    whole = (z >> np.uint64(40)).astype(np.int64) - (1 << 23)
    return (whole / np.float64(1 << 23)).astype(np.float32)


def table(case, stream, heads, gains, dim=None):
    """Rows `[tokens, heads, dim]` of queries (stream 1) or keys (stream 3)."""
    tokens, dim, period = case["tokens"], dim or case["dim"], case.get("period", 0)
    rows = numbers(case["seed"], stream, tokens * heads * dim).reshape(tokens, heads, dim)
    if period:
        blocks = -(-tokens // period)
        drift = numbers(case["seed"], stream + 1, blocks * heads * dim).reshape(blocks, heads, dim)
        rows = rows + drift[np.arange(tokens) // period]
    gain = np.array([gains[h % len(gains)] for h in range(heads)], dtype=np.float32)
    rows = rows * gain[None, :, None]
    assert rows.dtype == np.float32
    return rows


def by_head(rows):
    """Converts `[tokens, heads, dim]` to torch's order `[1, heads, tokens, dim]`."""
    return torch.from_numpy(np.ascontiguousarray(rows.transpose(1, 0, 2)))[None]


def inputs(case):
    """Queries and keys, by head."""
    q = table(case, 1, case["heads"], case.get("gains", [1.0]))
    k = table(case, 3, case["key_heads"], [1.0])
    return by_head(q), by_head(k)


def repeated(k, case):
    """Repeats the keys of a key head for each of its query heads."""
    return k.repeat_interleave(case["heads"] // case["key_heads"], 1)


def attention(q, k):
    """Causal softmax in binary32, `[1, heads, queries, keys]`; the queries are the last tokens."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
    n, m = logits.shape[-2:]
    hidden = torch.ones(n, m, dtype=torch.bool).triu(m - n + 1)
    return torch.softmax(logits.masked_fill(hidden, -torch.inf), -1, dtype=torch.float32)


def packed(items):
    """Integers as text, ascending: 0-3,7,9-12."""
    items = sorted(int(i) for i in items)
    assert len(set(items)) == len(items), "an item occurs twice"
    out, at = [], 0
    while at < len(items):
        end = at
        while end + 1 < len(items) and items[end + 1] == items[end] + 1:
            end += 1
        out.append(str(items[at]) if end == at else f"{items[at]}-{items[end]}")
        at = end + 1
    return ",".join(out)


class Missing(Exception):
    """A package of a family is not installed."""


class TooClose(Exception):
    """Scores at a cut are so close that two correct programs may differ."""


class Watch(TorchFunctionMode):
    """Redirects calls for "cuda" to the CPU, and measures the margin of every topk: the distance
    between the smallest kept and the largest dropped score, relative to the scores. A margin below
    `least` raises TooClose. With `all_gaps` every gap between kept scores is measured, because the
    caller uses fewer of them. Calls in `free`, and rows from `rows` on, are not measured."""

    def __init__(self, least=2e-5):
        super().__init__()
        self.least, self.all_gaps, self.free, self.rows = least, False, (), None
        self.margin, self.cuts, self.calls = float("inf"), 0, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        on_cpu = lambda x: "cpu" if isinstance(x, str) and x == "cuda" else x
        args = tuple(map(on_cpu, args))
        kwargs = {name: on_cpu(value) for name, value in (kwargs or {}).items()}
        if func in (torch.topk, torch.Tensor.topk):
            k = kwargs["k"] if "k" in kwargs else args[1]
            with torch._C.DisableTorchFunctionSubclass():
                if self.calls not in self.free:
                    rows = args[0].double()[..., : self.rows, :] if self.rows else args[0].double()
                    self.cut(rows.reshape(-1, rows.shape[-1]).numpy(), int(k))
                self.calls += 1
        return func(*args, **kwargs)

    def cut(self, rows, k):
        for row in rows:
            row = np.sort(row)[::-1]
            seen = row[np.isfinite(row)]
            # Sums of products may cancel, so their error is relative to the largest score.
            size = np.abs(seen).max(initial=0) if seen.min(initial=0) < 0 < seen.max(initial=0) else 0
            for at in range(1 if self.all_gaps else k, k + 1):
                if 0 < at < len(row):
                    kept, dropped = row[at - 1], row[at]
                    self.gap(kept, dropped, size or max(abs(kept), abs(dropped)))

    def gap(self, kept, dropped, size):
        """Records the margin of a cut. A masked (-inf) or forced (inf) score on one side is far."""
        if np.isneginf(dropped) or (np.isinf(kept) and np.isfinite(dropped)):
            return
        if np.isinf(kept):
            raise TooClose("a cut between forced scores")
        self.note((kept - dropped) / size if size > 0 else 0.0)

    def note(self, margin):
        self.cuts += 1
        self.margin = min(self.margin, float(margin))
        if margin < self.least:
            raise TooClose(f"margin {margin:.1e}")
