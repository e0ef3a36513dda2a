"""Blocks under names that the engine chooses."""

import array
import functools
import gc
import threading
import weakref

import kvtier
import numpy as np
import pytest
from gate import HANG_S
from kvtier import _reaper

PARTS = [96, 32, 96, 32]
BLOCK = sum(PARTS)


def name(number):
    return number.to_bytes(8, "little")


@functools.lru_cache(maxsize=None)
def content(number):
    return np.random.default_rng(number).integers(0, 256, BLOCK, np.uint8)


@pytest.fixture
def store(runtime):
    with kvtier.Store(runtime, "store(host=8MiB)") as store:
        yield store


def filled(numbers):
    return np.concatenate([content(n) for n in numbers]) if numbers else np.zeros(0, np.uint8)


def blocks_of(store, **more):
    return kvtier.Blocks(store, kvtier.Identity(model=b"m"), PARTS, **more)


def test_a_get_returns_the_blocks_of_a_put_and_lists_missing_ones(store):
    with blocks_of(store) as blocks:
        pool = kvtier.Pool(filled(range(100)), BLOCK)
        names = [name(n) for n in range(100)]
        assert blocks.put(names, pool.at(range(100))).result() == (100, 100 * BLOCK)
        back = np.full(130 * BLOCK, 0xA5, np.uint8)
        order = list(reversed(range(130)))
        op = blocks.get([name(n) for n in range(130)], kvtier.Pool(back, BLOCK).at(order))
        with pytest.raises(kvtier.NotFoundError):
            op.result()
        assert op.failed() == list(range(100, 130))
        rows = back.reshape(130, BLOCK)[::-1]
        assert all((rows[n] == content(n)).all() for n in range(100))
        assert (rows[100:] == 0xA5).all()
        assert blocks.prefix([name(n) for n in range(130)]) == 100
        assert blocks.prefix([name(500), name(1)]) == 0
        found = blocks.exists([name(1), name(500)])
        assert found[0] & kvtier.EXISTS_WHOLE and not found[1]
        assert blocks.prefetch(names[:3]).result().value == 3
        assert blocks.drop([name(1), name(500)]).removed_chunks == 1
        assert blocks.prefix(names) == 1
        assert blocks.clear().removed_chunks == 99
    assert blocks.closed


def test_parts_may_be_scattered_in_memory(store):
    blocks = blocks_of(store)
    planes = [np.zeros((40, size), np.uint8) for size in PARTS]
    starts = np.cumsum([0, *PARTS])
    for part, plane in enumerate(planes):
        for n in range(20):
            plane[2 * n] = content(n)[starts[part]:starts[part + 1]]
    tables = [np.array([p[2 * n].ctypes.data for n in range(20)], np.uint64) for p in planes]
    names = [name(n) for n in range(20)]
    blocks.put(names, kvtier.PartAddresses(tables, kept=planes)).result()
    # Contiguous blocks at the caller's addresses.
    back = np.zeros((20, BLOCK), np.uint8)
    at = array.array("Q", [back[n].ctypes.data for n in range(20)])
    blocks.get(names, kvtier.BlockAddresses(at, kept=back)).result()
    assert all((back[n] == content(n)).all() for n in range(20))
    # Parts in another order in memory.
    shifts = [BLOCK - end for end in starts[1:]]
    other = np.zeros((20, BLOCK), np.uint8)
    pool = kvtier.Pool(other, BLOCK, shifts=[int(s) for s in shifts])
    blocks.get(names, pool.at(range(20))).result()
    assert (other[3][BLOCK - PARTS[0]:] == content(3)[:PARTS[0]]).all()


def test_other_names_identities_and_parts_are_other_blocks(store):
    blocks = blocks_of(store)
    pool = kvtier.Pool(filled([1, 2]), BLOCK)
    blocks.put([b"a", b"longer"], pool.at([0, 1])).result()
    assert [bool(x) for x in blocks.exists([b"a", b"longer", b"alonger"])] == [True, True, False]
    for other in (kvtier.Blocks(store, kvtier.Identity(model=b"n"), PARTS),
                  kvtier.Blocks(store, kvtier.Identity(model=b"m"), PARTS[:3])):
        assert other.exists([b"a"]) == b"\0"
        assert other.keys([b"a"]) != blocks.keys([b"a"])
    assert len(blocks.keys([b"a", b"b"])) == 64
    assert blocks.exists([]) == b"" and blocks.keys([]) == b"" and blocks.prefix([]) == 0


