"""Messages between processes as bytes: frames of a stream, and in them attrs classes, by their annotations.

A message is a line of JSON with the name of its class and its fields, and after it the bytes of the tensors in them.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Final, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import attrs

from protocol.errors import ProtocolError
from protocol.tensor import DTYPES, Tensor

# A longer message is nonsense. Hidden states of a long prompt, and caches of a long text, are large.
MAX_MESSAGE_BYTES = 2**32
MAX_FRAME_BYTES = 2**20  # longer messages go in parts, each of which gets through within the timeout of a connection

# A frame's length, and whether it is a part of a long message. The part after the last one is empty.
_LENGTH = struct.Struct("!I")
_IS_PART = 2**31

_TENSOR = "__tensor__"  # the key of an object that stands for a tensor in the line of JSON
# What the functions that read a message raise if it is malformed.
_MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)

M = TypeVar("M")


class Frames:
    """Messages on a stream of bytes. Between the parts of a long message there may be short ones."""

    def __init__(self) -> None:
        self._received, self._parts = bytearray(), bytearray()

    @staticmethod
    def framed(message: bytes) -> Iterator[bytes]:
        """The frames of a message, to be sent in this order."""
        if len(message) <= MAX_FRAME_BYTES:
            yield _LENGTH.pack(len(message)) + message
            return
        for begin in range(0, len(message), MAX_FRAME_BYTES):
            part = message[begin : begin + MAX_FRAME_BYTES]
            yield _LENGTH.pack(_IS_PART | len(part)) + part
        yield _LENGTH.pack(_IS_PART)

    def add(self, data: bytes) -> None:
        """Take bytes that were received."""
        self._received += data

    def take(self, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes | None:
        """The first message that is there. Raises: ProtocolError: a longer one than `max_bytes` is announced."""
        while len(self._received) >= _LENGTH.size:
            (header,) = _LENGTH.unpack_from(self._received)
            length, is_part = header & ~_IS_PART, header >= _IS_PART
            total = length + len(self._parts) if is_part else length
            if length > MAX_FRAME_BYTES or total > max_bytes:
                raise ProtocolError(f"a message of {total} bytes was announced, which is too long")
            end = _LENGTH.size + length
            if len(self._received) < end:
                break
            frame = bytes(self._received[_LENGTH.size : end])
            del self._received[:end]
            if not is_part:
                return frame
            self._parts += frame
            if not frame:
                message, self._parts = bytes(self._parts), bytearray()
                return message
        return None


# --- fields ---------------------------------------------------------------------------------------


@attrs.frozen
class Form:
    """How a value travels: `write` turns it into JSON or a tensor; `read` turns that back, and checks it."""

    read: Callable[[Any], Any]
    write: Callable[[Any], Any] = lambda value: value


def whole(value: Any, least: int = 0, most: int = 2**64 - 1) -> int:
    """A whole number of a message, in [least, most]. Raises: ValueError: it is something else."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"a whole number from {least} to {most} was expected, got {value!r:.80}")
    return value


def _exactly(kind: type[M]) -> Callable[[Any], M]:
    def read(value: Any) -> M:
        if type(value) is not kind:
            raise ValueError(f"{kind.__name__} was expected, got {value!r:.80}")
        return value

    return read


def _read_number(value: Any) -> float:
    if type(value) not in (int, float) or not 0.0 <= value < math.inf:
        raise ValueError(f"a number of at least 0 was expected, got {value!r:.80}")
    return float(value)


_SIMPLE: Final[Mapping[Any, Form]] = {
    Any: Form(lambda value: value),
    bool: Form(_exactly(bool)),
    str: Form(_exactly(str)),
    int: Form(whole),
    float: Form(_read_number),
    Tensor: Form(_exactly(Tensor)),
    bytes: Form(
        lambda value: bytes(_exactly(Tensor)(value).data), lambda value: Tensor("U8", (len(value),), memoryview(value))
    ),
}


