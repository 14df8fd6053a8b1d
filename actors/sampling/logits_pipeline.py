"""From a model's logits to those by which tokens are chosen: logits processors first, then filters.

The building blocks are mlx-lm's, put together in its order: `logit_bias`, the penalties, the user's processors; then,
at a temperature, top-p, min-p, XTC and top-k over log-probabilities. The temperature itself belongs to the acceptance
rules. Both models' logits are shaped alike, each on its own thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import attrs
import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, apply_xtc, make_logits_processors

from actors.sampling.user_code import UserProcessors, UserSampler
from protocol.logits_processors import LogitsProcessor
from protocol.messages import Open
from protocol.randomness import Purpose, key_for
from protocol.settings import Settings


@attrs.frozen
class TokenHistory:
    """The end of a text.

    Attributes:
        begin: absolute position of the first of the tokens.
        tokens: from there to the end.
    """

    begin: int
    tokens: tuple[int, ...]

    def before(self, position: int, look_back: int | None) -> tuple[int, ...]:
        """The tokens before an absolute position; the last `look_back` of them, unless that is None."""
        history = self.tokens[: position - self.begin]
        return history if look_back is None else history[max(0, len(history) - look_back) :]

    def appended(self, token: int) -> TokenHistory:
        """With one token more; nothing stays nothing."""
        return self if self is NO_HISTORY else TokenHistory(self.begin, (*self.tokens, token))


NO_HISTORY = TokenHistory(0, ())
_NO_TOKENS = mx.array([], dtype=mx.int32)


class LogitsPipeline:
    """What one session's settings make of logits."""

    def __init__(self, opened: Open) -> None:
        """For one session.

        Args:
            opened: the message that begins it.

        Raises: ProcessorError: a processor cannot say its state; see `UserProcessors`.
        """
        settings = opened.settings
        self._seed = opened.seed
        self._settings = settings
        self._bias = make_logits_processors(logit_bias=dict(settings.logit_bias))
        self._penalties = _penalties(settings)
        self._own = UserProcessors(settings.logits_processors, opened.num_prompt)
        self._filters = _filters(settings) if settings.temperature > 0 else []
        self._sampler = None if settings.sampler is None else UserSampler(settings.sampler)
        # How many tokens before a position are to be known: all (None), or so many.
        sizes = [size for _, size in self._penalties]
        self._look_back = None if len(self._own) > 0 or None in sizes else max(filter(None, sizes), default=0)

    @property
    def runs_user_code(self) -> bool:
        """Whether a user's code has a say, which is called with what is computed and evaluated at once."""
        return len(self._own) > 0 or self._sampler is not None

    @property
    def needs_text(self) -> bool:
        """Whether logits are shaped by the tokens before them at all."""
        return self._look_back != 0

    def history(self, committed: Sequence[int], beyond: Sequence[int] = (), *, num_rows: int = 1) -> TokenHistory:
        """So much of a text as is needed to shape logits after it.

        Args:
            committed: the text, prompt included.
            beyond: drafted tokens after it.
            num_rows: for how many of the text's last tokens the logits after them are to be shaped.
        """
        if not self.needs_text:
            return NO_HISTORY
        total = len(committed) + len(beyond)
        begin = 0 if self._look_back is None else max(0, total - num_rows - self._look_back)
        return TokenHistory(begin, tuple(committed[begin:]) + tuple(beyond[max(0, begin - len(committed)) :]))

    def process(self, logits: mx.array, history: TokenHistory, start: int) -> mx.array:
        """Put logits through the processors.

        Args:
            logits: (n, V) for positions start … start + n - 1.
            history: of the text up to position start + n - 1, excluded; see `history`.
            start: absolute position of the first row.

        Returns: (n, V), lazy; evaluated, with `logits`, where `runs_user_code`.
        Raises: ProcessorError: a user's processor failed, or what it returned cannot be evaluated.
        """
        logits = self._biased(logits)
        if not self.needs_text:
            return logits
        histories = [history.before(start + i, self._look_back) for i in range(logits.shape[0])]
        rows = [self._penalised(logits[i : i + 1], mx.array(history)) for i, history in enumerate(histories)]
        if len(self._own) > 0:
            rows = self._own(rows, histories)
        return rows[0] if len(rows) == 1 else mx.concatenate(rows)

    def process_lazily(self, logits: mx.array, history: TokenHistory, position: int, token: mx.array) -> mx.array:
        """The same for one row, after a token that may not be computed yet. Not where `runs_user_code`.

        Args:
            logits: (1, V) for the position after `position`.
            history: of the text up to `position`, excluded.
            position: absolute, of the token.
            token: (1,), lazy.
        """
        logits = self._biased(logits)
        if not self.needs_text:
            return logits
        before = mx.array(history.before(position, self._look_back))
        # A slice, since penalties write into what they are given, and the model's own row is looked at as well.
        return self._penalised(logits[:1], mx.concatenate([before, token.astype(before.dtype)]))

    def filter(self, logits: mx.array, start: int) -> mx.array:
        """Leave out what the filters leave out.

        Args:
            logits: (n, V) processed, for positions start … start + n - 1.
            start: absolute position of the first row.

        Returns: (n, V) log-probabilities, -inf where a token is left out; the logits as they are where no filter
            is on. Lazy.
        """
        if not self._filters:
            return logits
        logits = logits.astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        for apply in self._filters:
            logprobs = apply(logprobs, partial(self._coins, start, logits.shape[0]))
        return logprobs

    def sample(self, logits: mx.array) -> mx.array | None:
        """What the user's sampler chooses by each row of logits (n, V): (n,) ids; None where there is no sampler.

        Raises: ProcessorError: the sampler failed.
        """
        return None if self._sampler is None else self._sampler(logits)

    def shape(self, logits: mx.array, history: TokenHistory, start: int) -> mx.array:
        """`process`, then `filter`."""
        return self.filter(self.process(logits, history, start), start)

    def _biased(self, logits: mx.array) -> mx.array:
        for processor in self._bias:  # knows no text, and takes all rows at once
            logits = processor(_NO_TOKENS, logits)
        return logits

    def _coins(self, start: int, num_rows: int) -> mx.array:
        """(n, 1) uniform numbers for XTC, one a position."""
        keys = [key_for(self._seed, Purpose.XTC, start + i) for i in range(num_rows)]
        return mx.stack([mx.random.uniform(key=key) for key in keys])[:, None]

    def _penalised(self, logits: mx.array, tokens: mx.array) -> mx.array:
        for processor, size in self._penalties:
            logits = processor(tokens if size is None else tokens[-size:], logits)
        return logits


