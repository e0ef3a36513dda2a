"""Options, hints, versions."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from typing import Any

import kvtier
import pytest


def test_sizes_and_texts() -> None:
    from kvtier_vllm.settings import Settings, size

    assert [size("n", one) for one in (7, "8GiB", "1.5 KiB", "2MB", "0")] == [
        7, 8 << 30, 1536, 2_000_000, 0]
    for wrong in ("GiB", -1, True, None, 1.5, "8 apples"):
        with pytest.raises(kvtier.InvalidError):
            size("n", wrong)
    for options in ({"policy": 7}, {"level": "paper"}, {"level": "disk"}, {"spec": Path("store")}):
        with pytest.raises(kvtier.InvalidError):
            Settings.take(options)
    assert Settings.take({"disk_path": "x"}).put_level() == kvtier.LEVEL_DISK
    assert Settings.take({}).put_level() == kvtier.LEVEL_RAM
    assert Settings.take({"disk_path": "/x"}).under("tp0").disk_path == "/x/tp0"


def test_a_misspelt_option() -> None:
    from kvtier_vllm.settings import Settings, reject_unknown

    with pytest.raises(kvtier.InvalidError, match="did you mean 'disk_path'"):
        reject_unknown({"disk_pth": ""}, Settings.names())
    with pytest.raises(kvtier.InvalidError, match="no option 'zebra'$|no option 'zebra' "):
        reject_unknown({"zebra": ""}, Settings.names())


@pytest.mark.parametrize("said", [7, [], {"tenant": "x"}, {"stop": "never"}, {"priority": 999},
                                  {"next_use_s": -1}, {"next_use_s": "soon"}, {"tenant": -1},
                                  {"done": "false"}, {"done": 0},
                                  *({name: wrong} for name in ("tenant", "priority", "next_use_s")
                                    for wrong in (math.inf, -math.inf, math.nan, 10**400))])
def test_nonsense_in_hints_is_passed_over(said: Any, caplog: pytest.LogCaptureFixture) -> None:
    from kvtier_vllm import hints

    assert hints.take({"kvtier": said}) is hints.NOTHING
    assert "passed over" in caplog.text


def test_hints() -> None:
    from kvtier_vllm import hints

    told = hints.take({"kvtier": {"tenant": 1, "priority": 0, "stop": "tool_use"}})
    assert (told.tenant, told.priority, told.stop) == (1, 0, kvtier.STOP_TOOL_USE)
    assert told.has_future and not hints.take(None).has_future
    half = hints.take({"kvtier": {"session": "\ud83d"}}).session  # as JSON may have it
    assert hints.number(half) != hints.number("")


def test_texts_are_no_flags() -> None:
    from kvtier_vllm.connector import KvtierConnector
    from kvtier_vllm.settings import flag

    assert [flag({"f": one}, "f", True) for one in (True, False, None)] == [True, False, True]
    assert flag({}, "f", True) and not flag({}, "f", False)
    for wrong in ("false", "true", "", 0, 1, []):
        with pytest.raises(kvtier.InvalidError, match="without quotes"):
            flag({"f": wrong}, "f", True)
    with pytest.raises(kvtier.InvalidError, match="layerwise"):
        KvtierConnector.requires_piecewise_for_cudagraph({"layerwise": "false"})


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "0.330.0", "0.3", ""])
@pytest.mark.parametrize("name", ["tier", "policy", "spec", "connector"])
def test_other_engines_are_refused(monkeypatch: pytest.MonkeyPatch, version: str,
                                   name: str) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.delitem(sys.modules, f"kvtier_vllm.{name}", raising=False)
    with pytest.raises(kvtier.UnsupportedError, match="0.33"):
        importlib.import_module(f"kvtier_vllm.{name}")


def test_stores_of_a_key_are_shared_and_closed_last() -> None:
    from kvtier_vllm.settings import Settings, acquire, find, release

    settings = Settings.take({"host_bytes": "64MiB", "policy": "lru"})
    one, two = acquire("k", settings), acquire("k", settings)
    assert one is two and find("k") is one
    release("k")
    one.set_policy("arc")
    release("k")
    assert find("k") is None
    with pytest.raises(kvtier.ClosedError):
        one.set_policy("lru")
    release("k")


def test_a_store_that_does_not_open_leaves_nothing() -> None:
    from kvtier_vllm.settings import Settings, acquire, find

    with pytest.raises(kvtier.SpecError):
        acquire("bad", Settings.take({"spec": "stor(host=1GiB)"}))
    assert find("bad") is None


def test_what_fails_after_the_store_is_open_closes_it(monkeypatch: pytest.MonkeyPatch,
                                                      tmp_path: Path) -> None:
    from kvtier_vllm.settings import Settings, acquire, find, release

    def fail(*_: Any) -> None:
        raise kvtier.NoMemoryError("no", kvtier.abi.KVT_E_NOMEM, "KVT_E_NOMEM")

    disk = Settings.take({"disk_path": str(tmp_path / "kv"), "disk_bytes": "256MiB"})
    with monkeypatch.context() as patch:
        patch.setattr(kvtier.Advisor, "policy_of", fail)
        with pytest.raises(kvtier.NoMemoryError) as failed:  # whose frames hold what is open
            acquire("late", disk)
    assert find("late") is None and failed.value.__traceback__ is not None
    acquire("late", disk)  # a directory belongs to one that is open
    release("late")
