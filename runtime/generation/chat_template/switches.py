"""Switches of chat templates: reasoning on and off by the template's own name, and its effort."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from runtime.generation.chat_template.known import ThinkingSwitch, known_of
from runtime.generation.chat_template.plain import QUESTION, USER_MARK, tried_with

# Names of switches and their values for on and off. The last ones are also levels of effort in other templates.
_SWITCHES = (
    ThinkingSwitch("enable_thinking", True, False),
    ThinkingSwitch("thinking", True, False),
    ThinkingSwitch("thinking_mode", "enabled", "disabled"),
    ThinkingSwitch("thinking_mode", "thinking", "chat"),
    ThinkingSwitch("thinking_budget", -1, 0),
)
_EFFORT_SWITCHES = tuple(ThinkingSwitch("reasoning_effort", "high", off) for off in ("none", "no_think"))
# Other names are looked for in the template.
_SWITCH_NAME = re.compile(
    r"(?<![\w.'\"])((?:enable_|use_|is_|with_|disable_|no_|skip_)?(?:think|thinking|reason|reasoning)(?:_enabled|_on)?)(?!\w)"
)
_NEGATIONS = ("disable_", "no_", "skip_")


def thinking_switch(tokenizer: Any) -> ThinkingSwitch | None:
    """The template's own switch for reasoning, found by rendering with it on and off; None if it has none."""
    known = known_of(tokenizer)
    if not known.switches:
        known.switches.append(_found_switch(tokenizer, known.template))
    return known.switches[0]


def _found_switch(tokenizer: Any, template: Any) -> ThinkingSwitch | None:
    sources = template.values() if isinstance(template, Mapping) else [template]
    names = {name: None for text in sources if isinstance(text, str) for name in _SWITCH_NAME.findall(text)}
    named = (ThinkingSwitch(name, not (off := name.startswith(_NEGATIONS)), off) for name in names)
    for switch in (*_SWITCHES, *named, *_EFFORT_SWITCHES):
        on, off = (tried_with(tokenizer, QUESTION, **{switch.name: value}) for value in (switch.on, switch.off))
        if on is None or off is None:
            continue
        if switch not in _SWITCHES:
            # A value that the template only writes down switches nothing.
            on, off = (text.rpartition(USER_MARK)[2] for text in (on, off))
        if on != off:
            return switch
    return None


def lacks_switch(tokenizer: Any) -> bool:
    """Whether the template has no switch for reasoning. That a renderer in Python has none cannot be told."""
    return known_of(tokenizer).template is not None and thinking_switch(tokenizer) is None


def with_own_switch(tokenizer: Any, switches: Mapping[str, Any]) -> dict[str, Any]:
    """Variables with `enable_thinking`, and with the same wish under the template's own name, unless that is given."""
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


def with_known_effort(tokenizer: Any, switches: Mapping[str, Any]) -> dict[str, Any]:
    """The variables, with the nearest effort that the template takes, or without one if it takes none."""
    changed = dict(switches)
    if isinstance(effort := changed.pop("reasoning_effort", None), str):
        efforts = known_of(tokenizer).efforts
        nearest = efforts[effort] if effort in efforts else _nearest_effort(tokenizer, effort)
        if effort in _EFFORTS:  # clients may think of any number of others
            efforts[effort] = nearest
        if nearest is not None:
            changed["reasoning_effort"] = nearest
    return changed


def _nearest_effort(tokenizer: Any, effort: str) -> str | None:
    """The nearest effort that the template takes, of two the higher; None for none."""
    efforts = [effort]
    if effort.lower() in _EFFORTS:
        level = _EFFORTS.index(effort.lower())
        downwards = _EFFORTS[:0:-1]  # without "none"
        efforts += sorted(downwards, key=lambda other: abs(_EFFORTS.index(other) - level))
    taken = (each for each in efforts if tried_with(tokenizer, QUESTION, reasoning_effort=each) is not None)
    return next(taken, None)
