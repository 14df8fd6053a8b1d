"""Outrider for asyncio: the same runtime, for programs on asyncio, uvloop, or anyio on top of either.

async with runtime.aio.open("path-or-hub-id/target", draft="path-or-hub-id/draft") as rt:
    async for token in rt.stream("def quicksort(items):", max_tokens=200):
        print(token.text, end="", flush=True)

Trio, and everything that works on it, runs in a thread of its own. Nothing here blocks the asyncio loop.
"""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, cast

import mlx.core as mx
import trio
from mlx_lm.tokenizer_utils import TokenizerWrapper

from actors.mlx_memory import peak_memory
from protocol.errors import ConversationBusyError, RuntimeClosedError, WrongEventLoopError
from protocol.reprs import shown
from protocol.settings import NGRAM
from protocol.statistics import Counts, Statistics
from runtime import conversation, engine, opening, streaming
from runtime.aio_many import Completions, MergedSource, TokenStreams
from runtime.aio_streaming import Commits, TokenStream
from runtime.conversation import Conversation as TrioConversation
from runtime.errand import Errand
from runtime.health import Health
from runtime.many import ManyPrompt, check_max_concurrent, is_list, with_settings
from runtime.relay import Relay, S
from runtime.session_file import SessionFile
from runtime.sources import Source, check_source
from runtime.streaming import Completion, complete
from runtime.text import Prompt
from runtime.trio_thread import TrioThread, asyncio_loop

__all__ = ["Completions", "Conversation", "Opening", "Runtime", "TokenStream", "TokenStreams", "open"]

T = TypeVar("T")
M = TypeVar("M")

_RUNTIME_CLOSED = "this runtime was closed; open another with runtime.aio.open()"


def open(target: Source, draft: Source | None = None, **options: Any) -> Opening:
    """`runtime.open` for asyncio: load the models, and keep them at work until the block is left.

    Args: as for `runtime.open`. A model that is given as `(model, tokenizer)` is evaluated first, where it was not yet,
        in the caller's thread, since it can be in no other. A trace function is called in another thread.

    Yields: a `Runtime`, to be used in this asyncio loop, in any of its tasks.

    Raises: as `runtime.open`, before the block is entered, and:
        WrongEventLoopError: there is no asyncio loop here, or trio is what runs.

    Cancellation: leaving the block ends every stream, waits for the forward passes that are running (at most one a
        model), and joins the threads, also while being cancelled. While loading, it waits for the load. The loop is not
        blocked meanwhile. Where the loop is closed with this still open, the threads end by themselves.
    """
    return Opening(target, draft, options)


class Opening:
    """An async context manager; see `open`."""

    def __init__(self, target: Source, draft: Source | None, options: dict[str, Any]) -> None:
        self._target = target
        self._draft = draft
        self._options = options

    def __repr__(self) -> str:
        return f"<outrider aio.open of {shown(self._target)}, draft {shown(self._draft)}>"

    async def __aenter__(self) -> Runtime:
        make = partial(opening.open, self._target, self._draft, **self._options)
        self._thread = TrioThread(make, "outrider-trio")
        for role, source in (("target", self._target), ("draft", self._draft)):
            checked = None if source is None or source == NGRAM else check_source(role, source)
            if isinstance(checked, tuple):
                mx.eval(checked[0])  # a lazy array can only be evaluated in the thread that made it
        return Runtime(self._thread, await self._thread.start())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is GeneratorExit:
            # A task that nobody runs any more cannot wait.
            self._thread.stop()
        else:
            await self._thread.end()


