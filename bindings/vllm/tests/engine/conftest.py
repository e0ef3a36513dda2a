"""Tests with the installed vLLM; all are skipped without vLLM 0.33."""

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
    SKIP_REASON = "" if VERSION.startswith("0.33.") else (
        f"vLLM 0.33 is needed, found {VERSION or 'none'}")
except ImportError as error:
    SKIP_REASON = f"vLLM's requirements are not installed: {error}"
collect_ignore_glob = ["test_*.py"] if SKIP_REASON else []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if SKIP_REASON:
        terminalreporter.write_line(f"skipped {HERE}: {SKIP_REASON}")
