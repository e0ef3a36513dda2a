#!/usr/bin/env python3
"""Counts the source files that a durable put, a get from disk and an eviction pass through.

    ffi-tests/measures/trips.py [--list]

A put and a get run on their own threads under callgrind, which records the file of every
instruction; nothing is inlined. For each it prints the number of files of src/, of files of the
store among them, and of calls between files of src/. --list names the files."""
import argparse
import collections
import os
import re
import subprocess
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TARGET = os.path.join(ROOT, "target", "measures")
# An eviction is everything that runs below this function while memory is full.
EVICTION = "kvtier::store::state::*::make_room"
STORE = ("src/store/",)


def run(*argv, **more):
    return subprocess.run(argv, check=True, cwd=ROOT, **more)


def build():
    env = dict(os.environ, CARGO_PROFILE_DEV_DEBUG="line-tables-only",
               CARGO_PROFILE_DEV_OPT_LEVEL="0", CARGO_TARGET_DIR=TARGET)
    run("cargo", "build", "--lib", "--quiet", env=env)
    program = os.path.join(TARGET, "trips")
    run("cc", "-O1", "-Iinclude", "ffi-tests/measures/trips.c",
        os.path.join(TARGET, "debug", "libkvtier.a"), "-lpthread", "-ldl", "-lm", "-o", program)
    return program


def short(path):
    """The path below the root of a file of src/, or None."""
    inside = path.startswith(ROOT + "/src/") or path.startswith("src/")
    if not inside:
        return None
    return path[len(ROOT) + 1:] if path.startswith(ROOT) else path


def read(profile):
    """Files of src/ in which instructions ran, and calls between them."""
    names, files, calls = {}, set(), collections.Counter()
    current = called = None
    after_call = False

    def name_of(text):
        number, _, name = text.partition(" ")
        if name:
            names[number] = name
        return names.get(number, "")

    with open(profile, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            key, _, value = line.rstrip("\n").partition("=")
            if key in ("fl", "fi", "fe"):
                current, called = short(name_of(value)), None
            elif key in ("cfi", "cfl"):
                called = short(name_of(value))
            elif key == "calls":
                callee = called or current
                if current and callee and callee != current:
                    calls[current, callee] += int(value.split()[0])
                after_call, called = True, None
            elif re.match(r"[+\-*\d]", line):
                if not after_call and current:
                    files.add(current)
                after_call = False
    return files, calls


def measure(program, trip):
    with tempfile.TemporaryDirectory() as scratch:
        out = os.path.join(scratch, "profile")
        options = ["--instr-atstart=no"]
        if trip == "evict":
            options += ["--toggle-collect=" + EVICTION]
        run("valgrind", "--tool=callgrind", "-q", "--callgrind-out-file=" + out, *options,
            program, trip, os.path.join(scratch, "kv"))
        parts = [os.path.join(scratch, name) for name in os.listdir(scratch)
                 if name.startswith("profile")]
        files, calls = set(), collections.Counter()
        for part in parts:
            some, more = read(part)
            files |= some
            calls += more
    return files, calls


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--list", action="store_true", help="name the files")
    args = parser.parse_args()
    program = build()
    print(f"{'trip':8}{'files':>7}{'store':>7}{'calls':>8}")
    for trip in ("put", "get", "evict"):
        files, calls = measure(program, trip)
        store = [name for name in files if name.startswith(STORE)]
        print(f"{trip:8}{len(files):7}{len(store):7}{sum(calls.values()):8}")
        if args.list:
            print("\n".join("  " + name for name in sorted(files)))


if __name__ == "__main__":
    main()
