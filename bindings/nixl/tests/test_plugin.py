"""The plugin in real NIXL agents, each in a process of its own.

KVTIER_NIXL_PYTHON names an interpreter that has NIXL and numpy; KVTIER_NIXL_PLUGINS the folder with
libplugin_KVTIER.so and libplugin_OBJ.so. `ffi-tests/run --engines nixl` provides both.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List

import numpy as np
import pytest

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1] / "python" / "tests"))
from processes import Child, Redis, redis_server  # noqa: E402

PYTHON = os.environ.get("KVTIER_NIXL_PYTHON", "")
PLUGINS = os.environ.get("KVTIER_NIXL_PLUGINS", "")
pytestmark = pytest.mark.skipif(not PYTHON or not PLUGINS,
                                reason="KVTIER_NIXL_PYTHON and KVTIER_NIXL_PLUGINS are not set")
#: One byte, a head's size, a page, a block, several parts, and parts of unequal sizes.
SIZES = [1, 8, 4096, 1 << 20, 8 << 20, (9 << 20) + 3]
KEYS = [f"model/0123/{at}.bin" for at in range(len(SIZES))]


class Agent(Child):
    """A NIXL agent in a process of its own."""

    def __init__(self, log: Path, params: Dict[str, str], **more: Any) -> None:
        environment = {"NIXL_PLUGIN_DIR": PLUGINS, **more.pop("environment", {})}
        super().__init__([PYTHON, HERE / "agent.py"], log, environment, {"params": params, **more})

    def write(self, keys: List[str] = KEYS, sizes: List[int] = SIZES, **more: Any) -> Any:
        return self.call("transfer", kind="WRITE", keys=keys, sizes=sizes, **more)

    def read(self, keys: List[str] = KEYS, sizes: List[int] = SIZES, **more: Any) -> Any:
        return self.call("transfer", kind="READ", keys=keys, sizes=sizes, **more)

    def sizes(self, keys: List[str] = KEYS) -> List[int]:
        return [int(one["size"]) if one else 0 for one in self.call("query", keys=keys)]


def remote_of(redis: Redis) -> str:
    return f'redis(url="{redis.url}", absent=1, timeout=600000)'


@pytest.fixture
def redis() -> Iterator[Redis]:
    with redis_server() as server:
        yield server


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


def dir_store(folder: Path, **more: str) -> Dict[str, str]:
    remote = f'dir(path="{folder}", absent=1, timeout=600000)'
    return {"spec": f"store(host=128MiB, remote={remote})", **more}


def sums(keys: List[str] = KEYS, sizes: List[int] = SIZES) -> List[str]:
    """The sums of the objects, computed here."""
    out = []
    for key, size in zip(keys, sizes):
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
        memory = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
        out.append(hashlib.sha256(memory.tobytes()).hexdigest())
    return out


def test_nixl_lists_the_plugin(log: Path, shared: Path) -> None:
    agent = Agent(log, dir_store(shared))
    names, params, kinds = agent.call("plugins")
    assert {"KVTIER", "OBJ"} <= set(names)
    assert set(params) == {"spec", "level", "weights", "bucket", "lookup_s"}
    assert set(kinds) == {"DRAM_SEG", "OBJ_SEG"}
    agent.close()


def exchange(log: Path, params: Dict[str, str]) -> None:
    """One process writes objects, another that was started before, and asked, finds and reads them.
    `absent=1` in the store: the answer "absent" is forgotten at once. Timeouts are long for slow
    machines."""
    reader = Agent(log, params, name="reader")
    assert reader.sizes() == [0] * len(KEYS)
    writer = Agent(log, params, name="writer")
    assert writer.write()["states"] == ["DONE"]
    writer.close()
    assert reader.sizes([*KEYS, "unknown"]) == [*SIZES, 0]
    # Twice: from the remote, and from host memory. And a handle may be posted again.
    for _ in range(2):
        answer = reader.read(times=2)
        assert answer["states"] == ["DONE"] * 2 and answer["sums"] == sums()
    late = Agent(log, params, name="late")  # has not asked before
    answer = late.read()
    assert answer["states"] == ["DONE"] and answer["sums"] == sums()
    late.close()
    reader.close()


def test_two_processes_share_objects_through_a_directory(log: Path, shared: Path) -> None:
    exchange(log, dir_store(shared))


def test_two_processes_share_objects_through_redis(log: Path, redis: Redis) -> None:
    exchange(log, {"spec": f"store(host=128MiB, remote={remote_of(redis)})"})


def test_the_password_of_the_remote_comes_from_the_environment(log: Path) -> None:
    with redis_server("--requirepass", "secret") as server:
        params = {"spec": f"store(host=128MiB, remote={remote_of(server)})"}
        agent = Agent(log, params, environment={"KVTIER_REMOTE_PASSWORD": "secret"})
        assert agent.write()["states"] == ["DONE"]
        agent.close()
        with pytest.raises(RuntimeError, match="NIXL_ERR_BACKEND"):
            Agent(log, params, environment={"KVTIER_REMOTE_PASSWORD": "wrong"})


def test_thousands_of_objects_in_one_transfer(log: Path, shared: Path) -> None:
    keys, sizes = [f"k{at}" for at in range(3000)], [512 + at % 2 for at in range(3000)]
    params = dir_store(shared)
    writer = Agent(log, params)
    assert writer.write(keys, sizes)["states"] == ["DONE"]
    writer.close()
    reader = Agent(log, params)
    assert reader.sizes(keys) == sizes
    answer = reader.read(keys, sizes)
    assert answer["states"] == ["DONE"] and answer["sums"] == sums(keys, sizes)
    reader.close()


def test_many_sizes_one_after_the_other(log: Path, shared: Path) -> None:
    agent = Agent(log, dir_store(shared))
    for first in range(0, 160, 40):
        keys, sizes = [f"k{at}" for at in range(first, first + 40)], [
            100 + at for at in range(first, first + 40)]
        assert agent.write(keys, sizes)["states"] == ["DONE"]
    for first in range(0, 160, 40):
        keys, sizes = [f"k{at}" for at in range(first, first + 40)], [
            100 + at for at in range(first, first + 40)]
        assert agent.sizes(keys) == sizes and agent.read(keys, sizes)["sums"] == sums(keys, sizes)
    with pytest.raises(RuntimeError, match="BACKEND"):
        agent.write([f"n{at}" for at in range(99)], [1000 + at for at in range(99)])
    agent.close()
    assert "64 layouts, the limit" in log.read_text()


def test_objects_without_room_for_their_size_are_missing(log: Path, shared: Path) -> None:
    """Transfers that are not released use all but one of the 64 layouts of the store, then all."""
    agent = Agent(log, dir_store(shared))
    agent.write()
    for count, expected in ((63, SIZES), (64, [0] * len(SIZES))):
        many = list(range(1000, 1000 + count))
        agent.call("prepare", kind="READ", keys=[f"n{at}" for at in many], sizes=many)
        assert agent.sizes() == expected
        agent.call("end")
        assert agent.sizes() == SIZES
    agent.close()


def test_agents_of_one_process_share_a_store(log: Path, tmp_path: Path) -> None:
    """A disk directory could not be opened twice. Buckets stay separate."""
    spec = f'store(host=64MiB, disk=disk(path="{tmp_path}/d", bytes=64MiB))'
    agent = Agent(log, {"spec": spec}, others=[{"spec": spec, "bucket": "b"}, {"spec": spec}])
    agent.write(KEYS[:3], SIZES[:3])
    assert agent.call("others_see", keys=KEYS[:3]) == [0, 3]
    agent.close()


def test_an_unknown_key_and_a_wrong_size_are_not_found(log: Path, shared: Path) -> None:
    agent = Agent(log, dir_store(shared))
    agent.write()
    for keys, sizes in ((["unknown"], [4096]), ([KEYS[2]], [4097]), ([*KEYS, "no"], [*SIZES, 7])):
        with pytest.raises(RuntimeError, match="NOT_FOUND"):
            agent.read(keys, sizes)
    assert agent.read()["sums"] == sums()
    agent.close()
    assert "a READ of 7 objects failed for 1: KVT_E_NOT_FOUND" in log.read_text()


def test_a_damaged_object_is_an_error_and_others_are_read(log: Path, shared: Path) -> None:
    params = dir_store(shared)
    writer = Agent(log, params)
    writer.write()
    writer.close()
    damaged = 0
    for file in shared.rglob("*"):
        if file.is_file() and file.stat().st_size > 1 << 20:  # of the three large objects
            with file.open("r+b") as opened:
                opened.seek(file.stat().st_size // 2)
                byte = opened.read(1)
                opened.seek(-1, os.SEEK_CUR)
                opened.write(bytes([byte[0] ^ 1]))
            damaged += 1
    assert damaged >= 3
    reader = Agent(log, params)
    for at, size in enumerate(SIZES):
        if size < 1 << 20:
            assert reader.read([KEYS[at]], [size])["sums"] == [sums()[at]]
        else:
            with pytest.raises(RuntimeError, match="NOT_FOUND"):
                reader.read([KEYS[at]], [size])
    reader.close()


def test_a_disk_survives_a_restart_and_serves_one_process(log: Path, tmp_path: Path) -> None:
    disk = f'disk=disk(path="{tmp_path}/d{{slot}}", bytes=256MiB)'
    params = {"spec": f"store(host=128MiB, {disk})", "level": "durable"}
    agent = Agent(log, params)
    assert agent.write()["states"] == ["DONE"]
    second = Agent(log, params)  # takes another directory
    assert second.sizes() == [0] * len(KEYS)
    second.close()
    with pytest.raises(RuntimeError, match="NIXL_ERR_BACKEND"):
        Agent(log, {"spec": params["spec"].replace("{slot}", "0")})
    assert "several processes need {slot}" in log.read_text()
    agent.kill()
    agent = Agent(log, params)
    assert agent.sizes() == SIZES and agent.read()["sums"] == sums()
    agent.close()


def test_buckets_and_weights_separate_objects(log: Path, shared: Path) -> None:
    params = [dir_store(shared), dir_store(shared, bucket="b"), dir_store(shared, weights="w")]
    agents = [Agent(log, one) for one in params]
    agents[1].write()
    assert [agent.sizes() == SIZES for agent in agents] == [False, True, False]
    for agent in agents:
        agent.close()


def test_it_stands_for_the_object_plugin(log: Path, shared: Path) -> None:
    """An engine names OBJ and passes the parameters of S3; the environment names the store."""
    environment = {"KVTIER_NIXL_SPEC": dir_store(shared)["spec"]}
    params = {"bucket": "kv", "endpoint_override": "unused", "scheme": "http", "num_threads": "4"}
    agent = Agent(log, params, plugin="OBJ", environment=environment)
    assert agent.write()["states"] == ["DONE"] and agent.sizes() == SIZES
    agent.close()


@pytest.mark.parametrize("params, words", [
    ({}, "the parameter spec is missing"),
    ({"spec": "store", "sepc": "x"}, 'there is no parameter "sepc": use spec, level'),
    ({"spec": "shop(host=1GiB)"}, "shop"),
    ({"spec": "store", "level": "far"}, 'level="far" is unknown: use ram'),
    ({"spec": "store", "level": "remote"}, 'level="remote" needs a store that writes to a remote'),
    ({"spec": "store", "level": "durable"}, 'level="durable" needs a store with a disk'),
    ({"spec": "store", "lookup_s": "1,5"}, 'lookup_s="1,5" is invalid: give seconds'),
    ({"spec": "store", "lookup_s": "soon"}, 'lookup_s="soon" is invalid: give seconds'),
    ({"spec": 'store(remote=dir(path="/nowhere/at/all"))'}, "/nowhere/at/all"),
])
def test_bad_parameters_are_refused_in_words(log: Path, params: Dict[str, str], words: str) -> None:
    with pytest.raises(RuntimeError, match="NIXL_ERR_BACKEND"):
        Agent(log, params)
    assert words in log.read_text()


@pytest.mark.parametrize("what, words", [
    ({"keys": ["k"], "sizes": [4096], "offset": 512}, "from offset 0"),
    ({"keys": ["k"], "sizes": [4096], "short": 1}, "MISMATCH|INVALID_PARAM"),
])
def test_bad_transfers_are_refused(log: Path, shared: Path, what: Any, words: str) -> None:
    agent = Agent(log, dir_store(shared))
    with pytest.raises(RuntimeError) as refused:
        agent.call("refused", kind="WRITE", **what)
    assert any(word in str(refused.value) + log.read_text() for word in words.split("|"))
    assert agent.write()["states"] == ["DONE"]
    agent.close()


def test_a_transfer_may_be_released_while_it_runs(log: Path, shared: Path) -> None:
    agent = Agent(log, dir_store(shared))
    keys = [f"large{at}" for at in range(16)]
    agent.call("abandon", kind="WRITE", keys=keys, sizes=[8 << 20] * 16)
    assert agent.write()["states"] == ["DONE"]
    agent.call("abandon", kind="READ", keys=KEYS, sizes=SIZES)
    assert agent.read()["sums"] == sums() and agent.call("abandoned_is_zero")
    agent.close()
    for _ in range(8):  # from the remote
        agent = Agent(log, dir_store(shared))
        agent.call("abandon", kind="READ", keys=KEYS, sizes=SIZES)
        assert agent.read()["sums"] == sums() and agent.call("abandoned_is_zero")
        agent.close()


def test_a_released_read_ends_in_its_remote_lookup(log: Path, redis: Redis) -> None:
    """The server does not answer. The release neither waits for it nor starts the copy."""
    params = {"spec": f"store(host=128MiB, remote={remote_of(redis)})", "lookup_s": "600"}
    writer, reader = Agent(log, params), Agent(log, params)
    writer.write(KEYS[:4], SIZES[:4])
    writer.close()
    redis.process.send_signal(signal.SIGSTOP)
    assert reader.call("abandon", kind="READ", keys=KEYS[:4], sizes=SIZES[:4]) == "PROC"
    redis.process.send_signal(signal.SIGCONT)
    assert reader.read(KEYS[:4], SIZES[:4])["sums"] == sums(KEYS[:4], SIZES[:4])
    assert reader.call("abandoned_is_zero")
    reader.close()


def test_a_dead_server_is_an_error_and_the_agent_goes_on(log: Path, redis: Redis) -> None:
    params = {"spec": f"store(host=128MiB, remote={remote_of(redis)})", "lookup_s": "1"}
    agent = Agent(log, params)
    assert agent.write(KEYS[:4], SIZES[:4])["states"] == ["DONE"]
    redis.kill()
    with pytest.raises(RuntimeError, match="BACKEND"):
        agent.write(["new"], [4096])
    with pytest.raises(RuntimeError, match="NOT_FOUND"):
        agent.read(["other"], [4096])
    assert agent.read(KEYS[:4], SIZES[:4])["sums"] == sums(KEYS[:4], SIZES[:4])  # host memory
    agent.close()