def test_blocks_survive_a_restart_on_disk(runtime, tmp_path):
    spec = f'store(host=4MiB, disk=disk(path="{tmp_path / "kv"}", bytes=64MiB, segment=1MiB))'
    names = [name(n) for n in range(50)]
    with kvtier.Store(runtime, spec) as store:
        pool = kvtier.Pool(filled(range(50)), BLOCK)
        blocks = blocks_of(store)
        blocks.put(names, pool.at(range(50)), level=kvtier.LEVEL_DURABLE).result()
    with kvtier.Store(runtime, spec) as store:
        back = np.zeros(50 * BLOCK, np.uint8)
        blocks = blocks_of(store)
        assert blocks.exists(names)[7] & 1 << kvtier.TIER_DISK
        blocks.get(names, kvtier.Pool(back, BLOCK).at(range(50))).result()
        assert (back == filled(range(50))).all()


def test_threads_share_blocks(store):
    blocks, wrong = blocks_of(store), []

    def work(seed):
        random = np.random.default_rng(seed)
        for _ in range(30):
            numbers = random.permutation(300)[:40].tolist()
            names = [name(n) for n in numbers]
            blocks.put(names, kvtier.Pool(filled(numbers), BLOCK).at(range(40))).result()
            back = np.zeros(40 * BLOCK, np.uint8)
            blocks.get(names, kvtier.Pool(back, BLOCK).at(range(40))).result()
            if not (back == filled(numbers)).all():
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert wrong == []


def test_invalid_arguments_are_rejected(store):
    blocks = blocks_of(store)
    pool = kvtier.Pool(bytearray(4 * BLOCK), BLOCK)
    assert pool.count == 4
    for rejected in (
        lambda: blocks.put([b"a"], pool.at([4])),
        lambda: blocks.put([b"a"], pool.at([-1])),
        lambda: blocks.put([b"a", b"b"], pool.at([0])),
        lambda: blocks.put([b"a"], kvtier.PartAddresses([[1]] * 3)),
        lambda: blocks.put([b"a"], kvtier.BlockAddresses([1], shifts=[0])),
        lambda: blocks.put([b""], pool.at([0])),
        lambda: kvtier.Pool(bytearray(8), 0),
        lambda: kvtier.Pool(bytearray(8), 4, offset=9),
        lambda: kvtier.Blocks(store, kvtier.Identity(), []),
    ):
        with pytest.raises(kvtier.InvalidError):
            rejected()
    for source in (b"read only", np.zeros((4, 8), np.uint8)[:, ::2], 7):
        with pytest.raises((TypeError, ValueError, BufferError, kvtier.InvalidError)):
            kvtier.Pool(source, 3)
    with pytest.raises(kvtier.LimitError):
        blocks.put([], pool.at([]))
    with pytest.raises(kvtier.UnavailableError):
        blocks.put([b"a"], pool.at([0]), level=kvtier.LEVEL_DISK)
    blocks.close()
    with pytest.raises(kvtier.ClosedError):
        blocks.exists([b"a"])
    with pytest.raises(kvtier.ClosedError):
        blocks.put([b"a"], pool.at([0]))


def test_kept_objects_live_until_the_op_is_closed(runtime, store):
    class Kept:
        pass

    kept = Kept()
    reference = weakref.ref(kept)
    blocks, memory = blocks_of(store), np.zeros(BLOCK, np.uint8)
    event = kvtier.ReadyEvent()
    at = kvtier.BlockAddresses([memory.ctypes.data], kept=kept)
    op = blocks.put([b"a"], at, ready=event)
    del kept, at
    gc.collect()
    assert reference() is not None and not op.info().resolved
    event.signal()
    op.result()
    op.close()
    gc.collect()
    assert reference() is None


