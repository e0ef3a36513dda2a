"""Names of LMCache's chunks, and the kinds of chunks: shapes, data types and memory format.

A `kvtier.Blocks` holds blocks of one size, and LMCache's keys say nothing about the chunk. So
each kind has its own blocks, and a key is looked up in every kind. An engine uses one kind, or a
few. A catalogue in the store lists them, so that a later process knows the kinds, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import threading
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch
from lmcache.v1.memory_management import MemoryFormat

import kvtier
from kvtier import Blocks, Pool
from kvtier_vllm import identity

log = logging.getLogger("kvtier_lmcache")

#: Most kinds of a store, which has at most 64 layouts. The catalogue needs one.
MAX_KINDS = 48
#: Bytes of a page of the catalogue, which lists one kind.
PAGE = 4096
#: Most bytes and most shapes of a chunk.
MAX_CHUNK_BYTES, MAX_SHAPES = 4 << 30, 4096
#: Most seconds that the first put of a kind, and opening, wait for the catalogue.
CATALOGUE_WAIT_S = 10.0


def name_of(key: Any) -> bytes:
    """The name of the block of a chunk: every field that distinguishes LMCache's keys."""
    tags = json.dumps(key.tags, default=str) if key.tags else ""
    fields = (key.model_name, key.world_size, key.worker_id, key.chunk_hash_hex, key.dtype,
              getattr(key, "layer_id", ""), tags)
    return "\0".join(map(str, fields)).encode()


class Kind(NamedTuple):
    """What LMCache needs to know of a chunk beside its bytes."""

    shapes: Tuple[Tuple[int, ...], ...]
    dtypes: Tuple[str, ...]
    fmt: str

    @property
    def nbytes(self) -> int:
        """The bytes of a chunk."""
        return sum(math.prod(shape) * dtype_of(name).itemsize
                   for shape, name in zip(self.shapes, self.dtypes))

    def torch_shapes(self) -> List[torch.Size]:
        """The shapes as LMCache's allocators take them."""
        return [torch.Size(shape) for shape in self.shapes]

    def torch_dtypes(self) -> List[torch.dtype]:
        """The data types as LMCache's allocators take them."""
        return [dtype_of(name) for name in self.dtypes]


def kind_of(obj: Any) -> Kind:
    """The kind of a memory object."""
    meta = obj.metadata
    shapes, dtypes = meta.shapes or [meta.shape], meta.dtypes or [meta.dtype]
    return Kind(tuple(map(tuple, shapes)), tuple(str(one).partition(".")[2] for one in dtypes),
                meta.fmt.name)


