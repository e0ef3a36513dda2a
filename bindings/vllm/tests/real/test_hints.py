"""Hints and quotas in a real vLLM on the processor, in one process and behind its HTTP server."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any, Dict, Iterator, List, Set

import kvtier
import pytest
from harness import ANSWER_SECONDS, MODEL, PYTHON, Engine, Server, connector
from kvtier_vllm.front import PATHS
from test_stories import TEXTS, alone, log  # noqa: F401: fixtures

pytestmark = pytest.mark.skipif(not PYTHON or not MODEL,
                                reason="KVTIER_VLLM_PYTHON and KVTIER_VLLM_MODEL are not set")

#: Bytes of the KV of a block of 128 tokens: 30 layers, K and V of 3 heads of 64 numbers.
BLOCK = 128 * 30 * 2 * 3 * 64 * 2
SMALL = {"max_model_len": 1024}


@pytest.mark.parametrize("transfer", [
    {"kv_cache_ttl_seconds": 3600}, {"cache_control": {"type": "ephemeral", "ttl": "1h"}}])
@pytest.mark.parametrize("layerwise", [False, True])
def test_kept_kv_survives_pressure_that_evicts_others(log: Path, transfer: Any, layerwise: bool) -> None:
    config = connector(host_bytes=24 * BLOCK, policy="lru", layerwise=layerwise)
    engine = Engine(log, kv_transfer_config=config, **SMALL)
    prompts = [text[:700] for text in TEXTS[:10]]
    engine.texts(prompts[:1], transfer=transfer)
    for prompt in prompts[1:]:  # 5 blocks each
        engine.texts([prompt])
    counts = engine.call("counts")
    assert counts["pins"] == 5 and counts["dropped_chunks"] > 0
    engine.call("reset")
    assert engine.cached(prompts[1:2]) == [0]
    assert engine.cached(prompts[:1]) == [640]
    engine.close()


def test_a_tenant_cannot_take_the_room_of_another(log: Path, alone: Any) -> None:
    config = connector(host_bytes="256MiB", policy="lru")
    engine = Engine(log, kv_transfer_config=config)
    prompts = [text[:700] for text in TEXTS[:5]]
    engine.texts(prompts[:1], hints={"tenant": 2})
    engine.call("quota", tenant=1, tier=kvtier.TIER_HOST, limit=12 * BLOCK)
    for prompt in prompts[1:]:
        engine.texts([prompt], hints={"tenant": 1})
    rows = engine.call("tenants")
    assert rows["1"]["rejected_puts"] == 0 and 0 < rows["1"]["host_bytes"] <= 12 * BLOCK
    long = TEXTS[6][:1750]
    assert engine.texts([long], hints={"tenant": 1}) == alone.texts([long], {})[0]
    rows = engine.call("tenants")
    assert rows["1"]["rejected_puts"] > 0, "13 blocks are more than 12"
    assert engine.call("connector_counts")["failed_saves"] > 0
    engine.call("reset")
    assert engine.cached(prompts[:1], hints={"tenant": 2}) == [640]
    assert engine.cached(prompts[1:2], hints={"tenant": 1}) == [0]
    engine.close()
    assert "quota" in log.read_text()


def test_wrong_hints_change_nothing_but_the_log(log: Path, alone: Any) -> None:
    prompt = TEXTS[0][:700]
    cold, warm = alone.texts([prompt], {})
    engine = Engine(log, kv_transfer_config=connector())
    wrong: List[Any] = [0, -1, 1e300, "600", True, [], {}]
    for at, ttl in enumerate(wrong):
        expected = cold if at == 0 else warm
        assert engine.texts([prompt], transfer={"kv_cache_ttl_seconds": ttl}) == expected
    for transfer in ({"cache_control": "1h"}, {"prompt_cache_retention": 24}, {"kvtier": [3]},
                     {"prompt_cache_key": ["x"]}, {"kvtier": {"ttl": 60}}):
        assert engine.texts([prompt], transfer=transfer) == warm
    assert engine.call("counts")["pins"] == 0
    engine.close()
    text = log.read_text()
    assert text.count("kv_cache_ttl_seconds hints of a request are ignored") >= len(wrong)
    assert "did you mean 'ttl_s'?" in text


class WithHints(Server):
    """The server with the middleware."""

    def __init__(self, log: Path, control: Path, **environment: str) -> None:
        self.control = control
        config = connector(spec=f'store(host=256MiB, control="{control}")', host_bytes=None)
        super().__init__(log, config, "--max-model-len", "2048", "--middleware",
                         "kvtier_vllm.front.HintsMiddleware", **environment)

    def metrics(self) -> Dict[str, float]:
        """The metrics of the store, which is in the process of the engine."""
        with socket.socket(socket.AF_UNIX) as one:
            one.settimeout(ANSWER_SECONDS)
            one.connect(str(self.control))
            one.sendall(b"metrics\n")
            answer = one.makefile("rb")
            word, size = answer.readline().split()[:2]
            assert word == b"ok"
            text = answer.read(int(size)).decode()
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#"]
        return {name: float(value) for name, value in lines}


@pytest.fixture
def server(log: Path, tmp_path: Path) -> Iterator[WithHints]:
    one = WithHints(log, tmp_path / "s", KVTIER_FRONT_TENANT="key")
    yield one
    one.close()


def unknown_paths(server: Server) -> Set[str]:
    """The paths of vLLM whose bodies have `kv_transfer_params`, and that the middleware lacks."""
    api = json.loads(server.send("GET", "/openapi.json")[1])
    found = set()
    for path, methods in api["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        name = content.get("application/json", {}).get("schema", {}).get("$ref", "")
        schema = api["components"]["schemas"].get(name.rpartition("/")[2], {})
        # Rendered prompts are computed by a later request.
        if "kv_transfer_params" in schema.get("properties", {}) and not path.endswith("render"):
            found.add(path)
    assert "/v1/chat/completions" in found
    return {path for path in found if not path.endswith(PATHS)}


def test_hints_of_all_apis_reach_the_store_through_http(server: WithHints) -> None:
    assert unknown_paths(server) == set()
    page = "A sentence that is repeated often, so that the prompt fills some blocks. " * 40
    pins, known = 0.0, {}  # type: float, Dict[str, Any]

    def more_pins() -> bool:
        nonlocal pins
        server.ask("/v1/completions", {"prompt": "x", "max_tokens": 1})  # the next step
        before, pins = pins, server.metrics()["kvtier_pins"]
        return pins > before

    hour = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    answer = server.ask("/v1/chat/completions", {
        "messages": [{"role": "user", "content": "1 " + page}], "max_tokens": 4,
        "temperature": 0, "prompt_cache_retention": "24h"})
    known["chat"] = answer["choices"][0]["message"]["content"]
    assert not (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") and more_pins()
    server.ask("/v1/completions", {"prompt": "2 " + page, "max_tokens": 1,
                                   "kv_cache_ttl_seconds": 600})
    assert more_pins()
    server.ask("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [
        {"type": "text", "text": "3 " + page, **hour}]}]})
    assert more_pins()
    server.ask("/v1/responses", {"input": "4 " + page, "max_output_tokens": 16,
                                 "prompt_cache_retention": "24h"})
    assert more_pins()
    server.ask("/v1/completions", {"prompt": "5 " + page, "max_tokens": 1})
    assert not more_pins()

    # Tokens that the connector loads count as cached tokens.
    assert server.send("POST", "/reset_prefix_cache")[0] == 200
    again = {"model": "m", "max_tokens": 4, "temperature": 0, "stream": True,
             "messages": [{"role": "user", "content": "1 " + page}], "prompt_cache_retention": "24h",
             "stream_options": {"include_usage": True}}
    status, stream = server.send("POST", "/v1/chat/completions", again)
    events = [json.loads(line[6:]) for line in stream.decode().splitlines()
              if line.startswith("data: {")]
    text = "".join(one["choices"][0]["delta"].get("content") or "" for one in events
                   if one["choices"])
    usage = events[-1]["usage"]
    assert status == 200 and text == known["chat"] and stream.rstrip().endswith(b"[DONE]")
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 256 and cached % 128 == 0 and cached > usage["prompt_tokens"] - 256
    assert server.metrics()["kvtier_host_hit_cells_total"] >= cached / 128 * 30

    # The engine itself refuses malformed bodies.
    assert server.send("POST", "/v1/completions", b'{"prompt": ')[0] in (400, 422)
    status, _ = server.send("POST", "/v1/completions", {
        "model": "m", "prompt": "x", "max_tokens": 1, "kv_transfer_params": 3})
    assert status in (400, 422)
    # Tenants are those of API keys, whatever the body says.
    for key in ("a", "b"):
        server.ask("/v1/completions", {"prompt": key + page, "max_tokens": 1, "kv_transfer_params": {
            "kvtier": {"tenant": 5}}}, authorization=f"Bearer {key}")
    tenants = {name for name in server.metrics() if name.startswith("kvtier_tenant_put_bytes_total")}
    assert len(tenants) >= 3 and not any('"5"' in name for name in tenants)
