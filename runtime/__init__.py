"""Outrider: an asynchronous runtime for speculative decoding on MLX.

async with runtime.open("path-or-hub-id/target", draft="path-or-hub-id/draft") as rt:
    async for token in rt.stream("def quicksort(items):", max_tokens=200):
        print(token.text, end="", flush=True)
"""

from __future__ import annotations

import os
import sys
import warnings
from importlib import import_module

from runtime.file_limit import guard_import
from runtime.loading import mlx_environment
from runtime.name_collisions import check_packages

# Before anything is imported from these packages.
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
    RankError,
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

TYPE_CHECKING = False  # as `typing.TYPE_CHECKING`; importing `typing` takes a while
if TYPE_CHECKING:
    from typing import Any

    from actors.distributed.joining import join_ranks
    from actors.distributed.rank_group import RankGroup
    from protocol.logits_processors import Checkpointed, LogitsProcessor, Stateless, stateless
    from protocol.messages import Likelihood
    from protocol.prices import Estimates
    from protocol.scores import Score, ScoredToken, TopLogprob
    from protocol.session_state import Commit
    from protocol.settings import Settings
    from protocol.statistics import Statistics
    from protocol.trace import Event, Instant, Share, Span
    from runtime import aio, sync
    from runtime.engine.opening import keep_open, open, stream
    from runtime.engine.runtime import Health, Runtime
    from runtime.generation.conversation import Conversation
    from runtime.generation.grammar import Grammar
    from runtime.generation.many_prompts import Completions
    from runtime.generation.reasoning import ReasoningTracker
    from runtime.generation.token_stream import Completion, TokenStream
    from runtime.generation.tokens import Token
    from runtime.generation.tool_calls.events import (
        CallArguments,
        CallBegan,
        CallBroken,
        CallEnded,
        ReasoningPart,
        TextPart,
        ToolCall,
    )
    from runtime.loading.demo import DEMO_DRAFT, DEMO_TARGET, DEMO_TRAINED_DRAFT
    from runtime.loading.drafters import Suggestion, suggest_draft
    from runtime.loading.model_spec import ModelSpec
    from runtime.ranks.following import follow
    from runtime.sync import generate_sync, open_sync

    __version__: str
    serve = keep_open

__all__ = [
    "DEMO_DRAFT", "DEMO_TARGET", "DEMO_TRAINED_DRAFT", "CallArguments", "CallBegan", "CallBroken", "CallEnded",
    "Checkpointed", "Commit", "Completion", "Completions", "Conversation", "ConversationBusyError",
    "DrafterAttachedError", "Estimates", "Event", "Grammar", "Health", "Instant", "Likelihood",
    "LogitsProcessor", "ModelError", "ModelSpec", "NoRuntimeError", "NotANumberError", "OutriderError",
    "ProcessorError", "PromptError", "PromptTooLongError", "ProtocolError", "RankError", "RankGroup",
    "ReasoningPart", "ReasoningTracker", "RewindError", "Runtime", "RuntimeBrokenError", "RuntimeClosedError",
    "Score", "ScoredToken", "SessionFileError", "Settings", "SettingsError", "Share", "Span", "Stateless",
    "Statistics", "StreamBusyError", "StreamFailedError", "Suggestion", "TextPart", "Token", "TokenStream",
    "ToolCall", "TopLogprob", "VocabularyMismatchError", "WrongEventLoopError", "aio", "follow",
    "generate_sync", "join_ranks", "keep_open", "open", "open_sync", "stateless", "stream", "suggest_draft",
    "sync",
]  # fmt: skip

# Public names are imported when they are first used, for three reasons. The models' libraries take seconds to import,
# and `outrider --help` must not wait for them. A BLAS can only replace MLX's own before mlx is imported. The command
# line handles Ctrl-C only from `runtime/__main__.py` on, which runs after this module. No module of this package may
# have the name of a public function: importing it would replace the function.
_MODULES = ("aio", "sync")
# Public names by the module that has them.
_HOMES = {
    "actors.distributed.joining": "join_ranks",
    "actors.distributed.rank_group": "RankGroup",
    "protocol.messages": "Likelihood",
    "protocol.prices": "Estimates",
    "protocol.scores": "Score ScoredToken TopLogprob",
    "protocol.session_state": "Commit",
    "protocol.statistics": "Statistics",
    "runtime.engine.opening": "keep_open open stream",
    "runtime.engine.runtime": "Health Runtime",
    "runtime.generation.conversation": "Conversation",
    "runtime.generation.grammar": "Grammar",
    "runtime.generation.many_prompts": "Completions",
    "runtime.generation.reasoning": "ReasoningTracker",
    "runtime.generation.tokens": "Token",
    "runtime.generation.token_stream": "Completion TokenStream",
    "runtime.generation.tool_calls.events": "CallArguments CallBegan CallBroken CallEnded ReasoningPart "
    "TextPart ToolCall",
    "runtime.loading.drafters": "Suggestion suggest_draft",
    "runtime.ranks.following": "follow",
    "runtime.sync": "generate_sync open_sync",
}
# The same for modules that do not import mlx.
_LIGHT_HOMES = {
    "protocol.logits_processors": "Checkpointed LogitsProcessor Stateless stateless",
    "protocol.settings": "Settings",
    "protocol.trace": "Event Instant Share Span",
    "runtime.loading.demo": "DEMO_DRAFT DEMO_TARGET DEMO_TRAINED_DRAFT",
    "runtime.loading.model_spec": "ModelSpec",
}

mlx_environment.tune()
guard_import()
if os.environ.get("OUTRIDER_BLAS"):
    from runtime.loading import blas

    blas.load_from_environment()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name == "serve":
        warnings.warn(
            "runtime.serve is deprecated and has become runtime.keep_open, with the same arguments; "
            "for the HTTP server run `outrider serve`",
            DeprecationWarning,
            stacklevel=2,
        )
        name = "keep_open"
    if (home := _home(name, _LIGHT_HOMES)) is None:
        if (home := _home(name, _HOMES)) is None and name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # This module was imported above if the environment names a BLAS; otherwise there is nothing to check.
        if (loaded_blas := sys.modules.get("runtime.loading.blas")) is not None:
            loaded_blas.check_environment()
        if home is None:
            return import_module(f"runtime.{name}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def _home(name: str, homes: dict[str, str]) -> str | None:
    return next((home for home, names in homes.items() if name in names.split()), None)


def _version() -> str:
    """The version of the installed package; looked up on use, since that searches all installed packages."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("outrider")
    except PackageNotFoundError:
        return "0+unknown"  # run from a source tree


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
