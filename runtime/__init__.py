"""Outrider: an asynchronous runtime for speculative decoding on MLX.

async with runtime.open("path-or-hub-id/target", draft="path-or-hub-id/draft") as rt:
    async for token in rt.stream("def quicksort(items):", max_tokens=200):
        print(token.text, end="", flush=True)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
from protocol.processors import Checkpointed, LogitsProcessor, stateless
from protocol.settings import Settings
from protocol.trace import Event, Instant, Span
from runtime import blas
from runtime.demo import DEMO_DRAFT, DEMO_TARGET

if TYPE_CHECKING:
    from protocol.statistics import Statistics
    from runtime import aio, sync
    from runtime.conversation import Conversation
    from runtime.engine import Runtime, stream
    from runtime.grammar import Grammar
    from runtime.health import Health
    from runtime.many import Completions, TokenStreams
    from runtime.opening import open, serve
    from runtime.reading import Token, TopLogprob
    from runtime.streaming import Completion, TokenStream
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
    "sync",
]

# What needs the models' libraries is imported when it is first asked for: they take a second, which
# `outrider --help` and a command line with a mistake in it need not wait for; and a BLAS can only be put in
# front of MLX's own before mlx is imported. No module of this package
# may have the name of one of these: the import system would put it in the function's place.
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

blas.obey_environment()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _HOMES and name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    blas.check()
    if name in _MODULES:
        return import_module(f"runtime.{name}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
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
