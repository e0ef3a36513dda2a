"""An ASGI middleware that passes the hints of OpenAI's and Anthropic's APIs on to kvtier:

    vllm serve MODEL --middleware kvtier_vllm.front.HintsMiddleware --kv-transfer-config ...

vLLM passes only `kv_transfer_params` of a request's body to connectors. The middleware copies the
fields with hints (`kvtier.hints.KEYS`) into it, from the body's top level and, for
`cache_control`, from its messages, system prompt and tools. Answers, streams included, are not
touched. A body that is no JSON object, or too long, is passed on as it is.

Environment variables, read once:

- `KVTIER_FRONT_BODY_BYTES`: longest body that is read, 32 MiB by default.
- `KVTIER_FRONT_TENANT=key`: the tenant is a hash of the request's API key. A tenant that the client
  names is replaced, on other paths too, so that no client spends the quota of another. Bodies that
  cannot be read are refused then. Only `--api-key` makes the key trustworthy.

The middleware runs before vLLM's authentication: it reads the bodies of requests that vLLM refuses.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any, Awaitable, Callable, Dict, Iterator, List, MutableMapping, Optional, Tuple

from kvtier import hints

from .settings import invalid, size

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: The ends of the paths whose requests take `kv_transfer_params`.
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
         "/inference/v1/generate", "/cohere/v2/chat", "/invocations")
#: Headers that name a conversation, for clients that send no `prompt_cache_key`.
SESSION_HEADERS = (b"x-session-id", b"session_id")
#: The top-level fields of a body that are copied.
_FIELDS = tuple(key for key in hints.KEYS if key != "cache_control")
_BODY_BYTES = 32 << 20
#: Most breakpoints that are read of a body.
_MAX_BREAKPOINTS = 64
#: Depth of content in content (an Anthropic `tool_result` has blocks, too).
_MAX_DEPTH = 4


def _breakpoints(content: Any, depth: int = 0) -> Iterator[Any]:
    """The `cache_control` of content blocks, messages or tools."""
    if not isinstance(content, list) or depth > _MAX_DEPTH:
        return
    for block in content:
        if isinstance(block, dict):
            if block.get("cache_control") is not None:
                yield block["cache_control"]
            yield from _breakpoints(block.get("content"), depth + 1)


def _cache_control(body: Dict[str, Any]) -> List[Any]:
    found: List[Any] = []
    if body.get("cache_control") is not None:
        found.append(body["cache_control"])
    for part in ("system", "messages", "tools"):
        for one in _breakpoints(body.get(part)):
            if len(found) == _MAX_BREAKPOINTS:
                return found
            found.append(one)
    return found


def _header(scope: Scope, *names: bytes) -> Optional[bytes]:
    """The first header with one of the names that has a value."""
    for name, value in scope.get("headers", ()):
        if name.lower() in names and value:
            return bytes(value)
    return None


def _tenant_of_key(scope: Scope) -> int:
    """A tenant number of a request's API key; requests without one share a number. The key is the
    one that vLLM checks: `x-api-key` counts only without `Authorization`, and the case of "Bearer"
    does not count."""
    key = _header(scope, b"authorization") or _header(scope, b"x-api-key") or b""
    scheme, blank, token = key.partition(b" ")
    key = scheme.lower() + blank + token if blank else key
    return 1 + int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") % (2**32 - 1)


def params_of(body: Dict[str, Any], scope: Scope, tenant_by_key: bool) -> Dict[str, Any]:
    """The `kv_transfer_params` of a body with its hints. Those that the client gave come first."""
    given = body.get("kv_transfer_params")
    params: Dict[str, Any] = dict(given) if isinstance(given, dict) else {}
    for key in _FIELDS:
        if body.get(key) is not None:
            params.setdefault(key, body[key])
    breakpoints = _cache_control(body)
    if breakpoints:
        params.setdefault("cache_control", breakpoints)
    session = _header(scope, *SESSION_HEADERS)
    if session is not None:
        params.setdefault("prompt_cache_key", session.decode("latin-1"))
    if tenant_by_key:
        own = params.get("kvtier")
        params["kvtier"] = {**(own if isinstance(own, dict) else {}),
                            "tenant": _tenant_of_key(scope)}
    return params


def _is_json(scope: Scope) -> bool:
    """Whether vLLM reads a body as JSON. Without a content type, some of its paths do."""
    kind = (_header(scope, b"content-type") or b"").lower()
    return not kind or b"json" in kind


def _takes_hints(scope: Scope) -> bool:
    return str(scope.get("path", "")).rstrip("/").endswith(PATHS)


def rewrite(data: bytes, scope: Scope, tenant_by_key: bool = False) -> bytes:
    """A body with its hints in `kv_transfer_params`; the same body if there is nothing to do.
    Reads JSON as the engine does. Bodies of paths other than `PATHS` get no hints; a tenant that
    they name is replaced. Raises RecursionError for deeply nested bodies."""
    try:
        text = data.decode(json.detect_encoding(data), "surrogatepass")
        body = json.loads(text)
    except ValueError:  # the engine refuses it
        return data
    given = body.get("kv_transfer_params") if isinstance(body, dict) else ""
    if given is not None and not isinstance(given, dict):
        return data  # the engine refuses it
    if not _takes_hints(scope) and not (given and "kvtier" in given):
        return data
    params = params_of(body, scope, tenant_by_key)
    if params == (given or {}):
        return data
    if "kv_transfer_params" in body:
        return json.dumps({**body, "kv_transfer_params": params}).encode()
    # All other bytes stay as they are.
    start = json.dumps({"kv_transfer_params": params})[:-1] + (", " if body else "")
    return (start + text.lstrip()[1:]).encode(errors="surrogatepass")


class HintsMiddleware:
    """The middleware, for `vllm serve --middleware kvtier_vllm.front.HintsMiddleware`."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._most = size("KVTIER_FRONT_BODY_BYTES",
                          _environment("KVTIER_FRONT_BODY_BYTES", str(_BODY_BYTES)))
        tenant = _environment("KVTIER_FRONT_TENANT", "client")
        if tenant not in ("client", "key"):
            raise invalid(f"KVTIER_FRONT_TENANT={tenant!r} is unknown: use client or key")
        self._tenant_by_key = tenant == "key"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope.get("method") != "POST" or not (
                _takes_hints(scope) or self._tenant_by_key and _is_json(scope)):
            await self._app(scope, receive, send)
            return
        messages, body = await self._read(receive)
        refusal, new = "", body
        if body is not None:
            try:
                new = rewrite(body, scope, self._tenant_by_key)
            except RecursionError:
                refusal = ("the JSON of the body is nested too deeply to be read: send a flatter "
                           "body")
        elif messages[-1]["type"] == "http.request":
            refusal = (f"the body has more than {self._most} bytes: send less, or raise "
                       "KVTIER_FRONT_BODY_BYTES")
        if refusal and self._tenant_by_key:
            await _refuse(send, refusal)
            return
        if new is not None and new is not body:
            headers = [(name, value) for name, value in scope["headers"]
                       if name.lower() != b"content-length"]
            scope = {**scope, "headers": [*headers, (b"content-length", b"%d" % len(new))]}
            messages = [{"type": "http.request", "body": new, "more_body": False}]
        await self._app(scope, _replay(messages, receive), send)

    async def _read(self, receive: Receive) -> Tuple[List[Message], Optional[bytes]]:
        """The messages of a request, and its body; None if it is too long, or the client left."""
        messages: List[Message] = []
        length = 0
        while True:
            message = await receive()
            messages.append(message)
            if message["type"] != "http.request":
                return messages, None
            length += len(message.get("body", b""))
            if length > self._most:
                return messages, None
            if not message.get("more_body", False):
                return messages, b"".join(one.get("body", b"") for one in messages)


def _environment(name: str, default: str) -> str:
    return os.environ.get(name, "") or default


def _replay(messages: List[Message], receive: Receive) -> Receive:
    """Delivers messages that were read, then those that follow."""
    left = list(reversed(messages))

    async def replay() -> Message:
        return left.pop() if left else await receive()

    return replay


async def _refuse(send: Send, text: str) -> None:
    body = json.dumps({"error": {"message": text, "type": "invalid_request_error",
                                 "code": 413}}).encode()
    await send({"type": "http.response.start", "status": 413, "headers": [
        (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})
