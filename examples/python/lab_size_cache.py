"""Computes how much memory a KV cache needs: which size gives which hit rate, and what the next GiB earns.

    python lab_size_cache.py [TRACE]

A TRACE is a file that `kvtier.Trace.open` reads, or a workload to generate (chat, agent, batch, multitenant,
burst). Set TOKEN_BYTES and PREFILL_TOKENS_PER_S to those of your model and machine.
"""

# %% Parameters
import os
import sys

import kvtier

ARGUMENTS = [] if "ipykernel" in sys.modules else sys.argv[1:]
TRACE = ARGUMENTS[0] if ARGUMENTS else "agent"
#: Bytes of K and V of one token: layers * key heads * head size * 2 (K and V) * bytes of an element.
TOKEN_BYTES = 32 * 8 * 128 * 2 * 2
#: Tokens that the engine computes in a second, without a cached prefix.
PREFILL_TOKENS_PER_S = 10_000
#: The policy of the cache. Stores use `horizon` in host memory by default.
POLICY = "horizon"
#: The share of the reachable hits that the cache should have.
TARGET = 0.90
GIB = 1 << 30


def on_error(kind, error, trace):
    """Ends the script with the library's message and exit status 1."""
    if isinstance(error, kvtier.Error):
        print(f"lab_size_cache: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = on_error


# %% The trace
if os.path.exists(TRACE) or not TRACE.isidentifier():
    trace = kvtier.Trace.open(TRACE)
else:
    trace = kvtier.Trace.generate(TRACE, duration_ns=2 * 3600 * 10**9, seed=1)
info = trace.info
block_bytes = info.block_tokens * TOKEN_BYTES
hours = max(info.duration_ns, 1) / 3600e9
print(f"{TRACE}: {info.requests} requests of {info.sessions} sessions in {hours:.2f} hours")
print(f"{info.tokens} tokens requested; an unbounded cache finds {100 * info.known_tokens / max(info.tokens, 1):.1f} %")
print(f"{info.blocks} distinct blocks of {info.block_tokens} tokens: {info.blocks * block_bytes / GIB:.1f} GiB\n")


# %% The hit rate at sizes that double, and the value of the memory that each step adds
def replay(policy, blocks):
    """Replays the trace with a cache of `blocks` blocks; the first tenth of the requests warms it up."""
    return trace.replay(policy, max(blocks, 1), warm_up=info.requests // 10, timed=False)


sizes, size = [], max(info.blocks // 256, 1)
while 3 * size < 2 * info.blocks:
    sizes.append(size)
    size *= 2
sizes.append(info.blocks)
counted_hours = hours * 0.9  # the warm-up is not counted

print("   memory   blocks    found   belady   of reachable   saved prefill   next GiB saves")
unbounded, previous, enough = replay(POLICY, info.blocks), None, None
for blocks in sizes:
    done, bound = replay(POLICY, blocks), replay("belady", blocks)
    memory = blocks * block_bytes / GIB
    reachable = done.hit_tokens / max(unbounded.hit_tokens, 1)
    saved = done.hit_tokens / PREFILL_TOKENS_PER_S / counted_hours
    marginal = ""
    if previous is not None:
        before, before_saved = previous
        marginal = f"{max(saved - before_saved, 0.0) / (memory - before):.1f} s/h"
    print(f"{memory:7.2f}G {blocks:8} {100 * done.token_hit_rate:7.2f}% {100 * bound.token_hit_rate:7.2f}% "
          f"{100 * reachable:13.1f}% {saved:11.0f} s/h {marginal:>16}")
    previous = memory, saved
    if enough is None and reachable >= TARGET:
        enough = blocks
print("\nsaved prefill: seconds of computing in an hour that hits save; next GiB: what the memory between the row"
      "\nabove and this row saves, for each GiB")

# %% The smallest size that reaches the target, by bisection
low, high = 1, enough or info.blocks
while low < high:
    middle = (low + high) // 2
    if replay(POLICY, middle).hit_tokens >= TARGET * unbounded.hit_tokens:
        high = middle
    else:
        low = middle + 1
print(f"\n{100 * TARGET:.0f} % of the reachable hits need {high} blocks, {high * block_bytes / GIB:.2f} GiB, "
      f"under {POLICY}")

# %% The same target under other policies: memory that a better policy replaces
for policy in ("lru", "s3fifo"):
    found = replay(policy, high).hit_tokens / max(unbounded.hit_tokens, 1)
    low_other, high_other = high, info.blocks
    while low_other < high_other:
        middle = (low_other + high_other) // 2
        if replay(policy, middle).hit_tokens >= TARGET * unbounded.hit_tokens:
            high_other = middle
        else:
            low_other = middle + 1
    print(f"{policy} has {100 * found:.1f} % with that memory, and needs {high_other * block_bytes / GIB:.2f} GiB for "
          f"{100 * TARGET:.0f} %")
trace.close()
