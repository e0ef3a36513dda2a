"""Puts the packages on the path, and checks that each test closes its stores."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import List

import pytest

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
HERE = Path(__file__).resolve().parent
for folder in (HERE.parent, HERE.parent.parent / "vllm", HERE, HERE / "engine"):
    sys.path.insert(0, str(folder))

sys.path.append(str(HERE.parents[1] / "python" / "tests"))  # handles.py
from handles import no_handles_left, pytest_runtest_makereport  # noqa: E402, F401

collect_ignore: List[str] = []


def pytest_configure(config: pytest.Config) -> None:
    """The tests in `engine` need LMCache, and run only if named."""
    paths = [(config.invocation_params.dir / argument.partition("::")[0]).resolve()
             for argument in config.args]
    if not any(HERE / "engine" in (path, *path.parents) for path in paths):
        collect_ignore.append("engine")
