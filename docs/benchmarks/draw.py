#!/usr/bin/env python3
"""Draws the plots and the tables of docs/benchmarks from docs/benchmarks/results/*.json.

    python3 docs/benchmarks/draw.py            write plots/*.svg and the tables between the markers of the pages
    python3 docs/benchmarks/draw.py --check    write nothing; exit 1 if something is stale or inconsistent

A table stands in a page between `<!-- table: NAME -->` and `<!-- /table -->`. The output depends on the results
alone. Results: docs/benchmarks/index.md, "Format of the results".
"""

import re
import sys
from pathlib import Path

sys.dont_write_bytecode = True

from drawing.plots import PLOTS  # noqa: E402
from drawing.results import Subject, problems  # noqa: E402
from drawing.tables import TABLES, run_line  # noqa: E402

HERE = Path(__file__).resolve().parent
PAGES = [*sorted(HERE.glob("*.md")), HERE.parent / "comparison.md"]
MARKER = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)
PLOT = re.compile(r"plots/([\w-]+)\.svg")


def main():
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        raise SystemExit(__doc__)
    names = ("store", "abi", "policies", "sparse", "stream", "device", "remote", "engines", "peers")
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
