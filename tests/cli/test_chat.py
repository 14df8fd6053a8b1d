"""The command `chat`: input, answers, and what ends an answer or the command."""

import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from chat_models import THINKING_TEMPLATE, pair, says, tokenizer
from command_line import outrider, piped, read_all, terminal
from sweeps import sweep

import runtime
from runtime.cli import chat_command
from runtime.terminal.chat_input import ChatSignals, LineReader, SignalWhileTyping
from runtime.terminal.display import CommandOutcome, Display, Output
from runtime.terminal.signals import ECHO_S

MAX = ("--max-tokens", "6")
# What is said after an answer of that many tokens.
CUT = "outrider: the answer was cut off after 6 tokens; /more continues it, and --max-tokens sets the limit\n"


async def answers(target: str, *turns: str) -> list[str]:
    """The answers of a conversation in Python."""
    async with runtime.open(target) as rt:
        conversation = rt.conversation()
        return [(await conversation.generate(turn, max_tokens=6)).text for turn in turns]


@attrs.define
class Person:
    """A person at a terminal."""

    process: trio.Process
    screen: Any
    greeting: str = ""
    farewell: str = ""
    _unseen: str = ""

    async def types(self, keys: str) -> None:
        await self.screen.send_all(keys.encode())

    async def enters(self, line: str, *wanted: str) -> None:
        """Type a line, and read up to the texts that must follow, one after the other, and the next prompt."""
        await self.types(f"{line}\r")
        for text in (*wanted, "> "):
            await self.sees(text)

    async def sees(self, wanted: str) -> str:
        """Read up to and including a text; returns what has come since the last call."""
        while wanted not in self._unseen:
            part = await self.screen.receive_some()
            assert part, f"{wanted!r} never came, but {self._unseen!r}"
            self._unseen += part.decode()
        seen, _, self._unseen = self._unseen.partition(wanted)
        return seen + wanted

    def interrupts(self) -> None:
        self.process.send_signal(signal.SIGINT)


@asynccontextmanager
async def at_a_terminal(*arguments: str, status: int = 0) -> AsyncIterator[Person]:
    """A person who has waited for the prompt; the command must then end with `status`."""
    async with (
        terminal() as (screen, given),
        outrider("chat", *arguments, stdin=given, stdout=given, stderr=given) as process,
    ):
        os.close(given)
        person = Person(process, screen)
        person.greeting = await person.sees("> ")
        yield person
        person.farewell = person._unseen + await read_all(screen)
        assert not any(word in person.farewell for word in ("Traceback", "error"))
    assert process.returncode == status


# --- pipes ----------------------------------------------------------------------------------------


def test_each_line_of_a_pipe_is_a_turn_and_stdout_has_the_answers_alone(endless, capfd, monkeypatch):
    # Whatever a line ends with; and two slashes say one to the model.
    ended = piped(capfd, monkeypatch, "--target", endless, *MAX, lines='w1 w2\n\n   \nw3\\\n"""w4\n//w1\nw4 w5')
    said = trio.run(answers, endless, "w1 w2", "w3\\", '"""w4', "/w1", "w4 w5")
    assert ended == (0, "".join(f"{answer}\n" for answer in said), CUT * 5)
    assert len(set(said)) == 5


def test_a_reset_forgets_what_was_said(endless, capfd, monkeypatch):
    lines = "w1 w2\nw3\n/reset\nw1 w2\n/exit\nw1 w2\n"
    _, out, err = piped(capfd, monkeypatch, "--target", endless, *MAX, lines=lines)
    first, second, again = out.splitlines()
    assert first == again != second
    assert err == CUT * 2 + "outrider: the conversation is forgotten, and a new one begins\n" + CUT


def test_help_is_for_whoever_types_and_not_for_stdout(endless, capfd, monkeypatch):
    status, out, err = piped(capfd, monkeypatch, "--target", endless, *MAX, lines="/help\n")
    assert (status, out) == (0, "")
    assert all(name in err for name in chat_command.COMMANDS)
    # How several lines are typed.
    assert '"""' in err
    assert "continues on the next line" in err


