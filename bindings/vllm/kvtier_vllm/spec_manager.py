"""The scheduler side of `kvtier_vllm.spec`: looks up blocks, and holds them for loads."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set

import kvtier
from kvtier._errors import Error

from . import _engine
from .remote_lookups import RemoteLookups
from .settings import SharedStore, logger

_engine.require("spec")

from vllm.v1.kv_offload.base import (  # noqa: E402
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    RequestOffloadingContext,
    get_offload_group_idx,
)

from .offload_events import OffloadEvents  # noqa: E402

TIER = "use TieringOffloadingSpec with the kvtier tier (kvtier_vllm.tier), which serves any " \
        "number of workers"
_IN_MEMORY = 1 << kvtier.TIER_HOST | 1 << kvtier.TIER_DEVICE


class KvtierBlocks(LoadStoreSpec):
    """The offload keys of a job's blocks, and the token of their store."""

    def __init__(self, keys: Sequence[bytes], token: str) -> None:
        self.keys, self.token = list(keys), token

    def __repr__(self) -> str:
        return f"{len(self.keys)} blocks"


class SharedMedium:
    """The blocks of each KV cache group, by group number, in one store. The worker opens it,
    because it knows the layout of blocks, and the manager looks it up in `media`."""

    def __init__(self, shared: SharedStore,
                 open_blocks: Callable[[str], Dict[int, kvtier.Blocks]]) -> None:
        self.shared, self._open_blocks = shared, open_blocks
        self.token, self.blocks = shared.token, open_blocks("")

    def reset(self) -> None:
        """Clears all blocks, and changes their identity. Blocks that are held, or still being
        stored, cannot be cleared, but are not found under the new identity."""
        epoch = uuid.uuid4().hex
        before, self.blocks = self.blocks, self._open_blocks(epoch)
        self.token = f"{self.shared.token}:{epoch}"
        for blocks in before.values():
            blocks.clear()
            blocks.close()

    def close(self) -> None:
        """Closes the handles of all groups."""
        for blocks in self.blocks.values():
            blocks.close()


class _Pin:
    """Blocks in memory that lookups report as hits. `is_used` says whether one did this step."""

    def __init__(self, hold: kvtier.Hold, keys: List[bytes]) -> None:
        self.hold, self.keys, self.is_used = hold, keys, True


class _Fetch(NamedTuple):
    """Blocks that are being fetched from disk or from the remote."""

    op: kvtier.Op
    keys: List[bytes]


media: Dict[str, SharedMedium] = {}


def by_group(keys: Iterable[Any]) -> Dict[int, List[bytes]]:
    """Offload keys by the number of their KV cache group."""
    groups: Dict[int, List[bytes]] = {}
    for key in keys:
        groups.setdefault(get_offload_group_idx(key), []).append(key)
    return groups


