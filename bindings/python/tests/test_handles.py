"""The check for handles that a test leaves open."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
LEAKS = """
import kvtier, pytest
kept = []

@pytest.mark.parametrize("fails", [True, False])
def test_leaves_a_runtime(fails):
    kept.append(kvtier.Runtime(workers=1))
    assert not fails, "the test itself"

def test_after_them():
    with kvtier.Runtime(workers=1):
        pass
"""


def test_a_failed_test_is_not_waited_for(pytester: pytest.Pytester) -> None:
    """The test that leaks fails, the failed one keeps its own message, and the next ones pass."""
    pytester.makeconftest(
        f"import sys\nsys.path.append({str(Path(__file__).parent)!r})\n"
        "from handles import no_handles_left, pytest_runtest_makereport\n"
        "import handles\nhandles.SECONDS = 3.0\n")
    pytester.makepyfile(LEAKS)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=1, passed=2, errors=1)
    result.stdout.fnmatch_lines(["*AssertionError: left open: *Runtime*"])
    result.stdout.fnmatch_lines(["*AssertionError: the test itself*"])
