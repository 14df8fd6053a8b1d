"""What is still cached of texts that are over, for texts that begin alike.

A session takes a line out of here and puts it back in the end, so a line is at work or kept, never both. mlx-lm's
own `LRUPromptCache` is not used: it trusts `is_trimmable` (see `actors.mlx.cache_rewind`), knows no checkpoints,
copies a cache each time that it gives it out, and overlooks a common prefix of one token.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from actors.model import Line, Model
from protocol.errors import RewindError

# A search looks at each line; and past some number, what is oldest is not asked for again.
MOST_LINES = 64

# Tokens at the end of a prompt which ask for an answer, such as tags around an empty thought, and which a text that
# goes on from it may be without.
ASKING = 4


@attrs.frozen
class Begun:
    """A line for a session, which holds the first `num_cached` tokens of its prompt already."""

    line: Line
    num_cached: int


@attrs.frozen(eq=False)
class Nearest:
    """A line, what it has processed, and how much of that a text begins with to which it could go back."""

    line: Line
    tokens: tuple[int, ...]
    reach: int


@attrs.frozen(eq=False)
class _Kept:
    """A line, what it has processed, and whether it leaves room for another model.

    The first `num_prompt` tokens are what somebody asked to be read; what came of them may be left out of a text that
    goes on from there, as thoughts are.
    """

    line: Line
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
        """A line for a prompt: of those that may serve, the one that can hold most of its beginning; or a new one.

        Args:
            prompt: its last token is not among what the line holds, since its logits are wanted.
            beside_another: see `Model.open_line`.
        """
        num_read = len(prompt) - 1
        best, num_cached = None, 0
        for kept in self._lines:
            if kept.beside_another == beside_another:
                common = common_length(kept.tokens, prompt[:num_read])
                reach = kept.line.reach(common, num_read)
                # Of two that reach as far, the one that was put away last.
                if reach > 0 and reach >= num_cached and kept.may_serve(common, reach):
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

    def nearest(self, text: tuple[int, ...]) -> Nearest | None:
        """The line that has most of a text's beginning; it stays where it is.

        Where several have the same, the one that was put away last. None where all are for other texts.
        """
        best: Nearest | None = None
        for kept in self._lines:
            reach = kept.line.reach(common_length(kept.tokens, text), len(text))
            if reach > 0 and (best is None or reach >= best.reach):
                best = Nearest(kept.line, kept.tokens, reach)
        return best

    def put_away(
        self,
        line: Line,
        held: tuple[int, ...],
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
            line.check(len(held))
            common = common_length(held, committed)
            if common < len(held) and line.reach(common, common) == common:
                line.resume(common)
                held = held[:common]
        except RewindError:
            line.close()
            raise
        kept = _Kept(line, held, len(held) if num_prompt is None else num_prompt, beside_another, line.num_bytes)
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
