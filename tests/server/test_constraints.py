"""What an answer must be, in the fields of OpenAI's, vLLM's and llama.cpp's clients: from the request to the text."""

import json
import re
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
import trio
from asgi import CHAT, COMPLETIONS, HELLO, MESSAGES, RESPONSES, ScriptedCheck, ask, real_server
from assembled import text_of
from chat_models import calling_pair
from schemas import closed_object
from sweeps import sweep
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from tool_letters import TOOLS
from transformers import PreTrainedTokenizerFast

from protocol.errors import ProcessorError
from runtime.server.answers.body import parse_request
from runtime.server.answers.request import GenerationRequest
from runtime.server.errors import ConstraintError, error_response_of
from runtime.server.grammars.schemas import ANY_OBJECT, Constraint, Schemas
from runtime.server.openai.requests import ChatRequest

SCHEMA = closed_object(a={"type": "boolean"})
NAMED = {"name": "x", "schema": SCHEMA}
GBNF = 'root ::= ("a" | "b") [0-9]{2} "."'

FIELDS: list[tuple[dict[str, Any], str | None, Any]] = [
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, "json", SCHEMA),
    ({"response_format": {"type": "json_object"}}, "json", ANY_OBJECT),
    ({"structured_outputs": {"json": SCHEMA}}, "json", SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json", json.dumps(SCHEMA)),
    ({"structured_outputs": {"json_object": True}}, "json", ANY_OBJECT),
    ({"structured_outputs": {"regex": "a|b"}}, "regex", "a|b"),
    ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"]),
    ({"structured_outputs": {"grammar": GBNF}}, "grammar", GBNF),
    ({}, None, None),
    ({"structured_outputs": None}, None, None),
    ({"structured_outputs": {"json_object": False, "backend": "xgrammar"}}, None, None),
    ({"response_format": {"type": "text"}}, None, None),
]


def parsed(fields: dict[str, Any]) -> GenerationRequest:
    return parse_request(ChatRequest, json.dumps({**HELLO, **fields}).encode()).generation()


@sweep(("fields", "kind", "value"), FIELDS)
def test_a_field_is_the_constraint_that_it_stands_for(fields, kind, value):
    constraint = parsed(fields).constraint
    if kind is None:
        assert constraint is None
        return
    assert (constraint.kind, constraint.value, constraint.field) == (kind, value, next(iter(fields)))
    assert constraint.write()


def held(**constraint: Any) -> dict[str, Any]:
    return {"structured_outputs": constraint}


# What is asked, beside a prompt, and what the answer is then.
ASKED: list[tuple[str, dict[str, Any], Callable[[str], Any]]] = [
    (CHAT, held(choice=["yes", "no"]), re.compile("yes|no").fullmatch),
    (CHAT, held(regex="[a-f]{3}[0-9]"), re.compile("[a-f]{3}[0-9]").fullmatch),
    (CHAT, held(json=json.dumps(SCHEMA)), lambda text: "a" in json.loads(text)),
    (CHAT, {**held(grammar=GBNF), "min_tokens": 100}, re.compile(r"[ab][0-9]{2}\.").fullmatch),
    (COMPLETIONS, held(grammar=GBNF), re.compile(r"[ab][0-9]{2}\.").fullmatch),
    (COMPLETIONS, held(choice=["yes", "no"]), re.compile("yes|no").fullmatch),
    # In the other APIs.
    (RESPONSES, held(choice=["yes", "no"]), re.compile("yes|no").fullmatch),
    (MESSAGES, held(grammar=GBNF), re.compile(r"[ab][0-9]{2}\.").fullmatch),
]  # fmt: skip
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, held(regex="a(b"), "structured_outputs cannot be followed: "),
    (COMPLETIONS, held(grammar='root ::= "a'), "cannot be read: Unexpected end of input"),
    (CHAT, held(json="{"), "is not JSON"),
    (CHAT, held(json="null"), "must be an object, True or False"),
    (CHAT, {**held(json="null"), "tools": TOOLS}, "must be an object, True or False"),
    (CHAT, {**held(regex="a"), "tools": TOOLS}, "cannot go together with tools"),
]


async def test_answers_keep_to_their_format_in_every_api():
    async with real_server(*calling_pair(thinks=False)) as (app, _):
        for path, fields, holds in ASKED:
            said = {RESPONSES: {"input": "hello"}, COMPLETIONS: {"prompt": "hello"}}.get(path, HELLO)
            answer = await ask(app, path, {**said, "temperature": 1, "seed": 3, **fields})
            assert answer.status == 200, answer.body
            assert holds(text_of(answer)), answer.body
            assert "x-outrider-ignored" not in answer.headers
        for path, fields, message in WRONG:
            said = {COMPLETIONS: {"prompt": "hello"}}.get(path, HELLO)
            refused = await ask(app, path, {**said, **fields})
            assert (refused.status, refused.fault["param"]) == (400, "structured_outputs")
            assert message in refused.fault["message"]


async def test_what_cannot_be_kept_to_to_the_end_is_named():
    tokenizer = Tokenizer(BPE(vocab={"<eos>": 0, "a": 1, "b": 2}, merges=[]))
    tokenizer.decoder = ByteLevel()
    letters = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    schemas = Schemas(letters, ScriptedCheck(), trio.to_thread.run_sync, 10.0)
    for kind, value in (("regex", "[ab]z"), ("grammar", 'root ::= "a" "z"')):
        grammar = await schemas.grammar(Constraint(kind, value, "structured_outputs"), "client")
        grammar(mx.array([2]), mx.zeros((1, 3)))
        with pytest.raises(ConstraintError, match="no token stands for") as raised:
            grammar(mx.array([2, 1]), mx.zeros((1, 3)))
        failed = ProcessorError("a logits processor raised")
        failed.__cause__ = raised.value
        assert error_response_of(failed).detail["param"] == "structured_outputs"
