"""OpenAI's responses, as `runtime.server.answers` serves them, and the endpoints for those that are stored."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from runtime.server.answers.api import Answer, Api
from runtime.server.answers.serializer import Serializer
from runtime.server.errors import ErrorResponse
from runtime.server.openai.requests import Request
from runtime.server.responses.bodies import DeletedResponse
from runtime.server.responses.requests import ParsedRequest, parse_response_request
from runtime.server.responses.serializer import ResponseSerializer
from runtime.server.responses.store import ResponseStore


class Responses(Api[ParsedRequest]):
    """`/v1/responses`."""

    def __init__(self, store: ResponseStore) -> None:
        """With a place for the responses."""
        self._store = store

    def parse(self, body: bytes) -> ParsedRequest:
        return parse_response_request(body, self._store)

    def request(self, body: ParsedRequest) -> Request:
        return body.chat

    def serializer(self, body: ParsedRequest, answer: Answer) -> Serializer:
        return ResponseSerializer(body, answer, self._store)


class StoredResponses:
    """The endpoint `/v1/responses/{id}`: a response that is stored."""

    def __init__(self, store: ResponseStore) -> None:
        """Of a store."""
        self._store = store

    async def __call__(self, request: HttpRequest) -> Response:
        """Handle a request: GET or DELETE.

        Raises: ErrorResponse: the response is not stored.
        """
        id = request.path_params["id"]
        if request.method == "DELETE":
            if self._store.delete(id):
                deleted: DeletedResponse = {"id": id, "object": "response", "deleted": True}
                return JSONResponse(deleted)
        elif (response := self._store.get(id)) is not None:
            return Response(response.body, media_type="application/json")
        raise ErrorResponse(404, "there is no such response, or no longer: the server keeps the latest", param="id")
