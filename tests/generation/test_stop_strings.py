"""A text ends before the first stop string, as if the whole text were decoded anew after every token.

`cut` is that definition in plain code. The matcher, the text of a stream and whole generations are compared with it.
"""

import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
import pytest
import trio
from chat_models import BEGUN_TEMPLATE, THINKING_TEMPLATE, pair, says, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from models import VOCAB_SIZE, llama, near
from sample_tokenizers import Bytes, OneLetterTokenizer, byte_fallback, byte_level, demo
from scripted import (
    ScriptedModel,
    Simulation,
    agreeing,
    continuation,
    ids,
    priced,
    prompt_with_distinct_continuation,
    read_into,
    run,
    simulated,
    truthful,
)
from sweeps import sweep
from tool_call_cases import TOOLS, call_format

import runtime
from protocol.messages import Open
from protocol.session_state import Commit
from protocol.settings import Settings
from protocol.stop_strings import StopMatcher
from runtime import Completion
from runtime.generation.text import ContentStops, GrowingText, StopFinder
from runtime.generation.tool_calls.answer_reader import AnswerReader

Decode = Callable[[list[int]], str]


def cut(
    decode: Decode, tokens: Sequence[int], stops: Sequence[str], ends: Iterable[int] = (), *, is_over: bool = True
) -> tuple[str, str | None, int]:
    """The text up to a stop string, that string or None, and the number of tokens until then."""
    for n in range(1, len(tokens) + 1):
        whole = decode([token for token in tokens[:n] if token not in ends])
        for readable in [whole.rstrip("\ufffd"), *([whole] if is_over and n == len(tokens) else [])]:
            if found := [(readable.find(stop), i) for i, stop in enumerate(stops) if stop in readable]:
                begin, first = min(found)
                return readable[:begin], stops[first], n
    return decode([token for token in tokens if token not in ends]), None, len(tokens)


def opened(stops: Sequence[str], ends: Iterable[int] = ()) -> Open:
    return Open(0, (1,), Settings(stop=tuple(stops)), 0, frozenset(ends))


def read(tokenizer: Any, tokens: Sequence[int], stops: Sequence[str], ends: Iterable[int] = ()) -> Any:
    """The same result, read as a stream does, also of an answer that might have reasoning."""
    found = _read(tokenizer, tokens, stops, ends, None)
    assert _read(tokenizer, tokens, stops, ends, AnswerReader(tags=("<☁>", "</☁>"))) == found
    return found


def _read(
    tokenizer: Any, tokens: Sequence[int], stops: Sequence[str], ends: Iterable[int], reader: AnswerReader | None
) -> tuple[str, str | None, int]:
    text, pieces = GrowingText(tokenizer, opened(stops, ends), reader), []
    for n, token in enumerate(tokens, start=1):
        pieces.append(text.add(token, is_last=n == len(tokens)))
        if text.stop is not None:
            return "".join(pieces), text.stop, n
    return "".join(pieces), None, len(tokens)


# --- the matcher ----------------------------------------------------------------------------------

SOME_STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


@given(st.lists(st.text("abc", max_size=4), max_size=12), SOME_STOPS)
@settings(max_examples=100)
def test_what_is_given_is_all_but_the_longest_beginning_of_a_stop_string(pieces, stops):
    matcher, given_text, text = StopMatcher(stops), "", ""
    beginnings = {stop[:n] for stop in stops for n in range(1, len(stop))}
    for piece in pieces:
        given_text, text = given_text + matcher.add(piece), text + piece
        found = [(text.find(stop), i) for i, stop in enumerate(stops) if stop in text]
        if found:
            begin, first = min(found)
            assert (given_text, matcher.found) == (text[:begin], stops[first])
            assert matcher.add("a") == matcher.finish("b") == ""
            return
        withheld = max((n for n in range(len(text) + 1) if text[len(text) - n :] in beginnings), default=0)
        assert (given_text, matcher.found) == (text[: len(text) - withheld], None)
    assert given_text + matcher.finish() == text


def test_what_lies_ahead_is_searched_and_given_only_where_the_text_ends():
    matcher = StopMatcher(["stop"])
    assert matcher.add("a", ahead="bst") == "a"
    assert matcher.add("", ahead="bsto") == ""
    assert matcher.add("", ahead="bstop") == "b"
    assert matcher.found == "stop"


