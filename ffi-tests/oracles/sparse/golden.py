#!/usr/bin/env python3
"""Selections of published implementations of sparse policies: tests/data/sparse/*.json, with which
tests/sparse/oracle.rs compares the library.

    golden.py --write DIR [FAMILY...]   runs the packages, writes DIR/FAMILY.json
    golden.py --check DIR [FAMILY...]   runs them again and compares with the files
        --python INTERPRETER            an interpreter with packages (may be given several times)
        --minference DIR                the unpacked sdist of minference 0.1.6.0; or KVTIER_MINFERENCE
        --h2o FILE                      modify_llama.py (h2o_hf/utils_real_drop) of FMInference/H2O; or
                                        KVTIER_H2O

Families: kvpress, minference, dsa (the indexer of transformers), h2o. A family whose packages are
missing is skipped with a line that begins with SKIP. The library's tests do not need this program:
the results are committed, the published code is not.

Inputs are computed from integers (portable.py). If scores at any cut are so close that two correct
programs may differ, the case is repeated with the next seed, and a line says so. The remaining
margins are in the files.

How to get the packages on a machine without a GPU (with the versions that were used):

    python3 -m venv A && A/bin/pip install --no-deps torch==2.15.0
    A/bin/pip install numpy filelock typing_extensions sympy networkx jinja2 fsspec setuptools pyelftools
    A/bin/python stub_cuda.py          # empty libraries in place of 5 GB of CUDA
    A/bin/pip install --no-deps kvpress==0.5.5 transformers==5.2.0 accelerate peft datasets \\
        'cachetools<6' 'fire<0.7' 'pandas<3'
    A/bin/pip install 'tokenizers<0.23' 'huggingface-hub<2' safetensors regex pyyaml requests tqdm \\
        packaging psutil termcolor python-dateutil pytz six dill xxhash multiprocess pyarrow httpx aiohttp

and a second environment, B, with transformers==5.23.0, tokenizers, huggingface-hub, safetensors, regex,
pyyaml, requests, tqdm, packaging, typer and einops, for dsa and minference. The sdist of minference:

    MINFERENCE_SKIP_CUDA_BUILD=TRUE B/bin/pip download --no-deps --no-binary :all: \\
        --no-build-isolation minference==0.1.6.0

with setuptools and wheel in B, because its setup imports torch; then unpack it.
"""

import argparse
import importlib
import json
import os
import pathlib
import subprocess
import sys

FAMILIES = ["kvpress", "minference", "dsa", "h2o"]
# Seeds to try for a case.
TRIES = 200


def answered(family, case, seed):
    """A case with its seed, result and margin; or None and the reason."""
    from portable import TooClose, Watch

    case = {**case, "seed": seed}
    watch = Watch(case.pop("least", 2e-5))
    try:
        result = family.run(case, watch)
    except TooClose as reason:
        return None, str(reason)
    margin = f"{watch.margin:.1e}" if watch.cuts else "none"
    return {**case, "cuts": watch.cuts, "margin": margin, "result": result}, ""


def searched(family, number, case):
    """The same with the first seed whose cuts have a sufficient margin."""
    for seed in range(1000 * number, 1000 * number + TRIES):
        found, why = answered(family, case, seed)
        if found:
            return found
        print(f"{case['name']}: seed {seed} skipped: {why}")
    sys.exit(f"{case['name']}: none of {TRIES} seeds has sufficient margins")


def generated(name):
    family = importlib.import_module("of_" + name)
    versions = family.versions()
    all_cases = [searched(family, n, case) for n, case in enumerate(family.cases(), 1)]
    return {"family": name, "versions": versions, "cases": all_cases}


def text(found):
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in found["cases"])
    head = json.dumps({k: v for k, v in found.items() if k != "cases"}, separators=(",", ":"))
    return head[:-1] + ',"cases":[\n' + lines + "\n]}\n"


def checked(name, path):
    """Runs the cases of a file again. Prints different versions; exits at a different result."""
    family = importlib.import_module("of_" + name)
    versions = family.versions()
    found = json.loads(path.read_text())
    if versions != found["versions"]:
        print(f"{name}: made with {found['versions']}, installed are {versions}")
    wanted = list(family.cases())
    if [case["name"] for case in wanted] != [case["name"] for case in found["cases"]]:
        sys.exit(f"{name}: the cases differ from those in {path.name}; run --write")
    for case, old in zip(wanted, found["cases"]):
        new, why = answered(family, case, old["seed"])
        if new is None or new["result"] != old["result"]:
            sys.exit(f"{name}, {case['name']}: {why or 'the result differs from the file'}")
    print(f"{name}: {len(wanted)} cases agree")


def one(name, args):
    """Runs one family in an interpreter that may have the packages."""
    import warnings

    warnings.simplefilter("ignore")
    try:
        from portable import Missing
    except (ImportError, OSError, ValueError) as error:
        # A torch without its libraries raises different exceptions.
        print(f"missing {' '.join(str(error).split())[:120]}")
        return 3
    path = args.folder / f"{name}.json"
    try:
        if args.check:
            checked(name, path)
        else:
            path.write_text(text(generated(name)))
            print(f"{path.name}: {path.stat().st_size} bytes")
    except Missing as reason:
        print(f"missing {reason}")
        return 3
    return 0


def main():
    parser = argparse.ArgumentParser(description="selections of published sparse policies")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", dest="folder", type=pathlib.Path)
    what.add_argument("--check", type=pathlib.Path)
    parser.add_argument("--python", action="append", default=[])
    parser.add_argument("--minference", default=os.environ.get("KVTIER_MINFERENCE", ""))
    parser.add_argument("--h2o", default=os.environ.get("KVTIER_H2O", ""))
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("families", nargs="*", default=[])
    args = parser.parse_args()
    mode = "--check" if args.check else "--write"
    args.folder = (args.check or args.folder).resolve()
    if args.inside:
        return one(args.inside, args)
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"KVTIER_MINFERENCE": args.minference, "KVTIER_H2O": args.h2o}
    failed = 0
    for name in args.families or FAMILIES:
        why = ""
        for python in args.python or [sys.executable]:
            command = [python, __file__, mode, str(args.folder), "--inside", name]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
            if done.returncode != 3:
                print(done.stdout, end="", flush=True)
                break
            why = done.stdout.strip().splitlines()[-1].removeprefix("missing ")
        if done.returncode == 3:
            print(f"SKIP: sparse oracles of {name}: {why}")
        elif done.returncode:
            print(f"{name}: failed")
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
