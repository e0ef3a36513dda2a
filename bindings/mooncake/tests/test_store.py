"""The methods that engines call, and their results."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import Any, Callable, List

import kvtier
import kvtier_mooncake
import numpy as np
import pytest
from kvtier import abi
from kvtier._errors import make
from kvtier_mooncake import (
    MooncakeDistributedStore,
    MooncakeHostMemAllocator,
    ReplicateConfig,
    _codes,
    _core,
    _transfers,
    _shapes,
)
from registered import HOST, Memory


def names(count: int, of: str = "key") -> Any:
    return [f"{of}@{at}" for at in range(count)]


def test_objects_from_several_buffers_come_back(store: Any) -> None:
    memory, keys = Memory(store, sizes=(4096, 100, 8192)), names(8)
    sizes = [list(memory.sizes)] * 8
    assert store.batch_is_exist(keys) == [0] * 8
    assert store.batch_put_from_multi_buffers(
        keys, memory.at(*range(8)), sizes, ReplicateConfig()) == [0] * 8
    states = store.batch_is_exist([*keys, "other"])
    assert states == [1] * 8 + [0] and all(type(one) is int for one in states)
    want = [memory.bytes(block) for block in range(8)]
    memory.overwrite()
    got = store.batch_get_into_multi_buffers(
        [*keys, "other"], memory.at(*range(15, 6, -1)), [memory.sizes] * 9)
    assert got == [sum(memory.sizes)] * 8 + [-704]
    assert [memory.bytes(15 - at) for at in range(8)] == want
    # An object that is stored already stays, and the put succeeds.
    assert store.batch_put_from_multi_buffers(keys, memory.at(*range(8)), sizes) == [0] * 8
    assert store.get(keys[3]) == want[3]


def test_objects_of_several_shapes_in_one_call(store: Any) -> None:
    memory = Memory(store)
    a = memory.rows[0].ctypes.data
    assert store.batch_put_from(["x", "y", "z"], [a, a + 10, a + 20], [10, 20, 10]) == [0] * 3
    assert [store.get_size(key) for key in ("x", "y", "z", "w")] == [10, 20, 10, -704]
    assert store.batch_get_into(["z", "w", "y"], [a, a + 50, a + 100], [10, 10, 20]) \
        == [10, -704, 20]
    assert store.get_into("y", a, 20) == 20 and store.put_from("v", a, 7) == 0


def test_objects_load_into_other_shapes(store: Any) -> None:
    """Buffers that are merged, split, larger than the object, and too small."""
    memory = Memory(store)
    want = memory.bytes(2)
    assert store.batch_put_from_multi_buffers(["k"], memory.at(2), [[4096, 4096]]) == [0]
    memory.overwrite()
    row = memory.rows[0].ctypes.data
    assert store.batch_get_into(["k"], [row], [8192]) == [8192]
    assert memory.rows[0].tobytes()[:8192] == want
    assert store.batch_get_into(["k"], [row], [20000]) == [8192]
    assert store.batch_get_into(["k"], [row], [8191]) == [-600]
    assert store.batch_get_into_multi_buffers(["k"], [[row, row + 9000, row + 20000]],
                                              [[5000, 3000, 192]]) == [8192]
    assert memory.rows[0].tobytes()[20000:20192] == want[-192:]


def test_values_come_back(store: Any) -> None:
    assert store.put("k", b"hello") == 0 and store.get("k") == b"hello"
    assert store.put("k", b"other") == 0 and store.get("k") == b"hello"  # first writer wins
    assert store.put_parts("p", b"ab", bytearray(b"cd"), np.arange(3, dtype=np.uint8)) == 0
    assert bytes(store.get_buffer("p").view()) == b"abcd\0\1\2"
    assert store.get_buffer("p").size() == 7 and store.get_buffer("q") is None
    assert [None if one is None else bytes(one) for one in store.batch_get_buffer(["q", "k"])] \
        == [None, b"hello"]
    assert store.get("q") == b"" and store.put("e", b"") == -600
    assert store.is_exist("p") == 1 and store.is_exist("q") == 0


def test_removed_objects_are_gone(store: Any) -> None:
    for key in ("a", "b", "ccc"):
        store.put(key, key.encode() * 10)
    assert store.remove("a") == 0 and store.remove("a") == -704
    assert store.remove_all(force=True) == 2
    assert store.batch_is_exist(["a", "b", "ccc"]) == [0, 0, 0]
    assert store.put("a", b"again") == 0 and store.get("a") == b"again"


def test_remove_removes_the_copies_of_all_shapes(opened: Callable[..., Any]) -> None:
    store = opened(spec=HOST, max_shapes=3)
    memory = Memory(store, sizes=(2, 2))
    assert store.put("k", b"old!") == 0
    assert store.batch_put_from_multi_buffers(["k"], memory.at(0), [[2, 2]]) == [0]
    assert store.remove("k") == 0
    assert store.is_exist("k") == 0 and store.get("k") == b"" and store.remove("k") == -704
    # A copy in a closed shape is removed, too.
    assert store.put("k", b"old!") == 0
    for size in range(5, 9):
        assert store.put(f"k{size}", bytes(size)) == 0
    assert store.is_exist("k") == 0 and store.remove("k") == 0
    row = memory.rows[0].ctypes.data
    assert store.batch_get_into(["k"], [row], [4]) == [-704]
    assert store.remove_all() == 4


def test_an_invalid_shape_fails_alone(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    big = np.arange(33 << 20, dtype=np.uint8)
    a = big.ctypes.data
    assert store.register_buffer(a, big.nbytes) == 0
    keys, at, sizes = ["x", "big", "y"], [a, a, a + 10], [10, 33 << 20, 20]
    assert store.batch_put_from(keys, at, sizes) == [0, -600, 0]
    assert "batch_put_from: " in caplog.text
    assert store.batch_is_exist(keys) == [1, 0, 1]
    assert store.batch_get_into(keys, at, sizes) == [10, -600, 20]


def test_unregistered_addresses_are_never_accessed(
        store: Any, caplog: pytest.LogCaptureFixture) -> None:
    memory, one = Memory(store), [[4096, 4096]]
    good = memory.at(0)[0]
    for bad in ([1 << 12, good[1]], [good[0], 2**64 - 1], [good[0], -5], [good[0], None],
                [good[0] - 1, good[1]], [good[0] + 16 * 4096 - 4095, good[1]]):
        assert store.batch_put_from_multi_buffers(["b"], [bad], one) == [-600]
        assert store.batch_get_into_multi_buffers(["b"], [bad], one) == [-600]
        assert "outside of the registered buffers" in caplog.text
    # The other objects of the call succeed.
    assert store.batch_put_from_multi_buffers(
        ["g", "b", "h"], [good, [1, 2], memory.at(1)[0]], one * 3) == [0, -600, 0]
    assert store.batch_is_exist(["g", "b", "h"]) == [1, 0, 1]
    assert store.unregister_buffer(memory.rows[0].ctypes.data) == 0
    assert store.unregister_buffer(memory.rows[0].ctypes.data) == -600
    assert store.batch_get_into_multi_buffers(["g"], [good], one) == [-600]


@pytest.mark.parametrize("how", ["unregister", "close"])
def test_unregister_and_close_wait_for_transfers(
        how: str, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `unregister_buffer` or `close` no transfer of another thread uses the buffer."""
    memory, inside, gate = Memory(store), threading.Event(), threading.Event()
    real = _transfers.Transfer._put_group

    def slow(*given: Any) -> None:
        inside.set()  # the addresses have been checked
        assert gate.wait(600)
        real(*given)

    monkeypatch.setattr(_transfers.Transfer, "_put_group", slow)
    results: List[Any] = []
    put = threading.Thread(target=lambda: results.append(
        store.batch_put_from_multi_buffers(["k"], memory.at(0), [[4096, 4096]])))
    put.start()
    assert inside.wait(600)
    out = threading.Thread(target=lambda: results.append(
        store.close() if how == "close"
        else store.unregister_buffer(memory.rows[0].ctypes.data)))
    out.start()
    end = time.monotonic() + 600
    while memory.rows[0].ctypes.data in store._regions._buffers:  # until it only waits for the put
        assert time.monotonic() < end
        time.sleep(0.001)
    assert out.is_alive() and not results
    if how == "unregister":  # a later transfer does not find the buffer, and is not waited for
        assert store.batch_put_from_multi_buffers(["l"], memory.at(1), [[4096, 4096]]) == [-600]
    gate.set()
    put.join(600)
    out.join(600)
    assert sorted(map(str, results)) == ["0", "[0]"] and not store._regions._transfers


