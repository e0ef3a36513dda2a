"""The installed engine's own classes; without it, or with another version, nothing runs here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import absent  # noqa: E402

try:
    import torch  # noqa: F401

    VERSION = absent.engine()
    WHY = "" if VERSION.startswith("0.33.") else f"vLLM 0.33 is needed, found {VERSION or 'none'}"
except ImportError as error:
    WHY = f"vLLM's requirements are not installed: {error}"
collect_ignore_glob = ["test_*.py"] if WHY else []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if WHY:
        terminalreporter.write_line(f"skipped {HERE}: {WHY}")
