"""The command `generate`: its arguments, and a text on stdout as it comes. Imports mlx only once it is needed."""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import trio

from protocol.errors import PromptError, SettingsError
from protocol.settings import settings_from
from runtime.cli.model_arguments import Models
from runtime.cli.settings_arguments import settings_of, value
from runtime.terminal.display import Display, Outcome, Output, OutputError, print_statistics, warnings_at_the_end
from runtime.terminal.signals import quitting, until_signal
from runtime.tracing.trace_files import ChromeFile, TimelineFile

logger = logging.getLogger("outrider")

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from protocol.statistics import Statistics
    from protocol.trace import Event
    from runtime.generation.text import Prompt
    from runtime.generation.token_reader import Token


# --- arguments ------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be asked of `generate`, beside the models, the settings and the BLAS."""
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument(
        "prompt_here",
        metavar="PROMPT",
        nargs="?",
        help='the text to continue, or what to ask a model that has a chat template; "-" reads it from stdin, as it is',
    )
    prompt.add_argument("-p", "--prompt", metavar="PROMPT", help="the same")
    chat = parser.add_argument_group("chat template")
    chat.add_argument(
        "--system", metavar="TEXT", help="what the model is told before it is asked; needs a chat template"
    )
    chat.add_argument("--system-prompt", dest="system", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    whether = chat.add_mutually_exclusive_group()
    whether.add_argument(
        "--chat",
        action="store_true",
        help="insist on the chat template (default: ask through it where there is one, else continue the text)",
    )
    whether.add_argument("--raw", action="store_true", help="continue the prompt as it is, without a chat template")
    whether.add_argument("--ignore-chat-template", dest="raw", action="store_true", help=argparse.SUPPRESS)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object at the end instead of text as it comes")
    output.add_argument(
        "--json-schema", metavar="FILE", help="write JSON that the schema in this file describes (needs llguidance)"
    )
    output.add_argument(
        "--logprobs",
        metavar="N",
        type=value,
        default=argparse.SUPPRESS,
        help="with --json, the log-probabilities of the tokens, and of the N likeliest at each place (default: 0)",
    )
    output.add_argument("--stats", action="store_true", help="end with a table of statistics on stderr")
    output.add_argument("--trace", metavar="FILE", help="write a trace that Perfetto and chrome://tracing read (JSON)")
    output.add_argument(
        "--timeline", metavar="FILE", help="write a page that shows who worked when, and on what (HTML)"
    )


@attrs.frozen
class _Asked:
    """What is to be generated from.

    Attributes:
        prompt: as it was given.
        system: what the model is told before, or None.
        template: whether the chat template is to be used; None where there is one.
    """

    prompt: str
    system: str | None = None
    template: bool | None = None

    def of(self, tokenizer: TokenizerWrapper | None) -> Prompt:
        """The prompt for the runtime: a text to continue, or messages.

        Raises: PromptError: there is no chat template, and it was insisted on.
        """
        has_template = tokenizer is not None and tokenizer.has_chat_template
        if not has_template and (self.template or self.system is not None):
            why = "--chat" if self.template else "--system"
            raise PromptError(f"{why} needs a chat template, and the target's tokenizer has none; leave it out")
        if not has_template or self.template is False:
            return self.prompt
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": self.prompt}]


def _asked(arguments: argparse.Namespace) -> _Asked:
    """What was asked for.

    Raises:
        PromptError: the prompt is not text.
        SettingsError: a system message is to be said without a chat template.
    """
    given: str = arguments.prompt if arguments.prompt_here is None else arguments.prompt_here
    if arguments.raw and arguments.system is not None:
        raise SettingsError("--system is said through the chat template, which --raw leaves out; give one of them")
    return _Asked(_read(given), arguments.system, False if arguments.raw else True if arguments.chat else None)


def _read(argument: str) -> str:
    """The prompt that an argument stands for.

    Raises: PromptError: it is not text.
    """
    try:
        if argument == "-":
            if sys.stdin is None:
                raise PromptError('the prompt "-" is to be read from stdin, and stdin is closed')
            argument = sys.stdin.read()
        # Arguments that are no text come with lone surrogates in place of what could not be decoded.
        argument.encode()
    except UnicodeError as error:
        raise PromptError(f"the prompt is not valid text: {error}; give it as {sys.getfilesystemencoding()}") from error
    return argument


def _schema(file: str) -> str:
    """The JSON schema in a file.

    Raises: SettingsError: it cannot be read or followed.
    """
    from runtime.generation.json_schema import check_json_schema

    try:
        schema = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"cannot read the JSON schema from {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"the JSON schema in {file} is not valid text: {error}; write it as UTF-8") from error
    try:
        check_json_schema(schema)
    except SettingsError as error:
        raise SettingsError(f"--json-schema {file}: {error}") from error
    return schema


# --- the command ----------------------------------------------------------------------------------


@attrs.define
class Generated(Outcome):
    """What has come of a generation so far; as an outcome, and:

    Attributes:
        pieces: its text.
        tokens: as they were given.
        stop_reason: the stop string or stop token that ended it, or None.
        statistics: None where it never began.
    """

    pieces: list[str] = attrs.field(factory=list)
    tokens: list[Token] = attrs.field(factory=list)
    stop_reason: str | int | None = None
    statistics: Statistics | None = None

    def as_json(self) -> str:
        """What `--json` shows of it."""
        said: dict[str, Any] = {
            "text": "".join(self.pieces),
            "tokens": [token.id for token in self.tokens],
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "interrupted": self.signal is not None,
            "statistics": None if self.statistics is None else attrs.asdict(self.statistics),
        }
        if any(token.logprob is not None for token in self.tokens):
            said["logprobs"] = [
                {
                    "logprob": _finite(token.logprob),
                    "top_logprobs": [
                        {"id": top.id, "text": top.text, "logprob": _finite(top.logprob)} for top in token.top_logprobs
                    ],
                }
                for token in self.tokens
            ]
        return json.dumps(said)


def _finite(logprob: float | None) -> float | None:
    """JSON has no minus infinity, which is what a token that is forbidden has."""
    return None if logprob is None or math.isinf(logprob) else logprob


def generate(arguments: argparse.Namespace, models: Models) -> Outcome:
    """Continue a prompt, and show what came of it, also where it was cut short.

    Raises: OutriderError: the arguments make no sense; what fails later is in the outcome.
    """
    settings = settings_of(arguments)
    if settings.get("logprobs") and not arguments.json:
        raise SettingsError("--logprobs has no place in a text; use it with --json")
    schema = None if arguments.json_schema is None else _schema(arguments.json_schema)
    asked = _asked(arguments)
    output = Output()
    generated = Generated()
    with warnings_at_the_end():
        with Display() as display, quitting(display):
            display.loading(models.loaded)
            import runtime.engine.opening  # noqa: F401  imported here, where Ctrl-C need not wait for it

            work = partial(
                _stream_text,
                asked,
                models,
                settings,
                schema,
                generated,
                display,
                None if arguments.json else output,
                None if arguments.trace is None else ChromeFile(arguments.trace),
                None if arguments.timeline is None else TimelineFile(arguments.timeline),
            )
            trio.run(until_signal, work, generated, display)
        try:
            if not arguments.json:
                output.end_line()
            elif generated.failure is None:
                output.write_now(generated.as_json() + "\n")
        except OutputError as error:
            generated.failure = generated.failure or error
    if arguments.stats and generated.statistics is not None:
        print_statistics(generated.statistics)
    return generated


async def _stream_text(
    asked: _Asked,
    models: Models,
    settings: dict[str, Any],
    schema: str | None,
    generated: Generated,
    display: Display,
    output: Output | None,
    trace: ChromeFile | None,
    timeline: TimelineFile | None,
) -> None:
    """Load the models, generate, and write the text to `output`, and what happened to the files, if there are any.

    Raises: OutriderError.

    Cancellation: as `runtime.open` and `TokenStream`. What was generated is in `generated` in any case.
    """
    async with AsyncExitStack() as stack:
        listeners = [display.on_event]
        for recorder in (trace, timeline):
            if recorder is not None:
                listeners.append(await stack.enter_async_context(recorder))

        def on_event(event: Event) -> None:
            for listener in listeners:
                listener(event)

        from runtime.engine.opening import open as open_runtime

        runtime = await stack.enter_async_context(
            open_runtime(models.target, models.draft, trace=on_event, **models.options)
        )
        if timeline is not None:
            timeline.tokenizer = runtime.tokenizer
        if schema is not None:
            from runtime.generation.grammar import Grammar

            settings = settings | {"logits_processors": [Grammar.from_json_schema(schema, runtime.tokenizer)]}
        prompt = asked.of(runtime.tokenizer)
        stream = runtime.stream(prompt, **settings)
        display.reading(stream.statistics().prompt_tokens, settings_from(settings).prefill_step_size)
        try:
            async with stream:
                async for token in stream:
                    generated.pieces.append(token.text)
                    generated.tokens.append(token)
                    display.writing()
                    if output is not None:
                        if token.index == 0 and isinstance(prompt, str):
                            output.echo(prompt)
                        await output.write(token.text, dimmed=token.is_thinking)
                    generated.finish_reason, generated.stop_reason = token.finish_reason, token.stop_reason
        finally:
            generated.statistics = stream.statistics()
        if schema is not None and generated.finish_reason == "length":
            logger.warning("the JSON is incomplete, cut off at %d tokens; raise --max-tokens", len(generated.tokens))
