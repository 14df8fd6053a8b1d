"""Chat templates: from chat messages to the text of a prompt, whatever the template refuses or calls its switches.

A template is a program that was written for certain messages. It is tried out once, with short chats, and the outcome
is kept with the tokenizer. So the shape of a prompt does not change within a conversation, and its prefix is reused.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import attrs
from mlx_lm.tokenizer_utils import TokenizerWrapper

from protocol.errors import PromptError
from runtime.generation.chat_repairs import OF_DROPPED, REPAIRS, Chat, Message
from runtime.generation.reasoning_tags import last_index, tags_of
from runtime.generation.template_probes import Needs, needed_of, needs_of, repaired
from runtime.generation.tool_calls.messages import for_template

_USER_MARK, _ANSWER_MARK = "userone", "answerone"
_QUESTION: Message = {"role": "user", "content": _USER_MARK}


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
class _Known:
    """What is known of one tokenizer's template."""

    template: Any
    needs: dict[bool, Needs] = attrs.field(factory=dict)  # by whether there are tools
    efforts: dict[str, str | None] = attrs.field(factory=dict)
    switches: list[ThinkingSwitch | None] = attrs.field(factory=list)  # empty before the first question
    starts: list[AnswerStart | None] = attrs.field(factory=list)


_known: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()


def _known_of(tokenizer: Any) -> _Known:
    template, known = getattr(tokenizer, "chat_template", None), _known.get(tokenizer)
    if known is None or known.template != template:
        known = _known[tokenizer] = _Known(template)
    return known


def render_chat_template(messages: Sequence[Mapping[str, Any]], tokenizer: TokenizerWrapper, /, **switches: Any) -> str:
    """The text of chat messages, ending where the answer begins.

    What the template takes is rendered as it is. Where it raises an error or leaves a text out, the messages are first
    repaired; see `runtime.generation.chat_repairs`.

    Args:
        messages: with a role and a content each. If the last one is the assistant's and has `"prefix": True`, the
            answer continues its text, which is kept to the character.
        **switches: further variables of the template; `add_generation_prompt=False` ends the text with the messages,
            and `enable_thinking` stands for the template's own switch, whatever its name and values.

    Raises: PromptError: the template does not take the messages, not even after repairs.
    """
    continues = bool(messages) and messages[-1].get("prefix") is True and messages[-1].get("role") == "assistant"
    turns = [{name: value for name, value in message.items() if name != "prefix"} for message in messages]
    if "enable_thinking" in switches:
        switches = _with_own_switch(tokenizer, switches)
    return _continued(turns, tokenizer, switches) if continues else _rendered(turns, tokenizer, switches)


def _rendered(turns: Sequence[Message], tokenizer: Any, switches: Mapping[str, Any]) -> str:
    tools = switches.get("tools") or ()
    # Python functions are the template's affair, or transformers'.
    are_schemas = isinstance(tools, (list, tuple)) and all(isinstance(tool, Mapping) for tool in tools)
    chat = Chat(tuple(for_template(turns)), tuple(tools) if are_schemas else ())
    # A renderer in Python, without a template, is only probed once it raises an error.
    may_drop = _known_of(tokenizer).template is not None and any(repair(chat) != chat for repair in OF_DROPPED)
    shaped = repaired(chat, _needs(tokenizer, has_tools=bool(tools)).always) if may_drop else chat
    try:
        return _plain(tokenizer, switches, shaped)
    except Exception as error:
        refusal = error
    render = partial(_plain, tokenizer, _with_known_effort(tokenizer, switches))
    needs = _needs(tokenizer, has_tools=bool(tools)).on_error
    for repairs in (needs, (*REPAIRS, *needs)):
        # No more than this chat needs, so that what comes before an oddity keeps its shape.
        if needed := needed_of(repairs, render, shaped):
            shaped = repaired(shaped, needed)
            break
    with suppress(Exception):
        return render(shaped)
    reason = textwrap.shorten(str(refusal), 300, placeholder="…")  # transformers may quote the whole chat
    raise PromptError(f"the chat template does not take these messages: {reason}") from refusal


def _plain(tokenizer: Any, switches: Mapping[str, Any], chat: Chat) -> str:
    """The text that a template makes of a chat. Raises: whatever it raises, as it is third-party code."""
    variables = {"add_generation_prompt": True, **switches, "tokenize": False}
    if chat.tools:
        variables["tools"] = [dict(tool) for tool in chat.tools]
    # Copies: some templates modify the messages.
    return cast(str, tokenizer.apply_chat_template([dict(message) for message in chat.messages], **variables))


