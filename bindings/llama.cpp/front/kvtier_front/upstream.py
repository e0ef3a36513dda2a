"""Calls to llama-server."""

import http.client
import json
import socket
import urllib.parse

MOST_ANSWER_BYTES = 64 << 20


class Refused(Exception):
    """The server said no, or nothing."""

    def __init__(self, status, words):
        super().__init__(f"{status}: {words}")
        self.status, self.words = status, words


class Upstream:
    """A server's address. Each call has a connection of its own: slots are held for long."""

    def __init__(self, url, timeout_s, key=None):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// address")
        self.host, self.port, self.timeout_s, self.key = parts.hostname, parts.port or 80, timeout_s, key

    def send(self, method, path, body=None, headers=None):
        """A request on its way; the answer is for the caller to read."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout_s)
        all_headers = {"Content-Type": "application/json"} if body is not None else {}
        if self.key:
            all_headers["Authorization"] = f"Bearer {self.key}"
        all_headers.update(headers or {})
        try:
            connection.request(method, path, body=body, headers=all_headers)
            return connection, connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Refused(502, f"the server does not answer: {error}") from error

    def call(self, method, path, value=None):
        """A JSON answer, or Refused."""
        body = None if value is None else json.dumps(value).encode()
        connection, answer = self.send(method, path, body)
        try:
            content = answer.read(MOST_ANSWER_BYTES)
        except (OSError, socket.timeout, http.client.HTTPException) as error:
            raise Refused(502, f"the server's answer broke off: {error}") from error
        finally:
            connection.close()
        if answer.status != 200:
            raise Refused(answer.status, content[:500].decode("utf-8", "replace"))
        try:
            return json.loads(content)
        except ValueError as error:
            raise Refused(502, "the server's answer is no JSON") from error
