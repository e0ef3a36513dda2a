"""An unchanged part of vLLM that names NIXL's object plugin, with kvtier's plugin in its place.

Needs KVTIER_NIXL_PLUGINS as in test_plugin.py, and vLLM and NIXL in the interpreter that
KVTIER_NIXL_PYTHON names."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
PYTHON = os.environ.get("KVTIER_NIXL_PYTHON", "")
PLUGINS = os.environ.get("KVTIER_NIXL_PLUGINS", "")
pytestmark = pytest.mark.skipif(
    not PYTHON or not PLUGINS or subprocess.run(
        [PYTHON, "-c", "import importlib.util as u; assert u.find_spec('vllm')"],
        stderr=subprocess.DEVNULL).returncode != 0,
    reason="KVTIER_NIXL_PYTHON has no vLLM")


def test_the_object_tier_of_vllm_shares_blocks_between_processes(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    remote = f'dir(path="{tmp_path}/shared", timeout=600000)'
    # The tier reads the telemetry of its transfers.
    environment = {**os.environ, "NIXL_PLUGIN_DIR": PLUGINS, "NIXL_TELEMETRY_ENABLE": "y",
                   "KVTIER_NIXL_SPEC": f"store(host=64MiB, remote={remote})"}

    def run(what: str) -> Any:
        done = subprocess.run([PYTHON, str(HERE / "vllm_tier.py"), what], env=environment,
                              text=True, capture_output=True)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout)

    assert run("store") is True
    # 20 blocks are found and loaded; a load with a block that is not stored fails as a whole.
    assert run("load") == [list(range(20)), True, True, False]
