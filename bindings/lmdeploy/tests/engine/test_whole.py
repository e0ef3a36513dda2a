"""Stories of lmdeploy's whole PyTorch engine on the processor, with our connector. The texts, and
the KV of the prompts, must be those of the same engine without kvtier.

`processor.py` says what of lmdeploy is replaced: `torch.cuda` and the GPU kernels.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

import pytest
from processes import Child

HERE = Path(__file__).resolve().parent
BLOCK = 16
SECONDS = 900.0
NUMBERS = random.Random(11)
TEXTS = [[NUMBERS.randrange(3, 510) for _ in range(1600)] for _ in range(40)]


def missing() -> str:
    """Why the engine cannot be imported; empty if it can."""
    code = "import lmdeploy.pytorch.engine.model_agent.agent"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = found.stderr.strip().splitlines()[-1:] if found.returncode else []
    return f"lmdeploy's engine does not import: {last[0]}" if last else ""


@pytest.fixture(scope="module", autouse=True)
def engine_is_installed() -> None:
    """Skips where the engine cannot be imported."""
    reason = missing()
    if reason:
        pytest.skip(reason)


class Engine(Child):
    """lmdeploy in a process of its own."""

    def __init__(self, log: Path, model: Path, **options: Any) -> None:
        environment = {
            "PYTHONPATH": os.pathsep.join([str(HERE), *(path for path in sys.path if path)]),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
        }
        super().__init__([sys.executable, HERE / "whole.py"], log, environment,
                         {"model": str(model), **options})

    def answers(self, prompts: List[List[int]], **more: Any) -> List[Any]:
        """The answers to prompts that are sent one after the other, because sums depend on the
        batch."""
        return [self.call("generate", prompts=[prompt], **more)[0] for prompt in prompts]

    def close(self) -> None:
        self.call("close")
        super().close()


def connector(disk: Optional[Path] = None, **more: Any) -> Dict[str, Any]:
    """The configuration of the connector."""
    config: Dict[str, Any] = {"host_bytes": 64 << 20, **more}
    if disk is not None:
        config.update(disk_path=str(disk), disk_bytes=1 << 30)
    return config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import models

    return models.llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


class Alone:
    """What lmdeploy without kvtier answers to texts that no other test uses: at first, and
    again with its own prefix cache. Sums depend on how much is computed at once, so that the
    two may differ."""

    def __init__(self, model: Path, log: Path) -> None:
        self.engine = Engine(log, model, num_gpu_blocks=4096)
        self.known: Dict[str, Any] = {}

    def answers(self, prompts: List[List[int]], **more: Any) -> Any:
        for prompt in prompts:
            key = json.dumps([prompt, more])
            if key not in self.known:
                self.known[key] = [self.engine.answers([prompt], **more)[0] for _ in range(2)]
        return [
            [self.known[json.dumps([prompt, more])][at] for prompt in prompts] for at in range(2)
        ]


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = Alone(model, tmp_path_factory.mktemp("alone") / "log")
    yield made
    made.engine.close()


def what(answers: List[Any]) -> List[Any]:
    """The texts, and digests of the prompts' KV."""
    return [(one["ids"], one["kv"]) for one in answers]


def full(prompt: List[int]) -> int:
    """The tokens of a prompt that a second request finds: full blocks, without the last token."""
    return (len(prompt) - 1) // BLOCK * BLOCK


def assert_loaded(engine: Engine, prompts: List[List[int]], warm: List[Any]) -> None:
    """All full blocks come from the engine's cache or ours, and texts and KV are right."""
    found = engine.answers(prompts)
    assert what(found) == what(warm)
    assert [one["cached"] for one in found] == [full(one) for one in prompts]


def test_a_restart_and_a_kill(model: Path, alone: Alone, log: Path, tmp_path: Path) -> None:
    prompts = [TEXTS[0][:1500], TEXTS[1][:700], TEXTS[2][:333]]
    cold, warm = alone.answers(prompts)
    config = connector(tmp_path / "disk")
    engine = Engine(log, model, connector=config)
    assert what(engine.answers(prompts)) == what(cold)
    engine.call("saved")
    engine.close()
    for _ in range(2):
        engine = Engine(log, model, connector=config)
        assert_loaded(engine, prompts, warm)
        engine.call("saved")
        engine.kill()


@pytest.mark.parametrize("asynchronous, fits", [(False, True), (True, True), (False, False)])
def test_ten_sessions_where_three_fit(
    asynchronous: bool, fits: bool, model: Path, alone: Alone, log: Path, tmp_path: Path
) -> None:
    """The engine's cache has room for three sessions. Each returns with a second question.
    Where kvtier has no disk, and less memory than the sessions need, it evicts blocks, which
    are computed again."""
    first, second = [text[:1400] for text in TEXTS[20:30]], [text[:1440] for text in TEXTS[20:30]]
    config = (
        connector(tmp_path / "disk", lookup_async=asynchronous)
        if fits
        else connector(host_bytes=8 << 20, lookup_async=asynchronous)
    )
    cold, warm = alone.answers(first)
    want, _ = alone.answers(second)
    engine = Engine(log, model, connector=config, num_gpu_blocks=3 * 94)
    assert what(engine.answers(first)) == what(cold)
    engine.call("saved")
    if fits:
        found = engine.answers(second)
        assert what(found) == what(want)
        assert [one["cached"] for one in found] == [1392] * 10
    else:
        found = engine.answers(first[::-1])[::-1]
        for one, texts in zip(found, zip(cold, warm)):
            assert one["ids"] in [text["ids"] for text in texts]
        assert min(one["cached"] for one in found) < 1392 == found[-1]["cached"]
    engine.close()


