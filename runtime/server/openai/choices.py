"""Several choices in one response of OpenAI's: which of them are given, and their bodies put together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.server.answers.choices import Choice
from runtime.server.answers.serializer import Event
from runtime.server.errors import ErrorResponse
from runtime.server.openai.requests import CompletionRequest, Request

# Tokens and likely other tokens of all answers to a request. Each takes some 60 bytes of JSON, and several times that
# in memory.
MAX_NAMED_TOKENS = 2**20


def check_size(request: Request, num_prompt_tokens: Sequence[int], max_tokens: int) -> None:
    """Check the size that the response to a request may have. A single plain answer may be of any.

    Args:
        request: the request.
        num_prompt_tokens: of each of its prompts.
        max_tokens: of each answer.

    Raises: ErrorResponse: it may have too many tokens, with the likely others that it names at each position.
    """
    each, of_prompts = 1 + (request.num_logprobs or 0), _named_with_prompt(request) * sum(num_prompt_tokens)
    num_named = request.num_candidates * (of_prompts + each * max_tokens * len(num_prompt_tokens))
    num_answers = request.num_candidates * len(num_prompt_tokens)
    is_plain = num_answers * each == 1 and request.prompt_logprobs is None
    if num_named > MAX_NAMED_TOKENS and not is_plain:
        raise ErrorResponse(
            400,
            f"the response may have {num_named} tokens ({num_answers} answers of up to {max_tokens} tokens, each with "
            f"{each - 1} likely others, and {of_prompts} of prompts), and the most is {MAX_NAMED_TOKENS}; ask "
            f"for fewer answers or log-probabilities, or lower {request.max_answer_tokens_field}",
            param=request.max_answer_tokens_field,
        )


def num_named_tokens(request: Request, choices: Sequence[Choice]) -> int:
    """How many tokens, and likely other tokens, the response to a request has; see `MAX_NAMED_TOKENS`."""
    each, with_prompt = 1 + (request.num_logprobs or 0), _named_with_prompt(request)
    return sum(with_prompt * choice.num_prompt_tokens + each * len(choice.tokens) for choice in choices)


def _named_with_prompt(request: Request) -> int:
    """How many tokens a response names for each token of the prompt."""
    echoed = 1 + (request.num_logprobs or 0) if isinstance(request, CompletionRequest) and request.echo else 0
    return echoed + (0 if request.prompt_logprobs is None else 1 + request.prompt_logprobs)


def whole_of_choices(request: Request, choices: Sequence[Choice]) -> Mapping[str, Any]:
    """The body of a response, of the bodies of its choices; the tokens of those that are not given are counted."""
    bodies = [choice.serializer.whole(choice.tokens, choice.statistics()) for choice in choices]
    given = [entry for i in _best(request, choices) for entry in bodies[i]["choices"]]
    return {
        **bodies[0],
        "choices": [{**entry, "index": index} for index, entry in enumerate(given)],
        "usage": _added([body["usage"] for body in bodies]),
    }


def last_events_of_choices(choices: Sequence[Choice]) -> Sequence[Event]:
    """The events after the last token of all choices: with the usage of all, if the request asks for it."""
    each = [choice.serializer.last_events(choice.statistics()) for choice in choices]
    events = []
    for alike in zip(*each, strict=True):
        data = alike[0].data
        if not isinstance(data, str):
            data = {**data, "usage": _added([event.data["usage"] for event in alike])}
        events.append(Event(data))
    return events


def _best(request: Request, choices: Sequence[Choice]) -> list[int]:
    """The indices of the choices that are given: of each prompt's, those with the highest mean log-probability."""
    size, num_given = request.num_candidates, request.num_choices
    if size == num_given:
        return list(range(len(choices)))
    best: list[int] = []
    for begin in range(0, len(choices), size):
        ranked = sorted(range(begin, begin + size), key=lambda i: _mean_logprob(choices[i]), reverse=True)
        best += ranked[:num_given]
    return best


def _mean_logprob(choice: Choice) -> float:
    logprobs = [token.logprob for token in choice.tokens if token.logprob is not None]
    return math.fsum(logprobs) / max(1, len(logprobs))  # none, where only the prompt is wanted


def _added(counts: Sequence[Any]) -> Any:
    """Counts of the same form, added up."""
    if isinstance(counts[0], Mapping):
        return {name: _added([each[name] for each in counts]) for name in counts[0]}
    return sum(counts)
