"""Outrider: an asynchronous runtime for speculative decoding on MLX.

async with runtime.open("path-or-hub-id/target", draft="path-or-hub-id/draft") as rt:
    async for token in rt.stream("def quicksort(items):", max_tokens=200):
        print(token.text, end="", flush=True)
"""

from __future__ import annotations

import os
from importlib import import_module

from runtime.name_collisions import check_packages

# Before anything is imported from them.
check_packages("protocol", "actors")

from protocol.errors import (
    ConversationBusyError,
    DrafterAttachedError,
    ModelError,
    NoRuntimeError,
    NotANumberError,
    OutriderError,
    ProcessorError,
    PromptError,
    PromptTooLongError,
    ProtocolError,
    RewindError,
    RuntimeBrokenError,
    RuntimeClosedError,
    SessionFileError,
    SettingsError,
    StreamBusyError,
    StreamFailedError,
    VocabularyMismatchError,
    WrongEventLoopError,
)

TYPE_CHECKING = False  # typing's, which takes a while to import
if TYPE_CHECKING:
    from typing import Any

    from protocol.logits_processors import Checkpointed, LogitsProcessor, stateless
    from protocol.settings import Settings
    from protocol.statistics import Statistics
    from protocol.trace import Event, Instant, Span
    from runtime import aio, sync
    from runtime.doctor.draft_suggestions import Suggestion, suggest_draft
    from runtime.engine.health import Health
    from runtime.engine.opening import open, serve
    from runtime.engine.runtime import Runtime, stream
    from runtime.generation.conversation import Conversation
    from runtime.generation.grammar import Grammar
    from runtime.generation.many_prompts import Completions, TokenStreams
    from runtime.generation.token_reader import Token, TopLogprob
    from runtime.generation.token_stream import Completion, TokenStream
    from runtime.loading.demo import DEMO_DRAFT, DEMO_TARGET
    from runtime.sync import generate_sync, open_sync

    __version__: str

__all__ = [
    "DEMO_DRAFT",
    "DEMO_TARGET",
    "Checkpointed",
    "Completion",
    "Completions",
    "Conversation",
    "ConversationBusyError",
    "DrafterAttachedError",
    "Event",
    "Grammar",
    "Health",
    "Instant",
    "LogitsProcessor",
    "ModelError",
    "NoRuntimeError",
    "NotANumberError",
    "OutriderError",
    "ProcessorError",
    "PromptError",
    "PromptTooLongError",
    "ProtocolError",
    "RewindError",
    "Runtime",
    "RuntimeBrokenError",
    "RuntimeClosedError",
    "SessionFileError",
    "Settings",
    "SettingsError",
    "Span",
    "Statistics",
    "StreamBusyError",
    "StreamFailedError",
    "Suggestion",
    "Token",
    "TokenStream",
    "TokenStreams",
    "TopLogprob",
    "VocabularyMismatchError",
    "WrongEventLoopError",
    "aio",
    "generate_sync",
    "open",
    "open_sync",
    "serve",
    "stateless",
    "stream",
    "suggest_draft",
    "sync",
]

# Whatever takes time to import is imported when it is first asked for. The models' libraries take seconds, which
# `outrider --help` and a command line with a mistake in it need not wait for; a BLAS can only be put in front of
# MLX's own before mlx is imported; and the command line answers Ctrl-C from `runtime/__main__.py` on, which runs after
# this. No module of this package may have the name of one of these: the import system would put it in the function's
# place.
_MODULES = ("aio", "sync")
_HOMES = {
    "Runtime": "runtime.engine.runtime",
    "open": "runtime.engine.opening",
    "serve": "runtime.engine.opening",
    "stream": "runtime.engine.runtime",
    "Completions": "runtime.generation.many_prompts",
    "Grammar": "runtime.generation.grammar",
    "Health": "runtime.engine.health",
    "Completion": "runtime.generation.token_stream",
    "Conversation": "runtime.generation.conversation",
    "Token": "runtime.generation.token_reader",
    "TokenStream": "runtime.generation.token_stream",
    "TokenStreams": "runtime.generation.many_prompts",
    "TopLogprob": "runtime.generation.token_reader",
    "generate_sync": "runtime.sync",
    "open_sync": "runtime.sync",
    "Statistics": "protocol.statistics",
}
# Of these, none imports mlx.
_LIGHT_HOMES = {
    "Checkpointed": "protocol.logits_processors",
    "LogitsProcessor": "protocol.logits_processors",
    "stateless": "protocol.logits_processors",
    "Settings": "protocol.settings",
    "Event": "protocol.trace",
    "Instant": "protocol.trace",
    "Span": "protocol.trace",
    "Suggestion": "runtime.doctor.draft_suggestions",
    "suggest_draft": "runtime.doctor.draft_suggestions",
    "DEMO_DRAFT": "runtime.loading.demo",
    "DEMO_TARGET": "runtime.loading.demo",
}

if os.environ.get("OUTRIDER_BLAS"):
    from runtime.loading import blas

    blas.load_from_environment()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in _LIGHT_HOMES:
        home = _LIGHT_HOMES[name]
    elif name in _HOMES or name in _MODULES:
        import_module("runtime.loading.blas").check_environment()
        if name in _MODULES:
            return import_module(f"runtime.{name}")
        home = _HOMES[name]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def _version() -> str:
    """Of the installed package; looked up when it is asked for, since that goes through all that is installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("outrider")
    except PackageNotFoundError:
        return "0+unknown"  # run from a source tree


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
