"""Endpoints that generate: from a request's body to a stream of tokens, and the response to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

import attrs
from starlette.types import Receive, Scope, Send

from protocol.errors import OutriderError
from protocol.statistics import Counts, Statistics
from runtime.generation.tool_calls.tools import Tools
from runtime.server.admission import RequestAdmission
from runtime.server.answers.api import Answer, Api
from runtime.server.answers.choices import Choice, Choices
from runtime.server.answers.event_stream import send_events, send_whole
from runtime.server.answers.ignored_fields import IgnoredFields
from runtime.server.answers.json_body import encoded_aside
from runtime.server.answers.parts import AnswerSplitter
from runtime.server.connections.client import BodyMemory, ClientGone, client_address, read_body, while_there
from runtime.server.errors import ErrorResponse, error_response_of, short_json
from runtime.server.fair_threads import SHORT, FairThreads
from runtime.server.metrics import Metrics
from runtime.server.middleware import TOKENS
from runtime.server.models.loaded_model import LoadedModel
from runtime.server.models.pool import ModelPool
from runtime.server.models.served_model import ModelLoadError, ServedModel
from runtime.server.openai.choices import num_named_tokens
from runtime.server.openai.prompts import tokenizer_of
from runtime.server.openai.requests import ChatRequest, Request
from runtime.server.openai.tool_fields import tools_of_request
from runtime.server.prepared_prompts import PreparedPrompt, PromptPreparation, answer_splitter

if TYPE_CHECKING:
    from runtime.generation.token_stream import TokenStream
    from runtime.server.timelines import Timeline

B = TypeVar("B")


@attrs.frozen
class Limits:
    """Limits of one request.

    Attributes:
        max_body_bytes: of the body.
        max_bodies_bytes: of the bodies of all requests that are being read, beyond the first 16 KiB of each; at least
            `max_body_bytes`.
        max_prompt_tokens: of the prompt; None for the context's length.
        max_tokens: default of the request's field `max_tokens`.
        max_tokens_limit: maximum of that field, to which higher values are lowered; None for the context's length.
        prefill_step_size: see `Settings`. During one prefill pass, other requests wait and a cancellation has no effect
            on the models.
        body_s: seconds within which the whole body must arrive.
        schema_s: seconds that a JSON schema may wait to be compiled, and then again seconds that it may take.
        stalled_s: seconds that the client may leave 64 KiB of the response unread.
        max_stored_responses, max_stored_bytes: of the responses of `/v1/responses` that are kept, and of their JSON.
    """

    max_body_bytes: int = 2 * 2**20
    max_bodies_bytes: int = 64 * 2**20
    max_prompt_tokens: int | None = None
    max_tokens: int = 512
    max_tokens_limit: int | None = None
    prefill_step_size: int | Literal["auto"] = "auto"
    body_s: float = 30.0
    schema_s: float = 10.0
    stalled_s: float = 60.0
    max_stored_responses: int = 1000
    max_stored_bytes: int = 64 * 2**20


@attrs.define
class ServerContext:
    """What all requests of a server share.

    Attributes:
        models: those that generate.
        limits: of each request.
        admission: of all requests.
        metrics: of all requests.
        preparation: parses bodies and tokenises prompts, which may take long.
        encoding: makes the bodies of responses, which may take long, too.
        body_memory: of the bodies that are being read.
        is_strict: whether what means nothing here is refused instead of ignored: unknown fields, a `max_tokens` beyond
            the limit, and the name of another model where there is one.
    """

    models: ModelPool
    limits: Limits
    admission: RequestAdmission
    metrics: Metrics
    preparation: FairThreads
    encoding: FairThreads
    body_memory: BodyMemory
    is_strict: bool = False


@attrs.define
class _Outcome:
    """What became of a request, for metrics and access log.

    Attributes:
        model: the name of its model, once that is known.
        streams: its generations that have begun.
        num_texts: generations that it asks for, once that is known.
        num_prompt_tokens: of its prompts.
        is_sent: whether the whole response was sent.
        failure: the error of the generation or of the server.
        status: the HTTP status of an error response.
    """

    model: str | None = None
    streams: list[TokenStream] = attrs.Factory(list)
    num_texts: int = 0
    num_prompt_tokens: int = 0
    is_sent: bool = False
    failure: Exception | None = None
    status: int | None = None

    @property
    def is_finished(self) -> bool:
        """Whether all that was asked for has been generated."""
        num_finished = sum(stream.finish_reason is not None for stream in self.streams)
        return self.is_sent or 0 < num_finished == self.num_texts


class Endpoint(Generic[B]):
    """An ASGI application that generates for one type of request; `B` is the type of its parsed body."""

    def __init__(self, context: ServerContext, api: Api[B]) -> None:
        """For one path.

        Args:
            context: what all requests share.
            api: translates requests and responses.
        """
        self._context = context
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request.

        Raises: ErrorResponse: the request is rejected or has failed; nothing was sent.

        Cancellation: ends the generation.
        """
        context, outcome = self._context, _Outcome()
        try:
            # Before the body is read, so that a client need not send one that cannot be admitted.
            context.admission.check()
            client = client_address(scope)
            body = await read_request(context, self._api.parse, scope, receive, client)
            request = self._api.request(body)
            check_ignored(context, request.ignored)
            outcome.model = requested_model(context, request.model)
            with context.admission.admit():
                respond = partial(self._respond, body, request, client, outcome)
                await while_there(receive, request.ignored.named_by(send), context.limits.stalled_s, respond)
        except ErrorResponse as error:
            outcome.status = error.status
            raise
        except ClientGone:
            pass
        except Exception as error:
            outcome.failure, outcome.status = error, 500  # the status that the application responds with
            raise
        finally:
            is_finished = outcome.is_finished
            context.metrics.count(outcome.model, outcome.streams, outcome.failure, outcome.status, is_finished)
            if outcome.streams:
                num_generated = sum(stream.statistics().generated_tokens for stream in outcome.streams)
                scope[TOKENS] = outcome.num_prompt_tokens, num_generated

    async def _respond(self, body: B, request: Request, client: str, outcome: _Outcome, send: Send) -> None:
        """Generate, and send the response; `outcome` gets the stream and its failure.

        Raises: ErrorResponse: the request is rejected or has failed; nothing was sent.
        """
        assert outcome.model is not None
        try:
            async with self._context.models.use(outcome.model) as model:
                await self._respond_by(model, body, request, client, outcome, send)
        except ModelLoadError as error:
            raise error_response_of(error) from error

    async def _respond_by(
        self, model: LoadedModel, body: B, request: Request, client: str, outcome: _Outcome, send: Send
    ) -> None:
        """As `_respond`, with the request's model."""
        try:
            tools = tools_of_request(request) if isinstance(request, ChatRequest) else None
            prompts = await self._prepared(model, request, tools, client)
        except OutriderError as error:
            raise error_response_of(error, request.prompt_field) from error
        outcome.num_prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        outcome.num_texts = request.num_candidates * sum(prompt.is_generated_for for prompt in prompts)
        begin = partial(self._begun, model, body, request, tools, outcome)
        begins = (partial(begin, prompt, i) for prompt in prompts for i in range(request.num_candidates))
        with Choices(begins, model.runtime.max_streams) as choices:
            try:
                await choices.begin_first()
            except OutriderError as error:
                raise error_response_of(error, request.prompt_field) from error
            if request.stream:
                num_named = 1 + (request.num_logprobs or 0)
                outcome.failure = await send_events(choices, self._api.last_events, num_named, send)
                outcome.is_sent = outcome.failure is None
                return
            make = partial(self._body_of, body, request, client)
            outcome.failure = await send_whole(choices, make, send)
            if outcome.failure is not None:
                raise error_response_of(outcome.failure) from outcome.failure
            outcome.is_sent = True

    async def _body_of(self, body: B, request: Request, client: str, choices: Sequence[Choice]) -> bytes:
        """The body of a response, whose generations are over."""
        make = partial(self._api.whole, body, choices)
        return await encoded_aside(make, num_named_tokens(request, choices), self._context.encoding, client)

    def _begun(
        self,
        model: LoadedModel,
        body: B,
        request: Request,
        tools: Tools | None,
        outcome: _Outcome,
        prompt: PreparedPrompt,
        number: int,
        before: Sequence[Choice],
    ) -> Choice:
        """A choice whose generation has begun, the prompt's text of this number; `outcome` gets its stream.

        Raises: OutriderError: it cannot begin.
        """
        stream = None
        if prompt.is_generated_for:
            stream = model.runtime.stream(prompt.ids, **prompt.settings_of_text(number))
            outcome.streams.append(stream)
        splitter = answer_splitter(request, tools, stream, tokenizer_of(model.runtime))
        answer = _answer(model, prompt, stream, splitter, before, counts_prompt=number == 0)
        statistics = partial(_ungenerated, model, prompt) if stream is None else stream.statistics
        return Choice(self._api.serializer(body, answer), stream, statistics, len(prompt.ids))

    async def _prepared(
        self, model: LoadedModel, request: Request, tools: Tools | None, client: str
    ) -> list[PreparedPrompt]:
        """The prompts of a request; see `PromptPreparation`."""
        context = self._context
        settings = {
            "reuse_prefix": True,
            "prefill_step_size": model.spec.settings.get("prefill_step_size", context.limits.prefill_step_size),
            "max_tokens": _max_tokens(request, model.spec, context),
        }
        limit = context.limits.max_prompt_tokens
        return await PromptPreparation(model, request, tools, client, context.preparation, limit, settings).prompts()


