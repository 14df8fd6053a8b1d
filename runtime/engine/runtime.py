"""The runtime: two actors at work, and the sessions that they work on."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal

import attrs
import trio
from mlx_lm.tokenizer_utils import TokenizerWrapper

from actors.actor import PREFIX_CACHE_BYTES
from actors.drafters.draft_actor import DraftActor, MakePolicy, policy_by_settings
from actors.drafters.lookup_actor import LookupActor
from actors.mlx.memory import peak_memory
from actors.model import Model
from actors.session import Session
from actors.target import TargetActor
from actors.workers.worker import Worker
from protocol.errors import (
    NoRuntimeError,
    OutriderError,
    RuntimeBrokenError,
    RuntimeClosedError,
)
from protocol.messages import Close, Open
from protocol.prices import Prices
from protocol.session_state import Commit
from protocol.settings import MISSING, NGRAM, Settings, SettingsLike, check_vocabulary_size, settings_from
from protocol.statistics import Counts, Statistics
from protocol.target_queue import TargetQueue
from protocol.trace import Event, Span
from runtime.engine.admission import StreamAdmission
from runtime.engine.drafter_slot import DrafterPlace, Load, LoadedDrafter
from runtime.engine.health import Health
from runtime.engine.nursery import BackgroundNursery
from runtime.engine.request_validation import RequestValidation
from runtime.generation.conversation import Account, Conversation, Message
from runtime.generation.many_prompts import Completions, ManyPrompt, TokenStreams, check_each, check_max_concurrent
from runtime.generation.reasoning import ReasoningTracker
from runtime.generation.text import GrowingText, Prompt, StopFinder
from runtime.generation.token_reader import Arrivals, Progress, TokenReader
from runtime.generation.token_stream import Completion, TokenStream, complete
from runtime.loading.model_sources import Device, Source, check_unknown
from runtime.persistence import saved_session
from runtime.persistence.saved_session import SavedStream
from runtime.persistence.saving import Models
from runtime.persistence.session_file import SessionFile

# Rounds that may wait for a slow consumer before the models wait with them.
BUFFERED_ROUNDS = 16

CLOSED = "this runtime was closed; open another with runtime.open(), runtime.aio.open() or runtime.open_sync()"

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


class Runtime:
    """Two models at work; made by `runtime.open` and `runtime.serve`."""

    def __init__(
        self,
        target: TargetActor,
        drafter: DrafterPlace,
        tokenizer: TokenizerWrapper | None,
        events: Events,
        prices: Prices,
        nursery: trio.Nursery,
        max_streams: int | None,
        shared_tokenizer: TokenizerWrapper | None,
        defaults: SettingsLike | None = None,
    ) -> None:
        self.prices = prices
        self._nursery = nursery
        self._places = StreamAdmission(
            max_streams, self._begin_session, lambda: self._closed is None and target.is_serving
        )
        self._target = target
        self._drafter = drafter
        self._tokenizer = tokenizer
        self._shared_tokenizer = shared_tokenizer
        self._intake = RequestValidation(
            target.model, tokenizer, has_drafter=lambda: drafter.actor is not None, defaults=defaults
        )
        self._events = events
        self._trio_token = trio.lowlevel.current_trio_token()
        self._sessions: dict[int, Session] = {}
        self._scopes: set[trio.CancelScope] = set()  # of what ends with the runtime, and is no session
        self._past = Counts()  # of sessions that are over
        # Held while a session's counts move to the past: another thread may be adding all of them up.
        self._moving = threading.Lock()
        self._closed: OutriderError | None = None
        self._broken = trio.Event()
        self._is_left = trio.Event()  # by the user, or for him
        self._is_released: trio.Event | None = None  # set once models and threads are let go of, by whoever holds them
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
            **settings: see `Settings`; those that are not given are the `defaults` of `open`.

        Returns: a stream that generates from now on, or, where `max_streams` others are at work, as soon as those
            that came before have made room. See `TokenStream` for how to end it, also while it waits.

        Raises: before any model work:
            SettingsError: a setting is unknown or out of its range, or stop strings are given and the target has
                no tokenizer.
            PromptError: the prompt is empty, longer than the context, or not encodable.
            ProcessorError: a logits processor cannot say its state. (One that another stream is calling at this moment
                is asked later, on a model's thread, and the error comes out of the stream: nobody waits here.)
            RuntimeClosedError, RuntimeBrokenError: the runtime is no longer there.
        """
        return self._begin(self._intake.opened(prompt, self.check_settings(settings)))

    async def generate(self, prompt: Prompt, **settings: Any) -> Completion:
        """Generate a whole text.

        Args, Raises: as `stream`; what can happen to a running stream is raised here too.

        Cancellation: ends the generation; what was generated until then is lost.
        """
        return await complete(self.stream(prompt, **settings))

    def generate_many(self, prompts: Iterable[ManyPrompt], *, max_concurrent: int = 8, **settings: Any) -> Completions:
        """Generate a whole text for each of many prompts.

        Args:
            prompts: each as for `stream`, or a pair (prompt, settings by name) for settings of its own; may be none.
            max_concurrent: generations at a time, >= 1; they begin in the order of the prompts.
            **settings: see `Settings`; of all that have no others of their own, the seed included. Each text is what it
                would be alone, but for a logits processor that keeps a state and can neither save nor restore it: all
                would share that.

        Returns: what can be awaited for all completions, in the order of the prompts, or iterated over as they finish;
            see `Completions`, also for what a failure and a cancellation do.

        Raises: before any model work, as `stream`, and:
            PromptError, SettingsError: of one of the prompts; it says at which index.
            SettingsError: `max_concurrent` is out of its range.
        """
        self.check_settings(settings)
        check_max_concurrent(max_concurrent)
        return Completions(
            self._check_each(prompts, settings),
            self._begin,
            max_concurrent,
            start_soon=self._nursery.start_soon,
            run_soon=self._run_soon,
        )

    def stream_many(self, prompts: Iterable[ManyPrompt], *, max_concurrent: int = 8, **settings: Any) -> TokenStreams:
        """Generate a text for each of many prompts, and give the tokens of all of them as they come.

        Args, Raises: as `generate_many`.

        Returns: an async iterator over pairs (index of the prompt, token); see `TokenStreams`.
        """
        self.check_settings(settings)
        check_max_concurrent(max_concurrent)
        return TokenStreams(
            self._check_each(prompts, settings),
            self._begin,
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

    async def load(self, path: SessionFile, *, any_draft: bool = False, **settings: Any) -> Conversation:
        """A conversation from a file of `Conversation.save`, to go on with where it was left.

        It goes on with the same text as it would have without the file, under the same conditions: the target must be
        the model that it was saved with, by its fingerprint (see `actors.persistence.fingerprint`), and so
        must the tokenizer's vocabulary and `open`'s options for caches. What is cached in the file is kept with what
        is cached of other texts, within `prefix_cache_bytes`; what finds no room there is read again.

        Nothing in a file is ever executed, and nothing of it is used before a checksum over all of it holds.

        Args:
            path: of the file; or a binary file object that can seek, such as `io.BytesIO`, which is read in another
                thread from its position to its end.
            any_draft: whether another draft model will do than the one it was saved with. It reads the text anew, and
                the text that comes is the same under the match rule. A runtime without a draft model leaves out what
                the file has of one, and where the file has none, the draft model reads the text anew.
            **settings: in the place of those that were saved; see `Settings`. Where there were `logits_processors`
                or a `sampler`, they must be given again, or [] or None to go on without.

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
            # A session without processors goes on without: this runtime's defaults are not its own.
            keywords = {"logits_processors": (), **saved_session.settings_of(session, path, settings)}
            begins = [message["content"] for message in session.messages[:1] if message["role"] == "system"]
            past = session.messages[len(begins) :]
            conversation = self._conversation(begins[0] if begins else None, session.thinking, keywords, past)
            await models.fill(path, session, self._intake.is_drafted(settings_from(keywords)))
        return conversation

    async def load_stream(self, path: SessionFile, *, any_draft: bool = False, **settings: Any) -> TokenStream:
        """A stream from a file of `TokenStream.save`, to go on behind the last token that was given.

        The tokens go on with the index after the last. `max_tokens` counts from the stream's beginning; `statistics`
        count what happens from now on. What is cached in the file is used as with `reuse_prefix`.

        Args: as `load`. Processors that keep a state and can save and restore it find it again by themselves; any other
            must be as it was.

        Returns: a stream that generates from now on; see `stream`. One that was saved at its end is over.

        Raises: as `load`, and:
            SettingsError: `max_tokens` is not above the number of tokens that the text has.

        Cancellation: waits for the job that is running; there is no stream then.
        """
        with self._while_open():
            saved_session.check_path(path)
            models = self._models()
            session = await models.read(path, any_draft=any_draft, is_stream=True)
            saved = session.stream
            assert saved is not None
            keywords = saved_session.settings_of(session, path, settings)
            checked = self._intake.checked({**keywords, "reuse_prefix": True})
            seed = saved.seed if settings.get("seed") is None else settings["seed"]
            opened = self._intake.resumed(session, saved, checked, seed)
            if not saved.is_over:
                await models.fill(path, session, opened.drafted)
            return self._begin(opened, saved)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The token ids that a prompt stands for, such as `stream` takes.

        May be called from any thread, one at a time: a long text takes a while, in which trio could do nothing else.

        Raises: PromptError: the prompt is empty, or not encodable.
        """
        return self._intake.encode(prompt)

    def statistics(self) -> Statistics:
        """Counts over all streams so far, and how busy the models have been; a frozen snapshot.

        `generation_tps` is over the whole life of the runtime, idle times included.
        """
        counts = Counts()
        with self._moving:
            counts.add(self._past)
            for session in list(self._sessions.values()):
                counts.add(session.counts)
        counts.target_seconds, counts.draft_seconds = self.busy_seconds
        elapsed = self._clock() - self._began
        return counts.snapshot(
            elapsed=elapsed,
            generation_seconds=elapsed,
            time_to_first_token=None,
            peak_memory=peak_memory(),
            estimates=self.prices.estimates(),
            lookahead=0 if self._draft is None else None,
        )

    async def aclose(self) -> None:
        """Close the runtime: end every stream, and begin no other. Closing twice is closing once.

        After `nursery.start(runtime.serve, …)`, this returns once the models are let go of and the threads are joined,
        which takes as long as the forward passes that are running, at most one a model. Inside
        `async with runtime.open(…)` it returns at once; models and threads go as the block is left.

        Cancellation: the runtime is closed in any case; only the waiting ends.
        """
        self._close(RuntimeClosedError(CLOSED))
        self._is_left.set()
        if self._is_released is None:
            await trio.lowlevel.checkpoint()
        else:
            await self._is_released.wait()

    @property
    def busy_seconds(self) -> tuple[float, float]:
        """Seconds that the target and the drafter have been at work so far; neither ever becomes less."""
        return self._target.worker.busy_seconds, self._drafter.busy_seconds

    def health(self) -> Health:
        """Whether the models are still at work; for a server to say, since it asks nothing of them."""
        is_open = self._closed is None
        return Health(
            target=is_open and self._target.is_alive,
            draft=None if (draft := self._draft) is None else is_open and draft.is_alive,
        )

    async def wait_broken(self) -> None:
        """Wait until the target has failed, and every stream has its error; for a server, which then has nothing to do.

        Returns at once where that has happened already, and never where it does not: also not where the runtime is
        closed.

        Cancellation: stops waiting.
        """
        await self._broken.wait()

    @property
    def tokenizer(self) -> TokenizerWrapper | None:
        """The target's tokenizer, as mlx-lm wraps it.

        It is yours: the runtime works with a copy of its own, which was made as it was opened. What you set on this one
        later, be it its truncation in another thread, has no effect on prompts and texts.
        """
        return self._shared_tokenizer

    @property
    def num_streams(self) -> int:
        """Streams that are under way: begun, and neither read to their end nor closed."""
        # Which another thread may be asking for. One that is over is put away in the next turn of the event loop.
        wanted = sum(not session.is_unwanted for session in list(self._sessions.values()))
        return wanted - self._places.num_waiting

    @property
    def num_waiting(self) -> int:
        """Streams that wait for others to make room, because `max_streams` are at work."""
        return self._places.num_waiting

    # --- the drafter ------------------------------------------------------------------------------

    async def attach_draft(self, draft: Source = MISSING, *, draft_device: Device = None, **unknown: Any) -> None:
        """Load a draft model into the open runtime; streams that begin afterwards are drafted.

        It is checked and timed as by `open`. Streams that are under way go on without.

        Args:
            draft, draft_device: as for `open`; "ngram" looks up without a model.
            **unknown: refused.

        Raises: and then the runtime is as it was:
            DrafterAttachedError: there is one, or one is being loaded.
            SettingsError, ModelError, VocabularyMismatchError: as `open`.
            RuntimeClosedError, RuntimeBrokenError: the runtime is no longer there, or was closed meanwhile.

        Cancellation: waits for the load; the runtime is as it was.
        """
        with self._while_open():
            check_unknown(unknown, ("draft", "draft_device"), positional=(), function="attach_draft")
            await self._drafter.attach(draft, draft_device)

    async def detach_draft(self) -> None:
        """Let go of the draft model, its memory and its thread; nothing happens where there is none.

        Streams that are under way go on undrafted, with the text that they would have had; under the rejection rule,
        without a seed, with another sample of the same distribution.

        Cancellation: it is detached in any case, after the draft step that is running; only the waiting ends.
        """
        await self._drafter.detach()

    @property
    def _draft(self) -> DraftActor | LookupActor | None:
        return self._drafter.actor

    # --- conversations ----------------------------------------------------------------------------

    def _conversation(
        self, system: str | None, thinking: bool | None, settings: dict[str, Any], past: Sequence[Message] = ()
    ) -> Conversation:
        # A conversation says by itself that it reuses what was read.
        settings = {**self._intake.keywords({}), "reuse_prefix": True, **settings}
        conversation = Conversation(
            self.stream, self._save, self._tokenizer, system=system, thinking=thinking, settings=settings, past=past
        )
        check_vocabulary_size(settings_from(settings), self._target.model.vocab_size)
        return conversation

    async def _save(self, path: SessionFile, account: Account) -> int:
        with self._while_open():
            return await self._models().save(path, account)

    async def _save_stream(
        self, opened: Open, arrivals: Arrivals, path: SessionFile, progress: Callable[[], Progress]
    ) -> int:
        with self._while_open():
            return await self._models().save_stream(path, opened, lambda: progress().then(arrivals.look_ahead()))

    def _models(self) -> Models:
        # One that has failed for good is none: nothing can be asked of it.
        draft = self._draft if isinstance(self._draft, DraftActor) and self._draft.is_alive else None
        return Models(self._target, draft, self._tokenizer)

    @contextmanager
    def _while_open(self) -> Iterator[None]:
        """For what asks the models for something, as long as they are there."""
        self.check_open()
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

    def check_open(self) -> None:
        """Raises: RuntimeClosedError, RuntimeBrokenError: the runtime is no longer there. For any thread."""
        if self._closed is not None:
            # A new object each time: a traceback grows on an exception that is raised again.
            raise _again(self._closed)

    def check_settings(self, settings: dict[str, Any]) -> Settings:
        """The settings of one stream, checked. For any thread.

        Raises: as `check_open`, and SettingsError: one is unknown or out of its range.
        """
        self.check_open()
        return self._intake.checked(settings)

    def _check_each(self, prompts: Iterable[ManyPrompt], settings: dict[str, Any]) -> list[Open]:
        """What begins the generation of each of many prompts; see `generate_many`."""
        shared = self._intake.checked(settings)

        def opened(prompt: Prompt, own: Mapping[str, Any]) -> Open:
            return self._intake.opened(prompt, self._intake.checked({**settings, **own}) if own else shared)

        return check_each(prompts, opened)

    def _begin(self, opened: Open, saved: SavedStream | None = None) -> TokenStream:
        """Begin a generation, or go on with one that was saved."""
        self.check_open()
        answer = ReasoningTracker(self._tokenizer, opened.prompt[: opened.num_prompt])
        send, receive = trio.open_memory_channel[Commit](BUFFERED_ROUNDS)
        session = Session(opened, send)
        session.counts.prompt_tokens = len(opened.prompt)
        if opened.settings.stop and self._tokenizer is not None:
            session.find_stop = find_stop = StopFinder(self._tokenizer, opened)
            find_stop.resume(opened.prompt[opened.num_prompt :])
        reading = TokenReader(
            session,
            GrowingText(self._tokenizer, opened),
            answer,
            clock=self._clock,
            on_token=session.counts.give,
            estimates=self.prices.estimates,
        )
        arrivals = Arrivals(session, receive, partial(self._end_session_soon, opened.session))
        if saved is not None:
            reading.resume(saved.progress)
            arrivals.resume(saved.progress.commits)
        self._sessions[opened.session] = session
        if saved is not None and saved.is_over:
            session.end()
        else:
            self._places.enter(session)
        stream = TokenStream(reading, arrivals, partial(self._save_stream, opened, arrivals))
        if reading.finish_reason is not None:
            stream._close()
        return stream

    def _begin_session(self, session: Session) -> None:
        draft = self._draft
        if (draft is None or not draft.is_serving) and session.opened.drafted:
            # The drafter was detached while this one waited for its place, or everything is about to end.
            session.opened = attrs.evolve(session.opened, drafted=False)
        self._target.open_session(session)
        if draft is not None and session.opened.drafted:
            draft.open_session(session)

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
        with self._moving:
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
        self._broken.set()

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


def _again(error: OutriderError) -> OutriderError:
    """A fresh exception that says the same, with the same cause."""
    fresh = type(error)(*error.args)
    fresh.__cause__ = error.__cause__
    return fresh


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def running(
    target: tuple[Model, Worker],
    draft: tuple[Model, Worker] | Literal["ngram"] | None,
    *,
    tokenizer: TokenizerWrapper | None = None,
    shared_tokenizer: TokenizerWrapper | None = None,
    events: Events | None = None,
    prices: Prices | None = None,
    make_policy: MakePolicy = policy_by_settings,
    max_streams: int | None = None,
    prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
    defaults: SettingsLike | None = None,
    draft_resources: AsyncExitStack | None = None,
    load_draft: Load | None = None,
) -> AsyncIterator[Runtime]:
    """A runtime over models and workers that are there already.

    Args:
        target, draft: a model and the worker that it lives on; real ones, or scripted ones in simulated
            time. Entering and leaving the workers is the caller's. "ngram" looks up instead of drafting, and
            None leaves the target to itself.
        tokenizer: the target's, or None.
        shared_tokenizer: what `Runtime.tokenizer` is, in the place of the same.
        events: where the workers announce their spans.
        prices: what is known of the models already; nothing if None.
        make_policy: decides how far a session is drafted ahead.
        max_streams: see `open`.
        prefix_cache_bytes: see `open`.
        defaults: see `open`.
        draft_resources: left once the drafter is detached, or the runtime is left.
        load_draft: loads a drafter that is to be attached; None where none can be.

    Cancellation: as `open`.
    """
    events, prices = events or Events(), prices or Prices()
    async with BackgroundNursery() as nursery:
        runtime: Runtime | None = None

        def on_failure(error: OutriderError) -> None:
            assert runtime is not None
            runtime._break(error)

        turns = TargetQueue()
        target_actor = TargetActor(
            *target,
            events,
            prices,
            on_failure=on_failure,
            prefix_cache_bytes=prefix_cache_bytes,
            target_queue=turns,
        )

        def make_drafter(draft: LoadedDrafter) -> DraftActor | LookupActor:
            if draft == NGRAM:
                return LookupActor(
                    events, prices, target[1].clock, target=target_actor.mailbox, make_policy=make_policy
                )
            return DraftActor(
                *draft,
                events,
                prices,
                target=target_actor.mailbox,
                target_vocab_size=target[0].vocab_size,
                make_policy=make_policy,
                prefix_cache_bytes=prefix_cache_bytes,
                target_queue=turns,
            )

        drafter = DrafterPlace(nursery, target_actor, make_drafter, load_draft)
        if draft is not None:
            await drafter.put(draft, draft_resources or AsyncExitStack())
        del draft  # the place has it, until it is detached
        await nursery.start(target_actor.serve)
        runtime = Runtime(
            target_actor,
            drafter,
            tokenizer,
            events,
            prices,
            nursery,
            max_streams,
            tokenizer if shared_tokenizer is None else shared_tokenizer,
            defaults,
        )
        end = partial(runtime._close, RuntimeClosedError(CLOSED))
        # A cancellation from further out ends the actors, and the block in its own time.
        target_actor.when_over(end)
        before = _current.get()
        _current.set(runtime)
        try:
            yield runtime
        finally:
            _current.set(before)
            end()


def stream(prompt: Prompt, **settings: Any) -> TokenStream:
    """`Runtime.stream`, on the runtime that the current task is running under.

    Raises: NoRuntimeError: there is none; and what `Runtime.stream` raises.
    """
    runtime = _current.get()
    if runtime is None:
        raise NoRuntimeError("no runtime is open here; use this inside `async with runtime.open(...)`")
    return runtime.stream(prompt, **settings)
