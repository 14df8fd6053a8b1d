"""JSON schemas at the server: what one may take, how clients share that, and the process that tries grammars out."""

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from asgi import Aside, ScriptedCheck
from command_line import HANGS_S, ROOT, environment
from mlx_lm.tokenizer_utils import TokenizerWrapper
from polling import until_in_trio
from transformers import AutoTokenizer

import runtime
from protocol.errors import SettingsError
from runtime.generation.grammar_vocabulary import tokenizer_json
from runtime.generation.json_schema import grammar_of_schema
from runtime.server.errors import ErrorResponse
from runtime.server.grammars import checker as checker_module
from runtime.server.grammars import schemas as schemas_module
from runtime.server.grammars.checker import CheckerGoneError, GrammarCheck, grammar_checker
from runtime.server.grammars.schemas import ANY_OBJECT, Constraint, Schemas

PLAIN: dict[str, Any] = {"type": "integer", "minimum": 5}
# What no look at it finds to be expensive: 99,400,891 remainders.
EXPENSIVE: dict[str, Any] = {
    "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
    "$defs": {"a": {"type": "integer", "multipleOf": 9973}, "b": {"type": "integer", "multipleOf": 9967}},
}


@functools.cache
def tokenizer() -> TokenizerWrapper:
    return TokenizerWrapper(AutoTokenizer.from_pretrained(runtime.DEMO_TARGET))


def read_vocabulary() -> tuple[str, list[int]]:
    return tokenizer_json(tokenizer())


# --- schemas in simulated time --------------------------------------------------------------------


def json_of(schema: dict[str, Any]) -> Constraint:
    return Constraint("json", schema, "response_format")


def schemas(check: ScriptedCheck, aside_s: float = 0.0) -> Schemas:
    return Schemas(tokenizer(), check, Aside(aside_s), 10.0)


async def test_what_was_found_out_of_a_schema_is_remembered_whatever_it_was(autojump_clock):
    for outcome, complaint in (
        ("done", None),
        ("time", "takes too long to compile; simplify it"),
        ("memory", "takes too much memory to compile; simplify it"),
        ("crash", "llguidance fails on it"),
    ):
        check = ScriptedCheck(1.0, outcome)
        made = schemas(check)
        for _ in range(2):
            if complaint is None:
                assert repr(await made.grammar(json_of(PLAIN), "a")).startswith("<Grammar: the JSON schema {'type'")
            else:
                with pytest.raises(ErrorResponse, match=complaint) as refused:
                    await made.grammar(json_of(PLAIN), "a")
                assert (refused.value.status, refused.value.detail["param"]) == (400, "response_format")
        assert len(check.asked) == 1


async def test_only_so_many_outcomes_are_remembered_and_the_latest_used_of_them(monkeypatch, autojump_clock):
    monkeypatch.setattr(schemas_module, "_MAX_OUTCOMES", 2)
    check = ScriptedCheck()
    made = schemas(check)
    for minimum in (1, 2, 1, 3, 1, 2):
        await made.grammar(json_of({"type": "integer", "minimum": minimum}), "a")
    assert len(check.asked) == 4  # 1, 2, 3, and 2 again


async def test_that_a_schema_took_longer_than_it_was_waited_for_is_not_remembered(autojump_clock):
    check = ScriptedCheck(11.0)
    made = schemas(check)
    with pytest.raises(ErrorResponse, match="was not compiled within 10 s"):
        await made.grammar(json_of(PLAIN), "a")
    assert check.num_at_once == 0
    check.seconds = 1.0
    await made.grammar(json_of(PLAIN), "a")


async def test_a_flooding_client_delays_neither_others_nor_any_json_object(autojump_clock):
    check = ScriptedCheck(9.0)
    made = schemas(check)

    async def flood(minimum: int) -> None:
        with suppress(ErrorResponse):
            await made.grammar(json_of({"type": "number", "minimum": minimum}), "attacker")

    async with trio.open_nursery() as nursery:
        for minimum in range(6):
            nursery.start_soon(flood, minimum)
        await trio.testing.wait_all_tasks_blocked()
        assert check.num_at_once == 2
        began = trio.current_time()
        await made.grammar(json_of(ANY_OBJECT), "attacker")
        assert trio.current_time() == began
        check.seconds = 0.5
        await made.grammar(json_of(PLAIN), "another")
        assert trio.current_time() == began + 0.5


async def test_requests_for_any_json_object_share_one_grammar(autojump_clock):
    grammars = []

    async def ask(made: Schemas) -> None:
        grammars.append(await made.grammar(json_of(ANY_OBJECT), "a"))

    made = Schemas(tokenizer(), ScriptedCheck(), Aside(9.0), 10.0)
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(ask, made)
    now = trio.current_time()
    await ask(made)
    assert trio.current_time() == now
    assert set(map(id, grammars)) == {id(await made.any_object())}


