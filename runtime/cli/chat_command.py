"""The command `chat`: turns read from the terminal, answers as they come.

Stdout has the answers and nothing else, each ended by a newline. What is typed with a slash in front is for the
program; `COMMANDS` has all that there is. Where stdin is no terminal, each of its lines is a turn, the first thing
that fails ends the program, and so does a signal. Nothing here imports mlx before it is needed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs
import trio

from protocol.errors import OutriderError, PromptError, RuntimeBrokenError, RuntimeClosedError
from protocol.reprs import shown
from runtime.cli.model_arguments import Models
from runtime.cli.settings_arguments import settings_of
from runtime.terminal.display import (
    BY_SIGNAL,
    ECHO_S,
    Display,
    Outcome,
    Output,
    OutputError,
    print_statistics,
    say,
    show,
    warnings_at_the_end,
)
from runtime.terminal.signals import quitting

if TYPE_CHECKING:
    from runtime.engine.runtime import Runtime
    from runtime.generation.conversation import Conversation

PROMPT = "> "
MORE = ". "  # in front of each further line of one text
BLOCK = '"""'
HOW_TO_LEAVE = "Ctrl-C again, Ctrl-D or /exit leaves"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be asked of `chat`, beside the models, the settings and the BLAS."""
    group = parser.add_argument_group("conversation")
    group.add_argument("--system", metavar="TEXT", help="what the model is told before anything is said")
    group.add_argument("--system-prompt", dest="system", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    group.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="have the model think before it answers, or not, where it can be told (default: as it likes)",
    )
    group.add_argument("--stats", action="store_true", help="end each answer with a table of statistics on stderr")


def chat(arguments: argparse.Namespace, models: Models) -> Outcome:
    """Talk until there is nothing more to say.

    Raises: OutriderError: the arguments make no sense; what fails later is in the outcome.
    """
    settings = settings_of(arguments)
    lines, output, outcome = Lines(), Output(), Outcome()
    with Display() as display, quitting(display):
        display.loading(models.loaded)
        import runtime.engine.opening  # noqa: F401  imported here, where Ctrl-C need not wait for it

        signals = Signals(outcome, display)
        asked = {"system": arguments.system, "thinking": arguments.thinking, **settings}
        trio.run(partial(_talk, models, asked, lines, output, signals, arguments.stats))
    return outcome


async def _talk(
    models: Models,
    asked: dict[str, Any],
    lines: Lines,
    output: Output,
    signals: Signals,
    shows_statistics: bool,
) -> None:
    """Load the models, and take turns; how it ends is in the signals' outcome.

    Args:
        models: to talk with.
        asked: of the conversation.
        lines: what is typed.
        output: where answers go.
        signals: what ends an answer, or everything.
        shows_statistics: after each answer.
    """
    display = signals.display
    with signals.heard(), signals.everything:
        try:
            with warnings_at_the_end():
                from runtime.engine.opening import open as open_runtime

                opening = open_runtime(models.target, models.draft, trace=display.on_event, **models.options)
            async with opening as runtime:
                signals.is_loading = False
                conversation = runtime.conversation(**asked)
                settings = {name: given for name, given in asked.items() if name not in ("system", "thinking")}
                talk = Chat(runtime, conversation, lines, output, signals, shows_statistics, settings)
                display.clear()
                await talk.take_turns()
        except OutriderError as error:
            signals.outcome.failure = error
    if signals.outcome.signal is not None:
        signals.outcome.failure = None  # nobody waits any more for what failed


# --- what is typed --------------------------------------------------------------------------------


class Lines:
    """The lines of stdin: edited, and remembered for the arrow keys, where a person types them.

    A person's text may have several lines: those that are pasted at once, those up to one that does not end in a
    backslash, and those between `BLOCK`s.
    """

    def __init__(self) -> None:
        self.is_interactive = sys.stdin is not None and sys.stdin.isatty()
        self._is_edited = self.is_interactive and sys.stdout is not None and sys.stdout.isatty()
        if self._is_edited:
            # A Python may be built without it; lines can be typed all the same.
            with suppress(ImportError):
                import readline  # input() edits lines once it is there

                # Python turns it off. What is pasted is one text then, until Enter is pressed. (libedit, which macOS
                # has in place of readline, knows nothing of it and passes over it.)
                readline.parse_and_bind("set enable-bracketed-paste on")

    def next(self) -> str | None:
        """The next text, without its end; None where there are no more. Waits, in the thread that calls it.

        Raises: PromptError: it is not text, or stdin is closed.
        """
        try:
            line = self._read(PROMPT)
            if line is None or not self.is_interactive or "\n" in line:
                return line
            if line.lstrip().startswith(BLOCK):
                return self._block(line.lstrip().removeprefix(BLOCK))
            return self._continued(line)
        except UnicodeError as error:
            raise PromptError(
                f"what was typed is not valid text: {error}; type it as {sys.getfilesystemencoding()}"
            ) from error

    def _continued(self, line: str) -> str | None:
        """A line, and those that it goes on in."""
        lines = [line]
        while lines[-1].endswith("\\"):
            if (following := self._read(MORE)) is None:
                return None
            lines[-1:] = [lines[-1].removesuffix("\\"), following]
        return "\n".join(lines)

    def _block(self, line: str) -> str | None:
        """What stands between two marks, of which the first has been read."""
        lines = [line]
        while not lines[-1].rstrip().endswith(BLOCK):
            if (following := self._read(MORE)) is None:
                return None
            lines.append(following)
        lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
        text = "\n".join(lines).strip("\n")
        # It is said, and no command.
        return f"/{text}" if text.startswith("/") and "\n" not in text else text

    def _read(self, prompt: str) -> str | None:
        if sys.stdin is None:
            raise PromptError("what is said is to be read from stdin, and stdin is closed")
        if self._is_edited:
            try:
                return input(prompt)
            except EOFError:
                show("")  # Ctrl-D leaves the cursor behind the prompt
                return None
        if self.is_interactive:
            show(prompt, end="")
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None


# --- signals --------------------------------------------------------------------------------------


class Heard(BaseException):
    """A signal came while a line was being typed. Like KeyboardInterrupt, it is nobody's error."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Signals:
    """What a signal does: it stops an answer, is raised where a line is typed, or ends everything."""

    def __init__(self, outcome: Outcome, display: Display, quit_now: Callable[[int], object] = os._exit) -> None:
        """Not listening yet.

        Args:
            outcome: where a signal that ends everything is noted.
            display: told of a cancellation.
            quit_now: ends the process with a status.
        """
        self.outcome = outcome
        self.display = display
        self.everything = trio.CancelScope()
        self.is_loading = True
        self.is_typing = False
        self.is_reading = False  # a prompt, of which a pass may take long
        # Whether a person is there who may go on after an answer was stopped.
        self.only_stops = False
        self._answer: trio.CancelScope | None = None
        self._quit_now = quit_now
        self._ending_at = 0.0

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Listen, in place of whoever did, while the block runs."""
        token = trio.lowlevel.current_trio_token()

        def on_signal(number: int, frame: FrameType | None) -> None:
            # Decided here and now: by the time that trio runs again, another answer may be under way.
            if self.is_typing:
                self.is_typing = False
                raise Heard(number)
            if not (self.only_stops and number == signal.SIGINT):
                token.run_sync_soon(self._end, number)
            elif self._answer is not None:
                token.run_sync_soon(self._stop, self._answer)

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def stopping(self) -> Iterator[trio.CancelScope]:
        """Have Ctrl-C stop what the block does, and no more than that."""
        with trio.CancelScope() as self._answer:
            try:
                yield self._answer
            finally:
                self._answer = None

    def typed(self, read: Callable[[], str | None]) -> str | None:
        """Wait for a line, with nothing else going on meanwhile.

        Raises: Heard: a signal came first.
        """
        self.is_typing = True
        try:
            return read()
        finally:
            self.is_typing = False

    def leave(self, number: int) -> None:
        """End everything, because of a signal."""
        self.outcome.signal = number
        self.everything.cancel()

    def _stop(self, answer: trio.CancelScope) -> None:
        answer.cancel()
        if self.is_reading:
            self.display.stopping(and_then="")

    def _end(self, number: int) -> None:
        if self.outcome.signal is None:
            self._ending_at = trio.current_time()
            if self.is_loading or self.is_reading:
                self.display.stopping()
            self.leave(number)
        elif trio.current_time() - self._ending_at > ECHO_S:
            # A load cannot be interrupted, and is waited for; here comes somebody who will not wait.
            self.display.clear()
            self._quit_now(BY_SIGNAL + number)


# --- turns ----------------------------------------------------------------------------------------


class Chat:
    """A conversation at the terminal.

    Attributes:
        runtime: where it takes place.
        conversation: what was said; a command may put another one in its place.
        settings: that were given, and hold for whatever conversation it is.
        is_over: whether the last turn was taken.
    """

    def __init__(
        self,
        runtime: Runtime,
        conversation: Conversation,
        lines: Lines,
        output: Output,
        signals: Signals,
        shows_statistics: bool,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.runtime = runtime
        self.conversation = conversation
        self.settings = settings
        self.is_over = False
        self._lines = lines
        self._output = output
        self._signals = signals
        self._shows_statistics = shows_statistics

    async def take_turns(self) -> None:
        """Take turns until there are no more.

        Raises: OutriderError: something failed that cannot be gone on from.
        """
        self._signals.only_stops = self._lines.is_interactive
        if self._lines.is_interactive:
            say('"/help" lists what else can be typed; Ctrl-D leaves')
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
                say(f"error: {error}")
            # Where nothing was awaited, what a signal has asked for happens here.
            await trio.lowlevel.checkpoint()

    def _typed(self) -> str | None:
        """The next text; None where it was the last, or nothing more is wanted."""
        was_interrupted = False
        while True:
            try:
                # This blocks trio, on purpose: nothing goes on between turns, and line editing and its Ctrl-C are at
                # home in the main thread.
                return self._signals.typed(self._lines.next)
            except Heard as heard:
                if was_interrupted or heard.number != signal.SIGINT or not self._lines.is_interactive:
                    self._signals.leave(heard.number)
                    return None
                # Maybe it was meant for an answer that was over a moment before.
                show("")
                say(HOW_TO_LEAVE)
                was_interrupted = True

    async def _take_turn(self, line: str) -> None:
        if "\n" in line:
            await self._answer(line)  # whatever it begins with: a command has one line
        elif line.startswith("//"):
            await self._answer(line[1:])
        elif line.startswith("/"):
            await self._obey(line)
        elif line.strip():
            await self._answer(line)

    async def _answer(self, text: str) -> None:
        """Say something, and show the answer.

        Cancellation: ends the answer; what was given of it is remembered.
        """
        stream = self.conversation.stream(text)
        self._signals.display.reading(0, 1)
        self._signals.is_reading = True
        was_thinking = False
        try:
            async with stream:
                async for token in stream:
                    self._signals.is_reading = False
                    self._signals.display.writing()
                    if self._output.is_terminal:
                        await self._output.write(token.text, dimmed=token.is_thinking)
                    elif not token.is_thinking:
                        # The line breaks after a thought, which nobody sees here, are no part of the answer.
                        said = token.text.lstrip() if was_thinking else token.text
                        was_thinking = was_thinking and not said
                        await self._output.write(said)
                    else:
                        was_thinking = True
        finally:
            self._signals.is_reading = False
            self._signals.display.clear()
            self._output.end_answer()
            if self._shows_statistics:
                print_statistics(stream.statistics())

    async def _obey(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        argument = rest.strip()
        if (command := COMMANDS.get(name)) is None:
            raise PromptError(
                f'there is no command {shown(name)}; "/help" lists them, and "/{name[:100]}" says it to the model'
            )
        if bool(argument) != (command.argument is not None):
            raise PromptError(f'it is "{name} {command.argument}"' if command.argument else f"{name} stands alone")
        await command.obey(self, argument)


# --- commands -------------------------------------------------------------------------------------


@attrs.frozen
class Command:
    """Something that can be typed.

    Attributes:
        obey: does it, with what stands after its name. What it raises of Outrider's errors is shown, and the
            conversation goes on.
        help: what it does.
        argument: what has to stand after its name, or None.
    """

    obey: Callable[[Chat, str], Awaitable[None]]
    help: str
    argument: str | None = None


async def _reset(chat: Chat, _: str) -> None:
    chat.conversation.reset()
    say("forgotten; the conversation begins anew")


def _file(argument: str) -> str:
    return os.path.expanduser(argument)


async def _save(chat: Chat, argument: str) -> None:
    size = await chat.conversation.save(_file(argument))
    say(f"saved to {argument}, {size / 1e3:,.0f} kB")


async def _load(chat: Chat, argument: str) -> None:
    chat.conversation = await chat.runtime.load(_file(argument), any_draft=True, **chat.settings)
    say(f"going on from {argument}, after {len(chat.conversation.messages)} messages")


async def _exit(chat: Chat, _: str) -> None:
    chat.is_over = True


async def _help(_: Chat, __: str) -> None:
    rows = [(f"{name} {command.argument or ''}".strip(), command.help) for name, command in COMMANDS.items()]
    rows += [
        ("//...", 'says "/..." to the model'),
        ("...\\", "goes on in the next line"),
        (BLOCK, "opens a text of several lines, and closes it; pasted lines stay together"),
        ("Ctrl-C", "stops an answer; what was said stays"),
        ("Ctrl-D", "leaves"),
    ]
    for name, text in rows:
        show(f"  {name:<14} {text}")


COMMANDS: dict[str, Command] = {
    "/help": Command(_help, "shows this"),
    "/reset": Command(_reset, "forgets what was said"),
    "/save": Command(_save, "saves what was said to a file", "FILE"),
    "/load": Command(_load, "goes on from a saved file, with the settings given here in place of those", "FILE"),
    "/exit": Command(_exit, "leaves"),
}
