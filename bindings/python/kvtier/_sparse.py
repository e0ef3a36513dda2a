"""Sparse policies alone, for engines that keep KV themselves: by name, or of one's own."""

from __future__ import annotations

import ctypes
import enum
import threading
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from . import _abi, _callbacks, _columns, _reaper
from ._budget import Account
from ._columns import Column
from ._errors import Error
from ._kernels import Attended, Index, TokenLists, Lent, Rows, u32_room
from ._lib import check, check_err, lib, text_pointer, u32
from ._offload import Attention, Context, attention_for_c, context_for_c
from ._policy import PolicyInfo, check_asked
from ._resource import Resource, byref, new_error


class SparseCaps(enum.IntFlag):
    """What a policy can do, for prompts and for text."""

    #: Which blocks to load.
    LOAD_PREFILL = _abi.KVT_SPARSE_LOAD_PREFILL
    LOAD_DECODE = _abi.KVT_SPARSE_LOAD_DECODE
    #: Which keys to compute with.
    INDEX_PREFILL = _abi.KVT_SPARSE_INDEX_PREFILL
    INDEX_DECODE = _abi.KVT_SPARSE_INDEX_DECODE
    #: Which tokens stay.
    EVICT_PREFILL = _abi.KVT_SPARSE_EVICT_PREFILL
    EVICT_DECODE = _abi.KVT_SPARSE_EVICT_DECODE


class SparseNeeds(enum.IntFlag):
    """What a policy has to be told."""

    KEYS = _abi.KVT_NEEDS_KEYS
    QUERIES = _abi.KVT_NEEDS_QUERIES
    #: `Sparse.observe`.
    COLUMN_SUMS = _abi.KVT_NEEDS_COLUMN_SUMS
    #: The query of the layer `ahead` before.
    NEXT_QUERY = _abi.KVT_NEEDS_NEXT_QUERY
    #: `Sparse.score`: a score a candidate.
    SCORES = _abi.KVT_NEEDS_SCORES
    VALUES = _abi.KVT_NEEDS_VALUES
    #: `Sparse.score`: a weight for each query and head.
    WEIGHTS = _abi.KVT_NEEDS_WEIGHTS
    #: All keys of the sequence, for `Sparse.index`.
    ALL_KEYS = _abi.KVT_NEEDS_ALL_KEYS


class SparseScope(enum.IntEnum):
    """For whom an answer is."""

    QUERY_HEAD = _abi.KVT_SCOPE_QUERY_HEAD
    KEY_HEAD = _abi.KVT_SCOPE_KEY_HEAD
    LAYER = _abi.KVT_SCOPE_LAYER


class SparseGranularity(enum.IntEnum):
    """What an answer names."""

    TOKEN = _abi.KVT_GRANULARITY_TOKEN
    BLOCK = _abi.KVT_GRANULARITY_BLOCK


class SparseTraits(NamedTuple):
    """What a policy is like."""

    caps: SparseCaps
    needs: SparseNeeds = SparseNeeds(0)
    scope: SparseScope = SparseScope.LAYER
    granularity: SparseGranularity = SparseGranularity.BLOCK
    #: Heads keep different numbers of tokens.
    ragged: bool = False
    #: Loads are restricted to what it selects; without, all is loaded.
    selects: bool = False
    #: Keys are to be turned to the places that they have in the cache.
    rotates: bool = False
    dense_layers: int = 0
    #: Sums of attention are wanted of so many last queries; 2**32 - 1 = of all.
    sum_queries: int = 0
    ahead: int = 0
    #: Heads and numbers of rows of its own, where they are not the model's.
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
    swift = True

    def __init__(self, handle: _abi.kvt_sparse_p) -> None:
        super().__init__(handle, _reaper.RANK_BUFFER)

    def attempt(self) -> int:
        return int(lib.kvt_sparse_close(byref(self.handle)))


