"""Sparse policies without a store, for engines that keep KV themselves: built-in or custom."""

from __future__ import annotations

import ctypes
import enum
import threading
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from . import _abi, _callbacks, _columns, _reaper
from ._budget import Account
from ._columns import Column
from ._errors import Error
from ._kernels import Attended, Borrowed, Index, Rows, TokenLists, u32_room
from ._lib import check, check_err, lib, text_pointer, u32
from ._offload import Attention, SparseContext, attention_for_c, context_for_c
from ._policy import PolicyInfo, check_with_cause
from ._resource import Resource, byref, new_error


class SparseCaps(enum.IntFlag):
    """The decisions that a policy can make, in prefill and in decode."""

    #: Chooses the blocks to load.
    LOAD_PREFILL = _abi.KVT_SPARSE_LOAD_PREFILL
    LOAD_DECODE = _abi.KVT_SPARSE_LOAD_DECODE
    #: Chooses the keys to compute with.
    INDEX_PREFILL = _abi.KVT_SPARSE_INDEX_PREFILL
    INDEX_DECODE = _abi.KVT_SPARSE_INDEX_DECODE
    #: Chooses the tokens to keep.
    EVICT_PREFILL = _abi.KVT_SPARSE_EVICT_PREFILL
    EVICT_DECODE = _abi.KVT_SPARSE_EVICT_DECODE


class SparseNeeds(enum.IntFlag):
    """The inputs that a policy needs."""

    KEYS = _abi.KVT_NEEDS_KEYS
    QUERIES = _abi.KVT_NEEDS_QUERIES
    #: `Sparse.observe`.
    COLUMN_SUMS = _abi.KVT_NEEDS_COLUMN_SUMS
    #: The query of the layer that is `ahead` layers earlier.
    NEXT_QUERY = _abi.KVT_NEEDS_NEXT_QUERY
    #: `Sparse.add_scores`: a score per candidate.
    SCORES = _abi.KVT_NEEDS_SCORES
    VALUES = _abi.KVT_NEEDS_VALUES
    #: `Sparse.add_scores`: a weight per query and head.
    WEIGHTS = _abi.KVT_NEEDS_WEIGHTS
    #: All keys of the sequence, for `Sparse.index`.
    ALL_KEYS = _abi.KVT_NEEDS_ALL_KEYS


class SparseScope(enum.IntEnum):
    """The heads that one decision of a policy covers."""

    QUERY_HEAD = _abi.KVT_SCOPE_QUERY_HEAD
    KEY_HEAD = _abi.KVT_SCOPE_KEY_HEAD
    LAYER = _abi.KVT_SCOPE_LAYER


class SparseGranularity(enum.IntEnum):
    """The unit of a policy's decisions."""

    TOKEN = _abi.KVT_GRANULARITY_TOKEN
    BLOCK = _abi.KVT_GRANULARITY_BLOCK


class SparseTraits(NamedTuple):
    """The properties of a policy."""

    caps: SparseCaps
    needs: SparseNeeds = SparseNeeds(0)
    scope: SparseScope = SparseScope.LAYER
    granularity: SparseGranularity = SparseGranularity.BLOCK
    #: Heads keep different numbers of tokens.
    ragged: bool = False
    #: Only selected blocks are loaded; otherwise all are.
    selects: bool = False
    #: Keys must be rotated to their positions in the cache.
    rotates: bool = False
    dense_layers: int = 0
    #: The number of last queries whose attention sums the policy needs; 2**32 - 1 = all.
    sum_queries: int = 0
    ahead: int = 0
    #: Heads and size of the policy's own rows, if they differ from the model's.
    own_query_heads: int = 0
    own_key_heads: int = 0
    own_dim: int = 0


_FLAGS = {"ragged": _abi.KVT_SPARSE_RAGGED, "selects": _abi.KVT_SPARSE_SELECTS,
          "rotates": _abi.KVT_SPARSE_ROTATES}
_DTYPES = {_abi.KVT_DTYPE_F32: ("f32", "f", 4), _abi.KVT_DTYPE_F16: ("f16", "H", 2),
           _abi.KVT_DTYPE_BF16: ("bf16", "H", 2), _abi.KVT_DTYPE_I8: ("int8", "b", 1)}


