"""Structured output: the tokens that a grammar allows, its rewind, and generated texts."""

import functools
import json
import random
import re
import sys
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import jsonschema
import llguidance.hf
import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.tokenizer_utils import TokenizerWrapper
from schemas import closed_object
from sweeps import sweep
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import runtime
from runtime import Grammar
from runtime.generation import grammar as grammar_module
from runtime.generation.json_schema import check_json_schema, grammar_of_schema

TOKENIZER = TokenizerWrapper(AutoTokenizer.from_pretrained(runtime.DEMO_TARGET))
VOCAB_SIZE = 4096
END = 0
PROMPT = [5, 6, 7]

AT = {"type": "array", "items": {"type": "number", "minimum": -9, "maximum": 9}}
PERSON = closed_object(
    name={"type": "string", "maxLength": 12},
    age={"type": "integer", "minimum": 0, "maximum": 130},
    mood={"enum": ["heiter", "trüb", "漢字", "🙂"]},
    tags={"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,8}$"}, "maxItems": 3},
)
PERSON["properties"]["home"] = {**closed_object(at=AT), "required": []}


def allowed(grammar: Grammar, text: list[int], width: int = VOCAB_SIZE) -> set[int]:
    """The tokens that a grammar allows after a text."""
    (row,) = grammar(mx.array(text), mx.zeros((1, width))).tolist()
    assert set(row) <= {0.0, -mx.inf}
    return {token for token, logit in enumerate(row) if logit == 0.0}


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def after(grammar: Grammar, text: str) -> set[int]:
    """The tokens that a grammar allows after a text that was fed token by token."""
    ids = encode(text)
    for length in range(len(ids)):
        assert ids[length] in allowed(grammar, PROMPT + ids[:length])
    return allowed(grammar, PROMPT + ids)


def texts(tokens: set[int]) -> set[str]:
    return {TOKENIZER.decode([token]) for token in tokens}


# --- allowed tokens -------------------------------------------------------------------------------


@sweep("text", ["", "a", "ba", "abab", "bbb"])
def test_a_token_is_allowed_where_the_text_with_it_can_still_be_completed(text):
    left = after(Grammar.from_regex("[ab]{2,4}", TOKENIZER), text)
    for token in range(VOCAB_SIZE):
        if token == END:
            assert (token in left) == (len(text) >= 2)
        else:
            longer = text + TOKENIZER.decode([token])
            assert (token in left) == (len(longer) <= 4 and set(longer) <= set("ab"))


@sweep("text", ["aab", "aa"])
def test_behind_the_end_comes_nothing_but_the_end(text):
    grammar = Grammar.from_regex("a+b?", TOKENIZER)
    assert END in after(grammar, text)
    for num_ends in (1, 2, 3):
        assert allowed(grammar, PROMPT + encode(text) + [END] * num_ends) == {END}


def test_every_end_that_the_tokenizer_has_will_do():
    tokenizer = TokenizerWrapper(AutoTokenizer.from_pretrained(runtime.DEMO_TARGET))
    assert after(Grammar.from_regex("a", tokenizer), "a") == {END}
    tokenizer.eos_token_ids = {END, 17}
    assert after(Grammar.from_regex("a", tokenizer), "a") == {END, 17}


def test_rows_that_pad_the_embedding_are_forbidden_and_missing_ones_are_no_harm():
    grammar = Grammar.from_regex(r"[^x]*", TOKENIZER)
    whole = allowed(grammar, PROMPT)
    assert max(whole) == VOCAB_SIZE - 1
    assert allowed(Grammar.from_regex(r"[^x]*", TOKENIZER), PROMPT, VOCAB_SIZE + 100) == whole
    assert allowed(Grammar.from_regex(r"[^x]*", TOKENIZER), PROMPT, 100) == {t for t in whole if t < 100}


