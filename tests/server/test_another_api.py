"""An API of one's own is a package: a translation, a serializer and operations; here in Ollama's form, line by line."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import trio
from asgi import HELLO, JSON, Served, direct, simulated_server
from pydantic import Field
from typing_extensions import TypedDict

from runtime.server import app
from runtime.server.answers.api import Event, Serializer
from runtime.server.answers.body import parse_request
from runtime.server.answers.chat import ChatBody
from runtime.server.answers.endpoint import Endpoint, Parsed
from runtime.server.answers.request import GenerationRequest
from runtime.server.errors import ErrorResponse
from runtime.server.operations import ErrorForm, Operation


class OllamaError(TypedDict):
    error: str


class OllamaChat(TypedDict):
    model: str
    message: dict[str, str]
    done: bool


class OllamaRequest(ChatBody):
    messages: list[dict[str, Any]] = Field(min_length=1)
    stream: bool = True
    options: dict[str, Any] = {}  # noqa: RUF012

    def generation(self) -> GenerationRequest:
        chat = self.chat_of(self.messages, (), None, None)
        limit = self.options.get("num_predict")
        return self.request_of(prompt_field="messages", chat=chat, format=None, num_logprobs=None, max_tokens=limit)


class Line(Event):
    def encoded(self) -> str:
        return f"{json.dumps(self.data)}\n"


class OllamaSerializer(Serializer):
    content_type = b"application/x-ndjson"
    keep_alive = "\n"

    def _said(self, tokens: Sequence[Any], *, done: bool) -> dict[str, Any]:
        text = "".join(part.text for part in self._parts(tokens))
        return {"model": self._answer.model, "message": {"role": "assistant", "content": text}, "done": done}

    def whole(self, tokens: Sequence[Any], statistics: Any) -> Mapping[str, Any]:
        return self._said(tokens, done=True)

    def first_events(self, statistics: Any) -> Sequence[Event]:
        return ()

    def events(self, tokens: Sequence[Any], statistics: Any) -> Sequence[Event]:
        return [Line(self._said(tokens, done=False))]

    def last_events(self, statistics: Any) -> Sequence[Event]:
        return [Line(self._said([], done=True))]

    def error_events(self, error: ErrorResponse) -> Sequence[Event]:
        return [Line({"error": error.detail["message"]})]


def parse(body: bytes) -> Parsed:
    return parse_request(OllamaRequest, body).generation(), OllamaSerializer


CHAT = Operation(
    "/api/chat",
    lambda context: Endpoint(context, parse),
    "ollama_chat",
    "Answer a chat in Ollama's form",
    OllamaChat,
    OllamaRequest,
    {"messages": HELLO["messages"]},
    errors=ErrorForm(OllamaError, lambda error: {"error": error.detail["message"]}),
)


def test_an_api_needs_nothing_of_the_others(monkeypatch):
    monkeypatch.setattr(app, "OPERATIONS", (*app.OPERATIONS, CHAT))
    asked = {"messages": HELLO["messages"], "options": {"num_predict": 12}}
    keyed = {**JSON, "authorization": "Bearer s3cret"}

    async def test(server: Served) -> None:
        expected = (await direct(server, HELLO, max_tokens=12)).text
        streamed = await server.ask("/api/chat", asked, headers=keyed, method="POST")
        assert streamed.headers["content-type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in streamed.body.splitlines() if line]
        assert "".join(line["message"]["content"] for line in lines) == expected
        assert [line["done"] for line in lines].count(True) == lines[-1]["done"] == 1
        whole = await server.ask("/api/chat", {**asked, "stream": False}, headers=keyed, method="POST")
        assert whole.json["message"]["content"] == expected
        # Its responses have no ids by which they could be told apart.
        ask = partial(server.ask, "/api/chat", asked, headers=keyed, method="POST")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            nursery.start_soon(ask)
        metrics = (await server.ask("/metrics", method="GET", headers=keyed)).body.decode()
        assert 'outrider_requests_total{outcome="failed"} 0.0' in metrics
        assert 'outrider_requests_total{outcome="finished"} 4.0' in metrics
        refused = await server.ask("/api/chat", {"messages": []}, headers=keyed, method="POST")
        assert (refused.status, refused.json) == (400, {"error": "messages must be a list of at least 1, got []"})
        assert (await server.ask("/api/chat", asked, method="POST")).status == 401
        described = (await server.ask("/openapi.json", method="GET")).json["paths"]["/api/chat"]["post"]
        assert described["operationId"] == "ollama_chat"

    simulated_server(test, api_key="s3cret")
