"""Switches of chat templates: reasoning on and off by the template's own name, and its effort."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs

from runtime.generation.chat_template.known import once_per_template, source_of
from runtime.generation.chat_template.plain import QUESTION, USER_MARK, tried_with


@attrs.frozen
class ThinkingSwitch:
    """The variable with which a template switches reasoning: its name, and its values for on and off."""

    name: str
    on: Any
    off: Any


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


@once_per_template
def thinking_switch(tokenizer: Any) -> ThinkingSwitch | None:
    """The template's own switch for reasoning, found by rendering with it on and off; None if it has none."""
    names = dict.fromkeys(_SWITCH_NAME.findall(source_of(tokenizer)))
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
    return getattr(tokenizer, "chat_template", None) is not None and thinking_switch(tokenizer) is None


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
        efforts = [effort]
        if effort.lower() in _EFFORTS:
            level = _EFFORTS.index(effort.lower())
            downwards = _EFFORTS[:0:-1]  # without "none"; of two that are as near, the higher comes first
            efforts += sorted(downwards, key=lambda other: abs(_EFFORTS.index(other) - level))
        taken = (each for each in efforts if tried_with(tokenizer, QUESTION, reasoning_effort=each) is not None)
        if (nearest := next(taken, None)) is not None:
            changed["reasoning_effort"] = nearest
    return changed
