#!/usr/bin/env python3
"""Draws the plots and the tables of docs/benchmarks from docs/benchmarks/results/*.json.

    python3 docs/benchmarks/draw.py            write plots/*.svg and the tables between the markers of the pages
    python3 docs/benchmarks/draw.py --check    write nothing; exit 1 if something is stale or inconsistent

A table stands in a page between `<!-- table: NAME -->` and `<!-- /table -->`. The output depends on the results
alone. Results: docs/benchmarks/index.md, "Format of the results".
"""

import json
import re
import sys
import textwrap
from decimal import Decimal
from math import log10, log2
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGES = [*sorted(HERE.glob("*.md")), HERE.parent / "comparison.md"]

# ---------------------------------------------------------------------------------------------- results


class Subject:
    """One file of results."""

    def __init__(self, path):
        data = json.loads(path.read_text(encoding="utf-8"), parse_float=Decimal, parse_int=Decimal)
        self.name, self.title = data["subject"], data["title"]
        self.runs, self.results = data["runs"], data["results"]
        if self.name != path.stem:
            raise SystemExit(f"{path}: subject '{self.name}' differs from the file's name")
        for result in self.results:
            if result["run"] not in self.runs:
                raise SystemExit(f"{path}: {result['name']}: unknown run '{result['run']}'")

    def of(self, *runs):
        for run in runs:
            if run not in self.runs:
                raise SystemExit(f"{self.name}: unknown run '{run}'")
        return [result for result in self.results if result["run"] in runs]

    def get(self, run, name=None, **fields):
        """The one result of a run with a name and with these fields."""
        found = [result for result in self.of(run) if name in (None, result["name"])
                 and all(result.get(key) == value for key, value in fields.items())]
        if len(found) != 1:
            raise SystemExit(f"{self.name}: {len(found)} results for {run} {name} {fields}")
        return found[0]

    def latest(self):
        """The last result of each name and dimensions; a later run replaces an earlier one."""
        last = {}
        for result in self.results:
            last[identity(result)] = result
        return list(last.values())


KNOWN = {"name", "run", "measures", "value", "range", "unit", "baseline", "ratio", "goal", "met", "reason", "note", "spread",
         "first", "earlier", "other", "cost", "jain", "encode_mbs", "decode_mbs", "error"}


def identity(result):
    return (result["name"], *(f"{key}={result[key]}" for key in result if key not in KNOWN))


def values(field):
    return field if isinstance(field, list) else [field]


def reads(goal):
    """A goal as (field, operator, limit)."""
    field, goal = ("ratio", goal[6:]) if goal.startswith("ratio ") else ("value", goal)
    operator, limit = goal.split(" ", 1)
    return field, operator, limit if limit == "baseline" else Decimal(limit)


def meets(result, value):
    _, operator, limit = reads(result["goal"])
    if limit == "baseline":
        limit = result["baseline"]["value"]
    return {"<=": value <= limit, "<": value < limit, ">=": value >= limit, ">": value > limit,
            "==": value == limit}[operator]


def problems(subject):
    """Results whose parts contradict each other."""
    for result in subject.results:
        where = f"{subject.name}.json: {result['name']} of {result['run']}"
        if "goal" in result:
            field = reads(result["goal"])[0]
            met = all(meets(result, value) for value in values(result[field]))
            if met != result["met"]:
                yield f"{where}: met is {result['met']}, the values say {met}"
        base = result.get("baseline", {})
        if {"value", "ratio"} <= result.keys() and base.get("unit") == result.get("unit") and "value" in base:
            single = [values(x) for x in (result["value"], result["ratio"], base["value"])]
            if all(len(one) == 1 for one in single):
                value, ratio, base = (one[0] for one in single)
                # Medians of ratios are not ratios of medians; of times the ratio may be the speed.
                if all(abs(one - ratio) > Decimal("0.15") * ratio for one in (value / base, base / value)):
                    yield f"{where}: {value} / {base} is not {ratio}"


# ---------------------------------------------------------------------------------------------- text

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
    if run["profile"] != "not recorded":
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


