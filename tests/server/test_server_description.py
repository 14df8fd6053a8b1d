"""Responses against the server's OpenAPI description, and against the schemas of the clients that read them."""

import json
import pkgutil
import re
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import pytest
from asgi import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    FIM,
    MESSAGES,
    MODEL,
    RESPONSES,
    Exchange,
    on_server,
)
from assembled import adapter
from every_response import all_seen
from jsonschema import Draft202012Validator
from pydantic import ValidationError
from referencing import Registry
from referencing.jsonschema import DRAFT202012
from sweeps import sweep

from runtime.server.app import OPERATIONS
from runtime.server.operations import description

PAGES = {"/", "/page", "/docs", "/openapi.json"}


def closed(schema: Any) -> Any:
    """A schema that takes no property that it does not describe."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {name: closed(value) for name, value in schema.items()}
    return {"additionalProperties": False, **result} if "properties" in schema else result


def check(registry: Registry[Any], path: str, answer: Exchange) -> tuple[str, str, str, str]:
    """Validate a response against its description, `urn:all` of the registry, of which all schemas are `closed`.

    Returns: path, method, status and content type of the response.
    """
    method, status = answer.scope["method"].lower(), str(answer.status)
    content_type = answer.headers["content-type"].partition(";")[0]
    at = ("paths", path, method, "responses", status, "content", content_type, "schema")
    pointer = "/".join(name.replace("/", "~1") for name in at)
    value = answer.json if content_type == "application/json" else answer.body.decode()
    Draft202012Validator({"$ref": f"urn:all#/{pointer}"}, registry=registry).validate(value)
    return path, method, status, content_type


def described(content: dict[str, Any]) -> set[tuple[str, str, str, str]]:
    """Path, method, status and content type of every response that there may be."""
    return {
        (path, method, status, content_type)
        for path, operations in content["paths"].items()
        for method, operation in operations.items()
        for status, response in operation["responses"].items()
        for content_type in response["content"]
    }


@on_server()
async def test_the_description_has_the_routes_of_the_application_but_for_its_pages(server):
    routes = {}
    for route in server.app.app.routes:
        if route.path not in PAGES:
            routes[re.sub(r":\w+}", "}", route.path)] = {method.lower() for method in route.methods} - {"head"}
    paths = (await server.ask("/openapi.json")).json["paths"]
    assert {path: set(operations) for path, operations in paths.items()} == routes


def test_every_response_is_as_described_and_every_described_response_is_given():
    content = closed(description(OPERATIONS, MODEL, has_key=True))
    registry = Registry().with_resource("urn:all", DRAFT202012.create_resource(content))
    assert {check(registry, path, answer) for path, answer in all_seen()} == described(content)


# --- the clients' schemas -------------------------------------------------------------------------

# Locations of fields, without the indices of lists.
Locations = Mapping[str, bool]


@attrs.frozen
class Schema:
    """What clients read at one path.

    Clients for Python take null for any field that may be left out, and the other way round. Which fields may be null
    is from those for JavaScript: the types of `openai` and `@anthropic-ai/sdk`, and zod's schemas in `@ai-sdk/openai`,
    `@ai-sdk/openai-compatible` and `@ai-sdk/anthropic`. All of them must take it.

    Attributes:
        whole, event: the types of a response and of an event, in the clients for Python, which take seconds to import.
        nulls, nulls_of_events: the fields that may be null, and whether they must be there.
    """

    whole: str
    nulls: Locations = attrs.Factory(dict)
    event: str = ""
    nulls_of_events: Locations = attrs.Factory(dict)


def within(name: str, nulls: Locations) -> Locations:
    return {f"{name}.{location}": must_be_there for location, must_be_there in nulls.items()}


LOGPROBS = within("choices.logprobs", {"content": True, "refusal": True})
MESSAGE = within("choices.message", {"content": True, "refusal": True})
CHATS = Schema(
    "openai.types.chat:ChatCompletion",
    {"choices.logprobs": True, **MESSAGE, **LOGPROBS},
    "openai.types.chat:ChatCompletionChunk",
    {"choices.logprobs": False, "choices.finish_reason": True, **LOGPROBS},
)
RESPONSE = {
    **dict.fromkeys(("error", "incomplete_details", "instructions"), True),
    **dict.fromkeys(("completed_at", "max_output_tokens", "previous_response_id"), False),
}
END = {"stop_reason": True, "stop_sequence": True}
MESSAGE_EVENTS = {**within("message", END), "delta.stop_sequence": False}
OF_TEXTS, CHOSEN, AT = "openai.types:Completion", {"choices.logprobs": True}, "openai.types.responses:"
SCHEMAS = {
    # In clients, a chunk is of the type of a response. OpenAI's service gives it no reason before the end.
    COMPLETIONS: Schema(OF_TEXTS, CHOSEN, OF_TEXTS, {**CHOSEN, "choices.finish_reason": True}),
    **dict.fromkeys((FIM, CHAT), CHATS),
    RESPONSES: Schema(f"{AT}Response", RESPONSE, f"{AT}ResponseStreamEvent", within("response", RESPONSE)),
    f"{RESPONSES}/{{id}}": Schema(f"{AT}Response", RESPONSE),
    MESSAGES: Schema("anthropic.types:Message", END, "anthropic.types:RawMessageStreamEvent", MESSAGE_EVENTS),
    COUNT_TOKENS: Schema("anthropic.types:MessageTokensCount"),
}
ERROR: Locations = within("error", {"param": False, "code": False})

# Of vLLM, whose tests read it where it was not asked for. OpenAI's types do not know it.
VLLMS = {"prompt_logprobs"}

# Objects that are Outrider's own, or the client's.
NOT_THEIRS = {"speculation", "tools", "response.tools"}


def bodies(answer: Exchange) -> Iterator[tuple[bool, dict[str, Any]]]:
    """The objects that an answer consists of, and whether they are events."""
    if answer.headers["content-type"] == "application/json":
        yield False, answer.json
        return
    for line in answer.body.decode().splitlines():
        if line.startswith("data: {"):
            yield True, json.loads(line.removeprefix("data: "))


def objects(value: Any, location: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects within a value, with their locations."""
    if isinstance(value, list):
        for item in value:
            yield from objects(item, location)
    elif isinstance(value, dict) and location not in NOT_THEIRS:
        yield location, value
        for name, field in value.items():
            yield from objects(field, f"{location}.{name}".lstrip("."))


