"""Scripted models, and the runtime over them in simulated time.

The next token of a scripted model is a function of the tokens before it. Scripts for greedy texts hash the whole
history, so that every token matters. Scripts for sampling tests depend on the last token only, so that probabilities
can be counted. A sequence of a scripted model stores the tokens that it was fed and nothing else: a cache that was
rewound too little, too far or not at all changes the text. Requests that no real cache could satisfy (an impossible
rewind, more tokens than the context holds) are recorded as misuses; `simulated` asserts on exit that there are none.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import AsyncIterator, Callable, Container, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, Literal, TypeVar

import attrs
import mlx.core as mx
import scripted_sequence
import trio
import trio.testing
from outcome import Error
from simulated_worker import SimulatedWorker
from sweeps import sweep

from actors.actor import Actor, ActorSession
from actors.drafters.draft_actor import DraftActor
from actors.model import Feed, FeedsEach, RewindMode, feed_each
from actors.prefix_cache import CacheHit
from actors.workers.worker import Job, JobError, Steps
from protocol.cache_size import CacheSize
from protocol.errors import RewindError
from protocol.messages import Message
from protocol.prefill_chunks import FIXED_CHUNK_TOKENS
from protocol.trace import Event, Events, Instant, Span
from runtime import Token
from runtime.engine.opening import running
from runtime.engine.runtime import Runtime

T = TypeVar("T")

VOCAB_SIZE = 64

Script = Callable[[Sequence[int]], Sequence[float]]
"""A function from a token history to the logits of the next token."""

Undo = Callable[[int, int], bool]
"""A function (length, num_tokens): whether a cache of that length could take `num_tokens` more and drop them again."""


# --- scripts --------------------------------------------------------------------------------------


def digest(purpose: str, history: Sequence[int]) -> int:
    """A number in [0, 2**64) that depends on every token of a history."""
    data = bytes(history)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=purpose.encode()).digest(), "big")


def fraction(purpose: str, history: Sequence[int]) -> float:
    """A number in [0, 1) that depends on every token of a history."""
    return digest(purpose, history) / 2**64


def next_token(history: Sequence[int]) -> int:
    """The true token after a history."""
    return digest("truth", history) % VOCAB_SIZE


def continuation(prompt: Sequence[int], length: int, stop_tokens: Iterable[int] = ()) -> list[int]:
    """The true text after a prompt: `length` tokens, or up to and including the first stop token."""
    text = list(prompt)
    while len(text) < len(prompt) + length:
        text.append(next_token(text))
        if text[-1] in stop_tokens:
            break
    return text[len(prompt) :]


def plain_text(script: Script, prompt: Sequence[int], length: int) -> list[int]:
    """The greedy text of a script after a prompt."""
    text = list(prompt)
    for _ in range(length):
        logits = script(text)
        text.append(max(range(VOCAB_SIZE), key=lambda token: logits[token]))
    return text[len(prompt) :]


def prompt_with_distinct_continuation(length: int) -> list[int]:
    """A prompt whose first `length` true tokens all differ, so that each of them can be the stop token."""
    prompts = ([3, first, second] for first in range(VOCAB_SIZE) for second in range(VOCAB_SIZE))
    return next(prompt for prompt in prompts if len(set(continuation(prompt, length))) == length)


@cache
def spike(token: int) -> tuple[float, ...]:
    """Logits with one high entry, at `token`; the other tokens are very unlikely."""
    return tuple(10.0 if i == token else 0.0 for i in range(VOCAB_SIZE))


def truthful(history: Sequence[int]) -> Sequence[float]:
    """The script of a model that always says the true token."""
    return spike(next_token(history))


def agreeing(agreement: float) -> Script:
    """The script of a model that is right at the share `agreement` of all positions, and wrong at the others."""

    def logits(history: Sequence[int]) -> Sequence[float]:
        token = next_token(history)
        if fraction("agree", history) >= agreement:
            token = (token + 1 + digest("wrong", history) % (VOCAB_SIZE - 1)) % VOCAB_SIZE
        return spike(token)

    return logits


def right_where(pattern: Sequence[bool]) -> Script:
    """The script of a model that is right at the positions that a repeated pattern marks."""

    def logits(history: Sequence[int]) -> Sequence[float]:
        return spike((next_token(history) + (not pattern[len(history) % len(pattern)])) % VOCAB_SIZE)

    return logits


def hashed(purpose: str, width: float, near: Script | None = None) -> Script:
    """A script of arbitrary logits in [0, width] for each history, added to the logits of `near` if that is given."""

    def logits(history: Sequence[int]) -> Sequence[float]:
        draws = random.Random(digest(purpose, history))
        base = near(history) if near is not None else (0.0,) * VOCAB_SIZE
        return [b + width * draws.random() for b in base]

    return logits


def markov(table: Sequence[Sequence[float]]) -> Script:
    """The script of a model whose probabilities depend on the last token only: row i of the table after token i."""
    rows = [[math.log(p) if p > 0 else -math.inf for p in row] for row in table]
    return lambda history: rows[history[-1]]


# --- what a cache can undo ------------------------------------------------------------------------


def always(_length: int, _num_tokens: int) -> bool:
    return True


def never(_length: int, _num_tokens: int) -> bool:
    return False


def within(window: int) -> Undo:
    """The behaviour of a rotating cache: tokens can be dropped until the window is full."""
    return lambda length, num_tokens: length + num_tokens < window


CACHES: dict[str, dict[str, Any]] = {
    "can be trimmed": {"undo": always},
    "recurrent": {"undo": never, "keeps_states": True},
    "of a window": {"undo": within(24), "keeps_states": True},
    "of a window, without states": {"undo": within(24)},
    "of nothing known": {"undo": never},
}
"""Options of a scripted model, by what its caches are."""
every_cache = sweep("cache", CACHES.values())


def pair_with(cache: dict[str, Any], agreement: float = 0.7) -> tuple[ScriptedModel, ScriptedModel]:
    """A target and a drafter, both with such caches."""
    return ScriptedModel(truthful, **cache), ScriptedModel(agreeing(agreement), **cache)


# --- scripted models ------------------------------------------------------------------------------


class ScriptedFailure(Exception):
    """The error of a scripted model that was told to fail."""


class ScriptedSequence(scripted_sequence.ScriptedSequence):
    """A sequence of a scripted model, with the limits of a cache, and a record of what was asked of it."""

    reads_with_others = True

    def __init__(self, model: ScriptedModel) -> None:
        super().__init__()
        self.model = model
        self.states: list[int] = []  # lengths at which a checkpoint exists
        self.prefix_checkpoints: list[int] = []  # lengths at which a prefix checkpoint exists
        self.resumed: list[int] = []  # lengths from which it continued with another text
        self.rewinds: list[tuple[int, int]] = []  # (length before, length after)
        self.fed: list[tuple[int, tuple[int, ...]]] = []  # (length before, tokens)
        self.is_closed = False
        self.is_lost = False  # whether nothing was fed since `forget`

    def row(self, length: int) -> Sequence[float]:
        return self.model.script(self.tokens[:length])

    def feed(self, tokens: tuple[int, ...], num_logits: int) -> mx.array | None:
        if not tokens or not 0 <= num_logits <= len(tokens):
            self._misuse(f"fed {tokens} for {num_logits} rows of logits")
        return super().feed(tokens, num_logits)

    def feed_lazy(self, token: mx.array) -> mx.array:
        if token.shape != (1,):
            self._misuse(f"fed lazily an array of shape {token.shape}")
        return super().feed_lazy(token)

    def take(self, tokens: tuple[int, ...]) -> None:
        self._check_open()
        self.model.fail_if_told("feed")
        bound = self.model.context_length
        if bound is not None and len(self.tokens) + len(tokens) > bound:
            self._misuse(f"fed {len(tokens)} tokens after {len(self.tokens)}, the context ends at {bound}")
        self.is_lost = False
        self.fed.append((len(self.tokens), tokens))
        super().take(tokens)

    def cut(self, length: int) -> None:
        before = len(self.tokens)
        super().cut(length)
        self.prefix_checkpoints = [each for each in self.prefix_checkpoints if each <= length]
        if len(self.tokens) < before:
            self.rewinds.append((before, len(self.tokens)))

    def prepare(self, num_tokens: int, settled: int) -> RewindMode:
        self._check_open()
        if self.model.undo(len(self.tokens), num_tokens):
            return RewindMode.TRIM
        if not self.model.keeps_states:
            return RewindMode.SINGLE
        if len(self.tokens) not in self.states:
            self.states.append(len(self.tokens))
        while len(self.states) > 1 and self.states[1] <= settled:
            del self.states[0]
        return RewindMode.CHECKPOINT

    def rewind(self, length: int) -> int:
        self._check_open()
        before = remaining = len(self.tokens)
        if length < before and not self.model.undo(before, 0) and self.states:
            # Go to the last checkpoint at or below `length`. Without one, go to the first checkpoint above: the rest
            # may be droppable from there.
            below = [state for state in self.states if state <= length]
            remaining = (below or self.states[:1])[-1]
        if length > before or (length < remaining and not self.model.undo(remaining, 0)):
            self._misuse(f"asked to rewind from {before} to {length} tokens")
            raise RewindError(f"cannot rewind from {before} to {length} tokens")
        self.cut(min(remaining, length))
        self.states = [state for state in self.states if state <= len(self.tokens)]
        return len(self.tokens)

    def forget(self) -> None:
        self.tokens, self.states, self.prefix_checkpoints = [], [], []
        self.is_lost = True

    def check(self, length: int) -> None:
        self._check_open()
        if length != len(self.tokens):
            self._misuse(f"should hold {length} tokens, holds {len(self.tokens)}")
        super().check(length)
        self.model.fail_if_told("check")

    def close(self) -> None:
        self._check_open()
        self.is_closed = True
        self.model.fail_if_told("close")

    @property
    def num_bytes(self) -> int:
        return self.model.bytes_per_token * len(self.tokens)

    @property
    def needs_prefix_checkpoints(self) -> bool:
        self._check_open()
        # Ask for a length far beyond the present one.
        return not self.model.undo(len(self.tokens), 10**6) and self.model.keeps_states

    def add_prefix_checkpoint(self) -> None:
        self._check_open()
        self.prefix_checkpoints.append(len(self.tokens))

    def reusable_length(self, num_common: int, num_read: int, pass_tokens: int = FIXED_CHUNK_TOKENS) -> int:
        self._check_open()
        if num_common > num_read:
            self._misuse(f"asked for the reusable length at {num_common} of {num_read} tokens")
        if len(self.tokens) <= num_common or self.model.undo(len(self.tokens), 0):
            return super().reusable_length(num_common, num_read)
        return max((state for state in [*self.states, *self.prefix_checkpoints] if state <= num_common), default=0)

    def reuse(self, length: int) -> None:
        if self.reusable_length(length, length) != length:
            self._misuse(f"asked to reuse {length} of {len(self.tokens)} tokens")
        self.cut(length)
        self.states.clear()
        self.resumed.append(length)
        self.model.fail_if_told("reuse")

    def copy(self, length: int) -> ScriptedSequence:
        if self.reusable_length(length, length) != length:
            self._misuse(f"asked to copy {length} of {len(self.tokens)} tokens")
        self.model.fail_if_told("copy")
        other = super().copy(length)
        other.fed, other.rewinds, other.resumed, other.states = [], [], [length], []
        other.prefix_checkpoints = [each for each in self.prefix_checkpoints if each <= length]
        self.model.sequences.append(other)
        return other

    def _check_open(self) -> None:
        if self.is_closed:
            self._misuse("used after it was closed")

    def _misuse(self, what: str) -> None:
        self.model.misuses.append(what)


class ScriptedModel(FeedsEach):
    """A model that follows a script.

    Attributes:
        sequences: all that were ever opened.
        misuses: requests to them that no real cache could have satisfied.
    """

    def __init__(
        self,
        script: Script,
        *,
        vocab_size: int = VOCAB_SIZE,
        context_length: int | None = None,
        undo: Undo = always,
        keeps_states: bool = False,
        bytes_per_token: int = 1,
        fails: Mapping[str, Container[int]] | None = None,
    ) -> None:
        """Create a model.

        Args:
            undo: which tokens a sequence can drop without a checkpoint.
            keeps_states: whether a sequence that cannot drop tokens can return to a checkpoint.
            bytes_per_token: the size that sequences report, and that is reserved for them.
            fails: the calls that raise, counted from 1 over all sequences. A failing check or reuse raises
                `RewindError`, as a real model's cache does when its length is wrong.
        """
        self.script = script
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.undo = undo
        self.keeps_states = keeps_states
        self.sequences: list[ScriptedSequence] = []
        self.misuses: list[str] = []
        self.bytes_per_token = bytes_per_token
        self.cache_size = CacheSize(slot_bytes=bytes_per_token)
        self.num_calls = {"open": 0, "feed": 0, "check": 0, "close": 0, "reuse": 0, "copy": 0}
        self._fails = dict(fails or {})

    # What its sequences are.
    kind: type[ScriptedSequence] = ScriptedSequence

    def open_sequence(self, *, alongside_model: bool) -> ScriptedSequence:
        self.fail_if_told("open")
        self.sequences.append(self.kind(self))
        return self.sequences[-1]

    def fail_if_told(self, call: str) -> None:
        self.num_calls[call] += 1
        if self.num_calls[call] in self._fails.get(call, ()):
            kind = RewindError if call in ("check", "reuse") else ScriptedFailure
            raise kind(f"{call} {self.num_calls[call]} failed")


class RefusingModel(ScriptedModel):
    """A model that has no memory for the passes for which `refuses` is true; notes of how many texts these were."""

    def __init__(self, script: Script, refuses: Callable[[Sequence[Feed]], bool], **options: Any) -> None:
        super().__init__(script, **options)
        self.refuses = refuses
        self.failures: list[int] = []

    def feed_together(self, feeds: Sequence[Feed]) -> list[mx.array]:
        if self.refuses(feeds):
            self.failures.append(len(feeds))
            raise MemoryError("no room for this one")
        return feed_each(feeds)

    def abandon_shared(self) -> None:
        """Empty all open sequences, also those that had no part in the pass, as the rows of a batch."""
        if self.failures[-1] > 1:  # a text alone is no row of a batch
            for sequence in self.sequences:
                if not sequence.is_closed:
                    sequence.forget()


# --- the runtime in simulated time ----------------------------------------------------------------

Price = Callable[[Job[Any]], float]

# Powers of two, so that sums are exact and times can be compared with ==.
PRICES: Mapping[str, float] = {
    "open": 0.0,
    "probe": 8.0,
    "prefill": 4.0,
    "draft": 0.5,
    "verify": 8.0,
    "decode": 8.0,
    "close": 0.0,
}


def priced(**changes: float) -> Price:
    """The price of each kind of job: from `PRICES`, unless given here."""
    prices = {**PRICES, **changes}
    return lambda job: prices[job.kind]


# Simulated seconds; longer than any test needs.
TOO_LONG = 2e6


@attrs.define
class HandedJob:
    """A job, and when it was handed to a worker."""

    job: Job[Any]
    at: float
    done_at: float | None = None  # None if it was taken back


class WatchedSessions(dict[int, ActorSession]):
    """An actor's session states by session id, with a record of past ones and of the messages that each received."""

    def __init__(self) -> None:
        super().__init__()
        self.all_states: dict[int, ActorSession] = {}
        self.received: dict[int, list[Message]] = {}

    def __setitem__(self, session: int, session_state: ActorSession) -> None:
        self.received[session] = []
        self.all_states[session] = session_state
        super().__setitem__(session, session_state)

    def watch(self, actor: Actor[Any]) -> None:
        """Have an actor without sessions keep its sessions here."""
        actor._sessions, receive = self, actor._receive

        def watched(session: ActorSession, message: Message) -> None:
            self.received[session.id].append(message)
            receive(session, message)

        actor._receive = watched


