"""Attention kernels on the CPU, for the caller's arrays and threads.

Queries are [tokens, query heads, key dim], keys [tokens, key heads, key dim] and values
[tokens, key heads, value dim]. They are objects with the buffer protocol, or `Rows`. The numbers
of a head are contiguous; heads and tokens have any positive stride. Results are memoryviews
(`numpy.asarray(result.out)`), or the caller's own arrays. Calls release Python's interpreter
lock.

>>> from array import array
>>> import kvtier
>>> rows = memoryview(array("f", range(32))).cast("B").cast("f", shape=[2, 2, 8])
>>> done = kvtier.kernels.prefill(rows, rows, rows)      # two tokens, two heads of 8 numbers
>>> done.out.shape, done.out[0, 1, 0]
((2, 2, 8), 8.0)
"""

from __future__ import annotations

import array
import ctypes
import enum
import math
import operator
import os
import threading
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple, Union

from . import _abi
from ._columns import Column, Columns
from ._errors import make
from ._lib import check, check_err, lib, u32, u64
from ._offload import Attention, attention_for_c
from ._pybuffer import Export, described
from ._resource import byref, new_error

__all__ = ["Attended", "BlockPlacement", "Decoded", "Index", "IndexHead", "IndexKind", "Rows",
           "Threads", "TokenLists", "check_rows", "column_sums", "decode", "merge", "pack_index",
           "page_boxes", "page_scores", "place_column_sums", "place_index", "prefill"]

#: The number of computing threads, including the caller's; or an executor of helper threads.
Threads = Union[int, Executor]

#: Types that kernels read: the code for C, the types of objects that may contain them, bytes.
_TYPES: Dict[str, Tuple[int, Tuple[str, ...], int]] = {
    "f32": (_abi.KVT_DTYPE_F32, ("f32",), 4), "f16": (_abi.KVT_DTYPE_F16, ("f16", "u16", "i16"), 2),
    "bf16": (_abi.KVT_DTYPE_BF16, ("bf16", "u16", "i16"), 2),
    "int8": (_abi.KVT_DTYPE_I8, ("int8",), 1),
}
#: The type of rows that an object's plain type implies.
_PLAIN = {"f32": "f32", "f16": "f16", "bf16": "bf16", "u16": "bf16", "int8": "int8"}
_SCALINGS = {"token": _abi.KVT_SCALES_TOKEN, "channel": _abi.KVT_SCALES_CHANNEL}


def _invalid(text: str) -> Exception:
    return make(_abi.KVT_E_INVALID, text)


class Rows(NamedTuple):
    """Numbers [tokens, heads, dim] with a type or scales that their object does not declare. A
    tensor, such as torch's, declares its type. A buffer's format f is f32, e is f16, H is bf16,
    and b is int8."""

    data: Any
    #: "f32", "f16", "bf16" or "int8"; None = as the object declares.
    dtype: Optional[str] = None
    #: f32, for int8: one per token and head ("token"), or one per head and number ("channel").
    scales: Optional[Column] = None
    scaling: str = "token"


class IndexKind(enum.IntEnum):
    """The meaning of a head's lists."""

    #: All keys; no list.
    DENSE = _abi.KVT_INDEX_DENSE
    #: Two lists: keys that every query sees, and distances back from the query.
    LINES = _abi.KVT_INDEX_LINES
    #: A list of blocks of keys per row of queries.
    BLOCKS = _abi.KVT_INDEX_BLOCKS
    #: A list of keys that every query sees; then per row of queries a list of ranges, each two
    #: numbers.
    RANGES = _abi.KVT_INDEX_RANGES


class IndexHead(NamedTuple):
    """The lists of a head: their kind, the number of the first one, and their count."""

    kind: int
    first: int = 0
    lists: int = 0
    #: Queries per row; 0 = one row for all queries.
    query_block: int = 0
    #: Keys per block.
    key_block: int = 0
    #: Queries from this position on see all keys.
    dense_from: int = 2**32 - 1


