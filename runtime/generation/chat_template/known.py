"""What is known of a tokenizer's chat template."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import attrs

from runtime.generation.chat_template.probes import Needs

# The opening and the closing tag of reasoning, and the ids of each.
Tags = tuple[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...]]]


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
    tags: list[Tags | None] = attrs.field(factory=list)


_known: WeakKeyDictionary[Any, KnownTemplate] = WeakKeyDictionary()


def known_of(tokenizer: Any) -> KnownTemplate:
    """What is known so far of a tokenizer's present template."""
    template, known = getattr(tokenizer, "chat_template", None), _known.get(tokenizer)
    if known is None or known.template != template:
        known = _known[tokenizer] = KnownTemplate(template)
    return known
