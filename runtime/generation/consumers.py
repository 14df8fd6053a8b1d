"""What the objects that a consumer holds have in common in trio, asyncio and plain threads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from protocol.errors import StreamBusyError
from protocol.session_state import FinishReason
from runtime.generation.reasoning import ReasoningTracker
from runtime.generation.token_reader import TokenReader
from runtime.generation.tool_calls.events import ToolCall

if TYPE_CHECKING:
    from runtime.generation.token_stream import Completion

_NOTHING_GIVEN = ReasoningTracker(None, ())


class StreamState(ABC):
    """What a stream tells of the tokens that it has given."""

    _is_closed: bool

    @property
    @abstractmethod
    def _opened_reader(self) -> TokenReader | None:
        """The stream's token reader; None until the prompt was checked."""

    @property
    def answer(self) -> ReasoningTracker:
        """The tokens given so far, split into reasoning and answer."""
        reader = self._opened_reader
        return _NOTHING_GIVEN if reader is None else reader.answer

    @property
    def content(self) -> str:
        """The text of the given tokens, without reasoning and tool calls."""
        reader = self._opened_reader
        return self.answer.said if reader is None or reader.parts is None else reader.parts.content

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls that are complete with the given tokens, in order; empty for a generation without tools."""
        reader = self._opened_reader
        return () if reader is None or reader.parts is None else tuple(reader.parts.calls)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the text ended, once its last token was given; None before, and after a cancellation."""
        reader = self._opened_reader
        return None if reader is None else reader.finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token that ended the text, as in `Token`, once its last token was given, or None."""
        reader = self._opened_reader
        return None if reader is None else reader.stop_reason

    @property
    def tail(self) -> str:
        """The text of the given tokens that was withheld: the possible beginning of a stop string, or half a character.

        The texts of the tokens and the tail add up to the tokenizer's decoding of the tokens' ids. After a `break`, a
        cancellation or a failure, the tail is the rest of the text. While the stream goes on, the tail comes with a
        later token, unless it turns out to be a stop string. It is empty once the text is over.
        """
        reader = self._opened_reader
        return "" if reader is None else reader.tail

    @property
    def is_closed(self) -> bool:
        """Whether no more tokens come: the last one was given, or the stream was closed or failed."""
        return self._is_closed

    @property
    def _state(self) -> str:
        """For a repr."""
        reader = self._opened_reader
        num_given = 0 if reader is None else reader.num_given
        return f"{self.finish_reason or ('closed' if self._is_closed else 'under way')}: {num_given} tokens given"


class AwaitableCompletions(ABC):
    """Completions that can be awaited all together, or else given one by one."""

    _gathered: list[Completion] | None = None
    _is_gathering = False

    @property
    @abstractmethod
    def _is_taken(self) -> bool:
        """Whether a completion was given, or somebody waits for one."""

    @property
    @abstractmethod
    def _has_ended_early(self) -> bool:
        """Whether this was closed or has failed, so that the next call raises the reason."""

    @abstractmethod
    async def _next_completion(self) -> tuple[int, Completion] | None:
        """The next finished completion, with the index of its prompt; None once all have been given."""

    @abstractmethod
    async def _checkpoint(self) -> None:
        """Let the event loop run other tasks, and take a cancellation."""

    def __await__(self) -> Generator[Any, None, list[Completion]]:
        """All completions, in the order of the prompts; awaited again, the same ones.

        Raises:
            StreamBusyError: they are being awaited, or given one by one, already.
            RuntimeClosedError: the runtime or this was closed before all were finished.
            RuntimeBrokenError, RewindError: the error of a stream, with a note that names the prompt.
            PromptError, SettingsError: for asyncio, of a prompt; the message says at which index.
        """
        return self._gather().__await__()

    def _check_not_gathering(self) -> None:
        if self._is_gathering and not self._has_ended_early:
            raise StreamBusyError("these completions are awaited all together, and cannot be given one by one as well")

    async def _gather(self) -> list[Completion]:
        if self._gathered is not None:
            await self._checkpoint()
            return self._gathered
        if (self._is_taken or self._is_gathering) and not self._has_ended_early:
            raise StreamBusyError("these completions are given to somebody already, and each is given once")
        self._is_gathering = True
        completions: dict[int, Completion] = {}
        while (following := await self._next_completion()) is not None:
            index, completion = following
            completions[index] = completion
        self._gathered = [completions[index] for index in sorted(completions)]
        return self._gathered
