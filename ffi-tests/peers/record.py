#!/usr/bin/env python3
"""Lines of the comparisons with other systems, and their way into docs/benchmarks/results/peers.json.

    record.py head                       print the machine, the date and the load as a line
    record.py convert VERSIONS < BARS    bars of `kvtier-bench` as lines; lines pass
                                         through; VERSIONS is a JSON object
    record.py save FILE [--about TEXT]   save the lines of FILE as the run of their date, and draw
                                         the tables and plots of docs/benchmarks

A line has `group`, `name`, `side`, `value`, `unit`, `ratio` and `versions`; a side that was not
measured has `skip` with the reason. A run of the same date is replaced, group by group.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs/benchmarks/results/peers.json"
KEPT = ("name", "group", "size", "side", "value", "unit", "ratio", "baseline", "note")


def machine():
    text = pathlib.Path("/proc/cpuinfo").read_text()
    cpu = next((line.split(":", 1)[1].strip() for line in text.splitlines()
                if line.startswith("model name")), platform.machine())
    if " hypervisor" in text:
        cpu = f"a virtual {cpu}"
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (f"{os.cpu_count()} cores of {cpu}, {round(pages / (1 << 30))} GiB, "
            f"Linux {'.'.join(platform.release().split('.')[:2])}")


def head():
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    print(json.dumps({"group": "run", "date": date, "machine": machine(), "load": load}))


def convert(versions):
    """A bar's ratio is its value if that is relative, and else value ÷ baseline. A difference from
    the baseline has none."""
    for text in sys.stdin:
        bar = json.loads(text)
        if "bar" not in bar:
            print(text, end="", flush=True)
            continue
        value, base = bar.get("value"), bar.get("baseline_value")
        if bar.get("unit", "").endswith(" more"):
            base = None
        is_ratio = bar.get("unit", "").startswith(("x", "of "))
        ratio = value if is_ratio else value / base if value is not None and base else None
        line = {"group": bar["group"], "name": bar["bar"], "side": "kvtier", "value": value,
                "unit": bar.get("unit", ""), "ratio": ratio, "versions": versions,
                "baseline": bar.get("baseline", "")}
        if base is not None and not is_ratio:
            line["baseline_value"] = base
        if bar.get("note"):
            line["skip" if value is None else "note"] = bar["note"]
        print(json.dumps(line, ensure_ascii=False), flush=True)


def rounded(value):
    """Three digits; an integer where nothing is behind the point."""
    value = float(f"{value:.3g}")
    return int(value) if value.is_integer() else value


def result(line, run):
    """A line as a result of a run."""
    out = {"name": line["name"], "run": run}
    out |= {key: line[key] for key in KEPT if line.get(key) not in (None, "", {})}
    for key in ("value", "ratio"):
        if key in out:
            out[key] = rounded(out[key])
    if out.get("unit", "").startswith(("x", "of ")):
        # The value is the ratio.
        del out["value"], out["unit"]
    if "baseline" in out:
        base = {"name": out["baseline"]}
        if "baseline_value" in line:
            base |= {"value": rounded(line["baseline_value"]), "unit": line["unit"]}
        out["baseline"] = base
    return out


def save(path, about):
    lines = [json.loads(text) for text in path.read_text().splitlines() if text.startswith("{")]
    heads = [line for line in lines if line["group"] == "run"]
    if not heads:
        sys.exit(f"{path} has no line of `record.py head`")
    measured = [line for line in lines if line.get("value") is not None]
    if not measured:
        sys.exit(f"{path} has no value")
    data = {"subject": "peers", "title": "Beside other systems", "runs": {}, "results": []}
    if RESULTS.exists():
        data = json.loads(RESULTS.read_text())
    date = heads[0]["date"]
    for group in dict.fromkeys(line["group"] for line in measured):
        run, part = f"{group}-{date}", [line for line in lines if line["group"] == group]
        versions = {}
        for line in part:
            versions |= line.get("versions", {})
        skipped = dict.fromkeys(f"{line['side']} was not measured: {line['skip']}"
                                for line in part if line.get("skip"))
        notes = [", ".join(f"{name} {number}" for name, number in sorted(versions.items())) + "."]
        notes = notes if versions else []
        data["runs"][run] = {
            "date": date, "machine": heads[0]["machine"], "profile": "no LTO",
            "command": "ffi-tests/peers/run.sh", "load": f"{heads[0]['load']} at the start",
            **({"about": about} if about else {}), "notes": notes + list(skipped)}
        data["results"] = [one for one in data["results"] if one["run"] != run]
        data["results"] += [result(line, run) for line in part if line.get("value") is not None]
    rows = ",\n".join("    " + json.dumps(one, ensure_ascii=False) for one in data["results"])
    top = json.dumps({**data, "results": []}, ensure_ascii=False, indent=2)
    RESULTS.write_text(top.replace('"results": []', f'"results": [\n{rows}\n  ]') + "\n")
    subprocess.run([sys.executable, ROOT / "docs/benchmarks/draw.py"], check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("head", "convert", "save"))
    parser.add_argument("what", nargs="?")
    parser.add_argument("--about", default="")
    args = parser.parse_args()
    if args.do == "head":
        head()
    elif args.do == "convert":
        convert(json.loads(args.what or "{}"))
    elif args.what:
        save(pathlib.Path(args.what), args.about)
    else:
        parser.error("save needs a file")


if __name__ == "__main__":
    main()
