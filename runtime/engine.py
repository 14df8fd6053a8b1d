"""The runtime: two actors at work, and the sessions that they work on."""

from __future__ import annotations

import inspect
import itertools
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import Any, Literal

import mlx.core as mx
import outcome
import trio
from mlx_lm.tokenizer_utils import TokenizerWrapper

from actors.actor import PREFIX_CACHE_BYTES
from actors.draft import DraftActor, MakePolicy, policy_by_settings
from actors.mlx_model import peak_memory, wired_memory
from actors.model import Model
from actors.ngram import LookupActor
from actors.session import Session
from actors.target import TargetActor
from actors.warm_up import warm_up
from actors.worker import Job, JobError, ThreadWorker, Worker
from protocol.books import Commit
from protocol.errors import (
    NoRuntimeError,
    OutriderError,
    PromptTooLongError,
    RuntimeBrokenError,
    RuntimeClosedError,
    SettingsError,
    WrongEventLoopError,
)
from protocol.messages import Close, Open
from protocol.prices import Prices
from protocol.processors import can_be_speculated_with
from protocol.settings import MAX_SEED, NGRAM, Settings, check_vocabulary_size, settings_from
from protocol.statistics import Counts, Statistics
from protocol.trace import Actor, Event, Span
from protocol.turns import Turns
from runtime import saved_session
from runtime.conversation import Account, Conversation, Message
from runtime.grammar import Grammar
from runtime.health import Health
from runtime.many import Completions, check_each, check_max_concurrent
from runtime.opening import (
    Device,
    Loaded,
    Source,
    check_cache_options,
    check_device,
    check_integer,
    check_source,
    check_unknown,
    load_onto,
)
from runtime.places import Places
from runtime.saved_session import FilePath
from runtime.saving import Models
from runtime.streaming import Completion, TokenStream, complete
from runtime.text import GrowingText, Prompt, StopFinder, check_vocabularies, encode_prompt
from runtime.thinking import Answer
from runtime.tracing import Recorder, TimelineFile, Trace, check_trace

logger = logging.getLogger("outrider")

# Rounds that may wait for a slow consumer before the models wait with them.
BUFFERED_ROUNDS = 16

_CLOSED = "this runtime was closed; open another with runtime.open()"

_warned_of: set[str] = set()  # logits processors, once a process

_current: ContextVar[Runtime | None] = ContextVar("outrider_runtime", default=None)


class Events:
    """Where everything that happens is announced, in trio's thread."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Event], None]] = []

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Have a function called with each event from now on."""
        self._listeners.append(listener)

    def __call__(self, event: Event) -> None:
        """Announce an event."""
        for listener in self._listeners:
            listener(event)


def _harmless(trace: Callable[[Event], None]) -> Callable[[Event], None]:
    """A user's trace function that cannot take the runtime down; after its first error it is left out."""
    failed = False

    def call(event: Event) -> None:
        nonlocal failed
        if failed:
            return
        # Somebody else's code, called in the middle of ours: whatever it raises, generation goes on.
        try:
            trace(event)
        except Exception:
            failed = True
            logger.exception("the trace function failed on %r and is not called again", event)

    return call


