"""The files of `outrider batch`: lines of JSON with prompts, and lines of JSON with their answers."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from protocol.argument_aliases import ALIASES
from protocol.errors import PromptError, SettingsError
from protocol.reprs import shown, shown_path
from runtime.terminal.display import check_place, write_all

if TYPE_CHECKING:
    from protocol.scores import TopLogprob
    from runtime.generation.token_stream import Completion
    from runtime.generation.tokens import Token

# What names a line, in the order in which it is looked for; the second is that of OpenAI's batches.
_NAMES = ("id", "custom_id")
# Fields of OpenAI's requests that say nothing about the answer to one prompt, and those without effect in `serve`.
_WITHOUT_EFFECT = frozenset(
    (
        *("model", "stream", "stream_options", "user", "metadata", "store", "service_tier", "prompt_cache_key"),
        *("safety_identifier", "prompt_cache_retention", "keep_alive", "priority", "request_id"),
    )
)
# Values that ask for what there is anyway.
_AS_ALWAYS = {"n": 1, "response_format": {"type": "text"}}


@attrs.frozen
class Question:
    """A line of a file of prompts."""

    label: Mapping[str, Any]  # {"id": …} or {"custom_id": …}, with the line's number if it has no id
    prompt: Any = None  # text, token ids, or chat messages; None if there is a fault
    is_raw: bool = False  # whether a text is continued without the chat template
    settings: Mapping[str, Any] = attrs.field(factory=dict)  # and arguments about tools, by name; not checked
    fault: str | None = None  # what is wrong with the line, if anything is

    @property
    def key(self) -> str:
        """What an answer to it is found by."""
        return json.dumps(self.label)


def check_regular(name: str, path: Path, remedy: str) -> None:
    """Refuse what cannot be read again: a pipe, a device or a directory. Raises: SettingsError."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return  # opening it tells why
    if not stat.S_ISREG(mode):
        kinds = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISDIR, "a directory"), (stat.S_ISSOCK, "a socket"))
        kind = next((kind for is_kind, kind in kinds if is_kind(mode)), "a device")
        raise SettingsError(f"{name} must be a regular file, got {kind}; {remedy}")


def questions_in(path: Path) -> Iterator[Question]:
    """The prompts in a file, one a line; blank lines are left out. Raises: SettingsError: it cannot be read."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _question(number, line)
    except OSError as error:
        raise SettingsError(f"cannot read the prompts from {shown_path(str(path))}: {error.strerror}") from error


def _question(number: int, line: bytes) -> Question:
    label: Mapping[str, Any] = {"id": number}
    try:
        record = json.loads(line)
    except ValueError as error:
        return Question(label, fault=f"line {number} is not JSON: {error}")
    except RecursionError:
        return Question(label, fault=f"line {number} has too many brackets inside of each other")
    if not isinstance(record, dict):
        return Question(label, fault=f"line {number} must be an object, got {shown(record)}")
    for name in _NAMES:
        if (given := record.pop(name, None)) is not None:
            if not isinstance(given, (str, int)) or isinstance(given, bool):
                return Question(label, fault=f"{name} must be a text or a whole number, got {shown(given)}")
            label = {name: given}
            break
    settings: dict[str, Any] = record
    if is_body := isinstance(record.get("body"), dict):
        url = record.get("url")
        if url is not None and not str(url).rstrip("/").endswith("/completions"):
            known = '"/v1/chat/completions" or "/v1/completions"'
            return Question(label, fault=f"url must be {known}, got {shown(url)}")
        settings = _of_body(record["body"])
    prompts = [settings.pop(name) for name in ("prompt", "messages") if name in settings]
    if len(prompts) != 1:
        return Question(label, fault='a line has either a "prompt" or "messages", and its settings')
    # A completion of OpenAI's continues its prompt.
    return Question(label, prompts[0], is_body, settings)


def _of_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt and the settings of a request of OpenAI's."""
    given = {name: value for name, value in body.items() if value is not None and name not in _WITHOUT_EFFECT}
    given = {name: value for name, value in given.items() if name not in _AS_ALWAYS or value != _AS_ALWAYS[name]}
    # In chats, whether to give log-probabilities, and for how many tokens besides.
    if isinstance(is_asked := given.get("logprobs"), bool):
        del given["logprobs"]
        num_top = given.pop("top_logprobs", 0)
        if is_asked:
            given["logprobs"] = num_top or 1
    settings = {ALIASES.get(name, name): value for name, value in given.items()}
    # Without a bound, which is not what a line means that says nothing.
    return {"max_tokens": None, **settings} if "max_tokens" in body and body["max_tokens"] is None else settings


