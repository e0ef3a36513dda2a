"""Processes of tests: a child that answers commands, and a Redis server. Only the standard library
is imported, because children run in the interpreters of engines."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Sequence

#: Most seconds until a process starts, answers or ends.
SECONDS = 900.0


class Child:
    """A process that runs `serve`. Its standard error is appended to a log."""

    def __init__(self, command: Sequence[object], log: Path, environment: Mapping[str, str],
                 start: Mapping[str, Any], **popen: Any) -> None:
        self.path, self.log = log, log.open("ab")
        self.process = subprocess.Popen(
            [str(one) for one in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.log, text=True, env={**os.environ, **environment}, **popen)
        try:
            self.call("start", **start)
        except BaseException:
            self.kill()
            raise

    def call(self, command: str, **arguments: Any) -> Any:
        """The result of a command. Raises RuntimeError with the child's error."""
        assert self.process.stdin and self.process.stdout
        with contextlib.suppress(BrokenPipeError):  # the log says why
            self.process.stdin.write(json.dumps({"do": command, **arguments}) + "\n")
            self.process.stdin.flush()
        limit = threading.Timer(SECONDS, self.process.kill)
        limit.start()
        try:
            line = self.process.stdout.readline()
        finally:
            limit.cancel()
        assert line, (f"{self.process.args!r} ended, or had no answer to {command} in "
                      f"{SECONDS:g} s: {self.path.read_text(errors='replace')[-6000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()

    def close(self) -> None:
        """Lets the child end by itself."""
        assert self.process.stdin
        self.process.stdin.close()
        assert self.process.wait(SECONDS) == 0
        self.log.close()


def serve(make: Callable[..., Any]) -> Any:
    """Answers one command a line, in JSON, until stdin ends. `start` calls `make`; other commands
    are methods of what it returned. Returns that, too."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print
    made: Any = None
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("do")
        try:
            if name == "start":
                made = make(**command)
                result: Any = True
            else:
                result = getattr(made, name)(**command)
            answer = {"result": result}
        except BaseException as error:  # the test gets it
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return made


class Redis:
    """A Redis server that keeps nothing on disk."""

    def __init__(self, *options: str) -> None:
        for _ in range(10):  # another program may take the port in between
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port = int(free.getsockname()[1])
            self.process = subprocess.Popen(
                ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
                 *options], stdout=subprocess.DEVNULL)
            if self._answers():
                return
        raise AssertionError("redis-server does not start")

    def _answers(self) -> bool:
        end = time.monotonic() + SECONDS
        while self.process.poll() is None and time.monotonic() < end:
            with socket.socket() as one:
                if one.connect_ex(("127.0.0.1", self.port)) == 0:
                    return True
            time.sleep(0.01)
        self.kill()
        return False

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def redis_server(*options: str) -> Iterator[Redis]:
    """A Redis server; skips the test where there is none."""
    import pytest

    if not shutil.which("redis-server"):
        pytest.skip("redis-server is not installed")
    server = Redis(*options)
    try:
        yield server
    finally:
        server.kill()