class Runtime:
    """Two models at work; made by `runtime.open` and `runtime.serve`."""

    def __init__(
        self,
        target: TargetActor,
        draft: DraftActor | LookupActor | None,
        tokenizer: TokenizerWrapper | None,
        events: Events,
        prices: Prices,
        nursery: trio.Nursery,
        max_streams: int | None,
    ) -> None:
        self._prices = prices
        self._nursery = nursery
        self._places = Places(max_streams, self._begin_session)
        self._target = target
        self._draft = draft
        self._tokenizer = tokenizer
        self._events = events
        self._trio_token = trio.lowlevel.current_trio_token()
        self._ids = itertools.count()
        self._sessions: dict[int, Session] = {}
        self._scopes: set[trio.CancelScope] = set()  # of what ends with the runtime, and is no session
        self._past = Counts()  # of sessions that are over
        self._closed: OutriderError | None = None
        self._clock = target.worker.clock
        self._began = self._clock()
        events.listen(self._attribute)

    def __repr__(self) -> str:
        state = "open" if self._closed is None else "closed"
        return f"<outrider Runtime, {state}: {self.num_streams} streams, {self.num_waiting} waiting>"

    # --- for users --------------------------------------------------------------------------------

    def stream(self, prompt: Prompt, **settings: Any) -> TokenStream:
        """Begin a generation.

        Args:
            prompt: text, token ids, or chat messages (through the tokenizer's chat template).
            **settings: see `Settings`.

        Returns: a stream that generates from now on, or, where `max_streams` others are at work, as soon as those
            that came before have made room. See `TokenStream` for how to end it, also while it waits.

        Raises: before any model work:
            SettingsError: a setting is unknown or out of its range, or stop strings are given and the target has
                no tokenizer.
            PromptError: the prompt is empty, longer than the context, or not encodable.
            ProcessorError: a logits processor cannot say its state.
            RuntimeClosedError, RuntimeBrokenError: the runtime is no longer there.
        """
        self._check_open()
        return self._begin(self._opened(prompt, self._checked(settings)))

    async def generate(self, prompt: Prompt, **settings: Any) -> Completion:
        """Generate a whole text.

        Args, Raises: as `stream`; what can happen to a running stream is raised here too.

        Cancellation: ends the generation; what was generated until then is lost.
        """
        return await complete(self.stream(prompt, **settings))

    def generate_many(self, prompts: Iterable[Prompt], *, max_concurrent: int = 8, **settings: Any) -> Completions:
        """Generate a whole text for each of many prompts.

        Args:
            prompts: each as for `stream`; may be none.
            max_concurrent: generations at a time, >= 1; they begin in the order of the prompts.
            **settings: see `Settings`; the same for all, the seed included. Each text is what it would be alone, but
                for a logits processor that keeps a state and can neither save nor restore it: all would share that.

        Returns: what can be awaited for all completions, in the order of the prompts, or iterated over as they finish;
            see `Completions`, also for what a failure and a cancellation do.

        Raises: before any model work, as `stream`, and:
            PromptError: it says at which index.
            SettingsError: `max_concurrent` is out of its range.
        """
        self._check_open()
        check_max_concurrent(max_concurrent)
        checked = self._checked(settings)
        return Completions(
            check_each(prompts, lambda prompt: self._opened(prompt, checked)),
            lambda opened: complete(self._begin(opened)),
            max_concurrent,
            start_soon=self._nursery.start_soon,
            run_soon=self._run_soon,
        )

    def conversation(self, system: str | None = None, *, thinking: bool | None = None, **settings: Any) -> Conversation:
        """Begin a conversation; nothing is generated until something is said.

        Args:
            system: what the model is told before anything is said, or None; without a chat template, the text's
                beginning.
            thinking: whether the model is to think before it answers, for those that can be told; None leaves it to
                the chat template.
            **settings: of every turn; see `Settings`. `reuse_prefix` is set.

        Returns: see `Conversation`.

        Raises: before any model work:
            SettingsError: a setting is unknown or out of its range, or the chat template has no switch for thinking.
            PromptError: there is no tokenizer, or its chat template does not take a system's message.
        """
        return self._conversation(system, thinking, settings)

    async def load(self, path: FilePath, *, any_draft: bool = False, **settings: Any) -> Conversation:
        """A conversation from a file of `Conversation.save`, to go on with where it was left.

        It goes on with the same text as it would have without the file, under the same conditions: the target must be
        the model that it was saved with, by its fingerprint (see `actors.fingerprint` for what that can tell), and so
        must the tokenizer's vocabulary and `open`'s options for caches. What is cached in the file is kept with what
        is cached of other texts, within `prefix_cache_bytes`; what finds no room there is read again.

        Nothing in a file is ever executed, and nothing of it is used before a checksum over all of it holds.

        Args:
            path: of the file.
            any_draft: whether another draft model will do than the one it was saved with. It reads the text anew, and
                the text that comes is the same under the match rule. A runtime without a draft model leaves out what
                the file has of one, and where the file has none, the draft model reads the text anew.
            **settings: in the place of those that were saved; see `Settings`. Where there were `logits_processors`,
                they must be given again, or [] to go on without.

        Raises: and then nothing has changed:
            SessionFileError: the file cannot be read (the system's error is the cause), is no saved session, is of a
                newer version, is damaged, or was saved with another model, vocabulary or cache.
            SettingsError: a setting is unknown or out of its range, or `logits_processors` are to be given again.
            RuntimeClosedError, RuntimeBrokenError: the runtime is no longer there.

        Cancellation: waits for the job that is running; there is no conversation then.
        """
        with self._while_open():
            saved_session.check_path(path)
            models = self._models()
            session = await models.read(path, any_draft=any_draft)
            keywords = saved_session.settings_of(session, path, settings)
            begins = [message["content"] for message in session.messages[:1] if message["role"] == "system"]
            past = session.messages[len(begins) :]
            conversation = self._conversation(begins[0] if begins else None, session.thinking, keywords, past)
            await models.fill(path, session, self._drafted(settings_from(keywords)))
        return conversation

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The token ids that a prompt stands for, such as `stream` takes.

        May be called from any thread, one at a time: a long text takes a while, in which trio could do nothing else.

        Raises: PromptError: the prompt is empty, or not encodable.
        """
        return encode_prompt(prompt, self._tokenizer, self._target.model.vocab_size)

    def statistics(self) -> Statistics:
        """Counts over all streams so far, and how busy the models have been; a frozen snapshot.

        `generation_tps` is over the whole life of the runtime, idle times included.
        """
        counts = Counts()
        counts.add(self._past)
        for session in list(self._sessions.values()):  # which another thread may be asking for
            counts.add(session.counts)
        counts.target_seconds = self._target.worker.busy_seconds
        counts.draft_seconds = self._draft.busy_seconds if self._draft else 0.0
        elapsed = self._clock() - self._began
        return counts.snapshot(
            elapsed=elapsed,
            generation_seconds=elapsed,
            time_to_first_token=None,
            peak_memory=peak_memory(),
            estimates=self._prices.estimates(),
        )

    def health(self) -> Health:
        """Whether the models are still at work; for a server to say, since it asks nothing of them."""
        is_open = self._closed is None
        return Health(
            target=is_open and self._target.is_alive,
            draft=None if self._draft is None else is_open and self._draft.is_alive,
        )

    @property
    def tokenizer(self) -> TokenizerWrapper | None:
        """The target's tokenizer, as mlx-lm wraps it."""
        return self._tokenizer

    @property
    def num_streams(self) -> int:
        """Streams that are under way: begun, and neither read to their end nor closed."""
        return len(self._sessions) - self._places.num_waiting

    @property
    def num_waiting(self) -> int:
        """Streams that wait for others to make room, because `max_streams` are at work."""
        return self._places.num_waiting

    # --- conversations ----------------------------------------------------------------------------

    def _conversation(
        self, system: str | None, thinking: bool | None, settings: dict[str, Any], past: Sequence[Message] = ()
    ) -> Conversation:
        conversation = Conversation(
            self.stream, self._save, self._tokenizer, system=system, thinking=thinking, settings=settings, past=past
        )
        check_vocabulary_size(settings_from(settings), self._target.model.vocab_size)
        return conversation

    async def _save(self, path: FilePath, account: Account) -> int:
        with self._while_open():
            return await self._models().save(path, account)

    def _models(self) -> Models:
        draft = self._draft if isinstance(self._draft, DraftActor) else None
        return Models(self._target, draft, self._tokenizer)

    @contextmanager
    def _while_open(self) -> Iterator[None]:
        """For what asks the models for something, as long as they are there."""
        self._check_open()
        with trio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.remove(scope)
        if scope.cancelled_caught:
            assert self._closed is not None
            raise _again(self._closed)

    # --- sessions ---------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed is not None:
            # A new object each time: a traceback grows on an exception that is raised again.
            raise _again(self._closed)

    def _checked(self, settings: dict[str, Any]) -> Settings:
        checked = settings_from(settings)
        check_vocabulary_size(checked, self._target.model.vocab_size)
        if checked.ignore_eos and any(isinstance(processor, Grammar) for processor in checked.logits_processors):
            raise SettingsError("ignore_eos=True leaves a grammar's text without an end; leave it False")
        if checked.stop and self._tokenizer is None:
            raise SettingsError(
                f"stop {list(checked.stop)} needs text, and the target was opened without a tokenizer; "
                "name ids in stop_tokens instead"
            )
        return checked

    def _opened(self, prompt: Prompt, settings: Settings) -> Open:
        model = self._target.model
        ids = encode_prompt(prompt, self._tokenizer, model.vocab_size)
        if model.context_length is not None and len(ids) >= model.context_length:
            raise PromptTooLongError(
                f"the prompt has {len(ids)} tokens, and the target's context of {model.context_length} must hold "
                f"it and at least one more; shorten it to {model.context_length - 1}"
            )
        ends = set(settings.stop_tokens)
        if self._tokenizer is not None and not settings.ignore_eos:
            ends |= set(self._tokenizer.eos_token_ids)
        return Open(
            session=next(self._ids),
            prompt=ids,
            settings=settings,
            seed=secrets.randbelow(MAX_SEED) if settings.seed is None else settings.seed,
            stop_tokens=frozenset(ends),
            context_length=model.context_length,
            drafted=self._drafted(settings),
        )

    def _drafted(self, settings: Settings) -> bool:
        return self._draft is not None and settings.lookahead != 0 and _can_be_speculated(settings)

    def _begin(self, opened: Open) -> TokenStream:
        self._check_open()
        answer = Answer(self._tokenizer, opened.prompt)
        send, receive = trio.open_memory_channel[Commit](BUFFERED_ROUNDS)
        session = Session(opened, send)
        session.counts.prompt_tokens = len(opened.prompt)
        if opened.settings.stop and self._tokenizer is not None:
            session.find_stop = StopFinder(self._tokenizer, opened)
        self._sessions[opened.session] = session
        self._places.enter(session)
        return TokenStream(
            session,
            receive,
            GrowingText(self._tokenizer, opened),
            answer,
            hang_up=partial(self._end_session_soon, opened.session),
            clock=self._clock,
            on_token=session.counts.give,
            estimates=self._prices.estimates,
        )

    def _begin_session(self, session: Session) -> None:
        self._target.open_session(session)
        if self._draft is not None and session.opened.drafted:
            self._draft.open_session(session)

    def _end_session_soon(self, session: int) -> None:
        """End a session, from any thread; harmless where it is over."""
        if (unwanted := self._sessions.get(session)) is not None:
            unwanted.is_unwanted = True
        self._run_soon(partial(self._end_session, session))

    def _run_soon(self, call: Callable[[], None]) -> None:
        """Have a function called in trio's thread; may be called from any, at any moment."""
        try:
            self._trio_token.run_sync_soon(call)
        except trio.RunFinishedError:
            return  # and with the event loop everything ended

    def _end_session(self, id: int) -> None:
        """End a session; harmless where it is over."""
        if (session := self._sessions.pop(id, None)) is None:
            return
        self._past.add(session.counts)
        self._places.give_up(id)
        self._target.close_session(Close(id))
        if self._draft is not None:
            self._draft.close_session(Close(id))

    def _attribute(self, event: Event) -> None:
        """Count a worker's time for the session that it was spent on."""
        if not isinstance(event, Span) or event.session not in self._sessions:
            return
        counts, seconds = self._sessions[event.session].counts, event.ended - event.began
        if event.actor == "draft":
            counts.draft_seconds += seconds
        else:
            counts.target_seconds += seconds
            if event.kind == "prefill":
                counts.prefilled_tokens += event.num_tokens
                counts.prefill_seconds += seconds

    def _break(self, error: OutriderError) -> None:
        """The target has failed: every stream ends with its error, and no new one begins."""
        cause = error.__cause__ or error
        self._close(RuntimeBrokenError(f"the target model failed, and the runtime with it: {cause}"), cause)

    def _close(self, error: OutriderError, cause: BaseException | None = None) -> None:
        if self._closed is not None:
            return
        error.__cause__ = cause
        self._closed = error
        for scope in self._scopes:
            scope.cancel()
        for id, session in list(self._sessions.items()):
            session.end(_again(error))
            self._end_session(id)


