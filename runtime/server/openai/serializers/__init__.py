"""Serializers: from streams' tokens to the response bodies and chunks of `runtime.server.openai.responses`."""

from runtime.server.openai.serializers.chats import ChatSerializer
from runtime.server.openai.serializers.completions import CompletionSerializer

__all__ = ["ChatSerializer", "CompletionSerializer"]