def sessions_of(job: Job[Any] | Steps[Any]) -> list[int | None]:
    """The sessions that a job or some steps are for."""
    return [share.session for share in job.shares] or [job.session]


class ComparingWorker(SimulatedWorker):
    """A simulated worker that compares, at each job, the session state's cached tokens with the scripted sequence.

    Attributes:
        handed: every job that was handed in and every step that was done, in order.
        runs: the steps that were done in a row, one list per `run_steps` call.
        max_ahead: most tokens that a sequence has held beyond the committed text when a job was handed in.
    """

    def __init__(self, actor: Any, price: Price, on_event: Callable[[Event], None]) -> None:
        super().__init__(actor, price, on_event)
        self.handed: list[HandedJob] = []
        self.runs: list[list[Job[Any]]] = []
        self.num_comparisons = 0
        self.max_ahead = 0
        self.sessions = WatchedSessions()
        self._is_target = actor == "target"
        self._sequences: dict[int | None, ScriptedSequence] = {}

    async def run(self, job: Job[T]) -> T:
        checked = [self._check_session(session) for session in sessions_of(job)]
        handed = HandedJob(job, self.clock())
        self.handed.append(handed)
        try:
            result = await super().run(job)
        except JobError:
            self._forget(job)
            raise
        handed.done_at = self.clock()
        opened = result.sequence if isinstance(result, CacheHit) else result
        if isinstance(opened, ScriptedSequence):
            self._sequences[job.session] = opened
            # It may come from the prefix cache; it now belongs to this session only.
            assert list(self._sequences.values()).count(opened) == 1, "two sessions share a sequence"
        if job.kind == "close":
            self._sequences.pop(job.session, None)
        for sequence, num_committed in checked:
            if sequence is not None:
                self.max_ahead = max(self.max_ahead, len(sequence.tokens) - num_committed)
        return result

    async def run_steps(self, steps: Steps[Any], *, meanwhile: Callable[[], None] | None = None) -> None:
        checked = {session: self._check_session(session) for session in sessions_of(steps)}
        at, on_step = self.clock(), steps.on_step
        done: list[Job[Any]] = []

        def watched(job: Job[Any], result: Any, goes_on: bool) -> None:
            nonlocal at
            done.append(job)
            self.handed.append(HandedJob(job, at, self.clock()))
            if isinstance(result, list):
                if self._is_target:
                    self._forget_failed(zip(sessions_of(job), (each.error for each in result), strict=True))
                else:
                    self._forget_failed((each.part.session, each.outcome) for each in result)
            on_step(job, result, goes_on)
            for session in sessions_of(job):
                sequence, num_committed = checked.get(session, (None, 0))
                if sequence is not None:
                    self.max_ahead = max(self.max_ahead, len(sequence.tokens) - num_committed)
                checked[session] = self._check_session(session)
            at = self.clock()

        steps.on_step = watched
        self.runs.append(done)
        try:
            await super().run_steps(steps, meanwhile=meanwhile)
        except JobError:
            self._forget(steps)
            raise

    def _forget_failed(self, outcomes: Iterable[tuple[int | None, Any]]) -> None:
        """After a session's part in a shared job failed, the contents of its sequence are undefined."""
        for session, result in outcomes:
            if isinstance(result, Error | Exception):
                self._sequences.pop(session, None)

    def _forget(self, job: Job[Any] | Steps[Any]) -> None:
        """After a failure in the middle of a job, the contents of the sequence are undefined."""
        for session in sessions_of(job):
            self._sequences.pop(session, None)

    def _check_session(self, session: int | None) -> tuple[ScriptedSequence | None, int]:
        """Compare a session's sequence with its state.

        Returns: the sequence, or None if the session has none; and the length of the committed text.
        """
        sequence = self._sequences.get(session)
        if sequence is None or sequence.is_lost:
            return None, 0
        session_state = self.sessions[session]
        self._compare(session_state, sequence)
        return sequence, len(session_state.state.committed)

    def _compare(self, session_state: ActorSession, sequence: ScriptedSequence) -> None:
        self.num_comparisons += 1
        # Not the copy that others have of the tokens: in long texts it would take longer than the comparison.
        cached_tokens, committed = session_state.cached_tokens._tokens, session_state.state.committed
        # A trained drafter reads some tokens again once hidden states have come, and its actor has not noticed yet.
        assert cached_tokens == sequence.tokens or cached_tokens == sequence.tokens[: sequence.length], (
            f"the session state says {cached_tokens}, the sequence holds {sequence.tokens}"
        )
        if self._is_target:
            both = min(len(cached_tokens), len(committed))
            assert cached_tokens[:both] == committed[:both], f"the target holds {cached_tokens}, not {committed}"


