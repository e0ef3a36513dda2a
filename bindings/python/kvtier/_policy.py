"""Eviction policies, on the library's table of objects or on the caller's own tables."""

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

#: The reason why a sequence stopped.
STOP_UNKNOWN = _abi.KVT_STOP_UNKNOWN
STOP_TOOL_USE = _abi.KVT_STOP_TOOL_USE
STOP_END_TURN = _abi.KVT_STOP_END_TURN
STOP_LENGTH = _abi.KVT_STOP_LENGTH
STOP_CANCELLED = _abi.KVT_STOP_CANCELLED

#: Called with sequence, length and maximum length; returns seconds and confidence, or None.
Predictor = Callable[[int, int, int], Optional[Tuple[float, float]]]
#: Called with the candidates' columns by name, each a read-only memoryview, and the time in ns.
#: Returns a score per candidate; the lowest is evicted first. The views end with the call.
Scorer = Callable[[Dict[str, Any], int], Sequence[float]]

#: The type of each column of a selection.
COLUMNS: Dict[str, str] = {
    "ids": "u64", "blocks": "u64", "created_ns": "i64", "last_access_ns": "i64",
    "count": "u64", "priority": "u8", "pinned": "u8", "lifetime_ns": "i64",
    "confidence": "f32", "length": "u64", "max_length": "u64", "refs": "u32",
    "tenant": "u32", "cost": "f64", "context": "u64", "tokens": "u64", "layer": "u32",
    "layers": "u32", "chunk": "u32", "chunks": "u32",
}


class _CallResult(ctypes.Structure):
    """A number and an error in one allocation: two allocations would take twice as long."""

    _fields_ = [("out", ctypes.c_uint64), ("err", ctypes.c_void_p)]


_lookup, _touch = quick("kvt_policy_lookup"), quick("kvt_policy_touch")


class PolicyInfo(NamedTuple):
    """Name and description of a policy that can be opened."""

    name: str
    about: str


class Victim(NamedTuple):
    """An evicted object."""

    id: int
    units: int


class Eviction(NamedTuple):
    """The result of an eviction."""

    victims: List[Victim]
    freed_units: int
    shortfall_units: int
    decision_ns: int
    decided_by: str


class SelectedVictim(NamedTuple):
    """A chosen candidate: it is evicted entirely, or except for its first blocks."""

    row: int
    id: int
    freed_blocks: int
    kept_blocks: int
    #: The blocks that this eviction frees, if the candidates list blocks.
    block_ids: Tuple[int, ...]


class Selection(NamedTuple):
    """The candidates that a selection chose."""

    victims: List[SelectedVictim]
    freed_blocks: int
    shortfall_blocks: int
    decision_ns: int
    decided_by: str


class LogEntry(NamedTuple):
    """An entry of the eviction log."""

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
    """Advice for a scheduler."""

    batch: int
    re_prefill_rate: float
    evictions: int


class PolicyObject(NamedTuple):
    """An object to insert."""

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
    """The session, tenant and length of a request, for a policy."""

    session: Optional[int] = None
    tenant: int = 0
    priority: Optional[int] = None
    length: int = 0
    max_length: int = 0
    tokens_each: int = 0


class PolicyJob(_reaper.Job):
    """Closes a policy."""

    __slots__ = ()
    nonblocking = True

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
        raise make(_abi.KVT_E_INVALID, f"time {value} is a float: it must be an integer of "
                                       "nanoseconds")
    number = operator.index(value)
    if not -(1 << 63) <= number < 1 << 63:
        raise make(_abi.KVT_E_INVALID, f"{number} is out of range: it must be a signed 64-bit "
                                       "integer")
    return number


def _context(context: Optional[PolicyContext]) -> Any:
    if context is None:
        return None
    given = _abi.kvt_policy_context_t(
        session=u64(context.session or 0), tenant=u32(context.tenant),
        priority=u32(context.priority or 0), length=u32(context.length),
        max_length=u32(context.max_length), tokens_each=u32(context.tokens_each))
    given.flags = ((_abi.KVT_CONTEXT_SESSION if context.session is not None else 0)
                   | (_abi.KVT_CONTEXT_PRIORITY if context.priority is not None else 0))
    return byref(given)


