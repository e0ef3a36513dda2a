#!/usr/bin/env python3
"""Measures `kvtier run` on an unmodified llama-server, and compares its texts. Not part of ctest, which has no
server.

    bench.py --server PROGRAM --library LIBRARY --model FILE [--pairs N] [PART...]

Parts: restart, users, token, prefill, soak. Each prints one line of JSON. Runs with and without kvtier
alternate; values are medians.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import pathlib
import random
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[4]
START_S = ANSWER_S = 600
# Tokens of the long conversation; of a shared prompt, and of each user's own part of it.
LONG, SHARED, OWN = 4000, 1000, 300


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Server:
    """A running llama-server."""

    def __init__(self, options, arguments, store=None, log=subprocess.DEVNULL, stats=None):
        self.port = free_port()
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVTIER_")}
        if store:
            environment.update(LD_PRELOAD=options.library, KVTIER_RUN_STORE=store)
            environment.update({"KVTIER_RUN_STATS": stats} if stats else {})
        command = [options.server, "-m", options.model, "--port", str(self.port), "--no-webui",
                   "-t", str(options.threads), *arguments]
        self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError, ValueError):
                if self.call("/health")["status"] == "ok":
                    return
            time.sleep(0.05)
        raise SystemExit("FAILED: the server does not start")

    def call(self, path, value=None, keep_bytes=None):
        body = None if value is None else json.dumps(value).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body,
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return answer.read(keep_bytes) if keep_bytes else json.loads(answer.read())

    def complete(self, prompt, tokens=1, **more):
        start = time.monotonic()
        answer = self.call("/completion", dict(prompt=prompt, n_predict=tokens, temperature=0,
                                               cache_prompt=True, ignore_eos=True, **more))
        answer["seconds"] = time.monotonic() - start
        return answer

    def stop(self, kill=False):
        (self.process.kill if kill else self.process.terminate)()
        self.process.wait(START_S)


def store(folder, host="1GiB", disk="8GiB"):
    return f'store(host={host}, inline=32MiB, disk=disk(path="{folder}/kv", bytes={disk}))'


def texts():
    return "".join((ROOT / "docs" / page).read_text(encoding="utf-8")
                   for page in ("reference/specs.md", "glossary.md", "reference/limits.md"))


def tokens_of(server, count):
    tokens = server.call("/tokenize", dict(content=texts()))["tokens"]
    return (tokens * (count // len(tokens) + 1))[:count]


def restart(options, folder):
    """The first token of a long conversation: prefill, a warm slot, and after a restart with kvtier."""
    arguments = ["-c", "8192", "-np", "1"]
    server = Server(options, arguments, store(folder))
    conversation = tokens_of(server, LONG)
    server.complete(conversation)
    server.stop()
    warm, cold, prefill = [], [], []
    for turn in range(options.pairs):
        question = [1000 + turn * 20 + i for i in range(20)]
        server = Server(options, arguments)
        prefill.append(server.complete(conversation)["seconds"])
        warm.append(server.complete(conversation + question)["seconds"])
        server.stop()
        server = Server(options, arguments, store(folder))
        cold.append(server.complete(conversation + question)["seconds"])
        server.stop()
    warm, cold, prefill = map(statistics.median, (warm, cold, prefill))
    return dict(part="restart", prefill_s=prefill, warm_s=warm, restart_s=cold, over_warm=cold / warm,
                faster_than_prefill=prefill / cold)


def users(options, folder):
    """Ten users of a shared prompt, with memory for three: kvtier's, against the server's own cache."""
    arguments = ["-c", "4096", "-np", "1"]
    server = Server(options, arguments)
    shared = tokens_of(server, SHARED)
    mib = options.kv_bytes * (SHARED + OWN + 100) * 3 // (1 << 20) + 1
    server.stop()
    seconds = {}
    for turn in range(options.pairs):
        for name in ("server", "kvtier"):
            place = os.path.join(folder, f"users-{turn}")
            own = ["-cram", str(mib)] if name == "server" else ["-cram", "0"]
            spec = store(place, host=f"{mib}MiB") if name == "kvtier" else None
            if spec:
                os.mkdir(place)
            server = Server(options, arguments + own, spec)
            histories = [shared + [2000 + user * OWN + i for i in range(OWN)] for user in range(10)]
            start = time.monotonic()
            for question in range(3):
                for user in range(10):
                    histories[user] = histories[user] + [3000 + user * 97 + question * 31 + i for i in range(30)]
                    server.complete(histories[user], 8)
            seconds.setdefault(name, []).append(time.monotonic() - start)
            server.stop()
    ours, theirs = statistics.median(seconds["kvtier"]), statistics.median(seconds["server"])
    return dict(part="users", kvtier_s=ours, server_s=theirs, ratio=ours / theirs, cache_mib=mib)


def alternating(options, folder, what, measure):
    """Ratio of a measure with kvtier to one without; the same servers serve all pairs."""
    plain = Server(options, ["-c", "16384", "-np", "1"])
    ours = Server(options, ["-c", "16384", "-np", "1", "-cram", "0"], store(folder))
    ratios = []
    for turn in range(options.pairs):
        pair = (plain, ours) if turn % 2 == 0 else (ours, plain)
        values = {server: measure(server, turn) for server in pair}
        ratios.append(values[ours] / values[plain])
    plain.stop()
    ours.stop()
    return dict(part=what, ratio=statistics.median(ratios), lowest=min(ratios), highest=max(ratios))


def token(options, folder):
    def measure(server, turn):
        prompt = [500 + turn * 7 + i for i in range(40)]
        return server.complete(prompt, 256)["timings"]["predicted_per_token_ms"]
    return alternating(options, folder, "token", measure)


def prefill(options, folder):
    def measure(server, turn):
        prompt = [(turn * 7919 + i * 31) % 40000 + 100 for i in range(1024)]
        return server.complete(prompt)["timings"]["prompt_ms"]
    return alternating(options, folder, "prefill", measure)


def soak(options, folder):
    """Requests of eight clients, some of which hang up: the same texts as without kvtier, before and after a
    kill, as far as the server repeats its own."""
    draw = random.Random(5)
    text = texts()
    requests = []
    for _ in range(options.requests):
        start = draw.randrange(6) * 2000
        prompt = text[start:start + draw.randrange(200, 1500)] + draw.choice(["", " and then", " However,"])
        requests.append((prompt, draw.randrange(4, 24), draw.random() < 0.15))

    def one(server, number):
        prompt, count, hangs_up = requests[number]
        if not hangs_up:
            return server.complete(prompt, count)["content"]
        value = dict(prompt=prompt, n_predict=count, temperature=0, stream=True)
        server.call("/completion", value, keep_bytes=random.Random(number).randrange(1, 400))
        return None

    def serve(spec, kill=False):
        server = Server(options, ["-c", "16384", "-np", "4"], spec)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            out = list(pool.map(lambda number: one(server, number), range(len(requests))))
        server.stop(kill)
        return out

    spec = store(folder)
    first, again, ours, killed = serve(None), serve(None), serve(spec, kill=True), serve(spec)
    differ = lambda other: sum(a != b for a, b in zip(first, other))
    return dict(part="soak", requests=len(requests), server_differs_from_itself=differ(again),
                kvtier_differs=differ(ours), after_kill_differs=differ(killed))


PARTS = {one.__name__: one for one in (restart, users, token, prefill, soak)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{' '.join(PARTS)}; default: all")
    for name in ("server", "library", "model"):
        parser.add_argument("--" + name, required=True)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-bytes", type=int, default=23040, help="KV bytes of a token (SmolLM2 135M)")
    options = parser.parse_args()
    for name in options.parts or PARTS:
        folder = tempfile.mkdtemp(prefix="kvtier-bench-")
        try:
            print(json.dumps(PARTS[name](options, folder)), flush=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