class SparseJob(_reaper.Job):
    """Closes a sparse policy."""

    __slots__ = ()
    nonblocking = True

    def __init__(self, handle: _abi.kvt_sparse_p) -> None:
        super().__init__(handle, _reaper.RANK_BUFFER)

    def attempt(self) -> int:
        return int(lib.kvt_sparse_close(byref(self.handle)))


def sparse_policies() -> List[PolicyInfo]:
    """Returns the sparse policies that can be opened.

    >>> import kvtier
    >>> {"quest", "h2o", "streaming"} <= {policy.name for policy in kvtier.sparse_policies()}
    True
    """
    count, found = ctypes.c_uint64(), []
    check(lib.kvt_sparse_count(byref(count)))
    for index in range(count.value):
        out = _abi.kvt_sparse_info_t()
        check(lib.kvt_sparse_info(index, byref(out)))
        name, about = (ctypes.string_at(text, size).decode() for text, size in
                       ((out.name, out.name_bytes), (out.about, out.about_bytes)))
        found.append(PolicyInfo(name, about))
    return found


class Sparse(Resource):
    """A sparse policy for one sequence: from a spec such as "quest(budget=2048)", or custom.

    Any thread may use it, one at a time: a concurrent call raises `BusyError`. The state of the
    policy is charged to `account`.

    A custom policy is any object with `traits`, a `SparseTraits`, and the methods that the traits
    require::

        on_prefill_offload(block, layer, first, keys)   on_decode_offload(block, first, keys)
        select_blocks(layer, query, candidates, at)     index(layer, queries, keys, at)
        sparse_prefill_attention(layer, queries, keys, values, at, out, lse)
        observe(layer, queries, sums, tokens)           evict(layer, at)
        evicted(layer, keep)     truncate(tokens)       fork()

    - Keys, queries and values are `Rows`; the keys of `on_decode_offload` are a list of `Rows`.
      `out` and `lse` are f32 output; `lse` may be None.
    - `select_blocks` returns block ids, and `index` an `Index`. `evict` returns a `TokenLists`, or
      None to keep all tokens. `fork` returns the policy of the copy.
    - Arguments are valid during the call only. Calls on the same policy from inside raise
      `BusyError`.
    - An exception becomes the `__cause__` of the error of the library call.
    - A custom policy that references its `Sparse` lives until the `Sparse` is closed.

    >>> import kvtier
    >>> shape = kvtier.Attention(layers=1, query_heads=2, key_heads=1, key_dim=8, value_dim=8,
    ...                          block_tokens=4, max_tokens=64)
    >>> with kvtier.Sparse(shape, "streaming(sinks=2,recent=4)") as policy:
    ...     policy.plan_eviction(0, kvtier.SparseContext(tokens=12, first_query=11)).lists()
    [[0, 1, 8, 9, 10, 11]]
    """

    _type_name = "sparse policy"

    def __init__(self, attention: Attention, policy: Union[str, Any], *,
                 account: Optional[Account] = None) -> None:
        shape = attention_for_c(attention)
        opts = _abi.kvt_sparse_opts_t()
        opts.attention, number = ctypes.pointer(shape), 0
        if account is not None:
            opts.account = account._raw.value
        if isinstance(policy, str):
            text = policy.encode()
            opts.spec, opts.spec_bytes = text_pointer(text), len(text)
        else:
            custom, number = custom_for_c(policy, attention)
            opts.custom = ctypes.pointer(custom)
        _reaper.arm()
        handle, err = _abi.kvt_sparse_p(), new_error()
        status = lib.kvt_sparse_open(byref(opts), byref(handle), byref(err))
        if status != _abi.KVT_OK and number:
            _callbacks.forget(number)
        check_err(status, err)
        self._adopt(handle, attention, account)

    def _adopt(self, handle: Any, attention: Attention, account: Optional[Account]) -> None:
        self._attention, self._account = attention, account
        #: Reading an index takes two calls: the lock keeps other calls out in between.
        self._lock = threading.RLock()
        self._own(SparseJob(handle))

    def fork(self) -> "Sparse":
        """Returns a copy for a sequence that continues from here, charged to the same account."""
        handle = _abi.kvt_sparse_p()
        self._call(lambda raw, err: lib.kvt_sparse_fork(raw, byref(handle), err))
        copy = Sparse.__new__(Sparse)
        copy._adopt(handle, self._attention, self._account)
        return copy

    @property
    def traits(self) -> SparseTraits:
        """The properties of the policy."""
        c = _abi.kvt_sparse_traits_t()
        check(lib.kvt_sparse_traits(self._raw, byref(c)))
        named: Dict[str, Any] = {
            name: bool(c.flags & _FLAGS[name]) if name in _FLAGS else getattr(c, name)
            for name in SparseTraits._fields}
        named.update(caps=SparseCaps(c.caps), needs=SparseNeeds(c.needs),
                     scope=SparseScope(c.scope), granularity=SparseGranularity(c.granularity))
        return SparseTraits(**named)

    def stats(self) -> Dict[str, int]:
        """Returns counters of decisions, and the size of the state."""
        c = _abi.kvt_sparse_stats_t()
        check(lib.kvt_sparse_stats(self._raw, byref(c)))
        names = [name for name, *_ in c._fields_ if name != "struct_size"]
        return {name: int(getattr(c, name)) for name in names}

    def append(self, layer: int, first: int, keys: Any) -> None:
        """Passes computed keys of tokens: the policy's own rows, if its traits define some."""
        with Borrowed() as borrowed:
            rows = borrowed.rows("keys", keys)
            self._call(lambda raw, err: lib.kvt_sparse_append(
                raw, u32(layer), u32(first), byref(rows), err))

    def add_block(self, layer: int, block: int, first: int, keys: Any) -> None:
        """Passes the keys of a layer's block that is about to be offloaded. `block` is its id
        among candidates."""
        with Borrowed() as borrowed:
            rows = borrowed.rows("keys", keys)
            self._call(lambda raw, err: lib.kvt_sparse_add_block(
                raw, u32(layer), u32(block), u32(first), byref(rows), err))

    def seal_all(self, block: int, first: int, keys: Sequence[Any]) -> None:
        """Passes the keys, one object per layer, of a block that decode has completed."""
        with Borrowed() as borrowed:
            rows = (_abi.kvt_rows_t * len(keys))(*(borrowed.rows("keys", each) for each in keys))
            size = ctypes.sizeof(_abi.kvt_rows_t)
            self._call(lambda raw, err: lib.kvt_sparse_seal_all(
                raw, u32(block), u32(first), rows, len(keys), size, err))

    def observe(self, layer: int, queries: int, sums: Column, tokens: int) -> None:
        """Passes attention sums of kept keys over `queries` queries: `tokens` numbers per query
        head, or once for all heads."""
        with Borrowed() as borrowed:
            given, count = borrowed.column("sums", "f32", sums)
            self._call(lambda raw, err: lib.kvt_sparse_observe(
                raw, u32(layer), u32(queries), given, count, u32(tokens), err))

    def add_scores(self, layer: int, scores: Column) -> None:
        """Sets numbers for the next decision about a layer: a score per candidate, or a weight per
        query and head."""
        with Borrowed() as borrowed:
            given, count = borrowed.column("scores", "f32", scores)
            self._call(lambda raw, err: lib.kvt_sparse_add_scores(raw, u32(layer), given, count, err))

    def truncate(self, tokens: int) -> None:
        """Truncates the sequence to `tokens` tokens."""
        self._call(lambda raw, err: lib.kvt_sparse_truncate(raw, u32(tokens), err))

    def reset(self) -> None:
        """Resets the policy for a new sequence."""
        self._call(lambda raw, err: lib.kvt_sparse_reset(raw))

    def save(self, layer: int, block: int) -> bytes:
        """Returns the policy's state of a block, to be stored with the block; empty if there is
        none."""
        count, room = ctypes.c_uint64(), 4096
        while True:
            data, err = (ctypes.c_uint8 * room)(), new_error()
            status = lib.kvt_sparse_save(self._raw, u32(layer), u32(block), data, room,
                                         byref(count), byref(err))
            if status != _abi.KVT_E_TOO_SMALL:
                check_err(status, err)
                return ctypes.string_at(data, count.value)
            lib.kvt_error_free(byref(err))
            room = count.value

    def load(self, layer: int, block: int, first: int, data: Any) -> None:
        """Restores the saved state of a block that was loaded again. The bytes may be
        untrusted."""
        with Borrowed() as borrowed:
            given, count = borrowed.column("data", "u8", memoryview(data).cast("B"))
            self._call(lambda raw, err: lib.kvt_sparse_load(
                raw, u32(layer), u32(block), u32(first), given, count, err))

    def select(self, layer: int, query: Optional[Any], candidates: Column,
               at: SparseContext) -> List[int]:
        """Returns the candidates to load for a query, ascending; all candidates without a
        query."""
        c, chosen = context_for_c(at), ctypes.c_uint64()
        with Borrowed() as borrowed:
            rows = None if query is None else borrowed.rows("queries", query)
            given, count = borrowed.column("candidates", "u32", candidates)
            ids = (ctypes.c_uint32 * count)()
            self._call(lambda raw, err: lib.kvt_sparse_select(
                raw, u32(layer), None if rows is None else byref(rows), given, count, byref(c),
                ids, count, byref(chosen), err))
        return list(ids[: chosen.value])

    def index(self, layer: int, queries: Any, at: SparseContext, *,
              keys: Optional[Any] = None) -> Index:
        """Returns the keys that queries attend to. `keys` are all keys of the sequence, if the
        traits need them."""
        c = context_for_c(at)
        with Borrowed() as borrowed:
            query_rows = borrowed.rows("queries", queries)
            key_rows = None if keys is None else borrowed.rows("keys", keys)
            return self._index(lambda raw, out, err: lib.kvt_sparse_index(
                raw, u32(layer), byref(query_rows),
                None if key_rows is None else byref(key_rows), byref(c), out, err))

    def last_index(self) -> Index:
        """Returns the last index again."""
        return self._index(lib.kvt_sparse_last_index)

    def plan_eviction(self, layer: int, at: SparseContext) -> Optional[TokenLists]:
        """Returns the tokens to keep if some must be evicted; None: keep all. The eviction takes
        effect with the call of `commit_eviction`."""
        c, some = context_for_c(at), ctypes.c_uint32()
        return self._keep(lambda raw, out, err: lib.kvt_sparse_plan_eviction(
            raw, u32(layer), byref(c), out, byref(some), err))

    def last_retained(self) -> Optional[TokenLists]:
        """Returns the last result of `plan_eviction` again."""
        return self._keep(lib.kvt_sparse_last_retained)

    def _keep(self, call: Callable[[Any, Any, Any], int]) -> Optional[TokenLists]:
        keep = TokenLists(u32_room(65), u32_room(4096))
        with self._lock:
            while True:
                out, err = keep._lower(), new_error()
                status = call(self._raw, byref(out), byref(err))
                if status != _abi.KVT_E_TOO_SMALL:
                    check_with_cause(status, err, _CALLBACK)
                    if not out.start_count:
                        return None
                    return TokenLists(keep.starts[: out.start_count], keep.items[: out.item_count])
                lib.kvt_error_free(byref(err))
                keep = TokenLists(u32_room(out.start_count), u32_room(out.item_count))
                call = lib.kvt_sparse_last_retained

    def commit_eviction(self, layer: int, keep: TokenLists) -> None:
        """Reports that a layer now has only these tokens."""
        c = keep._lower()
        self._call(lambda raw, err: lib.kvt_sparse_commit_eviction(raw, u32(layer), byref(c), err))

    def prefill_attention(self, layer: int, queries: Any, keys: Any, values: Any,
                          at: SparseContext, *, out: Optional[Any] = None,
                          lse: Optional[Any] = None) -> Attended:
        """Computes the attention of a prompt by the policy's index, on this thread. For several
        threads use `index` and `kernels.prefill`."""
        c = context_for_c(at)
        with Borrowed() as borrowed:
            problem = borrowed.problem(queries, keys, values, None, 0, 0, 0.0)
            out, to, count = borrowed.numbers("out", out, problem.out_shape)
            lse, logs, rows = borrowed.numbers("lse", lse, problem.lse_shape)
            self._call(lambda raw, err: lib.kvt_sparse_prefill_attention(
                raw, u32(layer), problem.c.queries, problem.c.keys, problem.c.values, byref(c),
                to, count, logs, rows, err))
        return Attended(out, lse)

    def close(self) -> None:
        """Closes the policy."""
        if self.closed:
            return
        self._raw  # noqa: B018: not in a forked child
        check(lib.kvt_sparse_close(byref(self._job.handle)))
        self._released()

    def _call(self, call: Callable[[Any, Any], int]) -> None:
        err = new_error()
        check_with_cause(call(self._raw, byref(err)), err, _CALLBACK)

    def _index(self, call: Callable[[Any, Any, Any], int]) -> Index:
        with self._lock:
            c, err = _abi.kvt_index_t(), new_error()
            status = call(self._raw, byref(c), byref(err))
            if status != _abi.KVT_E_TOO_SMALL:
                check_with_cause(status, err, _CALLBACK)
            lib.kvt_error_free(byref(err))
            index = Index._with_room(c.head_count, c.start_count, c.item_count)
            c = index._lower()
            check_err(lib.kvt_sparse_last_index(self._raw, byref(c), byref(err)), err)
            return index


