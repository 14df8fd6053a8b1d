"""Texts become windows: all of them, in the order of a seed, some held out."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from chat_models import TEMPLATE, tokenizer
from sweeps import sweep

from protocol.errors import SettingsError
from runtime.distill.data import HELD_OUT_EVERY, Text, Windows, read_texts


class Characters:
    """A tokenizer: a token a character."""

    eos_token_id = 0
    chat_template: str | None = None

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(character) for character in text]


class Beginning(Characters):
    """One that begins each text with a token, unless it is told not to."""

    def encode(self, text: str, *, add_special_tokens: bool = True, **_: Any) -> list[int]:
        return [1] * add_special_tokens + super().encode(text)


def windows(texts: list[str], length: int = 8) -> Windows:
    return Windows(map(Text, texts), Characters(), length)


def rows(array: mx.array) -> set[tuple[int, ...]]:
    return {tuple(row) for row in array.tolist()}


def test_files_become_texts(tmp_path: Path) -> None:
    plain, lines = tmp_path / "a.py", tmp_path / "b.jsonl"
    plain.write_text("one\ntext")
    lines.write_text(
        '\ufeff{"text": "two\u2028lines"}\n\n'
        '{"messages": [{"role": "user", "content": "three"}], "category": "chat"}\r\n',
        encoding="utf-8",
    )
    assert list(read_texts([plain, lines], tokenizer())) == [
        Text("one\ntext"),
        Text("two\u2028lines"),
        Text("<|user|>three<|endoftext|>", "chat", is_chat=True),
    ]


def test_a_rendered_chat_begins_with_the_templates_tokens_alone() -> None:
    made = Windows(iter([Text("b" * 14), Text("c" * 15, is_chat=True)]), Beginning(), 16)
    assert rows(mx.concatenate([made.held_out, made.learnt])) == {(1, *[98] * 14, 0), (*[99] * 15, 0)}


@sweep(
    ("line", "template", "said"),
    [
        ("{", None, "line 2 of .*is not JSON"),
        ('{"prompt": "a"}', None, 'line 2 of .*has neither a "text" nor "messages"'),
        ('["a"]', None, "has neither"),
        ('{"messages": []}', None, "no chat template"),
        ('{"messages": ["a"]}', TEMPLATE, 'line 2 of .*has "messages" that are no list of objects'),
        ('{"messages": [{"role": "user"}]}', "{{ raise_exception('no') }}", "line 2 of .*: the chat template .*: no"),
    ],
)
def test_a_line_that_is_no_text_is_named(line: str, template: str | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "b.jsonl"
    file.write_text('{"text": "a"}\n' + line)
    with pytest.raises(SettingsError, match=said):
        list(read_texts([file], Characters() if template is None else tokenizer(template)))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nothing\.txt.* cannot be read"):
        list(read_texts([tmp_path / "nothing.txt"], Characters()))


def test_too_little_text_is_refused() -> None:
    with pytest.raises(SettingsError, match="the texts have 6 tokens, and at least 16 are needed"):
        windows(["short"])


def test_of_many_texts_whole_ones_are_held_out() -> None:
    texts = [chr(97 + i % 26) * (31 + 8 * (i // 26)) for i in range(2 * HELD_OUT_EVERY)]
    made = windows(texts)
    kept, learnt = (made.held_out.flatten().tolist(), made.learnt.flatten().tolist())
    # Of letters that are in texts of one length only.
    alone = {ord(text[0]) for text in texts if sum(text[0] == other[0] for other in texts) == 1}
    assert kept
    assert not alone & set(kept) & set(learnt)


def test_of_few_texts_windows_are_held_out_and_nothing_is_in_both() -> None:
    text = "".join(chr(200 + i) for i in range(8 * 50))
    made = windows([text])
    kept, learnt = rows(made.held_out), rows(made.learnt)
    assert len(kept) == 3
    assert len(kept | learnt) == 50


def test_held_out_windows_are_of_one_category_each_and_the_categories_alternate() -> None:
    def of(category: str, first: str) -> list[Text]:
        return [Text(chr(ord(first) + i % 8) * (16 + i), category) for i in range(2 * HELD_OUT_EVERY)]

    made = Windows(iter([*of("b", "b"), *of("a", "s"), Text("z" * 64, "rare")]), Characters(), 8)
    assert made.held_out_categories[:4] == ["a", "b", "a", "b"]
    assert set(made.held_out_categories) == {"a", "b"}
    for window, category in zip(made.held_out.tolist(), made.held_out_categories, strict=True):
        assert all((token >= ord("s")) == (category == "a") for token in window if token)
    assert {ord("z")} in map(set, rows(made.learnt))


def test_batches_have_every_window_once_an_epoch_in_another_order_each_time() -> None:
    made = windows(["".join(chr(200 + i) for i in range(8 * 41))])
    num_windows = made.learnt.shape[0]
    epochs = [[made.batch(epoch * (num_windows // 3) + i, 3, 5) for i in range(num_windows // 3)] for epoch in (0, 1)]
    first, second = (mx.concatenate(batches) for batches in epochs)
    assert len(rows(first)) == len(rows(second)) == num_windows // 3 * 3
    assert not mx.array_equal(first, second)
    assert mx.array_equal(made.batch(4, 3, 5), epochs[0][4])


def test_a_batch_of_more_windows_than_there_are_has_all() -> None:
    made = windows(["".join(chr(200 + i) for i in range(8 * 5))])
    assert rows(made.batch(7, 100, 0)) == rows(made.learnt)


def test_the_most_frequent_tokens_are_chosen_and_filled_up() -> None:
    made = windows(["aaaaaaaabbbbbbbbbccc" * 3])
    assert made.most_frequent(2, 128) == [ord("a"), ord("b")]
    assert made.most_frequent(6, 128) == [0, 1, 2, ord("a"), ord("b"), ord("c")]
    made.add(mx.full((4, 8), ord("z")))
    assert ord("z") in made.most_frequent(1, 128)


def test_the_digest_tells_texts_and_lengths_apart() -> None:
    text = "abcdefgh" * 8
    assert windows([text]).digest == windows([text]).digest
    assert len({windows([text]).digest, windows([text + "i"]).digest, windows([text], 16).digest}) == 3