def _u32s(name: str, values: Column) -> "array.array[int]":
    numbers = array.array("I")
    with Columns() as columns:
        pointer, count = columns.take(name, "u32", values)
        if count:
            numbers.frombytes(ctypes.string_at(pointer, 4 * count))
    return numbers


def u32_room(count: int) -> "array.array[int]":
    """Returns an array with room for `count` numbers."""
    return array.array("I", bytes(4 * count))


def u32_pointer(numbers: "array.array[int]") -> Any:
    """Returns a pointer to the numbers of an array."""
    address = ctypes.c_void_p(numbers.buffer_info()[0])
    return ctypes.cast(address, ctypes.POINTER(ctypes.c_uint32))


class _Lists:
    """Concatenated lists: the start of each list, and the items of all."""

    def __init__(self, starts: Column, items: Column) -> None:
        self._starts, self._items = _u32s("starts", starts), _u32s("items", items)
        self._expose()

    def _expose(self) -> None:
        #: Read-only views, which keep the arrays alive.
        self.starts = memoryview(self._starts).toreadonly()
        self.items = memoryview(self._items).toreadonly()

    def lists(self) -> List[List[int]]:
        """Returns the lists."""
        ends = zip(self.starts, self.starts[1:])
        return [self.items[start:end].tolist() for start, end in ends]

    def _fill(self, c: Any) -> None:
        """Points a C struct to the lists, as input and as room for output."""
        c.starts, c.items = u32_pointer(self._starts), u32_pointer(self._items)
        c.start_count = c.start_capacity = len(self._starts)
        c.item_count = c.item_capacity = len(self._items)


def _flat(lists: Iterable[Sequence[int]]) -> Tuple[List[int], List[int]]:
    starts: List[int] = [0]
    items: List[int] = []
    for numbers in lists:
        items.extend(numbers)
        starts.append(len(items))
    return starts, items


class Index(_Lists):
    """The keys that each query attends to. No head: all keys. One head: for all heads. Otherwise
    one per query head or per key head. The numbers of a list ascend."""

    def __init__(self, heads: Sequence[IndexHead] = (), starts: Column = (),
                 items: Column = ()) -> None:
        super().__init__(starts, items)
        self._heads = (_abi.kvt_index_head_t * len(heads))()
        for to, head in zip(self._heads, heads):
            for name, value in zip(IndexHead._fields, head):
                setattr(to, name, u32(value))

    @classmethod
    def of(cls, heads: Sequence[IndexHead], lists: Iterable[Sequence[int]]) -> "Index":
        """Creates an index from lists, which heads refer to by number."""
        return cls(heads, *_flat(lists))

    @classmethod
    def _with_room(cls, heads: int, starts: int, items: int) -> "Index":
        index = cls()
        index._heads = (_abi.kvt_index_head_t * heads)()
        index._starts, index._items = u32_room(starts), u32_room(items)
        index._expose()
        return index

    @property
    def heads(self) -> List[IndexHead]:
        """The heads, which define the meaning of the lists."""
        return [IndexHead(*(getattr(head, name) for name in IndexHead._fields))
                for head in self._heads]

    def _fill(self, c: Any) -> None:
        super()._fill(c)
        c.heads = ctypes.cast(self._heads, ctypes.POINTER(_abi.kvt_index_head_t))
        c.head_count = c.head_capacity = len(self._heads)

    def _lower(self) -> Any:
        c = _abi.kvt_index_t()
        self._fill(c)
        return c

    def __repr__(self) -> str:
        return f"<kvtier.Index of {len(self._heads)} heads, {len(self._items)} items>"


class TokenLists(_Lists):
    """Positions of kept tokens, ascending: a list per head, or one for all heads."""

    @classmethod
    def of(cls, lists: Iterable[Sequence[int]]) -> "TokenLists":
        """Creates token lists from lists."""
        return cls(*_flat(lists))

    def _lower(self) -> Any:
        c = _abi.kvt_token_lists_t()
        self._fill(c)
        return c

    def __repr__(self) -> str:
        return f"<kvtier.TokenLists of {max(len(self._starts) - 1, 0)} lists, {len(self._items)} items>"


