"""Outrider: an asynchronous runtime for speculative decoding on MLX.

async with runtime.open("path-or-hub-id/target", draft="path-or-hub-id/draft") as rt:
    async for token in rt.stream("def quicksort(items):", max_tokens=200):
        print(token.text, end="", flush=True)
"""

from protocol.errors import (
    ModelError,
    NoRuntimeError,
    OutriderError,
    PromptError,
    ProtocolError,
    RewindError,
    RuntimeBrokenError,
    RuntimeClosedError,
    SettingsError,
    StreamBusyError,
    VocabularyMismatchError,
)
from protocol.settings import Settings
from protocol.statistics import Statistics
from protocol.trace import Event, Instant, Span
from runtime.demo import DEMO_DRAFT, DEMO_TARGET
from runtime.engine import Runtime, open, serve, stream
from runtime.stream import Completion, Token, TokenStream
from runtime.sync import generate_sync

__all__ = [
    "DEMO_DRAFT",
    "DEMO_TARGET",
    "Completion",
    "Event",
    "Instant",
    "ModelError",
    "NoRuntimeError",
    "OutriderError",
    "PromptError",
    "ProtocolError",
    "RewindError",
    "Runtime",
    "RuntimeBrokenError",
    "RuntimeClosedError",
    "Settings",
    "SettingsError",
    "Span",
    "Statistics",
    "StreamBusyError",
    "Token",
    "TokenStream",
    "VocabularyMismatchError",
    "generate_sync",
    "open",
    "serve",
    "stream",
]
