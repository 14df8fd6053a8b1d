"""The limits of a server."""

from __future__ import annotations

from functools import partial
from typing import Literal

import attrs

from protocol.options import option
from protocol.validation import check_integer, check_number, validator

_integer = partial(validator, check_integer)
_seconds = partial(validator, check_number)

DEFAULT_CONNECTIONS = 1000


@attrs.frozen(kw_only=True)
class Limits:
    """Limits and timeouts of a server. Those that are flags of `serve` are declared as options.

    Attributes:
        max_waiting: most requests that wait beside those that the models work on, >= 0; further ones get status 429.
        max_tokens: most tokens of an answer if the request does not set them, >= 1.
        max_tokens_limit: most tokens that a request may set, to which higher values are lowered, >= 1; None for the
            model's context.
        max_prompt_tokens: most tokens of a prompt, >= 1; None for the model's context.
        prefill_step_size: prompt tokens per prefill pass, during which all other answers wait and no cancellation takes
            effect, >= 1; "auto" for as many as are cheap, in 0.2 s at most.
        max_body_bytes: most bytes of a request's body, >= 1.
        max_bodies_bytes: most bytes of all bodies that are being read, beyond the first 16 KiB of each; at least
            `max_body_bytes`.
        max_connections: most connections at once, >= 1; for a further one, the longest idle one is closed, and it waits
            if all are busy; None for 1000, or as many as the limit of open files allows.
        stalled_s: seconds that a client may leave 64 KiB of a response unread, > 0.
        grace_s: seconds that current answers have to end when the server is stopped, >= 0; meanwhile it refuses new
            requests, and /health says that it is draining.
        idle_s: seconds that a client may take for the head of its next request.
        body_s: seconds within which a whole body must arrive.
        schema_s: seconds that a JSON schema may wait to be compiled, and then again seconds that it may take.
        max_stored_responses, max_stored_bytes: most responses of `/v1/responses` that are kept, and bytes of them.

    Raises: SettingsError: a limit is out of its range.
    """

    max_waiting: int = attrs.field(default=256, validator=_integer(0), metadata=option("N"))
    max_tokens: int = attrs.field(default=512, validator=_integer(1), metadata=option("N"))
    max_tokens_limit: int | None = attrs.field(
        default=None, validator=_integer(1, or_none="the model's context"), metadata=option("N")
    )
    max_prompt_tokens: int | None = attrs.field(
        default=None, validator=_integer(1, or_none="the model's context"), metadata=option("N")
    )
    prefill_step_size: int | Literal["auto"] = attrs.field(
        default="auto", validator=_integer(1, or_auto=True), metadata=option("N")
    )
    max_body_bytes: int = attrs.field(default=2 * 2**20, validator=_integer(1), metadata=option("N"))
    max_bodies_bytes: int = attrs.Factory(lambda self: max(64 * 2**20, self.max_body_bytes), takes_self=True)
    max_connections: int | None = attrs.field(
        default=None, validator=_integer(1, or_none="as many as are possible"), metadata=option("N")
    )
    stalled_s: float = attrs.field(default=60, validator=_seconds(above=0), metadata=option("N"))
    grace_s: float = attrs.field(default=5, validator=_seconds(0), metadata=option("N"))
    idle_s: float = 30.0
    body_s: float = 30.0
    schema_s: float = 10.0
    max_stored_responses: int = 1000
    max_stored_bytes: int = 64 * 2**20
