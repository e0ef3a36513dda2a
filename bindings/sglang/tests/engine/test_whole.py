"""Stories of a whole SGLang on the processor, with our backend below HiCache. The texts, and the KV
where they are compared, must be those of the same engine without kvtier.

`processor.py` says what of SGLang is replaced: the copies between its device pool and its host
pool.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Optional

import present  # noqa: F401, I001: skips where there is no engine
import pytest
from processes import Child

HERE = Path(__file__).resolve().parent
SECONDS = 900.0
PAGE = 16
try:
    importlib.import_module("sglang.srt.managers.scheduler")
    importlib.import_module("sglang.srt.entrypoints.engine")
except Exception as error:
    pytest.skip(f"SGLang's engine does not import: {error}", allow_module_level=True)

pytestmark = pytest.mark.skipif(
    "KVTIER_NO_SGLANG_HASH" in os.environ, reason="SGLang cannot compile its page hash here"
)

NUMBERS = random.Random(11)
TEXTS = [[NUMBERS.randrange(3, 510) for _ in range(1600)] for _ in range(12)]


class Engine(Child):
    """SGLang in processes of its own."""

    def __init__(self, log: Path, model: Path, **options: Any) -> None:
        environment = {
            "PYTHONPATH": os.pathsep.join([str(HERE), *(path for path in sys.path if path)]),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        super().__init__(
            [sys.executable, HERE / "whole.py"], log, environment,
            {"model_path": str(model), "max_total_tokens": 8192, **options},
            start_new_session=True)

    def answers(self, prompts: List[List[int]], **more: Any) -> List[Any]:
        """The answers to prompts that are sent one after the other, because sums depend on the
        batch."""
        return [self.call("generate", prompts=[prompt], **more)[0] for prompt in prompts]

    def texts(self, prompts: List[List[int]], **more: Any) -> List[Any]:
        return [one["ids"] for one in self.answers(prompts, **more)]

    def kv(self, tokens: List[int]) -> Any:
        return self.call("scheduler", method="kvtier_report", tokens=tokens)

    def stats(self) -> Dict[str, Any]:
        return dict(self.call("scheduler", method="kvtier_report")["stats"])

    def saved(self) -> None:
        """Waits until HiCache has written its pages to the store, and the store to its disk."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            found = self.call("scheduler", method="kvtier_report")
            stats = found["stats"]
            # Writes in flight are not unwritten bytes any more.
            if not found["busy"] and not stats.get("unwritten_bytes") and (
                not stats.get("disk_limit_bytes") or stats["disk_cells"] >= stats["host_cells"]
            ):
                return
            time.sleep(0.01)
        raise AssertionError("the pages were not written")

    def kill(self) -> None:
        """Kills all processes of the engine at once."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(SECONDS)
        try:  # SGLang ends its own processes; none may stay
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.log.close()


def extra(disk: Optional[Path] = None, **more: Any) -> str:
    """The JSON of the backend."""
    config = {
        "backend_name": "kvtier",
        "module_path": "kvtier_sglang",
        "class_name": "KvtierStorage",
        "interface_v1": 1,
        "host_bytes": 64 << 20,
        "prefetch_threshold": PAGE,
        **more,
    }
    if disk is not None:
        config.update(disk_path=str(disk), disk_bytes=1 << 30)
    return json.dumps({name: value for name, value in config.items() if value is not None})


def hicache(
    layout: str = "page_first", config: Optional[str] = None, **more: Any
) -> Dict[str, Any]:
    """The engine's options for HiCache."""
    options: Dict[str, Any] = {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_mem_layout": layout,
        "hicache_io_backend": "direct" if layout == "page_first_direct" else "kernel",
        "hicache_storage_prefetch_policy": "wait_complete",
        **more,
    }
    if config is not None:
        options.update(
            hicache_storage_backend="dynamic", hicache_storage_backend_extra_config=config
        )
    return options


def linker(disk: Path, **more: Any) -> Dict[str, Any]:
    """The engine's options for the linker."""
    config = {"host_bytes": 64 << 20, "disk_path": str(disk), "disk_bytes": 1 << 30, **more}
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": {
            "linker": "KvtierLinker",
            "linker_module_path": "kvtier_sglang.linker",
            "linker_extra_config": config,
        },
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import models

    return models.llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


