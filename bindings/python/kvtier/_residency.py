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
        #: Events that were lost because they were not read in time.
        self.missed = 0
        #: How often all that is resident was read.
        self.snapshots = 0
        self._cursor = 0
        self._waiting: "OrderedDict[bytes, Any]" = OrderedDict()
        self._changes: List[Change] = []
        self._snapshot: Optional[_Snapshot] = _Snapshot(store)

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
        """Returns the changes since the last call, of about `most` events. Never waits."""
        changes, self._changes = self._changes, []
        if self._snapshot is not None:
            if self._snapshot.thread.is_alive():
                return changes
            self._finish_snapshot(changes)
        while most > 0:
            data, missed, self._cursor = self._store._events_raw(self._cursor, min(_PAGE, most))
            if missed:
                self.missed += missed
                self._snapshot = _Snapshot(self._store)
                return changes
            if not data:
                return changes
            for event in _EVENT.iter_unpack(data):
                self._apply(event, changes)
            most -= len(data) // _EVENT.size
        return changes

    def _finish_snapshot(self, changes: List[Change]) -> None:
        snapshot, self._snapshot = self._snapshot, None
        assert snapshot is not None
        if snapshot.error is not None:
            raise snapshot.error
        self.snapshots += 1
        self._cursor = snapshot.cursor
        entries = snapshot.entries
        for key in [key for key in self.chunks if key not in entries]:
            self._set(key, self.chunks[key], 0, changes)
        for key, (tiers, facts) in entries.items():
            chunk = self.chunks.get(key) or Chunk(*facts)
            self._set(key, chunk, tiers & self._followed, changes)

    def _apply(self, event: Tuple[Any, ...], changes: List[Change]) -> None:
        _, _, kind, tier, tokens, position, key, parent, namespace = event
        if kind not in (_abi.KVT_STORE_EVENT_STORED, _abi.KVT_STORE_EVENT_REMOVED):
            return  # each chunk of a cleared namespace has its own event
        if not self._followed >> tier & 1:
            return
        chunk = self.chunks.get(key)
        if kind == _abi.KVT_STORE_EVENT_STORED:
            chunk = chunk or Chunk(tokens, position, parent, namespace)
            self._set(key, chunk, chunk.tiers | 1 << tier, changes)
        elif chunk is not None:
            self._set(key, chunk, chunk.tiers & ~(1 << tier), changes)

    def _set(self, key: bytes, chunk: Chunk, tiers: int, changes: List[Change]) -> None:
        """Changes the tiers of a chunk, and reports the media that this changes."""
        before, chunk.tiers = chunk.tiers, tiers
        if tiers and not before:
            self.chunks[key] = chunk
            chunk.label = self._waiting.pop(key, chunk.label)
        if before != tiers and (chunk.label is not None or not self._labelled):
            for medium, mask in self._medium_tiers.items():
                if bool(before & mask) != bool(tiers & mask):
                    changes.append(Change(bool(tiers & mask), medium, key, chunk.label, chunk))
        if not tiers:
            self.chunks.pop(key, None)

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
                self._waiting[key] = label
                if len(self._waiting) > _MAX_WAITING:
                    self._waiting.popitem(last=False)
                continue
            if chunk.label is not None or not self._labelled:
                self._report(False, key, chunk)
            chunk.label = label
            self._report(True, key, chunk)

    def unlabel_all(self) -> None:
        """Removes all labels. The next `poll` reports the chunks that had one as removed."""
        self._waiting.clear()
        for key, chunk in self.chunks.items():
            if chunk.label is not None:
                self._report(False, key, chunk)
                chunk.label = None

    def _report(self, stored: bool, key: bytes, chunk: Chunk) -> None:
        self._changes += [Change(stored, medium, key, chunk.label, chunk)
                          for medium in self.media_of(chunk)]


class _Snapshot:
    """Reads all that is resident, in a thread."""

    def __init__(self, store: "Store") -> None:
        self.cursor = 0
        self.entries: Dict[bytes, Tuple[int, Tuple[int, int, bytes, bytes]]] = {}
        self.error: Optional[Error] = None
        self._store = store
        self.thread = threading.Thread(target=self._read, name="kvtier-residents", daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            # The events from here on update what is read now.
            self.cursor = self._store._events_raw(FUTURE, 0)[2]
            for data in self._store._residents_raw(_PAGE):
                for event in _EVENT.iter_unpack(data):
                    _, _, _, tier, tokens, position, key, parent, namespace = event
                    tiers, facts = self.entries.get(key, (0, None))
                    self.entries[key] = tiers | 1 << tier, facts or (
                        tokens, position, parent, namespace)
        except Error as error:
            self.error = error
