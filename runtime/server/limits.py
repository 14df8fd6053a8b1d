"""The limits of a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import attrs

from protocol.options import option
from protocol.settings import MAX_ANSWER_TOKENS
from protocol.validation import check_integer, check_number, validator

DEFAULT_CONNECTIONS = 1000


def _flag(default: Any, check: Callable[..., None], *bounds: float, **options: Any) -> Any:
    """A field with a flag of `serve`, whose value is a number."""
    return attrs.field(default=default, validator=validator(check, *bounds, **options), metadata=option("N"))


@attrs.frozen(kw_only=True)
class Limits:
    """Limits and timeouts of a server. Those that are flags of `serve` are declared as options.

    Attributes:
        max_waiting: maximum number of waiting requests, besides those that the models work on, >= 0; further requests
            get status 429.
        max_tokens: maximum number of tokens in an answer if the request does not set it, >= 1; it may also end with
            the model's context.
        max_tokens_limit: maximum number of tokens that a request may ask for, >= 1; higher values are lowered to it;
            None for the model's context.
        max_prompt_tokens: maximum number of tokens in a prompt, >= 1; None for the model's context.
        prefill_step_size: prompt tokens per prefill pass, >= 1; other answers and cancellations wait until the pass
            ends; "auto" to choose by measured times, with at most 0.2 s a pass.
        max_body_bytes: maximum size of a request's body in bytes, >= 1.
        max_bodies_bytes: maximum size in bytes of all bodies that are being read, beyond the first 16 KiB of each; at
            least `max_body_bytes`.
        max_connections: maximum number of open connections, >= 1; a further one replaces the one that has been idle
            longest, or waits if all are busy; None for 1000, or as many as the limit of open files allows.
        stalled_s: seconds for which a client may leave 64 KiB of a response unread, > 0.
        grace_s: seconds that current answers have to end when the server is stopped, >= 0; meanwhile new requests are
            refused, and /health reports "draining".
        idle_s: seconds within which the head of a client's next request must arrive.
        body_s: seconds within which a whole body must arrive.
        schema_s: seconds that a JSON schema may wait to be compiled, and also seconds that compiling it may take.
        max_stored_responses, max_stored_bytes: maximum number of stored responses of `/v1/responses`, and their maximum
            size in bytes.

    Raises: SettingsError: a limit is out of its range.
    """

    max_waiting: int = _flag(256, check_integer, 0)
    max_tokens: int = _flag(MAX_ANSWER_TOKENS, check_integer, 1)
    max_tokens_limit: int | None = _flag(None, check_integer, 1, or_none="the model's context")
    max_prompt_tokens: int | None = _flag(None, check_integer, 1, or_none="the model's context")
    prefill_step_size: int | Literal["auto"] = _flag("auto", check_integer, 1, or_auto=True)
    max_body_bytes: int = _flag(2 * 2**20, check_integer, 1)
    max_bodies_bytes: int = attrs.Factory(lambda self: max(64 * 2**20, self.max_body_bytes), takes_self=True)
    max_connections: int | None = _flag(None, check_integer, 1, or_none="as many as are possible")
    stalled_s: float = _flag(60, check_number, above=0)
    grace_s: float = _flag(5, check_number, 0)
    idle_s: float = 30.0
    body_s: float = 30.0
    schema_s: float = 10.0
    max_stored_responses: int = 1000
    max_stored_bytes: int = 64 * 2**20
