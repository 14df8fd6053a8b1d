"""Saved conversations: their content, what must match it, and how the models save to and load from it."""

from __future__ import annotations

import io
import logging
import math
import os
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import attrs
import trio
from mlx_lm.tokenizer_utils import TokenizerWrapper

from actors.drafters.draft_actor import DraftActor
from actors.mlx.model import MLXModel
from actors.mlx.sequence_state import SequenceRecord
from actors.persistence import saved_sequence
from actors.persistence.fingerprint import Fingerprint, vocabulary_digest
from actors.persistence.saved_sequence import FilledSequence, SavedModelState
from actors.target.target_actor import TargetActor
from actors.workers.thread_worker import HangError
from actors.workers.worker import JobError
from protocol.errors import SessionFileError, SettingsError
from protocol.reprs import shown
from protocol.settings import Settings, settings_from
from protocol.tensor import Tensor
from runtime.generation.text import Prompt, encode_prompt
from runtime.generation.token_stream import SessionFile
from runtime.persistence import session_file
from runtime.persistence.session_file import Contents, named

logger = logging.getLogger("outrider")

# How long saving and loading wait for each answer of the draft model, in seconds.
DRAFTER_WAIT_S = 2.0

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class SavedSession:
    """A saved conversation."""

    messages: tuple[dict[str, Any], ...] = ()  # in order, including the system message
    tokens: tuple[int, ...]  # the beginning of the next turn's prompt
    thinking: bool | None = None  # see `Runtime.conversation`
    settings: Mapping[str, Any]  # by name, as JSON has them; without functions
    num_processors: int  # `logits_processors`, which are functions and not in the file
    cache_options: Mapping[str, int | None]  # those that affect the cached values
    vocabulary: str | None  # digest of the tokenizer's; None where there was no tokenizer
    target: SavedModelState
    draft: SavedModelState | None

    def __repr__(self) -> str:
        draft = "no draft model" if self.draft is None else "a draft model"
        return f"<outrider SavedSession: {len(self.messages)} messages, {len(self.tokens)} tokens, with {draft}>"


async def write(path: SessionFile, session: SavedSession) -> int:
    """Write a session, in another thread; see `session_file.write`. A cancellation leaves the old file."""
    contents = _contents(session)
    return await trio.to_thread.run_sync(session_file.write, path, contents, trio.from_thread.check_cancelled)


async def read(path: SessionFile) -> SavedSession:
    """Read a session, in another thread; see `session_file.read`. A cancellation strikes every few megabytes."""
    contents = await trio.to_thread.run_sync(session_file.read, path, trio.from_thread.check_cancelled)
    if "stream" in contents.content:  # of a version that saved these, too
        raise SessionFileError(f"{named(path)} has a running stream, not a conversation; generate it again")
    try:
        return _session(contents)
    except _Unexpected as error:
        raise SessionFileError(
            f"{named(path)} is damaged: {error} is not as it should be; use another copy of it, or save again"
        ) from None


def check_path(path: Any) -> None:
    """Raises: SettingsError: `path` is neither a path nor a binary file object."""
    is_file = (hasattr(path, "read") or hasattr(path, "write")) and not isinstance(path, io.TextIOBase)
    is_path = isinstance(path, (str, os.PathLike)) and isinstance(os.fspath(path), str) and bool(os.fspath(path))
    if not is_file and not is_path:
        raise SettingsError(
            f"a session is saved to and loaded from a path or a binary file object, got {shown(path)}; give the path "
            "of a file, or io.BytesIO"
        )


def settings_for_json(settings: Settings) -> dict[str, Any]:
    """Settings by name, as JSON has them: without processors, and for a sampler only whether there is one."""
    # A stream that continues a prompt cache file is not saved.
    left_out = ("logits_processors", "sampler", "prompt_cache_file")
    names = [field.name for field in attrs.fields(Settings) if field.name not in left_out]
    values = {name: list(value) if isinstance(value := getattr(settings, name), tuple) else value for name in names}
    # JSON has no numbers as names, and no infinity.
    values["logit_bias"] = [[id, None if math.isinf(bias) else bias] for id, bias in settings.logit_bias.items()]
    values["sampler"] = settings.sampler is not None
    return values


