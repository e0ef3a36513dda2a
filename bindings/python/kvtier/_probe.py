"""Decides whether a connector works with the installed version of its engine.

A connector lists the engine's interfaces that it uses. The probe compares the list with the
engine's modules. An engine whose version was tested, or whose interfaces are those of the list, is
accepted. Another engine is rejected with the names of what changed.
"""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from dataclasses import dataclass, field
from typing import Any, Iterator, List, Mapping, Optional, Tuple

from . import _abi
from ._errors import make
from ._needs import Needs

#: Most differences that an error names.
_MAX_NAMED = 3
#: Engines of this process that a warning was given for.
_warned: "set[Tuple[str, str]]" = set()

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
Parameters = Tuple[inspect.Parameter, ...]


@dataclass(frozen=True)
class Interface:
    """What a connector uses of a class, a function or another name of a module.

    Parameters are texts, as in a definition without `self`: "request, tokens, *, level=". A
    default's value does not matter. Names of positional parameters must be the engine's, unless a
    "/" follows them.
    """

    #: Attributes, properties, fields and members that it uses.
    has: Tuple[str, ...] = ()
    #: Methods that the connector overrides, with the parameters of its own methods. "?" before
    #: them: the engine's class may lack the method, which is then not called.
    overrides: Mapping[str, str] = field(default_factory=dict)
    #: Methods that the connector calls, with the arguments that it passes. The name "" is a call
    #: of the function or class itself. Arguments after "*" are passed by name.
    calls: Mapping[str, str] = field(default_factory=dict)


#: Interfaces by the module and the name that has them.
Interfaces = Mapping[str, Mapping[str, Interface]]


def parameters(text: str) -> Parameters:
    """Parses parameters. "*a" and "**b" take any number of arguments."""
    found: List[inspect.Parameter] = []
    kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for part in filter(None, (one.strip() for one in text.split(","))):
        if part == "/":
            found = [one.replace(kind=inspect.Parameter.POSITIONAL_ONLY) for one in found]
        elif part == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
        elif part.startswith("**"):
            found.append(inspect.Parameter(part[2:], inspect.Parameter.VAR_KEYWORD))
        elif part.startswith("*"):
            found.append(inspect.Parameter(part[1:], inspect.Parameter.VAR_POSITIONAL))
            kind = inspect.Parameter.KEYWORD_ONLY
        else:
            default = None if part.endswith("=") else inspect.Parameter.empty
            found.append(inspect.Parameter(part.rstrip("="), kind, default=default))
    return tuple(found)


def accepts(callee: Parameters, caller: Parameters) -> bool:
    """Whether a function with the parameters `callee` can be called in every way in which one with
    the parameters `caller` can be."""
    taken = {one.kind for one in callee}
    rest_positional = inspect.Parameter.VAR_POSITIONAL in taken
    rest_named = inspect.Parameter.VAR_KEYWORD in taken
    positional = [one for one in callee if one.kind in _POSITIONAL]
    named = {one.name for one in callee if one.kind in (
        inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)}
    given = set()
    for at, one in enumerate(one for one in caller if one.kind in _POSITIONAL):
        if at >= len(positional):
            if not (rest_positional and (rest_named or "ONLY" in one.kind.name)):
                return False
            continue
        mine = positional[at]
        by_position = inspect.Parameter.POSITIONAL_ONLY in (one.kind, mine.kind)
        if not (by_position or mine.name == one.name) or (
                one.default is not one.empty and mine.default is mine.empty):
            return False
        given.add(mine.name)
    for one in caller:
        if one.kind is inspect.Parameter.KEYWORD_ONLY:
            if one.name not in named and not rest_named:
                return False
            given.add(one.name)
        elif one.kind is inspect.Parameter.VAR_POSITIONAL and not rest_positional:
            return False
        elif one.kind is inspect.Parameter.VAR_KEYWORD and not rest_named:
            return False
    return all(one.default is not one.empty or one.name in given for one in callee
               if one.kind in (*_POSITIONAL, inspect.Parameter.KEYWORD_ONLY))


def _text(found: Parameters) -> str:
    """Parameters without annotations, and without the values of defaults."""
    plain = [one.replace(annotation=one.empty, default=one.empty if one.default is one.empty
                         else _DEFAULT) for one in found]
    return str(inspect.Signature(plain))


class _Default:
    def __repr__(self) -> str:
        return "..."


_DEFAULT = _Default()


def _parameters_of(owner: Any, name: str) -> Optional[Parameters]:
    """The parameters of a method, or of `owner` itself for the name "". None if they are not
    known. `self` is left out."""
    found = owner if not name else inspect.getattr_static(owner, name)
    bound = bool(name) and inspect.isclass(owner) and not isinstance(found, staticmethod)
    try:
        signature = inspect.signature(getattr(found, "__func__", found))
    except (TypeError, ValueError):
        return None
    return tuple(signature.parameters.values())[1 if bound else 0:]


