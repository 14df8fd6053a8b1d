"""What is known of a tokenizer's chat template, and the template itself as a function."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import attrs

from runtime.generation.chat_template.probes import Needs, tried
from runtime.generation.chat_template.repairs import Chat, Message

# Texts by which the places of messages in a rendered text are found.
USER_MARK, ANSWER_MARK = "userone", "answerone"
QUESTION: Message = {"role": "user", "content": USER_MARK}


@attrs.frozen
class ThinkingSwitch:
    """The variable with which a template switches reasoning: its name, and its values for on and off."""

    name: str
    on: Any
    off: Any


@attrs.frozen
class AnswerStart:
    """How a template begins an answer.

    Attributes:
        header: the text before the answer, up to its reasoning.
        prompts: that text with what the template opens or closes for the answer, for each position of its switch.
    """

    header: str
    prompts: tuple[str, ...]


@attrs.define
class KnownTemplate:
    """What is known of one tokenizer's template."""

    template: Any
    needs: dict[bool, Needs] = attrs.field(factory=dict)  # by whether there are tools
    efforts: dict[str, str | None] = attrs.field(factory=dict)
    switches: list[ThinkingSwitch | None] = attrs.field(factory=list)  # empty before the first question
    starts: list[AnswerStart | None] = attrs.field(factory=list)
    closings: list[str] = attrs.field(factory=list)


_known: WeakKeyDictionary[Any, KnownTemplate] = WeakKeyDictionary()


def known_of(tokenizer: Any) -> KnownTemplate:
    """What is known so far of a tokenizer's present template."""
    template, known = getattr(tokenizer, "chat_template", None), _known.get(tokenizer)
    if known is None or known.template != template:
        known = _known[tokenizer] = KnownTemplate(template)
    return known


def plain(tokenizer: Any, switches: Mapping[str, Any], chat: Chat) -> str:
    """The text that a template makes of a chat. Raises: whatever it raises, as it is third-party code."""
    variables = {"add_generation_prompt": True, **switches, "tokenize": False}
    if chat.tools:
        variables["tools"] = [dict(tool) for tool in chat.tools]
    # Copies: some templates modify the messages.
    return cast(str, tokenizer.apply_chat_template([dict(message) for message in chat.messages], **variables))


def tried_with(tokenizer: Any, *messages: Message, **switches: Any) -> str | None:
    """The text of messages with variables of the template; None if it raises an error."""
    return tried(partial(plain, tokenizer, switches), Chat(messages))
