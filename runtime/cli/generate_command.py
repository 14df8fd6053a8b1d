"""The command `outrider generate`: streams one text to stdout. Nothing here imports mlx at its top."""

from __future__ import annotations

import argparse
import json
import math
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import trio

from protocol.errors import PromptError, SettingsError
from protocol.settings import settings_from
from runtime.cli.arguments.models import PREFIX_CACHE, Models, add_models, models_of
from runtime.cli.arguments.settings import add_flags, add_settings, completed, limit_of, parse_value, settings_of
from runtime.cli.command import Command, follow_target
from runtime.loading.model_spec import ModelSpec
from runtime.persistence.prompt_cache_file import read_header
from runtime.terminal.display import (
    CommandOutcome,
    Display,
    Output,
    OutputError,
    UnfinishedError,
    cut_message,
    ending_of,
    print_message,
    print_statistics,
    warnings_at_the_end,
)
from runtime.terminal.signals import SignalScope, exit_on_signal
from runtime.tracing.trace_files import ChromeFile, TimelineFile

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from protocol.statistics import Statistics
    from protocol.trace import Event
    from runtime.generation.text import Prompt
    from runtime.generation.tokens import Token


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument(
        "prompt_here",
        metavar="PROMPT",
        nargs="?",
        help='text to continue, or the user message if the model has a chat template; "-" reads it from stdin',
    )
    prompt.add_argument("-p", "--prompt", metavar="PROMPT", help="the same as PROMPT")
    chat = parser.add_argument_group("chat template")
    add_flags(
        chat,
        ("--system TEXT", "system message; needs a chat template"),
        ("--prefill-response TEXT", "beginning of the answer, which the model continues; needs a chat template"),
    )
    whether = chat.add_mutually_exclusive_group()
    add_flags(
        whether,
        ("--chat", "require the chat template (default: use it if there is one, else continue the text)"),
        ("--raw", "continue the prompt without the chat template"),
    )
    add_flags(
        parser,
        (
            "--prompt-cache-file FILE",
            "file written by mlx_lm.cache_prompt, whose text the prompt continues; --target defaults to its model",
        ),
    )
    add_flags(
        parser.add_argument_group("output"),
        ("--json", "print one JSON object at the end instead of streaming text"),
        ("--json-schema FILE", "generate JSON that follows the schema in this file (needs llguidance)"),
        (
            "--logprobs N",
            "with --json, print the log-probability of each token, and of the N likeliest tokens at its position; 0 "
            "prints none (default: 0)",
            {"type": parse_value, "default": argparse.SUPPRESS},
        ),
        ("--stats", "print statistics on stderr at the end"),
        ("--trace FILE", "write a trace for Perfetto and chrome://tracing (JSON)"),
        ("--timeline FILE", "write a page with a timeline of both models (HTML)"),
    )
    add_settings(parser)
    # A single text never reuses a prefix.
    add_models(parser, without=PREFIX_CACHE, samples=True)


def _models_of(arguments: argparse.Namespace) -> Models:
    models = models_of(arguments)
    if arguments.prompt_cache_file is None or (file := read_header(arguments.prompt_cache_file)).model is None:
        return models
    if arguments.target is not None:
        if arguments.target != file.model:
            raise SettingsError(
                f"--prompt-cache-file was made with {file.model}, got --target {arguments.target}; give the same name, "
                "or leave --target out"
            )
        return models
    spec = models.target if isinstance(models.target, ModelSpec) else ModelSpec(models.target)
    # A file must not be able to make code run.
    tokenizer_config = {name: value for name, value in file.tokenizer_config.items() if name != "trust_remote_code"}
    spec = attrs.evolve(spec, path=file.model, tokenizer_config={**tokenizer_config, **spec.tokenizer_config})
    draft = None if arguments.draft is None else models.draft
    return attrs.evolve(models, target=file.model if spec.is_plain else spec, draft=draft, default=None)


