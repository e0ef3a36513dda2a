"""Saved states: files in the server's directory under a budget of bytes, found again after a restart."""

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
MAX_STATES = 4096
MAX_BLOCKS = 1 << 16
# Limit for all states together. A block takes 28 bytes in the index, so the index stays far below its limit.
MAX_ALL_BLOCKS = 1 << 20
MAX_INDEX_BYTES = 64 << 20
UNIT_BYTES = 1024
HASH_BYTES = 16


class Lru:
    """Evicts the least recently used state, if kvtier's policies are not installed."""

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
        import kvtier  # Optional: LRU works without it.
        self.object = kvtier.PolicyObject
        self.policy = kvtier.Policy(spec, max_objects=4 * MAX_STATES)
        self.name = spec

    def insert(self, number, units):
        self.policy.insert([self.object(number, units=units)])

    def touch(self, number):
        self.policy.lookup([number])

    def remove(self, number):
        self.policy.remove([number])

    def victim(self):
        victims = self.policy.preview(1, 1).victims
        return victims[0].id if victims else None


def open_policy(spec):
    """kvtier's policy if it is installed. Raises ImportError for a requested policy that is not available."""
    try:
        return Policy(spec or "lru")
    except ImportError:
        if spec and spec != "lru":
            raise
        return Lru()


def lock_directory(directory):
    """A descriptor that locks the directory against other proxies while it is open, because each removes
    files that it does not know. Raises OSError if another proxy holds the lock."""
    fd = os.open(os.path.join(directory, "kvtier-front.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def sync_and_hash(path):
    """Writes a file to disk; returns its length and hash."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.blake2b(digest_size=HASH_BYTES)
        size = 0
        while piece := file.read(1 << 20):
            digest.update(piece)
            size += len(piece)
    return size, digest.hexdigest()


class IndexTooLarge(Exception):
    """The index is larger than any that a proxy writes."""


class State:
    """A saved state. `is_checked`: its file was compared with its hash since the proxy started."""

    def __init__(self, number, name, blocks, size, digest, is_checked=True):
        self.number, self.name, self.blocks, self.bytes = number, name, blocks, size
        self.digest, self.is_checked = digest, is_checked


class StateCache:
    """For any thread. The index is verified against the files. States of several models may exist together;
    their blocks are always different."""

    def __init__(self, directory, budget_bytes, policy=None):
        self.directory, self.budget_bytes = directory, budget_bytes
        self.policy = policy or Lru()
        self.lock = threading.Lock()
        # In the order of use, the most recent last.
        self.states, self.used_bytes, self.used_blocks, self.next_number = {}, 0, 0, 1
        self.is_changed, self.has_reported = False, False
        self.counts = {"found_again": 0, "evicted": 0, "superseded": 0, "lost": 0}
        self._read_index()

    def path(self, name):
        return os.path.join(self.directory, name)

    def new_name(self):
        return f"kvt-{secrets.token_hex(16)}.slot"

    def find_longest(self, blocks, whole=False):
        """The state with the longest common prefix, and its blocks; `whole`: only states that match
        completely."""
        found, most = None, 0
        with self.lock:
            for state in self.states.values():
                count = keys.common(blocks, state.blocks)
                if count > most and (not whole or count == len(state.blocks)):
                    found, most = state, count
        return found, most

    def touch(self, state):
        with self.lock:
            if state.number in self.states:
                self.policy.touch(state.number)
                self.states[state.number] = self.states.pop(state.number)
                # The order of use alone is not worth a write.
                self.is_changed = True

    def is_intact(self, state):
        """Tells whether its file is unchanged; a changed file is discarded."""
        if state.is_checked:
            return True
        try:
            state.is_checked = sync_and_hash(self.path(state.name)) == (state.bytes, state.digest)
        except FileNotFoundError:
            pass
        except OSError as error:
            # Too many open files, for example: this says nothing about the file.
            self._report("read", error)
            return False
        if not state.is_checked:
            self.discard(state)
        return state.is_checked

    def close(self):
        with self.lock:
            if self.is_changed:
                self._write_index()

    def add(self, name, blocks, keep_starts=False):
        """Adds a file that the server has written. States that are its prefixes are dropped, unless states
        can only be used whole."""
        size, digest = sync_and_hash(self.path(name))
        with self.lock:
            for state in list(self.states.values()):
                is_start = keys.common(state.blocks, blocks) == len(state.blocks)
                if is_start and (not keep_starts or len(state.blocks) == len(blocks)):
                    self._drop(state, "superseded")
            self._insert(State(self.next_number, name, blocks[:MAX_BLOCKS], size, digest))
            self._evict()
            self._write_index()

    def discard(self, state):
        """The server could not use this state."""
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
        self.remove_file(state.name)

    def remove_file(self, name):
        """Removes a file, if it exists."""
        try:
            os.unlink(self.path(name))
        except FileNotFoundError:
            pass
        except OSError as error:
            self._report("remove", error)

    def _report(self, what, error):
        """Reports the first failure. The proxy continues: a state that is missing is computed."""
        if not self.has_reported:
            self.has_reported = True
            print(f"kvtier_front: cannot {what} in {self.directory}: {error}", file=sys.stderr, flush=True)

    def _is_over_limit(self):
        return (self.used_bytes > self.budget_bytes or len(self.states) > MAX_STATES
                or self.used_blocks > MAX_ALL_BLOCKS)

    def _evict(self):
        while self.states and self._is_over_limit():
            number = self.policy.victim()
            if number not in self.states:
                number = next(iter(self.states))
            self._drop(self.states[number], "evicted")

    def _write_index(self):
        """Writes the index. A failure fails no request: after a crash some states are missing, and none is
        wrong."""
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
            self._report("write the index", error)

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
        # Files without an entry in the index are left from a proxy that was killed.
        for name in os.listdir(self.directory):
            if NAME.fullmatch(name) and name not in known:
                self.remove_file(name)
        self._evict()

    def _state_of(self, entry):
        name, size = entry.get("name"), entry.get("bytes")
        blocks, digest = entry.get("blocks"), entry.get("hash")
        good = (isinstance(name, str) and NAME.fullmatch(name) and isinstance(size, int) and size > 0
                and isinstance(digest, str) and len(digest) == 2 * HASH_BYTES
                and isinstance(blocks, list) and len(blocks) <= MAX_BLOCKS
                and all(isinstance(one, str) and len(one) == 2 * keys.DIGEST_BYTES for one in blocks))
        try:
            good = good and os.stat(self.path(name)).st_size == size
        except OSError:
            good = False
        return State(self.next_number, name, blocks, size, digest, is_checked=False) if good else None

    def _index_entries(self):
        """Entries of the index. An index that cannot be read raises: a start must not cost all states."""
        try:
            with open(self.path(INDEX), "rb") as file:
                raw = file.read(MAX_INDEX_BYTES + 1)
        except FileNotFoundError:
            return []
        if len(raw) > MAX_INDEX_BYTES:
            raise IndexTooLarge(f"{self.path(INDEX)} has more than {MAX_INDEX_BYTES} bytes, which no proxy "
                                "writes: remove it to start without states")
        try:
            content = json.loads(raw)
        except (ValueError, RecursionError):
            return []
        entries = content.get("states") if isinstance(content, dict) else None
        return [one for one in entries if isinstance(one, dict)] if isinstance(entries, list) else []
