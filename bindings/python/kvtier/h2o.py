"""Token eviction for caches that keep a batch of sequences in arrays: what needs numpy only.

An `Evictor` knows which tokens of a layer are in which rows of its arrays, tells a policy for
each sequence what their keys got of the attention, and says which rows stay. The package
kvtier_transformers does so with torch tensors; `ArrayLayer` does it with arrays of numpy's.

>>> import numpy as np
>>> policy = spec("h2o", budget=4, n_recent=4)
>>> policy
'h2o(sink=4,recent=4,budget=4,evict_every=1,heads=all)'
>>> layer = ArrayLayer(policy, query_heads=2)
>>> rows = np.random.default_rng(0).standard_normal((3, 1, 2, 20, 8)).astype(np.float32)
>>> layer.step(*rows)
>>> layer.keys.shape, layer.evictor.seen
((1, 2, 12, 8), 20)
"""

from __future__ import annotations

import bisect
import importlib
import warnings
from typing import Any, Callable, List, Optional, Tuple, Union

from ._needs import Needs

Needs("kvtier.h2o", "eviction of tokens", "numpy", ("numpy",)).check()

import numpy as np  # noqa: E402

from . import _abi, kernels  # noqa: E402
from ._errors import make  # noqa: E402
from ._offload import Attention, Context  # noqa: E402
from ._sparse import (  # noqa: E402
    Sparse,
    SparseCaps,
    SparseNeeds,
    SparseScope,
    sparse_policies,
)

__all__ = ["ArrayLayer", "Evictor", "check", "spec"]

#: A spec, or what makes a policy of one's own for each sequence.
Policy = Union[str, Callable[[], Any]]

#: As many tokens as a policy can count.
MAX_TOKENS = 1 << 30
#: The sums of all queries are wanted, and add up.
ALL_QUERIES = 2**32 - 1

#: How policies call the numbers of `spec`.
_NAMES = {
    "h2o": {"n_sink": "sink", "n_recent": "recent", "budget": "budget",
            "evict_every": "evict_every"},
    "streaming": {"n_sink": "sinks", "n_recent": "recent"},
    "keydiff": {"n_sink": "sink", "n_recent": "recent", "budget": "budget"},
    "knorm": {"n_sink": "sink", "n_recent": "recent", "budget": "budget"},
    "tova": {"budget": "budget"}, "snapkv": {"budget": "budget"},
    "pyramidkv": {"budget": "budget"}, "adakv": {"budget": "budget"},
}


def _invalid(text: str) -> Exception:
    return make(_abi.KVT_E_INVALID, text)


def _unsupported(text: str) -> Exception:
    return make(_abi.KVT_E_UNSUPPORTED, text)


def spec(policy: str = "h2o", budget: Optional[int] = None, n_sink: Optional[int] = None,
         n_recent: Optional[int] = None, evict_every: int = 1, per_head: bool = False) -> str:
    """The spec of a policy: from its name and numbers, or as it is where it has parentheses.
    Without a number the policy's own default stands; `h2o` keeps 4 sinks."""
    if "(" in policy:
        if (budget, n_sink, n_recent, evict_every, per_head) != (None, None, None, 1, False):
            raise _invalid(f"{policy} has its numbers already: leave budget, n_sink, n_recent, "
                           "evict_every and per_head out, or give the name alone")
        return policy
    if policy not in _NAMES:
        known = ", ".join(one.name for one in sparse_policies())
        raise _invalid(f"{policy!r} takes no budget, n_sink and n_recent: those that do are "
                       f"{', '.join(_NAMES)}. Others are given as a whole spec, 'name(...)'; "
                       f"there are {known}")
    if policy == "h2o" and n_sink is None:
        n_sink = 4
    given = {"n_sink": n_sink, "n_recent": n_recent, "budget": budget,
             "evict_every": None if evict_every == 1 and policy != "h2o" else evict_every}
    names, words = _NAMES[policy], []
    for name, value in given.items():
        if value is None:
            continue
        if name not in names:
            raise _invalid(f"{policy} knows no {name}: it takes {', '.join(names)}")
        words.append(f"{names[name]}={value}")
    if n_sink is not None and n_sink < 4:
        warnings.warn(f"n_sink is {n_sink}: without its first 4 tokens a model tends to repeat "
                      "itself", stacklevel=2)
    if policy == "h2o":
        words.append("heads=" + ("each" if per_head else "all"))
    elif per_head:
        raise _invalid(f"per_head is h2o's; whether {policy} has a list for each head is in its "
                       "traits")
    return f"{policy}({','.join(words)})"


