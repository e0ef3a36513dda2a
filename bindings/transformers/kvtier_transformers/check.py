"""`check`: diagnoses common faults of token eviction in a model."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from kvtier import SparseNeeds
from kvtier.h2o import ALL_QUERIES
from transformers import DynamicCache

from .attention import SDPA
from .h2o import Eviction, eviction_of

#: Defaults of h2o.
_DEFAULTS = {"budget": 1024, "n_recent": 256}


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    ok: bool
    text: str
    advice: str = ""

    def __str__(self) -> str:
        head = f"{'ok ' if self.ok else 'BAD'} {self.name}: {self.text}"
        return head if self.ok or not self.advice else f"{head}\n    -> {self.advice}"


@dataclasses.dataclass
class Report:
    """The results of all checks."""

    findings: list[Finding] = dataclasses.field(default_factory=list)
    #: For each layer, the rows of its cache at the end and the lengths of its lists.
    layers: dict[int, tuple[int, list[int]]] = dataclasses.field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether all checks passed."""
        return all(finding.ok for finding in self.findings)

    @property
    def wrong(self) -> list[str]:
        """The names of the failed checks."""
        return [finding.name for finding in self.findings if not finding.ok]

    def add(self, name: str, faults: list[str], success: str, advice: str) -> None:
        """Adds a finding. It fails if there are faults, and shows the first one."""
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        self.findings.append(Finding(name, not faults, faults[0] + more if faults else success,
                                     advice))

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings))


class _Run:
    """Observations of one generation; the callback for `Eviction.watch`."""

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
                                      f"but the sequences have {[one + 1 for one in want]} tokens")
        self.check_mask(frame, frame.rows, at)
        if evictor.traits.sum_queries == ALL_QUERIES:
            more = evictor.observed - self._observed.get(at, 0)
            self._observed[at] = evictor.observed
            if more == 0:
                self.scores.append(f"layer {at}, step {step}: no attention was counted")

    def check_mask(self, frame: Any, rows: int, at: int) -> None:
        """Adds a fault if the mask's width differs from the number of keys."""
        if frame.mask is not None and frame.mask.shape[-1] != rows:
            self.masks.append(f"layer {at}: the mask is for {frame.mask.shape[-1]} keys, but the "
                              f"cache has {rows}")


def check(model: Any, *, tokens: int | None = None, steps: int | None = None,
          verbose: bool = True) -> Report:
    """Runs three short generations with random tokens, and diagnoses common faults.

    The faults are: evicted sinks, stale scores, a growing cache, restarted positions, masks of
    wrong length, a changed attention implementation, differing layers. Prints the findings with
    advice. `tokens` is the length of the prompt; default: a little more than a cache keeps."""
    report = Report()
    try:
        eviction = eviction_of(model)
    except Exception as error:
        report.add("installed", [str(error)], "", "call install_kv_eviction(model, budget)")
        return _finished(report, verbose)
    most = _max_rows(eviction)
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
    report.add("positions", _all(runs, "positions"), "they include evicted tokens",
               "position_ids must continue from cache.get_seq_length(), which counts evicted "
               "tokens too: omit them, or count from it")
    report.add("masks", _all(runs, "masks"), "their width is the number of keys",
               "pass the model masks for all tokens, including evicted ones; for your own "
               "attention classes see mask in porting.md")
    _check_layers(eviction, done, report)
    return _finished(report, verbose)


def _finished(report: Report, verbose: bool) -> Report:
    if verbose:
        print(report)
    return report


def _max_rows(eviction: Eviction) -> int | None:
    """Returns the most rows that a cache keeps after a step, or None if unknown."""
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
    except Exception as error:  # any error is a finding
        run.error, frame = error, eviction.last
        if frame is not None and frame.layer.keys is not None:
            run.check_mask(frame, int(frame.layer.keys.shape[2]), frame.layer.index)
    finally:
        eviction.watch = eviction.last = None
    return run


def _forwards(model: Any, eviction: Eviction, count: int, steps: int) -> _Run:
    """Runs bare forward passes of one sequence without a mask; positions come from the cache."""
    def work() -> None:
        cache, ids = DynamicCache(config=model.config), _ids(model, 1, count)
        for _ in range(steps):
            logits = model(ids, past_key_values=cache, use_cache=True).logits
            ids = logits[:, -1:].argmax(-1)
    return _watched(eviction, work)


