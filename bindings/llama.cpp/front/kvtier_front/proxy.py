"""The HTTP side: forwards requests, and streams answers as they arrive."""

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

# Paths of requests with a prompt.
COMPLETIONS = {"/completion", "/completions", "/v1/completions"}
CHATS = {"/v1/chat/completions", "/chat/completions"}
# Paths that are forwarded unchanged. All others are refused: the proxy owns slots and adapters. A client that
# changed them would lease saved states into states of another model.
POSTS = {"/v1/chat/completions/control", "/v1/responses", "/responses", "/v1/audio/transcriptions",
         "/audio/transcriptions", "/v1/messages", "/infill", "/embedding", "/embeddings", "/v1/embeddings",
         "/rerank", "/reranking", "/v1/rerank", "/v1/reranking", "/v1/systemone", "/tokenize", "/detokenize",
         "/apply-template", "/chat/completions/input_tokens", "/v1/chat/completions/input_tokens",
         "/responses/input_tokens", "/v1/responses/input_tokens", "/v1/messages/count_tokens",
         "/v1/streams/lookup"}
# Paths that every parser reads in the same way. A GET changes no slot.
PLAIN_PATH = re.compile(r"/|(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+")
# Headers of the connection, not of the message; lengths and encodings are set again.
OWN_HEADERS = {"connection", "keep-alive", "host", "content-length", "transfer-encoding", "expect", "te",
               "upgrade", "trailer", "proxy-connection", "accept-encoding", "server", "date"}
PIECE_BYTES = 64 << 10
# Part of an answer that is kept to know the slot's content; of longer answers only the beginning counts.
MAX_KEPT_BYTES = 8 << 20