class Alone:
    """What SGLang without kvtier answers. It runs once for all tests."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def texts(self, prompts: List[List[int]], **more: Any) -> List[Any]:
        """The answers without any cache."""
        assert self.engine.call("flush")
        return self.engine.texts(prompts, **more)

    def kv(self, tokens: List[int]) -> Any:
        assert self.engine.call("flush")
        self.engine.texts([tokens])
        return self.engine.kv(tokens)


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    engine = Engine(tmp_path_factory.mktemp("alone") / "log", model)
    yield Alone(engine)
    engine.close()


def pages(tokens: List[int]) -> int:
    """The tokens that a second request finds: whole pages, without the last token."""
    return (len(tokens) - 1) // PAGE * PAGE


def assert_loaded(engine: Engine, prompts: List[List[int]], want: List[Any]) -> None:
    """All pages of these prompts come from the store, and the texts are right."""
    found = engine.answers(prompts)
    assert [one["ids"] for one in found] == want
    assert [one["from"]["storage"] for one in found] == [pages(one) for one in prompts]


def test_a_flush_and_a_restart_and_a_kill(
    model: Path, alone: Alone, log: Path, tmp_path: Path
) -> None:
    prompts = [TEXTS[0][:1500], TEXTS[1][:700], TEXTS[2][:333]]
    want, kv = alone.texts(prompts), alone.kv(prompts[1])
    options = hicache("page_first", extra(tmp_path / "disk"))
    engine = Engine(log, model, **options)
    assert engine.texts(prompts) == want
    engine.saved()
    assert engine.call("flush")
    assert_loaded(engine, prompts, want)
    assert engine.kv(prompts[1]) == kv
    engine.saved()
    engine.close()
    for _ in range(2):
        engine = Engine(log, model, **options)
        assert_loaded(engine, prompts, want)
        assert engine.kv(prompts[1]) == kv
        engine.saved()
        engine.kill()


@pytest.mark.parametrize(
    "layout, interface", [("layer_first", 1), ("page_first_direct", 0), ("page_head", 1)]
)
def test_pages_of_other_layouts_load_after_a_flush(
    layout: str, interface: int, model: Path, alone: Alone, log: Path, tmp_path: Path
) -> None:
    prompts = [TEXTS[0][:1500], TEXTS[1][:700]]
    want, kv = alone.texts(prompts), alone.kv(prompts[1])
    engine = Engine(log, model, **hicache(layout, extra(interface_v1=interface)))
    assert engine.texts(prompts) == want
    engine.saved()
    assert engine.call("flush")
    assert_loaded(engine, prompts, want)
    assert engine.kv(prompts[1]) == kv
    engine.close()


@pytest.mark.parametrize("fits", [True, False])
def test_ten_sessions_where_three_fit(
    fits: bool, model: Path, alone: Alone, log: Path, tmp_path: Path
) -> None:
    """The engine has room for three sessions, and its host memory for six. Each returns with a
    second question. Where kvtier has no disk, and less memory than the sessions need, it evicts
    pages, which are computed again."""
    first, second = [text[:1400] for text in TEXTS[:10]], [text[:1440] for text in TEXTS[:10]]
    want = alone.texts(first + second)
    config = extra(tmp_path / "disk") if fits else extra(host_bytes=16 << 20)
    engine = Engine(log, model, **{**hicache("page_first", config), "max_total_tokens": 3 * 1500})
    assert engine.texts(first) == want[:10]
    engine.saved()
    found = engine.answers(second)
    assert [one["ids"] for one in found] == want[10:]
    cached = [one["cached"] for one in found]
    if fits:
        assert cached == [pages(first[0])] * 10
        assert [one["from"]["storage"] for one in found] == cached
    else:
        assert min(cached) < pages(first[0])
    engine.close()


def damage(disk: Path, part: float) -> None:
    """Overwrites bytes all over this part of what is on disk, counted from its end."""
    segments = sorted(disk.rglob("seg-*"))
    places = []
    for segment in segments:
        data = segment.read_bytes()
        places += [(segment, at) for at in range(8192, len(data), 512) if any(data[at : at + 512])]
    assert places
    for segment, at in places[int(len(places) * (1 - part)) :]:
        with segment.open("r+b") as file:
            file.seek(at)
            file.write(b"damaged")


@pytest.mark.parametrize("part", [1.0, 0.5])
def test_damaged_pages_are_computed_again(
    part: float, model: Path, alone: Alone, log: Path, tmp_path: Path
) -> None:
    """Of a prefix whose second half is damaged, at most the first half is loaded."""
    prompts = [TEXTS[3][:1500]]
    want, kv = alone.texts(prompts), alone.kv(prompts[0])
    options = hicache("page_first", extra(tmp_path / "disk", host_bytes=16 << 20))
    engine = Engine(log, model, **options)
    engine.texts(prompts)
    engine.saved()
    engine.close()
    damage(tmp_path / "disk", part)
    engine = Engine(log, model, **options)
    found = engine.answers(prompts)[0]
    assert found["ids"] == want[0] and engine.kv(prompts[0]) == kv
    assert found["cached"] == 0 if part == 1 else 0 < found["cached"] < pages(prompts[0])
    # Recomputed pages are stored again.
    engine.saved()
    assert engine.call("flush")
    assert_loaded(engine, prompts, want)
    engine.close()


def test_aborts_policies_and_attaching_at_run_time(
    model: Path, alone: Alone, log: Path, tmp_path: Path
) -> None:
    prompts = [TEXTS[5][:1500], TEXTS[6][:600]]
    want = alone.texts(prompts)
    config = extra(tmp_path / "disk")
    engine = Engine(log, model, **hicache("page_first", config))
    found = engine.call("generate", prompts=[TEXTS[7], TEXTS[8][:900]], abort=0, tokens=4)
    assert [one["end"] for one in found] == ["abort", "length"]
    assert engine.texts(prompts) == want
    engine.saved()
    assert engine.call("scheduler", method="kvtier_policy", spec="s3fifo")
    with pytest.raises(RuntimeError, match="nosuch"):
        engine.call("scheduler", method="kvtier_policy", spec="nosuch")
    assert engine.call("flush")
    # The request is aborted while its pages load, or soon after.
    engine.call("generate", prompts=prompts[:1], abort=0)
    assert engine.call("flush")
    assert_loaded(engine, prompts, want)
    engine.saved()
    assert engine.call("detach")[0]
    assert engine.call("flush")
    assert [one["cached"] for one in engine.answers(prompts)] == [0, 0]
    assert engine.call("flush")
    assert engine.call("attach", config=config)[0], "the directory is free again"
    assert_loaded(engine, prompts, want)
    engine.saved()
    assert engine.call("clear")[0] and engine.call("flush")
    found = engine.answers(prompts)
    assert [(one["ids"], one["cached"]) for one in found] == [(text, 0) for text in want]
    engine.close()


def test_requests_of_another_namespace_find_nothing(
    model: Path, alone: Alone, log: Path, tmp_path: Path
) -> None:
    """SGLang's names of pages have the namespace of a request in them, which an adapter is part
    of."""
    prompts = [TEXTS[9][:700]]
    want = alone.texts(prompts)
    engine = Engine(log, model, **hicache("page_first", extra(tmp_path / "disk")))
    assert engine.texts(prompts, extra_key="a") == want
    engine.saved()
    assert engine.call("flush")
    found = engine.answers(prompts, extra_key="b")[0]
    assert found["ids"] == want[0] and found["cached"] == 0
    engine.saved()
    assert engine.call("flush")
    assert engine.answers(prompts, extra_key="a")[0]["from"]["storage"] == pages(prompts[0])
    assert engine.answers(prompts)[0]["cached"] == 0
    engine.close()


def test_the_linker_loads_layer_by_layer_after_a_flush_and_a_kill(
    model: Path, alone: Alone, log: Path, tmp_path: Path
) -> None:
    prompts = [TEXTS[0][:1500], TEXTS[1][:700], TEXTS[2][:333]]
    want, kv = alone.texts(prompts), alone.kv(prompts[1])
    options = linker(tmp_path / "disk")
    engine = Engine(log, model, **options)
    assert engine.texts(prompts) == want
    engine.saved()
    assert engine.call("flush")
    for _ in range(2):
        found = engine.answers(prompts)
        assert [one["ids"] for one in found] == want
        assert [one["cached"] for one in found] == [pages(one) for one in prompts]
        assert engine.kv(prompts[1]) == kv
        engine.saved()
        engine.kill()
        engine = Engine(log, model, **options)
    # Requests that come together load together.
    found = engine.call("generate", prompts=prompts)
    assert [one["cached"] for one in found] == [pages(one) for one in prompts]
    engine.close()


def test_a_load_of_the_linker_that_fails_ends_its_request_only(
    model: Path, alone: Alone, log: Path, tmp_path: Path
) -> None:
    """SGLang aborts a request whose load has failed. The next one computes, and the engine goes
    on."""
    prompts = [TEXTS[3][:1500], TEXTS[4][:600]]
    want = alone.texts(prompts)
    options = linker(tmp_path / "disk", host_bytes=16 << 20)
    engine = Engine(log, model, **options)
    engine.texts(prompts[:1])
    engine.saved()
    engine.close()
    damage(tmp_path / "disk", 0.5)
    engine = Engine(log, model, **options)
    assert engine.answers(prompts[:1])[0]["end"] == "abort"
    found = engine.answers(prompts)
    assert [one["ids"] for one in found] == want and found[0]["cached"] < pages(prompts[0])
    engine.saved()
    assert engine.call("flush")
    found = engine.answers(prompts)
    assert [one["ids"] for one in found] == want
    assert [one["cached"] for one in found] == [pages(one) for one in prompts]
    engine.close()
