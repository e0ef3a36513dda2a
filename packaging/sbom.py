#!/usr/bin/env python3
"""Lists what is linked into the library or the tool, as CycloneDX 1.5 JSON.

    sbom.py PACKAGE --features F,F --target T --out FILE [--licences FILE]
    sbom.py --check FILE...

PACKAGE is kvtier (the library) or kvtier-cli (the tool). Crates, their graph and licences
come from cargo, hashes from Cargo.lock. Procedural macros and build scripts run at build time and
are not listed. Equal inputs give equal bytes: the time is SOURCE_DATE_EPOCH, and the serial
number is a hash of the contents. --licences writes the licence texts of the listed crates.
KVTIER_CARGO_ARGS is passed to cargo (cmake/vendor.sh). --check validates files against the rules of
the format that this script uses; every written file is checked, too.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any, Dict, List, Set, Tuple

ROOT = Path(__file__).resolve().parent.parent
LICENCE_IDS = {"0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "ISC",
               "MIT", "MIT-0", "MPL-2.0", "Unicode-3.0", "Unicode-DFS-2016", "Unlicense", "Zlib"}
EXCEPTIONS = {"LLVM-exception"}
LICENCE_FILE = r"(?i)(un)?licen[cs]e|copying|copyright|notice"
Key = Tuple[str, str]  # name, version


def run(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def cargo(*arguments: str) -> str:
    extra = os.environ.get("KVTIER_CARGO_ARGS", "").replace("'", "").split()
    return run(os.environ.get("CARGO", "cargo"), *arguments, "--locked", *extra)


def linked(package: str, features: str, target: str) -> Tuple[Key, Dict[Key, Set[Key]]]:
    """Returns the package and the graph of what is linked into it."""
    text = cargo("tree", "--package", package, "--no-default-features", "--features", features,
                 "--target", target, "--edges", "normal,no-proc-macro", "--prefix", "depth",
                 "--format", " {p}")
    graph: Dict[Key, Set[Key]] = {}
    path: List[Key] = []
    for line in filter(None, text.splitlines()):
        depth, name, version = line.split()[:3]
        key = (name, version[1:])
        del path[int(depth):]
        graph.setdefault(key, set())
        if path:
            graph[path[-1]].add(key)
        path.append(key)
    return next(iter(graph)), graph


def checksums() -> Dict[Key, str]:
    """Returns the SHA-256 of each crate's archive."""
    found = {}
    for entry in (ROOT / "Cargo.lock").read_text(encoding="utf-8").split("[[package]]")[1:]:
        fields = dict(re.findall(r'^(name|version|checksum) = "(.*)"$', entry, re.M))
        if "checksum" in fields:
            found[fields["name"], fields["version"]] = fields["checksum"]
    return found


def component(name: str, version: str, licence: str, kind: str = "cargo") -> Dict[str, Any]:
    purl = f"pkg:{kind}/{name}@{version.replace('+', '%2B')}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl,
            "licenses": [{"expression": licence.replace("/", " OR ")}]}


