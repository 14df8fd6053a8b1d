"""The input of a chat: texts that a user types, and what SIGINT and SIGTERM do meanwhile."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import trio

from protocol.errors import PromptError
from runtime.terminal.display import print_stderr
from runtime.terminal.signals import SignalScope

PROMPT = "> "
MORE_PROMPT = ". "  # in front of each further line of a text
BLOCK = '"""'


class LineReader:
    """Reads texts from the lines of stdin, with line editing and a history if both stdin and stdout are terminals.

    At a terminal a text may have several lines: lines that are pasted at once, lines that end in a backslash with the
    one after them, and lines between two `BLOCK`s. Elsewhere each line is a text.
    """

    def __init__(self) -> None:
        self.is_interactive = sys.stdin is not None and sys.stdin.isatty()
        self._is_edited = self.is_interactive and sys.stdout is not None and sys.stdout.isatty()
        if self._is_edited:
            # A Python may be built without readline; lines can be typed without it.
            with suppress(ImportError):
                import readline  # importing it makes input() edit lines

                # With it, pasted lines are one text until Enter is pressed. Python turns it off. (libedit, which macOS
                # has in place of readline, ignores the setting.)
                readline.parse_and_bind("set enable-bracketed-paste on")

    def read(self) -> str | None:
        """The next text without its line break; None at the end of stdin. Blocks the thread.

        Raises: PromptError: the input is not valid text, or stdin is closed.
        """
        try:
            line = self._read_line(PROMPT)
            if line is None or not self.is_interactive or "\n" in line:
                return line
            if line.lstrip().startswith(BLOCK):
                return self._block(line.lstrip().removeprefix(BLOCK))
            while line.endswith("\\"):
                if (following := self._read_line(MORE_PROMPT)) is None:
                    return None
                line = line.removesuffix("\\") + "\n" + following
            return line
        except UnicodeError as error:
            raise PromptError(
                f"what was typed is not valid text: {error}; type it as {sys.getfilesystemencoding()}"
            ) from error

    def _block(self, text: str) -> str | None:
        """The text up to the closing mark, which begins with the rest of the line with the opening one."""
        while not text.rstrip().endswith(BLOCK):
            if (following := self._read_line(MORE_PROMPT)) is None:
                return None
            text += "\n" + following
        text = text.rstrip().removesuffix(BLOCK).strip("\n")
        # A block is a text, never a command.
        return f"/{text}" if text.startswith("/") and "\n" not in text else text

    def _read_line(self, prompt: str) -> str | None:
        if sys.stdin is None:
            raise PromptError("chat reads from stdin, and stdin is closed; open it")
        if self._is_edited:
            try:
                return input(prompt)
            except EOFError:
                print_stderr("")  # the cursor is still behind the prompt
                return None
        if self.is_interactive:
            print_stderr(prompt, end="")
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None


class SignalWhileTyping(BaseException):
    """A signal, of this number, arrived while a line was being typed. A BaseException, like KeyboardInterrupt."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class ChatSignals(SignalScope):
    """Signals of a chat: Ctrl-C stops an answer or drops the typed line; other signals end the chat.

    Attributes:
        is_interactive: whether a user may go on after Ctrl-C; if not, Ctrl-C ends the chat.
        is_reading: whether prefill is running, whose passes may take long.
    """

    is_interactive = False
    is_reading = False
    _is_typing = False
    _came_between = False  # whether Ctrl-C came between an answer and a prompt
    _answer: trio.CancelScope | None = None

    def intercept(self, number: int) -> bool:
        """See `SignalScope.intercept`. Raises: SignalWhileTyping: a line is being typed."""
        if self._is_typing:
            self._is_typing = False
            raise SignalWhileTyping(number)
        # Once the chat is being left, every further signal is for the scope.
        if not self.is_interactive or number != signal.SIGINT or self.outcome.signal is not None:
            return False
        if self._answer is not None:
            trio.lowlevel.current_trio_token().run_sync_soon(self._stop, self._answer)
        else:
            self._came_between = True
        return True

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Have Ctrl-C cancel the block, and nothing beyond it."""
        with trio.CancelScope() as self._answer:
            try:
                yield
            finally:
                self._answer = None

    def while_typing(self, read: Callable[[], str | None]) -> str | None:
        """Call `read`, which blocks trio until a line is typed. Raises: SignalWhileTyping: a signal arrived first."""
        self._is_typing = True
        try:
            if self._came_between:
                raise SignalWhileTyping(signal.SIGINT)
            return read()
        finally:
            self._is_typing = self._came_between = False

    def _stop(self, answer: trio.CancelScope) -> None:
        answer.cancel()
        if self.is_reading:
            self.display.show_stopping(and_then="")