def _can_be_speculated(settings: Settings) -> bool:
    """Whether all logits processors may be called on drafted text; says so, once, where one may not."""
    careful = [processor for processor in settings.logits_processors if not can_be_speculated_with(processor)]
    for processor in careful:
        name = getattr(processor, "__qualname__", type(processor).__qualname__)
        if name not in _warned_of:
            _warned_of.add(name)
            logger.warning(
                "the logits processor %s may keep a state, so nothing is drafted for streams that use it; mark it with "
                "runtime.stateless if it keeps none, or give it save() and restore(state)",
                name,
            )
    return not careful


def _again(error: OutriderError) -> OutriderError:
    """A fresh exception that says the same, with the same cause."""
    fresh = type(error)(*error.args)
    fresh.__cause__ = error.__cause__
    return fresh


class _BackgroundNursery:
    """A nursery for the actors: it is cancelled on leaving, and the body's exceptions pass it unwrapped.

    A plain nursery would hand a user's own ValueError back to him in an exception group.
    """

    async def __aenter__(self) -> trio.Nursery:
        self._manager = trio.open_nursery()
        self._nursery = await self._manager.__aenter__()
        return self._nursery

    @trio.lowlevel.enable_ki_protection
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Shielded, so that it is this cancellation that ends the actors and none from further out: that one would
        # come out here, in the place of an error of the body's own.
        self._nursery.cancel_scope.shield = True
        self._nursery.cancel_scope.cancel()
        with _interrupts_unwrapped():
            await self._manager.__aexit__(None, None, None)


