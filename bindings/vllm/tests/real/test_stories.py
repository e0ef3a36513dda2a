"""Stories of a real vLLM on the processor, whose texts must be those of the engine without kvtier.

KVTIER_VLLM_PYTHON names an interpreter that has vLLM for processors and kvtier; KVTIER_VLLM_MODEL the folder of
a model (`models.py`). `ffi-tests/run --engines vllm` provides both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest
from harness import HERE, MODEL, PYTHON, Alone, Engine, connector, spec
from processes import Redis, redis_server

pytestmark = pytest.mark.skipif(not PYTHON or not MODEL,
                                reason="KVTIER_VLLM_PYTHON and KVTIER_VLLM_MODEL are not set")


def read_texts() -> List[List[int]]:
    """Parts of the documentation, 2,000 tokens each."""
    from tokenizers import Tokenizer

    pages = sorted((HERE.parents[3] / "docs").glob("*/*.md"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    ids = Tokenizer.from_file(str(Path(MODEL) / "tokenizer.json")).encode(text[:150_000]).ids
    return [ids[at:at + 2000] for at in range(0, 24_000, 2000)]


TEXTS = read_texts() if MODEL else []


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(tmp_path_factory.mktemp("alone"))


@pytest.fixture(params=["connector", "layerwise", "spec"])
def config(request: Any, tmp_path: Path) -> Dict[str, Any]:
    disk = tmp_path / "disk"
    if request.param == "spec":
        return spec(disk)
    return connector(disk, layerwise=request.param == "layerwise")


def test_a_reset_and_a_restart_and_a_kill(config: Dict[str, Any], log: Path, alone: Alone) -> None:
    prompts = [TEXTS[0][:1750], TEXTS[1][:700], TEXTS[2][:900]]
    cold, warm = alone.texts(prompts, {})
    engine = Engine(log, kv_transfer_config=config)
    assert engine.in_turn(prompts) == cold
    engine.call("reset")
    assert engine.in_turn(prompts) == warm
    engine.call("saved")
    engine.close()
    for _ in range(2):
        engine = Engine(log, kv_transfer_config=config)
        answers = [engine.call("generate", prompts=[one])["answers"][0] for one in prompts]
        assert [one["ids"] for one in answers] == warm
        assert answers[0]["cached"] >= 1600 and answers[1]["cached"] >= 600
        engine.call("saved")
        engine.kill()


def test_ten_sessions_where_three_fit(config: Dict[str, Any], log: Path, alone: Alone) -> None:
    """The engine's own cache has room for three sessions. Each returns with a second question."""
    options = {"num_gpu_blocks_override": 3 * 7 + 4, "max_model_len": 1024}
    first = [text[:700] for text in TEXTS[:10]]
    second = [text[:740] for text in TEXTS[:10]]
    # With room for all, the engine computes as much of the second questions.
    cold, _ = alone.texts(first + second, {"max_model_len": 1024})
    engine = Engine(log, kv_transfer_config=config, **options)
    assert engine.in_turn(first) == cold[:10]
    answers = [engine.call("generate", prompts=[one])["answers"][0] for one in second]
    assert [one["ids"] for one in answers] == cold[10:]
    assert min(one["cached"] for one in answers) == 640
    engine.close()


def test_chunks_copies_aborts_and_policies(config: Dict[str, Any], log: Path, alone: Alone) -> None:
    options = {"max_num_batched_tokens": 512}
    prompts = [TEXTS[3][:1500], TEXTS[4][:600]]
    cold, warm = alone.texts(prompts, options)
    copies, _ = alone.texts([TEXTS[5][:500]], options, n=3)
    engine = Engine(log, kv_transfer_config=config, **options)
    aborted = engine.call("generate", prompts=[TEXTS[6][:1900], TEXTS[7][:1800]], abort=0)
    assert aborted["answers"][0] is None or len(aborted["answers"][0]["ids"][0]) < 8
    assert engine.in_turn(prompts) == cold
    assert engine.call("policy", spec="s3fifo") == "s3fifo"
    engine.call("reset")
    assert engine.in_turn(prompts) == warm
    assert engine.in_turn([TEXTS[5][:500]], n=3) == copies
    with pytest.raises(RuntimeError, match="nosuch"):
        engine.call("policy", spec="nosuch")
    engine.call("reset")
    assert engine.in_turn(prompts) == warm
    engine.close()


