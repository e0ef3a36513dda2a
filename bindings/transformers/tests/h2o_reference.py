"""Reference model of H2O in float64, written from the paper's definition.

A token's score is the attention that it received from all queries so far. H2O keeps the first
`sink` tokens, the last `recent` tokens, and the `budget` tokens between with the highest scores.
"""

from __future__ import annotations

import numpy as np


class Reference:
    """One sequence in one layer. Keeps the keys of all tokens, including evicted ones."""

    def __init__(self, sink: int, recent: int, budget: int, every: int = 1,
                 per_head: bool = False) -> None:
        self.sink, self.recent, self.budget, self.every = sink, recent, budget, every
        self.per_head = per_head
        self.keys = None
        self.kept: list[list[int]] = []
        self.scores: list[dict[int, float]] = []

    def step(self, queries: np.ndarray, keys: np.ndarray, scale: float) -> None:
        """Adds tokens: queries [heads, tokens, dim], keys [key heads, tokens, dim]."""
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
                kept = self.kept[at]
                logits = self.keys[head // group][kept] @ queries[head, token] * scale
                weights = np.exp(logits - logits.max())
                weights /= weights.sum()
                for position, weight in zip(kept, weights):
                    self.scores[at][position] += weight
        for at, kept in enumerate(self.kept):
            self.kept[at] = self._evict(kept, self.scores[at])

    def _evict(self, kept: list[int], scores: dict[int, float]) -> list[int]:
        end = max(len(kept) - self.recent, 0)
        begin = min(self.sink, end)
        between = kept[begin:end]
        if len(between) - self.budget < self.every:
            return kept
        # Ties evict the lower position.
        best = sorted(between, key=lambda position: (scores[position], position))
        return kept[:begin] + sorted(best[len(between) - self.budget:]) + kept[end:]
