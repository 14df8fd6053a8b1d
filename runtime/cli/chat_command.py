"""The command `outrider chat`: a conversation in which turns are read from stdin and answers stream to stdout.

Stdout has the answers and nothing else, each ended by a line break. A line that begins with a slash is a command of the
chat: `COMMANDS` has them, and a new one goes there. If stdin is no terminal, each of its lines is a turn, and the first
error or signal ends the program. Nothing here imports mlx before it is needed.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import trio

from protocol.errors import OutriderError, PromptError, RuntimeBrokenError, RuntimeClosedError
from protocol.reprs import shown
from runtime.cli.arguments.mlx_lm import add_flags_without_effect
from runtime.cli.arguments.models import Models
from runtime.cli.arguments.settings import settings_of, with_tokens_of
from runtime.cli.flags import in_flags
from runtime.terminal.chat_input import BLOCK, ChatSignals, LineReader, SignalWhileTyping
from runtime.terminal.display import (
    CommandOutcome,
    Display,
    Output,
    OutputError,
    print_message,
    print_stderr,
    warnings_at_the_end,
)
from runtime.terminal.signals import exit_on_signal
from runtime.terminal.statistics_table import print_statistics

if TYPE_CHECKING:
    from runtime.engine.runtime import Runtime
    from runtime.generation.conversation import Conversation

HOW_TO_LEAVE = "Ctrl-C again, Ctrl-D or /exit leaves"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `chat`, other than the models, the settings and the BLAS."""
    group = parser.add_argument_group("conversation")
    group.add_argument("--system", metavar="TEXT", help="system message, the first of the conversation")
    group.add_argument("--system-prompt", dest="system", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    group.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="whether the model reasons before it answers, if its chat template has the choice (default: its own)",
    )
    group.add_argument("--stats", action="store_true", help="print statistics on stderr after each answer")
    add_flags_without_effect(parser, "chat")


def chat(arguments: argparse.Namespace, models: Models) -> CommandOutcome:
    """Talk until the input ends.

    Raises: OutriderError: an argument is invalid. Later errors are in the outcome.
    """
    settings = settings_of(arguments)
    lines, output, outcome = LineReader(), Output(), CommandOutcome()
    with Display() as display, exit_on_signal(display):
        display.show_loading(models.loaded)
        import runtime.engine.opening  # noqa: F401  imported here, where Ctrl-C ends it at once

        signals = ChatSignals(outcome, display)
        requested = {"system": arguments.system, "thinking": arguments.thinking, **settings}
        work = partial(_talk, models, requested, lines, output, signals, arguments.stats)
        trio.run(signals.run, work)
    return outcome


async def _talk(
    models: Models,
    requested: dict[str, Any],
    lines: LineReader,
    output: Output,
    signals: ChatSignals,
    shows_statistics: bool,
) -> None:
    """Load the models, and take turns until the chat is over.

    Args:
        requested: arguments of the conversation.
        lines, output, signals, shows_statistics: see `Chat`.

    Raises: OutriderError: a model cannot be loaded, or something failed after which the chat cannot go on.
    """
    display = signals.display
    with warnings_at_the_end():
        from runtime.engine.opening import open as open_runtime

        models.use_device()
        opening = open_runtime(models.target, models.draft, trace=display.on_event, **models.options)
    async with opening as runtime:
        requested = with_tokens_of(runtime.tokenizer, requested)
        conversation = runtime.conversation(**requested)
        settings = {name: given for name, given in requested.items() if name not in ("system", "thinking")}
        talk = Chat(runtime, conversation, lines, output, signals, shows_statistics, settings)
        display.clear()
        await talk.take_turns()


