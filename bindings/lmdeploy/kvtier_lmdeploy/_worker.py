"""Worker's side of the connector: a store, and transfers between it and the engine's KV cache.

Transfers are ops of the library. Each step of the engine polls for completed ones, so no thread
waits for them.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import OrderedDict
from typing import Any, Dict, List, Mapping, Optional, Set, Tuple

import kvtier
from kvtier import TIER_DISK, TIER_HOST, Blocks, Identity

from lmdeploy.pytorch.kv_connector.base import KVConnectorOutput

from . import _rows
from ._lookup import LookupServer
from ._meta import Hint, Load, Save, StepMeta
from ._settings import LEVELS, Settings, invalid

log = logging.getLogger("kvtier.lmdeploy")

_TIERS = {"host": TIER_HOST, "disk": TIER_DISK}


class WorkerSide:
    """The connector's state of one worker. The engine's loop calls it; lookup queries arrive on
    other threads."""

    def __init__(self, cache_config: Any, settings: Settings, engine: Dict[str, Any],
                 ranks: Tuple[int, int, int, int]) -> None:
        self._cache_config, self._settings, self._engine = cache_config, settings, engine
        self._global_rank, self._tp_rank, self._tp_size, self._replicas = ranks
        self._rows: Optional[_rows.Rows] = None
        self._runtime: Optional[kvtier.Runtime] = None
        self._device: Optional[kvtier.Device] = None
        self._store: Optional[kvtier.Store] = None
        #: Eviction policy of the store's host tier.
        self._policy = ""
        self._blocks: Optional[Blocks] = None
        self._service: Optional[LookupServer] = None
        self._identity = Identity()
        self._sessions: "OrderedDict[int, Blocks]" = OrderedDict()
        # The third item is the op's ready event, which must outlive the op.
        self._loads: Dict[int, Tuple[Load, Optional[kvtier.Op], Any]] = {}
        self._saves: Dict[int, Tuple[Save, Optional[kvtier.Op], Any]] = {}
        self._seen_evictions = {TIER_HOST: 0, TIER_DISK: 0}
        self.failed_saves = self.failed_loads = 0

    # Opening and closing.

    def register(self, caches: Mapping[str, Any]) -> None:
        """Opens the store for the engine's cache, and starts to answer lookup queries."""
        if self._rows is not None:
            raise invalid("a cache is registered already: call shutdown() before you register "
                          "another one")
        rows = _rows.read(caches, int(self._cache_config.num_gpu_blocks))
        self._open(rows)
        self._rows = rows
        try:
            self._service = LookupServer(self._engine, self._tp_rank, self._handle_query)
        except BaseException:
            self.shutdown()
            raise
        log.info("kvtier stores the KV cache of rank %d: %s", self._global_rank,
                 ", ".join(_rows.summary(rows)))

    def _open(self, rows: _rows.Rows) -> None:
        settings = self._settings
        store_options = settings.store_of(self._global_rank, self._tp_size)
        if settings.disk_path:  # the store itself makes only its own directory in it
            os.makedirs(settings.disk_path, mode=0o700, exist_ok=True)
        runtime = self._runtime = kvtier.Runtime(workers=int(settings.workers), name="lmdeploy")
        try:
            name = settings.device or ("" if rows.device == "cpu" else rows.device)
            if name:
                kind, _, ordinal = name.partition(":")
                self._device = kvtier.Device(runtime, kind, ordinal=int(ordinal or 0))
            self._store = kvtier.Store(runtime, device=self._device, **store_options)
            self._policy = settings.policy or kvtier.Advisor.policy_of(self._store)
            if settings.level == "remote" and not self._store.remote_stats()["read_circuit"]:
                raise invalid("level is 'remote', but the store has no remote: add one to spec "
                              "(remote=...), or set level to \"ram\"")
            if (settings.level in ("disk", "durable")
                    and not self._store.stats()["disk_limit_bytes"]):
                raise invalid(f"level is {settings.level!r}, but the store has no disk: set "
                              "disk_path and disk_bytes, or set level to \"ram\"")
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
        """Waits for transfers in progress, at most `drain_s` seconds, then closes the store.

        Late transfers are cancelled. Completed saves stay as `level` promises. A second call does
        nothing."""
        service, self._service = self._service, None
        if service is not None:
            service.close()
        ops = [op for _, op, _ in (*self._loads.values(), *self._saves.values()) if op is not None]
        end = time.monotonic() + self._settings.drain_s
        late = [op for op in ops if not op.wait(max(0.0, end - time.monotonic()))]
        if late:
            log.error("%d transfers did not complete within drain_s = %g s and are cancelled",
                      len(late), self._settings.drain_s)
        for op in late:
            op.cancel()
        for op in late:  # the engine may free its cache only after this
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
        if self._store is not None:
            self._store.close(self._settings.drain_s)
        if self._device is not None:
            self._device.close()
        if self._runtime is not None:
            self._runtime.close(self._settings.drain_s)
        self._blocks = self._store = self._device = self._runtime = None

    # Steps.

    def start_loads(self, meta: StepMeta) -> None:
        """Applies policy changes and hints, then submits the step's loads."""
        for switch in meta.switches:
            self._switch(switch.tier, switch.spec)
        for hint in meta.hints:
            self._hint(hint)
        # The running forward pass may still use these blocks, so loads wait for it.
        ready = self._record_event() if meta.loads else None
        for load in meta.loads:
            if load.request not in self._loads:
                self._loads[load.request] = (load, self._submit("load", load, ready), ready)

    def start_saves(self, meta: StepMeta) -> None:
        """Submits the step's saves; they wait for the work that the engine queued on its device."""
        if not meta.saves:
            return
        ready = self._record_event()
        for save in meta.saves:
            if save.number not in self._saves:
                self._saves[save.number] = (save, self._submit("save", save, ready), ready)

    def _submit(self, kind: str, transfer: "Load | Save", ready: Any) -> Optional[kvtier.Op]:
        """Submits a transfer that waits for the event `ready`. Returns None if the store rejects
        it: the transfer fails, the engine goes on."""
        rows = self._rows
        if rows is None:
            raise invalid("a step arrived before the cache was registered or after the shutdown: "
                          "call register_kv_caches first")
        try:
            blocks, addresses = self._session_blocks(transfer.session), rows.at(transfer.blocks)
            after = None if ready is None else ready[0]
            if kind == "load":
                return blocks.get(transfer.names, addresses, after=after)
            return blocks.put(transfer.names, addresses, level=LEVELS[self._settings.level],
                              after=after)
        except kvtier.Error as error:
            log.error("a %s of %d blocks was rejected: %s", kind, len(transfer.blocks), error)
            return None

    def _record_event(self) -> Any:
        """Records an event after the queued forward pass. Returns the imported event and the torch
        event that owns it, or None on a CPU, where the pass has completed."""
        if self._rows is None or self._rows.device == "cpu":
            return None
        import torch

        event = torch.cuda.Event()
        event.record()
        assert self._device is not None
        return self._device.import_event(int(event.cuda_event)), event

    def _session_blocks(self, session: int) -> Blocks:
        """Returns the `Blocks` of a session: the policies distinguish sessions by them."""
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
        """Returns the transfers that completed since the last call."""
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
            self._close_op("load", op, len(bad))
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
            self._close_op("save", op, failed)
            done.add(number)
        if done:
            output.completed_save_ids = done

    def _close_op(self, kind: str, op: Optional[kvtier.Op], failed: int) -> None:
        if op is None:
            return
        if failed:
            log.warning("a %s failed for %d blocks: %s", kind, failed, op.error())
        op.close()

    # Notifications and queries of the scheduler's side.

    def _switch(self, tier: int, spec: str) -> None:
        assert self._store is not None
        try:
            self._store.set_policy(tier, spec)
            if tier == TIER_HOST:
                self._policy = spec
        except kvtier.Error as error:
            log.error("cannot set policy %r of tier %d: %s", spec, tier, error)

    def _hint(self, hint: Hint) -> None:
        if self._blocks is None:  # shut down meanwhile
            return
        # Hints carry a delay: the scheduler may run on a machine with another clock.
        use = 0 if hint.next_use_s is None else time.monotonic_ns() + int(hint.next_use_s * 1e9)
        try:
            self._blocks.hint(hint.names, stop=hint.stop, next_use_ns=use, done=hint.done)
        except kvtier.Error as error:
            log.error("a hint of %d blocks was rejected: %s", len(hint.names), error)

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
        """Returns the store's statistics with the block size, the policy, and transfer counts."""
        if self._store is None or self._rows is None:
            return {}
        stats: Dict[str, Any] = dict(self._store.stats())
        stats.update(rank=self._global_rank, block_bytes=sum(self._rows.parts),
                     policy=self._policy,
                     room_bytes=max(stats["host_limit_bytes"], stats["disk_limit_bytes"]),
                     loading=len(self._loads), saving=len(self._saves),
                     failed_loads=self.failed_loads, failed_saves=self.failed_saves)
        return stats

    def _handle_query(self, query: Dict[str, Any], names: List[bytes]) -> Any:
        """Answers a query of the scheduler's side, on any thread."""
        store, blocks, kind = self._store, self._blocks, query.get("query")
        if store is None or blocks is None:
            return None
        if kind == "prefix":
            return blocks.prefix(names, self._settings.remote_lookup_s)
        if kind == "describe":
            return self.describe()
        if kind == "metrics":
            return store.metrics()
        if kind == "evictions":
            return [one._asdict() for one in store.evictions(
                _TIERS[query["tier"]], int(query["most"]))]
        return None
