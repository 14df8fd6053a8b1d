"""What the actors need of a model, so that real models and scripted ones look alike.

A `CachedSequence` is a model at work on one text: it holds what it has processed, goes forward, and, where it
can, back. All its methods run on the model's own thread.
"""

from __future__ import annotations

import enum
from typing import Protocol

import mlx.core as mx


class RewindMode(enum.Enum):
    """How a feed can be undone: the rungs of a ladder, best first."""

    TRIM = "trim"  # drop the tail, to any length
    CHECKPOINT = "checkpoint"  # restore the state from before it, and feed again what stands
    SINGLE = "none"  # not at all: feed only what is committed, the N=1 fallback


class CachedSequence(Protocol):
    """One text in the cache of one model."""

    def feed(self, tokens: tuple[int, ...], num_logits: int) -> mx.array | None:
        """Process tokens after those that are held.

        Args:
            tokens: at least one id.
            num_logits: rows of logits wanted, for the last so many tokens; in [0, len(tokens)].

        Returns: (num_logits, V) logits, which may be lazy; None for 0 rows, and then the cache is
            evaluated.
        """
        ...

    def feed_lazy(self, token: mx.array) -> mx.array:
        """Process one token that may not be computed yet.

        Args:
            token: (1,) id, which may be lazy.

        Returns: (1, V) logits, lazy.
        """
        ...

    def prepare(self, num_tokens: int, settled: int) -> RewindMode:
        """Make sure that the next feed can be undone, if that can be.

        Args:
            num_tokens: how many will be fed.
            settled: a length below which nobody will want to go back, such as that of the committed text;
                checkpoints that only served that are dropped.

        Returns: how it can be undone. After `RewindMode.SINGLE`, nothing may be fed that is not committed.
        """
        ...

    def rewind(self, length: int) -> int:
        """Go back until no more than the first `length` tokens are held.

        Returns: how many are held now: `length`, or fewer where only a checkpoint below could be restored,
            and then the tokens between are to be fed again.
        Raises: RewindError: it cannot go back so far, or did not.
        """
        ...

    def check(self, length: int) -> None:
        """Compare with the session's books.

        Raises: RewindError: some layer's cache holds another number of tokens than `length`.
        """
        ...

    def close(self) -> None:
        """Let go of the cache."""
        ...

    # --- for a text that begins as another one did ---

    @property
    def num_bytes(self) -> int:
        """What it holds in memory, checkpoints included."""
        ...

    @property
    def needs_prefix_checkpoints(self) -> bool:
        """Whether, once the text has gone on, only a pin can lead back to where it is now, and pins can be set."""
        ...

    @property
    def depends_on_passes(self) -> bool:
        """Whether what it holds of a text depends on how that was cut into passes, by more than rounding."""
        ...

    def add_prefix_checkpoint(self) -> None:
        """Keep the way back to the present length, whatever is settled, until the line goes back beyond it."""
        ...

    def reach(self, length: int, num_tokens: int) -> int:
        """How much of another text's beginning it could hold, such that nobody could tell that it was not fed anew.

        Args:
            length: of the beginning that both texts have in common.
            num_tokens: tokens of the other text that are to be fed without looking at logits, at least `length`.

        Returns: the most tokens, of the first `length`, that `resume` can bring it to; 0 for none.
        """
        ...

    def resume(self, length: int) -> None:
        """Go back to the first `length` tokens, as `reach` has said, for another text; checkpoints are dropped.

        Raises: RewindError: some layer's cache holds another number of tokens afterwards.
        """
        ...


class Model(Protocol):
    """A model on its thread."""

    @property
    def vocab_size(self) -> int:
        """Width of its logits, padding rows included."""
        ...

    @property
    def context_length(self) -> int | None:
        """Most positions that it can take, or None where it names no bound."""
        ...

    def open_sequence(self, *, beside_another: bool) -> CachedSequence:
        """Begin a text.

        Args:
            beside_another: whether another model works in this process at the same time, so that
                forward passes should leave room for it.
        """
        ...
