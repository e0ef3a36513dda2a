"""The calls that engines make, and what they return."""

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
    _moves,
    _shapes,
)
from registered import HOST, Memory


def names(count: int, of: str = "key") -> Any:
    return [f"{of}@{at}" for at in range(count)]


def test_put_and_get_from_many_buffers(store: Any) -> None:
    memory, keys = Memory(store, sizes=(4096, 100, 8192)), names(8)
    sizes = [list(memory.sizes)] * 8
    assert store.batch_is_exist(keys) == [0] * 8
    assert store.batch_put_from_multi_buffers(
        keys, memory.at(*range(8)), sizes, ReplicateConfig()) == [0] * 8
    states = store.batch_is_exist([*keys, "other"])
    assert states == [1] * 8 + [0] and all(type(one) is int for one in states)
    want = [memory.bytes(block) for block in range(8)]
    memory.spoil()
    got = store.batch_get_into_multi_buffers(
        [*keys, "other"], memory.at(*range(15, 6, -1)), [memory.sizes] * 9)
    assert got == [sum(memory.sizes)] * 8 + [-704]
    assert [memory.bytes(15 - at) for at in range(8)] == want
    # What is there stays, and that is no failure.
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


def test_other_buffers_than_it_was_put_from(store: Any) -> None:
    """A header and its data as one; more room than it needs; less."""
    memory = Memory(store)
    want = memory.bytes(2)
    assert store.batch_put_from_multi_buffers(["k"], memory.at(2), [[4096, 4096]]) == [0]
    memory.spoil()
    row = memory.rows[0].ctypes.data
    assert store.batch_get_into(["k"], [row], [8192]) == [8192]
    assert memory.rows[0].tobytes()[:8192] == want
    assert store.batch_get_into(["k"], [row], [20000]) == [8192]
    assert store.batch_get_into(["k"], [row], [8191]) == [-600]
    assert store.batch_get_into_multi_buffers(["k"], [[row, row + 9000, row + 20000]],
                                              [[5000, 3000, 192]]) == [8192]
    assert memory.rows[0].tobytes()[20000:20192] == want[-192:]


def test_values(store: Any) -> None:
    assert store.put("k", b"hello") == 0 and store.get("k") == b"hello"
    assert store.put("k", b"other") == 0 and store.get("k") == b"hello"  # first writer wins
    assert store.put_parts("p", b"ab", bytearray(b"cd"), np.arange(3, dtype=np.uint8)) == 0
    assert bytes(store.get_buffer("p").view()) == b"abcd\0\1\2"
    assert store.get_buffer("p").size() == 7 and store.get_buffer("q") is None
    assert [None if one is None else bytes(one) for one in store.batch_get_buffer(["q", "k"])] \
        == [None, b"hello"]
    assert store.get("q") == b"" and store.put("e", b"") == -600
    assert store.is_exist("p") == 1 and store.is_exist("q") == 0


def test_remove(store: Any) -> None:
    for key in ("a", "b", "ccc"):
        store.put(key, key.encode() * 10)
    assert store.remove("a") == 0 and store.remove("a") == -704
    assert store.remove_all(force=True) == 2
    assert store.batch_is_exist(["a", "b", "ccc"]) == [0, 0, 0]
    assert store.put("a", b"again") == 0 and store.get("a") == b"again"


def test_remove_takes_all_copies_away(opened: Callable[..., Any]) -> None:
    store = opened(spec=HOST, max_shapes=3)
    memory = Memory(store, sizes=(2, 2))
    assert store.put("k", b"old!") == 0
    assert store.batch_put_from_multi_buffers(["k"], memory.at(0), [[2, 2]]) == [0]
    assert store.remove("k") == 0
    assert store.is_exist("k") == 0 and store.get("k") == b"" and store.remove("k") == -704
    # One in a shape that is not open any more, too.
    assert store.put("k", b"old!") == 0
    for size in range(5, 9):
        assert store.put(f"k{size}", bytes(size)) == 0
    assert store.is_exist("k") == 0 and store.remove("k") == 0
    row = memory.rows[0].ctypes.data
    assert store.batch_get_into(["k"], [row], [4]) == [-704]
    assert store.remove_all() == 4


