"""A terminal interface: type a prompt, and watch the text stream, with drafted tokens in their own colour.

    python examples/terminal.py
    python examples/terminal.py --target path/or/hub-id --draft path/or/hub-id --max-tokens 1000 --temperature 0.7

Esc stops a text at once and keeps what was written. Enter during a text replaces it by a new one, so you can type at
any time. The rule above the typed line shows the share of drafted tokens that were accepted, the speed, and the length
of the text. Arrow keys, Home, End and the usual Ctrl keys edit the line, Alt-Enter or Ctrl-J breaks it, Up and Down
walk through the history, and Page Up and Page Down scroll. Ctrl-C leaves, and so does Ctrl-D in an empty line; the
terminal is then restored, and the text stays on it.

A model with a chat template (which `--target` may have) holds a conversation. Any other model, such as the demo pair,
continues each prompt by itself.

This is one trio program. An answer is a task with a cancel scope, which is all that Esc and Enter need. The line editor
and the screen are in `examples/console/`.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import attrs
import trio
from console.editor import Editor
from console.keys import Decoder, Event, Key
from console.page import Page, Style
from console.screen import COLOURS, NO_COLOURS, Frame, Status, View, draw, page_height, paint, styled
from console.terminal import NoTerminalError, Terminal, stderr_kept

import runtime

FRAME_S = 1 / 60  # shortest time between two frames
TICK_S = 0.1  # longest time between two frames while a text streams

HINT = "type a prompt; Ctrl-D leaves"
HINT_MEANWHILE = "Esc stops; Enter begins something new"


@attrs.define(eq=False)
class Answer:
    """A text that streams, or has ended; then `end` says how. Cancelling `scope` stops it."""

    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    stream: runtime.TokenStream | None = None
    end: str | None = None


class Interface:
    """The interface: typed input, streaming answers, and the screen.

    Attributes:
        page: the text of all prompts and answers.
        signal, failure: number of the signal, or error, that ended the program, if any.
    """

    def __init__(
        self,
        terminal: Terminal,
        begin: Callable[[str], runtime.TokenStream],
        *,
        is_chat: bool,
        max_tokens: int | None,
        greeting: Page,
    ) -> None:
        """An interface that shows nothing yet.

        Args:
            begin: starts a stream for a prompt; raises an `OutriderError` for a prompt that cannot be used.
            is_chat: whether prompts are answered, rather than continued.
            greeting: shown until the page has text.
        """
        self.page = Page()
        self.signal: int | None = None
        self.failure: runtime.OutriderError | None = None
        self._terminal = terminal
        self._begin = begin
        self._is_chat = is_chat
        self._max_tokens = max_tokens
        self._greeting = greeting
        self._editor = Editor()
        self._answer: Answer | None = None
        self._turn = trio.Lock()  # held by the answer that is streaming
        self._view_end: int | None = None  # row of the page after the visible part; None shows the end
        self._palette = NO_COLOURS if os.environ.get("NO_COLOR") else COLOURS
        self._shown: Frame | None = None
        self._changed = trio.Event()
        self._everything = trio.CancelScope()

    async def run(self) -> None:
        """Run until the user leaves.

        Cancellation: restores the terminal.
        """
        with self._terminal.taken(), self._everything, self._warnings_shown():
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                await nursery.start(self._hear_signals)
                nursery.start_soon(self._keep_drawn)
                await self._read_keys()

    def leave(self) -> None:
        """End the program."""
        self._everything.cancel()

    # --- input ------------------------------------------------------------------------------------

    async def _read_keys(self) -> None:
        decoder = Decoder()
        while True:
            data = None
            patience_s = decoder.patience_s
            with trio.move_on_after(float("inf") if patience_s is None else patience_s):
                data = await self._terminal.read()
            if data == b"":
                self.signal = signal.SIGHUP  # the signal itself may or may not come
                self.leave()
            for event in decoder.settle() if data is None else decoder.feed(data):
                self._obey(event)
                self._change()

    def _obey(self, event: Event) -> None:
        match event:
            case Key("escape"):
                self._end("stopped")
            case Key("ctrl-c"):
                self.leave()
            case Key("ctrl-d") if not self._editor.line.text:
                self.leave()
            case Key("ctrl-z"):
                self._terminal.suspend()
                self._shown = None
            case Key("ctrl-l"):
                self._shown = None
            case Key("page-up"):
                self._scroll(-1)
            case Key("page-down"):
                self._scroll(1)
            case _:
                if (text := self._editor.press(event)) is not None:
                    self._ask(text)

    async def _hear_signals(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        leaving = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        with trio.open_signal_receiver(*leaving, signal.SIGWINCH, signal.SIGCONT) as signals:
            task_status.started()
            async for number in signals:
                if number in leaving:
                    self.signal = number
                    self.leave()
                elif number == signal.SIGCONT:
                    self._terminal.take()  # another program may have changed it meanwhile
                self._shown = None
                self._change()

    # --- answers ----------------------------------------------------------------------------------

    def _ask(self, text: str) -> None:
        """Start a text, in place of the one that streams."""
        self._end("replaced")
        self._view_end = None
        if not self.page.is_empty:
            self.page.begin_line()
            self.page.write("\n", "plain")
        self.page.write(f"> {text}\n" if self._is_chat else text, "prompt")
        self._answer = Answer()
        self._nursery.start_soon(self._write, self._answer, text)

    def _end(self, how: str) -> None:
        """Stop the text that streams; what was written stays."""
        if self._answer is not None and self._answer.end is None:
            self._answer.end = how
            self._answer.scope.cancel()
            self._remark(f"[{how}]")

    async def _write(self, answer: Answer, text: str) -> None:
        """Stream a text to the page.

        Cancellation: ends the generation; the models are free after the current forward pass.
        """
        with answer.scope:
            # The previous answer may still be ending, and a conversation has one answer at a time.
            async with self._turn:
                try:
                    async with self._begin(text) as answer.stream:
                        async for token in answer.stream:
                            if answer.end is not None:
                                return  # the text was stopped before this token arrived
                            self.page.write(token.text, _style(token))
                            self._change()
                        answer.end = "full" if answer.stream.finish_reason == "length" else "done"
                        self._change()
                        if answer.end == "full":
                            self._remark(f"[full, with {answer.stream.statistics().generated_tokens:,} tokens]")
                except (runtime.RuntimeBrokenError, runtime.RuntimeClosedError) as error:
                    self.failure = error
                    self.leave()
                except runtime.OutriderError as error:
                    if answer.end is None:
                        answer.end = "failed"
                        self._remark(str(error), "error")

    def _remark(self, text: str, style: Style = "note") -> None:
        self.page.begin_line()
        self.page.write(text, style)
        self._change()

    @contextmanager
    def _warnings_shown(self) -> Iterator[None]:
        """Show the runtime's warnings on the page."""
        token = trio.lowlevel.current_trio_token()

        logger, handler = logging.getLogger("outrider"), logging.Handler(logging.WARNING)
        handler.emit = lambda record: token.run_sync_soon(self._remark, f"[{record.getMessage()}]")
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)

    # --- screen -----------------------------------------------------------------------------------

    def _change(self) -> None:
        self._changed.set()

    async def _keep_drawn(self) -> None:
        while True:
            self._changed = trio.Event()
            frame = draw(self._view())
            painting, self._shown = paint(self._shown, frame, self._palette), frame
            await self._terminal.write(painting)
            # The first change after a pause is drawn at once, so that typed characters appear without delay.
            await trio.sleep(FRAME_S)
            with trio.move_on_after(TICK_S if self._is_writing else float("inf")):
                await self._changed.wait()

    def _view(self) -> View:
        width, height = self._terminal.size()
        rows = (self._greeting if self.page.is_empty else self.page).rows(width)
        end = len(rows) if self._view_end is None else min(self._view_end, len(rows))
        hint = HINT_MEANWHILE if self._is_writing else HINT
        return View(width, height, rows, len(rows) - end, self._status(), self._editor.line, hint)

    @property
    def _is_writing(self) -> bool:
        return self._answer is not None and self._answer.end is None

    def _status(self) -> Status:
        if self._answer is None:
            return Status("ready")
        if self._answer.stream is None:
            return Status(self._answer.end or "beginning")
        statistics = self._answer.stream.statistics()
        if not statistics.generated_tokens and self._answer.end is None:
            seconds = f" for {statistics.elapsed:.0f} s" if statistics.elapsed >= 1 else ""
            return Status(f"reading {statistics.prompt_tokens:,} tokens{seconds}")
        return Status(
            self._answer.end or "writing",
            statistics.acceptance_rate,
            statistics.generation_tps,
            statistics.generated_tokens,
            self._max_tokens,
        )

    def _scroll(self, pages: int) -> None:
        view = self._view()
        height = page_height(view)
        end = len(view.page) - view.num_below + pages * max(1, height - 1)
        end = max(end, min(height, len(view.page)))
        self._view_end = end if end < len(view.page) else None


