#!/usr/bin/env python3
"""Writes kvtier/_abi.py from include/kvtier/kvtier.h.

    generate.py            writes the file
    generate.py --check    exits 1 and shows a diff when the file is stale

cbindgen writes the header, so a small parser is enough. An unknown construct is an error here
instead of a wrong call at run time.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, List, Optional, Tuple

HERE = Path(__file__).resolve().parent
HEADER = HERE.parent.parent / "include" / "kvtier" / "kvtier.h"
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
    order: List[str] = field(default_factory=list)  # structs and callbacks as declared


def without_comments(text: str) -> str:
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def preprocess(text: str, out: Header) -> str:
    """Evaluates and removes the directives, as a C compiler does, without C++ branches."""
    active: List[bool] = []
    rest: List[str] = []
    for line in text.split("\n"):
        words = line.split()
        if line.lstrip().startswith("#"):
            directive = words[0]
            if directive == "#ifdef" and words[1] == "__cplusplus":
                active.append(False)
            elif directive == "#ifndef" and words[1] == "KVTIER_H":
                active.append(True)
            elif directive == "#else":
                active[-1] = not active[-1]
            elif directive == "#endif":
                active.pop()
            elif not all(active):
                continue
            elif directive == "#define":
                define(line, words, out)
            elif directive != "#include":
                raise Unknown(f"directive: {line.strip()}")
        elif all(active):
            rest.append(line)
    if active:
        raise Unknown("an #if without its #endif")
    return "\n".join(rest)


def define(line: str, words: List[str], out: Header) -> None:
    name, value = words[1], " ".join(words[2:])
    if name == "KVTIER_H" or name.startswith("KVT_INIT_("):
        return
    sized = re.fullmatch(r"KVT_INIT_\((\w+)\)", value)
    if sized:
        out.sized.append(sized.group(1))
        return
    if value == "UINT64_MAX":
        out.constants[name] = 2**64 - 1
        return
    number = re.fullmatch(r"\(?(-?(?:0[xX][0-9a-fA-F]+|[0-9]+))(?:[uUlL]*)\)?", value)
    if not re.fullmatch(r"KVT_\w+", name) or not number:
        raise Unknown(f"define: {line.strip()}")
    out.constants[name] = int(number.group(1), 0)


def declarator(text: str) -> Tuple[str, CType]:
    """`const struct kvt_op_t *op` → its name and type; the name may be absent."""
    found = re.fullmatch(
        r"(const\s+)?(?:struct\s+)?(\w+)\s*((?:\*\s*(?:const\b\s*)?)*)(\w+)?\s*(?:\[(\w+)\])?",
        text.strip(),
    )
    if not found:
        raise Unknown(f"declaration: {text.strip()!r}")
    const, base, stars, name, length = found.groups()
    size = None if length is None else int(length, 0)
    return name or "", CType(base, stars.count("*"), bool(const), size)


def parameters(text: str) -> List[Tuple[str, CType]]:
    if text.strip() in ("", "void"):
        return []
    return [declarator(part) for part in text.split(",")]


def parse(text: str) -> Header:
    out = Header()
    body = preprocess(without_comments(text), out)
    statement = re.compile(
        r"\s*(?:"
        r"typedef\s+struct\s+(?P<opaque>\w+)\s+(?P<opaque_alias>\w+)\s*;"
        r"|typedef\s+struct\s+(?P<struct>\w+)\s*\{(?P<fields>[^{}]*)\}\s*(?P<struct_alias>\w+)\s*;"
        r"|typedef\s+(?P<cb_type>[\w\s*]+?)\(\*(?P<callback>\w+)\)\((?P<cb_params>[^()]*)\)\s*;"
        r"|typedef\s+(?P<scalar>\w+)\s+(?P<alias>\w+)\s*;"
        r"|(?P<restype>[\w\s]+?[\s*]+)(?P<function>kvt_\w+)\s*\((?P<params>[^()]*)\)\s*;"
        r")"
    )
    at = 0
    while body[at:].strip():
        found = statement.match(body, at)
        if not found:
            raise Unknown(f"near: {' '.join(body[at:].split())[:160]}")
        take(found.groupdict(), out)
        at = found.end()
    verify(out)
    return out


def take(part: Dict[str, Optional[str]], out: Header) -> None:
    if part["opaque"]:
        same(part["opaque"], part["opaque_alias"])
        out.opaque.append(part["opaque"])
    elif part["struct"]:
        same(part["struct"], part["struct_alias"])
        pieces = [p for p in (part["fields"] or "").split(";") if p.strip()]
        unique(out.order, part["struct"])
        out.structs[part["struct"]] = [declarator(p) for p in pieces]
    elif part["callback"]:
        unique(out.order, part["callback"])
        _, restype = declarator(part["cb_type"] or "")
        out.callbacks[part["callback"]] = Function(restype, parameters(part["cb_params"] or ""))
    elif part["alias"]:
        if part["scalar"] not in SCALARS:
            raise Unknown(f"typedef of {part['scalar']}")
        out.aliases[part["alias"]] = part["scalar"] or ""
    elif part["function"]:
        _, restype = declarator(part["restype"] or "")
        made = Function(restype, parameters(part["params"] or ""))
        # C allows a declaration to be repeated, but not to differ.
        if out.functions.setdefault(part["function"], made) != made:
            raise Unknown(f"two different declarations of {part['function']}: they must be equal")


def same(name: Optional[str], alias: Optional[str]) -> None:
    if name != alias:
        raise Unknown(f"struct {name} has the other alias {alias}: names must be equal")


def unique(names: List[str], name: str) -> None:
    if name in names:
        raise Unknown(f"{name} is declared twice")
    names.append(name)


def verify(out: Header) -> None:
    for name in out.sized:
        fields = out.structs.get(name)
        if not fields or fields[0] != ("struct_size", CType("uint64_t")):
            raise Unknown(f"an initialiser for {name}, whose first field is not struct_size")
    for name, fields in out.structs.items():
        if fields[0][0] == "struct_size" and name not in out.sized:
            raise Unknown(f"{name} has a struct_size and no initialiser")
        if any(not field_name for field_name, _ in fields):
            raise Unknown(f"a field without a name in {name}")
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

Generated by generate.py from include/kvtier/kvtier.h. Do not edit.
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
