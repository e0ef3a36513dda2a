"""How a scheduler asks its workers what they have.

In the same process it calls them; else over a socket of the file system in a folder that only this
user can enter, after both have shown the engine's secret. Messages are a line of JSON and the names
of blocks, nothing that could run.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import struct
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import (
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from ._names import NAME_BYTES

log = logging.getLogger("kvtier.lmdeploy")

#: Answers a question: its JSON, and names.
Answer = Callable[[Dict[str, Any], List[bytes]], Any]

#: Workers of this process, by folder and rank.
_here: Dict[Tuple[str, int], Answer] = {}
_here_lock = threading.Lock()


def _address(folder: str, rank: int) -> str:
    return os.path.join(folder, f"rank-{rank}")


#: Within so many seconds a caller shows the secret.
HANDSHAKE_S = 10.0


def _limit(handle: int, seconds: float) -> None:
    """Has the kernel end reads and writes of a socket that take longer; 0: none."""
    room = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(handle)) as it:
        it.settimeout(None)  # a default of the program's would make reads fail at once
        it.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, room)
        it.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, room)


def _connect(path: str, seconds: float) -> Connection:
    """A connection whose calls, this one too, take no longer each: a worker may be stuck."""
    with socket.socket(socket.AF_UNIX) as it:
        it.settimeout(None)
        _limit(it.fileno(), max(0.001, seconds))
        it.connect(path)
        return Connection(it.detach())


def _packed(question: Dict[str, Any], names: Sequence[bytes]) -> bytes:
    return json.dumps(question).encode() + b"\n" + b"".join(names)


def _unpacked(data: bytes) -> Tuple[Dict[str, Any], List[bytes]]:
    line, _, rest = data.partition(b"\n")
    question = json.loads(line)
    return question, [rest[at:at + NAME_BYTES] for at in range(0, len(rest), NAME_BYTES)]


class Service:
    """A worker's side: known in its process, or served on a socket."""

    def __init__(self, engine: Dict[str, Any], rank: int, answer: Answer) -> None:
        self._key = (str(engine["folder"]), rank)
        self._answer = answer
        self._listener: Optional[Listener] = None
        self._thread: Optional[threading.Thread] = None
        with _here_lock:
            _here[self._key] = answer
        if engine["pid"] != os.getpid():
            self._serve(str(engine["secret"]).encode())

    def _serve(self, secret: bytes) -> None:
        path = _address(*self._key)
        if os.path.exists(path):  # of a worker that was killed
            os.unlink(path)
        # Callers show the secret on threads of their own: one that says nothing is in nobody's way.
        self._listener = Listener(path, "AF_UNIX", backlog=16)
        self._thread = threading.Thread(target=self._accept, args=(secret,),
                                        name="kvtier-lookups", daemon=True)
        self._thread.start()

    def _accept(self, secret: bytes) -> None:
        listener = self._listener
        while listener is not None and self._listener is listener:
            try:
                connection = listener.accept()
            except Exception as error:  # noqa: BLE001: closed, or out of descriptors
                if self._listener is not listener:
                    return
                log.warning("a connection for lookups failed: %s", error)
                time.sleep(0.1)  # what fails at once again is not asked for all the time
                continue
            threading.Thread(target=self._talk, args=(connection, secret), daemon=True,
                             name="kvtier-lookups").start()

    def _talk(self, connection: Connection, secret: bytes) -> None:
        with connection:
            try:
                _limit(connection.fileno(), HANDSHAKE_S)
                deliver_challenge(connection, secret)
                answer_challenge(connection, secret)
                _limit(connection.fileno(), 0)
            except Exception as error:  # noqa: BLE001: a stranger at the door
                if self._listener is not None:
                    log.warning("a caller for lookups was turned away: %s", error)
                return
            while self._listener is not None:
                try:
                    question, names = _unpacked(connection.recv_bytes())
                    if self._listener is None:  # closed meanwhile: who asks goes to the next
                        return
                    reply = self._answer(question, names)
                    connection.send_bytes(json.dumps(reply).encode())
                except (EOFError, OSError):
                    return
                except Exception as error:  # noqa: BLE001: a question that has no answer
                    log.warning("a lookup failed: %s", error)
                    connection.send_bytes(json.dumps(None).encode())

    def close(self) -> None:
        """No answers from now on."""
        with _here_lock:
            if _here.get(self._key) is self._answer:
                del _here[self._key]
        listener, self._listener = self._listener, None
        if listener is None:
            return
        try:  # accept waits for a caller, and notices then that it is over
            _connect(_address(*self._key), 1.0).close()
        except Exception:  # noqa: BLE001: it was woken, or had gone
            pass
        listener.close()


