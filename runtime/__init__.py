"""Outrider: an asynchronous runtime for speculative decoding on MLX.

async with runtime.open("path-or-hub-id/target", draft="path-or-hub-id/draft") as rt:
    async for token in rt.stream("def quicksort(items):", max_tokens=200):
        print(token.text, end="", flush=True)
"""

from __future__ import annotations

import os
from importlib import import_module

from runtime.shadows import check_packages

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

    from protocol.processors import Checkpointed, LogitsProcessor, stateless
    from protocol.settings import Settings
    from protocol.statistics import Statistics
    from protocol.trace import Event, Instant, Span
    from runtime import aio, sync
    from runtime.conversation import Conversation
    from runtime.demo import DEMO_DRAFT, DEMO_TARGET
    from runtime.engine import Runtime, stream
    from runtime.grammar import Grammar
    from runtime.health import Health
    from runtime.many import Completions, TokenStreams
    from runtime.opening import open, serve
    from runtime.reading import Token, TopLogprob
    from runtime.streaming import Completion, TokenStream
    from runtime.suggestions import Suggestion, suggest_draft
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
    "Runtime": "runtime.engine",
    "open": "runtime.opening",
    "serve": "runtime.opening",
    "stream": "runtime.engine",
    "Completions": "runtime.many",
    "Grammar": "runtime.grammar",
    "Health": "runtime.health",
    "Completion": "runtime.streaming",
    "Conversation": "runtime.conversation",
    "Token": "runtime.reading",
    "TokenStream": "runtime.streaming",
    "TokenStreams": "runtime.many",
    "TopLogprob": "runtime.reading",
    "generate_sync": "runtime.sync",
    "open_sync": "runtime.sync",
    "Statistics": "protocol.statistics",
}
# Of these, none imports mlx.
_LIGHT_MODULES = ("blas",)
_LIGHT_HOMES = {
    "Checkpointed": "protocol.processors",
    "LogitsProcessor": "protocol.processors",
    "stateless": "protocol.processors",
    "Settings": "protocol.settings",
    "Event": "protocol.trace",
    "Instant": "protocol.trace",
    "Span": "protocol.trace",
    "Suggestion": "runtime.suggestions",
    "suggest_draft": "runtime.suggestions",
    "DEMO_DRAFT": "runtime.demo",
    "DEMO_TARGET": "runtime.demo",
}

if os.environ.get("OUTRIDER_BLAS"):
    from runtime import blas

    blas.obey_environment()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in _LIGHT_MODULES:
        return import_module(f"runtime.{name}")
    if name in _LIGHT_HOMES:
        home = _LIGHT_HOMES[name]
    elif name in _HOMES or name in _MODULES:
        import_module("runtime.blas").check()
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
