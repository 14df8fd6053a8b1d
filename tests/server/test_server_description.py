"""The server's OpenAPI description against its routes and its responses, over scripted models in simulated time."""

from __future__ import annotations

import re
from typing import Any

from asgi import Exchange, Served, on_server, simulated_server
from every_response import KEYED, all_seen
from jsonschema import Draft202012Validator
from referencing import Registry
from referencing.jsonschema import DRAFT202012

PAGES = {"/", "/page", "/docs", "/openapi.json"}


def closed(schema: Any) -> Any:
    """A schema that takes no property that it does not describe."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {name: closed(value) for name, value in schema.items()}
    return {"additionalProperties": False, **result} if "properties" in schema else result


class Description:
    """A description whose schemas validate responses."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content
        self._registry = Registry().with_resource("urn:all", DRAFT202012.create_resource(content))

    def validate(self, value: Any, *location: str) -> None:
        """Raises: jsonschema.ValidationError: a value is not as the schema at a location says."""
        pointer = "/".join(name.replace("/", "~1") for name in location)
        Draft202012Validator({"$ref": f"urn:all#/{pointer}"}, registry=self._registry).validate(value)


def check(description: Description, path: str, answer: Exchange) -> tuple[str, str, str, str]:
    """Validate a response against its description, of which all schemas are `closed`.

    Returns: path, method, status and content type of the response.
    """
    method, status = answer.scope["method"].lower(), str(answer.status)
    content_type = answer.headers["content-type"].partition(";")[0]
    at = ("paths", path, method, "responses", status, "content", content_type, "schema")
    if content_type == "application/json":
        description.validate(answer.json, *at)
    else:
        description.validate(answer.body.decode(), *at)
    return path, method, status, content_type


def described(description: dict[str, Any]) -> set[tuple[str, str, str, str]]:
    """Path, method, status and content type of every response that there may be."""
    return {
        (path, method, status, content_type)
        for path, operations in description["paths"].items()
        for method, operation in operations.items()
        for status, response in operation["responses"].items()
        for content_type in response["content"]
    }


@on_server()
async def test_the_description_has_the_routes_of_the_application_but_for_its_pages(server: Served) -> None:
    routes = {}
    for route in server.app.app._app.routes:
        if route.path not in PAGES:
            routes[re.sub(r":\w+}", "}", route.path)] = {method.lower() for method in route.methods} - {"head"}
    paths = (await server.ask("/openapi.json")).json["paths"]
    assert {path: set(operations) for path, operations in paths.items()} == routes


def description_with_key() -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    async def ask(server: Served) -> None:
        found.append((await server.ask("/openapi.json")).json)

    simulated_server(ask, **KEYED)
    return found[0]


def test_operations_have_summaries_and_the_page_shows_texts_verbatim() -> None:
    description = description_with_key()
    operations = [each for methods in description["paths"].values() for each in methods.values()]
    summaries = [each["summary"] for each in operations]
    assert len(set(summaries)) == len(summaries)
    shown = [*summaries, description["info"]["description"], *(each.get("description", "") for each in operations)]
    shown += [response["description"] for each in operations for response in each["responses"].values()]
    assert not [text for text in shown if "`" in text]


def test_every_response_is_as_described_and_every_described_response_is_given() -> None:
    description = Description(closed(description_with_key()))
    assert {check(description, path, answer) for path, answer in all_seen()} == described(description.content)
