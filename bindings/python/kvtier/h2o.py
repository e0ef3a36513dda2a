"""Token eviction for caches that keep a batch of sequences in arrays. It needs only numpy.

An `Evictor` tracks which row of a layer's arrays has which token. It passes attention sums to one
policy per sequence, and returns the rows to keep. `ArrayLayer` uses it with numpy arrays, the
package kvtier_transformers with torch tensors.

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
from ._offload import Attention, SparseContext  # noqa: E402
from ._sparse import (  # noqa: E402
    Sparse,
    SparseCaps,
    SparseNeeds,
    SparseScope,
    sparse_policies,
)

__all__ = ["ArrayLayer", "Evictor", "check", "spec"]

#: A spec, or a function that creates a custom policy per sequence.
Policy = Union[str, Callable[[], Any]]

#: The most tokens that a policy can count.
MAX_TOKENS = 1 << 30
#: The value of `sum_queries` for policies that accumulate the sums of all queries.
ALL_QUERIES = 2**32 - 1

#: Each policy's option names for the arguments of `spec`.
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
    """Returns the spec of a policy, from its name and numbers. A spec with parentheses is
    returned unchanged. A missing number selects the policy's default; `h2o` keeps 4 sinks."""
    if "(" in policy:
        if (budget, n_sink, n_recent, evict_every, per_head) != (None, None, None, 1, False):
            raise _invalid(f"{policy} is a complete spec: omit budget, n_sink, n_recent, "
                           "evict_every and per_head, or give only the policy's name")
        return policy
    if policy not in _NAMES:
        known = ", ".join(info.name for info in sparse_policies())
        raise _invalid(f"policy {policy!r} takes no budget, n_sink and n_recent: these policies "
                       f"do: {', '.join(_NAMES)}. Give any other as a complete spec, 'name(...)'; "
                       f"the policies are {known}")
    if policy == "h2o" and n_sink is None:
        n_sink = 4
    given = {"n_sink": n_sink, "n_recent": n_recent, "budget": budget,
             "evict_every": None if evict_every == 1 and policy != "h2o" else evict_every}
    names, words = _NAMES[policy], []
    for name, value in given.items():
        if value is None:
            continue
        if name not in names:
            raise _invalid(f"{policy} has no option {name}: it takes {', '.join(names)}")
        words.append(f"{names[name]}={value}")
    if n_sink is not None and n_sink < 4:
        warnings.warn(f"n_sink is {n_sink}: a model tends to repeat itself without its first 4 "
                      "tokens; use n_sink of at least 4", stacklevel=2)
    if policy == "h2o":
        words.append("heads=" + ("each" if per_head else "all"))
    elif per_head:
        raise _invalid(f"per_head is an option of h2o only: the traits of {policy} determine "
                       "whether it has a list per head")
    return f"{policy}({','.join(words)})"


def _zeros(*shape: int) -> "np.ndarray[Any, Any]":
    return np.zeros(shape, np.int64)


