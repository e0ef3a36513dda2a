"""Lookups where one side is stuck, or says nothing."""

from __future__ import annotations

import socket
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Listener
from pathlib import Path
from types import SimpleNamespace
from typing import Any, List

import pytest
from kvtier_lmdeploy import _lookup
from test_connector import names_of


def test_a_worker_that_is_stuck(tmp_path: Path, caplog: pytest.LogCaptureFixture,
                                monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes connections and says nothing, before the secret was shown and after it."""
    # The clock that says how long it is not asked again is the test's.
    now = [0.0]
    monkeypatch.setattr(_lookup, "time", SimpleNamespace(monotonic=lambda: now[0],
                                                         sleep=time.sleep))
    engine = {"folder": str(tmp_path), "pid": 0, "secret": "s"}
    names = list(names_of(3))
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "rank-0"))
        mute.listen()
        asker, began = _lookup.Asker(engine, [0], 1.0, False), time.monotonic()
        for _ in range(20):  # not one after the other
            assert asker.prefix(1, names) == 0
        assert asker.all({"ask": "metrics"}) == [None]
        assert 0.5 < time.monotonic() - began
        assert caplog.text.count("gave no answer") == 1, "of 21 questions one waited for it"
        now[0] = 0.9
        assert asker.prefix(1, names) == 0 and caplog.text.count("gave no answer") == 1
        now[0] = 1.1  # it is asked again
        assert asker.prefix(1, names) == 0 and caplog.text.count("gave no answer") == 2
        asker.close()
    caplog.clear()
    with Listener(str(tmp_path / "rank-1"), "AF_UNIX", authkey=b"s") as listener:
        many = names * 100_000  # more than a socket holds
        kept: List[Any] = []

        def accept() -> None:
            try:
                kept.append(listener.accept())
            except (AuthenticationError, EOFError, OSError):
                pass  # the asker gave up while the secrets were shown

        for seconds in (1.0, 10.0, 100.0):  # longer where the secrets took all of the time
            thread = threading.Thread(target=accept)
            thread.start()
            asker, began = _lookup.Asker(engine, [1], seconds, False), time.monotonic()
            assert asker.prefix(1, many) == 0
            assert 0.5 * seconds < time.monotonic() - began
            assert caplog.text.count("gave no answer") == 1
            caplog.clear()
            asker.close()
            thread.join()
            if kept:
                break
        kept[0].close()


def test_a_caller_that_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps neither others nor the shutdown waiting; and a worker that comes back is asked."""
    # Whoever waited for the caller would wait so long.
    monkeypatch.setattr(_lookup, "HANDSHAKE_S", 1200.0)
    engine = {"folder": str(tmp_path), "pid": 0, "secret": "s"}
    asker, names = _lookup.Asker(engine, [0], 600.0, False), list(names_of(3))
    with socket.socket(socket.AF_UNIX) as mute:
        for turn in range(2):
            service = _lookup.Service(engine, 0, lambda question, asked: len(asked))
            if turn == 0:
                mute.connect(str(tmp_path / "rank-0"))
            del _lookup._here[(str(tmp_path), 0)]  # as in another process
            began = time.monotonic()
            assert asker.prefix(1, names) == 3
            service.close()
            assert time.monotonic() - began < 600.0
            if turn == 0:  # the connection that it had ends with the next question
                assert asker.prefix(1, names) == 0
    asker.close()
