"""The probe of engines' interfaces, with modules whose interfaces have changed."""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
import warnings
from abc import ABC, abstractmethod
from typing import Any, Dict, Iterator

import kvtier
import pytest
from kvtier import _probe
from kvtier._probe import Engine, Interface, accepts, parameters

ENGINE = Engine("Motor", ("1.2", "1.3"), "1.1", "kvtier_motor", "'motor==1.3.*'", ("motor",), "2")
INTERFACES = {"motor.api": {
    "Base": Interface(has=("block_bytes", "role"), calls={"__init__": "role", "notify": "text"},
                      overrides={"matched": "request, tokens", "saved": "keys, **more",
                                 "sleep": "?config", "built": "config"}),
    "Job": Interface(has=("keys",), calls={"": "number, keys, *, nbytes"}),
    "Result": Interface(has=("HIT", "MISS")),
    "find": Interface(calls={"": "key"}),
}}


class Base(ABC):
    def __init__(self, role: str) -> None:
        self.block_bytes, self.role = 0, role

    @abstractmethod
    def matched(self, request: Any, tokens: int) -> int: ...

    def saved(self, keys: Any, **more: Any) -> None: ...

    @classmethod
    def built(cls, config: Any) -> None: ...

    @staticmethod
    def notify(text: str, level: int = 0) -> None: ...


@dataclasses.dataclass
class Job:
    number: int
    keys: Any
    nbytes: int = 0


class Result(enum.Enum):
    HIT = 1
    MISS = 2


def find(key: str, default: Any = None) -> Any: ...


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The engine's module, as the interfaces describe it."""
    module: Any = types.ModuleType("motor.api")
    module.Base, module.Job, module.Result, module.find = Base, Job, Result, find
    monkeypatch.setitem(sys.modules, "motor", types.ModuleType("motor"))
    monkeypatch.setitem(sys.modules, "motor.api", module)
    monkeypatch.setattr(_probe, "_warned", set())
    yield module


def rejected(version: str = "1.4.0") -> str:
    with pytest.raises(kvtier.UnsupportedError) as error:
        ENGINE.check(version, INTERFACES)
    assert str(error.value).startswith(f"Motor {version}: ")
    assert "pip install 'motor==1.3.*'" in str(error.value)
    return str(error.value)


def changed(members: Dict[str, Any]) -> Any:
    return type("Base", (Base,), members)


def test_a_tested_version_is_accepted_without_a_warning(api: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for version in ("1.2", "1.3.0", "1.3.7.post1", "1.3.0rc1+cpu"):
            ENGINE.check(version, INTERFACES)


def test_a_version_with_the_same_interfaces_is_accepted_with_one_warning(api: Any) -> None:
    with pytest.warns(UserWarning, match=r"Motor 1\.4\.0 .* Motor 1\.2 and 1\.3") as caught:
        ENGINE.check("1.4.0", INTERFACES)
        ENGINE.check("1.4.0", INTERFACES)
    assert len(caught) == 1


@pytest.mark.parametrize("version", ["1.0.9", "0.9", "2.0", "2.0.0rc1", "", "main"])
def test_a_version_outside_of_the_window_is_rejected(api: Any, version: str) -> None:
    with pytest.raises(kvtier.UnsupportedError, match="1.1 and newer, before 2.*motor==1.3"):
        ENGINE.check(version, INTERFACES)


def test_similar_numbers_are_other_versions(api: Any) -> None:
    assert ENGINE.is_tested("1.3") and ENGINE.is_tested("1.3.10")
    assert not ENGINE.is_tested("1.30") and not ENGINE.is_tested("1") and not ENGINE.is_tested("")


def test_a_missing_module_is_named(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "motor.api")
    assert "there is no module motor.api" in rejected()


def test_the_error_of_a_broken_module_is_passed_on(monkeypatch: pytest.MonkeyPatch,
                                                   tmp_path: Any) -> None:
    (tmp_path / "motor").mkdir()
    (tmp_path / "motor" / "__init__.py").write_text("")
    (tmp_path / "motor" / "api.py").write_text("import motor_needs_this")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="motor_needs_this"):
        ENGINE.check("1.4.0", INTERFACES)
    sys.modules.pop("motor", None)