def sparse_policies() -> List[PolicyInfo]:
    """The sparse policies that can be opened.

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
    """A sparse policy for one sequence: from a spec such as "quest(budget=2048)", or of one's
    own. Any thread may use it, one at a time: a call that comes while another is inside is a
    `BusyError`. `account` pays for what it keeps.

    A policy of one's own is any object with `traits`, a `SparseTraits`, and those of these
    methods that they promise::

        on_prefill_offload(block, layer, first, keys)   on_decode_offload(block, first, keys)
        select_blocks(layer, query, candidates, at)     index(layer, queries, keys, at)
        sparse_prefill_attention(layer, queries, keys, values, at, out, lse)
        observe(layer, queries, sums, tokens)           evict(layer, at)
        evicted(layer, keep)     truncate(tokens)       fork()

    Keys, queries and values are `Rows`, keys of `on_decode_offload` a list of them; `out` and
    `lse` (which may be None) are f32 to write to. `select_blocks` returns ids, `index` an
    `Index`, `evict` a `TokenLists`, or None where all stays, `fork` the policy of the copy. What they
    are handed ends with the call, and in it calls on this policy are a `BusyError`. What they
    raise is the `__cause__` of the error of the call that led there. One that keeps its
    `Sparse` stays until that is closed.

    >>> import kvtier
    >>> shape = kvtier.Attention(layers=1, query_heads=2, key_heads=1, key_dim=8, value_dim=8,
    ...                          block_tokens=4, max_tokens=64)
    >>> with kvtier.Sparse(shape, "streaming(sinks=2,recent=4)") as policy:
    ...     policy.evict(0, kvtier.Context(tokens=12, first_query=11)).lists()
    [[0, 1, 8, 9, 10, 11]]
    """

    _noun = "sparse policy"

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
        #: An index comes in two calls: nobody else's question comes between them.
        self._lock = threading.RLock()
        self._own(SparseJob(handle))

    def fork(self) -> "Sparse":
        """A copy for a sequence that goes on from here. The same account pays."""
        handle = _abi.kvt_sparse_p()
        self._told(lambda raw, err: lib.kvt_sparse_fork(raw, byref(handle), err))
        copy = Sparse.__new__(Sparse)
        copy._adopt(handle, self._attention, self._account)
        return copy

    @property
    def traits(self) -> SparseTraits:
        """What it is like."""
        c = _abi.kvt_sparse_traits_t()
        check(lib.kvt_sparse_traits(self._raw, byref(c)))
        named: Dict[str, Any] = {
            name: bool(c.flags & _FLAGS[name]) if name in _FLAGS else getattr(c, name)
            for name in SparseTraits._fields}
        named.update(caps=SparseCaps(c.caps), needs=SparseNeeds(c.needs),
                     scope=SparseScope(c.scope), granularity=SparseGranularity(c.granularity))
        return SparseTraits(**named)

    def stats(self) -> Dict[str, int]:
        """What it has chosen, and what it keeps."""
        c = _abi.kvt_sparse_stats_t()
        check(lib.kvt_sparse_stats(self._raw, byref(c)))
        names = [name for name, *_ in c._fields_ if name != "struct_size"]
        return {name: int(getattr(c, name)) for name in names}

    def append(self, layer: int, first: int, keys: Any) -> None:
        """Keys of tokens have been computed: the policy's own rows, if its traits have some."""
        with Lent() as lent:
            rows = lent.rows("keys", keys)
            self._told(lambda raw, err: lib.kvt_sparse_append(
                raw, u32(layer), u32(first), byref(rows), err))

    def seal(self, layer: int, block: int, first: int, keys: Any) -> None:
        """A block of a layer is about to be moved away; `block` is how candidates name it."""
        with Lent() as lent:
            rows = lent.rows("keys", keys)
            self._told(lambda raw, err: lib.kvt_sparse_add_block(
                raw, u32(layer), u32(block), u32(first), byref(rows), err))

    def seal_all(self, block: int, first: int, keys: Sequence[Any]) -> None:
        """A block that was written token by token is complete: its keys, of each layer."""
        with Lent() as lent:
            rows = (_abi.kvt_rows_t * len(keys))(*(lent.rows("keys", one) for one in keys))
            size = ctypes.sizeof(_abi.kvt_rows_t)
            self._told(lambda raw, err: lib.kvt_sparse_seal_all(
                raw, u32(block), u32(first), rows, len(keys), size, err))

    def observe(self, layer: int, queries: int, sums: Column, tokens: int) -> None:
        """What each kept key got of the attention of so many queries: `tokens` numbers for
        each query head, or once for all."""
        with Lent() as lent:
            given, count = lent.column("sums", "f32", sums)
            self._told(lambda raw, err: lib.kvt_sparse_observe(
                raw, u32(layer), u32(queries), given, count, u32(tokens), err))

    def score(self, layer: int, scores: Column) -> None:
        """Numbers for the next question about a layer: a score a candidate, or a weight for
        each query and head."""
        with Lent() as lent:
            given, count = lent.column("scores", "f32", scores)
            self._told(lambda raw, err: lib.kvt_sparse_add_scores(raw, u32(layer), given, count, err))

    def truncate(self, tokens: int) -> None:
        """The sequence has so many tokens now."""
        self._told(lambda raw, err: lib.kvt_sparse_truncate(raw, u32(tokens), err))

    def reset(self) -> None:
        """The sequence begins anew."""
        self._told(lambda raw, err: lib.kvt_sparse_reset(raw))

    def save(self, layer: int, block: int) -> bytes:
        """What it knows of a block, to be kept beside it; empty where it keeps nothing
        there."""
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
        """What was saved of a block, which came back. It may be anyone's bytes."""
        with Lent() as lent:
            given, count = lent.column("data", "u8", memoryview(data).cast("B"))
            self._told(lambda raw, err: lib.kvt_sparse_load(
                raw, u32(layer), u32(block), u32(first), given, count, err))

    def select(self, layer: int, query: Optional[Any], candidates: Column,
               at: Context) -> List[int]:
        """Which candidates are to be loaded for a query, ascending; all where there is
        none."""
        c, chosen = context_for_c(at), ctypes.c_uint64()
        with Lent() as lent:
            rows = None if query is None else lent.rows("queries", query)
            given, count = lent.column("candidates", "u32", candidates)
            ids = (ctypes.c_uint32 * count)()
            self._told(lambda raw, err: lib.kvt_sparse_select(
                raw, u32(layer), None if rows is None else byref(rows), given, count, byref(c),
                ids, count, byref(chosen), err))
        return list(ids[: chosen.value])

    def index(self, layer: int, queries: Any, at: Context, *, keys: Optional[Any] = None) -> Index:
        """Which keys queries are computed with; `keys` are all of the sequence, where the
        traits want them."""
        c = context_for_c(at)
        with Lent() as lent:
            asked = lent.rows("queries", queries)
            there = None if keys is None else lent.rows("keys", keys)
            return self._index(lambda raw, out, err: lib.kvt_sparse_index(
                raw, u32(layer), byref(asked), None if there is None else byref(there), byref(c),
                out, err))

    def last_index(self) -> Index:
        """The last index, again."""
        return self._index(lib.kvt_sparse_last_index)

    def evict(self, layer: int, at: Context) -> Optional[TokenLists]:
        """Which tokens stay, if some have to go; None: all stay. Nothing has gone before
        `evicted` says so."""
        c, some = context_for_c(at), ctypes.c_uint32()
        return self._keep(lambda raw, out, err: lib.kvt_sparse_plan_eviction(
            raw, u32(layer), byref(c), out, byref(some), err))

    def last_kept(self) -> Optional[TokenLists]:
        """What `evict` answered last, again."""
        return self._keep(lib.kvt_sparse_last_retained)

    def _keep(self, call: Callable[[Any, Any, Any], int]) -> Optional[TokenLists]:
        keep = TokenLists(u32_room(65), u32_room(4096))
        with self._lock:
            while True:
                out, err = keep._lower(), new_error()
                status = call(self._raw, byref(out), byref(err))
                if status != _abi.KVT_E_TOO_SMALL:
                    check_asked(status, err, _WHO)
                    if not out.start_count:
                        return None
                    return TokenLists(keep.starts[: out.start_count], keep.items[: out.item_count])
                lib.kvt_error_free(byref(err))
                keep = TokenLists(u32_room(out.start_count), u32_room(out.item_count))
                call = lib.kvt_sparse_last_retained

    def evicted(self, layer: int, keep: TokenLists) -> None:
        """These tokens are all there is now of a layer."""
        c = keep._lower()
        self._told(lambda raw, err: lib.kvt_sparse_commit_eviction(raw, u32(layer), byref(c), err))

    def prefill_attention(self, layer: int, queries: Any, keys: Any, values: Any, at: Context, *,
                          out: Optional[Any] = None, lse: Optional[Any] = None) -> Attended:
        """Attention of a prompt as the policy wants it, on this thread. For more threads:
        `index`, and `kernels.prefill`."""
        c = context_for_c(at)
        with Lent() as lent:
            problem = lent.problem(queries, keys, values, None, 0, 0, 0.0)
            out, to, count = lent.numbers("out", out, problem.out_shape)
            lse, logs, rows = lent.numbers("lse", lse, problem.lse_shape)
            self._told(lambda raw, err: lib.kvt_sparse_prefill_attention(
                raw, u32(layer), problem.c.queries, problem.c.keys, problem.c.values, byref(c),
                to, count, logs, rows, err))
        return Attended(out, lse)

    def close(self) -> None:
        """Closes it."""
        if self.closed:
            return
        self._raw  # noqa: B018: not in a forked child
        check(lib.kvt_sparse_close(byref(self._job.handle)))
        self._released()

    def _told(self, call: Callable[[Any, Any], int]) -> None:
        err = new_error()
        check_asked(call(self._raw, byref(err)), err, _WHO)

    def _index(self, call: Callable[[Any, Any, Any], int]) -> Index:
        with self._lock:
            c, err = _abi.kvt_index_t(), new_error()
            status = call(self._raw, byref(c), byref(err))
            if status != _abi.KVT_E_TOO_SMALL:
                check_asked(status, err, _WHO)
            lib.kvt_error_free(byref(err))
            index = Index._with_room(c.head_count, c.start_count, c.item_count)
            c = index._lower()
            check_err(lib.kvt_sparse_last_index(self._raw, byref(c), byref(err)), err)
            return index


