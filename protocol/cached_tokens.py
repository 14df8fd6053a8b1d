"""What a model's cache has processed, and the way from there to the text that is wanted."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from protocol.errors import ProtocolError


@attrs.frozen
class FeedPlan:
    """How to bring a cache in line: keep the first `keep` tokens it holds, then feed `feed`."""

    keep: int
    feed: tuple[int, ...]


class CachedTokens:
    """The tokens that one cache has processed, in order: its side of the session's books.

    There is one way to bring a cache in line with a text, whatever happened before: rewind to the
    longest common prefix, then feed what is missing. "All accepted, so the drafter is one token
    behind" is no case of its own.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        # Length of a prefix known to agree with the committed text. Committed text only grows, so it
        # needs no second look, and a plan costs what is new and not the whole text.
        self._agreed = 0

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> tuple[int, ...]:
        """A copy of what is held."""
        return tuple(self._tokens)

    def plan(self, committed: Sequence[int], beyond: Sequence[int] = (), *, num_logits: int = 1) -> FeedPlan:
        """The shortest way to hold `committed + beyond`.

        Args:
            committed: the session's committed text, prompt included; the same list, grown, each time.
            beyond: drafted tokens after it.
            num_logits: how many of the last tokens must be fed even where they are held already,
                because the logits after them are wanted; >= 0.

        Raises: ProtocolError: num_logits exceeds the text.
        """
        total = len(committed) + len(beyond)
        if num_logits > total:
            raise ProtocolError(f"cannot have {num_logits} rows of logits from {total} tokens")
        held, common = self._tokens, self._agreed
        limit = min(len(held), len(committed))
        while common < limit and held[common] == committed[common]:
            common += 1
        self._agreed = common
        if common == len(committed):
            limit = min(len(held), total)
            while common < limit and held[common] == beyond[common - len(committed)]:
                common += 1
        keep = min(common, total - num_logits)
        after = tuple(committed[keep:]) + tuple(beyond[max(0, keep - len(committed)) :])
        return FeedPlan(keep, after)

    def follow(self, plan: FeedPlan) -> None:
        """Note that the cache has carried out a plan."""
        del self._tokens[plan.keep :]
        self._tokens += plan.feed
        self._agreed = min(self._agreed, plan.keep)

    def rewind(self, length: int) -> None:
        """Note that the cache has been cut to its first `length` tokens."""
        del self._tokens[length:]
        self._agreed = min(self._agreed, length)
