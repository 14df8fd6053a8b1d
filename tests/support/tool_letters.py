"""A scripted server whose model calls tools."""

from collections.abc import Callable, Sequence
from typing import Any

from asgi import Letters, saying, simulated_server, with_parameters_of
from mlx_lm.tool_parsers import json_tools
from scripted import ScriptedModel
from tool_call_cases import tool

USER = {"role": "user", "content": "weather"}
TOOLS = [tool("weather", city="string"), tool("clock")]
ASKED: dict[str, Any] = {"messages": [USER], "tools": TOOLS, "max_tokens": 300}
OSLO = '<tool_call>{"name": "weather", "arguments": {"city": "oslo"}}</tool_call>'


class ToolLetters(Letters):
    """One character for each of 64 ids, with those of JSON; calls are as those of Qwen."""

    ALPHABET = 'abcdefghijklmnopqrstuvwxyzABCDEFGHIJ0123 \n.,:</>{}[]"_\\-()=!?#+*'
    has_tool_calling = True
    tool_parser = staticmethod(json_tools.parse_tool_call)
    tool_call_start, tool_call_end = json_tools.tool_call_start, json_tools.tool_call_end

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.told: list[Any] = []  # tools that the template was given

    def apply_chat_template(self, messages: Sequence[Any], **options: Any) -> Any:
        self.told.append(options.get("tools"))
        return super().apply_chat_template(messages, **options)


def serve_calls(
    test: Any, says: str, messages: Sequence[Any] = (USER,), *, has_drafter: bool = False, **options: Any
) -> None:
    """Run a test with a server whose model says a text to these messages; options as of `ToolLetters`."""
    tokenizer = ToolLetters(**options)
    start = len(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True))
    tokenizer.seen.clear()
    tokenizer.told.clear()
    script = saying(says, start, tokenizer)
    simulated_server(test, *(ScriptedModel(script) for _ in range(1 + has_drafter)), tokenizer=tokenizer)


def on_calling_server(says: str, messages: Sequence[Any] = (USER,), **options: Any) -> Callable[[Any], Any]:
    """Make a test of an async function whose argument `server` is that of `serve_calls`."""

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        def run_with_server(**given: Any) -> None:
            serve_calls(lambda server: test(server=server, **given), says, messages, **options)

        return with_parameters_of(test, run_with_server)

    return decorate