_WHO = "the policy"


class _Own:
    """A policy of the user's own, and the answer that C reads until its next question."""

    def __init__(self, policy: Any, attention: Attention) -> None:
        self.policy, self.attention = policy, attention
        self.answer: Any = None


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
    """The table of C for a policy of the user's own; its number is C's on success only."""
    traits = _lower(policy.traits)
    custom = _abi.kvt_sparse_custom_t(destroy=_callbacks.on_destroy)
    custom.traits = ctypes.pointer(traits)
    for name, function in _FUNCTIONS.items():
        if getattr(policy, name, None) is not None:
            setattr(custom, name, function)
    number = _callbacks.register(_Own(policy, attention))
    custom.user_data = number
    return custom, number


def _gathered(at: Any) -> memoryview:
    """Rows that have gaps, without them."""
    heads, run = at.heads or 1, at.run_bytes
    head_step = at.head_stride_bytes or run
    step, all_of_them = at.token_stride_bytes or heads * run, bytearray()
    for token in range(at.tokens):
        start = at.address
        if at.pages:
            page, token = divmod(token, at.page_tokens)
            start = at.pages[page] + at.shift_bytes
        for head in range(heads):
            all_of_them += ctypes.string_at(start + token * step + head * head_step, run)
    return memoryview(all_of_them)


