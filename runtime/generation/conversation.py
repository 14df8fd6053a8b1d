"""Conversations: the prompt of a turn contains all earlier turns, and only its new part is prefilled."""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self, Unpack

import attrs
import trio
from mlx_lm.tokenizer_utils import TokenizerWrapper

from protocol.errors import PromptError, PromptTooLongError, SettingsError
from protocol.reprs import shown
from protocol.settings import Settings, SettingsLike, settings_from, with_overrides
from protocol.settings_keywords import SettingsArguments
from protocol.validation import must_be
from runtime.generation.chat_template.known import thinking_switch
from runtime.generation.reasoning import ReasoningTracker
from runtime.generation.text import Prompt, apply_chat_template, begun_turn
from runtime.generation.token_stream import Completion, SessionFile, TokenStream, complete
from runtime.generation.tool_calls.call_format import call_format
from runtime.generation.tool_calls.events import Answer, ToolCall
from runtime.generation.tool_calls.tools import MAX_TOOL_ROUNDS, Functions

TurnMessage = dict[str, Any]


@attrs.frozen
class _State:
    """The messages before the last turn, without the system message, and that turn.

    One object, so that no other thread sees half a change.
    """

    past: list[TurnMessage]
    turn: _Turn | None = None


@attrs.frozen
class _Turn:
    """The user's message (none if the model goes on after the results of its calls), and the model's answer so far."""

    said: list[TurnMessage]
    answer: ReasoningTracker
    parts: Answer | None  # with calls told apart; None without tools
    stream: weakref.ref[TokenStream]  # weak: dropping the stream ends it


