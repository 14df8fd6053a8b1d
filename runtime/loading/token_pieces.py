"""The bytes that tokens stand for, by the two ways in which tokenizers write bytes into the names of tokens."""

from __future__ import annotations

import functools
import re

# What stands for a blank in tokenizers in the way of SentencePiece.
BLANK = "\u2581"

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def byte_level_piece(name: str) -> bytes | None:
    """The bytes of a token of a byte-level tokenizer; None if its name has characters that stand for no byte."""
    values = [_byte_of_character().get(character) for character in name]
    known = [value for value in values if value is not None]
    return bytes(known) if len(known) == len(values) else None


def byte_fallback(name: str) -> bytes | None:
    """The byte of a token that stands for one, as SentencePiece names it; None for other tokens."""
    byte = _BYTE_TOKEN.fullmatch(name)
    return None if byte is None else bytes([int(byte[1], 16)])


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for, by the table of GPT-2 (its `encoder.py`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