class Runtime:
    """Two models at work, for one asyncio loop; made by `runtime.aio.open`."""

    def __init__(self, thread: TrioThread[engine.Runtime], runtime: engine.Runtime) -> None:
        self._thread = thread
        self._runtime = runtime

    def __repr__(self) -> str:
        return repr(self._runtime)

    def stream(self, prompt: Prompt, **settings: Any) -> TokenStream:
        """Begin a generation.

        Args, Returns: as `runtime.Runtime.stream`.

        Raises: before any model work; as there, but that the prompt is looked at off the loop, since tokenising a long
            one takes time: a `PromptError` comes out of `async with`, `opened` or the first `__anext__`. And:
            WrongEventLoopError: this is not the loop that the runtime was opened in.
        """
        self._check(settings)
        return self._begin(partial(self._runtime.stream, _own(prompt), **settings))

    async def generate(self, prompt: Prompt, **settings: Any) -> Completion:
        """Generate a whole text.

        Args, Raises: as `stream`; what can happen to a running stream is raised here too.

        Cancellation: ends the generation; what was generated until then is lost.
        """
        return await complete(cast(Any, self.stream(prompt, **settings)))

    def generate_many(self, prompts: Iterable[ManyPrompt], *, max_concurrent: int = 8, **settings: Any) -> Completions:
        """Generate a whole text for each of many prompts.

        Args, Returns: as `runtime.Runtime.generate_many`, for asyncio.

        Raises: as `stream`; what is wrong with a prompt, or settings of its own, comes when the completions are
            waited for.
        """
        make = self._make_many(self._runtime.generate_many, prompts, max_concurrent, settings)
        return Completions(self._relay(lambda: MergedSource(make())), self._check_loop)

    def stream_many(self, prompts: Iterable[ManyPrompt], *, max_concurrent: int = 8, **settings: Any) -> TokenStreams:
        """Generate a text for each of many prompts, and give the tokens of all of them as they come.

        Args, Returns: as `runtime.Runtime.stream_many`, for asyncio.

        Raises: as `generate_many`.
        """
        make = self._make_many(self._runtime.stream_many, prompts, max_concurrent, settings)
        return TokenStreams(self._relay(lambda: MergedSource(make())), self._check_loop)

    def conversation(self, system: str | None = None, *, thinking: bool | None = None, **settings: Any) -> Conversation:
        """Begin a conversation; nothing is generated until something is said.

        Args, Returns: as `runtime.Runtime.conversation`, for asyncio.

        Raises: as `stream`; what the chat template does not take comes out of the first turn.
        """
        self._check(settings)
        make = partial(self._runtime.conversation, system, thinking=thinking, **settings)
        return Conversation(self, make)

    async def load(self, path: SessionFile, *, any_draft: bool = False, **settings: Any) -> Conversation:
        """A conversation from a file of `Conversation.save`, of either kind, to go on with where it was left.

        Args, Raises: as `runtime.Runtime.load`, and:
            WrongEventLoopError: this is not the loop that the runtime was opened in.

        Cancellation: waits for the job that is running; there is no conversation then.
        """
        made = await self._done_in_trio(partial(self._runtime.load, path, any_draft=any_draft, **settings))
        return Conversation(self, self._anew(made), made)

    async def load_stream(self, path: SessionFile, *, any_draft: bool = False, **settings: Any) -> TokenStream:
        """A stream from a file of `TokenStream.save`, of either kind, to go on behind the last token that was given.

        Args, Returns, Raises: as `runtime.Runtime.load_stream`, and:
            WrongEventLoopError: this is not the loop that the runtime was opened in.

        Cancellation: waits for the job that is running; there is no stream then.
        """
        made = await self._done_in_trio(partial(self._runtime.load_stream, path, any_draft=any_draft, **settings))
        stream = self._begin(lambda: made)
        await stream.opened()
        return stream

    def statistics(self) -> Statistics:
        """As `runtime.Runtime.statistics`. The models work on meanwhile: of a round that ends at this very moment, some
        figures may be in it and some not.
        """
        return self._runtime.statistics()

    def health(self) -> Health:
        """As `runtime.Runtime.health`."""
        return self._runtime.health()

    @property
    def tokenizer(self) -> TokenizerWrapper | None:
        """The target's tokenizer, as mlx-lm wraps it."""
        return self._runtime.tokenizer

    @property
    def num_streams(self) -> int:
        """Streams that are under way; one that was begun or ended just now may not be counted, or still be."""
        return self._runtime.num_streams

    @property
    def num_waiting(self) -> int:
        """Streams that wait for others to make room, because `max_streams` are at work; with the same reserve."""
        return self._runtime.num_waiting

    def _make_many(
        self, make: Callable[..., M], prompts: Iterable[ManyPrompt], max_concurrent: int, settings: dict[str, Any]
    ) -> Callable[[], M]:
        """What begins the generations of many prompts, in trio's thread."""
        self._check(settings)
        check_max_concurrent(max_concurrent)
        owned = [_own_of_many(prompt) for prompt in prompts] if is_list(prompts) else prompts
        return partial(make, owned, max_concurrent=max_concurrent, **settings)

    def _begin(self, open_stream: Callable[[], streaming.TokenStream]) -> TokenStream:
        """Relay what a stream gives that is opened in trio's thread."""
        return TokenStream(
            self._relay(lambda: Commits(open_stream())), self._check_loop, self._nothing_yet, self._done_in_trio
        )

    def _relay(self, make_source: Callable[[], S]) -> Relay[S, Any]:
        try:
            return Relay(self._thread, make_source)
        except trio.RunFinishedError:
            raise RuntimeClosedError(_RUNTIME_CLOSED) from None

    async def _done_in_trio(self, do: Callable[[], Awaitable[T]]) -> T:
        self._check_loop()
        self._runtime._check_open()
        try:
            errand = Errand(self._thread, self._runtime._check_open, do)
        except trio.RunFinishedError:
            raise RuntimeClosedError(_RUNTIME_CLOSED) from None
        return await errand.result()

    def _anew(self, made: TrioConversation) -> Callable[[], TrioConversation]:
        """Makes a conversation like one that there is, in which nothing was said yet."""
        system = made._system[0]["content"] if made._system else None
        return partial(self._runtime.conversation, system, thinking=made._thinking, **made._settings)

    def _nothing_yet(self) -> Statistics:
        return Counts().snapshot(
            elapsed=0.0,
            generation_seconds=0.0,
            time_to_first_token=None,
            peak_memory=peak_memory(),
            estimates=self._runtime._prices.estimates(),
        )

    def _check(self, settings: dict[str, Any]) -> None:
        self._check_loop()
        self._runtime._check_asked(settings)

    def _check_loop(self) -> None:
        if asyncio_loop() is not self._thread.loop:
            raise WrongEventLoopError(
                "this runtime belongs to another asyncio loop; open one in this loop, or hand the work over to that one"
            )


