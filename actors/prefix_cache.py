"""The prefix cache: cached sequences of texts that are over, for texts with the same beginning.

A session takes a sequence out and puts it back in the end, so a sequence is either in use or in the cache, never both.

mlx-lm's `LRUPromptCache` is not used: it trusts `is_trimmable` (see `actors.mlx.cache_kinds`), knows no checkpoints,
copies a cache each time that it hands one out, and overlooks a common prefix of one token. Its `PromptTrie` finds one
neighbour of a prompt, while the entry that can reuse most may be any of them, and it walks a dict for each token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

import attrs

from actors.model import CachedSequence, Model, ReusableSequence
from protocol.errors import RewindError

MAX_SEQUENCES = 64  # a search compares a prompt with each

# Tokens at the end of a prompt that ask for an answer, such as the tags of an empty reasoning block. A text that
# continues the prompt may lack them.
NUM_ANSWER_CUE_TOKENS = 4


@attrs.frozen
class CacheHit:
    """A sequence for a session, which holds the first `num_cached` tokens of its prompt; 0 for a new sequence."""

    sequence: CachedSequence
    num_cached: int


@attrs.frozen(eq=False)
class PrefixMatch:
    """A sequence that stays in the cache, its tokens, and how many of them a text can reuse."""

    sequence: ReusableSequence
    tokens: tuple[int, ...]
    num_reusable: int


@attrs.frozen(eq=False)
class _Entry:
    """A cached sequence, and its tokens, of which the first `num_prompt` were the prompt. A text that continues the
    prompt may lack the answer that follows, such as its reasoning. `packed` has the tokens as bytes, for the search.
    """

    sequence: ReusableSequence
    tokens: tuple[int, ...]
    num_prompt: int
    beside_another: bool
    num_bytes: int
    packed: bytes


def may_serve(num_prompt: int, num_tokens: int, num_common: int, num_reusable: int) -> bool:
    """Whether a prompt that shares `num_common` tokens with a sequence of `num_tokens`, and can reuse some, may take
    the sequence.

    Yes if the prompt continues the sequence's prompt, or if it reuses at least as many tokens as it discards. Otherwise
    two conversations that share only their beginning would take the sequence from each other each turn.
    """
    return num_common >= num_prompt - NUM_ANSWER_CUE_TOKENS or num_reusable >= num_tokens - num_reusable


class PrefixStore(Protocol):
    """Where sequences go when they leave a prefix cache, and from where they are brought back."""

    def evict(self, sequence: CachedSequence, tokens: tuple[int, ...], num_prompt: int) -> None:
        """Take a copy of a sequence that is about to be closed, on the model's thread. Must not raise."""

    async def bring_back(self, prompt: tuple[int, ...], *, beside_another: bool) -> None:
        """Put the sequence that has most of a prompt into the prefix cache, if no better one is there; see
        `PrefixCache.take_longest_match`. Cancellation: waits for the running job.
        """

    async def run(self) -> None:
        """Store what is evicted, until cancelled."""

    async def flush(self) -> None:
        """Store all that was evicted, at the end."""


