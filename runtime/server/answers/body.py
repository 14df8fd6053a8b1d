"""Request bodies: how they are received, and as JSON objects with strict types and fields that are ignored."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, TypeVar

import attrs
import trio
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, PrivateAttr, ValidationError
from starlette.types import Receive, Scope

from runtime.server.errors import ErrorResponse, error_response_of_body, unknown_field

# --- receiving ------------------------------------------------------------------------------------

# Bytes of each body that need no claim, so that a short request never waits for long ones.
FREE_BYTES = 2**14

Claim = Callable[[int], Awaitable[None]]
"""Claims bytes for one body beyond its first `FREE_BYTES`, once there is room for them; to be called once."""


class BodyMemory:
    """A bound on the bytes of all bodies together. Bodies wait for room in the order in which they ask for it.

    A body claims all that it may need at once: two bodies that each held half of the memory could never be completed.
    """

    def __init__(self, max_bytes: int) -> None:
        self._num_free = max_bytes
        self._turn = trio.StrictFIFOLock()
        self._freed = trio.Event()

    @contextmanager
    def claim(self) -> Iterator[Claim]:
        """A claim for one body. Its bytes are given back at the end of the block."""
        claimed = 0

        async def claim(num_bytes: int) -> None:
            nonlocal claimed
            async with self._turn:
                while self._num_free < num_bytes:
                    await self._freed.wait()
                claimed = num_bytes
                self._num_free -= claimed

        try:
            yield claim
        finally:
            self._num_free += claimed
            self._freed.set()
            self._freed = trio.Event()


class ClientGone(Exception):
    """The client has left; there is nobody to answer."""


async def read_body(scope: Scope, receive: Receive, max_bytes: int, within_s: float, claim: Claim) -> bytes:
    """The body of a request, if all of it arrives within `within_s` seconds, the wait for memory included.

    A compressed body is decompressed while it arrives; `max_bytes` bounds what comes out of it, too.

    Raises: ErrorResponse: the body is rejected, or had to wait for memory for all of that time. Or ClientGone.
    """
    headers = dict(scope["headers"])
    # With any other content type, a browser would let another host's page send the request without asking here first.
    if headers.get(b"content-type", b"").split(b";")[0].strip().lower() != b"application/json":
        raise ErrorResponse(415, "the body must be JSON, and be said to be: send Content-Type: application/json")
    too_long = partial(ErrorResponse, 413, f"the body is longer than {max_bytes} bytes; shorten it")
    # A body that says that it is too long is not read. Python refuses to convert very many digits.
    announced = headers.get(b"content-length", b"")
    if announced.isdigit() and (len(announced) > 18 or int(announced) > max_bytes):
        raise too_long()
    encoding = headers.get(b"content-encoding", b"").strip().lower().decode("latin-1")
    decompressor = None if encoding in ("", "identity") else _Decompressor(encoding)
    # How long a decompressed body will be is not known.
    most = int(announced) if announced.isdigit() and decompressor is None else max_bytes
    body, num_received, has_room = bytearray(), 0, False

    async def make_room() -> None:
        # The rest is not read until there is room, so its sender has to wait.
        nonlocal has_room
        if len(body) > FREE_BYTES and not has_room:
            await claim(most)
            has_room = True

    with trio.move_on_after(within_s):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            received = message.get("body", b"")
            num_received += len(received)
            if decompressor is None:
                body += received
            else:
                for piece in decompressor.pieces(received):
                    await make_room()
                    body += piece
                    if len(body) > max_bytes:
                        break
                    await trio.lowlevel.checkpoint()
            if max(len(body), num_received) > max_bytes:
                raise too_long()
            if not message.get("more_body", False):
                if decompressor is not None:
                    decompressor.finish()
                return bytes(body)
            await make_room()
    if len(body) > FREE_BYTES and not has_room:
        raise ErrorResponse(
            429,
            f"the bodies of other requests have taken the memory for bodies for {within_s:g} s; try again",
            code="bodies_waiting",
            retry_after_s=math.ceil(within_s),
        )
    raise ErrorResponse(408, f"the body did not come within {within_s:g} s")


# Formats of zlib by the encodings of bodies that are accepted, in addition to "identity".
_ZLIB_FORMATS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


class _Decompressor:
    """A decompressor of one body, which comes in any pieces. Raises ErrorResponse where it cannot be decompressed."""

    def __init__(self, encoding: str) -> None:
        if encoding not in _ZLIB_FORMATS:
            raise ErrorResponse(
                415,
                f"the body's content encoding {encoding[:60]!r} is not accepted; send gzip, deflate, or no encoding",
                headers={"Accept-Encoding": "gzip, deflate"},
            )
        self._encoding, self._format = encoding, _ZLIB_FORMATS[encoding]
        self._zlib: Any = None

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """What the next bytes decompress to, in pieces of at most `FREE_BYTES`."""
        piece = b""
        # After a whole piece there may be more, although all bytes have been read.
        while data or (len(piece) == FREE_BYTES and not self._zlib.eof):
            if self._zlib is None:
                # Some clients send what "deflate" is called elsewhere, without the header of zlib, which begins so.
                is_bare = self._encoding == "deflate" and data[0] & 0x0F != 8
                self._zlib = zlib.decompressobj(-zlib.MAX_WBITS if is_bare else self._format)
            elif self._zlib.eof:
                # The body goes on behind its end: gzip may have several members.
                self._zlib = zlib.decompressobj(self._format)
            try:
                piece = self._zlib.decompress(data, FREE_BYTES)
            except zlib.error as error:
                raise self._invalid(str(error)) from error
            yield piece
            data = self._zlib.unconsumed_tail or self._zlib.unused_data

    def finish(self) -> None:
        """Check that the end of the body has come."""
        if self._zlib is None or not self._zlib.eof:
            raise self._invalid("its end is missing")

    def _invalid(self, problem: str) -> ErrorResponse:
        return ErrorResponse(400, f"the body is not valid {self._encoding}: {problem}; send it whole, or uncompressed")


# --- parsing --------------------------------------------------------------------------------------


class _WithoutEffect: ...


# A field that clients send but that cannot affect any answer; of any type.
NoEffect = Annotated[Any, _WithoutEffect(), Field(description="accepted, but has no effect")]

# A field of responses, which clients send back as part of a conversation; of any type.
SentBack = Annotated[Any, Field(description="a field of responses, which may be sent back; has no effect")]

T = TypeVar("T")
# A list of objects, bounded for the time that it takes to read them.
BoundedList = Annotated[list[T], Field(max_length=1000, fail_fast=True)]


class Body(BaseModel):
    """A JSON object with strict types. Fields that it does not have are ignored."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    def take_other_names(self) -> None:
        """Where a field is null under its first name, take the value under another name. Raises: ValidationError."""
        for name, field in type(self).model_fields.items():
            if not isinstance(field.validation_alias, AliasChoices) or getattr(self, name) is not None:
                continue
            extra = self.model_extra or {}
            for other in field.validation_alias.choices:
                if (value := extra.get(str(other))) is not None:
                    del extra[str(other)]
                    self.__pydantic_validator__.validate_assignment(self, name, value)
                    break

    def ignored_names(self) -> Iterator[tuple[str, bool]]:
        """Names of the given fields that are ignored, dotted within nested objects, and whether each is known.

        Unknown fields that are null or [] are left out: they ask for nothing. A name may come more than once.
        """
        for name, value in (self.model_extra or {}).items():
            if value is not None and value != []:
                yield name, False
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if value is not None and any(isinstance(mark, _WithoutEffect) for mark in field.metadata):
                yield name, True
            # An object that is kept as it came, such as a JSON schema, has no fields to ignore.
            for body in value if isinstance(value, list) else [value]:
                if isinstance(body, Body):
                    yield from ((f"{name}.{inner}", is_known) for inner, is_known in body.ignored_names())