def _text_of(arguments: argparse.Namespace) -> str:
    for flag, given in (("--system", arguments.system), ("--prefill-response", arguments.prefill_response)):
        if arguments.raw and given is not None:
            raise SettingsError(f"{flag} needs the chat template, which --raw leaves out; give one of them")
    text: str = arguments.prompt if arguments.prompt_here is None else arguments.prompt_here
    try:
        if text == "-":
            if sys.stdin is None:
                raise PromptError('the prompt "-" is to be read from stdin, and stdin is closed')
            text = sys.stdin.read()
        # Python decodes invalid bytes in arguments to lone surrogates, which cannot be encoded.
        text.encode()
    except UnicodeError as error:
        raise PromptError(f"the prompt is not valid text: {error}; give it as {sys.getfilesystemencoding()}") from error
    if not text and arguments.system is None and arguments.prefill_response is None:
        raise PromptError("the prompt is empty; give a text to continue or a question")
    return text


# Stands for the prompt, to find out what a chat template puts in front of it. mlx-lm uses the same text.
_MARK = "<query>"


def _prompt_of(
    arguments: argparse.Namespace, text: str, tokenizer: TokenizerWrapper | None, template_args: dict[str, Any]
) -> Prompt:
    if arguments.raw or tokenizer is None or not tokenizer.has_chat_template:
        return text

    def messages(prompt: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
        if arguments.system is not None:
            found.insert(0, {"role": "system", "content": arguments.system})
        if arguments.prefill_response is not None:
            found.append({"role": "assistant", "content": arguments.prefill_response, "prefix": True})
        return found

    if arguments.prompt_cache_file is None:
        return messages(text)
    from runtime.generation.chat_template.rendering import render_chat_template

    # As in mlx-lm, the file has everything up to the user's words.
    marked, whole = (render_chat_template(messages(words), tokenizer, **template_args) for words in (_MARK, text))
    if _MARK not in marked:
        raise PromptError("the chat template does not repeat the prompt; give --raw to continue the cached prompt")
    return tuple(tokenizer.encode(whole[marked.index(_MARK) :], add_special_tokens=False))


def _schema(file: str) -> str:
    from runtime.generation.json_schema import check_json_schema

    try:
        schema = Path(file).read_text(encoding="utf-8")
        check_json_schema(schema)
    except OSError as error:
        raise SettingsError(f"cannot read the JSON schema from {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"the JSON schema in {file} is not valid text: {error}; write it as UTF-8") from error
    except SettingsError as error:
        raise SettingsError(f"--json-schema {file}: {error}") from error
    return schema


@attrs.define
class Generated(CommandOutcome):
    """The outcome of `generate`, with the generation so far."""

    tokens: list[Token] = attrs.field(factory=list)
    stop_reason: str | int | None = None  # the stop string or stop token that ended the text, or None
    statistics: Statistics | None = None  # of the stream; None if it never started
    cut: str | None = None  # that the text was cut off, and how to have more of it

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(token.text for token in self.tokens)

    def as_json(self) -> str:
        """The JSON object that `--json` prints."""
        result: dict[str, Any] = {
            "text": self.text,
            "tokens": [token.id for token in self.tokens],
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "interrupted": self.signal is not None,
            "statistics": None if self.statistics is None else attrs.asdict(self.statistics),
        }
        if any(token.logprob is not None for token in self.tokens):
            result["logprobs"] = [
                {
                    "logprob": _finite(token.logprob),
                    "top_logprobs": [
                        {"id": top.id, "text": top.text, "logprob": _finite(top.logprob)} for top in token.top_logprobs
                    ],
                }
                for token in self.tokens
            ]
        return json.dumps(result)


def _finite(logprob: float | None) -> float | None:
    """The value, or None for minus infinity, the log-probability of a forbidden token, which JSON lacks."""
    return None if logprob is None or math.isinf(logprob) else logprob


def generate(arguments: argparse.Namespace) -> CommandOutcome:
    """Continue a prompt, and show the text, also that of an interrupted generation."""
    models, settings = _models_of(arguments), settings_of(arguments)
    if settings.get("logprobs") and not arguments.json:
        raise SettingsError("--logprobs needs --json, since a text cannot show them; give both")
    schema = None if arguments.json_schema is None else _schema(arguments.json_schema)
    text = _text_of(arguments)
    output, generated = Output(), Generated()
    files = (ChromeFile, arguments.trace), (TimelineFile, arguments.timeline)
    recorders = [kind(file) for kind, file in files if file is not None]

    async def stream_text(stack: AsyncExitStack) -> None:
        listeners = [display.on_event]
        for recorder in recorders:
            listeners.append(await stack.enter_async_context(recorder))

        def on_event(event: Event) -> None:
            for listener in listeners:
                listener(event)

        runtime = await stack.enter_async_context(models.open(settings, trace=on_event, max_streams=1))
        for recorder in recorders:
            if isinstance(recorder, TimelineFile):
                recorder.tokenizer = runtime.tokenizer
        given = limit_of(runtime.tokenizer, is_raw=arguments.raw) | completed(settings, arguments, runtime.tokenizer)
        if schema is not None:
            from runtime.generation.grammar import Grammar

            given["logits_processors"] = [Grammar.from_json_schema(schema, runtime.tokenizer)]
        prompt = _prompt_of(arguments, text, runtime.tokenizer, models.options.get("chat_template_args", {}))
        stream = runtime.stream(prompt, **given)
        display.show_prefill(stream.statistics().prompt_tokens, settings_from(given).prefill_step_size)
        try:
            async with stream:
                async for token in stream:
                    generated.tokens.append(token)
                    display.clear_for_text()
                    if not arguments.json:
                        if token.index == 0 and isinstance(prompt, str):
                            output.echo(prompt)
                        await output.write(token.text, dimmed=token.is_thinking)
                    generated.finish_reason, generated.stop_reason = token.finish_reason, token.stop_reason
        finally:
            generated.statistics = stream.statistics()
        if generated.finish_reason == "length":
            generated.cut = cut_message(generated.statistics, runtime.context_length)
        if schema is not None:
            try:
                json.loads(generated.text)
            except ValueError as error:
                why = "; raise --max-tokens" if generated.finish_reason == "length" else " by a stop string"
                said = f"the JSON is incomplete, cut off at {len(generated.tokens)} tokens{why}"
                raise UnfinishedError(said) from error

    async def work() -> None:
        async with AsyncExitStack() as stack:
            await stream_text(stack)

    with warnings_at_the_end():
        with Display() as display, exit_on_signal(display):
            display.show_loading(models.loaded)
            import runtime.engine.opening  # noqa: F401  imported here, where Ctrl-C ends it at once

            trio.run(SignalScope(generated, display).run, work)
        try:
            if not arguments.json:
                output.end_line()
            elif generated.failure is None or isinstance(generated.failure, UnfinishedError):
                output.write_now(generated.as_json() + "\n")
        except OutputError as error:
            generated.failure = generated.failure or error
    # The JSON has the reason, and an error says more.
    if generated.cut is not None and generated.failure is None and not arguments.json:
        print_message(generated.cut)
    if arguments.stats and generated.statistics is not None:
        print_statistics(generated.statistics, ending_of(generated.finish_reason, generated.stop_reason))
    return generated


COMMAND = Command(
    name="generate",
    usage="PROMPT [options]",
    help="continue or answer a prompt",
    description="Continue a prompt, or answer it if the model has a chat template. The text streams to stdout; "
    "everything else goes to stderr.",
    epilog="""examples:
  outrider generate "def quicksort(items):" -m 120 --stats
  outrider generate "What is a monad?" --target org/model --draft org/small
  outrider generate - --target org/model --draft ngram < question.txt

Ctrl-C stops the generation and still prints statistics; a second Ctrl-C exits at once.""",
    common="--target --draft --max-tokens --temperature --seed --stop --lookahead --system --json --stats",
    add_arguments=_add_arguments,
    run=generate,
    follow=follow_target,
)
