"""Runs kvtier-llama for the tests and parses its output."""

import fcntl
import json
import os
import pathlib
import select
import subprocess
import sys
import termios
import time

PROGRAM = sys.argv[1] if len(sys.argv) > 1 else ""
MODELS = pathlib.Path(os.environ.get("KVTIER_LLAMA_MODELS", ""))
WAIT_S = 600


class Skip(Exception):
    pass


def model(name):
    path = MODELS / f"{name}.gguf"
    if not path.exists():
        raise Skip(f"no {path}: models.sh creates it")
    return str(path)


def start(*flags, **how):
    flags = [str(flag) for flag in flags]
    return subprocess.Popen([PROGRAM, *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, **how)


def run(*flags, say="", status=0):
    """The text of both outputs of a run."""
    process = start(*flags)
    try:
        out, err = process.communicate(say.encode(), timeout=WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    if process.returncode != status:
        raise AssertionError(f"{flags}: exit status {process.returncode}, not {status}\n{out!r}\n{err!r}")
    return out.decode(), err.decode()


def lines_of(text):
    return [json.loads(line) for line in text.splitlines()]


def run_json(*flags, say="", status=0):
    lines = lines_of(run(*flags, "--json", say=say, status=status)[0])
    assert all(line["type"] in ("text", "answer", "note", "error", "summary") for line in lines)
    return lines


def of_type(lines, kind):
    return [line for line in lines if line["type"] == kind]


def answers(lines):
    return [line["text"] for line in of_type(lines, "answer")]


def basic(name, *flags):
    return ["-m", model(name), "--threads", 1, "--greedy", "--ctx", 1024, *flags]


def read_until(process, count):
    """The first `count` text parts of an answer."""
    parts = []
    while len(parts) < count:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        line = json.loads(line)
        if line["type"] == "text":
            parts.append(line["text"])
    return parts


def expect(terminal, is_there):
    """Waits until the terminal's output from now on satisfies the condition."""
    end = time.monotonic() + WAIT_S
    shown = ""
    while not is_there(shown):
        ready, _, _ = select.select([terminal], [], [], max(0, end - time.monotonic()))
        assert ready, shown
        shown += os.read(terminal, 65536).decode(errors="replace")


def take_terminal(terminal):
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