# --- tokens of any bytes --------------------------------------------------------------------------


PARTS = [
    *(text.encode() for text in ("a", "b", "ab", "ba", " ", "é", "中", "🙂", "\u0301", "\ufffd")),
    *(b"\xf0", b"\xf0\x9f", b"\x9f\x99", b"\x99\x82", b"\x82", b"a\xf0\x9f", b"ab\xf0", b"\x82b"),
    *("é".encode()[:1], "é".encode()[1:], "中".encode()[:2], "中".encode()[2:], b"\xcc", b"\x81", b"\xff", b"b\xff"),
]
STOPS = st.lists(st.text("aab é🙂中\u0301\ufffd", min_size=1, max_size=4), min_size=1, max_size=4)


@given(st.lists(st.integers(0, len(PARTS) - 1), min_size=1, max_size=14), STOPS, st.sets(st.integers(0, 3), max_size=1))
@settings(max_examples=120)
def test_tokens_of_any_bytes_read_as_if_decoded_anew_each_time(tokens, stops, ends):
    if len(found := [i for i, token in enumerate(tokens) if token in ends]) > 0:
        del tokens[found[0] + 1 :]  # the end of the text
    table = Bytes(PARTS)
    assert read(table, tokens, stops, ends) == cut(table.decode, tokens, stops, ends)


@given(st.lists(st.integers(0, len(PARTS) - 1), min_size=1, max_size=14), STOPS, st.data())
@settings(max_examples=80)
def test_who_decides_reads_in_rounds_what_the_consumer_reads_in_tokens(tokens, stops, data):
    is_over = data.draw(st.booleans())
    borders = sorted(data.draw(st.sets(st.integers(1, len(tokens) - 1), max_size=5)) if len(tokens) > 1 else [])
    find, table, decided = StopFinder(Bytes(PARTS), opened(stops)), Bytes(PARTS), None
    for round, (begin, end) in enumerate(itertools.pairwise([0, *borders, len(tokens)])):
        finish_reason = "length" if is_over and end == len(tokens) else None
        commit = Commit(0, round, 1 + begin, tuple(tokens[begin:end]), 0, finish_reason=finish_reason)
        if (stop := find(commit)) is not None:
            decided = (stop.text, begin + stop.num_tokens)
            break
    _, text, num_tokens = cut(table.decode, tokens, stops, is_over=is_over)
    assert decided == (None if text is None else (text, num_tokens))


# --- real tokenizers ------------------------------------------------------------------------------


SINGLE_BYTES = sorted(i for token, i in demo().get_vocab().items() if len(token) == 1)
ANY_TOKEN = st.integers(1, len(demo().get_vocab()) - 1)


@given(st.lists(ANY_TOKEN | st.sampled_from(SINGLE_BYTES), min_size=1, max_size=16), st.data())
@settings(max_examples=60)
def test_any_tokens_of_a_real_tokenizer_read_as_if_decoded_anew_each_time(tokens, data):
    text = demo().decode(tokens)
    begins = st.integers(0, len(text) - 1) if text else st.just(0)
    pieces = st.builds(lambda begin, length: text[begin : begin + length] or "x", begins, st.integers(1, 4))
    stops = data.draw(st.lists(pieces, min_size=1, max_size=3))
    assert read(demo(), tokens, stops) == cut(demo().decode, tokens, stops)


VOCABULARY = byte_fallback().get_vocab()
WHOLE_CHARACTERS = [[VOCABULARY[f"<0x{byte:02X}>"] for byte in "🙂".encode()]]
WHOLE_CHARACTERS += [[VOCABULARY[word]] for word in ("▁the", "▁cat", "▁sat", "s", "▁")]


@given(
    st.lists(st.sampled_from(WHOLE_CHARACTERS), min_size=1, max_size=8),
    st.lists(st.sampled_from(["the", "e c", "ts", "s🙂", "🙂", " ", "🙂🙂", "at s"]), min_size=1, max_size=3),
)
@settings(max_examples=100)
def test_a_tokenizer_with_byte_fallback_reads_as_if_decoded_anew_each_time(parts, stops):
    """Of whole characters: a broken one would take back what was readable before."""
    tokens = [token for part in parts for token in part]
    assert read(byte_fallback(), tokens, stops) == cut(byte_fallback().decode, tokens, stops)