def check_nulls(body: dict[str, Any], nulls: Locations) -> None:
    """Assert that no other fields are null than may be, and that none of those is missing that must be there."""
    for location, found in objects(body):
        of_it = {name.rpartition(".")[2]: must for name, must in nulls.items() if name.rpartition(".")[0] == location}
        assert {name for name, field in found.items() if field is None} - VLLMS <= of_it.keys(), location
        assert {name for name, must_be_there in of_it.items() if must_be_there} <= found.keys(), location


# Reasons for an end that only a client sees which has cancelled an answer by its id, and reasons that the APIs have.
OURS = {
    '"finish_reason": "cancelled"': '"finish_reason": "length"',
    '"reason": "cancelled"': '"reason": "max_output_tokens"',
    '"stop_reason": "cancelled"': '"stop_reason": "max_tokens"',
}


def check_type(body: dict[str, Any], type: str, nulls: Locations) -> None:
    """Assert that a client for Python takes an object, without conversions."""
    text = json.dumps(body)
    for ours, theirs in OURS.items():
        text = text.replace(ours, theirs)
    try:
        adapter(pkgutil.resolve_name(type)).validate_json(text, strict=True)
    except ValidationError as error:
        for problem in error.errors():
            location = ".".join(part for part in problem["loc"] if isinstance(part, str))
            assert problem["input"] is None, problem
            assert location in nulls, problem


# Anthropic's client takes three seconds to import.
@sweep(
    "path", [pytest.param(path, marks=[pytest.mark.slow] * ("anthropic" in of.whole)) for path, of in SCHEMAS.items()]
)
def test_answers_are_what_the_clients_for_python_and_for_javascript_read(path):
    schema = SCHEMAS[path]
    answers = [answer for at, answer in all_seen() if at == path and answer.scope["method"] != "DELETE"]
    num_checked = 0
    for answer in answers:
        for is_event, body in bodies(answer):
            if "error" in body and body.get("object") != "response":
                check_nulls(body, ERROR)
            elif body.get("type") != "ping":
                nulls = schema.nulls_of_events if is_event else schema.nulls
                check_type(body, schema.event if is_event else schema.whole, nulls)
                check_nulls(body, nulls)
                num_checked += 1
    assert num_checked
