"""The terminal example in a terminal: what its screen shows after input, and what it leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import terminal as example
import trio
import trio.lowlevel
from chat_models import THINKING_TEMPLATE, says, target, tokenizer
from command_line import environment
from models import Failing, near
from polling import until_in_trio
from screens import HANGS_S, Person, person
from sweeps import sweep

import runtime

ROOT = Path(__file__).parents[2]
ESCAPE = "\x1b"
CTRL_D = "\x04"


Model = Any  # a path, or a model with its tokenizer


@contextlib.asynccontextmanager
async def at_work(
    target: Model,
    draft: Model = None,
    columns: int = 80,
    rows: int = 24,
    *,
    is_chat: bool = False,
    failures: list[BaseException] | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[Person, example.Interface]]:
    """A person in front of the interface, which runs on asyncio in a thread; they leave it on exit.

    What ends the interface before is added to `failures`.
    """
    settings = {"max_tokens": None, **settings}
    begun: list[example.Interface] = []

    async def run() -> None:
        greeting = example.Page()
        greeting.write("hello", "note")
        async with runtime.aio.open(target, draft=draft) as rt:
            begin = rt.conversation(**settings).stream if is_chat else lambda text: rt.stream(text, **settings)
            begun.append(
                example.Interface(
                    begin,
                    is_chat=is_chat,
                    max_tokens=settings["max_tokens"],
                    greeting=greeting,
                    terminal=(somebody.given, somebody.given),
                )
            )
            await begun[0].run()

    async def run_in_thread() -> None:
        try:
            await trio.to_thread.run_sync(asyncio.run, run())
        except Exception as error:
            if failures is None:
                raise
            failures.append(error)

    async with person(columns, rows) as somebody:
        before = somebody.attributes
        with trio.fail_after(HANGS_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run_in_thread)
                await somebody.sees("ready")
                try:
                    yield somebody, begun[0]
                finally:
                    if (loop := begun[0].app.loop) is not None:
                        loop.call_soon_threadsafe(begun[0].leave)
        assert somebody.attributes == before


def written(interface: example.Interface) -> str:
    """All text on the page, whether or not the screen has space for it."""
    return "\n".join(line.plain for line in interface.page.lines)


def num_written(shown: str) -> int:
    """The number of tokens in the status rule."""
    counted = re.search(r"─ +([\d,]+) tokens", shown)
    return int(counted[1].replace(",", "")) if counted else 0


# --- Esc and Enter --------------------------------------------------------------------------------


async def test_esc_stops_at_once_and_what_was_written_stays(endless: str) -> None:
    async with at_work(endless) as (somebody, interface):
        await somebody.types("w1 w2\r")
        await somebody.sees(lambda shown: num_written(shown) > 20)
        assert "─ writing ─" in somebody.shown
        await somebody.types(ESCAPE)
        stopped = await somebody.sees("─ stopped ─")
        assert "\n[stopped]\n" in stopped
        # The next text uses the models; the written part of the last text is still there.
        await somebody.types("w3 w4")
        assert (await somebody.sees("> w3 w4")).splitlines()[:22] == stopped.splitlines()[:22]
        await somebody.types("\r")
        await somebody.sees(lambda shown: "─ writing ─" in shown and num_written(shown) > 20)
        await somebody.types(ESCAPE)
        assert "\n[stopped]\n" in await somebody.sees("─ stopped ─")
        # By now, the first one may be above the part that the screen shows.
        assert written(interface).count("[stopped]") == 2


async def test_enter_puts_a_new_text_in_the_place_of_the_one_being_written(endless: str) -> None:
    async with at_work(endless) as (somebody, interface):
        await somebody.types("w1 w2\r")
        await somebody.sees(lambda shown: num_written(shown) > 5)
        await somebody.types("w3")
        # Typing does not stop the text.
        before = num_written(await somebody.sees("> w3"))
        await somebody.sees(lambda shown: num_written(shown) > before)
        await somebody.types("\r")
        await until_in_trio(lambda: "[replaced]\n\nw3" in written(interface))
        # If several prompts arrive in one read, the last one counts.
        await somebody.types("w4\rw5\rw6\r")
        await until_in_trio(lambda: "[replaced]\n\nw6" in written(interface))
        assert written(interface).count("[replaced]") == 4
        await somebody.sees(lambda shown: num_written(shown) > 5)


# --- the screen -----------------------------------------------------------------------------------


async def test_a_chat_model_is_answered_with_all_that_was_said() -> None:
    of = tokenizer(THINKING_TEMPLATE, thinks=True)
    answers = says(of, "<think>well</think>one", "two, and more of it", "three")
    pair = (target(), of), (near(target(), noise=0.05), None)
    async with at_work(*pair, 40, 14, is_chat=True, max_tokens=40, logits_processors=[answers]) as (somebody, _):
        await somebody.types("first\r")
        await somebody.sees("─ done ─")
        await somebody.types("second\r")
        await somebody.sees(lambda shown: "more of it" in shown and "─ done ─" in shown)
        assert somebody.shown.splitlines()[:6] == [
            "> first",
            "<think>well</think>one",
            "",
            "> second",
            "two, and more of it",
            "",
        ]


async def test_a_target_that_fails_ends_the_program_with_its_error() -> None:
    failing, failures = Failing(target()), list[BaseException]()
    async with at_work((failing, tokenizer(None)), failures=failures) as (somebody, _):
        failing.fails = True
        await somebody.types("x = 1\r")
        await until_in_trio(lambda: bool(failures))
    (error,) = failures[0].exceptions if isinstance(failures[0], BaseExceptionGroup) else failures
    assert isinstance(error, runtime.RuntimeBrokenError)
    assert "out of memory" in str(error)


async def test_a_model_that_writes_control_sequences_does_not_rule_the_terminal() -> None:
    of = tokenizer()
    answer = says(of, "a\x1b[2Jb\x1b]0;title\x07\x1b[?1049lc\td")
    async with at_work((target(), of), is_chat=True, max_tokens=60, logits_processors=[answer]) as (somebody, _):
        await somebody.types("go\r")
        shown = await somebody.sees("─ done ─")
        assert shown.splitlines()[:2] == ["> go", "a␛[2Jb␛]0;title␇␛[?1049lc    d"]
        assert b"title\x07" not in somebody.sent
    assert example.harmless("\rb\tc\x9b1m\x7f\u2028") == "b    c\ufffd1m\ufffd\ufffd"


# --- the window -----------------------------------------------------------------------------------


async def test_in_a_window_of_another_size_all_is_where_it_belongs(endless: str) -> None:
    async with at_work(endless, max_tokens=60) as (somebody, interface):
        await somebody.types("w1\r")
        await somebody.sees("[full, with 60 tokens]")
        await somebody.types("typed")
        await somebody.sees("> typed")
        text = interface.page.lines[0].plain
        for columns, rows in ((40, 30), (132, 8), (80, 24)):
            somebody.resizes(columns, rows)
            await somebody.sees(lambda shown: shown.endswith("> typed") and "─ full ─" in shown)
            assert len(somebody.shown.split("\n")) == rows
            above = [row for row in somebody.shown.splitlines()[:-2] if row and not row.startswith("[")]
            assert text.replace(" ", "").endswith("".join(above).replace(" ", ""))
            assert somebody.shown.splitlines()[-2].startswith("─ full ─")


# --- leaving --------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def program(*arguments: str, **options: Any) -> AsyncIterator[tuple[Person, trio.Process]]:
    """A person in front of the program, which runs as a process."""
    async with person() as somebody:
        process = await trio.lowlevel.open_process(
            [sys.executable, str(ROOT / "examples" / "terminal.py"), *arguments],
            **{"stdin": somebody.given, "stdout": somebody.given, "stderr": somebody.given, "env": environment()},
            **options,
        )
        try:
            with trio.fail_after(HANGS_S):
                yield somebody, process
        finally:
            if process.returncode is None:
                process.kill()
                with trio.CancelScope(shield=True):
                    await process.wait()


async def ends(somebody: Person, process: trio.Process) -> tuple[int | None, list[Any]]:
    """The exit status of a process that a person watches, and the terminal's attributes then."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(somebody.sees_the_end)
        await process.wait()
        attributes = somebody.attributes
        somebody.lets_go()
    return process.returncode, attributes


@sweep(
    ("way", "status"),
    [
        (f"{ESCAPE}{CTRL_D}", 0),
        pytest.param(signal.SIGTERM, 128 + 15, marks=pytest.mark.slow),
    ],
)
async def test_leaving_gives_the_terminal_back_and_leaves_the_text_on_it(
    way: str | signal.Signals, status: int, endless: str
) -> None:
    async with program("--target", endless, "--max-tokens", "none") as (somebody, process):
        before, modes = somebody.attributes, set(somebody.screen.mode)
        await somebody.sees("ready")
        assert somebody.attributes != before
        assert somebody.screen.mode != modes
        await somebody.types("w1 w2\r")
        await somebody.sees(lambda shown: "─ writing ─" in shown and num_written(shown) > 5)
        if isinstance(way, signal.Signals):
            process.send_signal(way)
        else:
            await somebody.types(way)
        assert await ends(somebody, process) == (status, before)
    assert somebody.screen.mode == modes
    assert not somebody.screen.cursor.hidden
    assert re.fullmatch(r"loading endless \.\.\.\nw1 w2[w\d\s]*(\[stopped\])?\s*", somebody.shown)
