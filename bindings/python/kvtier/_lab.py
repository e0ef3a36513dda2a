"""The lab: compares policies at several sizes on several traces, as a table."""

from __future__ import annotations

import os
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional
from typing import Tuple, Union

from . import _abi
from ._errors import make
from ._lib import u64
from ._resource import Resource
from ._trace import Replay, Trace

#: A trace, the path of a trace, or a kind for `Trace.generate` ("chat").
Source = Union[Trace, str, "os.PathLike[str]"]
#: A number of blocks, or a share of the trace's blocks: "5%".
Size = Union[int, str]
#: Called with the run, the requests done, and the number of requests. False stops the
#: comparison.
LabProgress = Callable[["LabRun", int, int], Any]


def _invalid(text: str) -> Exception:
    return make(_abi.KVT_E_INVALID, text)


class LabRun(NamedTuple):
    """A run of a comparison: its number, the number of runs, and its parameters."""

    number: int
    runs: int
    trace: str
    policy: str
    capacity_blocks: int


class LabRow(NamedTuple):
    """The result of a policy on a trace at a size."""

    trace: str
    policy: str
    #: The size as the caller gave it.
    size: str
    capacity_blocks: int
    replay: Replay

    @property
    def token_miss_ratio(self) -> float:
        """The share of requested tokens that must be computed."""
        return 1.0 - self.replay.token_hit_rate

    @property
    def cost_miss_ratio(self) -> float:
        """The share of the requested tokens' recompute cost that is not saved."""
        return 1.0 - self.replay.cost_hit_rate

    def as_dict(self) -> Dict[str, Any]:
        """Returns all numbers by name."""
        return {"trace": self.trace, "policy": self.policy, "size": self.size,
                "capacity_blocks": self.capacity_blocks,
                "token_miss_ratio": self.token_miss_ratio,
                "cost_miss_ratio": self.cost_miss_ratio, **self.replay._asdict()}


class LabTable(List[LabRow]):
    """The rows of a comparison, ordered by trace, policy and size. `str(table)` is a readable
    table."""

    def dicts(self) -> List[Dict[str, Any]]:
        """Returns the rows as dicts, for `pandas.DataFrame` and `csv.DictWriter`."""
        return [row.as_dict() for row in self]

    def best(self) -> "LabTable":
        """Returns the row with the fewest missed tokens per trace and size, the first of
        equals."""
        found: Dict[Tuple[str, str], LabRow] = {}
        for row in self:
            key = row.trace, row.size
            if key not in found or row.token_miss_ratio < found[key].token_miss_ratio:
                found[key] = row
        return LabTable(found.values())

    def text(self) -> str:
        """Returns a readable table."""
        head = ["trace", "policy", "size", "blocks", "tokens missed", "cost missed", "refilled",
                "decision p99"]
        lines = [head, *(
            [row.trace, row.policy, row.size, f"{row.capacity_blocks}",
             f"{100 * row.token_miss_ratio:.2f} %", f"{100 * row.cost_miss_ratio:.2f} %",
             f"{100 * row.replay.re_prefill_rate:.2f} %",
             f"{row.replay.decision_p99_ns / 1000:.1f} us"] for row in self)]
        widths = [max(map(len, column)) for column in zip(*lines)]
        # Names are aligned to the left, numbers to the right.
        return "\n".join("  ".join(
            word.ljust(width) if at < 2 else word.rjust(width)
            for at, (word, width) in enumerate(zip(line, widths))).rstrip() for line in lines)

    def __str__(self) -> str:
        return self.text()


class Lab(Resource):
    """Replays traces under several policies. Any thread may use it.

    Traces are positional, or `named`. A trace is an open `Trace`, which the caller keeps, a path,
    or a kind to generate ("chat", "agent", "batch", "multitenant", "burst"). `options` apply to
    traces that the lab opens or generates (`Trace.open`, `Trace.generate`).

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

    _type_name = "lab"

    def __init__(self, *traces: Source, named: Optional[Mapping[str, Source]] = None,
                 **options: Any) -> None:
        given: List[Tuple[str, Source]] = [(_name_of(source), source) for source in traces]
        given += list((named or {}).items())
        if not given:
            raise _invalid("the lab has no traces: give at least one")
        self._traces: Optional[Dict[str, Trace]] = {}
        self._owned: List[Trace] = []
        try:
            for name, source in given:
                if name in self._traces:
                    raise _invalid(f"two traces have the name {name!r}: give names with "
                                   "Lab(named={...})")
                self._traces[name] = self._take(source, options)
        except BaseException:
            self.close()
            raise

    def _take(self, source: Source, options: Dict[str, Any]) -> Trace:
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
        """Replays every trace under each policy at each size, with the options of `Trace.replay`.
        `progress` is called on this thread. Its exceptions are raised here; if it returns False,
        the comparison ends with `CancelledError`."""
        specs = [policies] if isinstance(policies, str) else list(policies)
        wanted = [sizes] if isinstance(sizes, (int, str)) else list(sizes)
        todo = [(name, trace, spec, size) for name, trace in self.traces.items()
                for spec in specs for size in wanted]
        table = LabTable()
        for number, (name, trace, spec, size) in enumerate(todo):
            blocks = _blocks(size, trace.info.blocks)
            run = LabRun(number, len(todo), name, spec, blocks)
            replay = trace.replay(spec, blocks, progress=_progress_of(progress, run), **options)
            table.append(LabRow(name, spec, str(size), blocks, replay))
        return table

    def close(self) -> None:
        """Closes the traces that the lab opened or generated."""
        self._traces = None
        while self._owned:
            self._owned.pop().close()

    def __iter__(self) -> Iterator[str]:
        return iter(self.traces)

    def __repr__(self) -> str:
        state = "closed" if self._traces is None else ", ".join(self._traces)
        return f"<kvtier.Lab {state}>"


def _progress_of(progress: Optional[LabProgress],
                 run: LabRun) -> "Optional[Callable[[int, int], Any]]":
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
    """Returns a size in blocks; a share is rounded up."""
    if not isinstance(size, str):
        return u64(size)
    if not size.endswith("%"):
        if size.isdigit():
            return int(size)
        raise _invalid(f"size {size!r} is invalid: give a number of blocks, or a share of the "
                       "trace's blocks such as '5%'")
    try:
        percent = float(size[:-1])
    except ValueError:
        percent = 0.0
    if not 0.0 < percent <= 1e6:
        raise _invalid(f"size {size!r} is invalid: a share must be above 0 % and at most "
                       "1000000 %")
    return max(1, -int(-trace_blocks * percent // 100))
