"""The documentation: every code block runs, every name in a table exists, every link leads somewhere.

A Python block is a whole program, unless a comment in front of it says what it needs:

    <!-- run: trio -->      a fragment: runs with `rt`, the demo pair opened by `runtime.open`
    <!-- run: asyncio -->   likewise, opened by `runtime.aio.open`
    <!-- run: tools -->     a whole program; runs with a scripted model in place of those that it names
    <!-- run: server -->    runs while `outrider serve` answers at the address that the block names (sh, too)
    <!-- names: hub -->     needs a model from the hub: is compiled, and its names and keywords are looked up

Fragments of one kind on one page share their names, like the cells of a notebook. `given` defines names for them.
In sh blocks, every `outrider` command is parsed; those that need nothing but the demo pair are run as well.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import io
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from chat_models import calling_pair, calling_tokenizer, says
from faces import on_asyncio
from served_command import serving
from sweeps import sweep

import protocol.errors
import runtime
from protocol.open_options import OpenOptions
from protocol.options import options_of
from runtime.cli import main as cli
from runtime.engine.opening import OPTIONS
from runtime.generation.tool_calls.tools import StreamArguments
from runtime.loading.named_models import INSTALL

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *GUIDES]
STREAM = StreamArguments.__annotations__

BLOCK = re.compile(r"(?:^<!-- (\w+: \w+) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARKERS = ("", "run: trio", "run: asyncio", "run: tools", "run: server", "names: hub")
ADDRESS = "http://127.0.0.1:8000/"
# A placeholder for the reader's model in a command.
PLACEHOLDER = "path/or/hub-id"
# Ends a hang; not an expectation.
HANGS_S = 120


@attrs.frozen
class Block:
    """A fenced block of code.

    Attributes:
        page: the path of the page.
        line: number of its first line of code in the page, from 1.
        language: the language after the fence.
        marker: the text of the comment in front of it, or "".
        source: the code.
    """

    page: Path
    line: int
    language: str
    marker: str
    source: str

    def code(self, *, flags: int = 0) -> Any:
        """The compiled code; its tracebacks point to the page."""
        return compile("\n" * (self.line - 1) + self.source, self.page, "exec", flags=flags)


def blocks_of(page: Path, text: str | None = None) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8") if text is None else text
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start(3)) + 1
        yield Block(page, line, match[2], match[1] or "", match[3])


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def having(language: str, marker: str) -> Any:
    """Parameters: the blocks of one kind, page by page."""
    found: dict[Path, list[Block]] = {}
    for block in BLOCKS:
        if (block.language, block.marker) == (language, marker):
            found.setdefault(block.page, []).append(block)
    return pytest.mark.parametrize("blocks", found.values(), ids=map(named, found))


@pytest.fixture(autouse=True)
def elsewhere(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare_buffers: None
) -> None:
    """Run blocks in a folder of their own, with the files that commands name, and with a target as small as the draft
    model, except where a drafter was trained for the real one."""
    monkeypatch.chdir(tmp_path)
    if "trained-drafters" not in request.node.name:
        for home in (runtime, runtime.loading.named_models):
            monkeypatch.setattr(home, "DEMO_TARGET", runtime.DEMO_DRAFT)
    (tmp_path / "schema.json").write_text('{"enum": ["small", "large"]}')
    (tmp_path / "prompts.jsonl").write_text(
        '{"prompt": "import os"}\n{"id": "a", "prompt": "def f(", "max_tokens": 4}\n'
    )


# --- every block is run ---------------------------------------------------------------------------


@sweep("page", PAGES)
def test_no_block_is_overlooked(page: Path) -> None:
    blocks = list(blocks_of(page))
    text = page.read_text(encoding="utf-8")
    assert text.count("```") == 2 * len(blocks)
    assert text.count("<!--") == sum(block.marker != "" for block in blocks)
    for block in blocks:
        assert block.marker in MARKERS
        assert block.language in ("python", "sh", "text"), f"{page}:{block.line}"
        assert block.marker == "" or block.language == "python" or block.marker == "run: server"


# --- Python -----------------------------------------------------------------------------------------


def given() -> dict[str, Any]:
    """The names that fragments can use, besides `rt`."""
    return {
        "runtime": runtime,
        "trio": trio,
        "target": runtime.DEMO_TARGET,
        "draft": runtime.DEMO_DRAFT,
        "prompt": "def quicksort(items):",
        "prompts": ["import os\n", "def read_lines(path):"],
        "enough": lambda token: token.index >= 3,
    }


def run_program(block: Block) -> None:
    exec(block.code(), {"__name__": "__main__"})


async def run_fragments(blocks: list[Block], rt: Any) -> None:
    names = given()
    for block in blocks:
        code = block.code(flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        names["rt"] = rt  # a block may have opened a runtime of its own
        awaitable = eval(code, names)
        if code.co_flags & inspect.CO_COROUTINE:
            await awaitable


@pytest.mark.slow
@having("python", "")
def test_programs_run(blocks: list[Block], capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks:
        run_program(block)
        assert capsys.readouterr().out.strip() or "print(" not in block.source


@pytest.mark.slow
@having("python", "run: trio")
async def test_fragments_run_under_trio(blocks: list[Block]) -> None:
    async with runtime.open(runtime.DEMO_TARGET, draft=runtime.DEMO_DRAFT) as rt:
        await run_fragments(blocks, rt)


@having("python", "run: asyncio")
@on_asyncio
async def test_fragments_run_under_asyncio(blocks: list[Block]) -> None:
    async with runtime.aio.open(runtime.DEMO_TARGET, draft=runtime.DEMO_DRAFT) as rt:
        await run_fragments(blocks, rt)


@having("python", "run: tools")
def test_programs_with_tools_run(
    blocks: list[Block], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = [
        f'<tool_call>{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}</tool_call>'
        for city in ("Lisbon", "Oslo")
    ]
    says_so = says(calling_tokenizer(), calls[0], "rain there", calls[1], "rain there, too")

    def opens_scripted(open: Any) -> Any:
        defaults = {"logits_processors": [says_so], "max_tokens": 80}
        return lambda target, draft=None: open(next(calling_pair()), defaults=defaults)

    for home, name in ((runtime, "open"), (runtime, "open_sync"), (runtime.aio, "open")):
        monkeypatch.setattr(home, name, opens_scripted(getattr(home, name)))
    for block in blocks:
        run_program(block)
        assert "rain" in capsys.readouterr().out


def check_names(block: Block) -> None:
    """Check the calls and keywords of a block that cannot be run."""
    for node in ast.walk(ast.parse(block.source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = {"runtime": runtime, "rt": runtime.Runtime}.get(node.value.id)
            assert owner is None or hasattr(owner, node.attr), f"{node.value.id}.{node.attr}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            known = {"target", "draft", *OPTIONS} if node.func.attr == "open" else {*STREAM, *OPTIONS}
            known |= attrs.fields_dict(runtime.ModelSpec).keys() if node.func.attr == "ModelSpec" else set()
            assert {keyword.arg for keyword in node.keywords if keyword.arg != "end"} <= known | {"flush"}


@having("python", "names: hub")
def test_blocks_that_need_the_hub_use_names_that_exist(blocks: list[Block]) -> None:
    for block in blocks:
        block.code(flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        check_names(block)
        assert re.search(r'"[\w-]+/[\w.-]+"', block.source), "it needs no hub, so run it"


# --- shells -----------------------------------------------------------------------------------------


def lines_of(block: Block) -> list[str]:
    """Command lines without their comments."""
    lines = block.source.replace("\\\n", " ").splitlines()
    return [line for line in (re.sub(r"(^|\s)# .*", "", line).strip() for line in lines) if line]


def commands_of(line: str) -> list[list[str]]:
    """The commands of a line, as lists of arguments, without redirections and variables."""
    line = re.sub(r"\$('[^']*')", lambda match: shlex.quote(ast.literal_eval(match[1])), line)  # $'\n'
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|<")
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    for token in lexer:
        if token in ("&&", "|"):
            commands.append([])
        elif token == "<":
            next(lexer)
        elif commands[-1] or not re.match(r"[A-Z_]+=", token):
            commands[-1].append(token)
    return commands


def check_command(arguments: list[str]) -> None:
    """Parse an `outrider` command, and check the extras that an installation names."""
    program, *rest = arguments
    match Path(program).name:
        case "outrider":
            cli._parser().parse_args(rest)
        case "pip":
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            if rest == INSTALL.split()[1:]:
                return
            rest = [each for each in rest if each != "--no-compile"]
            assert rest[:2] == ["install", "-e"]
            asked = re.fullmatch(r"\.(?:\[(.*)\])?", rest[2])
            assert set((asked[1] or "cpu").split(",")) <= extras.keys()
        case name:
            known = "curl echo haproxy mkdocs mlx_lm.cache_prompt mypy pytest python python3 ruff"
            assert name in known.split()


def runs(line: str) -> bool:
    """Whether a line needs nothing but the demo pair and a few seconds."""
    return commands_of(line)[-1][:2] == ["outrider", "generate"] and PLACEHOLDER not in line


@having("sh", "")
def test_commands_parse(blocks: list[Block]) -> None:
    for block in blocks:
        for line in lines_of(block):
            for command in commands_of(line):
                check_command(command)


LINES = [line for block in BLOCKS if block.language == "sh" for line in lines_of(block) if runs(line)]


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES)
def test_small_commands_run(line: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    *before, (_, *arguments) = commands_of(line)
    if before:
        ((program, text),) = before
        assert program == "echo"
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{text}\n"))
    assert cli.main(arguments) == 0
    assert capfd.readouterr().out.strip()


# --- the server -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_blocks_that_ask_the_server_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [block for block in BLOCKS if block.marker == "run: server"]
    with serving("--target", str(runtime.DEMO_TARGET), "--max-tokens-limit", "64") as server:
        for block in blocks:
            assert ADDRESS in block.source
            source = block.source.replace(ADDRESS, server.url)
            if block.language == "python":
                run_program(attrs.evolve(block, source=source))
                assert capsys.readouterr().out.strip()
            elif shutil.which("curl"):
                asked = ["bash", "-c", source]
                done = subprocess.run(asked, capture_output=True, encoding="utf-8", timeout=HANGS_S, check=True)
                assert done.stdout.strip().endswith("data: [DONE]")


# --- tables, links, paths ---------------------------------------------------------------------------


def rows_under(heading: str, page: str) -> Iterator[tuple[list[str], str]]:
    """The names in the first cell of each row of the table below a heading, and the second cell."""
    section = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    for row in re.findall(r"^\| `(.*)$", section, re.MULTILINE):
        first, second = f"`{row}".split(" | ")[:2]
        yield re.findall(r"`([\w-]+)`", first), second


@pytest.mark.parametrize(
    ("heading", "page", "declaration"),
    [("Settings", "streams.md", runtime.Settings), ("Options of `open`", "models.md", OpenOptions)],
)
def test_a_table_has_all_that_is_declared_with_defaults(heading: str, page: str, declaration: type) -> None:
    found = {}
    for names, cell in rows_under(heading, page):
        cell = re.sub(r"(\d+) GiB", lambda size: str(int(size[1]) * 2**30), cell.replace("`", ""))
        defaults = ast.literal_eval(f"[{cell}]")
        for name, default in zip(names, defaults if len(defaults) > 1 else defaults * len(names), strict=True):
            found[name] = default
    declared = {name: getattr(declaration(), name) for name in options_of(declaration)}
    assert found == {name: default for name, default in declared.items() if name not in ("target", "draft")}


def test_the_table_of_the_servers_flags_has_only_such_as_exist() -> None:
    for names, _ in rows_under("Options", "server.md"):
        for name in names:
            value = [] if name.startswith("--no-") or name == "--strict" else ["7"]
            assert cli._parser().parse_args(["serve", name, *value])


def test_every_public_name_is_in_the_reference() -> None:
    pages = {page.stem: page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md")}
    written = {
        *re.findall(r"::: runtime\.(\w+)", pages["runtime"]),
        *re.findall(r"`runtime\.(\w+)`", "".join(pages.values())),
    }
    errors = {name for name, value in vars(protocol.errors).items() if inspect.isclass(value)}
    assert set(runtime.__all__) <= written | errors
    assert set(runtime.aio.__all__) == set(re.findall(r"::: runtime\.aio\.(\w+)", pages["aio"]))
    assert set(runtime.sync.__all__) == set(re.findall(r"::: runtime\.sync\.(\w+)", pages["sync"]))


@sweep("page", PAGES[:2])
def test_links_of_pages_outside_the_site_lead_to_files(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (ROOT / link).exists(), link


@sweep("page", PAGES)
def test_paths_that_a_page_names_exist(page: Path) -> None:
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    for path in re.findall(r"`([a-z_][\w.-]*/(?:[\w./-]+\.\w+|(?:[\w-]+/)*))`", text):
        places = (ROOT, ROOT / "tests", ROOT / "runtime", ROOT / "actors")
        assert any((place / path).exists() for place in places), path


def test_docstrings_become_markdown_with_their_sections() -> None:
    pytest.importorskip("griffe", reason="the extra docs is not installed")
    path = ROOT / "docs" / "docstring_markdown.py"
    spec = importlib.util.spec_from_file_location("docstring_markdown", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    docstring = """Do it.

    async with it() as one:
        pass

    Args:
        one, two: numbers, both
            positive.
        **three: more.

    Returns: a number, or
        None.

    Cancellation: none.
    """
    assert module.as_markdown(docstring).split("\n\n") == [
        "Do it.",
        "```python\nasync with it() as one:\n    pass\n```",
        "**Args:**",
        "- `one`, `two`: numbers, both\n  positive.\n- `**three`: more.",
        "**Returns:** a number, or\nNone.",
        "**Cancellation:** none.",
    ]
