"""Measures how much attention sparse policies keep under a token budget, on made-up heads.

    python lab_sparse_quality.py [SPEC...]

A SPEC may contain {budget}: tokens that a head may see. The heads are made up: sinks at the start, a topic that
changes every 128 tokens, one strong key in 16, queries that return to an earlier topic. So the numbers show how
policies differ, not how a model would answer; `kvtier lab sparse` measures answers of a small trained model.
"""

# %% Parameters
import random
import sys
from array import array

import kvtier

ARGUMENTS = [] if "ipykernel" in sys.modules else sys.argv[1:]
SPECS = ARGUMENTS or [
    "full", "quest(budget={budget},page=16,dense=0)", "arkvale(budget={budget},page=16,dense=0,sinks=1,window=1)",
    "h2o(sink=4,recent={half},budget={rest})", "snapkv(budget={budget},window=32)",
    "adakv(budget={budget},window=32)", "tova(budget={budget})", "keydiff(budget={budget},sink=4,recent=16)",
    "knorm(budget={budget},sink=4,recent=16)", "streaming(sinks=4,recent={window})"]
BUDGETS = [64, 128, 256]
PROMPT, STEPS, SEED = 1024, 24, 1
SHAPE = kvtier.Attention(layers=1, query_heads=4, key_heads=2, key_dim=32, value_dim=32, block_tokens=16,
                         max_tokens=PROMPT + STEPS)