def _rows(c: Any) -> Rows:
    """Rows of C's: the memory itself where it has no gaps."""
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


def _maybe(rows: Any) -> Optional[Rows]:
    return _rows(rows.contents) if rows else None


def _at(c: Any) -> Context:
    at = c.contents
    return Context(at.tokens, at.first_query, bool(at.is_prefill), at.part, at.parts)


def _on_prefill_offload(own: _Own, block: int, layer: int, first: int, keys: Any) -> None:
    own.policy.on_prefill_offload(block, layer, first, _rows(keys.contents))


def _on_decode_offload(own: _Own, block: int, first: int, keys: Any, layers: int) -> None:
    # A newer library's entries may be longer.
    size, start = keys.contents.struct_size, ctypes.cast(keys, ctypes.c_void_p).value or 0
    each = [_rows(_abi.kvt_rows_t.from_address(start + i * size)) for i in range(layers)]
    own.policy.on_decode_offload(block, first, each)


def _select_blocks(own: _Own, layer: int, query: Any, candidates: Any, count: int, at: Any,
                   ids: Any, count_out: Any) -> None:
    among = _columns.view("u32", candidates, count)
    chosen = own.policy.select_blocks(layer, _maybe(query), among, _at(at))
    if len(chosen) > count:
        raise ValueError(f"{len(chosen)} blocks chosen of {count} candidates")
    for place, block in enumerate(chosen):
        ids[place] = u32(block)
    count_out[0] = len(chosen)


