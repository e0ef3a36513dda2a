"""Tables of the pages, in Markdown."""

import re
import textwrap
from decimal import Decimal

from .results import KNOWN, identity, meets, reads, values

# Pages of subjects that have none of their own name.
PAGES = {"abi": "store"}
SIGNS = {"<=": "≤", ">=": "≥", "<": "<", ">": ">", "==": "="}


def number(value):
    return f"{value:,}".replace("-", "−")


def several(field, ranged=False, bold=lambda value: False):
    texts = [f"**{number(value)}**" if bold(value) else number(value) for value in values(field)]
    return " to ".join(texts) if ranged else ", ".join(texts)


def unit_of(unit):
    return f" {unit}" if unit else ""


def measured(result):
    """The measured values; those that miss the goal are bold."""
    field = reads(result["goal"])[0] if "goal" in result else None
    ranged = result.get("range", False)

    def text(name):
        def bold(value):
            return name == field and not meets(result, value)
        return several(result[name], ranged and isinstance(result[name], list), bold)

    parts = []
    if "value" in result:
        parts.append(text("value") + unit_of(result.get("unit")))
    if "ratio" in result:
        ratio = text("ratio") + " ×"
        if parts and field == "ratio":
            parts = [f"{ratio} ({parts[0]})"]
        else:
            parts = [f"{parts[0]} ({ratio})" if parts else ratio]
    if "spread" in result:
        parts.append(f"over runs {several(result['spread'], True)}")
    if "first" in result:
        parts.append(f"a run before: {several(result['first'], False, lambda value: not meets(result, value))}")
    return "; ".join(parts)


def goal_of(result):
    if "goal" not in result:
        return ""
    field, operator, limit = reads(result["goal"])
    if limit == "baseline":
        return f"{SIGNS[operator]} baseline"
    if limit == 0 and operator == "<=":
        return "0"
    return f"{SIGNS[operator]} {number(limit)}{' ×' if field == 'ratio' else unit_of(result.get('unit'))}"


def baseline_of(result):
    base = result.get("baseline")
    if not base:
        return ""
    if "value" not in base:
        return base["name"]
    ranged = base.get("range", False)
    return f"{base['name']}: {several(base['value'], ranged)}{unit_of(base['unit'])}"


def beside(result, first):
    """The measured values, and the baseline's value where it differs from that of the first run."""
    text, base = measured(result), result.get("baseline", {})
    if "value" in base and base["value"] != first.get("baseline", {}).get("value"):
        text += f" (baseline {several(base['value'], base.get('range', False))})"
    return text


def run_line(run):
    parts = [run["date"], run["machine"]]
    if run["profile"] != "any":
        parts.append(run["profile"])
    if "load" in run:
        parts.append(f"load: {run['load']}")
    command = run["command"]
    parts.append(command if "not in the repository" in command else f"`{command}`")
    if "about" in run:
        parts.append(run["about"])
    return " · ".join(parts)


def grid(head, rows):
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def item(text):
    """An item of a list, in lines of 120 characters."""
    return textwrap.fill(text, 120, initial_indent="- ", subsequent_indent="  ", break_long_words=False,
                         break_on_hyphens=False)


def below(subject, runs, results):
    """Notes of results, then notes of runs, as a list."""
    lines, texts = [], {}
    for result in results:
        what = ", ".join(f"`{part.split('=', 1)[-1]}`" for part in identity(result))
        for field in ("reason", "note"):
            if field in result:
                texts.setdefault((field, result[field]), []).append(what)
    # A text that many results share is said once.
    for (field, text), names in texts.items():
        lines.append(item(f"{'; '.join(dict.fromkeys(names))}: {text}" if len(names) < 4 else text))
    for run in runs:
        lines += [item(note) for note in subject.runs[run].get("notes", [])]
    return "\n".join(lines)


def block(subject, runs, table, results, labels=None):
    """Runs, table and notes."""
    if labels and len(runs) > 1:
        head = "\n".join(item(f"{label}: {run_line(subject.runs[run])}") for run, label in zip(runs, labels))
    else:
        head = "\n".join(item(run_line(subject.runs[run])) for run in runs)
    return "\n\n".join(part for part in (head, table, below(subject, runs, results)) if part)