# --- whole generations, real models ---------------------------------------------------------------


@functools.cache
def tiny_pair() -> tuple[Any, Any]:
    return (llama(), byte_level()), (near(llama(), noise=0.05), byte_level())


def check(completion: Completion, decode: Decode, tokens: list[int], stops: Sequence[str]) -> None:
    """Assert that a completion equals the cut text of its tokens, including its pieces and counts."""
    text, stop, num_tokens = cut(decode, tokens, stops)
    assert completion.text == "".join(token.text for token in completion.tokens) == text
    assert completion.stop_reason == completion.tokens[-1].stop_reason == stop
    assert completion.finish_reason == completion.tokens[-1].finish_reason == ("length" if stop is None else "stop")
    assert ids(completion.tokens) == tokens[:num_tokens]
    assert all(token.stop_reason is token.finish_reason is None for token in completion.tokens[:-1])
    statistics = completion.statistics
    assert statistics.generated_tokens == num_tokens
    assert statistics.accepted == sum(token.from_draft for token in completion.tokens)
    assert statistics.accepted + statistics.rejected == statistics.proposed


PROMPT = [3, 1, 4, 1, 5]


@pytest.mark.slow
@sweep(("lookahead", "sampling"), [(0, {}), (3, {"temperature": 1.0, "seed": 5}), ("auto", {})])
async def test_a_generation_with_stop_strings_is_the_one_without_cut(lookahead, sampling):
    """For each token, a string that is completed by it: within the token, across tokens, and across rounds."""
    settings = {"max_tokens": 24, "lookahead": lookahead, "logprobs": 2, **sampling}
    draw = random.Random(0)
    async with runtime.open(*tiny_pair()) as rt:
        whole = await rt.generate(PROMPT, **settings)
        tokens = ids(whole.tokens)
        assert (len(tokens), whole.stop_reason) == (24, None)
        ends_in_half = 0
        for n in range(1, 25):
            text = byte_level().decode(tokens[:n])
            readable = text.rstrip("\ufffd") or text
            ends_in_half += readable != text
            stop = readable[-(1, draw.randint(2, 5), draw.randint(6, 12))[n % 3] :]
            stopped = await rt.generate(PROMPT, **settings, stop=stop)
            check(stopped, byte_level().decode, tokens, [stop])
            expected = [token.logprob for token in whole.tokens[: len(stopped.tokens)]]
            assert [token.logprob for token in stopped.tokens] == pytest.approx(expected, abs=1e-4)
            assert all(len(token.top_logprobs) == 2 for token in stopped.tokens)
        assert ends_in_half > 0, "no stop string was ever followed by half a character"


# --- the tail of an incomplete text ---------------------------------------------------------------


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=16), st.lists(st.text("abc🙂中é", min_size=1, max_size=3)))
@settings(max_examples=100)
def test_what_was_given_and_the_tail_are_the_text_of_the_tokens(tokens, stops):
    text, given_text = GrowingText(byte_level(), opened(stops)), ""
    assert text.tail == ""
    for n, token in enumerate(tokens, start=1):
        given_text += text.add(token, is_last=n == len(tokens))
        if text.stop is not None:
            assert text.tail == ""
            return
        assert given_text + text.tail == byte_level().decode(tokens[:n])
    assert text.tail == ""


@sweep("way", ["break", "cancel", "failure"])
async def test_a_broken_off_stream_has_the_rest_in_its_tail(way):
    tails = set()
    async with runtime.open(*tiny_pair()) as rt:
        whole = await rt.generate(PROMPT, max_tokens=24)
        stops = [whole.text[i : i + 3] + "☂" for i in range(len(whole.text))]
        for num_given in range(1, 13, 2):

            @runtime.stateless
            def fails(tokens: mx.array, logits: mx.array, length: int = len(PROMPT) + num_given) -> mx.array:
                if way == "failure" and len(tokens) >= length:
                    raise ValueError("no more")
                return logits

            got = []
            lookahead = 0 if way == "failure" else 3
            stream = rt.stream(PROMPT, max_tokens=24, lookahead=lookahead, stop=stops, logits_processors=[fails])
            is_failure = pytest.raises(runtime.ProcessorError) if way == "failure" else contextlib.nullcontext()
            with is_failure, trio.CancelScope() as scope:
                async for token in stream:
                    got.append(token)
                    if len(got) == num_given and way == "cancel":
                        scope.cancel()
                    elif len(got) == num_given and way == "break":
                        break
            assert len(got) == num_given
            tails.add(stream.tail)
            await stream.aclose()
            assert "".join(token.text for token in got) + stream.tail == byte_level().decode(ids(got))
        assert any("\ufffd" in tail for tail in tails)
        assert any(tail and "\ufffd" not in tail for tail in tails)
        async with rt.stream(PROMPT, max_tokens=24, stop=stops) as stream:
            async for _ in stream:
                pass
        assert stream.tail == ""


