"""The way of a request: from its body to a stream of tokens, and from there to the response."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any, Generic, TypeVar

import attrs
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from protocol.errors import OutriderError
from protocol.statistics import Statistics
from runtime.engine.runtime import Runtime
from runtime.engine.sessions import NEW_READER
from runtime.server.answers.api import BegunAnswer, Choice, Choices, Serializer
from runtime.server.answers.body import RequestBody
from runtime.server.answers.preparation import Preparation, PreparedPrompt
from runtime.server.answers.request import GenerationRequest
from runtime.server.answers.running import RunningAnswers
from runtime.server.answers.sending import send_events, send_whole
from runtime.server.connections.client import ClientGone, client_address, read_body, while_there
from runtime.server.context import SHORT, ServerContext
from runtime.server.errors import ErrorResponse, error_response_of
from runtime.server.metrics import RequestOutcome
from runtime.server.middleware import TOKENS
from runtime.server.timelines import Timeline

Parsed = tuple[GenerationRequest, Callable[[BegunAnswer], Serializer]]
"""A request, and what makes the serializer of its response, or of one of its choices."""


B = TypeVar("B")
R = TypeVar("R", bound=RequestBody | GenerationRequest)


async def read_request(context: ServerContext, parse: Callable[[bytes], B], scope: Scope, receive: Receive) -> B:
    """The body of a request, parsed; in another thread if it is long.

    Raises:
        ErrorResponse: the request is rejected.
        ClientGone: the client has left.
    """
    # Before the body is read, so that a client need not send one that cannot be admitted.
    context.admission.check()
    limits = context.limits
    with context.body_memory.claim() as claim:
        body = await read_body(scope, receive, limits.max_body_bytes, limits.body_s, claim)
        # A long one is not parsed on trio's thread, which serves everybody.
        if len(body) <= SHORT:
            return parse(body)
        return await context.in_thread(partial(parse, body), len(body))


def model_of(context: ServerContext, request: RequestBody | GenerationRequest) -> str:
    """The name of a request's model.

    A server of one model takes any name, as clients have their own, unless it is strict.

    Raises: ErrorResponse: there is none of that name; or the server is strict, and the request has an unknown field.
    """
    if context.is_strict:
        request.ignored.refuse()
    is_any = len(context.models.specs) == 1 and not context.is_strict
    return context.find_model(None if is_any else request.model, param="model")


@attrs.frozen
class TokenizerEndpoint(Generic[R]):
    """An ASGI application that answers one type of request with the tokenizer; `R` is the type of its body.

    Attributes:
        parse: parses and validates a body; may raise ErrorResponse.
        result: returns the response, in another thread; may raise ErrorResponse or OutriderError.
        field_and_length: the name of the field that the tokenizer works on, and the characters or tokens in it.
    """

    _context: ServerContext
    _parse: Callable[[bytes], R]
    _result: Callable[[R, Runtime], Mapping[str, Any]]
    _field_and_length: Callable[[R], tuple[str, int]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises: ErrorResponse: the request is rejected; nothing was sent.

        Cancellation: as for `ServerContext.in_thread`.
        """
        context = self._context
        with suppress(ClientGone):
            body = await read_request(context, self._parse, scope, receive)
            model_name = model_of(context, body)
            await while_there(receive, partial(self._respond, body, model_name, body.ignored.named_by(send)))

    async def _respond(self, body: R, model_name: str, send: Send) -> None:
        field, length = self._field_and_length(body)
        try:
            async with self._context.models.use(model_name) as model:
                runtime = model.runtime
                # The JSON of a long result takes a while, too.
                make = lambda: JSONResponse(self._result(body, runtime))  # noqa: E731
                response = await self._context.in_thread(make, length)
        except OutriderError as error:
            raise error_response_of(error, field) from error
        await send({"type": "http.response.start", "status": 200, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body})