class Attended(NamedTuple):
    """Outputs [queries, query heads, value dim], and log-sum-exps [queries, query heads]. A query
    that sees no key has zeros, and -inf."""

    out: Any
    lse: Any


class Decoded(NamedTuple):
    """Like `Attended`, with the attention sum of each key, in the order of selected keys:
    [query heads, keys] or [keys]; None if not requested."""

    out: Any
    lse: Any
    sums: Any


class Borrowed:
    """The memory that one call uses. The objects neither move nor resize until the call ends."""

    def __init__(self) -> None:
        self._exports: List[Export] = []
        self._columns = Columns()

    def __enter__(self) -> "Borrowed":
        return self

    def __exit__(self, *args: object) -> None:
        for export in self._exports:
            export.release()
        self._columns.__exit__(*args)

    def column(self, name: str, kind: str, values: Optional[Column]) -> Tuple[Any, int]:
        """Returns the pointer and the length of input numbers."""
        return self._columns.take(name, kind, values)

    def rows(self, name: str, source: Any) -> Any:
        """Returns queries, keys or values for C."""
        given = source if isinstance(source, Rows) else Rows(source)
        seen = described(given.data)
        shape, strides = seen.shape, seen.strides
        kind, types, size = _TYPES.get(given.dtype or _PLAIN.get(seen.dtype, ""), (0, (), 0))
        if len(shape) != 3 or 0 in shape or seen.dtype not in types:
            raise _invalid(f"{name} have shape {list(shape)} and type {seen.dtype}: they must be "
                           "[tokens, heads, dim], not empty, of f32, f16, bf16 (bits as uint16) or "
                           "int8; convert them, or declare the type of the bits with "
                           "kvtier.Rows(data, dtype)")
        tokens, heads, dim = shape
        # The stride of a dimension of size 1 is irrelevant.
        steps = [step if many > 1 else 0 for many, step in zip(shape, strides)]
        if (dim > 1 and steps[2] != size) or any(
                many > 1 and step <= 0 for many, step in zip(shape, steps)):
            raise _invalid(f"{name} have strides {list(strides)} in bytes: the numbers of a head "
                           "must be contiguous, and the strides of heads and tokens positive; "
                           "pass a contiguous copy")
        export = Export(given.data, writable=False, strided=True)
        self._exports.append(export)
        rows = _abi.kvt_rows_t(dtype=kind)
        at = rows.view
        at.address, at.tokens, at.heads = export.address, u32(tokens), u32(heads)
        at.run_bytes, at.head_stride_bytes = dim * size, steps[1]
        at.token_stride_bytes = steps[0] or heads * (steps[1] or dim * size)
        if given.scales is not None:
            if given.scaling not in _SCALINGS:
                raise _invalid(f"{name} have scaling {given.scaling!r}: it must be 'token' or "
                               "'channel'")
            rows.scaling = _SCALINGS[given.scaling]
            rows.scales, rows.scale_count = self.column(f"scales of {name}", "f32", given.scales)
        return rows

    def problem(self, queries: Any, keys: Any, values: Any, index: Optional[Index],
                first_query: int, first_key: int, scale: float) -> "Problem":
        """Returns the arguments of an attention call."""
        return Problem(self.rows("queries", queries), self.rows("keys", keys),
                       self.rows("values", values), index, first_query, first_key, scale)

    def numbers(self, name: str, target: Any, shape: Sequence[int],
                writable: bool = True) -> Tuple[Any, Any, int]:
        """Takes contiguous f32 numbers, or creates them if `target` is None. Returns the object,
        the pointer, and the count."""
        count = math.prod(shape)
        if target is None:
            target = _new(shape)
        seen = described(target)
        if seen.dtype != "f32" or seen.nbytes != 4 * count:
            raise _invalid(f"{name} has shape {list(seen.shape)} and type {seen.dtype}: it must "
                           f"have {count} numbers of f32, {list(shape)}")
        export = Export(target, writable)
        self._exports.append(export)
        pointer = ctypes.cast(ctypes.c_void_p(export.address), ctypes.POINTER(ctypes.c_float))
        return target, pointer, count


