"""From a body of bytes to a request."""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError

from runtime.server.answers.ignored_fields import RequestBody, ignored_fields
from runtime.server.errors import error_response_of_body

R = TypeVar("R", bound=RequestBody)


def parse_request(request_type: type[R], body: bytes) -> R:
    """Parse and validate the body of a request.

    Raises: ErrorResponse: the body is invalid.
    """
    try:
        request = request_type.model_validate_json(body)
        request.take_other_names()
    except ValidationError as error:
        raise error_response_of_body(error) from error
    request.keep_ignored(ignored_fields(request))
    request.check()
    return request
