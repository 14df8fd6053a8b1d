"""A conversation: turns that remember those before them, and read of each prompt only what is new."""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import attrs
from mlx_lm.tokenizer_utils import TokenizerWrapper

from protocol.errors import ConversationBusyError, PromptError, PromptTooLongError, SettingsError
from protocol.reprs import shown
from protocol.settings import Settings, settings_from
from runtime.generation.reasoning import ReasoningTracker
from runtime.generation.text import Prompt, apply_chat_template
from runtime.generation.token_stream import Completion, TokenStream, complete
from runtime.persistence.session_file import SessionFile

Message = dict[str, str]


@attrs.frozen
class Account:
    """All that there is to say of a conversation, for a file.

    Attributes:
        messages: see `Conversation.messages`.
        prompt: how the next turn's begins.
        thinking: see `Runtime.conversation`.
        settings: of every turn.
    """

    messages: list[Message]
    prompt: Prompt
    thinking: bool | None
    settings: Settings


@attrs.frozen
class _State:
    """A conversation as it is at one moment: one object, so that no other thread ever sees half a change.

    Attributes:
        past: messages before the last turn, without the system's.
        turn: the last one; None where there is none since the past.
    """

    past: list[Message]
    turn: _Turn | None = None


@attrs.frozen
class _Turn:
    """A turn that was begun last: what was said to the model, and what it has answered by now."""

    said: str
    answer: ReasoningTracker
    stream: weakref.ref[TokenStream]  # weak, since dropping the stream is a way to end it


