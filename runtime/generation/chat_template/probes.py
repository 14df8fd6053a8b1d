"""Probes of a chat template: which repairs of chats it needs, tried out once with texts that can be found again."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from runtime.generation.chat_template.repairs import (
    REPAIRS,
    Repair,
    TemplateInput,
    TemplateMessage,
    arguments_as_json,
    calls_as_text,
    calls_as_text_if_alone,
    roles_alternating,
    systems_first,
    systems_into_user,
    systems_joined,
    texts_before_calls,
)

Render = Callable[[TemplateInput], str]


def _message(role: str, text: str) -> TemplateMessage:
    return {"role": role, "content": text}


_system, _developer, _user, _says = (partial(_message, role) for role in ("system", "developer", "user", "assistant"))


def _calls(*calls: TemplateMessage, content: str | None = "") -> TemplateMessage:
    message = {"role": "assistant", "tool_calls": list(calls)}
    return message if content is None else {**message, "content": content}


def _call(id: str | None = "callmark1", arguments: Any = None) -> TemplateMessage:
    function = {"name": "markedtool", "arguments": {"city": "argumentmark"} if arguments is None else arguments}
    call = {"type": "function", "function": function}
    return call if id is None else {**call, "id": id}


def _result(text: str, id: str | None = "callmark1") -> TemplateMessage:
    result = {"role": "tool", "name": "markedtool", "content": text}
    return result if id is None else {**result, "tool_call_id": id}


def _orphan(text: str) -> TemplateMessage:
    return {"role": "tool", "content": text, "tool_call_id": "callmark9"}


_CITY = {"type": "string", "description": "a city"}


def _tool(parameters: Any, **function: Any) -> TemplateMessage:
    return {"type": "function", "function": {"name": "markedtool", **function, "parameters": parameters}}


_TOOL = _tool({"type": "object", "properties": {"city": _CITY}, "required": ["city"]}, description="a tool")


# A chat, and the texts of it that a template must write, in this order.
Probe = tuple[tuple[TemplateMessage, ...], tuple[str, ...]]


def _probe(*messages: TemplateMessage, marks: str = "") -> Probe:
    return messages, tuple(marks.split())


_ANSWERED = (_user("userone"), _says("answerone"))
_CALLED = (_user("userone"), _calls(_call()), _result("resultone"))


def _after_call(call: TemplateMessage, marks: str = "") -> Probe:
    result = _result("resultone", call["id"])
    return _probe(_user("userone"), _calls(call), result, _says("answerone"), _user("usertwo"), marks=marks)


_PROBES = (
    _probe(_system("systemone"), _user("userone"), marks="systemone"),
    _probe(_developer("systemone"), _user("userone"), marks="systemone"),
    _probe(_system("systemone"), marks="systemone"),
    _probe(_system("systemone"), _system("systemtwo"), _user("userone"), marks="systemone systemtwo"),
    _probe(_system("systemone"), _developer("systemtwo"), _user("userone"), marks="systemone systemtwo"),
    _probe(_system("systemone"), *_ANSWERED, _system("systemtwo"), _user("usertwo"), marks="systemone systemtwo"),
    _probe(_system("systemone"), *_ANSWERED, _developer("systemtwo"), _user("usertwo"), marks="systemone systemtwo"),
    _probe(*_ANSWERED, _system("systemtwo"), _user("usertwo"), marks="systemtwo"),
    _probe(*_ANSWERED, _developer("systemtwo"), _user("usertwo"), marks="systemtwo"),
    _probe(_system("systemone"), _user("userone"), _system("systemtwo"), marks="systemone systemtwo"),
    _probe(_user("userone"), _system("systemtwo"), marks="systemtwo"),
    _probe(_system("systemone"), *_CALLED, marks="systemone"),
    _probe(_system("systemone"), *_ANSWERED, marks="systemone"),
    _probe(_user("userone"), _says(""), _user("usertwo"), marks="userone usertwo"),
    _probe(_user("userone"), _user("usertwo"), marks="userone usertwo"),
    _probe(*_ANSWERED, _says("answertwo"), _user("usertwo"), marks="answerone answertwo"),
    _probe(_says("answerone"), _user("userone"), marks="answerone"),
    _probe(*_CALLED, marks="resultone"),
    _probe(*_CALLED, _user("usertwo"), marks="resultone usertwo"),
    _probe(_user("userone"), _calls(_call()), _user("usertwo"), marks="usertwo"),
    _probe(_user("userone"), _calls(_call()), _user("usertwo"), marks="argumentmark"),
    _probe(
        *(_user("userone"), _calls(_call(), _call("callmark2", {"city": "argumenttwo"}))),
        *(_result("resultone"), _result("resulttwo", "callmark2")),
        marks="argumenttwo resulttwo",
    ),
    _probe(_orphan("resultone"), _user("userone"), marks="resultone"),
    _probe(*_ANSWERED, _orphan("resultone"), _user("usertwo"), marks="resultone usertwo"),
    _probe(
        *(_user("userone"), _calls(_call()), _calls(_call("callmark2"))),
        *(_result("resultone"), _result("resulttwo", "callmark2")),
        marks="resultone resulttwo",
    ),
    _probe(_user("userone"), _calls(_call()), _orphan("resultone"), _result("resulttwo"), marks="resultone"),
    _probe(_user("userone"), _calls(_call()), _orphan("resultone"), _result("resulttwo"), marks="resulttwo"),
    _probe(_user("userone"), _calls(_call(), content="besideone"), _result("resultone"), marks="besideone"),
    _probe(_user("userone"), _calls(_call(), content="besideone"), _result("resultone"), marks="argumentmark"),
    _probe(_user("userone"), _calls(_call(), content="besideone"), _result("resultone"), _says("answerone")),
    _probe(_system("systemone"), _calls(_call()), _result("resultone"), _user("usertwo"), marks="argumentmark usertwo"),
    _after_call(_call("call_49c89af0")),
    _probe(_user("userone"), _calls(_call(None)), _result("resultone", None)),
    _after_call(_call(arguments='{"city": "argumentmark'), marks="argumentmark"),
    _after_call(_call(arguments=["argumentmark"]), marks="argumentmark"),
    _after_call(_call(arguments=5)),
    _probe(_user("userone"), _calls(_call(), content=None), _result("resultone")),
)

# Tools that some templates cannot write.
_TOOLS = (
    _tool({"type": "object", "properties": {"city": _CITY}}),
    _tool({"type": "object", "properties": {"city": {"type": "string"}}}, description="a tool"),
    _tool({"type": "object"}, description="a tool"),
    _tool({"type": "object", "properties": {"city": {"type": ["string", "null"]}}}, description="a tool"),
    _tool({"type": "object", "properties": {"city": {"enum": ["a", 1]}}}, description="a tool"),
    _tool({"type": "object", "properties": {"city": True}}, description="a tool"),
)

# Repairs that reach far, the furthest first. One of them is needed only where no other helps.
_FAR = (
    *(calls_as_text, calls_as_text_if_alone, texts_before_calls, roles_alternating),
    *(systems_into_user, systems_joined, systems_first),
)
_IN_DOUBT = (*_FAR, *(repair for repair in REPAIRS if repair not in _FAR))


@attrs.frozen
class Needs:
    """The repairs that a template needs, in the order of `REPAIRS`."""

    always: tuple[Repair, ...] = ()  # where the template leaves a text out
    on_error: tuple[Repair, ...] = ()  # these, and those where it raises an error


def repaired(chat: TemplateInput, repairs: Iterable[Repair]) -> TemplateInput:
    """The chat after some repairs."""
    for repair in repairs:
        chat = repair(chat)
    return chat


def needs_of(render: Render, *, has_tools: bool, calls_in_content: Repair | None = None) -> Needs:
    """Probe a template, which may raise anything, and may be another one if it `has_tools`. `calls_in_content` is the
    repair of this name; None if a call is no part of a content.
    """
    tools = (_TOOL,) if has_tools else ()
    called = TemplateInput(_CALLED, tools)

    def writes_calls(*repairs: Repair) -> bool:
        return _takes(render, repaired(called, repairs), ("argumentmark",))

    first: tuple[Repair, ...] = ()
    if not (takes_calls := _takes(render, called)):
        first = (arguments_as_json,) if _takes(render, arguments_as_json(called)) else ()
    elif calls_in_content is not None and not writes_calls():
        both = _takes(render, calls_in_content(called), ("argumentmark", "resultone"))
        first = (calls_in_content,) if both else ()
    # Without calls that can be written, no probe with calls says anything.
    writes_arguments = writes_calls(*first) or (not takes_calls and writes_calls(calls_as_text))
    always: set[Repair] = set(first if takes_calls else ())
    on_error: set[Repair] = set(first)
    cases = [(TemplateInput(messages, tools), marks) for messages, marks in _PROBES]
    cases += [(TemplateInput((_user("userone"),), (tool,)), ("markedtool",)) for tool in _TOOLS if has_tools]
    for chat, marks in cases:
        if not writes_arguments:
            marks = tuple(mark for mark in marks if not mark.startswith("argument"))
        chat = repaired(chat, first)
        if not _takes(render, chat, marks):
            needed = needed_of(REPAIRS, partial(_takes, render, marks=marks), chat)
            (always if _takes(render, chat) else on_error).update(needed)
    in_order = (*REPAIRS, *first)
    return Needs(
        tuple(repair for repair in in_order if repair in always),
        tuple(repair for repair in in_order if repair in always | on_error),
    )


def needed_of(repairs: Sequence[Repair], takes: Callable[[TemplateInput], bool], chat: TemplateInput) -> list[Repair]:
    """Those of some repairs without any of which a chat is not taken; none if all of them do not help."""
    needed, changed = [], chat
    for repair in repairs:
        after = repair(changed)
        if after != changed or repair(chat) != chat:
            needed.append(repair)
        changed = after
    if not takes(changed):
        return []
    for repair in _IN_DOUBT:
        fewer = [each for each in needed if each is not repair]
        if len(fewer) < len(needed) and takes(repaired(chat, fewer)):
            needed = fewer
    return needed


def _takes(render: Render, chat: TemplateInput, marks: Sequence[str] = ()) -> bool:
    """Whether a template writes a chat, with these texts in this order."""
    if (text := tried(render, chat)) is None:
        return False
    places = [text.find(mark) for mark in marks]
    return -1 not in places and places == sorted(places)


def tried(render: Render, chat: TemplateInput) -> str | None:
    """The text of a chat; None if the template raises an error."""
    # The template is third-party code, written for certain messages; it may raise anything for others.
    try:
        return render(chat)
    except Exception:
        return None


# --- repairs of a client's chat -------------------------------------------------------------------


def needed_for_texts(repairs: Sequence[Repair], render: Render, chat: TemplateInput) -> list[Repair]:
    """As `needed_of`: those without any of which the template raises, or leaves out what it writes after them all."""
    whole = repaired(chat, repairs)
    if (text := tried(render, whole)) is None:
        return []
    own = _words_of(chat)
    # Repairs add words, as to say whose result a text is.
    wanted = (_words(text) - (_words_of(whole) - own)) & own
    return needed_of(repairs, lambda changed: _has(tried(render, changed), wanted), chat)


def without_loss(repairs: Sequence[Repair], render: Render, chat: TemplateInput) -> TemplateInput:
    """The chat after those of some repairs after which the template leaves out nothing that it writes without them."""
    whole = repaired(chat, repairs)
    if whole == chat or (text := tried(render, chat)) is None:
        return whole
    wanted = _words(text) & _words_of(chat)
    fewer = ([each for each in repairs if each is not repair] for repair in _IN_DOUBT if repair in repairs)
    for kept in (repairs, *fewer):
        changed = repaired(chat, kept)
        after = tried(render, changed)
        if after is None or _has(after, wanted):
            return changed
    return chat


def _has(text: str | None, wanted: Counter[str]) -> bool:
    return text is not None and wanted <= _words(text)


def _words(text: str) -> Counter[str]:
    """The words of a text and how often it has them, whether it is written as JSON or not."""
    return Counter(re.findall(r"\w+", _ESCAPED.sub(_unescaped, text) if "\\" in text else text))


_ESCAPED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|[nrtbf\"\\/])")


def _unescaped(match: re.Match[str]) -> str:
    return chr(int(match[1], 16)) if match[1] else " "


def _words_of(chat: TemplateInput) -> Counter[str]:
    texts: list[str] = []
    for message in chat.messages:
        texts.append(_plain_text(message.get("content")))
        calls = message.get("tool_calls")
        listed = calls if isinstance(calls, (list, tuple)) else ()
        texts += (_plain_text(call.get("function")) for call in listed if isinstance(call, Mapping))
    return _words("\n".join(texts))


def _plain_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "\n".join(map(_plain_text, value.values()))
    if isinstance(value, (list, tuple)):
        return "\n".join(map(_plain_text, value))
    return value if isinstance(value, str) else ""