class Conversation:
    """Turns with a model, each of which continues those before; made by `Runtime.conversation`.

    The chat template makes the prompts. Without a template (a base model) the conversation is a running text: each
    user text is appended as it is, and continued.

    A turn becomes part of the conversation once the first token of its answer is given. From then on, the conversation
    contains as much of the answer as was given, whether the answer ends, is cancelled or fails; once the stream is
    closed, this includes its `tail`. A turn that ends before its first token leaves the conversation as it was, so it
    can be repeated.

    With tools, an answer may be calls of functions. `generate` calls them, and has the model go on with the results.
    For an answer that is streamed, `call_tools` calls them, and `stream` without a text goes on:

        async for token in conversation.stream("What is the weather in Lisbon?"):
            print(token.text, end="")
        while await conversation.call_tools():
            async for token in conversation.stream():
                print(token.text, end="")
    """

    def __init__(
        self,
        open_stream: Callable[..., TokenStream],
        expect: Callable[[Callable[[], Prompt]], None],
        write: Callable[..., Awaitable[int]],
        tokenizer: TokenizerWrapper | None,
        *,
        system: str | None,
        thinking: bool | None,
        settings: dict[str, Any],
        tools: Functions,
        past: Sequence[TurnMessage] = (),
    ) -> None:
        """See `Runtime.conversation`; `past` are earlier messages, without the system message.

        Args:
            open_stream, expect: `Runtime.stream` and `Runtime.expect`.
            write: `SessionSaver.save`.
        """
        if tokenizer is None:
            raise PromptError(
                "the target was opened without a tokenizer, and a conversation is text; open a model with one"
            )
        if system is not None and not isinstance(system, str):
            raise PromptError(f"system must be text or None, got {shown(system)}")
        if thinking is not None and not isinstance(thinking, bool):
            raise must_be("thinking", "True, False, or None for the model's own choice", thinking)
        self._open_stream = open_stream
        self._expect = expect
        self._write = write
        self._tokenizer = tokenizer
        self._settings = _checked(settings, ("system", "thinking", "tools"))
        self._thinking = thinking
        self._system: list[TurnMessage] = [] if system is None else [{"role": "system", "content": system}]
        self._state = _State([dict(message) for message in past])
        self._functions, self._schemas = tools, tools.schemas
        if self._schemas and (not tokenizer.has_chat_template or call_format(tokenizer) is None):
            raise PromptError(
                "mlx-lm knows no tool calls for this model's tokenizer; leave tools out, or take a model whose chat "
                "template has tools"
            )
        if tokenizer.has_chat_template:
            self._prompt([{"role": "user", "content": "?"}])  # raises what the template does not accept
        if thinking is not None and not (tokenizer.has_chat_template and thinking_switch(tokenizer)):
            raise SettingsError(
                f"thinking={thinking} has no effect on this model: its tokenizer has no chat template with such a "
                "switch; leave it out"
            )

    def __repr__(self) -> str:
        return f"<outrider Conversation: {len(self.messages)} messages>"

    @property
    def messages(self) -> list[TurnMessage]:
        """A copy of the messages so far, oldest first, including the system message, in OpenAI's form.

        An answer has its reasoning in "reasoning_content".
        """
        return [dict(message) for message in (*self._system, *self._so_far())]

    @property
    def pending_calls(self) -> tuple[ToolCall, ...]:
        """The calls of the last answer whose results the model was not told yet; empty during an answer."""
        return () if self._answering is not None else calls_without_results(self._so_far())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the answer that is under way, if any, as `TokenStream.aclose` does."""
        if (stream := self._answering) is not None:
            await stream.aclose()

    async def call_tools(self) -> bool:
        """Call the functions that the last answer calls, one after the other; the next prompt has their results.

        An async function is awaited here, any other is called in a thread. The model gets what it returns, as JSON
        unless it is a text, or the error that it raises.

        Returns: whether there were any calls; if so, `stream` without a text goes on.

        Raises: ConversationBusyError: an answer is under way, or the functions are being called already.

        Cancellation: cancels an async function; one in a thread goes on by itself. The conversation is as it was.
        """
        self._check_idle("call its tools")
        in_thread = partial(trio.to_thread.run_sync, abandon_on_cancel=True)
        results = await self._functions.results(self.pending_calls, in_thread)
        self.add_results(results)
        return bool(results)

    def add_results(self, results: Sequence[TurnMessage]) -> None:
        """Add the messages with the results of `pending_calls`; `call_tools` does this."""
        if results:
            self._state = _State([*self._so_far(), *results])

    def stream(
        self, text: str | None = None, settings: SettingsLike | None = None, **overrides: Unpack[SettingsArguments]
    ) -> TokenStream:
        """Begin a turn, and stream the answer, whose generation begins now.

        Args:
            text: of the user; None to have the model go on after `call_tools`.
            settings: of this turn, as for `Runtime.stream`, in place of the conversation's; `reuse_prefix` is set.
            **overrides: settings of this turn by name; each replaces that of `settings`.

        Raises: as `Runtime.stream`; ConversationBusyError: the turn before is neither over nor closed.
        """
        keywords = _checked({**self._settings, **turn_settings(settings, overrides)})
        if text is not None and not isinstance(text, str):
            raise PromptError(f"what is said in a conversation is text, got {type(text).__name__}")
        self._check_idle("say something")
        past = self._so_far()
        if text is None and (not past or past[-1]["role"] != "tool"):
            raise PromptError("there are no results of tools with which to go on; say something, or use call_tools()")
        said = [] if text is None else [{"role": "user", "content": text}]
        if self._schemas:
            keywords["tools"] = self._schemas
        try:
            stream = self._open_stream(self._prompt([*past, *said]), **keywords)
        except PromptTooLongError as error:
            if not past:
                raise
            raise PromptTooLongError(
                f"the conversation has become too long: {error}, or reset the conversation"
            ) from None
        self._state = _State(past, _Turn(said, stream.answer, stream.parts, weakref.ref(stream)))
        self._expect(self._next_turn)
        return stream

    async def generate(
        self, text: str, settings: SettingsLike | None = None, **overrides: Unpack[SettingsArguments]
    ) -> Completion:
        """Begin a turn, and wait for the whole answer.

        Functions that it calls are called, and the model goes on with their results, for at most `MAX_TOOL_ROUNDS`
        rounds. The last answer has calls only if these rounds are used up; they are the `pending_calls` then.

        Args, Raises: as `stream`, and as `TokenStream.__anext__`.

        Cancellation: ends the answer; the tokens so far are part of the conversation. See also `call_tools`.
        """
        completion = await complete(self.stream(text, settings, **overrides))
        for _ in range(MAX_TOOL_ROUNDS):
            if not await self.call_tools():
                break
            completion = await complete(self.stream(None, settings, **overrides))
        return completion

    async def save(self, path: SessionFile) -> int:
        """Save the conversation to a file, for `Runtime.load`.

        The file has the messages, the settings, what the target and the draft model have cached of the text, so that it
        need not be prefilled again, and the fingerprints of both models and of the tokenizer's vocabulary.
        `logits_processors` and a `sampler` are functions, which are not saved: they must be given again.

        At the path, there is always the complete old or the complete new file. It is in safetensors format, with the
        messages as plain text; only its owner can read a new file.

        Args:
            path: of the file; its directory must exist. An existing file is replaced. Or a binary file object, such as
                `io.BytesIO`, which is written from its position on, in another thread; after an error it contains a
                part of the data.

        Returns: the file's size in bytes.

        Raises:
            ConversationBusyError: a turn is neither over nor closed.
            SettingsError: `path` is neither a path nor a binary file object.
            SessionFileError: the file cannot be written; the system's error is the cause. An old file is unchanged.
            RuntimeClosedError, RuntimeBrokenError: the runtime is closed or has failed.

        Cancellation: leaves the old file, or, at the very last moment, the complete new one.
        """
        self._check_idle("save the conversation")
        # Templates end a prompt where an answer begins, so the prompt of the next turn needs some user's message.
        next_message = [{"role": "user", "content": "?"}] if self._tokenizer.has_chat_template else []
        prompt = self._prompt([*self._so_far(), *next_message])
        return await self._write(path, self.messages, prompt, self._thinking, settings_from(self._settings))

    def reset(self) -> None:
        """Forget all messages but the system message. Raises: ConversationBusyError: as `save`."""
        self._check_idle("forget what was said")
        self._state = _State([])

    @property
    def make_new(self) -> Callable[[], Conversation]:
        """Makes new conversations with the same system message and settings; does not refer to this conversation."""
        system = self._system[0]["content"] if self._system else None
        return partial(
            Conversation,
            self._open_stream,
            self._expect,
            self._write,
            self._tokenizer,
            system=system,
            thinking=self._thinking,
            settings=self._settings,
            tools=self._functions,
        )

    @property
    def _answering(self) -> TokenStream | None:
        turn = self._state.turn
        stream = None if turn is None else turn.stream()
        return None if stream is None or stream.is_closed else stream

    def _check_idle(self, what: str) -> None:
        self._functions.check_idle(what, self._answering is not None, "aclose()")

    def _so_far(self) -> list[TurnMessage]:
        state = self._state
        turn = state.turn
        if turn is None or turn.answer.num_tokens == 0:
            return state.past
        return [*state.past, *turn.said, self._reply(turn)]

    def _reply(self, turn: _Turn) -> TurnMessage:
        if turn.parts is not None and turn.parts.calls:
            return turn.parts.message
        answer = turn.answer.remembered()
        if not self._tokenizer.has_chat_template:
            return {"role": "assistant", "content": answer.text}
        if thinking := answer.thinking.strip():
            # Templates write the line breaks around the reasoning themselves.
            return {"role": "assistant", "content": answer.said.lstrip(), "reasoning_content": thinking}
        # Empty reasoning leaves its line breaks behind.
        return {"role": "assistant", "content": answer.said.lstrip() if answer.has_tags else answer.said}

    def _prompt(self, messages: list[TurnMessage]) -> Prompt:
        messages = [*self._system, *messages]
        if not self._tokenizer.has_chat_template:
            return "".join(message["content"] for message in messages)
        # Copies: some templates modify the messages.
        return apply_chat_template([dict(message) for message in messages], self._tokenizer, **self._switches())

    def _switches(self) -> dict[str, Any]:
        """The variables of the chat template."""
        switch: dict[str, Any] = {} if self._thinking is None else {"enable_thinking": self._thinking}
        return {**switch, "tools": self._schemas} if self._schemas else switch

    def _next_turn(self) -> Prompt:
        """What the prompt of the next turn will begin with."""
        return begun_turn([*self._system, *self._so_far()], self._tokenizer, **self._switches())


def calls_without_results(messages: Sequence[Mapping[str, Any]]) -> tuple[ToolCall, ...]:
    """The calls of the last message, if it is an answer that has some."""
    last = messages[-1] if messages else {}
    calls = last.get("tool_calls", ()) if last.get("role") == "assistant" else ()
    return tuple(ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls)


def turn_settings(settings: SettingsLike | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a conversation or a turn, as keyword arguments.

    `Settings.reuse_prefix` is left out: every `Settings` has it, and a conversation always reuses its prefix.
    """
    keywords = with_overrides(settings, {})
    if isinstance(settings, Settings):
        del keywords["reuse_prefix"]
    return {**keywords, **overrides}


def _checked(settings: dict[str, Any], beside: Sequence[str] = ()) -> dict[str, Any]:
    if "reuse_prefix" in settings and settings["reuse_prefix"] is not True:
        raise SettingsError(
            f"a conversation always reuses what it has read, got reuse_prefix={shown(settings['reuse_prefix'])}; use "
            "stream() with messages to prefill each prompt as a whole"
        )
    settings = {**settings, "reuse_prefix": True}
    settings_from(settings, beside)
    return settings
