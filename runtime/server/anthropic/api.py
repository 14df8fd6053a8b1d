"""Anthropic's messages, as `runtime.server.answers` serves them."""

from __future__ import annotations

from runtime.server.answers.api import Answer, Api
from runtime.server.answers.serializer import Serializer
from runtime.server.anthropic.requests import MessagesRequest, parse_chat
from runtime.server.anthropic.serializer import MessageSerializer
from runtime.server.openai.requests import ChatRequest, Request


class Messages(Api[ChatRequest]):
    """`/v1/messages`."""

    def parse(self, body: bytes) -> ChatRequest:
        return parse_chat(MessagesRequest, body)

    def request(self, body: ChatRequest) -> Request:
        return body

    def serializer(self, body: ChatRequest, answer: Answer) -> Serializer:
        return MessageSerializer(body, answer)
