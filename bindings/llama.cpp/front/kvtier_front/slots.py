"""Chooses the slot of a request, and the state that is restored into it first."""

import sys
import threading
import time
from typing import NamedTuple

from . import keys
from .model import ServerState
from .upstream import Refused

# A server that supports it would have reused this many blocks.
EXPECTED_BLOCKS = 8
MAX_FUTILE = 4
# After this many requests, conclusions about the server are tested again.
RETRY_REQUESTS = 100
MAX_MISSING = 3
MAX_REFRESHES = 3


def log(text):
    print(f"kvtier_front: {text}", file=sys.stderr, flush=True)


class Slot:
    """The proxy's record of one slot of the server."""

    def __init__(self, number):
        # `lora`: adapters of its last request and of its content; None: unknown.
        self.number, self.blocks, self.is_busy, self.used_at, self.lora = number, [], False, 0.0, None

    def clear(self):
        self.blocks, self.lora = [], None


class Lease(NamedTuple):
    """A slot leased to a request, the blocks that it has, and whether the server may reuse its content."""

    slot: Slot
    known: int
    is_restored: bool
    reuses: bool
    server_state: ServerState
    lora: str


class Slots:
    """For any thread. A slot belongs to one request from `acquire` to `release`."""

    def __init__(self, upstream, model, cache, least_blocks=2):
        self.upstream, self.model, self.cache, self.least_blocks = upstream, model, cache, least_blocks
        self.all = []
        self.free = threading.Condition()
        # The server's last known state, None after it failed. Refreshes are numbered, so that a late answer
        # to an early refresh is ignored.
        self.server_state, self.refreshes, self.last_refresh = None, 0, 0
        # If the server cannot use a part of a state (windows, recurrent models), only whole states count.
        self.only_whole = False
        # Some servers reuse no state (SWA without --swa-full): after MAX_FUTILE futile restores no more are
        # tried.
        self.futile, self.is_futile, self.retry_at = 0, False, 0
        # Files that the server reported as saved but that are not in the directory.
        self.missing, self.logged = 0, set()
        self.counts = {"requests": 0, "in_slot": 0, "restored": 0, "fresh": 0, "saved": 0, "not_saved": 0,
                       "restore_failed": 0, "server_changes": 0, "cached_tokens": 0, "prompt_tokens": 0}

    def count(self, **more):
        with self.free:
            for name, value in more.items():
                self.counts[name] += value

    def log_once(self, text):
        """Logs a message once."""
        if text not in self.logged:
            self.logged.add(text)
            log(text)

    def refresh(self):
        """The server's state now. If it changed, the content of all slots is unknown."""
        for _ in range(MAX_REFRESHES):
            with self.free:
                self.refreshes += 1
                number = self.refreshes
            try:
                new = self.model.query()
            except Refused:
                self.mark_gone()
                raise
            with self.free:
                if number > self.last_refresh:
                    self.last_refresh = number
                    if self.server_state != new:
                        self._reset(new)
                if self.server_state is not None:
                    return self.server_state
        raise Refused(503, f"the server changed {MAX_REFRESHES} times during this request: try again")

    def _reset(self, new):
        if self.all:
            self.counts["server_changes"] += 1
        self.server_state = new
        self.all = self.all[:new.slots] + [Slot(number) for number in range(len(self.all), new.slots)]
        for slot in self.all:
            slot.clear()
        self.free.notify_all()
        if new.identity is None:
            self.log_once("the server's model is not identified (its file cannot be accessed, or was replaced "
                          "while it ran): no states are saved or restored; restart the server, or set --identity")

    def mark_gone(self):
        """The next server may be another one, so refreshes in flight are ignored."""
        with self.free:
            self.server_state, self.last_refresh = None, self.refreshes
            for slot in self.all:
                slot.clear()

    def check_process(self):
        """A request failed inside the server. If its process cannot be identified, treat it as replaced."""
        try:
            if not self.refresh().process:
                self.mark_gone()
        except Refused:
            pass

    def _is_unchanged(self, server_state):
        try:
            return self.refresh() is server_state
        except Refused:
            return False

    def _known(self, slot, blocks):
        count = keys.common(blocks, slot.blocks)
        return count if not self.only_whole or count == len(slot.blocks) else 0

    def acquire(self, server_state, blocks, lora, deadline):
        """A lease, or None if no slot became free in time. `blocks` belong to the server state `server`."""
        with self.free:
            while not any(not slot.is_busy for slot in self.all):
                left = deadline - time.monotonic()
                if left <= 0 or not self.free.wait(left):
                    return None
            self._retry()
            slot, known, state = self._choose(blocks if server_state is self.server_state else [], lora)
            slot.is_busy = True
        try:
            lease = Lease(slot, known, False, slot.lora == lora, server_state, lora)
            if state is None:
                self.count(requests=1, **{"in_slot" if known >= self.least_blocks else "fresh": 1})
                return lease
            return self._restore(lease, state, keys.common(blocks, state.blocks))
        except BaseException:
            slot.clear()
            self.release(slot)
            raise

    def _choose(self, blocks, lora):
        """The free slot with the longest prefix. If a saved state has a longer one: that state, and the least
        recently used slot."""
        idle = [slot for slot in self.all if not slot.is_busy]
        best = max(idle, key=lambda slot: self._known(slot, blocks))
        known = self._known(best, blocks)
        state, saved = self.cache.find_longest(blocks, self.only_whole)
        # The server drops a slot's content if a request has other adapters than the slot's last one.
        targets = [slot for slot in idle if slot.lora == lora] if lora else idle
        restores = state is not None and targets and not self.is_futile and saved >= known + self.least_blocks
        if restores or known < self.least_blocks:
            # All content was saved after its request, so overwritten content can be restored.
            best = min(targets if restores else idle, key=lambda slot: (bool(slot.blocks), slot.used_at))
            known = self._known(best, blocks)
        return best, known, state if restores else None

    def _restore(self, lease, state, saved):
        """Restores a state into the leased slot. After a failure the prompt is computed."""
        slot = lease.slot
        slot.clear()
        fresh = lease._replace(known=0, reuses=False)
        if not self.cache.is_intact(state):
            self.count(requests=1, restore_failed=1, fresh=1)
            return fresh
        try:
            self._action(slot, "restore", state.name)
        except Refused as refused:
            if refused.status == 400:
                # The server rejects this file. Other errors say nothing about the file.
                self.cache.discard(state)
            elif refused.is_gone:
                self.mark_gone()
            self.count(requests=1, restore_failed=1, fresh=1)
            return fresh
        # The server may have been replaced since the last refresh: then it has a state of another model.
        if not self._is_unchanged(lease.server_state):
            self.count(requests=1, restore_failed=1, fresh=1)
            return fresh
        slot.blocks, slot.lora = list(state.blocks), lease.lora
        self.cache.touch(state)
        self.count(requests=1, restored=1)
        return lease._replace(known=saved, is_restored=True, reuses=True)

    def _action(self, slot, action, name=None):
        value = {"filename": name} if name else {}
        return self.upstream.call("POST", f"/slots/{slot.number}?action={action}", value)

    def finish(self, lease, blocks, cached_tokens, prompt_tokens):
        """A request has ended, and its slot holds these blocks. Saves the slot before another request uses
        it."""
        slot = lease.slot
        if isinstance(cached_tokens, int) and isinstance(prompt_tokens, int):
            self.count(cached_tokens=cached_tokens, prompt_tokens=prompt_tokens)
            self._judge_reuse(lease, cached_tokens)
        with self.free:
            if self.server_state is not lease.server_state:
                slot.clear()
                return
            slot.blocks, slot.lora = blocks, lease.lora
        if len(blocks) < self.least_blocks or self.is_futile or self.missing >= MAX_MISSING:
            return
        name = self.cache.new_name()
        try:
            self._action(slot, "save", name)
            if not self._is_unchanged(lease.server_state):
                raise Refused(502, "the server was replaced during the save")
            self.cache.add(name, blocks, keep_starts=self.only_whole)
            self.missing = 0
            self.count(saved=1)
        except (Refused, OSError) as error:
            # A full disk, or a model whose state cannot be saved: the slot itself stays usable.
            self.cache.remove_file(name)
            self.count(not_saved=1)
            self._not_saved(error)

    def _not_saved(self, error):
        if isinstance(error, Refused) and error.is_gone:
            self.mark_gone()
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            self.log_once(f"a saved state cannot be read or written: {error.strerror}")
        elif isinstance(error, FileNotFoundError):
            self.missing += 1
            if self.missing == MAX_MISSING:
                self.log_once(f"the server has saved {MAX_MISSING} states, but none is in "
                              f"{self.cache.directory}: set --slots to the directory of its --slot-save-path. "
                              "No more states are saved; remove files that start with kvt- from the server's "
                              "directory")

    def _judge_reuse(self, lease, cached_tokens):
        """Draws conclusions from the reused tokens. If a long restored prefix was not reused at all, this
        server cannot use parts of states. Only just restored content is known to have been in the slot."""
        if cached_tokens > 0:
            self.futile = 0
        elif lease.known >= EXPECTED_BLOCKS and not lease.lora and lease.is_restored:
            self.only_whole = True
            self.futile += 1
            self.retry_at = self.counts["requests"] + RETRY_REQUESTS
            if self.futile >= MAX_FUTILE:
                self.is_futile = True
                self.log_once("the server computes prompts again although it has their state; if its model has "
                              f"a sliding window, start it with --swa-full. For {RETRY_REQUESTS} requests no "
                              "states are saved")
        elif lease.known >= self.least_blocks and not lease.is_restored:
            # The slot did not hold what was recorded, so other records may be wrong too. All slots are saved
            # anyway.
            with self.free:
                for slot in self.all:
                    if not slot.is_busy:
                        slot.blocks = []

    def _retry(self):
        """Tests conclusions again, because a server may be restarted with other options."""
        if self.counts["requests"] < self.retry_at:
            return
        if self.is_futile:
            self.is_futile, self.futile = False, MAX_FUTILE - 1
            self.retry_at = self.counts["requests"] + RETRY_REQUESTS
        elif self.only_whole:
            self.only_whole, self.futile = False, 0

    def mark_unknown(self, lease, is_gone=False):
        """The content of the slot is unknown."""
        lease.slot.clear()
        if is_gone:
            self.mark_gone()

    def release(self, slot):
        with self.free:
            slot.is_busy = False
            slot.used_at = time.monotonic()
            self.free.notify()