IGNORED_HEADER = "X-Outrider-Ignored"

# The client chooses the names of unknown fields. Only these can stand in a header.
_HEADER_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_MAX_HEADER_NAMES = 32


@attrs.define
class IgnoredFields:
    """The names of a request's fields that are ignored."""

    names: dict[str, bool] = attrs.field(factory=dict)  # as from `Body.ignored_names`
    known: Sequence[str] = ()  # names of all fields of the body's type

    def add(self, name: str) -> None:
        """Add a field, as one without effect."""
        self.names.setdefault(name, True)

    @property
    def header(self) -> str | None:
        """The value of the header that names them, or None. Names beyond 32, or unfit for it, are only counted."""
        names = sorted(self.names, key=lambda name: self.names[name])  # unknown ones first
        fit = [name for name in names if _HEADER_NAME.fullmatch(name)][:_MAX_HEADER_NAMES]
        others = [f"+{len(names) - len(fit)} more"] if len(names) > len(fit) else []
        return ", ".join([*fit, *others]) or None

    def refuse(self) -> None:
        """Raises: ErrorResponse: a field is unknown, which a strict server refuses."""
        for name, is_known in self.names.items():
            if not is_known:
                raise unknown_field(name, self.known)

    @property
    def raw_headers(self) -> list[tuple[bytes, bytes]]:
        """That header for ASGI, if any field is ignored by now."""
        return [] if self.header is None else [(IGNORED_HEADER.lower().encode(), self.header.encode())]


class RequestBody(Body):
    """The whole body of a request."""

    model: str | None = Field(None, description="a name in `/v1/models`; any name if only one model is served")

    _ignored: IgnoredFields = PrivateAttr(default_factory=IgnoredFields)

    @property
    def ignored(self) -> IgnoredFields:
        """The fields that are ignored."""
        return self._ignored


R = TypeVar("R", bound=RequestBody)

# A pair of surrogates, any other escape sequence of one character, or half a pair.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[dD][89a-fA-F][0-9a-fA-F]{2}|.)", re.DOTALL
)


def without_halves(json: bytes) -> bytes:
    """JSON with U+FFFD for each half of a surrogate pair, which clients leave where they cut a text."""

    def whole(found: re.Match[bytes]) -> bytes:
        is_half = len(found[0]) == 6 and found[0][2:3] in b"dD"
        return rb"\ufffd" if is_half else found[0]

    return _ESCAPE.sub(whole, json)


def parse_request(request_type: type[R], body: bytes) -> R:
    """Parse and validate the body of a request. Raises: ErrorResponse: it is invalid."""
    try:
        try:
            request = request_type.model_validate_json(body)
        except ValidationError as error:
            # Searched only now: hardly any body has half a pair of surrogates.
            if error.errors()[0]["type"] != "json_invalid" or (whole := without_halves(body)) == body:
                raise
            request = request_type.model_validate_json(whole)
        request.take_other_names()
    except ValidationError as error:
        raise error_response_of_body(error) from error
    request._ignored = IgnoredFields(dict(request.ignored_names()), tuple(request_type.model_fields))
    return request
