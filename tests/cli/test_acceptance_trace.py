"""`outrider bench --trace-acceptance`: what a drafter would propose at each position of a text."""

import json
from itertools import pairwise, takewhile
from pathlib import Path

import mlx.core as mx
import pytest
from interrupts import cancelled_at
from mlx_lm.generate import generate_step
from mlx_lm.tokenizer_utils import TokenizerWrapper
from models import greedy
from sweeps import sweep
from traced_models import TracedForcedText, read_trace
from transformers import AutoTokenizer

import runtime
from protocol.errors import PromptError, SettingsError
from runtime.bench.acceptance_trace import AcceptanceTrace, TracedText, traced, with_grammar
from runtime.bench.one_stream import OneStream
from runtime.bench.prompt_files import BenchPrompt
from runtime.terminal.display import OutputError

PROMPTS = ([1, 2, 3], [5, 8, 13, 21])


def test_a_position_within_a_round_has_the_rest_of_its_drafts():
    rounds = [(0, [(7, 0.9), (8, 0.5), (1, 0.2), (2, 0.1)]), (3, [(4, 0.3)])]
    text = traced("chat", [1], [7, 8, 9, 4, 5], rounds)
    # Nothing is known of what it would say after the token 9, which it did not draft.
    assert text.drafts == (
        ((7, 0.9), (8, 0.5), (1, 0.2), (2, 0.1)),
        ((8, 0.5), (1, 0.2), (2, 0.1)),
        ((1, 0.2), (2, 0.1)),
        ((4, 0.3),),
        (),
    )
    assert [text.num_right(position) for position in range(5)] == [2, 1, 0, 1, 0]


def test_drafts_beyond_the_end_of_a_text_are_of_no_position():
    assert traced("", [1], [7], [(0, [(7, 0.9), (8, 0.5)])]).drafts == (((7, 0.9), (8, 0.5)),)


@pytest.mark.slow
async def test_it_has_what_the_models_say_at_every_position(pair, tmp_path):
    target, draft = pair
    trace = AcceptanceTrace(prompts=PROMPTS, max_tokens=48, file=tmp_path / "trace.jsonl")
    result = await trace.measure((target, None), (draft, None))
    texts = read_trace(tmp_path / "trace.jsonl")
    assert [text.prompt for text in texts] == [tuple(prompt) for prompt in PROMPTS]
    num_right = num_drafted = 0
    for text in texts:
        assert text.text == tuple(greedy(target, text.prompt, 48))
        for at, chain in enumerate(text.drafts):
            steps = generate_step(mx.array(text.prompt + text.text[:at]), draft, max_tokens=len(chain))
            for (token, sure), (expected, logprobs) in zip(chain, steps, strict=False):
                assert token == expected
                assert sure == pytest.approx(float(mx.exp(logprobs[expected])), abs=1e-3)
            num_drafted += bool(chain)
            num_right += bool(chain) and text.num_right(at) > 0
    assert num_drafted > 0
    (row,) = result["rows"]
    assert row["acceptance"][0] == num_right / num_drafted
    assert result["is_complete"]
    assert json.dumps(result)


@pytest.mark.slow
async def test_an_interrupted_one_has_the_texts_that_were_finished(pair, tmp_path):
    trace = AcceptanceTrace(prompts=PROMPTS, max_tokens=16, file=tmp_path / "trace.jsonl")
    result = await cancelled_at("decoding text 2 of 2", trace, (pair[0], None), (pair[1], None))
    assert [text.prompt for text in read_trace(tmp_path / "trace.jsonl")] == [tuple(PROMPTS[0])]
    assert (trace.repeats_done, trace.is_complete, result["rows"][0]["num_texts"]) == (1, False, 1)


SCHEMA = {
    "type": "object",
    "properties": {"first_name": {"type": "string", "maxLength": 9}, "is_known": {"type": "boolean"}},
    "required": ["first_name", "is_known"],
    "additionalProperties": False,
}
TOKENIZER = TokenizerWrapper(AutoTokenizer.from_pretrained(runtime.DEMO_TARGET))
SPACED, LINES = '{"first_name": "Ada", "is_known": true}', '{\n  "first_name": "is",\n  "is_known": false\n}'