class Asker:
    """A scheduler's side. What waits does so on a thread of its own, one question at a time."""

    def __init__(self, engine: Dict[str, Any], ranks: Sequence[int], timeout_s: float,
                 asynchronous: Optional[bool]) -> None:
        self._engine, self._ranks, self._timeout_s = engine, list(ranks), timeout_s
        near = engine["pid"] == os.getpid() and asynchronous is not True
        self._at_once = near or asynchronous is False
        self._lock = threading.Lock()
        self._connections: Dict[int, Connection] = {}
        #: Until when workers that did not answer in time are not asked: requests would wait for
        #: them one after the other.
        self._silent: Dict[int, float] = {}
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvtier-lookup")
        self._pending: Dict[int, "Future[int]"] = {}
        self.closed = False

    def prefix(self, request: int, names: Sequence[bytes]) -> Optional[int]:
        """How many blocks from the first on every worker has; None while that is asked. Asked
        again it is one question until the answer was taken."""
        if self._at_once:
            return self._prefix(list(names))
        future = self._pending.get(request)
        if future is None:
            if self.closed:
                return 0
            future = self._pending[request] = self._pool.submit(self._prefix, list(names))
        if not future.done():
            return None
        del self._pending[request]
        return future.result()

    def pending(self, request: int) -> bool:
        """Whether its question has no answer yet."""
        future = self._pending.get(request)
        return future is not None and not future.done()

    def cancel(self, request: int) -> None:
        """Nobody wants its answer."""
        future = self._pending.pop(request, None)
        if future is not None:
            future.cancel()

    def _prefix(self, names: List[bytes]) -> int:
        least = len(names)
        for rank in self._ranks:
            found = self.ask(rank, {"ask": "prefix"}, names[:least])
            least = min(least, found if isinstance(found, int) else 0)
            if least == 0:
                break
        return least

    def all(self, question: Dict[str, Any]) -> List[Any]:
        """The answers of all workers; None of one that gives none."""
        return [self.ask(rank, question, []) for rank in self._ranks]

    def later(self, question: Dict[str, Any]) -> "Future[List[Any]]":
        """The same, without waiting for it."""
        return self._pool.submit(self.all, question)

    def ask(self, rank: int, question: Dict[str, Any], names: Sequence[bytes]) -> Any:
        """A worker's answer; None where there is none in time."""
        with _here_lock:
            near = _here.get((str(self._engine["folder"]), rank))
        try:
            if near is not None:
                return near(question, list(names))
            if self._engine["pid"] == os.getpid() and not os.path.exists(
                    _address(str(self._engine["folder"]), rank)):
                return None  # it is not there yet, or sleeps
            if time.monotonic() < self._silent.get(rank, 0.0):
                return None
            return self._far(rank, question, names)
        except Exception as error:  # noqa: BLE001: without an answer the engine computes
            log.warning("worker %d gave no answer: %s", rank, error)
            if isinstance(error, (TimeoutError, BlockingIOError)):
                self._silent[rank] = time.monotonic() + self._timeout_s
            self._drop(rank)
            return None

    def _far(self, rank: int, question: Dict[str, Any], names: Sequence[bytes]) -> Any:
        with self._lock:
            connection = self._connections.get(rank)
            if connection is not None:
                try:
                    return self._asked(connection, question, names)
                except (EOFError, ConnectionError):  # it slept, and is another one now
                    del self._connections[rank]
                    connection.close()
            secret = str(self._engine["secret"]).encode()
            connection = _connect(_address(str(self._engine["folder"]), rank), self._timeout_s)
            self._connections[rank] = connection
            answer_challenge(connection, secret)
            deliver_challenge(connection, secret)
            return self._asked(connection, question, names)

    def _asked(self, connection: Connection, question: Dict[str, Any],
               names: Sequence[bytes]) -> Any:
        connection.send_bytes(_packed(question, names))
        if not connection.poll(self._timeout_s):
            raise TimeoutError(f"none within {self._timeout_s} s")
        return json.loads(connection.recv_bytes())

    def _drop(self, rank: int) -> None:
        with self._lock:
            connection = self._connections.pop(rank, None)
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Lets questions that are under way end, and hears no answers."""
        self.closed = True
        for request in list(self._pending):
            self.cancel(request)
        self._pool.shutdown(wait=True)
        for rank in list(self._connections):
            self._drop(rank)
        if self._engine["pid"] == os.getpid():  # its sockets are gone with the workers
            shutil.rmtree(str(self._engine["folder"]), ignore_errors=True)
