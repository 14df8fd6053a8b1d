"""The prefix cache: what was read of texts, for other texts with the same beginning.

A text takes a copy of what it has in common with another one, which may still be read or generated. Only a text that
continues another one takes that one's sequence itself. So the sequences are the branches of a tree: in use, each has
its own copy of the stem; in the cache, they have its keys and values in common.

`CONTRIBUTING.md` says why mlx-lm's `LRUPromptCache` is not used.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Protocol

import attrs

from actors.model import CachedSequence, Model, ReusableSequence
from protocol.errors import RewindError
from protocol.prefill_chunks import FIXED_CHUNK_TOKENS

MAX_SEQUENCES = 64  # a search compares a prompt with each
MAX_EVICTED = 16  # texts of evicted sequences that are remembered
MIN_SHARED = 256  # tokens of the shortest beginning that texts have in memory only once


@attrs.frozen
class CacheHit:
    """A sequence for a session, which holds the first `num_cached` tokens of its prompt; 0 for a new sequence."""

    sequence: CachedSequence
    num_cached: int
    # Tokens that the prompt has in common with the most similar text that it may reuse; >= `num_cached`, since some
    # caches can go back only to certain lengths.
    num_common: int = 0
    num_mismatched: int = 0  # further tokens in common with a text that the settings do not let it reuse
    num_evicted: int = 0  # further ones in common with a text whose sequence had to leave for want of room


@attrs.frozen(eq=False)
class PrefixMatch:
    """A sequence that stays in the cache, its tokens, and how many of them a text can reuse."""

    sequence: ReusableSequence
    tokens: tuple[int, ...]
    num_reusable: int


@attrs.define(eq=False)
class CachedPrefix:
    """A sequence that other texts can copy, or take, if it is in the cache."""

    sequence: ReusableSequence
    packed: bytes  # the tokens that it holds, or the first ones of them
    alongside_model: bool  # as it was opened; see `PrefixCache.open`
    pass_tokens: int  # see `ReusableSequence.reusable_length`; of its own text
    # Whether it holds just what the present prompt needs, read in the same passes.
    has_read_same: bool = attrs.field(default=False, kw_only=True)


@attrs.define(eq=False)
class _Entry(CachedPrefix):
    """A sequence in the cache, with its tokens: `num_prompt` of its prompt, and the answer that followed."""

    tokens: tuple[int, ...]
    num_prompt: int
    memory: Mapping[int, int]  # see `ReusableSequence.memory`


class PrefixStore(Protocol):
    """Where sequences go when they leave a prefix cache, and from where they are brought back."""

    def evict(self, sequence: ReusableSequence, tokens: tuple[int, ...], num_prompt: int) -> None:
        """Take the state of a sequence that is about to be closed, on the model's thread. Must not raise."""

    def shrink(self, max_bytes: float) -> None:
        """Drop what is not stored yet, oldest first, until it takes `max_bytes` beside what is being stored."""

    async def bring_back(self, prompt: tuple[int, ...], *, alongside_model: bool) -> None:
        """Put what is stored of a prompt into the prefix cache, if that is more; see `PrefixCache.open`."""

    async def run(self) -> None:
        """Store what is evicted, until cancelled."""

    async def flush(self) -> None:
        """Store all that was evicted, at the end."""


