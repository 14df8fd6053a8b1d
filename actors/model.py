"""The interface of a model that the actors use, so that real models and scripted ones look alike."""

from __future__ import annotations

import enum
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

import attrs
import mlx.core as mx

from protocol.cache_size import CacheSize
from protocol.messages import Features
from protocol.prefill_chunks import FIXED_CHUNK_TOKENS


class RewindMode(enum.Enum):
    """The ways to undo a feed, best first."""

    TRIM = "trim"  # drop the last tokens, to any length
    CHECKPOINT = "checkpoint"  # restore the state from before the feed, and feed the accepted tokens again
    SINGLE = "none"  # no way: feed only committed tokens, one predicted token a round


class CacheLostError(Exception):
    """A text's cache does not hold what the round was planned with."""


class CachedSequence(ABC):
    """One text in one model's cache, on the model's thread. An ability that it lacks is None or False."""

    @abstractmethod
    def feed(self, tokens: tuple[int, ...], num_logits: int) -> mx.array | None:
        """Process tokens, at least one id, after the cached ones.

        Returns: (num_logits, V) logits for the last `num_logits` tokens, in [0, len(tokens)], which may be lazy; None
        for 0 rows, and then the cache is evaluated.
        """

    @abstractmethod
    def feed_lazy(self, token: mx.array) -> mx.array:
        """Process one token, (1,) id, that may not be computed yet. Returns: (1, V) logits, lazy."""

    @abstractmethod
    def prepare(self, num_tokens: int, settled: int) -> RewindMode:
        """Prepare to undo the next feed, of `num_tokens`, if possible.

        Args:
            settled: no rewind goes below this length. Checkpoints that only lead below it are dropped.

        Returns: how the feed can be undone. After `RewindMode.SINGLE`, only committed tokens may be fed.
        """

    @abstractmethod
    def rewind(self, length: int) -> int:
        """Drop tokens until at most the first `length` are cached.

        Returns: how many are: `length`, or fewer if only a checkpoint below could be restored; those between must be
        fed again.
        Raises: RewindError: the cache cannot be rewound so far, or was not.
        """

    @abstractmethod
    def check(self, length: int) -> None:
        """Raises: RewindError: some layer's cache holds another number of tokens than the session has counted."""

    @property
    def is_row(self) -> bool:
        """Whether the text is a row of a batch, which its passes always compute. In any thread while no pass runs."""
        return False

    @property
    @abstractmethod
    def length(self) -> int:
        """Number of cached tokens; fewer than counted if a shared pass has failed. In any thread while no pass runs."""

    @abstractmethod
    def forget(self) -> None:
        """Drop all tokens, and all checkpoints: what the cache holds is not known."""

    @abstractmethod
    def close(self) -> None:
        """Release the cache."""

    # --- abilities ---

    @property
    def features(self) -> TextFeatures | None:
        """The features that are recorded of the text; None also while nobody reads any."""
        return None

    @property
    def reusable(self) -> ReusableSequence | None:
        """The sequence itself, if other texts with the same beginning can reuse it."""
        return None

    @property
    def reads_with_others(self) -> bool:
        """Whether its first tokens may be read in a pass that other texts share. May be read in any thread."""
        return False

    @property
    def computes_all_logits(self) -> bool:
        """Whether a pass over several tokens computes the logits of all, even if one row is asked for. Any thread."""
        return False

    @property
    def depends_on_passes(self) -> bool:
        """Whether the cache's content depends on how the text was divided into passes, by more than rounding."""
        return False


class TextFeatures(Protocol):
    """The features of one text's last tokens, until they are taken: hidden states that a trained drafter reads."""

    def want(self, wanted: bool) -> None:
        """Say, while no pass runs, whether features are wanted, as is assumed; if not, those here are dropped."""

    def arrays(self) -> list[mx.array]:
        """What `take` reads, to be evaluated together with something else."""

    def take(self, end: int) -> Features | None:
        """The features of tokens before position `end` that were fed since the last call; None if there are none."""


