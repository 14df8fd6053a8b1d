"""Many prompts at a time: their completions, in the prompts' order or as they finish, or their tokens as they come."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, cast

import trio

from protocol.errors import PromptError, SettingsError, StreamBusyError
from protocol.messages import Open
from protocol.reprs import shown
from runtime.generation.merged_streams import Give, Merged
from runtime.generation.text import Prompt
from runtime.generation.token_reader import Token
from runtime.generation.token_stream import Completion, TokenStream, complete
from runtime.loading.model_sources import check_integer

# A prompt, alone or with settings of its own by name.
ManyPrompt = Prompt | tuple[Prompt, Mapping[str, Any]]


def check_max_concurrent(value: Any) -> None:
    """See `Runtime.generate_many`.

    Raises: SettingsError: it is no whole number of at least 1.
    """
    check_integer("max_concurrent", value, 1)


def is_list(prompts: Any) -> bool:
    """Whether these can be many prompts; text and a single message can be gone through too, and are one."""
    return hasattr(prompts, "__iter__") and not isinstance(prompts, (str, bytes, Mapping))


def with_settings(prompt: ManyPrompt) -> tuple[Prompt, Mapping[str, Any]]:
    """A prompt, and the settings of its own."""
    # Two chat messages may stand in a tuple too: then the first is a mapping as well.
    if isinstance(prompt, tuple) and len(prompt) == 2:
        own, settings = prompt
        if isinstance(settings, Mapping) and not isinstance(own, Mapping):
            return cast(Prompt, own), settings
    return cast(Prompt, prompt), {}


def check_each(prompts: Iterable[ManyPrompt], check: Callable[[Prompt, Mapping[str, Any]], Open]) -> list[Open]:
    """What begins the generation of each prompt, once every prompt has been checked with its settings.

    Raises: PromptError, SettingsError: one will not do, and which; or they are no list of prompts.
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


class Completions(Merged[Completion]):
    """The completions of many prompts: awaitable, an async iterator, and an async context manager.

    `await` gives the list of them, in the order of the prompts. `async for` gives pairs (index of the prompt,
    completion), each as soon as it is finished. It is one or the other, by one task.

    The generations are under way from the moment that this exists. Where nobody takes what is finished, they wait:
    `max_concurrent` completions are kept ready, and no further generation begins until there is room.

    Failure: the first generation that fails cancels the rest and ends this with its error, once what was ready before
    is given. A note on the error says which prompt it was.

    Cancellation: leaving `async with`, `aclose`, a cancel scope around a waiting `await` or `__anext__`, and dropping
    the last reference (which is what `break` does) all end every generation. Each returns at once; the models are
    free after the forward pass that is running.
    """

    def __init__(
        self,
        opened: Sequence[Open],
        begin: Callable[[Open], TokenStream],
        max_concurrent: int,
        *,
        start_soon: Callable[..., None],
        run_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        """Made by `Runtime.generate_many`.

        Args: as `Merged`, but:
            begin: begins one of the generations.
        """

        async def produce(each: Open, give: Give[Completion]) -> None:
            await give(await complete(begin(each)))

        super().__init__(opened, produce, max_concurrent, start_soon=start_soon, run_soon=run_soon)
        self._gathered: list[Completion] | None = None
        self._is_gathering = False

    def __await__(self) -> Generator[Any, None, list[Completion]]:
        """All completions, in the order of the prompts; awaited again, the same ones.

        Raises:
            StreamBusyError: they are being awaited, or given one by one, already.
            RuntimeClosedError: the runtime or this was closed before all were finished.
            RuntimeBrokenError, RewindError: what a stream raises; see `Failure` above.
        """
        return self._gather().__await__()

    async def __anext__(self) -> tuple[int, Completion]:
        """The next that is finished: the index of its prompt, and what came of it.

        Raises:
            StopAsyncIteration: all have been given.
            StreamBusyError: another task is waiting for one, or for all of them.
            RuntimeClosedError, RuntimeBrokenError, RewindError: as when awaited.

        Cancellation: ends all generations.
        """
        if self._is_gathering and not self._has_ended_early:
            raise StreamBusyError("these completions are awaited all together, and cannot be given one by one as well")
        return await super().__anext__()

    async def _gather(self) -> list[Completion]:
        if self._gathered is not None:
            await trio.lowlevel.checkpoint()
            return self._gathered
        is_begun = self._is_gathering or self._is_waiting or self._num_left < self.num_prompts
        if is_begun and not self._has_ended_early:
            raise StreamBusyError("these completions are given to somebody already, and each is given once")
        self._is_gathering = True
        gathered: dict[int, Completion] = {}
        while (following := await self.next_item()) is not None:
            index, completion = following
            gathered[index] = completion
        self._gathered = [gathered[index] for index in range(self.num_prompts)]
        return self._gathered


class TokenStreams(Merged[Token]):
    """The tokens of many prompts as they come: an async iterator, and an async context manager.

    `async for` gives pairs (index of the prompt, token). The tokens of one prompt come in their order, and the last of
    them has a `finish_reason`; those of different prompts come as the models give them.

    What holds for `Completions` of when generations begin, of failure and of cancellation holds here too. Where nobody
    takes the tokens, the models wait.
    """

    def __init__(
        self,
        opened: Sequence[Open],
        begin: Callable[[Open], TokenStream],
        max_concurrent: int,
        *,
        start_soon: Callable[..., None],
        run_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        """Made by `Runtime.stream_many`.

        Args: as `Completions`.
        """

        async def produce(each: Open, give: Give[Token]) -> None:
            async with begin(each) as stream:
                async for token in stream:
                    await give(token)

        super().__init__(opened, produce, max_concurrent, start_soon=start_soon, run_soon=run_soon)

    def is_last(self, item: Token) -> bool:
        """See `Merged.is_last`."""
        return item.finish_reason is not None