def policies() -> List[PolicyInfo]:
    """Returns the policies that can be opened.

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
    """Converts log entries from C, with the names of the deciding policies."""
    names = [info.name for info in policies()]
    return [LogEntry(e.number, e.at_ns, e.id, e.session if e.has_session else None,
                     e.stamp_ns, e.score, e.units, e.hits, e.queue,
                     names[e.policy] if e.policy < len(names) else "")
            for e in entries]


class Policy(Resource):
    """An eviction policy from a spec such as "arc". It needs no runtime; any thread may use it.

    `now_ns` is a time on the caller's clock, which must not go back; 0 uses the library's clock.
    `score` is the score function of the spec "custom"; `predict` predicts lifetimes. Both may
    call the policy.

    >>> import kvtier
    >>> with kvtier.Policy("lru", max_objects=100) as policy:
    ...     policy.insert([1, 2, 3])
    ...     policy.touch([1])
    ...     [victim.id for victim in policy.evict(1).victims]
    1
    [3]

    On the caller's own tables, whose columns are not copied:

    >>> from array import array
    >>> with kvtier.Policy("lru") as policy:
    ...     table = {"ids": array("Q", [7, 8]), "blocks": array("Q", [4, 4]),
    ...              "last_access_ns": array("q", [20, 10])}
    ...     [pick.id for pick in policy.select(table, 4, now_ns=30).victims]
    [8]
    """

    _type_name = "policy"

    def __init__(self, spec: str = "lru", *, holes: bool = False, max_objects: int = 0,
                 capacity_units: int = 0, log_entries: int = 0, remember: Optional[int] = None,
                 alpha: Optional[float] = None, beta: Optional[float] = None,
                 score: Optional[Scorer] = None, predict: Optional[Predictor] = None) -> None:
        if (alpha is None) != (beta is None):
            raise make(_abi.KVT_E_INVALID, f"alpha is {alpha} and beta is {beta}: give both or "
                                           "none")
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

    def lookup(self, ids: Column, context: Optional[PolicyContext] = None, now_ns: int = 0) -> int:
        """Looks up a path of objects and counts the lookup. Returns how many leading objects are
        present."""
        handle = self._job.handle.value
        if not handle or _reaper.in_child:
            self._raw  # noqa: B018: raises the reason
        given, now = None if context is None else _context(context), _i64(now_ns) if now_ns else 0
        pointer, count, borrowed = ids_of("ids", ids)
        result = _CallResult()
        at = ctypes.addressof(result)
        status = _lookup(handle, now, given, pointer, count, None, at, at + 8)
        borrowed.release()
        if status:
            check_err(status, _abi.kvt_error_p(result.err))
        return int(result.out)

    def found(self, ids: Column, context: Optional[PolicyContext] = None,
              now_ns: int = 0) -> List[bool]:
        """Like `lookup`, but returns for each id whether it is present."""
        room: List[Any] = []

        def call(raw: Any, p: Any, n: int, out: Any, err: Any) -> int:
            room.append((ctypes.c_uint8 * n)())
            return int(lib.kvt_policy_lookup(raw, _i64(now_ns), _context(context), p, n, room[0],
                                             out, err))

        self._counted(call, ids)
        return [bool(hit) for hit in room[0]]

    def touch(self, ids: Column, context: Optional[PolicyContext] = None, now_ns: int = 0) -> int:
        """Touches objects without counting a lookup. Returns how many were present."""
        handle = self._job.handle.value
        if not handle or _reaper.in_child:
            self._raw  # noqa: B018: raises the reason
        given, now = None if context is None else _context(context), _i64(now_ns) if now_ns else 0
        pointer, count, borrowed = ids_of("ids", ids)
        result = _CallResult()
        at = ctypes.addressof(result)
        status = _touch(handle, now, given, pointer, count, at, at + 8)
        borrowed.release()
        if status:
            check_err(status, _abi.kvt_error_p(result.err))
        return int(result.out)

    def record(self, ids: Column, context: Optional[PolicyContext] = None, now_ns: int = 0,
               units: Optional[Column] = None) -> int:
        """Touches present objects and inserts the others. Returns how many were inserted."""
        with Columns() as columns:
            sizes, count = columns.take("units", "u64", units)
            if units is not None and count != len(ids):
                raise make(_abi.KVT_E_INVALID, f"{count} units for {len(ids)} ids: give one per "
                                               "id")
            return self._counted(lambda raw, p, n, out, err: lib.kvt_policy_record(
                raw, _i64(now_ns), _context(context), p, sizes, n, out, err), ids)

    def insert(self, rows: Sequence[Union[PolicyObject, int]],
               context: Optional[PolicyContext] = None, now_ns: int = 0) -> None:
        """Inserts objects, all or none; a bare id has one unit."""
        array = (_abi.kvt_policy_object_t * len(rows))()
        for target, row in zip(array, rows):
            source = row if isinstance(row, PolicyObject) else PolicyObject(row)
            for name in ("context", "tokens", "layer", "layers", "chunk", "chunks"):
                setattr(target, name, u32(getattr(source, name)))
            target.id, target.units, target.cost = u64(source.id), u64(source.units), source.cost
            target.next_use_ns = _i64(source.next_use_ns)
            if source.parent is not None:
                target.parent, target.flags = u64(source.parent), _abi.KVT_OBJECT_HAS_PARENT
        err = new_error()
        stride = ctypes.sizeof(_abi.kvt_policy_object_t)
        check_err(lib.kvt_policy_insert(self._raw, _i64(now_ns), _context(context), array,
                                        len(rows), stride, byref(err)), err)

    def remove(self, ids: Column, now_ns: int = 0) -> None:
        """Removes objects that their owner dropped; all or none."""
        self._plain(lambda raw, p, n, err: lib.kvt_policy_remove(raw, _i64(now_ns), p, n, err), ids)

    def report_evicted(self, ids: Column, now_ns: int = 0) -> None:
        """Reports that the objects of a selection were freed; all or none."""
        self._plain(lambda raw, p, n, err: lib.kvt_policy_report_evicted(raw, _i64(now_ns), p, n, err), ids)

    def resize(self, ids: Column, units: Column) -> None:
        """Changes the sizes of objects; all or none."""
        with Columns() as columns:
            sizes, count = columns.take("units", "u64", units)
            if count != len(ids):
                raise make(_abi.KVT_E_INVALID, f"{count} units for {len(ids)} ids: give one per "
                                               "id")
            self._plain(lambda raw, p, n, err: lib.kvt_policy_resize(raw, p, sizes, n, err), ids)

    def acquire(self, ids: Column) -> None:
        """Adds a reference to each object: referenced objects are never evicted."""
        self._plain(lib.kvt_policy_acquire, ids)

    def release(self, ids: Column) -> None:
        """Removes a reference from each object."""
        self._plain(lib.kvt_policy_release, ids)

    def pin(self, ids: Column) -> None:
        """Pins objects: pinned objects are never evicted."""
        self._plain(lib.kvt_policy_pin, ids)

    def unpin(self, ids: Column) -> None:
        """Unpins objects."""
        self._plain(lib.kvt_policy_unpin, ids)

    def hint(self, ids: Column, context: Optional[PolicyContext] = None, now_ns: int = 0, *,
             stop: int = STOP_UNKNOWN, next_use_ns: int = 0, confidence: float = 1.0,
             done: bool = False) -> int:
        """Gives the policy a hint about the future of objects. Returns how many are present."""
        flags = _abi.KVT_HINT_ZERO_CONFIDENCE | (_abi.KVT_HINT_DONE if done else 0)
        hint = _abi.kvt_policy_hint_t(flags=flags, stop=u32(stop), confidence=confidence,
                                      next_use_ns=_i64(next_use_ns))
        return self._counted(lambda raw, p, n, out, err: lib.kvt_policy_hint(
            raw, _i64(now_ns), _context(context), p, n, byref(hint), out, err), ids)

    def evict(self, required_units: int, most: int = 1024, now_ns: int = 0) -> Eviction:
        """Evicts until `required_units` are free, at most `most` victims."""
        return self._evict(lib.kvt_policy_evict, required_units, most, now_ns)

    def preview(self, required_units: int, most: int = 1024, now_ns: int = 0) -> Eviction:
        """Returns the victims of an eviction without evicting them."""
        return self._evict(lib.kvt_policy_preview, required_units, most, now_ns)

    def select(self, candidates: Dict[str, Column], required_blocks: int, *,
               allow_tail: bool = False, now_ns: int = 0) -> Selection:
        """Chooses victims among candidates in the caller's own tables.

        `candidates` are columns by name: those of `COLUMNS`, and block_offsets, block_ids and
        block_refs for shared blocks. Arrays of the right type are not copied."""
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
            check_with_cause(lib.kvt_policy_select(self._raw, _i64(now_ns), byref(given),
                                                   u64(required_blocks), flags, byref(out),
                                                   byref(err)), err)
        listed = out.block_count > 0
        victims = []
        for pick in picks[: out.victim_count]:
            end = pick.first_block + pick.freed_blocks
            ids = tuple(blocks[pick.first_block: end]) if listed else ()
            victims.append(SelectedVictim(pick.row, pick.id, pick.freed_blocks, pick.kept_blocks,
                                          ids))
        return Selection(victims, out.freed_blocks, out.shortfall_blocks, out.decision_ns,
                         _text(out.decided_by, out.decided_by_bytes))

    def _fill(self, columns: Columns, given: Any, candidates: Dict[str, Column]) -> int:
        kinds = dict(COLUMNS, block_offsets="u64", block_ids="u64", block_refs="u32")
        if "ids" not in candidates:
            raise make(_abi.KVT_E_INVALID, "the required column 'ids' is missing")
        rows = len(candidates["ids"])
        for name, values in candidates.items():
            if name not in kinds:
                raise make(_abi.KVT_E_INVALID, f"column '{name}' is unknown: it must be one of "
                                               f"{', '.join(kinds)}")
            if values is None:
                continue
            pointer, count = columns.take(name, kinds[name], values)
            if name in ("block_ids", "block_refs"):
                if given.block_entries not in (0, count):
                    raise make(_abi.KVT_E_INVALID, "block_ids and block_refs have "
                                                   f"{given.block_entries} and {count} entries: "
                                                   "they must have the same length")
                given.block_entries = count
            elif count != rows + (name == "block_offsets"):
                wanted = "one per row, and one more" if name == "block_offsets" else "one per row"
                raise make(_abi.KVT_E_INVALID, f"column {name} has {count} entries for {rows} "
                                               f"rows: give {wanted}")
            if count:
                setattr(given, name, pointer)
        given.rows = rows
        return rows

    def switch(self, spec: str) -> None:
        """Switches to another policy, which keeps the compatible state of the old one."""
        text, err = spec.encode(), new_error()
        check_err(lib.kvt_policy_switch(self._raw, text, len(text), byref(err)), err)

    def set_capacity(self, units: int) -> None:
        """Changes the capacity."""
        check(lib.kvt_policy_set_capacity(self._raw, u64(units)))

    @property
    def spec(self) -> str:
        """The spec, in canonical form."""
        room, size = ctypes.create_string_buffer(8192), ctypes.c_uint64()
        check(lib.kvt_policy_spec(self._raw, room, len(room), byref(size)))
        return room.raw[: size.value].decode()

    def stats(self) -> Dict[str, Any]:
        """Returns the counters, by the names of the C struct's fields."""
        out = _abi.kvt_policy_stats_t()
        check(lib.kvt_policy_stats(self._raw, byref(out)))
        skip = ("struct_size", "name", "name_bytes")
        names = [field[0] for field in out._fields_ if field[0] not in skip]
        found = {name: getattr(out, name) for name in names}
        found["name"] = _text(out.name, out.name_bytes)
        return found

    def gauge(self, name: str) -> float:
        """Returns a gauge of the policy; `NotFoundError` lists the existing ones."""
        text, value, err = name.encode(), ctypes.c_double(), new_error()
        check_err(lib.kvt_policy_gauge(self._raw, text, len(text), byref(value), byref(err)), err)
        return value.value

    def gauges(self) -> Dict[str, float]:
        """Returns all gauges of the policy, by name."""
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
        """Returns the log's evictions from number `since` on."""
        entries, n = (_abi.kvt_policy_log_entry_t * most)(), ctypes.c_uint64()
        stride = ctypes.sizeof(_abi.kvt_policy_log_entry_t)
        check(lib.kvt_policy_log(self._raw, u64(since), entries, most, stride, byref(n)))
        return log_entries(entries[: n.value])

    def advise(self, batch: int) -> Advice:
        """Returns the batch size that a scheduler should run, given the current one."""
        out = _abi.kvt_policy_advice_t()
        check(lib.kvt_policy_advise(self._raw, u64(batch), byref(out)))
        return Advice(out.batch, out.re_prefill_rate, out.evictions)

    def set_advice(self, *, shrink_above: Optional[float] = None,
                   grow_below: Optional[int] = None, min_batch: int = 0, max_batch: int = 0,
                   window: int = 0, patience: int = 0) -> None:
        """Changes the rules of advice; rules that are not given have their defaults."""
        rules = _abi.kvt_policy_advice_rules_t(
            shrink_above=shrink_above or 0.0, grow_below=u64(grow_below or 0),
            min_batch=u64(min_batch), max_batch=u64(max_batch), window=u64(window),
            patience=u64(patience))
        rules.flags = ((_abi.KVT_ADVICE_ZERO_SHRINK if shrink_above == 0 else 0)
                       | (_abi.KVT_ADVICE_ZERO_GROW if grow_below == 0 else 0))
        err = new_error()
        check_err(lib.kvt_policy_set_advice(self._raw, byref(rules), byref(err)), err)

    def close(self) -> None:
        """Closes the policy."""
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

    def _evict(self, call: Callable[..., int], required: int, most: int, now_ns: int) -> Eviction:
        victims, out = (_abi.kvt_policy_victim_t * most)(), _abi.kvt_policy_outcome_t()
        stride, err = ctypes.sizeof(_abi.kvt_policy_victim_t), new_error()
        check_with_cause(call(self._raw, _i64(now_ns), u64(required), victims, most, stride,
                              byref(out), byref(err)), err)
        evicted = [Victim(v.id, v.units) for v in victims[: out.victims]]
        return Eviction(evicted, out.freed_units, out.shortfall_units, out.decision_ns,
                        _text(out.decided_by, out.decided_by_bytes))


