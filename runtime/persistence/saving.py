"""Saving and loading of conversations and streams: between a runtime's models and a file."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import attrs
import trio
from mlx_lm.tokenizer_utils import TokenizerWrapper

from actors.drafters.draft_actor import DraftActor
from actors.mlx.model import MLXModel
from actors.persistence import saved_sequence
from actors.persistence.fingerprint import vocabulary_digest
from actors.persistence.saved_sequence import FilledSequence, SavedModelState
from actors.target.target_actor import TargetActor
from actors.workers.thread_worker import HangError
from actors.workers.worker import JobError
from protocol.errors import SessionFileError
from protocol.messages import Open
from runtime.generation.conversation import Account
from runtime.generation.text import encode_prompt
from runtime.generation.token_reader import Progress
from runtime.generation.token_stream import SessionFile
from runtime.persistence import saved_session
from runtime.persistence.saved_session import SavedSession, SavedStream, settings_for_json
from runtime.persistence.session_file import named, shown

logger = logging.getLogger("outrider")

# Rounds that a save waits for at most, until the caches that it has taken are of use.
_MAX_ROUNDS = 4
# How long a save waits for the draft model, in seconds.
DRAFTER_WAIT_S = 10.0

T = TypeVar("T")


@attrs.frozen
class SessionSaver:
    """Saves sessions from the models of a runtime, and loads them into these models.

    Attributes:
        target: the target's actor.
        draft: the drafter's, where the drafter is a `SavableModel`; else None.
        tokenizer: the target's.
    """

    target: TargetActor
    draft: DraftActor | None
    tokenizer: TokenizerWrapper | None

    async def save(self, path: SessionFile, account: Account) -> int:
        """Write a conversation and its cached sequences to a file; see `Conversation.save`."""
        saved_session.check_path(path)
        # Empty where the tokenizer has no chat template and there are no messages yet.
        tokens = encode_prompt(account.prompt, self.tokenizer, self.target.model.vocab_size) if account.prompt else ()
        session = SavedSession(
            messages=tuple(account.messages),
            tokens=tokens,
            thinking=account.thinking,
            settings=settings_for_json(account.settings),
            num_processors=len(account.settings.logits_processors),
            cache_options=self._cache_options,
            vocabulary=await self._vocabulary(),
            target=await saved_sequence.save(self.target, tokens),
            draft=await self._of_drafter(lambda draft: saved_sequence.save(draft, tokens)),
        )
        return await saved_session.write(path, session)

    async def _of_drafter(self, ask: Callable[[DraftActor], Awaitable[T]]) -> T | None:
        """The result of a question to the draft model; None where there is no draft model, or where it does not answer.

        A file is complete without the draft model's state: the draft model then prefills the text again.
        """
        if self.draft is None:
            return None
        try:
            with trio.move_on_after(DRAFTER_WAIT_S):
                return await ask(self.draft)
        except (JobError, HangError) as error:
            logger.warning("what the draft model has cached is not saved: %s", error)
        return None

    async def save_stream(self, path: SessionFile, opened: Open, progress: Callable[[], Progress]) -> int:
        """Write a stream and its cached sequences to a file; see `TokenStream.save`.

        Args:
            progress: returns how far its text has come, all commits included.
        """
        saved_session.check_path(path)
        progress()  # empties the channel of commits, where the models wait for a slow consumer
        target = await saved_sequence.take(self.target, opened.session)
        await trio.lowlevel.checkpoint()  # let the drafter hear of what the target has read
        draft = await self._of_drafter(lambda draft: saved_sequence.take(draft, opened.session))
        for _ in range(_MAX_ROUNDS):
            now = progress()
            committed = [token for commit in now.commits for token in commit.tokens]
            tokens = (*opened.prompt[: opened.num_prompt], *now.given, *committed)
            # A recurrent cache is of no use until the text has a token that the cache does not have.
            if all(taken is None or min(taken.lengths) < len(tokens) for taken in (target, draft)):
                break
            await self._of_drafter(saved_sequence.let_pass)
            await saved_sequence.let_pass(self.target)
        session = SavedSession(
            messages=(),
            tokens=tokens,
            thinking=None,
            settings=settings_for_json(opened.settings),
            num_processors=len(opened.settings.logits_processors),
            cache_options=self._cache_options,
            vocabulary=await self._vocabulary(),
            target=await saved_sequence.save(self.target, tokens, target),
            draft=await self._of_drafter(lambda actor: saved_sequence.save(actor, tokens, draft)),
            stream=SavedStream(opened.seed, now),
        )
        return await saved_session.write(path, session)

    async def read(self, path: SessionFile, *, any_draft: bool, is_stream: bool = False) -> SavedSession:
        """Read a conversation or a stream that fits these models; see `Runtime.load`. Changes nothing.

        Raises: SessionFileError: the file cannot be read, or does not fit.
        """
        session = await saved_session.read(path)
        saved_session.check_kind(path, session, is_stream=is_stream)
        saved_session.check_vocabulary(path, session.vocabulary, await self._vocabulary())
        _check_tokens(path, _ids(session), self.target.model.vocab_size)
        _check_ranks(path, session.target.num_ranks, self._num_ranks)
        present = await saved_sequence.identify(self.target)
        remedy = "open that one as the target, or begin the conversation anew"
        saved_session.check_model(path, "target", session.target.fingerprint, present, remedy)
        saved_session.check_cache_options(path, session.cache_options, self._cache_options)
        if session.draft is None:
            return session
        if self.draft is None:
            logger.info("what a draft model had cached for session %s is left out: there is none", shown(path))
            return attrs.evolve(session, draft=None)
        present = await saved_sequence.identify(self.draft)
        if any_draft and session.draft.fingerprint.difference(present) is not None:
            logger.info("what another draft model had cached for session %s is left out", shown(path))
            return attrs.evolve(session, draft=None)
        remedy = "open that one as the draft, or load with any_draft=True to have this one read the text anew"
        saved_session.check_model(path, "draft", session.draft.fingerprint, present, remedy)
        return session

    async def fill(self, path: SessionFile, session: SavedSession, drafted: bool) -> None:
        """Put a session's cached sequences into the models' prefix caches, once all of them are found to fit.

        Args:
            drafted: whether the session will have a drafter.

        Cancellation: takes effect once the sequences are kept.

        Raises: SessionFileError: a cached sequence does not fit its model.
        """
        saved_states: list[tuple[TargetActor | DraftActor, SavedModelState | None, bool]] = [
            (self.target, session.target, drafted and self.target.drafter.has_model)
        ]
        if self.draft is not None:
            saved_states.append((self.draft, session.draft, True))
        filled: list[tuple[TargetActor | DraftActor, FilledSequence]] = []
        with trio.CancelScope(shield=True):  # until the sequences are kept, nobody else would close them
            try:
                for actor, saved, beside_another in saved_states:
                    if saved is not None and saved.sequence is not None:
                        sequence = await saved_sequence.fill(actor, saved.sequence, beside_another=beside_another)
                        filled.append((actor, sequence))
            except SessionFileError as error:
                for actor, sequence in filled:
                    await saved_sequence.discard(actor, sequence)
                raise SessionFileError(
                    f"{named(path)} does not fit: {error}; use another copy of it, or save again"
                ) from error
            for actor, sequence in filled:
                await saved_sequence.keep(actor, sequence)

    @property
    def _cache_options(self) -> dict[str, int | None]:
        model = self.target.model
        return model.cache_options if isinstance(model, MLXModel) else {}

    @property
    def _num_ranks(self) -> int:
        return self.target.model.num_ranks if isinstance(self.target.model, MLXModel) else 1

    async def _vocabulary(self) -> str | None:
        if self.tokenizer is None:
            return None
        # Takes a few tenths of a second for a large vocabulary.
        return await trio.to_thread.run_sync(_vocabulary_digest, self.tokenizer)


def _vocabulary_digest(tokenizer: TokenizerWrapper) -> str:
    return vocabulary_digest(tokenizer.get_vocab())


def _ids(session: SavedSession) -> Iterable[int]:
    """All token ids in a session."""
    yield from session.tokens
    if session.stream is not None:
        for commit in session.stream.progress.commits:
            for likelihood in commit.likelihoods:
                yield from (id for id, _ in likelihood.top)


def _check_ranks(path: SessionFile, saved: int, present: int) -> None:
    """Raises: SessionFileError: the file has the parts of another number of ranks."""
    if saved != present:
        was, now = (f"{number} ranks" if number > 1 else "one machine" for number in (saved, present))
        raise SessionFileError(
            f"{named(path)} was saved with its target on {was}, and here it is on {now}; load it on {was}"
        )


def _check_tokens(path: SessionFile, tokens: Iterable[int], vocab_size: int) -> None:
    if (largest := max(tokens, default=0)) >= vocab_size:
        raise SessionFileError(
            f"{named(path)} has token {largest}, outside the target's vocabulary of {vocab_size} "
            "ids; open the target that it was saved with"
        )