def test_library_failures_return_rpc_fail() -> None:
    """After other codes vLLM's embedding store keeps its buffers forever."""
    for status in (abi.KVT_E_IO, abi.KVT_E_CANCELLED, abi.KVT_E_PANIC, abi.KVT_E_TIMEOUT):
        assert _codes.of_status(status) == -900


def test_invalid_buffers_are_not_registered(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert store.register_buffer(1 << 12, 4096) == -600  # nothing is mapped there
    assert "device" in caplog.text
    assert store.register_buffer(0, 10) == -600
    array = np.zeros(10, np.uint8)
    assert store.register_buffer(array.ctypes.data, 0) == -600
    assert store.register_buffer(array.ctypes.data, 1 << 40) == -600  # only a part is mapped
    assert store.register_buffer(array.ctypes.data, 10, "cuda:0") == -600


def test_malformed_calls_return_invalid_params(store: Any) -> None:
    memory = Memory(store)
    put = store.batch_put_from_multi_buffers
    assert put(["a", "b"], memory.at(0), [[4096, 4096]]) == [-600] * 2
    assert store.batch_put_from_multi_buffers(["a"], memory.at(0), [[4096]]) == [-600]
    for size in (0, -1, 2**32, 1.5, None):
        assert store.batch_put_from(["a"], [memory.at(0)[0][0]], [size]) == [-600]
    assert store.batch_put_from_multi_buffers(["a"], [[]], [[]]) == [-600]
    assert store.batch_is_exist([]) == [] and store.batch_put_from([], [], []) == []


def test_calls_before_setup_fail(caplog: pytest.LogCaptureFixture) -> None:
    store = MooncakeDistributedStore()
    assert store.batch_is_exist(["a", "b"]) == [-1010] * 2 and store.get("a") == b""
    assert store.put("a", b"x") == -1010 and store.remove("a") == -1010
    assert "not set up" in caplog.text
    assert store.close() == 0


def test_a_second_setup_and_use_after_close_fail(opened: Callable[..., Any]) -> None:
    store = opened()
    assert store.setup("h") == -600
    assert store.close() == 0 and store.close() == 0
    assert store.batch_is_exist(["a"]) == [-1010]


def test_a_too_large_object_returns_no_available_handle(opened: Callable[..., Any]) -> None:
    """An object larger than all memory gets Mooncake's code for that."""
    store = opened(spec="store(host=32MiB)")
    big = np.zeros(60 << 20, np.uint8)
    assert store.register_buffer(big.ctypes.data, big.nbytes) == 0
    # A buffer of over 32 MiB is an invalid argument.
    assert store.batch_put_from(["big"], [big.ctypes.data], [33 << 20]) == [-600]
    at, sizes = [[big.ctypes.data + (part << 20) for part in (0, 20, 40)]], [[20 << 20] * 3]
    assert store.batch_put_from_multi_buffers(["big"], at, sizes) == [-200]
    assert store.is_exist("big") == 0
    # Small objects evict each other.
    for at in range(200):
        assert store.put(f"k{at}", bytes(1 << 20)) == 0
    assert 0 < sum(store.batch_is_exist([f"k{at}" for at in range(200)])) < 200


def test_stores_with_equal_settings_share_one_kvtier_store(opened: Callable[..., Any]) -> None:
    first, second = opened(), opened()
    first.put("k", b"v")
    assert second.get("k") == b"v"
    assert first.kvtier_store is second.kvtier_store
    kvtier_mooncake.configure()
    lookups = MooncakeDistributedStore()  # a client without memory of its own
    assert lookups.setup("localhost", "P2PHANDSHAKE", 0) == 0
    assert lookups.batch_is_exist(["k", "l"]) == [1, 0]
    first.close()
    assert second.get("k") == b"v"
    assert lookups.close() == 0


def test_a_failed_setup_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ({"host_bytes": "8GiB"}, {"host_bytes": 1 << 26, "device": "cuda:x"},
                  {"spec": 5}, {"host_bytes": True}):
        monkeypatch.setenv("KVTIER_MOONCAKE_CONFIG", json.dumps(given))
        store = MooncakeDistributedStore()
        assert store.setup("localhost", "P2PHANDSHAKE", 0) == -600
    kvtier_mooncake.configure(spec=HOST)
    with monkeypatch.context() as broken:
        broken.setattr(_core.Core, "shapes", raise_io_error)
        assert store.setup("localhost", "P2PHANDSHAKE", 0) == -900
    assert not _core._cores and store.kvtier_store is None
    assert store.setup("localhost", "P2PHANDSHAKE", 0) == 0 and store.put("k", b"v") == 0
    assert store.close() == 0


def raise_io_error(*_: Any) -> None:
    raise make(abi.KVT_E_IO, "no")


def test_objects_of_another_model_are_not_found(tmp_path: Any,
                                                caplog: pytest.LogCaptureFixture) -> None:
    """The option `model` separates weights, because engines' keys do not."""
    for model, found in (("a", 0), ("a", 1), ("b", 0), ("a", 1)):
        kvtier_mooncake.configure(host_bytes=64 << 20, disk_path=str(tmp_path), level="durable",
                                  disk_bytes=256 << 20, model=model)
        store = MooncakeDistributedStore()
        assert store.setup("localhost", "P2PHANDSHAKE", 0) == 0
        assert store.is_exist("k") == found
        assert store.put("k", model.encode()) == 0 and store.get("k") == model.encode()
        assert store.close() == 0
    assert "weights" not in caplog.text
    kvtier_mooncake.configure(host_bytes=64 << 20, disk_path=str(tmp_path), disk_bytes=256 << 20)
    assert store.setup("localhost", "P2PHANDSHAKE", 0) == 0
    assert "not its weights" in caplog.text
    store.close()


def test_objects_of_other_stores_are_found_at_the_remote(opened: Callable[..., Any],
                                                         tmp_path: Any) -> None:
    given = {"spec": f'store(host=64MiB, remote=dir(path="{tmp_path}", timeout=600000))',
             "remote_lookup_s": 600}
    first, keys = opened(**given, level="remote"), names(8)
    memory = Memory(first, sizes=(4096, 100, 8192))
    sizes = [list(memory.sizes)] * 8
    assert first.batch_put_from_multi_buffers(keys, memory.at(*range(8)), sizes) == [0] * 8
    assert first.put("value", b"of bytes") == 0
    want = [memory.bytes(block) for block in range(8)]

    def other(policy: str, **more: Any) -> Any:  # a store of its own
        one = opened(**{**given, **more}, policy=policy)
        memory.overwrite()
        for row in memory.rows:
            assert one.register_buffer(row.ctypes.data, row.nbytes) == 0
        return one

    # A store that looks up first, objects in one shape and in several.
    one = other("lru")
    assert one.batch_is_exist([keys[0], "nothing", "value"]) == [1, 0, 1]
    assert one.batch_is_exist([*keys, "nothing"]) == [1] * 8 + [0]
    into = memory.at(*range(15, 7, -1))
    assert one.batch_get_into_multi_buffers(keys, into, sizes) == [sum(memory.sizes)] * 8
    assert [memory.bytes(15 - at) for at in range(8)] == want
    # A store that gets without a lookup: local, remote and missing objects in one call.
    one = other("arc")
    assert one.batch_get_into_multi_buffers(keys[3:5], into[3:5], sizes[:2]) \
        == [sum(memory.sizes)] * 2
    mixed = ["nothing", *keys, "neither"]
    assert one.batch_get_into_multi_buffers(
        mixed, memory.at(7, *range(15, 7, -1), 6), [list(memory.sizes)] * 10) \
        == [-704, *[sum(memory.sizes)] * 8, -704]
    assert [memory.bytes(15 - at) for at in range(8)] == want
    assert one.get("value") == b"of bytes" and one.get_size(keys[0]) == sum(memory.sizes)
    # A store without remote lookups.
    one = other("s3fifo", remote_lookup_s=0)
    assert one.batch_is_exist([*keys, "value"]) == [0] * 9 and one.get("value") == b""
    assert one.batch_get_into_multi_buffers(keys, into, sizes) == [-704] * 8


def test_tenants_do_not_see_each_other(opened: Callable[..., Any]) -> None:
    ours = opened()
    theirs = MooncakeDistributedStore()
    assert theirs.setup("localhost", "P2PHANDSHAKE", 0, tenant_id="them") == 0
    ours.put("k", b"ours")
    assert theirs.is_exist("k") == 0
    theirs.put("k", b"theirs")
    assert (ours.get("k"), theirs.get("k")) == (b"ours", b"theirs")
    assert theirs.remove_all() == 1 and ours.get("k") == b"ours"
    theirs.close()


def test_setup_takes_a_mapping() -> None:
    store = MooncakeDistributedStore()
    assert store.setup({"local_hostname": "here", "metadata_server": "P2PHANDSHAKE",
                        "global_segment_size": str(64 << 20), "local_buffer_size": "1",
                        "protocol": "tcp", "something_new": "x"}) == 0
    assert store.get_hostname() == "here"
    stats = store.kvtier_store.stats()
    assert stats["host_limit_bytes"] == 64 << 20
    assert store.close() == 0


def test_the_first_configured_source_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Any,
                                            caplog: pytest.LogCaptureFixture) -> None:
    def limit() -> int:
        store = MooncakeDistributedStore()
        assert store.setup("h", global_segment_size=33 << 20) == 0
        found = int(store.kvtier_store.stats()["host_limit_bytes"])
        store.close()
        return found

    assert limit() == 33 << 20
    engine = tmp_path / "mooncake.json"
    engine.write_text(json.dumps({"metadata_server": "x", "kvtier": {"host_bytes": 34 << 20}}))
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(engine))
    assert limit() == 34 << 20
    ours = tmp_path / "kvtier.json"
    ours.write_text(json.dumps({"host_bytes": 35 << 20}))
    monkeypatch.setenv("KVTIER_MOONCAKE_CONFIG", str(ours))
    assert limit() == 35 << 20
    monkeypatch.setenv("KVTIER_MOONCAKE_SPEC", f"store(host={36 << 20})")
    monkeypatch.setenv("KVTIER_MOONCAKE_CONFIG", '{"policy": "arc"}')
    assert limit() == 36 << 20
    kvtier_mooncake.configure(host_bytes=37 << 20)
    assert limit() == 37 << 20
    kvtier_mooncake.configure()
    for bad in ('{"hots_bytes": 1}', '{"level": "gone"}', "{", "[1]", "no/such/file",
                '{"policy": "nosuch"}', '{"host_bytes": 99999999, "level": "durable"}',
                '{"host_bytes": 99999999, "level": "remote"}', '{"remote_lookup_s": -1}',
                '{"remote_lookup_s": true}',
                '{"max_shapes": 0}', '{"max_shapes": 61}'):
        monkeypatch.setenv("KVTIER_MOONCAKE_CONFIG", bad)
        assert MooncakeDistributedStore().setup("h") == -600, bad
    assert "host_bytes" in caplog.text
    with pytest.raises(kvtier.InvalidError):
        kvtier_mooncake.configure(hots=1)