def _style(token: runtime.Token) -> Style:
    if token.is_thinking:
        return "drafted thinking" if token.from_draft else "thinking"
    return "drafted" if token.from_draft else "plain"


# --- the program ----------------------------------------------------------------------------------


async def main(target: str | Path, draft: str | Path | None, settings: dict[str, Any]) -> int:
    async with aclosing(Terminal(0, 1)) as terminal:
        names = [Path(model).name for model in (target, draft) if model is not None]
        print(f"loading {' and '.join(names)} ...", flush=True)
        async with runtime.open(target, draft=draft) as rt:
            is_chat = rt.tokenizer is not None and rt.tokenizer.has_chat_template

            def begin(text: str) -> runtime.TokenStream:
                return rt.stream(text, **settings)

            interface = Interface(
                terminal,
                rt.conversation(**settings).stream if is_chat else begin,
                is_chat=is_chat,
                max_tokens=settings["max_tokens"],
                greeting=greeting(names, is_chat),
            )
            with stderr_kept():
                await interface.run()
            if interface.signal != signal.SIGHUP:
                for row in interface.page.lines():
                    print(styled(row, NO_COLOURS if os.environ.get("NO_COLOR") else COLOURS))
    if interface.failure is not None:
        raise interface.failure
    return 0 if interface.signal is None else 128 + interface.signal


def greeting(names: list[str], is_chat: bool) -> Page:
    page = Page()
    page.write(" + ".join(names), "prompt")
    page.write("\nWhat you type is answered." if is_chat else "\nWhat you type is continued.", "note")
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
        status = trio.run(main, *parsed())
    except (NoTerminalError, runtime.OutriderError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT  # while the models were loaded
    sys.exit(status)
