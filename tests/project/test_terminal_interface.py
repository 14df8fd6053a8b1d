"""The terminal example in a terminal: what its screen shows after input, and what it leaves behind."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import terminal as example
import trio
import trio.lowlevel
from blocking_models import BlockingModel
from chat_models import THINKING_TEMPLATE, says, target, tokenizer
from command_line import environment, save_model
from console.keys import ESCAPE_S, Event, Key
from console.page import Page
from console.terminal import Terminal
from models import Failing, near
from polling import until_in_trio
from screens import HANGS_S, Person, person
from sweeps import sweep

import runtime

ROOT = Path(__file__).parents[2]
ESCAPE, UP, PAGE_UP, PAGE_DOWN = "\x1b", "\x1b[A", "\x1b[5~", "\x1b[6~"
CTRL_C, CTRL_D, CTRL_L = "\x03", "\x04", "\x0c"


@contextlib.asynccontextmanager
async def at_work(
    rt: runtime.Runtime,
    columns: int = 80,
    rows: int = 24,
    *,
    begin: Callable[[str], runtime.TokenStream] | None = None,
    is_chat: bool = False,
    **settings: Any,
) -> AsyncIterator[tuple[Person, example.Interface]]:
    """A person in front of the interface, who leaves it on exit."""
    settings = {"max_tokens": None, **settings}

    def begin_text(text: str) -> runtime.TokenStream:
        return rt.stream(text, **settings)

    greeting = Page()
    greeting.write("hello", "note")
    async with person(columns, rows) as somebody, contextlib.aclosing(Terminal(somebody.given, somebody.given)) as its:
        before = somebody.attributes
        interface = example.Interface(
            its, begin or begin_text, is_chat=is_chat, max_tokens=settings["max_tokens"], greeting=greeting
        )
        with trio.fail_after(HANGS_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(interface.run)
                await somebody.sees("ready")
                yield somebody, interface
                interface.leave()
        assert somebody.attributes == before


def written(interface: example.Interface) -> str:
    """All text on the page, whether or not the screen has space for it."""
    return "\n".join("".join(run.text for run in line) for line in interface.page.lines())


def num_written(shown: str) -> int:
    """The number of tokens in the status rule."""
    counted = re.search(r"─ +([\d,]+) tokens", shown)
    return int(counted[1].replace(",", "")) if counted else 0


# --- Esc and Enter --------------------------------------------------------------------------------


async def test_esc_stops_at_once_and_what_was_written_stays(endless: str) -> None:
    async with runtime.open(endless) as rt, at_work(rt) as (somebody, interface):
        await somebody.types("w1 w2\r")
        await somebody.sees(lambda shown: num_written(shown) > 20)
        assert "─ writing ─" in somebody.shown
        await somebody.types(ESCAPE)
        stopped = await somebody.sees("─ stopped ─")
        assert "\n[stopped]\n" in stopped
        assert rt.num_streams == 0
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
    prompts: list[str] = []
    async with runtime.open(endless) as rt:

        def begin(text: str) -> runtime.TokenStream:
            prompts.append(text)
            return rt.stream(text, max_tokens=None)

        async with at_work(rt, begin=begin) as (somebody, interface):
            await somebody.types("w1 w2\r")
            await somebody.sees(lambda shown: num_written(shown) > 5)
            await somebody.types("w3")
            # Typing does not stop the text.
            before = num_written(await somebody.sees("> w3"))
            await somebody.sees(lambda shown: num_written(shown) > before)
            await somebody.types("\r")
            await until_in_trio(lambda: "[replaced]\n\nw3" in written(interface) and prompts[-1] == "w3")
            # If several prompts arrive in one read, the last one counts.
            await somebody.types("w4\rw5\rw6\r")
            await until_in_trio(lambda: "[replaced]\n\nw6" in written(interface))
            assert written(interface).count("[replaced]") == 4
            await until_in_trio(lambda: prompts[-1] == "w6" and rt.num_streams == 1)
    assert prompts[:2] == ["w1 w2", "w3"]


async def test_esc_and_enter_take_effect_while_a_prompt_is_being_read() -> None:
    held = BlockingModel(target())
    async with runtime.open((held, tokenizer(None))) as rt, at_work(rt, prefill_step_size=8) as (somebody, _):
        try:
            held.block(after=1)
            await somebody.types("a prompt that takes several passes, of which one is held up half way\r")
            await held.blocked_in_trio()
            await somebody.sees("─ reading ")
            await somebody.types("x = 1\r")
            await somebody.sees("[replaced]")
            await somebody.types(ESCAPE)
            await somebody.sees("─ stopped ─")
            assert rt.num_streams == 0
        finally:
            held.release()
        await somebody.types("y = 2\r")
        await somebody.sees(lambda shown: num_written(shown) > 5)


async def test_esc_where_nothing_is_written_changes_nothing(endless: str) -> None:
    async with runtime.open(endless) as rt, at_work(rt, max_tokens=3) as (somebody, _):
        await somebody.types(f"w1{ESCAPE}w2")
        before = await somebody.sees("> w1w2")
        assert "ready" in before
        await somebody.types("\r")
        full = await somebody.sees("[full, with 3 tokens]")
        await somebody.types(f"{ESCAPE}.")
        assert (await somebody.sees("\n> .")).splitlines()[:-2] == full.splitlines()[:-2]


async def test_enter_on_nothing_replaces_nothing(endless: str) -> None:
    async with runtime.open(endless) as rt, at_work(rt) as (somebody, _):
        await somebody.types("w1\r")
        await somebody.sees(lambda shown: num_written(shown) > 5)
        await somebody.types("\r  \r")
        before = num_written(await somebody.sees("\n> "))
        await somebody.sees(lambda shown: num_written(shown) > before)
        assert "[replaced]" not in somebody.shown


# --- the screen -----------------------------------------------------------------------------------


@pytest.mark.slow
async def test_the_text_is_the_model_s_and_drafted_tokens_have_their_colour() -> None:
    async with runtime.open(runtime.DEMO_TARGET, runtime.DEMO_DRAFT) as rt:
        tokens = (await rt.generate("class Stack:", max_tokens=40)).tokens
        # With "auto" it may propose nothing if that does not pay.
        async with at_work(rt, max_tokens=40, lookahead=3) as (somebody, interface):
            await somebody.types("class Stack:\r")
            shown = await somebody.sees("[full, with 40 tokens]")
            text = "class Stack:" + "".join(token.text for token in tokens)
            assert shown.partition("[full")[0].split() == text.split()
            assert "██████████ 40 of 40" in shown
            assert "accepted" in shown
            runs = [run for line in interface.page.lines() for run in line]
            assert {run.style for run in runs} == {"prompt", "plain", "drafted", "note"}
            drafted = "".join(run.text for run in runs if run.style == "drafted")
            assert somebody.coloured("cyan").replace(" ", "") == drafted.replace(" ", "") + "drafted"


async def test_a_chat_model_is_answered_with_all_that_was_said() -> None:
    of = tokenizer(THINKING_TEMPLATE, thinks=True)
    answers = says(of, "<think>well</think>one", "two, and more of it", "three")
    async with runtime.open((target(), of), (near(target(), noise=0.05), None)) as rt:
        conversation = rt.conversation(max_tokens=40, logits_processors=[answers])
        async with at_work(rt, 40, 14, begin=conversation.stream, is_chat=True, max_tokens=40) as (somebody, _):
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
    said = [(message["role"], message["content"]) for message in conversation.messages]
    assert said == [("user", "first"), ("assistant", "one"), ("user", "second"), ("assistant", "two, and more of it")]


async def test_a_prompt_that_will_not_do_gets_its_message_and_the_next_is_taken(tmp_path: Path) -> None:
    short = str(save_model(tmp_path / "short", context=8))
    async with runtime.open(short) as rt, at_work(rt, max_tokens=2) as (somebody, _):
        await somebody.types("w1 w2 w3 w4 w5 w6 w7 w8 w9\r")
        assert "the prompt has 9 tokens" in await somebody.sees("─ failed ─")
        assert somebody.coloured("red").startswith("the prompt has 9 tokens")
        await somebody.types("w1\r")
        await somebody.sees("[full, with 2 tokens]")


async def test_a_target_that_fails_ends_the_program_with_its_error() -> None:
    failing = Failing(target())
    async with runtime.open((failing, tokenizer(None))) as rt, at_work(rt) as (somebody, interface):
        failing.fails = True
        await somebody.types("x = 1\r")
        await until_in_trio(lambda: interface.failure is not None)
        assert isinstance(interface.failure, runtime.RuntimeBrokenError)
        assert "out of memory" in str(interface.failure)


async def test_a_warning_of_the_runtime_s_is_shown_on_the_page(endless: str) -> None:
    async with runtime.open(endless) as rt, at_work(rt) as (somebody, _):
        logging.getLogger("outrider").warning("the draft model %s", "failed")
        await somebody.sees("[the draft model failed]")


async def test_a_model_that_writes_control_sequences_does_not_rule_the_terminal() -> None:
    of = tokenizer()
    hostile = "a\x1b[2Jb\x1b]0;title\x07\x1b[?1049lc\td"
    async with runtime.open((target(), of)) as rt:
        conversation = rt.conversation(max_tokens=60, logits_processors=[says(of, hostile)])
        async with at_work(rt, begin=conversation.stream, is_chat=True, max_tokens=60) as (somebody, _):
            await somebody.types("go\r")
            shown = await somebody.sees("─ done ─")
            assert shown.splitlines()[:2] == ["> go", "a␛[2Jb␛]0;title␇␛[?1049lc    d"]
            assert b"title\x07" not in somebody.sent


# --- input ----------------------------------------------------------------------------------------


async def test_the_line_is_edited_and_remembered(endless: str) -> None:
    async with runtime.open(endless) as rt, at_work(rt, max_tokens=2) as (somebody, _):
        await somebody.types("日本 w1")
        await somebody.sees("> 日")
        assert (somebody.screen.cursor.y, somebody.screen.cursor.x) == (23, 9)
        await somebody.types("\x1b[H\x1b[3~\x1b[3~\x1b[F2")
        await somebody.sees(lambda shown: shown.endswith(">  w12"))
        await somebody.types("\r")
        await somebody.sees("─ full ─")
        await somebody.types(f"x{UP}")
        await somebody.sees(lambda shown: shown.endswith(">  w12"))


async def test_a_paste_of_several_lines_is_one_prompt(endless: str) -> None:
    prompts: list[str] = []
    async with runtime.open(endless) as rt:

        def begin(text: str) -> runtime.TokenStream:
            prompts.append(text)
            return rt.stream(text, max_tokens=1)

        async with at_work(rt, begin=begin) as (somebody, _):
            await somebody.types("\x1b[200~def f():\r\n\tpass\x03\x1b\r\x1b[201~")
            shown = await somebody.sees("pass")
            assert shown.split("\n")[-3:] == ["> def f():", "      pass", ""]
            assert prompts == []
            await somebody.types("\r")
            await somebody.sees("─ full ─")
    assert prompts == ["def f():\n    pass\n"]


async def test_the_line_is_never_garbled_by_the_text_that_streams_above_it(endless: str) -> None:
    async with runtime.open(endless) as rt, at_work(rt, 40, 12) as (somebody, _):
        await somebody.types("w1\r")
        await somebody.sees(lambda shown: num_written(shown) > 100)
        typed = ""
        for character in "a line that is typed while it streams":
            typed += character
            await somebody.types(character)
            shown = await somebody.sees(
                lambda shown, typed=typed: (
                    shown.endswith("> " + typed.rstrip()) and somebody.screen.cursor.y == 11  # the update is complete
                )
            )
            assert re.fullmatch(r"─ writing ─ .*─", shown.splitlines()[10])
            assert all(re.fullmatch(r"(w\d+ ?)*", row) for row in shown.splitlines()[:10])


class Scripted:
    """A terminal from which bytes come at given moments; it shows nothing."""

    def __init__(self, *arrivals: tuple[float, bytes]) -> None:
        self._arrivals = list(arrivals)

    async def read(self) -> bytes:
        if not self._arrivals:
            await trio.sleep_forever()
        await trio.sleep_until(self._arrivals[0][0])
        return self._arrivals.pop(0)[1]


@sweep(
    ("arrivals", "heard"),
    [
        ([(1.0, b"\x1b")], [(1.0 + ESCAPE_S, Key("escape"))]),
        ([(1.0, b"\x1b"), (1.01, b"[A")], [(1.01, Key("up"))]),
        ([(1.0, b"\x1b["), (1.2, b"A")], [(1.2, Key("up"))]),
        ([(1.0, b"\x1b"), (1.02, b"\x1b")], [(1.02, Key("escape")), (1.02 + ESCAPE_S, Key("escape"))]),
        ([(1.0, b"\x1b"), (2.0, b"\x03")], [(1.0 + ESCAPE_S, Key("escape")), (2.0, Key("ctrl-c"))]),
    ],
)
async def test_a_bare_esc_is_told_from_a_sequence_by_what_follows_in_time(
    arrivals: list[tuple[float, bytes]], heard: list[tuple[float, Event]], autojump_clock: Any
) -> None:
    got: list[tuple[float, Event]] = []

    class Listening(example.Interface):
        def _obey(self, event: Event) -> None:
            got.append((trio.current_time(), event))

    begun = trio.current_time()
    scripted: Any = Scripted(*[(begun + at, data) for at, data in arrivals])
    interface = Listening(scripted, lambda text: None, is_chat=False, max_tokens=1, greeting=Page())
    with trio.move_on_after(10):
        await interface._read_keys()
    assert [(pytest.approx(at - begun), event) for at, event in got] == heard


# --- the window -----------------------------------------------------------------------------------


async def test_in_a_window_of_another_size_all_is_where_it_belongs(endless: str) -> None:
    async with runtime.open(endless) as rt, at_work(rt, max_tokens=60) as (somebody, interface):
        await somebody.types("w1\r")
        await somebody.sees("[full, with 60 tokens]")
        await somebody.types("typed")
        await somebody.sees("> typed")
        text = "".join(run.text for run in interface.page.lines()[0])
        for columns, rows in ((40, 30), (132, 8), (20, 5), (3, 2), (1, 1), (80, 24)):
            somebody.resizes(columns, rows)
            signal.raise_signal(signal.SIGWINCH)
            # A single cell has space for the cursor only.
            last = {1: "", 3: "ed"}.get(columns, "> typed")
            shown = await somebody.sees(lambda shown, last=last: shown.split("\n")[-1].endswith(last))
            assert len(shown.split("\n")) == rows
            if rows > 6:
                above = [row for row in shown.splitlines()[:-2] if row and not row.startswith("[")]
                assert text.replace(" ", "").endswith("".join(above).replace(" ", ""))
                assert shown.splitlines()[-2].startswith("─ full ─")


async def test_page_up_holds_the_view_while_the_text_goes_on(endless: str) -> None:
    async with runtime.open(endless) as rt, at_work(rt, 40, 12) as (somebody, _):
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
    async with runtime.open(endless) as rt, at_work(rt) as (somebody, _):
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
        await somebody.sees("loading")
        assert somebody.screen.mode == modes
        process.send_signal(signal.SIGCONT)
        assert await somebody.sees("─ full ─") == shown
        assert somebody.attributes == taken
        await somebody.types(f"w3{CTRL_C}")
        assert await ends(somebody, process) == (0, before)
        assert its_modes != modes
    assert somebody.screen.mode == modes


async def test_an_error_of_the_program_s_own_gives_the_terminal_back() -> None:
    def begin(_: str) -> runtime.TokenStream:
        raise ValueError("a mistake")

    async with person() as somebody:
        before, modes = somebody.attributes, set(somebody.screen.mode)
        async with contextlib.aclosing(Terminal(somebody.given, somebody.given)) as its:
            interface = example.Interface(its, begin, is_chat=False, max_tokens=1, greeting=Page())

            async def run() -> None:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(interface.run)
                    await somebody.sees("ready")
                    await somebody.types("w1\r")

            with pytest.raises(ExceptionGroup) as caught:
                await run()
        assert caught.group_contains(ValueError, match="a mistake", depth=None)
        assert somebody.attributes == before
        # Read everything that it sent.
        somebody.lets_go()
        await somebody.sees_the_end()
        assert somebody.screen.mode == modes
        assert not somebody.shown.strip()


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
