#!/usr/bin/env python3
"""Counts lines of code, comments and tests, files and fields of the store, and
identifiers with retired words.

    ffi-tests/measures/sources.py [--words]

--words lists the files with the most retired words."""
import argparse
import collections
import os
import re

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Words that the glossary replaces. A word counts if it is a whole part of an identifier: `told` in
# `note_told` and `ToldKind`, not in `threshold`.
RETIRED = set("""
    shelf shelves told tell deed deeds errand errands hands hungry starve board boards ledger books
    vacancies sight trial grain grains whoever debt debts owed along rectangle wish wishes trouble heard ears
    far near early downs homes
""".split())
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def files(*folders, ending=".rs"):
    for folder in folders:
        for path, _, names in os.walk(os.path.join(ROOT, folder)):
            for name in sorted(names):
                if name.endswith(ending):
                    yield os.path.join(path, name)


def text_of(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def split(path):
    """Counts lines of code, comments and unit tests, and blank lines."""
    counts = collections.Counter()
    product, _, tests = text_of(path).partition("\n#[cfg(test)]")
    counts["tests"] += len(tests.splitlines())
    for line in product.splitlines():
        line = line.strip()
        kind = "blank" if not line else "comments" if line.startswith("//") else "code"
        counts[kind] += 1
    return counts


def identifiers(text):
    """Identifiers outside comments and strings."""
    text = re.sub(r"//.*", "", text)
    text = re.sub(r'"(\\.|[^"\\])*"', '""', text)
    return IDENTIFIER.findall(text)


def retired(path):
    counts = collections.Counter()
    for identifier in identifiers(text_of(path)):
        for part in PART.findall(identifier):
            if part.lower() in RETIRED:
                counts[part.lower()] += 1
    return counts


def fields(path, name):
    """The number of fields of a struct."""
    found = re.search(r"\npub struct %s \{(.*?)\n\}" % name, text_of(path), re.S)
    body = found.group(1) if found else ""
    return len(re.findall(r"^    (?:pub(?:\(\w+\))? )?\w+: ", body, re.M))


def store():
    """The store's folder, and the file and name of its largest struct."""
    for folder, name in (("src/store/state", "StoreState"),):
        path = os.path.join(ROOT, folder, "mod.rs")
        if os.path.exists(path):
            return os.path.dirname(folder), path, name
    raise SystemExit("src/store/state/mod.rs does not exist: correct the path in store()")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--words", action="store_true")
    args = parser.parse_args()
    print(f"{'':24}{'code':>9}{'comments':>10}{'tests':>9}{'files':>7}")
    for folder in ("src", "crates"):
        all_files = list(files(folder))
        sums = sum((split(path) for path in all_files), collections.Counter())
        print(f"{folder + '/':24}{sums['code']:9}{sums['comments']:10}{sums['tests']:9}"
              f"{len(all_files):7}")
    tests = list(files("tests")) + list(files("ffi-tests", ending=".c"))
    lines = sum(len(text_of(path).splitlines()) for path in tests)
    print(f"{'tests/, ffi-tests/*.c':24}{'':19}{lines:9}{len(tests):7}")
    folder, path, name = store()
    print(f"\nthe store: {len(list(files(folder)))} files, {fields(path, name)} fields in {name}")
    words, by_file = collections.Counter(), {}
    for path in files("src", "crates"):
        found = retired(path)
        words += found
        by_file[path] = sum(found.values())
    print(f"retired words in identifiers: {sum(words.values())}")
    print("  " + ", ".join(f"{word} {count}" for word, count in words.most_common()))
    if args.words:
        for path in sorted(by_file, key=by_file.get, reverse=True)[:40]:
            print(f"  {by_file[path]:6}  {os.path.relpath(path, ROOT)}")


if __name__ == "__main__":
    main()
