"""Lookups while one side hangs or stays silent."""

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


def test_hanging_worker_times_out_once_per_retry_interval(
        tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker accepts connections and then hangs, before or after the handshake."""
    # The test controls the clock that limits retries.
    now = [0.0]
    monkeypatch.setattr(_lookup, "time", SimpleNamespace(monotonic=lambda: now[0],
                                                         sleep=time.sleep))
    engine = {"folder": str(tmp_path), "pid": 0, "secret": "s"}
    names = list(names_of(3))
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "rank-0"))
        mute.listen()
        client, began = _lookup.LookupClient(engine, [0], 1.0, False), time.monotonic()
        for _ in range(20):  # only the first query waits
            assert client.prefix(1, names) == 0
        assert client.query_all({"query": "metrics"}) == [None]
        assert 0.5 < time.monotonic() - began
        assert caplog.text.count("did not answer") == 1, "more than one of 21 queries waited"
        now[0] = 0.9
        assert client.prefix(1, names) == 0 and caplog.text.count("did not answer") == 1
        now[0] = 1.1  # the retry interval is over
        assert client.prefix(1, names) == 0 and caplog.text.count("did not answer") == 2
        client.close()
    caplog.clear()
    with Listener(str(tmp_path / "rank-1"), "AF_UNIX", authkey=b"s") as listener:
        many = names * 100_000  # more than a socket holds
        kept: List[Any] = []

        def accept() -> None:
            try:
                kept.append(listener.accept())
            except (AuthenticationError, EOFError, OSError):
                pass  # the client timed out during the handshake

        for seconds in (1.0, 10.0, 100.0):  # longer if the handshake took the whole timeout
            thread = threading.Thread(target=accept)
            thread.start()
            client, began = _lookup.LookupClient(engine, [1], seconds, False), time.monotonic()
            assert client.prefix(1, many) == 0
            assert 0.5 * seconds < time.monotonic() - began
            assert caplog.text.count("did not answer") == 1
            caplog.clear()
            client.close()
            thread.join()
            if kept:
                break
        kept[0].close()


def test_silent_client_blocks_neither_others_nor_close(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other clients and `close` do not wait for it, and a restarted worker is queried again."""
    # A wait for the silent client would take this long.
    monkeypatch.setattr(_lookup, "HANDSHAKE_S", 1200.0)
    engine = {"folder": str(tmp_path), "pid": 0, "secret": "s"}
    client, names = _lookup.LookupClient(engine, [0], 600.0, False), list(names_of(3))
    with socket.socket(socket.AF_UNIX) as mute:
        for turn in range(2):
            service = _lookup.LookupServer(engine, 0, lambda query, blocks: len(blocks))
            if turn == 0:
                mute.connect(str(tmp_path / "rank-0"))
            del _lookup._local_handlers[(str(tmp_path), 0)]  # as in another process
            began = time.monotonic()
            assert client.prefix(1, names) == 3
            service.close()
            assert time.monotonic() - began < 600.0
            if turn == 0:  # the next query ends the connection to the closed server
                assert client.prefix(1, names) == 0
    client.close()
