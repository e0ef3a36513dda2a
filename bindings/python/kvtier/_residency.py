"""Follows what a store has in its tiers, as changes of the chunks' residency in media."""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple

from . import _abi
from ._errors import Error

if TYPE_CHECKING:
    from ._store import Store

#: The medium of each tier that is followed, named as in vLLM's events. Chunks at the remote are
#: not followed, because all engines share them.
MEDIA: Mapping[int, str] = {_abi.KVT_TIER_HOST: "CPU", _abi.KVT_TIER_DISK: "STORAGE"}

FUTURE = 2**64 - 1
#: kvt_store_event_t: number, time, kind, tier, tokens, position, key, parent, namespace.
_EVENT = struct.Struct("<2Q4I32s32s32s")
#: Most labels that wait for their chunks to become resident.
_MAX_WAITING = 65_536
_PAGE = 1024


class Change(NamedTuple):
    """A chunk became resident in a medium (`stored`), or is no longer."""

    stored: bool
    medium: str
    key: bytes
    label: Any
    chunk: "Chunk"


class Chunk:
    """A chunk that is resident in some tier, or was until now."""

    __slots__ = ("tiers", "tokens", "position", "parent", "namespace", "label")

    def __init__(self, tokens: int, position: int, parent: bytes, namespace: bytes) -> None:
        #: Bits `1 << TIER_*` of the followed tiers that have all of it.
        self.tiers = 0
        self.tokens, self.position = tokens, position
        #: The keys of the chunk before it, and of its namespace. They are equal for a first chunk.
        self.parent, self.namespace = parent, namespace
        #: What the caller has said about it.
        self.label: Any = None