def _answer(
    model: LoadedModel,
    prompt: PreparedPrompt,
    stream: TokenStream | None,
    splitter: AnswerSplitter,
    before: Sequence[Choice],
    *,
    counts_prompt: bool,
) -> Answer:
    """What the serializer of the next choice needs."""

    def watch(id: str) -> Timeline:
        assert stream is not None, "a request that watches its answer has one"
        return model.timelines.watch(id, stream.session, stream.began)

    return Answer(
        model.name,
        tokenizer_of(model.runtime),
        splitter,
        watch,
        index=len(before),
        counts_prompt=counts_prompt,
        echo=prompt.echo,
        score=prompt.score,
        is_empty=stream is None,
        first=before[0].serializer if before else None,
    )


def _ungenerated(model: LoadedModel, prompt: PreparedPrompt) -> Statistics:
    """The statistics of a choice for which nothing is generated."""
    return Counts(prompt_tokens=len(prompt.ids)).snapshot(
        elapsed=0.0,
        generation_seconds=0.0,
        time_to_first_token=None,
        peak_memory=0,
        estimates=model.runtime.estimates,
    )


# --- from a request to the runtime ----------------------------------------------------------------


async def read_request(
    context: ServerContext, parse: Callable[[bytes], B], scope: Scope, receive: Receive, client: str
) -> B:
    """The parsed body of a request.

    Args:
        context: what all requests share.
        parse: parses the body; runs in another thread where that is long.
        scope, receive: of ASGI.
        client: the client's address.

    Raises:
        ErrorResponse: the request is rejected.
        ClientGone: the client has left.
    """
    limits = context.limits
    with context.body_memory.claim() as claim:
        body = await read_body(scope, receive, limits.max_body_bytes, limits.body_s, claim)
        # A long one is not read on trio's thread, which serves everybody.
        if len(body) <= SHORT:
            return parse(body)
        return await context.preparation.run(partial(parse, body), len(body), client)


