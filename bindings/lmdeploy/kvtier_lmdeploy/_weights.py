"""Fingerprints of weights: a digest over every byte of a model's files.

The digests are cached with each file's device, inode, size and times, so the next start reads
nothing. The cache relies on the change time, which the kernel sets and a program cannot reset.
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

#: Files that KV depends on: weights, configurations, and a model's own code.
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".py")

#: Bytes of one read; files that are read in parallel.
PIECE_BYTES, READERS = 4 << 20, 8

#: Least age of a file's last change for its digest to be cached, in nanoseconds. A younger file
#: may change again within one tick of the kernel's clock.
SETTLED_NS = 2_000_000_000

#: Path to the file's stamp, followed by its digest.
DigestCache = Dict[str, List[Any]]


def fingerprint(folder: str) -> str:
    """Returns a digest over all files of a model or an adapter that its KV depends on."""
    names = sorted(name for name in os.listdir(folder) if name.endswith(SUFFIXES))
    paths = [os.path.realpath(os.path.join(folder, name)) for name in names]
    cache = _load_cache()
    new = [path for path in paths if _cached_digest(cache, path) is None]
    size = sum(os.path.getsize(path) for path in new)
    if size >= 1 << 30:
        log.info("reading %.1f GiB once to compute the fingerprint of the weights; set `weights` "
                 "in kv_connector_extra_config to avoid this", size / (1 << 30))
    with ThreadPoolExecutor(READERS, "kvtier-weights") as pool:
        digests = list(pool.map(lambda path: _digest(cache, path), paths))
    if new:
        _save_cache(cache)
    total = hashlib.sha256(b"kvtier weights 1\0")
    for name, digest in zip(names, digests):
        total.update(f"{len(name)} {name} {digest}\n".encode())
    return total.hexdigest()


def _stamp(path: str) -> List[int]:
    it = os.stat(path)
    return [it.st_dev, it.st_ino, it.st_size, it.st_mtime_ns, it.st_ctime_ns]


def _cached_digest(cache: DigestCache, path: str) -> Optional[str]:
    entry = cache.get(path)
    return str(entry[-1]) if entry is not None and entry[:-1] == _stamp(path) else None


def _digest(cache: DigestCache, path: str) -> str:
    cached = _cached_digest(cache, path)
    if cached is not None:
        return cached
    began, before = time.time_ns(), _stamp(path)
    digest, piece = hashlib.sha256(), memoryview(bytearray(PIECE_BYTES))
    with open(path, "rb", buffering=0) as file:
        while True:
            got = file.readinto(piece)
            if not got:
                break
            digest.update(piece[:got])
    if before == _stamp(path) and max(before[3:]) + SETTLED_NS < began:
        cache[path] = [*before, digest.hexdigest()]
    return digest.hexdigest()


def _cache_path() -> str:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "kvtier", "weights.json")


def _load_cache() -> DigestCache:
    try:
        with open(_cache_path(), encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                return {}
            cache = json.load(file)
    except (OSError, ValueError):
        return {}
    if not isinstance(cache, dict):
        return {}
    return {path: entry for path, entry in cache.items()
            if isinstance(entry, list) and len(entry) == 6}


def _save_cache(cache: DigestCache) -> None:
    """Saves the cache. A failure is logged only: the next start reads the files again."""
    target = _cache_path()
    try:
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        # Keep entries that another process has saved meanwhile.
        merged = {path: entry for path, entry in {**_load_cache(), **cache}.items()
                  if os.path.exists(path)}
        handle, temporary = tempfile.mkstemp(dir=os.path.dirname(target))
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(merged, file)
        os.replace(temporary, target)
    except OSError as error:
        log.info("cannot save the digests of weights to %s, the next start reads the files again: "
                 "%s", target, error)