def settings_of(session: SavedSession, path: SessionFile, given: Mapping[str, Any]) -> dict[str, Any]:
    """A session's settings as keywords, with those that are given in place of the saved ones.

    Raises:
        SettingsError: a given setting is unknown or out of its range; or the session had `logits_processors` or a
            `sampler`, and none are given.
        SessionFileError: the saved settings are invalid.
    """
    settings_from(dict(given), ("any_draft", "tools"))
    if session.num_processors and "logits_processors" not in given:
        raise SettingsError(
            f"{named(path)} had {session.num_processors} logits_processors, which are functions of a program and not "
            "in the file; give logits_processors=[...] again, or [] to go on without"
        )
    saved = dict(session.settings)
    # Files from before there were samplers do not have this key.
    if saved.pop("sampler", False) and "sampler" not in given:
        raise SettingsError(
            f"{named(path)} had a sampler, which is a function of a program and not in the file; give sampler=... "
            "again, or None to go on without"
        )
    try:
        if "logit_bias" in saved:
            saved["logit_bias"] = {id: -math.inf if bias is None else bias for id, bias in saved["logit_bias"]}
        settings_from(saved)
    except (SettingsError, TypeError, ValueError) as error:
        raise SessionFileError(
            f"{named(path)} has settings that this Outrider does not take: {error}; update "
            "Outrider, or save the session again with this one"
        ) from error
    # A session without processors continues without: the runtime's defaults are not its own.
    return saved | dict(given) | {"logits_processors": tuple(given.get("logits_processors") or ())}


def check_model(path: SessionFile, role: str, saved: Fingerprint, present: Fingerprint, remedy: str) -> None:
    """Raises: SessionFileError: the model is not the one that the session was saved with."""
    if (difference := saved.difference(present)) is not None:
        raise SessionFileError(f"{named(path)} was saved with another {role} model: {difference}; {remedy}")


def check_vocabulary(path: SessionFile, saved: str | None, present: str | None) -> None:
    """Raises: SessionFileError: the tokenizer's vocabulary is not the one that the session was saved with."""
    if saved == present:
        return
    if saved is None or present is None:
        had, has = ("no tokenizer", "one") if saved is None else ("a tokenizer", "none")
        why = f"with {had}, and this runtime has {has}"
    else:
        why = "with a tokenizer of another vocabulary"
    raise SessionFileError(f"{named(path)} was saved {why}; open the target that it was saved with")