def bill(package: str, features: str, target: str, licences: Path | None) -> Dict[str, Any]:
    root, graph = linked(package, features, target)
    metadata = json.loads(cargo("metadata", "--format-version", "1", "--all-features"))
    known = {(p["name"], p["version"]): p for p in metadata["packages"]}
    sums = checksums()
    rust = re.search(r"^release: (.*)$", run(os.environ.get("RUSTC", "rustc"), "-vV"), re.M)
    if rust is None:
        raise SystemExit("rustc -vV does not name its release")
    std = component("rust-std", rust.group(1), "MIT OR Apache-2.0", "generic")
    refs, components = {}, [std]
    for key in sorted(graph):
        licence = known[key]["license"]
        if not licence:
            raise SystemExit(f"the crate {key[0]} {key[1]} names no licence")
        entry = component(*key, licence)
        if key in sums:
            entry["hashes"] = [{"alg": "SHA-256", "content": sums[key]}]
        refs[key] = entry["bom-ref"]
        if key == root:
            main = entry
        else:
            components.append(entry)
    if package != "kvtier":
        main["type"] = "application"
    main["properties"] = [{"name": "kvtier:features", "value": features},
                          {"name": "kvtier:target", "value": target}]
    components.sort(key=lambda entry: entry["bom-ref"])
    edges = {refs[key]: sorted([*(refs[to] for to in tos), std["bom-ref"]])
             for key, tos in graph.items()}
    edges[std["bom-ref"]] = []
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
    when = datetime.datetime.fromtimestamp(epoch, datetime.timezone.utc)
    found = {
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
        "metadata": {"timestamp": when.strftime("%Y-%m-%dT%H:%M:%SZ"), "component": main,
                     "lifecycles": [{"phase": "build"}]},
        "components": components,
        "dependencies": [{"ref": ref, "dependsOn": edges[ref]} for ref in sorted(edges)],
    }
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
    found["serialNumber"] = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, digest)}"
    if licences is not None:
        folders = {key: Path(known[key]["manifest_path"]).parent for key in graph if key in sums}
        licences.write_text(texts(folders, known, rust.group(1)), encoding="utf-8")
    return found


def texts(folders: Dict[Key, Path], known: Dict[Key, Any], rust: str) -> str:
    """Returns the licence texts that the crates bring along, each text once."""
    users: Dict[str, List[str]] = {}
    rows = [f"rust-std {rust}: MIT OR Apache-2.0, The Rust Project Developers"]
    for key in sorted(folders):
        name = " ".join(key)
        rows.append(f"{name}: {known[key]['license'].replace('/', ' OR ')}"
                    + "".join(f", {author}" for author in known[key]["authors"]))
        for path in sorted(folders[key].iterdir()):
            if path.is_file() and re.match(LICENCE_FILE, path.name):
                text = path.read_text(encoding="utf-8", errors="replace")
                users.setdefault(text.replace("\r\n", "\n").strip(), []).append(name)
    parts = ["Programs of others that are linked into kvtier's library and tool, with their "
             "licences.\n\n" + "\n".join(rows)]
    for text, names in sorted(users.items(), key=lambda item: item[1]):
        parts.append(f"{', '.join(names)}:\n\n{text}")
    return f"\n\n{'-' * 78}\n\n".join(parts) + "\n"


# The rules of the format, as far as this script uses it.

KEYS = {
    "bom": {"bomFormat", "specVersion", "serialNumber", "version", "metadata", "components",
            "dependencies"},
    "component": {"type", "bom-ref", "name", "version", "purl", "licenses", "hashes", "properties"},
}


def check_licence(expression: str) -> bool:
    words = re.findall(r"[()]|[^\s()]+", expression)
    depth, wanted = 0, "id"
    for word in words:
        if word == "(" and wanted == "id":
            depth += 1
        elif word == ")" and wanted == "operator" and depth:
            depth -= 1
        elif wanted == "id" and word in LICENCE_IDS:
            wanted = "operator"
        elif wanted == "operator" and word in ("AND", "OR"):
            wanted = "id"
        elif wanted == "operator" and word == "WITH":
            wanted = "exception"
        elif wanted == "exception" and word in EXCEPTIONS:
            wanted = "operator"
        else:
            return False
    return wanted == "operator" and depth == 0