def on_error(kind, error, trace):
    """Ends the script with the library's message and exit status 1."""
    if isinstance(error, kvtier.Error):
        print(f"lab_sparse_quality: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = on_error

# %% Heads: keys are topic + noise, queries look for the present topic, an earlier one, or the sinks
numbers = random.Random(SEED)
TOKENS, DIM = PROMPT + STEPS, SHAPE.key_dim


def direction(length):
    """Returns a random vector of a length."""
    vector = [numbers.gauss(0, 1) for _ in range(DIM)]
    norm = sum(x * x for x in vector) ** 0.5
    return [length * x / norm for x in vector]


def rows(vectors, heads):
    """Returns vectors as rows [tokens, heads, dim] of f32."""
    flat = array("f", [x for vector in vectors for x in vector])
    return memoryview(flat).cast("B").cast("f", shape=[len(vectors) // heads, heads, DIM])


def near(*vectors, noise):
    """Returns the sum of vectors with noise."""
    return [sum(xs) + numbers.gauss(0, noise) for xs in zip(*vectors)]


topics = [direction(5.0) for _ in range(TOKENS // 128 + 1)]
sink, nothing = direction(5.0), [0.0] * DIM
strong = [[1.5 * x for x in topic] for topic in topics]
keys = rows([near(sink if t < 4 else (topics if t % 16 else strong)[t // 128], noise=0.6)
             for t in range(TOKENS) for _ in range(SHAPE.key_heads)], SHAPE.key_heads)
values = rows([direction(1.0) for _ in range(TOKENS * SHAPE.key_heads)], SHAPE.key_heads)
queries = []
for t in range(TOKENS):
    now, earlier = topics[t // 128], topics[numbers.randrange(t // 128 + 1)]
    queries += [near(now, noise=0.6), near(earlier, noise=0.6), near(sink, noise=0.6), near(now, earlier, noise=0.6)]
queries = rows(queries, SHAPE.query_heads)


def part(view, first, last):
    """Returns the rows of some tokens."""
    heads = view.shape[1]
    return view.cast("B")[first * heads * DIM * 4:last * heads * DIM * 4].cast("f", shape=[last - first, heads, DIM])


# %% The exact attention of each decode step: the sums of a decode over all keys, by query head
exact = [kvtier.kernels.decode(part(queries, n - 1, n), part(keys, 0, n), part(values, 0, n), first_query=n - 1,
                               with_sums=True).sums.tolist() for n in range(PROMPT + 1, TOKENS + 1)]


# %% What a policy lets each query head see
def seen_by(index, head, query, tokens):
    """Returns the positions that an index names for a query head."""
    if not index.heads:
        return range(tokens)
    how = index.heads[head * len(index.heads) // SHAPE.query_heads]
    lists = index.lists()[how.first:how.first + how.lists]
    if how.kind == kvtier.kernels.IndexKind.DENSE or query >= how.dense_from:
        return range(tokens)
    if how.kind == kvtier.kernels.IndexKind.BLOCKS:
        size = how.key_block
        return {t for block in lists[0] for t in range(block * size, min((block + 1) * size, tokens))}
    return {*lists[0], *(query - distance for distance in lists[1] if distance <= query)}  # lines


def measure(spec):
    """Returns the share of keys that heads see, the mean attention to them, and that of the worst head."""
    with kvtier.Sparse(SHAPE, spec) as policy:
        traits, kept = policy.traits, None
        if traits.needs & kvtier.SparseNeeds.KEYS:
            policy.append(0, 0, part(keys, 0, PROMPT))
        if traits.needs & kvtier.SparseNeeds.COLUMN_SUMS:
            count = min(traits.sum_queries, PROMPT)
            prompt = [part(rows_of, 0, PROMPT) for rows_of in (queries, keys, values)]
            lse = kvtier.kernels.prefill(*prompt).lse
            sums = kvtier.kernels.column_sums(*prompt, lse, first=PROMPT - count)  # [query heads, tokens]
            policy.observe(0, count, sums.cast("B").cast("f"), PROMPT)
        if traits.caps & kvtier.SparseCaps.EVICT_PREFILL:  # once, after the prompt; later tokens stay
            lists = policy.plan_eviction(0, kvtier.SparseContext(tokens=PROMPT, is_prefill=True))
            kept = None if lists is None else [set(positions) for positions in lists.lists()]
        shares, recall = 0.0, [0.0] * SHAPE.query_heads
        for step, weights in enumerate(exact):
            n = PROMPT + step + 1
            index = kvtier.kernels.Index()
            if traits.caps & kvtier.SparseCaps.INDEX_DECODE:
                if traits.needs & kvtier.SparseNeeds.KEYS:
                    policy.append(0, n - 1, part(keys, n - 1, n))
                index = policy.index(0, part(queries, n - 1, n), kvtier.SparseContext(tokens=n, first_query=n - 1))
            for head in range(SHAPE.query_heads):
                seen = seen_by(index, head, n - 1, n)
                if kept is not None:
                    seen = kept[head * len(kept) // SHAPE.query_heads].union(range(PROMPT, n))
                recall[head] += sum(weights[head][t] for t in seen) / STEPS
                shares += len(seen) / n / STEPS / SHAPE.query_heads
        return shares, sum(recall) / len(recall), min(recall)


# %% The table. `random`: tokens by chance; `best`: the keys with the most attention of each query and head
for budget in BUDGETS:
    print(f"\n{budget} of {PROMPT} tokens          keys seen    attention kept    worst head")
    sizes = {"budget": budget, "half": budget // 2 - 4, "rest": budget - budget // 2, "window": budget - 4}
    for spec in SPECS:
        share, mean, least = measure(spec.format(**sizes))
        print(f"{spec.split('(')[0]:24} {100 * share:13.1f} % {100 * mean:15.1f} % {100 * least:11.1f} %")
    kept = [set(numbers.sample(range(TOKENS), budget)) for _ in exact]
    chance = [sum(sum(weights[h][t] for t in seen if t < len(weights[h])) for weights, seen in zip(exact, kept)) / STEPS
              for h in range(SHAPE.query_heads)]
    best = [sum(sum(sorted(weights[h], reverse=True)[:budget]) for weights in exact) / STEPS
            for h in range(SHAPE.query_heads)]
    for name, heads in (("random", chance), ("best", best)):
        print(f"{name:24} {100 * budget / TOKENS:13.1f} % {100 * sum(heads) / len(heads):15.1f} % "
              f"{100 * min(heads):11.1f} %")