class Follower:
    """Follows the store's events, and knows what is resident.

    Several tiers may be one medium: a chunk is in it as long as one of these tiers has all of the
    chunk. With `labelled`, only chunks with a label are reported, from then on. A reader that
    comes too late for some events reads all that is resident, in a thread of its own, and
    reports the differences. One thread uses a follower.
    """

    def __init__(self, store: "Store", media: Mapping[int, str] = MEDIA, *,
                 labelled: bool = False) -> None:
        self._store, self._media, self._labelled = store, dict(media), labelled
        self._medium_tiers: Dict[str, int] = {}
        for tier, medium in self._media.items():
            self._medium_tiers[medium] = self._medium_tiers.get(medium, 0) | 1 << tier
        self._followed = sum(1 << tier for tier in self._media)
        #: The chunks that are resident in followed tiers, by key.
        self.chunks: Dict[bytes, Chunk] = {}
        #: Those of them that have a label.
        self.named: Dict[bytes, Chunk] = {}
        #: Events that were lost because they were not read in time.
        self.missed = 0
        #: How often all that is resident was read.
        self.snapshots = 0
        self._cursor = 0
        self._waiting: "OrderedDict[bytes, Any]" = OrderedDict()
        self._changes: List[Change] = []
        self._snapshot: Optional[_Snapshot] = _Snapshot(store, self._followed)

    @property
    def cursor(self) -> int:
        """The number of the next event that is read, for `Store.watch`."""
        return self._cursor

    @property
    def is_reading(self) -> bool:
        """Whether all that is resident is being read: changes follow when that is done."""
        return self._snapshot is not None

    def wait(self) -> None:
        """Waits until all that is resident was read, if it is being read."""
        if self._snapshot is not None:
            self._snapshot.thread.join()

    def poll(self, most: int = 4096) -> List[Change]:
        """Returns the changes since the last call, of about `most` events. Never waits. After an
        error `end` returns the changes that were not returned yet."""
        self._read(most)
        changes, self._changes = self._changes, []
        return changes

    def _read(self, most: int) -> None:
        if self._snapshot is not None:
            if self._snapshot.thread.is_alive():
                return
            self._finish_snapshot()
        while most > 0:
            data, missed, self._cursor = self._store._events_raw(self._cursor, min(_PAGE, most))
            if missed:
                self.missed += missed
                self._snapshot = _Snapshot(self._store, self._followed)
                return
            if not data:
                return
            for event in _EVENT.iter_unpack(data):
                self._apply(event)
            most -= len(data) // _EVENT.size

    def _finish_snapshot(self) -> None:
        """Replaces what is known. Looks at the chunks only whose changes are reported, since it
        runs in the engine's step."""
        snapshot, self._snapshot = self._snapshot, None
        assert snapshot is not None
        if snapshot.error is not None:
            raise snapshot.error
        self.snapshots += 1
        self._cursor = snapshot.cursor
        old, self.chunks = self.chunks, snapshot.chunks
        if self._labelled:
            keys = [*self.named, *(key for key in self._waiting if key in self.chunks)]
        else:
            keys = list({**old, **self.chunks})
        for key in keys:
            before, now = old.get(key), self.chunks.get(key)
            chunk, tiers = now or before, now.tiers if now is not None else 0
            assert chunk is not None
            chunk.tiers = before.tiers if before is not None else 0
            chunk.label = before.label if before is not None else None
            if chunk.label is not None:
                self.named[key] = chunk
            self._set(key, chunk, tiers)

    def _apply(self, event: Tuple[Any, ...]) -> None:
        _, _, kind, tier, tokens, position, key, parent, namespace = event
        if kind not in (_abi.KVT_STORE_EVENT_STORED, _abi.KVT_STORE_EVENT_REMOVED):
            return  # each chunk of a cleared namespace has its own event
        if not self._followed >> tier & 1:
            return
        chunk = self.chunks.get(key)
        if kind == _abi.KVT_STORE_EVENT_STORED:
            chunk = chunk or Chunk(tokens, position, parent, namespace)
            self._set(key, chunk, chunk.tiers | 1 << tier)
        elif chunk is not None:
            self._set(key, chunk, chunk.tiers & ~(1 << tier))

    def _set(self, key: bytes, chunk: Chunk, tiers: int) -> None:
        """Changes the tiers of a chunk, and reports the media that this changes."""
        before, chunk.tiers = chunk.tiers, tiers
        if tiers and not before:
            self.chunks[key] = chunk
            if key in self._waiting:
                chunk.label = self._waiting.pop(key)
                self.named[key] = chunk
        if before != tiers and (chunk.label is not None or not self._labelled):
            for medium, mask in self._medium_tiers.items():
                if bool(before & mask) != bool(tiers & mask):
                    self._changes.append(
                        Change(bool(tiers & mask), medium, key, chunk.label, chunk))
        if not tiers:
            self.chunks.pop(key, None)
            if self.named.pop(key, None) is not None:
                # It may be resident again by an event that is not read yet. A description that
                # came before these events was of a chunk with this label, and changed nothing.
                self._wait(key, chunk.label)

    def _wait(self, key: bytes, label: Any) -> None:
        self._waiting[key] = label
        self._waiting.move_to_end(key)
        if len(self._waiting) > _MAX_WAITING:
            self._waiting.popitem(last=False)

    def media_of(self, chunk: Chunk) -> List[str]:
        """The media that have a chunk."""
        return [medium for medium, mask in self._medium_tiers.items() if chunk.tiers & mask]

    def label(self, keys: Iterable[bytes], labels: Iterable[Any]) -> None:
        """Labels chunks. A chunk that is not resident gets its label when it becomes resident."""
        for key, label in zip(keys, labels):
            chunk = self.chunks.get(key)
            if chunk is not None and chunk.label == label:
                continue
            if chunk is None:
                self._wait(key, label)
                continue
            if chunk.label is not None or not self._labelled:
                self._report(False, key, chunk)
            chunk.label = label
            self.named[key] = chunk
            self._report(True, key, chunk)

    def unlabel_all(self) -> None:
        """Removes all labels. The next `poll` reports the chunks that had one as removed."""
        self._waiting.clear()
        named, self.named = self.named, {}
        for key, chunk in named.items():
            self._report(False, key, chunk)
            chunk.label = None

    def end(self) -> List[Change]:
        """Removes all labels, and returns the changes that `poll` has not returned. A follower
        that failed ends so: its chunks with labels are not reported as resident for ever."""
        self.unlabel_all()
        changes, self._changes = self._changes, []
        return changes

    def _report(self, stored: bool, key: bytes, chunk: Chunk) -> None:
        self._changes += [Change(stored, medium, key, chunk.label, chunk)
                          for medium in self.media_of(chunk)]


class _Snapshot:
    """Reads the chunks that are resident in followed tiers, in a thread."""

    def __init__(self, store: "Store", followed: int) -> None:
        self.cursor = 0
        self.chunks: Dict[bytes, Chunk] = {}
        self.error: Optional[Error] = None
        self._store, self._followed = store, followed
        self.thread = threading.Thread(target=self._read, name="kvtier-residents", daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            # The events from here on update what is read now.
            self.cursor = self._store._events_raw(FUTURE, 0)[2]
            for data in self._store._residents_raw(_PAGE):
                for event in _EVENT.iter_unpack(data):
                    _, _, _, tier, tokens, position, key, parent, namespace = event
                    if self._followed >> tier & 1:
                        chunk = self.chunks.get(key)
                        if chunk is None:
                            chunk = self.chunks[key] = Chunk(tokens, position, parent, namespace)
                        chunk.tiers |= 1 << tier
        except Error as error:
            self.error = error
