"""Fixtures. These tests use stand-ins for lmdeploy's modules, and numpy arrays as tensors.

The tests in `engine` use the real modules; name their folder on the command line to run them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Callable, Iterator, List

import pytest

HERE = Path(__file__).resolve().parent
# Compare whole paths: argv also names the interpreter, whose path may contain "engine".
ENGINE = any(HERE / "engine" in (path, *path.parents)
             for path in (Path(argument.partition("::")[0]).resolve() for argument in sys.argv))
sys.path.insert(0, str(HERE.parent))
if not ENGINE:
    sys.path.insert(0, str(HERE / "stubs"))
    collect_ignore = ["engine"]

sys.path.append(str(HERE.parents[1] / "python" / "tests"))  # handles.py
from handles import no_handles_left, pytest_runtest_makereport  # noqa: E402, F401


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    """Registers connectors, and shuts them down after the test."""
    made: List[Any] = []

    def keep(connector: Any) -> Any:
        made.append(connector)
        return connector

    yield keep
    for connector in made:
        connector.shutdown()
