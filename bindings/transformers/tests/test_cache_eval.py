"""The evaluation tool: a full TieredCache gives equal results, a reduced cache different ones."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest
from cache_models import make, no_leaked_handles  # noqa: F401

import torch
from kvtier_transformers import _tasks, eval as tool
from transformers import DynamicCache, PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves a model and a tokenizer with one token per letter to a directory."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("model")
    letters = {chr(n): n - 31 for n in range(32, 127)}
    letters["\n"], letters["?"] = 97, 98
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="?"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?").save_pretrained(folder)
    make("llama").save_pretrained(folder)
    return folder


def run(capsys: Any, *args: object) -> "list[dict[str, Any]]":
    assert tool.main([str(arg) for arg in args]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_tiered_cache_scores_like_the_full_cache(model: Path, capsys: Any) -> None:
    one, = run(capsys, "ppl", "--model", model, "--length", 200, "--policy", "none", "--json")
    assert one["full"] == one["limited"] > 1 and one["length"] == 200
    rows = run(capsys, "ruler", "--model", model, "--length", 300, "--policy", "none",
               "--samples", 2, "--answer-tokens", 4, "--json")
    assert [row["eval"] for row in rows] == ["ruler/needle", "ruler/variables",
                                             "ruler/aggregation"]
    assert all(row["full"] == row["limited"] for row in rows)


def test_budget_changes_the_score(model: Path, capsys: Any, tmp_path: Path,
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache with zeroed keys stands in for eviction."""
    class Short(DynamicCache):
        def update(self, k: torch.Tensor, v: torch.Tensor, layer: int, *args: Any,
                   **kwargs: Any) -> Any:
            k, v = super().update(k, v, layer, *args, **kwargs)
            return torch.zeros_like(k), v

    @contextlib.contextmanager
    def limited(model: Any, policy: str, budget: int,
                recent: Any) -> Iterator[Callable[[], Any]]:
        assert (policy, budget, recent) == ("h2o", 32, 16)
        yield Short

    monkeypatch.setattr(tool, "limited", limited)
    text = tmp_path / "text"
    text.write_text("What is written here is read by a model of no mind. " * 9)
    one, = run(capsys, "ppl", "--model", model, "--text", text, "--length", 128, "--budget", 32,
               "--recent", 16, "--json")
    assert one["full"] != one["limited"] and one["budget"] == 32


def test_tasks_contain_their_answers() -> None:
    import random

    for name, make_one in _tasks.TASKS.items():
        for seed in range(20):
            sample = make_one(random.Random(seed), 300)
            again = make_one(random.Random(seed), 300)
            assert sample == again and 290 <= len(sample.context.split()) <= 900
            for word in sample.answers:
                assert word in sample.context and word not in sample.question, name


def test_missing_model_and_torch_are_reported(tmp_path: Path, capsys: Any) -> None:
    assert tool.main(["ppl", "--model", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err
    ended = subprocess.run([sys.executable, "-c", "import sys; sys.modules['torch'] = None\n"
                            "from kvtier import eval; raise SystemExit(eval.main())"],
                           capture_output=True, text=True, timeout=600)
    assert ended.returncode == 2 and "torch is not installed" in ended.stderr