@sweep("lookahead", [0, 3])
async def test_half_a_character_at_the_end_is_no_text(lookahead):
    decode = byte_level().decode
    async with runtime.open(*tiny_pair()) as rt:
        tokens = ids((await rt.generate(PROMPT, max_tokens=24, lookahead=lookahead)).tokens)
        halves = [n for n in range(1, 25) if decode(tokens[:n]).endswith("\ufffd")]
        assert halves
        for n in halves[-3:]:
            for stops in ((), "\ufffd☂"):
                stream = rt.stream(PROMPT, max_tokens=n, lookahead=lookahead, stop=stops)
                given_text = "".join([token.text async for token in stream])
                assert (given_text, stream.finish_reason) == (decode(tokens[:n]).rstrip("\ufffd"), "length")
                assert stream.tail == ""


# --- stop reasons ---------------------------------------------------------------------------------


DISTINCT = prompt_with_distinct_continuation(14)
TOKENS = continuation(DISTINCT, 14)
TEXT = OneLetterTokenizer().decode(TOKENS)


@sweep(
    ("settings", "finish_reason", "stop_reason", "num_tokens"),
    [
        ({}, "stop", None, 8),  # the tokenizer's own end
        ({"ignore_eos": True}, "length", None, 14),
        # The same, and named.
        *(({"stop_tokens": [TOKENS[7]], **more}, "stop", TOKENS[7], 8) for more in ({}, {"ignore_eos": True})),
        ({"stop_tokens": [TOKENS[9]]}, "stop", None, 8),
        ({"stop_tokens": [TOKENS[5]]}, "stop", TOKENS[5], 6),
        ({"stop": TEXT[5]}, "stop", TEXT[5], 6),
        ({"stop": TEXT[4:6], "stop_tokens": [TOKENS[5]]}, "stop", TOKENS[5], 6),  # a stop token is not part of the text
        ({"stop": TEXT[6:8]}, "stop", None, 8),  # nor is the end token
        ({"stop": TEXT[6:8], "ignore_eos": True}, "stop", TEXT[6:8], 8),
        ({"stop": TEXT[5], "stop_tokens": [TOKENS[4]]}, "stop", TOKENS[4], 5),
    ],
)
@sweep("lookahead", [0, 3])
async def test_a_reason_is_what_the_user_named(
    settings, finish_reason, stop_reason, num_tokens, lookahead, autojump_clock
):
    async with scripted_letters("right", tokenizer=OneLetterTokenizer([TOKENS[7]])) as simulation:
        completion = await simulation.runtime.generate(DISTINCT, max_tokens=14, lookahead=lookahead, **settings)
        assert (completion.finish_reason, completion.stop_reason) == (finish_reason, stop_reason)
        assert ids(completion.tokens) == TOKENS[:num_tokens]
        trimmed = num_tokens - (1 if finish_reason == "stop" else 0)
        trimmed -= len(stop_reason) - 1 if isinstance(stop_reason, str) else 0
        assert completion.text == TEXT[:trimmed]


# --- the models, in simulated time ----------------------------------------------------------------

PRICES = {"quick drafter": priced(draft=0.5, verify=8.0), "slow drafter": priced(draft=8.0, verify=3.0)}
DRAFTERS: dict[Any, Callable[[], Any]] = {
    "right": lambda: ScriptedModel(truthful),
    "wrong": lambda: ScriptedModel(agreeing(0.5)),
    "useless": lambda: ScriptedModel(agreeing(0.0)),
    "failing": lambda: ScriptedModel(truthful, fails={"feed": [4]}),
    "ngram": lambda: "ngram",
    None: lambda: None,
}
DRAFTS: list[tuple[Any, Any]] = [("right", 3), ("right", "auto"), ("wrong", 3), ("ngram", 3), (None, 0), ("right", 0)]
# Drafters that stop drafting, for a while or for good.
QUITTERS: list[tuple[Any, Any]] = [("useless", "auto"), ("failing", 3)]


