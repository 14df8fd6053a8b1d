"""Texts to learn from: files become batches of token ids, a few of them held out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from protocol.errors import SettingsError
from protocol.reprs import shown_path

# One of so many windows is held out.
HELD_OUT_EVERY = 20


def read_texts(files: Sequence[Path], tokenizer: Any) -> Iterator[str]:
    """The texts of some files, in order.

    Args:
        files: `.jsonl` with a "text", or "messages" for the chat template, in each line; any other is one text.
        tokenizer: the target's.

    Raises: SettingsError: a file cannot be read, or a line has neither.
    """
    for file in files:
        try:
            content = file.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise SettingsError(f"{shown_path(str(file))} cannot be read: {error}") from error
        if file.suffix == ".jsonl":
            for number, line in enumerate(content.splitlines(), 1):
                if line.strip():
                    yield _text_of(line, file, number, tokenizer)
        else:
            yield content


def _text_of(line: str, file: Path, number: int, tokenizer: Any) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise SettingsError(f"line {number} of {shown_path(str(file))} is not JSON: {error}") from error
    if isinstance(record, dict) and isinstance(record.get("text"), str):
        return str(record["text"])
    if isinstance(record, dict) and isinstance(record.get("messages"), list):
        return str(tokenizer.apply_chat_template(record["messages"], tokenize=False))
    raise SettingsError(f'line {number} of {shown_path(str(file))} has neither a "text" nor "messages"')


class Windows:
    """Windows of equally many tokens, cut from texts one after another.

    Attributes:
        held_out: (n, length) windows that are not learnt from.
        learnt: (m, length) the others.
    """

    def __init__(self, texts: Iterator[str], tokenizer: Any, length: int) -> None:
        """Cut texts.

        Args:
            texts: to learn from.
            tokenizer: the target's.
            length: tokens of a window, >= 8.

        Raises: SettingsError: there is less than a batch's worth of text.
        """
        tokens: list[int] = []
        for text in texts:
            tokens += tokenizer.encode(text)
        num_windows = len(tokens) // length
        if num_windows < 2:
            raise SettingsError(
                f"the texts have {len(tokens)} tokens, and at least {2 * length} are needed; give more files"
            )
        windows = mx.array(tokens[: num_windows * length], mx.int32).reshape(num_windows, length)
        is_held_out = [i % HELD_OUT_EVERY == 0 for i in range(num_windows)]
        self.held_out = windows[mx.array([i for i in range(num_windows) if is_held_out[i]])]
        self.learnt = windows[mx.array([i for i in range(num_windows) if not is_held_out[i]])]
        self._counts = Counter(tokens)
        mx.eval(self.held_out, self.learnt)

    def batch(self, index: int, size: int, seed: int) -> mx.array:
        """(size, length) windows: the `index`-th batch of an endless series. Each pass over all has its own order.

        The series depends on the arguments alone, so that training goes on where it was interrupted.
        """
        num_windows = self.learnt.shape[0]
        per_epoch = max(1, num_windows // size)
        epoch, place = divmod(index, per_epoch)
        order = mx.random.permutation(num_windows, key=mx.random.key(seed + epoch))
        return self.learnt[order[place * size : (place + 1) * size]]

    def held_out_batches(self, size: int) -> list[mx.array]:
        """All windows that are held out."""
        return [self.held_out[i : i + size] for i in range(0, self.held_out.shape[0], size)]

    def most_frequent(self, count: int, vocab_size: int) -> list[int]:
        """The ids that occur most often, ascending; filled up with the first ones that do not occur.

        Args:
            count: how many.
            vocab_size: of the target.
        """
        chosen = [token for token, _ in self._counts.most_common(count)]
        others = (token for token in range(vocab_size) if token not in self._counts)
        while len(chosen) < count:
            chosen.append(next(others))
        return sorted(chosen)