def bars(name, *runs, labels=None, dims=(), only=None, title="bar"):
    """Rows: results; columns: runs."""
    def make(all_subjects):
        subject = all_subjects[name]
        results = [result for result in subject.of(*runs) if only is None or only(result)]
        measures = {identity(result): result["measures"] for result in subject.results if "measures" in result}
        rows = {}
        for result in results:
            rows.setdefault(identity(result), {}).setdefault(result["run"], result)
        has_goal = any("goal" in result for result in results)
        has_base = any("baseline" in result for result in results)
        lines = []
        for key, by_run in rows.items():
            first = next(by_run[run] for run in runs if run in by_run)
            what = measures.get(key, "")
            cell = f"`{first['name']}`" if re.fullmatch(r"\w+", first["name"]) else first["name"]
            line = [f"{cell}: {what}" if what else cell]
            line += [str(number(first[dim]) if isinstance(first.get(dim), Decimal) else first.get(dim, ""))
                     for dim in dims]
            if has_goal:
                line.append(next((goal_of(result) for result in by_run.values() if "goal" in result), ""))
            line += [beside(by_run[run], first) if run in by_run else "" for run in runs]
            if has_base:
                line.append(baseline_of(first))
            lines.append(line)
        head = [title, *dims, *(["goal"] if has_goal else []), *(labels or ["measured"] * len(runs)),
                *(["baseline"] if has_base else [])]
        return block(subject, runs, grid(head, lines), results, labels)
    return make


def pivot(name, all_runs, row, column, cell=measured, corner=None, only=None, columns=None, group=None):
    """Rows and columns: fields of results. Runs: these, or the last one with a group."""
    def make(all_subjects):
        subject = all_subjects[name]
        runs = [subject.last(group)] if group else [all_runs] if isinstance(all_runs, str) else all_runs
        results = [result for result in subject.of(*runs) if only is None or only(result)]

        def key(result, fields):
            fields = [fields] if isinstance(fields, str) else fields
            return tuple(result.get(field) for field in fields)

        def text(keys):
            return ", ".join(number(key) if isinstance(key, Decimal) else str(key) for key in keys)

        rows, heads = [], []
        for result in results:
            if key(result, row) not in rows:
                rows.append(key(result, row))
            if key(result, column) not in heads:
                heads.append(key(result, column))
        cells = {(key(result, row), key(result, column)): cell(result) for result in results}
        lines = [[text(one), *(cells.get((one, head), "") for head in heads)] for one in rows]
        titles = columns or [text(head) for head in heads]
        return block(subject, runs, grid([corner or text([row]), *titles], lines), results)
    return make


def triple(result):
    """Hits, cost and fairness of a replay."""
    return f"{number(result['value'])} / {number(result['cost'])} / {number(result['jain'])}"


def value_only(result):
    bold = "goal" in result and not result["met"]
    text = several(result.get("value", result.get("ratio")), result.get("range", False))
    return f"**{text}**" if bold else text


def with_goal(result):
    return value_only(result) + (f" (goal {goal_of(result)})" if "goal" in result else "")


def two_runs(name, field, first, second, labels):
    """Rows: results; columns: the value and a second field."""
    def make(all_subjects):
        subject = all_subjects[name]
        results = subject.of(first)
        rows = []
        for result in results:
            seconds = [number(result["value"]) + unit_of(result["unit"])] if "value" in result else []
            what = f": {result['measures']}" if "measures" in result else ""
            rows.append([f"`{result['name']}`{what}", several(result["ratio"]), several(result[field]), *seconds])
        return block(subject, [first], grid(["step", *labels, *second], rows), results)
    return make


def codecs(all_subjects):
    subject = all_subjects["store"]
    run = "codecs-2026-11-21"
    rows = []
    for result in subject.of(run):
        rows.append([result["numbers"], f"`{result['codec']}`", f"{number(result['value'])} %",
                     number(result["encode_mbs"]), number(result["decode_mbs"]) if "decode_mbs" in result else "",
                     number(result["error"])])
    head = ["numbers", "codec", "on disk", "encoding, MB/s", "decoding, MB/s", "error"]
    return block(subject, [run], grid(head, rows), subject.of(run))


