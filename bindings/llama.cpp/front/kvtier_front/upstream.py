"""Calls to llama-server."""

import hmac
import http.client
import json
import socket
import urllib.parse

MOST_ANSWER_BYTES = 64 << 20


class Refused(Exception):
    """The server said no, or nothing."""

    def __init__(self, status, words, is_gone=False):
        super().__init__(f"{status}: {words}")
        self.status, self.words, self.is_gone = status, words, is_gone


class Upstream:
    """A server's address. Each call has a connection of its own: slots are held for long."""

    def __init__(self, url, timeout_s, key=None, call_s=60):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// address")
        self.host, self.port, self.timeout_s, self.key = parts.hostname, parts.port or 80, timeout_s, key
        # Of the front's own calls: a server that is told to end waits for those that it does not answer.
        self.call_s = call_s

    def admits(self, headers):
        """Whether a client has shown the key. The server asks its headers in this order as well."""
        if not self.key:
            return True
        shown = headers.get("Authorization") or headers.get("X-Api-Key") or ""
        shown = shown.removeprefix("Bearer ")
        return hmac.compare_digest(shown.encode("utf-8", "replace"), self.key.encode())

    def send(self, method, path, body=None, headers=None, timeout_s=None):
        """A request on its way; the answer is for the caller to read. Headers are the caller's alone: the
        front's key is for the front's calls, not for its clients'."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s or self.timeout_s)
        try:
            connection.request(method, path, body=body, headers=headers or {})
            return connection, connection.getresponse()
        except (ValueError, http.client.InvalidURL) as error:
            connection.close()
            raise Refused(400, f"this cannot be passed on: {error}") from error
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Refused(502, f"the server does not answer: {error}", True) from error

    def call(self, method, path, value=None):
        """A JSON answer to a call of the front's own, or Refused."""
        body = None if value is None else json.dumps(value).encode()
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        connection, answer = self.send(method, path, body, headers, self.call_s)
        try:
            content = answer.read(MOST_ANSWER_BYTES)
        except (OSError, socket.timeout, http.client.HTTPException) as error:
            raise Refused(502, f"the server's answer broke off: {error}", True) from error
        finally:
            connection.close()
        if answer.status != 200:
            raise Refused(answer.status, content[:500].decode("utf-8", "replace"))
        try:
            return json.loads(content)
        except ValueError as error:
            raise Refused(502, "the server's answer is no JSON") from error