# --- turns ----------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Chat:
    """A conversation at the terminal.

    Attributes:
        conversation: the current conversation; a command may replace it.
        shows_statistics: whether statistics follow each answer.
        settings: settings from the command line, for every conversation.
        is_over: whether the chat has ended.
    """

    runtime: Runtime
    conversation: Conversation
    _lines: LineReader
    _output: Output
    _signals: ChatSignals
    _shows_statistics: bool
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    is_over: bool = attrs.field(init=False, default=False)

    async def take_turns(self) -> None:
        """Take turns until the chat is over.

        Raises: OutriderError: something failed after which the chat cannot go on.
        """
        self._signals.is_interactive = self._lines.is_interactive
        if self._lines.is_interactive:
            tokenizer = self.runtime.tokenizer
            if tokenizer is not None and not tokenizer.has_chat_template:
                print_message("the model has no chat template: it continues the text so far, and does not answer")
            print_message('"/help" lists what else can be typed; Ctrl-D leaves')
        while not self.is_over:
            try:
                line = self._typed()
                if line is None:
                    return
                with self._signals.stopping(), warnings_at_the_end():
                    await self._take_turn(line)
            except (RuntimeBrokenError, RuntimeClosedError, OutputError):
                raise
            except OutriderError as error:
                if not self._lines.is_interactive:
                    raise
                print_message(f"error: {in_flags(error)}")
            # Lets a cancellation take effect if the turn awaited nothing.
            await trio.lowlevel.checkpoint()

    def _typed(self) -> str | None:
        """The next text; None at the end of the input, or when a signal ended the chat."""
        was_interrupted = False
        while True:
            try:
                # This blocks trio on purpose: nothing runs between turns, and line editing with its Ctrl-C works in the
                # main thread only.
                line = self._signals.while_typing(self._lines.read)
                # An empty line does nothing, and a Ctrl-C after it is still the second one.
                if line is None or line.strip():
                    return line
            except SignalWhileTyping as interruption:
                if was_interrupted or interruption.number != signal.SIGINT or not self._lines.is_interactive:
                    self._signals.cancel(interruption.number)
                    return None
                # The signal may have been meant for an answer that had just ended.
                print_stderr("")
                print_message(HOW_TO_LEAVE)
                was_interrupted = True

    async def _take_turn(self, line: str) -> None:
        if "\n" in line:
            await self._answer(line)  # a command has one line only
        elif line.startswith("//"):
            await self._answer(line[1:])
        elif line.startswith("/"):
            await self._run_command(line)
        else:
            await self._answer(line)

    async def _answer(self, text: str) -> None:
        """Send a user message, and show the answer.

        Cancellation: ends the answer; the part that was shown stays in the conversation.
        """
        stream = self.conversation.stream(text)
        self._signals.display.show_prefill(0, 1)
        self._signals.is_reading = True
        was_reasoning = False
        try:
            async with stream:
                async for token in stream:
                    self._signals.is_reading = False
                    self._signals.display.clear_for_text()
                    if self._output.is_terminal:
                        await self._output.write(token.text, dimmed=token.is_thinking)
                    elif not token.is_thinking:
                        # Reasoning is not shown here, so the line breaks after it are left out, too.
                        text = token.text.lstrip() if was_reasoning else token.text
                        was_reasoning = was_reasoning and not text
                        await self._output.write(text)
                    else:
                        was_reasoning = True
        finally:
            self._signals.is_reading = False
            self._signals.display.clear()
            self._output.end_answer()
            if self._shows_statistics:
                print_statistics(stream.statistics())

    async def _run_command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        argument = rest.strip()
        if (command := COMMANDS.get(name)) is None:
            raise PromptError(
                f'there is no command {shown(name)}; "/help" lists them, and "/{name[:100]}" sends it to the model'
            )
        if bool(argument) != (command.argument is not None):
            raise PromptError(f'it is "{name} {command.argument}"' if command.argument else f"{name} stands alone")
        await command.run(self, argument)


# --- commands -------------------------------------------------------------------------------------


@attrs.frozen
class Command:
    """A command of the chat.

    Attributes:
        run: runs it with the chat and its argument. An `OutriderError` that it raises is shown, and the conversation
            goes on.
        help: its help text.
        argument: placeholder of its argument; None if it takes none.
    """

    run: Callable[[Chat, str], Awaitable[None]]
    help: str
    argument: str | None = None


async def _reset(chat: Chat, _: str) -> None:
    chat.conversation.reset()
    print_message("forgotten; the conversation begins anew")


def _file(argument: str) -> str:
    return os.path.expanduser(argument)


async def _save(chat: Chat, argument: str) -> None:
    size = await chat.conversation.save(_file(argument))
    print_message(f"saved to {argument}, {size / 1e3:,.0f} kB")


async def _load(chat: Chat, argument: str) -> None:
    chat.conversation = await chat.runtime.load(_file(argument), any_draft=True, **chat.settings)
    print_message(f"going on from {argument}, after {len(chat.conversation.messages)} messages")


async def _exit(chat: Chat, _: str) -> None:
    chat.is_over = True


async def _help(_: Chat, __: str) -> None:
    rows = [(f"{name} {command.argument or ''}".strip(), command.help) for name, command in COMMANDS.items()]
    rows += [
        ("//...", 'sends "/..." to the model'),
        ("...\\", "goes on in the next line"),
        (BLOCK, "begins and ends a text of several lines; pasted lines stay together"),
        ("Ctrl-C", "stops an answer, which stays in the conversation"),
        ("Ctrl-D", "leaves"),
    ]
    for name, text in rows:
        print_stderr(f"  {name:<14} {text}")


COMMANDS: dict[str, Command] = {
    "/help": Command(_help, "shows this"),
    "/reset": Command(_reset, "forgets the conversation"),
    "/save": Command(_save, "saves the conversation to a file", "FILE"),
    "/load": Command(_load, "continues a saved conversation; settings of the command line replace its own", "FILE"),
    "/exit": Command(_exit, "leaves"),
}
