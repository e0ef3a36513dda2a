"""The lab: replays traces under several eviction policies and capacities, to compare them."""

from __future__ import annotations

import os
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional
from typing import Tuple, Union

from . import _abi
from ._errors import make
from ._lib import u64
from ._resource import Resource
from ._trace import Replay, Trace

#: An open trace, the path of a trace file, or a kind of `Trace.generate` such as "chat".
Source = Union[Trace, str, "os.PathLike[str]"]
#: A capacity: a number of blocks, or a percentage of the distinct blocks of the trace ("5%").
Size = Union[int, str]
#: Called with the progress of each run: the run, the number of replayed requests, and the number of
#: all requests. Returning False stops the comparison.
LabProgress = Callable[["LabRun", int, int], Any]


def _invalid(text: str) -> Exception:
    return make(_abi.KVT_E_INVALID, text)


class LabRun(NamedTuple):
    """One run of a comparison: its number, the number of runs, trace, policy and capacity."""

    number: int
    runs: int
    trace: str
    policy: str
    capacity_blocks: int


class LabRow(NamedTuple):
    """The result of one policy on one trace at one capacity."""

    trace: str
    policy: str
    #: The size as passed to `compare`.
    size: str
    capacity_blocks: int
    replay: Replay

    @property
    def token_miss_ratio(self) -> float:
        """The share of requested tokens that must be computed."""
        return 1.0 - self.replay.token_hit_rate

    @property
    def cost_miss_ratio(self) -> float:
        """The share of the prefill cost of all requested tokens that must be paid."""
        return 1.0 - self.replay.cost_hit_rate

    def as_dict(self) -> Dict[str, Any]:
        """All numbers by name."""
        return {"trace": self.trace, "policy": self.policy, "size": self.size,
                "capacity_blocks": self.capacity_blocks,
                "token_miss_ratio": self.token_miss_ratio,
                "cost_miss_ratio": self.cost_miss_ratio, **self.replay._asdict()}


class LabTable(List[LabRow]):
    """The rows of a comparison, ordered by trace, then policy, then size. `str(table)` is an
    aligned text table."""

    def dicts(self) -> List[Dict[str, Any]]:
        """The rows as dicts, for `pandas.DataFrame` and `csv.DictWriter`."""
        return [row.as_dict() for row in self]

    def best(self) -> "LabTable":
        """For each trace and size, the first row with the lowest token miss ratio."""
        found: Dict[Tuple[str, str], LabRow] = {}
        for row in self:
            key = row.trace, row.size
            if key not in found or row.token_miss_ratio < found[key].token_miss_ratio:
                found[key] = row
        return LabTable(found.values())

    def text(self) -> str:
        """The rows as an aligned text table."""
        head = ["trace", "policy", "size", "blocks", "tokens missed", "cost missed", "refilled",
                "decision p99"]
        lines = [head, *(
            [row.trace, row.policy, row.size, f"{row.capacity_blocks}",
             f"{100 * row.token_miss_ratio:.2f} %", f"{100 * row.cost_miss_ratio:.2f} %",
             f"{100 * row.replay.re_prefill_rate:.2f} %",
             f"{row.replay.decision_p99_ns / 1000:.1f} us"] for row in self)]
        wide = [max(map(len, column)) for column in zip(*lines)]
        # Names to the left, numbers to the right.
        return "\n".join("  ".join(
            word.ljust(width) if at < 2 else word.rjust(width)
            for at, (word, width) in enumerate(zip(line, wide))).rstrip() for line in lines)

    def __str__(self) -> str:
        return self.text()


