"""Ends the engines that a failed test has left running."""

from __future__ import annotations

from typing import Iterator

import pytest
from harness import running


@pytest.fixture(autouse=True)
def end_engines() -> Iterator[None]:
    yield
    for engine in list(running):
        engine.kill()
