"""Error messages in which some words are fields, and how each face (library, command line, server) writes those."""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from types import MappingProxyType
from typing import Any, Self

from protocol.errors import OutriderError
from protocol.reprs import shown


class Wording:
    """How a face writes the fields of messages. This one is Python's, for callers of the library.

    Attributes:
        words: what has another name in each face.
    """

    words: Mapping[str, str] = MappingProxyType({"none": "None", "save": "Conversation.save", "reset": "reset"})

    def argument(self, name: str) -> str:
        """The name of a setting or option."""
        return name

    def assignment(self, name: str, value: object) -> str:
        """A setting or option with a value."""
        return f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}"


class Message(str):
    """The message of an error, of which some words are fields that each face writes for its readers.

    In the template, `{option}` stands for the setting or option that the message is about, `{value}` for the value that
    was given, and `{option=}` for both. `{name}` stands for the field, or else the argument, of that name, and
    `{name=}` for the argument with its value. `{none}`, `{save}` and `{reset}` are words of the `Wording`.
    """

    template: str
    fields: dict[str, Any]

    def __new__(cls, template: str, /, **fields: Any) -> Self:
        message = super().__new__(cls, _worded(template, fields, Wording()))
        message.template, message.fields = template, fields
        return message

    def __getnewargs_ex__(self) -> tuple[tuple[str], dict[str, Any]]:
        return (self.template,), self.fields


def worded(said: object, wording: Wording) -> str:
    """A message, an error or a field of a message in the words of a face."""
    if isinstance(said, OutriderError) and said.args:
        said = said.args[0]
    return _worded(said.template, said.fields, wording) if isinstance(said, Message) else str(said)


def _worded(template: str, fields: dict[str, Any], wording: Wording) -> str:
    said: list[str] = []
    for text, name, _, _ in Formatter().parse(template):
        said.append(text)
        if name is None:
            continue
        if name == "option=":
            said.append(wording.assignment(fields["option"], fields["value"]))
        elif name.endswith("="):
            said.append(wording.assignment(name[:-1], fields[name[:-1]]))
        elif name == "option":
            option = fields[name]
            said.append(worded(option, wording) if isinstance(option, Message) else wording.argument(option))
        elif name == "value":
            said.append(wording.words["none"] if fields[name] is None else shown(fields[name]))
        elif name in wording.words:
            said.append(wording.words[name])
        elif name in fields and f"{{{name}=}}" not in template:
            said.append(worded(fields[name], wording))
        else:
            said.append(wording.argument(name))
    return "".join(said)
