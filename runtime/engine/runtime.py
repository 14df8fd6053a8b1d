"""The runtime: what a user holds of two models at work."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Never, Unpack, overload

import attrs
import mlx.core as mx
import trio
from mlx_lm.tokenizer_utils import TokenizerWrapper

from actors.drafters.draft_actor import DraftActor
from actors.persistence.saved_sequence import SavableModel
from actors.session import Session
from actors.target.target_actor import TargetActor
from protocol.argument_aliases import MISSING
from protocol.errors import RuntimeBrokenError, RuntimeClosedError
from protocol.open_options import OpenOptions
from protocol.prices import Estimates, Prices
from protocol.scores import Score, ScoredToken, TopLogprob
from protocol.settings import Settings, SettingsLike, check_vocabulary_size, keywords_of, settings_from
from protocol.settings_keywords import ScoreArguments, SettingsArguments
from protocol.statistics import Statistics
from protocol.trace import Events
from runtime.engine.drafter_slot import DrafterActor, DrafterSlot
from runtime.engine.request_validation import RequestValidation
from runtime.engine.sessions import Sessions
from runtime.generation.conversation import Conversation, TurnMessage, turn_settings
from runtime.generation.many_prompts import Completions, ManyPrompts, OnError, check_arguments
from runtime.generation.text import Detokenizer, Prompt, begun_turn
from runtime.generation.token_stream import Completion, SessionFile, TokenStream, complete
from runtime.generation.tool_calls.tools import Functions, StreamArguments
from runtime.loading.model_sources import ModelSource, check_unknown
from runtime.persistence import saved_session
from runtime.persistence.saved_session import SessionSaver

CLOSED = "this runtime was closed; open another with runtime.open(), runtime.aio.open() or runtime.open_sync()"

# Tokens, of a scored text or listed as likely, that are decoded without a pause; a few milliseconds.
_DECODED_AT_ONCE = 64


@attrs.frozen
class Health:
    """Which of the actors are alive.

    Attributes:
        target: False once it has failed or the runtime was closed: no stream will begin any more.
        draft: False while the drafter hangs or is late with a proposal, and once its thread has died or the runtime was
            closed: texts are then generated undrafted. None without a drafter. A drafter that fails in one stream
            serves the next, and is alive.
    """

    target: bool
    draft: bool | None

    @property
    def ok(self) -> bool:
        """Whether the target is alive, and the drafter if there is one."""
        return self.target and self.draft is not False


@attrs.frozen
class Memory:
    """Memory in bytes.

    Attributes:
        limit: that models and caches may take together, in this process; None for no limit.
        models: of the weights.
        reserved: for the caches of the streams that have begun; at most as much is in use.
    """

    limit: int | None
    models: int
    reserved: int


class Runtime:
    """Two models at work; made by `runtime.open` and `runtime.keep_open`.

    What it tells of itself can be asked for at any time and in any thread, except for `wait_broken`.

    Attributes:
        reads_when_idle: see `runtime.open` about `idle_reading`.
        model_defaults: the settings from the target's generation_config.json; empty unless `open` was asked for them.
    """

    model_defaults: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        target: TargetActor,
        drafter: DrafterSlot,
        tokenizer: TokenizerWrapper | None,
        shared_tokenizer: TokenizerWrapper | None,
        events: Events,
        prices: Prices,
        nursery: trio.Nursery,
        options: OpenOptions,
    ) -> None:
        """A runtime over actors that are serving; see `runtime.engine.opening.running`. Generations that are begun many
        at a time run in the nursery. `tokenizer` is the target's, for this runtime alone.
        """
        assert options.max_streams != "auto", "decided by who knows the models"
        memory_limit = None if options.memory_limit == "auto" else options.memory_limit
        defaults = keywords_of(options.defaults, "defaults")
        self._target = target
        self._drafter = drafter
        self._tokenizer = tokenizer
        self._shared_tokenizer = shared_tokenizer
        self._prices = prices
        self._nursery = nursery
        self._clock = target.worker.clock
        self._began = self._clock()
        self._sessions = Sessions(target, drafter, tokenizer, prices, options.max_streams, memory_limit)
        self.reads_when_idle = options.idle_reading
        if options.idle_reading:
            nursery.start_soon(self._sessions.idle_reading.run)
        self._validation = RequestValidation(target.model, tokenizer, defaults, lambda: drafter.actor is not None)
        self._is_left = trio.Event()  # set once the user has closed the runtime
        self._is_released: trio.Event | None = None  # set by `keep_open` once models and threads are released
        events.listen(self._sessions.attribute, only_spans=True)

    # --- generations ------------------------------------------------------------------------------

    def stream(
        self, prompt: Prompt, settings: SettingsLike | None = None, **overrides: Unpack[StreamArguments]
    ) -> TokenStream:
        """Begin a generation.

        Args:
            prompt: text, token ids, or chat messages (through the tokenizer's chat template).
            settings: a `Settings`, which sets every field, or a mapping of some settings by name. Settings that are
                not named have the `defaults` of `open`.
            **overrides: settings by name, each of which replaces that of `settings`; and for messages `tools`,
                `tool_choice` and `parallel_tool_calls`, see `StreamArguments`.

        Returns: a stream that generates from now on, or once fewer than `max_streams` earlier ones are at work and
            there is memory for its caches. See `TokenStream` for how to end it.

        Raises: before any model work:
            SettingsError: a setting is unknown or out of its range, stop strings are given and the target has no
                tokenizer, a tool is invalid, or a grammar has no place for the tag with which `thinking_budget` ends
                the reasoning that the prompt has begun.
            PromptError: the prompt is empty, not encodable, or longer than the context or the memory limit allows.
            ProcessorError: a logits processor cannot save its state. If another stream is calling it at this moment,
                the error comes out of the stream.
            RuntimeClosedError, RuntimeBrokenError: the runtime is closed, or its target has failed.
        """
        self.check_open()
        return self._sessions.begin(*self._validation.generation(prompt, settings, dict(overrides)))

    async def score(
        self, prompt: Prompt, continuation: str | Sequence[int], **options: Unpack[ScoreArguments]
    ) -> Score:
        """The log-probability of each token of a continuation, given the prompt and the tokens before it.

        They are the target's own, without temperature, filters and processors.

        Args:
            prompt: as for `stream`.
            continuation: token ids, or text. If the prompt is text, too, both are tokenised as one text, whose first
                tokens, as many as the prompt has alone, are the prompt's; spaces at the prompt's end belong to the
                continuation. After any other prompt, a text is tokenised alone, without special tokens.
            logprobs: number of the likeliest tokens at each position to give log-probabilities for; 0 (default) to 128.
            reuse_prefix, prefill_step_size: as the settings, but `reuse_prefix` is on by default.

        Raises: before any model work as `stream`, and:
            PromptError: the continuation is empty, or has no token of its own.
            PromptTooLongError: the context does not hold prompt and continuation.

        Cancellation: strikes between two passes; what was read stays in the prefix cache.
        """
        self.check_open()
        session = await self._sessions.read(self._validation.to_score(prompt, continuation, **options))
        opened = session.opened
        if len(session.scores) < opened.num_scored:  # the actors were cancelled, and have no error
            raise RuntimeClosedError("the runtime was closed before the continuation was scored; open another")
        tokens = await _scored_tokens(session, self._tokenizer)
        return Score(tokens, opened.num_read + 1, session.counts.cached_tokens)

    async def warm(
        self, prompt: Prompt, settings: SettingsLike | None = None, **overrides: Unpack[StreamArguments]
    ) -> Statistics:
        """Read a prompt, and keep it for streams that begin with it and have `reuse_prefix`; generate nothing.

        Args: as `stream`; settings of the generation have no effect.

        Returns: once the target has read, the statistics of the reading, with `prompt_tokens`, and `cached_tokens` of
            those, which were read before. A drafter reads on, unless streams wait for the room.

        Raises: as `score`.

        Cancellation: strikes between two passes; what was read is kept.
        """
        self.check_open()
        opened, _ = self._validation.generation(prompt, settings, {**overrides, "reuse_prefix": True})
        began = self._clock()
        session = await self._sessions.read(attrs.evolve(opened, only_reads=True))
        return session.counts.snapshot(elapsed=self._clock() - began, estimates=self.estimates, lookahead=0)

    def begun_turn(self, messages: Sequence[TurnMessage], /, **switches: Any) -> Prompt:
        """See `runtime.generation.text.begun_turn`. In any thread, as `encode`."""
        assert self._tokenizer is not None, "a chat has a tokenizer"
        return begun_turn(messages, self._tokenizer, **switches)

    def expect(self, prompt: Callable[[], Prompt]) -> None:
        """Read a prompt as `warm` does, once no stream is at work, if `reads_when_idle`; it is asked for then."""

        async def read() -> None:
            opened, _ = self._validation.generation(prompt(), None, {"reuse_prefix": True})
            await self._sessions.read(attrs.evolve(opened, only_reads=True), is_idle=True)

        if self.reads_when_idle:
            self._sessions.idle_reading.expect(read)

    async def generate(
        self, prompt: Prompt, settings: SettingsLike | None = None, **overrides: Unpack[StreamArguments]
    ) -> Completion:
        """Generate a whole text. Args, Raises: as `stream`, and what ends one. A cancellation ends the generation."""
        return await complete(self.stream(prompt, settings, **overrides))

    @overload
    def generate_many(
        self,
        prompts: ManyPrompts,
        settings: SettingsLike | None = None,
        *,
        max_concurrent: int = 8,
        on_error: Literal["raise"] = "raise",
        **overrides: Unpack[StreamArguments],
    ) -> Completions[Completion]: ...

    @overload
    def generate_many(
        self,
        prompts: ManyPrompts,
        settings: SettingsLike | None = None,
        *,
        max_concurrent: int = 8,
        on_error: OnError,
        **overrides: Unpack[StreamArguments],
    ) -> Completions[Completion | Exception]: ...

    def generate_many(
        self,
        prompts: ManyPrompts,
        settings: SettingsLike | None = None,
        *,
        max_concurrent: int = 8,
        on_error: OnError = "raise",
        **overrides: Unpack[StreamArguments],
    ) -> Completions[Any]:
        """Generate a whole text for each of many prompts: the text that the prompt would have alone.

        The exception is a logits processor that keeps a state and cannot save it: all generations share that state.

        Args:
            prompts: each as for `stream`, or a pair (prompt, its own settings and tools by name); may be empty. An
                async iterable may have any number: a prompt is taken from it when its generation can begin.
            settings, overrides: as for `stream`; for every prompt, the seed included. A prompt's own replace them.
            max_concurrent: generations at a time, >= 1; they begin in the order of the prompts.
            on_error: "return" gives the error of a generation in the place of its completion, and goes on; "raise"
                (default) ends all of them with it.

        Returns: an awaitable of all completions in the order of the prompts, and an async iterator over completions as
            they finish; see `Completions`, also for failure and cancellation.

        Raises: before any model work, as `stream`, and:
            PromptError, SettingsError: of one of the prompts; the message says at which index. One from an async
                iterable is checked when it is taken, and with "return" its error is given.
            SettingsError: `max_concurrent` or `on_error` is out of its range.
        """
        self.check_open()
        check = self._validation.of_many(settings, dict(overrides))
        check_arguments(max_concurrent, on_error)
        start_soon, run_soon, begin = self._nursery.start_soon, self._sessions.run_soon, self._sessions.begin
        return Completions(prompts, check, begin, max_concurrent, on_error, start_soon=start_soon, run_soon=run_soon)

    def encode(self, prompt: Prompt, /, **switches: Any) -> tuple[int, ...]:
        """The token ids of a prompt, such as `stream` takes; `switches` are further variables of the chat template.

        May be called in any thread, by one at a time: in trio's, a long text would stop everything for a while.

        Raises: PromptError: the prompt is empty, not encodable, or so long that it is sure to fill the context.
        """
        return self._validation.encode(prompt, **switches)

    @property
    def defaults(self) -> dict[str, Any]:
        """The settings of streams that do not set them: those of `open`, and `model_defaults`."""
        return self._validation.keywords({})

    def check_settings(self, settings: Mapping[str, Any]) -> Settings:
        """The settings of one stream, checked and completed by the defaults, in any thread. Raises: as `stream`."""
        self.check_open()
        return self._validation.checked(settings)

    # --- conversations and saved sessions ---------------------------------------------------------

    def conversation(
        self,
        system: str | None = None,
        settings: SettingsLike | None = None,
        *,
        thinking: bool | None = None,
        tools: Sequence[Callable[..., Any]] = (),
        **overrides: Unpack[SettingsArguments],
    ) -> Conversation:
        """Begin a conversation; nothing is generated before its first turn.

        Args:
            system: the system message, or None; without a chat template, the beginning of the text.
            settings, overrides: of every turn, as for `stream`; `reuse_prefix` is set.
            thinking: whether the model reasons first, where it has such a switch; None leaves it to the chat template.
            tools: functions that the model may call; see `Conversation.call_tools`.

        Returns: see `Conversation`.

        Raises: before any model work:
            SettingsError: a setting or a function is invalid, or the chat template has no switch for thinking.
            PromptError: there is no tokenizer, its chat template takes no messages, or the model has no calls.
        """
        return self._conversation(system, thinking, turn_settings(settings, overrides), Functions(tools))

    async def load(
        self,
        path: SessionFile,
        *,
        any_draft: bool = False,
        tools: Sequence[Callable[..., Any]] = (),
        **overrides: Unpack[SettingsArguments],
    ) -> Conversation:
        """Resume a conversation from a file of `Conversation.save`; its text is as if it had never been saved.

        The target must be the model that it was saved with, by its fingerprint (see `actors.persistence.fingerprint`);
        the tokenizer's vocabulary and `open`'s options for caches must be the same, too. Cached tokens from the file
        join the prefix cache, within `prefix_cache_bytes`; what finds no room is read again.

        Nothing in a file is ever executed, and nothing of it is used before a checksum over the whole file holds.

        Args:
            path: of the file; or a binary file object that can seek, such as `io.BytesIO`, which is read in another
                thread from its position to its end.
            any_draft: whether the drafter may differ from the one that the session was saved with. A draft model then
                reads the text again, a trained drafter only what comes from now on, as if the file had no cache of a
                drafter; under the match rule, the text to come is the same.
            tools: as for `conversation`. The file has no functions: without the ones that it was saved with, the model
                is told of none, and the text is read again.
            **overrides: settings by name; each replaces the saved one. If there were `logits_processors` or a
                `sampler`, they must be given again, or [] or None to continue without.

        Raises: and then nothing has changed:
            SessionFileError: the file cannot be read (the system's error is the cause), is no saved session, is of a
                newer version, is damaged, or was saved with another model, vocabulary or cache.
            SettingsError: a setting is unknown or out of its range, a function is invalid, or `logits_processors` must
                be given again.
            PromptError: there are functions, and the model has no calls.
            RuntimeClosedError, RuntimeBrokenError: the runtime is closed, or its target has failed.

        Cancellation: waits for the job that is running; there is no conversation then.
        """
        with self._sessions.while_open():
            models = self._models()
            session = await models.read(path, any_draft=any_draft)
            keywords = saved_session.settings_of(session, path, overrides)
            begins = [message["content"] for message in session.messages[:1] if message["role"] == "system"]
            past = session.messages[len(begins) :]
            system = begins[0] if begins else None
            conversation = self._conversation(system, session.thinking, keywords, Functions(tools), past)
            await models.fill(path, session, self._validation.is_drafted(settings_from(keywords)))
            self._sessions.make_room()
        return conversation

    def _conversation(
        self,
        system: str | None,
        thinking: bool | None,
        settings: Mapping[str, Any],
        tools: Functions,
        past: Sequence[TurnMessage] = (),  # without the system message
    ) -> Conversation:
        keywords = {**self._validation.keywords({}), "reuse_prefix": True, **settings}
        conversation = Conversation(
            self.stream,
            self.expect,
            self._save,
            self._tokenizer,
            system=system,
            thinking=thinking,
            settings=keywords,
            past=past,
            tools=tools,
        )
        check_vocabulary_size(settings_from(keywords), self._target.model.vocab_size)
        return conversation

    async def _save(self, *arguments: Any) -> int:
        with self._sessions.while_open():
            await self._sessions.end_idle_reading()
            return await self._models().save(*arguments)

    def _models(self) -> SessionSaver:
        # A drafter that has failed for good cannot be asked for anything. A draft model of another vocabulary reads the
        # text again.
        draft = self._draft
        if not (isinstance(draft, DraftActor) and draft.is_alive and isinstance(draft.model, SavableModel)):
            draft = None
        return SessionSaver(self._target, draft, self._tokenizer)

    # --- the drafter ------------------------------------------------------------------------------

    async def attach_draft(self, draft: ModelSource = MISSING, **unknown: Never) -> None:
        """Load a draft model, given as for `open`, into the open runtime; streams that begin afterwards are drafted.

        Raises: and then the runtime is as it was:
            DrafterAttachedError: the runtime has a drafter, or is loading one.
            SettingsError, ModelError, VocabularyMismatchError: as `open`.
            RuntimeClosedError, RuntimeBrokenError: the runtime is closed, or its target has failed; also meanwhile.

        Cancellation: waits for the load; the runtime is as it was.
        """
        with self._sessions.while_open():
            check_unknown(unknown, ("draft",), positional=(), function="attach_draft")
            await self._drafter.attach(draft)
            self._sessions.models_have_changed()

    async def detach_draft(self) -> None:
        """Release the draft model, its memory and its thread; does nothing without one.

        A draft model that hangs is not waited for: its thread is left behind later, with a warning. Streams that are
        under way continue undrafted, with the text that they would have had; above temperature 0 without a seed, with
        another sample of the same distribution.

        Cancellation: the drafter is detached in any case, after the draft step that is running; only the waiting ends.
        """
        try:
            await self._drafter.detach()
        finally:
            self._sessions.models_have_changed()

    # --- the end ----------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Close the runtime: end every stream, and take no others. Closing twice is closing once.

        After `nursery.start(runtime.keep_open, …)`, this returns once the models are released and the threads are
        joined, after at most one forward pass a model. Inside `async with runtime.open(…)` it returns at once; leaving
        the block releases them.

        Cancellation: the runtime is closed in any case; only the waiting ends.
        """
        self._sessions.close(RuntimeClosedError(CLOSED))
        self._is_left.set()
        if self._is_released is None:
            await trio.lowlevel.checkpoint()
        else:
            await self._is_released.wait()

    # --- what it tells of itself --------------------------------------------------------------------

    def __repr__(self) -> str:
        state = "open" if self._sessions.is_open else "closed"
        return f"<outrider Runtime, {state}: {self.num_streams} streams, {self.num_waiting} waiting>"

    def check_open(self) -> None:
        """Raises: RuntimeClosedError, RuntimeBrokenError: the runtime is closed, or its target has failed."""
        self._sessions.check_open()

    def health(self) -> Health:
        """Whether the models are alive; asks nothing of them, so that a server can call it at any time."""
        is_open, draft = self._sessions.is_open, self._draft
        return Health(is_open and self._target.is_alive, None if draft is None else is_open and draft.is_alive)

    async def wait_broken(self) -> RuntimeBrokenError:
        """Wait until the target has failed and every stream has its error, which is returned. Closing the runtime does
        not end the waiting.
        """
        await self._sessions.has_failed.wait()
        assert self._sessions.failure is not None
        return self._sessions.failure

    def statistics(self) -> Statistics:
        """Counts over all streams so far, and how busy the models have been; a frozen snapshot. `generation_tps` is
        over the runtime's whole life.
        """
        elapsed_s, counts = self._clock() - self._began, self._sessions.counts()
        counts.target_seconds, counts.draft_seconds = self.busy_seconds
        return counts.snapshot(
            elapsed=elapsed_s,
            generation_seconds=elapsed_s,
            peak_memory=mx.get_peak_memory(),
            estimates=self.estimates,
            lookahead=0 if self._draft is None else None,
        )

    @property
    def busy_seconds(self) -> tuple[float, float]:
        """Seconds that the target and the drafter have been at work so far; neither ever decreases."""
        return self._target.worker.busy_seconds, self._drafter.busy_seconds

    @property
    def estimates(self) -> Estimates:
        """What the models' passes have been measured to cost, and what speculating gains."""
        return self._prices.estimates()

    @property
    def max_streams(self) -> int | None:
        """Maximum number of concurrent streams; None for no bound."""
        return self._sessions.max_streams

    @property
    def num_streams(self) -> int:
        """Streams that are under way: begun, and neither read to their end nor closed."""
        return self._sessions.num_streams

    @property
    def num_waiting(self) -> int:
        """Streams that wait for admission, because `max_streams` are at work, or memory is short."""
        return self._sessions.num_waiting

    @property
    def tokenizer(self) -> TokenizerWrapper | None:
        """The target's tokenizer, as mlx-lm wraps it, of which the runtime uses a copy; None if it has none."""
        return self._shared_tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the target knows; each id of a prompt is in [0, `vocab_size`)."""
        return self._target.model.vocab_size

    @property
    def context_length(self) -> int | None:
        """Most tokens of a text, its prompt included; None where the target has no bound."""
        return self._target.model.context_length

    @property
    def context_in_memory(self) -> int | None:
        """Most tokens of a text, its prompt included, for which the memory limit and the context have room, if no other
        stream runs; None without a bound.
        """
        bounds = [bound for bound in (self.context_length, self._sessions.memory.longest_text) if bound is not None]
        return min(bounds, default=None)

    @property
    def memory(self) -> Memory:
        """What the models take, what streams have reserved for their caches, and the limit."""
        budget = self._sessions.memory
        limit = None if math.isinf(budget.limit) else int(budget.limit)
        return Memory(limit, budget.model_bytes, budget.reserved_bytes)

    @property
    def _draft(self) -> DrafterActor | None:
        return self._drafter.actor


async def _scored_tokens(session: Session, tokenizer: TokenizerWrapper | None) -> tuple[ScoredToken, ...]:
    """The scores of a session, with texts. Other tasks take turns with it: a long text has thousands of tokens."""
    opened = session.opened
    text = Detokenizer(tokenizer, opened.prompt[: len(opened.prompt) - opened.num_scored])
    tokens: list[ScoredToken] = []
    num_decoded = _DECODED_AT_ONCE
    for score in session.scores:
        num_decoded += 1 + len(score.top)
        if num_decoded > _DECODED_AT_ONCE:
            await trio.lowlevel.checkpoint()
            num_decoded = 1 + len(score.top)
        top = tuple(TopLogprob(id, text.alone(id), logprob) for id, logprob in score.top)
        tokens.append(ScoredToken(score.id, text.add(score.id), score.logprob, score.is_greedy, score.rank, top))
    last = tokens[-1]
    return (*tokens[:-1], attrs.evolve(last, text=last.text + text.finish()))