async def test_a_client_that_leaves_stops_what_is_tried_out_for_it(autojump_clock):
    check = ScriptedCheck(9.0)
    made = schemas(check)
    with trio.move_on_after(1) as scope:
        await made.grammar(json_of(PLAIN), "a")
    assert scope.cancelled_caught
    assert check.num_at_once == 0
    check.seconds = 0.0
    await made.grammar(json_of(PLAIN), "a")


async def test_a_check_that_cannot_be_made_is_not_the_client_s_fault(autojump_clock):
    async def fail(grammar: str, /) -> Any:
        raise CheckerGoneError("the process has ended; try again")

    with pytest.raises(ErrorResponse, match="try again") as refused:
        await Schemas(tokenizer(), fail, Aside(), 10.0).grammar(json_of(PLAIN), "a")
    assert (refused.value.status, refused.value.detail["code"]) == (503, "schemas_unavailable")


# --- schemas of tools -----------------------------------------------------------------------------


class Calls:
    """A request with tools of these schemas, of which the last grammar's loose ones are known."""

    def __init__(self, made: Schemas, schemas: dict[str, Any]) -> None:
        self.made = made
        self.schemas = schemas
        self.loose: set[str] = set()

    def write(self, loose: Collection[str]) -> str:
        self.loose = set(loose)
        held = {name: True if name in loose else schema for name, schema in self.schemas.items()}
        return grammar_of_schema({"type": "object", "properties": held})

    def write_one(self, name: str) -> str:
        return grammar_of_schema(self.schemas[name])

    async def ask(self) -> set[str]:
        """The names of the tools whose schemas the model is not held to."""
        await self.made.grammar_of_calls(self.write, "a", may_be_loose=self.schemas, write_one=self.write_one)
        return self.loose


NOT_FOLLOWED: dict[str, Any] = {"type": "string", "pattern": "^(?!a)b$"}


async def test_whether_the_schema_of_a_tool_can_be_followed_is_found_out_once(autojump_clock):
    check = ScriptedCheck()
    made = schemas(check)
    tools = {f"f{n}": {"type": "integer", "minimum": n} for n in range(8)}
    bad = {f"g{n}": {**NOT_FOLLOWED, "maxLength": n} for n in range(8)}
    assert await Calls(made, tools | bad).ask() == set(bad)
    num_asked = len(check.asked)
    assert num_asked <= 16 + 3
    for _ in range(2):
        assert await Calls(made, tools | bad).ask() == set(bad)
    assert len(check.asked) == num_asked
    # The same tools beside others, and in another order.
    assert await Calls(made, bad | {"other": PLAIN} | tools).ask() == set(bad)
    assert len(check.asked) == num_asked + 1


async def test_all_tools_are_loose_if_it_takes_too_long_to_find_out_which_must_be(autojump_clock):
    check = ScriptedCheck(3.0)
    made = schemas(check)
    bad = {f"g{n}": {**NOT_FOLLOWED, "maxLength": n} for n in range(4)}
    tools = {**bad, "f": PLAIN}
    began = trio.current_time()
    assert await Calls(made, tools).ask() == set(tools)
    # Of all schemas, of none, and then of one after the other.
    assert trio.current_time() - began == 3.0 + 3.0 + 10.0
    # It goes on where it was broken off.
    assert await Calls(made, tools).ask() == set(bad)


async def test_tools_that_cost_too_much_together_are_loose_at_once_from_then_on(autojump_clock):
    class Together(ScriptedCheck):
        async def __call__(self, grammar: str, /) -> Any:
            await super().__call__(grammar)
            return "time" if "minimum" in grammar and "object" in grammar else "done"

    check = Together()
    made = schemas(check)
    tools = {"f": PLAIN, "g": {"type": "integer", "minimum": 7}}
    for _ in range(3):
        await Calls(made, tools).ask()
        assert len(check.asked) == 4


# --- the process ----------------------------------------------------------------------------------


def children(pid: int | str = "self") -> list[int]:
    """The processes that try out grammars among those that a process has started, on Linux."""
    found = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                # Not others, of which some imports have need.
                if checker_module._PROGRAM.name in Path(f"/proc/{child}/cmdline").read_text():
                    found.append(int(child))
    return found


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@asynccontextmanager
async def checking(**bounds: Any) -> AsyncIterator[GrammarCheck]:
    with trio.fail_after(HANGS_S):
        async with grammar_checker(read_vocabulary, **bounds) as check:
            yield check


