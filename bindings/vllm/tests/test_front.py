"""The middleware: bodies of all APIs, streams, limits, and tenants by API key."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Dict, List, Optional

import kvtier
import pytest

HOUR = {"type": "ephemeral", "ttl": "1h"}


class App:
    """An engine's server: keeps what it receives, and answers with a stream."""

    def __init__(self) -> None:
        self.body, self.scope = b"", {}  # type: bytes, Dict[str, Any]
        self.last: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scope = scope
        while scope["type"] == "http":
            message = await receive()
            if message["type"] != "http.request":
                break
            self.body += message.get("body", b"")
            if not message.get("more_body"):
                self.last = await receive()
                break
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"data: 1\n\n", b"data: 2\n\n", b""):
            await send({"type": "http.response.body", "body": part, "more_body": bool(part)})


def request(body: bytes, *, path: str = "/v1/chat/completions", parts: int = 1,
            headers: Optional[Dict[str, str]] = None, method: str = "POST",
            leaves: bool = False) -> Any:
    """Sends a request through the middleware: the app, and the messages of the answer."""
    from kvtier_vllm.front import HintsMiddleware

    app, sent = App(), []  # type: App, List[Any]
    size = -(-len(body) // parts) or 1
    chunks = [body[at:at + size] for at in range(0, len(body), size)] or [b""]
    messages: List[Any] = [
        {"type": "http.request", "body": chunk, "more_body": at + 1 < len(chunks) or leaves}
        for at, chunk in enumerate(chunks)] + [{"type": "http.disconnect"}]
    given = {"content-length": str(len(body)), "content-type": "application/json",
             **(headers or {})}
    scope = {"type": "http", "method": method, "path": path,
             "headers": [(name.encode(), value.encode()) for name, value in given.items()]}

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(HintsMiddleware(app)(scope, receive, send))
    return app, sent


def params(body: Any, **more: Any) -> Any:
    """The `kv_transfer_params` that the engine gets, after the rest of the body was compared."""
    app, sent = request(json.dumps(body).encode(), **more)
    got = json.loads(app.body)
    assert {**got, "kv_transfer_params": 0} == {**body, "kv_transfer_params": 0}
    assert [one.get("body") for one in sent[1:]] == [b"data: 1\n\n", b"data: 2\n\n", b""]
    lengths = [value for name, value in app.scope["headers"] if name == b"content-length"]
    assert lengths == [str(len(app.body)).encode()] and app.last["type"] == "http.disconnect"
    return got.get("kv_transfer_params")


def test_openai_fields_reach_the_connector() -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/a/v1/responses",
                 "/cohere/v2/chat", "/invocations"):
        assert params({"model": "m", "prompt": "p", "prompt_cache_retention": "24h",
                       "prompt_cache_key": "chat-17", "stream": True}, path=path, parts=3) == {
            "prompt_cache_retention": "24h", "prompt_cache_key": "chat-17"}
    assert params({"kv_cache_ttl_seconds": 600}) == {"kv_cache_ttl_seconds": 600}
    assert params({"kvtier": {"tenant": 3}}) == {"kvtier": {"tenant": 3}}


def test_anthropic_breakpoints_are_collected() -> None:
    body = {"system": [{"type": "text", "text": "s", "cache_control": HOUR}],
            "tools": [{"name": "t", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "plain"},
                {"role": "user", "content": [
                    {"type": "tool_result", "content": [
                        {"type": "text", "text": "r", "cache_control": {"type": "ephemeral"}}]}]}]}
    found = params(body, path="/v1/messages")["cache_control"]
    assert found == [HOUR, {"type": "ephemeral"}, {"type": "ephemeral"}]
    from kvtier_vllm import hints

    assert hints.parse({"cache_control": found}).keep_s == 3600
    assert params({"cache_control": HOUR}, path="/v1/messages") == {"cache_control": [HOUR]}
    many = {"system": [{"cache_control": HOUR}] * 1000}
    assert len(params(many, path="/v1/messages")["cache_control"]) == 64


def test_what_the_client_gave_comes_first() -> None:
    given = {"do_remote_decode": False, "prompt_cache_key": "mine", "kvtier": {"tenant": 1}}
    got = params({"kv_transfer_params": given, "prompt_cache_key": "other",
                  "kvtier": {"tenant": 2}, "kv_cache_ttl_seconds": 5})
    assert got == {**given, "kv_cache_ttl_seconds": 5}


def test_a_session_header_names_the_conversation() -> None:
    assert params({"a": 1}, headers={"X-Session-Id": "chat-3"}) == {"prompt_cache_key": "chat-3"}
    assert params({}, headers={"x-session-id": "chat-3"}) == {"prompt_cache_key": "chat-3"}
    assert params({"prompt_cache_key": "mine"}, headers={"session_id": "chat-3"}) == {
        "prompt_cache_key": "mine"}


