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
        max_waiting: maximum number of waiting requests, besides those that the models work on, >= 0; further requests
            get status 429.
        max_tokens: maximum number of tokens in an answer if the request does not set it, >= 1.
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
