"""Puts the packages on the path, and checks that each test closes its stores."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Callable, Iterator, List

import pytest

HERE = Path(__file__).resolve().parent
for folder in (HERE.parent, HERE):
    sys.path.insert(0, str(folder))

sys.path.append(str(HERE.parents[1] / "python" / "tests"))  # handles.py
import handles  # noqa: E402
import kvtier_mooncake  # noqa: E402
from handles import pytest_runtest_makereport  # noqa: E402, F401
from kvtier_mooncake import _core  # noqa: E402
from registered import HOST  # noqa: E402

# The tests in `engine` need the real engines, and run only if named, one engine at a time.
paths = [Path(argument.partition("::")[0]).resolve() for argument in sys.argv]
if not any(HERE / "engine" in (path, *path.parents) for path in paths):
    collect_ignore = ["engine"]


@pytest.fixture(autouse=True)
def no_handles_left(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clears the configuration, and fails a test that leaves handles of the library open."""
    for name in list(os.environ):
        if name.startswith(("KVTIER_MOONCAKE", "MOONCAKE", "KVTIER_RANK", "RANK", "LOCAL_RANK")):
            monkeypatch.delenv(name)
    yield
    kvtier_mooncake.configure()
    kvtier_mooncake.uninstall()
    _core._at_exit()
    handles.check(request.node)


@pytest.fixture
def opened() -> Iterator[Callable[..., Any]]:
    """Makes stores that are set up, and closes them after the test."""
    made: List[Any] = []

    def make(**given: Any) -> Any:
        kvtier_mooncake.configure(**(given or {"spec": HOST}))
        store = kvtier_mooncake.MooncakeDistributedStore()
        assert store.setup("localhost", "P2PHANDSHAKE", 0) == 0
        made.append(store)
        return store

    yield make
    for store in made:
        assert store.close() == 0


@pytest.fixture
def store(opened: Callable[..., Any]) -> Any:
    return opened()