def test_a_missing_name_is_named(api: Any) -> None:
    del api.find
    assert "motor.api has no find" in rejected()


def test_a_missing_method_is_named(api: Any) -> None:
    api.Base = changed({"saved": None})
    assert "Base has no method saved, which this connector implements" in rejected()
    api.Base = changed({"notify": None})
    assert "Base has no method notify, which this connector calls" in rejected()


def test_a_renamed_parameter_is_named_with_both_signatures(api: Any) -> None:
    def matched(self: Any, request: Any, x: int) -> int: ...

    api.Base = changed({"matched": matched})
    assert ("Base.matched takes (request, x), this connector implements (request, tokens)"
            in rejected())


def test_an_added_parameter_is_named(api: Any) -> None:
    def matched(self: Any, request: Any, tokens: int, hints: Any = None) -> int: ...

    def notify(self: Any, text: str, target: str) -> None: ...

    api.Base = changed({"matched": matched})
    assert "Base.matched takes (request, tokens, hints=...)" in rejected()
    api.Base = changed({"notify": notify})
    assert "Base.notify takes (text, target), this connector calls it with (text)" in rejected()


def test_a_new_abstract_method_is_named(api: Any) -> None:
    @abstractmethod
    def drained(self: Any) -> None: ...

    api.Base = changed({"drained": drained})
    assert "Base.drained is abstract" in rejected()


def test_a_changed_optional_method_is_named(api: Any) -> None:
    def sleep(self: Any, level: int) -> None: ...

    api.Base = changed({"sleep": sleep})
    assert "Base.sleep takes (level), this connector implements (config)" in rejected()


def test_a_missing_field_is_named(api: Any) -> None:
    api.Job = dataclasses.make_dataclass("Job", [("number", int), ("names", Any), ("nbytes", int)])
    assert "Job has no keys; Job takes (number, names, nbytes)" in rejected()


def test_an_attribute_that_is_no_longer_set_is_named(api: Any) -> None:
    class Other(Base):
        pass

    plain = type("Plain", (), {name: value for name, value in vars(Base).items()
                               if name not in ("__init__", "__dict__", "__weakref__")})
    api.Base = type("Base", (plain,), {"__init__": lambda self, role: None})
    assert "Base has no block_bytes; Base has no role" in rejected()
    api.Base = Other  # its base class sets them
    ENGINE.check("1.3.0", INTERFACES)


def test_a_missing_enum_member_is_named(api: Any) -> None:
    api.Result = enum.Enum("Result", ["HIT", "PENDING"])
    assert "Result has no MISS" in rejected()


def test_changed_interfaces_of_a_tested_version_are_rejected(api: Any) -> None:
    api.Result = enum.Enum("Result", ["HIT"])
    assert "Result has no MISS" in rejected("1.3.0")


def test_an_error_names_at_most_three_differences(api: Any) -> None:
    api.Base, api.Job, api.Result = object, object, enum.Enum("Result", ["HIT"])
    assert "more differences" in rejected() and rejected().count(" has no ") == 3


@pytest.mark.parametrize("callee, caller, ok", [
    ("a, b", "a, b", True), ("a, b", "b, a", False), ("a, b=", "a", True), ("a, b", "a", False),
    ("a", "a, b", False), ("a, *more", "a, b", False), ("a, *more, **names", "a, b", True),
    ("*more, **names", "a, *, b", True), ("**names", "a", False), ("a, *, b", "a", False),
    ("a, *, b", "a, *, b", True), ("a, b", "a, *, b", True), ("a, /", "other", True),
    ("other", "a, /", True), ("a, /, b", "x, b", True), ("a", "a=", False), ("a=", "a=", True),
    ("a", "a, **names", False), ("a, **names", "a, *, c, **other", True), ("", "", True),
    ("a", "*more", False)])
def test_signatures_are_compared_as_calls(callee: str, caller: str, ok: bool) -> None:
    assert accepts(parameters(callee), parameters(caller)) is ok
