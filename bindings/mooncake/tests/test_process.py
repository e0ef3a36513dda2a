"""Installation, several processes, and the end of processes."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, Dict

import kvtier
import kvtier_mooncake
import pytest
from registered import HERE

PATHS = os.pathsep.join([str(HERE.parent), str(Path(kvtier.__file__).parents[1])])

PRELUDE = """
import os, sys, signal, subprocess
import numpy as np
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
store = MooncakeDistributedStore()
code = store.setup("localhost", "P2PHANDSHAKE", 64 << 20, 0, "tcp", "", "m")
a = np.arange(8 * 4096, dtype=np.uint32).view(np.uint8).reshape(8, -1)
if code == 0:
    assert store.register_buffer(a.ctypes.data, a.nbytes) == 0
keys, at, sizes = [f"k{i}" for i in range(8)], [[one.ctypes.data] for one in a], [[a.shape[1]]] * 8
"""


def run(text: str, *, shim: bool = True, **env: str) -> "subprocess.CompletedProcess[str]":
    paths = os.pathsep.join([str(HERE.parent / "kvtier_mooncake" / "shim"), PATHS])
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, timeout=600,
        env={**os.environ, "PYTHONPATH": paths if shim else PATHS, **env})


def test_install_replaces_the_module_and_uninstall_removes_it() -> None:
    kvtier_mooncake.install(spec="store(host=64MiB)")
    module: Any = importlib.import_module("mooncake.store")
    assert module.MooncakeDistributedStore is kvtier_mooncake.MooncakeDistributedStore
    kvtier_mooncake.install()  # installing twice is allowed
    kvtier_mooncake.uninstall()
    assert "mooncake.store" not in sys.modules


def test_install_is_rejected_after_the_real_import(monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    monkeypatch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", types.ModuleType("mooncake.store"))
    with pytest.raises(kvtier.StateError, match="imported already"):
        kvtier_mooncake.install()
    kvtier_mooncake.install(force=True)
    assert hasattr(sys.modules["mooncake.store"], "ReplicateConfig")


def test_the_shim_folder_works_on_pythonpath() -> None:
    done = run(PRELUDE + "print(code, store.put('k', b'v'), store.get('k'))")
    assert done.stdout.split() == ["0", "0", "b'v'"], done.stderr


def test_python_m_runs_programs_and_their_children(tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(textwrap.dedent("""
        import subprocess, sys
        from mooncake.store import MooncakeDistributedStore as Store
        store = Store()
        print(sys.argv[1:], store.setup("h", "", 0), store.kvtier_store.stats()["host_limit_bytes"])
        if "child" not in sys.argv:
            sys.exit(subprocess.run([sys.executable, __file__, "child"]).returncode)
    """))
    for program in ([str(script)], ["-m", "engine"]):
        done = subprocess.run(
            [sys.executable, "-m", "kvtier_mooncake", "--spec", "store(host=33MiB)", *program,
             "--spec", "theirs"], capture_output=True, text=True, timeout=600,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([PATHS, str(tmp_path)])})
        assert sorted(done.stdout.splitlines()) == [
            f"['--spec', 'theirs'] 0 {33 << 20}", f"['child'] 0 {33 << 20}"], done.stderr
    done = subprocess.run([sys.executable, "-m", "kvtier_mooncake"], capture_output=True, text=True,
                          timeout=600, env={**os.environ, "PYTHONPATH": PATHS})
    assert done.returncode == 2 and "nothing to run" in done.stderr


def disk(path: Path, name: str = "d") -> Dict[str, str]:
    return {"KVTIER_MOONCAKE_SPEC":
            f'store(host=64MiB, disk=disk(path="{path}/{name}", bytes=256MiB))',
            "KVTIER_MOONCAKE_CONFIG": '{"level": "durable"}'}


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "store.close()", "pass"])
def test_durable_objects_survive_the_process(end: str, tmp_path: Path) -> None:
    first = run(PRELUDE + f"print(store.batch_put_from_multi_buffers(keys, at, sizes))\n"
                          f"store.put('v', b'value')\nsys.stdout.flush()\n{end}", **disk(tmp_path))
    assert first.returncode == (-signal.SIGKILL if "kill" in end else 0), first.stderr
    assert first.stdout.split("]")[0] == "[0, 0, 0, 0, 0, 0, 0, 0", first.stderr
    second = run(PRELUDE + """
        print(store.batch_is_exist(keys + ["v", "w"]))
        want = a.copy(); a[:] = 0
        got = store.batch_get_into_multi_buffers(keys, at, sizes)
        print(got == [a.shape[1]] * 8, (a == want).all(), store.get("v"))
    """.replace("\n        ", "\n"), **disk(tmp_path))
    assert second.stdout.splitlines() == ["[1, 1, 1, 1, 1, 1, 1, 1, 1, 0]", "True True b'value'"], \
        second.stderr


def test_a_directory_belongs_to_one_process(tmp_path: Path) -> None:
    again = PRELUDE + """
        if "again" not in os.environ:
            print(code)
            sys.stdout.flush()
            subprocess.run([sys.executable, "-c", os.environ["TEXT"]],
                           env={**os.environ, "again": "1", "KVTIER_RANK": "1"})
        else:
            print(code)
    """.replace("\n        ", "\n")
    done = run(again, TEXT=again, **disk(tmp_path))
    assert done.stdout.split() == ["0", "-1010"]
    assert "{rank} or {slot}" in done.stderr
    assert run(again, TEXT=again, **disk(tmp_path, "s{slot}")).stdout.split() == ["0", "0"]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["d", "s0", "s1"]
    env = disk(tmp_path, "r{rank}")
    assert run(again, TEXT=again, KVTIER_RANK="0", **env).stdout.split() == ["0", "0"]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["d", "r0", "r1", "s0", "s1"]
    done = run(PRELUDE + "print(code)", **env)
    assert done.stdout.split() == ["-600"] and "KVTIER_RANK" in done.stderr


def test_calls_in_a_forked_child_fail(tmp_path: Path) -> None:
    done = run(PRELUDE + """
        store.put("k", b"v")
        child = os.fork()
        if child == 0:
            os._exit(0 if store.batch_is_exist(["k"]) == [-900] else 1)
        print(os.waitpid(child, 0)[1], store.get("k"))
    """.replace("\n        ", "\n"))
    assert done.stdout.split() == ["0", "b'v'"], done.stderr


def test_the_interpreter_exits_during_transfers() -> None:
    """Threads that still transfer at exit cause neither a crash nor a hang."""
    done = run(PRELUDE + """
        import threading
        turns = threading.Semaphore(0)
        def work(of):
            turn = 0
            while True:
                turn += 1
                store.batch_put_from_multi_buffers([f"{of}/{turn}/{k}" for k in keys], at, sizes)
                turns.release()
        for of in range(4):
            threading.Thread(target=work, args=(of,), daemon=True).start()
        for _ in range(40):  # until all threads transfer
            assert turns.acquire(timeout=600)
        print("end")
    """.replace("\n        ", "\n"))
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr[-2000:]