@sweep("written", [SPACED, LINES])
def test_a_replayed_grammar_proposes_what_the_real_one_does(written):
    grammar = runtime.Grammar.from_json_schema(SCHEMA, TOKENIZER)
    prompt = tuple(TOKENIZER.encode(f"Ada is known: {SPACED}\n", add_special_tokens=False))
    text = tuple(TOKENIZER.encode(written, add_special_tokens=False))
    found = with_grammar(TracedText("schema", prompt, text, ((),) * len(text)), grammar.forced_text())
    real, replayed = grammar.forced_text(), TracedForcedText(found)
    num_forced = num_allowed = num_forbidden = 0
    for at, token in enumerate(text):
        assert replayed.after(()) == real.after(())
        num_forced += bool(found.forced[at]) and found.forced[at][0][0] == token
        for end in range(at, min(at + 4, len(text))):
            beyond, whole = text[at:end], (*prompt, *text[:end])
            for copied in {other for one, other in pairwise(whole) if one == whole[-1]}:
                allowed = real.num_allowed(beyond, [copied])
                assert replayed.num_allowed(beyond, [copied]) == allowed
                num_allowed, num_forbidden = num_allowed + allowed, num_forbidden + 1 - allowed
        for tokens in (real, replayed):
            tokens.append([token])
    assert min(num_allowed, num_forbidden) > 0
    assert num_forced > len(text) / 2


@pytest.mark.slow
async def test_a_text_under_a_schema_has_the_tokens_that_are_forced(tmp_path):
    prompts = [BenchPrompt(("def f(",), "schema", schema=SCHEMA), BenchPrompt(("import ",), "code")]
    trace = AcceptanceTrace(prompts=prompts, max_tokens=48, file=tmp_path / "trace.jsonl")
    result = await trace.measure(runtime.DEMO_TARGET, runtime.DEMO_DRAFT)
    constrained, free = read_trace(tmp_path / "trace.jsonl")
    assert (free.forced, free.forbidden) == ((), ())
    grammar, num_forced = runtime.Grammar.from_json_schema(SCHEMA, TOKENIZER), 0
    assert grammar.allows(constrained.text)
    for at, (forced, drafted) in enumerate(zip(constrained.forced, constrained.drafts, strict=True)):
        certain = TOKENIZER.decode([token for token, _ in takewhile(lambda each: each[1] == 0, forced)])
        assert TOKENIZER.decode(constrained.text[at:]).startswith(certain)
        assert grammar.allows([*constrained.text[:at], *(token for token, _ in drafted[:1])])
        num_forced += bool(forced) and forced[0][0] == constrained.text[at]
    assert num_forced > 0
    share = num_forced / len(constrained.text)
    assert {row["category"]: row["forced"] for row in result["rows"]} == {"schema": share, "code": None, "all": share}
    assert json.dumps(result)


async def test_a_trace_that_cannot_be_written_is_not_complete(pair, tmp_path):
    target, draft = pair
    trace = AcceptanceTrace(prompts=PROMPTS[:1], max_tokens=16, file=tmp_path)
    with pytest.raises(OutputError, match="Is a directory"):
        await trace.measure((target, None), (draft, None))
    assert not trace.is_complete


async def test_what_has_no_drafts_of_its_own_is_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"greedy texts, got temperature=0\.5"):
        AcceptanceTrace(temperature=0.5, file=Path())
    with pytest.raises(SettingsError, match="a drafter with a model"):
        await AcceptanceTrace(file=Path()).measure("target", "ngram")


def test_a_benchmark_of_speed_takes_no_schema():
    with pytest.raises(PromptError, match="goes with --trace-acceptance only"):
        OneStream(prompts=[BenchPrompt(("a",), schema=SCHEMA)])
