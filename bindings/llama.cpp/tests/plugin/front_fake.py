"""A fake llama-server that has the interface used by the front, and the base class of the front's tests."""

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

from kvtier_front.model import Model  # noqa: E402
from kvtier_front.proxy import Front  # noqa: E402
from kvtier_front.state_cache import StateCache, open_policy  # noqa: E402
from kvtier_front.slots import Slots  # noqa: E402
from kvtier_front.upstream import Upstream  # noqa: E402

WAIT_S = 600  # anything slower is a hang


class FakeHandler(http.server.BaseHTTPRequestHandler):
    """A token is a character. A slot holds the text of its last request, a saved file the text of a slot."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def send_json(self, value, status=200):
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(content)

    def refuses_key(self):
        fake = self.server
        fake.authorizations.append((self.path, self.headers.get_all("Authorization")))
        if fake.key and self.headers.get("Authorization") != f"Bearer {fake.key}":
            self.send_json({"error": {"message": "Invalid API Key"}}, 401)
            return True
        return False

    def do_GET(self):
        fake = self.server
        if self.refuses_key():
            return
        if self.path == "/lora-adapters":
            self.send_json(fake.adapters)
        else:
            self.send_json({"path": self.path, "total_slots": len(fake.slots), "model_path": fake.model,
                      "media_marker": fake.marker})

    def do_OPTIONS(self):
        self.send_response(204)
        self.send_header("Access-Control-Allow-Origin", self.headers.get("Origin", "none"))
        self.end_headers()

    def do_POST(self):
        fake = self.server
        value = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refuses_key():
            return
        parts = urllib.parse.urlsplit(self.path)
        if parts.path.startswith("/slots/"):
            self.slot_action(int(parts.path[7:]), parts.query, value)
        elif parts.path == "/apply-template":
            texts = [f"<{one['role']}>{one['content']}" for one in value["messages"]]
            self.send_json({"prompt": "".join(texts)})
        elif parts.path in ("/completion", "/v1/chat/completions"):
            self.complete(value)
        else:
            self.send_json({"echo": value})
        fake.served.append(self.path)

    def slot_action(self, number, query, value):
        fake = self.server
        path = os.path.join(fake.directory, value.get("filename", ""))
        if fake.hangs:
            fake.resume.wait(WAIT_S)
            self.send_json({"error": {"message": "too late"}}, 500)
        elif query == "action=save" and not fake.is_full:
            with open(path, "w", encoding="utf-8") as file:
                file.write(fake.slots[number])
            fake.saved[value["filename"]] = fake.computed[number]
            saved = len(fake.slots[number])
            fake.after_save()
            self.send_json({"n_saved": saved})
        elif query == "action=restore" and fake.restore_status:
            self.send_json({"error": {"message": "not now"}}, fake.restore_status)
        elif query == "action=restore" and os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                content = file.read()
            fake.slots[number] = "" if content.startswith("damaged") else content
            fake.computed[number] = fake.saved.get(value["filename"])
            fake.restores += 1
            fake.after_restore()
            self.send_json({"n_restored": 1}, 400 if content.startswith("damaged") else 200)
        else:
            self.send_json({"error": {"message": "no"}}, 500)

    def complete(self, value):
        fake = self.server
        if value.get("wait"):
            fake.started.set()
            fake.resume.wait(WAIT_S)
        prompt = value.get("prompt") or "".join(f"<{m['role']}>{m['content']}" for m in value["messages"])
        if isinstance(prompt, list):
            prompt = "".join(f"{token}," for token in prompt)
        number = value["id_slot"]
        before = fake.slots[number] if value.get("cache_prompt") else ""
        same = len(os.path.commonprefix([before, prompt]))
        if fake.reuses_nothing or fake.is_windowed and same < len(before):
            same = 0
        # The model and the adapters that computed the reused tokens.
        computed = [fake.model, value.get("lora") or []]
        if same and fake.computed[number] != computed:
            fake.wrong.append((fake.computed[number], computed))
        fake.computed[number] = computed
        if fake.fails:
            self.send_json({"error": {"message": "no"}}, fake.fails)
            return
        answer = f" answer to {len(prompt)}"
        fake.slots[number] = prompt + answer
        timings = {"cache_n": same, "prompt_n": len(prompt) - same}
        if not value.get("stream"):
            self.send_json({"content": answer, "timings": timings, "slot": number})
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for part in answer.split(" ")[1:]:
            self.event({"choices": [{"delta": {"content": " " + part}}]})
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
        self.is_windowed, self.is_full, self.reuses_nothing = is_windowed, False, False
        self.model, self.marker, self.adapters = __file__, f"<__media_{1:032}__>", []
        self.computed, self.saved, self.wrong, self.authorizations = [None] * slots, {}, [], []
        self.key, self.restore_status, self.fails, self.restores = None, 0, 0, 0
        self.hangs, self.starts = False, 1
        self.after_save = self.after_restore = lambda: None
        self.served, self.started, self.resume = [], threading.Event(), threading.Event()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def handle_error(self, request, client_address):
        """Ignores errors of connections that the front closes after its time limit."""

    def restart(self, model=None, is_marked=True):
        """Acts as a new process at the same address: all slots are empty."""
        self.slots = [""] * len(self.slots)
        self.computed = [None] * len(self.slots)
        self.starts += 1
        self.marker = f"<__media_{self.starts:032}__>" if is_marked else "pinned"
        self.model = model or self.model


class FrontCase(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.directory = folder.name
        self.fake = self.front = self.cache = None
        self.addCleanup(self.check_reused_tokens)

    def check_reused_tokens(self):
        self.assertEqual(self.fake.wrong if self.fake else [], [])

    def start(self, slots=1, budget=1 << 20, identity="model", key=None, call_s=WAIT_S, **options):
        is_windowed = options.pop("is_windowed", False)
        if not self.fake:
            self.fake = Fake(self.directory, slots, is_windowed)
            self.addCleanup(self.fake.server_close)
            self.addCleanup(self.fake.shutdown)
            self.fake.key = key
        upstream = Upstream(f"http://127.0.0.1:{self.fake.server_address[1]}", WAIT_S, key, call_s)
        cache = StateCache(options.pop("directory", self.directory), budget, open_policy(None))
        slots = Slots(upstream, Model(upstream, identity), cache)
        slots.refresh()
        settings = {"most_body_bytes": 1 << 20, "most_connections": 16, "wait_s": WAIT_S,
                    "idle_s": WAIT_S, **options}
        self.front = Front(("127.0.0.1", 0), types.SimpleNamespace(**settings), upstream,
                           slots, cache)
        front = self.front
        threading.Thread(target=front.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
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
        self.wait_for_saves()
        return json.loads(content)["timings"]["cache_n"]

    def wait_for_saves(self):
        """Waits until no slot is busy, because a slot is saved after its answer."""
        deadline = time.monotonic() + WAIT_S
        with self.front.slots.free:
            while any(slot.is_busy for slot in self.front.slots.all):
                self.assertTrue(self.front.slots.free.wait(deadline - time.monotonic()))

    def counts(self):
        return self.front.report()

    def files(self):
        return [name for name in os.listdir(self.directory) if name.endswith(".slot")]