class PrefixCache:
    """The cached sequences of one model that no session uses. All methods run on the model's thread.

    Attributes:
        store: gets the sequences that leave for want of room, or at the end; None to drop them.
    """

    def __init__(self, model: Model, max_bytes: int) -> None:
        """Make an empty cache. The oldest entries are closed when it exceeds `max_bytes`."""
        self.store: PrefixStore | None = None
        self._model = model
        self._max_bytes = max_bytes
        self._entries: list[_Entry] = []  # oldest first

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Memory of all sequences in the cache."""
        return sum(entry.num_bytes for entry in self._entries)

    def take_longest_match(self, prompt: tuple[int, ...], *, beside_another: bool) -> CacheHit:
        """Take the sequence with most reusable tokens of a prompt, the newest of several, out of the cache; or open a
        new one. The prompt's last token is never reused, since its logits are wanted. Only sequences that were opened
        with the same `beside_another` match: a trained drafter needs the features of what is read, and texts without
        a drafter record none.

        Raises: RewindError: the sequence does not hold what it should; it is closed then.
        """
        num_read = len(prompt) - 1
        packed = pack(prompt[:num_read])
        best, num_cached = None, 0
        for entry in self._entries:
            if entry.beside_another == beside_another:
                num_common = common_length(entry.packed, packed)
                num_reusable = entry.sequence.reusable_length(num_common, num_read)
                serves = may_serve(entry.num_prompt, len(entry.tokens), num_common, num_reusable)
                if num_reusable > 0 and num_reusable >= num_cached and serves:
                    best, num_cached = entry, num_reusable
        if best is None:
            return CacheHit(self._model.open_sequence(beside_another=beside_another), 0)
        self._entries.remove(best)
        try:
            best.sequence.reuse(num_cached)
        except RewindError:
            best.sequence.close()
            raise
        return CacheHit(best.sequence, num_cached)

    def find_longest_match(self, text: tuple[int, ...]) -> PrefixMatch | None:
        """As `take_longest_match`, for a text, but the sequence stays in the cache; None if no token is reusable."""
        packed = pack(text)
        best: PrefixMatch | None = None
        for entry in self._entries:
            num_reusable = entry.sequence.reusable_length(common_length(entry.packed, packed), len(text))
            if num_reusable > 0 and (best is None or num_reusable >= best.num_reusable):
                best = PrefixMatch(entry.sequence, entry.tokens, num_reusable)
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
        """Put a sequence that is not in use any more into the cache, or close it if it is of no use.

        Args:
            cached_tokens: the tokens that the sequence holds.
            committed: the session's text. Cached tokens beyond it are dropped, if the sequence can drop them.
            beside_another: as the sequence was opened.
            num_prompt: how many tokens of the text were the session's prompt; None for all.

        Raises: RewindError: the sequence does not hold what it should; it is closed then.
        """
        if (reusable := sequence.reusable) is None:
            sequence.close()
            return
        try:
            # A session of a trained drafter may have ended before the drafter has read what was committed last.
            cached_tokens = reusable.settle(cached_tokens[: sequence.rewind(len(cached_tokens))], committed)
            sequence.check(len(cached_tokens))
            num_common = common_length(pack(cached_tokens), pack(committed))
            if num_common < len(cached_tokens) and reusable.reusable_length(num_common, num_common) == num_common:
                reusable.reuse(num_common)
                cached_tokens = cached_tokens[:num_common]
        except RewindError:
            sequence.close()
            raise
        entry = _Entry(
            reusable,
            cached_tokens,
            len(cached_tokens) if num_prompt is None else num_prompt,
            beside_another,
            reusable.num_bytes,
            pack(cached_tokens),
        )
        if entry.num_bytes > self._max_bytes or reusable.reusable_length(len(cached_tokens), len(cached_tokens)) == 0:
            sequence.close()
            return
        self._evict_prefixes_of(entry)
        self._entries.append(entry)
        while self.num_bytes > self._max_bytes or len(self._entries) > MAX_SEQUENCES:
            self._evict_oldest()

    def shrink(self, max_bytes: float) -> None:
        """Evict the oldest sequences until all together take at most `max_bytes`."""
        while self._entries and self.num_bytes > max_bytes:
            self._evict_oldest()

    def close(self) -> None:
        """Close all sequences."""
        while self._entries:
            self._evict_oldest()

    def _evict_oldest(self) -> None:
        entry = self._entries.pop(0)
        if self.store is not None:
            self.store.evict(entry.sequence, entry.tokens, entry.num_prompt)
        entry.sequence.close()

    def _evict_prefixes_of(self, newer: _Entry) -> None:
        """Close sequences that are a prefix of a newer one, if the newer one can rewind to that prefix."""
        for entry in list(self._entries):
            num_common = common_length(entry.packed, newer.packed)
            if (
                entry.beside_another == newer.beside_another
                and num_common == len(entry.tokens)
                and newer.sequence.reusable_length(num_common, num_common) == num_common
            ):
                self._entries.remove(entry)
                entry.sequence.close()


# --- comparing texts ------------------------------------------------------------------------------

_ID_TYPE = "q"
_ID_BYTES = array(_ID_TYPE).itemsize


def pack(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes of a fixed width, for `common_length`."""
    return array(_ID_TYPE, tokens).tobytes()


def common_length(one: bytes, other: bytes) -> int:
    """How many tokens two packed texts have in common at their beginnings.

    A binary search: comparing slices of bytes takes microseconds, and a loop over tokens holds the GIL for
    milliseconds.
    """
    low, high = 0, min(len(one), len(other)) // _ID_BYTES
    middle = high  # most texts that share anything share all of the shorter one
    while low < high:
        compared = slice(low * _ID_BYTES, middle * _ID_BYTES)
        if one[compared] == other[compared]:
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return low
