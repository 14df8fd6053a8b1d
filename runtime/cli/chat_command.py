"""The command `outrider chat`: a conversation in which turns are read from stdin and answers stream to stdout.

Stdout has the answers and nothing else, each ended by a line break. A line that begins with a slash is a command of the
chat, one of `COMMANDS`. If stdin is no terminal, each of its lines is a turn, and the first error or signal ends the
program. Nothing here imports mlx before it is needed.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import trio

from protocol.errors import OutriderError, PromptError, RuntimeBrokenError, RuntimeClosedError
from protocol.reprs import shown
from runtime.cli.arguments.models import add_models, models_of
from runtime.cli.arguments.settings import add_settings, completed, limit_of, settings_of
from runtime.cli.command import Command, follow_target
from runtime.cli.flags import in_flags
from runtime.terminal.chat_input import BLOCK, ChatSignals, LineReader, SignalWhileTyping
from runtime.terminal.display import (
    CommandOutcome,
    Display,
    Output,
    OutputError,
    cut_message,
    ending_of,
    print_message,
    print_statistics,
    print_stderr,
    stderr_console,
    warnings_at_the_end,
)
from runtime.terminal.signals import exit_on_signal
from runtime.terminal.tables import show_pairs
from runtime.terminal.word_wrap import WordWrap

if TYPE_CHECKING:
    from runtime.engine.runtime import Runtime
    from runtime.generation.conversation import Conversation

HOW_TO_LEAVE = "Ctrl-C again, Ctrl-D or /exit leaves"

# What /more says to a model with a chat template; any other model continues the text as it is.
_GO_ON = "Go on exactly where you stopped."


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_models(parser, samples=True)
    group = parser.add_argument_group("conversation")
    group.add_argument("--system", metavar="TEXT", help="system message; needs a chat template")
    group.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="whether the model reasons before it answers, if its chat template has a switch for that (default: "
        "the template's)",
    )
    group.add_argument("--stats", action="store_true", help="print statistics on stderr after each answer")
    add_settings(parser)


def chat(arguments: argparse.Namespace) -> CommandOutcome:
    """Talk until the input ends."""
    models, settings = models_of(arguments), settings_of(arguments)
    lines, output, outcome = LineReader(), Output(), CommandOutcome()

    async def talk() -> None:
        async with models.open(settings, trace=display.on_event, max_streams=1) as runtime:
            given = limit_of(runtime.tokenizer) | completed(settings, arguments, runtime.tokenizer)
            conversation = runtime.conversation(system=arguments.system, thinking=arguments.thinking, **given)
            chat = TerminalChat(runtime, conversation, lines, output, signals, arguments.stats, given)
            display.clear()
            await chat.take_turns()

    with Display() as display, exit_on_signal(display):
        display.show_loading(models.loaded)
        import runtime.engine.opening  # noqa: F401  imported here, where Ctrl-C ends it at once

        signals = ChatSignals(outcome, display)
        trio.run(signals.run, talk)
    return outcome


@attrs.define(eq=False)
class TerminalChat:
    """A conversation at the terminal."""

    runtime: Runtime
    conversation: Conversation  # a command may replace it
    _lines: LineReader
    _output: Output
    _signals: ChatSignals
    _shows_statistics: bool  # after each answer
    settings: Mapping[str, Any] = attrs.field(factory=dict)  # of the command line, for every conversation
    is_over: bool = attrs.field(init=False, default=False)
    was_cut: bool = attrs.field(init=False, default=False)  # the last answer, by --max-tokens or the context

    async def take_turns(self) -> None:
        """Take turns until the chat is over.

        Raises: OutriderError: a failure after which the chat cannot go on.
        """
        self._signals.is_interactive = self._lines.is_interactive
        if self._lines.is_interactive:
            tokenizer = self.runtime.tokenizer
            if tokenizer is not None and not tokenizer.has_chat_template:
                print_message("the model has no chat template: it continues the text so far, and does not answer")
            print_message('"/help" lists the commands; Ctrl-D leaves')
        while not self.is_over:
            try:
                line = self._typed()
                if line is None:
                    return
                is_command = line.startswith("/") and "\n" not in line
                with self._signals.stopping(), warnings_at_the_end():
                    if is_command and not line.startswith("//"):
                        await self._run_command(line)
                    else:
                        await self.answer(line[1:] if is_command else line)
            except (RuntimeBrokenError, RuntimeClosedError, OutputError):
                raise
            except OutriderError as error:
                if not self._lines.is_interactive:
                    raise
                print_message(f"error: {in_flags(error)}")
            # Lets a cancellation take effect if the turn awaited nothing.
            await trio.lowlevel.checkpoint()

    def _typed(self) -> str | None:
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

    async def answer(self, text: str) -> None:
        """Say a text to the model, and show its answer."""
        stream = self.conversation.stream(text)
        wrap = WordWrap()
        self.was_cut = False
        self._signals.display.show_prefill(0, 1)
        self._signals.is_reading = True
        was_reasoning = False
        try:
            async with stream:
                async for token in stream:
                    self._signals.is_reading = False
                    self._signals.display.clear_for_text()
                    self.was_cut = token.finish_reason == "length"
                    if self._output.is_terminal:
                        if token.is_thinking != was_reasoning:
                            await self._output.write(wrap.flush(self._output.columns), dimmed=was_reasoning)
                            was_reasoning = token.is_thinking
                        await self._output.write(wrap.add(token.text, self._output.columns), dimmed=was_reasoning)
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
            self._output.end_answer(wrap.flush(self._output.columns))
            if self.was_cut:
                print_message(cut_message(stream.statistics(), self.runtime.context_length, in_chat=True))
            if self._shows_statistics:
                print_statistics(stream.statistics(), ending_of(stream.finish_reason, stream.stop_reason))

    async def _run_command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        argument = rest.strip()
        if (command := COMMANDS.get(name)) is None:
            raise PromptError(
                f'there is no command {shown(name)}; "/help" lists them, and "/{name[:100]}" sends it to the model'
            )
        if bool(argument) != (command.argument is not None):
            raise PromptError(f'type "{name} {command.argument}"' if command.argument else f"{name} takes no argument")
        await command.run(self, argument)


@attrs.frozen
class ChatCommand:
    """A command of the chat. An `OutriderError` that it raises is shown, and the conversation goes on."""

    run: Callable[[TerminalChat, str], Awaitable[None]]
    help: str
    argument: str | None = None  # its placeholder


async def _more(chat: TerminalChat, _: str) -> None:
    if not chat.was_cut:
        raise PromptError("the last answer was not cut off; type what comes next")
    tokenizer = chat.runtime.tokenizer
    await chat.answer(_GO_ON if tokenizer is not None and tokenizer.has_chat_template else "")


async def _reset(chat: TerminalChat, _: str) -> None:
    chat.conversation.reset()
    chat.was_cut = False
    print_message("the conversation is forgotten, and a new one begins")


def _file(argument: str) -> str:
    return os.path.expanduser(argument)


async def _save(chat: TerminalChat, argument: str) -> None:
    size = await chat.conversation.save(_file(argument))
    print_message(f"saved to {argument}, {size / 1e3:,.0f} kB")


async def _load(chat: TerminalChat, argument: str) -> None:
    chat.conversation = await chat.runtime.load(_file(argument), any_draft=True, **chat.settings)
    chat.was_cut = False
    print_message(f"loaded {argument}, a conversation of {len(chat.conversation.messages)} messages")


async def _exit(chat: TerminalChat, _: str) -> None:
    chat.is_over = True


async def _help(_: TerminalChat, __: str) -> None:
    rows = [(f"{name} {command.argument or ''}".strip(), command.help) for name, command in COMMANDS.items()]
    rows += [
        ("//...", 'sends "/..." to the model'),
        ("...\\", "continues on the next line"),
        (BLOCK, "begins and ends a text of several lines; pasted lines stay together"),
        ("Ctrl-C", "stops an answer, which stays in the conversation"),
        ("Ctrl-D", "leaves"),
    ]
    show_pairs(stderr_console(), rows)


COMMANDS: dict[str, ChatCommand] = {
    "/help": ChatCommand(_help, "shows this list"),
    "/more": ChatCommand(_more, "continues an answer that was cut off"),
    "/reset": ChatCommand(_reset, "forgets the conversation"),
    "/save": ChatCommand(_save, "saves the conversation to a file", "FILE"),
    "/load": ChatCommand(_load, "continues a saved conversation; settings of the command line replace its own", "FILE"),
    "/exit": ChatCommand(_exit, "leaves"),
}


COMMAND = Command(
    name="chat",
    usage="[options]",
    help="chat with a model",
    description="Chat with a model, turn by turn. Answers stream to stdout. Turns go through the model's chat "
    "template; a model without one continues the text so far. If stdin is not a terminal, each of its lines "
    "is a turn.",
    epilog="""examples:
  outrider chat --target org/model --draft org/small --system "You are brief."
  outrider chat --target org/model --draft ngram -t 0.7 --no-thinking

"/help" lists the commands of the chat. Ctrl-C stops an answer, which stays in the conversation; pressed twice at the \
prompt, it leaves the chat.""",
    common="--target --draft --max-tokens --temperature --seed --stop --lookahead --system --no-thinking --stats",
    add_arguments=_add_arguments,
    run=chat,
    follow=follow_target,
)