class Evictor:
    """Decides which tokens of a layer to keep, for each sequence of a batch.

    The arrays have a row per kept token, and the same number of rows for each sequence and head.
    `ids` are the tokens of the rows: a token's index among the real tokens of its sequence, -1 =
    padding. `columns` are the rows' original columns of the batch. Both are [sequences, lists,
    rows]; a single list covers all heads. The policy's decisions are applied unchanged.
    """

    def __init__(self, shape: Attention, policy: Policy, layer: int = 0, batch: int = 1) -> None:
        self.shape, self.layer = shape, layer
        self.policies = [Sparse(shape, policy if isinstance(policy, str) else policy())
                         for _ in range(batch)]
        self.traits = self.policies[0].traits
        check_traits(self.traits, shape)
        #: The number of columns so far, including padding, as an attention mask counts them.
        self.seen = 0
        #: The number of observed queries, of all sequences.
        self.observed = 0
        #: Whether all columns are present in order, because nothing was evicted yet.
        self.whole = True
        #: [ids or columns, sequences, lists, rows], with spare rows at the end. Without padding,
        #: columns equal ids.
        self._room = _zeros(1, batch, 1, 64)
        self._rows = 0
        self._counts = np.zeros(batch, np.int64)
        self._new = np.zeros(batch, np.int64)
        self._gaps = False
        #: The padding columns of each sequence, in order.
        self._padding: List[List[int]] = [[] for _ in range(batch)]

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return len(self.policies)

    @property
    def counts(self) -> "np.ndarray[Any, Any]":
        """The number of real tokens of each sequence so far."""
        return self._counts

    @property
    def rows(self) -> int:
        """The number of rows of the arrays."""
        return self._rows

    @property
    def ids(self) -> "np.ndarray[Any, Any]":
        """The token of each row in its sequence, -1 = padding."""
        return self._room[0, :, :, :self._rows]

    @property
    def columns(self) -> "np.ndarray[Any, Any]":
        """The original column of each row in the batch."""
        return self._room[-1, :, :, :self._rows]

    @property
    def padded(self) -> bool:
        """Whether some rows are padding."""
        return self._gaps

    @property
    def by_head(self) -> bool:
        """Whether the policy needs sums per query head."""
        return self.traits.scope is not SparseScope.LAYER

    def kept(self, sequence: int) -> List[List[int]]:
        """Returns the kept tokens, a list per head or one for all heads."""
        lists = self.ids[sequence]
        if self.by_head and len(lists) == 1:  # nothing was evicted yet
            lists = np.broadcast_to(lists, (self.shape.key_heads, lists.shape[1]))
        return [ids[ids >= 0].tolist() for ids in lists]

    def extend(self, count: int, real: Any = None) -> None:
        """Adds `count` columns; `real` [sequences, columns] marks those that are no padding."""
        if real is not None:
            real = np.asarray(real, bool)
            if real.shape != (self.batch, count):
                raise _invalid(f"real has shape {list(real.shape)}: it must be [{self.batch}, "
                               f"{count}], sequences and columns; use a new cache for another "
                               "batch")
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
            for known, marks in zip(self._padding, real):
                known.extend((self.seen + np.flatnonzero(~marks)).tolist())
        if len(new) > 1:
            new[1] = self.seen + each
        self._rows, self.seen = end, self.seen + count
        self._counts = self._counts + self._new

    def real_rows(self, sequence: int) -> "Union[slice, np.ndarray[Any, Any]]":
        """Returns the rows of a sequence that are no padding; all its lists have as many."""
        if not self._gaps:
            return slice(0, self.rows)
        return _compact(np.flatnonzero(self.ids[sequence, 0] >= 0))

    def new_rows(self, sequence: int, count: int) -> "Union[slice, np.ndarray[Any, Any]]":
        """Returns which of the last `count` columns are no padding."""
        if not self._gaps:
            return slice(0, count)
        return _compact(np.flatnonzero(self.ids[sequence, 0, self.rows - count:] >= 0))

    def new_tokens(self, sequence: int) -> int:
        """Returns the number of real tokens in the last `extend`."""
        return int(self._new[sequence])

    def wants_sums(self, is_prefill: bool) -> int:
        """Returns the number of last queries whose sums the policy needs; 0 = none."""
        if not self.traits.needs & SparseNeeds.COLUMN_SUMS or not self._evicts(is_prefill):
            return 0
        if self.traits.ragged and not self.whole:
            raise _unsupported("heads have kept different numbers of tokens, so their attention "
                               "sums cannot be passed again: process the prompt in one piece")
        return self.traits.sum_queries

    @property
    def wants_keys(self) -> bool:
        """Whether the policy needs keys."""
        return bool(self.traits.needs & SparseNeeds.KEYS)

    def observe(self, sequence: int, sums: Any, queries: int) -> None:
        """Passes attention sums of a sequence's real rows over `queries` queries: [query heads,
        rows], or [rows]."""
        sums = np.ascontiguousarray(sums, np.float32)
        self.policies[sequence].observe(self.layer, queries, sums.reshape(-1), sums.shape[-1])
        self.observed += queries

    def append(self, sequence: int, keys: Any) -> None:
        """Passes the keys of the real tokens of the last `extend`: [tokens, heads, dim]."""
        first = int(self._counts[sequence] - self._new[sequence])
        self.policies[sequence].append(self.layer, first, keys)

    def evict(self, is_prefill: bool) -> "Optional[np.ndarray[Any, Any]]":
        """Lets the policies evict. Returns the rows to keep, [sequences, lists, rows], in the order
        to gather them; None = all rows. A sequence with fewer rows has row 0 in front, as
        padding."""
        if not self._evicts(is_prefill):
            return None
        keeps = [self._decide(sequence, is_prefill) for sequence in range(self.batch)]
        if all(keep is None for keep in keeps):
            return None
        lists = max([self._room.shape[2]] + [len(k.starts) - 1 for k in keeps if k is not None])
        rows = [[self._kept_rows(sequence, number, keep) for number in range(lists)]
                for sequence, keep in enumerate(keeps)]
        for policy, keep in zip(self.policies, keeps):
            if keep is not None:
                policy.commit_eviction(self.layer, keep)
        return self._gather(rows)

    def _evicts(self, is_prefill: bool) -> bool:
        caps = SparseCaps.EVICT_PREFILL if is_prefill else SparseCaps.EVICT_DECODE
        return bool(self.traits.caps & caps)

    def _decide(self, sequence: int, is_prefill: bool) -> Any:
        count, new = int(self._counts[sequence]), int(self._new[sequence])
        if new == 0:
            return None
        at = SparseContext(count, count - new, is_prefill)
        return self.policies[sequence].plan_eviction(self.layer, at)

    def _kept_rows(self, sequence: int, number: int, keep: Any) -> "np.ndarray[Any, Any]":
        """Returns the rows of one list of a sequence that stay."""
        ids = self.ids[sequence, number if self._room.shape[2] > 1 else 0]
        real = np.flatnonzero(ids >= 0) if self._gaps else None
        if keep is None:
            return np.arange(len(ids)) if real is None else real
        at = number if len(keep.starts) > 2 else 0
        kept = np.asarray(keep.items[keep.starts[at]: keep.starts[at + 1]]).astype(np.int64)
        found = np.searchsorted(ids if real is None else ids[real], kept)
        return found if real is None else np.asarray(real[found])

    def _gather(self, kept: List[List[Any]]) -> "np.ndarray[Any, Any]":
        """Keeps only these rows, and returns them as lists of equal length, padded in front."""
        most = max(len(numbers) for lists in kept for numbers in lists)
        count, before = len(kept[0]), self._rows
        rows = np.zeros((self.batch, count, most), np.int64)
        padding = []
        for sequence, lists in enumerate(kept):
            for at, numbers in enumerate(lists):
                rows[sequence, at, most - len(numbers):] = numbers
                if len(numbers) < most:
                    padding.append((sequence, at, most - len(numbers)))
        room = self._room[..., :before]
        if room.shape[2] != count:
            room = np.repeat(room, count, 2)
        # Spare rows for the tokens until the next eviction.
        self._room = _zeros(*room.shape[:3], most + max(before - most, 16))
        if rows.shape[:2] == (1, 1):
            self._room[..., :most] = room[..., rows[0, 0]]
        else:
            self._room[..., :most] = np.take_along_axis(room, rows[None], 3)
        self._rows = most
        for sequence, at, missing in padding:
            self._room[0, sequence, at, :missing] = -1
        self._gaps = bool(padding) or (self._gaps and bool((self.ids < 0).any()))
        self.whole = False
        return rows

    def select(self, sequences: Any) -> None:
        """Rebuilds the batch from these sequences, such as after a beam search step."""
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
        """Returns an independent copy."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.policies = [policy.fork() for policy in self.policies]
        other._room, other._counts = self._room.copy(), self._counts.copy()
        other._new = self._new.copy()
        other._padding = [list(columns) for columns in self._padding]
        return other

    def truncate(self, seen: int) -> "np.ndarray[Any, Any]":
        """Removes the columns from `seen` on, and returns the rows to keep, as `evict` does. Tokens
        that were evicted for these columns are not restored."""
        for sequence, padding in enumerate(self._padding):
            left = bisect.bisect_left(padding, seen)
            # The count includes removed columns whose tokens were evicted before.
            self._counts[sequence] -= self.seen - seen - (len(padding) - left)
            del padding[left:]
        for policy, count in zip(self.policies, self._counts.tolist()):
            policy.truncate(count)
        kept = self.columns < seen
        was_whole, self.seen = self.whole, seen
        rows = self._gather([[np.flatnonzero(marks) for marks in lists] for lists in kept])
        self.whole = was_whole
        return rows

    def forget(self) -> None:
        """Resets the attention sums of all tokens to 0; the tokens stay."""
        if self.traits.sum_queries != ALL_QUERIES:
            return
        for sequence, policy in enumerate(self.policies):
            policy.reset()
            count = int(self._counts[sequence])
            if count:
                heads = self.shape.query_heads if self.by_head else 1
                policy.observe(self.layer, 1, np.zeros(heads * count, np.float32), count)
                policy.commit_eviction(self.layer, kernels.TokenLists.of(self.kept(sequence)))


def check_traits(traits: Any, shape: Attention) -> None:
    """Raises `UnsupportedError` for a policy whose decisions such a cache cannot apply."""
    if not traits.caps & (SparseCaps.EVICT_PREFILL | SparseCaps.EVICT_DECODE):
        raise _unsupported("this policy evicts no tokens: use h2o, tova, snapkv, pyramidkv, "
                           "adakv, keydiff, knorm, streaming or duo")
    if traits.rotates:
        raise _unsupported("this policy rotates keys, but the cache keeps the positions of "
                           "their computation: omit rotate=true")
    if traits.scope is SparseScope.QUERY_HEAD and shape.query_heads != shape.key_heads:
        raise _unsupported(f"this policy keeps a list per query head, but {shape.query_heads} "
                           f"query heads share {shape.key_heads} key heads: use form=kvpress")
    if shape.latent and traits.ragged:
        raise _unsupported("this policy keeps a different number of tokens per head, but all "
                           "heads share the latent rows: use another policy")


def _compact(rows: "np.ndarray[Any, Any]") -> "Union[slice, np.ndarray[Any, Any]]":
    """Returns consecutive rows as a slice, which avoids a copy."""
    if len(rows) and rows[-1] - rows[0] + 1 == len(rows):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


class ArrayLayer:
    """Keys and values of a layer, [sequences, heads, rows, dim], under a policy."""

    def __init__(self, policy: Policy, query_heads: int, *, scale: float = 0.0, layer: int = 0,
                 layers: int = 1, latent: bool = False) -> None:
        self._options = policy, query_heads, layer, layers, latent
        self.scale = scale
        self.keys: Any = None
        self.values: Any = None
        self._evictor: Optional[Evictor] = None

    @property
    def evictor(self) -> Evictor:
        """The evictor; it does not exist before the first step."""
        if self._evictor is None:
            raise make(_abi.KVT_E_STATE, "the layer has no tokens yet: call step first")
        return self._evictor

    def step(self, queries: Any, keys: Any, values: Any, real: Any = None) -> None:
        """Adds tokens: their queries [sequences, query heads, tokens, dim], keys and values.
        `real` [sequences, tokens] marks those that are no padding."""
        batch, _, count, _ = queries.shape
        if self._evictor is None:
            self.keys, self.values = keys[:, :, :0], values[:, :, :0]
            policy, heads, layer, layers, latent = self._options
            shape = Attention(layers, heads, keys.shape[1], keys.shape[3], values.shape[3], 16,
                              MAX_TOKENS, latent)
            self._evictor = Evictor(shape, policy, layer, batch)
        evictor = self._evictor
        is_prefill = count > 1 or evictor.seen == 0
        self.keys = np.concatenate([self.keys, keys], 2)
        self.values = np.concatenate([self.values, values], 2)
        evictor.extend(count, real)
        for sequence in range(batch):
            self._observe(sequence, queries[sequence], count, is_prefill)
        rows = evictor.evict(is_prefill)
        if rows is not None:
            self.keys, self.values = (np.take_along_axis(plane, rows[..., None], 2)
                                      for plane in (self.keys, self.values))

    def _observe(self, sequence: int, queries: Any, count: int, is_prefill: bool) -> None:
        """Passes the new keys and the attention sums of a sequence to its policy."""
        evictor = self.evictor
        new = evictor.new_rows(sequence, count)
        queries = queries[:, new].swapaxes(0, 1)
        if queries.shape[0] == 0:
            return
        if evictor.wants_keys:
            new_keys = self.keys[sequence, :, self.keys.shape[2] - count:]
            evictor.append(sequence, new_keys[:, new].swapaxes(0, 1))
        wanted = evictor.wants_sums(is_prefill)
        if wanted:
            queries = queries[-wanted:]
            keys = self.keys[sequence][:, evictor.real_rows(sequence)].swapaxes(0, 1)
            sums = column_sums(queries, keys, self.scale, evictor.by_head)
            evictor.observe(sequence, sums, queries.shape[0])


def column_sums(queries: Any, keys: Any, scale: float = 0.0, by_head: bool = False,
                threads: Any = 1) -> Any:
    """Returns the attention sum of each key over the last queries: [query heads, keys] or [keys].

    Queries and keys are arrays [tokens, heads, dim] or `kernels.Rows`. No probabilities are
    stored. Values of one number keep the outputs small."""
    count, (total, heads) = _shape(queries)[0], _shape(keys)[:2]
    values, first = np.zeros((total, heads, 1), np.float32), total - count
    if count == 1:
        return np.asarray(kernels.decode(
            queries, keys, values, first_query=first, scale=scale, with_sums=True,
            by_head=by_head, threads=threads).sums)
    lse = kernels.prefill(queries, keys, values, first_query=first, scale=scale,
                          threads=threads).lse
    return np.asarray(kernels.column_sums(queries, keys, values, lse, first_query=first,
                                          scale=scale, by_head=by_head, threads=threads))


def _shape(rows: Any) -> Tuple[int, ...]:
    return tuple((rows.data if isinstance(rows, kernels.Rows) else rows).shape)


def check(model: Any, **options: Any) -> Any:
    """Checks a model whose cache evicts tokens for common defects. It calls
    `kvtier_transformers.check`."""
    return importlib.import_module("kvtier_transformers.check").check(model, **options)
