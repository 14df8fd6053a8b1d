"""Probes of a chat template: which repairs of chats it needs, tried out once with texts that can be found again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs

from runtime.generation.chat_template.repairs import (
    REPAIRS,
    Chat,
    Message,
    Repair,
    arguments_as_json,
    calls_as_text,
    roles_alternating,
    systems_first,
    systems_into_user,
    systems_joined,
)

Render = Callable[[Chat], str]


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def _developer(text: str) -> Message:
    return {"role": "developer", "content": text}


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _calls(*calls: Message, content: str | None = "") -> Message:
    message = {"role": "assistant", "tool_calls": list(calls)}
    return message if content is None else {**message, "content": content}


def _call(id: str | None = "callmark1", arguments: Any = None) -> Message:
    function = {"name": "markedtool", "arguments": {"city": "argumentmark"} if arguments is None else arguments}
    call = {"type": "function", "function": function}
    return call if id is None else {**call, "id": id}


def _result(text: str, id: str | None = "callmark1") -> Message:
    result = {"role": "tool", "name": "markedtool", "content": text}
    return result if id is None else {**result, "tool_call_id": id}


def _orphan(text: str) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": "callmark9"}


_CITY = {"type": "string", "description": "a city"}


def _tool(parameters: Any, **function: Any) -> Message:
    return {"type": "function", "function": {"name": "markedtool", **function, "parameters": parameters}}


_TOOL = _tool({"type": "object", "properties": {"city": _CITY}, "required": ["city"]}, description="a tool")


@attrs.frozen
class Probe:
    """A chat, and the texts of it that a template must write, in this order."""

    messages: tuple[Message, ...]
    marks: tuple[str, ...] = ()


def _probe(*messages: Message, marks: str = "") -> Probe:
    return Probe(messages, tuple(marks.split()))


_ANSWERED = (_user("userone"), _says("answerone"))
_CALLED = (_user("userone"), _calls(_call()), _result("resultone"))


def _after_call(call: Message, marks: str = "") -> Probe:
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
_FAR = (calls_as_text, roles_alternating, systems_into_user, systems_joined, systems_first)
_IN_DOUBT = (*_FAR, *(repair for repair in REPAIRS if repair not in _FAR))


@attrs.frozen
class Needs:
    """The repairs that a template needs, in the order of `REPAIRS`.

    Attributes:
        always: where the template leaves a text out.
        on_error: these, and those where it raises an error.
    """

    always: tuple[Repair, ...] = ()
    on_error: tuple[Repair, ...] = ()


def repaired(chat: Chat, repairs: Iterable[Repair]) -> Chat:
    """The chat after some repairs."""
    for repair in repairs:
        chat = repair(chat)
    return chat


def needs_of(render: Render, *, has_tools: bool) -> Needs:
    """Probe a template.

    Args:
        render: the template; it may raise anything.
        has_tools: whether it gets tools; it may be another template then.
    """
    tools = (_TOOL,) if has_tools else ()
    # Without calls that can be written, no probe with calls says anything.
    needs_json = not _takes(render, Chat(_CALLED, tools)) and _takes(render, arguments_as_json(Chat(_CALLED, tools)))
    first = (arguments_as_json,) if needs_json else ()
    writes_arguments = _takes(render, repaired(Chat(_CALLED, tools), first), ("argumentmark",))
    always: set[Repair] = set()
    on_error: set[Repair] = set(first)
    cases = [(Chat(probe.messages, tools), probe.marks) for probe in _PROBES]
    cases += [(Chat((_user("userone"),), (tool,)), ("markedtool",)) for tool in _TOOLS if has_tools]
    for chat, marks in cases:
        if not writes_arguments:
            marks = tuple(mark for mark in marks if not mark.startswith("argument"))
        chat = repaired(chat, first)
        if not _takes(render, chat, marks):
            needed = needed_of(REPAIRS, render, chat, marks)
            (always if _takes(render, chat) else on_error).update(needed)
    in_order = (*REPAIRS, arguments_as_json)
    return Needs(
        tuple(repair for repair in in_order if repair in always),
        tuple(repair for repair in in_order if repair in always | on_error),
    )


def needed_of(repairs: Sequence[Repair], render: Render, chat: Chat, marks: Sequence[str] = ()) -> list[Repair]:
    """Those of some repairs without any of which the template does not take a chat; none if all of them do not help."""
    needed, changed = [], chat
    for repair in repairs:
        after = repair(changed)
        if after != changed or repair(chat) != chat:
            needed.append(repair)
        changed = after
    if not _takes(render, changed, marks):
        return []
    for repair in _IN_DOUBT:
        fewer = [each for each in needed if each is not repair]
        if len(fewer) < len(needed) and _takes(render, repaired(chat, fewer), marks):
            needed = fewer
    return needed


def _takes(render: Render, chat: Chat, marks: Sequence[str] = ()) -> bool:
    """Whether a template writes a chat, with these texts in this order."""
    # The template is third-party code, written for certain messages; it may raise anything for others.
    try:
        text = render(chat)
    except Exception:
        return False
    places = [text.find(mark) for mark in marks]
    return -1 not in places and places == sorted(places)