class KvtierManager(OffloadingManager):
    """The scheduler side. The store knows the stored blocks; the manager tracks requests.

    A failed load of this seam ends vLLM. So a block is a hit only when it is in memory, where its
    checksum was verified, and is held. A held block may be demoted to disk, where a load still
    finds it, but not dropped. The end of a step holds or fetches all blocks that were looked up
    in it, and they are hits in the next step. `prepare_load` holds them again until
    `complete_load`."""

    def __init__(self, key: str, events: bool, remote_lookup_s: float) -> None:
        self._key = key
        self._storing: Set[bytes] = set()
        #: Blocks that were looked up in this step, and blocks that are being fetched, each with
        #: the requests that want it.
        self._requested: Dict[bytes, Set[str]] = {}
        self._fetching: Dict[bytes, Set[str]] = {}
        self._fetches: List[_Fetch] = []
        self._pinned: Dict[bytes, _Pin] = {}
        self._pins: List[_Pin] = []
        #: Keys whose fetch failed, by running request.
        self._failed: Dict[str, Set[bytes]] = {}
        self._holds: Dict[str, List[kvtier.Hold]] = {}
        self._has_events = events
        self._events: Optional[OffloadEvents] = None
        self._remote_lookups = RemoteLookups(remote_lookup_s)

    @property
    def _medium(self) -> SharedMedium:
        if self._key not in media:
            raise kvtier.StateError(
                "the worker is not in this process, or has not registered KV caches: a store "
                f"belongs to one process; {TIER}", kvtier.abi.KVT_E_STATE, "KVT_E_STATE")
        return media[self._key]

    @property
    def store(self) -> kvtier.Store:
        """The store, for `stats`, `set_policy`, `evictions` and `tenants`."""
        return self._medium.shared.store

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        self._failed.setdefault(req_context.req_id, set())
        self._remote_lookups.begin(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._failed.pop(req_context.req_id, None)
        self._remote_lookups.end(req_context.req_id)

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        if key in self._storing:
            return LookupResult.HIT_PENDING
        pin = self._pinned.get(key)
        if pin is not None:
            pin.is_used = True
            return LookupResult.HIT
        fetching = self._fetching.get(key)
        if fetching is not None:
            fetching.add(req_context.req_id)
            return LookupResult.RETRY
        if key in self._failed.get(req_context.req_id, ()):
            return LookupResult.MISS
        if key not in self._requested:
            blocks = self._medium.blocks[get_offload_group_idx(key)]
            found = self._remote_lookups.find(blocks, key, req_context.req_id)
            if found is None:
                return LookupResult.RETRY
            if not found:
                return LookupResult.MISS
            self._requested[key] = set()
        self._requested[key].add(req_context.req_id)
        return LookupResult.RETRY

    def _fail(self, keys: Iterable[bytes], requesters: Dict[bytes, Set[str]], why: str) -> None:
        failed = list(keys)
        if failed:
            logger.warning("%d blocks could not be fetched and count as misses: %s", len(failed),
                           why)
        for key in failed:
            for request in requesters.pop(key, ()):
                if request in self._failed:
                    self._failed[request].add(key)

    def _finish_fetches(self) -> None:
        """Moves blocks whose fetch has ended back to the requested ones, or marks them failed."""
        underway = []
        for fetch in self._fetches:
            if not fetch.op.info().released:
                underway.append(fetch)
                continue
            failed = fetch.op.failed()
            self._fail((fetch.keys[at] for at in failed), self._fetching, str(fetch.op.error()))
            for key in fetch.keys:
                if key in self._fetching:
                    self._requested[key] = self._fetching.pop(key)
            fetch.op.close()
        self._fetches = underway

    def _unpin(self, every: bool = False) -> None:
        """Releases pins that no lookup has used since the last step, or all of them."""
        kept = []
        for pin in self._pins:
            if pin.is_used and not every:
                pin.is_used = False
                kept.append(pin)
                continue
            for key in pin.keys:
                del self._pinned[key]
            pin.hold.close()
        self._pins = kept

    def _prepare(self, group: int, keys: List[bytes], requested: Dict[bytes, Set[str]]) -> None:
        """Holds the blocks in memory, and starts to fetch the others."""
        blocks = self._medium.blocks[group]
        found = blocks.exists(keys)
        in_memory = [key for key, one in zip(keys, found) if one & _IN_MEMORY]
        below = [key for key, one in zip(keys, found) if one and not one & _IN_MEMORY]
        if in_memory:
            hold = blocks.hold(in_memory)
            # A block that was evicted before it was held is fetched after its next lookup.
            held = [key for key, one in zip(in_memory, hold.held) if one & _IN_MEMORY]
            pin = _Pin(hold, held)
            self._pins.append(pin)
            self._pinned.update(dict.fromkeys(held, pin))
        if below:
            self._fetches.append(_Fetch(blocks.prefetch(below), below))
            self._fetching.update((key, requested[key]) for key in below)

    def on_schedule_end(self, context: Any) -> None:
        self._unpin()
        self._finish_fetches()
        self._remote_lookups.send()
        requested, self._requested = self._requested, {}
        for group, keys in by_group(requested).items():
            try:
                self._prepare(group, keys, requested)
            except Error as error:
                self._fail([key for key in keys if key not in self._pinned], requested, str(error))
        if self._key in media:
            media[self._key].shared.log_evictions()

    def has_pending_work(self) -> bool:
        return bool(self._requested or self._fetches or self._pins
                    or self._remote_lookups.is_pending)

    def prepare_load(self, keys: Collection[Any], req_context: Any) -> LoadStoreSpec:
        medium = self._medium
        self._release_load(req_context.req_id)
        holds = self._holds[req_context.req_id] = []
        for group, some in by_group(keys).items():
            holds.append(medium.blocks[group].hold(some))
        return KvtierBlocks(list(keys), medium.token)

    def complete_load(self, keys: Collection[Any], req_context: Any) -> None:
        self._release_load(req_context.req_id)
        self._announce(keys)

    def _release_load(self, request: str) -> None:
        """Releases the blocks that are held for a request's load."""
        for hold in self._holds.pop(request, ()):
            hold.close()

    def prepare_store(self, keys: Collection[Any], req_context: Any
                      ) -> Optional[PrepareStoreOutput]:
        medium = self._medium
        stored: Set[bytes] = set()
        for group, some in by_group(keys).items():
            found = medium.blocks[group].exists(some)
            # A remote hint may be stale, so a block that only the remote has is stored here, too.
            stored.update(key for key, one in zip(some, found) if one & kvtier.EXISTS_WHOLE)
        new = [key for key in keys if key not in stored and key not in self._storing]
        self._storing.update(new)
        return PrepareStoreOutput(new, KvtierBlocks(new, medium.token), [])

    def complete_store(self, keys: Collection[Any], req_context: Any, success: bool = True
                       ) -> None:
        self._storing.difference_update(keys)
        if success:
            self._announce(keys)

    def _announce(self, keys: Iterable[Any]) -> None:
        """Has events report blocks that were stored or loaded, as long as the store has them."""
        if self._has_events and self._events is None:
            self._events = OffloadEvents(self._medium.shared.store, Medium.CPU)
        if self._events is not None:
            for group, some in by_group(keys).items():
                self._events.found(self._medium.blocks[group], some)

    def take_events(self) -> Iterable[OffloadingEvent]:
        return () if self._events is None else self._events.take()

    def _release_all(self) -> None:
        for request in list(self._holds):
            self._release_load(request)
        self._unpin(every=True)
        while self._fetches:
            op = self._fetches[-1].op
            op.cancel()
            op.wait()
            self._fetches.pop()
            op.close()
        self._fetching.clear()
        self._requested.clear()
        self._remote_lookups.cancel()

    def reset_cache(self) -> None:
        self._release_all()
        self._storing.clear()
        if self._events is not None:
            self._events.reset()
        if self._key in media:
            media[self._key].reset()

    def shutdown(self) -> None:
        self._release_all()
