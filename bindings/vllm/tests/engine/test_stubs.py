"""Compares the stubs of vLLM's interfaces, which are those of 0.33, with the installed vLLM."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import importlib.util
import inspect
from pathlib import Path
from typing import Any, List, Tuple

import pytest
import vllm
from kvtier import _probe

if not vllm.__version__.startswith("0.33."):
    pytest.skip("the stubs are those of vLLM 0.33", allow_module_level=True)

STUBS = Path(__file__).resolve().parents[1] / "stubs"
MODULES = [str(path.relative_to(STUBS).with_suffix("")).replace("/", ".")
           for path in sorted(STUBS.glob("vllm/**/*.py")) if path.name != "__init__.py"]


def load_stub(name: str) -> Any:
    """Loads a module of the stubs next to vLLM's module of the same name."""
    path = STUBS.joinpath(*name.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    before = sys.modules.get(name)
    sys.modules[name] = module  # dataclasses look up their module there
    try:
        spec.loader.exec_module(module)
    finally:
        if before is not None:
            sys.modules[name] = before
    return module


def signature_of(function: Any) -> List[Tuple[str, Any, str]]:
    """The parameters of a function: name, kind and default."""
    function = getattr(function, "__func__", function)
    defaults = []
    for one in inspect.signature(function).parameters.values():
        if one.default is inspect.Parameter.empty:
            default = "required"
        elif isinstance(one.default, (int, str, bool, float, type(None), tuple, enum.Enum)):
            default = str(one.default)
        else:
            default = "other"
        defaults.append((one.name, one.kind, default))
    return defaults


@pytest.mark.parametrize("name", MODULES)
def test_stubs_have_the_installed_signatures(name: str) -> None:
    real, ours = importlib.import_module(name), load_stub(name)
    count = 0
    for label, thing in vars(ours).items():
        if label.startswith("_") or getattr(thing, "__module__", "") != name:
            continue
        assert hasattr(real, label), f"vLLM has no {label} any more"
        theirs = getattr(real, label)
        count += 1
        if inspect.isfunction(thing):
            assert signature_of(thing) == signature_of(theirs), label
            continue
        if issubclass(thing, enum.Enum):
            assert [(one.name, one.value) for one in thing] == [
                (one.name, one.value) for one in theirs], label
            continue
        assert getattr(thing, "__abstractmethods__", None) == getattr(
            theirs, "__abstractmethods__", None), label
        if dataclasses.is_dataclass(thing):
            mine = [one.name for one in dataclasses.fields(thing) if one.init]
            assert mine == [one.name for one in dataclasses.fields(theirs) if one.init], label
        for method, value in vars(thing).items():
            plain = getattr(value, "__func__", value)
            if inspect.isfunction(plain) and (not method.startswith("_") or method == "__init__"):
                if method == "__init__" and dataclasses.is_dataclass(thing) and (
                        label == "ReqContext"):
                    continue
                assert signature_of(plain) == signature_of(
                    getattr(theirs, method)), f"{label}.{method}"
    assert count


@pytest.mark.parametrize("module, name", [
    ("tier", "KvtierTier"), ("policy", "KvtierPolicy"), ("spec", "KvtierSpec"),
    ("spec", "KvtierManager"), ("spec", "KvtierWorker"), ("connector", "KvtierConnector")])
def test_overrides_have_the_installed_signatures(module: str, name: str) -> None:
    ours = getattr(importlib.import_module(f"kvtier_vllm.{module}"), name)
    assert not ours.__abstractmethods__
    compared = 0
    for method, value in vars(ours).items():
        plain = getattr(value, "__func__", value)
        if method.startswith("_") or not inspect.isfunction(plain):
            continue
        for base in ours.__mro__[1:]:
            if method in vars(base):
                mine, theirs = (_probe._parameters_of(cls, method) for cls in (ours, base))
                assert mine is not None and theirs is not None
                assert _probe.accepts(mine, theirs), method
                compared += 1
                break
    assert compared >= 2
