"""The text of a prompt from chat messages, whatever the template refuses or leaves out."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

from mlx_lm.tokenizer_utils import TokenizerWrapper

from protocol.errors import PromptError
from runtime.generation.answers.message_format import message_format
from runtime.generation.chat_template.known import (
    ANSWER_MARK,
    once_per_template,
    plain,
    space_before_closing,
    tags_of,
    thinking_switch,
    with_known_effort,
)
from runtime.generation.chat_template.probes import Needs, needed_for_texts, needs_of, repaired, tried, without_loss
from runtime.generation.chat_template.repairs import (
    OF_DROPPED,
    REPAIRS,
    Repair,
    TemplateInput,
    TemplateMessage,
    calls_in_content,
)
from runtime.generation.tool_calls.call_format import call_format, calls_as_json, written_calls, written_layout


def render_chat_template(messages: Sequence[Mapping[str, Any]], tokenizer: TokenizerWrapper, /, **switches: Any) -> str:
    """The text of chat messages, ending where the answer begins.

    What the template takes is rendered as it is. Where it raises an error or leaves a text out, the messages are first
    repaired; see `runtime.generation.chat_template.repairs`.

    Args:
        messages: with a role and a content each. If the last one is the assistant's and has `"prefix": True`, the
            answer continues its text, which is kept to the character.
        **switches: further variables of the template; `add_generation_prompt=False` ends the text with the messages,
            and `enable_thinking` stands for the template's own switch, whatever its name and values.

    Raises: PromptError: the template does not take the messages, not even after repairs.
    """
    continues = bool(messages) and messages[-1].get("prefix") is True and messages[-1].get("role") == "assistant"
    turns = [{name: value for name, value in message.items() if name != "prefix"} for message in messages]
    if "enable_thinking" in switches and (switch := thinking_switch(tokenizer)) is not None:
        # The same wish under the template's own name, unless that is given.
        switches = {switch.name: switch.on if switches["enable_thinking"] else switch.off, **switches}
    return _continued(turns, tokenizer, switches) if continues else _rendered(turns, tokenizer, switches)


def _rendered(turns: Sequence[TemplateMessage], tokenizer: Any, switches: Mapping[str, Any]) -> str:
    tools = switches.get("tools") or ()
    # Python functions are the template's affair, or transformers'.
    are_schemas = isinstance(tools, (list, tuple)) and all(isinstance(tool, Mapping) for tool in tools)
    chat = TemplateInput(tuple(for_template(turns)), tuple(tools) if are_schemas else ())
    # A renderer in Python, without a template, is only probed once it raises an error.
    has_template = getattr(tokenizer, "chat_template", None) is not None
    may_drop = has_template and any(repair(chat) != chat for repair in OF_DROPPED)
    always = _needs(tokenizer, has_tools=bool(tools)).always if may_drop else ()
    shaped = without_loss(always, partial(plain, tokenizer, switches), chat)
    try:
        return plain(tokenizer, switches, shaped)
    except Exception as error:
        refusal = error
    render = partial(plain, tokenizer, with_known_effort(tokenizer, switches))
    needs = _needs(tokenizer, has_tools=bool(tools)).on_error
    for repairs in (needs, (*REPAIRS, *needs)):
        # No more than this chat needs, so that what comes before an oddity keeps its shape.
        if needed := needed_for_texts(repairs, render, shaped):
            shaped = repaired(shaped, needed)
            break
    if (text := tried(render, shaped)) is not None:
        return text
    reason = textwrap.shorten(str(refusal), 300, placeholder="…")  # transformers may quote the whole chat
    raise PromptError(f"the chat template does not take these messages: {reason}") from refusal


@once_per_template
def _needs(tokenizer: Any, *, has_tools: bool) -> Needs:
    in_content: Repair | None = None
    # A call that is a message of its own, or has a header of its own, is no part of a content.
    if message_format(tokenizer) is None:
        format = call_format(tokenizer)
        layout = None if format is None else written_layout(format, tokenizer.chat_template)
        write = calls_as_json if format is None or layout is None else partial(written_calls, format, layout)
        in_content = calls_in_content(write)
    return needs_of(partial(plain, tokenizer, {}), has_tools=has_tools, calls_in_content=in_content)


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A copy of messages as chat templates take them.

    The arguments of calls are objects, not JSON as in OpenAI's form, and each result has its function's name. Empty
    lists of calls are left out, as some templates take any list for calls.
    """
    names: dict[Any, Any] = {}
    given = [dict(message) for message in messages]
    for message in given:
        if isinstance(calls := message.get("tool_calls"), (list, tuple)):
            message["tool_calls"] = [_call(call, names) for call in calls]
            if not calls:
                del message["tool_calls"]
        id = message.get("tool_call_id")
        if message.get("role") == "tool" and isinstance(id, str) and id in names:
            message.setdefault("name", names[id])
    return given


def _call(call: Any, names: dict[Any, Any]) -> Any:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = dict(call["function"])
    if isinstance(id := call.get("id"), str):
        names[id] = function.get("name")
    if isinstance(arguments := function.get("arguments"), str):
        # A malformed call of the model's stays text.
        with suppress(ValueError, RecursionError):
            function["arguments"] = json.loads(arguments or "{}")
    return {**call, "function": function}


# --- answers that continue a message --------------------------------------------------------------


def _continued(turns: Sequence[TemplateMessage], tokenizer: Any, switches: Mapping[str, Any]) -> str:
    """A prompt that ends with the last message's text, just as it is.

    In front of it stands what the template writes in front of an answer's text in a message, which has no reasoning, or
    has it closed. The text comes behind the generation prompt instead if the two differ by no more than an empty
    reasoning, or if the text has a tag of its own for the reasoning.
    """
    *before, last = turns
    if last.get("tool_calls"):
        raise PromptError(
            'an answer cannot continue a message with tool calls, which is complete; leave out its "prefix"'
        )
    text = cast(str, last.get("content") or "")
    fresh = _rendered(before, tokenizer, {**switches, "add_generation_prompt": True}) if before else ""
    marked = [*before, {**last, "content": ANSWER_MARK}]
    lead, mark, _ = _rendered(marked, tokenizer, {**switches, "add_generation_prompt": False}).rpartition(ANSWER_MARK)
    if not mark:
        raise PromptError(
            "the chat template does not take these messages: the final message does not appear in the chat; leave it "
            'out, or its "prefix"'
        )
    if not fresh or (tags := tags_of(tokenizer)) is None:
        return lead + text
    start, end = tags[0]
    # What the user says may have tags, too.
    ended = _rendered(before, tokenizer, {**switches, "add_generation_prompt": False})
    begun = fresh.removeprefix(ended) or fresh
    is_open = begun.rfind(start) > begun.rfind(end)
    if text.lstrip().startswith(start):
        return (fresh[: fresh.rfind(start)] if is_open and not fresh.endswith(end) else fresh) + text
    added = lead.removeprefix(fresh) if lead.startswith(fresh) else None
    thoughts = thoughts if isinstance(thoughts := last.get("reasoning_content"), str) else ""
    if thoughts.strip() not in (added or "") and not begun.rstrip().endswith(end):
        # Templates leave the reasoning of earlier answers out, and this answer is not over.
        return fresh + ("" if is_open else start) + thoughts + space_before_closing(tokenizer) + end + text
    has_empty_reasoning = added is not None and start in added and not added.replace(start, "").replace(end, "").strip()
    return (fresh if (is_open and end in text) or (has_empty_reasoning and not is_open) else lead) + text
