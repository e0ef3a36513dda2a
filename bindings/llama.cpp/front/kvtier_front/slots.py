"""Which slot a request goes to, and what has to be fetched into it before."""

import sys
import threading
import time

from . import keys
from .upstream import Refused

# Blocks that a server would have reused.
MEANT_BLOCKS = 8
MOST_VAIN = 4


class Slot:
    """A slot of the server, as far as the front knows."""

    def __init__(self, number):
        self.number, self.blocks, self.is_busy, self.used_at = number, [], False, 0.0


class Slots:
    """Any thread. A slot belongs to one request from `take` to `give`."""

    def __init__(self, upstream, shelf, count, least_blocks=2):
        self.upstream, self.shelf, self.least_blocks = upstream, shelf, least_blocks
        self.all = [Slot(number) for number in range(count)]
        self.free = threading.Condition()
        # Where the server cannot use a part of a state (windows, recurrent models), only whole ones count.
        self.only_whole = False
        # And some servers use none (SWA without --swa-full): after so many in vain no more are tried.
        self.vain, self.is_vain = 0, False
        self.counts = {"requests": 0, "in_slot": 0, "restored": 0, "fresh": 0, "saved": 0, "not_saved": 0,
                       "restore_failed": 0, "cached_tokens": 0, "prompt_tokens": 0}

    def note(self, **more):
        with self.free:
            for name, value in more.items():
                self.counts[name] += value

    def _known(self, slot, blocks):
        count = keys.common(blocks, slot.blocks)
        return count if not self.only_whole or count == len(slot.blocks) else 0

    def take(self, blocks, deadline):
        """The free slot that knows most; where a saved state knows more, the one that was used least recently
        with that state in it. None when none was free in time. With it, blocks that it knows."""
        with self.free:
            while not any(not slot.is_busy for slot in self.all):
                left = deadline - time.monotonic()
                if left <= 0 or not self.free.wait(left):
                    return None, 0
            idle = [slot for slot in self.all if not slot.is_busy]
            best = max(idle, key=lambda slot: self._known(slot, blocks))
            known = self._known(best, blocks)
            state, saved = self.shelf.best(blocks, self.only_whole)
            fetches = state is not None and not self.is_vain and saved >= known + self.least_blocks
            if fetches or known < self.least_blocks:
                # Everything was saved after its request: who is overwritten can be fetched again.
                best = min(idle, key=lambda slot: (bool(slot.blocks), slot.used_at))
            best.is_busy = True
        if not fetches:
            self.note(requests=1, **{"in_slot" if known >= self.least_blocks else "fresh": 1})
            return best, known
        try:
            self._action(best, "restore", state.name)
            best.blocks = list(state.blocks)
            self.shelf.used(state)
            self.note(requests=1, restored=1)
            return best, saved
        except Refused:
            # The server has cleared the slot: the prompt is computed.
            best.blocks = []
            self.shelf.lose(state)
            self.note(requests=1, restore_failed=1, fresh=1)
            return best, 0

    def _action(self, slot, action, name=None):
        value = {"filename": name} if name else {}
        return self.upstream.call("POST", f"/slots/{slot.number}?action={action}", value)

    def finished(self, slot, blocks, cached_tokens, prompt_tokens, known):
        """A request has ended, and its slot knows these blocks now. Saves it before anybody else has it."""
        slot.blocks = blocks
        if cached_tokens is not None and prompt_tokens:
            self.note(cached_tokens=cached_tokens, prompt_tokens=prompt_tokens)
            self._learn(cached_tokens, known)
        if len(blocks) < self.least_blocks or self.is_vain:
            return
        name = self.shelf.new_name()
        try:
            self._action(slot, "save", name)
            self.shelf.add(name, blocks, keep_starts=self.only_whole)
            self.note(saved=1)
        except (Refused, OSError):
            # A full disk, a model whose state cannot be saved: the slot itself is as good as ever.
            self.shelf.forget(name)
            self.note(not_saved=1)

    def _learn(self, cached_tokens, known):
        """A good part was there, and all was computed: parts of states are of no use to this model."""
        if cached_tokens > 0:
            self.vain = 0
        elif known >= MEANT_BLOCKS:
            self.only_whole = True
            self.vain += 1
            if self.vain == MOST_VAIN and not self.is_vain:
                self.is_vain = True
                print("kvtier_front: this server computes prompts anew though it has their state. Is its "
                      "model one with a sliding window? Then: --swa-full. No more states are kept",
                      file=sys.stderr, flush=True)

    def broken(self, slot):
        """Nobody knows what is in it."""
        slot.blocks = []

    def give(self, slot):
        with self.free:
            slot.is_busy = False
            slot.used_at = time.monotonic()
            self.free.notify()
