"""`outrider serve` as a child process."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import httpx
from command_line import HANGS_S, environment

import runtime

if TYPE_CHECKING:
    import openai  # takes a second

KEY = "s3cret"
MODEL, CALLER = "outrider-demo-target", "caller"
PROMPT = 'def quicksort(items):\n    """Sort a list in place."""\n'

# Like Qwen's: by this, mlx-lm knows the format of calls.
CALLER_TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for message in messages %}{{ message.role }}: {{ message.content or "" }}
{%- for call in message.tool_calls or [] %}{% set tool_call = call.function -%}
<tool_call>{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}</tool_call>{% endfor %}
{% endfor %}assistant:"""


@attrs.define
class Server:
    """A server in a process of its own, its URL with a slash at the end, and the lines it has written to stderr."""

    process: subprocess.Popen[str]
    url: str
    said: list[str]

    def client(self, key: str = KEY, **options: Any) -> openai.OpenAI:
        import openai

        return openai.OpenAI(base_url=f"{self.url}v1", api_key=key, max_retries=0, timeout=HANGS_S, **options)

    def health(self) -> Any:
        return httpx.get(f"{self.url}health", timeout=HANGS_S).json()

    def until_idle(self) -> None:
        until(lambda: self.health()["streams"] == self.health()["waiting"] == 0)

    def ends(self) -> int:
        return self.process.wait(timeout=HANGS_S)


def until(is_so: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < HANGS_S


@contextmanager
def serving(*arguments: str, program: Sequence[str] = ("-m", "runtime")) -> Iterator[Server]:
    """`outrider serve …` at a free port; killed on exit if it still runs."""
    named = ("--target", "--config")
    models = () if any(argument in named for argument in arguments) else ("--target", "demo")
    command = [sys.executable, *program, "serve", "--port", "0", *models, *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env=environment(), text=True) as p:
        said: list[str] = []
        # Read stderr to its end, or the process would block on a full pipe.
        reader = threading.Thread(target=said.extend, args=(p.stderr,))
        try:
            found = None
            while found is None:
                said.append(p.stderr.readline())
                assert said[-1], f"it ended: {said}"
                found = re.search(r"served at (http://\S+)", said[-1])
            reader.start()
            yield Server(p, found[1], said)
        finally:
            p.kill()
            if reader.ident is not None:
                reader.join()


@contextmanager
def serving_caller(folder: Path) -> Iterator[Server]:
    """The server of the demo pair with a template by which it can call tools, in a folder `caller` in `folder`."""
    target = folder / CALLER
    target.mkdir()
    for file in runtime.DEMO_TARGET.iterdir():
        (target / file.name).symlink_to(file)
    (target / "chat_template.jinja").write_text(CALLER_TEMPLATE, encoding="utf-8")
    with serving("--target", str(target), "--draft", str(runtime.DEMO_DRAFT), "--api-key", KEY) as one:
        yield one
