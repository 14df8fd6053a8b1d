"""What a saved session says: a conversation, its settings, and which models it was held with."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Mapping
from typing import Any, NoReturn

import attrs
import trio

from actors.fingerprint import Fingerprint
from actors.line_state import LineRecord
from actors.saved_line import SavedModel
from actors.tensor import Tensor
from protocol.errors import SessionFileError, SettingsError
from protocol.reprs import shown
from protocol.settings import Settings, settings_from
from runtime import session_file
from runtime.session_file import Contents

FilePath = str | os.PathLike[str]


@attrs.frozen(kw_only=True)
class SavedSession:
    """A conversation as a file has it.

    Attributes:
        messages: as they were said, in order, the system's included.
        tokens: how the next turn's prompt would begin.
        thinking: see `Runtime.conversation`.
        settings: by name, for JSON; without what is no data.
        num_processors: how many `logits_processors` it had, which are functions and not in the file.
        cache_options: with which the models' caches were made; those that decide what is in them.
        vocabulary: digest of the tokenizer's, or None where there was no tokenizer.
        target, draft: the models; `draft` is None where there was none.
    """

    messages: tuple[dict[str, str], ...]
    tokens: tuple[int, ...]
    thinking: bool | None
    settings: Mapping[str, Any]
    num_processors: int
    cache_options: Mapping[str, int | None]
    vocabulary: str | None
    target: SavedModel
    draft: SavedModel | None

    def __repr__(self) -> str:
        draft = "no draft model" if self.draft is None else "a draft model"
        return f"<outrider SavedSession: {len(self.messages)} messages, {len(self.tokens)} tokens, with {draft}>"


async def write(path: FilePath, session: SavedSession) -> int:
    """Write a session, in a thread of its own; see `session_file.write`. Returns the size in bytes.

    Cancellation: leaves what was there.

    Raises: SessionFileError.
    """
    contents = _contents(session)
    return await trio.to_thread.run_sync(session_file.write, path, contents, trio.from_thread.check_cancelled)


async def read(path: FilePath) -> SavedSession:
    """Read a session, in a thread of its own; see `session_file.read`.

    Cancellation: between two reads of a few megabytes.

    Raises: SessionFileError.
    """
    contents = await trio.to_thread.run_sync(session_file.read, path, trio.from_thread.check_cancelled)
    try:
        return _session(contents)
    except _Unexpected as error:
        raise SessionFileError(
            f"session file {os.fspath(path)!r} is damaged: {error}; use another copy of it, or save again"
        ) from None


def check_path(path: Any) -> FilePath:
    """What names a file. Raises: SettingsError: it does not."""
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str) or not os.fspath(path):
        raise SettingsError(f"a session is saved to and loaded from a path, got {shown(path)}; give the path of a file")
    return path


# --- settings -------------------------------------------------------------------------------------


def settings_for_json(settings: Settings) -> dict[str, Any]:
    """Settings by name, as JSON has them; without the processors."""
    names = [field.name for field in attrs.fields(Settings) if field.name != "logits_processors"]
    values = {name: list(value) if isinstance(value := getattr(settings, name), tuple) else value for name in names}
    # JSON has neither numbers for names nor infinity.
    values["logit_bias"] = [[id, None if math.isinf(bias) else bias] for id, bias in settings.logit_bias.items()]
    return values


def settings_of(session: SavedSession, path: FilePath, given: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a session's settings, with others in the place of some of them.

    Raises:
        SettingsError: one of those given is none, or out of its range; or the session had `logits_processors`, and
            none are given.
        SessionFileError: the file's are not settings.
    """
    settings_from(dict(given))
    if session.num_processors and "logits_processors" not in given:
        raise SettingsError(
            f"the session in {os.fspath(path)!r} had {session.num_processors} logits_processors, which are functions "
            "and not in the file; give logits_processors=[...] again, or [] to go on without"
        )
    saved = dict(session.settings)
    try:
        if "logit_bias" in saved:
            saved["logit_bias"] = {id: -math.inf if bias is None else bias for id, bias in saved["logit_bias"]}
        settings_from(saved)
    except (SettingsError, TypeError, ValueError) as error:
        raise SessionFileError(
            f"session file {os.fspath(path)!r} has settings that this Outrider does not take: {error}; update "
            "Outrider, or save the session again with this one"
        ) from error
    return saved | dict(given)


