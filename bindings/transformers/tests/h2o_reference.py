"""Heavy hitters as the paper has them, in float64: written for the tests, from the definition.

A token's score is what it got of the attention of all queries so far. The first `sink` tokens
and the last `recent` stay, and of those between the `budget` with the highest scores.
"""

from __future__ import annotations

import numpy as np


class Reference:
    """One sequence in one layer; keys of all tokens that ever were are remembered."""

    def __init__(self, sink: int, recent: int, budget: int, every: int = 1,
                 per_head: bool = False) -> None:
        self.sink, self.recent, self.budget, self.every = sink, recent, budget, every
        self.per_head = per_head
        self.keys = None
        self.kept: list[list[int]] = []
        self.scores: list[dict[int, float]] = []

    def step(self, queries: np.ndarray, keys: np.ndarray, scale: float) -> None:
        """Tokens come: queries [heads, tokens, dim], keys [key heads, tokens, dim]."""
        queries, keys = queries.astype(np.float64), keys.astype(np.float64)
        first = 0 if self.keys is None else self.keys.shape[1]
        self.keys = keys if first == 0 else np.concatenate([self.keys, keys], 1)
        lists = keys.shape[0] if self.per_head else 1
        if not self.kept:
            self.kept, self.scores = [[] for _ in range(lists)], [{} for _ in range(lists)]
        group = queries.shape[0] // keys.shape[0]
        for token in range(queries.shape[1]):
            for kept, scores in zip(self.kept, self.scores):
                kept.append(first + token)
                scores[first + token] = 0.0
            for head in range(queries.shape[0]):
                at = head // group if self.per_head else 0
                there = self.kept[at]
                logits = self.keys[head // group][there] @ queries[head, token] * scale
                weights = np.exp(logits - logits.max())
                weights /= weights.sum()
                for position, weight in zip(there, weights):
                    self.scores[at][position] += weight
        for at, there in enumerate(self.kept):
            self.kept[at] = self._stay(there, self.scores[at])

    def _stay(self, there: list[int], scores: dict[int, float]) -> list[int]:
        end = max(len(there) - self.recent, 0)
        begin = min(self.sink, end)
        between = there[begin:end]
        if len(between) - self.budget < self.every:
            return there
        # Of equal ones the lower goes.
        best = sorted(between, key=lambda position: (scores[position], position))
        return there[:begin] + sorted(best[len(between) - self.budget:]) + there[end:]
