"""Results: the files of results/, and whether they contradict themselves."""

import json
from decimal import Decimal


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

    def last(self, group):
        """The key of the last run with results of a group."""
        runs = [result["run"] for result in self.results if result.get("group") == group]
        if not runs:
            raise SystemExit(f"{self.name}: no results of the group '{group}'")
        return max(runs, key=lambda run: self.runs[run]["date"])

    def latest(self):
        """The last result of each name and dimensions; a later run replaces an earlier one."""
        last = {}
        for result in self.results:
            last[identity(result)] = result
        return list(last.values())


KNOWN = {"name", "run", "measures", "value", "range", "unit", "baseline", "ratio", "goal", "met", "reason", "note",
         "spread", "first", "earlier", "other", "cost", "jain", "encode_mbs", "decode_mbs", "error", "horizon", "locked",
         "allocations"}


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
