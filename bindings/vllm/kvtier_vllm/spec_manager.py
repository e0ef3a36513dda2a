"""The scheduler's side of `kvtier_vllm.spec`: what is there, and what must stay."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set

import kvtier
from kvtier._errors import Error

from . import _engine
from .asks import Asks
from .settings import Shared, logger

_engine.require()

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

TIER = "use TieringOffloadingSpec with the kvtier tier (kvtier_vllm.tier), which serves any " \
        "number of workers"
_IN_MEMORY = 1 << kvtier.TIER_HOST | 1 << kvtier.TIER_DEVICE


class KvtierBlocks(LoadStoreSpec):
    """Blocks by their offload keys, and the store that has them."""

    def __init__(self, keys: Sequence[bytes], token: str) -> None:
        self.keys, self.token = list(keys), token

    def __repr__(self) -> str:
        return f"{len(self.keys)} blocks"


class SharedMedium:
    """The blocks of each KV cache group, by its number, in one store. The worker opens it, since it knows what
    blocks consist of; the manager finds it."""

    def __init__(self, shared: Shared, make: Callable[[str], Dict[int, kvtier.Blocks]]) -> None:
        self.shared, self._make = shared, make
        self.token, self.spaces = shared.token, make("")

    def forget(self) -> None:
        """Nothing that is stored is to be found again. What is held now, or still being stored,
        cannot be cleared: so all has another identity from now on."""
        again = uuid.uuid4().hex
        spaces, self.spaces = self.spaces, self._make(again)
        self.token = f"{self.shared.token}:{again}"
        for blocks in spaces.values():
            blocks.clear()
            blocks.close()

    def close(self) -> None:
        """Closes its handles."""
        for blocks in self.spaces.values():
            blocks.close()


class _Pin:
    """Blocks that lookups were answered with, or will be in the next step."""

    def __init__(self, hold: kvtier.Hold, keys: List[bytes]) -> None:
        self.hold, self.keys, self.is_used = hold, keys, True


class _Fetch(NamedTuple):
    """Blocks on their way from disk, or from the remote."""

    op: kvtier.Op
    keys: List[bytes]


media: Dict[str, SharedMedium] = {}


def by_group(keys: Iterable[Any]) -> Dict[int, List[bytes]]:
    groups: Dict[int, List[bytes]] = {}
    for key in keys:
        groups.setdefault(get_offload_group_idx(key), []).append(key)
    return groups


class KvtierManager(OffloadingManager):
    """The scheduler's side. What is stored is the store's to say; what is underway is noted here.

    A load of this seam that fails ends vLLM. So a block is a hit once it is in memory, where its
    bytes have been checked, and held, so that nothing that comes to be stored meanwhile has it
    leave: it may have it go to disk, where the worker's load finds it, too. Both are done at the
    end of a step for all that was asked for in it; it is a hit in the next one, and held again
    from `prepare_load` to `complete_load`."""

    def __init__(self, key: str, events: bool, ask_s: float) -> None:
        self._key = key
        self._storing: Set[bytes] = set()
        #: What was asked for in this step, or is coming, and by which requests.
        self._wanted: Dict[bytes, Set[str]] = {}
        self._coming: Dict[bytes, Set[str]] = {}
        self._fetches: List[_Fetch] = []
        self._pinned: Dict[bytes, _Pin] = {}
        self._pins: List[_Pin] = []
        #: What did not come, for each request there is.
        self._lost: Dict[str, Set[bytes]] = {}
        self._holds: Dict[str, List[kvtier.Hold]] = {}
        self._events: Optional[List[OffloadingEvent]] = [] if events else None
        self._asks = Asks(ask_s)

    @property
    def _medium(self) -> SharedMedium:
        if self._key not in media:
            raise kvtier.StateError(
                "the worker is not in this process, or has no KV caches: a store belongs to one "
                f"process; {TIER}", kvtier.abi.KVT_E_STATE, "KVT_E_STATE")
        return media[self._key]

    @property
    def store(self) -> kvtier.Store:
        """The store, for `stats`, `set_policy`, `evictions` and `tenants`."""
        return self._medium.shared.store

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        self._lost.setdefault(req_context.req_id, set())
        self._asks.begin(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._lost.pop(req_context.req_id, None)
        self._asks.end(req_context.req_id)

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        if key in self._storing:
            return LookupResult.HIT_PENDING
        pin = self._pinned.get(key)
        if pin is not None:
            pin.is_used = True
            return LookupResult.HIT
        coming = self._coming.get(key)
        if coming is not None:
            coming.add(req_context.req_id)
            return LookupResult.RETRY
        if key in self._lost.get(req_context.req_id, ()):
            return LookupResult.MISS
        if key not in self._wanted:
            blocks = self._medium.spaces[get_offload_group_idx(key)]
            found = self._asks.find(blocks, key, req_context.req_id)
            if found is None:
                return LookupResult.RETRY
            if not found:
                return LookupResult.MISS
            self._wanted[key] = set()
        self._wanted[key].add(req_context.req_id)
        return LookupResult.RETRY

    def _lose(self, keys: Iterable[bytes], askers: Dict[bytes, Set[str]], why: str) -> None:
        lost = list(keys)
        if lost:
            logger.warning("%d blocks did not come: %s", len(lost), why)
        for key in lost:
            for request in askers.pop(key, ()):
                if request in self._lost:
                    self._lost[request].add(key)

    def _arrived(self) -> None:
        """What has come into memory is wanted now."""
        underway = []
        for one in self._fetches:
            if not one.op.info().released:
                underway.append(one)
                continue
            failed = one.op.failed()
            self._lose((one.keys[at] for at in failed), self._coming, str(one.op.error()))
            for key in one.keys:
                if key in self._coming:
                    self._wanted[key] = self._coming.pop(key)
            one.op.close()
        self._fetches = underway

    def _unpin(self, every: bool = False) -> None:
        """Lets those go that nobody has asked for since the last step."""
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

    def _prepare(self, group: int, keys: List[bytes], wanted: Dict[bytes, Set[str]]) -> None:
        """Holds what is in memory, and begins to fetch the rest."""
        blocks = self._medium.spaces[group]
        found = blocks.exists(keys)
        here = [key for key, one in zip(keys, found) if one & _IN_MEMORY]
        there = [key for key, one in zip(keys, found) if one and not one & _IN_MEMORY]
        if here:
            hold = blocks.hold(here)
            # One that has left memory before it was held is fetched when it is asked for again.
            held = [key for key, one in zip(here, hold.held) if one & _IN_MEMORY]
            pin = _Pin(hold, held)
            self._pins.append(pin)
            self._pinned.update(dict.fromkeys(held, pin))
        if there:
            self._fetches.append(_Fetch(blocks.prefetch(there), there))
            self._coming.update((key, wanted[key]) for key in there)

    def on_schedule_end(self, context: Any) -> None:
        self._unpin()
        self._arrived()
        self._asks.send()
        wanted, self._wanted = self._wanted, {}
        for group, keys in by_group(wanted).items():
            try:
                self._prepare(group, keys, wanted)
            except Error as error:
                self._lose([key for key in keys if key not in self._pinned], wanted, str(error))
        if self._key in media:
            media[self._key].shared.log_evictions()

    def has_pending_work(self) -> bool:
        return bool(self._wanted or self._fetches or self._pins or self._asks.is_open)

    def prepare_load(self, keys: Collection[Any], req_context: Any) -> LoadStoreSpec:
        medium = self._medium
        self._close(req_context.req_id)
        holds = self._holds[req_context.req_id] = []
        for group, some in by_group(keys).items():
            holds.append(medium.spaces[group].hold(some))
        return KvtierBlocks(list(keys), medium.token)

    def complete_load(self, keys: Collection[Any], req_context: Any) -> None:
        self._close(req_context.req_id)

    def _close(self, request: str) -> None:
        """Lets go of what a request's load has held."""
        for hold in self._holds.pop(request, ()):
            hold.close()

    def prepare_store(self, keys: Collection[Any], req_context: Any
                      ) -> Optional[PrepareStoreOutput]:
        medium = self._medium
        there: Set[bytes] = set()
        for group, some in by_group(keys).items():
            found = medium.spaces[group].exists(some)
            # That a remote has one is a hint, which does not stand for storing it here.
            there.update(key for key, one in zip(some, found) if one & kvtier.EXISTS_WHOLE)
        new = [key for key in keys if key not in there and key not in self._storing]
        self._storing.update(new)
        return PrepareStoreOutput(new, KvtierBlocks(new, medium.token), [])

    def complete_store(self, keys: Collection[Any], req_context: Any, success: bool = True
                       ) -> None:
        self._storing.difference_update(keys)
        if self._events is not None and success and keys:
            stored: List[Any] = [key for group, some in by_group(keys).items() for key, one in zip(
                some, self._medium.spaces[group].exists(some)) if one & kvtier.EXISTS_WHOLE]
            self._events.append(OffloadingEvent(keys=stored, medium=Medium.CPU, removed=False))

    def take_events(self) -> Iterable[OffloadingEvent]:
        if self._events:
            events, self._events = self._events, []
            return events
        return ()

    def _let_go(self) -> None:
        for request in list(self._holds):
            self._close(request)
        self._unpin(every=True)
        while self._fetches:
            op = self._fetches[-1].op
            op.cancel()
            op.wait()
            self._fetches.pop()
            op.close()
        self._coming.clear()
        self._wanted.clear()
        self._asks.forget()

    def reset_cache(self) -> None:
        self._let_go()
        self._storing.clear()
        if self._key in media:
            media[self._key].forget()

    def shutdown(self) -> None:
        self._let_go()
