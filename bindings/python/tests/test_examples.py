"""The scripts of examples/python: they run, and a bad argument ends them with the library's message."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import List

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "python"

RUNS = [
    ("lab_compare_policies.py", ["burst"], "belady"),
    ("lab_size_cache.py", ["burst"], "GiB"),
    ("lab_sparse_quality.py", [], "h2o"),
]
FAILURES = [
    ("lab_compare_policies.py", ["no-such-file.jsonl"], "no-such-file.jsonl"),
    ("lab_size_cache.py", ["no-such-file.jsonl"], "no-such-file.jsonl"),
    ("lab_sparse_quality.py", ["qest(budget={budget})"], "quest"),
]


def run(name: str, arguments: List[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, str(EXAMPLES / name), *arguments], capture_output=True,
                          text=True, timeout=600)


def test_every_example_is_tested() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {name for name, _, _ in RUNS} == {name for name, _, _ in FAILURES}


@pytest.mark.parametrize(("name", "arguments", "word"), RUNS)
def test_an_example_runs(name: str, arguments: List[str], word: str) -> None:
    done = run(name, arguments)
    assert done.returncode == 0, done.stderr
    assert word in done.stdout


@pytest.mark.parametrize(("name", "arguments", "word"), FAILURES)
def test_a_bad_argument_ends_it_with_the_message(name: str, arguments: List[str], word: str) -> None:
    done = run(name, arguments)
    assert done.returncode == 1
    assert word in done.stderr and "Traceback" not in done.stderr
