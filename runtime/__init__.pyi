"""The public names, and where each is defined. `__init__.py` imports a name from here when it is first used."""

from actors.distributed.joining import join_ranks
from protocol.errors import (
    ConversationBusyError,
    DrafterAttachedError,
    MemoryLimitError,
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
from protocol.logits_processors import LogitsProcessor, stateless
from protocol.scores import Score, TopLogprob
from protocol.settings import Settings
from protocol.statistics import Statistics
from protocol.trace import Event, Instant, Span
from runtime import aio, sync
from runtime.engine.opening import keep_open, open, stream
from runtime.engine.runtime import Health, Runtime
from runtime.generation.conversation import Conversation
from runtime.generation.grammar import Grammar
from runtime.generation.many_prompts import Completions
from runtime.generation.token_stream import Completion, TokenStream
from runtime.generation.tokens import Token
from runtime.generation.tool_calls.events import Delta, ToolCall
from runtime.loading.demo import DEMO_DRAFT, DEMO_TARGET, DEMO_TRAINED_DRAFT
from runtime.loading.drafters import suggest_draft
from runtime.loading.model_spec import ModelSpec
from runtime.ranks.following import follow
from runtime.sync import generate_sync, open_sync

__all__ = [
    "DEMO_DRAFT", "DEMO_TARGET", "DEMO_TRAINED_DRAFT", "Completion", "Completions", "Conversation",
    "ConversationBusyError", "Delta", "DrafterAttachedError", "Event", "Grammar", "Health", "Instant",
    "LogitsProcessor", "MemoryLimitError", "ModelError", "ModelSpec", "NoRuntimeError", "NotANumberError",
    "OutriderError", "ProcessorError", "PromptError", "PromptTooLongError", "ProtocolError", "RankError",
    "RewindError", "Runtime", "RuntimeBrokenError", "RuntimeClosedError", "Score", "SessionFileError", "Settings",
    "SettingsError", "Span", "Statistics", "StreamBusyError", "StreamFailedError", "Token", "TokenStream",
    "ToolCall", "TopLogprob", "VocabularyMismatchError", "WrongEventLoopError", "aio", "follow", "generate_sync",
    "join_ranks", "keep_open", "open", "open_sync", "stateless", "stream", "suggest_draft", "sync",
]  # fmt: skip

__version__: str
