"""Two stores that share a remote."""

import kvtier
import numpy as np
import pytest

CHUNK, ROW, LAYERS = 16, 128, 3
GROUP = kvtier.Group(layers=range(LAYERS), k_bytes=ROW)
TOKENS = [n * 5 for n in range(4 * CHUNK + 3)]


def session_of(store, **who):
    space = store.namespace(kvtier.Identity(model=b"m", **who), chunk_tokens=CHUNK, groups=[GROUP])
    session = space.session()
    session.append(TOKENS)
    return session


def planes():
    return [np.random.default_rng(layer).integers(0, 256, len(TOKENS) * ROW, np.uint8)
            for layer in range(LAYERS)]


def views(rows):
    return [kvtier.View(layer, ROW) for layer in rows]


@pytest.fixture
def shared(runtime, tmp_path):
    spec = f'store(host=8MiB, remote=dir(path="{tmp_path}", object=16KiB))'
    with kvtier.Store(runtime, spec, secrets={"password": b"of nobody"}) as one:
        with kvtier.Store(runtime, spec) as other:
            yield one, other


def test_one_puts_and_the_other_finds(shared):
    one, other = shared
    rows = planes()
    with session_of(one) as session:
        done = session.put(views(rows), level=kvtier.LEVEL_REMOTE).result(timeout=30)
        assert done.value == len(TOKENS)
        assert one.remote_stats()["sent_objects"] == 4
    with session_of(other) as session:
        assert session.locate(timeout=30).result().value == 4 * CHUNK
        back = [np.zeros(4 * CHUNK * ROW, np.uint8) for _ in range(LAYERS)]
        session.get(views(back), tokens=4 * CHUNK).result(timeout=30)
        for ours, theirs in zip(back, rows):
            assert (ours == theirs[:4 * CHUNK * ROW]).all()
        stats = other.remote_stats()
        assert (stats["fetched_objects"], stats["corrupt_objects"]) == (4, 0)


def test_a_tenant_has_names_of_its_own(shared):
    one, other = shared
    with session_of(one, remote_tenant=7) as session:
        session.put(views(planes()), level=kvtier.LEVEL_REMOTE).result(timeout=30)
    with session_of(other, remote_tenant=8) as session:
        assert session.locate(timeout=30).result().value == 0


def test_without_a_remote(runtime):
    with kvtier.Store(runtime, "store(host=8MiB)") as store, session_of(store) as session:
        assert session.locate().result(timeout=30).value == 0
        with pytest.raises(kvtier.UnavailableError):
            session.put(views(planes()), level=kvtier.LEVEL_REMOTE)
        assert set(store.remote_stats().values()) == {0}


def test_secrets_have_names(runtime):
    with pytest.raises(kvtier.InvalidError) as refused:
        kvtier.Store(runtime, "store", secrets={"passwort": b"hunter2"})
    assert "password" in str(refused.value) and "hunter2" not in str(refused.value)