def test_setup_without_memory_needs_another_store(caplog: pytest.LogCaptureFixture) -> None:
    assert MooncakeDistributedStore().setup("h", global_segment_size=0) == -600
    assert "KVTIER_MOONCAKE_SPEC" in caplog.text


def test_policies_metrics_evictions_and_tiers_are_available(opened: Callable[..., Any]) -> None:
    store = opened(spec=HOST, policy="lru")
    native = store.kvtier_store
    native.set_policy(kvtier.TIER_HOST, "arc")
    for at in range(80):
        store.put(f"k{at}", bytes(1 << 20))
    assert native.evictions(kvtier.TIER_HOST)[-1].policy == "arc"
    assert "kvtier" in native.metrics()
    known = [key for key in (f"k{at}" for at in range(80)) if store.is_exist(key)]
    tiers = store.batch_get_replica_desc([*known, "nope"])
    assert set(tiers) == set(known)
    assert all(one[0].is_memory_replica() and not one[0].is_disk_replica()
               and not one[0].is_local_disk_replica() for one in tiers.values())


def test_evictions_are_logged_once_if_enabled(
        opened: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvtier.mooncake")
    for enabled in (False, True):
        store = opened(spec=HOST, policy="lru", log_evictions=enabled)
        for at in range(80):
            store.put(f"k{at}", bytes(1 << 20))
        store.is_exist("k0")
        store.close()
        messages = [one.getMessage() for one in caplog.records
                    if one.getMessage().startswith("evicted from host")]
        assert len(set(messages)) == len(messages) and bool(messages) == enabled


def test_closed_shapes_are_reopened_on_use(opened: Callable[..., Any]) -> None:
    store = opened(spec=HOST, max_shapes=3)
    for size in range(1, 9):
        assert store.put(f"k{size}", bytes([size]) * size) == 0
    assert sum(store.batch_is_exist([f"k{size}" for size in range(1, 9)])) == 3
    memory = np.zeros(16, np.uint8)
    store.register_buffer(memory.ctypes.data, 16)
    assert store.batch_get_into(["k1"], [memory.ctypes.data], [1]) == [1]  # in a closed shape
    assert memory[0] == 1 and store.is_exist("k1") == 1
    assert store.remove_all() == 8


def test_a_new_shape_without_room_is_rejected(store: Any,
                                              caplog: pytest.LogCaptureFixture) -> None:
    """The number of layouts is limited: known shapes work, and new ones are not stored."""
    memory = np.zeros(100, np.uint8)
    a = memory.ctypes.data
    assert store.register_buffer(a, memory.nbytes) == 0
    assert store.batch_put_from(["k"], [a], [10]) == [0]
    others = kvtier.Identity(model=b"others")
    with contextlib.ExitStack() as stack:
        for size in range(1000, 1062):
            one = stack.enter_context(kvtier.Blocks(store.kvtier_store, others, [size]))
            one.put([b"b"], kvtier.Pool(bytes(size), size, writable=False).at([0])).result()
        assert store.batch_put_from(["new"], [a], [20]) == [-200]
        assert store.put("new", bytes(20)) == -200
        messages = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
        assert len(messages) == 2
        assert all("no room for another object shape: " in one for one in messages)
        caplog.clear()
        assert store.batch_get_into(["new", "k"], [a, a + 20], [20, 20]) == [-704, 10]
        assert store.batch_get_into(["k", "new"], [a, a + 20], [10, 20]) == [10, -704]
        assert store.batch_is_exist(["k", "new"]) == [1, 0] and store.get("k") == bytes(10)
        assert store.batch_put_from(["l", "new"], [a, a], [10, 20]) == [0, -200]
        assert store.remove("new") == -704 and store.remove("l") == 0
        # A shape that no store accepts.
        assert store.batch_put_from(["x" * 9], [a], [33 << 20]) == [-600]


def test_lookups_do_not_wait_for_a_catalogue_write(opened: Callable[..., Any], tmp_path: Any,
                                                   monkeypatch: pytest.MonkeyPatch,
                                                   caplog: pytest.LogCaptureFixture) -> None:
    """A catalogue write that is stuck delays only the put of the new shape."""
    disk = {"host_bytes": 64 << 20, "disk_path": str(tmp_path), "disk_bytes": 256 << 20,
            "model": "m"}
    store = opened(**disk)
    assert store.put("k", b"old") == 0
    shapes, begun = store._core.shapes(""), threading.Event()
    real, ready = shapes._catalogue.put, kvtier.ReadyEvent()

    def stuck(*args: Any, **more: Any) -> Any:
        begun.set()
        return real(*args, ready=ready, **more)

    monkeypatch.setattr(shapes._catalogue, "put", stuck)
    monkeypatch.setattr(_shapes, "CATALOGUE_WAIT_S", 600.0)  # the put waits for the test
    results: List[Any] = []
    put = threading.Thread(target=lambda: results.append(store.put("l", b"newer")))
    put.start()
    assert begun.wait(600)
    look = threading.Thread(target=lambda: results.append(
        [*store.batch_is_exist(["k", "nothing"]), store.get("k")]))
    look.start()
    look.join(600)
    found, waits = list(results), put.is_alive()
    ready.signal()
    for thread in (look, put):
        thread.join(600)
    ready.close()
    assert found == [[1, 0, b"old"]] and waits  # the put still waits for the catalogue
    assert results[1:] == [0] and "catalogue" not in caplog.text
    # A put, and closing, wait for the catalogue for a limited time.
    monkeypatch.setattr(_shapes, "CATALOGUE_WAIT_S", 0.1)
    ready = kvtier.ReadyEvent()
    assert store.put("m", b"the newest") == 0 and "catalogue" in caplog.text
    caplog.clear()
    # The event is signalled only after the close, so an unlimited wait would never end.
    closing = threading.Thread(target=shapes.close)
    closing.start()
    closing.join(600)
    assert not closing.is_alive() and "catalogue" in caplog.text
    ready.signal()
    ready.close()
    store.close()
    assert opened(**disk).batch_is_exist(list("klm")) == [1] * 3


def test_threads_put_get_and_register_concurrently(store: Any) -> None:
    """Concurrent puts, gets and registrations, with every byte compared."""
    errors = []

    def work(of: int) -> None:
        try:
            memory = Memory(store, 8, (1000 + of, 3000))
            sizes = [list(memory.sizes)] * 8
            for turn in range(10):
                keys = names(8, f"{of}/{turn}")
                want = [memory.bytes(block) for block in range(8)]
                assert store.batch_put_from_multi_buffers(keys, memory.at(*range(8)), sizes) \
                    == [0] * 8
                memory.overwrite()
                assert store.batch_get_into_multi_buffers(
                    keys, memory.at(*range(8)), sizes) == [4000 + of] * 8
                assert [memory.bytes(block) for block in range(8)] == want
                for row in memory.rows:
                    row += 1
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(of,)) for of in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert errors == []