@sweep(
    ("line", "complaint"),
    [
        ("/nope", "there is no command '/nope'"),
        ("/reset all", "/reset takes no argument"),
        ("w1 " * 32, "maximum context length is 32"),
    ],
)
def test_what_goes_wrong_with_a_line_of_a_pipe_ends_it(line, complaint, short, capfd, monkeypatch):
    status, out, err = piped(capfd, monkeypatch, "--target", short, *MAX, lines=f"w1\n{line}\nw2\n")
    assert (status, out.count("\n")) == (2, 1)
    assert complaint in err.removeprefix(CUT)
    assert err.count("\n") == 2


def test_a_cut_answer_is_said_to_be_and_more_continues_it(endless, short, capfd, monkeypatch):
    status, out, err = piped(capfd, monkeypatch, "--target", endless, *MAX, lines="w1 w2\n/more\n")
    assert (status, out.splitlines(), err) == (0, trio.run(answers, endless, "w1 w2", ""), CUT * 2)
    status, _, err = piped(capfd, monkeypatch, "--target", endless, *MAX, lines="/more\n")
    assert (status, "the last answer was not cut off" in err) == (2, True)
    status, _, err = piped(capfd, monkeypatch, "--target", short, "--max-tokens", "99", lines="w1 w2\n")
    assert (status, "context of 32 tokens is full; /reset begins a new conversation" in err) == (0, True)


# --- at a terminal --------------------------------------------------------------------------------


async def test_a_person_is_prompted_answered_told_what_was_wrong_and_left_with_a_whole_line(endless):
    # Lines can be edited, recalled and joined. A terminal puts a pasted text between two marks.
    pasted, typed = "w1\nw2\n\nw3", "w4 \\\n/exit\nw5"
    said = await answers(endless, pasted, typed)
    async with at_a_terminal("--target", endless, *MAX) as person:
        assert "the model has no chat template: it continues the text so far" in person.greeting
        assert '"/help" lists' in person.greeting
        await person.enters("/nope", "there is no command '/nope'")
        await person.enters("/hepl\x7f\x7flp", "stops an answer, which stays in the conversation")
        await person.enters("\x1b[A", "stops an answer, which stays in the conversation")
        await person.enters(f"\x1b[200~{pasted}\x1b[201~", said[0])
        for keys in ('"""w4 \\\r', "/exit\r"):
            await person.types(keys)
            await person.sees(". ")
        await person.enters('w5"""', said[1])
        await person.types("\x04")
    assert person.farewell.endswith("\n")


@sweep(
    ("typed", "texts"),
    [
        *[(("w1", "w2"), ["w1", "w2"]), (("w1\\", "w2", "w3"), ["w1\nw2", "w3"]), (("\\", ""), ["\n"])],
        *[(('"""', "w1", "  w2", '"""', "w3"), ["w1\n  w2", "w3"]), (('"""w1', "", 'w2"""  '), ["w1\n\nw2"])],
        *[(('  """w1"""',), ["w1"]), (('""""""',), [""]), (('"""/reset"""', "/reset"), ["//reset", "/reset"])],
        *[(("/a\nb\\",), ["/a\nb\\"]), (("w1\\",), []), (('"""w1', "w2"), [])],
    ],
)
def test_where_a_text_of_several_lines_begins_and_ends(typed, texts, monkeypatch):
    lines, rest = LineReader(), iter(typed)
    lines.is_interactive = True
    monkeypatch.setattr(lines, "_read_line", lambda prompt: next(rest, None))  # without line editing
    assert list(iter(lines.read, None)) == texts