def scripted_letters(draft: Any = None, price: str | None = None, **options: Any) -> Any:
    """A runtime in simulated time over a tokenizer of letters."""
    prices = {} if price is None else {"price": PRICES[price]}
    return simulated(
        ScriptedModel(truthful), DRAFTERS[draft](), **{"tokenizer": OneLetterTokenizer(), **prices, **options}
    )


def assert_idle_after_the_stop(simulation: Simulation) -> None:
    """Assert that, after the verdict that completed the stop string, no job begins."""
    *_, last = simulation.instants("verdict", "target")
    for worker in (simulation.target_worker, simulation.draft_worker):
        for handed in worker.handed if worker is not None else ():
            assert handed.at <= last.at or handed.job.kind == "close", f"{handed.job.kind} began after the end"
    simulation.assert_all_closed()


@pytest.mark.slow
@sweep("price", PRICES)
@sweep(("draft", "lookahead"), [*DRAFTS, *QUITTERS])
def test_both_models_stop_at_once_also_where_nobody_reads_yet(draft, lookahead, price):
    async def main(num_tokens: int, length: int) -> None:
        stop = TEXT[max(0, num_tokens - length) : num_tokens]
        async with scripted_letters(draft, price) as simulation:
            stream = simulation.runtime.stream(DISTINCT, max_tokens=None, lookahead=lookahead, stop=stop)
            await trio.sleep(10_000)
            assert_idle_after_the_stop(simulation)
            assert [token.id async for token in stream] == TOKENS[:num_tokens]
            assert stream.stop_reason == stop

    for num_tokens in range(1, 15, 4):
        run(main, num_tokens, (1, 3, 6)[num_tokens % 3])


@pytest.mark.slow
@sweep(("draft", "lookahead", "price"), [(*each, price) for each, price in zip(DRAFTS, [*PRICES] * 3, strict=True)])
def test_the_counts_are_those_of_a_stop_token_in_the_same_place(draft, lookahead, price):
    async def counts(**settings: Any) -> list[int]:
        async with scripted_letters(draft, price) as simulation:
            generated = (await simulation.runtime.generate(DISTINCT, lookahead=lookahead, **settings)).statistics
        names = ("generated_tokens", "proposed", "accepted", "rejected", "bonus", "rounds", "replayed_tokens")
        return [getattr(generated, name) for name in names]

    for num_tokens in range(1, 15, 3):
        by_token = run(lambda n=num_tokens: counts(stop_tokens=[TOKENS[n - 1]]))
        for length in (1, 4):
            stop = TEXT[max(0, num_tokens - length) : num_tokens]
            assert run(lambda s=stop: counts(stop=s)) == by_token


async def test_what_may_become_a_stop_string_comes_once_it_is_known_not_to(autojump_clock):
    stop = TEXT[2:5] + "☂"
    async with scripted_letters() as simulation:
        stream = simulation.runtime.stream(DISTINCT, max_tokens=7, stop=stop)
        pieces = [token.text async for token in stream]
    assert pieces == [TEXT[0], TEXT[1], "", "", "", TEXT[2:6], TEXT[6]]


@sweep("lookahead", [0, 3])
async def test_a_tokenizer_that_fails_fails_for_its_reader_and_for_nobody_else(lookahead, caplog, autojump_clock):
    async with scripted_letters("right", tokenizer=OneLetterTokenizer(fails_at=TOKENS[5])) as simulation:
        stream = simulation.runtime.stream(DISTINCT, max_tokens=8, lookahead=lookahead, stop="☂")
        got: list[int] = []
        with pytest.raises(ValueError, match=f"no token {TOKENS[5]}"):
            await read_into(got, stream)
        assert got == TOKENS[:5]
        await stream.aclose()
        other = await simulation.runtime.generate(DISTINCT, max_tokens=4, stop=TEXT[2])
        assert other.text == TEXT[:2]
    assert "not searched for stop strings any more" in caplog.text


# --- reasoning and calls --------------------------------------------------------------------------

