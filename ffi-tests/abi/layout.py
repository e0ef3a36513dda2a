#!/usr/bin/env python3
"""Compares the layout of every struct and the value of every constant between C compilers, and with
the committed table:

    layout.py [--bless] [--functions] [--emit]

    --bless      write layout.txt
    --functions  print the names of the functions that the header declares
    --emit       print the C program

Lines are `type size align`, `type.field offset size` and `CONSTANT value`, in the
order of the header.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
INCLUDE = os.path.join(HERE, "..", "..", "include")
TABLE = os.path.join(HERE, "layout.txt")
COMPILERS = ["gcc", "clang"]


def items(kind):
    with open(os.path.join(INCLUDE, "kvtier", "kvtier.json"), encoding="utf-8") as f:
        headers = json.load(f)["headers"]
    return [item for header in headers for item in header["items"] if item["kind"] == kind]


def program():
    out = ["#include <kvtier/kvtier.h>", "#include <stddef.h>", "#include <stdio.h>", ""]
    out += ["int main(void) {"]
    for item in items("struct"):
        name = item["name"]
        out.append(f'    printf("{name} %zu %zu\\n", sizeof({name}), _Alignof({name}));')
        for field in (field["name"] for field in item["fields"]):
            out.append(
                f'    printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), '
                f"sizeof((({name} *)0)->{field}));"
            )
    for name in (item["name"] for item in items("constant")):
        out.append(f'    printf("{name} %lld\\n", (long long)({name}));')
    return "\n".join(out + ["    return 0;", "}", ""])


def table_of(compiler, source, folder):
    path = os.path.join(folder, "layout.c")
    with open(path, "w", encoding="utf-8") as f:
        f.write(source)
    binary = os.path.join(folder, compiler)
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-I", INCLUDE]
    subprocess.run([compiler, *flags, path, "-o", binary], check=True)
    return subprocess.run([binary], check=True, capture_output=True, text=True).stdout


def difference(left, right):
    import difflib

    return "".join(difflib.unified_diff(left.splitlines(True), right.splitlines(True), n=0))


def main():
    if "--functions" in sys.argv:
        print("\n".join(sorted(item["name"] for item in items("function"))))
        return
    source = program()
    if "--emit" in sys.argv:
        print(source, end="")
        return
    found = [c for c in COMPILERS if shutil.which(c)]
    if not found:
        sys.exit(f"layout: no C compiler found; install one of {', '.join(COMPILERS)}")
    with tempfile.TemporaryDirectory() as folder:
        tables = {c: table_of(c, source, folder) for c in found}
    first = tables[found[0]]
    for compiler in found[1:]:
        if tables[compiler] != first:
            sys.exit(f"layout: {found[0]} and {compiler} differ:\n"
                     + difference(first, tables[compiler]))
    if first.count("\n") < 100 or "kvt_runtime_opts_t.workers" not in first:
        sys.exit("layout: too few structs and constants in include/kvtier/kvtier.json")
    if "--bless" in sys.argv:
        with open(TABLE, "w", encoding="utf-8") as f:
            f.write(first)
    with open(TABLE, encoding="utf-8") as f:
        committed = f.read()
    if committed != first:
        sys.exit("layout: layout.txt and the header differ (--bless writes layout.txt):\n"
                 + difference(committed, first))
    print(f"layout: {first.count(chr(10))} lines agree, with {' and '.join(found)}")


if __name__ == "__main__":
    main()
