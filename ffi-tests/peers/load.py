#!/usr/bin/env python3
"""kvtier's streamer beside other loaders: a whole safetensors file into memory, where it stays.

    load.py DIR [--quick] [--file MODEL]     DIR is on the disk to be measured

Without --file a file of 40 layers of 52 MiB (--quick: 16 MiB) is made in DIR and removed. A round
ends when numpy arrays (Run:ai: addresses) of all tensors are at hand; their memory is freed before
the next. All sides take turns in one process, after the page cache has forgotten the file, and
after as much memory as the file takes was touched and freed: virtual machines provide memory at
first touch, which is slower than disks. The baseline is eight threads that read 1 MiB at a time with
O_DIRECT into untouched memory of huge pages. Prints JSON (sides.py).

Run:ai's package imports torch. Here its library is called through the package's own bindings, as
`FileStreamer` does with one buffer for all tensors, so that torch may be absent.
"""

import argparse
import importlib
import importlib.util
import json
import mmap
import os
import pathlib
import sys
import threading
import types

import kvtier
import numpy as np
import safetensors
from sides import address, contest, kvtier_versions, timed, version

MIB, LAYERS, THREADS = 1 << 20, 40, 8
WARM, ROUNDS = 1, 7


def make(path, layer_bytes):
    """A safetensors file of layers with one tensor each."""
    tensors = {f"model.layers.{n}.mlp.up_proj.weight":
               {"dtype": "F16", "shape": [layer_bytes // 2],
                "data_offsets": [n * layer_bytes, (n + 1) * layer_bytes]} for n in range(LAYERS)}
    head = json.dumps(tensors).encode()
    head += b" " * (-(len(head) + 8) % 4096)
    piece = bytearray(os.urandom(MIB))
    with open(path, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for number in range(LAYERS * layer_bytes // MIB):
            piece[:8] = number.to_bytes(8, "little")
            file.write(piece)
        os.fsync(file.fileno())


def tensors(path):
    """Offset in the file and length of each tensor."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        head = json.loads(file.read(length))
    spans = [one["data_offsets"] for name, one in head.items() if name != "__metadata__"]
    return sorted((8 + length + start, end - start) for start, end in spans if end > start)


def untouched(nbytes):
    area = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    return area


class Side:
    """A loader: `read` returns the address of each tensor and what keeps it."""

    versions = {}

    def __init__(self, path):
        self.path, self.spans = str(path), tensors(path)
        self.bytes = os.path.getsize(path)

    def load(self, _):
        with open(self.path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        area = untouched(self.bytes)
        area.madvise(23)  # MADV_POPULATE_WRITE
        area.close()
        kept = []
        took = timed(lambda: kept.append(self.read()))
        starts, keeper = kept.pop()
        self.verify(starts)
        self.free(keeper)
        return took

    def verify(self, starts):
        """Compares the first and last bytes of all tensors with the file."""
        import ctypes
        with open(self.path, "rb", buffering=0) as file:
            for (offset, length), start in zip(self.spans, starts, strict=True):
                for at in (0, max(0, length - 64)):
                    count = min(64, length - at)
                    if ctypes.string_at(start + at, count) != os.pread(file.fileno(), count, offset + at):
                        raise RuntimeError(f"{self.name} returned wrong bytes")

    def free(self, keeper):
        pass


class Raw(Side):
    def read(self):
        area = untouched(-(-self.bytes // MIB) * MIB)
        whole = memoryview(area)
        file = os.open(self.path, os.O_RDONLY | os.O_DIRECT)

        def part(first):
            for at in range(first * MIB, self.bytes, THREADS * MIB):
                os.preadv(file, [whole[at:at + MIB]], at)

        threads = [threading.Thread(target=part, args=(n,)) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os.close(file)
        base = address(area)
        return [base + offset for offset, _ in self.spans], area


class Kvtier(Side):
    versions = kvtier_versions(kvtier)

    def __init__(self, path):
        super().__init__(path)
        self.runtime = kvtier.Runtime()
        self.terms = kvtier.StreamTerms(host_ceiling_bytes=self.bytes + (1 << 30))

    def read(self):
        model = kvtier.Model(self.path)
        streamer = kvtier.Streamer(self.runtime, model, self.terms)
        streamer.wait_resident()
        leases, arrays = [], []
        for unit in model.units:
            lease = streamer.acquire(unit.number)
            leases.append(lease)
            arrays += [(part.tensor, lease.array(part.tensor)) for part in model.parts(unit.number)]
        rows = model.tensors
        arrays.sort(key=lambda one: rows[one[0]].offset)
        return [array.ctypes.data for _, array in arrays], (model, streamer, leases, arrays)

    def free(self, keeper):
        model, streamer, leases, arrays = keeper
        arrays.clear()
        for lease in leases:
            lease.release()
        streamer.close()
        model.close()

    def close(self):
        self.runtime.close()


class RunAi(Side):
    versions = version("runai-model-streamer")

    def __init__(self, path):
        super().__init__(path)
        name = "runai_model_streamer"
        if name not in sys.modules:
            package = types.ModuleType(name)
            package.__path__ = importlib.util.find_spec(name).submodule_search_locations
            sys.modules[name] = package
        self.library = importlib.import_module(f"{name}.libstreamer.libstreamer")

    def read(self):
        library, streamer = self.library, self.library.runai_start()
        block = library.runai_probe_direct_block_size(streamer, [self.path])
        whole = np.empty(self.bytes + 2 * block, dtype=np.uint8)
        # As in the file, so that direct reads are possible.
        base = -(-whole.ctypes.data // block) * block
        starts = [base + offset for offset, _ in self.spans]
        library.runai_request(streamer, [self.path], [len(starts)],
                              [offset for offset, _ in self.spans],
                              [length for _, length in self.spans], starts)
        for _ in starts:
            code = library.runai_response(streamer)[0]
            if code != library.SUCCESS_ERROR_CODE:
                raise RuntimeError(library.runai_response_str(code))
        library.runai_end(streamer)
        return starts, whole


class Safetensors(Side):
    versions = version("safetensors")

    def read(self):
        with safetensors.safe_open(self.path, framework="np") as file:
            arrays = [file.get_tensor(name) for name in file.offset_keys()]
        return [array.ctypes.data for array in arrays if array.nbytes], arrays


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=pathlib.Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--file", type=pathlib.Path)
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    path = args.file or args.dir / "model.safetensors"
    if not args.file:
        make(path, (16 if args.quick else 52) * MIB)
    makes = [("raw reads", lambda: Raw(path)), ("kvtier", lambda: Kvtier(path)),
             ("Run:ai Model Streamer", lambda: RunAi(path)),
             ("safetensors package", lambda: Safetensors(path))]
    try:
        contest("load", makes, [["load"]], os.path.getsize(path), WARM, 3 if args.quick else ROUNDS)
    finally:
        if not args.file:
            path.unlink()


main()