def more_peers(all_subjects):
    """The last run of each group beside other systems that has no table of its own."""
    subject = all_subjects["peers"]
    groups = dict.fromkeys(result["group"] for result in subject.results)
    parts = []
    for group in groups:
        if group in ("host", "disk", "attention"):
            continue
        run = subject.last(group)
        results = [result for result in subject.of(run) if result["group"] == group]
        rows = [[f"`{result['name']}`", measured(result), baseline_of(result)] for result in results]
        parts.append(block(subject, [run], grid([f"bar of `{group}`", "measured", "baseline"], rows), results))
    return "\n\n".join(parts)


def instructions(all_subjects):
    """Counts of instructions: a block for each run."""
    subject = all_subjects["store"]
    fields = ("value", "before", "horizon", "locked", "allocations")
    heads = ["instructions, lru", "before", "instructions, horizon", "locked operations", "allocations"]
    parts = []
    for run in ("count-2026-11-28", "chunks-2026-11-28"):
        results = subject.of(run)
        shown = [(field, head) for field, head in zip(fields, heads) if any(field in result for result in results)]
        rows = [[f"`{result['name']}`", *(number(result[field]) if field in result else "" for field, _ in shown)]
                for result in results]
        head = ["a cell of", *(head for _, head in shown)]
        parts.append(block(subject, [run], grid(head, rows), results))
    return "\n\n".join(parts)


