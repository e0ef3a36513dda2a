"""PolicyContext leaves first: an eviction policy, on the library's table or on one's own."""

from __future__ import annotations

import ctypes
import itertools
import math
import operator
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from . import _abi, _callbacks, _reaper
from ._columns import Column, Columns, ids_of, view
from ._errors import Error, make
from ._lib import check, check_err, lib, quick, text_pointer, u32, u64
from ._resource import Resource, byref, new_error

#: Why a sequence stopped.
STOP_UNKNOWN = _abi.KVT_STOP_UNKNOWN
STOP_TOOL_USE = _abi.KVT_STOP_TOOL_USE
STOP_END_TURN = _abi.KVT_STOP_END_TURN
STOP_LENGTH = _abi.KVT_STOP_LENGTH
STOP_CANCELLED = _abi.KVT_STOP_CANCELLED

#: Sequence, length, maximum length; returns seconds and confidence, or None.
Predictor = Callable[[int, int, int], Optional[Tuple[float, float]]]
#: The candidates' columns by name, each a read-only memoryview, and the time in ns;
#: returns a score each, the least leaves first. The views end with the call.
Scorer = Callable[[Dict[str, Any], int], Sequence[float]]

#: The type of each column that a selection takes.
COLUMNS: Dict[str, str] = {
    "ids": "u64", "blocks": "u64", "created_ns": "i64", "last_access_ns": "i64",
    "count": "u64", "priority": "u8", "pinned": "u8", "lifetime_ns": "i64",
    "confidence": "f32", "length": "u64", "max_length": "u64", "refs": "u32",
    "tenant": "u32", "cost": "f64", "context": "u64", "tokens": "u64", "layer": "u32",
    "layers": "u32", "chunk": "u32", "chunks": "u32",
}


class _Answer(ctypes.Structure):
    """A number and an error, in one piece: two would take as long again."""

    _fields_ = [("out", ctypes.c_uint64), ("err", ctypes.c_void_p)]


_lookup, _touch = quick("kvt_policy_lookup"), quick("kvt_policy_touch")


class PolicyInfo(NamedTuple):
    """A policy that can be opened."""

    name: str
    about: str


class Victim(NamedTuple):
    """One that leaves."""

    id: int
    units: int


class Eviction(NamedTuple):
    """What an eviction came to."""

    victims: List[Victim]
    freed_units: int
    shortfall_units: int
    decision_ns: int
    decided_by: str


class Pick(NamedTuple):
    """A candidate that was chosen: it leaves, or keeps its first blocks."""

    row: int
    id: int
    freed_blocks: int
    kept_blocks: int
    #: The blocks that are free by it, where the candidates list blocks.
    block_ids: Tuple[int, ...]


class Selection(NamedTuple):
    """What was chosen among candidates."""

    victims: List[Pick]
    freed_blocks: int
    shortfall_blocks: int
    decision_ns: int
    decided_by: str


class LogEntry(NamedTuple):
    """An eviction in the log."""

    number: int
    at_ns: int
    id: int
    session: Optional[int]
    stamp_ns: int
    score: float
    units: int
    hits: int
    queue: int
    policy: str


class Advice(NamedTuple):
    """What a scheduler is advised."""

    batch: int
    re_prefill_rate: float
    evictions: int


class Row(NamedTuple):
    """An object to be inserted."""

    id: int
    units: int = 1
    parent: Optional[int] = None
    tokens: int = 0
    context: int = 0
    layer: int = 0
    layers: int = 0
    chunk: int = 0
    chunks: int = 0
    cost: float = 0.0
    next_use_ns: int = 0


class PolicyContext(NamedTuple):
    """PolicyContext asks."""

    session: Optional[int] = None
    tenant: int = 0
    priority: Optional[int] = None
    length: int = 0
    max_length: int = 0
    tokens_each: int = 0


class PolicyJob(_reaper.Job):
    """Closes a policy."""

    __slots__ = ()
    swift = True

    def __init__(self, handle: _abi.kvt_policy_p) -> None:
        super().__init__(handle, _reaper.RANK_BUFFER)

    def attempt(self) -> int:
        return int(lib.kvt_policy_close(byref(self.handle)))


def _text(pointer: Any, nbytes: int) -> str:
    return ctypes.string_at(pointer, nbytes).decode() if nbytes else ""


