"""Outrider's exceptions, by whose fault they are. Each message says the value, the bound and the remedy."""

from __future__ import annotations


class OutriderError(Exception):
    """Base of all of Outrider's exceptions."""


# --- the caller's fault ---------------------------------------------------------------------------


class SettingsError(OutriderError, ValueError):
    """A setting or option is unknown, of the wrong type, or out of its range. Raised before any model work.

    Attributes:
        is_of_file: whether the option stands in a file, where it has its name in Python.
    """

    is_of_file = False


class PromptError(OutriderError, ValueError):
    """A prompt is empty, too long for the model, cannot be encoded, or has ids outside the vocabulary."""


class PromptTooLongError(PromptError):
    """A prompt fills the target's context, so that no token can be generated."""

    @classmethod
    def by(cls, num_tokens: int, most: int, bound: str) -> PromptTooLongError:
        """The error for a prompt of more than `most` tokens, in words by which clients know that a context is full.

        Args:
            bound: the reason for `most`, as a clause.
        """
        return cls(f"prompt is too long: {num_tokens} tokens > {most} maximum; {bound}; shorten it")


class ModelError(OutriderError):
    """A model cannot be loaded or used: for example, the path does not exist or the checkpoint is damaged."""


class VocabularyMismatchError(ModelError):
    """Target and draft model have different vocabularies, and one cannot be translated to the other."""


class SessionFileError(OutriderError):
    """A saved session cannot be written or read, or belongs to other models. Nothing was changed."""


class NoRuntimeError(OutriderError):
    """`runtime.stream` was called outside a `runtime.open` block."""


class WrongEventLoopError(OutriderError, RuntimeError):
    """An object was used under another event loop than its own: trio instead of asyncio, or another asyncio loop."""


class DrafterAttachedError(OutriderError):
    """A drafter cannot be attached, because the runtime already has one."""


class StreamBusyError(OutriderError):
    """A task asked a stream for a token while another task was waiting for one."""


class ConversationBusyError(OutriderError):
    """A conversation cannot go on or be reset while one of its answers is being generated."""


class RuntimeClosedError(OutriderError):
    """You closed the runtime or the stream; it gives nothing more."""


class ProcessorError(OutriderError):
    """Your logits processor or sampler raised (see the cause), returned an unusable value, or allowed no token."""


# --- nobody's fault: a model or a machine failed --------------------------------------------------


class RuntimeBrokenError(OutriderError):
    """The target model failed, which closed the runtime; the original error is the cause."""


class RankError(OutriderError):
    """A rank of a sharded target is missing, has ended, hangs, or differs from the others; the message names it."""


class StreamFailedError(OutriderError):
    """A job of this stream failed; the original error is the cause. The model works, and other streams go on."""


class MemoryLimitError(OutriderError):
    """`memory_limit` has no room for more of this text, not even after other streams have made room for it."""


class NotANumberError(OutriderError):
    """A model's logits are NaN or infinite, so that no token can be chosen. It ends that stream alone."""


# --- our fault: each of these is a bug in Outrider ------------------------------------------------


class ProtocolError(OutriderError):
    """A message or transition that the protocol does not allow. The session is not used again."""


class RewindError(OutriderError):
    """A cache does not hold the tokens that the session state says it holds."""
