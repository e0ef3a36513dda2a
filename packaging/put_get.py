"""Puts KV into a store with a disk tier, opens the store again and gets the KV back."""

import sys
import tempfile

import kvtier

TOKENS = [1, 2, 3, 4]
stored = bytearray(range(64))


def open_store(runtime: kvtier.Runtime, folder: str) -> kvtier.Store:
    disk = f'disk(path="{folder}", bytes=64MiB, segment=4MiB)'
    return kvtier.Store(runtime, f"store(host=1MiB, disk={disk})")


GROUP = kvtier.Group([0], k_bytes=16)
loaded = bytearray(64)
with tempfile.TemporaryDirectory() as folder, kvtier.Runtime(workers=1) as runtime:
    for is_put in (True, False):
        with open_store(runtime, folder) as store, \
                store.namespace(kvtier.Identity(), chunk_tokens=4, groups=[GROUP]) as namespace, \
                namespace.session() as session:
            session.append(TOKENS)
            if is_put:
                session.put([kvtier.View(stored, 16)], level=kvtier.LEVEL_DURABLE).result(60)
            else:
                session.get([kvtier.View(loaded, 16)]).result(60)
print(f"kvtier {kvtier.__version__}:", "bytes differ" if loaded != stored else "all bytes are equal")
sys.exit(loaded != stored)