@attrs.define
class AnswerFile:
    """A file of answers, to which lines are added.

    A process that is killed can leave half a line at the end. It is removed, and its prompt is answered again.
    """

    _path: Path
    _fd: int
    answered: set[str]  # the keys of the questions that have an answer, or an error

    @classmethod
    def open(cls, path: Path, prompts: Path) -> AnswerFile:
        """Open or make a file, before any model work.

        Raises: SettingsError: it cannot be written, or has lines that are not answers.
        """
        check_place("--out", path)
        check_regular("--out", path, "name a file")
        if path.exists() and prompts.exists() and path.samefile(prompts):
            raise SettingsError(f"--out {shown_path(str(path))} is the file with the prompts; give another one")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            return cls(path, fd, _repair(path, fd))
        except OSError as error:
            raise SettingsError(f"cannot write the answers to {shown_path(str(path))}: {error.strerror}") from error

    def add(self, question: Question, answer: Completion | Exception) -> None:
        """Add a line. Raises: OutputError: it cannot be written."""
        line = {**question.label, **_answer(answer)}
        try:
            data = json.dumps(line, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            data = json.dumps(line).encode()  # half a surrogate has no UTF-8, and an id must stay what it is
        write_all(self._fd, data + b"\n", shown_path(str(self._path)))

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _repair(path: Path, fd: int) -> set[str]:
    """The keys of the answers in a file, whose last line is whole from then on."""
    keys, end = set(), 0
    beginnings = [f'{{"{name}": '.encode() for name in _NAMES]
    with open(fd, "rb", closefd=False) as file:
        for number, line in enumerate(file, 1):
            is_whole = line.endswith(b"\n")
            if (key := _key_of(line)) is not None:
                keys.add(key)
                if not is_whole:
                    os.write(fd, b"\n")
            elif not is_whole and any(line.startswith(each) or each.startswith(line) for each in beginnings):
                os.ftruncate(fd, end)
            elif line.strip():
                raise SettingsError(
                    f"--out {shown_path(str(path))} exists, and its line {number} is not an answer; give another file"
                )
            end += len(line)
    return keys


def _key_of(line: bytes) -> str | None:
    """The key of the answer in a line; None if it is not one."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not record.keys() & {"text", "error"}:
        return None
    return next((json.dumps({name: record[name]}) for name in _NAMES if name in record), None)


def _answer(answer: Completion | Exception) -> dict[str, Any]:
    if isinstance(answer, Exception):
        # Its index among the prompts of this run says nothing.
        return {"error": re.sub(r"^prompts\[\d+\]: ", "", str(answer))}
    statistics = answer.statistics
    line: dict[str, Any] = {"text": answer.content, "finish_reason": answer.finish_reason}
    if answer.thinking:
        line["thinking"] = answer.thinking
    if answer.tool_calls:
        line["tool_calls"] = [{"name": call.name, "arguments": call.arguments} for call in answer.tool_calls]
    if any(token.logprob is not None for token in answer.tokens):
        line["logprobs"] = [
            {**_logprob(token), "top_logprobs": [_logprob(top) for top in token.top_logprobs]}
            for token in answer.tokens
        ]
    return {**line, "prompt_tokens": statistics.prompt_tokens, "generated_tokens": statistics.generated_tokens}


def _logprob(token: Token | TopLogprob) -> dict[str, Any]:
    # JSON has no infinity.
    logprob = None if token.logprob is None or math.isinf(token.logprob) else token.logprob
    return {"id": token.id, "text": token.text, "logprob": logprob}


def unanswered(prompts: Path, answers: Path, answered: set[str]) -> int:
    """The number of questions that have no answer yet.

    Raises: SettingsError: there is an answer to another question; PromptError: no questions, or two with one id.
    """
    found: set[str] = set()
    for question in questions_in(prompts):
        if question.key in found:
            raise PromptError(
                f"{shown_path(str(prompts))} has two lines with {question.key}; answers are found by it, so each line "
                "needs one of its own, or none"
            )
        found.add(question.key)
    if not found:
        raise PromptError(f'{shown_path(str(prompts))} has no prompts; give one a line, such as {{"prompt": "…"}}')
    if others := answered - found:
        raise SettingsError(
            f"--out {shown_path(str(answers))} has an answer to {min(others)}, which is not in "
            f"{shown_path(str(prompts))}; give another file"
        )
    return len(found - answered)
