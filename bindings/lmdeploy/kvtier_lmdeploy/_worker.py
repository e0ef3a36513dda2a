"""A worker's side: a store, and the moves between it and the cache's rows.

Moves are ops of the library: nothing here waits for them, no thread is made for them. Each step of
the engine asks which have ended.
"""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from typing import Any, Dict, List, Mapping, Optional, Set, Tuple

import kvtier
from kvtier import TIER_DISK, TIER_HOST, Blocks, Identity

from ._engine import imports

with imports():
    from lmdeploy.pytorch.kv_connector.base import KVConnectorOutput

from . import _rows
from ._lookup import Service
from ._meta import Hint, Load, Save, StepMeta
from ._settings import LEVELS, Settings, invalid

log = logging.getLogger("kvtier.lmdeploy")

_TIERS = {"host": TIER_HOST, "disk": TIER_DISK}


class WorkerSide:
    """One worker's. The engine's loop uses it, and lookups do from other threads."""

    def __init__(self, cache_config: Any, settings: Settings, engine: Dict[str, Any],
                 ranks: Tuple[int, int, int, int]) -> None:
        self._cache_config, self._settings, self._engine = cache_config, settings, engine
        self._global_rank, self._tp_rank, self._tp_size, self._replicas = ranks
        self._rows: Optional[_rows.Rows] = None
        self._runtime: Optional[kvtier.Runtime] = None
        self._device: Optional[kvtier.Device] = None
        self._store: Optional[kvtier.Store] = None
        #: What its memory goes by.
        self._policy = ""
        self._blocks: Optional[Blocks] = None
        self._service: Optional[Service] = None
        self._identity = Identity()
        self._sessions: "OrderedDict[int, Blocks]" = OrderedDict()
        # With the event of the device that the op is behind, which must outlive it.
        self._loads: Dict[int, Tuple[Load, Optional[kvtier.Op], Any]] = {}
        self._saves: Dict[int, Tuple[Save, Optional[kvtier.Op], Any]] = {}
        self._seen_evictions = {TIER_HOST: 0, TIER_DISK: 0}
        self.failed_saves = self.failed_loads = 0

    # Opening and closing.

    def register(self, caches: Mapping[str, Any]) -> None:
        """The cache is there: opens the store, and answers lookups."""
        if self._rows is not None:
            raise invalid("a cache is registered already: shut the connector down first")
        rows = _rows.read(caches, int(self._cache_config.num_gpu_blocks))
        self._open(rows)
        self._rows = rows
        try:
            self._service = Service(self._engine, self._tp_rank, self._answer)
        except BaseException:
            self.shutdown()
            raise
        log.info("kvtier keeps the cache of rank %d: %s", self._global_rank,
                 ", ".join(_rows.summary(rows)))

    def _open(self, rows: _rows.Rows) -> None:
        settings = self._settings
        where = settings.store_of(self._global_rank, self._tp_size)
        runtime = self._runtime = kvtier.Runtime(workers=int(settings.workers), name="lmdeploy")
        try:
            name = settings.device or ("" if rows.device == "cpu" else rows.device)
            if name:
                what, _, ordinal = name.partition(":")
                self._device = kvtier.Device(runtime, what, ordinal=int(ordinal or 0))
            self._store = kvtier.Store(runtime, device=self._device, **where)
            self._policy = settings.policy or kvtier.Advisor.policy_of(self._store)
            if settings.level == "remote" and not self._store.remote_stats()["read_circuit"]:
                raise invalid("level 'remote', and the store has no remote: say one in spec")
            if (settings.level in ("disk", "durable")
                    and not self._store.stats()["disk_limit_bytes"]):
                raise invalid(f"level {settings.level!r}, and the store has no disk: say disk_path "
                              "and disk_bytes, or level \"ram\"")
            self._identity = self._identity_of(rows)
            self._blocks = Blocks(self._store, self._identity, rows.parts)
        except BaseException:
            self._close_store()
            raise

    def _identity_of(self, rows: _rows.Rows) -> Identity:
        cache, engine = self._cache_config, self._engine
        recipe = {"block_tokens": int(cache.block_size),
                  "kernel_tokens": int(getattr(cache, "kernel_block_size", -1)),
                  "quant": str(getattr(cache, "quant_policy", "")), "rows": rows.layout()}
        salt = self._settings.salt.encode()
        model, weights = str(engine["model"]).encode(), str(engine["weights"]).encode()
        return Identity(model=model, weights=weights, salt=salt or None,
                        recipe=json.dumps(recipe, sort_keys=True).encode(),
                        shard=(self._tp_rank // self._replicas, self._tp_size // self._replicas))

    def shutdown(self) -> None:
        """Lets what is under way end, then closes the store: what was acknowledged stays as its
        level says. Again, it does nothing."""
        service, self._service = self._service, None
        if service is not None:
            service.close()
        ops = [op for _, op, _ in (*self._loads.values(), *self._saves.values()) if op is not None]
        end = time.monotonic() + self._settings.drain_s
        late = [op for op in ops if not op.wait(max(0.0, end - time.monotonic()))]
        if late:
            log.error("%d moves did not end in %g s: they are cancelled", len(late),
                      self._settings.drain_s)
        for op in late:
            op.cancel()
        for op in late:  # until then the cache is not the engine's to free
            op.wait()
        self._collect(KVConnectorOutput())
        self._close_store()
        self._rows = None

    def _close_store(self) -> None:
        for blocks in self._sessions.values():
            blocks.close()
        self._sessions.clear()
        if self._blocks is not None:
            self._blocks.close()
        for thing in (self._store, self._device, self._runtime):
            if isinstance(thing, kvtier.Device):
                thing.close()
            elif thing is not None:
                thing.close(self._settings.drain_s)
        self._blocks = self._store = self._device = self._runtime = None

    # Steps.

    def start_loads(self, meta: StepMeta) -> None:
        """Has blocks loaded, and notes what the scheduler's side passes on."""
        for switch in meta.switches:
            self._switch(switch.tier, switch.spec)
        for hint in meta.hints:
            self._hint(hint)
        # Blocks may be of those that the forward under way still uses.
        behind = self._mark() if meta.loads else None
        for load in meta.loads:
            if load.request not in self._loads:
                self._loads[load.request] = (load, self._submit("load", load, behind), behind)

    def start_saves(self, meta: StepMeta) -> None:
        """Has blocks saved, behind what the engine has given its device to do."""
        if not meta.saves:
            return
        behind = self._mark()
        for save in meta.saves:
            if save.number not in self._saves:
                self._saves[save.number] = (save, self._submit("save", save, behind), behind)

    def _submit(self, what: str, move: "Load | Save", behind: Any) -> Optional[kvtier.Op]:
        """An op; None where it was refused: that is the end of this move, not of the engine."""
        rows = self._rows
        if rows is None:
            raise invalid("a step before the cache was registered, or after the shutdown")
        try:
            blocks, places = self._of_session(move.session), rows.at(move.blocks)
            after = None if behind is None else behind[0]
            if what == "load":
                return blocks.get(move.names, places, after=after)
            return blocks.put(move.names, places, level=LEVELS[self._settings.level], after=after)
        except kvtier.Error as error:
            log.error("a %s of %d blocks was refused: %s", what, len(move.blocks), error)
            return None

    def _mark(self) -> Any:
        """An event of the device behind the forward that was queued, and what holds it. On a CPU
        all has happened."""
        if self._rows is None or self._rows.device == "cpu":
            return None
        import torch

        event = torch.cuda.Event()
        event.record()
        assert self._device is not None
        return self._device.import_event(int(event.cuda_event)), event

    def _of_session(self, session: int) -> Blocks:
        """The cache's blocks as a session asks for them: the policies tell sessions apart."""
        assert self._store is not None and self._rows is not None
        found = self._sessions.get(session)
        if found is None:
            found = Blocks(self._store, self._identity, self._rows.parts)
            self._sessions[session] = found
            if len(self._sessions) > self._settings.max_sessions:
                _, oldest = self._sessions.popitem(last=False)
                oldest.close()
        self._sessions.move_to_end(session)
        return found

    def progress(self) -> KVConnectorOutput:
        """What has ended since the last time."""
        output = KVConnectorOutput()
        self._collect(output)
        if self._settings.log_evictions:
            self._log_evictions()
        return output

    def _collect(self, output: KVConnectorOutput) -> None:
        for request, (load, op, _) in list(self._loads.items()):
            if op is not None and not op.info().released:
                continue
            del self._loads[request]
            bad = set(load.blocks) if op is None else {load.blocks[at] for at in op.failed()}
            self._ended("load", op, len(bad))
            self.failed_loads += bool(bad)
            output.invalid_block_ids.update(bad)
            output.finished_receiving = (output.finished_receiving or set()) | {request}
        done: Set[int] = set()
        for number, (_, op, _) in list(self._saves.items()):
            if op is not None and not op.info().released:
                continue
            del self._saves[number]
            failed = 0 if op is None else len(op.failed())
            self.failed_saves += op is None or failed > 0
            self._ended("save", op, failed)
            done.add(number)
        if done:
            output.completed_save_ids = done

    def _ended(self, what: str, op: Optional[kvtier.Op], failed: int) -> None:
        if op is None:
            return
        if failed:
            log.warning("a %s: %d blocks did not come through: %s", what, failed, op.error())
        op.close()

    # What the scheduler's side passes on, and asks.

    def _switch(self, tier: int, spec: str) -> None:
        assert self._store is not None
        try:
            self._store.set_policy(tier, spec)
            if tier == TIER_HOST:
                self._policy = spec
        except kvtier.Error as error:
            log.error("set_policy(%d, %r): %s", tier, spec, error)

    def _hint(self, told: Hint) -> None:
        if self._blocks is None:  # shut down meanwhile: its blocks are nobody's to hint
            return
        # The policies' clock, which other machines do not have: what is said counts from now.
        use = 0 if told.next_use_s is None else time.monotonic_ns() + int(told.next_use_s * 1e9)
        try:
            self._blocks.hint(told.names, stop=told.stop, next_use_ns=use, done=told.done)
        except kvtier.Error as error:
            log.error("a hint of %d blocks was refused: %s", len(told.names), error)

    def _log_evictions(self) -> None:
        store = self._store
        for name, tier in _TIERS.items():
            if store is None or (tier == TIER_DISK and not self.describe()["disk_limit_bytes"]):
                continue
            for entry in store.evictions(tier):
                if entry.number >= self._seen_evictions[tier]:
                    self._seen_evictions[tier] = entry.number + 1
                    log.info("evicted from %s: %s", name, entry)

    def describe(self) -> Dict[str, Any]:
        """What the store counts, and how large a block is."""
        if self._store is None or self._rows is None:
            return {}
        stats: Dict[str, Any] = dict(self._store.stats())
        stats.update(rank=self._global_rank, block_bytes=sum(self._rows.parts),
                     policy=self._policy,
                     room_bytes=max(stats["host_limit_bytes"], stats["disk_limit_bytes"]),
                     loading=len(self._loads), saving=len(self._saves),
                     failed_loads=self.failed_loads, failed_saves=self.failed_saves)
        return stats

    def _answer(self, question: Dict[str, Any], names: List[bytes]) -> Any:
        """A question of the scheduler's side, on whatever thread."""
        store, blocks, ask = self._store, self._blocks, question.get("ask")
        if store is None or blocks is None:
            return None
        if ask == "prefix":
            return blocks.prefix(names, self._settings.ask_s)
        if ask == "describe":
            return self.describe()
        if ask == "metrics":
            return store.metrics()
        if ask == "tenants":
            return [one._asdict() for one in store.tenants()]
        if ask == "evictions":
            return [one._asdict() for one in store.evictions(
                _TIERS[question["tier"]], int(question["most"]))]
        return None
