"""The lab: policies by sizes on several traces, as a table."""

from __future__ import annotations

import os
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional
from typing import Tuple, Union

from . import _abi
from ._errors import make
from ._lib import u64
from ._resource import Resource
from ._trace import Replay, Trace

#: A trace, the path of one, or what `Trace.generate` makes ("chat").
Source = Union[Trace, str, "os.PathLike[str]"]
#: Blocks, or a part of the trace's: "5%".
Size = Union[int, str]
#: Told of each run and how far it is: the row's trace, policy and size, then requests done and
#: how many there are. False stops all.
LabProgress = Callable[["LabRun", int, int], Any]


def _invalid(text: str) -> Exception:
    return make(_abi.KVT_E_INVALID, text)


class LabRun(NamedTuple):
    """A run of a comparison: which it is of how many, and of what."""

    number: int
    runs: int
    trace: str
    policy: str
    capacity_blocks: int


class LabRow(NamedTuple):
    """How a policy did on a trace at a size."""

    trace: str
    policy: str
    #: As it was asked for.
    size: str
    capacity_blocks: int
    replay: Replay

    @property
    def token_miss_ratio(self) -> float:
        """Tokens to be computed, of all that were asked for."""
        return 1.0 - self.replay.token_hit_rate

    @property
    def cost_miss_ratio(self) -> float:
        """The same of what computing costs."""
        return 1.0 - self.replay.cost_hit_rate

    def as_dict(self) -> Dict[str, Any]:
        """All numbers by name."""
        return {"trace": self.trace, "policy": self.policy, "size": self.size,
                "capacity_blocks": self.capacity_blocks,
                "token_miss_ratio": self.token_miss_ratio,
                "cost_miss_ratio": self.cost_miss_ratio, **self.replay._asdict()}


class LabTable(List[LabRow]):
    """The rows of a comparison: traces, policies within them, sizes within policies.
    `str(table)` is the table for people."""

    def dicts(self) -> List[Dict[str, Any]]:
        """The rows as dicts, for `pandas.DataFrame` and `csv.DictWriter`."""
        return [row.as_dict() for row in self]

    def best(self) -> "LabTable":
        """For each trace and size the row that misses the fewest tokens, the first of equals."""
        found: Dict[Tuple[str, str], LabRow] = {}
        for row in self:
            key = row.trace, row.size
            if key not in found or row.token_miss_ratio < found[key].token_miss_ratio:
                found[key] = row
        return LabTable(found.values())

    def text(self) -> str:
        """The table for people."""
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
    """Traces, and what policies would do on them. Traces are given by name, or one after the
    other: open ones, which stay yours, paths of files, or kinds that can be generated ("chat",
    "agent", "batch", "multitenant", "burst"); `options` are for those that are opened or made
    here (`Trace.open`, `Trace.generate`). Any thread may use it.

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
        given: List[Tuple[str, Source]] = [(_name_of(one), one) for one in traces]
        given += list((named or {}).items())
        if not given:
            raise _invalid("a lab without traces")
        self._traces: Optional[Dict[str, Trace]] = {}
        self._mine: List[Trace] = []
        try:
            for name, source in given:
                if name in self._traces:
                    raise _invalid(f"two traces are called {name!r}: name them, Lab(named={{...}})")
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
        self._mine.append(trace)
        return trace

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
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
        """Replays every trace under each policy at each size; the options are those of
        `Trace.replay`. `progress` is called on this thread; what it raises is raised here, and
        where it gives False all ends with `CancelledError`."""
        specs = [policies] if isinstance(policies, str) else list(policies)
        asked = [sizes] if isinstance(sizes, (int, str)) else list(sizes)
        todo = [(name, trace, spec, size) for name, trace in self.traces.items()
                for spec in specs for size in asked]
        table = LabTable()
        for number, (name, trace, spec, size) in enumerate(todo):
            blocks = _blocks(size, trace.info.blocks)
            run = LabRun(number, len(todo), name, spec, blocks)
            replay = trace.replay(spec, blocks, progress=_told(progress, run), **options)
            table.append(LabRow(name, spec, str(size), blocks, replay))
        return table

    def close(self) -> None:
        """Closes the traces that were opened or made here."""
        self._traces = None
        while self._mine:
            self._mine.pop().close()

    def __iter__(self) -> Iterator[str]:
        return iter(self.traces)

    def __repr__(self) -> str:
        what = "closed" if self._traces is None else ", ".join(self._traces)
        return f"<kvtier.Lab {what}>"


def _told(progress: Optional[LabProgress], run: LabRun) -> "Optional[Callable[[int, int], Any]]":
    if progress is None:
        return None
    hear = progress
    return lambda done, total: hear(run, done, total)


def _name_of(source: Source) -> str:
    if isinstance(source, Trace):
        return "trace"
    name = os.path.basename(os.fspath(source))
    return name[: -len(".kvtrace")] if name.endswith(".kvtrace") else name


def _blocks(size: Size, all_of_them: int) -> int:
    """A size in blocks; a part of them is rounded up."""
    if not isinstance(size, str):
        return u64(size)
    if not size.endswith("%"):
        if size.isdigit():
            return int(size)
        raise _invalid(f"a size of {size!r}: blocks, or a part of the trace's such as '5%'")
    try:
        part = float(size[:-1])
    except ValueError:
        part = 0.0
    if not 0.0 < part <= 1e6:
        raise _invalid(f"a size of {size!r}: a part is more than 0 %")
    return max(1, -int(-all_of_them * part // 100))