@contextmanager
def _interrupts_unwrapped() -> Iterator[None]:
    """Let a Ctrl-C out of a nursery as itself; a group would end the process with another status."""
    try:
        yield
    except BaseExceptionGroup as group:
        if group.split(KeyboardInterrupt)[1] is not None:
            raise
        raise KeyboardInterrupt from None


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def running(
    target: tuple[Model, Worker],
    draft: tuple[Model, Worker] | Literal["ngram"] | None,
    *,
    tokenizer: TokenizerWrapper | None = None,
    events: Events | None = None,
    prices: Prices | None = None,
    make_policy: MakePolicy = policy_by_settings,
    max_streams: int | None = None,
    prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
) -> AsyncIterator[Runtime]:
    """A runtime over models and workers that are there already.

    Args:
        target, draft: a model and the worker that it lives on; real ones, or scripted ones in simulated
            time. Entering and leaving the workers is the caller's. "ngram" looks up instead of drafting, and
            None leaves the target to itself.
        tokenizer: the target's, or None.
        events: where the workers announce their spans.
        prices: what is known of the models already; nothing if None.
        make_policy: decides how far a session is drafted ahead.
        max_streams: see `open`.
        prefix_cache_bytes: see `open`.

    Cancellation: as `open`.
    """
    events, prices = events or Events(), prices or Prices()
    async with _BackgroundNursery() as nursery:
        runtime: Runtime | None = None

        def on_failure(error: OutriderError) -> None:
            assert runtime is not None
            runtime._break(error)

        turns = Turns()
        target_actor = TargetActor(
            *target,
            events,
            prices,
            on_failure=on_failure,
            beside_another=draft != NGRAM,
            prefix_cache_bytes=prefix_cache_bytes,
            turns=turns,
        )
        draft_actor: DraftActor | LookupActor | None = None
        if draft == NGRAM:
            draft_actor = LookupActor(
                events, prices, target[1].clock, target=target_actor.mailbox, make_policy=make_policy
            )
        elif draft is not None:
            draft_actor = DraftActor(
                *draft,
                events,
                prices,
                target=target_actor.mailbox,
                target_vocab_size=target[0].vocab_size,
                make_policy=make_policy,
                prefix_cache_bytes=prefix_cache_bytes,
                turns=turns,
            )
        if draft_actor is not None:
            target_actor.drafter = draft_actor.mailbox
            await nursery.start(draft_actor.serve)
        await nursery.start(target_actor.serve)
        runtime = Runtime(target_actor, draft_actor, tokenizer, events, prices, nursery, max_streams)
        end = partial(runtime._close, RuntimeClosedError(_CLOSED))
        for actor in (target_actor, draft_actor):
            if actor is not None:
                # A cancellation from further out ends the actors, and the block in its own time.
                actor.when_over(end)
        before = _current.get()
        _current.set(runtime)
        try:
            yield runtime
        finally:
            _current.set(before)
            end()


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def open(
    target: Source,
    draft: Source | None = None,
    *,
    target_device: Device = None,
    draft_device: Device = None,
    rewind: str = "auto",
    max_kv_size: int | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
    max_streams: int | None = None,
    prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
    trace: Trace = None,
    **unknown: Any,
) -> AsyncIterator[Runtime]:
    """Load a target and a draft model, and keep them at work until the block is left.

    Args:
        target: a path or hub id for `mlx_lm.load`, or `(model, tokenizer)` already built. With None for
            a tokenizer, prompts are token ids and texts stay empty.
        draft: likewise; or "ngram", which drafts without a model, by looking up what came after the same words
            earlier in the prompt and the text; or None for plain decoding through the same machinery.
        target_device, draft_device: "cpu", "gpu", an MLX device, or None for MLX's default.
        rewind: how caches are put right after a rejection: "auto" takes, before each round, the first that
            every layer's cache has at that moment of *trim* (drop the tail), *checkpoint* (restore the state
            from before the round, and feed what was accepted again in front of the next window) and *none*
            (feed one committed token at a time); naming one insists on it.
        max_kv_size: most tokens that a cache keeps, >= 5, for models that make no caches of their own; the
            oldest but the first four are forgotten. None for no bound.
        kv_bits: quantise key-value caches to 2, 3, 4, 5, 6 or 8 bits; None does not.
        kv_group_size: quantisation group, 32, 64 or 128.
        quantized_kv_start: quantise once a cache holds so many tokens, >= 0.
        max_streams: most streams that the models work on at the same time, >= 1, which bounds the memory for caches;
            further ones wait in the order of their calls. None for no bound.
        prefix_cache_bytes: most memory that each of the two models may take for caches of texts that are over, for
            streams with `reuse_prefix`, >= 0; what was used least recently goes first. 0 keeps nothing.
        trace: the path of a file to write: Chrome trace JSON, for Perfetto or chrome://tracing, or where the name
            ends in .html the timeline as a page. It is whole once the block is left, for whatever reason. Or a
            function that is called in trio's thread with each `Span` and `Instant`, and should return quickly.
        **unknown: refused.

    Yields: a `Runtime`, which is also what `runtime.stream` uses in this task and its children.

    Raises: before the block is entered, with nothing left half open:
        SettingsError: an option is unknown or out of its range.
        ModelError: a model cannot be loaded (the original error is the cause), or its caches do not have the
            way to rewind that was insisted on.
        VocabularyMismatchError: target and draft do not share a vocabulary.

    Cancellation: leaving the block ends every stream, waits for the forward passes that are running (at
    most one a model), and joins the threads, also while being cancelled. While loading, it waits for the
    load.
    """
    if not trio.lowlevel.in_trio_task():
        raise WrongEventLoopError(
            "runtime.open is for trio; under asyncio use runtime.aio.open, without an event loop runtime.generate_sync"
        )
    check_unknown(unknown, OPTIONS)
    sources: dict[Actor, Source] = {"target": check_source("target", target)}
    devices: dict[Actor, mx.Device | None] = {
        "target": check_device("target", target_device),
        "draft": check_device("draft", draft_device),
    }
    if draft is not None and draft != NGRAM:
        sources["draft"] = check_source("draft", draft)
    options = check_cache_options(rewind, max_kv_size, kv_bits, kv_group_size, quantized_kv_start)
    if max_streams is not None:
        check_integer("max_streams", max_streams, 1)
    check_integer("prefix_cache_bytes", prefix_cache_bytes, 0)
    events = Events()
    listener = check_trace(trace)

    async with AsyncExitStack() as stack:
        if isinstance(listener, Recorder) and listener is not trace:
            # First in, last out: a trace has the last of what the workers do.
            await stack.enter_async_context(listener)
        if listener is not None:
            events.listen(_harmless(listener))
        stack.enter_context(wired_memory())
        workers = {role: await stack.enter_async_context(ThreadWorker(role, devices[role], events)) for role in sources}
        loaded: dict[Actor, outcome.Outcome[Loaded]] = {}

        async def load(role: Actor) -> None:
            loaded[role] = await outcome.acapture(load_onto, workers[role], role, sources[role], options)

        with _interrupts_unwrapped():
            async with trio.open_nursery() as nursery:
                for role in sources:
                    nursery.start_soon(load, role)
        ours = loaded["target"].unwrap()
        theirs = loaded["draft"].unwrap() if "draft" in loaded else None
        if isinstance(listener, TimelineFile):
            listener.tokenizer = ours.tokenizer
        stack.enter_context(ours.model.evaluating_layers())
        if theirs is not None:
            stack.enter_context(theirs.model.evaluating_layers())
        if theirs is not None and ours.tokenizer is not None and theirs.tokenizer is not None:
            await _compare(workers["draft"], ours.tokenizer, theirs.tokenizer)
        prices = Prices()
        if theirs is not None:
            await _measure((ours.model, workers["target"]), (theirs.model, workers["draft"]), prices)
        async with running(
            (ours.model, workers["target"]),
            (theirs.model, workers["draft"]) if theirs is not None else NGRAM if draft == NGRAM else None,
            tokenizer=ours.tokenizer,
            events=events,
            prices=prices,
            max_streams=max_streams,
            prefix_cache_bytes=prefix_cache_bytes,
        ) as runtime:
            yield runtime


