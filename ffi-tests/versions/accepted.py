"""Says which parts of a connector accept the sources of an engine, as JSON.

    python accepted.py vllm FOLDER

FOLDER has the sources of an engine's wheel. Modules that the engine needs and that are not
installed are replaced by placeholders. So are the modules of vLLM that lead to most of the engine.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import types
import warnings
from pathlib import Path
from typing import Any, Dict, Optional, Sequence, Set, Tuple

ROOT = Path(__file__).resolve().parents[2]
BINDINGS = ROOT / "bindings"
#: Modules of each connector that import the engine.
PARTS: Dict[str, Tuple[str, ...]] = {
    "vllm": ("kvtier_vllm.tier", "kvtier_vllm.policy", "kvtier_vllm.spec",
             "kvtier_vllm.connector"),
    "sglang": ("kvtier_sglang", "kvtier_sglang.linker"),
    "lmdeploy": ("kvtier_lmdeploy._connector",),
    "transformers": ("kvtier_transformers", "kvtier_transformers.h2o"),
}
#: Modules that must not be replaced: a missing one is a difference between versions.
REAL = (*PARTS, "kvtier", *(f"kvtier_{engine}" for engine in PARTS))

sys.path.insert(0, str(BINDINGS / "vllm" / "tests" / "engine"))
import absent  # noqa: E402


class _Placeholders(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages that are not installed, and everything in them."""

    def __init__(self) -> None:
        self.packages: Set[str] = set()

    def find_spec(self, name: str, path: Optional[Sequence[str]] = None,
                  target: Optional[types.ModuleType] = None
                  ) -> Optional[importlib.machinery.ModuleSpec]:
        if name.partition(".")[0] not in self.packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return absent._Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def prepare(engine: str) -> None:
    """Makes the modules of the engine importable that its connector imports."""
    if engine == "vllm":
        absent.engine()
    if engine == "lmdeploy":
        sys.path.insert(0, str(BINDINGS / "lmdeploy" / "tests" / "engine"))
        importlib.import_module("standin").stand_in()


def load(part: str, engine: str, placeholders: _Placeholders) -> None:
    """Imports a module of a connector, again for each package that is not installed."""
    while True:
        before = set(sys.modules)
        try:
            importlib.import_module(part)
            return
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if not package or package in REAL or package in placeholders.packages:
                raise
            placeholders.packages.add(package)
            for name in set(sys.modules) - before:
                if name.partition(".")[0] in (engine, f"kvtier_{engine}"):
                    del sys.modules[name]


def main() -> None:
    """Prints the parts with the reason of a rejection, or null, and the warnings."""
    engine, folder = sys.argv[1:3]
    sys.path[:0] = [folder, str(BINDINGS / "python"), str(BINDINGS / engine)]
    prepare(engine)
    placeholders = _Placeholders()
    sys.meta_path.append(placeholders)
    parts: Dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for part in PARTS[engine]:
            from kvtier import UnsupportedError

            try:
                load(part, engine, placeholders)
                parts[part] = None
            except UnsupportedError as error:
                parts[part] = error.message
    print(json.dumps({"parts": parts, "placeholders": sorted(placeholders.packages), "warnings": [
        str(one.message) for one in caught if "was not tested with" in str(one.message)]}))


if __name__ == "__main__":
    main()