def _has(owner: Any, name: str) -> bool:
    """Whether a class has an attribute, a field, or an attribute that its `__init__` sets."""
    if hasattr(owner, name):
        return True
    if name in getattr(owner, "__dataclass_fields__", ()):
        return True
    for base in getattr(owner, "__mro__", ()):
        code = getattr(vars(base).get("__init__"), "__code__", None)
        if name in getattr(code, "co_names", ()) or name in _annotations(base):
            return True
    return False


def _annotations(owner: Any) -> Any:
    try:
        return getattr(owner, "__annotations__", ())
    except NameError:  # Python 3.14 evaluates them, and some names are for type checkers only
        return ()


def changes(label: str, owner: Any, interface: Interface) -> Iterator[str]:
    """The differences of one class, function or module."""
    for name in interface.has:
        if not _has(owner, name):
            yield f"{label} has no {name}"
    for name, text in interface.overrides.items():
        full = f"{label}.{name}"
        if inspect.getattr_static(owner, name, None) is None:
            if not text.startswith("?"):
                yield f"{label} has no method {name}, which this connector implements"
            continue
        mine, theirs = parameters(text.lstrip("?")), _parameters_of(owner, name)
        if theirs is not None and not accepts(mine, theirs):
            yield f"{full} takes {_text(theirs)}, this connector implements {_text(mine)}"
    known = {*interface.overrides, *interface.has}
    for name in sorted(getattr(owner, "__abstractmethods__", ()) if interface.overrides else ()):
        if name not in known:
            yield f"{label}.{name} is abstract, and this connector does not implement it"
    for name, text in interface.calls.items():
        full = f"{label}.{name}" if name else label
        if name and inspect.getattr_static(owner, name, None) is None:
            yield f"{label} has no method {name}, which this connector calls"
            continue
        mine, theirs = parameters(text), _parameters_of(owner, name)
        if theirs is not None and not accepts(theirs, mine):
            yield f"{full} takes {_text(theirs)}, this connector calls it with {_text(mine)}"


def differences(interfaces: Interfaces) -> Iterator[str]:
    """What the engine's modules lack of `interfaces`. Imports the modules."""
    for path, names in interfaces.items():
        try:
            module = importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{path}.".startswith(f"{error.name}."):
                raise  # a module that the engine's module needs
            yield f"there is no module {path}"
            continue
        for label, interface in names.items():
            if not hasattr(module, label):
                yield f"{path} has no {label}"
            else:
                yield from changes(label, getattr(module, label), interface)


def numbers(version: str) -> Tuple[int, ...]:
    """The numbers at the begin of a version: (0, 5, 23) of "0.5.23.post1"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


@dataclass(frozen=True)
class Engine:
    """An engine as its connector knows it."""

    #: Its name in messages.
    name: str
    #: Its version, or a part in front, that the connector was tested with; the newest last.
    tested: Tuple[str, ...]
    #: The oldest version that is accepted.
    oldest: str
    #: The package of the connector, what to pass to `pip install`, and the modules that it needs.
    package: str
    install: str
    modules: Tuple[str, ...]
    #: The first version that is not accepted any more. "": the interfaces alone decide.
    before: str = ""

    @property
    def needs(self) -> Needs:
        """The required modules."""
        return Needs(self.package, f"{self.name} {self.tested[-1]}", self.install, self.modules)

    def is_tested(self, version: str) -> bool:
        """Whether the connector was tested with this version."""
        found = numbers(version)
        return any(found[:len(line)] == line for line in map(numbers, self.tested))

    def check_version(self, version: str) -> None:
        """Raises `kvtier.UnsupportedError` for a version outside of the window."""
        found = numbers(version)
        if not found or found < numbers(self.oldest) or (
                self.before and found >= numbers(self.before)):
            window = f"{self.oldest} and newer" + (f", before {self.before}" if self.before else "")
            raise self.rejected(version, f"{self.package} supports {window}")

    def check(self, version: str, interfaces: Interfaces) -> None:
        """Raises `kvtier.UnsupportedError` for a version outside of the window, and for changed
        interfaces. Warns once of a version that was not tested."""
        self.check_version(version)
        changed = list(differences(interfaces))
        if changed:
            more = len(changed) - _MAX_NAMED
            raise self.rejected(version, "; ".join(changed[:_MAX_NAMED]) + (
                f"; and {more} more differences" if more > 0 else ""))
        if self.is_tested(version) or (self.name, version) in _warned:
            return
        _warned.add((self.name, version))
        warnings.warn(
            f"{self.name} {version} was not tested with {self.package}, which was tested with "
            f"{self.name} {self._tested_text()}. The interfaces that it uses are the same",
            stacklevel=3)

    def _tested_text(self) -> str:
        *most, last = self.tested
        return f"{', '.join(most)} and {last}" if most else last

    def rejected(self, version: str, reason: str) -> Exception:
        """The error of a version that is not accepted."""
        return make(_abi.KVT_E_UNSUPPORTED,
                    f"{self.name} {version or 'of unknown version'}: {reason}: run pip install "
                    f"{self.install}, or install a newer kvtier")
