"""Requests of other servers' own test-suites, each with what its test expects of the response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
from asgi import CHAT, COMPLETIONS, Exchange

Body = dict[str, Any] | list[Any] | str | int | None

KEY = "s3cret"


@attrs.frozen
class Asked:
    """One request of a case; its path and body may follow from the responses before. Without a body it is a GET."""

    path: str | Callable[[Sequence[Exchange]], str]
    body: Body | Callable[[Sequence[Exchange]], Body] = None
    headers: dict[str, str] = attrs.Factory(dict)
    method: str | None = None


@attrs.frozen
class Case:
    """A test of another server, in short.

    Attributes:
        peer: the server whose test it is.
        file: file of the test, below the folder of its peer's tests.
        holds: whether the responses are as expected; with `instead`, as they are meant to be here.
        instead: why the test is not meant to pass here, and what happens instead; None if it passes.
        key: the API key of the server, if it has one.
    """

    peer: str
    file: str
    test: str
    expects: str
    asked: Sequence[Asked]
    holds: Callable[[Sequence[Exchange]], bool]
    instead: str | None = None
    key: str | None = None

    @property
    def id(self) -> str:
        return f"{self.peer}: {self.file}: {self.test}: {self.expects}"


# --- what is asked ----------------------------------------------------------------------------------

HELLO: list[dict[str, Any]] = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Hello!"},
]


def chat(*messages: dict[str, Any], headers: dict[str, str] | None = None, **fields: Any) -> Asked:
    """A request for a chat completion; of 8 tokens, unless it says otherwise."""
    body = {"messages": list(messages or HELLO), "max_tokens": 8, **fields}
    if "max_completion_tokens" in body:
        del body["max_tokens"]
    return Asked(CHAT, body, headers or {})


def completion(prompt: Any = "Once upon a time", *, headers: dict[str, str] | None = None, **fields: Any) -> Asked:
    """A request for a completion, likewise."""
    return Asked(COMPLETIONS, {"prompt": prompt, "max_tokens": 8, **fields}, headers or {})


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


# --- what is expected -------------------------------------------------------------------------------

Holds = Callable[[Sequence[Exchange]], bool]


def refused(status: int = 400, *words: str) -> Holds:
    """Every request is refused with this status, and the message has these words."""
    return lambda answers: all(
        answer.status == status and all(word in answer.body.decode() for word in words) for answer in answers
    )


def choice(answer: Exchange) -> Any:
    """The one choice of a whole response."""
    [only] = answer.json["choices"]
    return only


def choices_of_chunks(answer: Exchange) -> list[Any]:
    """The choices of a stream's chunks, those with the usage left out."""
    return [event["choices"][0] for event in answer.events if event["choices"]]


def answered(*answers: Exchange) -> bool:
    """Whether each is a whole response with a choice and an id, or a stream that came to its end."""
    return all(
        answer.is_done if answer.headers["content-type"].startswith("text/event") else has_choice(answer)
        for answer in answers
    )


def has_choice(answer: Exchange) -> bool:
    return answer.status == 200 and bool(answer.json["id"]) and choice(answer)["finish_reason"] in ("stop", "length")


def all_answered(answers: Sequence[Exchange]) -> bool:
    return answered(*answers)