def answer_text(content, is_stream):
    """The generated text, and the server's timings, from a forwarded answer."""
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
        """Logs nothing, for privacy."""

    def setup(self):
        self.timeout = self.server.options.idle_s
        super().setup()

    def do_GET(self):
        if self.has_body():
            self.fail(400, f"a {self.command} request must not have a body")
        elif self.path == "/kvtier":
            if self.is_admitted():
                self.send_json(200, self.server.report())
        elif not PLAIN_PATH.fullmatch(self.path.split("?")[0]):
            self.fail(403, "the proxy forwards plain paths only: letters, digits, and . _ ~ -")
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
            self.fail(403, "the proxy does not forward this path: clients must not change slots, adapters or "
                           "models")
        elif self.has_adapters(body):
            self.fail(400, "adapters of a request (lora) are supported in completions and chats only")
        else:
            self.relay(body)

    def is_admitted(self):
        """Tells whether a client may use functions that need the proxy's own key."""
        if self.server.upstream.accepts_key(self.headers):
            return True
        self.fail(401, "the API key is wrong: send the server's key")
        return False

    def has_adapters(self, body):
        """Tells whether a forwarded request would leave another model's state in a slot. Forms contain text
        only, which the server never reads as adapters."""
        if self.headers.get_content_type() == "multipart/form-data":
            return False
        try:
            request = json.loads(body)
        except (ValueError, RecursionError):
            # The server may accept a body that is not JSON here, so search for the name.
            return b"lora" in body or b"\\u" in body
        return isinstance(request, dict) and bool(request.get("lora"))

    def has_body(self):
        return "Transfer-Encoding" in self.headers or self.headers.get("Content-Length", "0") != "0"

    def send_json(self, status, value):
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def fail(self, status, message):
        self.close_connection = True
        self.send_json(status, {"error": {"code": status, "message": message}})

    def read_body(self):
        lengths = self.headers.get_all("Content-Length") or [""]
        length = lengths[0]
        is_number = length.isascii() and length.isdigit() and len(length) < 19
        if not is_number or len(lengths) > 1 or "Transfer-Encoding" in self.headers:
            self.fail(411, "the request has no valid Content-Length: send its length in bytes")
            return None
        if int(length) > self.server.options.most_body_bytes:
            self.fail(413, f"the body has {length} bytes, at most {self.server.options.most_body_bytes} are "
                           "allowed (--most-body-bytes)")
            return None
        body = self.rfile.read(int(length))
        return body if len(body) == int(length) else None

    def relay(self, body):
        """Forwards a request and its answer unchanged."""
        try:
            self.forward(body)
        except Refused as refused:
            if refused.is_gone:
                self.server.slots.mark_gone()
            self.fail(refused.status, refused.message)

    def serve(self, path, body):
        slots = self.server.slots
        try:
            request = json.loads(body)
            if not isinstance(request, dict):
                raise ValueError("a request must be an object")
            server_state = slots.refresh()
            prompt = self.prompt_of(path, request)
            lora = keys.lora_of(request)
        except (ValueError, RecursionError) as error:
            self.fail(400, f"the body is not a valid JSON request: {error}")
            return
        except Refused as refused:
            if refused.is_gone:
                slots.mark_gone()
            self.fail(refused.status, refused.message)
            return
        if prompt is None:
            # Several prompts, or none: the server reports the error.
            if lora:
                self.fail(400, "adapters of a request (lora) are supported with one prompt only")
            else:
                self.relay(body)
            return
        lease = slots.acquire(server_state, keys.chain(server_state.identity, prompt, lora), lora,
                          time.monotonic() + self.server.options.wait_s)
        if lease is None:
            self.fail(503, f"no slot became free within {self.server.options.wait_s} s: try again")
            return
        try:
            self.complete(lease, request, prompt)
        except BaseException:
            # The client or the server failed in the middle: the content of the slot is unknown.
            self.close_connection = True
            slots.mark_unknown(lease)
            raise
        finally:
            slots.release(lease.slot)

    def complete(self, lease, request, prompt):
        slots = self.server.slots
        request.update({"id_slot": lease.slot.number, "cache_prompt": lease.reuses})
        try:
            status, content = self.forward(json.dumps(request).encode(), keeps=True)
        except Refused as refused:
            slots.mark_unknown(lease, refused.is_gone)
            self.fail(refused.status, refused.message)
            return
        except http.client.HTTPException:
            # The server broke off its answer.
            self.close_connection = True
            slots.mark_unknown(lease, True)
            return
        if status != 200:
            slots.mark_unknown(lease)
            if status >= 500:
                slots.check_process()
            return
        text, timings = answer_text(content, bool(request.get("stream")))
        blocks = keys.chain(lease.server_state.identity, prompt + text, lease.lora)
        slots.finish(lease, blocks, timings.get("cache_n"), timings.get("prompt_n"))

    def prompt_of(self, path, request):
        """The text that the server will see. For a chat the server's own template makes it."""
        if path in CHATS:
            answer = self.server.upstream.call("POST", "/apply-template", request)
            return keys.text_of(answer.get("prompt", ""))
        prompt = request.get("prompt")
        several = isinstance(prompt, list) and not all(isinstance(one, int) for one in prompt)
        return None if prompt is None or several else keys.text_of(prompt)

    def forward(self, body, keeps=False):
        headers = {}
        for name, value in self.headers.items():
            # The first of repeated headers counts, as in the proxy's own checks.
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
                # HTTP/1.0 clients take the end of the connection as the end of the answer.
                self.close_connection = True
            self.end_headers()
            while True:
                piece = answer.read1(PIECE_BYTES)
                if not piece:
                    break
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if is_chunked else piece)
                if keeps and len(kept) < MAX_KEPT_BYTES:
                    kept += piece
            if is_chunked:
                self.wfile.write(b"0\r\n\r\n")
            return answer.status, bytes(kept)
        finally:
            connection.close()


class Front(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """The listener, with a limit on simultaneous connections."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address, options, upstream, slots, cache):
        super().__init__(address, Handler)
        self.options, self.upstream, self.slots, self.cache = options, upstream, slots, cache
        self.connections = threading.BoundedSemaphore(options.most_connections)

    def process_request(self, request, client_address):
        if not self.connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request, client_address):
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.release()

    def handle_error(self, request, client_address):
        """Ignores clients that disconnect; reports anything else as a defect."""
        error = sys.exc_info()[1]
        if not isinstance(error, (OSError, http.client.HTTPException)):
            print(f"kvtier_front: a request failed: {error!r}", file=sys.stderr, flush=True)

    def report(self):
        cache = self.cache
        return {"pid": os.getpid(), "states": len(cache.states), "bytes": cache.used_bytes,
                "budget_bytes": cache.budget_bytes, "policy": cache.policy.name,
                "only_whole": self.slots.only_whole, "in_vain": self.slots.is_futile,
                "identity": self.slots.server_state.identity if self.slots.server_state else None,
                **cache.counts, **self.slots.counts}