def _i64(value: int) -> int:
    if value.__class__ is int and -0x8000000000000000 <= value <= 0x7FFFFFFFFFFFFFFF:
        return value
    if isinstance(value, float):
        raise make(_abi.KVT_E_INVALID, f"{value} is not a number of nanoseconds")
    number = operator.index(value)
    if not -(1 << 63) <= number < 1 << 63:
        raise make(_abi.KVT_E_INVALID, f"{number} is not a signed 64-bit number")
    return number


def _who(who: Optional[PolicyContext]) -> Any:
    if who is None:
        return None
    given = _abi.kvt_policy_context_t(
        session=u64(who.session or 0), tenant=u32(who.tenant), priority=u32(who.priority or 0),
        length=u32(who.length), max_length=u32(who.max_length), tokens_each=u32(who.tokens_each))
    given.flags = ((_abi.KVT_CONTEXT_SESSION if who.session is not None else 0)
                   | (_abi.KVT_CONTEXT_PRIORITY if who.priority is not None else 0))
    return byref(given)


def policies() -> List[PolicyInfo]:
    """The policies that can be opened.

    >>> import kvtier
    >>> {"lru", "arc", "horizon"} <= {policy.name for policy in kvtier.policies()}
    True
    """
    count = ctypes.c_uint64()
    check(lib.kvt_policy_count(byref(count)))
    found = []
    for index in range(count.value):
        out = _abi.kvt_policy_info_t()
        check(lib.kvt_policy_info(index, byref(out)))
        found.append(PolicyInfo(_text(out.name, out.name_bytes), _text(out.about, out.about_bytes)))
    return found


def log_entries(entries: Sequence[Any]) -> List[LogEntry]:
    """Entries of a log, with the names of the policies that decided."""
    names = [info.name for info in policies()]
    return [LogEntry(e.number, e.at_ns, e.id, e.session if e.has_session else None,
                     e.stamp_ns, e.score, e.units, e.hits, e.queue,
                     names[e.policy] if e.policy < len(names) else "")
            for e in entries]


