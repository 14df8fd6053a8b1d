"""A decoder of the bytes that a terminal sends: keys, typed text and pastes.

The same bytes give the same events, however they are cut into pieces. Time matters in one case: the Esc key sends the
byte that begins all longer sequences, so the key is known only when nothing follows for `Decoder.patience_s`.
"""

from __future__ import annotations

import codecs
import re

import attrs

# Seconds to wait for more bytes: after Esc, whose sequence a terminal sends at once; inside a sequence, which no single
# key leaves open; inside a paste, whose end comes unless the connection is lost.
ESCAPE_S = 0.05
SEQUENCE_S = 0.5
PASTE_S = 2.0


@attrs.frozen
class Key:
    """A key other than a character, by name: "enter", "escape", "ctrl-c", "left", "ctrl-left"."""

    name: str


@attrs.frozen
class Typed:
    """Typed characters, without control characters."""

    text: str


@attrs.frozen
class Pasted:
    """A pasted text. Its line breaks are newlines; newlines and tabs are its only control characters."""

    text: str


Event = Key | Typed | Pasted

_PASTE_END = "\x1b[201~"
# CSI, with the dialect of the Linux console; SS3 of known keys; and Alt with keys that have a meaning here. Other bytes
# after an Esc were typed after it: on a slow connection both arrive together, and Esc must not be lost.
_SEQUENCE = re.compile(
    r"\x1b(?:\[\[[A-E]|\[(?!\[)(?P<parameters>[0-?]{0,32})[ -/]{0,4}(?P<final>[@-~])|O(?P<ss3>[A-DFHMP-S])"
    r"|(?P<alt>[bdf\r\n\x7f\x08]))"
)
_BEGUN = re.compile(r"\x1b(?:\[\[?|\[[0-?]{1,32}[ -/]{0,4}|O)?\Z")
_TEXT = re.compile(r"[^\x00-\x1f\x7f-\x9f]+")

_BY_FINAL = {"A": "up", "B": "down", "C": "right", "D": "left", "H": "home", "F": "end", "M": "enter"}
_BY_NUMBER = {"1": "home", "7": "home", "4": "end", "8": "end", "3": "delete", "5": "page-up", "6": "page-down"}
_BY_ALT = {
    "b": "ctrl-left", "f": "ctrl-right", "d": "alt-d", "\r": "newline", "\n": "newline", "\x7f": "ctrl-w",
    "\x08": "ctrl-w",
}  # fmt: skip
_BY_CONTROL = {"\r": "enter", "\n": "newline", "\t": "tab", "\x7f": "backspace", "\x08": "backspace"}


class Decoder:
    """Turns bytes into events, and keeps the beginning of an incomplete sequence."""

    def __init__(self) -> None:
        # Invalid UTF-8 becomes replacement characters, so that keys after it still work.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._pasting: list[str] | None = None

    @property
    def patience_s(self) -> float | None:
        """Seconds to wait for more bytes before `settle`; None if nothing is incomplete."""
        if self._pasting is not None:
            return PASTE_S
        if not self._held:
            return None
        return ESCAPE_S if self._held == "\x1b" else SEQUENCE_S

    def feed(self, data: bytes) -> list[Event]:
        """The events that these bytes complete."""
        return self._events(self._utf8.decode(data))

    def settle(self) -> list[Event]:
        """The events of the incomplete bytes, once no more bytes came."""
        if self._pasting is not None:
            text, self._pasting, self._held = "".join([*self._pasting, self._held]), None, ""
            return [Pasted(_clean(text))]
        held, self._held = self._held, ""
        return [Key("escape"), *self._events(held[1:])] if held else []

    def _events(self, text: str) -> list[Event]:
        rest, self._held = self._held + text, ""
        events: list[Event] = []
        while rest and not self._held:
            if self._pasting is not None:
                rest = self._paste(rest, events)
            elif rest[0] != "\x1b":
                rest = _plain(rest, events)
            elif sequence := _SEQUENCE.match(rest):
                rest = rest[sequence.end() :]
                name = _name(sequence)
                if name == "paste":
                    self._pasting = []
                elif name is not None:
                    events.append(Key(name))
            elif _BEGUN.match(rest):
                self._held = rest
            else:
                events.append(Key("escape"))
                rest = rest[1:]
        return events

    def _paste(self, rest: str, events: list[Event]) -> str:
        assert self._pasting is not None
        pasted, end, after = rest.partition(_PASTE_END)
        if end:
            events.append(Pasted(_clean("".join([*self._pasting, pasted]))))
            self._pasting = None
            return after
        num_held = next(n for n in range(min(len(rest), len(_PASTE_END) - 1), -1, -1) if rest.endswith(_PASTE_END[:n]))
        self._pasting.append(rest[: len(rest) - num_held])
        self._held = rest[len(rest) - num_held :]
        return ""


def _plain(rest: str, events: list[Event]) -> str:
    """Remove text or a control character from the front; returns the rest."""
    if text := _TEXT.match(rest):
        events.append(Typed(text[0]))
        return rest[text.end() :]
    if rest[0] in _BY_CONTROL:
        events.append(Key(_BY_CONTROL[rest[0]]))
    elif "\x01" <= rest[0] <= "\x1a":
        events.append(Key(f"ctrl-{chr(ord(rest[0]) + 0x60)}"))
    return rest[1:]


def _name(sequence: re.Match[str]) -> str | None:
    """The key of a sequence; None for one without a meaning here."""
    if sequence["alt"]:
        return _BY_ALT[sequence["alt"]]
    if sequence["ss3"]:
        return _BY_FINAL.get(sequence["ss3"])
    if not sequence["final"]:
        return None
    number, _, modifiers = sequence["parameters"].partition(";")
    if sequence["final"] == "~":
        name = "paste" if number == "200" else _BY_NUMBER.get(number)
    else:
        name = _BY_FINAL.get(sequence["final"]) if sequence["final"] != "M" else None
    # 1 plus the modifiers: 1 for Shift, 2 for Alt, 4 for Ctrl. Alt with an arrow moves by words, too.
    held = int(modifiers) - 1 if modifiers.isdecimal() else 0
    return f"ctrl-{name}" if name in ("left", "right") and held & 6 else name


def _clean(pasted: str) -> str:
    text = pasted.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(character for character in text if character in "\n\t" or _TEXT.match(character))