def pivot(name, runs, row, column, cell=measured, corner=None, only=None, columns=None):
    """Rows and columns: fields of results."""
    runs = [runs] if isinstance(runs, str) else runs

    def make(all_subjects):
        subject = all_subjects[name]
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


def summary(all_subjects):
    """Goals met and missed, by subject; of each bar the last run."""
    rows = []
    for subject in all_subjects.values():
        goals = [result for result in subject.latest() if "goal" in result]
        met = sum(1 for result in goals if result["met"])
        page = {"abi": "store"}.get(subject.name, subject.name)
        dates = sorted({run["date"] for run in subject.runs.values()})
        rows.append([f"[{subject.title}]({page}.md)", number(len(subject.results)), number(len(goals)), number(met),
                     number(len(goals) - met), dates[-1] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"])
    return grid(["subject", "results", "with a goal", "met", "missed", "dates"], rows)


def missed(all_subjects):
    """Every goal that the last run misses; one row for results that differ in their dimensions only."""
    rows = {}
    for subject in all_subjects.values():
        page = {"abi": "store"}.get(subject.name, subject.name)
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


TABLES = {
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
    "cache": pivot("policies", "cache-2026-11-21", "policy", ["load", "ids"], measured,
                   columns=["get, 64 ids a call", "get, 1 id", "mix, 64 ids a call", "mix, 1 id"],
                   only=lambda result: result["name"] == "cache"),
    "cache-peers": pivot("policies", "cache-2026-11-21", "peer", ["load", "hasher"], value_only,
                         columns=["own hasher: get, ns", "mix, ns", "ids as hashes: get, ns", "mix, ns"],
                         only=lambda result: result["name"] == "peer"),
    "libcachesim": pivot("policies", "libcachesim-2026-11-21", "policy", ["load", "ids"], measured,
                         columns=["get, 64 ids a call", "get, 1 id", "mix, 64 ids a call", "mix, 1 id"]),
    "replay": pivot("policies", "replay-2026-11-21", ["trace", "table"], "ids", measured, corner="trace, table",
                    columns=["one request a call", "64 a call"]),
    "metadata": bars("policies", "metadata"),
    "store": bars("store", "store-2026-11-21", "store-2026-11-21-evening", labels=["full run", "later code"]),
    "scale": bars("store", "scale-2026-11-21", "scale-2026-11-21-quick", labels=["full run", "quick run"]),
    "promises": bars("store", "promises-2026-11-27"),
    "segments": pivot("store", "segments-2026-11-27", "segments", "name", value_only,
                      columns=["share of cells", "bytes written for each byte of cells"]),
    "codecs": codecs,
    "peers": bars("store", "peers-2026-11-21"),
    "peers-host": pivot("store", "host-peers-2026-11-26", ["size", "op"], "side", measured, corner="objects"),
    "peers-disk": pivot("store", "disk-peers-2026-11-26", "side", "op", measured),
    "attention": bars("sparse", "attention-quiet", "attention-load", labels=["quiet", "under load"]),
    "attention-torch": bars("sparse", "attention-torch-quiet", "attention-torch-load",
                            labels=["kvtier, quieter", "kvtier, under load"]),
    "sparse": bars("sparse", "sparse-2026-11-22"),
    "offload": bars("sparse", "offload-2026-11-22"),
    "offload-long": pivot("sparse", "offload-long-2026-11-22", "policy", "name",
                          lambda result: measured(result) + (
                              f"; in memory {number(result['baseline']['value'])}" if "baseline" in result else ""),
                          columns=["pairs found in the last 2,048 symbols", "prompt, offloaded", "decode, offloaded"]),
    "stream": bars("stream", "stream-quiet", "stream-other", labels=["quiet run", "other run"]),
    "stream-parts": two_runs("stream", "other", "parts", ["a pass, quiet run"], ["quiet run, ×", "other run, ×"]),
    "stream-device": pivot("stream", "device-passes", "placement", "c_ms", measured, corner="device/host/file",
                           columns=["c = 0.07 ms", "2 ms", "4 ms", "6.5 ms", "9 ms"]),
    "stream-demo": pivot("stream", "demo", "memory", "name", measured, corner="memory for weights",
                         columns=["a token"]),
    "stream-peers": pivot("stream", "load-peers-2026-11-26", "side", "name", measured,
                          columns=["loading a file, ÷ raw reads"]),
    "gpu": bars("device", "gpu-first", "gpu-later", "gpu-2026-11-27",
                labels=["first", "later", "last"]),
    "gpu-methods": pivot("device", "methods", ["size", "direction"], "method", value_only, corner="cells"),
    "gpu-torch": bars("device", "torch-2026-11-26", "torch-2026-11-27", labels=["first", "last"]),
    "remote": bars("remote", "remote-quiet", "remote-load", "remote-2026-11-26",
                   labels=["quiet", "under load", "later code"]),
    "lmcache-first": pivot("remote", "lmcache-2026-11-23", "name", "connector", measured, corner="kvtier ÷ LMCache"),
    "lmcache": pivot("remote", "lmcache-2026-11-26", "name", "connector",
                     lambda result: f"{measured(result)} (earlier {number(result['earlier'])})",
                     corner="kvtier ÷ LMCache"),
    "tls": pivot("remote", "tls", "protection", "name", measured),
    "s3": pivot("remote", "s3", "name", "peer", measured, corner="throughput ÷",
                only=lambda result: "peer" in result),
    "s3-lookups": bars("remote", "s3", only=lambda result: "peer" not in result),
    "failures": bars("remote", "failures"),
    "real": bars("engines", "real-2026-11-26", title="scenario"),
    "demo": bars("engines", "demo-2026-11-23", title="scenario"),
    "llama": bars("engines", "llama-2026-11-23"),
    "longer": pivot("engines", "longer-2026-11-23", "name", "context",
                    lambda result: value_only(result) + (f" (goal {goal_of(result)})" if "goal" in result else ""),
                    corner="measure"),
    "python": bars("engines", "python-2026-11-23"),
    "vllm-peers": pivot("engines", ["vllm-peers-1", "vllm-peers-2"], "peer", ["run", "op"], measured,
                        corner="speed of vLLM's tier ÷", columns=["1st run: store", "load", "2nd run: store", "load"]),
    "sglang-load": bars("engines", "sglang-load"),
}

# ---------------------------------------------------------------------------------------------- plots

WIDTH = 400
STYLE = """
    .page { fill: #ffffff; stroke: #d1d5db }
    text { fill: #1f2937; font: 11px system-ui, sans-serif }
    .head { font-weight: 600; font-size: 12px }
    .small { fill: #4b5563; font-size: 10px }
    .grid { stroke: #d1d5db; stroke-width: 1; fill: none }
    .goal { stroke: #1f2937; stroke-width: 2; fill: none }
    .a { fill: #1f5fae; stroke: #1f5fae }
    .b { fill: #b3541e; stroke: #b3541e }
    .c { fill: #2e7d32; stroke: #2e7d32 }
    .d { fill: #7b3fa0; stroke: #7b3fa0 }
    .e { fill: #9ca3af; stroke: #9ca3af }
    .bad { fill: #b91c1c; stroke: #b91c1c }
    .line { fill: none; stroke-width: 2 }
    .thin { fill: none; stroke-width: 1; opacity: 0.6 }
    .dash { stroke-dasharray: 5 3 }
    rect { stroke-width: 0 }
    .page { stroke-width: 1 }
    @media (prefers-color-scheme: dark) {
      .page { fill: #161a20; stroke: #374151 }
      text { fill: #e5e7eb }
      .small { fill: #b6bcc6 }
      .grid { stroke: #374151 }
      .goal { stroke: #e5e7eb }
      .a { fill: #7fb2f0; stroke: #7fb2f0 }
      .b { fill: #f0a06a; stroke: #f0a06a }
      .c { fill: #7ccf85; stroke: #7ccf85 }
      .d { fill: #c9a0e8; stroke: #c9a0e8 }
      .e { fill: #6b7280; stroke: #6b7280 }
      .bad { fill: #f87171; stroke: #f87171 }
    }
  """


def escape(text):
    return str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def at(value):
    """A coordinate, with at most one digit after the point."""
    text = f"{float(value):.1f}"
    return text[:-2] if text.endswith(".0") else text


class Picture:
    """An SVG that grows downwards."""

    def __init__(self, title, description=""):
        self.title, self.description, self.parts, self.y = title, description, [], 8
        for line in wrapped(title, 50):
            self.y += 15
            self.text(10, self.y, line, "head")
        for line in wrapped(description, 64):
            self.y += 13
            self.text(10, self.y, line, "small")
        self.y += 8

    def text(self, x, y, text, kind="", anchor="start"):
        kind = f' class="{kind}"' if kind else ""
        anchor = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self.parts.append(f'<text{kind} x="{at(x)}" y="{at(y)}"{anchor}>{escape(text)}</text>')

    def bar(self, x, y, width, height, kind):
        self.parts.append(f'<rect class="{kind}" x="{at(x)}" y="{at(y)}" width="{at(max(width, 0.5))}" '
                          f'height="{at(height)}" rx="1.5"/>')

    def path(self, points, kind):
        steps = "".join(f"{'L' if index else 'M'}{at(x)} {at(y)}" for index, (x, y) in enumerate(points))
        self.parts.append(f'<path class="{kind}" d="{steps}"/>')

    def dot(self, x, y, kind, radius=3):
        self.parts.append(f'<circle class="{kind}" cx="{at(x)}" cy="{at(y)}" r="{at(radius)}"/>')

    def legend(self, entries):
        """Entries: (class, text)."""
        x = 10
        self.y += 4
        for kind, text in entries:
            width = 18 + 5.8 * len(text)
            if x + width > WIDTH - 6:
                x, self.y = 10, self.y + 15
            self.bar(x, self.y, 10, 10, kind)
            self.text(x + 14, self.y + 9, text)
            x += width + 8
        self.y += 20

    def svg(self):
        height = at(self.y + 8)
        body = "\n  ".join(self.parts)
        description = f"\n  <desc>{escape(self.description)}</desc>" if self.description else ""
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH * 3 // 2}" '
                f'height="{at((self.y + 8) * 1.5)}" role="img">\n  <title>{escape(self.title)}</title>{description}\n  <style>{STYLE}</style>\n  '
                f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{at(self.y + 7)}" rx="6"/>\n  '
                f'{body}\n</svg>\n')


def wrapped(text, columns):
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > columns:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    return lines + ([line] if line else [])


def horizontal(picture, groups, top, reference=None, unit="", axis=True):
    """Bars in groups: (label, [(class, value, text, goal or None)]). `reference`: a vertical line at a value."""
    left, right = 10, WIDTH - 12
    span = right - left - 62

    def x(value):
        return left + float(value) / top * span

    start = picture.y
    for label, entries in groups:
        for line in wrapped(label, 60):
            picture.y += 12
            picture.text(left, picture.y, line)
        picture.y += 4
        for kind, value, text, goal in entries:
            picture.bar(left, picture.y, x(min(float(value), top)) - left, 9, kind)
            if goal is not None:
                picture.path([(x(goal), picture.y - 2), (x(goal), picture.y + 11)], "goal")
            picture.text(max(x(min(float(value), top)), x(goal) if goal is not None else 0) + 5, picture.y + 8.5, text)
            picture.y += 12
        picture.y += 2
    if reference is not None:
        picture.parts.insert(0, f'<path class="grid dash" d="M{at(x(reference))} {at(start)}V{at(picture.y + 3)}"/>')
        picture.y += 14
        picture.text(x(reference), picture.y, f"{reference}{unit}", "small", "middle")
        picture.y += 8
    picture.y += 4


def against_goals(title, results, note=""):
    """One row a bar: how far its worst and best values are from the goal, on a logarithmic axis."""
    picture = Picture(title, "Each dot is a measured value ÷ its goal; right of the line meets the goal, left of it misses. "
                      + note)
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
    own = ("horizon", "horizon(objective=cost)", "auto", "predictive", "belady", "unbounded")
    for trace, label in (("conversation", "conversation"), ("synthetic", "synthetic"), ("agents", "coding agents")):
        results = [result for result in subject.of(trace) if "blocks" in result]
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
            if policy not in own and policy != "lru":
                picture.path([(x(size), y(by[policy, size])) for size in sizes], "e thin")
        best = [max(value for (policy, one), value in by.items() if one == size and policy not in own) for size in sizes]
        for kind, line in (("e line dash", [by["belady", size] for size in sizes]), ("b line dash", best),
                           ("c line", [by["lru", size] for size in sizes]), ("d line", [by["auto", size] for size in sizes]),
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
    own = ("horizon", "horizon(objective=cost)", "auto", "predictive", "belady", "unbounded")
    groups = []
    for trace in ("conversation", "synthetic", "agents"):
        results = [result for result in subject.of(trace) if "blocks" in result]
        for size in sorted({result["blocks"] for result in results}):
            by = {result["policy"]: float(result["value"]) for result in results if result["blocks"] == size}
            classic = max((policy for policy in by if policy not in own), key=lambda policy: by[policy])
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
                      "Black tick: the goal. Red misses it. Two cores; 2026-11-21, promises 2026-11-27.")
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
    picture.text(10, picture.y + 8, "Cost of a cell in the tables, ns, last runs", "head")
    picture.y += 12
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
    subject = all_subjects["store"]
    picture = Picture("Beside Mooncake, LMCache and NIXL: objects of 1 MiB, GiB/s",
                      "Two cores of a virtual Xeon, virtual disk, 2026-11-26, kvtier before write-behind.")
    picture.legend([("a", "kvtier"), ("e", "others")])
    groups = []
    for op in ("put", "get"):
        entries = []
        for result in subject.of("host-peers-2026-11-26"):
            if result["size"] == "1 MiB" and result["op"] == op:
                kind = "a" if result["side"].startswith("kvtier") else "e"
                entries.append((kind, result["value"], f"{number(result['value'])} {result['side']}", None))
        groups.append((f"{op}, host memory", entries))
    horizontal(picture, groups, 11)
    groups = []
    for op in ("durable put", "cold get"):
        entries = []
        for result in subject.of("disk-peers-2026-11-26"):
            if result["op"] == op and "written over" not in result["side"]:
                kind = {"kvtier": "a", "raw, fresh file": "c"}.get(result["side"], "e")
                side = result["side"].split(", O_DIRECT")[0].split(" (")[0].replace(", one file over and over", ", one file")
                entries.append((kind, result["value"], f"{number(result['value'])} {side}", None))
        groups.append((f"{op}, disk", entries))
    horizontal(picture, groups, 3.6)
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
    picture.text(10, picture.y + 8, "kvtier stream demo: a model of 312 MiB, ms a token", "head")
    picture.y += 12
    groups = [(f"memory for weights: {result['memory'].split(' (')[0]}",
               [("c" if "without" in result["memory"] else "a", result["value"], f"{number(result['value'])} ms", None)])
              for result in subject.of("demo")]
    horizontal(picture, groups, 180)
    return picture.svg()


def gpu_copies(all_subjects):
    subject = all_subjects["device"]
    picture = Picture("Copies to the GPU by method, as a share of one large copy",
                      "NVIDIA H200, PCIe 5 x16, 2026-11-26, mean of two runs. kvtier measures at opening and takes the best.")
    picture.legend([("e", "one by one"), ("b", "in batches"), ("a", "by the kernel")])
    kinds = {"one by one": "e", "in batches": "b", "by the kernel": "a"}
    groups = []
    for size in ("16 KiB", "64 KiB", "1 MiB"):
        entries = []
        for result in subject.of("methods"):
            if result["size"] == size and result["direction"] == "to":
                mean = sum(result["ratio"]) / len(result["ratio"])
                entries.append((kinds[result["method"]], mean, f"{mean:.2f}", None))
        groups.append((f"cells of {size}", entries))
    horizontal(picture, groups, 1.05, reference=1)
    picture.text(10, picture.y + 8, "Speed ÷ torch 2.11, 2026-11-27", "head")
    picture.y += 12
    groups = []
    for result in subject.of("torch-2026-11-27"):
        value = sum(values(result["ratio"])) / len(values(result["ratio"]))
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
        mean = sum(result["ratio"]) / len(result["ratio"])
        groups.append((f"{result['name']}, beside {result['connector']}",
                       [("a" if mean >= 1 else "bad", mean, f"{mean:.2f} ×", None)]))
    horizontal(picture, groups, 4, reference=1, unit=" ×")
    picture.text(10, picture.y + 8, "One connection, MiB/s, 2026-11-23", "head")
    picture.y += 8
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
        groups.append((label, [("a", share, f"{number(value)} {unit}", None), ("e", 100, f"{number(base)} {unit}", None)]))
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
    "gpu-goals": goals_of("device", "GPU: the last run against its goals", "NVIDIA H200, 2026-11-27.", ["gpu-2026-11-27"]),
    "gpu-copies": gpu_copies,
    "remote-peers": remote_peers,
    "engines-first-token": first_tokens,
    "engines-llama": goals_of("engines", "llama.cpp: bars against their goals", "SmolLM2 135M, Zen 4, 2026-11-23.",
                              ["llama-2026-11-23"]),
}

