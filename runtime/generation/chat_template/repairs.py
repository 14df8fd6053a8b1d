"""Repairs of chat messages for templates that raise for them or leave texts out; which ones a template needs is probed.

Each repair is a function from a chat to a chat. It changes only what templates are known to refuse, keeps every text,
and treats equal beginnings of two chats equally where it can, so that a longer chat reuses the prefix of a shorter one.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import attrs

TemplateMessage = Mapping[str, Any]

_SYSTEM = ("system", "developer")
_BETWEEN_TEXTS = "\n\n"
# Content of a message that is put in to have roles alternate. Some templates refuse an empty one.
_FILLER = " "


@attrs.frozen
class TemplateInput:
    """What a chat template renders: messages in the form of templates, and tools in OpenAI's form."""

    messages: tuple[TemplateMessage, ...]
    tools: tuple[TemplateMessage, ...] = ()


Repair = Callable[[TemplateInput], TemplateInput]


def _on_messages(change: Callable[[Sequence[TemplateMessage]], Sequence[TemplateMessage]]) -> Repair:
    @wraps(change)
    def repair(chat: TemplateInput) -> TemplateInput:
        return attrs.evolve(chat, messages=tuple(change(chat.messages)))

    return repair


def _on_each(change: Callable[[TemplateMessage], TemplateMessage]) -> Repair:
    @wraps(change)
    def repair(chat: TemplateInput) -> TemplateInput:
        return attrs.evolve(chat, messages=tuple(map(change, chat.messages)))

    return repair


# --- system messages ------------------------------------------------------------------------------


@_on_each
def developers_as_system(message: TemplateMessage) -> TemplateMessage:
    """Give "developer" messages the role "system"."""
    return {**message, "role": "system"} if message["role"] == "developer" else message


@_on_messages
def systems_first(messages: Sequence[TemplateMessage]) -> Sequence[TemplateMessage]:
    """Move later system messages behind the leading ones."""
    return sorted(messages, key=lambda message: message["role"] not in _SYSTEM)


@_on_messages
def systems_joined(messages: Sequence[TemplateMessage]) -> Sequence[TemplateMessage]:
    """Join neighbouring system messages to one."""
    return _joined(messages, lambda before, after: before["role"] in _SYSTEM and after["role"] in _SYSTEM)


@_on_messages
def systems_into_user(messages: Sequence[TemplateMessage]) -> Sequence[TemplateMessage]:
    """Put the texts of system messages in front of the first user's text."""
    texts = [message.get("content") for message in messages if message["role"] in _SYSTEM]
    if not texts:
        return messages
    others = [message for message in messages if message["role"] not in _SYSTEM]
    first = next((i for i, message in enumerate(others) if message["role"] == "user"), None)
    if first is None:
        return [{"role": "user", "content": _text(texts)}, *others]
    others[first] = {**others[first], "content": _text([*texts, others[first].get("content")])}
    return others


def systems_into_user_if_alone(chat: TemplateInput) -> TemplateInput:
    """As `systems_into_user`, in a chat without any user's message."""
    return chat if any(message["role"] == "user" for message in chat.messages) else systems_into_user(chat)


def systems_into_user_before_end(chat: TemplateInput) -> TemplateInput:
    """As `systems_into_user`, in a chat that ends with an answer or with the result of a call."""
    return systems_into_user(chat) if chat.messages[-1]["role"] in ("assistant", "tool") else chat


# --- calls and results ----------------------------------------------------------------------------


@_on_each
def calls_as_text(message: TemplateMessage) -> TemplateMessage:
    """Write all calls and results as text, for templates without a role for results."""
    message = _result_as_text(message)
    if not (calls := _calls(message)):
        return message
    functions = [call.get("function", call) if isinstance(call, Mapping) else call for call in calls]
    texts = [json.dumps(function, ensure_ascii=False, default=str) for function in functions]
    return {**_without(message, "tool_calls"), "content": _text([message.get("content"), *texts])}


def calls_as_text_if_alone(chat: TemplateInput) -> TemplateInput:
    """As `calls_as_text`, in a chat without any result."""
    return chat if any(message["role"] == "tool" for message in chat.messages) else calls_as_text(chat)


