"""The options, without LMCache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Optional

import pytest

import kvtier
from kvtier_lmcache import _config


def config(name: str = "kvtier", plugins: Optional[list] = None, **options: Any) -> Any:
    """What LMCache's configuration has of a plugin."""
    options = {"module_path": "kvtier_lmcache", "class_name": "KvtierBackend", **options}
    return SimpleNamespace(storage_plugins=[name] if plugins is None else plugins, extra_config={
        f"storage_plugin.{name}.{key}": value for key, value in options.items()})


def test_options_are_read_below_the_plugins_own_name() -> None:
    settings, accepted = _config.read(config(
        "mine", disk_path="/tmp/kv", disk_bytes="1GiB", policy="s3fifo", lmcache_version="0.6.0"))
    assert (settings.disk_path, settings.disk_bytes, settings.policy, accepted) == (
        "/tmp/kv", 1 << 30, "s3fifo", "0.6.0")
    assert settings.put_level() == kvtier.LEVEL_DISK


def test_other_plugins_and_keys_are_ignored() -> None:
    given = config(host_bytes="64MiB", plugins=["other", "kvtier"])
    given.extra_config.update({"storage_plugin.other.module_path": "x", "use_odirect": True,
                               "storage_plugin.other.dsk": 1})
    assert _config.read(given)[0].host_bytes == 64 << 20


@pytest.mark.parametrize("options, text", [
    ({"dsk_path": "/tmp/kv"}, "did you mean 'disk_path'"),
    ({"polcy": "lru"}, "did you mean 'policy'"),
    ({"host_bytes": "many"}, "host_bytes='many' is no size"),
    ({"host_bytes": True}, "host_bytes=True is no size"),
    ({"disk_path": 5}, "disk_path=5 is a int: give a text"),
    ({"level": "tape"}, "level='tape' is unknown: use one of ram, disk"),
    ({"level": "disk"}, "needs a store with a disk"),
    ({"remote_lookup_s": -1}, "out of range"),
    ({"lmcache_version": 5}, "lmcache_version=5 is a int"),
])
def test_a_wrong_option_is_an_error_that_says_what_is_accepted(options: Any, text: str) -> None:
    with pytest.raises(kvtier.InvalidError, match=text.replace("(", r"\(")):
        _config.read(config(**options))


@pytest.mark.parametrize("plugins", [[], ["other"], ["kvtier", "second"]])
def test_exactly_one_plugin_must_have_the_class(plugins: Any) -> None:
    given = config(plugins=plugins)
    given.extra_config.update({"storage_plugin.second.module_path": "kvtier_lmcache.backend",
                               "storage_plugin.second.class_name": "KvtierBackend"})
    with pytest.raises(kvtier.InvalidError, match="name exactly one"):
        _config.read(given)


def test_another_version_of_lmcache_is_rejected_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_config, "version", lambda: "0.9.1")
    with pytest.raises(kvtier.UnsupportedError, match="LMCache 0.9.1 is not the version.*0.5.6"):
        _config.check_version()
    with pytest.raises(kvtier.UnsupportedError, match='"lmcache_version": "0.9.1"'):
        _config.check_version("0.9.0")
    _config.check_version("0.9.1")


def test_an_unknown_version_of_lmcache_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_config, "version", lambda: "")
    with pytest.raises(kvtier.UnsupportedError, match="of an unknown version"):
        _config.check_version("")
