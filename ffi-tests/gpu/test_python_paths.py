#!/usr/bin/env python3
"""Tests python_paths.py without a GPU:  test_python_paths.py WORK

Its parts run with a fake driver (ffi-tests/cuda) and a fake torch (stand_in), and must pass. If events
are signaled too early they must fail, and without torch they must be skipped. The interpreter has the
package `kvtier` and numpy. Compiled libraries go to WORK.
"""

import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CUDA, KERNELS = HERE.parent / "cuda", ROOT / "src" / "device" / "cuda" / "kernels"


def compiled(to, sources, beside, command):
    """Builds a library unless it is newer than its sources."""
    newest = max(path.stat().st_mtime for path in [*sources, *beside])
    if not to.exists() or to.stat().st_mtime < newest:
        subprocess.run([*command, "-shared", "-fPIC", "-o", str(to), *map(str, sources), "-ldl",
                        "-lpthread"], check=True)


def build(work):
    """Builds the fake driver under the name libcuda.so.1, and the kernels that it runs."""
    work.mkdir(parents=True, exist_ok=True)
    compiled(work / "libcuda.so.1", [CUDA / "fake.c"], CUDA.glob("*.h"),
             [os.environ.get("CC", "cc"), "-std=c11", "-O1"])
    kernels = CUDA / "kernels"
    compiled(work / "kernels.so",
             [*sorted(KERNELS.glob("*.cu")), *sorted(kernels.glob("*.cpp")), kernels / "probe.cu"],
             [*KERNELS.glob("*.h"), *kernels.glob("*.h")],
             [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-DEMULATED",
              "-ffp-contract=off", "-Wno-unknown-pragmas", f"-I{KERNELS}", f"-I{kernels}",
              "-x", "c++"])


def rows(work, *arguments, status=0, torch=HERE / "stand_in", **more):
    """Runs python_paths.py; returns the outcome and note of each part."""
    environment = {**os.environ, "PYTHONPATH": str(torch), "LD_LIBRARY_PATH": str(work),
                   "KVTIER_FAKE_KERNELS": str(work / "kernels.so"), **more}
    done = subprocess.run([sys.executable, str(HERE / "python_paths.py"), *arguments],
                          env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode != status:
        sys.exit(f"python_paths.py returned {done.returncode}, expected {status}:\n"
                 f"{done.stdout}{done.stderr}")
    lines = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()]
    assert all(len(line) == 3 for line in lines), done.stdout
    return {name.partition(" ")[2]: (outcome, note) for name, outcome, note in lines}


def main():
    work = pathlib.Path(sys.argv[1]).resolve()
    build(work)
    parts = ("blocks", "session", "kernels", "vllm", "lmdeploy", "sglang", "mooncake", "bandwidth")
    for device in ("cuda", "cpu"):
        found = rows(work, "--quick", "--device", device, *parts)
        assert list(found) == list(parts), found
        assert all(outcome == "passed" for outcome, _ in found.values()), found
        assert ("events" in found["blocks"][1]) == (device == "cuda"), found
        assert "torch's copy" in found["bandwidth"][1], found
    # Parts fail if transfers do not wait for events.
    found = rows(work, "blocks", "session", status=2, KVTIER_EARLY="1")
    assert all(outcome.startswith("**failed") for outcome, _ in found.values()), found
    assert "did not wait for its stream's event" in found["blocks"][1], found
    none = work / "broken"
    none.mkdir(exist_ok=True)
    (none / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open')\n")
    found = rows(work, torch=none)
    assert len(found) == len(parts) + 1, found
    assert all(one == "skipped" for one, _ in found.values()), found
    assert "libcudart" in found["blocks"][1], found
    print("python_paths: passed")


main()