def _new(shape: Sequence[int]) -> Any:
    flat: Any = memoryview(bytearray(4 * math.prod(shape)))
    return flat.cast("f") if 0 in shape else flat.cast("f", shape=list(shape))


def dim_of(rows: Any) -> int:
    """Returns the numbers per head of rows."""
    sizes = {kind: size for kind, _, size in _TYPES.values()}
    return int(rows.view.run_bytes) // sizes[rows.dtype]


class Problem:
    """The arguments of an attention call for C, and the shapes of its results."""

    def __init__(self, queries: Any, keys: Any, values: Any, index: Optional[Index],
                 first_query: int, first_key: int, scale: float) -> None:
        self._kept = (queries, keys, values, index)  # the targets of pointers
        self.c = _abi.kvt_attention_args_t(first_query=u32(first_query), first_key=u32(first_key),
                                    scale=scale)
        self.c.queries, self.c.keys = ctypes.pointer(queries), ctypes.pointer(keys)
        self.c.values = ctypes.pointer(values)
        if index is not None:
            self.c.select = ctypes.pointer(index._lower())
        self.queries, self.heads = int(queries.view.tokens), int(queries.view.heads)
        self.keys, self.dim = int(keys.view.tokens), dim_of(values)

    @property
    def out_shape(self) -> Tuple[int, int, int]:
        """The shape of the outputs."""
        return self.queries, self.heads, self.dim

    @property
    def lse_shape(self) -> Tuple[int, int]:
        """The shape of the log-sum-exps."""
        return self.queries, self.heads


class _Items:
    """The items of a step; each is taken once."""

    def __init__(self, count: int) -> None:
        self._next, self._count, self._lock = 0, count, threading.Lock()

    def take(self) -> Optional[int]:
        with self._lock:
            item, self._next = self._next, self._next + 1
            return item if item < self._count else None

    def stop(self) -> None:
        with self._lock:
            self._next = self._count


class _Job:
    """A job of the library, executed by the caller's thread and its helpers."""

    def __init__(self, call: Any) -> None:
        self._handle, err = _abi.kvt_attention_job_p(), new_error()
        check_err(call(byref(self._handle), byref(err)), err)

    def __enter__(self) -> "_Job":
        return self

    def __exit__(self, *_: object) -> None:
        # Waits for running items; then the caller owns its memory again.
        lib.kvt_attention_job_close(byref(self._handle))

    def info(self) -> Any:
        """Returns how the job is divided into steps and items."""
        info = _abi.kvt_attention_job_info_t()
        check(lib.kvt_attention_job_info(self._handle, byref(info)))
        return info

    def run(self, threads: Threads) -> None:
        info = self.info()
        helpers = os.cpu_count() or 1
        if not isinstance(threads, Executor):
            helpers = operator.index(threads) - 1
            if helpers < 0:
                raise _invalid(f"threads is {threads}: it must be at least 1, or an executor")
        steps = (info.items, info.last_items)[: info.steps]
        if helpers == 0 or max(steps) < 2:
            for step, items in enumerate(steps):
                self._items(step, 0, items, info.scratch_count)
        elif isinstance(threads, Executor):
            self._share(steps, info.scratch_count, threads, helpers)
        else:
            with ThreadPoolExecutor(helpers, "kvtier-kernel") as pool:
                self._share(steps, info.scratch_count, pool, helpers)

    def sums(self, flags: int, pointer: Any, count: int) -> None:
        """Adds the attention sums of a decode's keys to `pointer`."""
        err = new_error()
        check_err(lib.kvt_decode_sums(self._handle, flags, pointer, count, byref(err)), err)

    def _items(self, step: int, first: int, items: int, scratch: int,
               memory: Optional[Any] = None) -> None:
        memory, err = memory or (ctypes.c_float * scratch)(), new_error()
        check_err(lib.kvt_attention_job_run(self._handle, step, first, items, memory, scratch, byref(err)),
                  err)

    def _share(self, steps: Sequence[int], scratch: int, pool: Executor, helpers: int) -> None:
        for step, count in enumerate(steps):
            items = _Items(count)

            def work(step: int = step, items: _Items = items) -> None:
                memory = (ctypes.c_float * scratch)()
                item = items.take()
                while item is not None:
                    self._items(step, item, 1, scratch, memory)
                    item = items.take()

            futures: "List[Future[None]]" = []
            try:
                futures += (pool.submit(work) for _ in range(min(helpers, count - 1)))
                work()
            finally:
                items.stop()
                # Helpers that have not begun are cancelled: this job may occupy the pool itself.
                begun = [future for future in futures if not future.cancel()]
                wait(begun)
            for future in begun:
                future.result()