def test_a_name_of_items_longer_than_a_byte_is_rejected(store):
    blocks = kvtier.Blocks(store, kvtier.Identity(model=b"m"), [64])
    pool = kvtier.Pool(bytearray(b"A" * 64), 64)
    # A 64-bit hash as a buffer of one number has 8 bytes, but a length of 1.
    with pytest.raises(kvtier.InvalidError):
        blocks.put([memoryview(array.array("Q", [0x1111_0001]))], pool.at([0]))


def test_parts_outside_of_the_pool_are_rejected(store):
    blocks = kvtier.Blocks(store, kvtier.Identity(model=b"m"), [64, 64])
    blocks.put([b"x"], kvtier.Pool(bytes(b"Z" * 128), 128, writable=False).at([0])).result()
    with pytest.raises(kvtier.InvalidError):
        blocks.get([b"x"], kvtier.Pool(bytes(128), 128, writable=False).at([0]))
    arena = bytearray(512)
    inner = memoryview(arena)[128:384]
    for pool, index in (
        (kvtier.Pool(inner[:64], 64), 0),
        (kvtier.Pool(inner, 64), 3),
        (kvtier.Pool(inner, 128, shifts=[0, 193]), 0),
        (kvtier.Pool(inner, 128, shifts=[-1, 64]), 0),
        (kvtier.Pool(inner, 128, offset=64, shifts=[-65, 0]), 0),
    ):
        with pytest.raises(kvtier.InvalidError):
            blocks.get([b"x"], pool.at([index]))
    assert bytes(arena) == bytes(512)
    blocks.get([b"x"], kvtier.Pool(inner, 128, offset=64, shifts=[-64, 128]).at([0])).result()
    assert bytes(arena[128:192]) == b"Z" * 64 == bytes(arena[320:384])


def test_a_rejected_put_keeps_no_objects(store):
    """A rejected put leaves neither a job nor a reference to its memory."""
    class Memory(bytearray):
        pass

    memory = Memory(4096)
    reference = weakref.ref(memory)
    pool = kvtier.Pool(memory, 64)
    gc.collect()
    before = len(_reaper._live)
    with kvtier.Blocks(store, kvtier.Identity(), [64]) as blocks:
        for wrong in (kvtier.InvalidError, kvtier.UnavailableError):
            given = {"priority": 77} if wrong is kvtier.InvalidError else {"after": 99}
            with pytest.raises(wrong):
                blocks.put([b"a"], pool.at([0]), **given)
    with pytest.raises(kvtier.ClosedError):
        blocks.put([b"a"], pool.at([0]))
    del blocks, memory, pool
    gc.collect()
    assert reference() is None
    assert len(_reaper._live) <= before


def test_a_pool_of_closed_device_memory_is_rejected(runtime):
    with kvtier.Device(runtime, "simulated", memory_bytes=1 << 20) as device:
        with kvtier.Store(runtime, "store(host=1MiB)", device=device) as store:
            with kvtier.Blocks(store, kvtier.Identity(), [256]) as blocks:
                memory = device.alloc(4096)
                pool = kvtier.Pool(memory, 256)
                place = pool.at([1])
                assert blocks.put([b"a"], place).result(HANG_S).value == 1
                memory.close()
                for closed in (place, pool.at([0])):
                    with pytest.raises(kvtier.ClosedError):
                        blocks.get([b"a"], closed)
                    with pytest.raises(kvtier.ClosedError):
                        blocks.put([b"b"], closed)


STARTS = [sum(PARTS[:part]) for part in range(len(PARTS) + 1)]