TAGS = ("<think>", "</think>")
JSON_CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 9.8, "b": 1}}</tool_call>'
GLM_CALL = "<tool_call>search<arg_key>query</arg_key><arg_value>9.8 or</arg_value></tool_call>"

NO_CALL = "<tool_call>nothing</tool_call>"
WHOLE: Any = None  # nothing is found


@sweep(
    ("options", "text", "stops", "given", "found"),
    [
        ({"is_thinking": True}, "9.8 <9.8?</think>\n\nIt is 9.80.", "9.8", "9.8 <9.8?</think>\n\nIt is ", "9.8"),
        *(({}, text, "9.8", WHOLE, None) for text in ("<think>9.8</think>9.", "<think>9.8")),
        ({}, "9.8<think>9.8</think>", "9.8", "", "9.8"),
        ({}, "a <think>9.8", "9.8", "a <think>", "9.8"),  # a word
        ({"is_thinking": True}, "a\n\nb\n</think>\n\nc\n\nd", "\n\n", "a\n\nb\n</think>\n\nc", "\n\n"),
        ({"is_thinking": True}, "a</think>b", "</think>", "a", "</think>"),
        ({"is_thinking": True}, "a 9.8</think>b 9.8", ["</think>x", "9.8"], "a 9.8</think>b ", "9.8"),
        ({"format": "json_tools"}, f"I: {JSON_CALL}\n9.8", "9.8", f"I: {JSON_CALL}\n", "9.8"),
        ({"format": "json_tools"}, f"9. {JSON_CALL[:50]}", "9.8", WHOLE, None),
        ({"format": "json_tools"}, f"9.8 {JSON_CALL}", "9.8", "", "9.8"),
        ({"format": "json_tools"}, f"A {JSON_CALL}", "<tool_call>", "A ", "<tool_call>"),
        ({"format": "json_tools"}, f"{NO_CALL} 9.8", "9.8", f"{NO_CALL} ", "9.8"),
        *(({"format": "glm47"}, f"a {text}", "9.8", WHOLE, None) for text in (GLM_CALL * 2, GLM_CALL[:60])),
        ({"format": "glm47"}, f"{GLM_CALL}b 9.8", "9.8", f"{GLM_CALL}b ", "9.8"),
    ],
)
def test_stop_strings_are_found_in_the_content_alone(options, text, stops, given, found):
    format = call_format(options["format"]) if "format" in options else None
    for size in (1, 2, 3, 7, len(text)):
        reader = AnswerReader(tags=TAGS, is_thinking="is_thinking" in options, format=format, tools=TOOLS)
        search, pieces = ContentStops([stops] if isinstance(stops, str) else stops, reader), ""
        for begin in range(0, len(text), size):
            pieces += search.add(text[begin : begin + size])
            if search.found is None:
                assert pieces + search.withheld == text[: begin + size]
        pieces += search.finish()
        assert (pieces, search.found) == (text if given is None else given, found)
        assert search.withheld == ""


def test_only_what_may_become_a_stop_string_a_tag_or_a_call_is_withheld():
    search = ContentStops(["9.8"], AnswerReader(tags=TAGS, format=call_format("glm47"), tools=TOOLS))
    for piece, shown in (
        ("<th", ""),
        ("ink>9.", "<think>9."),
        ("8</think>9", "8</think>"),
        (".7 ", "9.7"),
        ("b<tool_call>sea", " b"),
        ("son, so", "<tool_call>season, so"),
    ):
        assert search.add(piece) == shown


@sweep("draft", ["ngram", "model", None])
@sweep(("template", "lead"), [(THINKING_TEMPLATE, ""), (BEGUN_TEMPLATE, "<think>\n")])
async def test_a_stop_string_in_the_reasoning_ends_no_stream(template, lead, draft):
    said = "The cat, the dog, the cat.</think>\n\nIt is the dog, the cat."
    processor = says(tokenizer(template, thinks=True), said if lead else f"<think>{said}", lead=lead)
    target, drafter = pair(thinks=True, template=template)
    async with runtime.open(target, drafter if draft == "model" else draft) as rt:
        settings: Any = {"logits_processors": (processor,), "stop": "the dog", "max_tokens": 60}
        completion = await rt.generate([{"role": "user", "content": "Which?"}], **settings)
    assert (completion.thinking.strip(), completion.content.strip()) == ("The cat, the dog, the cat.", "It is")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "the dog")