def prefill(queries: Any, keys: Any, values: Any, *, index: Optional[Index] = None,
            first_query: int = 0, first_key: int = 0, scale: float = 0.0,
            out: Optional[Any] = None, lse: Optional[Any] = None,
            threads: Threads = 1) -> Attended:
    """Computes causal attention of a prompt, or of a part of it. `first_query` and `first_key`
    are the positions of the first query and key. `out` and `lse` are arrays of f32 for the
    results. A scale of 0 is 1 / sqrt(key dim)."""
    with Borrowed() as borrowed:
        problem = borrowed.problem(queries, keys, values, index, first_query, first_key, scale)
        out, to, count = borrowed.numbers("out", out, problem.out_shape)
        lse, logs, rows = borrowed.numbers("lse", lse, problem.lse_shape)
        with _Job(lambda job, err: lib.kvt_prefill_open(
                byref(problem.c), to, count, logs, rows, job, err)) as job:
            job.run(threads)
    return Attended(out, lse)


def _memory(problem: Problem, flags: int) -> int:
    count, err = ctypes.c_uint64(), new_error()
    check_err(lib.kvt_decode_memory(byref(problem.c), flags, byref(count), byref(err)), err)
    return count.value


def decode(queries: Any, keys: Any, values: Any, *, index: Optional[Index] = None,
           first_query: int = 0, first_key: int = 0, scale: float = 0.0, with_sums: bool = False,
           by_head: bool = True, out: Optional[Any] = None, lse: Optional[Any] = None,
           threads: Threads = 1) -> Decoded:
    """Computes attention of the next token, or of a few. The job is divided by keys, so that
    threads share one query. `with_sums` also returns the attention sum of each key."""
    with Borrowed() as borrowed:
        problem = borrowed.problem(queries, keys, values, index, first_query, first_key, scale)
        out, to, count = borrowed.numbers("out", out, problem.out_shape)
        lse, logs, rows = borrowed.numbers("lse", lse, problem.lse_shape)
        flags = _abi.KVT_DECODE_SCORES if with_sums else 0
        need = _memory(problem, flags)
        memory = (ctypes.c_float * need)()
        with _Job(lambda job, err: lib.kvt_decode_open(
                byref(problem.c), flags, to, count, logs, rows, memory, need, job, err)) as job:
            job.run(threads)
            if not with_sums:
                return Decoded(out, lse, None)
            selected = job.info().sum_keys
            shape = (problem.heads, selected) if by_head else (selected,)
            got, pointer, many = borrowed.numbers("sums", None, shape)
            job.sums(_abi.KVT_SUMS_BY_HEAD if by_head else 0, pointer, many)
    return Decoded(out, lse, got)


