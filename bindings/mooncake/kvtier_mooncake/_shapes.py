"""The objects of a tenant, by shape: the sizes of the buffers that an object was put from.

A `kvtier.Blocks` holds blocks of one shape, but a Mooncake object has only a name. So a name is
looked up in each known shape. An engine uses one shape or a few.
"""

from __future__ import annotations

import contextlib
import json
import logging
import operator
import threading
from collections import OrderedDict
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

import kvtier
from kvtier import Blocks, Pool, abi
from kvtier._errors import make

Shape = Tuple[int, ...]

log = logging.getLogger("kvtier.mooncake")

#: The catalogue lists the known shapes: bytes of one of its pages, and most pages.
PAGE, MAX_PAGES = 4096, 256

#: Most seconds that a put of a new shape, or closing, waits for the catalogue.
CATALOGUE_WAIT_S = 5.0

#: Most bytes of a buffer, and most buffers of an object: the library's own limits.
MAX_BUFFER_BYTES, MAX_BUFFERS = 32 << 20, 4096


class Shapes:
    """The shapes of a tenant's objects. Any thread may use it."""

    def __init__(self, store: kvtier.Store, model: str, tenant: str, max_open: int,
                 level: int, remote_lookup_s: float = 0.0) -> None:
        self._store, self._max_open, self._level = store, max_open, level
        self._remote_lookup_s = remote_lookup_s
        weights, salt = model.encode() or None, tenant.encode() or None
        self._identity = kvtier.Identity(model=b"mooncake", weights=weights, salt=salt)
        # Never held while waiting for the store, so that other threads can look up.
        self._lock = threading.Lock()
        self._open: "OrderedDict[Shape, Blocks]" = OrderedDict()
        self._pages: Dict[Shape, int] = {}
        #: Running writes of catalogue pages.
        self._page_writes: Dict[Shape, kvtier.Op] = {}
        self._catalogue = Blocks(store, kvtier.Identity(
            model=b"mooncake catalogue", weights=weights, salt=salt), [PAGE])
        self._read_catalogue()

    def of(self, shape: Shape) -> Blocks:
        """The blocks of a shape, which becomes known. If too many are open, the least recently
        used shape is closed. Its objects stay, and are found again once it is reopened."""
        with self._lock:
            blocks = self._open.get(shape)
            if blocks is None:
                blocks = self._open_one(shape)
                self._add_to_catalogue(shape)
            self._open.move_to_end(shape)
            return blocks

    def try_open(self, shape: Shape) -> Optional[Blocks]:
        """As `of`, but None if the store has no room for the shape, which then has no objects."""
        try:
            return self.of(shape)
        except kvtier.BudgetError:
            return None

    def _open_one(self, shape: Shape) -> Blocks:
        try:
            blocks = Blocks(self._store, self._identity, shape)
        except kvtier.LimitError as error:  # the shape itself is valid
            raise make(abi.KVT_E_BUDGET, "the store has no room for another object shape: "
                       f"{error.message}") from error
        self._open[shape] = blocks
        if len(self._open) > self._max_open:
            # It closes when its last reference goes: other threads may be about to use it.
            self._open.popitem(last=False)
        return blocks

    def known(self) -> List[Tuple[Shape, Blocks]]:
        """The open shapes and their blocks, the most recently used first."""
        with self._lock:
            return list(reversed(self._open.items()))

    def find(self, names: Sequence[bytes],
             excluded: Optional[Shape] = None) -> List[Optional[Shape]]:
        """The shape that each object is stored in, also at the remote; None if it is not stored."""
        known = [(shape, blocks) for shape, blocks in self.known() if shape != excluded]
        found: List[Optional[Shape]] = [None] * len(names)
        self._lookup(known, names, found)
        if None in found and self.uses_remote:
            missing = [name for name, shape in zip(names, found) if shape is None]
            self._lookup_at_remote([blocks for _, blocks in known], missing)
            self._lookup(known, names, found)
        return found

    def _lookup(self, known: Sequence[Tuple[Shape, Blocks]], names: Sequence[bytes],
                found: List[Optional[Shape]]) -> None:
        left = [at for at, shape in enumerate(found) if shape is None]
        for shape, blocks in known:
            if not left:
                break
            states = blocks.exists([names[at] for at in left] if len(left) < len(names) else names)
            for at, state in zip(left, states):
                if state:
                    found[at] = shape
            left = [at for at in left if found[at] is None]

    @property
    def uses_remote(self) -> bool:
        """Whether objects that local tiers lack are looked up at a remote."""
        return bool(self._remote_lookup_s) and self._catalogue.has_remote

    def _lookup_at_remote(self, shapes: Sequence[Blocks], names: Sequence[bytes]) -> None:
        """Looks up names at the remote in all shapes at once, as fast as in one shape."""
        ready = kvtier.Names(names)
        with contextlib.ExitStack() as stack:
            ops = []
            for blocks in shapes:
                # A lookup that fails, or has no answer in time, is a miss.
                with contextlib.suppress(kvtier.Error):
                    ops.append(stack.enter_context(
                        blocks.remote_lookup(ready, timeout=self._remote_lookup_s)))
            for op in ops:
                op.wait()

    def find_at_remote(self, shape: Shape, names: Sequence[bytes]) -> List[int]:
        """The positions of the objects that the remote has in a shape."""
        blocks = self.try_open(shape) if self.uses_remote else None
        if blocks is None:
            return []
        states = blocks.exists(names, self._remote_lookup_s)
        return [at for at, state in enumerate(states) if state]

    def states(self, names: Sequence[bytes]) -> List[int]:
        """1 for each object that is stored, 0 for the others."""
        known = self.known()
        if len(known) == 1:  # the usual case costs one native call and one pass
            states = known[0][1].exists(names)
            if 0 in states and self.uses_remote:
                states = known[0][1].exists(names, self._remote_lookup_s)
            return [1 if state else 0 for state in states]
        return [0 if shape is None else 1 for shape in self.find(names)]

    def drop(self, name: bytes) -> Tuple[int, int]:
        """Removes all copies of an object, and returns the numbers of removed copies and of copies
        in use. It also looks into shapes that are not open, where a copy would reappear later."""
        with self._lock:
            shapes, opened = list(self._pages), dict(self._open)
        removed = blocked = 0
        for shape in shapes:
            blocks = opened.get(shape) or self.try_open(shape)
            if blocks is None:
                blocked += self._catalogue.has_remote  # the remote may have a copy
                continue
            report = blocks.drop([name])
            removed += report.removed_chunks
            blocked += report.referenced_chunks + report.transferring_chunks
        return removed, blocked

    def clear(self) -> int:
        """Removes all objects of all shapes, and returns their number."""
        with self._lock:
            shapes = list(self._pages)
        count = 0
        for shape in shapes:
            blocks = self.try_open(shape)
            count += 0 if blocks is None else blocks.clear().removed_chunks
        return count

    def close(self) -> None:
        """Closes all shapes. Objects stay. It writes the catalogue again, in case of evictions."""
        with self._lock:
            shapes, self._pages = dict(self._pages), {}
            self._page_writes.clear()
            self._open.clear()
        op = self._write_pages(shapes)
        if op is not None:
            _wait_for_write(op)
        self._catalogue.close()

    def _read_catalogue(self) -> None:
        """Reads the shapes of earlier processes, and of processes that share the remote."""
        names = [_page_name(page) for page in range(MAX_PAGES)]
        states = self._catalogue.exists(names, self._remote_lookup_s)
        present = [at for at, state in enumerate(states) if state]
        if not present:
            return
        memory = bytearray(PAGE * len(present))
        with self._catalogue.get([names[at] for at in present], Pool(memory, PAGE).at(
                range(len(present))), timeout=CATALOGUE_WAIT_S) as op:
            op.wait()
            failed = set(op.failed())
        for at, page in enumerate(present):
            text = bytes(memory[at * PAGE:(at + 1) * PAGE]).rstrip(b"\0")
            shape = _parse(text) if at not in failed else None
            if shape is None:
                continue
            self._pages[shape] = page
            if len(self._open) < self._max_open:
                with contextlib.suppress(kvtier.BudgetError):  # opened on first use
                    self._open_one(shape)

    def _add_to_catalogue(self, shape: Shape) -> None:
        if shape in self._pages:
            return
        taken = set(self._pages.values())
        page = next((one for one in range(MAX_PAGES) if one not in taken), None)
        self._pages[shape] = MAX_PAGES if page is None else page
        op = self._write_pages({shape: self._pages[shape]})
        if op is not None:
            self._page_writes[shape] = op

    def wait_for_catalogue(self, shape: Shape) -> None:
        """Waits at most `CATALOGUE_WAIT_S` until the catalogue lists a shape, before a put of it
        returns: other processes need the entry to find the object. A slow write continues."""
        with self._lock:
            op = self._page_writes.get(shape)
        if op is None:
            return
        _wait_for_write(op)
        with self._lock:
            self._page_writes.pop(shape, None)

    def _write_pages(self, shapes: Dict[Shape, int]) -> Optional[kvtier.Op]:
        """Starts to write the catalogue pages of some shapes."""
        texts = {page: json.dumps(_run_lengths(shape)).encode() for shape, page in shapes.items()}
        # Shapes without a page: a later process finds their objects once it uses the shape itself.
        texts = {page: text for page, text in texts.items()
                 if page < MAX_PAGES and len(text) <= PAGE}
        if not texts:
            return None
        memory = b"".join(text.ljust(PAGE, b"\0") for text in texts.values())
        try:
            return self._catalogue.put(
                [_page_name(page) for page in texts],
                Pool(memory, PAGE, writable=False).at(range(len(texts))), level=self._level)
        except kvtier.Error as error:
            log.warning("the catalogue of object shapes could not be written, so other processes "
                        "may not find new shapes: %s", error)
            return None