def _needs(tokenizer: Any, *, has_tools: bool) -> Needs:
    known = _known_of(tokenizer)
    if has_tools not in known.needs:
        known.needs[has_tools] = needs_of(partial(_plain, tokenizer, {}), has_tools=has_tools)
    return known.needs[has_tools]


def _tried(tokenizer: Any, *messages: Message, **switches: Any) -> str | None:
    """The text of a chat; None if the template raises an error."""
    try:
        return _plain(tokenizer, switches, Chat(messages))
    except Exception:
        return None


# --- answers that continue a message --------------------------------------------------------------


def _continued(turns: Sequence[Message], tokenizer: Any, switches: Mapping[str, Any]) -> str:
    """A prompt that ends with the last message's text, just as it is.

    In front of it stands what the template writes in front of an answer's text in a message, which has no reasoning, or
    has it closed. The text comes behind the generation prompt instead if the two differ by no more than an empty
    reasoning, or if the text has a tag of its own for the reasoning.
    """
    *before, last = turns
    text = cast(str, last.get("content") or "")
    fresh = _rendered(before, tokenizer, {**switches, "add_generation_prompt": True}) if before else ""
    marked = [*before, {**last, "content": _ANSWER_MARK}]
    lead, mark, _ = _rendered(marked, tokenizer, {**switches, "add_generation_prompt": False}).rpartition(_ANSWER_MARK)
    if not mark:
        raise PromptError(
            "the chat template does not take these messages: the final message does not appear in the chat; leave it "
            'out, or its "prefix"'
        )
    if not fresh or (tags := tags_of(tokenizer)) is None:
        return lead + text
    start, end = tags[0]
    is_open = fresh.rfind(start) > fresh.rfind(end)
    if text.lstrip().startswith(start):
        return (fresh[: fresh.rfind(start)] if is_open and not fresh.endswith(end) else fresh) + text
    added = lead.removeprefix(fresh) if lead.startswith(fresh) else None
    has_empty_reasoning = added is not None and start in added and not added.replace(start, "").replace(end, "").strip()
    return (fresh if (is_open and end in text) or (has_empty_reasoning and not is_open) else lead) + text


# --- where answers begin --------------------------------------------------------------------------


def answer_start(tokenizer: Any) -> AnswerStart | None:
    """How the template begins an answer; None without a template, or if it cannot be found out."""
    if not getattr(tokenizer, "has_chat_template", False):
        return None
    known = _known_of(tokenizer)
    if not known.starts:
        known.starts.append(_found_start(tokenizer))
    return known.starts[0]


def _found_start(tokenizer: Any) -> AnswerStart | None:
    ended = _tried(tokenizer, _QUESTION, add_generation_prompt=False)
    switch, prompts = thinking_switch(tokenizer), []
    for variables in [{}] if switch is None else [{}, {switch.name: switch.on}, {switch.name: switch.off}]:
        text = _tried(tokenizer, _QUESTION, **variables)
        if text is not None and ended is not None:
            prompts.append(text.removeprefix(ended) if text.startswith(ended) else text.rpartition(_USER_MARK)[2])
    if not any(prompts):
        # The template has no generation prompt: an answer begins where the question ends.
        text = _tried(tokenizer, _QUESTION, {"role": "assistant", "content": _ANSWER_MARK}) or ""
        prompts = [text.partition(_USER_MARK)[2].rpartition(_ANSWER_MARK)[0]]
    tags = tags_of(tokenizer)
    found = tuple(dict.fromkeys(prompt for prompt in prompts if prompt.strip()))
    if not found:
        return None
    return AnswerStart(found[0] if tags is None else found[0].partition(tags[0][0])[0], found)


# Most tokens of a text before an answer. Longer ones are not recognised.
_MAX_START_TOKENS = 64


def begins_answer(tokenizer: Any, prompt: Sequence[int]) -> bool:
    """Whether a prompt ends where its template begins a new answer."""
    if (start := answer_start(tokenizer)) is None:
        return False
    end = tokenizer.decode(list(prompt[-_MAX_START_TOKENS:])).rstrip()
    return any(end.endswith(text.rstrip()) for text in start.prompts)


