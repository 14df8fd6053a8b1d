"""The text that a grammar forces: what is beyond doubt is in every legal text, and blanks are guessed by the text's."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from schemas import closed_object
from sweeps import sweep
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import runtime
from runtime import Grammar
from runtime.generation.grammar import GrammarText
from runtime.generation.grammar_vocabulary import indexed
from runtime.generation.json_schema import grammar_of_schema
from runtime.generation.tool_calls.call_grammar import reasoning_before

TOKENIZER = TokenizerWrapper(AutoTokenizer.from_pretrained(runtime.DEMO_TARGET))
VOCABULARY = indexed(TOKENIZER)

NAMES = st.sampled_from(["a", "name", "first name", "größe", "漢字", "x_1", "name2", "na"])
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.just({"type": "string", "maxLength": 8}),
        st.just({"type": "integer", "minimum": -20, "maximum": 3000}),
        st.just({"type": "boolean"}),
        st.just({"type": ["string", "null"], "maxLength": 3}),
        st.lists(st.sampled_from(["low", "lowest", "high", "ja, ja", "漢"]), min_size=1, unique=True).map(
            lambda values: {"enum": values}
        ),
        st.just({"const": "always so"}),
    ),
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner),
        st.builds(
            lambda properties, number: {**closed_object(**properties), "required": sorted(properties)[:number]},
            st.dictionaries(NAMES, inner, min_size=1, max_size=4),
            st.integers(0, 4),
        ),
    ),
    max_leaves=8,
)


def tokens_of(forced: Sequence[Any], max_doubt: int = 2) -> list[int]:
    """The tokens in front of the first one of which more is in doubt."""
    found = []
    for each in forced:
        if each.doubt > max_doubt:
            break
        found.append(each.token)
    return found


def text_of(tokens: Sequence[int]) -> str:
    return VOCABULARY.decode_str(list(tokens))


def forced_after(grammar: Grammar, *texts: str) -> str:
    """What is proposed after a text that came in some parts."""
    forced = grammar.forced_text()
    for text in texts:
        forced.after(())
        tokens = VOCABULARY.tokenize_str(text)
        assert forced.num_allowed((), tokens) == len(tokens), text
        forced.append(tokens)
    return text_of([each.token for each in forced.after(())])


def legal(matcher: Any) -> list[int]:
    return [token for token, bias in enumerate(matcher.compute_logit_bias()) if bias]


# --- what is beyond doubt -------------------------------------------------------------------------


@given(schema=VALUES, compact=st.booleans(), seed=st.integers(0, 2**32), length=st.integers(0, 30))
@settings(max_examples=60)
def test_what_is_beyond_doubt_is_in_every_legal_text_and_all_that_is_proposed_is_legal(schema, compact, seed, length):
    grammar, dice = Grammar.from_json_schema(schema, TOKENIZER, compact=compact), random.Random(seed)
    forced, matcher = grammar.forced_text(), grammar._start.deep_copy()
    for _ in range(length):
        found = forced.after(())
        proposed = [each.token for each in found]
        assert forced.num_allowed((), proposed) == len(proposed)
        assert_every_text_has(matcher.deep_copy(), tokens_of(found, max_doubt=0))
        choice = legal(matcher)
        if matcher.is_stopped() or not choice:
            assert proposed == []
            return
        # Now and then the proposed text, or else no text would get far.
        token = proposed[0] if proposed and dice.random() < 0.5 else dice.choice(choice)
        matcher.consume_token(token)
        forced.append([token])


def assert_every_text_has(matcher: Any, tokens: Sequence[int]) -> None:
    text = VOCABULARY.decode_bytes(list(tokens))
    for token in tokens:
        for other in legal(matcher):
            theirs = VOCABULARY.decode_bytes([other])
            assert theirs.startswith(text[: len(theirs)]), (text, theirs)
        matcher.consume_token(token)
        text = text[len(VOCABULARY.decode_bytes([token])) :]


@given(schema=VALUES, seed=st.integers(0, 2**32), cuts=st.lists(st.integers(1, 5), max_size=8))
@settings(max_examples=30)
def test_it_is_the_same_after_tokens_of_the_text_and_after_the_same_that_were_drafted(schema, seed, cuts):
    grammar, dice, text = Grammar.from_json_schema(schema, TOKENIZER, compact=True), random.Random(seed), []
    matcher = grammar._start.deep_copy()
    while len(text) < sum(cuts) and not matcher.is_stopped():
        text.append(dice.choice(legal(matcher)))
        matcher.consume_token(text[-1])
    step_by_step, begin = grammar.forced_text(), 0
    for cut in cuts:
        step_by_step.append(text[begin : begin + cut])
        begin += cut
        beyond = grammar.forced_text()
        at_once = grammar.forced_text()
        at_once.append(text[:begin])
        assert step_by_step.after(()) == beyond.after(text[:begin]) == at_once.after(())


# --- blanks ---------------------------------------------------------------------------------------

TEXT = {"type": "string"}
HOME = closed_object(town=TEXT, code={"type": "integer"})
SCHEMA = closed_object(name=TEXT, home=HOME, kind={"enum": ["big", "small"]}, last=TEXT)
FACTS = {"name": "Anna", "home": {"town": "Rome", "code": 7}, "kind": "small", "last": "x"}


@sweep(
    ("indent", "separators", "texts", "expected"),
    [
        (None, (", ", ": "), ['{"name": "Anna"', ", "], '"home": {"town": "'),
        (None, (",", ":"), ['{"name"', ':"Anna"', ","], '"home":{"town":"'),
        (2, (",", ": "), ["{", '\n  "name": "Anna"', ","], '\n  "home": {\n    "town": "'),
        (4, (",", ": "), ["{", '\n    "name": "Anna"', ","], '\n    "home": {\n        "town": "'),
        (2, (",", ":"), ["{", '\n  "name"', ':"Anna"', ",\n"], ""),
    ],
)
def test_blanks_are_those_that_the_text_had(indent, separators, texts, expected):
    grammar = Grammar.from_json_schema(SCHEMA, TOKENIZER)
    assert json.dumps(FACTS, indent=indent, separators=separators).startswith("".join(texts) + expected)
    assert forced_after(grammar, *texts) == expected


@sweep("indent", [None, 2, 4, 7])
def test_a_text_takes_few_passes_however_it_is_laid_out(indent):
    text, forced = json.dumps(FACTS, indent=indent), Grammar.from_json_schema(SCHEMA, TOKENIZER).forced_text()
    tokens, num_passes = VOCABULARY.tokenize_str(text), 0
    while tokens:
        proposed = [each.token for each in forced.after(())]
        pairs = zip(proposed, tokens, strict=False)
        num_right = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        forced.append(tokens[: num_right + 1])
        tokens, num_passes = tokens[num_right + 1 :], num_passes + 1
    assert len(VOCABULARY.tokenize_str(text)) / num_passes > 2.0


@sweep(
    ("value", "is_number"),
    [
        *[({"type": "integer"}, True), ({"type": "number", "minimum": -3}, True), ({"type": "boolean"}, False)],
        *[({"type": ["integer", "null"]}, False), ({"enum": [7, "7"]}, False), ({}, False)],
    ],
)
def test_the_blank_before_a_number_is_proposed_if_it_is_a_token_of_its_own(value, is_number):
    schema = closed_object(a=value)
    # This tokenizer has tokens of a blank and digits.
    assert len(VOCABULARY.tokenize_str(" 1")) == 1
    assert forced_after(Grammar.from_json_schema(schema, TOKENIZER)) == '{"a":'
    backend = Tokenizer(BPE(vocab={chr(code): code - 31 for code in range(32, 127)} | {"<eos>": 0}, merges=[]))
    backend.decoder = decoders.ByteFallback()
    characters = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    forced = Grammar.from_json_schema(schema, characters).forced_text().after(())
    assert indexed(characters).decode_str([each.token for each in forced]) == ('{"a": ' if is_number else '{"a":')


def test_a_number_may_go_on_so_what_follows_it_is_in_doubt():
    forced = Grammar.from_json_schema(SCHEMA, TOKENIZER).forced_text()
    forced.append(VOCABULARY.tokenize_str('{"name": "Anna", "home": {"town": "Rome", "code": 7'))
    assert forced.after(())[0].doubt == 2


@sweep("blanks", ["[ ]*", "[ \\n]*", "\\s{0,90}"])
def test_where_any_number_of_blanks_is_allowed_none_is_guessed(blanks):
    grammar = Grammar.from_regex(f"a{blanks}b", TOKENIZER)
    assert forced_after(grammar) == "a"
    assert forced_after(grammar, "a ") == forced_after(grammar, "a  ") == ""


# --- cost -----------------------------------------------------------------------------------------


class Counted:
    """A matcher that counts its copies."""

    def __init__(self, matcher: Any, copies: list[None]) -> None:
        self._matcher, self._copies = matcher, copies

    def deep_copy(self) -> Counted:
        self._copies.append(None)
        return Counted(self._matcher.deep_copy(), self._copies)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


def test_the_state_of_a_text_is_copied_only_after_drafted_tokens_were_rejected():
    grammar, copies = Grammar.from_json_schema(SCHEMA, TOKENIZER), list[None]()
    matcher: Any = Counted(grammar._start.deep_copy(), copies)
    forced, tokens = GrammarText(matcher, VOCABULARY), VOCABULARY.tokenize_str(json.dumps(FACTS))
    num_rejected = 0
    while tokens:
        drafted: list[int] = []
        while found := forced.after(drafted):
            drafted += [each.token for each in found]
        num_right = sum(itertools.takewhile(bool, map(int.__eq__, drafted, tokens)))
        num_rejected += num_right < len(drafted)
        forced.append(tokens[: num_right + 1])
        tokens = tokens[num_right + 1 :]
    assert forced.after(()) == []
    assert 0 < len(copies) <= 1 + num_rejected


def test_no_more_of_a_long_forced_text_is_looked_for_than_can_be_proposed():
    text = '"' + "word and " * 1000 + '"'
    forced = Grammar.from_json_schema({"const": json.loads(text)}, TOKENIZER).forced_text()
    drafted: list[int] = []
    for _ in range(3):
        found = forced.after(drafted)
        assert 0 < len(text_of([each.token for each in found])) <= 256
        assert forced.num_allowed(drafted, [each.token for each in found]) == len(found)
        drafted += [each.token for each in found]
    assert text.startswith(text_of(drafted))


# --- tokens ---------------------------------------------------------------------------------------


@sweep(
    ("pattern", "before", "expected"),
    [
        *(("(north|south) pole", *each) for each in (("n", "orth pole"), ("north po", "le"), ("north pole", ""))),
        *(("漢字 (🙂|🙃)!", *each) for each in (("", "漢字 "), ("漢字 🙂", "!"))),
    ],
)
def test_it_begins_in_the_middle_of_a_word_or_character(pattern, before, expected):
    found = forced_after(Grammar.from_regex(pattern, TOKENIZER), before)
    assert found.rstrip("\N{REPLACEMENT CHARACTER}") == expected


@sweep(
    ("is_thinking", "text", "expected"),
    [
        *((True, text, "") for text in ("", 'I must say {"name', "so it is.</thi", "so it is.</think>\n\n")),
        (True, "so it is.</think>\n\n{", '"name": "'),
        *[(False, "", ""), (False, "<", "think>"), (False, "{", '"name": "'), (False, '{"name": "<thi', "")],
    ],
)
def test_while_a_model_reasons_nothing_is_forced_but_its_tags(is_thinking, text, expected):
    tags = ("<think>", "</think>")
    written = reasoning_before(grammar_of_schema(SCHEMA), tokenizer=TOKENIZER, tags=tags, is_thinking=is_thinking)
    assert forced_after(Grammar(written, TOKENIZER), text) == expected


def test_after_the_end_of_the_text_and_after_a_text_that_is_not_allowed_nothing_is_forced():
    forced = Grammar.from_regex("ab", TOKENIZER).forced_text()
    forced.append(VOCABULARY.tokenize_str("ab"))
    assert forced.after(()) == []
    forced.append([0])
    assert forced.after(()) == forced.after([0]) == []
    forced = Grammar.from_regex("ab", TOKENIZER).forced_text()
    assert forced.num_allowed((), VOCABULARY.tokenize_str("x")) == 0
    assert forced.after(VOCABULARY.tokenize_str("x")) == []
    assert text_of(tokens_of(forced.after(()))) == "ab"


def test_special_tokens_are_forced_too():
    tokenizer = TokenizerWrapper(AutoTokenizer.from_pretrained(runtime.DEMO_TARGET))
    tokenizer._tokenizer.add_special_tokens({"additional_special_tokens": ["<|call|>", "<|done|>"]})
    call, done = tokenizer.convert_tokens_to_ids(["<|call|>", "<|done|>"])
    forced = Grammar.from_lark(f'start: <[{call}]> "f(" /[0-9]/ ")" <[{done}]>', tokenizer).forced_text()
    tokens = [each.token for each in forced.after(())]
    assert tokens == [call, *VOCABULARY.tokenize_str("f(")]
    forced.append(tokens)
    forced.append(VOCABULARY.tokenize_str("7"))
    assert [each.token for each in forced.after(())] == [*VOCABULARY.tokenize_str(")"), done]


def test_a_tokenizer_that_begins_each_text_with_a_blank_changes_no_forced_text():
    words = ["<eos>", "▁", "▁a", "a", "b", "ab", "c", "<0x20>"]
    backend = Tokenizer(BPE(vocab={word: i for i, word in enumerate(words)}, merges=[("▁", "a"), ("a", "b")]))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    forced = Grammar.from_choices(["cabc", "cabb"], tokenizer).forced_text()
    assert indexed(tokenizer).decode_str([each.token for each in forced.after(())]) == "cab"
    forced.append([6])
    assert indexed(tokenizer).decode_str([each.token for each in forced.after(())]) == "ab"
