"""The plots, by name."""

from decimal import Decimal
from math import log2, log10

from .results import identity, meets, reads, values
from .svg import WIDTH, Picture, at, horizontal
from .tables import number


# Policies of a replay that are no classic ones.
OWN = ("horizon", "horizon(objective=cost)", "auto", "predictive", "belady", "unbounded")


def replays(subject, trace):
    return [result for result in subject.of(trace) if "blocks" in result]


def mean(result):
    ratios = values(result["ratio"])
    return sum(ratios) / len(ratios)


def against_goals(title, results, note=""):
    """One row a bar: how far its worst and best values are from the goal, on a logarithmic axis."""
    picture = Picture(title, "Each dot is a measured value ÷ its goal; right of the line meets the goal, left of it "
                      "misses. " + note)
    middle, step = 236, 42
    rows = []
    for result in results:
        if "goal" not in result:
            continue
        field, operator, limit = reads(result["goal"])
        if limit == "baseline" or limit == 0 or operator == "==":
            continue
        points = [float(limit / value) if operator in ("<=", "<") else float(value / limit)
                  for value in values(result[field]) if value > 0]
        if points:
            rows.append((result, points))
    start = picture.y
    for result, points in rows:
        picture.y += 15
        dims = " ".join(part.split("=", 1)[-1] for part in identity(result)[1:])
        label = f"{result['name']} {dims}".strip()
        picture.text(10, picture.y, label if len(label) < 32 else label[:30] + "…")
        for point in points:
            x = middle + max(-1.2, min(3.2, log2(point))) * step
            picture.dot(x, picture.y - 3.5, "a" if point >= 1 else "bad", 3.2)
    picture.y += 8
    for power, name in ((-1, "½"), (0, "goal"), (1, "2 ×"), (2, "4 ×"), (3, "8 ×+")):
        x = middle + power * step
        picture.parts.insert(0, f'<path class="{"goal" if power == 0 else "grid"}" '
                                f'd="M{at(x)} {at(start)}V{at(picture.y)}"/>')
        picture.text(x, picture.y + 11, name, "small", "middle")
    picture.y += 14
    return picture.svg()


def hits(all_subjects):
    subject = all_subjects["policies"]
    picture = Picture("Tokens found in a replay, in % of all, against cache size",
                      "Blocks of 512 tokens, logarithmic axis. Thin lines: the other classic policies. 2026-11-21.")
    picture.legend([("e", "belady (knows the future)"), ("a", "horizon"), ("b", "best classic"), ("c", "lru"),
                    ("d", "auto")])
    for trace, label in (("conversation", "conversation"), ("synthetic", "synthetic"), ("agents", "coding agents")):
        results = replays(subject, trace)
        sizes = sorted({result["blocks"] for result in results})
        by = {(result["policy"], result["blocks"]): result["value"] for result in results}
        low = 10 * int(min(by.values()) / 10)
        high = 10 * (int(max(by.values()) / 10) + 1)
        left, right, top, bottom = 40, WIDTH - 24, picture.y + 16, picture.y + 156

        def x(size):
            return left + (log10(size) - log10(sizes[0])) / (log10(sizes[-1]) - log10(sizes[0])) * (right - left)

        def y(value):
            return bottom - float(value - low) / (high - low) * (bottom - top)

        picture.text(10, picture.y + 6, label, "head")
        for value in range(low, high + 1, 10 if high - low <= 60 else 20):
            picture.path([(left, y(value)), (right, y(value))], "grid")
            picture.text(left - 6, y(value) + 3.5, value, "small", "end")
        for size in sizes:
            picture.text(x(size), bottom + 14, number(size), "small", "middle")
        for policy in sorted({policy for policy, _ in by}):
            if policy not in OWN and policy != "lru":
                picture.path([(x(size), y(by[policy, size])) for size in sizes], "e thin")
        best = [max(value for (policy, one), value in by.items() if one == size and policy not in OWN)
                for size in sizes]
        for kind, line in (("e line dash", [by["belady", size] for size in sizes]), ("b line dash", best),
                           ("c line", [by["lru", size] for size in sizes]),
                           ("d line", [by["auto", size] for size in sizes]),
                           ("a line", [by["horizon", size] for size in sizes])):
            points = [(x(size), y(value)) for size, value in zip(sizes, line)]
            picture.path(points, kind)
            for point in points:
                picture.dot(*point, kind.split()[0], 2.6)
        picture.y = bottom + 28
    picture.text(WIDTH / 2, picture.y, "blocks in the cache", "small", "middle")
    picture.y += 4
    return picture.svg()