# --- what must match ------------------------------------------------------------------------------


def check_model(path: FilePath, role: str, saved: Fingerprint, present: Fingerprint, remedy: str) -> None:
    """Raises: SessionFileError: the model is not the one with which a session was saved."""
    if (difference := saved.difference(present)) is not None:
        raise SessionFileError(
            f"session file {os.fspath(path)!r} was saved with another {role} model: {difference}; {remedy}"
        )


def check_vocabulary(path: FilePath, saved: str | None, present: str | None) -> None:
    """Raises: SessionFileError: the tokenizer means something else by its ids than the one that a session had."""
    if saved == present:
        return
    if saved is None or present is None:
        had, has = ("no tokenizer", "one") if saved is None else ("a tokenizer", "none")
        why = f"with {had}, and this runtime has {has}"
    else:
        why = "with a tokenizer of another vocabulary"
    raise SessionFileError(f"session file {os.fspath(path)!r} was saved {why}; open the target that it was saved with")


def check_cache_options(path: FilePath, saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Raises: SessionFileError: caches are made otherwise than they were."""
    for name in sorted(saved.keys() | present.keys()):
        if (was := saved.get(name)) != (now := present.get(name)):
            raise SessionFileError(
                f"session file {os.fspath(path)!r} was saved with {name}={was!r}, and this runtime has {now!r}; "
                f"open it with {name}={was!r}"
            )


# --- there and back -------------------------------------------------------------------------------


def _contents(session: SavedSession) -> Contents:
    tokens = memoryview(array("I", session.tokens)).cast("B")
    tensors = {"tokens": Tensor("U32", (len(session.tokens),), tokens)}

    def model(saved: SavedModel | None) -> Any:
        if saved is None:
            return None
        tensors.update(saved.line.tensors if saved.line is not None else {})
        line = None if saved.line is None else saved.line.description
        return {"fingerprint": attrs.asdict(saved.fingerprint), "line": line}

    content = {
        "messages": [dict(message) for message in session.messages],
        "thinking": session.thinking,
        "settings": dict(session.settings),
        "num_processors": session.num_processors,
        "cache_options": dict(session.cache_options),
        "vocabulary": session.vocabulary,
        "target": model(session.target),
        "draft": model(session.draft),
    }
    return Contents(content, tensors)


class _Unexpected(Exception):
    """A file whose checksum holds, and which says something else than a saved session does."""


def _session(contents: Contents) -> SavedSession:
    match contents.content:
        case {
            "messages": list(messages),
            "thinking": bool() | None as thinking,
            "settings": dict(settings),
            "num_processors": int(num_processors),
            "cache_options": dict(cache_options),
            "vocabulary": str() | None as vocabulary,
            "target": dict(target),
            "draft": dict() | None as draft,
        } if num_processors >= 0:
            return SavedSession(
                messages=tuple(_message(message) for message in messages),
                thinking=thinking,
                tokens=_tokens(contents.tensors.get("tokens")),
                settings=settings,
                num_processors=num_processors,
                cache_options=cache_options,
                vocabulary=vocabulary,
                target=_model(target, contents),
                draft=None if draft is None else _model(draft, contents),
            )
    _unexpected("what it says of itself")


def _message(described: Any) -> dict[str, str]:
    match described:
        case {"role": "system" | "user" | "assistant", "content": str()}:
            if all(isinstance(value, str) for value in described.values()):
                return dict(described)
    _unexpected("what it says of a message")


def _tokens(tensor: Tensor | None) -> tuple[int, ...]:
    if tensor is None or tensor.dtype != "U32" or len(tensor.shape) != 1:
        _unexpected("its tokens")
    return tuple(tensor.data.cast("I").tolist())


def _model(described: Mapping[str, Any], contents: Contents) -> SavedModel:
    names = {field.name: int if field.name == "num_parameters" else str for field in attrs.fields(Fingerprint)}
    match described:
        case {"fingerprint": dict(values), "line": dict() | None as line} if values.keys() == names.keys():
            if all(type(values[name]) is kind for name, kind in names.items()):
                recorded = None if line is None else LineRecord(line, contents.tensors)
                return SavedModel(Fingerprint(**values), recorded)
    _unexpected("what it says of a model")


def _unexpected(what: str) -> NoReturn:
    raise _Unexpected(f"{what} is not as it should be")
