"""Many prompts at a time: checks of the list, and iterators over their completions or tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, cast

import trio

from protocol.errors import PromptError, SettingsError, StreamBusyError
from protocol.reprs import shown
from protocol.settings import Settings, SettingsLike, keywords_of
from runtime.generation.merged_streams import Generation, Give, Merged
from runtime.generation.text import Prompt
from runtime.generation.token_reader import Token
from runtime.generation.token_stream import Completion, TokenStream, complete

ManyPrompt = Prompt | tuple[Prompt, SettingsLike]
"""One of many prompts, alone or with its own settings."""


def is_list(prompts: Any) -> bool:
    """Whether a value can be a list of prompts. Text and a single message are iterable too, but are one prompt."""
    return hasattr(prompts, "__iter__") and not isinstance(prompts, (str, bytes, Mapping))


def with_settings(prompt: ManyPrompt) -> tuple[Prompt, Mapping[str, Any]]:
    """A prompt, and its own settings."""
    # A tuple may also be two chat messages; then its first item is a mapping as well.
    if isinstance(prompt, tuple) and len(prompt) == 2:
        alone, settings = prompt
        if isinstance(settings, Settings):
            return cast(Prompt, alone), keywords_of(settings, "settings")
        if isinstance(settings, Mapping) and not isinstance(alone, Mapping):
            return cast(Prompt, alone), settings
    return cast(Prompt, prompt), {}


def check_each(
    prompts: Iterable[ManyPrompt], check: Callable[[Prompt, Mapping[str, Any]], Generation]
) -> list[Generation]:
    """Check every prompt with its settings, and return the beginning of its generation.

    Raises: PromptError, SettingsError: one is invalid (the message has its index), or `prompts` is no list of prompts.
    """
    if not is_list(prompts):
        raise PromptError(
            f"prompts must be a sequence of prompts, got {shown(prompts)}; for a single one use generate()"
        )
    checked = []
    for index, prompt in enumerate(prompts):
        try:
            checked.append(check(*with_settings(prompt)))
        except (PromptError, SettingsError) as error:
            kind = PromptError if isinstance(error, PromptError) else SettingsError
            raise kind(f"prompts[{index}]: {error}") from error.__cause__
    return checked


class AwaitableCompletions(ABC):
    """Completions that can be awaited all together, or else given one by one."""

    _gathered: list[Completion] | None = None
    _is_gathering = False
    _is_waiting: bool  # for the next completion
    _num_finished: int  # completions that were given

    @property
    @abstractmethod
    def _has_ended_early(self) -> bool:
        """Whether this was closed or has failed, so that the next call raises the reason."""

    @abstractmethod
    async def _next(self) -> tuple[int, Completion] | None:
        """The next finished completion, with the index of its prompt; None once all have been given."""

    @abstractmethod
    async def _checkpoint(self) -> None:
        """Let the event loop run other tasks, and take a cancellation."""

    def __await__(self) -> Generator[Any, None, list[Completion]]:
        """All completions, in the order of the prompts. Awaiting again gives the same ones.

        Raises:
            StreamBusyError: they are being awaited, or given one by one, already.
            RuntimeClosedError: the runtime or this was closed before all were finished.
            RuntimeBrokenError, RewindError: the error of a stream, with a note that names the prompt.
            PromptError, SettingsError: on asyncio, a prompt or its settings are invalid; the message has its index.
        """
        return self._gather().__await__()

    def _check_not_gathering(self) -> None:
        if self._is_gathering and not self._has_ended_early:
            raise StreamBusyError("these completions are awaited all together, and cannot be given one by one as well")

    async def _gather(self) -> list[Completion]:
        if self._gathered is not None:
            await self._checkpoint()
            return self._gathered
        is_taken = self._is_waiting or self._num_finished > 0 or self._is_gathering
        if is_taken and not self._has_ended_early:
            raise StreamBusyError("these completions are given to somebody already, and each is given once")
        self._is_gathering = True
        completions: dict[int, Completion] = {}
        while (following := await self._next()) is not None:
            index, completion = following
            completions[index] = completion
        self._gathered = [completions[index] for index in sorted(completions)]
        return self._gathered


class Completions(Merged[Completion], AwaitableCompletions):
    """The completions of many prompts: awaitable, an async iterator, and an async context manager.

    `await` gives the list of them, in the order of the prompts. `async for` gives pairs (index of the prompt,
    completion), each as soon as it is finished. Use one or the other, in one task.

    The generations start as soon as this object exists. If nobody takes the finished completions, up to
    `max_concurrent` of them are kept, and then no further generation begins.

    Failure: the first generation that fails cancels the others. Its error is raised once the completions that were
    finished before have been given. A note on the error names the prompt.

    Cancellation: leaving `async with`, `aclose`, a cancel scope around a waiting `await` or `__anext__`, and dropping
    the last reference (which is what `break` does) all end every generation. Each returns at once; the models are
    free after the forward pass that is running.
    """

    @staticmethod
    async def _produce(stream: TokenStream, give: Give[Completion]) -> None:
        await give(await complete(stream))

    async def __anext__(self) -> tuple[int, Completion]:
        """The next finished completion, with the index of its prompt.

        Raises: as when awaited; StreamBusyError: another task is waiting for one, or for all of them.

        Cancellation: ends all generations.
        """
        self._check_not_gathering()
        return await super().__anext__()

    async def _checkpoint(self) -> None:
        await trio.lowlevel.checkpoint()


class TokenStreams(Merged[Token]):
    """The tokens of many prompts as they come: an async iterator, and an async context manager.

    `async for` gives pairs (index of the prompt, token). The tokens of one prompt come in order, and its last token has
    a `finish_reason`; tokens of different prompts come in the order in which the models commit them.

    Start, failure and cancellation are as for `Completions`. If nobody takes the tokens, the models wait.
    """

    @staticmethod
    async def _produce(stream: TokenStream, give: Give[Token]) -> None:
        async with stream:
            async for token in stream:
                await give(token)

    def is_last(self, item: Token) -> bool:
        return item.finish_reason is not None
