#!/usr/bin/env python3
"""Builds the wheel for any Python 3: the package with the shared library, and the connectors for
engines (`bindings/*/kvtier_*`).

    build_wheel.py [--prebuilt DIR] [--out DIR] [--licences FILE] [--sbom FILE]

The wheel contains DIR/lib/libkvtier.so unchanged; KVTIER_PREBUILT_DIR can name DIR, too. Without
DIR, cmake/build.sh builds the library with cargo. The wheel also gets the given licences of the
crates in the library, and the list of these crates (packaging/build.sh). This file is also the PEP
517 backend that `pip install` calls. It has no build dependencies, because a wheel is a zip file.
The build is reproducible.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import os
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

import generate

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PACKAGE = HERE / "kvtier"

MACHINES = {62: "x86_64", 183: "aarch64"}
#: The libraries of the C runtime; a manylinux wheel may need no others.
SYSTEM = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1",
          "libgcc_s.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
#: What `pip install 'kvtier[NAME]'` installs for the connector kvtier_NAME. The package itself
#: needs none of it.
EXTRAS = {
    "lmcache": ["lmcache==0.5.6"],
    "lmdeploy": ["lmdeploy>=0.17,<0.19"],
    "mooncake": ["numpy"],
    "sglang": ["sglang==0.5.23"],
    "transformers": ["torch", "transformers>=5.22,<6"],
    "vllm": ["vllm>=0.31,<0.34"],
}
SHT_DYNAMIC, SHT_GNU_VERNEED = 6, 0x6FFFFFFE
DT_NEEDED = 1


class Elf:
    """The parts of a 64-bit little-endian ELF file that determine the wheel's tag."""

    def __init__(self, data: bytes) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise SystemExit("the library is not a 64-bit little-endian ELF file")
        self.data = data
        self.machine = struct.unpack_from("<H", data, 18)[0]
        offset, = struct.unpack_from("<Q", data, 40)
        size, count = struct.unpack_from("<HH", data, 58)
        # name, type, flags, addr, offset, size, link, info, addralign, entsize
        self.sections = [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * size)
                         for i in range(count)]

    def _text(self, section: int, offset: int) -> str:
        start = self.sections[section][4] + offset
        return self.data[start : self.data.index(b"\0", start)].decode()

    def needed_libraries(self) -> List[str]:
        names = []
        for section in self.sections:
            if section[1] != SHT_DYNAMIC:
                continue
            for at in range(section[4], section[4] + section[5], 16):
                tag, value = struct.unpack_from("<QQ", self.data, at)
                if tag == DT_NEEDED:
                    names.append(self._text(section[6], value))
        return names

    def needed_versions(self) -> Iterator[Tuple[str, str]]:
        """Yields pairs of library and symbol version."""
        for section in self.sections:
            if section[1] != SHT_GNU_VERNEED:
                continue
            at = section[4]
            while True:
                _, count, file, aux, following = struct.unpack_from("<HHIII", self.data, at)
                entry = at + aux
                for _ in range(count):
                    _, _, _, name, step = struct.unpack_from("<IHHII", self.data, entry)
                    yield self._text(section[6], file), self._text(section[6], name)
                    entry += step
                if not following:
                    break
                at += following


def platform_tag(library: bytes) -> str:
    """Returns the oldest manylinux tag with every symbol version that the library needs."""
    elf = Elf(library)
    machine = MACHINES.get(elf.machine)
    if machine is None:
        raise SystemExit(f"ELF machine {elf.machine} is not supported: it must be one of "
                         f"{', '.join(MACHINES.values())}")
    foreign = set(elf.needed_libraries()) - SYSTEM
    if foreign:
        raise SystemExit(f"the library needs {sorted(foreign)}, which manylinux does not "
                         f"guarantee: link it to none but {sorted(SYSTEM)}")
    minor = 17  # the oldest tag that pip knows by version
    for _, version in elf.needed_versions():
        found = re.fullmatch(r"GLIBC_2\.(\d+)(?:\.\d+)?", version)
        if found:
            minor = max(minor, int(found.group(1)))
        elif version.startswith("GLIBC_") and version != "GLIBC_ABI_DT_RELR":
            raise SystemExit(f"the library needs {version}: only GLIBC_2.N and GLIBC_ABI_DT_RELR "
                             "map to a manylinux tag")
        elif version == "GLIBC_ABI_DT_RELR":
            minor = max(minor, 36)  # the first glibc that loads packed relocations
    return f"manylinux_2_{minor}_{machine}"


