"""The terminal example in a terminal: what its screen shows after input, and what it leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import terminal as example
import trio
import trio.lowlevel
from blocking_models import BlockingModel
from chat_models import THINKING_TEMPLATE, says, target, tokenizer
from command_line import environment, save_model
from models import Failing, near
from polling import until_in_trio
from prompt_toolkit.document import Document
from screens import HANGS_S, Person, person
from sweeps import sweep

import runtime

ROOT = Path(__file__).parents[2]
ESCAPE, UP, PAGE_UP, PAGE_DOWN = "\x1b", "\x1b[A", "\x1b[5~", "\x1b[6~"
CTRL_C, CTRL_D, CTRL_L = "\x03", "\x04", "\x0c"


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


async def test_esc_and_enter_take_effect_while_a_prompt_is_being_read() -> None:
    held = BlockingModel(target())
    async with at_work((held, tokenizer(None)), prefill_step_size=8) as (somebody, _):
        try:
            held.block(after=1)
            await somebody.types("a prompt that takes several passes, of which one is held up half way\r")
            await held.blocked_in_trio()
            await somebody.sees("─ reading ")
            await somebody.types("x = 1\r")
            await somebody.sees("[replaced]")
            await somebody.types(ESCAPE)
            await somebody.sees("─ stopped ─")
        finally:
            held.release()
        await somebody.types("y = 2\r")
        await somebody.sees(lambda shown: num_written(shown) > 5)


async def test_esc_and_enter_where_nothing_is_written_or_typed_change_nothing(endless: str) -> None:
    async with at_work(endless, max_tokens=3) as (somebody, interface):
        await somebody.types(f"w1{ESCAPE}")
        await somebody.sees("> w1")
        await somebody.types("w2\r")
        full = await somebody.sees("[full, with 3 tokens]")
        await somebody.types("\r  \r.")
        assert (await somebody.sees("  .")).splitlines()[:-2] == full.splitlines()[:-2]
        assert written(interface).startswith("w1w2")


# --- the screen -----------------------------------------------------------------------------------


@pytest.mark.slow
async def test_the_text_is_the_model_s_and_drafted_tokens_have_their_colour() -> None:
    async with runtime.open(runtime.DEMO_TARGET, runtime.DEMO_DRAFT) as rt:
        tokens = (await rt.generate("class Stack:", max_tokens=40)).tokens
    # With "auto" it may propose nothing if that does not pay.
    async with at_work(runtime.DEMO_TARGET, runtime.DEMO_DRAFT, max_tokens=40, lookahead=3) as (somebody, interface):
        await somebody.types("class Stack:\r")
        shown = await somebody.sees("[full, with 40 tokens]")
        text = "class Stack:" + "".join(token.text for token in tokens)
        assert shown.partition("[full")[0].split() == text.split()
        assert "██████████ 40 of 40" in shown
        assert "accepted" in shown
        runs = [run for line in interface.page.lines for run in example.fragments(line)]
        drafted = "".join(text for style, text, *_ in runs if "class:drafted" in style)
        assert drafted
        assert somebody.coloured("cyan").replace(" ", "") == drafted.replace(" ", "") + "drafted"


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


async def test_a_prompt_that_will_not_do_gets_its_message_and_the_next_is_taken(tmp_path: Path) -> None:
    async with at_work(str(save_model(tmp_path / "short", context=8)), max_tokens=2) as (somebody, _):
        await somebody.types("w1 w2 w3 w4 w5 w6 w7 w8 w9\r")
        assert "prompt is too long: 9 tokens" in await somebody.sees("─ failed ─")
        assert somebody.coloured("red").startswith("prompt is too long: 9 tokens")
        await somebody.types("w1\r")
        await somebody.sees("[full, with 2 tokens]")


async def test_a_target_that_fails_ends_the_program_with_its_error() -> None:
    failing, failures = Failing(target()), list[BaseException]()
    async with at_work((failing, tokenizer(None)), failures=failures) as (somebody, _):
        failing.fails = True
        await somebody.types("x = 1\r")
        await until_in_trio(lambda: bool(failures))
    (error,) = failures[0].exceptions if isinstance(failures[0], BaseExceptionGroup) else failures
    assert isinstance(error, runtime.RuntimeBrokenError)
    assert "out of memory" in str(error)


async def test_a_warning_of_the_runtime_s_is_shown_on_the_page(endless: str) -> None:
    async with at_work(endless) as (somebody, _):
        logging.getLogger("outrider").warning("the draft model %s", "failed")
        await somebody.sees("[the draft model failed]")


async def test_a_model_that_writes_control_sequences_does_not_rule_the_terminal() -> None:
    of = tokenizer()
    answer = says(of, "a\x1b[2Jb\x1b]0;title\x07\x1b[?1049lc\td")
    async with at_work((target(), of), is_chat=True, max_tokens=60, logits_processors=[answer]) as (somebody, _):
        await somebody.types("go\r")
        shown = await somebody.sees("─ done ─")
        assert shown.splitlines()[:2] == ["> go", "a␛[2Jb␛]0;title␇␛[?1049lc    d"]
        assert b"title\x07" not in somebody.sent
    assert example.harmless("\rb\tc\x9b1m\x7f\u2028") == "b    c\ufffd1m\ufffd\ufffd"


@sweep(
    ("text", "width", "rows"),
    [
        ("", 4, [""]),
        ("abcde", 4, ["abcd", "e"]),
        ("one two", 5, ["one ", "two"]),
        ("one two", 3, ["one", "two"]),
        ("日本語", 5, ["日本", "語"]),
        ("one\n\ntwo", 5, ["one", "", "two"]),
    ],
)
def test_lines_are_wrapped_after_words(text: str, width: int, rows: list[str]) -> None:
    page = example.Page()
    for character in text:
        page.write(character, "plain")
        page.rows(width)
    assert [row.plain for row in page.rows(width)] == rows
    page.rows(1)
    assert [row.plain for row in page.rows(width)] == rows


# --- input ----------------------------------------------------------------------------------------


async def test_the_line_is_edited_and_remembered(endless: str) -> None:
    async with at_work(endless, max_tokens=2) as (somebody, _):
        await somebody.types("日本 w1")
        await somebody.sees(lambda shown: shown.endswith("w1"))
        assert (somebody.screen.cursor.y, somebody.screen.cursor.x) == (23, 9)
        await somebody.types("\x1b[H\x1b[3~\x1b[3~\x1b[F2")
        await somebody.sees(lambda shown: shown.endswith(">  w12"))
        await somebody.types("\r")
        await somebody.sees("─ full ─")
        await somebody.types(f"x{UP}")
        await somebody.sees(lambda shown: shown.endswith(">  w12"))


@sweep(
    ("before", "after", "lengths"),
    [("ab", "cd", (1, 1)), ("ae\u0301", "👩\u200d💻b", (2, 3)), ("a\n", "\nb", (1, 1)), ("", "日", (1, 1))],
)
def test_keys_move_over_what_looks_like_one_character(before: str, after: str, lengths: tuple[int, int]) -> None:
    document = Document(before + after, len(before))
    assert (example.length_before(document), example.length_after(document)) == lengths


async def test_a_paste_of_several_lines_is_one_prompt(endless: str) -> None:
    async with at_work(endless, max_tokens=1) as (somebody, interface):
        await somebody.types("\x1b[200~def f():\r\n\tpass\x03\x1b\r\x1b[201~")
        shown = await somebody.sees("pass")
        assert shown.split("\n")[-3:] == ["> def f():", "      pass", ""]
        assert written(interface) == ""
        await somebody.types("\r")
        await somebody.sees("─ full ─")
        assert written(interface).startswith("def f():\n    pass\n")


async def test_the_line_is_never_garbled_by_the_text_that_streams_above_it(endless: str) -> None:
    async with at_work(endless, None, 40, 12) as (somebody, _):
        await somebody.types("w1\r")
        await somebody.sees(lambda shown: num_written(shown) > 100)
        typed = ""
        for character in "a line that is typed while it streams":
            typed += character
            await somebody.types(character)
            shown = await somebody.sees(lambda shown, typed=typed: shown.endswith("> " + typed.rstrip()))
            assert somebody.screen.cursor.y == 11
            assert re.fullmatch(r"─ writing ─ .*─", shown.splitlines()[10])
            assert all(re.fullmatch(r"(w\d+ ?)*", row) for row in shown.splitlines()[:10])


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


async def test_page_up_holds_the_view_while_the_text_goes_on(endless: str) -> None:
    async with at_work(endless, None, 40, 12) as (somebody, _):
        await somebody.types("w1\r")
        await somebody.sees(lambda shown: num_written(shown) > 200)
        await somebody.types(PAGE_UP)
        held = (await somebody.sees("more below")).splitlines()[:10]
        below = hidden(somebody.shown)
        shown = await somebody.sees(lambda shown: hidden(shown) > below)
        assert shown.splitlines()[:10] == held
        await somebody.types(PAGE_UP * 100)
        await somebody.sees(lambda shown: shown.startswith("w1"))
        await somebody.types(ESCAPE)
        await somebody.sees("more below")
        await somebody.types(PAGE_DOWN * 1000)
        await somebody.sees("[stopped]")
        assert "below" not in somebody.shown


def hidden(shown: str) -> int:
    below = re.search(r"([\d,]+) more below", shown)
    return int(below[1].replace(",", "")) if below else 0


async def test_ctrl_l_draws_anew_what_something_else_has_written_over(endless: str) -> None:
    async with at_work(endless) as (somebody, _):
        before = somebody.shown
        os.write(somebody.given, b"\x1b[2J\x1b[Hnoise")
        await somebody.sees("noise")
        await somebody.types(CTRL_L)
        assert await somebody.sees(lambda shown: "noise" not in shown and "ready" in shown) == before


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
        pytest.param(CTRL_C, 0, id="Ctrl-C"),
        pytest.param(f"{ESCAPE}{CTRL_D}", 0, id="Esc and Ctrl-D", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 128 + 15, id="SIGTERM", marks=pytest.mark.slow),
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


@pytest.mark.slow
async def test_a_window_that_is_closed_ends_the_program(endless: str) -> None:
    async with program("--target", endless, "--max-tokens", "none") as (somebody, process):
        await somebody.sees("ready")
        await somebody.types("w1 w2\r")
        await somebody.sees(lambda shown: num_written(shown) > 5)
        somebody.lets_go()
        await somebody.hangs_up()
        assert await process.wait() == 128 + signal.SIGHUP


@pytest.mark.slow
async def test_ctrl_z_gives_the_terminal_back_until_it_is_taken_again(endless: str) -> None:
    # A process group of its own, because Ctrl-Z stops all processes of a group.
    async with program("--target", endless, "--max-tokens", "4", process_group=0) as (somebody, process):
        before, modes = somebody.attributes, set(somebody.screen.mode)
        await somebody.sees("ready")
        taken, its_modes = somebody.attributes, set(somebody.screen.mode)
        await somebody.types("w1 w2\r")
        shown = await somebody.sees("─ full ─")
        await somebody.types("\x1a")
        _, status = await trio.to_thread.run_sync(os.waitpid, process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert somebody.attributes == before
        await somebody.sees(lambda shown: "loading" in shown and somebody.screen.mode == modes)
        process.send_signal(signal.SIGCONT)
        assert await somebody.sees("─ full ─") == shown
        assert somebody.attributes == taken
        await somebody.types(f"w3{CTRL_C}")
        assert await ends(somebody, process) == (0, before)
        assert its_modes != modes
    assert somebody.screen.mode == modes


async def test_where_there_is_no_terminal_that_is_said_before_a_model_is_loaded() -> None:
    for streams in ({"stdin": subprocess.DEVNULL}, {"stdout": subprocess.DEVNULL}):
        async with person() as somebody:
            given = {"stdin": somebody.given, "stdout": somebody.given, **streams}
            done = await trio.run_process(
                [sys.executable, str(ROOT / "examples" / "terminal.py")],
                **{"capture_stderr": True, "check": False, "env": environment(), **given},
            )
            (missing,) = streams
            said = f"error: {missing} is no terminal, and this program is nothing without one\n"
            assert (done.returncode, done.stderr.decode()) == (1, said)


async def test_a_setting_out_of_range_is_refused_before_a_model_is_loaded() -> None:
    done = await trio.run_process(
        [sys.executable, str(ROOT / "examples" / "terminal.py"), "--temperature", "-1"],
        capture_stderr=True,
        check=False,
        env=environment(),
    )
    assert done.returncode == 2
    assert "temperature must be" in done.stderr.decode()
