"""Requests over time, and how a policy does on them: the lab."""

from __future__ import annotations

import ctypes
import os
from typing import Any, Callable, Iterable, List, NamedTuple, Optional, Union

from . import _abi, _callbacks, _reaper
from ._errors import make
from ._lib import check, check_err, lib, text_pointer, u32, u64
from ._resource import Resource, byref, new_error

#: What a policy is told of the future: why requests stopped (as an engine knows),
#: nothing, or also when a session's next request comes.
HINTS_STOP = _abi.KVT_HINTS_STOP
HINTS_NONE = _abi.KVT_HINTS_NONE
HINTS_THINK = _abi.KVT_HINTS_THINK

#: How many requests are done, and how many there are; False stops the replay.
Progress = Callable[[int, int], Any]


class TraceInfo(NamedTuple):
    """What is in a trace."""

    requests: int
    references: int
    blocks: int
    block_tokens: int
    sessions: int
    duration_ns: int
    tokens: int
    #: What an unbounded cache finds of them.
    known_tokens: int


class Replay(NamedTuple):
    """How a policy did."""

    requests: int
    references: int
    hits: int
    tokens: int
    hit_tokens: int
    cost: float
    hit_cost: float
    inserts: int
    evictions: int
    re_prefill_rate: float
    jain_sessions: float
    jain_tenants: float
    utilisation: float
    decision_p50_ns: int
    decision_p99_ns: int
    decision_max_ns: int
    run_ns: int

    @property
    def token_hit_rate(self) -> float:
        """Tokens found, per token asked for."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0

    @property
    def cost_hit_rate(self) -> float:
        """Recompute cost found, of all that was asked for."""
        return self.hit_cost / self.cost if self.cost else 0.0


class Comparison(NamedTuple):
    """A row of a comparison: a policy at a size."""

    spec: str
    capacity_blocks: int
    replay: Replay


class TraceJob(_reaper.Job):
    """Frees a trace."""

    __slots__ = ()
    swift = True

    def __init__(self, handle: _abi.kvt_trace_p) -> None:
        super().__init__(handle, _reaper.RANK_BUFFER)

    def attempt(self) -> int:
        return int(lib.kvt_trace_free(byref(self.handle)))


def _number(name: str, value: float) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise make(_abi.KVT_E_INVALID, f"{name}: {error}") from error


class Trace(Resource):
    """Requests to a KV cache over time; `Trace.open` and `Trace.generate` make one.
    It never changes, and any thread may use it. `kvtier.Lab` compares several.

    >>> import kvtier
    >>> with kvtier.Trace.generate("chat", duration_ns=600 * 10**9, seed=1) as trace:
    ...     small, all_of_them = (trace.replay("lru", blocks) for blocks in
    ...                           (trace.info.blocks // 10, trace.info.blocks))
    >>> small.token_hit_rate < all_of_them.token_hit_rate, all_of_them.evictions
    (True, 0)
    """

    _noun = "trace"

    def __init__(self) -> None:
        raise TypeError("use Trace.open or Trace.generate")

    @classmethod
    def open(cls, path: "Union[str, os.PathLike[str]]", kind: str = "", *,
             block_tokens: int = 0, seed: int = 0, gap_ns: int = 0, duration_ns: int = 0,
             flat: bool = False) -> "Trace":
        """Reads a file, plain or zstd: kvtier, mooncake, weka, sharegpt, azure, oracle or
        csv; without a kind by the content. `gap_ns` and `duration_ns` are for files
        that do not tell when sessions start. `flat` makes every block a request of
        its own."""
        name = os.fspath(path)
        try:
            data = name.encode()
        except (UnicodeEncodeError, AttributeError) as error:
            raise make(_abi.KVT_E_INVALID, f"a path that is not UTF-8 text: {name!r}") from error
        return cls._make(lib.kvt_trace_open, data, kind, block_tokens, seed, gap_ns, duration_ns,
                         0.0, flat)

    @classmethod
    def generate(cls, kind: str, *, duration_ns: int = 0, rate: float = 0.0, seed: int = 0,
                 block_tokens: int = 0, flat: bool = False) -> "Trace":
        """Makes a workload up, the same on every machine: chat, agent, batch,
        multitenant or burst, a day of it unless told otherwise. `rate` is how many
        sessions start in a second."""
        return cls._make(lib.kvt_trace_generate, b"", kind, block_tokens, seed, 0, duration_ns,
                         _number("rate", rate), flat)

    @classmethod
    def _make(cls, call: Callable[..., int], path: bytes, kind: str, block_tokens: int,
              seed: int, gap_ns: int, duration_ns: int, rate: float, flat: bool) -> "Trace":
        text = kind.encode()
        opts = _abi.kvt_trace_opts_t(
            flags=_abi.KVT_TRACE_FLAT if flat else 0, path_bytes=len(path),
            kind_bytes=len(text), block_tokens=u64(block_tokens), seed=u64(seed),
            gap_ns=u64(gap_ns), duration_ns=u64(duration_ns), rate=rate)
        opts.path = text_pointer(path, empty_is_none=True)
        opts.kind = text_pointer(text, empty_is_none=True)
        _reaper.arm()
        handle, err = _abi.kvt_trace_p(), new_error()
        check_err(call(byref(opts), byref(handle), byref(err)), err)
        trace = cls.__new__(cls)
        trace._own(TraceJob(handle))
        return trace

    @property
    def info(self) -> TraceInfo:
        """What is in it."""
        out = _abi.kvt_trace_info_t()
        check(lib.kvt_trace_info(self._raw, byref(out)))
        return TraceInfo(*(getattr(out, name) for name in TraceInfo._fields))

    def replay(self, spec: str, capacity_blocks: int, *, warm_up: int = 0, layers: int = 0,
               holes: bool = False, timed: bool = True, hints: int = HINTS_STOP,
               alpha: float = 0.0, progress: Optional[Progress] = None) -> Replay:
        """Replays it under a policy with room for so many blocks. `progress` is called
        on this thread; where it gives False the replay ends with `CancelledError`, and
        what it raises is raised here."""
        text = spec.encode()
        opts = _abi.kvt_replay_opts_t(
            flags=((_abi.KVT_REPLAY_HOLES if holes else 0)
                   | (0 if timed else _abi.KVT_REPLAY_UNTIMED)),
            spec_bytes=len(text), capacity_blocks=u64(capacity_blocks), warm_up=u64(warm_up),
            layers=u32(layers), hints=u32(hints), alpha=_number("alpha", alpha))
        opts.spec = text_pointer(text)
        watch, number = _Watch(progress), 0
        if progress is not None:
            number = _callbacks.register(watch)
            opts.progress, opts.user_data = on_progress, number
        out, err = _abi.kvt_replay_report_t(), new_error()
        try:
            status = lib.kvt_trace_replay(self._raw, byref(opts), byref(out), byref(err))
        finally:
            _callbacks.forget(number)
        if watch.raised is not None:
            lib.kvt_error_free(byref(err))
            raise watch.raised
        check_err(status, err)
        return Replay(*(getattr(out, name) for name in Replay._fields))

    def compare(self, specs: Iterable[str], sizes: Iterable[int],
                **options: Any) -> List[Comparison]:
        """Replays it under each policy at each size in blocks; the options are those of
        `replay`. One row a run, sizes within policies."""
        blocks = list(sizes)
        return [Comparison(spec, size, self.replay(spec, size, **options))
                for spec in specs for size in blocks]

    def close(self) -> None:
        """Frees it; replays that are going on go on to their end."""
        if self.closed:
            return
        self._raw  # noqa: B018: not in a forked child
        check(lib.kvt_trace_free(byref(self._job.handle)))
        self._released()


class _Watch:
    """A progress callable, and what it raised."""

    __slots__ = ("hear", "raised")

    def __init__(self, hear: Optional[Progress]) -> None:
        self.hear = hear
        self.raised: Optional[BaseException] = None

    def __call__(self, done: int, total: int) -> bool:
        try:
            # One that says nothing wants to go on.
            return self.hear is None or self.hear(done, total) is not False
        except BaseException as error:  # noqa: BLE001: nothing may cross into C
            self.raised = error
            return False


def _on_progress(number: int, done: int, total: int) -> int:
    watch = _callbacks.find(number)
    return int(watch is None or watch(done, total))


on_progress = _abi.kvt_progress_fn(_on_progress)