@pytest.mark.slow
async def test_ctrl_c_stops_an_answer_and_what_was_said_stays(endless):
    async with at_a_terminal("--target", endless, "--max-tokens", "none", "--stats") as person:
        await person.types("w1 w2\r")
        await person.sees("w1 w2\r\n")
        await person.sees(" w")  # an answer has begun, and has no end
        person.interrupts()
        first = await person.sees("after a prompt of 2")
        await person.sees("> ")
        num_said = int(re.sub(r"\x1b\[\d*m", "", first).rpartition("tokens")[2].split()[0].replace(",", ""))
        await person.types("w3\r")
        await person.sees("w3\r\n")
        await person.sees(" w")
        person.interrupts()
        second = await person.sees("were cached")
        num_asked = int(second.rpartition("after a prompt of ")[2].partition(", of which")[0].replace(",", ""))
        # The conversation so far: prompt, answer and prompt. The last word of the answer and the prompt form one token.
        assert num_asked == 2 + num_said + 1 - 1
        await person.sees("> ")
        await person.types("\x04")


@pytest.mark.slow
async def test_ctrl_c_drops_the_typed_text_and_then_leaves(endless):
    async with at_a_terminal("--target", endless, *MAX, status=130) as person:
        await person.types('"""w1\r')
        await person.sees(". ")
        person.interrupts()
        await person.enters("", chat_command.HOW_TO_LEAVE)
        await person.enters("w2", *await answers(endless, "w2"))
        await person.types("/nope")
        await person.sees("/nope")
        person.interrupts()
        # Also if the signal comes just before the command waits for the line.
        await person.types("\r")
        seen = await person.sees(chat_command.HOW_TO_LEAVE)
        assert "there is no command" not in seen
        await person.sees("> ")
        # After another input it is the first Ctrl-C again.
        await person.enters("/help", "stops an answer, which stays in the conversation")
        person.interrupts()
        await person.enters("", chat_command.HOW_TO_LEAVE)
        person.interrupts()
        await person.types("\r")


# --- thinking -------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_while_the_chat_is_being_left_ends_the_process(second, autojump_clock):
    statuses: list[int] = []
    outcome = CommandOutcome()
    signals = ChatSignals(outcome, Display(), statuses.append)
    signals.is_interactive = True

    async def work() -> None:
        with trio.CancelScope(shield=True):  # a model that hangs is waited for
            with pytest.raises(SignalWhileTyping):
                signals.while_typing(lambda: signal.raise_signal(signal.SIGTERM))
            signals.cancel(signal.SIGTERM)
            await trio.sleep(ECHO_S + 1)
            signal.raise_signal(second)
            await trio.sleep(1)

    await signals.run(work)
    assert statuses == [128 + second]
    assert outcome.signal == signal.SIGTERM


class Typed(LineReader):
    """A reader that returns given lines."""

    def __init__(self, *lines: str) -> None:
        self.is_interactive = False
        self._lines = list(lines)

    def read(self) -> str | None:
        return self._lines.pop(0) if self._lines else None


async def shown(output: Output) -> None:
    """Show an answer with reasoning in it."""
    wrapped = tokenizer(THINKING_TEMPLATE, thinks=True)
    processor = says(wrapped, "<think>\nHm.\n</think>\n\nimport os")
    async with runtime.open(*pair(thinks=True, template=THINKING_TEMPLATE)) as rt:
        conversation = rt.conversation(logits_processors=(processor,), lookahead=0)
        signals = ChatSignals(CommandOutcome(), Display())
        await chat_command.TerminalChat(rt, conversation, Typed("What now?"), output, signals, False).take_turns()


async def test_a_pipe_gets_what_is_said_and_not_what_is_thought(capfd):
    await shown(Output())
    assert capfd.readouterr() == ("import os\n", "")


async def test_a_terminal_shows_what_is_thought_dimmed(monkeypatch, capfd):
    monkeypatch.delenv("NO_COLOR", raising=False)
    output = Output()
    output.is_terminal = True
    await shown(output)
    out, _ = capfd.readouterr()
    dimmed, _, rest = out.rpartition("\x1b[22m")
    assert dimmed.replace("\x1b[22m", "").replace("\x1b[2m", "") == "<think>\nHm.\n</think>"
    assert rest == "\n\nimport os\n"