def test_preempted_requests_finish(config: Dict[str, Any], log: Path, alone: Alone) -> None:
    """Requests outgrow the engine's cache, which ends some and starts them again later."""
    options = {"num_gpu_blocks_override": 16, "max_model_len": 1024}
    prompts = [text[:500] for text in TEXTS[:5]]
    cold, _ = alone.texts(prompts, {"max_model_len": 1024}, tokens=1)
    engine = Engine(log, kv_transfer_config=config, **options)
    answers = engine.call("generate", prompts=prompts, tokens=300)["answers"]
    assert [len(one["ids"][0]) for one in answers] == [300] * 5
    assert [[one["ids"][0][:1]] for one in answers] == cold
    engine.close()


def damage(disk: Path) -> None:
    """Overwrites a few bytes of each page of the store's files."""
    segments = list(disk.rglob("seg-*"))
    assert segments
    for segment in segments:
        with segment.open("r+b") as file:
            for at in range(8192, segment.stat().st_size, 4096):
                file.seek(at)
                file.write(b"damaged")


def test_a_damaged_store_is_computed_again(config: Dict[str, Any], log: Path, tmp_path: Path,
                                           alone: Alone) -> None:
    prompts = [TEXTS[0][:1750]]
    cold, _ = alone.texts([TEXTS[0][:1750], TEXTS[1][:700], TEXTS[2][:900]], {})
    engine = Engine(log, kv_transfer_config=config)
    engine.in_turn(prompts)
    engine.call("saved")
    engine.close()
    damage(tmp_path / "disk")
    engine = Engine(log, kv_transfer_config=config)
    answer = engine.call("generate", prompts=prompts)["answers"][0]
    assert answer["ids"] == cold[0] and answer["cached"] == 0
    engine.close()


def test_a_load_that_fails_in_the_middle(config: Dict[str, Any], log: Path, tmp_path: Path,
                                         alone: Alone) -> None:
    """The disk is damaged while the engine runs: the store believes that it has the KV."""
    config["kv_connector_extra_config"]["host_bytes"] = "48MiB"
    prompts = [TEXTS[0][:1750], TEXTS[1][:700], TEXTS[2][:900]]
    cold, _ = alone.texts(prompts, {})
    engine = Engine(log, kv_transfer_config=config)
    for prompt in (prompts[0], TEXTS[8][:1900], TEXTS[9][:1900]):
        engine.texts([prompt])
        engine.call("saved")
    engine.call("reset")
    damage(tmp_path / "disk")
    assert engine.in_turn(prompts) == cold
    assert engine.call("counts")["corrupt_cells"] > 0
    engine.close()


@pytest.fixture
def redis() -> Iterator[Redis]:
    with redis_server() as server:
        yield server


def test_two_servers_share_a_redis_and_survive_it(redis: Redis, log: Path, alone: Alone) -> None:
    prompts = [TEXTS[0][:1750], TEXTS[1][:700], TEXTS[2][:900]]
    cold, warm = alone.texts(prompts, {})
    url = f'store(host=256MiB, remote=redis(url="{redis.url}"))'
    shared = connector(spec=url, level="remote", remote_lookup_s=60, host_bytes=None)
    first = Engine(log, kv_transfer_config=shared)
    assert first.in_turn(prompts) == cold
    first.close()
    second = Engine(log, kv_transfer_config=shared)
    answers = [second.call("generate", prompts=[one])["answers"][0] for one in prompts]
    assert [one["ids"] for one in answers] == warm and answers[0]["cached"] >= 1600
    redis.kill()
    assert second.in_turn([TEXTS[3][:700]]) == alone.texts([TEXTS[3][:700]], {})[0]
    second.call("reset")
    assert second.in_turn(prompts) == warm  # from host memory
    second.close()


