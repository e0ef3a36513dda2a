"""The requirements of a connector, and the error that says what to install."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import contextmanager
from typing import Callable, Iterator, Tuple


class Needs:
    """The `modules` that a `package` of this wheel requires. Messages name their `purpose`, and
    what to pass to `pip install`."""

    def __init__(self, package: str, purpose: str, install: str,
                 modules: Tuple[str, ...]) -> None:
        self.package, self.purpose, self.install, self.modules = (
            package, purpose, install, modules)

    def check(self) -> None:
        """Raises an ImportError that names the first module that is not installed."""
        for name in self.modules:
            if not _is_installed(name):
                raise ModuleNotFoundError(
                    f"{self.package} is for {self.purpose}, but {name} is not installed for "
                    f"{sys.executable}: run pip install {self.install}", name=name)

    @contextmanager
    def imports(self, version: Callable[[], None]) -> Iterator[None]:
        """Surrounds imports of the modules. If an import fails, `version` is called: it raises
        for an unsupported version, which is a better error than the missing name."""
        self.check()
        try:
            yield
        except ImportError as error:
            try:
                version()
            except Exception as unsupported:
                raise unsupported from error
            raise


def _is_installed(name: str) -> bool:
    if sys.modules.get(name) is not None:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # another import is replacing the module
        return True
