"""`python -m kvtier.eval` compares a model under a KV budget with its full cache. It runs
`kvtier_transformers.eval`; see `python -m kvtier.eval --help`."""

from __future__ import annotations

import importlib
import sys


def main() -> int:
    """Runs the tool and returns its exit status."""
    try:
        tool = importlib.import_module("kvtier_transformers.eval")
    except ImportError as error:
        print(f"kvtier.eval: {error}", file=sys.stderr)
        return 2
    return int(tool.main())


if __name__ == "__main__":
    sys.exit(main())
