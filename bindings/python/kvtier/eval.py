"""`python -m kvtier.eval`: a model with a budget against its full cache; see
`python -m kvtier.eval --help`. What runs is `kvtier_transformers.eval`."""

from __future__ import annotations

import importlib
import sys


def main() -> int:
    """Runs it; the exit status."""
    try:
        tool = importlib.import_module("kvtier_transformers.eval")
    except ImportError as error:
        print(f"kvtier.eval: {error}", file=sys.stderr)
        return 2
    return int(tool.main())


if __name__ == "__main__":
    sys.exit(main())
