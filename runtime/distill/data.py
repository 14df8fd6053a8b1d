"""Texts to learn from: files are cut into windows of equal length, some of which are held out."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from protocol.errors import SettingsError
from protocol.reprs import shown_path

# One text in this many is held out. If there are fewer texts, one window in this many is.
HELD_OUT_EVERY = 20
# The most windows that are held out. More would make evaluations slow, at the expense of training.
MAX_HELD_OUT = 64


def read_texts(files: Sequence[Path], tokenizer: Any) -> Iterator[str]:
    """The texts of some files, in order: of `.jsonl`, a "text" or "messages" in each line; any other is one text.

    Raises: SettingsError: a file cannot be read, or a line has neither.
    """
    for file in files:
        try:
            content = file.read_text(encoding="utf-8")
        except OSError as error:
            raise SettingsError(f"{shown_path(str(file))} cannot be read: {error.strerror}") from error
        except UnicodeError as error:
            raise SettingsError(f"{shown_path(str(file))} is not text in UTF-8: {error}") from error
        if file.suffix == ".jsonl":
            for number, line in enumerate(content.splitlines(), 1):
                if line.strip():
                    yield _text_of(line, file, number, tokenizer)
        else:
            yield content


def _text_of(line: str, file: Path, number: int, tokenizer: Any) -> str:
    where = f"line {number} of {shown_path(str(file))}"
    try:
        record = json.loads(line)
    except ValueError as error:
        raise SettingsError(f"{where} is not JSON: {error}") from error
    if isinstance(record, dict) and isinstance(record.get("text"), str):
        return str(record["text"])
    if isinstance(record, dict) and isinstance(record.get("messages"), list):
        if getattr(tokenizer, "chat_template", None) is None:
            raise SettingsError(f'{where} has "messages", and the target has no chat template; give a "text"')
        return str(tokenizer.apply_chat_template(record["messages"], tokenize=False))
    raise SettingsError(f'{where} has neither a "text" nor "messages"')


class Windows:
    """Windows of equal length, cut from texts that follow one another.

    Attributes:
        held_out, learnt: (n, length) int32.
        num_tokens: number of tokens in all texts.
        digest: identifies the texts and the length of a window, in hexadecimal.
    """

    def __init__(self, texts: Iterator[str], tokenizer: Any, length: int) -> None:
        """Cut texts, with the end-of-text token between them, into windows of `length` tokens, >= 8. Whole texts are
        held out if there are at least `HELD_OUT_EVERY`, else windows.

        Raises: SettingsError: there is less than two windows of text.
        """
        end = getattr(tokenizer, "eos_token_id", None)
        encoded = [
            array("i", [*tokenizer.encode(text, verbose=False), *([] if end is None else [end])]) for text in texts
        ]
        self.num_tokens = sum(map(len, encoded))
        digests = [hashlib.sha256(tokens.tobytes()).hexdigest() for tokens in encoded]
        self.digest = hashlib.sha256(" ".join([str(length), *digests]).encode()).hexdigest()[:16]
        num_held_out = len(encoded) // HELD_OUT_EVERY
        held_out = set(sorted(digests)[:num_held_out])
        pairs = [*zip(encoded, digests, strict=True)]
        kept = _windows([text for text, digest in pairs if digest in held_out], length)
        learnt = _windows([text for text, digest in pairs if digest not in held_out], length)
        if learnt.shape[0] + kept.shape[0] < 2:
            raise SettingsError(
                f"the texts have {self.num_tokens} tokens, and at least {2 * length} are needed; give more files"
            )
        if 0 in (learnt.shape[0], kept.shape[0]):
            every = mx.concatenate([learnt, kept])
            places = range(every.shape[0])
            kept = every[mx.array([i for i in places if i % HELD_OUT_EVERY == 0])]
            learnt = every[mx.array([i for i in places if i % HELD_OUT_EVERY > 0])]
        # At most `MAX_HELD_OUT`, spread evenly.
        self.held_out = kept[:: -(-kept.shape[0] // MAX_HELD_OUT)]
        self.learnt = learnt
        self._counts = Counter(token for tokens in encoded for token in tokens)
        mx.eval(self.held_out, self.learnt)

    def add(self, windows: mx.array) -> None:
        """Add windows (n, length) to learn from."""
        self.learnt = mx.concatenate([self.learnt, windows.astype(mx.int32)])
        self._counts.update(windows.flatten().tolist())  # type: ignore[arg-type]
        mx.eval(self.learnt)

    def batch(self, index: int, size: int, seed: int) -> mx.array:
        """(size, length) windows: the `index`-th batch of an endless series. Each epoch has its own order.

        The series depends on the arguments alone, so that training can continue where it was interrupted. If there are
        fewer windows than `size`, a batch has all.
        """
        num_windows = self.learnt.shape[0]
        per_epoch = max(1, num_windows // size)
        epoch, place = divmod(index, per_epoch)
        order = mx.random.permutation(num_windows, key=mx.random.key(seed + epoch))
        return self.learnt[order[place * size : (place + 1) * size]]

    def held_out_batches(self, size: int) -> list[mx.array]:
        """All windows that are held out, up to `size` at a time."""
        return [self.held_out[i : i + size] for i in range(0, self.held_out.shape[0], size)]

    def most_frequent(self, count: int, vocab_size: int) -> list[int]:
        """The `count` ids that occur most often, ascending; filled up with the lowest ids that do not occur."""
        chosen = [token for token, _ in sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))[:count]]
        others = (token for token in range(vocab_size) if token not in self._counts)
        while len(chosen) < count:
            chosen.append(next(others))
        return sorted(chosen)


def _windows(texts: Sequence[array[int]], length: int) -> mx.array:
    """Windows (n, length) of the texts, joined in order; the last tokens are dropped if they fill no window."""
    tokens = array("i")
    for text in texts:
        tokens += text
    num_windows = len(tokens) // length
    if num_windows == 0:
        return mx.zeros((0, length), mx.int32)
    return mx.array(cast(Any, memoryview(tokens)[: num_windows * length]), mx.int32).reshape(num_windows, length)
