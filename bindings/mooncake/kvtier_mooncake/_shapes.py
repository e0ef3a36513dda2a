"""Objects by their shape: the sizes of the buffers that they were put from.

A `kvtier.Blocks` has blocks of one shape, and an object of Mooncake's has a name alone. So a name
is looked for in each shape that is known: of those an engine has one or a few.
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

#: The catalogue: blocks of so many bytes, so many of them, that say which shapes there are.
PAGE, PAGES = 4096, 256

#: So long a put of a new shape, or closing, waits for the catalogue at most.
NOTE_S = 5.0

#: A buffer's bytes, and buffers of an object: the library's own limits.
MOST_BYTES, MOST_BUFFERS = 32 << 20, 4096


class Shapes:
    """The kinds of objects of a tenant. Any thread may use it."""

    def __init__(self, store: kvtier.Store, model: str, tenant: str, most: int,
                 level: int, ask_s: float = 0.0) -> None:
        self._store, self._most, self._level, self._ask_s = store, most, level, ask_s
        weights, salt = model.encode() or None, tenant.encode() or None
        self._identity = kvtier.Identity(model=b"mooncake", weights=weights, salt=salt)
        # Nobody waits for the store with it: other threads look up meanwhile.
        self._lock = threading.Lock()
        self._open: "OrderedDict[Shape, Blocks]" = OrderedDict()
        self._pages: Dict[Shape, int] = {}
        #: Pages on their way to the catalogue.
        self._notes: Dict[Shape, kvtier.Op] = {}
        self._catalogue = Blocks(store, kvtier.Identity(
            model=b"mooncake catalogue", weights=weights, salt=salt), [PAGE])
        self._read()

    def of(self, shape: Shape) -> Blocks:
        """The blocks of a shape, which is known from now on. At most `most` are open; of one
        that was closed objects stay, and are found again when it is asked for."""
        with self._lock:
            blocks = self._open.get(shape)
            if blocks is None:
                blocks = self._open_one(shape)
                self._note(shape)
            self._open.move_to_end(shape)
            return blocks

    def there(self, shape: Shape) -> Optional[Blocks]:
        """The same; None where the store has no room for one more: nothing of it is there."""
        try:
            return self.of(shape)
        except kvtier.BudgetError:
            return None

    def _open_one(self, shape: Shape) -> Blocks:
        try:
            blocks = Blocks(self._store, self._identity, shape)
        except kvtier.LimitError as error:  # the shape itself was checked
            raise make(abi.KVT_E_BUDGET, f"no more kinds of objects: {error.message}") from error
        self._open[shape] = blocks
        if len(self._open) > self._most:
            # Calls of other threads may be about to use it: it closes when they let go of it.
            self._open.popitem(last=False)
        return blocks

    def known(self) -> List[Tuple[Shape, Blocks]]:
        """Those that are open, the last used first."""
        with self._lock:
            return list(reversed(self._open.items()))

    def find(self, names: Sequence[bytes], but: Optional[Shape] = None) -> List[Optional[Shape]]:
        """The shape that each object is there in; a remote is asked for those that are not here."""
        known = [(shape, blocks) for shape, blocks in self.known() if shape != but]
        found: List[Optional[Shape]] = [None] * len(names)
        self._look(known, names, found)
        if None in found and self.asks:
            missing = [name for name, shape in zip(names, found) if shape is None]
            self._ask([blocks for _, blocks in known], missing)
            self._look(known, names, found)
        return found

    def _look(self, known: Sequence[Tuple[Shape, Blocks]], names: Sequence[bytes],
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
    def asks(self) -> bool:
        """Whether a remote is asked for what is not here."""
        return bool(self._ask_s) and self._catalogue.has_remote

    def _ask(self, shapes: Sequence[Blocks], names: Sequence[bytes]) -> None:
        """Asks for names in all shapes at once, which takes no longer than for one of them."""
        ready = kvtier.Names(names)
        with contextlib.ExitStack() as stack:
            ops = []
            for blocks in shapes:
                # What it does not say in time, or refuses to be asked, is not there.
                with contextlib.suppress(kvtier.Error):
                    ops.append(stack.enter_context(blocks.locate(ready, timeout=self._ask_s)))
            for op in ops:
                op.wait()

    def came(self, shape: Shape, names: Sequence[bytes]) -> List[int]:
        """Which of some objects that were not here are at the remote, in a shape."""
        blocks = self.there(shape) if self.asks else None
        if blocks is None:
            return []
        return [at for at, state in enumerate(blocks.exists(names, self._ask_s)) if state]

    def states(self, names: Sequence[bytes]) -> List[int]:
        """1 for each that is there, 0 for the others."""
        known = self.known()
        if len(known) == 1:  # the usual case costs one native call and one pass
            states = known[0][1].exists(names)
            if 0 in states and self.asks:
                states = known[0][1].exists(names, self._ask_s)
            return [1 if state else 0 for state in states]
        return [0 if shape is None else 1 for shape in self.find(names)]

    def drop(self, name: bytes) -> Tuple[int, int]:
        """Takes all copies of an object away; how many went, and how many could not. Shapes that
        are not open are looked into, too: a copy there would come back."""
        with self._lock:
            shapes, opened = list(self._pages), dict(self._open)
        gone = held = 0
        for shape in shapes:
            blocks = opened.get(shape) or self.there(shape)
            if blocks is None:
                held += self._catalogue.has_remote  # which may have a copy
                continue
            report = blocks.drop([name])
            gone += report.removed_chunks
            held += report.referenced_chunks + report.transferring_chunks
        return gone, held

    def clear(self) -> int:
        """Takes all objects of all shapes away, and says how many."""
        with self._lock:
            shapes = list(self._pages)
        count = 0
        for shape in shapes:
            blocks = self.there(shape)
            count += 0 if blocks is None else blocks.clear().removed_chunks
        return count

    def close(self) -> None:
        """Closes them; objects stay. The catalogue is put again, should it have left."""
        with self._lock:
            shapes, self._pages = dict(self._pages), {}
            self._notes.clear()
            self._open.clear()
        op = self._put(shapes)
        if op is not None:
            _wait(op)
        self._catalogue.close()

    def _read(self) -> None:
        """Which shapes there are of earlier processes, and of others that share a remote."""
        names = [_page_name(page) for page in range(PAGES)]
        states = self._catalogue.exists(names, self._ask_s)
        there = [at for at, state in enumerate(states) if state]
        if not there:
            return
        memory = bytearray(PAGE * len(there))
        with self._catalogue.get([names[at] for at in there], Pool(memory, PAGE).at(
                range(len(there))), timeout=NOTE_S) as op:
            op.wait()
            failed = set(op.failed())
        for at, page in enumerate(there):
            text = bytes(memory[at * PAGE:(at + 1) * PAGE]).rstrip(b"\0")
            shape = _parsed(text) if at not in failed else None
            if shape is None:
                continue
            self._pages[shape] = page
            if len(self._open) < self._most:
                with contextlib.suppress(kvtier.BudgetError):  # it is opened when it is asked for
                    self._open_one(shape)

    def _note(self, shape: Shape) -> None:
        if shape in self._pages:
            return
        taken = set(self._pages.values())
        page = next((one for one in range(PAGES) if one not in taken), None)
        self._pages[shape] = PAGES if page is None else page
        op = self._put({shape: self._pages[shape]})
        if op is not None:
            self._notes[shape] = op

    def noted(self, shape: Shape) -> None:
        """Waits until the catalogue has the shape: before a put of it is answered, since other
        processes find by that what was put. Not longer than `NOTE_S`: it is written then all the
        same, once that goes."""
        with self._lock:
            op = self._notes.get(shape)
        if op is None:
            return
        _wait(op)
        with self._lock:
            self._notes.pop(shape, None)

    def _put(self, shapes: Dict[Shape, int]) -> Optional[kvtier.Op]:
        """Begins to write their pages."""
        texts = {page: json.dumps(_runs(shape)).encode() for shape, page in shapes.items()}
        # A next process finds objects of others once it has put or asked for one.
        texts = {page: text for page, text in texts.items() if page < PAGES and len(text) <= PAGE}
        if not texts:
            return None
        memory = b"".join(text.ljust(PAGE, b"\0") for text in texts.values())
        try:
            return self._catalogue.put(
                [_page_name(page) for page in texts],
                Pool(memory, PAGE, writable=False).at(range(len(texts))), level=self._level)
        except kvtier.Error as error:
            log.warning("the catalogue of shapes could not be written: %s", error)
            return None


def _wait(op: kvtier.Op) -> None:
    """For pages on their way. Several threads may; an op that is dropped goes on."""
    error: Optional[object] = op.error() if op.wait(NOTE_S) else f"not within {NOTE_S:g} s"
    if error is not None:
        log.warning("the catalogue of shapes could not be written: %s", error)


def _page_name(page: int) -> bytes:
    return b"shape %d" % page


def _runs(shape: Iterable[int]) -> List[List[int]]:
    """Sizes and how many of each follow each other."""
    runs: List[List[int]] = []
    for size in shape:
        if runs and runs[-1][0] == size:
            runs[-1][1] += 1
        else:
            runs.append([size, 1])
    return runs


def _parsed(text: bytes) -> Optional[Shape]:
    try:
        runs: Any = json.loads(text)
        shape = tuple(int(size) for size, count in runs for _ in range(int(count)))
        return check_shape(shape)
    except (ValueError, TypeError, kvtier.Error):
        return None


def check_shape(sizes: Sequence[int]) -> Shape:
    """A shape from the sizes of an object's buffers."""
    try:
        shape = tuple(map(operator.index, sizes))
    except TypeError:
        shape = ()
    if not 0 < len(shape) <= MOST_BUFFERS or min(shape) <= 0 or max(shape) > MOST_BYTES:
        raise make(abi.KVT_E_INVALID, f"an object of buffers of {list(sizes)[:8]} bytes: up to "
                   f"{MOST_BUFFERS} can be, of 1 to {MOST_BYTES} bytes")
    return shape