# The names that templates have for the reasoning of a message.
_REASONING = ("reasoning_content", "reasoning", "thinking")


@_on_each
def one_text_beside_calls(message: TemplateMessage) -> TemplateMessage:
    """Put reasoning in front of the content beside calls, where a template takes one of the two (gpt-oss)."""
    if not (_calls(message) and message.get("content")):
        return message
    reasoning = next((text for name in _REASONING if (text := message.get(name))), None)
    return {**_without(message, *_REASONING), "content": _text([reasoning, message["content"]])}


@_on_messages
def orphans_as_text(messages: Sequence[TemplateMessage]) -> Sequence[TemplateMessage]:
    """Make users' texts of results whose call is not in the answers before them, behind the results that follow."""
    changed: list[TemplateMessage] = []
    orphans: list[TemplateMessage] = []
    waiting: list[Any] = []  # ids of calls whose results may follow
    answered: list[Any] = []
    for message in messages:
        if message["role"] == "tool":
            id = _result_id(message)
            if waiting and (id in waiting or None in (*waiting, id)):
                answered.append(id)
                changed.append(message)
            else:
                orphans.append(_result_as_text(message))
            continue
        changed += orphans
        before = [id for id in waiting if id not in answered] if message["role"] == "assistant" else []
        waiting, answered, orphans = [*before, *map(_id_of, _calls(message))], [], []
        changed.append(message)
    return [*changed, *orphans]


def calls_in_content(write: Callable[[Sequence[tuple[str, Mapping[str, Any]]]], str]) -> Repair:
    """A repair that puts calls behind the content as the model writes them, for templates that write results alone."""

    @_on_each
    def with_calls_in_content(message: TemplateMessage) -> TemplateMessage:
        calls = []
        for call in _calls(message):
            function = call.get("function") if isinstance(call, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                return message
            arguments = function.get("arguments")
            calls.append((function["name"], arguments if isinstance(arguments, Mapping) else _as_object(arguments)))
        if not calls:
            return message
        return {**_without(message, "tool_calls"), "content": f"{message.get('content') or ''}{write(calls)}"}

    return with_calls_in_content


@_on_messages
def calls_one_by_one(messages: Sequence[TemplateMessage]) -> Sequence[TemplateMessage]:
    """Give each call a message of its own, followed by its result."""
    changed: list[TemplateMessage] = []
    at = 0
    while at < len(messages):
        message, calls = messages[at], _calls(messages[at])
        at += 1
        if len(calls) < 2:
            changed.append(message)
            continue
        results: list[TemplateMessage] = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        bare = {**_without(message, "reasoning_content"), "content": ""}
        for number, call in enumerate(calls):
            changed.append({**(message if number == 0 else bare), "tool_calls": [call]})
            found = next((result for result in results if _result_id(result) == _id_of(call)), None)
            if found is None and results and _result_id(results[0]) is None:
                found = results[0]
            if found is not None:
                results.remove(found)
                changed.append(found)
        changed += results
    return changed


@_on_messages
def short_ids(messages: Sequence[TemplateMessage]) -> Sequence[TemplateMessage]:
    """Give calls and their results ids of nine letters and digits: digests of the ids that they have."""
    changed: list[TemplateMessage] = []
    given: dict[Any, str] = {}  # by the client's id, of the last call that has it
    uses: dict[Any, int] = {}
    waiting: list[str] = []  # of calls without an id and without a result so far
    for message in messages:
        if calls := _calls(message):
            named, waiting = [], []
            for call in calls:
                id = _id_of(call)
                uses[id] = uses.get(id, 0) + 1
                given[id] = _short_id(id, uses[id])
                if id is None:
                    waiting.append(given[id])
                named.append({**call, "id": given[id]} if isinstance(call, Mapping) else call)
            message = {**message, "tool_calls": named}
        elif message["role"] == "tool":
            if (id := _result_id(message)) not in given:
                given[id] = _short_id(id, 1)
            message = {**message, "tool_call_id": waiting.pop(0) if id is None and waiting else given[id]}
        changed.append(message)
    return changed


def _on_arguments(change: Callable[[Any], Any]) -> Repair:
    """A repair of the arguments of calls."""

    def changed(call: Any) -> Any:
        if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
            return call
        return {**call, "function": {**function, "arguments": change(function.get("arguments"))}}

    @_on_each
    def repair(message: TemplateMessage) -> TemplateMessage:
        return {**message, "tool_calls": list(map(changed, calls))} if (calls := _calls(message)) else message

    return repair


def _as_object(value: Any) -> Mapping[str, Any]:
    is_blank = value is None or (isinstance(value, str) and not value.strip())
    return {} if is_blank else {"arguments": value}


# Texts, as those of malformed calls, and what is neither text nor an object.
texts_as_objects = _on_arguments(lambda value: _as_object(value) if isinstance(value, str) else value)
others_as_objects = _on_arguments(lambda value: value if isinstance(value, (str, Mapping)) else _as_object(value))
arguments_as_json = _on_arguments(lambda value: value if isinstance(value, str) else json.dumps(value))


@_on_each
def empty_contents(message: TemplateMessage) -> TemplateMessage:
    """Give messages without a content an empty one."""
    return message if message.get("content") is not None else {**message, "content": ""}


@_on_each
def empty_answers_filled(message: TemplateMessage) -> TemplateMessage:
    """Give answers without a text and calls a blank text."""
    is_filled = message["role"] != "assistant" or message.get("content") or _calls(message)
    return message if is_filled else {**message, "content": _FILLER}


def _without(message: TemplateMessage, *names: str) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name not in names}


