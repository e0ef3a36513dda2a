"""Pins with a share, lifetimes, and quotas of tenants."""

from __future__ import annotations

import time

import pytest

import kvtier


def test_pins_lifetimes_and_quotas_reach_the_store() -> None:
    spec = "store(host=16MiB, pins=0.25)"
    with kvtier.Runtime() as runtime, kvtier.Store(runtime, spec) as store:
        with kvtier.Blocks(store, kvtier.Identity(model=b"m"), [1 << 20], tenant=7) as blocks:
            pool = kvtier.Pool(bytearray(8 << 20), 1 << 20)
            names = [b"%d" % n for n in range(6)]
            blocks.put(names, pool.at(range(6))).result()
            blocks.pin(names[:4], timeout=3600)
            with pytest.raises(kvtier.BudgetError, match="pins="):
                blocks.pin(names[4:], timeout=3600)
            assert store.stats()["pins"] == 4 and store.stats()["rejected_pins"] == 2
            store.set_quota(7, kvtier.TIER_HOST, 5 << 20)
            assert sum(byte != 0 for byte in blocks.exists(names)) == 5, "not pinned, so evicted"
            with pytest.raises(kvtier.BudgetError, match="tenant 7.*quota of 5242880"):
                blocks.put([b"a", b"b"], pool.at([0, 1]))
            row = store.tenants()[0]
            assert (row.tenant, row.rejected_puts, row.host_quota_bytes) == (7, 1, 5 << 20)
            assert row.host_bytes == 4 << 20, "the put evicted what it could"
            with pytest.raises(kvtier.InvalidError, match="tenant 0"):
                store.set_quota(0, kvtier.TIER_HOST, 1)
        with kvtier.Blocks(store, kvtier.Identity(model=b"m"), [4096], ttl=1e-9) as short:
            small = kvtier.Pool(bytearray(4096), 4096)
            short.put([b"short"], small.at([0])).result()
            end = time.monotonic() + 600  # it ends while it is put, so it is removed a moment later
            while any(short.exists([b"short"])) and time.monotonic() < end:
                time.sleep(0.01)
            assert store.stats()["expired_chunks"] == 1
