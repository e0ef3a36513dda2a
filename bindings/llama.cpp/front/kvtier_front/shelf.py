"""Saved states: files in the server's directory, under a budget of bytes, known again after a restart."""

import fcntl
import json
import os
import re
import secrets
import threading
import time

from . import keys

INDEX = "kvtier-front.json"
NAME = re.compile(r"kvt-[0-9a-f]{32}\.slot")
MOST_INDEX_BYTES = 256 << 20
MOST_STATES = 4096
MOST_BLOCKS = 1 << 16
UNIT_BYTES = 1024


class Lru:
    """Who was used least recently leaves; where kvtier's policies are not there."""

    name = "lru (without kvtier)"

    def __init__(self):
        self.order = {}

    def insert(self, number, _units):
        self.order[number] = True

    def touch(self, number):
        if self.order.pop(number, None):
            self.order[number] = True

    def remove(self, number):
        self.order.pop(number, None)

    def victim(self):
        return next(iter(self.order), None)


class Policy:
    """One of kvtier's policies, by its spec."""

    def __init__(self, spec):
        import kvtier  # Optional: LRU does without.
        self.row = kvtier.Row
        self.policy = kvtier.Policy(spec, max_objects=4 * MOST_STATES)
        self.name = spec

    def insert(self, number, units):
        self.policy.insert([self.row(number, units=units)])

    def touch(self, number):
        self.policy.lookup([number])

    def remove(self, number):
        self.policy.remove([number])

    def victim(self):
        victims = self.policy.preview(1, 1).victims
        return victims[0].id if victims else None


def open_policy(spec):
    """kvtier's where it is installed; a spec that was asked for and cannot be had is an error."""
    try:
        return Policy(spec or "lru")
    except ImportError:
        if spec and spec != "lru":
            raise
        return Lru()


def hold(directory):
    """A descriptor that keeps other fronts out of a directory while it is open, as each removes what it
    does not know. OSError where one is there."""
    fd = os.open(os.path.join(directory, "kvtier-front.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


class State:
    """A saved state."""

    def __init__(self, number, name, blocks, size):
        self.number, self.name, self.blocks, self.bytes = number, name, blocks, size


class Shelf:
    """Any thread. Nothing is believed of the index that the files do not bear out."""

    def __init__(self, directory, budget_bytes, identity, policy=None):
        self.directory, self.budget_bytes, self.identity = directory, budget_bytes, identity
        self.policy = policy or Lru()
        self.lock = threading.Lock()
        self.states, self.used_bytes, self.next_number = {}, 0, 1
        self.counts = {"found_again": 0, "evicted": 0, "superseded": 0, "lost": 0}
        self._read_index()

    def path(self, name):
        return os.path.join(self.directory, name)

    def new_name(self):
        return f"kvt-{secrets.token_hex(16)}.slot"

    def best(self, blocks, whole=False):
        """The state that has most of these first blocks, and how many; `whole`: all of its own."""
        found, most = None, 0
        with self.lock:
            for state in self.states.values():
                count = keys.common(blocks, state.blocks)
                if count > most and (not whole or count == len(state.blocks)):
                    found, most = state, count
        return found, most

    def used(self, state):
        with self.lock:
            if state.number in self.states:
                self.policy.touch(state.number)
                self._write_index()

    def add(self, name, blocks, keep_starts=False):
        """Takes a file in that the server has written. States that it goes on from are not needed any more,
        unless they serve where a part of a state does not."""
        size = os.stat(self.path(name)).st_size
        with self.lock:
            for state in list(self.states.values()):
                is_start = keys.common(state.blocks, blocks) == len(state.blocks)
                if is_start and (not keep_starts or len(state.blocks) == len(blocks)):
                    self._drop(state, "superseded")
            state = State(self.next_number, name, blocks[:MOST_BLOCKS], size)
            self._insert(state)
            self._make_room()
            self._write_index()

    def lose(self, state):
        """The server could not use it."""
        with self.lock:
            if state.number in self.states:
                self._drop(state, "lost")
                self._write_index()

    def _insert(self, state):
        self.next_number = max(self.next_number, state.number) + 1
        self.states[state.number] = state
        self.used_bytes += state.bytes
        self.policy.insert(state.number, max(1, state.bytes // UNIT_BYTES))

    def _drop(self, state, why):
        del self.states[state.number]
        self.used_bytes -= state.bytes
        self.counts[why] += 1
        self.policy.remove(state.number)
        self.forget(state.name)

    def forget(self, name):
        """Removes a file, if it is there."""
        try:
            os.unlink(self.path(name))
        except FileNotFoundError:
            pass

    def _make_room(self):
        while self.states and (self.used_bytes > self.budget_bytes or len(self.states) > MOST_STATES):
            number = self.policy.victim()
            if number not in self.states:
                number = next(iter(self.states))
            self._drop(self.states[number], "evicted")

    def _write_index(self):
        order = list(self.states.values())
        content = {"version": 1, "identity": self.identity, "written": int(time.time()),
                   "states": [{"name": s.name, "bytes": s.bytes, "blocks": s.blocks} for s in order]}
        temporary = self.path(INDEX + ".new")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(fd, "w", encoding="ascii") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path(INDEX))

    def _read_index(self):
        for entry in self._index_entries():
            name, size, blocks = entry.get("name"), entry.get("bytes"), entry.get("blocks")
            good = (isinstance(name, str) and NAME.fullmatch(name) and isinstance(size, int)
                    and isinstance(blocks, list) and len(blocks) <= MOST_BLOCKS
                    and all(isinstance(one, str) and len(one) == 2 * keys.DIGEST_BYTES for one in blocks))
            try:
                good = good and size > 0 and os.stat(self.path(name)).st_size == size
            except OSError:
                good = False
            if good and all(state.name != name for state in self.states.values()):
                self._insert(State(self.next_number, name, blocks, size))
                self.counts["found_again"] += 1
        known = {state.name for state in self.states.values()}
        # Files of ours that no index tells of: of another model, or of a front that was killed.
        for name in os.listdir(self.directory):
            if NAME.fullmatch(name) and name not in known:
                self.forget(name)
        self._make_room()

    def _index_entries(self):
        try:
            with open(self.path(INDEX), encoding="ascii") as file:
                content = json.loads(file.read(MOST_INDEX_BYTES))
        except (OSError, ValueError):
            return []
        if not isinstance(content, dict) or content.get("identity") != self.identity:
            return []
        entries = content.get("states")
        return [one for one in entries if isinstance(one, dict)] if isinstance(entries, list) else []