def gap(all_subjects):
    subject = all_subjects["policies"]
    picture = Picture("Share of the way from lru to belady, in % of their difference in tokens found",
                      "belady knows the future. 0 = as lru, 100 = as belady. 2026-11-21.")
    picture.legend([("a", "horizon"), ("d", "auto"), ("b", "best classic")])
    groups = []
    for trace in ("conversation", "synthetic", "agents"):
        results = replays(subject, trace)
        for size in sorted({result["blocks"] for result in results}):
            by = {result["policy"]: float(result["value"]) for result in results if result["blocks"] == size}
            classic = max((policy for policy in by if policy not in OWN), key=lambda policy: by[policy])
            entries = []
            for kind, policy in (("a", "horizon"), ("d", "auto"), ("b", classic)):
                share = (by[policy] - by["lru"]) / (by["belady"] - by["lru"]) * 100
                name = f" {policy}" if kind == "b" else ""
                entries.append((kind, max(share, 0), f"{number(Decimal(round(share)))} %{name}", None))
            groups.append((f"{trace}, {number(size)} blocks", entries))
    horizontal(picture, groups, 42)
    return picture.svg()


def ratios(all_subjects):
    subject = all_subjects["store"]
    picture = Picture("Rates of the store ÷ plain calls on the same machine, last runs",
                      "Tick: the goal. Red misses it. Two cores; 2026-11-21, get beside writes 2026-11-27.")
    names = {"host_put_1MiB": "host put, 1 MiB ÷ memcpy", "host_get_1MiB": "host get, 1 MiB ÷ memcpy",
             "host_put_64KiB": "host put, 64 KiB ÷ memcpy", "host_get_64KiB": "host get, 64 KiB ÷ memcpy",
             "durable_put": "durable put, 1 MiB ÷ O_DIRECT", "cold_get": "get after a restart ÷ O_DIRECT",
             "append_durable": "durable append, one caller ÷ plain calls",
             "read_one_caller": "read, one caller ÷ plain calls", "read_two_callers": "read, two callers ÷ plain calls",
             "get_beside_writes": "get beside writes ÷ get alone"}
    latest = {result["name"]: result for result in subject.latest()}
    groups = []
    for name, label in names.items():
        result = latest[name]
        value = values(result["ratio"])[0]
        bad = "goal" in result and not meets(result, value)
        goal = reads(result["goal"])[2] if "goal" in result else None
        groups.append((label, [("bad" if bad else "a", value, f"{number(value)} ×", goal)]))
    horizontal(picture, groups, 2.0, reference=1, unit=" ×")
    picture.heading("Cost of a cell in the tables, ns, last runs")
    groups = []
    for name in ("put_cell_by_512_of_32_layers", "get_cell_by_512_of_32_layers", "put_cell_by_512", "get_cell_by_512",
                 "put_cell_single", "get_cell_single"):
        result = latest[name]
        value = max(values(result["value"]))
        goal = reads(result["goal"])[2]
        groups.append((name, [("bad" if value > goal else "a", value, f"{number(value)} ns", goal)]))
    horizontal(picture, groups, 1500)
    return picture.svg()


def store_peers(all_subjects):
    subject = all_subjects["peers"]
    runs = [subject.last("host"), subject.last("disk")]
    picture = Picture("Beside Mooncake, LMCache and NIXL: objects of 1 MiB, GiB/s",
                      "Two cores of a virtual machine, virtual disk, "
                      + " and ".join(sorted({subject.runs[run]["date"] for run in runs})) + ".")
    picture.legend([("a", "kvtier"), ("c", "memmove, plain calls"), ("e", "others")])
    for run, ops, where in ((runs[0], ("put", "get"), "host memory"), (runs[1], ("durable put", "cold get"), "disk")):
        results = [result for result in subject.of(run) if result.get("size", "1 MiB") == "1 MiB"]
        groups = []
        for op in ops:
            entries = []
            for result in results:
                if result["name"] == op and "written over" not in result["side"]:
                    plain = result["side"] in ("memmove", "raw, fresh file")
                    kind = "a" if result["side"].startswith("kvtier") else "c" if plain else "e"
                    side = result["side"].split(", O_DIRECT")[0].split(", io_uring")[0]
                    entries.append((kind, result["value"], f"{number(result['value'])} {side}", None))
            groups.append((f"{op}, {where}", entries))
        horizontal(picture, groups, 1.4 * float(max(result["value"] for result in results)))
    return picture.svg()


def goals_of(name, title, note="", runs=None):
    def make(all_subjects):
        subject = all_subjects[name]
        results = subject.of(*runs) if runs else subject.latest()
        return against_goals(title, results, note)
    return make


def stream_steps(all_subjects):
    subject = all_subjects["stream"]
    picture = Picture("A model streamed with 59 % of it in memory: speed as a multiple of a memory map",
                      "Two cores of a virtual Zen 4, virtual disk, 2026-11-22, two runs.")
    picture.legend([("a", "quiet run"), ("e", "other run")])
    groups = [(f"{result['name']}: {result['measures']}",
               [("a", result["ratio"], f"{number(result['ratio'])} ×", None),
                ("e", result["other"], f"{number(result['other'])} ×", None)]) for result in subject.of("parts")]
    horizontal(picture, groups, 3.5, reference=1, unit=" ×")
    picture.heading("kvtier stream demo: a model of 312 MiB, ms a token")
    groups = []
    for result in subject.of("demo"):
        kind = "c" if "without" in result["memory"] else "a"
        groups.append((f"memory for weights: {result['memory'].split(' (')[0]}",
                       [(kind, result["value"], f"{number(result['value'])} ms", None)]))
    horizontal(picture, groups, 180)
    return picture.svg()


