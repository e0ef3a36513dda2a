"""Options of stores, and hints of requests."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import kvtier
import pytest
from processes import redis_server


def test_sizes_are_parsed_and_bad_options_are_rejected() -> None:
    from kvtier_vllm.settings import Settings, size

    assert [size("n", one) for one in (7, "8GiB", "1.5 KiB", "2MB", "0")] == [
        7, 8 << 30, 1536, 2_000_000, 0]
    for wrong in ("GiB", -1, True, None, 1.5, "8 apples"):
        with pytest.raises(kvtier.InvalidError):
            size("n", wrong)
    for options in ({"policy": 7}, {"level": "paper"}, {"level": "disk"}, {"spec": Path("store")}):
        with pytest.raises(kvtier.InvalidError):
            Settings.from_config(options)
    assert Settings.from_config({"disk_path": "x"}).put_level() == kvtier.LEVEL_DISK
    assert Settings.from_config({}).put_level() == kvtier.LEVEL_RAM
    assert Settings.from_config({"disk_path": "/x"}).under("tp0").disk_path == "/x/tp0"
    of_rank = Settings.from_config({"spec": "store(control=\"/x/{rank}.sock\")"}).under("tp0")
    assert (of_rank.disk_path, of_rank.spec) == ("", "store(control=\"/x/tp0.sock\")")


def test_a_misspelt_option_is_rejected_with_a_suggestion() -> None:
    from kvtier_vllm.settings import Settings, reject_unknown

    with pytest.raises(kvtier.InvalidError, match="did you mean 'disk_path'"):
        reject_unknown({"disk_pth": ""}, Settings.names())
    with pytest.raises(kvtier.InvalidError, match="no option 'zebra'$|no option 'zebra' "):
        reject_unknown({"zebra": ""}, Settings.names())


def test_the_secrets_of_a_remote_come_from_the_environment(monkeypatch: Any) -> None:
    """A Redis server that takes one password: the store says so when it opens with another."""
    from kvtier_vllm.settings import Settings, SharedStore

    with redis_server("--requirepass", "right") as server:
        remote = f'redis(url="{server.url}", require=true, timeout=600000)'
        settings = Settings.from_config({"spec": f"store(host=16MiB, remote={remote})"})
        monkeypatch.setenv("KVTIER_REMOTE_PASSWORD", "right")
        SharedStore(settings).close()
        monkeypatch.setenv("KVTIER_REMOTE_PASSWORD", "wrong")
        with pytest.raises(kvtier.Error):
            SharedStore(settings)


@pytest.mark.parametrize("given", [7, [], {"tenant": "x"}, {"stop": "never"}, {"priority": 999},
                                   {"next_use_s": -1}, {"next_use_s": "soon"}, {"tenant": -1},
                                   {"done": "false"}, {"done": 0},
                                   *({name: wrong} for name in ("tenant", "priority", "next_use_s")
                                     for wrong in (math.inf, -math.inf, math.nan, 10**400))])
def test_malformed_hints_are_ignored_with_a_warning(given: Any,
                                                    caplog: pytest.LogCaptureFixture) -> None:
    from kvtier_vllm import hints

    assert hints.parse({"kvtier": given}) is hints.NONE
    assert "are ignored" in caplog.text


def test_hints_are_parsed() -> None:
    from kvtier_vllm import hints

    parsed = hints.parse({"kvtier": {"tenant": 1, "priority": 0, "stop": "tool_use"}})
    assert (parsed.tenant, parsed.priority, parsed.stop) == (1, 0, kvtier.STOP_TOOL_USE)
    assert parsed.has_future and not hints.parse(None).has_future
    half = hints.parse({"kvtier": {"session": "\ud83d"}}).session  # as JSON may have it
    assert hints.hash64(half) != hints.hash64("")


def test_a_text_is_no_boolean() -> None:
    from kvtier_vllm.connector import KvtierConnector
    from kvtier_vllm.settings import flag

    assert [flag({"f": one}, "f", True) for one in (True, False, None)] == [True, False, True]
    assert flag({}, "f", True) and not flag({}, "f", False)
    for wrong in ("false", "true", "", 0, 1, []):
        with pytest.raises(kvtier.InvalidError, match="without quotes"):
            flag({"f": wrong}, "f", True)
    with pytest.raises(kvtier.InvalidError, match="layerwise"):
        KvtierConnector.requires_piecewise_for_cudagraph({"layerwise": "false"})


def test_a_store_is_shared_by_key_and_closed_by_its_last_user() -> None:
    from kvtier_vllm.settings import Settings, acquire, find, release

    settings = Settings.from_config({"host_bytes": "64MiB", "policy": "lru"})
    one, two = acquire("k", settings), acquire("k", settings)
    assert one is two and find("k") is one
    release("k")
    one.set_policy("arc")
    release("k")
    assert find("k") is None
    with pytest.raises(kvtier.ClosedError):
        one.set_policy("lru")
    release("k")


def test_a_store_that_fails_to_open_is_not_registered() -> None:
    from kvtier_vllm.settings import Settings, acquire, find

    with pytest.raises(kvtier.SpecError):
        acquire("bad", Settings.from_config({"spec": "stor(host=1GiB)"}))
    assert find("bad") is None


def test_an_error_after_opening_closes_the_store(monkeypatch: pytest.MonkeyPatch,
                                                 tmp_path: Path) -> None:
    from kvtier_vllm.settings import Settings, acquire, find, release

    def fail(*_: Any) -> None:
        raise kvtier.NoMemoryError("no", kvtier.abi.KVT_E_NOMEM, "KVT_E_NOMEM")

    disk = Settings.from_config({"disk_path": str(tmp_path / "kv"), "disk_bytes": "256MiB"})
    with monkeypatch.context() as patch:
        patch.setattr(kvtier.Advisor, "policy_of", fail)
        with pytest.raises(kvtier.NoMemoryError) as failed:  # its frames refer to the store
            acquire("late", disk)
    assert find("late") is None and failed.value.__traceback__ is not None
    acquire("late", disk)  # succeeds only if the first store has released the directory
    release("late")