def test_a_shape_that_is_refused_fails_alone(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    big = np.arange(33 << 20, dtype=np.uint8)
    a = big.ctypes.data
    assert store.register_buffer(a, big.nbytes) == 0
    keys, at, sizes = ["x", "big", "y"], [a, a, a + 10], [10, 33 << 20, 20]
    assert store.batch_put_from(keys, at, sizes) == [0, -600, 0]
    assert "batch_put_from: " in caplog.text
    assert store.batch_is_exist(keys) == [1, 0, 1]
    assert store.batch_get_into(keys, at, sizes) == [10, -600, 20]


def test_addresses_outside_of_registered_buffers_are_never_touched(
        store: Any, caplog: pytest.LogCaptureFixture) -> None:
    memory, one = Memory(store), [[4096, 4096]]
    good = memory.at(0)[0]
    for bad in ([1 << 12, good[1]], [good[0], 2**64 - 1], [good[0], -5], [good[0], None],
                [good[0] - 1, good[1]], [good[0] + 16 * 4096 - 4095, good[1]]):
        assert store.batch_put_from_multi_buffers(["b"], [bad], one) == [-600]
        assert store.batch_get_into_multi_buffers(["b"], [bad], one) == [-600]
        assert "lead out of the registered buffers" in caplog.text
    # The others of the call go on.
    assert store.batch_put_from_multi_buffers(
        ["g", "b", "h"], [good, [1, 2], memory.at(1)[0]], one * 3) == [0, -600, 0]
    assert store.batch_is_exist(["g", "b", "h"]) == [1, 0, 1]
    assert store.unregister_buffer(memory.rows[0].ctypes.data) == 0
    assert store.unregister_buffer(memory.rows[0].ctypes.data) == -600
    assert store.batch_get_into_multi_buffers(["g"], [good], one) == [-600]


@pytest.mark.parametrize("how", ["unregister", "close"])
def test_memory_is_the_engines_once_it_is_taken_out(
        how: str, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine frees after `unregister_buffer`, or `close`, no other thread's move uses."""
    memory, inside, gate = Memory(store), threading.Event(), threading.Event()
    real = _moves.Mover._put_group

    def slow(*given: Any) -> None:
        inside.set()  # its addresses were found good
        assert gate.wait(600)
        real(*given)

    monkeypatch.setattr(_moves.Mover, "_put_group", slow)
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
    while memory.rows[0].ctypes.data in store._regions._of:  # until it waits for the put alone
        assert time.monotonic() < end
        time.sleep(0.001)
    assert out.is_alive() and not results
    if how == "unregister":  # a later one is not waited for, and does not find it
        assert store.batch_put_from_multi_buffers(["l"], memory.at(1), [[4096, 4096]]) == [-600]
    gate.set()
    put.join(600)
    out.join(600)
    assert sorted(map(str, results)) == ["0", "[0]"] and not store._regions._moves


def test_a_failure_of_the_library_is_one_that_engines_go_on_after() -> None:
    """vLLM's store of embeddings keeps its buffers for ever after other codes."""
    for status in (abi.KVT_E_IO, abi.KVT_E_CANCELLED, abi.KVT_E_PANIC, abi.KVT_E_TIMEOUT):
        assert _codes.of_status(status) == -900


def test_what_cannot_be_registered(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert store.register_buffer(1 << 12, 4096) == -600  # nothing is mapped there
    assert "device" in caplog.text
    assert store.register_buffer(0, 10) == -600
    array = np.zeros(10, np.uint8)
    assert store.register_buffer(array.ctypes.data, 0) == -600
    assert store.register_buffer(array.ctypes.data, 1 << 40) == -600  # not all of it
    assert store.register_buffer(array.ctypes.data, 10, "cuda:0") == -600


def test_malformed_calls(store: Any) -> None:
    memory = Memory(store)
    put = store.batch_put_from_multi_buffers
    assert put(["a", "b"], memory.at(0), [[4096, 4096]]) == [-600] * 2
    assert store.batch_put_from_multi_buffers(["a"], memory.at(0), [[4096]]) == [-600]
    for size in (0, -1, 2**32, 1.5, None):
        assert store.batch_put_from(["a"], [memory.at(0)[0][0]], [size]) == [-600]
    assert store.batch_put_from_multi_buffers(["a"], [[]], [[]]) == [-600]
    assert store.batch_is_exist([]) == [] and store.batch_put_from([], [], []) == []


def test_a_store_that_is_not_set_up(caplog: pytest.LogCaptureFixture) -> None:
    store = MooncakeDistributedStore()
    assert store.batch_is_exist(["a", "b"]) == [-1010] * 2 and store.get("a") == b""
    assert store.put("a", b"x") == -1010 and store.remove("a") == -1010
    assert "not set up" in caplog.text
    assert store.close() == 0


def test_setup_again_and_use_after_close(opened: Callable[..., Any]) -> None:
    store = opened()
    assert store.setup("h") == -600
    assert store.close() == 0 and store.close() == 0
    assert store.batch_is_exist(["a"]) == [-1010]


def test_a_full_store(opened: Callable[..., Any]) -> None:
    """An object larger than all memory is refused with Mooncake's code for that."""
    store = opened(spec="store(host=32MiB)")
    big = np.zeros(60 << 20, np.uint8)
    assert store.register_buffer(big.ctypes.data, big.nbytes) == 0
    # A buffer has 32 MiB at most.
    assert store.batch_put_from(["big"], [big.ctypes.data], [33 << 20]) == [-600]
    at, sizes = [[big.ctypes.data + (part << 20) for part in (0, 20, 40)]], [[20 << 20] * 3]
    assert store.batch_put_from_multi_buffers(["big"], at, sizes) == [-200]
    assert store.is_exist("big") == 0
    # Small ones come and go.
    for at in range(200):
        assert store.put(f"k{at}", bytes(1 << 20)) == 0
    assert 0 < sum(store.batch_is_exist([f"k{at}" for at in range(200)])) < 200


def test_stores_of_a_process_share_what_has_the_same_settings(opened: Callable[..., Any]) -> None:
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


def test_a_setup_that_fails_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ({"host_bytes": "8GiB"}, {"host_bytes": 1 << 26, "device": "cuda:x"},
                  {"spec": 5}, {"host_bytes": True}):
        monkeypatch.setenv("KVTIER_MOONCAKE_CONFIG", json.dumps(given))
        store = MooncakeDistributedStore()
        assert store.setup("localhost", "P2PHANDSHAKE", 0) == -600
    kvtier_mooncake.configure(spec=HOST)
    with monkeypatch.context() as broken:
        broken.setattr(_core.Core, "shapes", _fails)
        assert store.setup("localhost", "P2PHANDSHAKE", 0) == -900
    assert not _core._cores and store.kvtier_store is None
    assert store.setup("localhost", "P2PHANDSHAKE", 0) == 0 and store.put("k", b"v") == 0
    assert store.close() == 0


def _fails(*_: Any) -> None:
    raise make(abi.KVT_E_IO, "no")


def test_another_model_on_the_same_disk(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Engines' keys name a model, if anything, and not its weights."""
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


def test_what_others_put_is_found_at_the_remote(opened: Callable[..., Any], tmp_path: Any) -> None:
    given = {"spec": f'store(host=64MiB, remote=dir(path="{tmp_path}", timeout=600000))',
             "ask_s": 600}
    first, keys = opened(**given, level="remote"), names(8)
    memory = Memory(first, sizes=(4096, 100, 8192))
    sizes = [list(memory.sizes)] * 8
    assert first.batch_put_from_multi_buffers(keys, memory.at(*range(8)), sizes) == [0] * 8
    assert first.put("value", b"of bytes") == 0
    want = [memory.bytes(block) for block in range(8)]

    def other(policy: str, **more: Any) -> Any:  # a store of its own
        one = opened(**{**given, **more}, policy=policy)
        memory.spoil()
        for row in memory.rows:
            assert one.register_buffer(row.ctypes.data, row.nbytes) == 0
        return one

    # One that looks first, of objects in one shape and in several.
    one = other("lru")
    assert one.batch_is_exist([keys[0], "nothing", "value"]) == [1, 0, 1]
    assert one.batch_is_exist([*keys, "nothing"]) == [1] * 8 + [0]
    into = memory.at(*range(15, 7, -1))
    assert one.batch_get_into_multi_buffers(keys, into, sizes) == [sum(memory.sizes)] * 8
    assert [memory.bytes(15 - at) for at in range(8)] == want
    # One that does not, for all of them, some of which it has by then, and those that are nowhere.
    one = other("arc")
    assert one.batch_get_into_multi_buffers(keys[3:5], into[3:5], sizes[:2]) \
        == [sum(memory.sizes)] * 2
    mixed = ["nothing", *keys, "neither"]
    assert one.batch_get_into_multi_buffers(
        mixed, memory.at(7, *range(15, 7, -1), 6), [list(memory.sizes)] * 10) \
        == [-704, *[sum(memory.sizes)] * 8, -704]
    assert [memory.bytes(15 - at) for at in range(8)] == want
    assert one.get("value") == b"of bytes" and one.get_size(keys[0]) == sum(memory.sizes)
    # One that is told not to ask.
    one = other("s3fifo", ask_s=0)
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


def test_setup_by_a_mapping_as_lmcache_does() -> None:
    store = MooncakeDistributedStore()
    assert store.setup({"local_hostname": "here", "metadata_server": "P2PHANDSHAKE",
                        "global_segment_size": str(64 << 20), "local_buffer_size": "1",
                        "protocol": "tcp", "something_new": "x"}) == 0
    assert store.get_hostname() == "here"
    stats = store.kvtier_store.stats()
    assert stats["host_limit_bytes"] == 64 << 20
    assert store.close() == 0


def test_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Any,
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
                '{"host_bytes": 99999999, "level": "remote"}', '{"ask_s": -1}', '{"ask_s": true}',
                '{"max_shapes": 0}', '{"max_shapes": 61}'):
        monkeypatch.setenv("KVTIER_MOONCAKE_CONFIG", bad)
        assert MooncakeDistributedStore().setup("h") == -600, bad
    assert "host_bytes" in caplog.text
    with pytest.raises(kvtier.InvalidError):
        kvtier_mooncake.configure(hots=1)


def test_a_client_without_memory_and_no_store(caplog: pytest.LogCaptureFixture) -> None:
    assert MooncakeDistributedStore().setup("h", global_segment_size=0) == -600
    assert "KVTIER_MOONCAKE_SPEC" in caplog.text


def test_live_policy_metrics_and_evictions(opened: Callable[..., Any]) -> None:
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


def test_evictions_are_logged_once_where_it_was_asked_for(
        opened: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvtier.mooncake")
    for asked in (False, True):
        store = opened(spec=HOST, policy="lru", log_evictions=asked)
        for at in range(80):
            store.put(f"k{at}", bytes(1 << 20))
        store.is_exist("k0")
        store.close()
        told = [one.getMessage() for one in caplog.records
                if one.getMessage().startswith("evicted from host")]
        assert len(set(told)) == len(told) and bool(told) == asked


def test_at_most_so_many_shapes_are_open(opened: Callable[..., Any]) -> None:
    store = opened(spec=HOST, max_shapes=3)
    for size in range(1, 9):
        assert store.put(f"k{size}", bytes([size]) * size) == 0
    assert sum(store.batch_is_exist([f"k{size}" for size in range(1, 9)])) == 3
    memory = np.zeros(16, np.uint8)
    store.register_buffer(memory.ctypes.data, 16)
    assert store.batch_get_into(["k1"], [memory.ctypes.data], [1]) == [1]  # there all the same
    assert memory[0] == 1 and store.is_exist("k1") == 1
    assert store.remove_all() == 8


def test_a_store_with_no_room_for_one_more_shape(store: Any,
                                                 caplog: pytest.LogCaptureFixture) -> None:
    """The library has so many layouts: what is there goes on, what is new is not stored."""
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
        told = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
        assert len(told) == 2 and all("no more kinds of objects: " in one for one in told)
        caplog.clear()
        assert store.batch_get_into(["new", "k"], [a, a + 20], [20, 20]) == [-704, 10]
        assert store.batch_get_into(["k", "new"], [a, a + 20], [10, 20]) == [10, -704]
        assert store.batch_is_exist(["k", "new"]) == [1, 0] and store.get("k") == bytes(10)
        assert store.batch_put_from(["l", "new"], [a, a], [10, 20]) == [0, -200]
        assert store.remove("new") == -704 and store.remove("l") == 0
        assert store.batch_put_from(["x" * 9], [a], [33 << 20]) == [-600]  # none could have it


def test_nobody_waits_with_what_others_need(opened: Callable[..., Any], tmp_path: Any,
                                            monkeypatch: pytest.MonkeyPatch,
                                            caplog: pytest.LogCaptureFixture) -> None:
    """The catalogue is written as slowly as a remote that is stuck."""
    disk = {"host_bytes": 64 << 20, "disk_path": str(tmp_path), "disk_bytes": 256 << 20,
            "model": "m"}
    store = opened(**disk)
    assert store.put("k", b"old") == 0
    shapes, begun = store._core.shapes(""), threading.Event()
    real, ready = shapes._catalogue.put, kvtier.Event()

    def stuck(*args: Any, **more: Any) -> Any:
        begun.set()
        return real(*args, ready=ready, **more)

    monkeypatch.setattr(shapes._catalogue, "put", stuck)
    monkeypatch.setattr(_shapes, "NOTE_S", 600.0)  # the put waits until the test lets it go on
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
    assert found == [[1, 0, b"old"]] and waits  # other processes could not find it
    assert results[1:] == [0] and "catalogue" not in caplog.text
    # It is not waited for without end, and neither by closing.
    monkeypatch.setattr(_shapes, "NOTE_S", 0.1)
    ready = kvtier.Event()
    assert store.put("m", b"the newest") == 0 and "catalogue" in caplog.text
    caplog.clear()
    # The event is signalled only after the close: one that waited for it would not end.
    closing = threading.Thread(target=shapes.close)
    closing.start()
    closing.join(600)
    assert not closing.is_alive() and "catalogue" in caplog.text
    ready.signal()
    ready.close()
    store.close()
    assert opened(**disk).batch_is_exist(list("klm")) == [1] * 3


def test_threads(store: Any) -> None:
    """Puts, gets and registrations at once, with every byte compared."""
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
                memory.spoil()
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


def test_device_memory(opened: Callable[..., Any]) -> None:
    """Memory of a device goes through it: here the one for tests, which is slow and spoils."""
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
    # One object in memory of both kinds is refused.
    array = np.zeros(4096, np.uint8)
    store.register_buffer(array.ctypes.data, 4096)
    assert store.batch_put_from_multi_buffers(["m"], [[array.ctypes.data, at[0]]],
                                              [[4096, 4096]]) == [-600]
    store.unregister_buffer(memory.address)
    del event, memory


def test_memory_for_an_engines_pools(store: Any) -> None:
    allocator = MooncakeHostMemAllocator()
    address = allocator.alloc(1 << 20)
    assert address and store.register_buffer(address, 1 << 20) == 0
    assert store.batch_put_from(["k"], [address], [1 << 20]) == [0]
    assert store.get("k") == bytes(1 << 20)
    assert store.unregister_buffer(address) == 0 and allocator.free(address) == 0
    assert allocator.free(address) == -600 and allocator.alloc(1 << 60) == 0
