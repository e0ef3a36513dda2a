#!/usr/bin/env python3
"""Runs an unmodified llama-server with the plugin and with the front. Not part of ctest, which has no server.

    server.py --server PROGRAM --model FILE --plugin LIBRARY [--arguments="--swa-full"]

Checks that answers are equal with all of the model in memory, with a quarter of it, and without the plugin.
Checks that the front reuses whole prompts in the order A, B, A, in P+x, P+y, P+x, and after a restart.
Prints the measured values.
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

START_S, ANSWER_S = 600, 600
FRONT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "front")


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def call(port, path, value=None):
    body = None if value is None else json.dumps(value).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, headers)
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        return json.loads(answer.read())


def wait_for(port, path, process):
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            return call(port, path)
        except (OSError, ValueError):
            time.sleep(0.1)
    raise SystemExit(f"FAILED: no answer of {path} on port {port}: see the logs")


@contextlib.contextmanager
def running(command, environment, log):
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(START_S)


@contextlib.contextmanager
def server(options, folder, *arguments, **variables):
    port = free_port()
    command = [options.server, "-m", options.model, "--port", str(port), "-np", "1", "-t", "1", "-ub", "64",
               "--no-webui", "-cram", "0", *arguments, *options.arguments.split()]
    log = os.path.join(folder, "server.log")
    with running(command, {**os.environ, **variables}, log) as process:
        wait_for(port, "/health", process)
        yield port, process


def anonymous_mib(process):
    with open(f"/proc/{process.pid}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) // 1024


def expect(condition, what):
    if not condition:
        raise SystemExit(f"FAILED: {what}")


def check_plugin(options, folder):
    plugin_arguments = ["-dev", "KVTIER", "-ngl", "99", "-fit", "off"]
    with_plugin = {"GGML_BACKEND_PATH": options.plugin, "KVTIER_STATS": "1"}
    quarter = {**with_plugin, "KVTIER_BUDGET": str(os.path.getsize(options.model) // 4)}
    configurations = [("mapped", [], {}), ("copied", ["-lm", "none"], {}),
                      ("KVTIER", plugin_arguments, with_plugin),
                      ("KVTIER, a quarter", plugin_arguments, quarter)]
    texts = set()
    for name, arguments, variables in configurations:
        with server(options, folder, "-c", "512", "--no-repack", *arguments, **variables) as (port, process):
            prompt = "The history of the city of Paris begins "
            answer = call(port, "/completion", {"prompt": prompt, "n_predict": 24, "temperature": 0})
            texts.add(answer["content"])
            rate = answer["timings"]["predicted_per_second"]
            print(f"{name}: {anonymous_mib(process)} MiB anonymous, {rate:.1f} tokens/s", flush=True)
        if variables:
            with open(os.path.join(folder, "server.log"), encoding="utf-8", errors="replace") as file:
                stats = [json.loads(line[8:]) for line in file if line.startswith("kvtier: {")]
            expect(stats and stats[0]["streamed_graphs"] > 0, "the plugin computes graphs")
            expect(stats[0]["peak_bytes"] <= stats[0]["budget_bytes"], "the peak is within the budget")
    expect(len(texts) == 1, f"all texts are equal: {texts}")


def unique_text(start, count):
    """A text without repetitions."""
    return " ".join(f"{(7919 * number) % 10007} is not {number}" for number in range(start, start + count))


def ask(port, name, prompt):
    begin = time.monotonic()
    answer = call(port, "/completion", {"prompt": prompt, "n_predict": 2, "temperature": 0})
    timings, passed = answer["timings"], 1000 * (time.monotonic() - begin)
    print(f"{name}: {passed:.0f} ms, reused {timings['cache_n']}, computed {timings['prompt_n']}", flush=True)
    return answer["content"], timings["prompt_n"]


def check_front(options, folder):
    one, other, start = unique_text(0, 30), unique_text(100, 40), unique_text(200, 30)
    ends = [" " + unique_text(300, 8), " " + unique_text(400, 8)]
    sequences = [[("A", one), ("B", other), ("A", one)],
               [("P+x", start + ends[0]), ("P+y", start + ends[1]), ("P+x", start + ends[0])]]
    slots = os.path.join(folder, "slots")
    os.mkdir(slots, 0o700)
    first = {}
    for is_again in [False, True]:
        with server(options, folder, "-c", "1024", "--slot-save-path", slots + "/") as (port, _):
            at = free_port()
            command = [sys.executable, "-m", "kvtier_front", "--server", f"http://127.0.0.1:{port}",
                       "--listen", f"127.0.0.1:{at}", "--slots", slots]
            environment = {**os.environ, "PYTHONPATH": FRONT}
            with running(command, environment, os.path.join(folder, "front.log")) as process:
                wait_for(at, "/kvtier", process)
                for sequence in [[one[0]] for one in sequences] if is_again else sequences:
                    for name, prompt in sequence:
                        text, computed = ask(at, ("again " if is_again else "") + name, prompt)
                        expect(name not in first or computed <= 2, f"{name} is reused")
                        expect(first.setdefault(name, text) == text, f"{name}: the text is equal")


def main():
    parser = argparse.ArgumentParser()
    for name in ["server", "model", "plugin"]:
        parser.add_argument("--" + name, required=True)
    parser.add_argument("--arguments", default="", help="further arguments of the server")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        check_plugin(options, folder)
        check_front(options, folder)
    print("all checks passed")


if __name__ == "__main__":
    main()
