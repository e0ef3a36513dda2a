"""The HTTP side: requests are passed on, streams as they come."""

import http.client
import http.server
import json
import os
import socketserver
import threading
import time

from . import keys
from .upstream import Refused

# What has a prompt, and where it is.
COMPLETIONS = {"/completion", "/completions", "/v1/completions"}
CHATS = {"/v1/chat/completions", "/chat/completions"}
# Of a connection, not of what is said on it; lengths and encodings are made anew.
OWN_HEADERS = {"connection", "keep-alive", "host", "content-length", "transfer-encoding", "expect", "te",
               "upgrade", "trailer", "proxy-connection", "accept-encoding", "server", "date"}
PIECE_BYTES = 64 << 10
# Of an answer that is kept to know what the slot holds; what is longer is known by its start.
MOST_KEPT_BYTES = 8 << 20


def answer_text(content, is_stream):
    """What was generated, and the server's timings, of an answer as it was passed on."""
    if is_stream:
        values = []
        for line in content.split(b"\n"):
            if line.startswith(b"data: {"):
                try:
                    values.append(json.loads(line[6:]))
                except ValueError:
                    continue
    else:
        try:
            values = [json.loads(content)]
        except ValueError:
            values = []
    text, timings = [], {}
    for value in values:
        timings = value.get("timings") or timings if isinstance(value, dict) else timings
        choices = value.get("choices") if isinstance(value, dict) else None
        part = value.get("content") if isinstance(value, dict) else None
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            message = choices[0].get("message") or choices[0].get("delta") or {}
            part = message.get("content") or choices[0].get("text")
        if isinstance(part, str):
            text.append(part)
    return "".join(text), timings if isinstance(timings, dict) else {}


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server_version = "kvtier-front"

    def log_message(self, *_):
        """Silent: a front has no log of who asked what."""

    def setup(self):
        self.timeout = self.server.options.idle_s
        super().setup()

    def do_GET(self):
        if self.path == "/kvtier":
            self.say(200, self.server.report())
        else:
            self.relay(None)

    def do_HEAD(self):
        self.relay(None)

    def do_OPTIONS(self):
        self.relay(None)

    def do_POST(self):
        body = self.read_body()
        if body is None:
            return
        path = self.path.split("?")[0]
        if path.startswith("/slots"):
            self.say(403, {"error": {"code": 403, "message": "slots are the front's"}})
        elif path in COMPLETIONS or path in CHATS:
            self.serve(path, body)
        else:
            self.relay(body)

    def say(self, status, value):
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def fail(self, status, words):
        self.close_connection = True
        self.say(status, {"error": {"code": status, "message": words}})

    def read_body(self):
        length = self.headers.get("Content-Length", "")
        if not length.isdigit():
            self.fail(411, "say how long it is: Content-Length")
            return None
        if int(length) > self.server.options.most_body_bytes:
            self.fail(413, f"more than {self.server.options.most_body_bytes} bytes")
            return None
        body = self.rfile.read(int(length))
        return body if len(body) == int(length) else None

    def relay(self, body):
        """As it is, to the server and back."""
        try:
            self.forward(body)
        except Refused as refused:
            self.fail(refused.status, refused.words)

    def serve(self, path, body):
        server, slot = self.server, None
        try:
            request = json.loads(body)
            if not isinstance(request, dict):
                raise ValueError("a request is an object")
            prompt = self.prompt_of(path, request)
        except (ValueError, RecursionError) as error:
            self.fail(400, f"not JSON that is understood: {error}")
            return
        except Refused as refused:
            self.fail(refused.status, refused.words)
            return
        if prompt is None:
            # Several prompts, or none: the server knows what to say.
            self.relay(body)
            return
        identity = server.shelf.identity
        try:
            slot, known = server.slots.take(keys.chain(identity, prompt),
                                            time.monotonic() + server.options.wait_s)
            if slot is None:
                self.fail(503, "all slots are busy")
                return
            request.update({"id_slot": slot.number, "cache_prompt": True})
            status, content = self.forward(json.dumps(request).encode(), keeps=True)
            if status != 200:
                server.slots.broken(slot)
                return
            text, timings = answer_text(content, bool(request.get("stream")))
            server.slots.finished(slot, keys.chain(identity, prompt + text), timings.get("cache_n"),
                                  timings.get("prompt_n"), known)
        except Refused as refused:
            server.slots.broken(slot)
            self.fail(refused.status, refused.words)
        except (OSError, http.client.HTTPException):
            # Either side went away in the middle: what the slot holds is not known.
            self.close_connection = True
            if slot:
                server.slots.broken(slot)
        finally:
            if slot:
                server.slots.give(slot)

    def prompt_of(self, path, request):
        """The text that the server will see. Of a chat the server's own template makes it."""
        if path in CHATS:
            answer = self.server.upstream.call("POST", "/apply-template", request)
            return keys.text_of(answer.get("prompt", ""))
        prompt = request.get("prompt")
        several = isinstance(prompt, list) and not all(isinstance(one, int) for one in prompt)
        return None if prompt is None or several else keys.text_of(prompt)

    def forward(self, body, keeps=False):
        headers = {name: value for name, value in self.headers.items() if name.lower() not in OWN_HEADERS}
        connection, answer = self.server.upstream.send(self.command, self.path, body, headers)
        kept = bytearray()
        try:
            length = answer.getheader("Content-Length")
            has_body = self.command != "HEAD" and answer.status not in (204, 304)
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in OWN_HEADERS:
                    self.send_header(name, value)
            if length is not None:
                self.send_header("Content-Length", length)
            elif has_body:
                self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            while True:
                piece = answer.read1(PIECE_BYTES)
                if not piece:
                    break
                self.wfile.write(piece if length is not None else b"%x\r\n%s\r\n" % (len(piece), piece))
                if keeps and len(kept) < MOST_KEPT_BYTES:
                    kept += piece
            if length is None and has_body:
                self.wfile.write(b"0\r\n\r\n")
            return answer.status, bytes(kept)
        finally:
            connection.close()


class Front(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """Listens. So many connections at once, and no more."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address, options, upstream, slots, shelf):
        super().__init__(address, Handler)
        self.options, self.upstream, self.slots, self.shelf = options, upstream, slots, shelf
        self.room = threading.BoundedSemaphore(options.most_connections)

    def process_request(self, request, client_address):
        if not self.room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request, client_address):
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.room.release()

    def handle_error(self, request, client_address):
        """Clients go away: nothing to tell."""

    def report(self):
        shelf = self.shelf
        return {"pid": os.getpid(), "states": len(shelf.states), "bytes": shelf.used_bytes,
                "budget_bytes": shelf.budget_bytes, "policy": shelf.policy.name,
                "only_whole": self.slots.only_whole, "in_vain": self.slots.is_vain,
                **shelf.counts, **self.slots.counts}
