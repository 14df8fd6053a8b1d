"""The project's own exceptions, split by whose fault they are.

Each message says the value, the bound and the remedy.
"""

from __future__ import annotations


class OutriderError(Exception):
    """Base of every exception that Outrider raises on its own account."""


# --- the caller's: raised before any model work ---------------------------------------------------


class SettingsError(OutriderError, ValueError):
    """A setting or option is unknown, of the wrong type, or out of its range."""


class PromptError(OutriderError, ValueError):
    """A prompt is empty, too long for the model, not encodable, or has ids outside the vocabulary."""


class PromptTooLongError(PromptError):
    """A prompt leaves no room in the target's context."""


class ModelError(OutriderError):
    """A model cannot be loaded or cannot be used: no such path, a damaged checkpoint."""


class VocabularyMismatchError(ModelError):
    """Target and draft do not mean the same tokens by the same ids."""


class SessionFileError(OutriderError):
    """A saved session cannot be written, cannot be read, or belongs to other models; nothing was changed."""


class NoRuntimeError(OutriderError):
    """`runtime.stream` was called where no `runtime.open` is in force."""


class WrongEventLoopError(OutriderError, RuntimeError):
    """Something was used under another event loop than the one it is for: trio for asyncio, or another asyncio loop."""


class DrafterAttachedError(OutriderError):
    """A drafter was to be attached to a runtime that has one."""


class StreamBusyError(OutriderError):
    """A second task asked a stream for a token while a first was waiting for one."""


class ConversationBusyError(OutriderError):
    """A conversation was to go on, or be reset, while an answer in it was under way."""


class RuntimeClosedError(OutriderError):
    """The runtime or the stream was closed by you; nothing more comes from it."""


class ProcessorError(OutriderError):
    """A logits processor or sampler of yours raised (the cause), returned something of no use, or left no token."""


# --- what happened to you -------------------------------------------------------------------------


class RuntimeBrokenError(OutriderError):
    """The target model failed and took the runtime with it; the original error is the cause."""


class StreamFailedError(OutriderError):
    """A job of this stream failed, of the error that is the cause; the model works, and other streams go on."""


class NotANumberError(OutriderError):
    """A model's logits are NaN or infinite, so that no token can be chosen by them; it ends that stream alone."""


# --- ours: one of these in the wild is a bug in Outrider ------------------------------------------


class ProtocolError(OutriderError):
    """A message or transition that the protocol does not have. The session is not used again."""


class RewindError(OutriderError):
    """A cache holds something other than what the session's books say."""
