"""The content of messages: parts of any API, and the text that a model reads of them.

Models here read text. A part that is none leaves a line in its place, and the response's header names its type, so that
a conversation with an image in it can go on. Only in what the user asks now, it is an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Tag

from runtime.server.answers.body import Body, BoundedList, NoEffect, SentBack
from runtime.server.errors import ErrorResponse


class CachedBody(Body):
    """An object that may mark the end of a prefix to cache. Here prefixes are cached without marks."""

    cache_control: NoEffect = None


class TextPart(CachedBody):
    """Text."""

    type: Literal["text", "input_text", "output_text", "reasoning_text", "summary_text"]
    text: str
    citations: SentBack = None
    annotations: SentBack = None
    logprobs: SentBack = None


class RefusalPart(Body):
    """A refusal, in an earlier answer of another model."""

    type: Literal["refusal"]
    refusal: str


class ThinkingPart(Body):
    """Reasoning of an earlier answer, which is no text of the message; redacted reasoning cannot be read."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str | BoundedList[TextPart] | None = None
    signature: SentBack = None
    data: SentBack = None
    closed: SentBack = None


class OtherPart(Body):
    """A part of another type, of which nothing is read: an image, audio, a file, a call that a service has run, …"""

    type: str

    def ignored_names(self) -> Iterator[tuple[str, bool]]:
        """See `Body`: the type, if nothing is read."""
        if text_of(self) is None:
            yield self.type, False


class DocumentPart(OtherPart):
    """A document or a result of a search; only its text can be read."""

    source: Any = None
    content: Any = None
    title: str | None = None
    context: str | None = None


def text_of(part: Any) -> str | None:
    """The text of a part of a message; None if it has none that can be read."""
    match part:
        case TextPart():
            return part.text
        case RefusalPart():
            return part.refusal
        case ThinkingPart():
            return ""
        case DocumentPart():
            # With its title and its context, or source, before it.
            content, before = part.content, part.source
            match part.source:
                case {"type": "text", "data": data} | {"type": "content", "content": data}:
                    content, before = data, part.context
            pieces = content if isinstance(content, list) else [{"text": content}]
            texts: list[Any] = [piece.get("text") if isinstance(piece, dict) else None for piece in pieces]
            if all(isinstance(text, str) for text in texts):
                lines = (part.title, before, "".join(texts))
                return "\n".join(line for line in lines if line and isinstance(line, str))
    return None


_KINDS = {
    **dict.fromkeys(("text", "input_text", "output_text", "reasoning_text", "summary_text"), "Text"),
    **dict.fromkeys(("thinking", "redacted_thinking"), "Thinking"),
    **dict.fromkeys(("document", "search_result"), "Document"),
    "refusal": "Refusal",
}


def type_of(value: Any) -> str | None:
    """The type of a part or an item, parsed or not; None if it has none."""
    type = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return type if isinstance(type, str) else None


def kind_of_part(value: Any) -> str | None:
    """The tag of a part in a union of its kinds."""
    type = type_of(value)
    return None if type is None else _KINDS.get(type, "Other")


Kinds = (
    Annotated[TextPart, Tag("Text")]
    | Annotated[RefusalPart, Tag("Refusal")]
    | Annotated[ThinkingPart, Tag("Thinking")]
    | Annotated[DocumentPart, Tag("Document")]
    | Annotated[OtherPart, Tag("Other")]
)
ContentPart = Annotated[Kinds, Discriminator(kind_of_part)]
Content = str | BoundedList[ContentPart]


def as_text_or_parts(value: Any) -> Any:
    """What a client gives for a tool's result or arguments: as JSON, unless it is null, text or a list of parts."""
    is_content = value is None or isinstance(value, str) or (isinstance(value, list) and all(map(type_of, value)))
    return value if is_content else json.dumps(value, ensure_ascii=False)


Result = Annotated[Content | None, BeforeValidator(as_text_or_parts)]


def joined(content: str | list[Any], *, is_system: bool = False) -> str:
    """The text of a message's content. A document is a block of its own, and so is a part that cannot be read, a line.

    Claude Code's billing header is no part of the system's message.
    """
    text, was_block = "", False
    for part in [TextPart(type="text", text=content)] if isinstance(content, str) else content:
        read = text_of(part)
        piece = line_of(part.type) if read is None else read
        # The first line of Claude Code's instructions, which has a number that changes with each request.
        if is_system and piece.startswith("x-anthropic-billing-header:"):
            piece = piece.partition("\n")[2].lstrip("\n")
        if not piece:
            continue
        is_block = read is None or isinstance(part, DocumentPart)
        if text and (is_block or was_block) and not text.endswith("\n") and not piece.startswith("\n"):
            text += "\n"
        text, was_block = text + piece, is_block
    return text


def reasoning_in(content: Any) -> str:
    """The reasoning among the parts of a message's content."""
    parts = content if isinstance(content, list) else ()
    return "".join(joined(part.thinking or "") for part in parts if isinstance(part, ThinkingPart))


def line_of(type: str) -> str:
    """The line in place of a part or an item that cannot be read."""
    return f"[{_plain(type)} omitted]"


def check_asked(messages: Sequence[Any], field: str, is_result: Callable[[Any], bool]) -> None:
    """Check what the user asks, in the last message but for the system's.

    A part that cannot be read is refused unless two texts follow it in the message, of which the first may be the
    question about the part: some clients join what the user says after an error to the message that was refused. What
    agents say there of their tools is never what the user asks about; nor is what stands with a result, or behind it.

    Raises: ErrorResponse: a part cannot be read. An answer that ignores it would mislead.
    """
    said = [i for i, message in enumerate(messages) if getattr(message, "role", "") not in ("system", "developer")]
    last = messages[said[-1]] if said else None
    if getattr(last, "role", "") != "user" or any(is_result(messages[i]) for i in said[-2:]):
        return
    parts = last.content if isinstance(last.content, list) else ()  # type: ignore[union-attr]
    texts = [index for index, part in enumerate(parts) if isinstance(part, TextPart) and part.text.strip()]
    for index, part in enumerate(parts):
        is_asked = isinstance(part, OtherPart) and text_of(part) is None and "tool" not in part.type
        if is_asked and not any(index < text for text in texts[-2:-1]):
            where = f"{field}.{said[-1]}.content.{index}"
            what = {"image": "images", "video": "videos", "file": "files"}.get(_plain(part.type), _plain(part.type))
            raise ErrorResponse(
                400,
                f"{what} cannot be read by the models here, which take text alone; leave out {where} of type "
                f"{part.type[:60]!r}, or send its text",
                param=where,
            )


def _plain(type: str) -> str:
    return type[:60].removeprefix("input_").removesuffix("_url")
