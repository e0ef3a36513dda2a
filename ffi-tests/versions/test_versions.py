"""Compares each connector with the interfaces in the wheels of several versions of its engine.

The sources of a wheel are fetched to a folder in KVTIER_VERSIONS (default: a temporary folder), and
a process imports the connector with them; see accepted.py. A version whose wheel cannot be had is
skipped with the reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import sources  # noqa: E402

#: Versions, and the parts that are rejected, each with a part of the reason. The READMEs of the
#: connectors have the same tables.
VERSIONS: List[Tuple[str, Dict[str, str]]] = [
    ("vllm==0.30.0", {part: "0.31 and newer" for part in (
        "kvtier_vllm.tier", "kvtier_vllm.policy", "kvtier_vllm.spec", "kvtier_vllm.connector")}),
    ("vllm==0.31.0", {}),
    ("vllm==0.32.0", {}),
    ("vllm==0.33.0", {}),
    ("sglang==0.5.21", {part: "0.5.22 and newer" for part in (
        "kvtier_sglang", "kvtier_sglang.linker")}),
    ("sglang==0.5.22", {"kvtier_sglang.linker": "has no method record_offload_ready"}),
    ("sglang==0.5.23", {}),
    ("lmdeploy==0.16.0", {"kvtier_lmdeploy._connector": "0.17 and newer"}),
    ("lmdeploy==0.17.0", {}),
    ("lmdeploy==0.18.0", {}),
    ("transformers==5.21.1", {part: "5.22 and newer" for part in (
        "kvtier_transformers", "kvtier_transformers.h2o")}),
    ("transformers==5.22.2", {}),
    ("transformers==5.23.0", {}),
    ("transformers==5.24.0", {}),
]
#: Those of them that a connector was tested with: no warning.
TESTED = ("vllm==0.31.0", "vllm==0.32.0", "vllm==0.33.0", "sglang==0.5.23", "lmdeploy==0.17.0",
          "lmdeploy==0.18.0", "transformers==5.23.0")

pytest.importorskip("torch", reason="needs torch")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("KVTIER_VERSIONS")
    return Path(given) if given else tmp_path_factory.mktemp("versions")


def accepted(requirement: str, folder: Path) -> Any:
    """The parts of a connector with the reasons of their rejection, and the warnings."""
    try:
        found = sources.extract(requirement, folder)
    except sources.Unavailable as error:
        pytest.skip(str(error))
    engine = requirement.partition("==")[0]
    done = subprocess.run([sys.executable, str(HERE / "accepted.py"), engine, str(found)],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=1800,
                          check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("requirement, rejected", VERSIONS)
def test_a_version_is_accepted_or_rejected_by_name(requirement: str, rejected: Dict[str, str],
                                                   folder: Path) -> None:
    answer = accepted(requirement, folder)
    reasons = {part: text for part, text in answer["parts"].items() if text is not None}
    assert set(reasons) == set(rejected), reasons
    for part, reason in rejected.items():
        assert reason in reasons[part]
    is_accepted = len(rejected) < len(answer["parts"])
    assert len(answer["warnings"]) == (is_accepted and requirement not in TESTED), answer
