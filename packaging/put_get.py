"""Puts KV into a store with a disk tier, opens the store again and gets it back (packaging/try.sh)."""

import sys
import tempfile

import kvtier

TOKENS = [1, 2, 3, 4]
stored = bytearray(range(64))


def open_store(runtime: kvtier.Runtime, folder: str) -> kvtier.Store:
    return kvtier.Store(runtime, f'store(host=1MiB, disk=disk(path="{folder}", bytes=64MiB, segment=4MiB))')


with tempfile.TemporaryDirectory() as folder, kvtier.Runtime(workers=1) as runtime:
    for is_put in (True, False):
        with open_store(runtime, folder) as store, \
                store.namespace(kvtier.Identity(), chunk_tokens=4, groups=[kvtier.Group([0], k_bytes=16)]) as names, \
                names.session() as session:
            session.append(TOKENS)
            if is_put:
                session.put([kvtier.View(stored, 16)], level=kvtier.LEVEL_DURABLE).result(60)
            else:
                loaded = bytearray(64)
                session.get([kvtier.View(loaded, 16)]).result(60)
print(f"kvtier {kvtier.__version__}: {'every byte is equal' if loaded == stored else 'bytes differ'}")
sys.exit(loaded != stored)