class Codec(Generic[M]):
    """Messages of some classes, as bytes and back."""

    def __init__(
        self,
        kinds: Sequence[type],
        where: str,
        forms: Mapping[Any, Form] = _SIMPLE,
        not_sent: Collection[str] = (),
        names: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare the forms of all fields: `forms` of types that are no records of simple types.

        Errors say `where` messages are sent. Fields that are `not_sent` have their defaults at the other end. `names`
        are those in annotations that modules do not have at run time.
        """
        self._where, self._not_sent, self._names = where, not_sent, dict(names or {})
        self._simple: dict[Any, Form] = {**_SIMPLE, **forms}
        self._kinds = {kind.__name__: self._record(kind) for kind in kinds}

    def encode(self, message: M) -> bytes:
        """A message as bytes. Raises: TypeError: it has a value that JSON cannot represent."""
        tensors: list[memoryview] = []

        def stand_in(value: Any) -> Any:
            if not isinstance(value, Tensor):
                raise TypeError(f"a message cannot carry {value!r}")
            tensors.append(value.data)
            return {_TENSOR: [value.dtype, value.shape, len(value.data)]}

        name = type(message).__name__
        fields = self._kinds[name].write(message)
        line = json.dumps([name, *fields], separators=(",", ":"), default=stand_in).encode()
        return b"".join((line, b"\n", *tensors)) if tensors else line

    def decode(self, data: bytes) -> M:
        """A message from its bytes. Raises: ProtocolError: they are no message, or one of another version."""
        try:
            name, *fields = _unpacked(data)
            message: M = self._kinds[name].read(fields)
        except _MALFORMED as error:
            raise ProtocolError(f"{data[:80]!r} is no message {self._where}: {error}") from error
        return message

    def _form(self, hint: Any) -> Form:
        origin, inner = get_origin(hint) or hint, get_args(hint)
        if (simple := self._simple.get(hint)) is not None:
            return simple
        if origin in (Union, UnionType):
            if NoneType in inner:
                form = self._form(Union[tuple(kind for kind in inner if kind is not NoneType)])  # noqa: UP007
                return Form(
                    lambda value: None if value is None else form.read(value),
                    lambda value: None if value is None else form.write(value),
                )
            return _one_of({kind.__name__: self._form(kind) for kind in inner})
        if origin is Literal:
            return Form(lambda value: inner[inner.index(value)])
        if origin in (tuple, frozenset, list):
            return _many(self._form(inner[0]), origin)
        if origin is dict:
            form, check = self._form(inner[1]), _exactly(dict)
            return Form(lambda values: {name: form.read(value) for name, value in check(values).items()})
        assert attrs.has(hint), hint
        return self._record(hint)

    def _record(self, kind: type) -> Form:
        """An object by its attributes, except those that do not travel."""
        hints = get_type_hints(kind, localns=self._names)
        names = [field.name for field in attrs.fields(kind) if field.name not in self._not_sent]
        forms = {name: self._form(hints[name]) for name in names}

        def read(values: Any) -> Any:
            return kind(**{name: form.read(value) for (name, form), value in zip(forms.items(), values, strict=True)})

        return Form(read, lambda value: [form.write(getattr(value, name)) for name, form in forms.items()])


def _one_of(forms: Mapping[str, Form]) -> Form:
    """An object of one of several classes, which is told by its name."""

    def read(value: Any) -> Any:
        name, fields = value
        return forms[name].read(fields)

    return Form(read, lambda value: [type(value).__name__, forms[type(value).__name__].write(value)])


def _many(form: Form, kind: Callable[[Iterator[Any]], Any]) -> Form:
    check = _exactly(list)
    return Form(lambda values: kind(map(form.read, check(values))), lambda values: list(map(form.write, values)))


def _unpacked(data: bytes) -> list[Any]:
    # JSON without indentation has no line breaks.
    if (end := data.find(b"\n")) < 0:
        end = len(data)
    begin, rest = 0, memoryview(data)[end + 1 :]

    def tensor(found: dict[str, Any]) -> Any:
        nonlocal begin
        if _TENSOR not in found:
            return found
        dtype, shape, num_bytes = found[_TENSOR]
        if math.prod(map(whole, shape)) * DTYPES[dtype] != num_bytes or begin + num_bytes > len(rest):
            raise ValueError(f"a tensor {dtype}{shape} does not have {num_bytes} bytes, or they are missing")
        begin += num_bytes
        return Tensor(dtype, tuple(shape), rest[begin - num_bytes : begin])

    message = json.loads(data[:end], object_hook=tensor)
    if begin != len(rest) or type(message) is not list:
        raise ValueError("there are bytes of no tensor, or there is no list")
    return message