class LaggingWorker(ComparingWorker):
    """A worker that continues before trio's thread has heard of a step, as a real worker thread does.

    State and sequence are therefore compared only where a job is handed in.
    """

    def __init__(
        self, actor: Any, price: Price, on_event: Callable[[Event], None], report_delay: Callable[[], float]
    ) -> None:
        """`report_delay` gives, for each step, the seconds until trio's thread hears of it; steps arrive in order."""
        super().__init__(actor, price, on_event)
        self._report_delay = report_delay

    async def run_steps(self, steps: Steps[Any], *, meanwhile: Callable[[], None] | None = None) -> None:
        if meanwhile is not None:
            meanwhile()
        for session in sessions_of(steps):
            self._check_session(session)
        error: JobError | None = None
        send, receive = trio.open_memory_channel[Any](math.inf)

        async def hear() -> None:
            with trio.CancelScope(shield=True):
                async for at, *heard in receive:
                    await trio.sleep_until(at)
                    steps.hand_over(*heard).unwrap()

        done: list[Job[Any]] = []
        self.runs.append(done)

        def report(job: Job[Any], *heard: Any) -> None:
            done.append(job)
            send.send_nowait((self.clock() + self._report_delay(), job, *heard))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hear)
            with send:
                try:
                    await self._run_in_row(steps, report)
                except JobError as raised:
                    error = raised
                    self._forget(steps)
        if error is not None:
            raise error