# ---------------------------------------------------------------------------------------------- main

MARKER = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)
PLOT = re.compile(r"plots/([\w-]+)\.svg")


def main():
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        raise SystemExit(__doc__)
    names = ("store", "abi", "policies", "sparse", "stream", "device", "remote", "engines")
    files = {path.stem for path in (HERE / "results").glob("*.json")}
    if files != set(names):
        raise SystemExit(f"results/: {sorted(files ^ set(names))} is missing or not known to draw.py")
    subjects = {name: Subject(HERE / "results" / f"{name}.json") for name in names}
    wrong = [problem for subject in subjects.values() for problem in problems(subject)]

    wanted = {HERE / "plots" / f"{name}.svg": draw(subjects) for name, draw in PLOTS.items()}
    tables, plots = set(), set()
    for page in PAGES:
        if not page.exists():
            continue
        text = page.read_text(encoding="utf-8")
        if text.count("<!-- table:") != len(MARKER.findall(text)):
            wrong.append(f"{page.name}: a table has no end")

        def fill(match, page=page):
            name = match.group(2)
            if name not in TABLES:
                wrong.append(f"{page.name}: unknown table '{name}'")
                return match.group(0)
            tables.add(name)
            return f"{match.group(1)}\n{TABLES[name](subjects)}\n\n{match.group(4)}"

        wanted[page] = MARKER.sub(fill, text)
        plots.update(PLOT.findall(text))
    wrong += [f"table '{name}' is in no page" for name in sorted(TABLES.keys() - tables)]
    wrong += [f"plot '{name}' is in no page" for name in sorted(PLOTS.keys() - plots)]
    wrong += [f"plot '{name}' of a page is not drawn" for name in sorted(plots - PLOTS.keys())]
    drawn = " ".join(" ".join(text for path, text in wanted.items() if path.suffix == ".md").split())
    for subject in subjects.values():
        for run in subject.runs.values():
            if run_line(run) not in drawn:
                wrong.append(f"{subject.name}.json: a run of {run['date']} ({run['command']}) is in no table")

    for path, text in sorted(wanted.items()):
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if check:
            wrong.append(f"{path.relative_to(HERE.parent.parent)} is stale: run docs/benchmarks/draw.py")
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(HERE.parent.parent))
    for path in sorted((HERE / "plots").glob("*")):
        if path not in wanted:
            wrong.append(f"{path.relative_to(HERE.parent.parent)} is drawn by nothing")
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