@sweep("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_what_is_allowed_keeps_its_logits(dtype):
    logits = mx.random.normal((1, VOCAB_SIZE), key=mx.random.key(1)).astype(dtype)
    masked = Grammar.from_regex("[ab]", TOKENIZER)(mx.array(PROMPT), logits)
    assert (masked.shape, masked.dtype) == (logits.shape, dtype)
    for token in range(VOCAB_SIZE):
        is_allowed = TOKENIZER.decode([token]) in ("a", "b")
        assert masked[0, token].item() == (logits[0, token].item() if is_allowed else -mx.inf)


# Also ids that the tokenizer does not know.
@sweep("token", [*encode("c"), VOCAB_SIZE, VOCAB_SIZE + 1000, 2**31 - 1])
def test_disallowed_text_and_what_follows_are_left_as_they_are(token):
    grammar = Grammar.from_regex("[ab]+", TOKENIZER)
    after(grammar, "a")
    saved = grammar.save()
    a, everything = encode("a"), set(range(VOCAB_SIZE))
    assert allowed(grammar, [*PROMPT, *a, token]) == everything
    assert allowed(grammar, [*PROMPT, *a, token, *a]) == everything
    grammar.restore(saved)
    assert END in allowed(grammar, PROMPT + a + a) < everything


def test_one_of_some_texts_is_followed():
    grammar = functools.partial(Grammar.from_choices, ["yes", 'no "really"\n', "ja 漢"], TOKENIZER)
    assert END in after(grammar(), "yes")
    assert texts(after(grammar(), 'no "')) <= {"r", "re", "rea", "real", "reall", "really", 'really"', 'really"\n'}
    assert END in after(grammar(), "ja 漢")


LARK_SUM = 'start: sum "."?\nsum: /[0-9]{1,3}/ (" + " /[0-9]{1,3}/)*'


@sweep(
    ("make", "grammar"),
    [
        (Grammar.from_lark, LARK_SUM),
        (Grammar.from_gbnf, LARK_SUM),
        (Grammar.from_gbnf, 'root ::= sum "."?\nsum ::= [0-9]{1,3} (" + " [0-9]{1,3})*\n'),
    ],
)
def test_a_context_free_grammar_is_followed(make, grammar):
    beyond = texts(after(make(grammar, TOKENIZER), "12 +"))
    assert " " in beyond
    assert all(re.fullmatch(" [0-9]{0,3}", text) for text in beyond)
    assert END in after(make(grammar, TOKENIZER), "12 + 3.")


# --- texts ----------------------------------------------------------------------------------------


@sweep(
    ("text", "is_compact"),
    [
        *[('{"a":[1,1],"b":2}', True), ('{"a": [1, 1], "b": 2}', False), ('{ "a" : [ ] , "b" : 2 }', False)],
        *((json.dumps({"a": [1, 1], "b": 2}, indent=indent), False) for indent in (8, "\t")),
    ],
)
def test_json_may_be_written_in_the_usual_ways_or_without_white_space(text, is_compact):
    schema = {"properties": {"a": {"items": {"const": 1}}, "b": {"const": 2}}, "additionalProperties": False}
    assert after(Grammar.from_json_schema(schema, TOKENIZER), text) == {END}
    compact = Grammar.from_json_schema(schema, TOKENIZER, compact=True)
    if is_compact:
        assert after(compact, text) == {END}
    else:
        with pytest.raises(AssertionError):
            after(compact, text)


@sweep("seed", range(3))
def test_a_model_cannot_lose_itself_in_white_space(seed):
    grammar = Grammar.from_json_schema({"type": "array", "items": {"const": 1}, "maxItems": 3}, TOKENIZER)
    draw, text = random.Random(seed), list(PROMPT)
    while text[-1] != END:
        left = sorted(allowed(grammar, text))
        blank = [token for token in left if not TOKENIZER.decode([token]).strip() and token != END]
        text.append(draw.choice(blank or left))
    assert json.loads(TOKENIZER.decode(text[len(PROMPT) : -1])) in ([], [1], [1, 1], [1, 1, 1])
    assert len(text) < 200


@sweep("schema", [True, "true", {}, "{}"])
@sweep("compact", [True, False])
def test_true_and_the_empty_schema_are_any_json(schema, compact):
    begins = texts(after(Grammar.from_json_schema(schema, TOKENIZER, compact=compact), ""))
    assert set('{["-0123456789tfn') <= begins
    assert "a" not in begins


def test_mlx_lm_itself_can_use_one():
    model, tokenizer = load(str(runtime.DEMO_TARGET))
    schema = closed_object(sort={"enum": ["quick", "merge"]})
    grammar = Grammar.from_json_schema(schema, tokenizer, compact=True)
    ids = []
    for token, _ in generate_step(mx.array(encode("def sort(")), model, logits_processors=[grammar]):
        if token in tokenizer.eos_token_ids:
            break
        ids.append(token)
    jsonschema.validate(json.loads(tokenizer.decode(ids)), schema)


# --- going back -----------------------------------------------------------------------------------

GRAMMARS: list[Callable[[], Grammar]] = [
    lambda: Grammar.from_json_schema(PERSON, TOKENIZER, compact=True),
    lambda: Grammar.from_json_schema({}, TOKENIZER),
    lambda: Grammar.from_regex("(ab|ba)*[0-9]{2,5}", TOKENIZER),
    lambda: Grammar.from_lark('start: "(" start ")" | "x"+', TOKENIZER),
]


def straight(make: Callable[[], Grammar], text: tuple[int, ...]) -> mx.array:
    """What a fresh grammar allows after a text, called as in plain decoding."""
    grammar = make()
    for length in range(len(text)):
        grammar(mx.array([*PROMPT, *text[:length]]), ZEROS)
    return grammar(mx.array([*PROMPT, *text]), ZEROS)


ZEROS = mx.zeros((1, VOCAB_SIZE))


@pytest.mark.parametrize("make", GRAMMARS, ids=["schema", "any json", "regex", "lark"])
@given(data=st.data(), max_pending=st.sampled_from([0, 2, 16]))
@settings(max_examples=10)
def test_in_whatever_order_texts_come_each_gets_what_it_would_get_in_plain_decoding(make, data, max_pending):
    with mock.patch.object(grammar_module, "_MAX_PENDING_TOKENS", max_pending):
        play(make, data)


def play(make: Callable[[], Grammar], data: st.DataObject) -> None:
    grammar = make()
    states = {None: grammar.save()}
    # For each text, the tokens that are allowed after it; None stands for the text before the prompt was seen.
    known: dict[tuple[int, ...], list[int]] = {}
    for _ in range(data.draw(st.integers(1, 25), label="calls")):
        parent = data.draw(st.sampled_from([None, *known]), label="after")
        text: tuple[int, ...] = ()
        if parent is not None:
            anything = st.integers(0, VOCAB_SIZE + 10)
            one_of_these = st.sampled_from(known[parent]) if known[parent] else anything
            text = (*parent, data.draw(one_of_these | one_of_these | anything, label="token"))
        grammar.restore(states[parent])
        # A state also comes from a replay, which has no logits.
        logits = data.draw(st.sampled_from([ZEROS, ZEROS + 1]), label="logits")
        masked = grammar(mx.array([*PROMPT, *text]), logits)
        states[text] = grammar.save()
        expected = straight(make, text) + logits
        assert mx.array_equal(masked, expected)
        known[text] = [token for token, logit in enumerate(expected[0].tolist()) if logit > -mx.inf]


@sweep("prompt", [PROMPT, [9], PROMPT + encode("ab")])
@sweep("is_cut_off", [True, False])
def test_for_another_stream_it_begins_anew(prompt, is_cut_off):
    grammar = Grammar.from_regex("[a-c]{2}[0-9]", TOKENIZER)
    at_first = None
    for stream_prompt, text in ((PROMPT, "a" if is_cut_off else "ab1"), (prompt, "ab1")):
        state = grammar.save()
        ids = encode(text)
        for length in range(len(ids) + 1):
            grammar.restore(state)
            left = allowed(grammar, stream_prompt + ids[:length])
            state = grammar.save()
            at_first = at_first or left
            assert length or left == at_first
        assert (left == {END}) == (text == "ab1")


def states_along(grammar: Grammar, text: list[int]) -> list[Any]:
    """The states after each beginning of a text that comes token by token."""
    states = []
    for length in range(len(text) + 1):
        allowed(grammar, PROMPT + text[:length])
        states.append(grammar.save())
        grammar.restore(states[-1])
    return states


def test_the_states_of_a_long_text_share_their_matchers():
    states = states_along(Grammar.from_regex("a+", TOKENIZER), encode("a") * 64)
    assert [state.size for state in states] == list(range(len(PROMPT), len(PROMPT) + 65))
    assert len({id(state.matcher) for state in states}) <= 5


def test_rows_of_one_text_after_another_copy_no_state():
    copies = []

    class Counted:
        def __init__(self, matcher):
            self._matcher = matcher

        def deep_copy(self):
            copies.append(self)
            return Counted(self._matcher.deep_copy())

        def __getattr__(self, name):
            return getattr(self._matcher, name)

    grammar, text = Grammar.from_regex("a+", TOKENIZER), encode("a") * 12
    grammar._start = Counted(grammar._start)
    states = states_along(grammar, text)
    assert len(copies) == 1
    # What was drafted was rejected.
    grammar.restore(states[3])
    assert END in allowed(grammar, PROMPT + text[:4])
    assert len(copies) == 2


def test_without_states_a_text_that_does_not_go_on_from_the_last_begins_anew():
    grammar = Grammar.from_regex("[a-c]{2}[0-9]", TOKENIZER)
    first = allowed(grammar, PROMPT)
    assert allowed(grammar, PROMPT + encode("a")) != first
    assert allowed(grammar, [1, 2]) == first


def test_calls_on_two_threads_do_not_mix_their_states():
    grammar = Grammar.from_regex("[a-c]{2}[0-9]", TOKENIZER)
    alone = after(Grammar.from_regex("[a-c]{2}[0-9]", TOKENIZER), "a")
    allowed(grammar, PROMPT)
    grammar.restore(grammar.save())
    others = threading.Thread(target=grammar, args=(mx.array([1, 2]), ZEROS))
    others.start()
    others.join()
    assert allowed(grammar, PROMPT + encode("a")) == alone


# --- rejected grammars ----------------------------------------------------------------------------


def nested(depth):
    return functools.reduce(lambda inner, _: {"items": inner}, range(depth), {})


def by(number: float) -> dict[str, Any]:
    return {"type": "number", "multipleOf": number}


TOO_LOW = r"to be followed; numbers must be above -9007199254740992$"
TOO_MANY = "added up over all values, must be at most 100000, got "


@sweep(
    ("schema", "complaint"),
    [
        ("{", r"the JSON schema \{ is not JSON: .*line 1"),
        ({"enum": [float("nan")]}, "is not JSON: Out of range float values"),
        ({"enum": {1}}, "is not JSON: Object of type set"),
        ({"type": "text"}, r"the JSON schema \{'type': 'text'\} cannot be followed: Invalid type: text"),
        ({"not": {"type": "string"}}, 'cannot be followed: Unimplemented keys: \\["not"\\]'),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable schema: minimum .5. is greater"),
        *[(False, "Unsatisfiable schema"), (3, "the JSON schema 3 must be an object, True or False")],
        (None, "the JSON schema None must be an object"),
        ({"enum": [10**400]}, "cannot be followed: number out of range"),
        ({"default": -(10**400)}, "has -1000.*too low to be followed"),
        ({"type": "string", "pattern": "(a"}, "regex parse error"),
        ({"title": "x" * 200, "$ref": "#/nowhere"}, "the JSON schema .{79}… cannot be followed: .*'/nowhere'"),
        # Of which llguidance would take the process along.
        *(({"type": "integer", "const": low}, TOO_LOW) for low in (-(2**63), -1e20)),
        ({"type": "integer", "enum": [-(2**64), 1]}, TOO_LOW),
        ({"type": "integer", "minimum": -1e25, "maximum": -1e24}, TOO_LOW),
        ({"type": "integer", "minimum": -(2**63) + 1, "exclusiveMaximum": -(2**63) + 2}, TOO_LOW),
        ({"properties": {"minimum": {"const": {"minimum": -1e20}}}}, TOO_LOW),
        ({"anyOf": [{"items": {"$ref": "#/$defs/a"}}], "$defs": {"a": {"const": -(2**53)}}}, TOO_LOW),
        # By which it would divide for hours.
        *[(by(99_999_989), f"{TOO_MANY}99999989"), (by(109981.3), f"{TOO_MANY}1099813")],
        (by(1234.5678), f"{TOO_MANY}6172839"),
        ({"type": "array", "items": {"anyOf": [{"not": by(9973)}, by(9967)]}}, f"{TOO_MANY}99400891"),
        ({"allOf": [by(7)] * 50_000 + [by(n) for n in range(100_003, 140_003, 2)]}, TOO_MANY),
        ({"properties": {f"p{n}": by(n) for n in range(10_001, 10_041, 2)}}, TOO_MANY),
        ({"$defs": {"a": by(-3), "b": by(100_003)}}, f"{TOO_MANY}100003"),
        (by(10**400 + 1), TOO_MANY),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_in_llguidance_s_words(schema, complaint):
    with pytest.raises(runtime.SettingsError, match=complaint):
        Grammar.from_json_schema(schema, TOKENIZER, compact=True)
    with pytest.raises(runtime.SettingsError, match=complaint):
        check_json_schema(schema)


INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
NUMBER64 = {**INT64, "type": "number"}
LOW = {"type": "integer", "minimum": -1e300}


@sweep(
    ("schema", "text", "is_allowed"),
    [
        # As low as JSON can tell numbers apart, and lower bounds lower.
        ({"type": "integer", "const": -(2**53) + 1}, "-9007199254740991", True),
        ({"type": "integer", "minimum": -(2**53) + 1, "maximum": -(2**53) + 1}, "-9007199254740991", True),
        ({"type": "integer", "minimum": -(2**60), "maximum": 3}, "-1152921504606846976", True),
        ({"type": "integer", "default": 3, "maximum": 2**60}, "1152921504606846976", True),
        ({"type": "integer", "minimum": -(2**63)}, "-9223372036854774784", True),
        ({"type": "integer", "exclusiveMinimum": -(2.0**63)}, "-9223372036854775809", False),
        *[(INT64, "9223372036854775807", True), (INT64, "9223372036854775808", False)],
        *[(LOW, "-7", True), (LOW, "-9223372036854775809", False)],
        *[(NUMBER64, "-9223372036854774784", True), (NUMBER64, "9223372036854775809", False)],
        ({"type": "number", "minimum": -1e300, "maximum": 1e300}, "-6.02e23", True),
        ({"type": "number", "exclusiveMinimum": -(10**400)}, "-6.02e23", True),
        ({"type": "number", "minimum": -1e300, "maximum": 3}, "4", False),
        ({"items": {"type": "number", "minimum": -1e300}}, "[-6.02e23]", True),
    ],
)
def test_bounds_may_be_as_far_out_as_numbers_are(schema, text, is_allowed):
    grammar, ids = Grammar.from_json_schema(schema, TOKENIZER), [*encode(text), END]
    assert all(ids[i] in allowed(grammar, PROMPT + ids[:i]) for i in range(len(ids))) == is_allowed


@sweep(
    "schema",
    [
        *map(by, (99_991, 0.01, 1e-8, 10_000_000, 65_536)),
        {"properties": {name: by(9973) for name in "abcdefghijklm"}},
        {"properties": {"multipleOf": {"type": "integer"}, "anyOf": {"enum": [{"multipleOf": 99_999_989}]}}},
        {"const": {"multipleOf": 99_999_989}},
    ],
)
def test_multiple_of_takes_round_numbers_and_leaves_lookalikes(schema):
    check_json_schema(schema)


CHOICES = "choices must be a list of at least one text"


@sweep(
    ("make", "given", "complaint"),
    [
        (Grammar.from_regex, "a(b", r"the regular expression a\(b cannot be followed: .*unclosed group"),
        (Grammar.from_regex, "a(?=b)", "look-around, including look-ahead and look-behind, is not supported"),
        (Grammar.from_regex, b"a", "the regular expression b'a' must be a text"),
        (Grammar.from_regex, "\ud800", "is not valid text: .*UTF-8"),
        (Grammar.from_lark, "start: no", 'the grammar start: no cannot be followed: .*unknown name: "no"'),
        (Grammar.from_lark, None, "the grammar None must be a text"),
        *((Grammar.from_choices, odd, f"{CHOICES}, got {re.escape(repr(odd))}") for odd in ([], "yes")),
        (Grammar.from_choices, ["a", 3], "a choice must be a text"),
        (Grammar.from_gbnf, 'root ::= "a', "the grammar root .*cannot be read: Unexpected end of input"),
        (Grammar.from_gbnf, 'x ::= "a"', "No 'root' rule found"),
        (Grammar.from_gbnf, "root ::= " + "(" * 9000, "cannot be read: maximum recursion depth"),
        (Grammar.from_gbnf, "\n" * 2**16, "must have at most 32768 characters, got 65536"),
        (Grammar.from_gbnf, b"a", "must be a text"),
        # What Python or llguidance cannot go through.
        (Grammar.from_json_schema, nested(150), "cannot be followed: recursion limit exceeded"),
        (Grammar.from_json_schema, {"enum": [10**5000]}, "the JSON schema <dict> is not JSON: Exceeds the limit"),
        (Grammar.from_json_schema, "[" * 100_000, "is nested too deeply to be followed"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_refused(make, given, complaint):
    with pytest.raises(runtime.SettingsError, match="(?s)" + complaint):
        make(given, TOKENIZER)


def test_a_schema_that_python_cannot_go_through_is_refused():
    with pytest.raises(runtime.SettingsError, match="the JSON schema <dict> is nested too deeply to be followed"):
        Grammar.from_json_schema(nested(100_000), TOKENIZER)


def hugging_face(model: Any, **options: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def characters(text: str, **options: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of these characters and an end token."""
    return hugging_face(BPE(vocab={c: i for i, c in enumerate(["<eos>", *text])}, merges=[]), **options)


def test_text_without_tokens_is_refused_at_once():
    tokenizer = characters("abc", eos_token="<eos>")
    with pytest.raises(runtime.SettingsError, match="the regular expression z asks for text that no token stands for"):
        Grammar.from_regex("z", tokenizer)
    grammar = Grammar.from_regex("[ab]z", tokenizer)
    assert allowed(grammar, [3], 4) == {1, 2}
    with pytest.raises(runtime.SettingsError, match="asks for text that no token stands for; allow other text"):
        allowed(grammar, [3, 1], 4)
    # A model that has fewer rows than the tokenizer has tokens.
    with pytest.raises(runtime.SettingsError, match="asks for text that no token stands for"):
        allowed(Grammar.from_regex("c", tokenizer), [1], 3)


def test_after_an_error_it_goes_on_from_any_state():
    grammar = Grammar.from_regex("az|b+", characters("abc", eos_token="<eos>"))
    allowed(grammar, [3], 4)
    state = grammar.save()
    with pytest.raises(runtime.SettingsError):
        allowed(grammar, [3, 1], 4)
    grammar.restore(state)
    assert allowed(grammar, [3, 2], 4) == {0, 2}


WORDS = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"w": 0}, unk_token="w")), eos_token="w")


@sweep(
    ("tokenizer", "complaint"),
    [
        (None, "a grammar needs the target's tokenizer, as Runtime.tokenizer has it, got None"),
        ("path/to/a/model", "as Runtime.tokenizer has it, got 'path/to/a/model'"),
        (characters("abc"), "a tokenizer with an end-of-text token"),
        (WORDS, "llguidance cannot read the tokenizer .*: .*decoder"),
    ],
)
def test_a_tokenizer_that_will_not_do_is_refused(tokenizer, complaint):
    with pytest.raises(runtime.SettingsError, match=complaint):
        Grammar.from_regex("a", tokenizer)


def test_without_llguidance_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for make in (Grammar.from_json_schema, Grammar.from_regex, Grammar.from_lark):
        with pytest.raises(runtime.SettingsError, match=r"not installed; pip install 'outrider\[grammar\]'"):
            make("{}", TOKENIZER)


def test_a_vocabulary_is_indexed_once(monkeypatch):
    indexed, index = [], llguidance.hf.from_tokenizer

    def count(tokenizer: Any, **options: Any) -> Any:
        indexed.append(tokenizer)
        return index(tokenizer, **options)

    monkeypatch.setattr(llguidance.hf, "from_tokenizer", count)
    tokenizer = characters("abc", eos_token="<eos>")
    for known_as in (tokenizer, TokenizerWrapper(tokenizer), tokenizer):
        Grammar.from_regex("a", known_as)
    assert indexed == [tokenizer]


# --- through the runtime --------------------------------------------------------------------------

MODULE = closed_object(
    name={"type": "string", "maxLength": 8},
    language={"enum": ["Python", "C", "Rust"]},
    lines={"type": "integer", "minimum": 0, "maximum": 5000},
    imports={"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
)
REQUEST = 'def describe(path):\n    """Describe a module as JSON."""\n    return json.dumps('


async def described(rt: runtime.Runtime, **settings: Any) -> runtime.Completion:
    """The completion for a schema; asserts that it is valid."""
    grammar = Grammar.from_json_schema(MODULE, rt.tokenizer, compact=True)
    completion = await rt.generate(REQUEST, logits_processors=[grammar], max_tokens=200, **settings)
    assert completion.finish_reason == "stop"
    jsonschema.validate(json.loads(completion.text), MODULE)
    assert completion.statistics.draft_failures == 0
    return completion


@pytest.mark.slow
async def test_the_text_is_the_same_with_a_draft_model(float32_pair):
    target, draft = float32_pair
    async with runtime.open(target) as rt:
        plain = await described(rt)
    async with runtime.open(target, draft) as rt:
        drafted = await described(rt, lookahead=3)
    assert drafted.text == plain.text
    assert drafted.statistics.accepted > 5


@pytest.fixture(scope="module")
def float32_pair() -> list[tuple[Any, Any]]:
    """The demo pair in float32, where rounding decides nothing."""
    pair = [load(str(path)) for path in (runtime.DEMO_TARGET, runtime.DEMO_DRAFT)]
    for model, _ in pair:
        model.set_dtype(mx.float32)
    return [(model, tokenizer) for model, tokenizer in pair]


@pytest.mark.slow
async def test_streams_that_share_a_grammar_have_their_texts_alone(float32_pair):
    prompts = [REQUEST, "names = [", "import os\n"]
    target, draft = float32_pair
    async with runtime.open(target, draft) as rt:
        grammar = Grammar.from_json_schema(MODULE, rt.tokenizer, compact=True)
        settings = {"max_tokens": 16, "lookahead": 3}
        at_once = await rt.generate_many(prompts, logits_processors=[grammar], **settings)
        for prompt, completion in zip(prompts, at_once, strict=True):
            assert completion.statistics.draft_failures == 0
            fresh = Grammar.from_json_schema(MODULE, rt.tokenizer, compact=True)
            assert completion.text == (await rt.generate(prompt, logits_processors=[fresh], **settings)).text
    assert len({completion.text for completion in at_once}) > 1


async def test_a_grammar_needs_the_end_of_the_text():
    async with runtime.open(runtime.DEMO_TARGET) as rt:
        with pytest.raises(runtime.SettingsError, match="ignore_eos=True leaves a grammar's text without an end"):
            rt.stream("x", logits_processors=[Grammar.from_regex("a+", rt.tokenizer)], ignore_eos=True)


def test_data_in_a_schema_keeps_what_keywords_lose():
    schema = {"anyOf": [{"const": {"format": "path", "uniqueItems": True}}, {"enum": [{"format": "x"}]}]}
    assert json.loads(grammar_of_schema(schema))["grammars"][0]["json_schema"]["anyOf"] == schema["anyOf"]


def test_optional_properties_for_which_llguidance_takes_too_long_are_refused():
    properties: dict[str, Any] = {f"p{i}": {} for i in range(2001)}
    schema = {"items": {"type": "object", "properties": properties, "required": ["p0"]}}
    grammar_of_schema(schema)
    properties["p2001"] = {}
    with pytest.raises(runtime.SettingsError, match="an object with 2001 optional properties"):
        grammar_of_schema(schema)
