"""What the runtime and both actors share about one session."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import trio

from actors.sampling.logits_pipeline import LogitsPipeline
from protocol.errors import OutriderError
from protocol.messages import Open
from protocol.session_state import Commit
from protocol.statistics import Counts
from protocol.stop_strings import Stop


@attrs.define(eq=False)
class Session:
    """One generation, as the runtime hands it to the actors.

    Only touched in trio's thread.

    Attributes:
        opened: the message that begins it.
        commits: where the target puts what is committed. Bounded, so that a slow consumer slows the
            models and not the memory; closed when nothing more comes.
        counts: what the actors count; the consumer's side counts tokens.
        shaping: of both models' logits.
        unsent: what was committed and waits for room among the commits.
        error: why nothing more comes, where that is not the end of the text.
        on_left: called when the last of the actors has nothing more to do with it, and whatever they had of it is put
            away; must not raise.
        find_stop: reads what a round is about to commit, each round once and in order, and says where a stop string
            ends the text, if one does; must not raise. None where there are no stop strings, and nothing is read.
        is_unwanted: whether nobody will read any more, and the session ends as soon as that is heard of. May be set in
            any thread.
    """

    opened: Open
    commits: trio.MemorySendChannel[Commit]
    counts: Counts = attrs.field(factory=Counts)
    unsent: Commit | None = None
    error: OutriderError | None = None
    on_left: Callable[[], None] | None = None
    _num_parts: int = attrs.field(default=0, init=False)
    is_unwanted: bool = False
    logits_pipeline: LogitsPipeline = attrs.field(
        init=False, default=attrs.Factory(lambda self: LogitsPipeline(self.opened), takes_self=True)
    )
    find_stop: Callable[[Commit], Stop | None] | None = None

    def end(self, error: OutriderError | None = None) -> None:
        """Say that nothing more comes, and why. The first reason stands."""
        if self.error is None:
            self.error = error
        self.commits.close()

    def join(self) -> None:
        """Say that an actor takes part from now on."""
        self._num_parts += 1

    def leave(self) -> None:
        """Say that one does no longer."""
        self._num_parts -= 1
        if self._num_parts == 0 and self.on_left is not None:
            self.on_left()
