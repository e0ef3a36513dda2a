"""Puts that run in the background."""

from __future__ import annotations

import contextlib
import logging
import threading
from concurrent.futures import Future
from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Sequence, Set

import kvtier
from kvtier import BlockAddresses, Blocks

log = logging.getLogger("kvtier_lmcache")

Callback = Optional[Callable[[Any], None]]


class _Put(NamedTuple):
    """One native call: chunks of one kind. Its memory objects are referenced until it ends."""

    keys: List[Any]
    names: List[bytes]
    objects: List[Any]
    on_complete: Callback
    future: "Future[None]"


class Puts:
    """The puts of a store, which the library's notifier thread completes. Any thread may use
    it."""

    def __init__(self, runtime: kvtier.Runtime, level: int) -> None:
        self._level = level
        self._names: Set[bytes] = set()
        self._count = 0
        self._changed = threading.Condition()
        self._queue = runtime.queue(callback=self._on_completions)

    def __contains__(self, name: bytes) -> bool:
        with self._changed:
            return name in self._names

    def claim(self, names: Sequence[bytes]) -> List[int]:
        """Marks names as being put. Returns the positions of those that were not marked yet."""
        with self._changed:
            new = []
            for at, name in enumerate(names):
                if name not in self._names:
                    self._names.add(name)
                    new.append(at)
            return new

    def unclaim(self, names: Sequence[bytes]) -> None:
        """Reverts `claim` for names that are not put."""
        with self._changed:
            self._names.difference_update(names)
            self._changed.notify_all()

    def start(self, blocks: Blocks, keys: List[Any], names: List[bytes], objects: List[Any],
              on_complete: Callback) -> "Future[None]":
        """Starts to put claimed names. The future ends when all of them are stored or failed."""
        put = _Put(keys, names, objects, on_complete, Future())
        with self._changed:
            self._count += 1
        for obj in objects:
            obj.ref_count_up()
        try:
            blocks.put(names, BlockAddresses([obj.data_ptr for obj in objects], kept=objects),
                       level=self._level, queue=self._queue, tag=put)
        except kvtier.Error as error:
            self._end(put, range(len(names)), error)
        return put.future

    def _on_completions(self, completions: List[kvtier.Completion]) -> None:
        for completion in completions:
            if not completion.events & kvtier.RELEASED or not isinstance(completion.tag, _Put):
                continue
            put, op = completion.tag, completion.op
            failed: Sequence[int] = ()
            error = completion.error
            if op is not None:
                if error is not None:
                    failed, error = op.failed() or range(len(put.names)), op.error() or error
                op.close()
            self._end(put, failed, error)

    def _end(self, put: _Put, failed: Sequence[int], error: Optional[kvtier.Error]) -> None:
        for obj in put.objects:
            obj.ref_count_down()
        with self._changed:
            self._names.difference_update(put.names)
            self._count -= 1
            self._changed.notify_all()
        if error is not None:
            log.warning("%d of %d chunks were not stored: %s", len(failed), len(put.names), error)
        without = set(failed)
        for at, key in enumerate(put.keys):
            if put.on_complete is not None and at not in without:
                try:
                    put.on_complete(key)
                except Exception:  # as in LMCache's own backends
                    log.exception("on_complete_callback failed for a chunk")
        if error is not None:
            put.future.set_exception(error)
        else:
            put.future.set_result(None)

    @contextlib.contextmanager
    def using_memory(self) -> Iterator[None]:
        """Surrounds another transfer that uses memory objects; `drain` waits for it, too."""
        with self._changed:
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

    def drain(self) -> None:
        """Waits until no transfer uses a memory object."""
        with self._changed:
            while self._count:
                if not self._changed.wait(5.0) and self._count:
                    log.warning("still waiting for %d transfers", self._count)

    def close(self) -> None:
        """Waits for all puts."""
        self.drain()
        self._queue.close()
