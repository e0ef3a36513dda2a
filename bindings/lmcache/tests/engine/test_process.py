"""Several processes on one directory: restarts, kills, damage."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, List

import pytest
import torch
from sites import config, key, metadata

import kvtier
from kvtier_lmcache import KvtierBackend

CHILD = [sys.executable, str(Path(__file__).with_name("child.py"))]
SHA = re.compile(r"^(?:[0-9a-f]{64}|none|opened)$", re.M)


def child(action: str, path: Any, first: int = 0, count: int = 16) -> List[str]:
    """Runs another process, and returns what it says of each chunk."""
    done = subprocess.run([*CHILD, action, str(path), str(first), str(count)], check=True,
                          timeout=600, stdout=subprocess.PIPE, text=True)
    return SHA.findall(done.stdout)


def hashes(content: List[Any]) -> List[str]:
    return [hashlib.sha256(data).hexdigest() if data else "none" for data in content]


def closed(site: Any) -> List[str]:
    """Puts 64 chunks and closes the site. Returns the chunks' hashes."""
    stored = hashes(site.put(range(64)))
    site.close()
    return stored


def test_another_process_finds_the_chunks(opened: Any, tmp_path: Any) -> None:
    stored = child("put", tmp_path)
    assert len(set(stored)) == 16
    site = opened(tmp_path)
    assert hashes(site.get([key(number) for number in range(17)])) == [*stored, "none"]


def test_durable_chunks_survive_a_kill(opened: Any, tmp_path: Any) -> None:
    process = subprocess.Popen([*CHILD, "die", str(tmp_path), "0", "100000"], text=True,
                               stdout=subprocess.PIPE)
    assert process.stdout is not None
    acknowledged: List[str] = []
    for line in process.stdout:
        acknowledged += SHA.findall(line)
        if len(acknowledged) == 50:
            process.send_signal(signal.SIGKILL)
            break
    rest = process.communicate(timeout=600)[0]
    acknowledged += SHA.findall(rest)
    assert process.returncode == -signal.SIGKILL
    found = opened(tmp_path).get([key(number) for number in range(len(acknowledged))])
    assert hashes(found) == acknowledged


@pytest.mark.parametrize("offset", [0.0, 0.37, 0.9])
def test_a_damaged_chunk_is_a_miss_and_never_wrong(opened: Any, tmp_path: Any,
                                                   offset: float) -> None:
    stored = closed(opened(tmp_path))
    segments = [path for path in tmp_path.rglob("*") if path.is_file()
                and path.stat().st_size > 256 << 10]
    assert segments, list(tmp_path.rglob("*"))
    for path in segments:
        with path.open("r+b") as file:
            for at in range(int(offset * 4096), path.stat().st_size, 256 << 10):
                file.seek(at)
                data = file.read(64)
                file.seek(at)
                file.write(bytes(byte ^ 0x55 for byte in data))
    site = opened(tmp_path)
    assert site.backend is not None
    keys = [key(number) for number in range(64)]
    found = hashes(site.get(keys))
    assert all(one in (given, "none") for one, given in zip(found, stored))
    assert "none" in found
    # Lost chunks can be stored again.
    site.put(range(64))
    assert hashes(site.get(keys)) == stored and site.used_bytes == 0


def test_truncated_segments_are_misses(opened: Any, tmp_path: Any) -> None:
    stored = closed(opened(tmp_path))
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.stat().st_size > 256 << 10:
            os.truncate(path, 128 << 10)
    site = opened(tmp_path)
    found = hashes(site.get([key(number) for number in range(64)]))
    assert all(one in (given, "none") for one, given in zip(found, stored)) and "none" in found


def test_a_directory_belongs_to_one_engine(opened: Any, tmp_path: Any) -> None:
    site = opened(tmp_path)
    content = site.put(range(4))
    assert child("open", tmp_path) == ["none"]  # LMCache goes on without the backend
    with pytest.raises(kvtier.BusyError, match="give each engine a disk_path of its own"):
        KvtierBackend(config(tmp_path), metadata(), site.manager.allocator_backend)
    assert site.get([key(number) for number in range(4)]) == content


def test_each_rank_has_its_own_folder(opened: Any, tmp_path: Any) -> None:
    sites = [opened(tmp_path, meta=metadata(worker_id=rank, world_size=2)) for rank in range(2)]
    content = [site.put([rank], keys=[key(1, worker_id=rank, world_size=2)])
               for rank, site in enumerate(sites)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0of2", "rank1of2"]
    assert [site.get([key(1, worker_id=rank, world_size=2)])
            for rank, site in enumerate(sites)] == content


def test_a_path_that_cannot_be_a_directory_is_an_error_with_the_path(
        opened: Any, tmp_path: Any) -> None:
    site = opened(None)
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises((kvtier.Error, OSError), match="file"):
        KvtierBackend(config(tmp_path / "file" / "kv"), metadata(), site.manager.allocator_backend)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_path_without_rights_is_an_error(opened: Any, tmp_path: Any) -> None:
    site = opened(None)
    tmp_path.chmod(0o500)
    with pytest.raises((kvtier.Error, OSError), match="ermission"):
        KvtierBackend(config(tmp_path), metadata(), site.manager.allocator_backend)


def test_engines_share_a_remote(opened: Any, tmp_path: Any) -> None:
    remote = f'store(remote=dir(path="{tmp_path / "remote"}"))'
    (tmp_path / "remote").mkdir()
    one = opened(tmp_path / "a", spec=remote, level="remote")
    content = one.put(range(8))
    two = opened(tmp_path / "b", spec=remote, level="remote")
    keys = [key(number) for number in range(9)]
    assert two.manager.batched_contains(keys, pin=True) == (8, {"kvtier": keys[:8]})
    assert two.get(keys) == [*content, None]
    two.manager.batched_unpin(keys[:8])


def test_engines_that_share_a_remote_list_different_kinds(opened: Any, tmp_path: Any) -> None:
    """Both stores open before either lists a kind."""
    remote = f'store(remote=dir(path="{tmp_path / "remote"}"))'
    (tmp_path / "remote").mkdir()
    one, two = [opened(tmp_path / name, spec=remote, level="remote") for name in "ab"]
    content = [*one.put([0]), *two.put([1], shapes=[torch.Size([2, 4, 7, 128])])]
    three = opened(tmp_path / "c", spec=remote, level="remote")
    assert three.get([key(0), key(1)]) == content
