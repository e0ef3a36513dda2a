#!/usr/bin/env python3
"""The front before a server that behaves as llama-server does, in as far as the front can see."""

import http.client
import http.server
import json
import os
import socketserver
import sys
import tempfile
import threading
import time
import types
import unittest
import urllib.parse

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "front"))

from kvtier_front import keys  # noqa: E402
from kvtier_front.__main__ import identity_of  # noqa: E402
from kvtier_front.proxy import Front  # noqa: E402
from kvtier_front.shelf import INDEX, Shelf, hold, open_policy  # noqa: E402
from kvtier_front.slots import Slots  # noqa: E402
from kvtier_front.upstream import Upstream  # noqa: E402

WAIT_S = 20


class FakeHandler(http.server.BaseHTTPRequestHandler):
    """Tokens are characters. A slot holds the text of its last request, and a file that of a slot."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def say(self, value, status=200):
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):
        self.say({"path": self.path, "total_slots": len(self.server.slots)})

    def do_OPTIONS(self):
        self.send_response(204)
        self.send_header("Access-Control-Allow-Origin", self.headers.get("Origin", "none"))
        self.end_headers()

    def do_POST(self):
        fake = self.server
        value = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        parts = urllib.parse.urlsplit(self.path)
        if parts.path.startswith("/slots/"):
            self.slot_action(int(parts.path[7:]), parts.query, value)
        elif parts.path == "/apply-template":
            self.say({"prompt": "".join(f"<{one['role']}>{one['content']}" for one in value["messages"])})
        elif parts.path in ("/completion", "/v1/chat/completions"):
            self.complete(value)
        else:
            self.say({"echo": value})
        fake.served.append(self.path)

    def slot_action(self, number, query, value):
        fake = self.server
        path = os.path.join(fake.directory, value.get("filename", ""))
        if query == "action=save" and not fake.is_full:
            with open(path, "w", encoding="utf-8") as file:
                file.write(fake.slots[number])
            self.say({"n_saved": len(fake.slots[number])})
        elif query == "action=restore" and os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                content = file.read()
            fake.slots[number] = "" if content.startswith("damaged") else content
            self.say({"n_restored": 1}, 400 if content.startswith("damaged") else 200)
        else:
            self.say({"error": {"message": "no"}}, 500)

    def complete(self, value):
        fake = self.server
        if value.get("wait"):
            fake.started.set()
            fake.goes_on.wait(WAIT_S)
        prompt = value.get("prompt") or "".join(f"<{m['role']}>{m['content']}" for m in value["messages"])
        if isinstance(prompt, list):
            prompt = "".join(f"{token}," for token in prompt)
        number = value["id_slot"]
        before = fake.slots[number]
        same = len(os.path.commonprefix([before, prompt]))
        if fake.is_windowed and same < len(before):
            same = 0
        answer = f" answer to {len(prompt)}"
        fake.slots[number] = prompt + answer
        timings = {"cache_n": same, "prompt_n": len(prompt) - same}
        if not value.get("stream"):
            self.say({"content": answer, "timings": timings, "slot": number})
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for word in answer.split(" ")[1:]:
            self.event({"choices": [{"delta": {"content": " " + word}}]})
        self.event({"choices": [], "timings": timings})
        self.wfile.write(b"0\r\n\r\n")

    def event(self, value):
        line = b"data: " + json.dumps(value).encode() + b"\n\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))


class Fake(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True

    def __init__(self, directory, slots, is_windowed=False):
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.directory, self.slots = directory, [""] * slots
        self.is_windowed, self.is_full = is_windowed, False
        self.served, self.started, self.goes_on = [], threading.Event(), threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.directory = folder.name
        self.fake = self.front = None

    def start(self, slots=1, budget=1 << 20, identity="model", **options):
        is_windowed = options.pop("is_windowed", False)
        if not self.fake:
            self.fake = Fake(self.directory, slots, is_windowed)
            self.addCleanup(self.fake.server_close)
            self.addCleanup(self.fake.shutdown)
        upstream = Upstream(f"http://127.0.0.1:{self.fake.server_address[1]}", WAIT_S)
        shelf = Shelf(self.directory, budget, identity, open_policy(None))
        settings = {"most_body_bytes": 1 << 20, "most_connections": 16, "wait_s": WAIT_S,
                    "idle_s": WAIT_S, **options}
        self.front = Front(("127.0.0.1", 0), types.SimpleNamespace(**settings), upstream,
                           Slots(upstream, shelf, slots), shelf)
        front = self.front
        threading.Thread(target=front.serve_forever, daemon=True).start()
        self.addCleanup(front.server_close)
        self.addCleanup(front.shutdown)

    def request(self, method, path, body=None, headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.front.server_address[1], timeout=WAIT_S)
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, content

    def ask(self, prompt, **more):
        status, content = self.request("POST", "/completion", json.dumps({"prompt": prompt, **more}))
        self.assertEqual(status, 200, content)
        self.settled()
        return json.loads(content)["timings"]["cache_n"]

    def settled(self):
        """Saving goes on after the answer: waits until all slots are given back."""
        deadline = time.monotonic() + WAIT_S
        with self.front.slots.free:
            while any(slot.is_busy for slot in self.front.slots.all):
                self.assertTrue(self.front.slots.free.wait(deadline - time.monotonic()))

    def counts(self):
        return self.front.report()

    def files(self):
        return [name for name in os.listdir(self.directory) if name.endswith(".slot")]

    def test_comes_back_to_one_that_was_overwritten(self):
        self.start()
        one, other = "one " * 100, "two " * 100
        self.assertEqual(self.ask(one), 0)
        self.assertEqual(self.ask(other), 0)
        self.assertEqual(self.ask(one), len(one))
        self.assertEqual(self.counts()["restored"], 1)

    def test_branches_are_kept(self):
        self.start()
        start = "a common start of some length. " * 10
        one, other = start + "one end " * 20, start + "another end " * 20
        self.ask(one)
        self.assertGreaterEqual(self.ask(other), len(start))
        self.assertEqual(self.ask(one), len(one))
        self.assertEqual(self.ask(one + " answer"), len(one + " answer"))

    def test_knows_states_again_after_a_restart(self):
        self.start()
        prompt = "a long conversation " * 40
        self.ask(prompt)
        self.fake.slots[0] = ""
        self.start()
        self.assertEqual(self.counts()["found_again"], 1)
        self.assertEqual(self.ask(prompt), len(prompt))
        self.start(identity="another model")
        self.assertEqual((self.counts()["found_again"], self.files()), (0, []))

    def test_believes_no_index_that_is_damaged(self):
        self.start()
        self.ask("a prompt " * 60)
        path = os.path.join(self.directory, INDEX)
        with open(path, encoding="ascii") as file:
            good = json.load(file)
        entry = good["states"][0]
        for damage in ["", "{", "[]", "{\"states\": 7}", json.dumps({**good, "states": [7, {}]}),
                       json.dumps({**good, "states": [{**entry, "name": "../" + entry["name"]}]}),
                       json.dumps({**good, "states": [{**entry, "bytes": entry["bytes"] + 1}]}),
                       json.dumps({**good, "states": [{**entry, "blocks": ["x"]}]})]:
            with open(path, "w", encoding="ascii") as file:
                file.write(damage)
            shelf = Shelf(self.directory, 1 << 20, "model")
            self.assertEqual((shelf.states, shelf.used_bytes), ({}, 0), damage)

    def test_keeps_its_budget(self):
        self.start(budget=5000)
        for number in range(12):
            self.ask(f"{number} " * 500)
            used = sum(os.path.getsize(os.path.join(self.directory, name)) for name in self.files())
            self.assertLessEqual(used, 5000)
            self.assertEqual(used, self.front.shelf.used_bytes)
        self.assertGreater(self.counts()["evicted"], 0)
        last = "11 " * 500
        self.fake.slots[0] = ""
        self.front.slots.all[0].blocks = []
        self.assertEqual(self.ask(last), len(last))

    def test_goes_on_where_states_cannot_be_used_or_saved(self):
        self.start()
        one = "one " * 100
        self.ask(one)
        for name in self.files():
            with open(os.path.join(self.directory, name), "w", encoding="ascii") as file:
                file.write("damaged")
        self.ask("other " * 100)
        self.assertEqual(self.ask(one), 0)
        self.assertEqual(self.counts()["restore_failed"], 1)
        self.fake.is_full = True
        self.ask("third " * 100)
        self.assertEqual(self.counts()["not_saved"], 1)
        self.assertEqual(self.ask("third " * 100), len("third " * 100))

    def test_models_that_cannot_use_a_part(self):
        self.start(is_windowed=True)
        start = "a common start of some length. " * 40
        one = start + "one end " * 20
        self.ask(one)
        self.assertEqual(self.ask(start + "another end " * 20), 0)
        self.assertTrue(self.counts()["only_whole"])
        self.ask("something else " * 40)
        answered = one + f" answer to {len(one)}"
        self.assertEqual(self.ask(answered + " and more"), len(answered))

    def test_gives_up_where_no_state_is_used(self):
        self.start(is_windowed=True)
        prompt = "a prompt of some length. " * 40
        for number in range(4):
            self.assertEqual(self.ask(prompt + f" {number} " * number), 0)
            self.fake.slots[0] = "x"
        self.ask(prompt)
        self.assertTrue(self.counts()["in_vain"])
        saved = self.counts()["saved"]
        self.assertEqual(self.ask(prompt), len(prompt) if self.fake.slots[0] == prompt else 0)
        self.assertEqual(self.counts()["saved"], saved)

    def test_streams_and_chats(self):
        self.start()
        messages = [{"role": "user", "content": "tell me " * 50}]
        body = {"messages": messages, "stream": True}
        status, content = self.request("POST", "/v1/chat/completions", json.dumps(body))
        self.assertEqual((status, content.count(b"data: ")), (200, 4))
        self.settled()
        text = "<user>" + "tell me " * 50
        expected = keys.chain("model", text + f" answer to {len(text)}")
        self.assertEqual(self.front.slots.all[0].blocks, expected)
        self.assertEqual(self.ask([1, 2, 3] * 50), 0)
        self.assertEqual(self.ask([1, 2, 3] * 60), 300)

    def test_two_at_once_and_none_too_many(self):
        self.start(slots=2, wait_s=0.2)
        held = json.dumps({"prompt": "first " * 50, "wait": True})
        answers = []
        thread = threading.Thread(target=lambda: answers.append(self.request("POST", "/completion", held)))
        thread.start()
        self.assertTrue(self.fake.started.wait(WAIT_S))
        status, content = self.request("POST", "/completion", json.dumps({"prompt": "second " * 50}))
        self.assertEqual((status, json.loads(content)["slot"]), (200, 1))
        self.fake.started.clear()
        other = threading.Thread(target=lambda: answers.append(self.request("POST", "/completion", held)))
        other.start()
        self.assertTrue(self.fake.started.wait(WAIT_S))
        status, _ = self.request("POST", "/completion", json.dumps({"prompt": "third " * 50}))
        self.assertEqual(status, 503)
        self.fake.goes_on.set()
        thread.join(WAIT_S)
        other.join(WAIT_S)
        self.assertEqual([status for status, _ in answers], [200, 200])

    def test_refuses(self):
        self.start(most_body_bytes=1000)
        self.assertEqual(self.request("POST", "/completion", "x" * 1001)[0], 413)
        self.assertEqual(self.request("POST", "/completion", "{")[0], 400)
        self.assertEqual(self.request("POST", "/completion", "[1]")[0], 400)
        self.assertEqual(self.request("POST", "/completion", "[" * 999)[0], 400)
        self.assertEqual(self.request("POST", "/slots/0?action=erase", "{}")[0], 403)
        self.assertEqual(self.request("POST", "/completion", None, {"Transfer-Encoding": "chunked"})[0], 411)
        status, content = self.request("GET", "/props?x=1")
        self.assertEqual((status, json.loads(content)["path"]), (200, "/props?x=1"))
        self.assertEqual(json.loads(self.request("POST", "/tokenize", "{\"a\": 1}")[1]), {"echo": {"a": 1}})
        self.assertEqual(json.loads(self.request("GET", "/kvtier")[1])["requests"], 0)
        connection = http.client.HTTPConnection("127.0.0.1", self.front.server_address[1], timeout=WAIT_S)
        for _ in range(2):
            connection.request("OPTIONS", "/completion", headers={"Origin": "here"})
            answer = connection.getresponse()
            answer.read()
            self.assertEqual((answer.status, answer.getheader("Access-Control-Allow-Origin")), (204, "here"))
        connection.close()
        self.fake.server_close()
        self.fake.shutdown()
        self.assertEqual(self.request("POST", "/completion", "{\"prompt\": \"x\"}")[0], 502)
        self.assertFalse(self.front.slots.all[0].is_busy)


class Policies(unittest.TestCase):
    def test_one_of_kvtier_decides(self):
        try:
            policy = open_policy("s3fifo")
        except ImportError:
            self.skipTest("the Python package kvtier is not there")
        with tempfile.TemporaryDirectory() as folder:
            shelf = Shelf(folder, 5000, "model", policy)
            for number in range(20):
                name = shelf.new_name()
                with open(shelf.path(name), "w", encoding="ascii") as file:
                    file.write("x" * 1500)
                shelf.add(name, keys.chain("model", f"{number:03}" * 100))
                self.assertLessEqual(shelf.used_bytes, 5000)
            self.assertEqual((len(shelf.states), shelf.counts["evicted"]), (3, 17))


class Directory(unittest.TestCase):
    def test_is_one_front_s(self):
        with tempfile.TemporaryDirectory() as folder:
            first = hold(folder)
            with self.assertRaises(OSError):
                hold(folder)
            os.close(first)
            os.close(hold(folder))


class Identity(unittest.TestCase):
    def test_models_and_templates_are_told_apart(self):
        props = {"model_path": __file__, "build_info": "b1", "chat_template": "x"}
        base = identity_of(props, "")
        for change in [{"build_info": "b2"}, {"chat_template": "y"}, {"model_path": "/x"}]:
            self.assertNotEqual(identity_of({**props, **change}, ""), base)
        self.assertNotEqual(identity_of(props, "lora 3"), base)

    def test_chains_differ_from_the_first_difference_on(self):
        one, other = keys.chain("m", "x" * 640), keys.chain("m", "x" * 300 + "y" + "x" * 339)
        self.assertEqual((len(one), keys.common(one, other)), (10, 4))
        self.assertEqual(keys.common(one, keys.chain("n", "x" * 640)), 0)


if __name__ == "__main__":
    unittest.main()
