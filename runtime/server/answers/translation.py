"""The translation of another API's request to a chat, from which the answer is generated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any, TypeVar

import attrs
from pydantic import ValidationError

from runtime.server.answers.body import Body
from runtime.server.answers.ignored_fields import ignored_fields
from runtime.server.errors import error_response_of_body
from runtime.server.openai.requests import ChatRequest
from runtime.server.openai.requests.request import PASSED_ON


class TranslatedBody(Body):
    """The body of a request; unknown fields that mean the same in every API are taken as in a chat."""

    def passed_on(self) -> dict[str, Any]:
        """The fields of a chat among the unknown fields, not validated."""
        return {name: value for name, value in (self.model_extra or {}).items() if name in PASSED_ON}


R = TypeVar("R", bound=TranslatedBody)
C = TypeVar("C", bound=ChatRequest)


def parse_translated(
    body: bytes, request_type: type[R], chat_type: type[C], fields: Callable[[R], Mapping[str, Any]], tags: Set[str]
) -> tuple[R, C]:
    """Parse and validate the body of a request, and translate it.

    Args:
        body: JSON.
        request_type: the type of the body.
        chat_type: the type of the chat.
        fields: returns the fields of the chat that a body stands for.
        tags: the types of items of lists in the body.

    Returns: the request, and the chat that it stands for.

    Raises: ErrorResponse: the body is invalid.
    """
    try:
        request = request_type.model_validate_json(body)
        chat = chat_type.model_validate({**request.passed_on(), **fields(request)})
        chat.take_other_names()
    except ValidationError as error:
        raise error_response_of_body(error, tags) from error
    ignored = ignored_fields(request, PASSED_ON)
    chat.keep_ignored(attrs.evolve(ignored, unknown=(*ignored.unknown, *chat.unknown())))
    chat.check()
    return request, chat
