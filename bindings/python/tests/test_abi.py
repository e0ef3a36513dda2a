"""The generated declarations: up to date, with the sizes and offsets of a C compiler."""

from __future__ import annotations

import ast
import ctypes
import json
import shutil
import subprocess
import sys
from pathlib import Path

import generate
import kvtier
import pytest
from kvtier import _abi, _errors, _lib

HERE = Path(__file__).resolve().parent
HEADER = generate.parse(generate.HEADER.read_text(encoding="utf-8"))
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def test_declarations_match_the_header() -> None:
    done = subprocess.run([sys.executable, str(generate.HERE / "generate.py"), "--check"])
    assert done.returncode == 0


def test_check_shows_the_difference_of_an_outdated_file(tmp_path: Path) -> None:
    stale = tmp_path / "_abi.py"
    stale.write_text(generate.TARGET.read_text().replace("KVT_OK = 0", "KVT_OK = 1"))
    command = [sys.executable, str(generate.HERE / "generate.py"), "--check",
               "--output", str(stale)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "-KVT_OK = 1" in done.stdout and "+KVT_OK = 0" in done.stdout


def described(*used: str) -> str:
    """A description of structs `kvt_0_t`, `kvt_1_t`, ..., each with a field of another type."""
    items = [{"kind": "struct", "name": f"kvt_{at}_t", "sized": False,
              "fields": [{"name": "field", "type": kind}]} for at, kind in enumerate(used)]
    items += [{"kind": "constant", "name": name, "value": "0"}
              for name in ("KVT_HEADER_VERSION", "KVT_OK")]
    return json.dumps({"headers": [{"items": items}]})


def test_types_follow_the_types_that_they_use() -> None:
    order = generate.parse(described("kvt_2_t", "uint32_t", "kvt_1_t")).order
    assert order == ["kvt_1_t", "kvt_2_t", "kvt_0_t"]
    with pytest.raises(generate.Unknown, match="kvt_0_t and kvt_1_t use each other"):
        generate.parse(described("kvt_1_t", "kvt_0_t"))


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_sizes_offsets_and_constants_match_the_c_compiler(tmp_path: Path) -> None:
    lines = ["#include <stddef.h>", "#include <stdio.h>", "#include <kvtier/kvtier.h>",
             "int main(void) {"]
    expected = []
    for name, fields in HEADER.structs.items():
        struct = getattr(_abi, name)
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        expected.append(f"{name} {ctypes.sizeof(struct)}")
        assert [field[0] for field in struct._fields_] == [field[0] for field in fields]
        for field, _ in fields:
            place = getattr(struct, field)
            lines.append(f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), '
                         f"sizeof((({name} *)0)->{field}));")
            expected.append(f"{name}.{field} {place.offset} {place.size}")
    for name in HEADER.constants:
        as_c = ("%llu", "unsigned long long") if HEADER.constants[name] >= 2**63 else ("%lld", "long long")
        lines.append(f'printf("{name} {as_c[0]}\\n", ({as_c[1]})({name}));')
        expected.append(f"{name} {getattr(_abi, name)}")
    for name in HEADER.sized:
        lines.append("{ %s v = %s; printf(\"%s init %%d\\n\", (int)v.struct_size); }"
                     % (name, f"KVT_{name[4:-2].upper()}_INIT", name))
        expected.append(f"{name} init {getattr(_abi, name)().struct_size}")
    # A function with another type causes a warning, which is an error here.
    for name, function in HEADER.functions.items():
        lines.append(f"(void)&{name};")
    lines.append("return 0; }")
    source, program = tmp_path / "layout.c", tmp_path / "layout"
    source.write_text("\n".join(lines))
    include = generate.HEADER.parent.parent
    assert COMPILER is not None
    subprocess.run([COMPILER, "-std=c99", "-Wall", "-Werror", "-O1", f"-I{include}", str(source),
                    "-o", str(program)], check=True)
    output = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == expected
    assert len(HEADER.structs) > 10 and len(expected) > 150


def test_every_function_is_bound_with_its_parameters() -> None:
    assert set(_abi.FUNCTIONS) == set(HEADER.functions)
    for name, function in HEADER.functions.items():
        bound = getattr(_lib.lib, name)
        assert len(bound.argtypes) == len(function.params)
        assert name != "kvt_op_wait" or bound.restype is ctypes.c_int32


def test_every_error_has_the_name_of_its_status() -> None:
    for name, status in HEADER.constants.items():
        if name.startswith("KVT_E_"):
            error = _errors.make(status, "words")
            assert isinstance(error, kvtier.Error) and error.name == name
            assert _lib.lib.kvt_status_name(status).decode() == name
    assert set(_errors.CLASSES) <= {HEADER.constants[n] for n in HEADER.constants}
    unknown = _errors.make(-9999, "words")
    assert type(unknown) is kvtier.Error and unknown.name == "KVT_E_UNKNOWN"


def test_a_handle_of_another_type_is_rejected() -> None:
    with pytest.raises(ctypes.ArgumentError):
        _lib.lib.kvt_op_cancel(_abi.kvt_buffer_p(5))


U64 = {"name": "a", "type": "uint64_t"}
BAD = [
    ({"kind": "union", "name": "kvt_x_t"}, "union kvt_x_t"),
    ({"kind": "alias", "name": "kvt_x_t", "type": "long"}, "typedef of long"),
    ({"kind": "struct", "name": "kvt_x_t", "sized": False,
      "fields": [{"name": "a", "type": "long"}]}, "type"),
    ({"kind": "struct", "name": "kvt_x_t", "sized": True, "fields": [U64]}, "not struct_size"),
    ({"kind": "function", "name": "kvt_x", "returns": {"type": "kvt_status_t"},
      "params": [{"name": "a", "type": "uint8_t", "pointers": 3}]}, "type"),
    ({"kind": "function", "name": "kvt_x", "returns": {"type": "kvt_status_t"},
      "params": [{"name": "a", "type": "kvt_completion_t"}]}, "type"),
]


def with_item(item: dict) -> str:
    described = json.loads(generate.HEADER.read_text(encoding="utf-8"))
    described["headers"][-1]["items"].append(item)
    return generate.emit(generate.parse(json.dumps(described)))


@pytest.mark.parametrize(("item", "complaint"), BAD)
def test_an_unknown_construct_of_the_interface_is_an_error(item: dict, complaint: str) -> None:
    with pytest.raises(generate.Unknown, match=complaint):
        with_item(item)


def test_arrays_and_nested_structs_are_generated() -> None:
    fields = [{"name": "bytes", "type": "uint8_t", "length": 32},
              {"name": "item", "type": "kvt_op_item_t"}]
    item = {"kind": "struct", "name": "kvt_key_t", "sized": False, "fields": fields}
    made = with_item(item)
    assert '("bytes", ctypes.c_uint8 * 32),' in made and '("item", kvt_op_item_t),' in made


def test_sources_parse_as_python_3_9() -> None:
    files = [*generate.TARGET.parent.glob("*.py"), *generate.HERE.glob("*.py")]
    assert len(files) > 10
    for path in files:
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))
