"""A real vLLM on the processor with LMCache's connector and the plugin: its texts are those of
vLLM alone, and a second process loads what the first one stored.

KVTIER_LMCACHE_PYTHON names an interpreter that has vLLM for processors, LMCache and kvtier;
KVTIER_VLLM_MODEL the folder of a model.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, List

import pytest

PYTHON = os.environ.get("KVTIER_LMCACHE_PYTHON", "")
MODEL = os.environ.get("KVTIER_VLLM_MODEL", "")
pytestmark = pytest.mark.skipif(not PYTHON or not MODEL, reason="KVTIER_LMCACHE_PYTHON and "
                                "KVTIER_VLLM_MODEL are not set")


def engine(path: Any, *lengths: int) -> List[Any]:
    """Runs an engine for prompts of some lengths, and returns its answers."""
    done = subprocess.run(
        [PYTHON, str(Path(__file__).with_name("engine.py")), MODEL, str(path), *map(str, lengths)],
        stdout=subprocess.PIPE, text=True, check=True, timeout=3600,
        env={**os.environ, "PYTHONHASHSEED": "0"})
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"ids"')]


def test_a_restarted_vllm_loads_the_kv_and_writes_the_same_text(tmp_path: Path) -> None:
    alone = engine("", 400, 700)
    stored = engine(tmp_path / "kv", 400, 700)
    loaded = engine(tmp_path / "kv", 700, 400)
    assert [one["ids"] for one in stored] == [one["ids"] for one in alone]
    assert [one["ids"] for one in loaded] == [one["ids"] for one in reversed(alone)]
    # Whole chunks of 64 tokens: the prompts begin equally.
    assert [one["cached"] for one in stored] == [0, 384]
    assert [one["cached"] for one in loaded] == [640, 384]