def test_device_memory_is_transferred_through_the_device(opened: Callable[..., Any]) -> None:
    """Device memory is copied by the device, here by the simulated one."""
    store = opened(spec="store(host=64MiB)", device="simulated")
    device = store._core.device
    memory = device.alloc(8 * 4096)
    assert store.register_buffer(memory.address, memory.nbytes, "device") == 0
    data = np.random.default_rng(3).integers(0, 256, 8 * 4096, dtype=np.uint8)
    event = device.upload(data, memory)
    event.wait()
    at = [memory.address + block * 4096 for block in range(8)]
    assert store.batch_put_from(names(8), at, [4096] * 8) == [0] * 8
    for block in range(8):
        assert store.get(f"key@{block}") == data[block * 4096:(block + 1) * 4096].tobytes()
    assert store.batch_get_into(names(8), at[::-1], [4096] * 8) == [4096] * 8
    back = np.zeros_like(data)
    device.download(memory, back).wait()
    assert (back.reshape(8, 4096)[::-1] == data.reshape(8, 4096)).all()
    # An object in memory of both kinds is rejected.
    array = np.zeros(4096, np.uint8)
    store.register_buffer(array.ctypes.data, 4096)
    assert store.batch_put_from_multi_buffers(["m"], [[array.ctypes.data, at[0]]],
                                              [[4096, 4096]]) == [-600]
    store.unregister_buffer(memory.address)
    del event, memory


def test_the_allocators_memory_can_be_registered(store: Any) -> None:
    allocator = MooncakeHostMemAllocator()
    address = allocator.alloc(1 << 20)
    assert address and store.register_buffer(address, 1 << 20) == 0
    assert store.batch_put_from(["k"], [address], [1 << 20]) == [0]
    assert store.get("k") == bytes(1 << 20)
    assert store.unregister_buffer(address) == 0 and allocator.free(address) == 0
    assert allocator.free(address) == -600 and allocator.alloc(1 << 60) == 0