class Policy(Resource):
    """An eviction policy from a spec such as "arc". Needs no runtime; any thread may
    use it. `now_ns` is the caller's clock, which must not go back; 0 is the library's.

    `score` is for the spec "custom"; `predict` says lifetimes. Both may use the policy.

    >>> import kvtier
    >>> with kvtier.Policy("lru", max_objects=100) as policy:
    ...     policy.insert([1, 2, 3])
    ...     policy.touch([1])
    ...     [victim.id for victim in policy.evict(1).victims]
    1
    [3]

    On tables of one's own, whose columns are read where they are:

    >>> from array import array
    >>> with kvtier.Policy("lru") as policy:
    ...     table = {"ids": array("Q", [7, 8]), "blocks": array("Q", [4, 4]),
    ...              "last_access_ns": array("q", [20, 10])}
    ...     [pick.id for pick in policy.select(table, 4, now_ns=30).victims]
    [8]
    """

    _noun = "policy"

    def __init__(self, spec: str = "lru", *, holes: bool = False, max_objects: int = 0,
                 capacity_units: int = 0, log_entries: int = 0, remember: Optional[int] = None,
                 alpha: Optional[float] = None, beta: Optional[float] = None,
                 score: Optional[Scorer] = None, predict: Optional[Predictor] = None) -> None:
        if (alpha is None) != (beta is None):
            raise make(_abi.KVT_E_INVALID, "alpha and beta belong together")
        text = spec.encode()
        opts = _abi.kvt_policy_opts_t(
            spec_bytes=len(text), max_objects=u64(max_objects), log_entries=u64(log_entries),
            capacity_units=u64(capacity_units), remember=u64(remember or 0), alpha=alpha or 0.0,
            beta=beta or 0.0)
        opts.spec = text_pointer(text)
        opts.flags = ((_abi.KVT_POLICY_HOLES if holes else 0)
                      | (_abi.KVT_POLICY_ZERO_REMEMBER if remember == 0 else 0)
                      | (_abi.KVT_POLICY_COST if alpha is not None else 0))
        numbers = []
        custom = _abi.kvt_policy_custom_t()
        if score is not None:
            numbers.append(_callbacks.register(score))
            custom.score, custom.destroy, custom.user_data = (
                on_score, _callbacks.on_destroy, numbers[-1])
            opts.custom = ctypes.pointer(custom)
        predictor = _abi.kvt_policy_predictor_t()
        if predict is not None:
            numbers.append(_callbacks.register(predict))
            predictor.predict, predictor.destroy, predictor.user_data = (
                on_predict, _callbacks.on_destroy, numbers[-1])
            opts.predictor = ctypes.pointer(predictor)
        _reaper.arm()
        handle, err = _abi.kvt_policy_p(), new_error()
        status = lib.kvt_policy_open(byref(opts), byref(handle), byref(err))
        if status != _abi.KVT_OK:
            for number in numbers:
                _callbacks.forget(number)
        check_err(status, err)
        self._own(PolicyJob(handle))

    def lookup(self, ids: Column, who: Optional[PolicyContext] = None, now_ns: int = 0) -> int:
        """Looks a path of objects up and counts it; how many from the start on are there."""
        handle = self._job.handle.value
        if not handle or _reaper.in_child:
            self._raw  # noqa: B018: says why not
        asks, now = None if who is None else _who(who), _i64(now_ns) if now_ns else 0
        pointer, count, lent = ids_of("ids", ids)
        answer = _Answer()
        at = ctypes.addressof(answer)
        status = _lookup(handle, now, asks, pointer, count, None, at, at + 8)
        lent.release()
        if status:
            check_err(status, _abi.kvt_error_p(answer.err))
        return int(answer.out)

    def found(self, ids: Column, who: Optional[PolicyContext] = None, now_ns: int = 0) -> List[bool]:
        """Like `lookup`, and says it for each id."""
        room: List[Any] = []

        def call(raw: Any, p: Any, n: int, out: Any, err: Any) -> int:
            room.append((ctypes.c_uint8 * n)())
            return int(lib.kvt_policy_lookup(raw, _i64(now_ns), _who(who), p, n, room[0], out, err))

        self._counted(call, ids)
        return [bool(hit) for hit in room[0]]

    def touch(self, ids: Column, who: Optional[PolicyContext] = None, now_ns: int = 0) -> int:
        """Touches objects without counting a lookup; how many were there."""
        handle = self._job.handle.value
        if not handle or _reaper.in_child:
            self._raw  # noqa: B018: says why not
        asks, now = None if who is None else _who(who), _i64(now_ns) if now_ns else 0
        pointer, count, lent = ids_of("ids", ids)
        answer = _Answer()
        at = ctypes.addressof(answer)
        status = _touch(handle, now, asks, pointer, count, at, at + 8)
        lent.release()
        if status:
            check_err(status, _abi.kvt_error_p(answer.err))
        return int(answer.out)

    def record(self, ids: Column, who: Optional[PolicyContext] = None, now_ns: int = 0,
               units: Optional[Column] = None) -> int:
        """Touches objects that are there and inserts the others; how many were new."""
        with Columns() as columns:
            sizes, count = columns.take("units", "u64", units)
            if units is not None and count != len(ids):
                raise make(_abi.KVT_E_INVALID, f"{count} units for {len(ids)} ids")
            return self._counted(lambda raw, p, n, out, err: lib.kvt_policy_record(
                raw, _i64(now_ns), _who(who), p, sizes, n, out, err), ids)

    def insert(self, rows: Sequence[Union[Row, int]], who: Optional[PolicyContext] = None,
               now_ns: int = 0) -> None:
        """Inserts objects, all or none; a bare id has one unit."""
        array = (_abi.kvt_policy_object_t * len(rows))()
        for target, row in zip(array, rows):
            one = row if isinstance(row, Row) else Row(row)
            for name in ("context", "tokens", "layer", "layers", "chunk", "chunks"):
                setattr(target, name, u32(getattr(one, name)))
            target.id, target.units, target.cost = u64(one.id), u64(one.units), one.cost
            target.next_use_ns = _i64(one.next_use_ns)
            if one.parent is not None:
                target.parent, target.flags = u64(one.parent), _abi.KVT_OBJECT_HAS_PARENT
        err = new_error()
        stride = ctypes.sizeof(_abi.kvt_policy_object_t)
        check_err(lib.kvt_policy_insert(self._raw, _i64(now_ns), _who(who), array, len(rows),
                                        stride, byref(err)), err)

    def remove(self, ids: Column, now_ns: int = 0) -> None:
        """Takes objects away that their owner gave up; all or none."""
        self._plain(lambda raw, p, n, err: lib.kvt_policy_remove(raw, _i64(now_ns), p, n, err), ids)

    def evicted(self, ids: Column, now_ns: int = 0) -> None:
        """Says that what a selection named was freed; all or none."""
        self._plain(lambda raw, p, n, err: lib.kvt_policy_report_evicted(raw, _i64(now_ns), p, n, err), ids)

    def resize(self, ids: Column, units: Column) -> None:
        """Changes sizes; all or none."""
        with Columns() as columns:
            sizes, count = columns.take("units", "u64", units)
            if count != len(ids):
                raise make(_abi.KVT_E_INVALID, f"{count} units for {len(ids)} ids")
            self._plain(lambda raw, p, n, err: lib.kvt_policy_resize(raw, p, sizes, n, err), ids)

    def acquire(self, ids: Column) -> None:
        """Takes a reference to each: such objects never leave."""
        self._plain(lib.kvt_policy_acquire, ids)

    def release(self, ids: Column) -> None:
        """Gives a reference to each back."""
        self._plain(lib.kvt_policy_release, ids)

    def pin(self, ids: Column) -> None:
        """Pins objects: they never leave."""
        self._plain(lib.kvt_policy_pin, ids)

    def unpin(self, ids: Column) -> None:
        """Unpins objects."""
        self._plain(lib.kvt_policy_unpin, ids)

    def hint(self, ids: Column, who: Optional[PolicyContext] = None, now_ns: int = 0, *,
             stop: int = STOP_UNKNOWN, next_use_ns: int = 0, confidence: float = 1.0,
             done: bool = False) -> int:
        """Tells what is known of the future of objects; how many are there."""
        flags = _abi.KVT_HINT_ZERO_CONFIDENCE | (_abi.KVT_HINT_DONE if done else 0)
        told = _abi.kvt_policy_hint_t(flags=flags, stop=u32(stop), confidence=confidence,
                                      next_use_ns=_i64(next_use_ns))
        return self._counted(lambda raw, p, n, out, err: lib.kvt_policy_hint(
            raw, _i64(now_ns), _who(who), p, n, byref(told), out, err), ids)

    def evict(self, required_units: int, most: int = 1024, now_ns: int = 0) -> Eviction:
        """Evicts until enough is free, at most `most` victims."""
        return self._leave(lib.kvt_policy_evict, required_units, most, now_ns)

    def preview(self, required_units: int, most: int = 1024, now_ns: int = 0) -> Eviction:
        """Says who would leave, without anything leaving."""
        return self._leave(lib.kvt_policy_preview, required_units, most, now_ns)

    def select(self, candidates: Dict[str, Column], required_blocks: int, *,
               allow_tail: bool = False, now_ns: int = 0) -> Selection:
        """Chooses among candidates in the caller's own tables, given as columns by name:
        `COLUMNS`, and block_offsets, block_ids and block_refs where blocks are shared.
        Arrays of the right type are not copied."""
        given = _abi.kvt_policy_columns_t()
        with Columns() as columns:
            rows = self._fill(columns, given, candidates)
            picks = (_abi.kvt_policy_pick_t * rows)()
            blocks = (ctypes.c_uint64 * given.block_entries)()
            out = _abi.kvt_policy_selection_t(
                victim_capacity=rows, stride_bytes=ctypes.sizeof(_abi.kvt_policy_pick_t),
                block_capacity=given.block_entries)
            out.victims = ctypes.cast(picks, ctypes.POINTER(_abi.kvt_policy_pick_t))
            out.block_ids = ctypes.cast(blocks, ctypes.POINTER(ctypes.c_uint64))
            err = new_error()
            flags = _abi.KVT_SELECT_TAIL if allow_tail else 0
            check_asked(lib.kvt_policy_select(self._raw, _i64(now_ns), byref(given),
                                              u64(required_blocks), flags, byref(out),
                                              byref(err)), err)
        listed = out.block_count > 0
        victims = []
        for pick in picks[: out.victim_count]:
            end = pick.first_block + pick.freed_blocks
            ids = tuple(blocks[pick.first_block: end]) if listed else ()
            victims.append(Pick(pick.row, pick.id, pick.freed_blocks, pick.kept_blocks, ids))
        return Selection(victims, out.freed_blocks, out.shortfall_blocks, out.decision_ns,
                         _text(out.decided_by, out.decided_by_bytes))

    def _fill(self, columns: Columns, given: Any, candidates: Dict[str, Column]) -> int:
        kinds = dict(COLUMNS, block_offsets="u64", block_ids="u64", block_refs="u32")
        if "ids" not in candidates:
            raise make(_abi.KVT_E_INVALID, "there is no column 'ids'")
        rows = len(candidates["ids"])
        for name, values in candidates.items():
            if name not in kinds:
                raise make(_abi.KVT_E_INVALID, f"there is no column '{name}'")
            if values is None:
                continue
            pointer, count = columns.take(name, kinds[name], values)
            if name in ("block_ids", "block_refs"):
                if given.block_entries not in (0, count):
                    raise make(_abi.KVT_E_INVALID, "block_ids and block_refs differ in length")
                given.block_entries = count
            elif count != rows + (name == "block_offsets"):
                raise make(_abi.KVT_E_INVALID, f"column {name} has {count} entries for {rows} rows")
            if count:
                setattr(given, name, pointer)
        given.rows = rows
        return rows

    def switch(self, spec: str) -> None:
        """Goes on with another policy; what carries over does."""
        text, err = spec.encode(), new_error()
        check_err(lib.kvt_policy_switch(self._raw, text, len(text), byref(err)), err)

    def set_capacity(self, units: int) -> None:
        """Changes what fits."""
        check(lib.kvt_policy_set_capacity(self._raw, u64(units)))

    @property
    def spec(self) -> str:
        """The spec, in canonical form."""
        room, size = ctypes.create_string_buffer(8192), ctypes.c_uint64()
        check(lib.kvt_policy_spec(self._raw, room, len(room), byref(size)))
        return room.raw[: size.value].decode()

    def stats(self) -> Dict[str, Any]:
        """What it has counted, by the names of the C struct's fields."""
        out = _abi.kvt_policy_stats_t()
        check(lib.kvt_policy_stats(self._raw, byref(out)))
        skip = ("struct_size", "name", "name_bytes")
        names = [field[0] for field in out._fields_ if field[0] not in skip]
        found = {name: getattr(out, name) for name in names}
        found["name"] = _text(out.name, out.name_bytes)
        return found

    def gauge(self, name: str) -> float:
        """A number of the policy's own; `NotFoundError` names what there is."""
        text, value, err = name.encode(), ctypes.c_double(), new_error()
        check_err(lib.kvt_policy_gauge(self._raw, text, len(text), byref(value), byref(err)), err)
        return value.value

    def gauges(self) -> Dict[str, float]:
        """All numbers of the policy's own, by name."""
        found: Dict[str, float] = {}
        for index in itertools.count():
            name, size = ctypes.POINTER(ctypes.c_char)(), ctypes.c_uint64()
            value = ctypes.c_double()
            status = lib.kvt_policy_gauge_at(self._raw, index, byref(name), byref(size),
                                             byref(value))
            if status == _abi.KVT_E_NOT_FOUND:
                break
            check(status)
            found[_text(name, size.value)] = value.value
        return found

    def log(self, since: int = 0, most: int = 1024) -> List[LogEntry]:
        """Evictions from number `since` on that the log still has."""
        entries, n = (_abi.kvt_policy_log_entry_t * most)(), ctypes.c_uint64()
        stride = ctypes.sizeof(_abi.kvt_policy_log_entry_t)
        check(lib.kvt_policy_log(self._raw, u64(since), entries, most, stride, byref(n)))
        return log_entries(entries[: n.value])

    def advise(self, batch: int) -> Advice:
        """How large a batch a scheduler should run, from the one that runs."""
        out = _abi.kvt_policy_advice_t()
        check(lib.kvt_policy_advise(self._raw, u64(batch), byref(out)))
        return Advice(out.batch, out.re_prefill_rate, out.evictions)

    def set_advice(self, *, shrink_above: Optional[float] = None,
                   grow_below: Optional[int] = None, min_batch: int = 0, max_batch: int = 0,
                   window: int = 0, patience: int = 0) -> None:
        """Changes what advice goes by; what is not given has its default."""
        rules = _abi.kvt_policy_advice_rules_t(
            shrink_above=shrink_above or 0.0, grow_below=u64(grow_below or 0),
            min_batch=u64(min_batch), max_batch=u64(max_batch), window=u64(window),
            patience=u64(patience))
        rules.flags = ((_abi.KVT_ADVICE_ZERO_SHRINK if shrink_above == 0 else 0)
                       | (_abi.KVT_ADVICE_ZERO_GROW if grow_below == 0 else 0))
        err = new_error()
        check_err(lib.kvt_policy_set_advice(self._raw, byref(rules), byref(err)), err)

    def close(self) -> None:
        """Closes it."""
        if self.closed:
            return
        self._raw  # noqa: B018: not in a forked child
        check(lib.kvt_policy_close(byref(self._job.handle)))
        self._released()

    def _counted(self, call: Callable[..., int], ids: Column) -> int:
        with Columns() as columns:
            pointer, count = columns.take("ids", "u64", ids)
            out, err = ctypes.c_uint64(), new_error()
            check_err(call(self._raw, pointer, count, byref(out), byref(err)), err)
            return out.value

    def _plain(self, call: Callable[..., int], ids: Column) -> None:
        with Columns() as columns:
            pointer, count = columns.take("ids", "u64", ids)
            err = new_error()
            check_err(call(self._raw, pointer, count, byref(err)), err)

    def _leave(self, call: Callable[..., int], required: int, most: int, now_ns: int) -> Eviction:
        victims, out = (_abi.kvt_policy_victim_t * most)(), _abi.kvt_policy_outcome_t()
        stride, err = ctypes.sizeof(_abi.kvt_policy_victim_t), new_error()
        check_asked(call(self._raw, _i64(now_ns), u64(required), victims, most, stride,
                         byref(out), byref(err)), err)
        left = [Victim(v.id, v.units) for v in victims[: out.victims]]
        return Eviction(left, out.freed_units, out.shortfall_units, out.decision_ns,
                        _text(out.decided_by, out.decided_by_bytes))


