"""A terminal interface: type a prompt, and watch the text stream, with drafted tokens in their own colour.

    pip install -e '.[examples]'
    python examples/terminal.py
    python examples/terminal.py --target path/or/hub-id --draft path/or/hub-id --max-tokens 1000 --temperature 0.7

Esc stops a text at once and keeps what was written. Enter during a text replaces it by a new one, so you can type at
any time. The rule above the typed line shows the share of drafted tokens that were accepted, the speed, and the length
of the text. Arrow keys, Home, End and the usual Ctrl keys edit the line, Alt-Enter or Ctrl-J breaks it, Up and Down
walk through the history, and Page Up and Page Down scroll. Ctrl-C leaves, and so does Ctrl-D in an empty line; the
terminal is then restored, and the text stays on it.

A model with a chat template (which `--target` may have) holds a conversation. Any other model, such as the demo pair,
continues each prompt by itself.

The screen, the keys and the line editor are those of prompt_toolkit, on asyncio. An answer is a task: to cancel it is
all that Esc and Enter need.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import logging
import os
import re
import signal
import sys
import tempfile
import termios
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
from prompt_toolkit import Application, print_formatted_text
from prompt_toolkit.application import run_in_terminal
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import FormattedText, StyleAndTextTuples, fragment_list_width
from prompt_toolkit.input import create_input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.layout import BufferControl, Dimension, FormattedTextControl, HSplit, Layout, Window
from prompt_toolkit.layout.controls import UIContent, UIControl
from prompt_toolkit.layout.processors import AfterInput, ConditionalProcessor
from prompt_toolkit.output import create_output
from prompt_toolkit.styles import Style
from rich.cells import split_graphemes
from rich.console import Console
from rich.text import Text

import runtime

FRAME_S = 1 / 60  # shortest time between two frames
TICK_S = 0.1  # longest time between two frames
ESCAPE_S = 0.05  # after Esc, for the rest of a sequence, which a terminal sends at once

HINT = "type a prompt; Ctrl-D leaves"
HINT_MEANWHILE = "Esc stops; Enter begins something new"
TAB = "    "
GAUGE = 10  # cells
LONGEST_INPUT = 8  # rows

Parts = list[StyleAndTextTuples]  # of the status

# "thinking" is a model's reasoning; "note" and "error" are messages of the program.
COLOURS = {"drafted": "ansicyan", "thinking": "dim", "prompt": "bold", "note": "dim", "error": "ansired"}
NO_COLOURS = {**COLOURS, "drafted": "underline", "error": "bold"}


class Page:
    """The text of all prompts and answers, in lines that are wrapped to any width."""

    def __init__(self) -> None:
        self.lines = [Text()]
        self._width = 0
        self._rows: list[Text] = []  # of all lines but the last, at that width
        self._console = Console(file=io.StringIO())

    @property
    def is_empty(self) -> bool:
        """Whether the page has no text."""
        return len(self.lines) == 1 and not self.lines[0]

    def write(self, text: str, style: str = "plain") -> None:
        """Add text; control sequences in it are made harmless."""
        first, *others = harmless(text).split("\n")
        self.lines[-1].append(first, style)
        for line in others:
            self._rows += self._wrapped(self.lines[-1]) if self._width else []
            self.lines.append(Text().append(line, style))

    def begin_line(self) -> None:
        """End the last line unless it is empty."""
        if self.lines[-1]:
            self.write("\n")

    def rows(self, width: int) -> list[Text]:
        """The text as rows of a width >= 1, which end after words."""
        if width != self._width:
            self._width = width
            self._rows = [row for line in self.lines[:-1] for row in self._wrapped(line)]
        return [*self._rows, *self._wrapped(self.lines[-1])]

    def _wrapped(self, line: Text) -> list[Text]:
        return list(line.wrap(self._console, self._width, overflow="fold")) or [Text()]


def fragments(row: Text) -> StyleAndTextTuples:
    """A row for prompt_toolkit."""
    styled = [(" ".join(f"class:{word}" for word in str(span.style).split()), span) for span in row.spans]
    return [(style, row.plain[span.start : span.end]) for style, span in styled]


def harmless(text: str) -> str:
    """A text without control sequences, which a model may write and a terminal would obey.

    Line breaks stay, tabs become blanks, and other control characters become their symbols ("␛").
    """

    def shown(character: str) -> str:
        if character == "\n" or unicodedata.category(character) not in ("Cc", "Cs", "Zl", "Zp"):
            return character
        return chr(0x2400 + ord(character)) if character < " " else "\N{REPLACEMENT CHARACTER}"

    return "".join(map(shown, text.replace("\r", "").replace("\t", TAB)))


class PageControl(UIControl):
    """The visible part of the page that a function returns."""

    def __init__(self, page: Callable[[], Page]) -> None:
        self.page = page
        self.end: int | None = None  # the row after the visible part; None follows the end of the page
        self.num_below = 0  # rows below the visible part, in the last frame
        self._num_rows = self._height = 0

    def create_content(self, width: int, height: int) -> UIContent:
        rows = self.page().rows(max(1, width))
        end = len(rows) if self.end is None else min(self.end, len(rows))
        self._num_rows, self._height, self.num_below = len(rows), height, len(rows) - end
        shown = rows[max(0, end - height) : end]
        return UIContent(lambda i: fragments(shown[i]), len(shown), show_cursor=False)

    def scroll(self, pages: int) -> None:
        """Move the visible part."""
        end = (self._num_rows if self.end is None else self.end) + pages * max(1, self._height - 1)
        end = max(end, min(self._height, self._num_rows))
        self.end = end if end < self._num_rows else None


@attrs.define(eq=False)
class Answer:
    """A text that streams, or has ended; then `end` says how. Cancelling `task` stops it."""

    task: asyncio.Task[None] | None = None
    stream: runtime.aio.TokenStream | None = None
    end: str | None = None


class Interface:
    """The interface: typed input, streaming answers, and the screen."""

    def __init__(
        self,
        begin: Callable[[str], runtime.aio.TokenStream],
        *,
        is_chat: bool,
        max_tokens: int | None,
        greeting: Page,
        terminal: tuple[int, int] = (0, 1),
    ) -> None:
        """An interface that shows nothing yet.

        Args:
            begin: starts a stream for a prompt; the stream raises an `OutriderError` for a prompt that cannot be used.
            is_chat: whether prompts are answered, rather than continued.
            greeting: shown until the page has text.
            terminal: file descriptors to read and to write.
        """
        self.page = Page()
        self.signal: int | None = None  # that ended the program
        self._begin = begin
        self._is_chat = is_chat
        self._max_tokens = max_tokens
        self._answer: Answer | None = None
        self._turn = asyncio.Lock()  # held by the answer that is streaming
        self._view = PageControl(lambda: greeting if self.page.is_empty else self.page)
        self._line = Buffer(multiline=True)
        self._attributes = termios.tcgetattr(terminal[0])
        self.app: Application[None] = Application(
            Layout(HSplit([Window(self._view), *self._below()])),
            style=Style.from_dict(NO_COLOURS if os.environ.get("NO_COLOR") else COLOURS),
            key_bindings=self._keys(),
            full_screen=True,
            min_redraw_interval=FRAME_S,
            refresh_interval=TICK_S,
            input=create_input(os.fdopen(terminal[0], closefd=False)),
            output=create_output(os.fdopen(terminal[1], "w", closefd=False)),
        )
        self.app.timeoutlen = self.app.ttimeoutlen = ESCAPE_S

    async def run(self) -> None:
        """Run until the user leaves. Raises: OutriderError: the models are lost.

        Cancellation: restores the terminal.
        """
        with self._warnings_shown():
            async with asyncio.TaskGroup() as self._answers:
                try:
                    await self.app.run_async(set_exception_handler=False, handle_sigint=False)
                except (EOFError, OSError, termios.error):
                    self.signal = signal.SIGHUP  # the terminal has gone; the signal itself may or may not come
                finally:
                    self._end("stopped")

    def leave(self, number: int | None = None) -> None:
        """End the program, perhaps because of a signal."""
        if self.app.is_running and not self.app.is_done:
            self.signal = number
            self.app.exit()

    def _suspend(self) -> None:
        # prompt_toolkit restores nearly all of them.
        termios.tcsetattr(self.app.input.fileno(), termios.TCSANOW, self._attributes)
        os.kill(0, signal.SIGTSTP)

    def take_again(self) -> None:
        """Take the terminal again, which another program may have changed."""
        if self.app.is_running:
            run_in_terminal(lambda: None)

    # --- keys -------------------------------------------------------------------------------------

    def _keys(self) -> KeyBindings:
        keys, line = KeyBindings(), self._line

        @keys.add("enter")
        def _(_: KeyPressEvent) -> None:
            if line.text.strip():
                text = line.text
                if line.history.get_strings()[-1:] != [text]:
                    line.append_to_history()
                line.reset()
                self._ask(text)

        @keys.add("left")
        def _(_: KeyPressEvent) -> None:
            line.cursor_position -= length_before(line.document)

        @keys.add("right")
        def _(_: KeyPressEvent) -> None:
            line.cursor_position += length_after(line.document)

        @keys.add("backspace")
        def _(_: KeyPressEvent) -> None:
            line.delete_before_cursor(length_before(line.document))

        @keys.add("delete")
        @keys.add("c-d")
        def _(event: KeyPressEvent) -> None:
            if not line.text and event.key_sequence[0].key == Keys.ControlD:
                self.leave()
            line.delete(length_after(line.document))

        @keys.add(Keys.BracketedPaste)
        def _(event: KeyPressEvent) -> None:
            text = event.data.replace("\r\n", "\n").replace("\r", "\n").replace("\t", TAB)
            line.insert_text(re.sub(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", "", text))

        keys.add("c-j")(lambda _: line.insert_text("\n"))
        keys.add("escape", "enter")(lambda _: line.insert_text("\n"))
        keys.add("tab")(lambda _: line.insert_text(TAB))
        keys.add("escape")(lambda _: self._end("stopped"))
        keys.add("pageup")(lambda _: self._view.scroll(-1))
        keys.add("pagedown")(lambda _: self._view.scroll(1))
        keys.add("c-c")(lambda _: self.leave())
        keys.add("c-z")(lambda _: run_in_terminal(self._suspend))
        return keys

    # --- answers ----------------------------------------------------------------------------------

    def _ask(self, text: str) -> None:
        """Start a text, in place of the one that streams."""
        self._end("replaced")
        self._view.end = None
        if not self.page.is_empty:
            self.page.begin_line()
            self.page.write("\n")
        self.page.write(f"> {text}\n" if self._is_chat else text, "prompt")
        self._answer = Answer()
        self._answer.task = self._answers.create_task(self._write(self._answer, text))

    def _end(self, how: str) -> None:
        """Stop the text that streams; what was written stays."""
        if self._answer is not None and self._answer.end is None:
            assert self._answer.task is not None
            self._answer.end = how
            self._answer.task.cancel()
            self._remark(f"[{how}]")

    async def _write(self, answer: Answer, text: str) -> None:
        """Stream a text to the page. Cancellation: the models are free after the current forward pass."""
        # The previous answer may still be ending, and a conversation has one answer at a time.
        async with self._turn:
            try:
                async with self._begin(text) as answer.stream:
                    async for token in answer.stream:
                        self.page.write(token.text, _style(token))
                        self.app.invalidate()
                    answer.end = "full" if answer.stream.finish_reason == "length" else "done"
                    if answer.end == "full":
                        self._remark(f"[full, with {answer.stream.statistics().generated_tokens:,} tokens]")
            except (runtime.RuntimeBrokenError, runtime.RuntimeClosedError) as error:
                if not self.app.is_done:
                    self.app.exit(exception=error)
            except runtime.OutriderError as error:
                answer.end = "failed"
                self._remark(str(error), "error")

    def _remark(self, text: str, style: str = "note") -> None:
        self.page.begin_line()
        self.page.write(text, style)
        self.app.invalidate()

    @contextmanager
    def _warnings_shown(self) -> Iterator[None]:
        """Show the runtime's warnings on the page."""
        loop = asyncio.get_running_loop()
        logger, handler = logging.getLogger("outrider"), logging.Handler(logging.WARNING)
        handler.emit = lambda record: loop.call_soon_threadsafe(self._remark, f"[{record.getMessage()}]")
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)

    # --- screen -----------------------------------------------------------------------------------

    def _below(self) -> list[Window]:
        """The rule with the status, and the typed line."""
        hint = AfterInput(lambda: HINT_MEANWHILE if self._is_writing else HINT, "class:note")
        is_blank = Condition(lambda: not self._line.text)
        control = BufferControl(self._line, input_processors=[ConditionalProcessor(hint, is_blank)])
        return [
            Window(FormattedTextControl(self._rule), height=1, char="─", style="class:note"),
            Window(
                control,
                height=lambda: Dimension(max=max(1, min(LONGEST_INPUT, self._size().rows // 3))),
                wrap_lines=True,
                dont_extend_height=True,
                get_line_prefix=lambda number, wrapped: [("class:prompt", "  " if number or wrapped else "> ")],
            ),
        ]

    def _size(self) -> Any:
        return self.app.output.get_size()

    @property
    def _is_writing(self) -> bool:
        return self._answer is not None and self._answer.end is None

    def _rule(self) -> StyleAndTextTuples:
        """The status, in the longest wording that fits."""
        rule: StyleAndTextTuples = []
        for parts in self._wordings():
            rule = [("class:note", "─")]
            for part in parts:
                rule += [("class:note", " "), *part, ("class:note", " ─")]
            if fragment_list_width(rule) <= self._size().columns:
                break
        return rule

    def _wordings(self) -> Iterator[Parts]:
        """The wordings of the status, from the longest to the shortest: parts, each of fragments.

        Numbers have fixed widths, so that the parts stay in place while numbers grow.
        """
        plain, answer = "class:plain", self._answer
        statistics = None if answer is None or answer.stream is None else answer.stream.statistics()
        begin: Parts = [[(plain, self._activity(statistics))]]
        if self._view.num_below:
            begin.append([("class:prompt", f"{self._view.num_below:,} more below")])
        count, rates, short_rates = Parts(), Parts(), Parts()
        gauge: StyleAndTextTuples = []
        if statistics is not None and (statistics.generated_tokens or not self._is_writing):
            num_tokens, limit = statistics.generated_tokens, self._max_tokens
            most = "" if limit is None else f"{limit:,}"
            count.append([(plain, f"{num_tokens:>{len(most)},} of {most}" if most else f"{num_tokens:,} tokens")])
            if limit is not None:
                filled = min(GAUGE, GAUGE * num_tokens // limit)
                gauge = [(plain, "█" * filled), ("class:note", "░" * (GAUGE - filled)), (plain, " ")]
            if (rate := statistics.acceptance_rate) is not None:
                rates.append([("class:drafted", "drafted"), (plain, f" {rate:4.0%} accepted")])
                short_rates.append([("class:drafted", f"{rate:4.0%}")])
            if (speed := statistics.generation_tps) is not None:
                rates.append([(plain, f"{speed:5.1f} tokens/s")])
                short_rates.append([(plain, f"{speed:3.0f}/s")])
        full = [gauge + each for each in count]
        yield from ([*begin, *full, *rates], [*begin, *full, *short_rates], [*begin, *count, *short_rates])
        yield from ([*begin, *count], begin[-1:])

    def _activity(self, statistics: runtime.Statistics | None) -> str:
        if self._answer is None:
            return "ready"
        if self._answer.end is not None or statistics is None:
            return self._answer.end or "beginning"
        if statistics.generated_tokens:
            return "writing"
        seconds = f" for {statistics.elapsed:.0f} s" if statistics.elapsed >= 1 else ""
        return f"reading {statistics.prompt_tokens:,} tokens{seconds}"


def length_before(document: Document) -> int:
    """Length of what looks like one character before the cursor, such as a letter and its accent; at least 1."""
    spans, _ = split_graphemes(document.current_line_before_cursor)
    return spans[-1][1] - spans[-1][0] if spans else 1


def length_after(document: Document) -> int:
    """The same after the cursor."""
    spans, _ = split_graphemes(document.current_line_after_cursor)
    return spans[0][1] if spans else 1


def _style(token: runtime.Token) -> str:
    return " ".join(["plain", *["thinking"] * token.is_thinking, *["drafted"] * token.from_draft])


# --- the program ----------------------------------------------------------------------------------


async def main(target: str | Path, draft: str | Path | None, settings: dict[str, Any]) -> int:
    for name, stream in (("stdin", sys.stdin), ("stdout", sys.stdout)):
        if stream is None or not stream.isatty():
            sys.exit(f"error: {name} is no terminal, and this program is nothing without one")
    names = [Path(model).name for model in (target, draft) if model is not None]
    print(f"loading {' and '.join(names)} ...", flush=True)
    async with runtime.aio.open(target, draft=draft) as rt:
        is_chat = rt.tokenizer is not None and rt.tokenizer.has_chat_template
        interface = Interface(
            rt.conversation(**settings).stream if is_chat else lambda text: rt.stream(text, **settings),
            is_chat=is_chat,
            max_tokens=settings["max_tokens"],
            greeting=greeting(names, is_chat),
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, interface.leave, number)
        loop.add_signal_handler(signal.SIGCONT, interface.take_again)
        with stderr_kept():
            await interface.run()
    if interface.signal != signal.SIGHUP:
        for line in interface.page.lines:
            print_formatted_text(FormattedText(fragments(line)), style=interface.app.style)
    return 0 if interface.signal is None else 128 + interface.signal


@contextmanager
def stderr_kept() -> Iterator[None]:
    """Hold back all output to stderr, and write it after the block."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as said:
        stderr = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            said.seek(0)
            with suppress(OSError):  # the terminal has gone
                sys.stderr.write(said.read().decode(errors="replace"))
                sys.stderr.flush()


def greeting(names: list[str], is_chat: bool) -> Page:
    page = Page()
    page.write(" + ".join(names), "prompt")
    page.write(f"\nWhat you type is {'answered' if is_chat else 'continued'}.", "note")
    if len(names) > 1:
        page.write(" Tokens that were drafted ", "note")
        page.write("look like this", "drafted")
        page.write(".", "note")
    return page


def number_or_none(text: str) -> int | None:
    return None if text == "none" else int(text)


def parsed() -> tuple[str | Path, str | Path | None, dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", metavar="MODEL", help="path or hub id (default: the bundled demo pair)")
    parser.add_argument("--draft", metavar="MODEL", help='path or hub id; "ngram" looks up; "none" decodes plainly')
    parser.add_argument("--max-tokens", metavar="N", type=number_or_none, default=256, help='or "none" for no limit')
    parser.add_argument("--temperature", metavar="T", type=float, default=0.0, help="0 is greedy")
    args = parser.parse_args()
    settings = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    try:
        runtime.Settings(**settings)
    except runtime.SettingsError as error:
        parser.error(str(error))
    draft = args.draft or (runtime.DEMO_DRAFT if args.target is None else None)
    return args.target or runtime.DEMO_TARGET, None if draft == "none" else draft, settings


if __name__ == "__main__":
    try:
        status = asyncio.run(main(*parsed()))
    except runtime.OutriderError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT  # while the models were loaded
    sys.exit(status)
