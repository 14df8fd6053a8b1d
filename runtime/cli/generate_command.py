"""The command `outrider generate`: streams one text to stdout. Nothing here imports mlx at its top."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import trio

from protocol.errors import OutriderError, PromptError, SettingsError
from protocol.settings import settings_from
from runtime.cli.arguments.mlx_lm import add_flags_without_effect
from runtime.cli.arguments.models import Models
from runtime.cli.arguments.settings import parse_value, settings_of, with_tokens_of
from runtime.loading.model_spec import ModelSpec
from runtime.persistence.prompt_cache_file import read_header
from runtime.terminal.display import CommandOutcome, Display, Output, OutputError, warnings_at_the_end
from runtime.terminal.signals import SignalScope, exit_on_signal
from runtime.terminal.statistics_table import print_statistics
from runtime.tracing.trace_files import ChromeFile, TimelineFile

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from protocol.statistics import Statistics
    from protocol.trace import Event
    from runtime.generation.text import Prompt
    from runtime.generation.token_reader import Token


# --- arguments ------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `generate`, other than the models, the settings and the BLAS."""
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument(
        "prompt_here",
        metavar="PROMPT",
        nargs="?",
        help='text to continue, or the user message if the model has a chat template; "-" reads it from stdin',
    )
    prompt.add_argument("-p", "--prompt", metavar="PROMPT", help="the same as PROMPT")
    chat = parser.add_argument_group("chat template")
    chat.add_argument("--system", metavar="TEXT", help="system message; needs a chat template")
    chat.add_argument("--system-prompt", dest="system", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    chat.add_argument(
        "--prefill-response", metavar="TEXT", help="beginning of the answer, which continues it; needs a chat template"
    )
    whether = chat.add_mutually_exclusive_group()
    whether.add_argument(
        "--chat",
        action="store_true",
        help="require the chat template (default: use it if there is one, else continue the text)",
    )
    whether.add_argument("--raw", action="store_true", help="continue the prompt without the chat template")
    whether.add_argument("--ignore-chat-template", dest="raw", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--prompt-cache-file",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="file of mlx_lm.cache_prompt, which the prompt continues; its model is the default of --target",
    )
    parser.add_argument("--extra-eos-token", nargs="+", default=(), help=argparse.SUPPRESS)
    add_flags_without_effect(parser, "generate")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", action="store_true", help="print one JSON object at the end instead of streaming text"
    )
    output.add_argument(
        "--json-schema", metavar="FILE", help="generate JSON that follows the schema in this file (needs llguidance)"
    )
    output.add_argument(
        "--logprobs",
        metavar="N",
        type=parse_value,
        default=argparse.SUPPRESS,
        help="with --json, print log-probabilities of the tokens, and of the N likeliest tokens at each position "
        "(default: 0)",
    )
    output.add_argument("--stats", action="store_true", help="print statistics on stderr at the end")
    output.add_argument("--trace", metavar="FILE", help="write a trace for Perfetto and chrome://tracing (JSON)")
    output.add_argument("--timeline", metavar="FILE", help="write a page with a timeline of both models (HTML)")


# Stands for the prompt, to find out what a chat template puts in front of it; the same that mlx-lm takes.
_MARK = "<query>"