def package_version() -> str:
    """Returns the version of the header that the declarations were generated from; writes these
    first, if need be."""
    generate.write()
    text = (PACKAGE / "_abi.py").read_text(encoding="utf-8")
    parts = dict(re.findall(r"^KVT_VERSION_(MAJOR|MINOR|PATCH) = (\d+)$", text, re.M))
    return f"{parts['MAJOR']}.{parts['MINOR']}.{parts['PATCH']}"


def metadata() -> str:
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    extras = "".join(
        f"Provides-Extra: {name}\n"
        + "".join(f'Requires-Dist: {needed}; extra == "{name}"\n' for needed in EXTRAS[name])
        for name in sorted(EXTRAS))
    return (
        "Metadata-Version: 2.1\n"
        "Name: kvtier\n"
        f"Version: {package_version()}\n"
        "Summary: Tiered KV-cache storage for LLM inference engines\n"
        "License: Apache-2.0\n"
        "Requires-Python: >=3.9\n"
        "Classifier: License :: OSI Approved :: Apache Software License\n"
        "Classifier: Operating System :: POSIX :: Linux\n"
        "Classifier: Typing :: Typed\n"
        f"{extras}"
        "Description-Content-Type: text/markdown\n"
        f"\n{readme}"
    )


def library(prebuilt: Optional[str]) -> bytes:
    """Returns the shared library's bytes, and builds the library if none is given."""
    prebuilt = prebuilt or os.environ.get("KVTIER_PREBUILT_DIR")
    if prebuilt:
        return (Path(prebuilt) / "lib" / "libkvtier.so").read_bytes()
    script = ROOT / "cmake" / "build.sh"
    if not script.exists():
        raise SystemExit("this is not a source checkout, so the library cannot be built: set "
                         "KVTIER_PREBUILT_DIR to a directory with lib/libkvtier.so")
    with tempfile.TemporaryDirectory() as out:
        subprocess.run(["sh", str(script), out], check=True, stdout=sys.stderr)
        return (Path(out) / "lib" / "libkvtier.so").read_bytes()


def packages() -> List[Path]:
    """Returns the package and the connectors. A source archive has them beside the package, a
    checkout in the folder of each engine."""
    # Folders beside an unpacked archive are unrelated.
    folders = [HERE] if (HERE / "PKG-INFO").exists() else [*HERE.parent.glob("*"), HERE]
    found = {path.name: path for folder in folders for path in folder.glob("kvtier_*")
             if (path / "__init__.py").is_file()}
    return [PACKAGE, *(found[name] for name in sorted(found))]


def sources(package: Path) -> Iterator[Tuple[str, bytes]]:
    """Yields the files of a package with their names in the wheel."""
    for path in sorted(package.rglob("*")):
        within = path.relative_to(package.parent)
        if "tests" in within.parts or not path.is_file():
            continue
        if path.suffix in (".py", ".pyi") or path.name == "py.typed":
            yield within.as_posix(), path.read_bytes()


def entries(tag: str, shared: Optional[bytes],
            notes: Optional[Dict[str, bytes]] = None) -> Dict[str, bytes]:
    """Returns the wheel's files without RECORD; `notes` are files for its dist-info."""
    info = f"kvtier-{package_version()}.dist-info"  # writes the declarations, too
    found = {name: data for package in packages() for name, data in sources(package)}
    if shared is not None:
        found["kvtier/lib/libkvtier.so"] = shared
    found[f"{info}/METADATA"] = metadata().encode()
    wheel = f"Wheel-Version: 1.0\nGenerator: kvtier\nRoot-Is-Purelib: false\nTag: {tag}\n"
    found[f"{info}/WHEEL"] = wheel.encode()
    found.update((f"{info}/{name}", data)
                 for name, data in {**licence(), **(notes or {})}.items())
    return found