class Conversation:
    """Turns with a model, each of which goes on from those before; made by `Runtime.conversation`.

    With a chat template, prompts are made by it. Without one (a base model) the conversation is a running text: what is
    said is appended to it as it is, and continued.

    What was said and answered becomes part of the conversation with the first token of the answer that is given; from
    then on with as much of the answer as was given, whatever ends it: its end, a cancellation or a failure. To what was
    given belongs the stream's `tail`, once it is closed. A turn that ends before its first token leaves the
    conversation as it was, so the same can be said again.
    """

    def __init__(
        self,
        open_stream: Callable[..., TokenStream],
        write: Callable[[SessionFile, Account], Awaitable[int]],
        tokenizer: TokenizerWrapper | None,
        *,
        system: str | None,
        thinking: bool | None,
        settings: dict[str, Any],
        past: Sequence[Message] = (),
    ) -> None:
        """See `Runtime.conversation`.

        Args:
            open_stream: `Runtime.stream`.
            write: saves the conversation to a file.
            tokenizer: the target's.
            system, thinking, settings: as there.
            past: what was said after the system's message.
        """
        if tokenizer is None:
            raise PromptError(
                "the target was opened without a tokenizer, and a conversation is text; use stream() with token ids"
            )
        if system is not None and not isinstance(system, str):
            raise PromptError(f"system must be text or None, got {shown(system)}")
        if thinking is not None and not isinstance(thinking, bool):
            raise SettingsError(
                f"thinking must be True, False, or None for the model's own choice, got {shown(thinking)}"
            )
        self._open_stream = open_stream
        self._write = write
        self._tokenizer = tokenizer
        self._settings = _checked(settings)
        self._thinking = thinking
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._state = _State([dict(message) for message in past])
        self._check_template()

    def __repr__(self) -> str:
        return f"<outrider Conversation: {len(self.messages)} messages>"

    @property
    def messages(self) -> list[Message]:
        """What was said so far, oldest first, the system's message included; a copy.

        Each has a "role" and a "content"; what the model thought meanwhile is in "reasoning_content", where it did.
        """
        return [dict(message) for message in (*self._system, *self._so_far())]

    def stream(self, text: str, **overrides: Any) -> TokenStream:
        """Say something, and stream the answer.

        Args:
            text: what to say.
            **overrides: settings for this turn, in the place of the conversation's.

        Returns: the answer, which is generated from now on; see `TokenStream` for how to end it.

        Raises: as `Runtime.stream`, and:
            ConversationBusyError: the turn before is neither over nor closed.
        """
        settings = _checked({**self._settings, **overrides})
        if not isinstance(text, str):
            raise PromptError(f"what is said in a conversation is text, got {type(text).__name__}")
        self._check_idle("say something")
        settled = self._so_far()
        try:
            stream = self._open_stream(self._prompt([*settled, {"role": "user", "content": text}]), **settings)
        except PromptTooLongError as error:
            if not settled:
                raise
            raise PromptTooLongError(
                f"the conversation has become too long: {error}, or begin anew with reset"
            ) from None
        self._state = _State(settled, _Turn(text, stream.answer, weakref.ref(stream)))
        return stream

    async def generate(self, text: str, **overrides: Any) -> Completion:
        """Say something, and have the whole answer.

        Args, Raises: as `stream`; what can happen to a running stream is raised here too.

        Cancellation: ends the answer; what was generated until then is part of the conversation.
        """
        return await complete(self.stream(text, **overrides))

    async def save(self, path: SessionFile) -> int:
        """Save the conversation to a file, for `Runtime.load`.

        In the file are the messages, the settings, and what target and draft model still have cached of the text, so
        that whoever goes on need not read it again; also what each model and the tokenizer's vocabulary can be told by.
        Where randomness is seeded, the seed is among the settings, and there is no other random state. What is not in
        it: `logits_processors`, which are functions and have to be given again.

        The file is written beside its place and moved there as a whole, so there is the old one or the new one at any
        time. It is in safetensors format, and holds what was said as plain text; a new one can be read by its owner
        alone.

        Args:
            path: of the file; its directory must exist. What is there already is replaced. Or a binary file object,
                such as `io.BytesIO`, which is written to from its position on, in another thread, and left with a part
                where something goes wrong.

        Returns: the file's size in bytes.

        Raises:
            ConversationBusyError: a turn is neither over nor closed.
            SettingsError: the path is neither.
            SessionFileError: the file cannot be written; the system's error is the cause. What was there still is.
            RuntimeClosedError, RuntimeBrokenError: the runtime is no longer there.

        Cancellation: leaves what was there, or, at the very last, the whole new file.
        """
        self._check_idle("save the conversation")
        return await self._write(path, self._account())

    def reset(self) -> None:
        """Forget everything but the system's message.

        Raises: ConversationBusyError: a turn is neither over nor closed.
        """
        self._check_idle("forget what was said")
        self._state = _State([])

    def anew(self) -> Conversation:
        """A conversation with the same system message and settings, in which nothing was said yet."""
        system = self._system[0]["content"] if self._system else None
        return Conversation(
            self._open_stream,
            self._write,
            self._tokenizer,
            system=system,
            thinking=self._thinking,
            settings=self._settings,
        )

    def _check_idle(self, what: str) -> None:
        turn = self._state.turn
        stream = None if turn is None else turn.stream()
        if stream is not None and not stream.is_closed:
            raise ConversationBusyError(
                f"cannot {what} while an answer is under way; read it to its end, or close its stream with aclose()"
            )

    def _so_far(self) -> list[Message]:
        """What was said so far, but for the system's message."""
        state = self._state
        return [*state.past, *([] if state.turn is None else self._exchange(state.turn))]

    def _exchange(self, turn: _Turn) -> list[Message]:
        """What was said in a turn, and answered by now."""
        if turn.answer.num_tokens == 0:
            return []
        answer = turn.answer.remembered()
        if not self._tokenizer.has_chat_template:
            reply = {"role": "assistant", "content": answer.text}
        elif thinking := answer.thinking.strip():
            # Templates set what comes before and after by themselves.
            reply = {"role": "assistant", "content": answer.said.lstrip(), "reasoning_content": thinking}
        else:
            # An empty thought leaves its line breaks behind.
            reply = {"role": "assistant", "content": answer.said.lstrip() if answer.has_tags else answer.said}
        return [{"role": "user", "content": turn.said}, reply]

    def _account(self) -> Account:
        so_far = self._so_far()
        # Templates end a prompt by asking for an answer, which the next prompt does elsewhere.
        asked = [{"role": "user", "content": "?"}] if self._tokenizer.has_chat_template else []
        prompt = self._prompt([*so_far, *asked])
        return Account(self.messages, prompt, self._thinking, settings_from(self._settings))

    def _prompt(self, messages: list[Message]) -> Prompt:
        messages = [*self._system, *messages]
        if not self._tokenizer.has_chat_template:
            return "".join(message["content"] for message in messages)
        switch = {} if self._thinking is None else {"enable_thinking": self._thinking}
        # Copies: some templates write into what they are given.
        return apply_chat_template([dict(message) for message in messages], self._tokenizer, **switch)

    def _check_template(self) -> None:
        """Find out before the first turn what the chat template does not take."""
        probe: list[Message] = [{"role": "user", "content": "?"}]
        can_switch = False
        if self._tokenizer.has_chat_template:
            self._prompt(probe)
            asked = [apply_chat_template(probe, self._tokenizer, enable_thinking=choice) for choice in (True, False)]
            can_switch = asked[0] != asked[1]
        if self._thinking is not None and not can_switch:
            raise SettingsError(
                f"thinking={self._thinking} cannot be told to this model: its tokenizer has no chat template with such "
                "a choice; leave it None"
            )


def _checked(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a turn.

    Raises: SettingsError: one is unknown, out of its range, or not a conversation's to choose.
    """
    if "reuse_prefix" in settings and settings["reuse_prefix"] is not True:
        raise SettingsError(
            f"a conversation always reuses what it has read, got reuse_prefix={shown(settings['reuse_prefix'])}; use "
            "stream() with messages to read everything anew"
        )
    settings = {**settings, "reuse_prefix": True}
    settings_from(settings)
    return settings
