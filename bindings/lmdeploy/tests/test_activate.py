"""Activation: lmdeploy's factory builds our connector in this process and its children."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).resolve().parent

PRELUDE = """
import sys
import kvtier_lmdeploy
import stubs
NAMES = ("build_kv_connector", "prepare_kv_connector_config")
def all_ours():
    from lmdeploy.pytorch.engine import engine
    from lmdeploy.pytorch.engine.model_agent import agent
    from lmdeploy.pytorch.kv_connector import factory
    import lmdeploy.pytorch.kv_connector as package
    return {getattr(module, name).__module__ for name in NAMES
            for module in (engine, agent, factory, package)}
"""


def run(text: str, **env: str) -> str:
    path = os.pathsep.join([str(HERE / "stubs"), *sys.path])
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(text)], capture_output=True,
                          text=True, timeout=600, env={**os.environ, "PYTHONPATH": path, **env})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_activate_patches_modules_imported_before_and_after() -> None:
    ours, theirs = "{'kvtier_lmdeploy._activate'}", "{'lmdeploy.pytorch.kv_connector.factory'}"
    assert run(PRELUDE + "kvtier_lmdeploy.activate(); print(all_ours())") == ours
    assert run(PRELUDE + "all_ours(); kvtier_lmdeploy.activate(); print(all_ours())") == ours
    assert run(PRELUDE + """
kvtier_lmdeploy.activate(); kvtier_lmdeploy.activate(); all_ours()
kvtier_lmdeploy.deactivate(); kvtier_lmdeploy.deactivate(); print(all_ours())""") == theirs
    assert run(PRELUDE + "print(all_ours(), 'torch' in sys.modules)") == f"{theirs} False"


def test_other_connectors_use_the_original_factory() -> None:
    assert run(PRELUDE + """
kvtier_lmdeploy.activate()
from lmdeploy.pytorch.engine import engine
cache = stubs.Cache(stubs.Transfer("MooncakeStoreConnector"))
engine.prepare_kv_connector_config(cache, model_path="m")
print(cache.prepared_by, engine.build_kv_connector("role", cache, tp_size=2))
try:
    engine.build_kv_connector("role", stubs.Cache(stubs.Transfer("Nobody")))
except ValueError as error:
    print(error)
""").splitlines() == ["lmdeploy Mooncake's", "Unsupported KV connector: 'Nobody'"]


def test_python_m_runs_scripts_and_modules_activated(tmp_path: Path) -> None:
    script = tmp_path / "serve.py"
    script.write_text("import sys, kvtier_lmdeploy\n"
                      "print(sys.argv[1:], kvtier_lmdeploy.activated(), __name__)\n")
    path = os.pathsep.join([str(tmp_path), str(HERE / "stubs"), *sys.path])
    for program in ([str(script)], ["-m", "serve"]):
        done = subprocess.run(
            [sys.executable, "-m", "kvtier_lmdeploy", *program, "--model", "x"], text=True,
            capture_output=True, timeout=600,
            env={**os.environ, "PYTHONPATH": path})
        assert done.stdout.strip() == "['--model', 'x'] True __main__", done.stderr
    done = subprocess.run([sys.executable, "-m", "kvtier_lmdeploy"], text=True, timeout=600,
                          capture_output=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 1 and "usage" in done.stderr


def test_spawned_processes_are_activated(tmp_path: Path) -> None:
    """A spawned process activates on import, and runs another sitecustomize on the path too."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import sys; sys.theirs = True\n")
    script = tmp_path / "serve.py"
    script.write_text(textwrap.dedent("""
        import multiprocessing, sys
        def engine():
            loaded = "kvtier" in sys.modules
            from lmdeploy.pytorch.engine import engine
            print(loaded, engine.build_kv_connector.__module__, sys.theirs, flush=True)
        if __name__ == "__main__":
            process = multiprocessing.get_context("spawn").Process(target=engine)
            process.start()
            process.join()
    """))
    path = os.pathsep.join([str(other), str(HERE / "stubs"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "kvtier_lmdeploy", str(script)], text=True, capture_output=True,
        timeout=600, env={**os.environ, "PYTHONPATH": path})
    assert done.stdout.strip() == "False kvtier_lmdeploy._activate True", done.stderr


def test_mp_backend_is_rejected() -> None:
    assert run(PRELUDE + """
import kvtier
kvtier_lmdeploy.activate()
from lmdeploy.pytorch.engine import engine
cache = stubs.Cache(stubs.Transfer(kv_connector_extra_config={"host_bytes": 1 << 26}))
try:
    engine.prepare_kv_connector_config(cache, model_path="m", distributed_executor_backend="mp")
except kvtier.UnsupportedError as error:
    print("ray" in str(error))
""") == "True"
