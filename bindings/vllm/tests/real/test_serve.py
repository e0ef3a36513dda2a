"""`vllm serve` with concurrent clients, some of which hang up.

KVTIER_VLLM_SECONDS: how long the clients ask, 20 by default.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any, Dict, List

import pytest
from harness import ANSWER_SECONDS, MODEL, PYTHON, Alone, connector, spec
from test_stories import TEXTS

pytestmark = pytest.mark.skipif(not PYTHON or not MODEL,
                                reason="KVTIER_VLLM_PYTHON and KVTIER_VLLM_MODEL are not set")
SECONDS = float(os.environ.get("KVTIER_VLLM_SECONDS", "20"))
CLIENTS = 8


class Server:
    """`vllm serve` on a free port."""

    def __init__(self, log: Path, config: Dict[str, Any], *more: str) -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]
        environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
                       "VLLM_NO_USAGE_STATS": "1"}
        command = [PYTHON, "-m", "vllm.entrypoints.cli.main", "serve", MODEL, "--served-model-name", "m",
                   "--port", str(self.port), "--host", "127.0.0.1", "--enforce-eager",
                   "--dtype", "bfloat16", "--max-model-len", "4096",
                   "--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(config), *more]
        self.log = log.open("ab")
        self.process = subprocess.Popen(command, env=environment, stdout=self.log, stderr=self.log,
                                        start_new_session=True)
        end = time.monotonic() + ANSWER_SECONDS
        while not self.answers():
            assert self.process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < end
            time.sleep(0.2)

    def answers(self) -> bool:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False

    def ask(self, path: str, body: Dict[str, Any]) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_SECONDS)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return connection.getresponse()

    def complete(self, prompt: List[int], tokens: int = 8) -> Any:
        answer = self.ask("/v1/completions", {
            "model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True})
        text = answer.read()
        assert answer.status == 200, text
        return json.loads(text)

    def hang_up(self, prompt: List[int]) -> None:
        answer = self.ask("/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 200,
                                              "temperature": 0, "stream": True, "ignore_eos": True})
        answer.read(64)
        answer.close()

    def end(self, how: int) -> None:
        os.killpg(self.process.pid, how)
        self.process.wait(ANSWER_SECONDS)
        self.log.close()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(tmp_path_factory.mktemp("alone"))


def crowd(server: Server, seconds: float) -> int:
    """Clients with conversations that grow, for so long. Returns the answers; an error fails the test."""
    end, done, errors = time.monotonic() + seconds, [0] * CLIENTS, []

    def client(number: int) -> None:
        drawn = random.Random(number)
        try:
            while time.monotonic() < end:
                text, size = TEXTS[drawn.randrange(8)], drawn.randrange(100, 1900)
                if drawn.random() < 0.2:
                    server.hang_up(text[:size])
                else:
                    assert len(server.complete(text[:size])["choices"][0]["token_ids"]) == 8
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


@pytest.mark.parametrize("door", ["connector", "spec"])
def test_clients_that_hang_up_leave_right_texts(door: str, tmp_path: Path, alone: Alone) -> None:
    config = (connector if door == "connector" else spec)(tmp_path / "disk")
    # The engine's own cache has room for two of the conversations.
    server = Server(tmp_path / "log", config, "--num-gpu-blocks-override", "40")
    assert crowd(server, SECONDS) >= CLIENTS
    asked = [TEXTS[9][:1750], TEXTS[10][:700]]
    cold, warm = alone.texts(asked, {})
    assert [[server.complete(one)["choices"][0]["token_ids"]] for one in asked] == cold
    server.end(signal.SIGKILL)
    server = Server(tmp_path / "log", config)
    for prompt, text in zip(asked, warm):
        answer = server.complete(prompt)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert [answer["choices"][0]["token_ids"]] == text and cached > len(prompt) * 0.8
    server.end(signal.SIGINT)