def check_asked(status: int, err: _abi.kvt_error_p, who: str = "the score function") -> None:
    """Like `check_err`, after a call that may have asked a function of the user's:
    what that raised is the cause."""
    raised = _callbacks.take_raised()
    try:
        check_err(status, err)
    except Error as error:
        if raised is None:
            raise
        if not isinstance(raised, Exception):
            raise raised  # an interrupt is for the caller
        error.message = f"{error.message}; {who} raised {raised!r}"
        raise error from raised
    if raised is not None:  # what was evicted before it counts
        _callbacks.report(raised)


def _ask_scorer(score: Scorer, table: Any, now_ns: int, out: Any) -> bool:
    rows, views = table.contents.rows, {}
    for name, kind in COLUMNS.items():
        pointer = getattr(table.contents, name)
        if pointer:
            views[name] = view(kind, pointer, rows)
    scores = score(views, now_ns)
    if len(scores) != rows:
        raise ValueError(f"{len(scores)} scores for {rows} candidates")
    for row, value in enumerate(scores):
        out[row] = value
    return True


def _on_score(number: int, table: Any, now_ns: int, out: Any) -> int:
    score = _callbacks.find(number)
    if score is None:
        return _abi.KVT_E_CLOSED
    done = _callbacks.call_and_keep(_ask_scorer, score, table, now_ns, out)
    return _abi.KVT_OK if done else _abi.KVT_E_STATE


def _ask_predictor(predict: Predictor, sequence: int, length: int, most: int) -> Tuple[float, float]:
    told = predict(sequence, length, most)
    return (math.nan, 0.0) if told is None else (float(told[0]), float(told[1]))


def _on_predict(number: int, sequence: int, length: int, most: int, seconds: Any,
                confidence: Any) -> int:
    predict = _callbacks.find(number)
    told = predict and _callbacks.call(_ask_predictor, predict, sequence, length, most)
    if not told or math.isnan(told[0]):
        return 0
    seconds[0], confidence[0] = told
    return 1


on_score = _abi.kvt_policy_score_fn(_on_score)
on_predict = _abi.kvt_policy_predict_fn(_on_predict)
