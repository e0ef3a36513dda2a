"""The errors of connectors whose engine is missing or has an unsupported version."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Dict, Tuple

import pytest

#: None in `sys.modules` makes an import fail like a missing module.
PROGRAM = """
import sys
for name in {missing!r}:
    sys.modules[name] = None
try:
    {statement}
except Exception as error:
    print(type(error).__name__, getattr(error, "name", ""), error, sep="\\n")
else:
    print("imported")
"""

#: A statement, the missing module, and two parts of the message: the purpose and the package for
#: pip.
MISSING = [
    ("import kvtier_vllm.tier", "vllm", "vLLM 0.33", "'vllm==0.33.*'"),
    ("import kvtier_vllm.spec", "vllm", "vLLM 0.33", "'vllm==0.33.*'"),
    ("import kvtier_vllm.policy", "vllm", "vLLM 0.33", "'vllm==0.33.*'"),
    ("import kvtier_vllm.connector", "vllm", "vLLM 0.33", "'vllm==0.33.*'"),
    ("import kvtier_vllm.connector_meta", "vllm", "vLLM 0.33", "'vllm==0.33.*'"),
    ("import kvtier_vllm.spec_manager", "vllm", "vLLM 0.33", "'vllm==0.33.*'"),
    ("from kvtier_lmcache import KvtierBackend", "lmcache", "LMCache 0.5.6", "lmcache==0.5.6"),
    ("from kvtier_lmdeploy import KvtierConnector", "lmdeploy", "lmdeploy 0.18",
     "lmdeploy==0.18.0"),
    ("import kvtier_sglang", "sglang", "SGLang 0.5.23", "sglang==0.5.23"),
    ("import kvtier_sglang.linker", "sglang", "SGLang 0.5.23", "sglang==0.5.23"),
    ("import kvtier_mooncake", "numpy", "a Mooncake backend", "numpy"),
    ("import kvtier_transformers", "torch", "transformers 5.23", '"transformers>=5.22,<6"'),
    ("import kvtier.h2o", "numpy", "eviction", "numpy"),
]


def output(statement: str, *missing: str, path: str = "") -> str:
    program = PROGRAM.format(missing=missing, statement=statement)
    program = f"import sys; sys.path.insert(0, {path!r})\n{program}" if path else program
    return subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE,
                          timeout=600).stdout.decode()


@pytest.mark.parametrize("statement, module, purpose, install", MISSING)
def test_a_missing_module_is_named_with_its_install_command(statement: str, module: str,
                                                            purpose: str, install: str) -> None:
    kind, name, message = output(statement, module).split("\n", 2)
    assert (kind, name) == ("ModuleNotFoundError", module)
    assert purpose in message and f"{module} is not installed" in message and install in message


def test_packages_without_requirements_are_imported() -> None:
    engines = ("vllm", "lmcache", "lmdeploy", "sglang", "torch", "transformers")
    for statement in ("import kvtier, kvtier_vllm, kvtier_vllm.settings, kvtier_lmdeploy",
                      "import kvtier_lmcache, kvtier_mooncake"):
        assert output(statement, *engines) == "imported\n"
    assert "pip install lmdeploy==0.18.0" in output(
        "import kvtier_lmdeploy; kvtier_lmdeploy.activate()", *engines)


#: A statement, files that make an unsupported version, and the version that the message requires.
OTHERS: Dict[str, Tuple[Dict[str, str], str]] = {
    "import kvtier_vllm.connector": ({"vllm/__init__.py": "__version__ = '0.1.0'"}, "0.33"),
    "import vllm, kvtier_vllm.tier": ({"vllm/__init__.py": "__version__ = '0.1.0'"}, "0.33"),
    "from kvtier_lmcache import KvtierBackend": (
        {"lmcache/__init__.py": "", "torch.py": ""}, "0.5.6"),
    "import kvtier_sglang": (
        {"sglang/__init__.py": "", "sglang/version.py": "__version__ = '0.1.0'", "torch.py": ""},
        "0.5.23"),
    "from kvtier_lmdeploy import KvtierConnector": ({"lmdeploy/__init__.py": ""}, "0.18.0"),
    "import kvtier_lmdeploy; kvtier_lmdeploy.activate()": ({"lmdeploy/__init__.py": ""}, "0.18.0"),
    "import kvtier_transformers": (
        {"transformers.py": "__version__ = '0.1.0'", "torch.py": ""}, "5.22"),
}


@pytest.mark.parametrize("statement", OTHERS)
def test_an_unsupported_version_is_rejected(statement: str, tmp_path: Path) -> None:
    files, supported = OTHERS[statement]
    for engine in ("vllm", "lmcache", "lmdeploy", "sglang", "transformers"):
        files = {**files, f"{engine}-0.1.0.dist-info/METADATA":
                 f"Metadata-Version: 2.1\nName: {engine}\nVersion: 0.1.0\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    kind, name, message = output(statement, path=str(tmp_path)).split("\n", 2)
    assert (kind, name) == ("UnsupportedError", "KVT_E_UNSUPPORTED")
    assert "0.1.0" in message and supported in message
    assert "nstall" in message


def test_the_error_of_a_broken_module_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so: cannot open')")
    (tmp_path / "transformers.py").write_text("import torch")
    kind, _, message = output("import kvtier_transformers", path=str(tmp_path)).split("\n", 2)
    assert kind == "OSError" and "libcudart" in message