def test_requests_at_once_and_preemption(model: Path, alone: Alone, log: Path) -> None:
    """Four requests that outgrow the engine's cache. It preempts some, whose KV is loaded again."""
    prompts = [text[:500] for text in TEXTS[30:34]]
    engine = Engine(log, model, connector=connector(), num_gpu_blocks=140)
    answers = engine.call("generate", prompts=prompts, tokens=200)
    assert [len(one["ids"]) for one in answers] == [200] * 4
    assert [one["ids"][0] for one in answers] == [
        one["ids"][0] for one in alone.answers(prompts)[0]
    ]
    engine.close()


@pytest.mark.parametrize("part", [1.0, 0.5])
def test_damaged_blocks_are_computed_again(
    part: float, model: Path, alone: Alone, log: Path, tmp_path: Path
) -> None:
    prompts = [TEXTS[3][:1500]]
    cold, warm = alone.answers(prompts)
    config = connector(tmp_path / "disk")
    engine = Engine(log, model, connector=config)
    engine.answers(prompts)
    engine.call("saved")
    engine.close()
    places = []
    for segment in sorted((tmp_path / "disk").rglob("seg-*")):
        data = segment.read_bytes()
        places += [(segment, at) for at in range(8192, len(data), 512) if any(data[at : at + 512])]
    assert places
    for segment, at in places[int(len(places) * (1 - part)) :]:
        with segment.open("r+b") as file:
            file.seek(at)
            file.write(b"damaged")
    engine = Engine(log, model, connector=config)
    found = engine.answers(prompts)
    assert what(found) == what(cold)
    assert found[0]["cached"] == 0
    engine.call("saved")
    engine.kill()
    engine = Engine(log, model, connector=config)  # what was computed again is stored again
    assert_loaded(engine, prompts, warm)
    engine.close()


def test_blocks_lost_between_lookup_and_load(
    model: Path, alone: Alone, log: Path, tmp_path: Path
) -> None:
    """A load fails in the middle: the engine computes all of the prompt, and goes on."""
    prompts = [TEXTS[4][:1500], TEXTS[5][:600]]
    cold, warm = alone.answers(prompts)
    config = connector(tmp_path / "disk")
    engine = Engine(log, model, connector=config)
    engine.answers(prompts)
    engine.call("saved")
    engine.close()
    engine = Engine(log, model, connector=config)
    assert engine.call("lose", blocks=40)
    found = engine.answers(prompts[:1])
    assert what(found) == what(cold[:1]) and found[0]["cached"] == 0
    assert engine.call("stats")["failed_loads"] == 1
    assert_loaded(engine, prompts[1:], warm[1:])
    engine.call("saved")
    engine.close()
    engine = Engine(log, model, connector=config)
    assert_loaded(engine, prompts, warm)
    engine.close()


def test_aborts_policies_and_weights(
    model: Path, alone: Alone, log: Path, tmp_path: Path
) -> None:
    prompts = [TEXTS[6][:1500], TEXTS[7][:600]]
    cold, warm = alone.answers(prompts)
    config = connector(tmp_path / "disk")
    engine = Engine(log, model, connector=config)
    found = engine.call("generate", prompts=[TEXTS[8], TEXTS[9][:900]], abort=0, tokens=4)
    assert [one["end"] for one in found] == ["CANCEL", "FINISH"]
    assert what(engine.answers(prompts)) == what(cold)
    engine.call("saved")
    assert engine.call("policy", spec="s3fifo")
    with pytest.raises(RuntimeError, match="nosuch"):
        engine.call("policy", spec="nosuch")
    engine.close()
    # The request that loads is aborted, and comes again.
    engine = Engine(log, model, connector=config)
    engine.call("generate", prompts=prompts[:1], abort=0)
    assert_loaded(engine, prompts, warm)
    engine.close()
    engine = Engine(log, model, connector=config)
    assert engine.call("weights", version="2")
    found = engine.answers(prompts)
    assert what(found) == what(cold) and [one["cached"] for one in found] == [0, 0]
    engine.close()


def test_other_weights_find_nothing(model: Path, log: Path, tmp_path: Path) -> None:
    import models

    config = connector(tmp_path / "disk", level="disk")
    engine = Engine(log, model, connector=config)
    engine.answers([TEXTS[0][:700]])
    engine.call("saved")
    engine.close()
    other = models.llama(tmp_path / "llama", seed=8)
    engine = Engine(log, other, connector=config)
    assert engine.answers([TEXTS[0][:700]])[0]["cached"] == 0
    engine.close()