class Conversation:
    """Turns with a model, each of which goes on from those before; made by `Runtime.conversation`.

    As `runtime.Conversation`, for asyncio: chat templates are filled in, and their texts tokenised, off the loop.
    """

    def __init__(
        self,
        runtime: Runtime,
        make: Callable[[], conversation.Conversation],
        made: conversation.Conversation | None = None,
    ) -> None:
        """See `Runtime.conversation` and `Runtime.load`.

        Args:
            runtime: whose.
            make: makes the conversation itself, in trio's thread.
            made: one that there is already; `make` makes another like it, without what was said.
        """
        self._runtime = runtime
        self._make = make
        self._made = made
        self._last: weakref.ref[TokenStream] | None = None  # weak, since dropping the stream is a way to end it

    def __repr__(self) -> str:
        return f"<outrider aio.Conversation: {len(self.messages)} messages>"

    @property
    def messages(self) -> list[conversation.Message]:
        """What was said so far, oldest first; a copy. A turn belongs to it from its first token on that was given."""
        return [] if self._made is None else self._made.messages

    def stream(self, text: str, **overrides: Any) -> TokenStream:
        """Say something, and stream the answer.

        Args, Returns: as `runtime.Conversation.stream`, for asyncio.

        Raises: as `Runtime.stream`, and:
            ConversationBusyError: the turn before is neither over nor closed.
        """
        self._runtime._check(overrides)
        self._check_idle("say something")
        stream = self._runtime._begin(partial(self._open, text, overrides))
        self._last = weakref.ref(stream)
        return stream

    async def generate(self, text: str, **overrides: Any) -> Completion:
        """Say something, and have the whole answer.

        Args, Raises: as `stream`; what can happen to a running stream is raised here too.

        Cancellation: ends the answer; what was generated until then is lost, but not what was given of it.
        """
        return await complete(cast(Any, self.stream(text, **overrides)))

    async def save(self, path: SessionFile) -> int:
        """Save the conversation to a file, for `Runtime.load`, here or in trio; see `runtime.Conversation.save`.

        Args, Returns, Raises: as there.

        Cancellation: leaves what was there, or, at the very last, the whole new file.
        """
        self._runtime._check_loop()
        self._check_idle("save the conversation")
        return await self._runtime._done_in_trio(partial(self._save, path))

    def reset(self) -> None:
        """Forget everything but the system's message.

        Raises: ConversationBusyError: a turn is neither over nor closed.
        """
        self._runtime._check_loop()
        self._check_idle("forget what was said")
        self._made, self._last = None, None

    def _check_idle(self, what: str) -> None:
        stream = None if self._last is None else self._last()
        if stream is not None and not stream.is_closed:
            raise ConversationBusyError(
                f"cannot {what} while an answer is under way; read it to its end, or close its stream with aclose()"
            )

    def _open(self, text: str, overrides: dict[str, Any]) -> streaming.TokenStream:
        """In trio's thread, where one turn begins after the other."""
        return self._there().stream(text, **overrides)

    async def _save(self, path: SessionFile) -> int:
        return await self._there().save(path)

    def _there(self) -> conversation.Conversation:
        if self._made is None:
            self._made = self._make()
        return self._made


def _own(prompt: Prompt) -> Prompt:
    """A prompt that the caller cannot change any more, and that any thread can read."""
    if hasattr(prompt, "tolist"):
        listed: Prompt = prompt.tolist()
        return listed
    if isinstance(prompt, list):
        return [dict(item) if isinstance(item, Mapping) else item for item in prompt]
    return prompt


def _own_of_many(prompt: ManyPrompt) -> ManyPrompt:
    """Likewise with settings of its own."""
    alone, settings = with_settings(prompt)
    return (_own(alone), dict(settings)) if settings else _own(alone)
