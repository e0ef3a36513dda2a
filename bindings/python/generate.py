#!/usr/bin/env python3
"""Writes kvtier/_abi.py from include/kvtier/kvtier.json, the description of the C interface.

    generate.py            writes the file
    generate.py --check    exits 1 and shows a diff when the file is stale

An unknown construct is an error here instead of a wrong call at run time.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

HERE = Path(__file__).resolve().parent
HEADER = HERE.parent.parent / "include" / "kvtier" / "kvtier.json"
TARGET = HERE / "kvtier" / "_abi.py"

SCALARS = {
    "int8_t": "c_int8", "uint8_t": "c_uint8", "int16_t": "c_int16", "uint16_t": "c_uint16",
    "int32_t": "c_int32", "uint32_t": "c_uint32", "int64_t": "c_int64", "uint64_t": "c_uint64",
    "size_t": "c_size_t", "float": "c_float", "double": "c_double", "bool": "c_bool",
    "char": "c_char",
}


class Unknown(Exception):
    """A construct that this generator does not support."""


@dataclass(frozen=True)
class CType:
    """A C type: its base name, the number of stars, whether the pointee is const."""

    base: str
    stars: int = 0
    const: bool = False
    length: Optional[int] = None


@dataclass
class Function:
    restype: CType
    params: List[Tuple[str, CType]]


@dataclass
class Header:
    constants: Dict[str, int] = field(default_factory=dict)
    opaque: List[str] = field(default_factory=list)
    aliases: Dict[str, str] = field(default_factory=dict)
    structs: Dict[str, List[Tuple[str, CType]]] = field(default_factory=dict)
    callbacks: Dict[str, Function] = field(default_factory=dict)
    functions: Dict[str, Function] = field(default_factory=dict)
    sized: List[str] = field(default_factory=list)
    order: List[str] = field(default_factory=list)  # structs and callbacks, each after what it uses


def parse(text: str) -> Header:
    out = Header()
    for header in json.loads(text)["headers"]:
        for item in header["items"]:
            take(item, out)
    verify(out)
    out.order = sorted_by_use(out)
    return out


def sorted_by_use(out: Header) -> List[str]:
    """Returns structs and callbacks in an order in which each follows the types that it uses. C
    declares some structs before their definition, ctypes cannot."""
    order: List[str] = []
    open_names: List[str] = []

    def visit(name: str) -> None:
        if name in order:
            return
        if name in open_names:
            raise Unknown(f"the types {' and '.join(open_names)} use each other")
        open_names.append(name)
        if name in out.structs:
            kinds = [kind for _, kind in out.structs[name]]
        else:
            callback = out.callbacks[name]
            kinds = [callback.restype, *(kind for _, kind in callback.params)]
        for kind in kinds:
            if kind.base in out.structs or kind.base in out.callbacks:
                visit(kind.base)
        open_names.pop()
        order.append(name)

    for name in out.order:
        visit(name)
    return order


def take(item: Dict[str, Any], out: Header) -> None:
    kind, name = item["kind"], item["name"]
    if kind == "constant":
        value = item["value"].rstrip("uUlL")
        out.constants[name] = 2**64 - 1 if value == "UINT64_MAX" else int(value, 0)
    elif kind == "alias":
        if item["type"] not in SCALARS:
            raise Unknown(f"typedef of {item['type']}")
        out.aliases[name] = item["type"]
    elif kind == "handle":
        out.opaque.append(name)
    elif kind == "struct":
        out.order.append(name)
        out.structs[name] = declared(item["fields"])
        if item["sized"]:
            out.sized.append(name)
    elif kind == "callback":
        out.order.append(name)
        out.callbacks[name] = Function(ctype(item["returns"]), declared(item["params"]))
    elif kind == "function":
        out.functions[name] = Function(ctype(item["returns"]), declared(item["params"]))
    else:
        raise Unknown(f"{kind} {name}")


def declared(fields: List[Dict[str, Any]]) -> List[Tuple[str, CType]]:
    return [(field["name"], ctype(field)) for field in fields]


def ctype(item: Dict[str, Any]) -> CType:
    stars = item.get("pointers", 0)
    return CType(item["type"], stars, item.get("const", False), item.get("length"))


def verify(out: Header) -> None:
    for name in out.sized:
        if out.structs[name][0] != ("struct_size", CType("uint64_t")):
            raise Unknown(f"{name} is sized, and its first field is not struct_size")
    for needed in ("KVT_HEADER_VERSION", "KVT_OK"):
        if needed not in out.constants:
            raise Unknown(f"the constant {needed} is missing")


def handle(name: str) -> str:
    return re.sub(r"_t$", "_p", name)


def spell(out: Header, kind: CType, place: str) -> str:
    """A ctypes expression. `place` is field, param, callback or result."""
    base, stars = kind.base, kind.stars
    if base == "void":
        if stars == 0 and place in ("result", "callback-result"):
            return "None"
        text = {1: "ctypes.c_void_p", 2: "ctypes.POINTER(ctypes.c_void_p)"}.get(stars)
    elif base == "char" and stars == 1:
        # Only these texts end in NUL: the others have a length.
        nul_ended = place == "result" or (place == "param" and kind.const)
        text = "ctypes.c_char_p" if nul_ended else "ctypes.POINTER(ctypes.c_char)"
    elif base == "char" and stars == 2 and place == "param":
        # Output of a text that lives as long as the library, with a separate length.
        text = "ctypes.POINTER(ctypes.POINTER(ctypes.c_char))"
    elif base in out.opaque:
        text = {1: handle(base), 2: f"ctypes.POINTER({handle(base)})"}.get(stars)
    elif base in out.callbacks:
        text = base if stars == 0 else None
    elif base in out.structs:
        text = {0: base, 1: f"ctypes.POINTER({base})"}.get(stars)
        if stars == 0 and place != "field":
            text = None
    else:
        scalar = SCALARS.get(out.aliases.get(base, base))
        name = base if base in out.aliases else f"ctypes.{scalar}"
        text = {0: name, 1: f"ctypes.POINTER({name})"}.get(stars) if scalar else None
    if text is None or (kind.length is not None and place != "field"):
        raise Unknown(f"the type {kind} as a {place}")
    return text if kind.length is None else f"{text} * {kind.length}"


PRELUDE = '''\
"""The C interface, as ctypes sees it.