def check_ignored(context: ServerContext, ignored: IgnoredFields) -> None:
    """Raises: ErrorResponse: the server is strict, and the request has an unknown field."""
    if context.is_strict:
        ignored.refuse()


def requested_model(context: ServerContext, name: str | None) -> str:
    """The name of the model that the body of a request asks for: the only one whatever the name, as clients have names
    of their own; of several the first one if there is no name.

    Raises: ErrorResponse: there are several models or the server is strict, and none has this name.
    """
    is_any = len(context.models.specs) == 1 and not context.is_strict
    return find_model(context.models, None if is_any else name, param="model")


def find_model(models: ModelPool, name: str | None, *, param: str | None = None) -> str:
    """The name of a model; the first one's for None.

    Args:
        models: the server's.
        name: as a request gives it.
        param: the field that has it, if it is one of the body.

    Raises: ErrorResponse: there is no such model.
    """
    names = [spec.name for spec in models.specs]
    if name is None:
        return names[0]
    if name not in models:
        known = f"use {names[0]!r}" if len(names) == 1 else f"the models are {', '.join(map(repr, names))}"
        message = f"there is no model {short_json(name)} here; {known}"
        raise ErrorResponse(404, message, param=param, code="model_not_found")
    return name


def _max_tokens(request: Request, spec: ServedModel, context: ServerContext) -> int | None:
    """The most tokens of an answer; None for as many as the model's context has room for."""
    requested, limit = request.max_answer_tokens, context.limits.max_tokens_limit
    if requested is None:
        requested = spec.settings.get("max_tokens", context.limits.max_tokens)
    elif requested == -1:
        requested = None
    elif context.is_strict and limit is not None and requested > limit:
        field = request.max_answer_tokens_field
        raise ErrorResponse(400, f"{field} must be at most {limit} here, got {requested}", param=field)
    if limit is None:
        return requested
    return limit if requested is None else min(requested, limit)