def _generates(model: Any, eviction: Eviction, count: int, steps: int) -> _Run:
    """Runs `generate` on two sequences, one of them with left padding."""
    def work() -> None:
        ids = _ids(model, 2, count)
        mask = torch.ones_like(ids)
        mask[1, : count // 4] = 0
        model.generate(ids, attention_mask=mask, max_new_tokens=steps, min_new_tokens=steps,
                       do_sample=False, pad_token_id=0)
    return _watched(eviction, work)


def _check_implementation(eviction: Eviction, report: Report) -> None:
    want = SDPA if eviction.implementation == "sdpa" else eviction.implementation
    faults = [f"layer {at}: the attention implementation is "
              f"{module.config._attn_implementation!r}, but eviction was installed for "
              f"{eviction.implementation!r}"
              for at, module in eviction.modules.items()
              if (module.config._attn_implementation or "eager") != want]
    report.add("implementation", faults, f"{eviction.implementation}, observed in "
               f"{len(eviction.modules)} layers",
               "call remove_kv_eviction, set_attn_implementation and install_kv_eviction, in this "
               "order")


def _check_run(runs: list[_Run], report: Report) -> None:
    errors = [f"{type(run.error).__name__}: {run.error}" for run in runs if run.error is not None]
    report.add("generation", errors, "it runs with and without padding",
               "see the failed checks below; the error comes from the model or its cache")


def _check_sinks(eviction: Eviction, runs: list[_Run], report: Report) -> None:
    faults = []
    for run in runs:
        for at, layer in run.layers.items():
            for sequence in range(layer.evictor.batch):
                for one in layer.evictor.kept(sequence):
                    if one[:4] != [0, 1, 2, 3]:
                        faults.append(f"layer {at}: of the first 4 tokens only "
                                      f"{[token for token in one[:4] if token < 4]} are resident")
    report.add("sinks", faults, "the first 4 tokens are resident",
               "models repeat themselves without sinks: install with n_sink=4 or more, or use a "
               "policy with sinks (h2o, streaming, keydiff, knorm)")


def _check_scores(runs: list[_Run], report: Report) -> None:
    faults = _all(runs, "scores")
    first, second = runs[0], runs[1]
    if not faults and first.error is None and second.error is None:
        kept = [{at: layer.evictor.kept(0) for at, layer in run.layers.items()}
                for run in (first, second)]
        if kept[0] != kept[1]:
            faults = ["the same prompt keeps other tokens the second time: state of the first "
                      "generation remains"]
    needs = [layer.evictor.traits.needs for run in runs for layer in run.layers.values()]
    counts = any(one & SparseNeeds.COLUMN_SUMS for one in needs)
    report.add("scores", faults, "counted in every step, and reset in each generation" if counts
               else "this policy uses no scores",
               "begin a new cache for each generation, or call reset_eviction_scores; a function "
               "for custom policies must return a new policy at each call")


def _check_growth(runs: list[_Run], most: int | None, report: Report) -> None:
    faults = []
    for run in runs:
        for at, rows in run.rows.items():
            limit = most if most is not None else max(rows[: len(rows) // 2 + 1])
            if max(rows) > limit or run.layers[at].evictor.rows != rows[-1]:
                faults.append(f"layer {at}: the cache has {rows[-1]} rows after {len(rows)} "
                              f"steps, the limit is {limit}")
    highest = max((max(rows) for run in runs for rows in run.rows.values()), default=0)
    report.add("growth", faults, f"at most {highest} rows",
               "a policy that evicts only after the prompt lets the cache grow during "
               "generation; otherwise check whether your own attention class keeps tokens "
               "elsewhere")


def _check_layers(eviction: Eviction, runs: list[_Run], report: Report) -> None:
    faults = []
    for run in runs:
        steps = set(run.steps.values())
        for at in sorted(set(eviction.modules) - set(run.steps)):
            faults.append(f"layer {at} did not run")
        if len(steps) > 1:
            faults.append(f"layers ran different numbers of times: {sorted(steps)}")
        found = {at: layer.evictor for at, layer in run.layers.items()}
        report.layers = {at: (one.rows, [len(kept) for kept in one.kept(0)])
                         for at, one in found.items()}
        lengths = {one.rows for one in found.values()}
        ragged = any(one.traits.ragged for one in found.values())
        if len(lengths) > 1 and not ragged and eviction.numbers.get("name") != "pyramidkv":
            faults.append("layers keep different numbers of tokens: " + ", ".join(
                f"{at}: {one.rows}" for at, one in sorted(found.items())))
    report.add("layers", faults, "all layers keep equal numbers of tokens",
               "the hooks of a layer that keeps all tokens did not run: check whether its forward "
               "was replaced, or whether its cache has another class")
