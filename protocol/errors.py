"""Outrider's exceptions, by whose fault they are. Each message says the value, the bound and the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from types import MappingProxyType
from typing import Any, Self

from protocol.reprs import shown


class Wording:
    """How a face writes the fields of messages. This one is Python's, for callers of the library.

    Attributes:
        words: what has another name in each face.
    """

    words: Mapping[str, str] = MappingProxyType({"none": "None", "save": "Conversation.save", "reset": "reset"})

    def argument(self, name: str) -> str:
        """The name of a setting or option."""
        return name

    def assignment(self, name: str, value: object) -> str:
        """A setting or option with a value."""
        return f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}"


class Message(str):
    """The message of an error, of which some words are fields that each face writes for its readers.

    In the template, `{option}` stands for the setting or option that the message is about, `{value}` for the value that
    was given, and `{name}` for the field of that name; if there is none, for the argument of that name, and `{name=}`
    for the argument with its value. `{none}`, `{save}` and `{reset}` are words of the `Wording`.
    """

    template: str
    fields: dict[str, Any]

    def __new__(cls, template: str, /, **fields: Any) -> Self:
        message = super().__new__(cls, _worded(template, fields, Wording()))
        message.template, message.fields = template, fields
        return message

    def __getnewargs_ex__(self) -> tuple[tuple[str], dict[str, Any]]:
        return (self.template,), self.fields


def worded(said: object, wording: Wording) -> str:
    """A message, an error or a field of a message in the words of a face."""
    if isinstance(said, OutriderError) and said.args:
        said = said.args[0]
    return _worded(said.template, said.fields, wording) if isinstance(said, Message) else str(said)


def _worded(template: str, fields: dict[str, Any], wording: Wording) -> str:
    said: list[str] = []
    for text, name, _, _ in Formatter().parse(template):
        said.append(text)
        if name is None:
            continue
        if name.endswith("="):
            said.append(wording.assignment(name[:-1], fields[name[:-1]]))
        elif name == "option":
            said.append(wording.argument(fields[name]))
        elif name == "value":
            said.append(wording.words["none"] if fields[name] is None else shown(fields[name]))
        elif name in wording.words:
            said.append(wording.words[name])
        elif name in fields and f"{{{name}=}}" not in template:
            said.append(worded(fields[name], wording))
        else:
            said.append(wording.argument(name))
    return "".join(said)


class OutriderError(Exception):
    """Base of all of Outrider's exceptions."""

    @classmethod
    def of(cls, template: str, /, **fields: Any) -> Self:
        """An error with the `Message` of a template and its fields."""
        return cls(Message(template, **fields))

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the message: `option`, `value`, `bound` and `remedy` where a value is not allowed."""
        return self.args[0].fields if self.args and isinstance(self.args[0], Message) else {}


# --- the caller's fault ---------------------------------------------------------------------------


class SettingsError(OutriderError, ValueError):
    """A setting or option is unknown, of the wrong type, or out of its range. Raised before any model work."""


class PromptError(OutriderError, ValueError):
    """A prompt is empty, too long for the model, cannot be encoded, or has ids outside the vocabulary."""


class PromptTooLongError(PromptError):
    """A prompt fills the target's context, so that no token can be generated."""


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


class NotANumberError(OutriderError):
    """A model's logits are NaN or infinite, so that no token can be chosen. It ends that stream alone."""


# --- our fault: each of these is a bug in Outrider ------------------------------------------------


class ProtocolError(OutriderError):
    """A message or transition that the protocol does not allow. The session is not used again."""


class RewindError(OutriderError):
    """A cache does not hold the tokens that the session state says it holds."""