@attrs.define
class Simulation:
    """A runtime over scripted models, and a record of everything that happened in it."""

    runtime: Runtime
    target: ScriptedModel
    draft: ScriptedModel | None
    target_worker: ComparingWorker
    draft_worker: ComparingWorker | None
    events: list[Event] = attrs.Factory(list)

    def spans(self, actor: str, *kinds: str, session: int | None = None) -> list[Span]:
        """Finished jobs of an actor; of all kinds and all sessions unless given."""
        return [
            event
            for event in self.events
            if isinstance(event, Span)
            and event.actor == actor
            and (not kinds or event.kind in kinds)
            and session in (None, event.session)
        ]

    def rounds(self) -> list[Span]:
        """The target's passes that have given tokens."""
        return [span for span in self.spans("target") if span.gives_tokens]

    def instants(self, kind: str, actor: str | None = None) -> list[Instant]:
        """Decisions of one kind; of both actors unless one is given."""
        return [e for e in self.events if isinstance(e, Instant) and e.kind == kind and actor in (None, e.actor)]

    def assert_all_closed(self) -> None:
        for model in (self.target, self.draft):
            if model is not None:
                assert model.misuses == []
                assert [sequence for sequence in model.sequences if not sequence.is_closed] == []


@asynccontextmanager
async def simulated(
    target: ScriptedModel,
    draft: ScriptedModel | Literal["ngram"] | None = None,
    *,
    price: Price | None = None,
    draft_price: Price | None = None,
    listener: Callable[[Event], None] | None = None,
    schedule: int = 0,
    report_delay: Callable[[], float] | None = None,
    idle_reading: bool = False,
    **options: Any,
) -> AsyncIterator[Simulation]:
    """A runtime over scripted models in simulated time; needs an autojumping clock.

    Asserts on exit that no task is left, that no sequence is open, and that none was misused.

    Args:
        target, draft: the models; "ngram" for prompt lookup instead of a draft model.
        price: seconds that a job takes, on either worker.
        draft_price: the same on the draft worker, if that differs.
        schedule: seed of trio's random choice between tasks that are ready at the same time.
        report_delay: see `LaggingWorker`; None for no delay.
        idle_reading: see `runtime.open`; by default not even on a machine with other power than a battery's.
        options: others of `running`, such as `make_policy`, `tokenizer` and `max_batch`.
    """
    trio._core._run._r.seed(schedule)
    price = price or priced()
    num_tasks = trio.lowlevel.current_statistics().tasks_living
    events = Events()

    def worker_of(actor: str, price: Price) -> ComparingWorker:
        about = (actor, price, events)
        return ComparingWorker(*about) if report_delay is None else LaggingWorker(*about, report_delay)

    target_worker = worker_of("target", price)
    draft_model = draft if isinstance(draft, ScriptedModel) else None
    draft_worker = None if draft_model is None else worker_of("draft", draft_price or price)
    # Without a deadline, a runtime that hangs would leave the clock nothing to jump to, and hang the test.
    with trio.fail_after(TOO_LONG):
        async with running(
            (target, target_worker),
            draft if draft_model is None or draft_worker is None else (draft_model, draft_worker),
            events=events,
            idle_reading=idle_reading,
            **options,
        ) as runtime:
            simulation = Simulation(runtime, target, draft_model, target_worker, draft_worker)
            events.listen(simulation.events.append)
            if listener is not None:
                events.listen(listener)
            target_worker.sessions.watch(runtime._target)
            if isinstance(runtime._draft, DraftActor) and draft_worker is not None:
                draft_worker.sessions.watch(runtime._draft)
            yield simulation
    simulation.assert_all_closed()
    # Fewer if tasks that were already running have ended meanwhile.
    assert trio.lowlevel.current_statistics().tasks_living <= num_tasks