def check_component(entry: Dict[str, Any], wrong: List[str]) -> None:
    name = f"component {entry.get('name')}"
    if set(entry) - KEYS["component"]:
        wrong.append(f"{name}: unknown fields {sorted(set(entry) - KEYS['component'])}")
    if entry.get("type") not in ("library", "application"):
        wrong.append(f"{name}: type {entry.get('type')!r}, not library or application")
    if not re.fullmatch(r"\d+\.\d+\.\d+\S*", entry.get("version", "")):
        wrong.append(f"{name}: version {entry.get('version')!r} is no version")
    purl = f"{entry.get('name')}@{entry.get('version', '').replace('+', '%2B')}"
    if entry.get("purl") not in (f"pkg:cargo/{purl}", f"pkg:generic/{purl}"):
        wrong.append(f"{name}: purl {entry.get('purl')!r} does not name {purl}")
    licences = entry.get("licenses", [])
    if len(licences) != 1 or not check_licence(licences[0].get("expression", "")):
        wrong.append(f"{name}: {licences} is not one SPDX expression of known licences")
    for entry_hash in entry.get("hashes", []):
        content = entry_hash.get("content", "")
        if entry_hash.get("alg") != "SHA-256" or not re.fullmatch("[0-9a-f]{64}", content):
            wrong.append(f"{name}: {entry_hash} is no SHA-256")


def check_graph(bom: Dict[str, Any], refs: List[str], wrong: List[str]) -> None:
    graph = {entry["ref"]: entry["dependsOn"] for entry in bom["dependencies"]}
    if len(graph) != len(bom["dependencies"]) or set(graph) != set(refs):
        wrong.append("dependencies: not one entry for each component")
    for ref, tos in graph.items():
        if ref in tos or tos != sorted(set(tos)) or set(tos) - set(refs):
            wrong.append(f"dependencies of {ref}: doubled, unsorted or unknown")
    reached, todo = set(), [bom["metadata"]["component"]["bom-ref"]]
    while todo:
        ref = todo.pop()
        if ref not in reached:
            reached.add(ref)
            todo.extend(graph.get(ref, []))
    if set(refs) - reached:
        wrong.append(f"nothing depends on {sorted(set(refs) - reached)}")


def check(text: str) -> List[str]:
    """Returns what is wrong with a file."""
    bom = json.loads(text)
    wrong: List[str] = []
    if set(bom) != KEYS["bom"]:
        return [f"fields differ: {sorted(set(bom) ^ KEYS['bom'])}"]
    if (bom["bomFormat"], bom["specVersion"]) != ("CycloneDX", "1.5"):
        wrong.append(f"{bom['bomFormat']} {bom['specVersion']}, not CycloneDX 1.5")
    if not re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", bom["serialNumber"]):
        wrong.append(f"serialNumber {bom['serialNumber']!r} is no urn:uuid")
    if type(bom["version"]) is not int or bom["version"] < 1:
        wrong.append(f"version {bom['version']!r} is no number from 1")
    if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", bom["metadata"]["timestamp"]):
        wrong.append(f"timestamp {bom['metadata']['timestamp']!r} is no UTC time")
    entries = [bom["metadata"]["component"], *bom["components"]]
    for entry in entries:
        check_component(entry, wrong)
    for entry in bom["components"]:
        own = entry["name"].startswith("kvtier")
        if entry["purl"].startswith("pkg:cargo/") and not own and not entry.get("hashes"):
            wrong.append(f"component {entry['name']}: no hash")
    refs = [entry["bom-ref"] for entry in entries]
    if len(set(refs)) != len(refs):
        wrong.append("two components have the same bom-ref")
    check_graph(bom, refs, wrong)
    if re.search(r'"/|file:/', text):
        wrong.append("an absolute path")
    return wrong


def main() -> int:
    options = argparse.ArgumentParser(description="Lists what is linked into kvtier.")
    options.add_argument("names", nargs="+", metavar="PACKAGE|FILE")
    options.add_argument("--check", action="store_true")
    options.add_argument("--features", default="redis,dir")
    options.add_argument("--target", default="x86_64-unknown-linux-gnu")
    options.add_argument("--out", type=Path)
    options.add_argument("--licences", type=Path)
    given = options.parse_args()
    if given.check:
        files = [Path(name) for name in given.names]
    else:
        if len(given.names) != 1 or given.out is None:
            options.error("one PACKAGE and --out FILE are needed")
        found = bill(given.names[0], given.features, given.target, given.licences)
        given.out.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        files = [given.out]
    status = 0
    for path in files:
        for line in check(path.read_text(encoding="utf-8")):
            print(f"{path}: {line}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
