"""Two stores that share a remote."""

import kvtier
import numpy as np
import pytest
from gate import HANG_S

CHUNK, ROW, LAYERS = 16, 128, 3
GROUP = kvtier.Group(layers=range(LAYERS), k_bytes=ROW)
TOKENS = [n * 5 for n in range(4 * CHUNK + 3)]


def session_of(store, **fields):
    identity = kvtier.Identity(model=b"m", **fields)
    session = store.namespace(identity, chunk_tokens=CHUNK, groups=[GROUP]).session()
    session.append(TOKENS)
    return session


def planes():
    return [np.random.default_rng(layer).integers(0, 256, len(TOKENS) * ROW, np.uint8)
            for layer in range(LAYERS)]


def views(rows):
    return [kvtier.View(layer, ROW) for layer in rows]


@pytest.fixture
def shared(runtime, tmp_path):
    spec = f'store(host=8MiB, remote=dir(path="{tmp_path}", timeout=600000, object=16KiB))'
    with kvtier.Store(runtime, spec, secrets={"password": b"unused"}) as one:
        with kvtier.Store(runtime, spec) as other:
            yield one, other


def test_a_store_reads_what_another_wrote_to_the_remote(shared):
    one, other = shared
    rows = planes()
    with session_of(one) as session:
        done = session.put(views(rows), level=kvtier.LEVEL_REMOTE).result(timeout=HANG_S)
        assert done.value == len(TOKENS)
        assert one.remote_stats()["uploaded_objects"] == 4
    with session_of(other) as session:
        assert session.remote_lookup(timeout=HANG_S).result().value == 4 * CHUNK
        back = [np.zeros(4 * CHUNK * ROW, np.uint8) for _ in range(LAYERS)]
        session.get(views(back), tokens=4 * CHUNK).result(timeout=HANG_S)
        for loaded, stored in zip(back, rows):
            assert (loaded == stored[:4 * CHUNK * ROW]).all()
        stats = other.remote_stats()
        assert (stats["fetched_objects"], stats["corrupt_objects"]) == (4, 0)


def test_a_remote_tenant_has_separate_object_names(shared):
    one, other = shared
    with session_of(one, remote_tenant=7) as session:
        session.put(views(planes()), level=kvtier.LEVEL_REMOTE).result(timeout=HANG_S)
    with session_of(other, remote_tenant=8) as session:
        assert session.remote_lookup(timeout=HANG_S).result().value == 0


def test_a_store_without_a_remote_locates_nothing(runtime):
    with kvtier.Store(runtime, "store(host=8MiB)") as store, session_of(store) as session:
        assert session.remote_lookup().result(timeout=HANG_S).value == 0
        with pytest.raises(kvtier.UnavailableError):
            session.put(views(planes()), level=kvtier.LEVEL_REMOTE)
        assert set(store.remote_stats().values()) == {0}


def test_an_unknown_secret_is_rejected_without_its_value(runtime):
    with pytest.raises(kvtier.InvalidError) as caught:
        kvtier.Store(runtime, "store", secrets={"passwort": b"hunter2"})
    assert "password" in str(caught.value) and "hunter2" not in str(caught.value)


BLOCK = 4096


def pool_of(numbers):
    return kvtier.Pool(bytearray(b"".join(bytes([n]) * BLOCK for n in numbers)), BLOCK)


def blocks_of(store):
    return kvtier.Blocks(store, kvtier.Identity(model=b"m"), [BLOCK])


def test_a_store_locates_blocks_that_another_wrote_to_the_remote(shared):
    one, other = shared
    with blocks_of(one) as blocks:
        op = blocks.put([b"1", b"2"], pool_of([1, 2]).at([0, 1]), level=kvtier.LEVEL_REMOTE)
        assert op.result(timeout=HANG_S).value == 2
    with blocks_of(other) as blocks:
        names = kvtier.Names([b"1", b"9", b"2", b"1"])
        assert blocks.exists(names) == bytes(4)
        op = blocks.remote_lookup(names, timeout=HANG_S)
        with pytest.raises(kvtier.NotFoundError):
            op.result()
        assert (op.failed(), op.info().value) == ([1], 1)
        remote = 1 << kvtier.TIER_REMOTE
        assert blocks.exists(names) == bytes([remote, 0, remote, remote])
        assert (blocks.prefix(names), blocks.prefix([b"2", b"1", b"9"])) == (1, 2)
        back = bytearray(4 * BLOCK)
        op = blocks.get(names, kvtier.Pool(back, BLOCK).at(range(4)))
        op.wait(HANG_S)
        assert op.failed() == [1]
        assert [back[at * BLOCK:(at + 1) * BLOCK] == bytes([n]) * BLOCK
                for at, n in ((0, 1), (2, 2), (3, 1))] == [True] * 3
        assert blocks.exists([b"1"])[0] & kvtier.EXISTS_WHOLE
        assert blocks.remote_lookup([b"1", b"2"]).result(timeout=HANG_S).value == 2
        assert other.remote_stats()["looked_up_names"] == 3


def test_blocks_are_located_in_a_store_without_a_remote(runtime):
    with kvtier.Store(runtime, "store(host=8MiB)") as store, blocks_of(store) as blocks:
        blocks.put([b"1"], pool_of([1]).at([0])).result(timeout=HANG_S)
        op = blocks.remote_lookup([b"1", b"2"])
        op.wait(HANG_S)
        assert (op.failed(), op.info().value) == ([1], 1)
        with pytest.raises(kvtier.LimitError):
            blocks.remote_lookup([])
