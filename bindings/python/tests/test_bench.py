"""The benchmark prints the format of `kvtier-bench --json`. Its times are not tested."""

from __future__ import annotations

import json
import subprocess
import sys

import build_wheel

KEYS = {"group", "bar", "value", "unit", "baseline", "baseline_value", "goal", "better", "ok"}


def test_every_line_is_a_bar() -> None:
    script = build_wheel.HERE / "bench.py"
    done = subprocess.run([sys.executable, str(script), "--rounds", "1"], capture_output=True,
                          text=True, timeout=600)
    assert done.returncode == 0, done
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(set(line) >= KEYS and line["group"] == "python" for line in lines)
    bars = [line["bar"] for line in lines]
    assert len(set(bars)) == len(bars) and {"call_now", "call_policy_touch_16", "batch_put_1000",
                                            "batch_get_1000", "batch_get_ready_1000"} <= set(bars)
    for line in lines:
        known = line["value"] is not None and line["baseline_value"] is not None
        assert line["ok"] == (line["value"] <= line["goal"] if known else None)
        assert known or line["note"]