class ReusableSequence(CachedSequence):
    """A sequence that another text with the same beginning can take over."""

    @property
    def reusable(self) -> ReusableSequence | None:
        return self

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory of the cache, checkpoints included."""

    @property
    def memory(self) -> Mapping[int, int]:
        """That memory in bytes, by the ids of what takes it, which sequences may have in common."""
        return {id(self): self.num_bytes}

    def share(self, other: ReusableSequence, num_common: int) -> None:
        """Keep the first tokens in memory only once, if possible, with an idle sequence that was opened alike."""

    @abstractmethod
    def reusable_length(self, num_common: int, num_read: int, pass_tokens: int = FIXED_CHUNK_TOKENS) -> int:
        """How many tokens another text can reuse, with the same result as if they were fed again: the largest length in
        [0, num_common] that `reuse` and `copy` can go back to. Changes nothing.

        The other text has `num_common` tokens in common, and feeds `num_read` >= `num_common` without looking at
        logits; in passes of `pass_tokens`, if its cache depends on passes.
        """

    @abstractmethod
    def reuse(self, length: int) -> None:
        """Rewind to a `reusable_length`, for another text. Drops checkpoints of rounds. Raises: RewindError."""

    can_copy = True

    def shared_from(self, num_read: int, pass_tokens: int) -> int | None:
        """The shortest beginning that another text can copy once it was read; None for just the whole prompt."""
        return None if self.depends_on_passes else 0

    @abstractmethod
    def copy(self, length: int) -> ReusableSequence:
        """A new sequence with the first tokens of this one, if `can_copy`, which goes on. Otherwise as `reuse`."""

    def settle(self, tokens: tuple[int, ...], text: Sequence[int]) -> tuple[int, ...]:
        """Read what can be read of a finished text with features that were given. Gives the cached tokens now."""
        return tokens

    @property
    def needs_prefix_checkpoints(self) -> bool:
        """Whether only a prefix checkpoint can lead back to the present length later, and can be made."""
        return False

    def add_prefix_checkpoint(self) -> None:
        """Keep the present state for other texts, if that is needed, until the sequence is rewound below it."""


@attrs.frozen
class Feed:
    """Tokens of one text, to be processed in a pass that other texts may share."""

    sequence: CachedSequence
    tokens: tuple[int, ...]  # at least one id
    num_logits: int  # rows of logits wanted, for the last `num_logits` tokens; in [1, len(tokens)]
    alone: bool = False  # whether it must have its pass to itself, and its cache must stay apart from those of others


def feed_each(feeds: Sequence[Feed]) -> list[mx.array]:
    """`Model.feed_together` with a pass for each text."""
    logits = [feed.sequence.feed(feed.tokens, feed.num_logits) for feed in feeds]
    return [rows for rows in logits if rows is not None]


class Model(Protocol):
    """A model on its thread."""

    @property
    def vocab_size(self) -> int:
        """Width of its logits, padding rows included."""

    @property
    def context_length(self) -> int | None:
        """Largest number of positions, or None if the model names no bound."""

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""

    @property
    def cache_size(self) -> CacheSize:
        """The memory that its caches take, by the sizes of texts."""

    @property
    def records_features(self) -> bool:
        """Whether a drafter reads its hidden states; see `TextFeatures`."""

    def feed_together(self, feeds: Sequence[Feed]) -> list[mx.array]:
        """Process tokens of sequences, in one pass if possible. Returns: (num_logits, V) logits of each, maybe lazy."""

    @property
    def widest_row(self) -> int:
        """Most tokens of one text in a pass that texts share."""

    def read_together(self, sequences: Sequence[CachedSequence], tokens: Sequence[tuple[int, ...]]) -> None:
        """Process the first tokens, at most `widest_row`, of empty sequences without logits, in one pass if possible.

        Raises: whatever the model raises; what the sequences hold is not known then.
        """

    def feed_ahead(self, sequences: Sequence[CachedSequence], tokens: mx.array) -> mx.array:
        """As `feed_together` for one token each, (n,), which may not be computed yet. Returns: (n, V) logits, lazy."""

    def sharing_obstacle(self, *, rewinds_passes: bool = False) -> str | None:
        """Why texts cannot share passes; None if they can. `rewinds_passes`: and rewind by more than the last one."""

    def abandon_shared(self) -> None:
        """Empty the caches of all texts that share passes, because one of those passes has failed."""

    def open_sequence(self, *, alongside_model: bool) -> CachedSequence:
        """Make an empty sequence, whose passes leave processor time for another model of this process."""


class FeedsEach:
    """The part of a `Model` that concerns several texts, for one that feeds each by itself, such as a scripted one."""

    num_bytes = 0
    cache_size = CacheSize()
    records_features = False
    feed_together = staticmethod(feed_each)
    widest_row = sys.maxsize

    def read_together(self, sequences: Sequence[CachedSequence], tokens: Sequence[tuple[int, ...]]) -> None:
        for sequence, read in zip(sequences, tokens, strict=True):
            sequence.feed(read, 0)

    def feed_ahead(self, sequences: Sequence[CachedSequence], tokens: mx.array) -> mx.array:
        logits = [sequence.feed_lazy(tokens[i : i + 1]) for i, sequence in enumerate(sequences)]
        return mx.concatenate(logits)

    def sharing_obstacle(self, *, rewinds_passes: bool = False) -> str | None:
        return None

    def abandon_shared(self) -> None:
        """Nothing is shared."""