@attrs.frozen
class Endpoint:
    """An ASGI application that generates for one type of request.

    Attributes:
        parse: parses and validates a body, in another thread if it is long; may raise ErrorResponse.
    """

    _context: ServerContext
    _parse: Callable[[bytes], Parsed]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises: ErrorResponse: the request is rejected or has failed; nothing was sent.

        Cancellation: ends the generation.
        """
        context, outcome, client = self._context, RequestOutcome(), client_address(scope)
        try:
            request, make_serializer = await read_request(context, self._parse, scope, receive)
            outcome.model = model_of(context, request)
            with context.admission.admit():
                named = request.ignored.named_by(send)
                await while_there(receive, partial(self._respond, request, make_serializer, client, outcome, named))
        except ErrorResponse as error:
            outcome.status = error.status
            raise
        except ClientGone:
            pass
        except Exception as error:
            outcome.failure, outcome.status = error, 500  # the status that the application responds with
            raise
        finally:
            context.metrics.count(outcome)
            if outcome.streams:
                num_generated = sum(stream.statistics().generated_tokens for stream in outcome.streams)
                scope[TOKENS] = outcome.num_prompt_tokens, num_generated

    async def _respond(
        self,
        request: GenerationRequest,
        make_serializer: Callable[[BegunAnswer], Serializer],
        client: str,
        outcome: RequestOutcome,
        send: Send,
    ) -> None:
        """Raises: ErrorResponse: the request is rejected or has failed; nothing was sent."""
        assert outcome.model is not None
        send_answer = send_events if request.stream else send_whole
        try:
            async with self._context.models.use(outcome.model) as model:
                preparation = Preparation(self._context, model, request, client)
                prompts = await preparation.prompts()
                outcome.num_prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
                outcome.num_texts = request.num_choices * sum(prompt.read is None for prompt in prompts)
                begin = partial(_begun, preparation, make_serializer, outcome)
                begins = (partial(begin, prompt, i) for prompt in prompts for i in range(request.num_choices))
                with closing(Choices(begins, model.runtime.max_streams)) as choices:
                    await choices.begin_first()
                    with RunningAnswers.of(self._context).listed(choices):
                        outcome.failure = await send_answer(choices, request, send, self._context.in_thread)
                if outcome.failure is None and model.runtime.reads_when_idle:
                    await preparation.expect_next_turn(choices.begun[0].stream)
        except OutriderError as error:
            raise error_response_of(error, request.prompt_field) from error
        outcome.is_sent = outcome.failure is None and not choices.is_cancelled
        if outcome.failure is not None and not request.stream:
            raise error_response_of(outcome.failure) from outcome.failure


def _begun(
    preparation: Preparation,
    make_serializer: Callable[[BegunAnswer], Serializer],
    outcome: RequestOutcome,
    prompt: PreparedPrompt,
    number: int,
    before: Sequence[Choice],
) -> Choice:
    """Begin answer `number` to a prompt; `outcome` gets its stream. Raises: OutriderError: it cannot begin."""
    model, stream = preparation.model, None
    if (read := prompt.read) is not None:
        statistics: Callable[[], Statistics] = lambda: read  # noqa: E731
    else:
        NEW_READER.set(preparation.reader)
        stream = model.runtime.stream(prompt.ids, prompt.settings_of_text(number))
        outcome.streams.append(stream)
        statistics = stream.statistics

    def watch(id: str) -> Timeline:
        assert stream is not None, "a request that watches its answer has one"
        return model.timelines.watch(id, stream.session, stream.began)

    answer = BegunAnswer(
        preparation.request,
        model.name,
        preparation.tokenizer,
        preparation.splitter(stream),
        watch,
        prompt.ids,
        index=len(before),
        counts_prompt=number == 0,
        echo=prompt.echo,
        score=prompt.score,
        first=before[0].serializer if before else None,
        defaults=model.runtime.defaults,
    )
    return Choice(make_serializer(answer), stream, statistics)
