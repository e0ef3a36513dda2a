"""Saved states: files in the server's directory, under a budget of bytes, known again after a restart."""

import fcntl
import hashlib
import json
import os
import re
import secrets
import sys
import threading
import time

from . import keys

INDEX = "kvtier-front.json"
NAME = re.compile(r"kvt-[0-9a-f]{32}\.slot")
MOST_STATES = 4096
MOST_BLOCKS = 1 << 16
# Of all states: 28 bytes each in the index, which with the rest of it stays below its limit by far.
MOST_ALL_BLOCKS = 1 << 20
MOST_INDEX_BYTES = 64 << 20
UNIT_BYTES = 1024
HASH_BYTES = 16


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


def settle(path):
    """The length and hash of a file that is on the disk after this."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.blake2b(digest_size=HASH_BYTES)
        size = 0
        while piece := file.read(1 << 20):
            digest.update(piece)
            size += len(piece)
    return size, digest.hexdigest()


class IndexTooLarge(Exception):
    """No index that a front writes."""


class State:
    """A saved state. `is_checked`: its file has been held against its hash since the front started."""

    def __init__(self, number, name, blocks, size, digest, is_checked=True):
        self.number, self.name, self.blocks, self.bytes = number, name, blocks, size
        self.digest, self.is_checked = digest, is_checked


class Shelf:
    """Any thread. Nothing is believed of the index that the files do not bear out. States of several models
    are side by side: blocks of one are never those of another."""

    def __init__(self, directory, budget_bytes, policy=None):
        self.directory, self.budget_bytes = directory, budget_bytes
        self.policy = policy or Lru()
        self.lock = threading.Lock()
        # In the order of their use, the latest last.
        self.states, self.used_bytes, self.used_blocks, self.next_number = {}, 0, 0, 1
        self.is_changed, self.has_failed = False, False
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
                self.states[state.number] = self.states.pop(state.number)
                # Who was used when is worth no write of its own.
                self.is_changed = True

    def is_whole(self, state):
        """Whether its file is what it was; one that is not is lost."""
        if state.is_checked:
            return True
        try:
            state.is_checked = settle(self.path(state.name)) == (state.bytes, state.digest)
        except FileNotFoundError:
            pass
        except OSError as error:
            # Too many open files and such: of this the file is not guilty.
            self._failed("read", error)
            return False
        if not state.is_checked:
            self.lose(state)
        return state.is_checked

    def close(self):
        with self.lock:
            if self.is_changed:
                self._write_index()

    def add(self, name, blocks, keep_starts=False):
        """Takes a file in that the server has written. States that it goes on from are not needed any more,
        unless they serve where a part of a state does not."""
        size, digest = settle(self.path(name))
        with self.lock:
            for state in list(self.states.values()):
                is_start = keys.common(state.blocks, blocks) == len(state.blocks)
                if is_start and (not keep_starts or len(state.blocks) == len(blocks)):
                    self._drop(state, "superseded")
            self._insert(State(self.next_number, name, blocks[:MOST_BLOCKS], size, digest))
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
        self.used_blocks += len(state.blocks)
        self.policy.insert(state.number, max(1, state.bytes // UNIT_BYTES))

    def _drop(self, state, why):
        del self.states[state.number]
        self.used_bytes -= state.bytes
        self.used_blocks -= len(state.blocks)
        self.counts[why] += 1
        self.policy.remove(state.number)
        self.forget(state.name)

    def forget(self, name):
        """Removes a file, if it is there."""
        try:
            os.unlink(self.path(name))
        except FileNotFoundError:
            pass
        except OSError as error:
            self._failed("remove", error)

    def _failed(self, what, error):
        """The front goes on: what is not kept is computed. Said once."""
        if not self.has_failed:
            self.has_failed = True
            print(f"kvtier_front: cannot {what} in {self.directory}: {error}", file=sys.stderr, flush=True)

    def _is_too_much(self):
        return (self.used_bytes > self.budget_bytes or len(self.states) > MOST_STATES
                or self.used_blocks > MOST_ALL_BLOCKS)

    def _make_room(self):
        while self.states and self._is_too_much():
            number = self.policy.victim()
            if number not in self.states:
                number = next(iter(self.states))
            self._drop(self.states[number], "evicted")

    def _write_index(self):
        """As it is now. No request fails for it: after a crash states are missing, and nothing is wrong."""
        states = [{"name": one.name, "bytes": one.bytes, "hash": one.digest, "blocks": one.blocks}
                  for one in self.states.values()]
        content = {"version": 2, "written": int(time.time()), "states": states}
        temporary = self.path(INDEX + ".new")
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(fd, "w", encoding="ascii") as file:
                json.dump(content, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path(INDEX))
            self._sync_directory()
            self.is_changed = False
        except OSError as error:
            self.is_changed = True
            self._failed("write the index", error)

    def _sync_directory(self):
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _read_index(self):
        for entry in self._index_entries():
            state = self._state_of(entry)
            if state and all(other.name != state.name for other in self.states.values()):
                self._insert(state)
                self.counts["found_again"] += 1
        known = {state.name for state in self.states.values()}
        # Files of ours that no index tells of: of a front that was killed.
        for name in os.listdir(self.directory):
            if NAME.fullmatch(name) and name not in known:
                self.forget(name)
        self._make_room()

    def _state_of(self, entry):
        name, size = entry.get("name"), entry.get("bytes")
        blocks, digest = entry.get("blocks"), entry.get("hash")
        good = (isinstance(name, str) and NAME.fullmatch(name) and isinstance(size, int) and size > 0
                and isinstance(digest, str) and len(digest) == 2 * HASH_BYTES
                and isinstance(blocks, list) and len(blocks) <= MOST_BLOCKS
                and all(isinstance(one, str) and len(one) == 2 * keys.DIGEST_BYTES for one in blocks))
        try:
            good = good and os.stat(self.path(name)).st_size == size
        except OSError:
            good = False
        return State(self.next_number, name, blocks, size, digest, is_checked=False) if good else None

    def _index_entries(self):
        """Those of the index. One that cannot be read is an error: a start must not cost all states."""
        try:
            with open(self.path(INDEX), "rb") as file:
                raw = file.read(MOST_INDEX_BYTES + 1)
        except FileNotFoundError:
            return []
        if len(raw) > MOST_INDEX_BYTES:
            raise IndexTooLarge(f"{self.path(INDEX)} has more than {MOST_INDEX_BYTES} bytes, which no front "
                                "writes: remove it to begin without states")
        try:
            content = json.loads(raw)
        except (ValueError, RecursionError):
            return []
        entries = content.get("states") if isinstance(content, dict) else None
        return [one for one in entries if isinstance(one, dict)] if isinstance(entries, list) else []
