"""Tests with the installed LMCache; all are skipped without LMCache 0.5.6."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any, Callable, Iterator, List

import pytest

HERE = Path(__file__).resolve().parent

try:
    VERSION = importlib.metadata.version("lmcache")
    import lmcache.v1.cache_engine
    import lmcache.v1.storage_backend.storage_manager  # noqa: F401

    SKIP_REASON = "" if VERSION == "0.5.6" else f"LMCache 0.5.6 is needed, found {VERSION}"
except importlib.metadata.PackageNotFoundError:
    SKIP_REASON = "LMCache is not installed"
except ImportError as error:
    SKIP_REASON = f"LMCache's requirements are not installed: {error}"
collect_ignore_glob = ["test_*.py"] if SKIP_REASON else []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if SKIP_REASON:
        terminalreporter.write_line(f"skipped {HERE}: {SKIP_REASON}")


@pytest.fixture
def opened() -> Iterator[Callable[..., Any]]:
    """Opens sites (`site.Site`), and closes them after the test."""
    from sites import Site
    made: List[Any] = []

    def make(*args: Any, **more: Any) -> Any:
        made.append(Site(*args, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()
