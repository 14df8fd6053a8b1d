"""OpenAI's responses: their operations, and the endpoint of those that are stored."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from runtime.server.answers.endpoint import Endpoint, Parsed, endings
from runtime.server.context import ServerContext
from runtime.server.errors import ErrorResponse
from runtime.server.operations import Operation
from runtime.server.responses.requests import ResponsesRequest, parse_response_request
from runtime.server.responses.serializer import DeletedResponse, ResponseBody, ResponseSerializer
from runtime.server.responses.store import ResponseStore


def _store(context: ServerContext) -> ResponseStore:
    limits = context.limits
    empty = ResponseStore(limits.max_stored_responses, limits.max_stored_bytes)
    store: ResponseStore = context.kept.setdefault(ResponseStore, empty)
    return store


def _endpoint(context: ServerContext) -> Endpoint:
    store = _store(context)

    def parse(body: bytes) -> Parsed:
        parsed = parse_response_request(body, store)
        return parsed.generation, partial(ResponseSerializer, parsed, store)

    return Endpoint(context, parse)


async def _stored(context: ServerContext, request: HttpRequest) -> Response:
    """Return a stored response, or drop it if the method is DELETE.

    Raises: ErrorResponse: it is not stored.
    """
    id, store = request.path_params["id"], _store(context)
    if request.method == "DELETE":
        if store.delete(id):
            deleted: DeletedResponse = {"id": id, "object": "response", "deleted": True}
            return JSONResponse(deleted)
    elif (response := store.get(id)) is not None:
        return Response(response.body, media_type="application/json")
    raise ErrorResponse(404, "there is no such response, or no longer: the server keeps the latest", param="id")


OPERATIONS = (
    Operation(
        "/v1/responses",
        _endpoint,
        "respond",
        "Answer a conversation in the form of OpenAI's responses",
        ResponseBody,
        ResponsesRequest,
        {"input": "def quicksort(items):", "max_output_tokens": 32, "stream": True},
        is_streamed=True,
    ),
    *endings("/v1/responses", "response"),
    Operation(
        "/v1/responses/{id}",
        lambda context: partial(_stored, context),
        "response",
        "A stored response",
        ResponseBody,
        statuses=("404",),
    ),
    Operation(
        "/v1/responses/{id}",
        lambda context: partial(_stored, context),
        "delete_response",
        "Delete a stored response",
        DeletedResponse,
        method="DELETE",
        statuses=("404",),
    ),
)
