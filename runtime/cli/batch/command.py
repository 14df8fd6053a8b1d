"""The command `outrider batch`: answers the prompts in a file. Nothing here imports mlx at its top."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import trio

from protocol.errors import PromptError
from protocol.reprs import shown_path
from protocol.validation import check_integer
from runtime.cli.arguments.models import add_models, models_of
from runtime.cli.arguments.settings import add_flags, add_settings, completed, limit_of, parse_value, settings_of
from runtime.cli.batch.files import AnswerFile, Question, check_regular, questions_in, unanswered
from runtime.cli.command import Command, follow_target
from runtime.terminal.display import (
    CommandOutcome,
    Display,
    UnfinishedError,
    print_message,
    print_statistics,
    warnings_at_the_end,
)
from runtime.terminal.signals import SignalScope, exit_on_signal

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from protocol.statistics import Statistics
    from runtime.generation.text import Prompt


@attrs.define
class Answered(CommandOutcome):
    """The outcome of `batch`, with the counts of this run."""

    num_answers: int = 0  # errors included
    num_errors: int = 0
    statistics: Statistics | None = None


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", metavar="PROMPTS", type=Path, help="file with a JSON object in each line")
    add_flags(
        parser,
        ("--out FILE", "file for the answers; those that it has already are kept", {"type": Path, "required": True}),
        ("--max-concurrent N", "prompts at a time (default: 8)", {"type": parse_value, "default": 8}),
        ("--system TEXT", "system message in front of each prompt that is a text; needs a chat template"),
        ("--raw", "continue the texts without the chat template"),
        ("--stats", "print statistics on stderr at the end"),
    )
    add_settings(parser)
    add_models(parser, samples=True)


def batch(arguments: argparse.Namespace) -> CommandOutcome:
    """Answer every prompt that has no answer yet."""
    models, settings = models_of(arguments), settings_of(arguments)
    outcome = Answered()
    check_integer("max_concurrent", arguments.max_concurrent, 1)
    check_regular("PROMPTS", arguments.prompts, "write it to a file first")
    # A file that is not there must not leave an empty one for its answers.
    any(questions_in(arguments.prompts))
    with closing(AnswerFile.open(arguments.out, arguments.prompts)) as answers:
        num_due = unanswered(arguments.prompts, arguments.out, answers.answered)
        if num_due == 0:
            print_message(f"every prompt has its answer in {arguments.out}")
            return outcome

        def add(question: Question, answer: Any) -> None:
            answers.add(question, answer)
            outcome.num_answers += 1
            outcome.num_errors += isinstance(answer, Exception)
            display.show_share("answered", outcome.num_answers, num_due)

        async def work() -> None:
            async with AsyncExitStack() as stack:
                runtime = await stack.enter_async_context(models.open(settings))
                tokenizer = runtime.tokenizer
                # Prompts often begin alike.
                given = {"reuse_prefix": True, **completed(settings, arguments, tokenizer)}
                asked: dict[int, Question] = {}

                async def prompts() -> AsyncIterator[Any]:
                    numbers = itertools.count()
                    for question in questions_in(arguments.prompts):
                        await trio.lowlevel.checkpoint()
                        if question.key in answers.answered:
                            continue
                        if question.fault is not None:
                            add(question, PromptError(question.fault))
                            continue
                        asked[next(numbers)] = question
                        prompt = _prompt_of(question, arguments, tokenizer)
                        limit = {} if "max_tokens" in settings else limit_of(tokenizer, is_raw=isinstance(prompt, str))
                        yield prompt, limit | dict(question.settings)

                display.show_share("answered", 0, num_due)
                many = runtime.generate_many(
                    prompts(), given, max_concurrent=arguments.max_concurrent, on_error="return"
                )
                try:
                    async with many:
                        async for index, answer in many:
                            add(asked.pop(index), answer)
                finally:
                    outcome.statistics = runtime.statistics()
            if outcome.num_answers < num_due:
                raise UnfinishedError(
                    f"only {outcome.num_answers:,} of {num_due:,} prompts were answered, since "
                    f"{shown_path(str(arguments.prompts))} has changed meanwhile"
                )
            outcome.finish_reason = "complete"
            if outcome.num_errors:
                raise UnfinishedError(
                    f"{outcome.num_errors:,} of {outcome.num_answers:,} prompts failed; see the lines with "
                    f'"error" in {arguments.out}, and remove a line to try its prompt again'
                )

        with warnings_at_the_end(), Display() as display, exit_on_signal(display):
            display.show_loading(models.loaded)
            import runtime.engine.opening  # noqa: F401  imported here, where Ctrl-C ends it at once

            trio.run(SignalScope(outcome, display).run, work)
    if arguments.stats and outcome.statistics is not None:
        print_statistics(outcome.statistics)
    if outcome.finish_reason is None:
        print_message(f"answered {outcome.num_answers:,} of {num_due:,}; the same command goes on from here")
    else:
        print_message(f"{outcome.num_answers:,} answers were added to {arguments.out}")
    return outcome


def _prompt_of(question: Question, arguments: argparse.Namespace, tokenizer: TokenizerWrapper | None) -> Prompt:
    prompt: Prompt = question.prompt
    is_raw = question.is_raw or arguments.raw or tokenizer is None or not tokenizer.has_chat_template
    if is_raw or not isinstance(prompt, str):
        return prompt
    system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    return [*system, {"role": "user", "content": prompt}]


COMMAND = Command(
    name="batch",
    usage="PROMPTS --out FILE [options]",
    help="answer the prompts in a file",
    description='Answer the prompts in a file. Each of its lines is a JSON object with a "prompt" or "messages", '
    'settings by name, and an "id"; or a line of OpenAI\'s batches, with "custom_id" and "body". Each answer is a '
    "line with the same id, or with the line's number, as soon as it is finished; one whose prompt has failed has an "
    '"error".',
    epilog="""examples:
  outrider batch prompts.jsonl --out answers.jsonl --target org/model --draft org/small
  outrider batch prompts.jsonl --out answers.jsonl --target org/model --max-concurrent 32 -m 200

After Ctrl-C, or whatever else ended it, the same command goes on with the prompts that have no answer yet.""",
    common="--out --target --draft --max-concurrent --max-tokens --temperature --seed --system --stats",
    add_arguments=_add_arguments,
    run=batch,
    follow=follow_target,
)
