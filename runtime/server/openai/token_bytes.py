"""The bytes of a token, which may be a part of a character."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes(tokenizer: TokenizerWrapper, token: int, text: str) -> list[int] | None:
    """The bytes of a token.

    Args:
        tokenizer: the token's.
        token: its id.
        text: the token decoded alone.

    Returns: None where they are unknown: the token is part of a character, of a tokenizer that has neither byte-level
        tokens nor byte fallback.
    """
    if "\ufffd" not in text:
        return list(text.encode())
    convert = getattr(tokenizer, "convert_ids_to_tokens", None)
    name = None if convert is None else convert(token)
    if not isinstance(name, str):
        return None
    if (byte := _BYTE_TOKEN.fullmatch(name)) is not None:
        return [int(byte[1], 16)]
    values = [_byte_of_character().get(character) for character in name]
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else None


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for, by the table of GPT-2 (its `encoder.py`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