def _calls(message: TemplateMessage) -> list[Any]:
    calls = message.get("tool_calls")
    return list(calls) if isinstance(calls, (list, tuple)) else []


def _id_of(call: Any) -> str | None:
    id = call.get("id") if isinstance(call, Mapping) else None
    return id if isinstance(id, str) else None


def _result_id(result: TemplateMessage) -> str | None:
    id = result.get("tool_call_id")
    return id if isinstance(id, str) else None


_LETTERS = string.ascii_letters + string.digits


def _short_id(id: str | None, use: int) -> str:
    """The id of the call that is the `use`-th with a client's id; None stands for no id."""
    if id is not None and use == 1 and len(id) == 9 and id.isascii() and id.isalnum():
        return id
    number = int.from_bytes(hashlib.sha256(f"{use} {id or ''}".encode("utf-8", "replace")).digest()[:16], "big")
    return "".join(_LETTERS[number // len(_LETTERS) ** place % len(_LETTERS)] for place in range(9))


def _result_as_text(message: TemplateMessage) -> TemplateMessage:
    if message["role"] != "tool":
        return message
    name = message.get("name")
    whose = f"Result of {name}:" if isinstance(name, str) and name else "Result of a tool:"
    return {"role": "user", "content": f"{whose}\n{message.get('content') or ''}"}


# --- the order of roles ---------------------------------------------------------------------------


@_on_messages
def neighbours_joined(messages: Sequence[TemplateMessage]) -> Sequence[TemplateMessage]:
    """Join neighbouring messages of the user's, and of the assistant's."""
    return _joined(messages, lambda before, after: before["role"] == after["role"] in ("user", "assistant"))


@_on_messages
def roles_alternating(messages: Sequence[TemplateMessage]) -> Sequence[TemplateMessage]:
    """Put blank messages in, so that user and assistant alternate, the user first; calls and results do not count."""
    changed: list[TemplateMessage] = []
    expected = "user"
    for message in messages:
        if message["role"] in ("user", "assistant") and not _calls(message):
            if message["role"] != expected:
                changed.append({"role": expected, "content": _FILLER})
            expected = "assistant" if message["role"] == "user" else "user"
        elif message["role"] == "assistant" and expected == "user" and not changed:
            changed.append({"role": "user", "content": _FILLER})
            expected = "assistant"
        changed.append(message)
    return changed


@_on_messages
def texts_before_calls(messages: Sequence[TemplateMessage]) -> Sequence[TemplateMessage]:
    """Put the content beside calls, and the reasoning, in a message of their own before the calls."""
    changed: list[TemplateMessage] = []
    for message in messages:
        if _calls(message) and message.get("content"):
            changed.append(_without(message, "tool_calls"))
            message = {**_without(message, *_REASONING), "content": ""}
        changed.append(message)
    return changed


@_on_messages
def user_before_calls(messages: Sequence[TemplateMessage]) -> Sequence[TemplateMessage]:
    """Put a blank message of the user's before a call that comes first."""
    first = next((i for i, message in enumerate(messages) if message["role"] not in _SYSTEM), None)
    if first is None or not _calls(messages[first]):
        return messages
    return [*messages[:first], {"role": "user", "content": _FILLER}, *messages[first:]]


def _joined(
    messages: Sequence[TemplateMessage], are_one: Callable[[TemplateMessage, TemplateMessage], bool]
) -> list[TemplateMessage]:
    changed: list[TemplateMessage] = []
    for message in messages:
        if changed and are_one(changed[-1], message):
            changed[-1] = _both(changed[-1], message)
        else:
            changed.append(message)
    return changed


def _both(before: TemplateMessage, after: TemplateMessage) -> TemplateMessage:
    joined = {**before, "content": _text([before.get("content"), after.get("content")])}
    if calls := [*_calls(before), *_calls(after)]:
        joined["tool_calls"] = calls
    if reasoning := _text([before.get("reasoning_content"), after.get("reasoning_content")]):
        joined["reasoning_content"] = reasoning
    return joined


def _text(texts: Sequence[Any]) -> str:
    return _BETWEEN_TEXTS.join(text for text in texts if text)


# --- tools ----------------------------------------------------------------------------------------


def tools_filled(chat: TemplateInput) -> TemplateInput:
    """Fill what tools leave out: descriptions, types and properties."""
    return attrs.evolve(chat, tools=tuple(map(_filled_tool, chat.tools)))


def _filled_tool(tool: TemplateMessage) -> TemplateMessage:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool
    given = function.get("parameters")
    parameters = _filled_schema(given if isinstance(given, Mapping) else {})
    parameters = parameters | {"type": parameters.get("type", "object"), "properties": parameters.get("properties", {})}
    if not isinstance(parameters["properties"], Mapping):
        parameters["properties"] = {}
    if not isinstance(parameters.get("required", []), list):
        del parameters["required"]
    described = {**function, "description": function.get("description") or "", "parameters": parameters}
    return {**tool, "function": described}


def _filled_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    filled = dict(schema)
    if isinstance(properties := filled.get("properties"), Mapping):
        filled["properties"] = {name: _filled_property(inner) for name, inner in properties.items()}
    if isinstance(items := filled.get("items"), Mapping):
        filled["items"] = _filled_schema(items)
    return filled


def _filled_property(schema: Any) -> dict[str, Any]:
    filled = _filled_schema(schema if isinstance(schema, Mapping) else {})
    if not isinstance(filled.get("description"), str):
        filled["description"] = ""
    if isinstance(types := filled.get("type"), list):
        # Templates write one type.
        filled["type"] = next((each for each in types if each != "null"), "string")
    return filled


# In the order in which they are applied.
REPAIRS: tuple[Repair, ...] = (
    developers_as_system,
    systems_first,
    systems_joined,
    systems_into_user,
    systems_into_user_if_alone,
    systems_into_user_before_end,
    one_text_beside_calls,
    calls_as_text,
    calls_as_text_if_alone,
    orphans_as_text,
    neighbours_joined,
    user_before_calls,
    texts_before_calls,
    calls_one_by_one,
    roles_alternating,
    short_ids,
    texts_as_objects,
    others_as_objects,
    empty_contents,
    empty_answers_filled,
    tools_filled,
)

# Those of texts that templates are known to leave out, and not only to refuse.
OF_DROPPED = tuple(
    repair
    for repair in REPAIRS
    if repair
    not in (one_text_beside_calls, roles_alternating, short_ids, empty_contents, empty_answers_filled, tools_filled)
)