#: The name of a callback in messages.
_CALLBACK = "the policy"


class _CustomPolicy:
    """A custom policy, and its last result, which C reads until the next call."""

    def __init__(self, policy: Any, attention: Attention) -> None:
        self.policy, self.attention = policy, attention
        self.result: Any = None


def _lower(traits: SparseTraits) -> Any:
    c = _abi.kvt_sparse_traits_t()
    for name in SparseTraits._fields:
        value = getattr(traits, name)
        if name in _FLAGS:
            c.flags |= _FLAGS[name] if value else 0
        else:
            setattr(c, name, u32(value))
    return c


def custom_for_c(policy: Any, attention: Attention) -> Tuple[Any, int]:
    """Returns the C table of a custom policy, and its callback number. C owns the number only if
    the open succeeds."""
    traits = _lower(policy.traits)
    custom = _abi.kvt_sparse_custom_t(destroy=_callbacks.on_destroy)
    custom.traits = ctypes.pointer(traits)
    for name, function in _FUNCTIONS.items():
        if getattr(policy, name, None) is not None:
            setattr(custom, name, function)
    number = _callbacks.register(_CustomPolicy(policy, attention))
    custom.user_data = number
    return custom, number


def _gathered(at: Any) -> memoryview:
    """Copies rows with gaps to contiguous memory."""
    heads, run = at.heads or 1, at.run_bytes
    head_step = at.head_stride_bytes or run
    step, gathered = at.token_stride_bytes or heads * run, bytearray()
    for token in range(at.tokens):
        start = at.address
        if at.pages:
            page, token = divmod(token, at.page_tokens)
            start = at.pages[page] + at.shift_bytes
        for head in range(heads):
            gathered += ctypes.string_at(start + token * step + head * head_step, run)
    return memoryview(gathered)


