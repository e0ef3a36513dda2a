"""What weights are: a digest of every byte of their files, read once.

A digest is kept with the file's device, inode, size and times, so the next start reads nothing. The
time of a file's last change is the kernel's own: who writes to it cannot keep it as it was.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Dict, List, Optional

log = logging.getLogger("kvtier.lmdeploy")

#: Weights, and what says how they are used: configurations, and code that comes with a model.
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".py")

#: So much is read at a time, and files side by side.
PIECE_BYTES, READERS = 4 << 20, 8

#: A file that changed so shortly before it was read may change again within one tick of the
#: kernel's clock: its digest is not kept.
SETTLED_NS = 2_000_000_000

Known = Dict[str, List[Any]]


def fingerprint(folder: str) -> str:
    """A digest of all files of a model (or an adapter) that its KV depends on."""
    names = sorted(name for name in os.listdir(folder) if name.endswith(SUFFIXES))
    paths = [os.path.realpath(os.path.join(folder, name)) for name in names]
    known = _kept()
    new = [path for path in paths if _digest_kept(known, path) is None]
    size = sum(os.path.getsize(path) for path in new)
    if size >= 1 << 30:
        log.info("reading %.1f GiB of weights once, to know whose KV it is; `weights` in "
                 "kv_connector_extra_config says it without", size / (1 << 30))
    with ThreadPoolExecutor(READERS, "kvtier-weights") as pool:
        digests = list(pool.map(lambda path: _digest(known, path), paths))
    if new:
        _keep(known)
    total = hashlib.sha256(b"kvtier weights 1\0")
    for name, digest in zip(names, digests):
        total.update(f"{len(name)} {name} {digest}\n".encode())
    return total.hexdigest()


def _stamp(path: str) -> List[int]:
    it = os.stat(path)
    return [it.st_dev, it.st_ino, it.st_size, it.st_mtime_ns, it.st_ctime_ns]


def _digest_kept(known: Known, path: str) -> Optional[str]:
    entry = known.get(path)
    return str(entry[-1]) if entry is not None and entry[:-1] == _stamp(path) else None


def _digest(known: Known, path: str) -> str:
    kept = _digest_kept(known, path)
    if kept is not None:
        return kept
    began, before = time.time_ns(), _stamp(path)
    digest, piece = hashlib.sha256(), memoryview(bytearray(PIECE_BYTES))
    with open(path, "rb", buffering=0) as file:
        while True:
            got = file.readinto(piece)
            if not got:
                break
            digest.update(piece[:got])
    if before == _stamp(path) and max(before[3:]) + SETTLED_NS < began:
        known[path] = [*before, digest.hexdigest()]
    return digest.hexdigest()


def _place() -> str:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "kvtier", "weights.json")


def _kept() -> Known:
    try:
        with open(_place(), encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                return {}
            known = json.load(file)
    except (OSError, ValueError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {path: entry for path, entry in known.items()
            if isinstance(entry, list) and len(entry) == 6}


def _keep(known: Known) -> None:
    """Where it cannot be kept, files are read again."""
    place = _place()
    try:
        os.makedirs(os.path.dirname(place), mode=0o700, exist_ok=True)
        # What another process has kept meanwhile stays.
        together = {path: entry for path, entry in {**_kept(), **known}.items()
                    if os.path.exists(path)}
        handle, made = tempfile.mkstemp(dir=os.path.dirname(place))
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(together, file)
        os.replace(made, place)
    except OSError as error:
        log.info("digests of weights are not kept: %s", error)
