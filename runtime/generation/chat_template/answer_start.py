"""Where a prompt begins an answer, and whether it begins the answer's reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from runtime.generation.chat_template.known import once_per_template
from runtime.generation.chat_template.plain import ANSWER_MARK, QUESTION, USER_MARK, tried_with
from runtime.generation.chat_template.switches import thinking_switch
from runtime.generation.chat_template.tags import last_index, tags_of


@attrs.frozen
class AnswerStart:
    """How a template begins an answer."""

    header: str  # the text before the answer, up to its reasoning
    prompts: tuple[str, ...]  # with what the template opens or closes for it, for each position of its switch


@once_per_template
def answer_start(tokenizer: Any) -> AnswerStart | None:
    """How the template begins an answer; None without a template, or if it cannot be found out."""
    if not getattr(tokenizer, "has_chat_template", False):
        return None
    ended = tried_with(tokenizer, QUESTION, add_generation_prompt=False)
    switch, prompts = thinking_switch(tokenizer), []
    for variables in [{}] if switch is None else [{}, {switch.name: switch.on}, {switch.name: switch.off}]:
        text = tried_with(tokenizer, QUESTION, **variables)
        if text is not None and ended is not None:
            prompts.append(text.removeprefix(ended) if text.startswith(ended) else text.rpartition(USER_MARK)[2])
    if not any(prompts):
        # The template has no generation prompt: an answer begins where the question ends.
        text = tried_with(tokenizer, QUESTION, {"role": "assistant", "content": ANSWER_MARK}) or ""
        prompts = [text.partition(USER_MARK)[2].rpartition(ANSWER_MARK)[0]]
    tags = tags_of(tokenizer)
    found = tuple(dict.fromkeys(prompt for prompt in prompts if prompt.strip()))
    if not found:
        return None
    return AnswerStart(found[0] if tags is None else found[0].partition(tags[0][0])[0], found)


@once_per_template
def space_before_closing(tokenizer: Any) -> str:
    """The white space that the template writes between reasoning and its closing tag; "" if it writes no reasoning."""
    if (tags := tags_of(tokenizer)) is None:
        return ""
    answer = {"role": "assistant", "content": ANSWER_MARK, "reasoning_content": "reasonone"}
    text = tried_with(tokenizer, QUESTION, answer, add_generation_prompt=False) or ""
    space, tag, _ = text.partition("reasonone")[2].partition(tags[0][1])
    return space if tag and not space.strip() else ""


# Most tokens of a text before an answer. Longer ones are not recognised.
_MAX_START_TOKENS = 64


def begins_answer(tokenizer: Any, prompt: Sequence[int]) -> bool:
    """Whether a prompt ends where its template begins a new answer."""
    if (start := answer_start(tokenizer)) is None:
        return False
    end = tokenizer.decode(list(prompt[-_MAX_START_TOKENS:])).rstrip()
    return any(end.endswith(text.rstrip()) for text in start.prompts)


def opens_reasoning(tokenizer: Any, prompt: Sequence[int]) -> bool:
    """Whether the answer to a prompt begins within the reasoning.

    The opening tag counts only where an answer begins: in what the template adds for it, or at the beginning of the
    message that it continues. In any other place it is a word.
    """
    if (tags := tags_of(tokenizer)) is None:
        return False
    (opening, closing), (opening_ids, closing_ids) = tags
    # What stands before the last closing tag does not matter, nor a long text without an opening one.
    rest = list(prompt[last_index(prompt, closing_ids) + 1 :])
    if opening_ids and opening_ids[0] not in rest:
        return False
    begin = rest.index(opening_ids[0]) if opening_ids else 0
    text = tokenizer.decode(rest[max(0, begin - _MAX_START_TOKENS) :])
    ends = [end for id in tokenizer.eos_token_ids if (end := tokenizer.decode([id]))]
    last_end, at = text.rfind(closing), len(text)
    while (at := text.rfind(opening, 0, at)) > last_end:
        after = text[at + len(opening) :]
        if any(end in after for end in ends):
            return False
        if (start := answer_start(tokenizer)) is None or not after.strip():
            return True
        before, header = text[:at].rstrip(), start.header.strip()
        if header and before.endswith(header):
            return header not in after
    return False