def _rows(c: Any) -> Rows:
    """Converts rows from C. Contiguous rows are not copied."""
    at = c.view
    name, code, size = _DTYPES[c.dtype]
    heads, run = at.heads or 1, at.run_bytes
    dense = (not at.pages and at.head_stride_bytes in (0, run)
             and at.token_stride_bytes in (0, heads * run))
    view: Any = (_columns.view("u8", at.address, at.tokens * heads * run) if dense
                 else _gathered(at))
    view = view.cast("B").cast(code, shape=[at.tokens, heads, run // size])
    if not c.scale_count:
        return Rows(view, name)
    scaling = "token" if c.scaling == _abi.KVT_SCALES_TOKEN else "channel"
    return Rows(view, name, _columns.view("f32", c.scales, c.scale_count), scaling)


def _optional_rows(rows: Any) -> Optional[Rows]:
    return _rows(rows.contents) if rows else None


def _context(c: Any) -> SparseContext:
    at = c.contents
    return SparseContext(at.tokens, at.first_query, bool(at.is_prefill), at.part, at.parts)


def _on_prefill_offload(custom: _CustomPolicy, block: int, layer: int, first: int,
                        keys: Any) -> None:
    custom.policy.on_prefill_offload(block, layer, first, _rows(keys.contents))


def _on_decode_offload(custom: _CustomPolicy, block: int, first: int, keys: Any,
                       layers: int) -> None:
    # A newer library's entries may be longer.
    size, start = keys.contents.struct_size, ctypes.cast(keys, ctypes.c_void_p).value or 0
    each = [_rows(_abi.kvt_rows_t.from_address(start + i * size)) for i in range(layers)]
    custom.policy.on_decode_offload(block, first, each)


def _select_blocks(custom: _CustomPolicy, layer: int, query: Any, candidates: Any, count: int,
                   at: Any, ids: Any, count_out: Any) -> None:
    among = _columns.view("u32", candidates, count)
    chosen = custom.policy.select_blocks(layer, _optional_rows(query), among, _context(at))
    if len(chosen) > count:
        raise ValueError(f"select_blocks returned {len(chosen)} blocks for {count} candidates: "
                         "return each candidate at most once")
    for place, block in enumerate(chosen):
        ids[place] = u32(block)
    count_out[0] = len(chosen)


def _index(custom: _CustomPolicy, layer: int, queries: Any, keys: Any, at: Any,
           out: Any) -> None:
    custom.result = custom.policy.index(layer, _rows(queries.contents), _optional_rows(keys),
                                        _context(at))
    if not isinstance(custom.result, Index):
        raise TypeError(f"index returned {custom.result!r}: it must return a kvtier.Index")
    custom.result._fill(out.contents)


def _attend(custom: _CustomPolicy, layer: int, queries: Any, keys: Any, values: Any, at: Any,
            out: Any, lse: Any) -> None:
    rows, shape = [_rows(each.contents) for each in (queries, keys, values)], custom.attention
    size = queries.contents.view.tokens * shape.query_heads
    to = _columns.view("f32", out, size * shape.value_dim, writable=True)
    logs = _columns.view("f32", lse, size, writable=True) if lse else None
    custom.policy.sparse_prefill_attention(layer, *rows, _context(at), to, logs)


def _observe(custom: _CustomPolicy, layer: int, queries: int, sums: Any, count: int,
             tokens: int) -> None:
    custom.policy.observe(layer, queries, _columns.view("f32", sums, count), tokens)


def _evict(custom: _CustomPolicy, layer: int, at: Any, out: Any) -> None:
    custom.result = custom.policy.evict(layer, _context(at))
    if custom.result is None:
        return
    if not isinstance(custom.result, TokenLists):
        raise TypeError(f"evict returned {custom.result!r}: it must return a kvtier.TokenLists or "
                        "None")
    custom.result._fill(out.contents)


def _evicted(custom: _CustomPolicy, layer: int, kept: Any) -> None:
    c = kept.contents
    custom.policy.evicted(layer, TokenLists(_columns.view("u32", c.starts, c.start_count),
                                            _columns.view("u32", c.items, c.item_count)))


def _truncate(custom: _CustomPolicy, tokens: int) -> None:
    custom.policy.truncate(tokens)


def _fork(custom: _CustomPolicy, copy_out: Any) -> None:
    copy_out[0] = _callbacks.register(_CustomPolicy(custom.policy.fork(), custom.attention))


def _invoke(method: Callable[..., None], custom: _CustomPolicy, args: Sequence[Any]) -> bool:
    method(custom, *args)
    return True


def _callback(kind: Any, method: Callable[..., None]) -> Any:
    """Returns a C function that calls a method of the custom policy with the given number."""

    def call(number: int, *args: Any) -> int:
        custom = _callbacks.find(number)
        if custom is None:
            return _abi.KVT_E_CLOSED
        if _callbacks.call_and_keep(_invoke, method, custom, args):
            return _abi.KVT_OK
        raised = _callbacks.raised()
        return raised.status if isinstance(raised, Error) else _abi.KVT_E_STATE

    return kind(call)


#: The C function of each method of a custom policy. They live as long as the module.
_FUNCTIONS: Dict[str, Any] = {
    "on_prefill_offload": _callback(_abi.kvt_on_prefill_offload_fn, _on_prefill_offload),
    "on_decode_offload": _callback(_abi.kvt_on_decode_offload_fn, _on_decode_offload),
    "select_blocks": _callback(_abi.kvt_select_blocks_fn, _select_blocks),
    "index": _callback(_abi.kvt_sparse_index_fn, _index),
    "sparse_prefill_attention": _callback(_abi.kvt_sparse_attention_fn, _attend),
    "observe": _callback(_abi.kvt_sparse_observe_fn, _observe),
    "evict": _callback(_abi.kvt_sparse_evict_fn, _evict),
    "evicted": _callback(_abi.kvt_sparse_evicted_fn, _evicted),
    "truncate": _callback(_abi.kvt_sparse_truncate_fn, _truncate),
    "fork": _callback(_abi.kvt_sparse_fork_fn, _fork),
}
