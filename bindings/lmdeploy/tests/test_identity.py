"""Identity of KV: models, weights, adapters, and reused configurations."""

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


def test_models_with_equal_names_do_not_share_kv(tmp_path: Path,
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
    with pytest.raises(kvtier.InvalidError, match="set weights"):
        factory.prepare_kv_connector_config(nowhere, model_path="somebody/model")


def test_fingerprint_covers_every_byte_and_is_cached(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier_lmdeploy import _weights

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    weights = folder / "model.safetensors"
    weights.write_bytes(b"a" * 300_000)
    for path in (folder / "config.json", weights):  # in the future: recent on any slow machine
        os.utime(path, (time.time() + 3600, time.time() + 3600))
    before = _weights.fingerprint(str(folder))
    assert not _weights._load_cache()  # the file could change within the same tick
    monkeypatch.setattr(_weights, "SETTLED_NS", -10**13)
    assert _weights.fingerprint(str(folder)) == before
    assert len(_weights._load_cache()) == 2
    assert Path(_weights._cache_path()).stat().st_mode & 0o777 == 0o600
    assert Path(_weights._cache_path()).parent.stat().st_mode & 0o777 == 0o700
    with monkeypatch.context() as closed:
        closed.setattr(_weights.hashlib, "sha256", once := Counting(_weights.hashlib.sha256))
        assert _weights.fingerprint(str(folder)) == before
        assert once.calls == 1  # the total only: all files come from the cache
    # A changed byte with the old size and modification time.
    at = weights.stat()
    with open(weights, "r+b") as file:
        file.seek(123_456)
        file.write(b"b")
    os.utime(weights, ns=(at.st_atime_ns, at.st_mtime_ns))
    assert _weights.fingerprint(str(folder)) != before
    with open(_weights._cache_path(), "w") as file:
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


def test_adapters_with_equal_names_do_not_share_kv(tmp_path: Path) -> None:
    """Engines share KV under an adapter only if the configuration describes the adapter."""
    def variant_of(**extra: Any) -> List[str]:
        cache, found = stubs.cache_config({**HOST, **extra}), []
        scheduler = stubs.scheduler(cache)
        for _ in range(2):
            request = Request(1, range(33), adapter="lora")
            found.append(scheduler._scheduler_side()._variant(request))
        assert found[0] == found[1] != ""
        scheduler.shutdown()
        return found[0]

    assert variant_of() != variant_of()
    folders = []
    for data in (b"1", b"2", b"1"):
        folders.append(tmp_path / str(len(folders)))
        folders[-1].mkdir()
        (folders[-1] / "adapter_model.safetensors").write_bytes(data)
    one, two, same = (variant_of(adapters={"lora": str(folder)}) for folder in folders)
    assert one == same != two
    assert variant_of(adapters={"lora": "v1"}) == variant_of(adapters={"lora": "v1"})
    with pytest.raises(kvtier.InvalidError, match="adapters"):
        stubs.cache_config({**HOST, "adapters": ["lora"]})


def test_reused_configuration_gets_a_new_identity() -> None:
    """Preparing a configuration again replaces the previous engine's identity."""
    from lmdeploy.pytorch.kv_connector import factory

    cache = stubs.cache_config(HOST)
    extra = cache.kv_transfer_config.kv_connector_extra_config
    before, extra["weights"] = dict(extra["kvtier_engine"]), "others"
    factory.prepare_kv_connector_config(cache, model_path="model-b")
    after = extra["kvtier_engine"]
    assert all(before[name] != after[name] for name in ("folder", "secret", "model", "weights"))
