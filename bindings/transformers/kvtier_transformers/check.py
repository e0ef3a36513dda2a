"""Looks for what usually goes wrong when tokens go from a cache: `check`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from kvtier import SparseNeeds
from kvtier.h2o import ALL_QUERIES
from transformers import DynamicCache

from .attention import SDPA
from .h2o import Eviction, eviction_of

#: What h2o keeps where nothing is said.
_DEFAULTS = {"budget": 1024, "n_recent": 256}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    ok: bool
    text: str
    advice: str = ""

    def __str__(self) -> str:
        head = f"{'ok ' if self.ok else 'BAD'} {self.name}: {self.text}"
        return head if self.ok or not self.advice else f"{head}\n    -> {self.advice}"


@dataclasses.dataclass
class Report:
    """What was found."""

    findings: list[Finding] = dataclasses.field(default_factory=list)
    #: For each layer how many rows its cache had in the end, and the lengths of its lists.
    layers: dict[int, tuple[int, list[int]]] = dataclasses.field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return all(finding.ok for finding in self.findings)

    @property
    def wrong(self) -> list[str]:
        """The names of what is wrong."""
        return [finding.name for finding in self.findings if not finding.ok]

    def add(self, name: str, faults: list[str], fine: str, advice: str) -> None:
        """Adds a finding: wrong with the first fault, if there is one."""
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        self.findings.append(Finding(name, not faults, faults[0] + more if faults else fine,
                                     advice))

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings))


class _Run:
    """What was seen of a generation."""

    def __init__(self) -> None:
        self.steps: dict[int, int] = {}
        self.rows: dict[int, list[int]] = {}
        self.layers: dict[int, Any] = {}
        self.positions: list[str] = []
        self.masks: list[str] = []
        self.scores: list[str] = []
        self._observed: dict[int, int] = {}
        self.error: Exception | None = None

    def __call__(self, module: Any, frame: Any) -> None:
        at, evictor = module.layer_idx, frame.layer.evictor
        step = self.steps[at] = self.steps.get(at, 0) + 1
        self.rows.setdefault(at, []).append(int(frame.layer.keys.shape[2]))
        self.layers[at] = frame.layer
        if frame.positions is not None:
            last = frame.positions[..., -1].flatten().tolist()
            want = (evictor.counts - 1).tolist()
            if last != want and last * len(want) != want:
                self.positions.append(f"layer {at}, step {step}: the last positions are {last}, "
                                      f"there were {[one + 1 for one in want]} tokens")
        self.mask_of(frame, frame.rows, at)
        if evictor.traits.sum_queries == ALL_QUERIES:
            more = evictor.observed - self._observed.get(at, 0)
            self._observed[at] = evictor.observed
            if more == 0:
                self.scores.append(f"layer {at}, step {step}: nothing was counted")

    def mask_of(self, frame: Any, rows: int, at: int) -> None:
        """Whether a mask is as wide as keys are many."""
        if frame.mask is not None and frame.mask.shape[-1] != rows:
            self.masks.append(f"layer {at}: a mask for {frame.mask.shape[-1]} keys, there are "
                              f"{rows}")


def check(model: Any, *, tokens: int | None = None, steps: int | None = None,
          verbose: bool = True) -> Report:
    """Generates a little with random tokens, and looks for what usually goes wrong: sinks that
    went, scores that are stale, a cache that grows, positions that begin again, masks of a
    wrong length, another attention implementation, layers that differ. Prints what it found,
    with advice. `tokens` is the length of the prompt (default: a little more than stays)."""
    report = Report()
    try:
        eviction = eviction_of(model)
    except Exception as error:
        report.add("installed", [str(error)], "", "call install_kv_eviction(model, budget)")
        return _said(report, verbose)
    most = _most(eviction)
    every = eviction.numbers.get("evict_every") or 1
    count = tokens or (most or 128) + 16
    steps = steps or 2 * every + 8
    _check_implementation(eviction, report)
    runs = [_forwards(model, eviction, count, steps) for _ in range(2)]
    runs.append(_generates(model, eviction, count, steps))
    _check_run(runs, report)
    done = [run for run in runs if run.error is None]
    _check_sinks(eviction, done, report)
    _check_scores(runs, report)
    _check_growth(done, most, report)
    report.add("positions", _all(runs, "positions"), "they count tokens that went",
               "position_ids have to go on from cache.get_seq_length(), which counts all tokens "
               "that there ever were: leave them to the model, or count from it")
    report.add("masks", _all(runs, "masks"), "as wide as keys are many",
               "masks that the model is given are for all tokens that there ever were; see mask "
               "in porting.md for attention classes of your own")
    _check_layers(eviction, done, report)
    return _said(report, verbose)


def _said(report: Report, verbose: bool) -> Report:
    if verbose:
        print(report)
    return report


def _most(eviction: Eviction) -> int | None:
    """The most that stays after a step, if it is known."""
    numbers = eviction.numbers
    if numbers.get("name") != "h2o":
        return None
    between = sum(default if numbers[name] is None else int(numbers[name])
                  for name, default in _DEFAULTS.items())
    return int(between + numbers["n_sink"] + numbers["evict_every"] - 1)


def _all(runs: list[_Run], name: str) -> list[str]:
    return [fault for run in runs for fault in getattr(run, name)]


def _ids(model: Any, batch: int, count: int) -> torch.Tensor:
    config = model.config.get_text_config(decoder=True)
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (batch, count), generator=random)
    return ids.to(next(model.parameters()).device)


def _watched(eviction: Eviction, work: Any) -> _Run:
    run = _Run()
    eviction.watch = run
    try:
        with torch.no_grad():
            work()
    except Exception as error:  # whatever it is, it is what was looked for
        run.error, frame = error, eviction.last
        if frame is not None and frame.layer.keys is not None:
            run.mask_of(frame, int(frame.layer.keys.shape[2]), frame.layer.index)
    finally:
        eviction.watch = eviction.last = None
    return run


def _forwards(model: Any, eviction: Eviction, count: int, steps: int) -> _Run:
    """One sequence, without a mask: positions come from the cache."""
    def work() -> None:
        cache, ids = DynamicCache(config=model.config), _ids(model, 1, count)
        for _ in range(steps):
            logits = model(ids, past_key_values=cache, use_cache=True).logits
            ids = logits[:, -1:].argmax(-1)
    return _watched(eviction, work)


def _generates(model: Any, eviction: Eviction, count: int, steps: int) -> _Run:
    """Two sequences, one with padding on the left."""
    def work() -> None:
        ids = _ids(model, 2, count)
        mask = torch.ones_like(ids)
        mask[1, : count // 4] = 0
        model.generate(ids, attention_mask=mask, max_new_tokens=steps, min_new_tokens=steps,
                       do_sample=False, pad_token_id=0)
    return _watched(eviction, work)


def _check_implementation(eviction: Eviction, report: Report) -> None:
    want = SDPA if eviction.implementation == "sdpa" else eviction.implementation
    faults = [f"layer {at}: attention is computed by {module.config._attn_implementation!r}, "
              f"eviction was installed for {eviction.implementation!r}"
              for at, module in eviction.modules.items()
              if (module.config._attn_implementation or "eager") != want]
    report.add("implementation", faults, f"{eviction.implementation}, watched in "
               f"{len(eviction.modules)} layers",
               "call remove_kv_eviction, set_attn_implementation, and install_kv_eviction again, "
               "in this order")


def _check_run(runs: list[_Run], report: Report) -> None:
    errors = [f"{type(run.error).__name__}: {run.error}" for run in runs if run.error is not None]
    report.add("generation", errors, "it ran, with padding and without",
               "see what is wrong below; the error is the model's or the cache's own")


def _check_sinks(eviction: Eviction, runs: list[_Run], report: Report) -> None:
    faults = []
    for run in runs:
        for at, layer in run.layers.items():
            for sequence in range(layer.evictor.batch):
                for one in layer.evictor.kept(sequence):
                    if one[:4] != [0, 1, 2, 3]:
                        faults.append(f"layer {at}: of the first 4 tokens "
                                      f"{[token for token in one[:4] if token < 4]} are left")
    report.add("sinks", faults, "the first 4 tokens are there",
               "without them models repeat themselves: install with n_sink=4 or more, or take a "
               "policy with sinks (h2o, streaming, keydiff, knorm)")


def _check_scores(runs: list[_Run], report: Report) -> None:
    faults = _all(runs, "scores")
    first, second = runs[0], runs[1]
    if not faults and first.error is None and second.error is None:
        kept = [{at: layer.evictor.kept(0) for at, layer in run.layers.items()}
                for run in (first, second)]
        if kept[0] != kept[1]:
            faults = ["the same prompt twice keeps other tokens the second time: something is "
                      "left of the first"]
    needs = [layer.evictor.traits.needs for run in runs for layer in run.layers.values()]
    counts = any(one & SparseNeeds.COLUMN_SUMS for one in needs)
    report.add("scores", faults, "counted in every step, and anew in each generation" if counts
               else "this policy counts none",
               "a cache counts for itself: begin a new one for each generation (or call "
               "reset_eviction_scores), and make policies of your own for each call")


def _check_growth(runs: list[_Run], most: int | None, report: Report) -> None:
    faults = []
    for run in runs:
        for at, rows in run.rows.items():
            limit = most if most is not None else max(rows[: len(rows) // 2 + 1])
            if max(rows) > limit or run.layers[at].evictor.rows != rows[-1]:
                faults.append(f"layer {at}: {rows[-1]} rows after {len(rows)} steps, "
                              f"at most {limit} were to stay")
    fine = "at most " + str(max((max(rows) for run in runs for rows in run.rows.values()),
                                default=0)) + " rows"
    report.add("growth", faults, fine,
               "a policy that evicts behind the prompt only lets the cache grow by what is "
               "written; otherwise update of an attention class of your own may keep tokens "
               "elsewhere, too")


def _check_layers(eviction: Eviction, runs: list[_Run], report: Report) -> None:
    faults = []
    for run in runs:
        steps = set(run.steps.values())
        for at in sorted(set(eviction.modules) - set(run.steps)):
            faults.append(f"layer {at} was never seen to run")
        if len(steps) > 1:
            faults.append(f"layers ran {sorted(steps)} times")
        found = {at: layer.evictor for at, layer in run.layers.items()}
        report.layers = {at: (one.rows, [len(kept) for kept in one.kept(0)])
                         for at, one in found.items()}
        lengths = {one.rows for one in found.values()}
        ragged = any(one.traits.ragged for one in found.values())
        if len(lengths) > 1 and not ragged and eviction.numbers.get("name") != "pyramidkv":
            faults.append("layers keep different numbers of tokens: " + ", ".join(
                f"{at}: {one.rows}" for at, one in sorted(found.items())))
    report.add("layers", faults, "all keep alike",
               "a layer that keeps all is not asked: is its forward replaced, or its cache another "
               "class?")