def test_a_transfer_of_some_parts_touches_no_other_bytes(store):
    blocks, names = blocks_of(store), [name(n) for n in range(20)]
    whole = kvtier.Pool(filled(range(20)), BLOCK)
    assert blocks.put(names, whole.at(range(20))).result().bytes_done == 20 * BLOCK
    for first, count in ((0, 1), (1, 2), (3, 1), (2, None), (0, None)):
        low, high = STARTS[first], STARTS[len(PARTS) if count is None else first + count]
        back = np.full((20, BLOCK), 0xA5, np.uint8)
        some = {"first_part": first, "parts": count}
        assert blocks.prefetch(names, **some).result().value == 20
        # Without shifts a part has its offset in the whole block.
        done = blocks.get(names, kvtier.Pool(back, BLOCK).at(range(20)), **some).result()
        assert done.bytes_done == 20 * (high - low)
        for n in range(20):
            assert (back[n, low:high] == content(n)[low:high]).all()
        assert (back[:, :low] == 0xA5).all() and (back[:, high:] == 0xA5).all()
        # Tables of only these parts, each in a separate plane.
        sizes = PARTS[first:None if count is None else first + count]
        planes = [np.full((20, size + 8), 0xA5, np.uint8) for size in sizes]
        tables = [np.array([row.ctypes.data for row in plane], np.uint64) for plane in planes]
        blocks.get(names, kvtier.PartAddresses(tables, kept=planes), **some).result()
        assert (np.concatenate([plane[:, :-8] for plane in planes], 1) == back[:, low:high]).all()
        assert all((plane[:, -8:] == 0xA5).all() for plane in planes)


def test_shifts_may_be_those_of_the_transferred_parts_or_of_all(store):
    blocks = blocks_of(store)
    blocks.put([b"a"], kvtier.Pool(filled([1]), BLOCK).at([0])).result()
    middle = content(1)[STARTS[1]:STARTS[3]]
    for shifts in ([0, PARTS[1]], [999, 0, PARTS[1], 999]):
        back = np.full(PARTS[1] + PARTS[2], 0xA5, np.uint8)
        place = kvtier.Pool(back, back.nbytes, shifts=shifts).at([0])
        blocks.get([b"a"], place, first_part=1, parts=2).result()
        assert (back == middle).all()
        # The other parts do not fit into this memory.
        with pytest.raises(kvtier.InvalidError):
            blocks.get([b"a"], place)
        with pytest.raises(kvtier.InvalidError):
            blocks.get([b"a"], place, first_part=2, parts=1 if len(shifts) == 2 else 2)
    for wrong in (kvtier.PartAddresses([[1]] * 4), kvtier.PartAddresses([[1]]),
                  kvtier.BlockAddresses([1], shifts=[0])):
        with pytest.raises(kvtier.InvalidError):
            blocks.get([b"a"], wrong, first_part=1, parts=2)


def test_a_block_exists_once_all_its_parts_are_stored(store):
    blocks, memory = blocks_of(store), filled([7])
    place = kvtier.Pool(memory, BLOCK).at([0])
    for part in range(len(PARTS)):
        assert blocks.exists([b"a"]) == b"\0"
        blocks.put([b"a"], place, first_part=part, parts=1).result()
    assert blocks.prefix([b"a"]) == 1
    back = np.zeros(BLOCK, np.uint8)
    blocks.get([b"a"], kvtier.Pool(back, BLOCK).at([0])).result()
    assert (back == memory).all()


@pytest.mark.parametrize("first, count", [
    (4, None), (0, 5), (3, 2), (0, 0), (2**32 - 1, 1), (-1, 1), (0, -1), (1, 2**32), (2**32, 1)])
def test_parts_out_of_range_are_rejected(store, first, count):
    blocks, there = blocks_of(store), kvtier.Pool(bytearray(BLOCK), BLOCK).at([0])
    for rejected in (
        lambda: blocks.put([b"a"], there, first_part=first, parts=count),
        lambda: blocks.get([b"a"], there, first_part=first, parts=count),
        lambda: blocks.prefetch([b"a"], first_part=first, parts=count),
    ):
        with pytest.raises(kvtier.InvalidError) as caught:
            rejected()
        if 0 <= first < 2**32 and 0 <= (count or 0) < 2**32:
            assert "a block of 4 parts: first_part must be below 4" in str(caught.value)


