"""`outrider serve` as a child process, with the demo pair and a chat template by which it can call tools."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from served_command import KEY, Server, serving

import runtime

MODEL = "caller"

# Like Qwen's: by this, mlx-lm knows the format of calls.
TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for message in messages %}{{ message.role }}: {{ message.content or "" }}
{%- for call in message.tool_calls or [] %}{% set tool_call = call.function -%}
<tool_call>{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}</tool_call>{% endfor %}
{% endfor %}assistant:"""


@contextmanager
def serving_caller(folder: Path) -> Iterator[Server]:
    """The server, whose target lies in a folder `caller` that is made in `folder`."""
    target = folder / MODEL
    target.mkdir()
    for file in runtime.DEMO_TARGET.iterdir():
        (target / file.name).symlink_to(file)
    (target / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    with serving("--target", str(target), "--draft", str(runtime.DEMO_DRAFT), "--api-key", KEY) as one:
        yield one