OPTIONS = tuple(
    name
    for name, parameter in inspect.signature(open).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
)


async def _measure(target: tuple[Model, Worker], draft: tuple[Model, Worker], prices: Prices) -> None:
    """What both models cost, for the rules to begin with."""
    try:
        with _interrupts_unwrapped():
            await warm_up(target, draft, prices)
    except JobError as error:
        # Streams will meet the same error, where it can be told whose it is.
        logger.info("the models could not be timed: %s", error)


async def _compare(worker: Worker, ours: TokenizerWrapper, theirs: TokenizerWrapper) -> None:
    try:
        await worker.run(Job("load", partial(check_vocabularies, ours, theirs)))
    except JobError as error:
        raise (error.__cause__ or error) from None


async def serve(
    target: Source,
    draft: Source | None = None,
    *,
    task_status: trio.TaskStatus[Runtime] = trio.TASK_STATUS_IGNORED,
    **options: Any,
) -> None:
    """`open` as a task: `rt = await nursery.start(runtime.serve, target, draft)`.

    Args, Raises: as `open`.

    Cancellation: this is how it ends; see `open`.
    """
    async with open(target, draft, **options) as runtime:
        task_status.started(runtime)
        await trio.sleep_forever()


def stream(prompt: Prompt, **settings: Any) -> TokenStream:
    """`Runtime.stream`, on the runtime that the current task is running under.

    Raises: NoRuntimeError: there is none; and what `Runtime.stream` raises.
    """
    runtime = _current.get()
    if runtime is None:
        raise NoRuntimeError("no runtime is open here; use this inside `async with runtime.open(...)`")
    return runtime.stream(prompt, **settings)