def test_prepared_names_serve_several_calls(store):
    blocks, pool = blocks_of(store), kvtier.Pool(filled(range(4)), BLOCK)
    for given in ([name(n) for n in range(4)], [b"a", b"bb", b"d" * 300]):
        plain = list(given)
        ready = kvtier.Names(given)
        given.clear()  # does not change the prepared names
        assert len(ready) == len(plain)
        addresses = pool.at(range(len(plain)))
        assert not any(blocks.exists(ready))
        assert blocks.put(ready, addresses).result().value == len(plain)
        assert blocks.keys(ready) == blocks.keys(plain)
        assert blocks.exists(ready) == blocks.exists(plain) and blocks.prefix(ready) == len(plain)
        assert blocks.prefetch(ready).result().value == len(plain)
        back = np.zeros(4 * BLOCK, np.uint8)
        for _ in range(2):
            op = blocks.get(ready, kvtier.Pool(back, BLOCK).at(range(len(plain))))
            assert op.result().value == len(plain)
        assert (back[:len(plain) * BLOCK] == filled(range(len(plain)))).all()
        assert blocks.drop(ready).removed_chunks == len(plain)
        with pytest.raises(kvtier.InvalidError):
            blocks.get(ready, pool.at([0]))
    blocks.close()
    with pytest.raises(kvtier.ClosedError):
        blocks.exists(ready)
    with pytest.raises(kvtier.ClosedError):
        blocks.get(ready, pool.at([0]))


def test_contiguous_names_of_equal_length_are_copied(store):
    blocks = blocks_of(store)
    hashes = np.random.default_rng(1).integers(0, 256, (50, 16), np.uint8)
    apart = [row.tobytes() for row in hashes]
    for joined in (hashes, hashes.tobytes(), bytearray(hashes.tobytes()),
                   memoryview(hashes.view(np.uint64)), np.asfortranarray(hashes)):
        names = kvtier.Names(joined, each_bytes=16)
        assert len(names) == 50 and blocks.keys(names) == blocks.keys(apart)
    mine = bytearray(hashes.tobytes())
    names = kvtier.Names(mine, each_bytes=16)
    mine[:] = bytes(len(mine))
    assert blocks.keys(names) == blocks.keys(apart)
    for wrong, each in ((b"abcde", 2), (b"abcd", -2), (b"abcd", 2**64)):
        with pytest.raises(kvtier.InvalidError):
            kvtier.Names(wrong, each_bytes=each)
    for wrong in ("abcd", 4, [b"ab"], None):
        with pytest.raises(TypeError):
            kvtier.Names(wrong, each_bytes=2)


@pytest.mark.parametrize("names", [
    ["a"], "ab", b"ab", [1], [None], [b"a", "b"],
    [memoryview(array.array("H", [1, 2])), b"abcd"], [memoryview(array.array("Q", [1]))] * 2,
    [b""], [b"", b"a"], [b"a" * 65537]])
def test_invalid_names_are_rejected(store, names):
    blocks, pool = blocks_of(store), kvtier.Pool(bytearray(2 * BLOCK), BLOCK)
    for rejected in (lambda: blocks.exists(names), lambda: blocks.drop(names),
                    lambda: blocks.put(names, pool.at(range(len(names))))):
        with pytest.raises((TypeError, kvtier.InvalidError, kvtier.LimitError)):
            rejected()


def test_pool_indexes_may_be_of_any_integer_sequence(store):
    memory = bytearray(300 * 64)
    pool = kvtier.Pool(memory, 64)
    first = pool.at([0]).addresses[0]
    wanted = [first + 64 * index for index in (299, 0, 256, 3, 3)]
    order = [299, 0, 256, 3, 3]
    for given in (order, tuple(order), array.array("i", order), np.array(order),
                  np.array(order, np.uint16), np.array([order, order]).T[:, 0],
                  np.array(order, ">i4"), [np.int64(index) for index in order], iter(order)):
        assert list(pool.at(given).addresses) == wanted
    assert list(pool.at(range(299, -1, -1)).addresses) == [first + 64 * i
                                                          for i in range(299, -1, -1)]
    assert list(pool.at(bytes([1, 2])).addresses) == [first + 64, first + 128]
    assert len(pool.at([]).addresses) == 0 == len(pool.at(np.array([], np.int64)).addresses)
    for wrong in ([300], [-1], [0, 2**64], [-2**63], [1.0], ["1"], np.array([-1]),
                  np.array([1.5]), np.array([[1]]), [None]):
        with pytest.raises(kvtier.InvalidError, match="of a pool of 300"):
            pool.at(wrong)
    with pytest.raises(kvtier.InvalidError):
        kvtier.Pool(bytearray(10), 64).at([0])


