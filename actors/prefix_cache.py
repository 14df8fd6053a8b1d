"""What is still cached of texts that are over, for texts that begin alike.

A session takes a line out of here and puts it back in the end, so a line is at work or kept, never both. mlx-lm's
own `LRUPromptCache` is not used: it trusts `is_trimmable` (see `actors.mlx.cache_rewind`), knows no checkpoints,
copies a cache each time that it gives it out, and overlooks a common prefix of one token.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from actors.model import CachedSequence, Model
from protocol.errors import RewindError

# A search looks at each line; and past some number, what is oldest is not asked for again.
MAX_SEQUENCES = 64

# Tokens at the end of a prompt which ask for an answer, such as tags around an empty thought, and which a text that
# goes on from it may be without.
ASKING = 4


@attrs.frozen
class CacheHit:
    """A line for a session, which holds the first `num_cached` tokens of its prompt already."""

    sequence: CachedSequence
    num_cached: int


@attrs.frozen(eq=False)
class Nearest:
    """A line, what it has processed, and how much of that a text begins with to which it could go back."""

    sequence: CachedSequence
    tokens: tuple[int, ...]
    reach: int


@attrs.frozen(eq=False)
class _Entry:
    """A line, what it has processed, and whether it leaves room for another model.

    The first `num_prompt` tokens are what somebody asked to be read; what came of them may be left out of a text that
    goes on from there, as thoughts are.
    """

    sequence: CachedSequence
    tokens: tuple[int, ...]
    num_prompt: int
    beside_another: bool
    num_bytes: int

    def may_serve(self, common: int, reach: int) -> bool:
        """Whether a text may have it that has so much in common with it, of which it can hold so much.

        A text that goes on from this one may. Another may where it gains more than whoever goes on from this one loses:
        two conversations that have no more in common than their beginning would take it from each other in each turn.
        """
        return common >= self.num_prompt - ASKING or reach >= len(self.tokens) - reach


class PrefixCache:
    """The lines of one model that nobody is at work on. All its methods run on the model's own thread."""

    def __init__(self, model: Model, max_bytes: int) -> None:
        """Nothing yet.

        Args:
            model: whose lines.
            max_bytes: of all caches that are kept, >= 0. Where they are more, those go first that were put away first.
        """
        self._model = model
        self._max_bytes = max_bytes
        self._sequences: list[_Entry] = []  # put away first is first

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def num_bytes(self) -> int:
        """What the kept lines hold in memory."""
        return sum(kept.num_bytes for kept in self._sequences)

    def begin(self, prompt: tuple[int, ...], *, beside_another: bool) -> CacheHit:
        """A line for a prompt: of those that may serve, the one that can hold most of its beginning; or a new one.

        Args:
            prompt: its last token is not among what the line holds, since its logits are wanted.
            beside_another: see `Model.open_sequence`.
        """
        num_read = len(prompt) - 1
        best, num_cached = None, 0
        for kept in self._sequences:
            if kept.beside_another == beside_another:
                common = common_length(kept.tokens, prompt[:num_read])
                reach = kept.sequence.reach(common, num_read)
                # Of two that reach as far, the one that was put away last.
                if reach > 0 and reach >= num_cached and kept.may_serve(common, reach):
                    best, num_cached = kept, reach
        if best is None:
            return CacheHit(self._model.open_sequence(beside_another=beside_another), 0)
        self._sequences.remove(best)
        try:
            best.sequence.resume(num_cached)
        except RewindError:
            best.sequence.close()
            raise
        return CacheHit(best.sequence, num_cached)

    def nearest(self, text: tuple[int, ...]) -> Nearest | None:
        """The line that has most of a text's beginning; it stays where it is.

        Where several have the same, the one that was put away last. None where all are for other texts.
        """
        best: Nearest | None = None
        for kept in self._sequences:
            reach = kept.sequence.reach(common_length(kept.tokens, text), len(text))
            if reach > 0 and (best is None or reach >= best.reach):
                best = Nearest(kept.sequence, kept.tokens, reach)
        return best

    def put(
        self,
        sequence: CachedSequence,
        cached_tokens: tuple[int, ...],
        committed: Sequence[int],
        *,
        beside_another: bool,
        num_prompt: int | None = None,
    ) -> None:
        """Keep a line that nobody is at work on any more, or let go of it where it is of no use.

        Args:
            line: of a session that is over.
            held: what it has processed.
            committed: the session's text. What the line holds beyond it is dropped, if it can be.
            beside_another: as it was opened.
            num_prompt: tokens of the text that were the session's prompt; None for all.

        Raises: RewindError: the line does not hold what it should; it is closed then.
        """
        try:
            sequence.check(len(cached_tokens))
            common = common_length(cached_tokens, committed)
            if common < len(cached_tokens) and sequence.reach(common, common) == common:
                sequence.resume(common)
                cached_tokens = cached_tokens[:common]
        except RewindError:
            sequence.close()
            raise
        kept = _Entry(
            sequence,
            cached_tokens,
            len(cached_tokens) if num_prompt is None else num_prompt,
            beside_another,
            sequence.num_bytes,
        )
        if kept.num_bytes > self._max_bytes or sequence.reach(len(cached_tokens), len(cached_tokens)) == 0:
            sequence.close()
            return
        self._evict_entries_no_more_useful_than(kept)
        self._sequences.append(kept)
        while self.num_bytes > self._max_bytes or len(self._sequences) > MAX_SEQUENCES:
            self._sequences.pop(0).sequence.close()

    def close(self) -> None:
        """Let go of all lines."""
        while self._sequences:
            self._sequences.pop().sequence.close()

    def _evict_entries_no_more_useful_than(self, newer: _Entry) -> None:
        """Drop lines that hold the beginning of another, where that one could go back there."""
        for kept in list(self._sequences):
            common = common_length(kept.tokens, newer.tokens)
            if (
                kept.beside_another == newer.beside_another
                and common == len(kept.tokens)
                and newer.sequence.reach(common, common) == common
            ):
                self._sequences.remove(kept)
                kept.sequence.close()


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of what two texts begin with in common."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