def licence() -> Dict[str, bytes]:
    """Returns the licence by its file name; an unpacked archive has its own copy."""
    folder = HERE if (HERE / "PKG-INFO").exists() else ROOT
    path = folder / "LICENSE"
    return {path.name: path.read_bytes()} if path.exists() else {}


def write_wheel(out: Path, shared: bytes, notes: Optional[Dict[str, bytes]] = None) -> Path:
    """Writes the wheel and returns its path."""
    tag = f"py3-none-{platform_tag(shared)}"
    return _pack(out, tag, entries(tag, shared, notes))


def _pack(out: Path, tag: str, files: Dict[str, bytes]) -> Path:
    info = f"kvtier-{package_version()}.dist-info"
    record = []
    for name, data in sorted(files.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(data)}\n")
    record.append(f"{info}/RECORD,,\n")
    files = dict(sorted(files.items()))
    files[f"{info}/RECORD"] = "".join(record).encode()
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"kvtier-{package_version()}-{tag}.whl"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            # A fixed time keeps the build reproducible.
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.create_system = 3
            mode = 0o755 if name.endswith(".so") else 0o644
            entry.external_attr = (0o100000 | mode) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data, compresslevel=9)
    return target


# The PEP 517 backend.


def get_requires_for_build_wheel(config_settings: Any = None) -> List[str]:
    return []


def get_requires_for_build_sdist(config_settings: Any = None) -> List[str]:
    return []


def get_requires_for_build_editable(config_settings: Any = None) -> List[str]:
    return []


def build_wheel(wheel_directory: str, config_settings: Any = None,
                metadata_directory: Optional[str] = None) -> str:
    return write_wheel(Path(wheel_directory), library(None)).name


def build_editable(wheel_directory: str, config_settings: Any = None,
                   metadata_directory: Optional[str] = None) -> str:
    """Points to this directory and those of the connectors. KVTIER_LIBRARY, or the system's
    loader, finds the library. Only kvtier/_abi.py is written to the source tree."""
    tag = "py3-none-any"
    files = {name: data for name, data in entries(tag, None).items() if ".dist-info/" in name}
    folders = dict.fromkeys(package.parent for package in packages())
    files["kvtier.pth"] = "".join(f"{folder}\n" for folder in folders).encode()
    return _pack(Path(wheel_directory), tag, files).name


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    """Packs this directory and the connectors. A build from the archive needs
    KVTIER_PREBUILT_DIR."""
    base = f"kvtier-{package_version()}"
    names = ["README.md", "build_wheel.py", "generate.py", "pyproject.toml"]
    files = {name: (HERE / name).read_bytes() for name in names}
    files.update(licence())
    files.update(item for package in packages() for item in sources(package))
    target = Path(sdist_directory) / f"{base}.tar.gz"
    with tarfile.open(target, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for name, data in files.items():
            _add(archive, f"{base}/{name}", data)
        _add(archive, f"{base}/PKG-INFO", metadata().encode())
    return target.name


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), 0o644
    archive.addfile(entry, io.BytesIO(data))


def main() -> int:
    options = argparse.ArgumentParser(description="Builds the kvtier wheel.")
    options.add_argument("--prebuilt", help="directory with lib/libkvtier.so")
    options.add_argument("--out", type=Path, default=Path("dist"))
    options.add_argument("--licences", type=Path, help="licences of the crates in the library")
    options.add_argument("--sbom", type=Path, help="what is linked into the library")
    given = options.parse_args()
    notes: Dict[str, bytes] = {}
    if given.licences:
        notes["THIRD-PARTY.txt"] = given.licences.read_bytes()
    if given.sbom:
        notes[f"sboms/{given.sbom.name}"] = given.sbom.read_bytes()
    print(write_wheel(given.out, library(given.prebuilt), notes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