def opens_reasoning(tokenizer: Any, prompt: Sequence[int], tag: tuple[int, ...], end: tuple[int, ...]) -> bool:
    """Whether the answer to a prompt begins within the reasoning, whose opening and closing tags are given as ids.

    The opening tag counts only where an answer begins: in what the template adds for it, or at the beginning of the
    message that it continues. In any other place it is a word.
    """
    if tag[0] not in prompt:
        return False
    prompt = list(prompt)
    last_end, at = last_index(prompt, end), len(prompt)
    while (at := last_index(prompt[:at], tag)) > last_end:
        after = prompt[at + len(tag) :]
        if not tokenizer.eos_token_ids.isdisjoint(after):
            return False
        start = answer_start(tokenizer)
        if start is None or (len(after) < _MAX_START_TOKENS and not tokenizer.decode(after).strip()):
            return True
        before, header = tokenizer.decode(prompt[max(0, at - _MAX_START_TOKENS) : at]).rstrip(), start.header.strip()
        if header and before.endswith(header):
            return header not in tokenizer.decode(after)
    return False


# --- switches -------------------------------------------------------------------------------------

# Names of switches and their values for on and off. The last ones are also levels of effort in other templates.
_SWITCHES = (
    ThinkingSwitch("enable_thinking", True, False),
    ThinkingSwitch("thinking", True, False),
    ThinkingSwitch("thinking_mode", "enabled", "disabled"),
    ThinkingSwitch("thinking_budget", -1, 0),
)
_EFFORT_SWITCHES = tuple(ThinkingSwitch("reasoning_effort", "high", off) for off in ("none", "no_think"))
# Other names are looked for in the template.
_SWITCH_NAME = re.compile(
    r"(?<![\w.'\"])((?:enable_|use_|is_|with_)?(?:think|thinking|reason|reasoning)(?:_enabled|_on)?)(?!\w)"
)


def thinking_switch(tokenizer: Any) -> ThinkingSwitch | None:
    """The template's own switch for reasoning, found by rendering with it on and off; None if it has none."""
    known = _known_of(tokenizer)
    if not known.switches:
        known.switches.append(_found_switch(tokenizer, known.template))
    return known.switches[0]


def _found_switch(tokenizer: Any, template: Any) -> ThinkingSwitch | None:
    sources = template.values() if isinstance(template, Mapping) else [template]
    names = {name: None for text in sources if isinstance(text, str) for name in _SWITCH_NAME.findall(text)}
    for switch in (*_SWITCHES, *(ThinkingSwitch(name, True, False) for name in names), *_EFFORT_SWITCHES):
        on, off = (_tried(tokenizer, _QUESTION, **{switch.name: value}) for value in (switch.on, switch.off))
        if on is None or off is None:
            continue
        if switch not in _SWITCHES:
            # A value that the template only writes down switches nothing.
            on, off = (text.rpartition(_USER_MARK)[2] for text in (on, off))
        if on != off:
            return switch
    return None


def lacks_switch(tokenizer: Any) -> bool:
    """Whether the template has no switch for reasoning. That a renderer in Python has none cannot be told."""
    return _known_of(tokenizer).template is not None and thinking_switch(tokenizer) is None


def _with_own_switch(tokenizer: Any, switches: Mapping[str, Any]) -> dict[str, Any]:
    switch = thinking_switch(tokenizer)
    own = {} if switch is None else {switch.name: switch.on if switches["enable_thinking"] else switch.off}
    return {**own, **switches}


def asks_for_reasoning(tokenizer: Any, switches: Mapping[str, Any]) -> bool | None:
    """Whether variables of a template ask for reasoning, or for none; None if they leave it to the template."""
    if (wish := switches.get("enable_thinking")) is not None:
        return bool(wish)
    switch = thinking_switch(tokenizer)
    if switch is not None and switch.name in switches:
        return bool(switches[switch.name] != switch.off)
    return effort != "none" if (effort := switches.get("reasoning_effort")) else None


_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def _with_known_effort(tokenizer: Any, switches: Mapping[str, Any]) -> dict[str, Any]:
    """The variables, with the nearest effort that the template takes, or without one if it takes none."""
    changed = dict(switches)
    if isinstance(effort := changed.pop("reasoning_effort", None), str):
        efforts = _known_of(tokenizer).efforts
        if effort not in efforts:
            tried = (each for each in _nearest_efforts(effort) if _tried(tokenizer, _QUESTION, reasoning_effort=each))
            efforts[effort] = next(tried, None)
        if (nearest := efforts[effort]) is not None:
            changed["reasoning_effort"] = nearest
    return changed


def _nearest_efforts(effort: str) -> list[str]:
    """An effort and all others, the nearest first; of two, the higher."""
    if effort.lower() not in _EFFORTS:
        return [effort]
    level = _EFFORTS.index(effort.lower())
    downwards = _EFFORTS[:0:-1]  # without "none"
    return [effort, *sorted(downwards, key=lambda other: abs(_EFFORTS.index(other) - level))]
