"""The state of a runtime: what it tells of its models and streams, without a generation to find out."""

from __future__ import annotations

import attrs
from mlx_lm.tokenizer_utils import TokenizerWrapper

from actors.target.target_actor import TargetActor
from protocol.errors import RuntimeBrokenError
from protocol.prices import Estimates, Prices
from protocol.statistics import Statistics
from runtime.engine.drafter_slot import DrafterActor, DrafterSlot
from runtime.engine.sessions import Sessions


@attrs.frozen
class Health:
    """Which of the actors are alive.

    Attributes:
        target: False once it has failed or the runtime was closed: no stream will begin any more.
        draft: False while the drafter hangs or is late with a proposal, and once its thread has died or the runtime was
            closed: texts are then generated undrafted. None without a drafter. A drafter that fails in one stream
            serves the next, and is alive.
    """

    target: bool
    draft: bool | None

    @property
    def ok(self) -> bool:
        """Whether the target is alive, and the drafter if there is one."""
        return self.target and self.draft is not False


class RuntimeState:
    """What a runtime tells of itself. May be asked at any time and in any thread, but for `wait_broken`."""

    def __init__(
        self,
        target: TargetActor,
        drafter: DrafterSlot,
        sessions: Sessions,
        prices: Prices,
        shared_tokenizer: TokenizerWrapper | None,
    ) -> None:
        """Of a runtime that has just been opened.

        Args:
            target, drafter, sessions, prices: the runtime's.
            shared_tokenizer: the target's tokenizer, as the user gets it.
        """
        self._target = target
        self._drafter = drafter
        self._sessions = sessions
        self._prices = prices
        self._shared_tokenizer = shared_tokenizer
        self._began = target.worker.clock()

    def __repr__(self) -> str:
        state = "open" if self._sessions.is_open else "closed"
        return f"<outrider Runtime, {state}: {self.num_streams} streams, {self.num_waiting} waiting>"

    def check_open(self) -> None:
        """Raises: RuntimeClosedError, RuntimeBrokenError: the runtime is closed, or its target has failed.

        May be called in any thread.
        """
        self._sessions.check_open()

    def health(self) -> Health:
        """Whether the models are alive; asks nothing of them, so that a server can call it at any time."""
        is_open = self._sessions.is_open
        return Health(
            target=is_open and self._target.is_alive,
            draft=None if (draft := self._draft) is None else is_open and draft.is_alive,
        )

    async def wait_broken(self) -> RuntimeBrokenError:
        """Wait until the target has failed and every stream has its error; a server then has nothing left to do.

        Returns: the error of every stream; at once if that has happened already.

        Cancellation: ends the waiting; closing the runtime does not.
        """
        await self._sessions.has_failed.wait()
        assert self._sessions.failure is not None
        return self._sessions.failure

    def statistics(self) -> Statistics:
        """Counts over all streams so far, and how busy the models have been; a frozen snapshot.

        `generation_tps` is over the runtime's whole life.
        """
        elapsed_s = self._target.worker.clock() - self._began
        return self._sessions.statistics(elapsed_s, self.busy_seconds, is_drafted=self._draft is not None)

    @property
    def busy_seconds(self) -> tuple[float, float]:
        """Seconds that the target and the drafter have been at work so far; neither ever decreases."""
        return self._target.worker.busy_seconds, self._drafter.busy_seconds

    @property
    def estimates(self) -> Estimates:
        """What the models' passes have been measured to cost, and what speculating gains."""
        return self._prices.estimates()

    @property
    def max_streams(self) -> int | None:
        """Most streams that are at work at the same time; None for no bound."""
        return self._sessions.max_streams

    @property
    def num_streams(self) -> int:
        """Streams that are under way: begun, and neither read to their end nor closed."""
        return self._sessions.num_streams

    @property
    def num_waiting(self) -> int:
        """Streams that wait for admission, because `max_streams` are at work."""
        return self._sessions.num_waiting

    @property
    def tokenizer(self) -> TokenizerWrapper | None:
        """The target's tokenizer, as mlx-lm wraps it; None if the target was opened without one.

        The runtime works with a copy: changes to this object, such as its truncation, have no effect on it.
        """
        return self._shared_tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the target knows; each id of a prompt is in [0, `vocab_size`)."""
        return self._target.model.vocab_size

    @property
    def context_length(self) -> int | None:
        """Most tokens of a text, its prompt included; None where the target has no bound."""
        return self._target.model.context_length

    @property
    def _draft(self) -> DrafterActor | None:
        return self._drafter.actor
