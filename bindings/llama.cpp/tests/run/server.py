#!/usr/bin/env python3
"""Runs an unmodified llama-server under the preloaded library: the same texts as without it, and less to compute.

    server.py --server PROGRAM --library LIBRARY --model FILE --hybrid FILE --vision FILE [CASE...]

Not part of ctest, which has no server; `ffi-tests/run --engines llama.cpp` builds one. Texts are compared at
temperature 0, of one client at a time. The engine's sums depend on how a prompt is cut into batches, so that both
sides cut it in the same places.
"""

import argparse
import base64
import concurrent.futures
import json
import os
import pathlib
import random
import shutil
import struct
import sys
import tempfile

from bench import Server, store, texts


def expect(condition, what):
    if not condition:
        print(f"FAILED: {what}")
        sys.exit(1)


class Place:
    """A store's directory, and runs of the server with and without it."""

    def __init__(self, options, folder):
        self.options, self.folder = options, folder
        self.stats = os.path.join(folder, "stats")
        self.store = os.path.join(folder, "store")
        os.mkdir(self.store)
        self.log = os.path.join(folder, "log")

    def run(self, with_kvtier, arguments, work, model=None, kill=False):
        """What `work` returns, and what kvtier restored."""
        options = argparse.Namespace(**vars(self.options))
        options.model = model or options.model
        before = len(self.read_stats())
        with open(self.log, "a", encoding="utf-8") as log:
            server = Server(options, arguments, store(self.store) if with_kvtier else None, log=log,
                            stats=self.stats)
            try:
                out = work(server)
            finally:
                server.stop(kill)
        restored = sum(one["restored_tokens"] for one in self.read_stats()[before:])
        return out, restored

    def read_stats(self):
        if not os.path.exists(self.stats):
            return []
        return [json.loads(line) for line in pathlib.Path(self.stats).read_text(encoding="utf-8").splitlines()]


def conversations(server):
    """Prompts as tokens, each with another beginning."""
    text = texts()
    parts = [text[start:start + count] for start, count in ((0, 1200), (3000, 1500), (6000, 700), (9000, 2400))]
    return [server.call("/tokenize", dict(content=part))["tokens"] for part in parts]