def ids(tokens: Iterable[Token]) -> list[int]:
    """The ids of tokens."""
    return [token.id for token in tokens]


async def collect(stream: Any) -> list[int]:
    """The ids of a whole stream."""
    return [token.id async for token in stream]


async def collect_all(streams: Sequence[Any]) -> list[list[int]]:
    """The ids of whole streams that are read at once."""
    texts: list[list[int]] = [[] for _ in streams]
    async with trio.open_nursery() as nursery:
        for text, stream in zip(texts, streams, strict=True):
            nursery.start_soon(read_into, text, stream)
    return texts


async def read_into(got: list[int], stream: Any, *, pause: float = 0.0) -> None:
    """Append the ids of a stream to a list, sleeping for `pause` seconds after each, until the stream ends."""
    async for token in stream:
        got.append(token.id)
        if pause:
            await trio.sleep(pause)


async def text_of(simulation: Simulation, prompt: Sequence[int], **settings: Any) -> list[int]:
    """The ids of a whole generated text."""
    return ids((await simulation.runtime.generate(prompt, **settings)).tokens)


async def texts_of(simulation: Simulation, prompts: Sequence[Any], **settings: Any) -> list[list[int]]:
    """The ids of whole texts that are generated beside each other."""
    return [ids(each.tokens) for each in await simulation.runtime.generate_many(prompts, **settings)]


def run(main: Callable[..., Any], *args: Any) -> Any:
    """Run an async function with a simulated clock of its own."""
    return trio.run(main, *args, clock=trio.testing.MockClock(autojump_threshold=0))
