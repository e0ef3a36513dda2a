"""What the tests of a real vLLM share: engines in processes of their own, and their answers without kvtier."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Dict, List, Optional, Set, Tuple, Union

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[2] / "python" / "tests"))
from processes import Child  # noqa: E402

PYTHON, MODEL = os.environ.get("KVTIER_VLLM_PYTHON", ""), os.environ.get("KVTIER_VLLM_MODEL", "")
ANSWER_SECONDS = 600.0


#: Engines and servers that run.
running: "Set[Union[Engine, Server]]" = set()


class Engine(Child):
    """A vLLM in a process of its own."""

    def __init__(self, log: Path, **options: Any) -> None:
        running.add(self)
        super().__init__([PYTHON, HERE / "engine.py"], log, {},
                         {"model": MODEL, "max_model_len": 4096, **options})

    def texts(self, prompts: List[List[int]], **more: Any) -> List[Any]:
        return [one and one["ids"] for one in self.call("generate", prompts=prompts, **more)["answers"]]

    def in_turn(self, prompts: List[List[int]], **more: Any) -> List[Any]:
        return [self.texts([prompt], **more)[0] for prompt in prompts]

    def cached(self, prompts: List[List[int]], **more: Any) -> List[int]:
        return [one["cached"] for one in self.call("generate", prompts=prompts, **more)["answers"]]

    def kill(self) -> None:
        super().kill()
        running.discard(self)

    def close(self) -> None:
        super().close()
        running.discard(self)


def connector(disk: Optional[Path] = None, **extra: Any) -> Dict[str, Any]:
    """The configuration of the connector."""
    extra.setdefault("host_bytes", "256MiB")
    if disk is not None:
        extra.update(disk_path=str(disk), disk_bytes="2GiB")
    return {"kv_connector": "KvtierConnector", "kv_connector_module_path": "kvtier_vllm.connector",
            "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra}


def spec(disk: Path, **extra: Any) -> Dict[str, Any]:
    """The configuration of the offloading spec."""
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "KvtierSpec", "spec_module_path": "kvtier_vllm.spec",
                "host_bytes": "256MiB", "disk_path": str(disk), "disk_bytes": "2GiB", **extra}}


class Alone:
    """Answers of the engine without kvtier. Sums depend on what is computed together, so that they come in two
    kinds: cold, and with what the engine's own prefix cache has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: Dict[str, Any] = {}

    def texts(self, prompts: List[List[int]], options: Dict[str, Any], **more: Any) -> Any:
        key = json.dumps([prompts, options, more])
        if key not in self.known:
            engine = Engine(self.folder / "alone", **options)
            self.known[key] = [engine.in_turn(prompts, **more) for _ in range(2)]
            engine.close()
        return self.known[key]


class Server:
    """The server of `vllm serve`. The command itself needs a package named vllm."""

    def __init__(self, log: Path, config: Dict[str, Any], *more: str, **environment: str) -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]
        self.log = log.open("ab")
        env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
               "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1", **environment}
        # The server starts processes of its own.
        self.process = subprocess.Popen(
            [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL,
             "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(self.port),
             "--enforce-eager", "--dtype", "bfloat16", "--enable-prompt-tokens-details",
             "--kv-transfer-config", json.dumps(config), *more],
            stdout=self.log, stderr=self.log, env=env, start_new_session=True)
        running.add(self)
        end = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < end:
            assert self.process.poll() is None, log.read_text()[-4000:]
            try:
                self.send("GET", "/health")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
        raise AssertionError("the server does not start")

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> Tuple[int, bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode() if body else None
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, method=method,
            headers={"content-type": "application/json", **headers})
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def ask(self, path: str, body: Dict[str, Any], **headers: str) -> Any:
        status, answer = self.send("POST", path, {"model": "m", **body}, **headers)
        assert status == 200, answer
        return json.loads(answer)

    def end(self, how: int) -> None:
        os.killpg(self.process.pid, how)
        self.process.wait(ANSWER_SECONDS)
        self.log.close()
        running.discard(self)

    def kill(self) -> None:
        self.end(signal.SIGKILL)

    def close(self) -> None:
        self.end(signal.SIGTERM)
