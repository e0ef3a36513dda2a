"""Puts the packages on the path, and checks that each test closes its stores."""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from typing import Iterator, List

import pytest

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
HERE = Path(__file__).resolve().parent
for folder in (HERE.parent, HERE.parent.parent / "vllm", HERE, HERE / "engine"):
    sys.path.insert(0, str(folder))

from kvtier import _callbacks, _reaper  # noqa: E402

collect_ignore: List[str] = []


def pytest_configure(config: pytest.Config) -> None:
    """The tests in `engine` need LMCache, and run only if named."""
    paths = [(config.invocation_params.dir / argument.partition("::")[0]).resolve()
             for argument in config.args]
    if not any(HERE / "engine" in (path, *path.parents) for path in paths):
        collect_ignore.append("engine")


@pytest.fixture(autouse=True)
def no_handles_left() -> Iterator[None]:
    """Fails a test that leaves handles of the library open."""
    yield
    end = time.monotonic() + 600.0
    while True:
        gc.collect()
        assert _reaper.flush(600.0)
        left = [job for job in list(_reaper._live.values()) if job.handle.value]
        if not left and _callbacks.live() == 0:
            return
        assert time.monotonic() < end, (left, _callbacks.live())
        time.sleep(0.001)