def whole_chunks(prompt):
    """What is restored of a prompt: full chunks, and at least one token is left to decode."""
    return prompt[:(len(prompt) - 1) // 32 * 32]


def answer(server, prompt, in_steps):
    """A text. `in_steps`: the prompt is computed in the two parts that a restore leaves."""
    if in_steps:
        server.complete(whole_chunks(prompt), 1)
    return server.complete(prompt, 12)["content"]


def in_steps(server):
    return [answer(server, prompt, True) for prompt in conversations(server)]


def at_once(server):
    return [answer(server, prompt, False) for prompt in conversations(server)]


# Without the server's own cache of prompts, which would restore them itself.
ONE = ["-c", "4096", "-np", "1", "-cram", "0"]


def check_restart(place, arguments, model=None, alone_too=True):
    """The server alone, a first run, one that restores and is killed, and another."""
    first, none = place.run(True, arguments, in_steps, model)
    second, some = place.run(True, arguments, at_once, model)
    place.run(True, arguments, at_once, model, kill=True)
    third, again = place.run(True, arguments, at_once, model)
    expect(first == second == third, f"texts are the same: {first} {second} {third}")
    expect(none == 0 and min(some, again) > 1000, f"tokens are restored after a restart: {none} {some} {again}")
    if alone_too:
        alone, _ = place.run(False, arguments, in_steps, model)
        expect(alone == first, f"texts are those of the server alone: {alone} {first}")


def case_texts_are_the_same_after_a_restart_and_a_kill(place):
    check_restart(place, ONE)


def case_hybrid_models_are_restored(place):
    # Batches are cut where states can be saved, so that sums differ from those of the server alone.
    check_restart(place, ONE, place.options.hybrid, alone_too=False)


def case_a_draft_model_gives_the_same_texts(place):
    check_restart(place, ONE + ["--model-draft", place.options.model, "--spec-draft-n-max", "4"])


def case_the_server_saves_and_restores_slots(place):
    os.mkdir(os.path.join(place.folder, "slots"))
    arguments = ONE + ["--slot-save-path", os.path.join(place.folder, "slots")]

    def work(steps):
        def of_server(server):
            prompts = conversations(server)
            out = [answer(server, prompts[0], steps)]
            server.call("/slots/0?action=save", dict(filename="one"))
            out.append(answer(server, prompts[1], steps))
            server.call("/slots/0?action=restore", dict(filename="one"))
            out.append(server.complete(prompts[0] + [100, 200], 12)["content"])
            server.call("/slots/0?action=erase", {})
            return out + [answer(server, prompts[2], steps)]
        return of_server

    alone, _ = place.run(False, arguments, work(True))
    ours, _ = place.run(True, arguments, work(True))
    again, restored = place.run(True, arguments, work(False))
    expect(alone == ours == again, f"texts around slots of the server: {alone} {ours} {again}")
    expect(restored > 500, f"tokens are restored around slots: {restored}")


def case_embeddings_are_computed(place):
    arguments = ONE + ["--embeddings", "--pooling", "mean", "-ub", "2048"]

    def work(server):
        return [server.call("/embedding", dict(content=prompt)) for prompt in conversations(server)]

    alone, _ = place.run(False, arguments, work)
    for _ in range(2):
        ours, restored = place.run(True, arguments, work)
        expect(alone == ours and restored == 0, "embeddings are computed as without kvtier")


def picture(seed):
    """A bitmap of 64 x 64 random pixels."""
    rows = random.Random(seed).randbytes(64 * 64 * 3)
    heading = struct.pack("<2sIHHI", b"BM", 54 + len(rows), 0, 0, 54)
    info = struct.pack("<IiiHHIIiiII", 40, 64, 64, 1, 24, 0, len(rows), 0, 0, 0, 0)
    return base64.b64encode(heading + info + rows).decode()


def case_images_are_restored(place):
    arguments = ONE + ["--mmproj", place.options.vision]
    before, after = texts()[:1000], texts()[1000:1600]

    def ask(seed):
        def of_server(server):
            marker = server.call("/props")["media_marker"]
            prompt = dict(prompt_string=before + marker + after, multimodal_data=[picture(seed)])
            return server.complete(prompt, 12)["content"]
        return of_server

    _, none = place.run(True, arguments, ask(1))
    first, restored = place.run(True, arguments, ask(1))
    second, again = place.run(True, arguments, ask(1))
    # Bits are compared by ctest: here the parts that are computed differ between a first run and a restart.
    expect(none == 0 and restored == again > 500, f"text around an image and it are restored: {restored}, {again}")
    expect(first == second, f"texts are the same: {first} {second}")
    _, other = place.run(True, arguments, ask(2))
    expect(0 < other < restored - 100, f"of another image only the text before it is restored: {other}")


def case_several_slots_and_clients_that_hang_up(place):
    arguments = ["-c", "8192", "-np", "4"]

    def one(server, number, prompt):
        if number % 5 != 4:
            return server.complete(prompt, 8)["content"]
        value = dict(prompt=prompt, n_predict=64, temperature=0, stream=True)
        server.call("/completion", value, keep_bytes=100)
        return None

    def work(server):
        prompts = [prompt + [100 + number] for number in range(3) for prompt in conversations(server)]
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            return list(pool.map(lambda at: one(server, at, prompts[at]), range(len(prompts))))

    place.run(True, arguments, work, kill=True)
    out, restored = place.run(True, arguments, work)
    expect(all(text or number % 5 == 4 for number, text in enumerate(out)), f"every client got a text: {out}")
    expect(restored > 1000, f"tokens are restored after a kill: {restored}")


def case_another_model_or_context_finds_nothing(place):
    place.run(True, ONE, at_once)
    _, restored = place.run(True, ONE + ["-ctk", "q8_0"], at_once)
    expect(restored == 0, f"keys of another type are not taken: {restored}")
    _, restored = place.run(True, ONE, at_once, place.options.hybrid)
    expect(restored == 0, f"another model's are not taken: {restored}")
    _, restored = place.run(True, ONE, at_once)
    expect(restored > 1000, f"the first model's are still there: {restored}")


CASES = {name[len("case_"):]: one for name, one in list(globals().items()) if name.startswith("case_")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{' '.join(CASES)}; default: all")
    for name in ("server", "library", "model", "hybrid", "vision"):
        parser.add_argument("--" + name, required=True)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    for name in options.cases or CASES:
        if name not in CASES:
            parser.error(f"unknown case '{name}': use {' '.join(CASES)}")
        folder = tempfile.mkdtemp(prefix="kvtier-server-")
        try:
            CASES[name](Place(options, folder))
            print(f"ok {name}", flush=True)
        except BaseException:
            log = pathlib.Path(folder, "log")
            print(log.read_text(encoding="utf-8", errors="replace")[-4000:] if log.exists() else "no log")
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{len(options.cases or CASES)} cases passed")


if __name__ == "__main__":
    main()
