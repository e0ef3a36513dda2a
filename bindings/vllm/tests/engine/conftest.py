"""Tests with the installed vLLM; all are skipped without a version that kvtier_vllm supports."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import absent  # noqa: E402

try:
    import torch  # noqa: F401
    from kvtier import UnsupportedError
    from kvtier_vllm._engine import ENGINE

    SKIP_REASON, VERSION = "", absent.engine()
    try:
        ENGINE.check_version(VERSION)
    except UnsupportedError as error:
        SKIP_REASON = str(error)
except ImportError as error:
    SKIP_REASON = f"vLLM's requirements are not installed: {error}"
collect_ignore_glob = ["test_*.py"] if SKIP_REASON else []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if SKIP_REASON:
        terminalreporter.write_line(f"skipped {HERE}: {SKIP_REASON}")
