"""Which slot a request goes to, and what has to be fetched into it before."""

import sys
import threading
import time
from typing import NamedTuple

from . import keys
from .model import Seen
from .upstream import Refused

# Blocks that a server would have reused.
MEANT_BLOCKS = 8
MOST_VAIN = 4
# After so many requests, what was learnt of a server is put to the test again.
RETRY_REQUESTS = 100
MOST_MISSING = 3
LOOKS = 3


def say(words):
    print(f"kvtier_front: {words}", file=sys.stderr, flush=True)


class Slot:
    """A slot of the server, as far as the front knows."""

    def __init__(self, number):
        # `lora`: adapters of its last request and of what it holds; None: not known.
        self.number, self.blocks, self.is_busy, self.used_at, self.lora = number, [], False, 0.0, None

    def forget(self):
        self.blocks, self.lora = [], None


class Turn(NamedTuple):
    """A slot that a request has, blocks that it knows, and whether the server may reuse what is in it."""

    slot: Slot
    known: int
    is_restored: bool
    reuses: bool
    seen: Seen
    lora: str


class Slots:
    """Any thread. A slot belongs to one request from `take` to `give`."""

    def __init__(self, upstream, model, shelf, least_blocks=2):
        self.upstream, self.model, self.shelf, self.least_blocks = upstream, model, shelf, least_blocks
        self.all = []
        self.free = threading.Condition()
        # The server as it was seen last, None since it went away. Looks are numbered: a late answer to an
        # early look says nothing any more.
        self.seen, self.looks, self.last_look = None, 0, 0
        # Where the server cannot use a part of a state (windows, recurrent models), only whole ones count.
        self.only_whole = False
        # And some servers use none (SWA without --swa-full): after so many in vain no more are tried.
        self.vain, self.is_vain, self.retry_at = 0, False, 0
        # Files that the server says it has written and that are not there.
        self.missing, self.told = 0, set()
        self.counts = {"requests": 0, "in_slot": 0, "restored": 0, "fresh": 0, "saved": 0, "not_saved": 0,
                       "restore_failed": 0, "server_changes": 0, "cached_tokens": 0, "prompt_tokens": 0}

    def note(self, **more):
        with self.free:
            for name, value in more.items():
                self.counts[name] += value

    def tell(self, words):
        """Once."""
        if words not in self.told:
            self.told.add(words)
            say(words)

    def look(self):
        """The server as it is now. Where it is another than before, its slots hold nothing that is known."""
        for _ in range(LOOKS):
            with self.free:
                self.looks += 1
                number = self.looks
            try:
                new = self.model.look()
            except Refused:
                self.went_away()
                raise
            with self.free:
                if number > self.last_look:
                    self.last_look = number
                    if self.seen != new:
                        self._start_again(new)
                if self.seen is not None:
                    return self.seen
        raise Refused(503, "the server comes and goes")

    def _start_again(self, new):
        if self.all:
            self.counts["server_changes"] += 1
        self.seen = new
        self.all = self.all[:new.slots] + [Slot(number) for number in range(len(self.all), new.slots)]
        for slot in self.all:
            slot.forget()
        self.free.notify_all()
        if new.identity is None:
            self.tell("which model the server has is not known (its file cannot be seen, or was replaced "
                      "while it ran): no states are kept or used until it is")

    def went_away(self):
        """What comes back may be another server: looks that are under way do not count."""
        with self.free:
            self.seen, self.last_look = None, self.looks
            for slot in self.all:
                slot.forget()

    def doubt(self):
        """A request has failed inside the server. One that cannot be told from its successor has gone."""
        try:
            if not self.look().process:
                self.went_away()
        except Refused:
            pass

    def _is_still(self, seen):
        try:
            return self.look() is seen
        except Refused:
            return False

    def _known(self, slot, blocks):
        count = keys.common(blocks, slot.blocks)
        return count if not self.only_whole or count == len(slot.blocks) else 0

    def take(self, seen, blocks, lora, deadline):
        """A turn, or None when no slot was free in time. `blocks` are of the server that was `seen`."""
        with self.free:
            while not any(not slot.is_busy for slot in self.all):
                left = deadline - time.monotonic()
                if left <= 0 or not self.free.wait(left):
                    return None
            self._try_again()
            slot, known, state = self._choose(blocks if seen is self.seen else [], lora)
            slot.is_busy = True
        try:
            turn = Turn(slot, known, False, slot.lora == lora, seen, lora)
            if state is None:
                self.note(requests=1, **{"in_slot" if known >= self.least_blocks else "fresh": 1})
                return turn
            return self._fetch(turn, state, keys.common(blocks, state.blocks))
        except BaseException:
            slot.forget()
            self.give(slot)
            raise

    def _choose(self, blocks, lora):
        """The free slot that knows most; where a saved state knows more, that state and the slot that was
        used least recently."""
        idle = [slot for slot in self.all if not slot.is_busy]
        best = max(idle, key=lambda slot: self._known(slot, blocks))
        known = self._known(best, blocks)
        state, saved = self.shelf.best(blocks, self.only_whole)
        # The server drops what is in a slot when the adapters of a request are others than the last one's.
        targets = [slot for slot in idle if slot.lora == lora] if lora else idle
        fetches = state is not None and targets and not self.is_vain and saved >= known + self.least_blocks
        if fetches or known < self.least_blocks:
            # Everything was saved after its request: who is overwritten can be fetched again.
            best = min(targets if fetches else idle, key=lambda slot: (bool(slot.blocks), slot.used_at))
            known = self._known(best, blocks)
        return best, known, state if fetches else None

    def _fetch(self, turn, state, saved):
        """Puts a state into the slot of a turn. What fails leaves a prompt to be computed."""
        slot = turn.slot
        slot.forget()
        fresh = turn._replace(known=0, reuses=False)
        if not self.shelf.is_whole(state):
            self.note(requests=1, restore_failed=1, fresh=1)
            return fresh
        try:
            self._action(slot, "restore", state.name)
        except Refused as refused:
            if refused.status == 400:
                # What the server says of a file that it cannot use. Of anything else the file is not guilty.
                self.shelf.lose(state)
            elif refused.is_gone:
                self.went_away()
            self.note(requests=1, restore_failed=1, fresh=1)
            return fresh
        # Between the look and this another server may have come: then it has what it must not have.
        if not self._is_still(turn.seen):
            self.note(requests=1, restore_failed=1, fresh=1)
            return fresh
        slot.blocks, slot.lora = list(state.blocks), turn.lora
        self.shelf.used(state)
        self.note(requests=1, restored=1)
        return turn._replace(known=saved, is_restored=True, reuses=True)

    def _action(self, slot, action, name=None):
        value = {"filename": name} if name else {}
        return self.upstream.call("POST", f"/slots/{slot.number}?action={action}", value)

    def finished(self, turn, blocks, cached_tokens, prompt_tokens):
        """A request has ended, and its slot knows these blocks now. Saves it before anybody else has it."""
        slot = turn.slot
        if isinstance(cached_tokens, int) and isinstance(prompt_tokens, int):
            self.note(cached_tokens=cached_tokens, prompt_tokens=prompt_tokens)
            self._learn(turn, cached_tokens)
        with self.free:
            if self.seen is not turn.seen:
                slot.forget()
                return
            slot.blocks, slot.lora = blocks, turn.lora
        if len(blocks) < self.least_blocks or self.is_vain or self.missing >= MOST_MISSING:
            return
        name = self.shelf.new_name()
        try:
            self._action(slot, "save", name)
            if not self._is_still(turn.seen):
                raise Refused(502, "another server has come")
            self.shelf.add(name, blocks, keep_starts=self.only_whole)
            self.missing = 0
            self.note(saved=1)
        except (Refused, OSError) as error:
            # A full disk, a model whose state cannot be saved: the slot itself is as good as ever.
            self.shelf.forget(name)
            self.note(not_saved=1)
            self._not_saved(error)

    def _not_saved(self, error):
        if isinstance(error, Refused) and error.is_gone:
            self.went_away()
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            self.tell(f"a state that the server has saved cannot be kept: {error.strerror}")
        elif isinstance(error, FileNotFoundError):
            self.missing += 1
            if self.missing == MOST_MISSING:
                self.tell(f"the server has saved {MOST_MISSING} states, and none is in "
                          f"{self.shelf.directory}: --slots must be the directory of its --slot-save-path. "
                          "Nothing is saved any more; files that start with kvt- in the server's directory "
                          "are left over")

    def _learn(self, turn, cached_tokens):
        """A good part was there, and all was computed: parts of states are of no use to this model. Only of
        what has just been fetched is it known that it was there."""
        if cached_tokens > 0:
            self.vain = 0
        elif turn.known >= MEANT_BLOCKS and not turn.lora and turn.is_restored:
            self.only_whole = True
            self.vain += 1
            self.retry_at = self.counts["requests"] + RETRY_REQUESTS
            if self.vain >= MOST_VAIN:
                self.is_vain = True
                self.tell("this server computes prompts anew though it has their state. Is its model one "
                          f"with a sliding window? Then: --swa-full. For {RETRY_REQUESTS} requests no "
                          "states are kept")
        elif turn.known >= self.least_blocks and not turn.is_restored:
            # Not what it was taken for: then the others may not be, either. All of them are saved.
            with self.free:
                for slot in self.all:
                    if not slot.is_busy:
                        slot.blocks = []

    def _try_again(self):
        """Servers are started anew with other options: what was learnt of one is not for ever."""
        if self.counts["requests"] < self.retry_at:
            return
        if self.is_vain:
            self.is_vain, self.vain = False, MOST_VAIN - 1
            self.retry_at = self.counts["requests"] + RETRY_REQUESTS
        elif self.only_whole:
            self.only_whole, self.vain = False, 0

    def broken(self, turn, is_gone=False):
        """Nobody knows what is in it."""
        turn.slot.forget()
        if is_gone:
            self.went_away()

    def give(self, slot):
        with self.free:
            slot.is_busy = False
            slot.used_at = time.monotonic()
            self.free.notify()