def pad(logits: mx.array, width: int) -> mx.array:
    """Logits (n, W) as wide as the target's: a narrower model gives tokens that it does not know no chance. Lazy."""
    missing = width - logits.shape[1]
    return mx.pad(logits, [(0, 0), (0, missing)], constant_values=-mx.inf) if missing > 0 else logits[:, :width]


# --- the settings' own ----------------------------------------------------------------------------


# MLX's slices know no larger numbers.
_MOST_TOKENS = 2**31 - 1

# Less than this times the whole is 0 in float32, and mlx-lm's filter then drops every token.
_LEAST_TOP_P = 1e-30


def _penalties(settings: Settings) -> list[tuple[LogitsProcessor, int | None]]:
    """Each penalty that is on, and how many tokens it looks back; None for all."""
    found = []
    for name in ("repetition", "presence", "frequency"):
        size: int | None = getattr(settings, f"{name}_context_size")
        # mlx-lm cuts the text as well, and takes no None.
        most = _MOST_TOKENS if size is None else min(size, _MOST_TOKENS)
        made = make_logits_processors(
            **{f"{name}_penalty": getattr(settings, f"{name}_penalty"), f"{name}_context_size": most}
        )
        found += [(processor, None if size is None else most) for processor in made]
    return found


Filter = Callable[[mx.array, Callable[[], mx.array]], mx.array]
"""From (n, V) log-probabilities, and what makes (n, 1) uniform numbers for them, to (n, V) log-probabilities."""


def _filters(settings: Settings) -> list[Filter]:
    """The filters that are on, in mlx-lm's order (`mlx_lm.sample_utils.make_sampler`)."""
    filters: list[Filter] = []
    if 0 < settings.top_p < 1:
        filters.append(lambda logprobs, _: apply_top_p(logprobs, max(settings.top_p, _LEAST_TOP_P)))
    if settings.min_p > 0:
        filters.append(lambda logprobs, _: _min_p(logprobs, settings))
    if settings.xtc_probability > 0:
        filters.append(lambda logprobs, coins: _xtc(logprobs, settings, coins()))
    if settings.top_k > 0:
        filters.append(lambda logprobs, _: _top_k(logprobs, settings.top_k))
    return filters


def _min_p(logprobs: mx.array, settings: Settings) -> mx.array:
    keep = min(settings.min_tokens_to_keep, logprobs.shape[-1])
    return apply_min_p(logprobs, settings.min_p, keep)


def _xtc(logprobs: mx.array, settings: Settings, coins: mx.array) -> mx.array:
    """mlx-lm tosses one coin of its own for all rows; ours says for each row whether what it leaves out is left out."""
    special = [token for token in settings.xtc_special_tokens if token < logprobs.shape[-1]]
    left_out = apply_xtc(logprobs, 1.0, settings.xtc_threshold, special)
    return mx.where(coins > settings.xtc_probability, logprobs, left_out)


def _top_k(logprobs: mx.array, top_k: int) -> mx.array:
    return apply_top_k(logprobs, top_k) if top_k < logprobs.shape[-1] else logprobs