def _zeros(*shape: int) -> "np.ndarray[Any, Any]":
    return np.zeros(shape, np.int64)


class Evictor:
    """Which tokens of a layer stay, for each sequence of a batch.

    Arrays have a row for each token that is there, and as many for each sequence and head:
    `ids` says which token a row has (its place among the real ones of the sequence, -1 =
    padding) and `columns` which column of the batch it was, both [sequences, lists, rows].
    One list is for all heads. What a policy answers is not changed.
    """

    def __init__(self, shape: Attention, policy: Policy, layer: int = 0, batch: int = 1) -> None:
        self.shape, self.layer = shape, layer
        self.policies = [Sparse(shape, policy if isinstance(policy, str) else policy())
                         for _ in range(batch)]
        self.traits = self.policies[0].traits
        check_traits(self.traits, shape)
        #: Columns that came so far, padding included: what a mask counts.
        self.seen = 0
        #: Queries that were observed, of all sequences.
        self.observed = 0
        #: Whether all columns are there, in their order: nothing went yet.
        self.whole = True
        #: [ids or columns, sequences, lists, rows], with room behind. Without padding columns
        #: are ids.
        self._room = _zeros(1, batch, 1, 64)
        self._rows = 0
        self._counts = np.zeros(batch, np.int64)
        self._new = np.zeros(batch, np.int64)
        self._gaps = False
        #: The columns of each sequence that were padding, in their order.
        self._padding: List[List[int]] = [[] for _ in range(batch)]

    @property
    def batch(self) -> int:
        """How many sequences."""
        return len(self.policies)

    @property
    def counts(self) -> "np.ndarray[Any, Any]":
        """How many real tokens each sequence had."""
        return self._counts

    @property
    def rows(self) -> int:
        """How many rows the arrays have."""
        return self._rows

    @property
    def ids(self) -> "np.ndarray[Any, Any]":
        """Which token of its sequence each row is, -1 = padding."""
        return self._room[0, :, :, :self._rows]

    @property
    def columns(self) -> "np.ndarray[Any, Any]":
        """Which column of the batch each row was."""
        return self._room[-1, :, :, :self._rows]

    @property
    def padded(self) -> bool:
        """Whether some rows are padding."""
        return self._gaps

    @property
    def by_head(self) -> bool:
        """Whether sums are wanted for each query head."""
        return self.traits.scope is not SparseScope.LAYER

    def kept(self, sequence: int) -> List[List[int]]:
        """The tokens that are there, a list for each head or one for all."""
        of = self.ids[sequence]
        if self.by_head and len(of) == 1:  # nothing went yet
            of = np.broadcast_to(of, (self.shape.key_heads, of.shape[1]))
        return [one[one >= 0].tolist() for one in of]

    def extend(self, count: int, real: Any = None) -> None:
        """So many columns came; `real` [sequences, columns] says which are no padding."""
        if real is not None:
            real = np.asarray(real, bool)
            if real.shape != (self.batch, count):
                raise _invalid(f"{list(real.shape)} for {count} columns of {self.batch} "
                               "sequences: a cache is begun anew for another batch")
            real = None if real.all() else real
        if real is not None and len(self._room) == 1:
            self._room = np.concatenate([self._room, self._room])
        first, end = self._rows, self._rows + count
        if end > self._room.shape[3]:
            room = _zeros(*self._room.shape[:3], end + end // 2 + 64)
            room[..., :first] = self._room[..., :first]
            self._room = room
        each = np.arange(count)
        new = self._room[:, :, :, first:end]
        if real is None:
            new[0] = (self._counts[:, None] + each)[:, None]
            self._new[:] = count
        else:
            ids = np.where(real, self._counts[:, None] + np.cumsum(real, 1) - 1, -1)
            new[0], self._new, self._gaps = ids[:, None], real.sum(1), True
            for known, one in zip(self._padding, real):
                known.extend((self.seen + np.flatnonzero(~one)).tolist())
        if len(new) > 1:
            new[1] = self.seen + each
        self._rows, self.seen = end, self.seen + count
        self._counts = self._counts + self._new

    def real_rows(self, sequence: int) -> "Union[slice, np.ndarray[Any, Any]]":
        """The rows of a sequence that are no padding; all its lists have as many."""
        if not self._gaps:
            return slice(0, self.rows)
        return _compact(np.flatnonzero(self.ids[sequence, 0] >= 0))

    def new_rows(self, sequence: int, count: int) -> "Union[slice, np.ndarray[Any, Any]]":
        """Which of the `count` columns that came last are no padding."""
        if not self._gaps:
            return slice(0, count)
        return _compact(np.flatnonzero(self.ids[sequence, 0, self.rows - count:] >= 0))

    def came(self, sequence: int) -> int:
        """How many real tokens came last."""
        return int(self._new[sequence])

    def wants_sums(self, is_prefill: bool) -> int:
        """The sums of so many last queries are to be told; 0 = none are."""
        if not self.traits.needs & SparseNeeds.COLUMN_SUMS or not self._evicts(is_prefill):
            return 0
        if self.traits.ragged and not self.whole:
            raise _unsupported("heads have different numbers of tokens, attention to them cannot "
                               "be told again: give the prompt in one piece")
        return self.traits.sum_queries

    @property
    def wants_keys(self) -> bool:
        """Whether keys are to be told."""
        return bool(self.traits.needs & SparseNeeds.KEYS)

    def observe(self, sequence: int, sums: Any, queries: int) -> None:
        """What the real rows of a sequence got of the attention of so many queries:
        [query heads, rows], or [rows]."""
        sums = np.ascontiguousarray(sums, np.float32)
        self.policies[sequence].observe(self.layer, queries, sums.reshape(-1), sums.shape[-1])
        self.observed += queries

    def append(self, sequence: int, keys: Any) -> None:
        """The keys of the real tokens that came last: [tokens, heads, dim]."""
        first = int(self._counts[sequence] - self._new[sequence])
        self.policies[sequence].append(self.layer, first, keys)

    def evict(self, is_prefill: bool) -> "Optional[np.ndarray[Any, Any]]":
        """Asks the policies: which rows stay, [sequences, lists, rows], to be gathered in this
        order; None = all do. Where a sequence has fewer, row 0 stands for padding in front."""
        if not self._evicts(is_prefill):
            return None
        keeps = [self._ask(sequence, is_prefill) for sequence in range(self.batch)]
        if all(keep is None for keep in keeps):
            return None
        lists = max([self._room.shape[2]] + [len(k.starts) - 1 for k in keeps if k is not None])
        places = [[self._places(sequence, one, keep) for one in range(lists)]
                  for sequence, keep in enumerate(keeps)]
        for policy, keep in zip(self.policies, keeps):
            if keep is not None:
                policy.evicted(self.layer, keep)
        return self._gather(places)

    def _evicts(self, is_prefill: bool) -> bool:
        caps = SparseCaps.EVICT_PREFILL if is_prefill else SparseCaps.EVICT_DECODE
        return bool(self.traits.caps & caps)

    def _ask(self, sequence: int, is_prefill: bool) -> Any:
        count, new = int(self._counts[sequence]), int(self._new[sequence])
        if new == 0:
            return None
        at = Context(count, count - new, is_prefill)
        return self.policies[sequence].evict(self.layer, at)

    def _places(self, sequence: int, one: int, keep: Any) -> "np.ndarray[Any, Any]":
        ids = self.ids[sequence, one if self._room.shape[2] > 1 else 0]
        there = np.flatnonzero(ids >= 0) if self._gaps else None
        if keep is None:
            return np.arange(len(ids)) if there is None else there
        at = one if len(keep.starts) > 2 else 0
        stays = np.asarray(keep.items[keep.starts[at]: keep.starts[at + 1]]).astype(np.int64)
        found = np.searchsorted(ids if there is None else ids[there], stays)
        return found if there is None else np.asarray(there[found])

    def _gather(self, places: List[List[Any]]) -> "np.ndarray[Any, Any]":
        """Keeps these rows, and says which: lists of one length, padded in front."""
        most = max(len(one) for lists in places for one in lists)
        lists, before = len(places[0]), self._rows
        rows = np.zeros((self.batch, lists, most), np.int64)
        padding = []
        for sequence, of in enumerate(places):
            for at, one in enumerate(of):
                rows[sequence, at, most - len(one):] = one
                if len(one) < most:
                    padding.append((sequence, at, most - len(one)))
        room = self._room[..., :before]
        if room.shape[2] != lists:
            room = np.repeat(room, lists, 2)
        # Room for as many as come until some go again.
        self._room = _zeros(*room.shape[:3], most + max(before - most, 16))
        if rows.shape[:2] == (1, 1):
            self._room[..., :most] = room[..., rows[0, 0]]
        else:
            self._room[..., :most] = np.take_along_axis(room, rows[None], 3)
        self._rows = most
        for sequence, at, count in padding:
            self._room[0, sequence, at, :count] = -1
        self._gaps = bool(padding) or (self._gaps and bool((self.ids < 0).any()))
        self.whole = False
        return rows

    def select(self, sequences: Any) -> None:
        """The batch is made of these of its sequences now: a beam goes on from another."""
        order, used, policies = np.asarray(sequences, np.int64), set(), []
        for sequence in order.tolist():
            policy = self.policies[sequence]
            policies.append(policy.fork() if sequence in used else policy)
            used.add(sequence)
        self.policies = policies
        self._room = self._room[:, order]
        self._counts, self._new = self._counts[order], self._new[order]
        self._padding = [list(self._padding[sequence]) for sequence in order.tolist()]

    def fork(self) -> "Evictor":
        """The same, of which each goes its own way."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.policies = [policy.fork() for policy in self.policies]
        other._room, other._counts = self._room.copy(), self._counts.copy()
        other._new = self._new.copy()
        other._padding = [list(one) for one in self._padding]
        return other

    def truncate(self, seen: int) -> "np.ndarray[Any, Any]":
        """Takes columns from `seen` on back: the rows that stay, as `evict` says it. What went
        for them does not come back."""
        for sequence, padding in enumerate(self._padding):
            left = bisect.bisect_left(padding, seen)
            # Of the columns that go, those whose tokens went before count, too.
            self._counts[sequence] -= self.seen - seen - (len(padding) - left)
            del padding[left:]
        for policy, count in zip(self.policies, self._counts.tolist()):
            policy.truncate(count)
        stays = self.columns < seen
        was_whole, self.seen = self.whole, seen
        rows = self._gather([[np.flatnonzero(one) for one in lists] for lists in stays])
        self.whole = was_whole
        return rows

    def forget(self) -> None:
        """Sets what tokens got of the attention so far to nothing; they stay."""
        if self.traits.sum_queries != ALL_QUERIES:
            return
        for sequence, policy in enumerate(self.policies):
            policy.reset()
            count = int(self._counts[sequence])
            if count:
                heads = self.shape.query_heads if self.by_head else 1
                policy.observe(self.layer, 1, np.zeros(heads * count, np.float32), count)
                policy.evicted(self.layer, kernels.TokenLists.of(self.kept(sequence)))


def check_traits(traits: Any, shape: Attention) -> None:
    """Refuses a policy whose answers such a cache cannot follow."""
    if not traits.caps & (SparseCaps.EVICT_PREFILL | SparseCaps.EVICT_DECODE):
        raise _unsupported("this policy evicts no tokens: take h2o, tova, snapkv, pyramidkv, "
                           "adakv, keydiff, knorm, streaming or duo")
    if traits.rotates:
        raise _unsupported("keys keep the positions that they were computed with: leave "
                           "rotate=true out")
    if traits.scope is SparseScope.QUERY_HEAD and shape.query_heads != shape.key_heads:
        raise _unsupported("a list for each query head, where heads share keys: take "
                           "form=kvpress")
    if shape.latent and traits.ragged:
        raise _unsupported("all heads share a latent row: a policy that gives heads different "
                           "numbers of tokens cannot be")


def _compact(rows: "np.ndarray[Any, Any]") -> "Union[slice, np.ndarray[Any, Any]]":
    """Rows side by side as a slice, which copies nothing."""
    if len(rows) and rows[-1] - rows[0] + 1 == len(rows):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


class ArrayLayer:
    """Keys and values of a layer, [sequences, heads, rows, dim], under a policy."""

    def __init__(self, policy: Policy, query_heads: int, *, scale: float = 0.0, layer: int = 0,
                 layers: int = 1, latent: bool = False) -> None:
        self._open = policy, query_heads, layer, layers, latent
        self.scale = scale
        self.keys: Any = None
        self.values: Any = None
        self._evictor: Optional[Evictor] = None

    @property
    def evictor(self) -> Evictor:
        """What decides; there is none before the first step."""
        if self._evictor is None:
            raise make(_abi.KVT_E_STATE, "no token has come yet")
        return self._evictor

    def step(self, queries: Any, keys: Any, values: Any, real: Any = None) -> None:
        """Tokens come: their queries [sequences, query heads, tokens, dim], keys and values.
        `real` [sequences, tokens] says which are no padding."""
        batch, _, count, _ = queries.shape
        if self._evictor is None:
            self.keys, self.values = keys[:, :, :0], values[:, :, :0]
            policy, heads, layer, layers, latent = self._open
            shape = Attention(layers, heads, keys.shape[1], keys.shape[3], values.shape[3], 16,
                              MAX_TOKENS, latent)
            self._evictor = Evictor(shape, policy, layer, batch)
        evictor = self._evictor
        is_prefill = count > 1 or evictor.seen == 0
        self.keys = np.concatenate([self.keys, keys], 2)
        self.values = np.concatenate([self.values, values], 2)
        evictor.extend(count, real)
        for sequence in range(batch):
            self._tell(sequence, queries[sequence], count, is_prefill)
        places = evictor.evict(is_prefill)
        if places is not None:
            self.keys, self.values = (np.take_along_axis(one, places[..., None], 2)
                                      for one in (self.keys, self.values))

    def _tell(self, sequence: int, queries: Any, count: int, is_prefill: bool) -> None:
        evictor = self.evictor
        new = evictor.new_rows(sequence, count)
        queries = queries[:, new].swapaxes(0, 1)
        if queries.shape[0] == 0:
            return
        if evictor.wants_keys:
            came = self.keys[sequence, :, self.keys.shape[2] - count:]
            evictor.append(sequence, came[:, new].swapaxes(0, 1))
        wanted = evictor.wants_sums(is_prefill)
        if wanted:
            queries = queries[-wanted:]
            keys = self.keys[sequence][:, evictor.real_rows(sequence)].swapaxes(0, 1)
            sums = column_sums(queries, keys, self.scale, evictor.by_head)
            evictor.observe(sequence, sums, queries.shape[0])


def column_sums(queries: Any, keys: Any, scale: float = 0.0, by_head: bool = False,
                threads: Any = 1) -> Any:
    """What each key got of the attention of the last queries: [query heads, keys] or [keys].
    Both are arrays [tokens, heads, dim] or `kernels.Rows`; no probabilities are kept, and no
    outputs: values have one number."""
    count, (total, heads) = _shape(queries)[0], _shape(keys)[:2]
    values, first = np.zeros((total, heads, 1), np.float32), total - count
    if count == 1:
        return np.asarray(kernels.decode(
            queries, keys, values, first_query=first, scale=scale, with_sums=True,
            by_head=by_head, threads=threads).sums)
    lse = kernels.prefill(queries, keys, values, first_query=first, scale=scale,
                          threads=threads).lse
    return np.asarray(kernels.sums(queries, keys, values, lse, first_query=first, scale=scale,
                                   by_head=by_head, threads=threads))


def _shape(rows: Any) -> Tuple[int, ...]:
    return tuple((rows.data if isinstance(rows, kernels.Rows) else rows).shape)


def check(model: Any, **options: Any) -> Any:
    """Looks for what usually goes wrong with a model whose cache evicts tokens: see
    `kvtier_transformers.check`, which this calls."""
    return importlib.import_module("kvtier_transformers.check").check(model, **options)
