"""Queries from the scheduler to its workers: which blocks a store has, statistics, metrics.

A worker in the same process is called directly. Other workers answer over a Unix socket in a folder
of mode 0700, after both sides have proved that they know the engine's secret. A message is a line
of JSON and block names, so it cannot carry code.
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

#: Handles a query (its JSON and block names), and returns the reply as JSON values.
Handler = Callable[[Dict[str, Any], List[bytes]], Any]

#: Handlers of the workers in this process, by folder and rank.
_local_handlers: Dict[Tuple[str, int], Handler] = {}
_local_lock = threading.Lock()


def _address(folder: str, rank: int) -> str:
    return os.path.join(folder, f"rank-{rank}")


#: Seconds that a client has to authenticate.
HANDSHAKE_S = 10.0


def _set_timeout(handle: int, seconds: float) -> None:
    """Sets the kernel's timeout for each read and write of a socket, in seconds; 0: none."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(handle)) as it:
        it.settimeout(None)  # a default timeout of the program would make the socket non-blocking
        it.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        it.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _connect(path: str, seconds: float) -> Connection:
    """Connects with a timeout of `seconds` for this and each later call: a worker may hang."""
    with socket.socket(socket.AF_UNIX) as it:
        it.settimeout(None)
        _set_timeout(it.fileno(), max(0.001, seconds))
        it.connect(path)
        return Connection(it.detach())


def _pack(query: Dict[str, Any], names: Sequence[bytes]) -> bytes:
    return json.dumps(query).encode() + b"\n" + b"".join(names)


def _unpack(data: bytes) -> Tuple[Dict[str, Any], List[bytes]]:
    line, _, rest = data.partition(b"\n")
    query = json.loads(line)
    return query, [rest[at:at + NAME_BYTES] for at in range(0, len(rest), NAME_BYTES)]


class LookupServer:
    """Worker's side: registers its handler in this process, and serves other processes."""

    def __init__(self, engine: Dict[str, Any], rank: int, handler: Handler) -> None:
        self._key = (str(engine["folder"]), rank)
        self._handler = handler
        self._listener: Optional[Listener] = None
        self._thread: Optional[threading.Thread] = None
        with _local_lock:
            _local_handlers[self._key] = handler
        if engine["pid"] != os.getpid():
            self._serve(str(engine["secret"]).encode())

    def _serve(self, secret: bytes) -> None:
        path = _address(*self._key)
        if os.path.exists(path):  # left by a worker that was killed
            os.unlink(path)
        # Each client authenticates on a thread of its own, so a silent client blocks no other.
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
                log.warning("accepting a lookup connection failed: %s", error)
                time.sleep(0.1)  # an error that persists must not make this loop spin
                continue
            threading.Thread(target=self._serve_client, args=(connection, secret), daemon=True,
                             name="kvtier-lookups").start()

    def _serve_client(self, connection: Connection, secret: bytes) -> None:
        with connection:
            try:
                _set_timeout(connection.fileno(), HANDSHAKE_S)
                deliver_challenge(connection, secret)
                answer_challenge(connection, secret)
                _set_timeout(connection.fileno(), 0)
            except Exception as error:  # noqa: BLE001: not a client of this engine
                if self._listener is not None:
                    log.warning("rejected a lookup client that failed to authenticate: %s", error)
                return
            while self._listener is not None:
                try:
                    query, names = _unpack(connection.recv_bytes())
                    if self._listener is None:  # closed meanwhile: the client reconnects
                        return
                    reply = self._handler(query, names)
                    connection.send_bytes(json.dumps(reply).encode())
                except (EOFError, OSError):
                    return
                except Exception as error:  # noqa: BLE001: the client gets an empty reply
                    log.warning("a lookup query failed: %s", error)
                    connection.send_bytes(json.dumps(None).encode())

    def close(self) -> None:
        """Stops answering queries."""
        with _local_lock:
            if _local_handlers.get(self._key) is self._handler:
                del _local_handlers[self._key]
        listener, self._listener = self._listener, None
        if listener is None:
            return
        try:  # wakes the accept loop, which then sees that the server is closed
            _connect(_address(*self._key), 1.0).close()
        except Exception:  # noqa: BLE001: the loop is awake or has ended
            pass
        listener.close()


