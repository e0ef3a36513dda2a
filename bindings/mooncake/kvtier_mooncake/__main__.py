"""`python -m kvtier_mooncake [--spec SPEC] [--config JSON] -m MODULE ...`, or a script's path."""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from ._install import install


def main() -> None:
    """Runs a program with this package as `mooncake.store`, also in its child processes."""
    parser = argparse.ArgumentParser(
        prog="python -m kvtier_mooncake", allow_abbrev=False,
        description="Runs a program with kvtier as its Mooncake store.")
    parser.add_argument("--spec", help="the store's spec; {rank} or {slot} makes it differ by "
                        "process")
    parser.add_argument("--config", help="the options as JSON, or the path of a JSON file")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE ...",
                        help="a module to run and its arguments, as with python -m")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="or a script and its arguments")
    options = parser.parse_args()
    program = options.module or options.script
    if not program:
        parser.error("nothing to run: give -m MODULE, or the path of a script")
    # Child processes get the options from the environment, and the module from PYTHONPATH.
    for name, value in (("SPEC", options.spec), ("CONFIG", options.config)):
        if value is not None:
            os.environ[f"KVTIER_MOONCAKE_{name}"] = value
    package = os.path.dirname(os.path.abspath(__file__))
    paths = [os.path.join(package, "shim"), os.path.dirname(package)]
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(paths + ([before] if before else []))
    install()
    sys.argv = list(program)
    if options.module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(program[0])))
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main()
