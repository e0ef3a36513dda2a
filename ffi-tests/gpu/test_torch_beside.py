#!/usr/bin/env python3
"""Tests torch_beside.py with a fake torch and a fake tool: the printed rows, and that it never fails.
Both fakes define the measured times, so the expected rows are known."""

import os
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent

TOOL = """#!/bin/sh
[ "$1 $2" = "device --json" ] || exit 3
printf '%s\\n' '{"bar": "d2d_copy", "value": 1.0, "note": "20.0 GB/s"}' \\
 '{"bar": "prefill_sparse_30", "value": 2.5, "note": "65536 tokens, all keys at 400.0 TFLOP/s"}' \\
 '{"bar": "prefill_sparse_30_f16", "value": 1.5, "note": "65536 tokens, all keys at 440.0 TFLOP/s"}' \\
 '{"bar": "decode_chosen_16th", "value": 10.0, "note": "131072 tokens, all keys at 2000.0 GB/s"}' \\
 '{"bar": "decode_chosen_16th_f16", "value": null, "note": "no memory"}' \\
 '{"bar": "h2d_pinned", "value": 0.5, "baseline_value": 400.0, "note": ""}' \\
 '{"bar": "d2h_pinned", "value": 1.0, "baseline_value": 134.2, "note": ""}' \\
 '{"bar": "both_ways", "value": 0.8, "baseline_value": 500.0, "note": ""}'
"""

# Fake times: 88 ms for a prompt, 0.5 ms for a decode step, 1 ms for a copy, 2 ms for two at once.
TORCH = '''
import contextlib, sys, types
__version__ = "0.0-stub"
bfloat16, float16, uint8 = "bfloat16", "float16", "uint8"
_now = [0.0]
class Tensor:
    def __init__(self, shape, dtype): self.shape, self.dtype = shape, dtype
    def copy_(self, other, non_blocking=False): _now[0] += 1.0
def randn(*shape, device, dtype):
    assert device == "cuda"
    return Tensor(shape, dtype)
def empty(count, dtype, device=None, pin_memory=False):
    assert (device == "cuda") != pin_memory
    return Tensor((count,), dtype)
def empty_like(other): return Tensor(other.shape, other.dtype)
class _Event:
    def __init__(self, enable_timing): assert enable_timing
    def record(self): self.at = _now[0]
    def synchronize(self): pass
    def elapsed_time(self, other): return other.at - self.at
class _Stream:
    def wait_stream(self, other): assert other is not self
_stream = _Stream()
cuda = types.SimpleNamespace(is_available=lambda: AVAILABLE, Event=_Event, Stream=_Stream,
                             current_stream=lambda: _stream,
                             stream=lambda one: contextlib.nullcontext())
no_grad = contextlib.nullcontext
_flash = []
def _attend(q, k, v, is_causal):
    assert _flash and q.dtype == k.dtype == v.dtype and k.shape == v.shape
    if q.dtype == "float16": raise RuntimeError("no kernel | for\\nthis")
    assert is_causal == (q.shape[2] == k.shape[2])
    assert q.shape in ((1, 32, 65536, 128), (1, 8, 4, 128)), q.shape
    _now[0] += 88.0 if is_causal else 0.5
@contextlib.contextmanager
def _only(backend):
    _flash.append(backend)
    yield
    _flash.pop()
nn = types.ModuleType("torch.nn")
nn.functional = types.SimpleNamespace(scaled_dot_product_attention=_attend)
attention = types.ModuleType("torch.nn.attention")
attention.SDPBackend = types.SimpleNamespace(FLASH_ATTENTION=1)
attention.sdpa_kernel = _only
sys.modules["torch.nn"], sys.modules["torch.nn.attention"] = nn, attention
'''


def run(work, torch, tool):
    """Runs torch_beside.py; returns the printed rows without the table head, and the text."""
    modules = work / "modules"
    modules.mkdir(exist_ok=True)
    (modules / "torch.py").write_text(torch)
    path = work / "kvtier"
    path.write_text(tool)
    path.chmod(0o755)
    command = [sys.executable, str(HERE / "torch_beside.py"), str(path)]
    environment = {**os.environ, "PYTHONPATH": str(modules), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and not done.stderr, (done.returncode, done.stderr)
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()]
    assert all(line.startswith("| ") and line.endswith(" |") and line.count("|") == 5
               for line in done.stdout.splitlines()), done.stdout
    return rows[2:], done.stdout


def main():
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        good = TORCH.replace("AVAILABLE", "True")
        rows, text = run(work, good, TOOL)
        # 2 * 65536^2 * 32 * 128 multiply-adds at 400 TFLOP/s take 87.96 ms, 30 % of them 35.18.
        for want in [
            "| prefill 65536 bfloat16 | dense 87.96 ms, 30 % 35.18 ms | 88.00 ms "
            "| dense 1.00x, 30 % 2.50x |",
            "30 % beside our own dense | 2.50x | goal 2.0x | reached |",
            "| prefill float16 |  | SKIP: RuntimeError: no kernel / for this |",
            # 131072 keys and values of 8 heads are 536.9 MB: 0.268 ms at 2000 GB/s.
            "| decode 131072 bfloat16 | all 0.268 ms, a 16th 0.027 ms | 0.500 ms "
            "| all 1.86x, a 16th 18.63x |",
            "| decode float16 | SKIP: no decode_chosen_16th_f16 |",
            # 2 GiB in 1 ms.
            "beside a copy | 2000 GB/s read | 2147 GB/s read and written | 0.93x |",
            # A quarter of that in 1 ms, and two in 2.
            "| pinned memory to the device | 200.0 GB/s | 268.4 GB/s | 0.75x |",
            "| pinned memory both ways | 400.0 GB/s | 268.4 GB/s | 1.49x |",
        ]:
            assert want in text, (want, text)
        assert len(rows) == 10, text
        for torch, tool, word in [
            (TORCH.replace("AVAILABLE", "False"), TOOL, "torch sees no GPU"),
            ("raise OSError('libcudart.so.12: cannot open')", TOOL, "OSError: libcudart"),
            ("raise ImportError('no module')", TOOL, "ImportError"),
            (good, "#!/bin/sh\nexit 7\n", "CalledProcessError"),
            (good, "#!/bin/sh\necho nonsense\n", "JSONDecodeError"),
        ]:
            rows, text = run(work, torch, tool)
            assert len(rows) == 1 and rows[0][0] == "SKIP" and word in text, text
    print("torch_beside: passed")


main()