class LookupClient:
    """Scheduler's side. Asynchronous queries run on one thread, one after the other."""

    def __init__(self, engine: Dict[str, Any], ranks: Sequence[int], timeout_s: float,
                 asynchronous: Optional[bool]) -> None:
        self._engine, self._ranks, self._timeout_s = engine, list(ranks), timeout_s
        local = engine["pid"] == os.getpid() and asynchronous is not True
        self._synchronous = local or asynchronous is False
        self._lock = threading.Lock()
        self._connections: Dict[int, Connection] = {}
        #: Time before which a worker that timed out is not queried again. Without it each request
        #: would wait for the full timeout.
        self._retry_at: Dict[int, float] = {}
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvtier-lookup")
        self._pending: Dict[int, "Future[int]"] = {}
        self.closed = False

    def prefix(self, request: int, names: Sequence[bytes]) -> Optional[int]:
        """Returns how many leading blocks every worker has, or None while the query runs.

        Calls for the same request share one query until one of them returns its result."""
        if self._synchronous:
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
        """Whether a request's query is still running."""
        future = self._pending.get(request)
        return future is not None and not future.done()

    def cancel(self, request: int) -> None:
        """Cancels a request's query."""
        future = self._pending.pop(request, None)
        if future is not None:
            future.cancel()

    def _prefix(self, names: List[bytes]) -> int:
        least = len(names)
        for rank in self._ranks:
            found = self.query(rank, {"query": "prefix"}, names[:least])
            least = min(least, found if isinstance(found, int) else 0)
            if least == 0:
                break
        return least

    def query_all(self, query: Dict[str, Any]) -> List[Any]:
        """Returns the replies of all workers; None for a worker that does not reply."""
        return [self.query(rank, query, []) for rank in self._ranks]

    def query_all_async(self, query: Dict[str, Any]) -> "Future[List[Any]]":
        """Like `query_all`, on the client's thread."""
        return self._pool.submit(self.query_all, query)

    def query(self, rank: int, query: Dict[str, Any], names: Sequence[bytes]) -> Any:
        """Returns a worker's reply, or None if there is none within the timeout."""
        with _local_lock:
            handler = _local_handlers.get((str(self._engine["folder"]), rank))
        try:
            if handler is not None:
                return handler(query, list(names))
            if self._engine["pid"] == os.getpid() and not os.path.exists(
                    _address(str(self._engine["folder"]), rank)):
                return None  # the worker has not started, or sleeps
            if time.monotonic() < self._retry_at.get(rank, 0.0):
                return None
            return self._query_socket(rank, query, names)
        except Exception as error:  # noqa: BLE001: without a reply the engine computes
            log.warning("worker %d did not answer a lookup query: %s", rank, error)
            if isinstance(error, (TimeoutError, BlockingIOError)):
                self._retry_at[rank] = time.monotonic() + self._timeout_s
            self._disconnect(rank)
            return None

    def _query_socket(self, rank: int, query: Dict[str, Any], names: Sequence[bytes]) -> Any:
        with self._lock:
            connection = self._connections.get(rank)
            if connection is not None:
                try:
                    return self._exchange(connection, query, names)
                except (EOFError, ConnectionError):  # the worker restarted after a sleep
                    del self._connections[rank]
                    connection.close()
            secret = str(self._engine["secret"]).encode()
            connection = _connect(_address(str(self._engine["folder"]), rank), self._timeout_s)
            self._connections[rank] = connection
            answer_challenge(connection, secret)
            deliver_challenge(connection, secret)
            return self._exchange(connection, query, names)

    def _exchange(self, connection: Connection, query: Dict[str, Any],
                  names: Sequence[bytes]) -> Any:
        connection.send_bytes(_pack(query, names))
        if not connection.poll(self._timeout_s):
            raise TimeoutError(f"no reply within lookup_timeout_s = {self._timeout_s} s")
        return json.loads(connection.recv_bytes())

    def _disconnect(self, rank: int) -> None:
        with self._lock:
            connection = self._connections.pop(rank, None)
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Cancels pending queries, waits for the running one, and closes all connections."""
        self.closed = True
        for request in list(self._pending):
            self.cancel(request)
        self._pool.shutdown(wait=True)
        for rank in list(self._connections):
            self._disconnect(rank)
        if self._engine["pid"] == os.getpid():  # the workers, who used its sockets, have ended
            shutil.rmtree(str(self._engine["folder"]), ignore_errors=True)
