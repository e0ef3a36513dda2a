"""Traces of requests over time, and replays of them under a policy."""

from __future__ import annotations

import ctypes
import os
from typing import Any, Callable, Iterable, List, NamedTuple, Optional, Union

from . import _abi, _callbacks, _reaper
from ._errors import make
from ._lib import check, check_err, lib, text_pointer, u32, u64
from ._resource import Resource, byref, new_error

#: The hints that a policy gets in a replay. STOP: why a request stopped, as an engine knows it.
#: NONE: no hints. THINK: also the time of a session's next request.
HINTS_STOP = _abi.KVT_HINTS_STOP
HINTS_NONE = _abi.KVT_HINTS_NONE
HINTS_THINK = _abi.KVT_HINTS_THINK

#: Called with the requests done and the number of requests; False stops the replay.
Progress = Callable[[int, int], Any]


class TraceInfo(NamedTuple):
    """The contents of a trace, in numbers."""

    requests: int
    references: int
    blocks: int
    block_tokens: int
    sessions: int
    duration_ns: int
    tokens: int
    #: The tokens that an unbounded cache finds.
    known_tokens: int


class Replay(NamedTuple):
    """The result of a replay under a policy."""

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
        """The share of requested tokens that were found."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0

    @property
    def cost_hit_rate(self) -> float:
        """The share of the requested tokens' recompute cost that was saved."""
        return self.hit_cost / self.cost if self.cost else 0.0


class Comparison(NamedTuple):
    """A row of a comparison: a policy at a size."""

    spec: str
    capacity_blocks: int
    replay: Replay


class TraceJob(_reaper.Job):
    """Frees a trace."""

    __slots__ = ()
    nonblocking = True

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
    """Requests to a KV cache over time, created by `Trace.open` and `Trace.generate`. A trace is
    immutable; any thread may use it. `kvtier.Lab` compares several traces.

    >>> import kvtier
    >>> with kvtier.Trace.generate("chat", duration_ns=600 * 10**9, seed=1) as trace:
    ...     small, large = (trace.replay("lru", blocks) for blocks in
    ...                     (trace.info.blocks // 10, trace.info.blocks))
    >>> small.token_hit_rate < large.token_hit_rate, large.evictions
    (True, 0)
    """

    _type_name = "trace"

    def __init__(self) -> None:
        raise TypeError("use Trace.open or Trace.generate")

    @classmethod
    def open(cls, path: "Union[str, os.PathLike[str]]", kind: str = "", *,
             block_tokens: int = 0, seed: int = 0, gap_ns: int = 0, duration_ns: int = 0,
             flat: bool = False) -> "Trace":
        """Reads a file, plain or zstd, of kind kvtier, mooncake, weka, sharegpt, azure, oracle or
        csv; without a kind the content decides. `gap_ns` and `duration_ns` are for files without
        start times of sessions. `flat` makes every block a separate request."""
        name = os.fspath(path)
        try:
            data = name.encode()
        except (UnicodeEncodeError, AttributeError) as error:
            raise make(_abi.KVT_E_INVALID, f"path {name!r} is invalid: it must be UTF-8 text"
                       ) from error
        return cls._make(lib.kvt_trace_open, data, kind, block_tokens, seed, gap_ns, duration_ns,
                         0.0, flat)

    @classmethod
    def generate(cls, kind: str, *, duration_ns: int = 0, rate: float = 0.0, seed: int = 0,
                 block_tokens: int = 0, flat: bool = False) -> "Trace":
        """Generates a workload, identical on every machine: chat, agent, batch, multitenant or
        burst. `duration_ns` is a day by default. `rate` is the number of session starts per
        second."""
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
        """The contents of the trace, in numbers."""
        out = _abi.kvt_trace_info_t()
        check(lib.kvt_trace_info(self._raw, byref(out)))
        return TraceInfo(*(getattr(out, name) for name in TraceInfo._fields))

    def replay(self, spec: str, capacity_blocks: int, *, warm_up: int = 0, layers: int = 0,
               holes: bool = False, timed: bool = True, hints: int = HINTS_STOP,
               alpha: float = 0.0, progress: Optional[Progress] = None) -> Replay:
        """Replays the trace under a policy with a capacity in blocks. `progress` is called on
        this thread. Its exceptions are raised here; if it returns False, the replay ends with
        `CancelledError`."""
        text = spec.encode()
        opts = _abi.kvt_replay_opts_t(
            flags=((_abi.KVT_REPLAY_HOLES if holes else 0)
                   | (0 if timed else _abi.KVT_REPLAY_UNTIMED)),
            spec_bytes=len(text), capacity_blocks=u64(capacity_blocks), warm_up=u64(warm_up),
            layers=u32(layers), hints=u32(hints), alpha=_number("alpha", alpha))
        opts.spec = text_pointer(text)
        reporter, number = _ProgressReporter(progress), 0
        if progress is not None:
            number = _callbacks.register(reporter)
            opts.progress, opts.user_data = on_progress, number
        out, err = _abi.kvt_replay_report_t(), new_error()
        try:
            status = lib.kvt_trace_replay(self._raw, byref(opts), byref(out), byref(err))
        finally:
            _callbacks.forget(number)
        if reporter.raised is not None:
            lib.kvt_error_free(byref(err))
            raise reporter.raised
        check_err(status, err)
        return Replay(*(getattr(out, name) for name in Replay._fields))

    def compare(self, specs: Iterable[str], sizes: Iterable[int],
                **options: Any) -> List[Comparison]:
        """Replays the trace under each policy at each size in blocks, with the options of
        `replay`. Returns one row per run, ordered by policy and size."""
        blocks = list(sizes)
        return [Comparison(spec, size, self.replay(spec, size, **options))
                for spec in specs for size in blocks]

    def close(self) -> None:
        """Frees the trace. Running replays continue to their end."""
        if self.closed:
            return
        self._raw  # noqa: B018: not in a forked child
        check(lib.kvt_trace_free(byref(self._job.handle)))
        self._released()


class _ProgressReporter:
    """A progress callable, and the exception that it raised."""

    __slots__ = ("progress", "raised")

    def __init__(self, progress: Optional[Progress]) -> None:
        self.progress = progress
        self.raised: Optional[BaseException] = None

    def __call__(self, done: int, total: int) -> bool:
        try:
            # A result of None continues the replay.
            return self.progress is None or self.progress(done, total) is not False
        except BaseException as error:  # noqa: BLE001: no exception may cross into C
            self.raised = error
            return False


def _on_progress(number: int, done: int, total: int) -> int:
    reporter = _callbacks.find(number)
    return int(reporter is None or reporter(done, total))


on_progress = _abi.kvt_progress_fn(_on_progress)
