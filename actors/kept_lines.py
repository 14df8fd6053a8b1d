"""What is still cached of texts that are over, for texts that begin alike.

A session takes a line out of here and puts it back in the end, so a line is at work or kept, never both. mlx-lm's
own `LRUPromptCache` is not used: it trusts `is_trimmable` (see `actors.mlx_cache`), knows nothing of checkpoints,
copies a cache each time that it gives it out, and overlooks a common prefix of one token.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from actors.model import Line, Model
from protocol.errors import RewindError

# A search looks at each line; and past some number, what is oldest is not asked for again.
MOST_LINES = 64


@attrs.frozen
class Begun:
    """A line for a session, which holds the first `num_cached` tokens of its prompt already."""

    line: Line
    num_cached: int


@attrs.frozen(eq=False)
class _Kept:
    """A line, what it has processed, and whether it leaves room for another model."""

    line: Line
    tokens: tuple[int, ...]
    beside_another: bool
    num_bytes: int


class KeptLines:
    """The lines of one model that nobody is at work on. All its methods run on the model's own thread."""

    def __init__(self, model: Model, max_bytes: int) -> None:
        """Nothing yet.

        Args:
            model: whose lines.
            max_bytes: of all caches that are kept, >= 0. Where they are more, those go first that were put away first.
        """
        self._model = model
        self._max_bytes = max_bytes
        self._lines: list[_Kept] = []  # put away first is first

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def num_bytes(self) -> int:
        """What the kept lines hold in memory."""
        return sum(kept.num_bytes for kept in self._lines)

    def begin(self, prompt: tuple[int, ...], *, beside_another: bool) -> Begun:
        """A line for a prompt: the one that can be brought to hold most of its beginning, or a new one.

        Args:
            prompt: its last token is not among what the line holds, since its logits are wanted.
            beside_another: see `Model.open_line`.
        """
        num_read = len(prompt) - 1
        best, num_cached = None, 0
        for kept in self._lines:
            if kept.beside_another == beside_another:
                reach = kept.line.reach(common_length(kept.tokens, prompt[:num_read]), num_read)
                # Of two that reach as far, the one that was put away last.
                if reach > 0 and reach >= num_cached:
                    best, num_cached = kept, reach
        if best is None:
            return Begun(self._model.open_line(beside_another=beside_another), 0)
        self._lines.remove(best)
        try:
            best.line.resume(num_cached)
        except RewindError:
            best.line.close()
            raise
        return Begun(best.line, num_cached)

    def put_away(self, line: Line, held: tuple[int, ...], committed: Sequence[int], *, beside_another: bool) -> None:
        """Keep a line that nobody is at work on any more, or let go of it where it is of no use.

        Args:
            line: of a session that is over.
            held: what it has processed.
            committed: the session's text. What the line holds beyond it is dropped, if it can be.
            beside_another: as it was opened.

        Raises: RewindError: the line does not hold what it should; it is closed then.
        """
        try:
            line.check(len(held))
            common = common_length(held, committed)
            if common < len(held) and line.reach(common, common) == common:
                line.resume(common)
                held = held[:common]
        except RewindError:
            line.close()
            raise
        kept = _Kept(line, held, beside_another, line.num_bytes)
        if kept.num_bytes > self._max_bytes or line.reach(len(held), len(held)) == 0:
            line.close()
            return
        self._drop_what_is_no_more_use_than(kept)
        self._lines.append(kept)
        while self.num_bytes > self._max_bytes or len(self._lines) > MOST_LINES:
            self._lines.pop(0).line.close()

    def close(self) -> None:
        """Let go of all lines."""
        while self._lines:
            self._lines.pop().line.close()

    def _drop_what_is_no_more_use_than(self, newer: _Kept) -> None:
        """Drop lines that hold the beginning of another, where that one could go back there."""
        for kept in list(self._lines):
            common = common_length(kept.tokens, newer.tokens)
            if (
                kept.beside_another == newer.beside_another
                and common == len(kept.tokens)
                and newer.line.reach(common, common) == common
            ):
                self._lines.remove(kept)
                kept.line.close()


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of what two texts begin with in common."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
