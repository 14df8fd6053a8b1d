"""From the bytes that a terminal sends to what was done at its keyboard.

Pure: the same events come of the same bytes, in however many pieces these arrive. Only where nothing more comes does
time play a part: the Esc key sends the byte that all longer sequences begin with, so whether it was pressed is known
when nothing has followed for `Decoder.patience_s`.
"""

from __future__ import annotations

import codecs
import re

import attrs

# How long to wait for what may follow: a byte after Esc, which a terminal sends at once; the rest of a sequence that
# is under way, which no one key leaves open; the end of a paste, which comes unless somebody has pulled a plug.
ESCAPE_S = 0.05
SEQUENCE_S = 0.5
PASTE_S = 2.0


@attrs.frozen
class Key:
    """A key that is no text, by name: "enter", "escape", "ctrl-c", "left", "ctrl-left"."""

    name: str


@attrs.frozen
class Typed:
    """Characters that were typed, without control characters."""

    text: str


@attrs.frozen
class Pasted:
    """A text that was pasted; its line breaks are newlines, and of control characters it has these and tabs alone."""

    text: str


Event = Key | Typed | Pasted

_PASTE_END = "\x1b[201~"
# CSI, in the Linux console's dialect too; SS3, where it is a key's; and Alt with the keys that mean something here.
# What else follows an Esc was typed after it: on a slow line the two come together, and Esc must not be lost.
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
    """Takes bytes, gives events, and keeps what may be the beginning of something."""

    def __init__(self) -> None:
        # Bytes that are no UTF-8 become replacement characters, and keep nobody from leaving.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._pasting: list[str] | None = None

    @property
    def patience_s(self) -> float | None:
        """Seconds to wait for more before `settle`; None where nothing is held that more bytes could change."""
        if self._pasting is not None:
            return PASTE_S
        if not self._held:
            return None
        return ESCAPE_S if self._held == "\x1b" else SEQUENCE_S

    def feed(self, data: bytes) -> list[Event]:
        """What these bytes complete."""
        return self._events(self._utf8.decode(data))

    def settle(self) -> list[Event]:
        """What is held by itself, since nothing more came."""
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
    """Take text, or a control character, off the front."""
    if text := _TEXT.match(rest):
        events.append(Typed(text[0]))
        return rest[text.end() :]
    if rest[0] in _BY_CONTROL:
        events.append(Key(_BY_CONTROL[rest[0]]))
    elif "\x01" <= rest[0] <= "\x1a":
        events.append(Key(f"ctrl-{chr(ord(rest[0]) + 0x60)}"))
    return rest[1:]


def _name(sequence: re.Match[str]) -> str | None:
    """Which key a sequence is for; None for one that means nothing here."""
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
    # 1 plus what is held down: 1 for Shift, 2 for Alt, 4 for Ctrl. Alt and an arrow go by words, too.
    held = int(modifiers) - 1 if modifiers.isdecimal() else 0
    return f"ctrl-{name}" if name in ("left", "right") and held & 6 else name


def _clean(pasted: str) -> str:
    text = pasted.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(character for character in text if character in "\n\t" or _TEXT.match(character))
