"""Official clients of `/v1/responses` and of Anthropic's API, and frameworks, with `outrider serve` as a process."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest
from command_line import HANGS_S
from schemas import closed_object
from served_command import CALLER, KEY, MODEL, PROMPT, Server

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    import anthropic  # takes seconds

SAID: Any = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=HANGS_S) as one:
        yield one


# --- /v1/responses --------------------------------------------------------------------------------


def test_a_response_is_the_text_of_the_runtime(client, expected):
    response = client.responses.create(model=MODEL, input=PROMPT, max_output_tokens=24)
    assert response.output_text == expected
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.output_tokens == 24
    events = list(client.responses.create(model=MODEL, input=PROMPT, max_output_tokens=24, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert events[-1].response.output_text == "".join(deltas) == expected
    assert client.responses.retrieve(response.id) == response


class Verdict(pydantic.BaseModel):
    """What the model is held to."""

    is_sorted: bool
    order: Literal["rising", "falling"]


def test_a_response_keeps_to_a_type(client):
    asked: Any = {"model": MODEL, "input": PROMPT, "max_output_tokens": 200, "text_format": Verdict}
    assert isinstance(client.responses.parse(**asked).output_parsed, Verdict)
    with client.responses.stream(**asked) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Verdict)


def test_errors_of_responses_come_as_the_client_knows_them(client, server):
    with pytest.raises(openai.BadRequestError, match="max_output_tokens must be at least -1") as bad:
        client.responses.create(model=MODEL, input="a", max_output_tokens=-2)
    assert bad.value.param == "max_output_tokens"
    with pytest.raises(openai.NotFoundError, match="no such response"):
        client.responses.retrieve("resp_0")
    with pytest.raises(openai.NotFoundError, match="no embeddings here"):
        client.embeddings.create(model=MODEL, input="a")


CITY = {"type": "string", "enum": ["Oslo", "Lisbon"]}
SCHEMA = {**closed_object(city=CITY, days={"type": "integer", "maximum": 9}), "required": ["city"]}
HELD: dict[str, Any] = {"model": CALLER, "temperature": 1.0, "extra_body": {"seed": 7}}


def test_a_response_calls_a_function(caller):
    function: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
    asked: Any = {**HELD, "input": "Weather?", "tools": [function], "tool_choice": "required"}
    with caller.client() as client:
        with client.responses.stream(**asked, parallel_tool_calls=False) as stream:
            deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
            response = stream.get_final_response()
        (call,) = response.output
        assert (call.type, call.name) == ("function_call", "weather")
        assert "".join(deltas) == call.arguments
        assert len(deltas) > 1
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
        assert client.responses.create(**asked, parallel_tool_calls=False).output[0].arguments == call.arguments
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "mild"}
        more = client.responses.create(
            model=CALLER, input=[output], previous_response_id=response.id, tools=[function], max_output_tokens=8
        )
        assert more.usage.output_tokens == 8


# --- Anthropic's API ------------------------------------------------------------------------------


def test_a_message_is_the_text_of_the_runtime(claude, expected):
    message = claude.messages.create(model=MODEL, messages=SAID, max_tokens=24)
    assert [block.text for block in message.content] == [expected]
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 24)
    with claude.messages.stream(model=MODEL, messages=SAID, max_tokens=24) as stream:
        assert "".join(stream.text_stream) == expected
        final = stream.get_final_message()
    assert final.usage.cache_read_input_tokens > 0
    counted = claude.messages.count_tokens(model=MODEL, messages=SAID)
    assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens
    stop = expected[9:12]
    stopped = claude.messages.create(model=MODEL, messages=SAID, max_tokens=24, stop_sequences=[stop])
    assert stopped.content[0].text == expected.partition(stop)[0]
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)


def test_a_message_calls_a_tool(caller):
    import anthropic

    tools: Any = [{"name": "weather", "input_schema": SCHEMA, "strict": True}]
    choice: Any = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    said: Any = [{"role": "user", "content": "Weather?"}]
    asked: Any = {"model": CALLER, "tools": tools, "max_tokens": 200, "extra_body": {"temperature": 1.0, "seed": 7}}
    with anthropic.Anthropic(base_url=caller.url, api_key=KEY, max_retries=0, timeout=HANGS_S) as claude:
        with claude.messages.stream(**asked, messages=said, tool_choice=choice) as stream:
            deltas = [event.partial_json for event in stream if event.type == "input_json"]
            message = stream.get_final_message()
        (block,) = message.content
        assert (block.type, block.name, message.stop_reason) == ("tool_use", "weather", "tool_use")
        assert json.loads("".join(deltas)) == block.input
        assert len(deltas) > 1
        jsonschema.validate(block.input, SCHEMA)
        result: Any = {"type": "tool_result", "tool_use_id": block.id, "content": "mild"}
        said += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        more = claude.messages.create(**{**asked, "max_tokens": 8}, messages=said)
        assert more.usage.output_tokens == 8


def test_errors_of_messages_come_as_the_client_knows_them(claude, server):
    import anthropic

    with pytest.raises(anthropic.BadRequestError, match="max_tokens must be at least -1") as bad:
        claude.messages.create(model=MODEL, messages=SAID, max_tokens=-2)
    assert bad.value.type == "invalid_request_error"
    stranger = claude.with_options(api_key="wrong")
    with pytest.raises(anthropic.AuthenticationError, match="x-api-key: KEY"):
        stranger.messages.create(model=MODEL, messages=SAID, max_tokens=1)


# --- frameworks -----------------------------------------------------------------------------------


@pytest.fixture(params=["langchain_client", "pydantic_ai_client"])
def example(request: pytest.FixtureRequest, caller: Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = importlib.import_module(request.param)  # takes seconds
    monkeypatch.setattr(module, "KEY", KEY)
    monkeypatch.setattr(module, "BASE_URL", f"{caller.url}v1")
    monkeypatch.setattr(module, "MODEL", CALLER)
    return module


def told(example: ModuleType, feature: str) -> Any:
    """What a function of an example returns, and the list of what it yields, with asyncio or without."""
    found = getattr(example, feature)()
    if hasattr(found, "__aiter__"):

        async def pieces() -> list[Any]:
            return [piece async for piece in found]

        return asyncio.run(pieces())
    if hasattr(found, "__await__"):
        return asyncio.run(found)
    return list(found) if hasattr(found, "__next__") else found


def num_requests(server: Server, outcome: str) -> int:
    figures = httpx.get(f"{server.url}metrics", timeout=HANGS_S).text
    found = re.search(rf'^outrider_requests_total{{outcome="{outcome}"}} (\d+)', figures, re.MULTILINE)
    return int(found[1])


def test_an_answer_is_streamed(example):
    pieces = told(example, "stream")
    assert len(pieces) > 1
    assert "".join(pieces)


def test_a_tool_is_called_as_its_schema_says(example):
    arguments, after = told(example, "call")
    assert arguments["city"] in ("Lisbon", "Oslo")
    assert 1 <= arguments["days"] <= 9
    assert after


def test_an_answer_keeps_to_a_type(example):
    weather = told(example, "structured")
    assert weather.sky in ("clear", "cloudy", "rainy")
    assert -40 <= weather.degrees <= 50


def test_an_answer_that_is_broken_off_is_over(example, caller):
    before = num_requests(caller, "cancelled")
    assert told(example, "break_off")
    caller.until_idle()
    assert num_requests(caller, "cancelled") == before + 1
    assert num_requests(caller, "refused") == num_requests(caller, "failed") == 0
