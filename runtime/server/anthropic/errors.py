"""Error bodies in Anthropic's format."""

from __future__ import annotations

from runtime.server.anthropic.responses import ErrorType, MessagesErrorBody

_TYPES: dict[int, ErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def messages_error_body(status: int, message: str) -> MessagesErrorBody:
    """The body of an error response.

    Args:
        status: its HTTP status.
        message: for people.
    """
    return {"type": "error", "error": {"type": _TYPES.get(status, "invalid_request_error"), "message": message}}