class Lab(Resource):
    """A set of named traces on which policies are compared. A trace is an open `Trace`, which the
    caller keeps and closes; the path of a trace file; or a kind to generate ("chat", "agent",
    "batch", "multitenant", "burst"). `named` sets names; other traces are named after their source.
    `options` are those of `Trace.open` and `Trace.generate`. Any thread may use a lab.

    >>> import kvtier
    >>> with kvtier.Lab("chat", duration_ns=600 * 10**9, seed=1) as lab:
    ...     table = lab.compare(["lru", "belady"], ["5%", 200])
    >>> [(row.policy, row.size) for row in table]
    [('lru', '5%'), ('lru', '200'), ('belady', '5%'), ('belady', '200')]
    >>> [row.policy for row in table.best()]
    ['belady', 'belady']
    >>> print(str(table).splitlines()[0])
    trace  policy  size  blocks  tokens missed  cost missed  refilled  decision p99
    """

    _noun = "lab"

    def __init__(self, *traces: Source, named: Optional[Mapping[str, Source]] = None,
                 **options: Any) -> None:
        sources: List[Tuple[str, Source]] = [(_name_of(one), one) for one in traces]
        sources += list((named or {}).items())
        if not sources:
            raise _invalid("a lab needs at least one trace")
        self._traces: Optional[Dict[str, Trace]] = {}
        self._owned: List[Trace] = []
        try:
            for name, source in sources:
                if name in self._traces:
                    raise _invalid(f"two traces have the name {name!r}: set names, "
                                   "Lab(named={...})")
                self._traces[name] = self._open(source, options)
        except BaseException:
            self.close()
            raise

    def _open(self, source: Source, options: Dict[str, Any]) -> Trace:
        if isinstance(source, Trace):
            return source
        if isinstance(source, str) and source.isidentifier() and not os.path.exists(source):
            trace = Trace.generate(source, **options)
        else:
            trace = Trace.open(source, **options)
        self._owned.append(trace)
        return trace

    @property
    def closed(self) -> bool:
        """Whether the lab was closed."""
        return self._traces is None

    @property
    def traces(self) -> Dict[str, Trace]:
        """The traces by name."""
        if self._traces is None:
            raise self._closed_error()
        return dict(self._traces)

    @property
    def _raw(self) -> Any:
        return self.traces

    def compare(self, policies: Union[str, Iterable[str]] = ("lru", "s3fifo", "arc", "horizon"),
                sizes: Union[Size, Iterable[Size]] = ("1%", "5%", "10%"), *,
                progress: Optional[LabProgress] = None, **options: Any) -> LabTable:
        """Replays every trace under each policy at each size. `options` are those of
        `Trace.replay`. `progress` is called on this thread. Its exceptions propagate; if it
        returns False, the comparison ends with `CancelledError`."""
        specs = [policies] if isinstance(policies, str) else list(policies)
        all_sizes = [sizes] if isinstance(sizes, (int, str)) else list(sizes)
        runs = [(name, trace, spec, size) for name, trace in self.traces.items()
                for spec in specs for size in all_sizes]
        table = LabTable()
        for number, (name, trace, spec, size) in enumerate(runs):
            blocks = _blocks(size, trace.info.blocks)
            run = LabRun(number, len(runs), name, spec, blocks)
            replay = trace.replay(spec, blocks, progress=_progress_of(progress, run), **options)
            table.append(LabRow(name, spec, str(size), blocks, replay))
        return table

    def close(self) -> None:
        """Closes the traces that this lab has opened or generated."""
        self._traces = None
        while self._owned:
            self._owned.pop().close()

    def __iter__(self) -> Iterator[str]:
        return iter(self.traces)

    def __repr__(self) -> str:
        what = "closed" if self._traces is None else ", ".join(self._traces)
        return f"<kvtier.Lab {what}>"


def _progress_of(progress: Optional[LabProgress],
                 run: LabRun) -> "Optional[Callable[[int, int], Any]]":
    """The `progress` of `Trace.replay` for one run."""
    if progress is None:
        return None
    callback = progress
    return lambda done, total: callback(run, done, total)


def _name_of(source: Source) -> str:
    if isinstance(source, Trace):
        return "trace"
    name = os.path.basename(os.fspath(source))
    return name[: -len(".kvtrace")] if name.endswith(".kvtrace") else name


def _blocks(size: Size, trace_blocks: int) -> int:
    """A size in blocks; a percentage is rounded up."""
    if not isinstance(size, str):
        return u64(size)
    if not size.endswith("%"):
        if size.isdigit():
            return int(size)
        raise _invalid(f"size is {size!r}: use a number of blocks, or a percentage such as '5%'")
    try:
        percent = float(size[:-1])
    except ValueError:
        percent = 0.0
    if not 0.0 < percent <= 1e6:
        raise _invalid(f"size is {size!r}: a percentage must be greater than 0")
    return max(1, -int(-trace_blocks * percent // 100))
