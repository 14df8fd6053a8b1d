"""Texts to learn from: files are cut into windows of equal length, some of which are held out."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import attrs
import mlx.core as mx

from protocol.errors import PromptError, SettingsError
from protocol.reprs import shown_path
from runtime.generation.chat_template.rendering import render_chat_template

# One text in this many is held out. If there are fewer texts, one window in this many is.
HELD_OUT_EVERY = 20
# The most windows that are held out. More would make evaluations slow, at the expense of training.
MAX_HELD_OUT = 64


@attrs.frozen
class Text:
    """A text to learn from."""

    content: str
    category: str = ""  # acceptance is also shown by category; may be empty
    is_chat: bool = False  # rendered by the chat template, with all special tokens that it wants


def read_texts(files: Sequence[Path], tokenizer: Any) -> Iterator[Text]:
    """The texts of some files, in order: of `.jsonl`, a "text" or "messages" in each line, and perhaps its "category";
    any other is one text. Raises: SettingsError: a file cannot be read, or a line is no such text.
    """
    for file in files:
        try:
            content = file.read_text(encoding="utf-8-sig")
        except OSError as error:
            raise SettingsError(f"{shown_path(str(file))} cannot be read: {error.strerror}") from error
        except UnicodeError as error:
            raise SettingsError(f"{shown_path(str(file))} is not text in UTF-8: {error}") from error
        if file.suffix == ".jsonl":
            # Not `splitlines`: other ends of lines, such as U+2028, may stand in a JSON string.
            for number, line in enumerate(content.split("\n"), 1):
                if line.strip():
                    yield _text_of(line, file, number, tokenizer)
        else:
            yield Text(content)


def _text_of(line: str, file: Path, number: int, tokenizer: Any) -> Text:
    where = f"line {number} of {shown_path(str(file))}"
    try:
        record = json.loads(line)
    except ValueError as error:
        raise SettingsError(f"{where} is not JSON: {error}") from error
    category = str(record.get("category") or "") if isinstance(record, dict) else ""
    if isinstance(record, dict) and isinstance(record.get("text"), str):
        return Text(record["text"], category)
    if isinstance(record, dict) and isinstance(messages := record.get("messages"), list):
        if getattr(tokenizer, "chat_template", None) is None:
            raise SettingsError(f'{where} has "messages", and the target has no chat template; give a "text"')
        if not messages or not all(isinstance(message, dict) for message in messages):
            raise SettingsError(f'{where} has "messages" that are no list of objects with "role" and "content"')
        try:
            return Text(render_chat_template(messages, tokenizer, add_generation_prompt=False), category, True)
        except PromptError as error:
            raise SettingsError(f"{where}: {error}") from error
    raise SettingsError(f'{where} has neither a "text" nor "messages"')


@attrs.frozen
class _Encoded:
    """A text as tokens."""

    tokens: array[int]
    category: str
    digest: str


class Windows:
    """Windows of equal length, cut from texts that follow one another: `held_out` and `learnt`, (n, length) int32."""

    def __init__(self, texts: Iterator[Text], tokenizer: Any, length: int) -> None:
        """Cut texts, with the end-of-text token between them, into windows of `length` tokens, >= 8. Whole texts are
        held out if a category has `HELD_OUT_EVERY`, else windows. Raises: SettingsError: there is too little text.
        """
        end = getattr(tokenizer, "eos_token_id", None)
        ends = [] if end is None else [end]

        def encode(text: Text) -> _Encoded:
            ids = tokenizer.encode(text.content, verbose=False, add_special_tokens=not text.is_chat)
            tokens = array("i", [*ids, *ends])
            return _Encoded(tokens, text.category, hashlib.sha256(tokens.tobytes()).hexdigest())

        encoded = [encode(text) for text in texts]
        self.num_tokens = sum(len(text.tokens) for text in encoded)
        names = [str(length), *(text.digest + text.category for text in encoded)]
        self.digest = hashlib.sha256(" ".join(names).encode()).hexdigest()[:16]  # of the texts and the length
        by_category: dict[str, list[_Encoded]] = {}
        for text in encoded:
            by_category.setdefault(text.category, []).append(text)
        digests = {category: sorted(text.digest for text in each) for category, each in by_category.items()}
        held_out = {digest for each in digests.values() for digest in each[: len(each) // HELD_OUT_EVERY]}
        learnt = _windows([text.tokens for text in encoded if text.digest not in held_out], length)
        kept = {
            category: _windows([text.tokens for text in by_category[category] if text.digest in held_out], length)
            for category in sorted(by_category)
        }
        if learnt.shape[0] + sum(len(windows) for windows in kept.values()) < 2:
            raise SettingsError(
                f"the texts have {self.num_tokens} tokens, and at least {2 * length} are needed; give more files"
            )
        if learnt.shape[0] == 0 or not any(map(len, kept.values())):
            every = mx.concatenate([learnt, *kept.values()])
            places = range(every.shape[0])
            kept = {"": every[mx.array([i for i in places if i % HELD_OUT_EVERY == 0])]}
            learnt = every[mx.array([i for i in places if i % HELD_OUT_EVERY > 0])]
        # At most `MAX_HELD_OUT`, spread evenly, and the categories in turn: an evaluation may end before it has all.
        most = -(-MAX_HELD_OUT // sum(len(windows) > 0 for windows in kept.values()))
        spread = {category: windows[:: -(-len(windows) // most)] for category, windows in kept.items() if len(windows)}
        in_turn = sorted((i, category) for category, windows in spread.items() for i in range(len(windows)))
        in_turn = in_turn[:MAX_HELD_OUT]
        self.held_out = mx.stack([spread[category][i] for i, category in in_turn])
        self.held_out_categories = [category for _, category in in_turn]
        self.learnt = learnt
        self._counts = Counter(token for text in encoded for token in text.tokens)
        mx.eval(self.held_out, self.learnt)

    def add(self, windows: mx.array) -> None:
        """Add windows (n, length) to learn from."""
        self.learnt = mx.concatenate([self.learnt, windows.astype(mx.int32)])
        self._counts.update(windows.flatten().tolist())  # type: ignore[arg-type]
        mx.eval(self.learnt)

    def batch(self, index: int, size: int, seed: int) -> mx.array:
        """(size, length) windows, or all if they are fewer: the `index`-th batch of an endless series, in which each
        epoch has its own order. It depends on the arguments alone, so that training can continue.
        """
        num_windows = self.learnt.shape[0]
        per_epoch = max(1, num_windows // size)
        epoch, place = divmod(index, per_epoch)
        order = mx.random.permutation(num_windows, key=mx.random.key(seed + epoch))
        return self.learnt[order[place * size : (place + 1) * size]]

    def most_frequent(self, count: int, vocab_size: int) -> list[int]:
        """The `count` ids that occur most often, ascending; filled up with the lowest ids that do not occur."""
        by_count = sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))
        others = (token for token in range(vocab_size) if token not in self._counts)
        return sorted(islice(chain((token for token, _ in by_count), others), count))


def _windows(texts: Sequence[array[int]], length: int) -> mx.array:
    """Windows (n, length) of the texts, joined in order; the last tokens are dropped if they fill no window."""
    tokens = array("i")
    for text in texts:
        tokens += text
    num_windows = len(tokens) // length
    if num_windows == 0:
        return mx.zeros((0, length), mx.int32)
    return mx.array(cast(Any, memoryview(tokens)[: num_windows * length]), mx.int32).reshape(num_windows, length)
