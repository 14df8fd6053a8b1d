"""Prompts of a benchmark: texts, chats and conversations of several turns, from files of several kinds.

A line that is a JSON object may have the fields of Spec-Bench (Xia et al. 2024, `question.jsonl`) and of SPEED-Bench
(NVIDIA 2026, exported as JSON lines): "turns" and "category". Others have "prompt" or "messages". Any of them may have
a "response_format" as chat requests of the server have it, with a JSON schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from protocol.errors import PromptError

# Value of `--prompts` for the prompts that come with Outrider.
BUNDLED = "bundled"
_BUNDLED_FILE = Path(__file__).parent / "prompts.jsonl"


@attrs.frozen
class BenchPrompt:
    """A prompt, or what a user says in each turn of a conversation."""

    turns: tuple[Any, ...]  # a text, token ids or chat messages; of a conversation, texts
    category: str = ""  # figures are also shown by category; may be empty
    is_chat: bool = False  # whether turns are messages of a user; without a chat template they are texts to continue
    schema: Any = None  # the JSON schema of the answers; None for any text

    @property
    def has_answers(self) -> bool:
        """Whether the model answers chat messages, and may end each answer."""
        return self.is_chat or (isinstance(self.turns[0], list) and isinstance(self.turns[0][0], dict))

    def at(self, turn: int, answers: Sequence[str], *, has_template: bool) -> Any:
        """The prompt of a turn, after the answers to those before it."""
        if not self.is_chat:
            return self.turns[turn]
        said = [text for pair in zip(self.turns, answers, strict=False) for text in pair] + [self.turns[turn]]
        if not has_template:
            return "\n\n".join(said)
        return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]


def bench_prompts(prompts: Iterable[BenchPrompt | str | Sequence[int]]) -> tuple[BenchPrompt, ...]:
    """Prompts as `BenchPrompt`; texts and token ids are wrapped."""
    return tuple(prompt if isinstance(prompt, BenchPrompt) else BenchPrompt((prompt,)) for prompt in prompts)


def read_prompts(file: str) -> list[BenchPrompt]:
    """The prompts in a file: a JSON list of texts (FILE.json), or a text or a JSON object a line.

    Raises: PromptError: the file cannot be read, has no prompt, or one of another form.
    """
    path = _BUNDLED_FILE if file == BUNDLED else Path(file)
    try:
        text = path.read_text(encoding="utf-8")
        lines = [line for line in text.splitlines() if line.strip()]
        has_objects = path.suffix == ".jsonl" or text.lstrip().startswith("{")
        is_list = path.suffix == ".json"
        found = json.loads(text) if is_list else [json.loads(line) for line in lines] if has_objects else lines
    except (OSError, ValueError) as error:
        raise PromptError(f"cannot read prompts from {path}: {error}") from error
    if not isinstance(found, list) or (is_list and not all(isinstance(prompt, str) for prompt in found)):
        raise PromptError(f"{path} must hold a JSON list of texts")
    if not found:
        raise PromptError(f"there is no prompt in {path}; give one a line")
    return [_prompt_of(each, f"line {number} of {path}") for number, each in enumerate(found, 1)]


def _prompt_of(found: Any, where: str) -> BenchPrompt:
    category, schema = "", None
    if isinstance(found, dict):
        category, schema = str(found.get("category", "")), _schema_of(found.get("response_format"), where)
    match found:
        case {"turns": [str(), *_] as turns} if all(isinstance(turn, str) for turn in turns):
            return BenchPrompt(tuple(turns), category, is_chat=True, schema=schema)
        case {"messages": [dict(), *_] as messages}:
            return BenchPrompt((messages,), category, schema=schema)
        case str(text) | {"prompt": str(text)}:
            return BenchPrompt((text,), category, schema=schema)
    raise PromptError(f'{where} is no prompt; an object has "prompt", "messages" or "turns" (a list of texts)')


def _schema_of(response_format: Any, where: str) -> Any:
    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return schema
    form = '{"type": "json_schema", "json_schema": {"schema": {…}}}'
    raise PromptError(f"{where} has another response_format than {form}; write it in this form, or leave it out")
