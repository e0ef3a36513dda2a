"""Lookups where one side is stuck, or says nothing."""

from __future__ import annotations

import socket
import threading
import time
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any, List

import pytest
from kvtier_lmdeploy import _lookup
from test_connector import names_of


def test_a_worker_that_is_stuck(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One that takes connections and says nothing, before the secret was shown and after it."""
    engine = {"folder": str(tmp_path), "pid": 0, "secret": "s"}
    names = list(names_of(3))
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "rank-0"))
        mute.listen()
        asker, began = _lookup.Asker(engine, [0], 1.0, False), time.monotonic()
        for _ in range(20):  # not one after the other
            assert asker.prefix(1, names) == 0
        assert asker.all({"ask": "metrics"}) == [None]
        asker.close()
        assert 0.5 < time.monotonic() - began < 10.0
    with Listener(str(tmp_path / "rank-1"), "AF_UNIX", authkey=b"s") as listener:
        thread = threading.Thread(target=lambda: kept.append(listener.accept()))
        kept: List[Any] = []
        thread.start()
        asker, began = _lookup.Asker(engine, [1], 1.0, False), time.monotonic()
        many = names * 100_000  # more than a socket holds
        assert asker.prefix(1, many) == 0
        assert 0.5 < time.monotonic() - began < 10.0
        thread.join()
        asker.close()
        kept[0].close()
    assert caplog.text.count("gave no answer") == 2


def test_a_caller_that_says_nothing(tmp_path: Path) -> None:
    """It keeps neither others nor the shutdown waiting; and a worker that comes back is asked."""
    engine = {"folder": str(tmp_path), "pid": 0, "secret": "s"}
    asker, names = _lookup.Asker(engine, [0], 5.0, False), list(names_of(3))
    with socket.socket(socket.AF_UNIX) as mute:
        for turn in range(2):
            service = _lookup.Service(engine, 0, lambda question, asked: len(asked))
            if turn == 0:
                mute.connect(str(tmp_path / "rank-0"))
            del _lookup._here[(str(tmp_path), 0)]  # as in another process
            began = time.monotonic()
            assert asker.prefix(1, names) == 3
            service.close()
            assert time.monotonic() - began < 4.0
            if turn == 0:  # the connection that it had ends with the next question
                assert asker.prefix(1, names) == 0
    asker.close()