@pytest.mark.parametrize("remote, layerwise", [("dir", False), ("dir", True), ("redis", False)])
def test_one_engine_prefills_and_another_decodes(remote: str, layerwise: bool, log: Path,
                                                 request: Any, tmp_path: Path,
                                                 alone: Alone) -> None:
    """The second engine runs, and has answered another prompt, before the first one prefills."""
    if remote == "redis":
        url = request.getfixturevalue("redis").url
        where = f'redis(url="{url}", timeout=600000)'
    else:
        (tmp_path / "shared").mkdir()
        where = f'dir(path="{tmp_path}/shared", timeout=600000)'
    shared = connector(spec=f"store(host=256MiB, remote={where})", level="remote", host_bytes=None,
                       remote_lookup_s=60, layerwise=layerwise)
    prompts = [TEXTS[0][:1750], TEXTS[1][:700], TEXTS[2][:900]]
    other = TEXTS[3][:700]
    cold, warm = alone.texts(prompts, {})
    other_cold, _ = alone.texts([other], {})
    decode = Engine(log, kv_transfer_config={**shared, "kv_role": "kv_consumer"})
    assert decode.in_turn([other]) == other_cold
    prefill = Engine(log, kv_transfer_config={**shared, "kv_role": "kv_producer"})
    first = prefill.in_turn(prompts, tokens=1)
    assert [ids[0] for ids in first] == [ids[0][:1] for ids in cold]
    answers = [decode.call("generate", prompts=[one])["answers"][0] for one in prompts]
    block = decode.call("block")  # one token is always computed
    assert [one["cached"] for one in answers] == [(len(p) - 1) // block * block for p in prompts]
    assert [one["ids"] for one in answers] == warm
    # The consumer saved nothing, and the producer loads nothing.
    assert prefill.cached([other]) == [0]
    prefill.call("reset")
    assert prefill.cached([prompts[0]]) == [0]
    # The decode engine goes on without the prefill engine.
    prefill.kill()
    decode.call("reset")
    again = decode.call("generate", prompts=[prompts[1]])["answers"][0]
    assert again["ids"] == warm[1] and again["cached"] >= 640
    decode.close()


def test_a_damaged_remote_is_computed_by_the_decode_engine(log: Path, tmp_path: Path,
                                                           alone: Alone) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    spec = f'store(host=256MiB, remote=dir(path="{folder}", timeout=600000))'
    shared = connector(spec=spec, level="remote", host_bytes=None, remote_lookup_s=60)
    prompts = [TEXTS[0][:1750]]
    cold, _ = alone.texts([TEXTS[0][:1750], TEXTS[1][:700], TEXTS[2][:900]], {})
    prefill = Engine(log, kv_transfer_config={**shared, "kv_role": "kv_producer"})
    prefill.in_turn(prompts, tokens=1)
    prefill.close()
    objects = [file for file in folder.rglob("*") if file.is_file() and file.stat().st_size > 65536]
    assert len(objects) >= 1750 // 128
    for file in objects:
        with file.open("r+b") as opened:
            opened.seek(file.stat().st_size // 2)
            opened.write(b"damaged")
    decode = Engine(log, kv_transfer_config={**shared, "kv_role": "kv_consumer"})
    answer = decode.call("generate", prompts=prompts)["answers"][0]
    assert answer["ids"] == cold[0] and answer["cached"] == 0
    decode.close()


def test_sleep_is_refused_in_words(log: Path) -> None:
    with pytest.raises(RuntimeError, match="(?i)sleep"):
        Engine(log, kv_transfer_config=connector(), enable_sleep_mode=True)


def test_fifty_requests_read_a_shared_prefix_once(log: Path, tmp_path: Path) -> None:
    """All arrive at once, with one prefix of 4,000 tokens on disk."""
    prefix = (TEXTS[0] + TEXTS[1])[:3968]
    config = connector(tmp_path / "disk")
    options = {"max_model_len": 4200, "kv_transfer_config": config}
    engine = Engine(log, **options)
    engine.texts([prefix + [100]])
    engine.call("saved")
    engine.close()
    engine = Engine(log, **options)
    before = engine.call("counts")["disk_read_bytes"]
    answers = engine.call("generate", prompts=[prefix + [100 + i, 7] for i in range(50)], tokens=2)
    read = engine.call("counts")["disk_read_bytes"] - before
    size = len(prefix) * 23040
    assert min(one["cached"] for one in answers["answers"]) == 3968
    assert read <= 1.05 * size, f"{read / size} times the prefix was read"
    engine.close()