def column_sums(queries: Any, keys: Any, values: Any, lse: Any, *,
                index: Optional[Index] = None, first_query: int = 0, first_key: int = 0,
                scale: float = 0.0, first: int = 0, by_head: bool = True,
                out: Optional[Any] = None, threads: Threads = 1) -> Any:
    """Returns the attention sum of each key over a prompt's queries from `first` on: [query heads,
    keys], or [keys]. `lse` are the log-sum-exps of `prefill`."""
    with Borrowed() as borrowed:
        problem = borrowed.problem(queries, keys, values, index, first_query, first_key, scale)
        _, logs, rows = borrowed.numbers("lse", lse, problem.lse_shape, False)
        shape = (problem.heads, problem.keys) if by_head else (problem.keys,)
        got, to, count = borrowed.numbers("out", out, shape)
        flags = _abi.KVT_SUMS_BY_HEAD if by_head else 0
        with _Job(lambda job, err: lib.kvt_column_sums_open(
                byref(problem.c), logs, rows, u32(first), flags, to, count, job, err)) as job:
            job.run(threads)
    return got


def merge(out: Any, lse: Any, other: Any, other_lse: Any) -> None:
    """Merges attention of the same queries to other keys into `out` and `lse`, in place."""
    with Borrowed() as borrowed:
        rows = described(lse).nbytes // 4
        dim = described(out).nbytes // 4 // max(rows, 1)
        _, to, _ = borrowed.numbers("out", out, (rows, dim))
        _, logs, _ = borrowed.numbers("lse", lse, (rows,))
        _, more, _ = borrowed.numbers("other", other, (rows, dim), False)
        _, more_logs, _ = borrowed.numbers("other_lse", other_lse, (rows,), False)
        err = new_error()
        check_err(lib.kvt_attention_merge(to, logs, more, more_logs, rows, u32(dim), byref(err)),
                  err)