def test_a_place_is_memory_without_a_python_object(runtime, store):
    memory = filled(range(4))
    freed = []

    class Kept:
        def __del__(self):
            freed.append(True)

    place = kvtier.MemoryRange(memory.ctypes.data, memory.nbytes, kept=Kept())
    assert (place.address, place.nbytes, place.on_device) == (
        memory.ctypes.data, memory.nbytes, False)
    blocks = blocks_of(store)
    pool = kvtier.Pool(place, BLOCK)
    assert pool.count == 4
    with pytest.raises(kvtier.InvalidError):
        pool.at([4])
    event = kvtier.ReadyEvent()
    op = blocks.put([b"a", b"b"], pool.at([3, 1]), ready=event)
    del place, pool
    gc.collect()
    assert not freed  # the op holds the object
    event.signal()
    assert op.result().value == 2
    op.close()
    gc.collect()
    assert freed
    back = np.zeros(BLOCK, np.uint8)
    blocks.get([b"a"], kvtier.Pool(back, BLOCK).at([0])).result()
    assert (back == content(3)).all()
    for address, nbytes in ((0, 8), (2**64 - 8, 9), (-1, 8), (8, -1), (2**64, 1)):
        with pytest.raises(kvtier.InvalidError):
            kvtier.MemoryRange(address, nbytes)


def test_a_place_may_be_device_memory(runtime):
    with kvtier.Device(runtime, "simulated", memory_bytes=1 << 20) as device:
        with kvtier.Store(runtime, "store(host=1MiB)", device=device) as store:
            with kvtier.Blocks(store, kvtier.Identity(), [256]) as blocks:
                with device.alloc(4096) as memory:
                    place = kvtier.MemoryRange(memory.address, memory.nbytes,
                                         on_device=memory.on_device, kept=memory)
                    device.upload(bytes(range(256)) * 16, memory).wait()
                    blocks.put([b"a"], kvtier.Pool(place, 256).at([15])).result(HANG_S)
                    back = bytearray(256)
                    blocks.get([b"a"], kvtier.Pool(back, 256).at([0])).result(HANG_S)
                    assert bytes(back) == bytes(range(256))
                    row = bytearray(512)
                    device.download(place, row, offset=256).wait()
                    assert bytes(row) == bytes(range(256)) * 2
        with kvtier.Store(runtime, "store(host=1MiB)") as store:
            with kvtier.Blocks(store, kvtier.Identity(), [256]) as blocks:
                with pytest.raises(kvtier.UnavailableError):
                    blocks.put([b"a"], kvtier.Pool(
                        kvtier.MemoryRange(4096, 256, on_device=True), 256).at([0]))


def test_leaving_the_with_block_of_an_op_cancels_it(store):
    blocks, event = blocks_of(store), kvtier.ReadyEvent()
    with blocks.put([b"a"], kvtier.Pool(bytearray(BLOCK), BLOCK).at([0]), ready=event) as op:
        op.wait(0.01)
        assert not op.info().released
    assert op.closed and blocks.exists([b"a"]) == b"\0"


def stored(store, numbers):
    blocks = blocks_of(store)
    names = [name(n) for n in numbers]
    blocks.put(names, kvtier.Pool(filled(numbers), BLOCK).at(range(len(numbers)))).result()
    return blocks, names