def check_cache_options(path: SessionFile, saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Raises: SessionFileError: the cache options differ from those that the session was saved with."""
    for name in sorted(saved.keys() | present.keys()):
        if (was := saved.get(name)) != (now := present.get(name)):
            option = f"{name}={shown(was)}"
            raise SessionFileError(
                f"{named(path)} was saved with {option}, and this runtime has {shown(now)}; open it with {option}"
            )


def _contents(session: SavedSession) -> Contents:
    tokens = memoryview(array("I", session.tokens)).cast("B")
    tensors = {"tokens": Tensor("U32", (len(session.tokens),), tokens)}

    def model(saved: SavedModelState | None) -> Any:
        if saved is None:
            return None
        tensors.update(saved.sequence.tensors if saved.sequence is not None else {})
        sequence = None if saved.sequence is None else saved.sequence.description
        # "line" is the name of a cached sequence in the format's version 1.
        ranks = {"ranks": saved.num_ranks} if saved.num_ranks > 1 else {}
        return {"fingerprint": attrs.asdict(saved.fingerprint), "line": sequence, **ranks}

    described = attrs.asdict(session, recurse=False, filter=lambda field, _: field.name != "tokens")
    return Contents({**described, "target": model(session.target), "draft": model(session.draft)}, tensors)


class _Unexpected(Exception):
    """A part of a file's content, which is named, is not that of a saved session, although the checksum matches."""


def _session(contents: Contents) -> SavedSession:
    match contents.content:
        case {
            "messages": list(messages),
            "thinking": bool() | None,
            "settings": dict(),
            "num_processors": int(num_processors),
            "cache_options": dict(),
            "vocabulary": str() | None,
            "target": dict(target),
            "draft": dict() | None as draft,
        } if num_processors >= 0:
            tokens = contents.tensors.get("tokens")
            if tokens is None or tokens.dtype != "U32" or len(tokens.shape) != 1:
                raise _Unexpected("its tokens")
            names = ("thinking", "settings", "num_processors", "cache_options", "vocabulary")
            return SavedSession(
                messages=tuple(_message(message) for message in messages),
                tokens=tuple(tokens.data.cast("I").tolist()),
                target=_model(target, contents),
                draft=None if draft is None else _model(draft, contents),
                **{name: contents.content[name] for name in names},
            )
    raise _Unexpected("what it says of itself")


def _message(described: Any) -> dict[str, Any]:
    def is_call(call: Any) -> bool:
        match call:
            case {"id": str(), "type": "function", "function": {"name": str(), "arguments": str()}}:
                return True
        return False

    match described:
        case {"role": "system" | "user" | "assistant" | "tool", "content": str()}:
            calls = described.get("tool_calls", [])
            has_texts = all(isinstance(value, str) for name, value in described.items() if name != "tool_calls")
            if has_texts and isinstance(calls, list) and all(map(is_call, calls)):
                return dict(described)
    raise _Unexpected("what it says of a message")


def _model(described: Mapping[str, Any], contents: Contents) -> SavedModelState:
    names = {field.name: int if field.name == "num_parameters" else str for field in attrs.fields(Fingerprint)}
    match described:
        case {"fingerprint": dict(values), "line": dict() | None as sequence} if values.keys() == names.keys():
            num_ranks = described.get("ranks", 1)
            if all(type(values[name]) is kind for name, kind in names.items()) and type(num_ranks) is int:
                record = None if sequence is None else SequenceRecord(sequence, contents.tensors)
                return SavedModelState(Fingerprint(**values), record, num_ranks)
    raise _Unexpected("what it says of a model")


@attrs.frozen
class SessionSaver:
    """Saves sessions from the models of a runtime, and loads them into these models."""

    target: TargetActor
    draft: DraftActor | None  # None also where it is no `SavableModel`
    tokenizer: TokenizerWrapper | None

    async def save(
        self,
        path: SessionFile,
        messages: Sequence[dict[str, Any]],
        prompt: Prompt,
        thinking: bool | None,
        settings: Settings,
    ) -> int:
        """Write a conversation, whose next prompt is given, and its cached sequences; see `Conversation.save`."""
        check_path(path)
        # Empty where the tokenizer has no chat template and there are no messages yet.
        tokens = encode_prompt(prompt, self.tokenizer, self.target.model.vocab_size) if prompt else ()
        session = SavedSession(
            messages=tuple(messages),
            thinking=thinking,
            tokens=tokens,
            settings=settings_for_json(settings),
            num_processors=len(settings.logits_processors),
            cache_options=self._cache_options,
            vocabulary=await self._vocabulary(),
            target=await saved_sequence.save(self.target, tokens),
            draft=await self._of_drafter(partial(saved_sequence.save, text=tokens)),
        )
        return await write(path, session)

    async def _of_drafter(self, ask: Callable[[DraftActor], Awaitable[T]]) -> T | None:
        """The draft model's answer; None without one, or if it hangs or is gone: then it reads the text again."""
        if (draft := self.draft) is None:
            return None
        try:
            if (answer := await draft.ask(partial(ask, draft), DRAFTER_WAIT_S)) is None:
                logger.warning("what the draft model has cached is left out: it does not answer")
        except (JobError, HangError, SessionFileError) as error:
            if isinstance(error, SessionFileError) and draft.is_alive:
                raise
            logger.warning("what the draft model has cached is left out: %s", error)
            return None
        return answer

    async def read(self, path: SessionFile, *, any_draft: bool) -> SavedSession:
        """Read a conversation that fits these models; see `Runtime.load`. Changes nothing.

        Raises: SessionFileError: the file cannot be read, or does not fit; SettingsError: as `check_path`.
        """
        check_path(path)
        session = await read(path)
        check_vocabulary(path, session.vocabulary, await self._vocabulary())
        if (largest := max(session.tokens, default=0)) >= (vocab_size := self.target.model.vocab_size):
            raise SessionFileError(
                f"{named(path)} has token {largest}, outside the target's vocabulary of {vocab_size} "
                "ids; open the target that it was saved with"
            )
        num_ranks = self.target.model.num_ranks if isinstance(self.target.model, MLXModel) else 1
        if session.target.num_ranks != num_ranks:
            numbers = session.target.num_ranks, num_ranks
            was, now = (f"{number} ranks" if number > 1 else "one machine" for number in numbers)
            raise SessionFileError(
                f"{named(path)} was saved with its target on {was}, and here it is on {now}; load it on {was}"
            )
        present = await saved_sequence.identify(self.target)
        remedy = "open that one as the target, or begin a new conversation"
        check_model(path, "target", session.target.fingerprint, present, remedy)
        check_cache_options(path, session.cache_options, self._cache_options)
        if session.draft is None:
            return session
        where, without_draft = session_file.shown(path), attrs.evolve(session, draft=None)
        if self.draft is None:
            logger.info("what a draft model had cached for session %s is left out: there is none", where)
            return without_draft
        if (of_draft := await self._of_drafter(saved_sequence.identify)) is None:
            return without_draft
        if any_draft and session.draft.fingerprint.difference(of_draft) is not None:
            logger.info("what another draft model had cached for session %s is left out", where)
            return without_draft
        remedy = "open that one as the draft, or load with any_draft=True to have this one read the text again"
        check_model(path, "draft", session.draft.fingerprint, of_draft, remedy)
        return session

    async def fill(self, path: SessionFile, session: SavedSession, drafted: bool) -> None:
        """Put a session's cached sequences into the models' prefix caches, if both fit.

        Raises: SessionFileError: a cached sequence does not fit its model.
        """
        alongside_model = drafted and self.target.drafter.has_model
        filled: FilledSequence | None = None
        try:
            if (recorded := session.target.sequence) is not None:
                filled = await saved_sequence.fill(self.target, recorded, alongside_model=alongside_model)
            if session.draft is not None and (of_draft := session.draft.sequence) is not None:
                await self._of_drafter(partial(saved_sequence.restore, recorded=of_draft, alongside_model=True))
        except BaseException as error:  # a cancellation, too: nobody else would close the sequence
            if filled is not None:
                with trio.CancelScope(shield=True):
                    await saved_sequence.discard(self.target, filled)
            if not isinstance(error, SessionFileError):
                raise
            raise SessionFileError(
                f"{named(path)} does not fit: {error}; use another copy of it, or save again"
            ) from error
        if filled is not None:
            with trio.CancelScope(shield=True):
                await saved_sequence.keep(self.target, filled)

    @property
    def _cache_options(self) -> dict[str, int | None]:
        model = self.target.model
        return model.cache_options if isinstance(model, MLXModel) else {}

    async def _vocabulary(self) -> str | None:
        if (tokenizer := self.tokenizer) is None:
            return None
        # Takes a few tenths of a second for a large vocabulary.
        return await trio.to_thread.run_sync(lambda: vocabulary_digest(tokenizer.get_vocab()))