def gpu_copies(all_subjects):
    subject = all_subjects["device"]
    picture = Picture("Copies to the GPU by method, as a share of one large copy",
                      "NVIDIA H200, PCIe 5 x16, 2026-11-26, mean of two runs. kvtier measures at opening, and uses "
                      "the best.")
    picture.legend([("e", "one by one"), ("b", "in batches"), ("a", "by the kernel")])
    kinds = {"one by one": "e", "in batches": "b", "by the kernel": "a"}
    groups = []
    for size in ("16 KiB", "64 KiB", "1 MiB"):
        entries = []
        for result in subject.of("methods"):
            if result["size"] == size and result["direction"] == "to":
                entries.append((kinds[result["method"]], mean(result), f"{mean(result):.2f}", None))
        groups.append((f"cells of {size}", entries))
    horizontal(picture, groups, 1.05, reference=1)
    picture.heading("Speed ÷ torch 2.11, 2026-11-27")
    groups = []
    for result in subject.of("torch-2026-11-27"):
        value = mean(result)
        groups.append((subject.get("torch-2026-11-26", result["name"])["measures"],
                       [("a" if value >= Decimal("0.9") else "bad", value, f"{value:.2f} ×", None)]))
    horizontal(picture, groups, 2.5, reference=1, unit=" ×")
    return picture.svg()


def remote_peers(all_subjects):
    subject = all_subjects["remote"]
    picture = Picture("Redis: kvtier's rate ÷ that of LMCache 0.5.6, chunks of 256 KiB",
                      "Two cores, server on the same machine, 2026-11-26, mean of two runs.")
    groups = []
    for result in subject.of("lmcache-2026-11-26"):
        value = mean(result)
        groups.append((f"{result['name']}, beside {result['connector']}",
                       [("a" if value >= 1 else "bad", value, f"{value:.2f} ×", None)]))
    horizontal(picture, groups, 4, reference=1, unit=" ×")
    picture.heading("One connection, MiB/s, 2026-11-23", below=8)
    picture.legend([("a", "put"), ("b", "get")])
    groups = []
    for protection in ("plain", "sealed", "rediss://", "both"):
        entries = [("a" if result["name"] == "put" else "b", result["value"], number(result["value"]), None)
                   for result in subject.of("tls") if result["protection"] == protection]
        groups.append(({"both": "TLS and sealed", "rediss://": "TLS (rediss://)"}.get(protection, protection), entries))
    horizontal(picture, groups, 1300)
    return picture.svg()


def first_tokens(all_subjects):
    subject = all_subjects["engines"]
    picture = Picture("Time until an engine continues, as a share of the time without kvtier",
                      "Processor only, two cores: virtual Xeon, 2026-11-26, and Zen 4, 2026-11-23.")
    picture.legend([("a", "with kvtier"), ("e", "without: the prompt is computed again")])
    groups = []
    for run, name, label in (("real-2026-11-26", "vllm_first_token", "vLLM 0.32: first token of a stored prompt"),
                             ("real-2026-11-26", "llama_continue", "llama.cpp: continues after kill -9, Xeon"),
                             ("demo-2026-11-23", "llama_continue", "llama.cpp: continues after kill -9, Zen 4"),
                             ("demo-2026-11-23", "llama_returning_user", "llama.cpp: a returning user waits, Zen 4"),
                             ("real-2026-11-26", "llama_ten_users", "llama.cpp: ten users, all requests, Xeon"),
                             ("demo-2026-11-23", "llama_ten_users", "llama.cpp: ten users, all requests, Zen 4")):
        result = subject.get(run, name)
        value, base, unit = result["value"], result["baseline"]["value"], result["unit"]
        share = 100 * (value / base)
        groups.append((label, [("a", share, f"{number(value)} {unit}", None),
                               ("e", 100, f"{number(base)} {unit}", None)]))
    horizontal(picture, groups, 100)
    return picture.svg()


PLOTS = {
    "policies-hits": hits,
    "policies-gap": gap,
    "store-ratios": ratios,
    "store-peers": store_peers,
    "sparse-goals": goals_of("sparse", "Attention kernels, sparse policies and offload on the CPU, against their goals",
                             "Zen 4, 2026-11-22, under load where measured so."),
    "stream-steps": stream_steps,
    "gpu-goals": goals_of("device", "GPU: the last run against its goals", "NVIDIA H200, 2026-11-27.",
                          ["gpu-2026-11-27"]),
    "gpu-copies": gpu_copies,
    "remote-peers": remote_peers,
    "engines-first-token": first_tokens,
    "engines-llama": goals_of("engines", "llama.cpp: bars against their goals", "SmolLM2 135M, Zen 4, 2026-11-23.",
                              ["llama-2026-11-23"]),
}
