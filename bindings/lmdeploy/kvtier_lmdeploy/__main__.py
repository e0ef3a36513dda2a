"""Runs a module or script with the connector activated.

Example: `python -m kvtier_lmdeploy -m lmdeploy serve ...`.
"""

from __future__ import annotations

import os
import runpy
import sys

from ._activate import activate


def main() -> None:
    """Activates the connector in this process and its children, then runs the program."""
    program = sys.argv[1:]
    module = program[:1] == ["-m"]
    program = program[1:] if module else program
    if not program or program[0].startswith("-"):
        sys.exit("usage: python -m kvtier_lmdeploy (-m MODULE | SCRIPT) ARGUMENTS")
    activate()
    package = os.path.dirname(os.path.abspath(__file__))
    paths = [os.path.join(package, "site"), os.path.dirname(package)]
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(paths + ([before] if before else []))
    os.environ["KVTIER_LMDEPLOY_CHILDREN"] = "1"
    sys.argv = program
    if module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(program[0])))
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main()
