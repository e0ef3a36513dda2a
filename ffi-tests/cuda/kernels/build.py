#!/usr/bin/env python3
"""Compiles the CUDA kernels of src/device/cuda/kernels:  build.py [--check] WORKDIR

Writes to the folder `built` beside them: PTX for compute capability 8.0, which drivers compile for
all later ones; code for 9.0; and the registers and memory of each kernel. A kernel that spills or
has a stack is an error, unless SPILLS gives a reason. With --check nothing is written, and the
committed files must equal the output.

The compiler is NVRTC. pip installs it and the compressor into WORKDIR. Drivers from CUDA 12.0 on
load the output of this version.
"""

import ctypes
import pathlib
import re
import subprocess
import sys

PACKAGE = "nvidia-cuda-nvrtc-cu12==12.0.140"
PACKER = "zstandard==0.25.0"
HERE = pathlib.Path(__file__).resolve().parents[3] / "src/device/cuda/kernels"
BUILT = HERE / "built"
OPTIONS = ["--std=c++17", "--fmad=true", "--ptxas-options=-v"]
# Kernels that may spill or have a stack, with the reason.
SPILLS = {}


class Nvrtc:
    """The functions of the library NVRTC."""

    def __init__(self, work):
        place = work / PACKAGE.replace("==", "-")
        if not place.exists():
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary=:all:"]
            quiet = ["--disable-pip-version-check", "--root-user-action=ignore"]
            target = ["--target", str(place), PACKAGE, PACKER]
            if subprocess.run([*pip, *quiet, *target]).returncode != 0:
                print(f"SKIP: pip cannot install {PACKAGE} and {PACKER}")
                sys.exit(77)
        sys.path.insert(0, str(place))
        [path] = place.glob("nvidia/cuda_nvrtc/lib/libnvrtc.so.12")
        self.library = ctypes.CDLL(str(path))

    def call(self, name, *args):
        status = getattr(self.library, name)(*args)
        if status != 0:
            self.library.nvrtcGetErrorString.restype = ctypes.c_char_p
            message = self.library.nvrtcGetErrorString(status).decode()
            raise RuntimeError(f"{name}: {message}")

    def text(self, what, program):
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self.call(f"nvrtcGet{what}", program, text)
        return text.raw

    def compile(self, source, arch):
        """The code of a source for an architecture, and the compiler's log."""
        headers = sorted(HERE.glob("*.h"))
        names = (ctypes.c_char_p * len(headers))(*[path.name.encode() for path in headers])
        texts = (ctypes.c_char_p * len(headers))(*[path.read_bytes() for path in headers])
        program = ctypes.c_void_p()
        self.call("nvrtcCreateProgram", ctypes.byref(program), source.read_bytes(),
                  source.name.encode(), len(headers), texts, names)
        options = [f"--gpu-architecture={arch}", *OPTIONS]
        array = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        try:
            self.call("nvrtcCompileProgram", program, len(options), array)
        except RuntimeError as error:
            log = self.text("ProgramLog", program).rstrip(b"\0").decode()
            raise SystemExit(f"{source.name} for {arch}: {error}\n{log}") from None
        log = self.text("ProgramLog", program).rstrip(b"\0").decode()
        code = self.text("CUBIN" if arch.startswith("sm") else "PTX", program)
        self.call("nvrtcDestroyProgram", ctypes.byref(program))
        return code, log


def plain(ptx):
    """PTX without comments and without the compiler's unused tables."""
    lines = re.sub(r"//.*", "", ptx.rstrip(b"\0").decode()).splitlines()
    kept = [line.rstrip() for line in lines if not re.search(r"\dnv6target\d", line)]
    return "\n".join(line for line in kept if line) + "\n"


def resources(log, arch):
    """Name, architecture, registers, shared memory, stack and spills of each kernel in a log."""
    found = re.findall(
        r"Compiling entry function '(\w+)'.*?\n"
        r".*?\n.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
        r".*?Used (\d+) registers(?:, (\d+) bytes smem)?", log)
    for name, stack, stores, loads, registers, shared in sorted(found):
        yield name, arch, int(registers), int(shared or 0), int(stack), int(stores) + int(loads)


def build(nvrtc):
    """Contents of the output files, by name."""
    import zstandard  # installed with the compiler

    def pack(code):
        return zstandard.ZstdCompressor(level=19).compress(code)

    files, table = {}, []
    for source in sorted(HERE.glob("*.cu")):
        for arch in ["sm_80", "sm_90"]:
            code, log = nvrtc.compile(source, arch)
            rows = list(resources(log, arch))
            kernels = re.findall(r"^extern \"C\" __global__", source.read_text(), re.M)
            if len(rows) != len(kernels):
                raise SystemExit(f"{source.name}: the log names {len(rows)} of {len(kernels)} "
                                 f"kernels:\n{log}")
            table += rows
            if arch == "sm_90":
                files[source.stem + ".cubin.zst"] = pack(code)
        ptx = plain(nvrtc.compile(source, "compute_80")[0]).encode()
        files[source.stem + ".ptx.zst"] = pack(ptx)
    bad = [row for row in table if (row[4] or row[5]) and row[0] not in SPILLS]
    if bad:
        raise SystemExit(f"kernels with spills or a stack, without a reason in SPILLS: {bad}")
    head = ("kernel", "for", "registers", "shared", "stack", "spilled")
    lines = [f"{n:<24} {a:<6} {r:>9} {s:>7} {l:>6} {p:>8}" for n, a, r, s, l, p in [head, *table]]
    files["resources.txt"] = ("\n".join(lines) + "\n").encode()
    return files


def main():
    arguments = sys.argv[1:]
    is_check = "--check" in arguments
    arguments = [argument for argument in arguments if argument != "--check"]
    if len(arguments) != 1:
        raise SystemExit(__doc__)
    work = pathlib.Path(arguments[0])
    work.mkdir(parents=True, exist_ok=True)
    files = build(Nvrtc(work.resolve()))
    BUILT.mkdir(exist_ok=True)
    committed = {path.name: path.read_bytes() for path in BUILT.iterdir()}
    if is_check:
        differ = sorted(name for name in files.keys() | committed.keys()
                        if files.get(name) != committed.get(name))
        if differ:
            raise SystemExit(f"not the output of these sources and this compiler: {differ}; "
                             "run build.py without --check")
    else:
        for name in committed.keys() - files.keys():
            (BUILT / name).unlink()
        for name, content in files.items():
            (BUILT / name).write_bytes(content)
    print(files["resources.txt"].decode(), end="")
    print(f"{len(files)} files, {sum(map(len, files.values()))} bytes")


main()
