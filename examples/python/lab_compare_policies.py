"""Compares eviction policies on traces of requests, at several cache sizes.

    python lab_compare_policies.py [TRACE...]

A TRACE is a file (kvtier, mooncake, weka, sharegpt, azure, oracle, csv; plain or zstd), or a workload to
generate: chat, agent, batch, multitenant or burst. The cells (`# %%`) run in an editor's notebook view, too.
"""

# %% Parameters
import sys

import kvtier

ARGUMENTS = [] if "ipykernel" in sys.modules else sys.argv[1:]
TRACES = ARGUMENTS or ["chat", "agent"]
#: Policy specs. `belady` knows the future: it is the bound of all others.
POLICIES = ["lru", "s3fifo", "arc", "gdsf", "horizon", "auto", "belady"]
#: Shares of the trace's distinct blocks, or numbers of blocks.
SIZES = ["1%", "5%", "10%", "25%"]


def on_error(kind, error, trace):
    """Ends the script with the library's message and exit status 1."""
    if isinstance(error, kvtier.Error):
        print(f"lab_compare_policies: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = on_error


def print_table(head, rows):
    """Prints rows of text: the first column to the left, the others to the right."""
    widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]
    for row in [head, *rows]:
        print("  ".join(word.rjust(width) if at else word.ljust(width)
                        for at, (word, width) in enumerate(zip(row, widths))))


# %% The traces. Generated workloads have two hours here and equal bytes on every machine.
lab = kvtier.Lab(*TRACES, duration_ns=2 * 3600 * 10**9, seed=1)
print_table(["trace", "requests", "sessions", "blocks", "tokens", "known tokens"], [
    [name, f"{info.requests}", f"{info.sessions}", f"{info.blocks}", f"{info.tokens}",
     f"{100 * info.known_tokens / max(info.tokens, 1):.1f} %"]
    for name, info in ((name, trace.info) for name, trace in lab.traces.items())])
print("\nknown tokens: the share of requested tokens that an unbounded cache finds")

# %% Replay each trace under each policy at each size. This is the code that a store runs.
table = lab.compare(POLICIES, SIZES)

# %% The share of requested tokens that each policy found
for name in lab.traces:
    print(f"\n{name}: tokens found, by size of the cache")
    print_table(["policy", *SIZES], [
        [policy, *(f"{100 * row.replay.token_hit_rate:.2f} %" for row in table
                   if (row.trace, row.policy) == (name, policy))] for policy in POLICIES])

# %% How much of the gap between `lru` and the optimum each policy closes, where there is a gap
found = {(row.trace, row.policy, row.size): row.replay.token_hit_rate for row in table}


def closed_gap(name, policy, size):
    """Returns the closed share of the gap, as text; a dash where the gap is below one percent of the tokens."""
    low, high = found[name, "lru", size], found[name, "belady", size]
    return f"{100 * (found[name, policy, size] - low) / (high - low):.0f} %" if high - low >= 0.01 else "-"


for name in lab.traces:
    print(f"\n{name}: closed share of the gap between lru and belady")
    print_table(["policy", *SIZES], [
        [policy, *(closed_gap(name, policy, size) for size in SIZES)] for policy in POLICIES])

# %% What a decision costs, and what was evicted too early
print("\nat the second size: time of an eviction call, and blocks that were evicted and requested again")
print_table(["trace, policy", "median", "99th percentile", "evicted too early", "fairness"], [
    [f"{row.trace}, {row.policy}", f"{row.replay.decision_p50_ns / 1000:.1f} us",
     f"{row.replay.decision_p99_ns / 1000:.1f} us", f"{100 * row.replay.re_prefill_rate:.2f} %",
     f"{row.replay.jain_sessions:.3f}"] for row in table if row.size == SIZES[1]])

# %% The best policy without foresight
print()
for row in kvtier.LabTable(row for row in table if row.policy != "belady").best():
    print(f"{row.trace} at {row.size} ({row.capacity_blocks} blocks): {row.policy}")
lab.close()
