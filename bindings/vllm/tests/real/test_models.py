"""Models of random weights, one of each kind of cache (`models.py tiny`), and LoRA.

KVTIER_VLLM_TINY is the folder of the models.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any, Dict, List

import pytest
from harness import PYTHON, Alone, Engine, connector, spec

TINY = os.environ.get("KVTIER_VLLM_TINY", "")
pytestmark = pytest.mark.skipif(not PYTHON or not TINY,
                                reason="KVTIER_VLLM_PYTHON and KVTIER_VLLM_TINY are not set")
#: Kinds whose layers all have full attention. The connector takes no others.
FULL = ("gqa", "moe", "mla")
OTHERS = ("window", "mixed", "hybrid")
#: Texts of kinds for which vLLM turns its own prefix cache off on processors, after a reset.
_continued: Dict[str, Any] = {}


def prompts(seed: int) -> List[List[int]]:
    drawn = random.Random(seed)
    return [[drawn.randrange(3, 1000) for _ in range(count)] for count in (700, 400, 900)]


def options(kind: str) -> Dict[str, Any]:
    return {"model": str(Path(TINY) / kind), "skip_tokenizer_init": True, "max_model_len": 2048}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("kind", FULL + OTHERS)
@pytest.mark.parametrize("interface", ["connector", "spec"])
def test_texts_of_a_restarted_engine_are_equal(interface: str, kind: str, tmp_path: Path,
                                               alone: Alone) -> None:
    config = (connector if interface == "connector" else spec)(tmp_path / "disk")
    if interface == "connector" and kind in OTHERS:
        with pytest.raises(RuntimeError, match="not supported.*kvtier_vllm.spec"):
            Engine(tmp_path / "log", kv_transfer_config=config, **options(kind))
        return
    asked = prompts(1)
    cold, warm = alone.texts(asked, options(kind))
    engine = Engine(tmp_path / "log", kv_transfer_config=config, **options(kind))
    assert engine.in_turn(asked) == cold
    engine.call("reset")
    if kind == "mla":
        # Continued from KV, sums differ from those of the whole prompt, but not from interface to interface.
        warm = _continued.setdefault(kind, engine.in_turn(asked))
        assert [text[0][:2] for text in warm] == [text[0][:2] for text in cold]
    assert engine.in_turn(asked) == warm
    engine.call("saved")
    engine.kill()
    engine = Engine(tmp_path / "log", kv_transfer_config=config, **options(kind))
    answers = [engine.call("generate", prompts=[one])["answers"][0] for one in asked]
    assert [one["ids"] for one in answers] == warm
    assert min(one["cached"] / len(prompt) for one, prompt in zip(answers, asked)) > 0.5
    engine.close()


@pytest.mark.parametrize("interface", ["connector", "spec"])
def test_a_lora_has_kv_of_its_own(interface: str, tmp_path: Path, alone: Alone) -> None:
    config = (connector if interface == "connector" else spec)(tmp_path / "disk")
    with_lora = {**options("gqa"), "enable_lora": True, "max_lora_rank": 8}
    lora, asked = str(Path(TINY) / "lora"), prompts(2)
    plain, plain_warm = alone.texts(asked, with_lora)
    adapted, adapted_warm = alone.texts(asked, with_lora, lora=lora)
    assert plain != adapted
    engine = Engine(tmp_path / "log", kv_transfer_config=config, **with_lora)
    assert engine.in_turn(asked) == plain
    assert engine.in_turn(asked, lora=lora) == adapted
    engine.call("saved")
    engine.close()
    engine = Engine(tmp_path / "log", kv_transfer_config=config, **with_lora)
    assert engine.cached([asked[0]], lora=lora) == [640]
    assert engine.in_turn(asked, lora=lora) == adapted_warm
    assert engine.in_turn(asked) == plain_warm
    engine.close()
