"""What a connector is for, and what to install where that is not there."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import contextmanager
from typing import Callable, Iterator, Tuple


class Needs:
    """What a package of this wheel needs beside it: `modules`, of which `what` is told in words
    and `install` in those of pip."""

    def __init__(self, who: str, what: str, install: str, modules: Tuple[str, ...]) -> None:
        self.who, self.what, self.install, self.modules = who, what, install, modules

    def check(self) -> None:
        """Fails where one of them is not installed: an ImportError that names it."""
        for name in self.modules:
            if not _there(name):
                raise ModuleNotFoundError(
                    f"{self.who} is for {self.what}; {name} is not installed for {sys.executable}:"
                    f" pip install {self.install}", name=name)

    @contextmanager
    def imports(self, version: Callable[[], None]) -> Iterator[None]:
        """Around imports of them. `version` refuses another version than those supported: that is
        said rather than which name it lacks."""
        self.check()
        try:
            yield
        except ImportError as error:
            try:
                version()
            except Exception as refused:
                raise refused from error
            raise


def _there(name: str) -> bool:
    if sys.modules.get(name) is not None:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # it is being replaced by somebody
        return True
