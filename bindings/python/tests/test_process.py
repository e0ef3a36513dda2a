"""Forked children, interpreter exit, the wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path
from typing import Dict, Optional

import build_wheel
import kvtier
import pytest

LIBRARY = build_wheel.PACKAGE.parent


def run(code: str, env: Optional[Dict[str, str]] = None) -> "subprocess.CompletedProcess[str]":
    """Runs a program; defects at exit change its exit status or its output."""
    command = [sys.executable, "-X", "dev", "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600,
                          env={**os.environ, **(env or {})}, cwd="/")


def test_a_forked_child_is_rejected_and_can_exit() -> None:
    done = run("""
        import gc, os, sys
        import kvtier
        runtime = kvtier.Runtime(workers=2)
        queue, buffer = runtime.queue(), runtime.buffer(4096)
        budget = runtime.budget()
        account = budget.account("a")
        op = runtime.submit(kvtier.Work.checksum(buffer), queue=queue)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            uses = [runtime.stats, runtime.now_ns, lambda: runtime.buffer(4096), runtime.close,
                    buffer.view, lambda: len(buffer), buffer.info, buffer.close, queue.poll,
                    queue.close, queue.fileno, op.info, op.wait, op.cancel, op.close,
                    lambda: runtime.submit(kvtier.Work.checksum(buffer, 1)), kvtier.Runtime,
                    budget.report, budget.close, account.close,
                    lambda: account.reserve(1, 1), lambda: runtime.wrap(bytearray(8))]
            for i, use in enumerate(uses):
                try:
                    use()
                except kvtier.ForkedError as error:
                    assert error.name == "KVT_E_FORKED"
                else:
                    print("not rejected:", i, flush=True)
            assert kvtier.checksum(b"works") and kvtier.spec_check("lru")
            del runtime, queue, buffer, op, budget, account, uses, use
            gc.collect()
            sys.exit(7)  # the atexit handlers run
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        op.result(600)
        queue.close()
        runtime.submit(kvtier.Work.checksum(buffer)).result(600)
        buffer.close()
        print("parent continues")
    """)
    assert (done.returncode, done.stdout.strip()) == (0, "parent continues"), done


def test_a_child_of_a_process_without_runtimes_may_use_the_library() -> None:
    done = run("""
        import os, kvtier
        pid = os.fork()
        with kvtier.Runtime(workers=1) as runtime, runtime.buffer(4096) as buffer:
            runtime.submit(kvtier.Work.checksum(buffer)).result(600)
        if pid:
            assert os.waitpid(pid, 0)[1] == 0
    """)
    assert done.returncode == 0 and not done.stderr, done


@pytest.mark.parametrize("ending", ["pass", "sys.exit(0)", "raise SystemExit"])
def test_the_interpreter_exits_cleanly_with_open_objects(ending: str) -> None:
    done = run(f"""
        import logging, sys, threading, kvtier
        kvtier.log_to("kvtier", logging.DEBUG)
        runtime = kvtier.Runtime(workers=2, on_thread=lambda role, index: None)
        seen = []
        queue = runtime.queue(callback=seen.extend)
        budget = runtime.budget()
        account = budget.account("a", reclaim=lambda *args: 0)
        buffer = runtime.buffer(1 << 20, account=account)
        wrapped = runtime.wrap(bytearray(1 << 20))
        view = buffer.view()
        ops = [runtime.submit(kvtier.Work.copy(wrapped, buffer), queue=queue) for _ in range(500)]
        {ending}
    """)
    assert done.returncode == 0 and not done.stderr, done


def test_the_interpreter_exits_cleanly_during_callbacks() -> None:
    for _ in range(5):
        done = run("""
            import kvtier
            runtime = kvtier.Runtime(workers=2)
            seen = []
            queue = runtime.queue(callback=seen.extend)
            buffer = runtime.buffer(4096)
            for _ in range(3000):
                runtime.post(kvtier.Work.checksum(buffer), queue)
        """)
        assert done.returncode == 0 and not done.stderr, done


def test_a_missing_library_is_an_import_error(tmp_path: Path) -> None:
    done = run("import kvtier", {"KVTIER_LIBRARY": str(tmp_path / "none.so")})
    assert done.returncode == 1 and "KVTIER_LIBRARY" in done.stderr
    assert "ImportError" in done.stderr


def test_another_library_is_an_abi_error() -> None:
    done = run("import kvtier", {"KVTIER_LIBRARY": "libm.so.6"})
    assert done.returncode == 1 and "AbiError" in done.stderr, done


def test_ctrl_c_interrupts_a_wait() -> None:
    done = run("""
        import os, signal, threading, time, kvtier
        # A shell starts background jobs with this signal ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        runtime = kvtier.Runtime(workers=1)
        budget = runtime.budget(host_bytes=4096)
        account = budget.account("a")
        account.reserve(kvtier.TIER_HOST, 4096)
        op = account.reserve_later(kvtier.TIER_HOST, 4096)
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()  # inside the try: on a slow machine it may fire at once
            op.wait()
        except KeyboardInterrupt:
            print("interrupted")
    """)
    assert done.stdout.strip() == "interrupted" and done.returncode == 0, done


def shared_library(tmp_path: Path) -> Path:
    """Creates a prebuilt directory from the loaded library."""
    from kvtier import _lib

    prebuilt = tmp_path / "prebuilt"
    (prebuilt / "lib").mkdir(parents=True)
    shutil.copy(_lib.lib._name, prebuilt / "lib" / "libkvtier.so")
    return prebuilt


def engine(root: Path) -> None:
    """Creates the folder of a connector."""
    package = root / "someengine" / "kvtier_someengine"
    (package / "part").mkdir(parents=True)
    (package / "tests").mkdir()
    for name in ("__init__.py", "part/__init__.py", "part/deep.py", "tests/test_it.py", "x.md",
                 "py.typed"):
        (package / name).write_text("")


def test_the_wheel_contains_the_connectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine(tmp_path)
    monkeypatch.setattr(build_wheel, "HERE", tmp_path / "python")
    found = {name for package in build_wheel.packages()
             for name, _ in build_wheel.sources(package)}
    connectors = {name for name in found if name.startswith("kvtier_")}
    assert connectors == {f"kvtier_someengine/{name}" for name in (
        "__init__.py", "part/__init__.py", "part/deep.py", "py.typed")}
    assert "kvtier/_abi.py" in found and not any("__pycache__" in name for name in found)


def test_an_unpacked_archive_ignores_folders_beside_it(tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / build_wheel.build_sdist(str(tmp_path))
    packed_names = {path.name for path in build_wheel.packages()}
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path)
    engine(tmp_path)  # an unrelated folder beside the archive
    monkeypatch.setattr(build_wheel, "HERE", tmp_path / archive.name[: -len(".tar.gz")])
    assert {path.name for path in build_wheel.packages()} == packed_names
    assert build_wheel.licence()


def test_extras_name_the_versions_that_connectors_support() -> None:
    found = {path.name[len("kvtier_"):]: path for path in build_wheel.packages()[1:]}
    assert set(found) == set(build_wheel.EXTRAS)

    def text(name: str, file: str) -> str:
        return (found[name] / file).read_text(encoding="utf-8")

    for name, window, extra in [
            ("lmdeploy", 'tested=("0.17", "0.18"), oldest="0.17"', "lmdeploy>=0.17,<0.19"),
            ("sglang", 'tested=("0.5.23",), oldest="0.5.22"', "sglang==0.5.23"),
            ("vllm", 'tested=("0.31", "0.32", "0.33"), oldest="0.31"', "vllm>=0.31,<0.34")]:
        assert window in text(name, "_engine.py")
        assert build_wheel.EXTRAS[name] == [extra]
    assert build_wheel.EXTRAS["lmcache"] == ["lmcache==0.5.6"]
    assert 'TESTED = "0.5.6"' in text("lmcache", "_config.py")
    for needed in build_wheel.EXTRAS["transformers"]:
        assert needed in text("transformers", "_engine.py")
    assert 'extra == "vllm"' in build_wheel.metadata()


def test_the_tag_of_the_wheel_matches_auditwheel(tmp_path: Path) -> None:
    pytest.importorskip("auditwheel", reason="needs auditwheel")
    wheel = build_wheel.write_wheel(
        tmp_path, (shared_library(tmp_path) / "lib" / "libkvtier.so").read_bytes())
    shown = subprocess.run([sys.executable, "-m", "auditwheel", "show", str(wheel)],
                           capture_output=True, text=True, check=True).stdout
    tag = wheel.name.rpartition("-")[2][: -len(".whl")]
    assert f'"{tag}"' in " ".join(shown.split()), shown


def test_the_wheel_is_reproducible_and_complete(tmp_path: Path) -> None:
    prebuilt = shared_library(tmp_path)
    data = build_wheel.library(str(prebuilt))
    first = build_wheel.write_wheel(tmp_path / "a", data)
    second = build_wheel.write_wheel(tmp_path / "b", data)
    assert first.read_bytes() == second.read_bytes() and first.name == second.name
    assert first.name.startswith(f"kvtier-{kvtier.__version__}-py3-none-manylinux_2_")
    with zipfile.ZipFile(first) as archive:
        names = archive.namelist()
        record = archive.read(names[-1]).decode().splitlines()
    assert names[-1].endswith("RECORD") and len(record) == len(names)
    assert {"kvtier/py.typed", "kvtier/_abi.py", "kvtier/lib/libkvtier.so"} <= set(names)


def test_the_tag_matches_readelf(tmp_path: Path) -> None:
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("no readelf")
    path = shared_library(tmp_path) / "lib" / "libkvtier.so"
    shown = subprocess.run([readelf, "-V", "-W", str(path)], capture_output=True, text=True,
                           check=True).stdout
    needed = [int(word.split(".")[1]) for word in shown.split() if word.startswith("GLIBC_2.")]
    tag = build_wheel.platform_tag(path.read_bytes())
    assert f"_2_{max([17, *needed])}_" in tag


def test_pip_builds_and_installs_from_the_directory(tmp_path: Path) -> None:
    prebuilt = shared_library(tmp_path)
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    env = {**os.environ, "KVTIER_PREBUILT_DIR": str(prebuilt), "PIP_DISABLE_PIP_VERSION_CHECK": "1",
           "PYTHONDONTWRITEBYTECODE": "1"}
    for name in ("KVTIER_LIBRARY", "PYTHONPATH"):
        env.pop(name, None)
    python = str(venv / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--no-index", "-q", str(build_wheel.HERE)],
                   check=True, env=env)
    smoke = textwrap.dedent("""
        import importlib.util, kvtier
        assert importlib.util.find_spec("numpy") is None, "the venv must be empty"
        with kvtier.Runtime(workers=1) as runtime:
            with kvtier.Store(runtime, "store(host=1MiB)") as store:
                group, identity = kvtier.Group([0], k_bytes=16), kvtier.Identity()
                with store.namespace(identity, chunk_tokens=4, groups=[group]) as namespace:
                    with namespace.session() as session:
                        session.append([1, 2, 3, 4])
                        data, back = bytearray(range(64)), bytearray(64)
                        session.put([kvtier.View(data, 16)]).result(600)
                        session.get([kvtier.View(back, 16)]).result(600)
        print(data == back, kvtier.abi.__file__)
    """)
    output = subprocess.run([python, "-c", smoke], capture_output=True, text=True, env=env,
                            check=True, cwd="/").stdout.split()
    assert output[0] == "True" and output[1].startswith(str(venv))
    subprocess.run([python, "-m", "pip", "check"], check=True, env=env)
    subprocess.run([python, "-m", "pip", "uninstall", "-y", "-q", "kvtier"], check=True, env=env)
