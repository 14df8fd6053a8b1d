"""OpenAI's completions and chats, and Mistral's fill-in-the-middle, as `runtime.server.answers` serves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from runtime.server.answers.api import Answer, Api
from runtime.server.answers.choices import Choice
from runtime.server.answers.serializer import Event, Serializer
from runtime.server.openai.choices import last_events_of_choices, whole_of_choices
from runtime.server.openai.requests import ChatRequest, CompletionRequest, FimRequest, Request, parse_request
from runtime.server.openai.serializers import ChatSerializer, CompletionSerializer

R = TypeVar("R", bound=Request)


class _OpenAI(Api[R]):
    """An API whose responses may have several choices."""

    request_type: type[R]

    def parse(self, body: bytes) -> R:
        return parse_request(self.request_type, body)

    def request(self, body: R) -> Request:
        return body

    def whole(self, body: R, choices: Sequence[Choice]) -> Mapping[str, Any]:
        return whole_of_choices(body, choices)

    def last_events(self, choices: Sequence[Choice]) -> Sequence[Event]:
        return last_events_of_choices(choices)


class Completions(_OpenAI[CompletionRequest]):
    """`/v1/completions`."""

    request_type = CompletionRequest

    def serializer(self, body: CompletionRequest, answer: Answer) -> Serializer:
        return CompletionSerializer(body, answer)


class Chats(_OpenAI[ChatRequest]):
    """`/v1/chat/completions`."""

    request_type = ChatRequest

    def serializer(self, body: ChatRequest, answer: Answer) -> Serializer:
        return ChatSerializer(body, answer)


class Fims(_OpenAI[FimRequest]):
    """`/v1/fim/completions`: a completion's request, and a chat's response."""

    request_type = FimRequest

    def serializer(self, body: FimRequest, answer: Answer) -> Serializer:
        return ChatSerializer(body, answer)