def _index(own: _Own, layer: int, queries: Any, keys: Any, at: Any, out: Any) -> None:
    own.answer = own.policy.index(layer, _rows(queries.contents), _maybe(keys), _at(at))
    if not isinstance(own.answer, Index):
        raise TypeError(f"index returned {own.answer!r}, which is no Index")
    own.answer._fill(out.contents)


def _attend(own: _Own, layer: int, queries: Any, keys: Any, values: Any, at: Any, out: Any,
            lse: Any) -> None:
    rows, shape = [_rows(one.contents) for one in (queries, keys, values)], own.attention
    size = queries.contents.view.tokens * shape.query_heads
    to = _columns.view("f32", out, size * shape.value_dim, writable=True)
    logs = _columns.view("f32", lse, size, writable=True) if lse else None
    own.policy.sparse_prefill_attention(layer, *rows, _at(at), to, logs)


def _observe(own: _Own, layer: int, queries: int, sums: Any, count: int, tokens: int) -> None:
    own.policy.observe(layer, queries, _columns.view("f32", sums, count), tokens)


def _evict(own: _Own, layer: int, at: Any, out: Any) -> None:
    own.answer = own.policy.evict(layer, _at(at))
    if own.answer is None:
        return
    if not isinstance(own.answer, TokenLists):
        raise TypeError(f"evict returned {own.answer!r}, which is no TokenLists")
    own.answer._fill(out.contents)


def _evicted(own: _Own, layer: int, kept: Any) -> None:
    c = kept.contents
    own.policy.evicted(layer, TokenLists(_columns.view("u32", c.starts, c.start_count),
                                   _columns.view("u32", c.items, c.item_count)))


def _truncate(own: _Own, tokens: int) -> None:
    own.policy.truncate(tokens)


def _fork(own: _Own, copy_out: Any) -> None:
    copy_out[0] = _callbacks.register(_Own(own.policy.fork(), own.attention))


def _ask(ask: Callable[..., None], own: _Own, args: Sequence[Any]) -> bool:
    ask(own, *args)
    return True


def _called(kind: Any, ask: Callable[..., None]) -> Any:
    """A function for C that asks the policy of a number."""

    def call(number: int, *args: Any) -> int:
        own = _callbacks.find(number)
        if own is None:
            return _abi.KVT_E_CLOSED
        if _callbacks.call_and_keep(_ask, ask, own, args):
            return _abi.KVT_OK
        raised = _callbacks.raised()
        return raised.status if isinstance(raised, Error) else _abi.KVT_E_STATE

    return kind(call)


#: What C is given for each method that a policy has; they live as long as the module.
_FUNCTIONS: Dict[str, Any] = {
    "on_prefill_offload": _called(_abi.kvt_on_prefill_offload_fn, _on_prefill_offload),
    "on_decode_offload": _called(_abi.kvt_on_decode_offload_fn, _on_decode_offload),
    "select_blocks": _called(_abi.kvt_select_blocks_fn, _select_blocks),
    "index": _called(_abi.kvt_sparse_index_fn, _index),
    "sparse_prefill_attention": _called(_abi.kvt_sparse_attention_fn, _attend),
    "observe": _called(_abi.kvt_sparse_observe_fn, _observe),
    "evict": _called(_abi.kvt_sparse_evict_fn, _evict),
    "evicted": _called(_abi.kvt_sparse_evicted_fn, _evicted),
    "truncate": _called(_abi.kvt_sparse_truncate_fn, _truncate),
    "fork": _called(_abi.kvt_sparse_fork_fn, _fork),
}
