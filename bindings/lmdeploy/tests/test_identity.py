"""Whose KV it is: models, adapters, and configurations that were used before."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Callable, List

import kvtier
import pytest
import stubs
from stubs import Request
from test_connector import HOST, arrays, names_of, tensors


def test_other_models_see_nothing_of_each_other(tmp_path: Path,
                                                closing: Callable[[Any], Any]) -> None:
    from lmdeploy.pytorch.kv_connector import factory

    models = []
    for at, data in enumerate((b"a" * 300_000, b"a" * 299_999 + b"b")):
        folder = tmp_path / str(at) / "model"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(data)
        models.append(str(folder))
    keys = []
    for model in models:
        cache = stubs.Cache(stubs.Transfer(kv_connector_extra_config=dict(HOST)))
        factory.prepare_kv_connector_config(cache, model_path=model)
        worker = closing(stubs.worker(cache, tensors(arrays())))
        keys.append(worker._worker._blocks.keys(names_of(1)))
    assert keys[0] != keys[1]
    nowhere = stubs.Cache(stubs.Transfer(kv_connector_extra_config=dict(HOST)))
    with pytest.raises(kvtier.InvalidError, match="say weights"):
        factory.prepare_kv_connector_config(nowhere, model_path="somebody/model")


def test_every_byte_of_weights_counts_and_is_read_once(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier_lmdeploy import _weights

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    weights = folder / "model.safetensors"
    weights.write_bytes(b"a" * 300_000)
    for path in (folder / "config.json", weights):  # just written, however slow the machine is
        os.utime(path, (time.time() + 3600, time.time() + 3600))
    before = _weights.fingerprint(str(folder))
    assert not _weights._kept()  # it could change within the same tick of the clock
    monkeypatch.setattr(_weights, "SETTLED_NS", -10**13)
    assert _weights.fingerprint(str(folder)) == before
    assert len(_weights._kept()) == 2
    assert Path(_weights._place()).stat().st_mode & 0o777 == 0o600
    assert Path(_weights._place()).parent.stat().st_mode & 0o777 == 0o700
    with monkeypatch.context() as closed:
        closed.setattr(_weights.hashlib, "sha256", once := Counting(_weights.hashlib.sha256))
        assert _weights.fingerprint(str(folder)) == before
        assert once.calls == 1  # the sum of what is kept
    # Any byte, with the size and the time that it had.
    at = weights.stat()
    with open(weights, "r+b") as file:
        file.seek(123_456)
        file.write(b"b")
    os.utime(weights, ns=(at.st_atime_ns, at.st_mtime_ns))
    assert _weights.fingerprint(str(folder)) != before
    with open(_weights._place(), "w") as file:
        file.write("[broken")
    weights.write_bytes(b"a" * 300_000)
    assert _weights.fingerprint(str(folder)) == before
    (folder / "config.json").write_text('{"rope_theta": 1}')
    assert _weights.fingerprint(str(folder)) != before


class Counting:
    def __init__(self, real: Any) -> None:
        self.real, self.calls = real, 0

    def __call__(self, *given: Any) -> Any:
        self.calls += 1
        return self.real(*given)


def test_adapters_of_the_same_name_are_not_the_same(tmp_path: Path) -> None:
    """An adapter's name says nothing of its weights: of another engine's KV nothing is found,
    unless the configuration says what it is."""
    def kinds(**extra: Any) -> List[str]:
        cache, found = stubs.cache_config({**HOST, **extra}), []
        scheduler = stubs.scheduler(cache)
        for _ in range(2):
            found.append(scheduler._scheduler_side()._kind(Request(1, range(33), adapter="lora")))
        assert found[0] == found[1] != ""
        scheduler.shutdown()
        return found[0]

    assert kinds() != kinds()
    folders = []
    for data in (b"1", b"2", b"1"):
        folders.append(tmp_path / str(len(folders)))
        folders[-1].mkdir()
        (folders[-1] / "adapter_model.safetensors").write_bytes(data)
    one, two, same = (kinds(adapters={"lora": str(folder)}) for folder in folders)
    assert one == same != two
    assert kinds(adapters={"lora": "v1"}) == kinds(adapters={"lora": "v1"})
    with pytest.raises(kvtier.InvalidError, match="adapters"):
        stubs.cache_config({**HOST, "adapters": ["lora"]})


def test_an_engine_is_not_taken_for_the_one_before() -> None:
    """A configuration that was prepared for another engine has nothing of its identity."""
    from lmdeploy.pytorch.kv_connector import factory

    cache = stubs.cache_config(HOST)
    extra = cache.kv_transfer_config.kv_connector_extra_config
    before, extra["weights"] = dict(extra["kvtier_engine"]), "others"
    factory.prepare_kv_connector_config(cache, model_path="model-b")
    after = extra["kvtier_engine"]
    assert all(before[name] != after[name] for name in ("folder", "secret", "model", "weights"))
