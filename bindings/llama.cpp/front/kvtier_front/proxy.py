"""The HTTP side: requests are passed on, streams as they come."""

import http.client
import http.server
import json
import os
import re
import socketserver
import sys
import threading
import time

from . import keys
from .upstream import Refused

# What has a prompt, and where it is.
COMPLETIONS = {"/completion", "/completions", "/v1/completions"}
CHATS = {"/v1/chat/completions", "/chat/completions"}
# What is passed on as it is. All that is not named is refused: slots and adapters are the front's, and who
# changes them behind it makes its states those of another model.
POSTS = {"/v1/chat/completions/control", "/v1/responses", "/responses", "/v1/audio/transcriptions",
         "/audio/transcriptions", "/v1/messages", "/infill", "/embedding", "/embeddings", "/v1/embeddings",
         "/rerank", "/reranking", "/v1/rerank", "/v1/reranking", "/v1/systemone", "/tokenize", "/detokenize",
         "/apply-template", "/chat/completions/input_tokens", "/v1/chat/completions/input_tokens",
         "/responses/input_tokens", "/v1/responses/input_tokens", "/v1/messages/count_tokens",
         "/v1/streams/lookup"}
# Paths that mean the same to everybody who reads them. Nothing that is only asked for changes a slot.
PLAIN_PATH = re.compile(r"/|(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+")
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
        if self.has_body():
            self.fail(400, f"a {self.command} has no body")
        elif self.path == "/kvtier":
            if self.is_admitted():
                self.say(200, self.server.report())
        elif not PLAIN_PATH.fullmatch(self.path.split("?")[0]):
            self.fail(403, "the front passes on plain paths only")
        else:
            self.relay(None)

    def do_HEAD(self):
        self.do_GET()

    def do_OPTIONS(self):
        self.do_GET()

    def do_POST(self):
        body = self.read_body()
        if body is None:
            return
        path = self.path.split("?")[0]
        if path in COMPLETIONS or path in CHATS:
            if self.is_admitted():
                self.serve(path, body)
        elif path not in POSTS:
            self.fail(403, "the front does not pass this on: slots, adapters and models are not its clients'")
        elif self.has_adapters(body):
            self.fail(400, "adapters of a request (lora) are had in completions and chats only")
        else:
            self.relay(body)

    def is_admitted(self):
        """Whether a client may have what the front does with its own key."""
        if self.server.upstream.admits(self.headers):
            return True
        self.fail(401, "the API key is not the server's")
        return False

    def has_adapters(self, body):
        """Whether a request that the front does not understand would leave another model's state in a slot.
        Forms have texts only, which are no adapters to the server."""
        if self.headers.get_content_type() == "multipart/form-data":
            return False
        try:
            request = json.loads(body)
        except (ValueError, RecursionError):
            # The server may read what is not JSON here: it is told by name.
            return b"lora" in body or b"\\u" in body
        return isinstance(request, dict) and bool(request.get("lora"))

    def has_body(self):
        return "Transfer-Encoding" in self.headers or self.headers.get("Content-Length", "0") != "0"

    def say(self, status, value):
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def fail(self, status, words):
        self.close_connection = True
        self.say(status, {"error": {"code": status, "message": words}})

    def read_body(self):
        lengths = self.headers.get_all("Content-Length") or [""]
        length = lengths[0]
        is_number = length.isascii() and length.isdigit() and len(length) < 19
        if not is_number or len(lengths) > 1 or "Transfer-Encoding" in self.headers:
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
            if refused.is_gone:
                self.server.slots.went_away()
            self.fail(refused.status, refused.words)

    def serve(self, path, body):
        slots = self.server.slots
        try:
            request = json.loads(body)
            if not isinstance(request, dict):
                raise ValueError("a request is an object")
            seen = slots.look()
            prompt = self.prompt_of(path, request)
            lora = keys.lora_of(request)
        except (ValueError, RecursionError) as error:
            self.fail(400, f"not JSON that is understood: {error}")
            return
        except Refused as refused:
            if refused.is_gone:
                slots.went_away()
            self.fail(refused.status, refused.words)
            return
        if prompt is None:
            # Several prompts, or none: the server knows what to say.
            if lora:
                self.fail(400, "adapters of a request (lora) are had with one prompt only")
            else:
                self.relay(body)
            return
        turn = slots.take(seen, keys.chain(seen.identity, prompt, lora), lora,
                          time.monotonic() + self.server.options.wait_s)
        if turn is None:
            self.fail(503, "all slots are busy")
            return
        try:
            self.complete(turn, request, prompt)
        except BaseException:
            # Either side went away in the middle, or worse: what the slot holds is not known.
            self.close_connection = True
            slots.broken(turn)
            raise
        finally:
            slots.give(turn.slot)

    def complete(self, turn, request, prompt):
        slots = self.server.slots
        request.update({"id_slot": turn.slot.number, "cache_prompt": turn.reuses})
        try:
            status, content = self.forward(json.dumps(request).encode(), keeps=True)
        except Refused as refused:
            slots.broken(turn, refused.is_gone)
            self.fail(refused.status, refused.words)
            return
        except http.client.HTTPException:
            # The server broke off in its answer.
            self.close_connection = True
            slots.broken(turn, True)
            return
        if status != 200:
            slots.broken(turn)
            if status >= 500:
                slots.doubt()
            return
        text, timings = answer_text(content, bool(request.get("stream")))
        blocks = keys.chain(turn.seen.identity, prompt + text, turn.lora)
        slots.finished(turn, blocks, timings.get("cache_n"), timings.get("prompt_n"))

    def prompt_of(self, path, request):
        """The text that the server will see. Of a chat the server's own template makes it."""
        if path in CHATS:
            answer = self.server.upstream.call("POST", "/apply-template", request)
            return keys.text_of(answer.get("prompt", ""))
        prompt = request.get("prompt")
        several = isinstance(prompt, list) and not all(isinstance(one, int) for one in prompt)
        return None if prompt is None or several else keys.text_of(prompt)

    def forward(self, body, keeps=False):
        headers = {}
        for name, value in self.headers.items():
            # Of several the first counts, as it does where the front looks at them.
            if name.lower() not in OWN_HEADERS:
                headers.setdefault(name.lower(), value)
        connection, answer = self.server.upstream.send(self.command, self.path, body, headers)
        kept = bytearray()
        try:
            length = answer.getheader("Content-Length")
            is_chunked = False
            has_body = self.command != "HEAD" and answer.status not in (204, 304)
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in OWN_HEADERS:
                    self.send_header(name, value)
            if length is not None:
                self.send_header("Content-Length", length)
            elif has_body and self.request_version == "HTTP/1.1":
                self.send_header("Transfer-Encoding", "chunked")
                is_chunked = True
            elif has_body:
                # Older clients know that it has ended when the connection has.
                self.close_connection = True
            self.end_headers()
            while True:
                piece = answer.read1(PIECE_BYTES)
                if not piece:
                    break
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if is_chunked else piece)
                if keeps and len(kept) < MOST_KEPT_BYTES:
                    kept += piece
            if is_chunked:
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
        """Clients go away: nothing to tell. Anything else is a defect."""
        error = sys.exc_info()[1]
        if not isinstance(error, (OSError, http.client.HTTPException)):
            print(f"kvtier_front: a request failed: {error!r}", file=sys.stderr, flush=True)

    def report(self):
        shelf = self.shelf
        return {"pid": os.getpid(), "states": len(shelf.states), "bytes": shelf.used_bytes,
                "budget_bytes": shelf.budget_bytes, "policy": shelf.policy.name,
                "only_whole": self.slots.only_whole, "in_vain": self.slots.is_vain,
                "identity": self.slots.seen.identity if self.slots.seen else None,
                **shelf.counts, **self.slots.counts}
