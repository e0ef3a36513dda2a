#!/usr/bin/env python3
"""Writes stub libraries where torch's Linux wheel looks for those of CUDA (5 GB), so that torch can be
imported without them. Run it with the interpreter of torch's environment. Needs pyelftools and gcc.
The CPU part of torch works as usual; calls for a GPU fail.

Each stub has the symbols, with versions, that torch's libraries import from it. Its functions return
999, which every caller treats as an error.
"""

import collections
import importlib.util
import pathlib
import subprocess
import sys
import tempfile

from elftools.elf.elffile import ELFFile

SYSTEM = [pathlib.Path(p) for p in ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64")]
# Prefixes of CUDA symbols without a version.
PREFIXES = ("cu", "nccl", "nvrtc", "nvshmem", "nv")


def is_missing(name, folder):
    return not any((at / name).exists() for at in [folder, *SYSTEM])


def wanted(folder):
    """For each missing library and version (or none): names and types of the imported symbols."""
    need = collections.defaultdict(lambda: collections.defaultdict(set))
    defined, loose = set(), []
    for path in [*folder.glob("*.so*"), *folder.parent.glob("*.so")]:
        with open(path, "rb") as file:
            elf = ELFFile(file)
            tags = elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")
            missing = [tag.needed for tag in tags if is_missing(tag.needed, folder)]
            for name in missing:
                need[name]  # pylint: disable=pointless-statement
            versions = {}
            if section := elf.get_section_by_name(".gnu.version_r"):
                for library, parts in section.iter_versions():
                    versions.update({part["vna_other"]: (library.name, part.name) for part in parts})
            numbers = elf.get_section_by_name(".gnu.version")
            for at, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
                if symbol["st_shndx"] != "SHN_UNDEF":
                    defined.add(symbol.name)
                    continue
                number = numbers.get_symbol(at)["ndx"] if numbers else 0
                library, version = versions.get(number, ("", ""))
                one = (symbol.name, symbol["st_info"]["type"])
                if library and is_missing(library, folder):
                    need[library][version].add(one)
                elif not library and symbol.name.startswith(PREFIXES):
                    loose += [(name, one) for name in missing]
    for name, one in loose:
        if one[0] not in defined:
            need[name][""].add(one)
    return need


def build(name, versions, folder, work):
    lines, seen = [], set()
    for symbol, kind in sorted(set().union(*versions.values())):
        if symbol not in seen:
            seen.add(symbol)
            lines.append(f"int {symbol}[64];" if kind == "STT_OBJECT" else f"int {symbol}(void) {{ return 999; }}")
    script = []
    for version, symbols in versions.items():
        if version:
            names = "; ".join(sorted({symbol for symbol, _ in symbols}))
            script.append(f"{version} {{ global: {names}; }};")
    source, script_path = work / "stub.c", work / "stub.map"
    source.write_text("\n".join(lines) + "\n")
    script_path.write_text("\n".join(script) + "\n")
    command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", str(source), "-o", str(folder / name)]
    command += [f"-Wl,-soname,{name}"] + ([f"-Wl,--version-script={script_path}"] if script else [])
    subprocess.run(command, check=True)
    print(f"{name}: {len(seen)} symbols")


def main():
    found = importlib.util.find_spec("torch")
    if found is None:
        sys.exit("this interpreter has no torch: run stub_cuda.py with the one that has")
    folder = pathlib.Path(found.origin).parent / "lib"
    with tempfile.TemporaryDirectory() as work:
        for name, versions in sorted(wanted(folder).items()):
            build(name, versions, folder, pathlib.Path(work))


if __name__ == "__main__":
    main()
