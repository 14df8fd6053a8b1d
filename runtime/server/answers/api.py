"""The interface of an API: how its requests become generations, and who makes its responses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import attrs

from runtime.server.answers.choices import Choice
from runtime.server.answers.parts import AnswerSplitter
from runtime.server.answers.serializer import Event, Serializer
from runtime.server.openai.requests import Request

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from protocol.scores import Score
    from runtime.server.openai.serializers.echo import Echo
    from runtime.server.timelines import Timeline

B = TypeVar("B")


@attrs.frozen
class Answer:
    """What a serializer needs of the generation that has begun.

    Attributes:
        model: the target's name.
        tokenizer: the target's.
        splitter: splits the tokens into parts; new.
        watch: keeps the models' activity under the response's id from now on, and returns it.
        index: of this choice in the response.
        counts_prompt: whether the usage has the prompt's tokens; they are counted once for all choices of a prompt.
        echo: the prompt, if the response repeats it.
        score: of the prompt's tokens but the first, if the response has their log-probabilities.
        is_empty: whether nothing is generated.
        first: the serializer of the response's first choice; None if this is the first.
    """

    model: str
    tokenizer: TokenizerWrapper
    splitter: AnswerSplitter
    watch: Callable[[str], Timeline]
    index: int = 0
    counts_prompt: bool = True
    echo: Echo | None = None
    score: Score | None = None
    is_empty: bool = False
    first: Serializer | None = None


class Api(ABC, Generic[B]):
    """One type of request of one API; `B` is the type of its parsed body."""

    @abstractmethod
    def parse(self, body: bytes) -> B:
        """Parse and validate the body of a request; runs in another thread where it is long.

        Raises: ErrorResponse: the body is invalid.
        """

    @abstractmethod
    def request(self, body: B) -> Request:
        """What to generate for a request.

        Raises: ErrorResponse: the request names something that is not there.
        """

    @abstractmethod
    def serializer(self, body: B, answer: Answer) -> Serializer:
        """The serializer of the response, or of one of its choices."""

    def whole(self, body: B, choices: Sequence[Choice]) -> Mapping[str, Any]:
        """The whole response as one body, for JSON; the choices have all of their tokens."""
        (choice,) = choices
        return choice.serializer.whole(choice.tokens, choice.statistics())

    def last_events(self, choices: Sequence[Choice]) -> Sequence[Event]:
        """The events after the last token of all choices."""
        (choice,) = choices
        return choice.serializer.last_events(choice.statistics())
