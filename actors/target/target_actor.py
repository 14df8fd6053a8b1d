"""The target: judges proposals, commits tokens, and decodes by itself when nobody drafts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import trio

from actors.actor import ModelActor
from actors.model import CachedSequence, Model
from actors.probe import PROBED, probe
from actors.session import Session
from actors.target.drafter_link import DrafterLink
from actors.target.round_loop import RoundLoop
from actors.target.target_session import TargetSession
from actors.workers.worker import Job, JobError, Worker
from protocol.errors import OutriderError, StreamFailedError
from protocol.messages import Close, Message, PromptFeatures
from protocol.open_options import MAX_BATCH, PREFIX_CACHE_BYTES
from protocol.prices import Prices
from protocol.session_state import Commit, SessionPhase
from protocol.target_queue import TargetQueue
from protocol.trace import Event


class TargetActor(ModelActor[TargetSession]):
    """Verifies proposals. The rounds that wait when the model becomes free share a forward pass.

    Each session has a task that opens its cache, reads its prompt, and closes it. Its rounds are run by the round loop.

    Attributes:
        drafter: the link to the drafter; without one until `DrafterLink.attach`.
    """

    name = "target"

    def __init__(
        self,
        model: Model,
        worker: Worker,
        on_event: Callable[[Event], None],
        prices: Prices,
        *,
        on_failure: Callable[[OutriderError], None],
        target_queue: TargetQueue,
        prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
        max_batch: int = MAX_BATCH,
    ) -> None:
        """As `ModelActor`, and:

        Args:
            on_failure: called once the model has failed; no session can go on then.
            target_queue: shows the drafter which passes wait and run here.
            max_batch: most sessions that share one pass, >= 1.
        """
        super().__init__(model, worker, on_event, prices, prefix_cache_bytes=prefix_cache_bytes)
        self._on_failure = on_failure
        self.drafter = DrafterLink(lambda: len(self._sessions), prices, partial(self._note, kind="overdue"))
        self._rounds = RoundLoop(
            model,
            worker,
            prices,
            target_queue,
            self.drafter,
            self.chunk_size,
            max_batch,
            on_commit=self._note_commit,
            on_rewind=self._note_rewind,
        )

    async def _serve_beside(self) -> None:
        await self._rounds.serve()

    def _hand_over(self, message: Message) -> None:
        super()._hand_over(message)
        if (session := self._sessions.get(message.session)) is not None:
            self._rounds.look_at(session)

    def _new_session(self, shared: Session) -> TargetSession:
        return TargetSession(shared)

    async def _run_session(self, session: TargetSession) -> None:
        opened, shared = session.shared.opened, session.shared
        try:
            # A text to score is read as drafted ones are, so that each can reuse what was read for the other.
            beside_another = self.drafter.has_model and (opened.drafted or opened.num_scored > 0)
            async with self._open_sequence(session, beside_another=beside_another) as sequence:
                if (features := sequence.features) is not None:
                    features.want(session.state.phase is not SessionPhase.UNDRAFTED)
                shared.counts.cached_tokens = len(session.cached_tokens)
                await self._rounds.read(session, opened.num_read)
                await self._give_prompt_features(session, sequence)
                await self._hand_on(session, sequence)
                if opened.num_scored > 0:
                    await self._rounds.read(session, len(opened.prompt) - 1)
                    session.state.close(Close(session.id))
                await self._rounds.decode(session)
                # The consumer takes an unsent commit from `shared`: waiting here would delay another session.
                shared.deliver_nowait()
                if session.state.finish_reason is not None:
                    self._note(session, "finish")
        except JobError as error:
            await self._end_or_break(session, error)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the consumer has gone, or the runtime has ended the session
        except Exception as error:  # of any kind: it ends this session, and the others go on
            self._fail(session, error)
        finally:
            shared.end()
            # A session that failed must not occupy the drafter, even before anybody has read that it failed.
            if session.state.phase is not SessionPhase.CLOSED:
                self.drafter.send(Close(session.id))

    async def _give_prompt_features(self, session: TargetSession, sequence: CachedSequence) -> None:
        """Give a drafter that reads features those of the prompt."""
        if self.drafter.mailbox is None or not session.shared.opened.drafted:
            return
        if (features := sequence.features) is not None and features.arrays():
            call = partial(features.take, len(session.cached_tokens))
            session.prompt_features = await self.worker.run(Job("prefill", call, session.id))
        if session.prompt_features is not None:
            self.drafter.send(PromptFeatures(session.id, session.prompt_features))

    async def _end_or_break(self, session: TargetSession, error: JobError) -> None:
        """End a session one of whose jobs failed, and the runtime if the model does not work any more.

        A foreign exception may still be this session's doing: a prompt that does not fit into memory, a processor. So
        the model counts as failed only if it also fails at a text that has nothing to do with the session.
        """
        cause = error.__cause__
        if isinstance(cause, OutriderError):
            session.shared.end(cause)
            return
        try:
            # Also if nobody wants this session any more: the result matters to the others.
            with trio.CancelScope(shield=True):
                await self.worker.run(Job("probe", partial(probe, self.model), None, len(PROBED)))
        except JobError:
            self._on_failure(error)
        else:
            self._fail(session, cause or error)

    def _fail(self, session: TargetSession, error: BaseException) -> None:
        if isinstance(error, OutriderError):
            session.shared.end(error)
            return
        failure = StreamFailedError(
            f"this stream failed, and no other: {type(error).__name__}: {error}; the model itself works"
        )
        failure.__cause__ = error
        session.shared.end(failure)

    def _note_commit(self, session: TargetSession, commit: Commit) -> None:
        self._note(session, "verdict", round=commit.round, num_tokens=commit.num_from_draft, commit=commit)

    def _note_rewind(self, session: TargetSession, num_tokens: int) -> None:
        self._note(session, "rewind", num_tokens=num_tokens)