def test_held_blocks_are_not_dropped(store):
    blocks, names = stored(store, list(range(20)))
    with blocks.hold([*names[:10], name(99)]) as hold:
        assert [bool(byte) for byte in hold.held] == [True] * 10 + [False]
        assert hold.held == blocks.exists([*names[:10], name(99)])
        assert "hold" in repr(hold).lower()
        report = blocks.drop(names)
        assert (report.removed_chunks, report.referenced_chunks) == (10, 10)
        again = blocks.hold(names[:5])
        again.close()
        again.close()  # does not release the other hold
        assert again.closed
        assert blocks.drop(names).referenced_chunks == 10
        with pytest.raises(kvtier.ClosedError):
            again.__enter__()
    assert blocks.drop(names).removed_chunks == 10
    assert blocks.hold(names).held == bytes(20)
    assert blocks.hold([]).held == b""
    blocks.close()


def test_a_dropped_hold_releases_its_blocks(store):
    blocks, names = stored(store, [1, 2, 3])
    hold = blocks.hold([names[0], names[0], names[2]])
    assert blocks.drop(names).referenced_chunks == 2
    del hold
    gc.collect()
    assert _reaper.flush()
    assert blocks.drop(names).removed_chunks == 2
    blocks.close()


@pytest.mark.parametrize("ready", [False, True])
def test_a_hold_releases_only_the_blocks_that_it_found(store, ready):
    blocks, lengths = blocks_of(store), [1, 5, 2, 7, 3]
    for names in ([b"x" * n for n in lengths], [bytes([n]) * 3 for n in lengths]):
        pool = kvtier.Pool(filled(range(5)), BLOCK)
        blocks.put(names, pool.at(range(5))).result()
        missing = [b"?" * n for n in lengths]
        mixed = [name for pair in zip(missing, names) for name in pair]
        with blocks.hold(kvtier.Names(mixed) if ready else mixed) as hold:
            assert [bool(byte) for byte in hold.held] == [False, True] * 5
            assert blocks.drop(names).referenced_chunks == 5
        assert blocks.drop(names).removed_chunks == 5
    blocks.close()


def test_closing_blocks_ends_their_holds(store):
    blocks, names = stored(store, [1, 2])
    hold, late = blocks.hold(names), blocks.hold(names)
    blocks.close()
    hold.close()
    with blocks_of(store) as others:
        assert others.drop(names).removed_chunks == 2
        with pytest.raises(kvtier.ClosedError):
            blocks.hold(names)
        with pytest.raises(kvtier.ClosedError):
            blocks.hint(names)
    del late
    gc.collect()
    assert _reaper.flush()


def test_concurrent_closes_release_a_hold_once(store):
    blocks, names = stored(store, [1, 2])
    for _ in range(50):
        hold, other = blocks.hold(names), blocks.hold(names)
        threads = [threading.Thread(target=hold.close) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert blocks.drop(names).referenced_chunks == 2
        other.close()
    assert blocks.drop(names).removed_chunks == 2
    blocks.close()


def test_a_hold_is_released_when_another_thread_closes_it_during_the_release(store, monkeypatch):
    blocks, names = stored(store, [1, 2])
    hold, release = blocks.hold(names), kvtier._blocks.lib.kvt_session_release_blocks

    class Late:
        def kvt_session_release_blocks(self, *args):
            other = threading.Thread(target=hold.close)
            other.start()
            other.join()
            return release(*args)

    monkeypatch.setattr(kvtier._blocks, "lib", Late())
    hold.close()
    monkeypatch.undo()
    assert hold.closed
    assert blocks.drop(names).removed_chunks == 2
    blocks.close()


def test_blocks_hinted_as_done_are_evicted_first(runtime):
    with kvtier.Store(runtime, "store(host=512KiB,policy=predictive)") as store:
        blocks = kvtier.Blocks(store, kvtier.Identity(), [4096])
        pool, names = kvtier.Pool(bytearray(4096 * 80), 4096), [name(n) for n in range(200)]
        blocks.put(names[:80], pool.at(range(80))).result()
        blocks.hint([*names[:40], b"not there"], done=True)
        blocks.put(names[100:170], pool.at(range(70))).result()
        assert sum(map(bool, blocks.exists(names[:40]))) < 20
        assert all(blocks.exists(names[40:80]))
        for wrong in ({"confidence": 2.0}, {"stop": 99}):
            with pytest.raises(kvtier.InvalidError):
                blocks.hint(names[:1], **wrong)
        blocks.close()
