"""Measures what token eviction costs: a model with a token budget against its full cache.

    python -m kvtier_transformers.eval ppl   --model DIR --length 2048 --budget 256
    python -m kvtier_transformers.eval ruler --model DIR --length 2048 --budget 256 --samples 20

`ppl` computes the perplexity of a text, one token at a time after a prompt. `ruler` asks for facts
in filler: a hidden number (needle), a chain of assignments (variables), the most frequent names
(aggregation). `--policy` is a policy of `install_kv_eviction`, such as h2o or
"snapkv(budget=512,window=32)". `--policy none` runs the full cache through a TieredCache, which
must give equal results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

import kvtier
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from ._errors import invalid
from ._tasks import TASKS, prose
from .tiers import Tiers

Row = Dict[str, Any]


def _device_of(model: Any) -> torch.device:
    device: torch.device = model.get_input_embeddings().weight.device
    return device


def perplexity(model: Any, ids: torch.Tensor, new_cache: Callable[[], Any],
               prompt: int) -> float:
    """Returns the perplexity of the tokens after the first `prompt` tokens. Each token is predicted
    from the tokens before it that the cache still has."""
    cache, loss = new_cache(), 0.0
    with torch.no_grad():
        logits = model(input_ids=ids[:, :prompt], past_key_values=cache).logits[:, -1]
        for at in range(prompt, ids.shape[1]):
            loss -= float(torch.log_softmax(logits.float(), -1)[0, ids[0, at]])
            one = ids[:, at:at + 1]
            logits = model(input_ids=one, past_key_values=cache).logits[:, -1]
    return math.exp(loss / (ids.shape[1] - prompt))


def answer(model: Any, context: torch.Tensor, question: torch.Tensor,
           new_cache: Callable[[], Any], tokens: int) -> List[int]:
    """Returns the model's greedy answer of `tokens` tokens.

    The question follows the context in separate passes, so tokens of the context are evicted
    without knowledge of the question."""
    cache, output = new_cache(), []
    with torch.no_grad():
        model(input_ids=context, past_key_values=cache)
        for at in range(question.shape[1]):
            logits = model(input_ids=question[:, at:at + 1], past_key_values=cache).logits
        for _ in range(tokens):
            one = logits[:, -1:].argmax(-1)
            output.append(int(one))
            logits = model(input_ids=one, past_key_values=cache).logits
    return output


@contextlib.contextmanager
def limited(model: Any, policy: str, budget: int,
            recent: Optional[int]) -> Iterator[Callable[[], Any]]:
    """Context manager: limits the model to a budget, and yields a function that creates caches."""
    if policy == "none":
        with Tiers(model, "store(host=256MiB)") as tiers:
            yield tiers.cache
        return
    from . import install_kv_eviction, remove_kv_eviction

    if "(" in policy:  # a full spec contains its own numbers
        install_kv_eviction(model, policy=policy)
    else:
        install_kv_eviction(model, budget=budget, n_recent=recent, policy=policy)
    try:
        yield lambda: DynamicCache(config=model.config)
    finally:
        remove_kv_eviction(model)


def _ids(tokenizer: Any, text: str, device: torch.device, begins: bool = False) -> torch.Tensor:
    """Returns the token ids of a text.

    With `begins` they start with the tokenizer's BOS token, without which some models degrade."""
    ids: List[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    first = tokenizer.bos_token_id
    if begins and first is not None and first in tokenizer("a")["input_ids"][:1]:
        ids = [first, *ids]
    return torch.tensor([ids], device=device)


def _fitting(tokenizer: Any, length: int) -> int:
    """Returns the number of filler words that give about `length` tokens."""
    sample = prose(0, 400)
    tokens = len(tokenizer(sample, add_special_tokens=False)["input_ids"])
    return max(60, int(length * len(sample.split()) / tokens))


def ppl(model: Any, tokenizer: Any, args: argparse.Namespace) -> List[Row]:
    """Runs the perplexity evaluation; returns one row."""
    if args.text is not None:
        text = Path(args.text).read_text(encoding="utf-8")
    else:
        text = prose(args.seed, 2 * _fitting(tokenizer, args.length))
    ids = _ids(tokenizer, text, _device_of(model), begins=True)[:, :args.length]
    prompt = ids.shape[1] // 2
    if prompt < 8:
        raise invalid(f"the text has {ids.shape[1]} tokens: use a text and a --length of at least "
                      "16")

    def full() -> Any:
        return DynamicCache(config=model.config)

    before = perplexity(model, ids, full, prompt)
    with limited(model, args.policy, args.budget, args.recent) as new_cache:
        begin = time.perf_counter()
        after = perplexity(model, ids, new_cache, prompt)
        taken = time.perf_counter() - begin
    return [{"eval": "ppl", "length": ids.shape[1], "full": before, "limited": after,
             "better": "lower", "seconds": round(taken, 3)}]


def _score(tokenizer: Any, output: Sequence[int], answers: Sequence[str]) -> float:
    text = tokenizer.decode(output).lower()
    return sum(one in text for one in answers) / len(answers)


def ruler(model: Any, tokenizer: Any, args: argparse.Namespace) -> List[Row]:
    """Runs the retrieval tasks; returns one row per task, with the mean share of found answers."""
    words, device = _fitting(tokenizer, args.length), _device_of(model)
    rows = []
    for name in args.task or list(TASKS):
        numbers = random.Random(f"{args.seed} {name}")
        samples = [TASKS[name](numbers, words) for _ in range(args.samples)]

        def run(new_cache: Callable[[], Any]) -> float:
            found = []
            for sample in samples:
                context = _ids(tokenizer, sample.context, device, begins=True)
                question = _ids(tokenizer, sample.question, device)
                output = answer(model, context, question, new_cache, args.answer_tokens)
                found.append(_score(tokenizer, output, sample.answers))
            return sum(found) / len(found)

        before = run(lambda: DynamicCache(config=model.config))
        with limited(model, args.policy, args.budget, args.recent) as new_cache:
            begin = time.perf_counter()
            after = run(new_cache)
            taken = time.perf_counter() - begin
        rows.append({"eval": f"ruler/{name}", "length": args.length, "full": before,
                     "limited": after, "better": "higher", "seconds": round(taken, 3)})
    return rows


def show(rows: Sequence[Row], args: argparse.Namespace) -> None:
    """Prints the rows as a table or as JSON lines."""
    for row in rows:
        row.update(model=str(args.model), policy=args.policy, budget=args.budget)
    if args.json:
        for row in rows:
            print(json.dumps(row), flush=True)
        return
    print(f"{args.model}: full cache against {args.policy}, budget {args.budget}")
    print(f"{'':20} {'length':>7} {'full':>10} {'limited':>10}   better")
    for row in rows:
        print(f"{row['eval']:20} {row['length']:7} {row['full']:10.4f} {row['limited']:10.4f}"
              f"   {row['better']}")


def parse(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m kvtier.eval", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["ruler", "ppl"])
    parser.add_argument("--model", required=True, type=Path,
                        help="a directory with a model and its tokenizer")
    parser.add_argument("--length", type=int, default=1024, help="tokens of the text")
    parser.add_argument("--budget", type=int, default=256, help="tokens that the policy keeps")
    parser.add_argument("--recent", type=int, help="last tokens kept in addition (default: the "
                        "policy's)")
    parser.add_argument("--policy", default="h2o", help="policy of install_kv_eviction, or none")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 or auto")
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16, float16 or auto")
    parser.add_argument("--attention", default="sdpa", help="sdpa or eager")
    parser.add_argument("--text", help="ppl: a text file (default: generated text)")
    parser.add_argument("--task", action="append", choices=sorted(TASKS),
                        help="ruler: a task, may be repeated (default: all)")
    parser.add_argument("--samples", type=int, default=10, help="ruler: questions per task")
    parser.add_argument("--answer-tokens", type=int, default=16, help="ruler: tokens of an answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    return parser.parse_args(argv)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Runs the command line; returns the exit status."""
    args = parse(argv)
    if not (args.model / "config.json").is_file():
        print(f"{args.model} has no config.json: pass --model a directory in transformers' format",
              file=sys.stderr)
        return 2
    if min(args.length, args.budget, args.samples, args.answer_tokens) < 1:
        print("--length, --budget, --samples and --answer-tokens must be 1 or greater",
              file=sys.stderr)
        return 2
    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    placement = {"device_map": "auto"} if args.device == "auto" else {}
    model: Any = AutoModelForCausalLM.from_pretrained(
        args.model, local_files_only=True, dtype=args.dtype,
        attn_implementation=args.attention, **placement)
    model.eval()
    if args.device != "auto":
        model = model.to(args.device)
    try:
        rows = (ppl if args.what == "ppl" else ruler)(model, tokenizer, args)
    except kvtier.Error as error:
        print(error, file=sys.stderr)
        return 1
    show(rows, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
