"""Calls to llama-server."""

import hmac
import http.client
import json
import socket
import urllib.parse

MAX_ANSWER_BYTES = 64 << 20


class Refused(Exception):
    """The server returned an error, or did not answer (`is_gone`)."""

    def __init__(self, status, message, is_gone=False):
        super().__init__(f"{status}: {message}")
        self.status, self.message, self.is_gone = status, message, is_gone


class Upstream:
    """The server's address. Each call has its own connection, because slots are busy for long."""

    def __init__(self, url, timeout_s, key=None, call_s=60):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"--server {url!r} is not an http:// address")
        self.host, self.port, self.timeout_s, self.key = parts.hostname, parts.port or 80, timeout_s, key
        # Timeout of the proxy's own calls: a server that is shutting down holds calls without answering.
        self.call_s = call_s

    def accepts_key(self, headers):
        """Tells whether a client sent the key, in the order of headers that the server uses."""
        if not self.key:
            return True
        shown = headers.get("Authorization") or headers.get("X-Api-Key") or ""
        shown = shown.removeprefix("Bearer ")
        return hmac.compare_digest(shown.encode("utf-8", "replace"), self.key.encode())

    def send(self, method, path, body=None, headers=None, timeout_s=None):
        """Sends a request; the caller reads the answer. It has the caller's headers only: the proxy's key is
        for its own calls, not for its clients'."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s or self.timeout_s)
        try:
            connection.request(method, path, body=body, headers=headers or {})
            return connection, connection.getresponse()
        except (ValueError, http.client.InvalidURL) as error:
            connection.close()
            raise Refused(400, f"this request cannot be forwarded: {error}") from error
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Refused(502, f"the server does not answer: {error}", True) from error

    def call(self, method, path, value=None):
        """The JSON answer to one of the proxy's own calls; raises Refused."""
        body = None if value is None else json.dumps(value).encode()
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        connection, answer = self.send(method, path, body, headers, self.call_s)
        try:
            content = answer.read(MAX_ANSWER_BYTES)
        except (OSError, socket.timeout, http.client.HTTPException) as error:
            raise Refused(502, f"the server's answer is incomplete: {error}", True) from error
        finally:
            connection.close()
        if answer.status != 200:
            raise Refused(answer.status, content[:500].decode("utf-8", "replace"))
        try:
            return json.loads(content)
        except ValueError as error:
            raise Refused(502, "the server's answer is not JSON") from error