def check_with_cause(status: int, err: _abi.kvt_error_p,
                     callback: str = "the score function") -> None:
    """Like `check_err`, after a call that may have called a user's function. The function's
    exception becomes the cause of the error."""
    raised = _callbacks.take_raised()
    try:
        check_err(status, err)
    except Error as error:
        if raised is None:
            raise
        if not isinstance(raised, Exception):
            raise raised  # the caller must see an interrupt unchanged
        error.message = f"{error.message}; {callback} raised {raised!r}"
        raise error from raised
    if raised is not None:  # the call succeeded with the evictions before the exception
        _callbacks.report(raised)


def _call_scorer(score: Scorer, table: Any, now_ns: int, out: Any) -> bool:
    rows, views = table.contents.rows, {}
    for name, kind in COLUMNS.items():
        pointer = getattr(table.contents, name)
        if pointer:
            views[name] = view(kind, pointer, rows)
    scores = score(views, now_ns)
    if len(scores) != rows:
        raise ValueError(f"{len(scores)} scores for {rows} candidates: return one per candidate")
    for row, value in enumerate(scores):
        out[row] = value
    return True


def _on_score(number: int, table: Any, now_ns: int, out: Any) -> int:
    score = _callbacks.find(number)
    if score is None:
        return _abi.KVT_E_CLOSED
    done = _callbacks.call_and_keep(_call_scorer, score, table, now_ns, out)
    return _abi.KVT_OK if done else _abi.KVT_E_STATE


def _call_predictor(predict: Predictor, sequence: int, length: int,
                    most: int) -> Tuple[float, float]:
    lifetime = predict(sequence, length, most)
    return (math.nan, 0.0) if lifetime is None else (float(lifetime[0]), float(lifetime[1]))


def _on_predict(number: int, sequence: int, length: int, most: int, seconds: Any,
                confidence: Any) -> int:
    predict = _callbacks.find(number)
    lifetime = predict and _callbacks.call(_call_predictor, predict, sequence, length, most)
    if not lifetime or math.isnan(lifetime[0]):
        return 0
    seconds[0], confidence[0] = lifetime
    return 1


on_score = _abi.kvt_policy_score_fn(_on_score)
on_predict = _abi.kvt_policy_predict_fn(_on_predict)