@pytest.mark.parametrize("body", [
    b"", b"{", b"[1]", b"7", b"null", b"\xff\xfe\xff", b'{"prompt_cache_key": ', b"{}",
    b'{"a":1e400}',
    b'{"kv_transfer_params": 3, "prompt_cache_key": "x"}', b"[" * 100_000,
    b'{"prompt_cache_key": ' + b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}"])
def test_other_bodies_are_passed_on_untouched(body: bytes) -> None:
    app, sent = request(body, parts=2)
    assert app.body == body and sent[0]["status"] == 200


def test_bytes_beside_the_hints_stay() -> None:
    body = b' \n{"x": 1e400, "y": 1.10, "prompt_cache_key": "\\ud83d"}\n'
    app, _ = request(body)
    assert app.body == (b'{"kv_transfer_params": {"prompt_cache_key": "\\ud83d"}, '
                        b'"x": 1e400, "y": 1.10, "prompt_cache_key": "\\ud83d"}\n')
    for encoding in ("utf-8-sig", "utf-16", "utf-32"):  # as the engine reads them
        app, _ = request('{"prompt_cache_key": "ä"}'.encode(encoding))
        assert json.loads(app.body)["kv_transfer_params"] == {"prompt_cache_key": "ä"}


def test_other_requests_are_not_read() -> None:
    body = b'{"prompt_cache_key": "x"}'
    for more in ({"path": "/v1/models"}, {"path": "/v1/embeddings"}, {"method": "GET"}):
        app, _ = request(body, **more)
        assert app.body == body
    app, _ = request(body, parts=3, leaves=True)
    assert app.body == body, "the client left: the engine sees all of it"


def test_long_bodies_are_passed_on_without_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_FRONT_BODY_BYTES", "1KiB")
    body = json.dumps({"prompt_cache_key": "x", "prompt": "p" * 2000}).encode()
    app, _ = request(body, parts=5)
    assert app.body == body
    monkeypatch.setenv("KVTIER_FRONT_TENANT", "key")
    app, sent = request(body, parts=5)
    assert sent[0]["status"] == 413 and b"KVTIER_FRONT_BODY_BYTES" in sent[1]["body"]
    assert app.scope == {}
    monkeypatch.setenv("KVTIER_FRONT_BODY_BYTES", "many")
    with pytest.raises(kvtier.InvalidError, match="KVTIER_FRONT_BODY_BYTES='many'"):
        request(body)


def test_the_tenant_is_that_of_the_api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_FRONT_TENANT", "key")

    def tenant(body: Any, **headers: str) -> int:
        return int(params(body, headers=headers)["kvtier"]["tenant"])

    claims = {"kv_transfer_params": {"kvtier": {"tenant": 5, "priority": 1}}}
    one, two = tenant({}, authorization="Bearer a"), tenant(claims, authorization="Bearer b")
    assert one != two and tenant(claims, authorization="Bearer a") == one
    assert params(claims, headers={"x-api-key": "a"})["kvtier"]["priority"] == 1
    assert 1 <= tenant({}) < 2**32 and tenant({"kv_transfer_params": {"kvtier": "x"}}) == tenant({})
    _, sent = request(b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    assert sent[0]["status"] == 413
    monkeypatch.setenv("KVTIER_FRONT_TENANT", "token")
    with pytest.raises(kvtier.InvalidError, match="client or key"):
        request(b"{}")


def test_a_client_cannot_change_the_tenant_of_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_FRONT_TENANT", "key")

    def tenant(**headers: str) -> int:
        return int(params({}, headers=headers)["kvtier"]["tenant"])

    own = tenant(Authorization="Bearer a")
    assert tenant(**{"x-api-key": "other", "authorization": "Bearer a"}) == own
    assert tenant(**{"authorization": "bEARER a"}) == own, "vLLM ignores the case"
    assert tenant(**{"x-api-key": "other"}) not in (own, tenant())


@pytest.mark.parametrize("path", ["/v1/chat/completions/batch", "/v1/other", "/"])
def test_a_tenant_is_replaced_on_every_path(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    claims = {"kv_transfer_params": {"kvtier": {"tenant": 5, "priority": 1}}, "a": 1}
    assert params(claims, path=path) == claims["kv_transfer_params"]
    monkeypatch.setenv("KVTIER_FRONT_TENANT", "key")
    got = params(claims, path=path)["kvtier"]
    assert got["tenant"] != 5 and got["priority"] == 1
    assert params({"prompt_cache_key": "x"}, path=path) is None
    speech = b"x" * 100
    app, _ = request(speech, path=path, headers={"content-type": "multipart/form-data; boundary=x"})
    assert app.body == speech


def test_lifespan_and_websockets_are_passed_on() -> None:
    from kvtier_vllm.front import HintsMiddleware

    app = App()

    async def nothing(*_: Any) -> None:
        return None

    asyncio.run(HintsMiddleware(app)({"type": "lifespan"}, nothing, nothing))
    assert app.scope == {"type": "lifespan"}