def page_boxes(keys: Any, page_tokens: int, *, boxes: Optional[Any] = None,
               first: int = 0) -> Any:
    """Returns the bounding boxes of pages of keys, [pages, key heads, 2 * key dim]: the minimum
    and maximum of each number. With `boxes` it extends them by keys from position `first` on."""
    with Borrowed() as borrowed:
        rows = borrowed.rows("keys", keys)
        heads, dim = int(rows.view.heads), dim_of(rows)
        if boxes is None:
            if first != 0 or u32(page_tokens) == 0:
                raise _invalid(f"first={first}, page_tokens={page_tokens}: new boxes need first=0 "
                               "and page_tokens of at least 1")
            pages = -(-int(rows.view.tokens) // page_tokens)
        else:
            pages = described(boxes).nbytes // (8 * heads * dim)
        boxes, to, count = borrowed.numbers("boxes", boxes, (pages, heads, 2 * dim))
        err = new_error()
        check_err(lib.kvt_pages_extend(to, count, u32(page_tokens), u32(first), byref(rows),
                                       byref(err)), err)
    return boxes


def page_scores(boxes: Any, queries: Any, *, first: int = 0, count: Optional[int] = None,
                out: Optional[Any] = None) -> Any:
    """Returns an upper bound of each query's product with the keys of each page, computed from
    the page's box: [queries, query heads, count]."""
    with Borrowed() as borrowed:
        pages, asked = borrowed.rows("boxes", boxes), borrowed.rows("queries", queries)
        tokens, heads = int(asked.view.tokens), int(asked.view.heads)
        count = u32(pages.view.tokens - u32(first) if count is None else count)
        scores, to, many = borrowed.numbers("out", out, (tokens, heads, count))
        room = tokens * heads * (2 * dim_of(asked) + 96) + 4096
        scratch, err = (ctypes.c_float * room)(), new_error()
        check_err(lib.kvt_pages_score(byref(pages), byref(asked), u32(first), count, to, many,
                                      scratch, room, byref(err)), err)
    return scores


class BlockPlacement(NamedTuple):
    """The tokens of a buffer: some blocks, ascending, followed by the tail."""

    blocks: Column
    block_tokens: int
    #: The position of the first token of the tail.
    tail_first: int = 0
    tail_tokens: int = 0


def _placed(borrowed: Borrowed, of: BlockPlacement) -> Any:
    c = _abi.kvt_block_placement_t(block_tokens=u32(of.block_tokens), tail_first=u32(of.tail_first),
                          tail_tokens=u32(of.tail_tokens))
    c.blocks, c.block_count = borrowed.column("blocks", "u32", of.blocks)
    return c


def place_index(attention: Attention, placed: BlockPlacement, index: Optional[Index], first: int,
                count: int = 1) -> Tuple[Index, int]:
    """Translates an index of positions (None = all keys) to rows of a buffer, for `count` queries
    from position `first` on. Returns the index of rows, and the row of the first query."""
    shape, row = attention_for_c(attention), ctypes.c_uint32()
    wanted = None if index is None else byref(index._lower())
    with Borrowed() as borrowed:
        there, answer, err = _placed(borrowed, placed), Index._with_room(0, 0, 0), new_error()
        while True:
            out = answer._lower()
            status = lib.kvt_index_place(byref(shape), byref(there), wanted, u32(first),
                                         u32(count), byref(out), byref(row), byref(err))
            if status != _abi.KVT_E_TOO_SMALL:
                check_err(status, err)
                return answer, row.value
            answer = Index._with_room(out.head_count, out.start_count, out.item_count)


def place_column_sums(attention: Attention, tokens: int, placed: BlockPlacement, sums: Any, *,
                      select: Optional[Index] = None, first_query: int = 0, queries: int = 0,
                      kept: Optional[TokenLists] = None, since: int = 0,
                      out: Optional[Any] = None) -> Any:
    """Adds attention sums of a buffer's rows to those of the kept tokens, as `Sparse.observe`
    takes them: [query heads, tokens]. `kept` is the argument of the last
    `Sparse.commit_eviction`; tokens from `since` on are newer. With `select` the sums are those of
    `decode`."""
    lists = 0 if kept is None else len(kept.starts) - 1
    stayed = kept.items.nbytes // 4 // lists if kept is not None and lists > 0 else 0
    c = _abi.kvt_resident_tokens_t(tokens=u32(tokens), since=u32(since))
    c.attention = ctypes.pointer(attention_for_c(attention))
    if kept is not None:
        c.kept = ctypes.pointer(kept._lower())
    by = None if select is None else byref(select._lower())
    with Borrowed() as borrowed:
        there = _placed(borrowed, placed)
        count = described(sums).nbytes // 4
        _, given, _ = borrowed.numbers("sums", sums, (count,), False)
        shape = attention.query_heads, max(stayed + tokens - since, 0)
        out, to, room = borrowed.numbers("out", out, shape)
        err = new_error()
        check_err(lib.kvt_column_sums_place(byref(c), byref(there), by, u32(first_query), u32(queries),
                                     given, count, to, room, byref(err)), err)
    return out


def check_rows(rows: Any) -> None:
    """Raises `InvalidError` unless all numbers are finite. Kernels do not check this."""
    with Borrowed() as borrowed:
        given, err = borrowed.rows("rows", rows), new_error()
        check_err(lib.kvt_rows_check(byref(given), byref(err)), err)


def pack_index(index: Index, kernel: Any, address: int) -> bytes:
    """Encodes an index for a device's kernel of kind `abi.KVT_DEVICE_KERNEL_PREFILL`.

    The kernel's query_count, query_heads, key_heads, tokens and first must be set; the call
    sets its count, numbers, counts, index and scratch_bytes. The caller copies the returned
    bytes to `address`."""
    c, need = index._lower(), ctypes.c_uint64()
    heads = c.head_count * ctypes.sizeof(_abi.kvt_index_head_t)
    room = (ctypes.c_uint8 * (heads + 4 * (c.start_count + c.item_count)))()
    err = new_error()
    check_err(lib.kvt_kernel_pack_index(byref(c), byref(kernel), u64(address), room, len(room),
                                   byref(need), byref(err)), err)
    return bytes(room)[: need.value]