async def the_child(of: int) -> int:
    """The one process that a process has, as soon as it has it."""
    while not (found := children(of)):
        await trio.lowlevel.checkpoint()
    (child,) = found
    return child


async def test_a_process_finds_out_what_grammars_take_and_kills_what_takes_too_much():
    async with checking() as check:
        outcomes: dict[str, str] = {}

        async def find_out(name: str, schema: dict[str, Any]) -> None:
            outcomes[name] = await check(grammar_of_schema(schema))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(find_out, "plain", PLAIN)
            nursery.start_soon(find_out, "expensive", EXPENSIVE)
            # What is wrong with a grammar is for its compilation to say.
            nursery.start_soon(find_out, "wrong", {"type": "integer", "minimum": 5, "maximum": 4})
        assert outcomes == {"plain": "done", "expensive": "time", "wrong": "done"}


async def test_a_grammar_that_takes_too_much_memory_is_killed():
    async with checking(cpu_s=60, memory_bytes=2**23) as check:
        assert await check(grammar_of_schema(EXPENSIVE)) == "memory"
        assert await check(grammar_of_schema(PLAIN)) == "done"


@linux
async def test_a_process_is_used_again_until_who_leaves_has_it_killed_and_ends_with_the_block():
    async with checking(cpu_s=600) as check:
        await check(grammar_of_schema(PLAIN))
        process = await the_child(os.getpid())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(check, grammar_of_schema(EXPENSIVE))
            await trio.testing.wait_all_tasks_blocked()
            assert children() == [process]
            nursery.cancel_scope.cancel()
        assert children() == []
        assert await check(grammar_of_schema(PLAIN)) == "done"
        assert children() not in ([], [process])
    assert children() == []


@pytest.mark.slow
@linux
async def test_a_process_that_dies_is_replaced():
    async with checking(cpu_s=600) as check:
        await check(grammar_of_schema(PLAIN))
        for grammar in (EXPENSIVE, PLAIN):  # in the middle of a check, and before one
            process = await the_child(os.getpid())
            if grammar is PLAIN:
                os.kill(process, signal.SIGKILL)
            async with trio.open_nursery() as nursery:

                async def fail(grammar: dict[str, Any] = grammar) -> None:
                    with pytest.raises(CheckerGoneError, match="try again"):
                        await check(grammar_of_schema(grammar))

                nursery.start_soon(fail)
                await trio.testing.wait_all_tasks_blocked()
                if grammar is EXPENSIVE:
                    os.kill(process, signal.SIGKILL)
            assert await check(grammar_of_schema(PLAIN)) == "done"


@linux
async def test_a_grammar_that_leaves_little_memory_is_the_last_of_its_process():
    async with checking(memory_bytes=0) as check:
        for _ in range(2):
            assert await check(grammar_of_schema(PLAIN)) == "done"
            assert children() == []


async def test_a_process_that_does_not_start_fails_only_its_own_requests(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    async with checking() as check:
        with pytest.raises(CheckerGoneError, match=r"cannot be started: .*No such file"):
            await check(grammar_of_schema(PLAIN))
        monkeypatch.undo()
        assert await check(grammar_of_schema(PLAIN)) == "done"


async def test_a_tokenizer_that_will_not_do_is_what_every_grammar_is_refused_with():
    def fail() -> tuple[str, list[int]]:
        raise SettingsError("no vocabulary")

    async with grammar_checker(fail) as check:
        for _ in range(2):
            with pytest.raises(SettingsError, match="no vocabulary"):
                await check("")


@pytest.mark.slow
@linux
async def test_where_the_server_is_killed_nothing_is_left(tmp_path):
    program = """
import json, sys, trio
from runtime.server.grammars.checker import grammar_checker
vocabulary, grammar = json.load(open(sys.argv[1]))
async def main():
    async with grammar_checker(lambda: tuple(vocabulary), cpu_s=600) as check:
        await check(grammar)
trio.run(main)
"""
    asked = tmp_path / "asked.json"
    asked.write_text(json.dumps([read_vocabulary(), grammar_of_schema(EXPENSIVE)]))
    with trio.fail_after(HANGS_S):
        server = await trio.lowlevel.open_process([sys.executable, "-c", program, asked], cwd=ROOT, env=environment())
        try:
            process = await the_child(server.pid)
        finally:
            server.kill()
            with trio.CancelScope(shield=True):
                await server.wait()
        await until_in_trio(lambda: not Path(f"/proc/{process}").exists())


def test_the_process_imports_neither_mlx_nor_the_runtime():
    program = (
        "import runpy, sys\n"
        f"runpy.run_path({str(checker_module._PROGRAM)!r}, run_name='tried')\n"
        "print(sorted({'mlx', 'runtime', 'actors', 'protocol', 'trio', 'transformers'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
