"""`vllm serve` with concurrent clients, some of which hang up.

KVTIER_VLLM_SECONDS: how long the clients ask, 20 by default.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import threading
import time
from pathlib import Path
from typing import Any, List

import pytest
from harness import ANSWER_SECONDS, MODEL, PYTHON, Alone, Server, connector, spec
from test_stories import TEXTS

pytestmark = pytest.mark.skipif(not PYTHON or not MODEL,
                                reason="KVTIER_VLLM_PYTHON and KVTIER_VLLM_MODEL are not set")
SECONDS = float(os.environ.get("KVTIER_VLLM_SECONDS", "20"))
CLIENTS = 8


def complete(server: Server, prompt: List[int], tokens: int = 8) -> Any:
    return server.ask("/v1/completions", {"prompt": prompt, "max_tokens": tokens, "temperature": 0,
                                          "ignore_eos": True, "return_token_ids": True})


def hang_up(server: Server, prompt: List[int]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=ANSWER_SECONDS)
    body = {"model": "m", "prompt": prompt, "max_tokens": 200, "temperature": 0, "stream": True,
            "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200 and answer.read(64)
    connection.close()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(tmp_path_factory.mktemp("alone"))


def crowd(server: Server, seconds: float) -> int:
    """Clients that send prompts for so long, and at least one each. Some hang up. Returns the number of complete
    answers; an error fails the test."""
    end, done, errors = time.monotonic() + seconds, [0] * CLIENTS, []

    def client(number: int) -> None:
        drawn = random.Random(number)
        try:
            while not done[number] or time.monotonic() < end:
                text, size = TEXTS[drawn.randrange(8)], drawn.randrange(100, 1900)
                if drawn.random() < 0.2:
                    hang_up(server, text[:size])
                else:
                    assert len(complete(server, text[:size])["choices"][0]["token_ids"]) == 8
                    done[number] += 1
        except BaseException as error:  # the test reports it
            errors.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    return sum(done)


def test_clients_that_hang_up_leave_right_texts(tmp_path: Path, alone: Alone) -> None:
    # Requests end when their KV is on disk: the server is killed.
    config = connector(tmp_path / "disk", level="disk")
    # The engine's own cache has room for two of the conversations.
    server = Server(tmp_path / "log", config, "--max-model-len", "4096",
                    "--num-gpu-blocks-override", "40")
    assert crowd(server, SECONDS) >= CLIENTS
    asked = [TEXTS[9][:1750], TEXTS[10][:700]]
    cold, warm = alone.texts(asked, {})
    assert [[complete(server, one)["choices"][0]["token_ids"]] for one in asked] == cold
    server.kill()
    server = Server(tmp_path / "log", config, "--max-model-len", "4096")
    for prompt, text in zip(asked, warm):
        answer = complete(server, prompt)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert [answer["choices"][0]["token_ids"]] == text and cached > len(prompt) * 0.8
    server.close()


def test_the_spec_is_refused_with_words(tmp_path: Path) -> None:
    """On a processor the server has its worker in a process of its own."""
    log = tmp_path / "log"
    with pytest.raises(AssertionError):
        Server(log, spec(tmp_path / "disk"))
    assert "the worker is in another process" in log.read_text()