@attrs.frozen
class _PromptRequest:
    """The prompt as the command line gives it.

    Attributes:
        prompt: the text.
        system: the system message, or None.
        template: whether to use the chat template; None uses it if there is one.
        prefill_response: the beginning of the answer, or None.
        continues_cache: whether it continues a prompt cache file, which has what the template puts in front of it.
        template_args: variables of the chat template.
    """

    prompt: str
    system: str | None = None
    template: bool | None = None
    prefill_response: str | None = None
    continues_cache: bool = False
    template_args: Mapping[str, Any] = attrs.field(factory=dict)

    def prompt_for(self, tokenizer: TokenizerWrapper | None) -> Prompt:
        """The prompt for the runtime: a text to continue, or chat messages.

        Raises: PromptError: the chat template is required, and there is none.
        """
        has_template = tokenizer is not None and tokenizer.has_chat_template
        needs = {"--chat": self.template, "--system": self.system, "--prefill-response": self.prefill_response}
        if not has_template and (why := [flag for flag, given in needs.items() if given not in (None, False)]):
            raise PromptError(f"{why[0]} needs a chat template, and the target's tokenizer has none; leave it out")
        if not has_template or self.template is False:
            return self.prompt
        if not self.continues_cache:
            return self._messages(self.prompt)
        from runtime.generation.text import render_chat_template

        assert tokenizer is not None
        # As mlx-lm does: the file has all up to the user's words.
        marked, whole = (
            render_chat_template(self._messages(words), tokenizer, **self.template_args)
            for words in (_MARK, self.prompt)
        )
        if _MARK not in marked:
            raise PromptError("the chat template does not repeat the prompt; give --raw to continue the cached prompt")
        return tuple(tokenizer.encode(whole[marked.index(_MARK) :], add_special_tokens=False))

    def _messages(self, prompt: str) -> list[dict[str, Any]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        answer = (
            []
            if self.prefill_response is None
            else [{"role": "assistant", "content": self.prefill_response, "prefix": True}]
        )
        return [*system, {"role": "user", "content": prompt}, *answer]


def _prompt_request(arguments: argparse.Namespace, models: Models) -> _PromptRequest:
    """The prompt that the arguments give.

    Raises:
        PromptError: the prompt is empty, or not valid text.
        SettingsError: there is a system message or the beginning of an answer, but --raw leaves out the chat template.
    """
    given: str = arguments.prompt if arguments.prompt_here is None else arguments.prompt_here
    if arguments.raw and arguments.system is not None:
        raise SettingsError("--system needs the chat template, which --raw leaves out; give one of them")
    if arguments.raw and arguments.prefill_response is not None:
        raise SettingsError("--prefill-response needs the chat template, which --raw leaves out; give one of them")
    prompt = _read(given)
    if not prompt and arguments.system is None and arguments.prefill_response is None:
        raise PromptError("the prompt is empty; give a text to continue or a question")
    return _PromptRequest(
        prompt,
        arguments.system,
        False if arguments.raw else True if arguments.chat else None,
        arguments.prefill_response,
        hasattr(arguments, "prompt_cache_file"),
        models.options.get("chat_template_args", {}),
    )


def _models_of_cache(arguments: argparse.Namespace, models: Models) -> Models:
    """The models, where the prompt cache file names the target if the command line does not.

    Raises:
        SessionFileError: the file is no prompt cache file.
        SettingsError: the command line names another target.
    """
    if not hasattr(arguments, "prompt_cache_file") or (file := read_header(arguments.prompt_cache_file)).model is None:
        return models
    if arguments.target is not None:
        if arguments.target != file.model:
            raise SettingsError(
                f"--prompt-cache-file was made with {file.model}, got --target {arguments.target}; give the same name, "
                "or leave --target out"
            )
        return models
    spec = models.target if isinstance(models.target, ModelSpec) else ModelSpec(models.target)
    # A file must not be able to have code run.
    tokenizer_config = {name: value for name, value in file.tokenizer_config.items() if name != "trust_remote_code"}
    spec = attrs.evolve(spec, path=file.model, tokenizer_config={**tokenizer_config, **spec.tokenizer_config})
    draft = None if arguments.draft is None else models.draft
    return attrs.evolve(models, target=file.model if spec.is_plain else spec, draft=draft)


def _read(argument: str) -> str:
    """The prompt that an argument stands for: its text, or that of stdin.

    Raises: PromptError: it is not valid text, or stdin is closed.
    """
    try:
        if argument == "-":
            if sys.stdin is None:
                raise PromptError('the prompt "-" is to be read from stdin, and stdin is closed')
            argument = sys.stdin.read()
        # Python decodes invalid bytes in arguments to lone surrogates, which cannot be encoded.
        argument.encode()
    except UnicodeError as error:
        raise PromptError(f"the prompt is not valid text: {error}; give it as {sys.getfilesystemencoding()}") from error
    return argument


def _schema(file: str) -> str:
    """The JSON schema in a file.

    Raises: SettingsError: the file cannot be read, or the schema is not supported.
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


class IncompleteJsonError(OutriderError):
    """The text ended before the JSON that was asked for was complete."""


@attrs.define
class Generated(CommandOutcome):
    """The outcome of `generate`, with the generation so far.

    Attributes:
        pieces: the pieces of the text.
        tokens: the tokens.
        stop_reason: the stop string or stop token that ended the text, or None.
        statistics: statistics of the stream; None if it never started.
    """

    pieces: list[str] = attrs.field(factory=list)
    tokens: list[Token] = attrs.field(factory=list)
    stop_reason: str | int | None = None
    statistics: Statistics | None = None

    def as_json(self) -> str:
        """The JSON object that `--json` prints."""
        result: dict[str, Any] = {
            "text": "".join(self.pieces),
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


def generate(arguments: argparse.Namespace, models: Models) -> CommandOutcome:
    """Continue a prompt, and show the text, also that of an interrupted generation.

    Raises: OutriderError: an argument is invalid. Later errors are in the outcome.
    """
    settings = settings_of(arguments)
    if settings.get("logprobs") and not arguments.json:
        raise SettingsError("--logprobs needs --json, since a text cannot show them; give both")
    schema = None if arguments.json_schema is None else _schema(arguments.json_schema)
    models = _models_of_cache(arguments, models)
    request = _prompt_request(arguments, models)
    output = Output()
    generated = Generated()
    with warnings_at_the_end():
        with Display() as display, exit_on_signal(display):
            display.show_loading(models.loaded)
            import runtime.engine.opening  # noqa: F401  imported here, where Ctrl-C ends it at once

            work = partial(
                _stream_text,
                request,
                models,
                settings,
                arguments.extra_eos_token,
                schema,
                generated,
                display,
                None if arguments.json else output,
                None if arguments.trace is None else ChromeFile(arguments.trace),
                None if arguments.timeline is None else TimelineFile(arguments.timeline),
            )
            trio.run(SignalScope(generated, display).run, work)
        try:
            if not arguments.json:
                output.end_line()
            elif generated.failure is None or isinstance(generated.failure, IncompleteJsonError):
                output.write_now(generated.as_json() + "\n")
        except OutputError as error:
            generated.failure = generated.failure or error
    if arguments.stats and generated.statistics is not None:
        print_statistics(generated.statistics)
    return generated


async def _stream_text(
    request: _PromptRequest,
    models: Models,
    settings: dict[str, Any],
    extra_eos_tokens: Sequence[str],
    schema: str | None,
    generated: Generated,
    display: Display,
    output: Output | None,
    trace: ChromeFile | None,
    timeline: TimelineFile | None,
) -> None:
    """Load the models, generate, stream the text to `output`, and write the trace and the timeline, each unless None.

    Raises: OutriderError.

    Cancellation: as `runtime.open` and `TokenStream`. The text so far stays in `generated`.
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

        models.use_device()
        runtime = await stack.enter_async_context(
            open_runtime(models.target, models.draft, trace=on_event, **models.options)
        )
        if timeline is not None:
            timeline.tokenizer = runtime.tokenizer
        if schema is not None:
            from runtime.generation.grammar import Grammar

            settings = settings | {"logits_processors": [Grammar.from_json_schema(schema, runtime.tokenizer)]}
        settings = with_tokens_of(runtime.tokenizer, settings, extra_eos_tokens)
        prompt = request.prompt_for(runtime.tokenizer)
        stream = runtime.stream(prompt, **settings)
        display.show_prefill(stream.statistics().prompt_tokens, settings_from(settings).prefill_step_size)
        try:
            async with stream:
                async for token in stream:
                    generated.pieces.append(token.text)
                    generated.tokens.append(token)
                    display.clear_for_text()
                    if output is not None:
                        if token.index == 0 and isinstance(prompt, str):
                            output.echo(prompt)
                        await output.write(token.text, dimmed=token.is_thinking)
                    generated.finish_reason, generated.stop_reason = token.finish_reason, token.stop_reason
        finally:
            generated.statistics = stream.statistics()
        if schema is not None:
            try:
                json.loads("".join(generated.pieces))
            except ValueError as error:
                why = "; raise --max-tokens" if generated.finish_reason == "length" else " by a stop string"
                said = f"the JSON is incomplete, cut off at {len(generated.tokens)} tokens{why}"
                raise IncompleteJsonError(said) from error