def dtype_of(name: str) -> torch.dtype:
    """The data type of a name, such as `bfloat16`. Raises ValueError for other texts."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no data type of torch")
    return found


def to_page(kind: Kind) -> bytes:
    """A page of the catalogue. Empty if the kind does not fit."""
    text = json.dumps(kind).encode()
    return text.ljust(PAGE, b"\0") if len(text) <= PAGE else b""


def from_page(page: bytes) -> Optional[Kind]:
    """The kind of a page; None if it is not valid, or has a format that this LMCache lacks."""
    try:
        shapes, dtypes, fmt = json.loads(page.rstrip(b"\0"))
        kind = Kind(tuple(tuple(int(side) for side in shape) for shape in shapes),
                    tuple(str(one) for one in dtypes), str(fmt))
        valid = (kind.fmt in MemoryFormat.__members__
                 and 0 < len(kind.shapes) == len(kind.dtypes) <= MAX_SHAPES
                 and all(side > 0 for shape in kind.shapes for side in shape)
                 and 0 < kind.nbytes <= MAX_CHUNK_BYTES)
        return kind if valid else None
    except (ValueError, TypeError):
        return None


class Kinds:
    """The kinds of a store's chunks. Any thread may use it."""

    def __init__(self, store: kvtier.Store, weights: str, level: int,
                 remote_lookup_s: float) -> None:
        self._store, self._weights, self._level = store, weights, level
        self._remote_lookup_s = remote_lookup_s
        self._lock = threading.Lock()
        self._open: Dict[Kind, Blocks] = {}
        self._pages: Set[int] = set()  # pages that this store or its remote has
        self._listed: Set[Kind] = set()
        self._holds: List[kvtier.Hold] = []
        self._rejected: Dict[Kind, None] = {}
        self._catalogue = Blocks(store, self._identity({"catalogue": PAGE}), [PAGE])
        self._read_pages(range(MAX_KINDS))

    def _identity(self, terms: Dict[str, Any]) -> kvtier.Identity:
        # LMCache's keys contain the model's name, so the identity does not.
        return identity.build("lmcache", self._weights, terms)

    def of(self, kind: Kind) -> Optional[Blocks]:
        """The blocks of a kind, which becomes known. None if the store has no room for it."""
        blocks = self._open.get(kind)
        if blocks is not None:
            return blocks
        with self._lock:
            if kind in self._open:
                return self._open[kind]
            if kind in self._rejected:
                return None
            blocks = self._add(kind)
            if blocks is not None:
                self._write_page(kind)
            elif len(self._rejected) < MAX_KINDS:
                self._rejected[kind] = None
            return blocks

    def _add(self, kind: Kind) -> Optional[Blocks]:
        reason = f"a store keeps chunks of at most {MAX_KINDS} different shapes"
        if len(self._open) < MAX_KINDS:
            try:
                blocks = Blocks(self._store, self._identity({"kind": kind}),
                                identity.parts(kind.nbytes))
            except kvtier.Error as error:
                reason = str(error)
            else:
                # A new dictionary, so that other threads may iterate over the old one.
                self._open = {**self._open, kind: blocks}
                return blocks
        log.warning("chunks of shape %s are not stored: %s; with save_unfull_chunk each length of "
                    "a last chunk is a shape", kind.shapes, reason)
        return None

    def find(self, names: Sequence[bytes], remote: bool = True) -> List[Optional[Kind]]:
        """The kind of each chunk, also at the remote if `remote` is set; None if it is not
        stored."""
        found: List[Optional[Kind]] = [None] * len(names)
        self._lookup(names, found, None)
        if remote and None in found and self._remote_lookup_s and self._catalogue.has_remote:
            self._lookup(names, found, self._remote_lookup_s)
        return found

    def _lookup(self, names: Sequence[bytes], found: List[Optional[Kind]],
                remote_timeout: Optional[float]) -> None:
        for kind, blocks in self._open.items():
            left = [at for at, one in enumerate(found) if one is None]
            if not left:
                return
            wanted = names if len(left) == len(names) else [names[at] for at in left]
            for at, state in zip(left, blocks.exists(wanted, remote_timeout)):
                if state:
                    found[at] = kind

    def known(self) -> List[Tuple[Kind, Blocks]]:
        """All kinds and their blocks."""
        return list(self._open.items())

    def close(self) -> None:
        """Closes all kinds. Chunks stay in the store."""
        with self._lock:
            for hold in self._holds:
                hold.close()
            for blocks in (*self._open.values(), self._catalogue):
                blocks.close()
            self._open, self._holds = {}, []

    def _read_pages(self, pages: Iterable[int]) -> None:
        """Adds the kinds that pages of the catalogue list."""
        names = {page: _page_name(page) for page in pages}
        states = self._catalogue.exists(list(names.values()), self._remote_lookup_s or None)
        present = [page for page, state in zip(names, states) if state]
        if not present:
            return
        memory = bytearray(PAGE * len(present))
        with self._catalogue.get([names[page] for page in present], Pool(memory, PAGE).at(
                range(len(present))), timeout=CATALOGUE_WAIT_S) as op:
            op.wait()
            failed = set(op.failed())
        for at, page in enumerate(present):
            if at in failed:
                continue
            self._pages.add(page)
            kind = from_page(bytes(memory[at * PAGE:(at + 1) * PAGE]))
            if kind is not None and (kind in self._open or self._add(kind) is not None):
                self._listed.add(kind)
                self._hold(page)

    def _write_page(self, kind: Kind) -> None:
        """Lists a kind before its first chunk is stored.

        Processes that share a remote write one catalogue. So the page depends on the kind, and the
        catalogue is read again first. One race remains: two processes that list kinds of one page
        within the time for which the remote's answer "absent" is valid. The first one to write
        wins, and later processes do not know the kind of the second one."""
        data = to_page(kind)
        try:
            self._read_pages([page for page in range(MAX_KINDS) if page not in self._pages])
            page = next((one for one in _pages_of(data) if one not in self._pages), None)
            if kind in self._listed or page is None or not data:
                return
            memory = Pool(data, PAGE, writable=False)
            self._catalogue.put([_page_name(page)], memory.at([0]), level=self._level).result(
                CATALOGUE_WAIT_S)
            self._pages.add(page)
            self._hold(page)
        except kvtier.Error as error:
            log.warning("the store could not list a new kind of chunks, so another process may not "
                        "find them: %s", error)

    def _hold(self, page: int) -> None:
        with contextlib.suppress(kvtier.Error):  # held pages are not evicted
            self._holds.append(self._catalogue.hold([_page_name(page)]))


def _pages_of(data: bytes) -> List[int]:
    """All pages, in the order in which the page `data` tries them."""
    first = hashlib.sha256(data).digest()[0] % MAX_KINDS
    return [(first + step) % MAX_KINDS for step in range(MAX_KINDS)]


def _page_name(page: int) -> bytes:
    return b"kind %d" % page
