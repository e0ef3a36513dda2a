"""Sparse policies and kernels without a store. The tests compare results with attention in
float64, computed by the header's definition of an index."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Iterator, List, Optional, Tuple

import kvtier
import numpy as np
import pytest
from gate import HANG_S
from kvtier import (
    Attention,
    SparseContext,
    Index,
    IndexHead,
    IndexKind,
    TokenLists,
    Rows,
    Sparse,
    SparseCaps,
    SparseNeeds,
    SparseTraits,
    kernels,
)

LAYERS, QUERY_HEADS, HEADS, DIM, VALUES, BLOCK, TOKENS = 3, 4, 2, 16, 8, 16, 160
SHAPE = Attention(LAYERS, QUERY_HEADS, HEADS, DIM, VALUES, BLOCK, 4096)
PROMPT, LAST = SparseContext(TOKENS, is_prefill=True), SparseContext(TOKENS, TOKENS - 1)
NO_KEY = -np.inf

numbers = np.random.default_rng(4711)
Q = numbers.uniform(-1, 1, (TOKENS, QUERY_HEADS, DIM)).astype(np.float32)
K = numbers.uniform(-1, 1, (TOKENS, HEADS, DIM)).astype(np.float32)
V = numbers.uniform(-1, 1, (TOKENS, HEADS, VALUES)).astype(np.float32)


def seen(index: Optional[Index], head: int, first: int, queries: int, keys: int) -> np.ndarray:
    """Returns which keys each query of a head sees, by the header's definition."""
    at = first + np.arange(queries)
    causal = np.arange(keys)[None, :] <= at[:, None]
    if index is None or not index.heads:
        return causal
    heads, lists = index.heads, index.lists()
    per = {1: 0, HEADS: head // (QUERY_HEADS // HEADS), QUERY_HEADS: head}
    used = heads[per[len(heads)]]
    mask = np.zeros((queries, keys), bool)
    for row, query in enumerate(at):
        block = row // used.query_block if used.query_block else 0
        if used.kind == IndexKind.DENSE or query >= used.dense_from:
            mask[row] = True
        elif used.kind == IndexKind.LINES:
            mask[row, [k for k in lists[used.first] if k < keys]] = True
            mask[row, [query - back for back in lists[used.first + 1] if back <= query]] = True
        elif used.kind == IndexKind.BLOCKS:
            for number in lists[used.first + block]:
                mask[row, number * used.key_block: (number + 1) * used.key_block] = True
        else:
            mask[row, [k for k in lists[used.first] if k < keys]] = True
            ranges = lists[used.first + 1 + block]
            for start, end in zip(ranges[::2], ranges[1::2]):
                mask[row, start:end] = True
    return mask & causal


def attend(q: Any, k: Any, v: Any, index: Optional[Index] = None,
           first: int = 0) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns outputs, log-sum-exps, and attention sums by head and key."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    out = np.zeros((q.shape[0], q.shape[1], v.shape[2]))
    lse, sums = np.zeros(q.shape[:2]), np.zeros((q.shape[1], k.shape[0]))
    for head in range(q.shape[1]):
        logits = q[:, head] @ k[:, head // group].T / np.sqrt(q.shape[2])
        logits[~seen(index, head, first, q.shape[0], k.shape[0])] = NO_KEY
        top = logits.max(1, keepdims=True)
        weights = np.exp(logits - top)
        lse[:, head] = (top + np.log(weights.sum(1, keepdims=True)))[:, 0]
        weights /= weights.sum(1, keepdims=True)
        out[:, head], sums[head] = weights @ v[:, head // group], weights.sum(0)
    return out, lse, sums


def check(got: Any, q: Any, k: Any, v: Any, index: Optional[Index] = None, first: int = 0,
          most: float = 2e-5) -> None:
    out, lse, _ = attend(q, k, v, index, first)
    assert np.abs(np.asarray(got.out) - out).max() < most
    assert np.abs(np.asarray(got.lse) - lse).max() < most


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as pool:
        yield pool


SPECS = ["minference(budget=0.2,last_q=16,sinks=4,recent=8)",
         "minference(type=tri_shape,sinks=8,recent=32,dense_rows=20)",
         "xattention(block=32,stride=4)", "flexprefill(block=32)", "streaming(sinks=4,recent=40)",
         "full"]


@pytest.mark.parametrize("spec", SPECS)
def test_prefill_with_an_index_matches_the_model(spec: str, pool: ThreadPoolExecutor) -> None:
    with Sparse(SHAPE, spec) as policy:
        traits = policy.traits
        assert SparseCaps.INDEX_PREFILL in traits.caps
        keys = K if SparseNeeds.ALL_KEYS in traits.needs else None
        index = policy.index(1, Q, PROMPT, keys=keys)
        again = policy.last_index()
        assert again.lists() == index.lists() and again.heads == index.heads
        done = kernels.prefill(Q, K, V, index=index)
        check(done, Q, K, V, index)
        for threads in (3, pool):  # the bits do not depend on threads
            other = kernels.prefill(Q, K, V, index=index, threads=threads)
            assert bytes(other.out) == bytes(done.out) and bytes(other.lse) == bytes(done.lse)
        out = np.empty((TOKENS, QUERY_HEADS, VALUES), np.float32)
        whole = policy.prefill_attention(1, Q, K, V, PROMPT, out=out)
        assert whole.out is out and out.tobytes() == bytes(done.out)
        assert np.array_equal(np.asarray(whole.lse), np.asarray(done.lse))


INDEXES = [
    Index(),
    Index.of([IndexHead(IndexKind.LINES, 0, 2)], [[0, 9, 70], [0, 1, 2, 30]]),
    Index.of([IndexHead(IndexKind.BLOCKS, 0, 5, 32, 32), IndexHead(IndexKind.DENSE)],
             [[0], [0, 1], [0, 2], [1, 3], [0, 2, 4]]),
    Index.of([IndexHead(IndexKind.RANGES, 0, 3, 80, 0, 150)],
             [[0, 1], [10, 20, 40, 80], [0, 5, 100, 160]]),
    Index.of([IndexHead(IndexKind.LINES, 2 * head, 2) for head in range(QUERY_HEADS)],
             [x for head in range(QUERY_HEADS) for x in ([head], [0, 1 + head])]),
]


@pytest.mark.parametrize("index", INDEXES, ids=repr)
def test_prefill_with_the_callers_index_matches_the_model(index: Index) -> None:
    check(kernels.prefill(Q, K, V, index=index), Q, K, V, index)
    check(kernels.prefill(Q[-30:], K, V, first_query=TOKENS - 30, index=None), Q[-30:], K, V,
          None, TOKENS - 30)


def test_merged_attention_equals_attention_to_all_keys() -> None:
    cuts, done = [0, 50, 53, TOKENS], None
    for first, end in zip(cuts, cuts[1:]):
        part = kernels.prefill(Q, K[first:end], V[first:end], first_key=first)
        if done is None:
            done = part
        else:
            kernels.merge(done.out, done.lse, part.out, part.lse)
    check(done, Q, K, V)
    with pytest.raises(kvtier.InvalidError):
        kernels.merge(done.out, done.lse, np.asarray(done.out)[1:], done.lse)


def test_attention_sums_match_the_model(pool: ThreadPoolExecutor) -> None:
    _, _, want = attend(Q, K, V)
    done = kernels.prefill(Q, K, V)
    logs = np.asarray(done.lse)
    logs.flags.writeable = False
    got = np.asarray(kernels.column_sums(Q, K, V, logs, threads=pool))
    assert got.shape == want.shape and np.abs(got - want).max() < 1e-3
    flat = np.asarray(kernels.column_sums(Q, K, V, done.lse, by_head=False, first=100))
    _, _, late = attend(Q[100:], K, V, None, 100)
    assert np.abs(flat - late.sum(0)).max() < 1e-3
    # The sums of decode: all keys, and selected keys in their order.
    two = kernels.decode(Q[-2:], K, V, first_query=TOKENS - 2, with_sums=True, threads=2)
    check(two, Q[-2:], K, V, None, TOKENS - 2)
    _, _, want = attend(Q[-2:], K, V, None, TOKENS - 2)
    assert np.abs(np.asarray(two.sums) - want).max() < 2e-5
    index = Index.of([IndexHead(IndexKind.BLOCKS, 0, 1, 0, 16)], [[0, 4, 9]])
    one = kernels.decode(Q[-1:], K, V, first_query=TOKENS - 1, index=index, with_sums=True,
                         by_head=False)
    check(one, Q[-1:], K, V, index, TOKENS - 1)
    _, _, want = attend(Q[-1:], K, V, index, TOKENS - 1)
    chosen = [*range(16), *range(64, 80), *range(144, 160)]
    assert np.abs(np.asarray(one.sums) - want.sum(0)[chosen]).max() < 2e-5
    assert kernels.decode(Q[-1:], K, V, first_query=TOKENS - 1).sums is None


def test_rows_may_have_other_types_and_gaps() -> None:
    wide = np.zeros((TOKENS, 3, HEADS, DIM), np.float32)
    wide[:, 1] = K
    assert bytes(kernels.prefill(Q, wide[:, 1], V).out) == bytes(kernels.prefill(Q, K, V).out)
    turned = np.ascontiguousarray(K.transpose(1, 0, 2)).transpose(1, 0, 2)
    assert bytes(kernels.prefill(Q, turned, V).out) == bytes(kernels.prefill(Q, K, V).out)
    halves = [x.astype(np.float16) for x in (Q, K, V)]
    check(kernels.prefill(*halves), *halves)
    bits = [(x.view(np.uint32) >> 16).astype(np.uint16) for x in (Q, K, V)]
    back = [(x.astype(np.uint32) << 16).view(np.float32) for x in bits]
    check(kernels.prefill(*bits), *back)
    check(kernels.prefill(*(Rows(x, "f16") for x in (y.view(np.uint16) for y in halves))), *halves)
    small = np.clip(np.round(K * 127), -127, 127).astype(np.int8)
    token = numbers.uniform(0.5, 1, (TOKENS, HEADS)).astype(np.float32) / 127
    channel = numbers.uniform(0.5, 1, (HEADS, DIM)).astype(np.float32) / 127
    check(kernels.prefill(Q, Rows(small, scales=token.ravel()), V), Q,
          small * token[:, :, None], V)
    keys = Rows(small, "int8", channel.ravel(), "channel")
    check(kernels.prefill(Q, keys, V), Q, small * channel[None], V)
    # The values of a latent are the first numbers of the keys.
    latent = K[:, :1]
    check(kernels.prefill(Q, latent, latent[:, :, :VALUES]), Q, latent, latent[:, :, :VALUES])


def test_page_scores_are_upper_bounds_of_products() -> None:
    boxes = kernels.page_boxes(K, BLOCK)
    got = np.asarray(boxes)
    pages = K.reshape(TOKENS // BLOCK, BLOCK, HEADS, DIM)
    want = np.concatenate([pages.min(1), pages.max(1)], 2)
    assert np.array_equal(np.sort(got, 2), np.sort(want, 2))
    scores = np.asarray(kernels.page_scores(boxes, Q[:3], first=2, count=5))
    for head in range(QUERY_HEADS):
        products = Q[:3, head].astype(np.float64) @ K[:, head // 2].T.astype(np.float64)
        best = products.reshape(3, TOKENS // BLOCK, BLOCK).max(2)[:, 2:7]
        assert (scores[:, head] > best - 1e-4).all()
        ends = Q[:3, head, None, :].astype(np.float64) * want[None, 2:7, head // 2].reshape(
            1, 5, 2, DIM).transpose(2, 0, 1, 3)
        assert np.abs(scores[:, head] - ends.max(0).sum(2)).max() < 1e-4
    # The same boxes, extended by a few tokens at a time.
    grown = np.zeros_like(got)
    for first in range(0, TOKENS, 5):
        kernels.page_boxes(K[first:first + 5], BLOCK, boxes=grown, first=first)
    assert np.array_equal(grown, got)
    with pytest.raises(kvtier.InvalidError):
        kernels.page_boxes(K, 0)
    with pytest.raises(kvtier.InvalidError):
        kernels.page_boxes(K, BLOCK, first=16)


def test_an_index_of_positions_is_translated_to_buffer_rows() -> None:
    blocks, last = [0, 2, 5], TOKENS - 1
    placed = kernels.BlockPlacement(blocks, BLOCK, TOKENS - 5, 5)
    position = np.array([*(b * BLOCK + i for b in blocks for i in range(BLOCK)),
                         *range(TOKENS - 5, TOKENS)])
    wanted = Index.of([IndexHead(IndexKind.BLOCKS, head, 1, 0, 8) for head in range(QUERY_HEADS)],
                      [[0, 1 + head % 2, 4, 11, 19] for head in range(QUERY_HEADS)])
    index, row = kernels.place_index(SHAPE, placed, wanted, last)
    assert row == len(position) - 1
    for head in range(QUERY_HEADS):
        rows = seen(index, head, row, 1, len(position))[0]
        assert np.array_equal(rows, seen(wanted, head, last, 1, TOKENS)[0][position])
    k, v = K[position], V[position]
    done = kernels.decode(Q[-1:], k, v, first_query=row, index=index, with_sums=True)
    check(done, Q[-1:], k, v, index, row)
    out = np.ones((QUERY_HEADS, TOKENS), np.float32)
    assert kernels.place_column_sums(SHAPE, TOKENS, placed, done.sums, select=index,
                                     first_query=row, queries=1, out=out) is out
    want = np.ones((QUERY_HEADS, TOKENS))
    want[:, position] += attend(Q[-1:], k, v, index, row)[2]
    assert np.abs(out - want).max() < 2e-5
    # All rows, added to the sums of kept tokens and of later ones.
    whole, row = kernels.place_index(SHAPE, placed, None, last)
    assert not whole.heads
    done = kernels.decode(Q[-1:], k, v, first_query=row, with_sums=True)
    kept = TokenLists.of([[*range(16), *range(32, 48), 70, *range(80, 96)]])
    got = np.asarray(kernels.place_column_sums(SHAPE, TOKENS, placed, done.sums, kept=kept,
                                               since=TOKENS - 5))
    resident = [*kept.lists()[0], *range(TOKENS - 5, TOKENS)]
    assert got.shape == (QUERY_HEADS, len(resident))
    want = np.zeros((QUERY_HEADS, TOKENS))
    want[:, position] = attend(Q[-1:], k, v, None, row)[2]
    assert np.abs(got - want[:, resident]).max() < 2e-5
    with pytest.raises(kvtier.InvalidError):
        kernels.place_index(SHAPE, placed._replace(tail_first=3), wanted, last)


def test_h2o_keeps_heavy_hitters(runtime: kvtier.Runtime) -> None:
    with runtime.budget(host_bytes=1 << 24) as budget, budget.account() as account:
        policy = Sparse(SHAPE, "h2o(sink=2,recent=10,budget=20)", account=account)
        done = kernels.prefill(Q, K, V)
        sums = np.asarray(kernels.column_sums(Q, K, V, done.lse))
        policy.append(0, 0, K)
        policy.observe(0, TOKENS, sums.ravel(), TOKENS)
        used = account.held(kvtier.TIER_HOST).used_bytes
        assert used == policy.stats()["state_bytes"] > 0
        keep = policy.plan_eviction(0, PROMPT)
        assert keep is not None
        _, _, want = attend(Q, K, V)
        for head, kept in enumerate(keep.lists()):
            got = want[2 * head] + want[2 * head + 1]
            inner = [key for key in kept if 2 <= key < TOKENS - 10]
            evicted = [key for key in range(2, TOKENS - 10) if key not in inner]
            assert {0, 1, *range(TOKENS - 10, TOKENS)} <= set(kept) and len(kept) == 32
            assert got[inner].min() > got[evicted].max() - 1e-3
        policy.commit_eviction(0, keep)
        assert policy.plan_eviction(0, PROMPT) is None
        with pytest.raises(kvtier.InvalidError):
            policy.commit_eviction(0, TokenLists.of([[5, 5], [1, 2]]))
        policy.reset()
        policy.close()
        assert account.held(kvtier.TIER_HOST).used_bytes == 0


def test_evict_returns_token_lists_of_any_length() -> None:
    class Long(CustomPolicy):
        def evict(self, layer: int, at: SparseContext) -> Optional[TokenLists]:
            return TokenLists.of([range(layer, 3000), range(4096)])

    with Sparse(SHAPE, Long()) as policy:
        keep = policy.plan_eviction(1, LAST)
        assert keep is not None
        assert keep.lists() == [[*range(1, 3000)], [*range(4096)]]
        again = policy.last_retained()
        assert again is not None and again.lists() == keep.lists()


def test_quest_selects_blocks_for_a_query() -> None:
    blocks = TOKENS // BLOCK
    with Sparse(SHAPE, "quest(budget=64,page=16,dense=0)") as policy:
        for block in range(blocks):
            policy.add_block(2, block, block * BLOCK, K[block * BLOCK:(block + 1) * BLOCK])
        query, candidates = Q[-1:], list(range(blocks))[::-1]
        ids = policy.select(2, query, candidates, LAST)
        assert 4 <= len(ids) < blocks and ids == sorted(ids)
        assert policy.select(2, query, np.array(candidates, np.uint32), LAST) == ids
        assert policy.select(2, None, candidates, LAST) == candidates[::-1]
        assert policy.select(2, query, [], LAST) == []
        with pytest.raises(kvtier.InvalidError):
            policy.select(2, query, [1, 1], LAST)
        index = policy.index(2, query, LAST)
        for head in range(QUERY_HEADS):
            used = np.flatnonzero(seen(index, head, TOKENS - 1, 1, TOKENS)[0]) // BLOCK
            assert 0 < len(used) and set(used) <= set(ids)
        done = kernels.decode(query, K, V, first_query=TOKENS - 1, index=index, threads=2)
        check(done, query, K, V, index, TOKENS - 1)
        saved = policy.save(2, 3)
        assert saved
        with pytest.raises(kvtier.NotFoundError):
            policy.save(1, 3)
        with policy.fork() as copy:
            policy.reset()
            assert copy.select(2, query, candidates, LAST) == ids
            copy.truncate(100)
        policy.load(2, 3, 3 * BLOCK, saved)
        assert policy.save(2, 3) == saved
        with pytest.raises(kvtier.CorruptError):
            policy.load(2, 4, 4 * BLOCK, saved[:-1])


def test_scores_apply_once_and_seal_all_covers_all_layers() -> None:
    with Sparse(SHAPE, "external(topk=2)") as policy:
        assert SparseNeeds.SCORES in policy.traits.needs
        policy.add_scores(1, [0, 5, 1, 0, 7, 2])
        assert policy.select(1, Q[-1:], range(6), SparseContext(100, 99)) == [1, 4]
        # The scores apply to one call.
        assert policy.select(1, Q[-1:], range(6), SparseContext(100, 99)) == [*range(6)]
    with Sparse(SHAPE, "quest(budget=32,page=16,dense=0)") as policy:
        policy.seal_all(0, 0, [K[:BLOCK]] * LAYERS)
        assert policy.save(0, 0) == policy.save(2, 0) != b""
        with pytest.raises(kvtier.InvalidError):
            policy.seal_all(1, BLOCK, [K[BLOCK:2 * BLOCK]] * 2)


class CustomPolicy:
    """A custom policy: it selects blocks with multiples of 4, and a window of keys."""

    traits = SparseTraits(
        SparseCaps.LOAD_DECODE | SparseCaps.INDEX_PREFILL | SparseCaps.EVICT_DECODE,
        SparseNeeds.QUERIES, selects=True)

    def __init__(self) -> None:
        self.calls: List[Any] = []
        self.policy: "Optional[weakref.ref[Sparse]]" = None
        self.error: Optional[BaseException] = None

    def fail(self) -> None:
        if self.error is not None:
            raise self.error

    def on_prefill_offload(self, block: int, layer: int, first: int, keys: Rows) -> None:
        self.fail()
        assert keys.dtype == "f32" and np.array_equal(np.asarray(keys.data),
                                                      K[first:first + BLOCK])
        self.calls.append(("prefill", block, layer, first))

    def on_decode_offload(self, block: int, first: int, keys: List[Rows]) -> None:
        assert [rows.data[0, 0, 0] for rows in keys] == [K[0, 0, 0], K[1, 0, 0], K[2, 0, 0]]
        self.calls.append(("decode", block, first))

    def select_blocks(self, layer: int, query: Optional[Rows], candidates: memoryview,
                      at: SparseContext) -> Any:
        self.fail()
        assert self.policy is not None and query is not None and at == LAST
        assert np.array_equal(np.asarray(query.data), Q[-1:])
        with pytest.raises(kvtier.BusyError):
            self.policy().reset()
        if layer == 2:
            return [1000]
        return np.array([id for id in candidates if id % 4 == 0][::-1])

    def index(self, layer: int, queries: Rows, keys: Optional[Rows], at: SparseContext) -> Any:
        if layer == 2:
            return [0]
        return Index.of([IndexHead(IndexKind.LINES, 0, 2)], [[0], range(8)])

    def observe(self, layer: int, queries: int, sums: memoryview, tokens: int) -> None:
        self.calls.append(("observe", layer, queries, sums.tolist(), tokens))

    def evict(self, layer: int, at: SparseContext) -> Optional[TokenLists]:
        return TokenLists.of([[0, 5], [1, 2, 3]]) if layer else None

    def evicted(self, layer: int, keep: TokenLists) -> None:
        self.calls.append(("evicted", layer, keep.lists()))

    def truncate(self, tokens: int) -> None:
        self.fail()
        self.calls.append(("truncate", tokens))

    def fork(self) -> "CustomPolicy":
        copy = CustomPolicy()
        copy.calls = self.calls
        return copy


def test_a_custom_policy_is_called_for_every_decision() -> None:
    custom = CustomPolicy()
    with Sparse(SHAPE, custom) as policy:
        custom.policy = weakref.ref(policy)
        assert policy.traits == CustomPolicy.traits
        policy.add_block(1, 2, 32, K[32:48])
        policy.seal_all(9, 32, [K[i:i + BLOCK] for i in range(LAYERS)])
        assert policy.select(0, Q[-1:], range(10), LAST) == [0, 4, 8]
        with pytest.raises(kvtier.InvalidError, match="1000"):
            policy.select(2, Q[-1:], range(10), LAST)
        index = policy.index(0, Q, PROMPT)
        check(policy.prefill_attention(0, Q, K, V, PROMPT), Q, K, V, index)
        assert [len(numbers) for numbers in index.lists()] == [1, 8]
        with pytest.raises(kvtier.StateError, match="must return a kvtier.Index"):
            policy.index(2, Q, PROMPT)
        policy.observe(1, 3, [1.0, 2.0], 2)
        assert policy.plan_eviction(0, LAST) is None
        keep = policy.plan_eviction(1, LAST)
        assert keep is not None and keep.lists() == [[0, 5], [1, 2, 3]]
        policy.commit_eviction(1, keep)
        with policy.fork() as copy:
            copy.truncate(33)
        policy.reset()
    assert custom.calls == [
        ("prefill", 2, 1, 32), ("decode", 9, 32), ("observe", 1, 3, [1.0, 2.0], 2),
        ("evicted", 1, [[0, 5], [1, 2, 3]]), ("truncate", 33), ("truncate", 0)]


def test_an_exception_of_a_custom_policy_is_the_cause(unraisable: List[Any]) -> None:
    custom = CustomPolicy()
    with Sparse(SHAPE, custom) as policy:
        custom.policy = weakref.ref(policy)
        custom.error = KeyError("mine")
        with pytest.raises(kvtier.StateError, match="the policy raised KeyError") as caught:
            policy.select(0, Q[-1:], range(10), LAST)
        assert caught.value.__cause__ is custom.error
        with pytest.raises(kvtier.StateError):
            policy.truncate(5)
        custom.error = kvtier.LimitError("full", kvtier.abi.KVT_E_LIMIT, "KVT_E_LIMIT")
        with pytest.raises(kvtier.LimitError):
            policy.add_block(0, 1, 16, K[16:32])
        custom.error = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            policy.select(0, Q[-1:], range(10), LAST)
        # A reset returns no error.
        custom.error = ValueError("late")
        policy.reset()
        assert unraisable == [custom.error]
        custom.error = None
        assert policy.select(0, Q[-1:], range(10), LAST) == [0, 4, 8]


class CustomKernel:
    """A custom policy with an attention kernel, for rows with gaps."""

    traits = SparseTraits(SparseCaps.INDEX_PREFILL)

    def sparse_prefill_attention(self, layer: int, queries: Rows, keys: Rows, values: Rows,
                                 at: SparseContext, out: memoryview,
                                 lse: Optional[memoryview]) -> None:
        assert np.array_equal(np.asarray(keys.data), K) and keys.dtype == "f32"
        assert values.dtype == "f16" and values.data.format == "H"
        assert np.array_equal(np.asarray(values.data).view(np.float16), V.astype(np.float16))
        assert lse is not None and len(lse) == TOKENS * QUERY_HEADS
        np.asarray(out)[:] = np.arange(len(out))
        lse[-1] = 5.0


def test_a_custom_policy_may_compute_attention() -> None:
    wide = np.zeros((TOKENS, HEADS, DIM + 4), np.float32)
    wide[:, :, :DIM] = K
    with Sparse(SHAPE, CustomKernel()) as policy:
        got = policy.prefill_attention(0, Q, wide[:, :, :DIM], V.astype(np.float16), PROMPT)
        assert np.array_equal(np.asarray(got.out).ravel(),
                              np.arange(TOKENS * QUERY_HEADS * VALUES))
        assert got.lse[TOKENS - 1, QUERY_HEADS - 1] == 5.0
        with pytest.raises(kvtier.UnsupportedError):
            policy.fork()
        with pytest.raises(kvtier.UnsupportedError):
            policy.select(0, Q[-1:], [0], LAST)


def test_a_concurrent_call_raises_busy_error() -> None:
    inside, go = threading.Event(), threading.Event()

    class Slow(CustomPolicy):
        def evict(self, layer: int, at: SparseContext) -> Optional[TokenLists]:
            inside.set()
            assert go.wait(HANG_S)
            return None

    with Sparse(SHAPE, Slow()) as policy:
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(policy.plan_eviction, 0, LAST)
            assert inside.wait(HANG_S)
            with pytest.raises(kvtier.BusyError):
                policy.stats()
            go.set()
            assert future.result() is None


def test_a_job_may_run_on_the_pool_that_executes_it() -> None:
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(kernels.prefill, Q, K, V, threads=pool).result(HANG_S)
    check(done, Q, K, V)


BAD: List[Tuple[type, Callable[[], Any]]] = [
    (kvtier.SpecError, lambda: Sparse(SHAPE, "qest")),
    (kvtier.InvalidError, lambda: Sparse(SHAPE, "")),
    (kvtier.InvalidError, lambda: Sparse(Attention(0, 4, 2, 16, 8, 16, 64), "full")),
    (kvtier.InvalidError, lambda: kernels.prefill(Q, K, V[1:])),
    (kvtier.InvalidError, lambda: kernels.prefill(Q[:, 0], K, V)),
    (kvtier.InvalidError, lambda: kernels.prefill(Q.astype(np.float64), K, V)),
    (kvtier.InvalidError, lambda: kernels.prefill(Q[::-1], K, V)),
    (kvtier.InvalidError, lambda: kernels.prefill(Q[:, :, ::2], K[:, :, ::2], V)),
    (kvtier.InvalidError, lambda: kernels.prefill(Q, np.broadcast_to(K[:1], K.shape), V)),
    (kvtier.InvalidError, lambda: kernels.prefill(Q[:0], K, V)),
    (kvtier.InvalidError, lambda: kernels.prefill(Q, Rows(K, "f16"), V)),
    (kvtier.InvalidError, lambda: kernels.prefill(Q, K, V, out=np.zeros(5, np.float32))),
    (kvtier.InvalidError, lambda: kernels.prefill(Q, K, V, threads=0)),
    (kvtier.InvalidError, lambda: kernels.prefill(Q, K, V, first_query=-1)),
    (kvtier.InvalidError, lambda: kernels.prefill(Q, K, V, index=Index([IndexHead(9)]))),
    (kvtier.InvalidError, lambda: kernels.prefill(Q, K, V, index=Index.of(
        [IndexHead(IndexKind.LINES, 0, 2)], [[5, 5], [0]]))),
    (kvtier.InvalidError, lambda: kernels.prefill(Q, K, V, index=Index(
        [IndexHead(IndexKind.LINES, 0, 2)], [0, 1, 9], [1, 2]))),
    (kvtier.InvalidError, lambda: kernels.check_rows(np.full((1, 1, 4), np.nan, np.float32))),
    (BufferError, lambda: kernels.prefill(Q, K, V, out=memoryview(
        bytes(4 * TOKENS * QUERY_HEADS * VALUES)).cast("f"))),
]


@pytest.mark.parametrize(("kind", "call"), BAD, ids=range(len(BAD)))
def test_invalid_arguments_are_errors(kind: type, call: Callable[[], Any]) -> None:
    with pytest.raises((kind, ValueError) if kind is BufferError else kind):
        call()


def test_a_custom_policy_without_a_required_method_is_rejected() -> None:
    class Empty:
        traits = SparseTraits(SparseCaps.EVICT_DECODE)

    with pytest.raises(kvtier.InvalidError, match="evict"):
        Sparse(SHAPE, Empty())
    with pytest.raises(AttributeError):
        Sparse(SHAPE, object())
    policy = Sparse(SHAPE, "full")
    policy.close()
    policy.close()
    with pytest.raises(kvtier.ClosedError):
        policy.stats()


def test_every_sparse_policy_opens_and_rejects_missing_capabilities() -> None:
    names = {info.name for info in kvtier.sparse_policies()}
    assert len(names) >= 18 and all(info.about for info in kvtier.sparse_policies())
    args = {"duo": '(alpha="1 0 1 0 1 0")', "arkvale": "(page=16)"}
    for name in names:
        with Sparse(SHAPE, name + args.get(name, "")) as policy:
            traits = policy.traits
            assert traits.caps
            if SparseCaps.LOAD_DECODE not in traits.caps:
                with pytest.raises(kvtier.UnsupportedError):
                    policy.select(0, Q[-1:], [0], LAST)
            if SparseCaps.EVICT_DECODE not in traits.caps:
                with pytest.raises(kvtier.UnsupportedError):
                    policy.plan_eviction(0, LAST)


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
import array, math, kvtier
from kvtier import kernels
rows = memoryview(array.array("f", [1, 0, 0, 1])).cast("B").cast("f", shape=[2, 1, 2])
done = kernels.prefill(rows, rows, rows, threads=2)
e = math.exp(1 / math.sqrt(2))
want = [1, 0, 1 / (1 + e), e / (1 + e)]
got = [x for token in done.out.tolist() for head in token for x in head]
assert all(abs(a - b) < 1e-6 for a, b in zip(got, want)), got
"""


def test_numpy_is_not_needed() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_NUMPY], check=True, timeout=600)