class PrefixCache:
    """The cached sequences of one model that no session uses. All methods run on the model's thread."""

    def __init__(self, model: Model, max_bytes: int) -> None:
        """Make an empty cache. The oldest entries are closed when it exceeds `max_bytes`."""
        self.store: PrefixStore | None = None  # gets the sequences that leave for want of room, or at the end
        self._model = model
        self._max_bytes = max_bytes
        self._entries: list[_Entry] = []  # least recently used first
        # The texts of those that left for want of room: only to say what a larger cache would have saved.
        self._evicted = deque[tuple[bytes, bool]](maxlen=MAX_EVICTED)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Memory of all sequences in the cache. What several have in common counts once."""
        return sum({id: size for entry in self._entries for id, size in entry.memory.items()}.values())

    def open(
        self,
        prompt: tuple[int, ...],
        *,
        alongside_model: bool,
        pass_tokens: int = FIXED_CHUNK_TOKENS,
        in_use: Sequence[CachedPrefix] = (),
        may_reuse: bool = True,
    ) -> CacheHit:
        """Open a sequence that holds as much of a prompt as some text does, the newest of several: that of a text which
        the prompt continues, else a copy; or a new one. The prompt's last token is never reused: its logits are wanted.

        Args:
            alongside_model: as it is opened. A trained drafter needs features, and texts without a drafter record none.
            pass_tokens: see `ReusableSequence.reusable_length`.
            in_use: sequences outside the cache.
            may_reuse: whether the text may use any; if not, it gets a new one.

        Raises: RewindError: the sequence does not hold what it should; as after any error, one in the cache is closed.
        """
        num_read = len(prompt) - 1
        packed = pack(prompt[:num_read])
        best: CachedPrefix | None = None
        num_cached = most_common = most_mismatched = 0
        for source in (*self._entries, *in_use):
            num_common = common_length(source.packed, packed)
            if not may_reuse or source.alongside_model != alongside_model:
                most_mismatched = max(most_mismatched, num_common)
                continue
            reusable_length = partial(source.sequence.reusable_length, num_common, num_read)
            num_reusable = num_read if source.has_read_same else reusable_length(pass_tokens)
            if num_reusable == 0 and pass_tokens != source.pass_tokens and reusable_length(source.pass_tokens) > 0:
                most_mismatched = max(most_mismatched, num_common)
                continue
            most_common = max(most_common, num_common)
            if num_reusable > 0 and num_reusable >= num_cached:
                best, num_cached = source, num_reusable
        evicted = (
            common_length(text, packed) for text, was_alongside in self._evicted if was_alongside == alongside_model
        )
        counted = max(most_common, most_mismatched)
        missed = max(0, most_mismatched - most_common), max(0, max(evicted, default=0) - counted) if may_reuse else 0
        if best is None:
            return CacheHit(self._model.open_sequence(alongside_model=alongside_model), 0, most_common, *missed)
        if not isinstance(best, _Entry):
            return CacheHit(best.sequence.copy(num_cached), num_cached, most_common, *missed)
        self._entries.remove(best)
        with ExitStack() as stack:
            stack.callback(best.sequence.close)  # whatever is raised
            if common_length(best.packed, packed) >= best.num_prompt or not best.sequence.can_copy:
                sequence = best.sequence
                sequence.reuse(num_cached)
            else:
                sequence = best.sequence.copy(num_cached)
                self._entries.append(best)  # it was used last
            stack.pop_all()
        return CacheHit(sequence, num_cached, most_common, *missed)

    def find_longest_match(self, text: tuple[int, ...]) -> PrefixMatch | None:
        """As `open`, for a text, but the sequence stays in the cache; None if no token is reusable."""
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
        alongside_model: bool,
        num_prompt: int | None = None,
        pass_tokens: int = FIXED_CHUNK_TOKENS,
    ) -> None:
        """Put a sequence that is not in use any more into the cache, or close it if it is of no use.

        Args:
            cached_tokens: that it holds. Those beyond the session's text, `committed`, are dropped, if they can be.
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
            num_reusable = reusable.reusable_length(num_common, num_common, pass_tokens)
            if num_reusable == num_common < len(cached_tokens):
                reusable.reuse(num_common)
                cached_tokens = cached_tokens[:num_common]
        except RewindError:
            sequence.close()
            raise
        num_tokens, packed, memory = len(cached_tokens), pack(cached_tokens), reusable.memory
        num_prompt = num_tokens if num_prompt is None else num_prompt
        entry = _Entry(reusable, packed, alongside_model, pass_tokens, cached_tokens, num_prompt, memory)
        if reusable.reusable_length(num_tokens, num_tokens, pass_tokens) == 0:
            sequence.close()
            return
        if sum(memory.values()) > self._max_bytes:
            self._evicted.append((packed, alongside_model))
            sequence.close()
            return
        if (
            longer := next((each for each in self._entries if each.sequence.can_copy and _holds(each, entry)), None)
        ) is not None:
            sequence.close()
            self._entries.remove(longer)
            self._entries.append(longer)  # it was used last
            return
        for shorter in [each for each in self._entries if _holds(entry, each)]:
            self._entries.remove(shorter)
            shorter.sequence.close()
        self._entries.append(entry)
        self._share_beginning(entry)
        self.shrink(self._max_bytes)

    def _share_beginning(self, entry: _Entry) -> None:
        """Have the newest sequence keep what it has in common with another one only once."""
        alike = [each for each in self._entries[:-1] if each.alongside_model == entry.alongside_model]
        lengths = [common_length(each.packed, entry.packed) for each in alike]
        if max(lengths, default=0) >= MIN_SHARED:
            other = alike[lengths.index(max(lengths))]
            entry.sequence.share(other.sequence, max(lengths))
            entry.memory, other.memory = entry.sequence.memory, other.sequence.memory

    def shrink(self, max_bytes: float) -> None:
        """Evict the oldest sequences until all, with those that are being stored, take at most `max_bytes`."""
        while self._entries and (self.num_bytes > max_bytes or len(self._entries) > MAX_SEQUENCES):
            self._evict_oldest()
        if self.store is not None:
            self.store.shrink(max_bytes - self.num_bytes)

    def close(self) -> None:
        """Close all sequences."""
        while self._entries:
            self._evict_oldest()

    def _evict_oldest(self) -> None:
        entry = self._entries.pop(0)
        if self.store is not None:
            self.store.evict(entry.sequence, entry.tokens, entry.num_prompt)
        self._evicted.append((entry.packed, entry.alongside_model))
        entry.sequence.close()


def _holds(longer: _Entry, shorter: _Entry) -> bool:
    """Whether a sequence can go back to all that another one holds."""
    num_tokens = len(shorter.tokens)
    return (
        longer.alongside_model == shorter.alongside_model
        and longer.packed.startswith(shorter.packed)
        and longer.sequence.reusable_length(num_tokens, num_tokens) == num_tokens
    )


# --- comparing texts ------------------------------------------------------------------------------

_ID_TYPE = "q"
_ID_BYTES = array(_ID_TYPE).itemsize


def pack(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes of a fixed width, for `common_length`."""
    return array(_ID_TYPE, tokens).tobytes()


def packed_beginning(packed: bytes, num_tokens: int) -> bytes:
    """The first tokens of a packed text."""
    return packed[: num_tokens * _ID_BYTES]


def common_length(one: bytes, other: bytes) -> int:
    """How many tokens two packed texts begin with alike; by slices, as a loop would hold the GIL for long."""
    low, high, width = 0, min(len(one), len(other)) // _ID_BYTES, 1024
    while low < high:
        end = min(low + width, high)
        compared = slice(low * _ID_BYTES, end * _ID_BYTES)
        if one[compared] == other[compared]:
            low, width = end, 2 * width
        else:
            high, width = end - 1, (end - low) // 2
    return low