def summary(all_subjects):
    """Goals met and missed, by subject; of each bar the last run."""
    rows = []
    for subject in all_subjects.values():
        goals = [result for result in subject.latest() if "goal" in result]
        met = sum(1 for result in goals if result["met"])
        page = PAGES.get(subject.name, subject.name)
        dates = sorted({run["date"] for run in subject.runs.values()})
        rows.append([f"[{subject.title}]({page}.md)", number(len(subject.results)), number(len(goals)), number(met),
                     number(len(goals) - met), dates[-1] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"])
    return grid(["subject", "results", "with a goal", "met", "missed", "dates"], rows)


def missed(all_subjects):
    """Every goal that the last run misses; one row for results that differ in their dimensions only."""
    rows = {}
    for subject in all_subjects.values():
        page = PAGES.get(subject.name, subject.name)
        reasons = {identity(result): result["reason"] for result in subject.results if "reason" in result}
        for result in subject.latest():
            if result.get("met", True):
                continue
            run = subject.runs[result["run"]]
            name = f"`{result['name']}`" if re.fullmatch(r"\w+", result["name"]) else result["name"]
            dims = ", ".join(number(value) if isinstance(value, Decimal) else str(value)
                             for key, value in result.items() if key not in KNOWN)
            reason = reasons.get(identity(result), "Not known.")
            texts = rows.setdefault((page, name, goal_of(result), run["date"], reason), [])
            texts.append(f"{dims}: {measured(result)}" if dims else measured(result))
    lines = [[f"[{page}]({page}.md)", name, goal, "; ".join(texts), date, reason]
             for (page, name, goal, date, reason), texts in rows.items()]
    return grid(["page", "bar", "goal", "measured", "date", "reason"], lines)


def ratio_of(ours, theirs):
    return (ours / theirs).quantize(Decimal("0.01"))


def comparison(all_subjects):
    """kvtier ÷ other systems on the same machine: one row a measure."""
    remote, engines = all_subjects["remote"], all_subjects["engines"]
    stream, peers = all_subjects["stream"], all_subjects["peers"]
    rows = []

    def ratios(field, better=1):
        return ", ".join(number(value) if better * (value - 1) >= 0 else f"**{number(value)}**"
                         for value in values(field)) + " ×"

    def row(what, ours, cells, subject, run):
        run = subject.runs[run]
        machine = re.sub(r"^2 cores of a virtual ", "", run["machine"].split(",")[0])
        page = PAGES.get(subject.name, subject.name)
        machine = "kind not recorded" if machine == "machine" else machine
        rows.append([what, ours, *(cells.get(peer, "") for peer in ("LMCache", "Mooncake", "NIXL", "other")),
                     f"{machine}, {run['date']}", f"[{page}](benchmarks/{page}.md)"])

    def beside(group, ours, sides, what, **fields):
        """A row of the last run of a group, with the ratio to each side that was measured."""
        run = peers.last(group)
        value = peers.get(run, side=ours, **fields)["value"]
        cells = {}
        for peer, side, label in sides:
            found = [result for result in peers.of(run) if result["side"] == side
                     and all(result.get(key) == one for key, one in fields.items())]
            if found:
                text = f"{label} {ratios(ratio_of(value, found[0]['value']))}".strip()
                cells[peer] = "; ".join(part for part in (cells.get(peer), text) if part)
        row(what, f"{value} GiB/s", cells, peers, run)

    for size in ("1 MiB", "256 KiB", "64 KiB"):
        for op in ("put", "get"):
            beside("host", "kvtier session", [("LMCache", "LMCache L1", ""), ("Mooncake", "Mooncake", ""),
                                              ("NIXL", "NIXL", "")], f"{op}, host memory, {size}", size=size, name=op)
    for op in ("durable put", "cold get"):
        beside("disk", "kvtier", [("LMCache", "LMCache fs_native, O_DIRECT, 8 workers", "fs_native"),
                                  ("LMCache", "LMCache raw_block, io_uring, on a file", "raw_block"),
                                  ("NIXL", "NIXL, fresh file", "")], f"{op}, disk, 1 MiB, one caller", name=op)
    run = "lmcache-2026-11-26"
    for op in ("put", "get"):
        cells = "; ".join(f"`{result['connector'].split(' ')[0]}` {ratios(result['ratio'])}"
                          for result in remote.of(run) if result["name"] == op)
        row(f"{op}, Redis, 256 KiB, two runs", "", {"LMCache": cells}, remote, run)
    for op in ("store", "load"):
        two = [engines.get(run, peer="LMCache 0.5.6's local disk", op=op)["ratio"]
               for run in ("vllm-peers-1", "vllm-peers-2")]
        row(f"kvtier's tier under vLLM, {op}, 256 KiB, two runs", "", {"LMCache": f"local disk {ratios(two)}"}, engines,
            "vllm-peers-1")
    for name, what in (("vllm_file_256KiB", "256 KiB"), ("vllm_file_1MiB", "1 MiB, two runs")):
        result = engines.get("python-2026-11-23", name)
        row(f"the same, store and load, {what}", "", {"other": f"vLLM's file tier {ratios(result['ratio'])}"}, engines,
            result["run"])
    run = "sglang-load"
    cells = ", ".join(f"{result['measures']} {ratios(result['ratio'])}" for result in engines.of(run))
    row("kvtier's backend under SGLang, under load: unreliable", "", {"other": f"SGLang's file backend: {cells}"},
        engines, run)
    result = engines.get("llama-tier-2026-11-29", "restore_memory")
    row("time to restore 1,024 tokens from host memory, under load, eight runs, least and greatest", "",
        {"other": f"llama.cpp's state copy {ratios([min(result['ratio']), max(result['ratio'])], -1)}"}, engines,
        result["run"])
    run = "load-peers-2026-11-28"
    ours = stream.get(run, side="kvtier")["value"]
    cells = "; ".join(f"{side} {ratios(ratio_of(ours, stream.get(run, side=side)['value']))}"
                      for side in ("Run:ai Model Streamer", "safetensors package"))
    row("loading a safetensors file into memory", f"{ours} GiB/s", {"other": cells}, stream, run)
    return grid(["measure", "kvtier", "÷ LMCache 0.5.6", "÷ Mooncake 0.3.13", "÷ NIXL 1.5.1", "÷ other",
                 "2 cores of a virtual machine, date", "details"], rows)


TABLES = {
    "comparison": comparison,
    "summary": summary,
    "missed": missed,
    "abi": bars("abi", "abi-2026-11-21"),
    "size": bars("abi", "size-2026-11-22", title="file"),
    "policy": pivot("policies", "policy-2026-11-21", "policy", "name", value_only,
                    columns=["1k, µs", "1k known, µs", "100k, ms", "100k known, ms", "victim p50, ns",
                             "victim p99, µs", "bytes"], only=lambda result: result["policy"] != "all"),
    "policy-goals": bars("policies", "quality", dims=("trace", "policy", "blocks")),
    **{f"hits-{trace}": pivot("policies", trace, "policy", "blocks", triple,
                              only=lambda result: result["policy"] != "unbounded")
       for trace in ("conversation", "synthetic", "agents", "agents_holes")},
    "generated": pivot("policies", "generated", "policy", ["trace", "share"], value_only,
                       only=lambda result: result["trace"] != "batch",
                       columns=[f"{kind}, {share} %" for kind in ("chat", "agent", "multitenant", "burst")
                                for share in (2, 10)]),
    "cache": pivot("policies", "cache-2026-11-28-late", "policy", ["load", "ids"], measured,
                   columns=["get, 64 ids a call", "get, 1 id", "mix, 64 ids a call", "mix, 1 id"],
                   only=lambda result: result["name"] == "cache"),
    "cache-peers": pivot("policies", "cache-2026-11-28-late", "peer", ["load", "hasher"], value_only,
                         columns=["own hasher: get, ns", "mix, ns", "ids as hashes: get, ns", "mix, ns"],
                         only=lambda result: result["name"] == "peer"),
    "libcachesim": pivot("policies", "libcachesim-2026-11-21", "policy", ["load", "ids"], measured,
                         columns=["get, 64 ids a call", "get, 1 id", "mix, 64 ids a call", "mix, 1 id"]),
    "replay": pivot("policies", "replay-2026-11-28-late", ["trace", "table"], "ids", measured, corner="trace, table",
                    columns=["one request a call", "64 a call"]),
    "churn": pivot("policies", "churn-2026-11-28", "policy", "name", measured, columns=["put, × lru"]),
    "growth": pivot("policies", "growth-2026-11-28", "policy", "name", measured, columns=["growth, × a random read"]),
    "metadata": bars("policies", "metadata"),
    "store": bars("store", "store-2026-11-21", "store-2026-11-21-evening", "store-2026-11-28", "tables-2026-11-28",
                  "store-2026-11-28-ahead",
                  labels=["full run", "later code", "2026-11-28, under load", "2026-11-28, quiet",
                          "2026-11-28, pieces prepared ahead"]),
    "callers": bars("store", "callers-2026-11-28", "callers-2026-11-28-late", labels=["before", "jobs of several chunks"]),
    "horizon": bars("store", "horizon-2026-11-28"),
    "instructions": instructions,
    "scale": bars("store", "scale-2026-11-21", "scale-2026-11-21-quick", labels=["full run", "quick run"]),
    "promises": bars("store", "promises-2026-11-27"),
    "segments": pivot("store", "segments-2026-11-27", "segments", "name", value_only,
                      columns=["share of cells", "bytes written for each byte of cells"]),
    "codecs": codecs,
    "peers-host": pivot("peers", None, ["size", "name"], "side", measured, corner="objects", group="host",
                        only=lambda result: result["group"] == "host"),
    "peers-disk": pivot("peers", None, "side", "name", measured, group="disk"),
    "peers-attention": pivot("peers", None, "side", ["name", "size"], measured, group="attention"),
    "peers-more": more_peers,
    "peers-host-before": pivot("store", "host-peers-2026-11-26", ["size", "op"], "side", measured, corner="objects"),
    "peers-disk-before": pivot("store", "disk-peers-2026-11-26", "side", "op", measured),
    "attention": bars("sparse", "attention-quiet", "attention-load", "attention-2026-11-28",
                      labels=["quiet", "under load", "2026-11-28"]),
    "attention-torch": bars("sparse", "attention-torch-quiet", "attention-torch-load",
                            labels=["kvtier, quieter", "kvtier, under load"]),
    "sparse": bars("sparse", "sparse-2026-11-22", "h2o-2026-11-28", labels=["2026-11-22", "2026-11-28"]),
    "offload": bars("sparse", "offload-2026-11-22"),
    "offload-long": pivot("sparse", "offload-long-2026-11-22", "policy", "name",
                          lambda result: measured(result) + (
                              f"; in memory {number(result['baseline']['value'])}" if "baseline" in result else ""),
                          columns=["pairs found in the last 2,048 symbols", "prompt, offloaded", "decode, offloaded"]),
    "stream": bars("stream", "weights-2026-11-28", "stream-quiet", "stream-other",
                   labels=["2026-11-28", "quiet run", "other run"]),
    "stream-parts": two_runs("stream", "other", "parts", ["a pass, quiet run"], ["quiet run, ×", "other run, ×"]),
    "stream-device": pivot("stream", "device-passes", "placement", "c_ms", measured, corner="device/host/file",
                           columns=["c = 0.07 ms", "2 ms", "4 ms", "6.5 ms", "9 ms"]),
    "stream-demo": pivot("stream", "demo", "memory", "name", measured, corner="memory for weights",
                         columns=["a token"]),
    "stream-peers": pivot("stream", "load-peers-2026-11-28", "side", "name", measured,
                          columns=["loading a file, ÷ raw reads"]),
    "gpu": bars("device", "gpu-first", "gpu-later", "gpu-2026-11-27",
                labels=["first", "later", "last"]),
    "gpu-methods": pivot("device", "methods", ["size", "direction"], "method", value_only, corner="cells"),
    "gpu-torch": bars("device", "torch-2026-11-26", "torch-2026-11-27", labels=["first", "last"]),
    "remote": bars("remote", "remote-quiet", "remote-load", "remote-2026-11-26", "remote-2026-11-28",
                   "remote-priority", labels=["quiet", "under load", "later code", "load 7", "last"]),
    "lmcache-first": pivot("remote", "lmcache-2026-11-23", "name", "connector", measured, corner="kvtier ÷ LMCache"),
    "lmcache": pivot("remote", "lmcache-2026-11-26", "name", "connector",
                     lambda result: f"{measured(result)} (earlier {number(result['earlier'])})",
                     corner="kvtier ÷ LMCache"),
    "lmcache-native": bars("remote", "native-before", "native", "native-2026-11-28",
                           labels=["library before", "later library", "last"]),
    "tls": pivot("remote", "tls", "protection", "name", measured),
    "s3": pivot("remote", "s3", "name", "peer", measured, corner="throughput ÷",
                only=lambda result: "peer" in result),
    "s3-lookups": bars("remote", "s3", only=lambda result: "peer" not in result),
    "failures": bars("remote", "failures"),
    "real": bars("engines", "real-2026-11-26", title="scenario"),
    "demo": bars("engines", "demo-2026-11-23", title="scenario"),
    "llama": bars("engines", "llama-2026-11-23"),
    "llama-tier": bars("engines", "llama-tier-2026-11-29"),
    "llama-layers": bars("engines", "llama-layers-2026-11-29"),
    "longer": pivot("engines", "longer-2026-11-23", "name", "context", with_goal, corner="measure"),
    "longer-last": pivot("engines", "longer-2026-11-29", "name", "context", with_goal, corner="measure"),
    "run": bars("engines", "run-2026-11-29"),
    "vllm-real": bars("engines", "vllm-real-2026-11-29"),
    "candle": bars("engines", "candle-2026-11-29"),
    "experts": bars("engines", "experts-2026-11-29"),
    "python": bars("engines", "python-2026-11-23"),
    "vllm-peers": pivot("engines", ["vllm-peers-1", "vllm-peers-2"], "peer", ["run", "op"], measured,
                        corner="speed of vLLM's tier ÷", columns=["1st run: store", "load", "2nd run: store", "load"]),
    "lmcache-plugin": bars("engines", "lmcache-2026-11-29"),
    "sglang-load": bars("engines", "sglang-load"),
}