Generated by generate.py from include/kvtier/kvtier.json. Do not edit.
"""

from __future__ import annotations

import ctypes
from typing import Any, Dict, Tuple


class Handle(ctypes.c_void_p):
    """A handle is never followed; a class for each noun keeps them apart."""


class Sized(ctypes.Structure):
    """A struct that states its size, as every call demands."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(struct_size=ctypes.sizeof(type(self)), **fields)
'''


def emit(out: Header) -> str:
    lines = [PRELUDE, ""]
    lines += [f"{name} = {value}" for name, value in sorted(out.constants.items())]
    lines.append("")
    for alias, scalar in sorted(out.aliases.items()):
        lines.append(f"{alias} = ctypes.{SCALARS[scalar]}")
    for name in sorted(out.opaque):
        lines += ["", "", f"class {handle(name)}(Handle):", f'    """{name} *"""']
    for name in out.order:
        lines += ["", ""]
        if name in out.callbacks:
            callback = out.callbacks[name]
            kinds = [spell(out, callback.restype, "callback-result")]
            kinds += [spell(out, kind, "callback") for _, kind in callback.params]
            lines += textwrap.wrap(f"{name} = ctypes.CFUNCTYPE({', '.join(kinds)})", 96,
                                   subsequent_indent="    ", break_long_words=False)
            continue
        base = "Sized" if name in out.sized else "ctypes.Structure"
        lines += [f"class {name}({base}):", "    _fields_ = ["]
        for field_name, kind in out.structs[name]:
            lines.append(f'        ("{field_name}", {spell(out, kind, "field")}),')
        lines.append("    ]")
    lines += ["", "", "#: Result and arguments of every function."]
    lines.append("FUNCTIONS: Dict[str, Tuple[Any, Tuple[Any, ...]]] = {")
    for name, function in sorted(out.functions.items()):
        kinds = [f"{spell(out, kind, 'param')}," for _, kind in function.params]
        restype = spell(out, function.restype, "result")
        entry = f'"{name}": ({restype}, ({" ".join(kinds)})),'
        lines += textwrap.wrap(entry, 96, initial_indent="    ", subsequent_indent="        ",
                               break_long_words=False, break_on_hyphens=False)
    lines += ["}", ""]
    lines += ["", "def bind(library: ctypes.CDLL) -> None:"]
    lines += ['    """Tells ctypes the types of every function; AttributeError if one lacks."""']
    lines += ["    for name, (restype, argtypes) in FUNCTIONS.items():"]
    lines += ["        function = getattr(library, name)"]
    lines += ["        function.restype = restype", "        function.argtypes = argtypes", ""]
    return "\n".join(lines)


def write() -> None:
    """Writes the declarations, if they are absent or outdated. An archive that build_sdist made has
    them, and no header."""
    if not HEADER.exists():
        return
    text = emit(parse(HEADER.read_text(encoding="utf-8")))
    if not TARGET.exists() or TARGET.read_text(encoding="utf-8") != text:
        TARGET.write_text(text, encoding="utf-8")


def main() -> int:
    options = argparse.ArgumentParser(description="Generates kvtier/_abi.py.")
    options.add_argument("--check", action="store_true", help="compare, do not write")
    options.add_argument("--header", type=Path, default=HEADER)
    options.add_argument("--output", type=Path, default=TARGET)
    given = options.parse_args()
    try:
        text = emit(parse(given.header.read_text(encoding="utf-8")))
    except Unknown as error:
        print(f"{given.header.name}: unsupported construct: {error}", file=sys.stderr)
        return 2
    if not given.check:
        given.output.write_text(text, encoding="utf-8")
        return 0
    before = given.output.read_text(encoding="utf-8") if given.output.exists() else ""
    if before == text:
        return 0
    diff = difflib.unified_diff(
        before.splitlines(True), text.splitlines(True), str(given.output.name), "generated"
    )
    sys.stdout.writelines(diff)
    print(f"{given.output.name} is out of date: run generate.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