def _wait_for_write(op: kvtier.Op) -> None:
    """Waits for a catalogue write. Several threads may wait; a dropped op continues."""
    error: Optional[object] = f"it took longer than {CATALOGUE_WAIT_S:g} s"
    if op.wait(CATALOGUE_WAIT_S):
        error = op.error()
    if error is not None:
        log.warning("the catalogue of object shapes could not be written, so other processes may "
                    "not find new shapes: %s", error)


def _page_name(page: int) -> bytes:
    return b"shape %d" % page


def _run_lengths(shape: Iterable[int]) -> List[List[int]]:
    """The run-length encoding of a shape: pairs of a size and its number of repetitions."""
    runs: List[List[int]] = []
    for size in shape:
        if runs and runs[-1][0] == size:
            runs[-1][1] += 1
        else:
            runs.append([size, 1])
    return runs


def _parse(text: bytes) -> Optional[Shape]:
    try:
        runs: Any = json.loads(text)
        shape = tuple(int(size) for size, count in runs for _ in range(int(count)))
        return check_shape(shape)
    except (ValueError, TypeError, kvtier.Error):
        return None


def check_shape(sizes: Sequence[int]) -> Shape:
    """Validates the sizes of an object's buffers, and returns them as a shape."""
    try:
        shape = tuple(map(operator.index, sizes))
    except TypeError:
        shape = ()
    if not 0 < len(shape) <= MAX_BUFFERS or min(shape) <= 0 or max(shape) > MAX_BUFFER_BYTES:
        raise make(abi.KVT_E_INVALID, f"an object cannot have {len(sizes)} buffers of "
                   f"{list(sizes)[:8]} bytes: it needs 1 to {MAX_BUFFERS} buffers of 1 to "
                   f"{MAX_BUFFER_BYTES} bytes each")
    return shape
