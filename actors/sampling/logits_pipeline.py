"""The logits pipeline: from a model's logits to those that tokens are chosen from, in mlx-lm's order and by its parts.

First the processors: `logit_bias`, the penalties, the user's logits processors. Then, at a temperature above 0, the
filters over log-probabilities: top-p, min-p, XTC and top-k. The temperature itself belongs to `protocol.acceptance`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import cast

import attrs
import mlx.core as mx
from mlx_lm.sample_utils import apply_top_k, apply_top_p, make_logits_processors

from actors.sampling.user_code import UserProcessors, UserSampler
from protocol.errors import NotANumberError, ProcessorError
from protocol.logits_processors import LogitsProcessor
from protocol.messages import Open
from protocol.randomness import Purpose, key_for
from protocol.settings import Settings


@attrs.frozen
class TokenHistory:
    """The last tokens of a text, as many as the pipeline needs, from the absolute position `begin` to the end."""

    begin: int
    tokens: tuple[int, ...]

    def before(self, position: int, look_back: int | None) -> tuple[int, ...]:
        """The last `look_back` tokens before an absolute position; all that there are if it is None."""
        history = self.tokens[: position - self.begin]
        return history if look_back is None else history[max(0, len(history) - look_back) :]

    def appended(self, token: int) -> TokenHistory:
        """The history with one more token; `NO_HISTORY` stays as it is."""
        return self if self is NO_HISTORY else TokenHistory(self.begin, (*self.tokens, token))


NO_HISTORY = TokenHistory(0, ())
_NO_TOKENS = mx.array([], dtype=mx.int32)


class LogitsPipeline:
    """The processors and filters of one session's settings, and tokens that are forced at some positions.

    A forced token has probability 1, whatever the settings. It may be set at any time, for positions that no running
    pass has logits for: a draft that does not know of it is not accepted.
    """

    def __init__(self, opened: Open) -> None:
        """Raises: ProcessorError: a processor failed to save its state; see `UserProcessors`."""
        settings = opened.settings
        self._seed = opened.seed
        self._settings = settings
        self.rule = settings.rule  # by which the tokens are judged that are drafted from these logits
        self._bias = make_logits_processors(logit_bias=dict(settings.logit_bias))
        self._penalties = _penalties(settings)
        processors = settings.logits_processors
        self._own = UserProcessors(processors, len(opened.prompt)) if processors else None
        self._filters = _filters(settings) if settings.temperature > 0 else []
        self._sampler = None if settings.sampler is None else UserSampler(settings.sampler)
        # How many tokens before a position the processors need; None for all.
        sizes = [size for _, size in self._penalties]
        self._look_back = None if self._own is not None or None in sizes else max(filter(None, sizes), default=0)
        self.needs_text = self._look_back != 0  # whether any processor depends on the tokens before the logits
        # Whether there is a user's processor or sampler, called with evaluated arrays and evaluated at once.
        self.runs_user_code = self._own is not None or self._sampler is not None
        # Processors depend on the text, and XTC draws from its seed.
        self._kind: Hashable | None = None
        self._forced: tuple[int, tuple[int, ...]] = (0, ())  # the first position, and the tokens from there on
        if not (self.runs_user_code or self.needs_text or self._bias or settings.xtc_probability > 0):
            shapes = settings.top_p, settings.min_p, settings.min_tokens_to_keep, settings.top_k
            self._kind = (self.rule, settings.temperature, *(shapes if self._filters else ()))

    @property
    def kind(self) -> Hashable | None:
        """Texts of the same kind are judged together; None for a text that is judged by itself."""
        return None if self._forced[1] else self._kind

    @property
    def forced_until(self) -> int:
        """The position after the last one with a forced token; 0 if there was none."""
        return self._forced[0] + len(self._forced[1])

    def force(self, start: int, tokens: Sequence[int]) -> None:
        """Force tokens from a position on, in place of those that were forced before; none end that."""
        self._forced = start, tuple(tokens)

    def history(self, committed: Sequence[int], beyond: Sequence[int] = (), *, num_rows: int = 1) -> TokenHistory:
        """The tokens of a text and a draft that processors need for the logits after the last `num_rows` of them."""
        if not self.needs_text:
            return NO_HISTORY
        total = len(committed) + len(beyond)
        begin = 0 if self._look_back is None else max(0, total - num_rows - self._look_back)
        return TokenHistory(begin, tuple(committed[begin:]) + tuple(beyond[max(0, begin - len(committed)) :]))

    def process(self, logits: mx.array, history: TokenHistory, start: int, last: mx.array | None = None) -> mx.array:
        """Apply the processors to (n, V) logits for positions start … start + n - 1; `history` ends just before the
        last of them, or before one more token `last`, (1,), which may be lazy. Not that if `runs_user_code`.

        Returns: (n, V), lazy. With a user's processor, `logits` and the result are evaluated.
        Raises: ProcessorError: a user's processor failed, or its result cannot be evaluated.
        """
        for processor in self._bias:  # does not depend on the text, and takes all rows at once
            logits = processor(_NO_TOKENS, logits)
        if not self.needs_text:
            return self._with_forced(logits, start) if self._forced[1] else logits
        histories = [history.before(start + i, self._look_back) for i in range(logits.shape[0])]
        texts = [mx.array(tokens) for tokens in histories]
        if last is not None:
            texts = [mx.concatenate([text, last.astype(text.dtype)]) for text in texts]
        # Slices, since penalties write into the array that they are given, and the logit check reads the model's own.
        rows = [self._penalised(logits[i : i + 1], text) for i, text in enumerate(texts)]
        if self._own is not None:
            rows = self._own(rows, histories)
        return self._with_forced(rows[0] if len(rows) == 1 else mx.concatenate(rows), start)

    def filter(self, logits: mx.array, start: int) -> mx.array:
        """Filter (n, V) processed logits for positions from `start` on: log-probabilities, -inf if removed; lazy."""
        if not self._filters:
            return logits
        logits = logits.astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        for apply in self._filters:
            logprobs = apply(logprobs, partial(self._xtc_uniforms, start, logits.shape[0]))
        return logprobs

    def sample(self, logits: mx.array, start: int) -> mx.array | None:
        """The ids (n,) that the user's sampler, if any, chooses from (n, V) shaped logits. Raises: ProcessorError."""
        return None if self._sampler is None else self._sampler(logits, start)

    def shape(self, logits: mx.array, history: TokenHistory, start: int) -> mx.array:
        """`process`, then `filter`."""
        return self.filter(self.process(logits, history, start), start)

    def _with_forced(self, logits: mx.array, start: int) -> mx.array:
        """Logits (n, V) for positions from `start` on, in which a forced token is the only one of its row."""
        begin, tokens = self._forced
        for position, token in enumerate(tokens, begin):
            if 0 <= (row := position - start) < logits.shape[0] and token < logits.shape[1]:
                is_token = mx.arange(logits.shape[1]) == token
                forced = mx.where(is_token, 0.0, -mx.inf).astype(logits.dtype)
                logits = mx.where(mx.arange(logits.shape[0])[:, None] == row, forced, logits)
        return logits

    def _xtc_uniforms(self, start: int, num_rows: int) -> mx.array:
        """(num_rows, 1) draws in [0, 1), one for each position."""
        keys = [key_for(self._seed, Purpose.XTC, start + i) for i in range(num_rows)]
        return mx.stack([mx.random.uniform(key=key) for key in keys])[:, None]

    def _penalised(self, logits: mx.array, tokens: mx.array) -> mx.array:
        for processor, size in self._penalties:
            logits = processor(tokens if size is None else tokens[-size:], logits)
        return logits


def by_kind(kinds: Sequence[Hashable | None]) -> dict[Hashable, list[int]]:
    """The indices of texts of each kind. A text of no kind, which is handled by itself, is under its index."""
    groups: dict[Hashable, list[int]] = {}
    for index, kind in enumerate(kinds):
        groups.setdefault(kind or index, []).append(index)
    return groups


def pad(logits: mx.array, width: int) -> mx.array:
    """Logits (n, W) at the target's width: cut, or filled up with -inf for tokens that the model lacks. Lazy."""
    missing = width - logits.shape[1]
    return mx.pad(logits, [(0, 0), (0, missing)], constant_values=-mx.inf) if missing > 0 else logits[:, :width]


# --- checks ---------------------------------------------------------------------------------------


@attrs.define
class LogitCheck:
    """Whether a token can be chosen from rows of logits, by the largest of each row.

    MLX's maximum of a row is NaN if any element is. So it is finite if and only if no logit is NaN or +inf and at least
    one is finite.
    """

    arrays: list[mx.array]  # (n,) the maxima of the model's own rows, and of the processed ones if these differ; lazy
    _values: list[tuple[float, ...]] | None = attrs.field(default=None, init=False)

    @classmethod
    def of(cls, logits: mx.array, processed: mx.array) -> LogitCheck:
        """The check of the model's rows (n, V), and of the processed rows, which may be the same object."""
        own = mx.max(logits, axis=-1)
        return cls([own] if processed is logits else [own, mx.max(processed, axis=-1)])

    def are_sound(self) -> list[bool]:
        """Whether a token can be chosen from each row."""
        return [all(map(math.isfinite, row)) for row in self._read()]

    def num_sound(self) -> int:
        """How many rows come before the first one from which no token can be chosen."""
        sound = self.are_sound()
        return sound.index(False) if False in sound else len(sound)

    def _read(self) -> list[tuple[float, ...]]:
        if self._values is None:
            self._values = list(zip(*[cast(list[float], each.tolist()) for each in self.arrays], strict=True))
        return self._values

    def check(self, row: int, position: int, role: str) -> None:
        """Check that a token can be chosen from a row, for the token at an absolute position.

        Raises: NotANumberError: the model's own logits are no numbers. ProcessorError: only the processed ones are.
        """
        own, *processed = self._read()[row]
        if not math.isfinite(own):
            raise NotANumberError(
                f"the {role} model gave {_named(own)} for the token at position {position}; usually numbers have "
                "overflowed in float16, or weights are damaged: load the model in bfloat16 or float32, or download it "
                "again"
            )
        if processed and not math.isfinite(processed[0]):
            raise ProcessorError(
                f"logits processors, penalties and logit_bias leave {_named(processed[0])} for the token at position "
                f"{position}; forbid tokens with -inf, and leave at least one logit finite"
            )


def _named(maximum: float) -> str:
    if math.isnan(maximum):
        return "logits that are not numbers (NaN)"
    return "logits that are infinite (+inf)" if maximum > 0 else "no logit that is finite (all are -inf)"


# --- penalties and filters by settings ------------------------------------------------------------


_MAX_CONTEXT_SIZE = 2**31 - 1  # the largest bound of a slice that MLX accepts
_MIN_TOP_P = 1e-30  # a smaller one may become 0 in float32, and then mlx-lm's filter drops every token


def _penalties(settings: Settings) -> list[tuple[LogitsProcessor, int | None]]:
    """The penalties that are on, each with the number of tokens that it looks back; None for all."""
    penalties = []
    for name in ("repetition", "presence", "frequency"):
        size: int | None = getattr(settings, f"{name}_context_size")
        # mlx-lm's penalty cuts the text, too, and does not accept None.
        max_size = _MAX_CONTEXT_SIZE if size is None else min(size, _MAX_CONTEXT_SIZE)
        made = make_logits_processors(
            **{f"{name}_penalty": getattr(settings, f"{name}_penalty"), f"{name}_context_size": max_size}
        )
        penalties += [(processor, None if size is None else max_size) for processor in made]
    return penalties


Filter = Callable[[mx.array, Callable[[], mx.array]], mx.array]
"""From (n, V) log-probabilities, and a function that draws (n, 1) uniform numbers, to some with -inf where removed."""


def _filters(settings: Settings) -> list[Filter]:
    """The filters that are on, in mlx-lm's order (`mlx_lm.sample_utils.make_sampler`)."""
    filters: list[Filter] = []
    if 0 < settings.top_p < 1:
        # As an array: a number would be part of the name of a compiled kernel, and compiled for each value.
        top_p = mx.array(max(settings.top_p, _MIN_TOP_P))
        filters.append(lambda logprobs, _: apply_top_p(logprobs, top_p))  # type: ignore[arg-type]
    if settings.min_p > 0:
        filters.append(lambda logprobs, _: _min_p(logprobs, settings))
    if settings.xtc_probability > 0:
        filters.append(lambda logprobs, draw_uniforms: _xtc(logprobs, settings, draw_uniforms()))
    if settings.top_k > 0:
        top_k = settings.top_k
        filters.append(lambda logprobs, _: apply_top_k(logprobs, top_k) if top_k < logprobs.shape[-1] else logprobs)
    return filters


# mlx-lm's `apply_min_p` and `apply_xtc` are compiled for each value of their thresholds, which takes a second on a
# CPU, and happens under a lock on Metal. These two are not compiled.


def _min_p(logprobs: mx.array, settings: Settings) -> mx.array:
    """Min-p (https://arxiv.org/abs/2407.01082), as in `mlx_lm.sample_utils.apply_min_p`."""
    num_kept = min(settings.min_tokens_to_keep, logprobs.shape[-1])
    is_removed = logprobs < mx.max(logprobs, axis=-1, keepdims=True) + math.log(settings.min_p)
    if num_kept > 1:
        best = mx.argpartition(logprobs, kth=-num_kept, axis=-1)[..., -num_kept:]
        is_removed = mx.put_along_axis(is_removed, best, mx.array(False), axis=-1)
    return mx.where(is_removed, -mx.inf, logprobs)


def _xtc(logprobs: mx.array, settings: Settings, uniforms: mx.array) -> mx.array:
    """XTC, as in `mlx_lm.sample_utils.apply_xtc`, but decided for each row by `uniforms` (n, 1), not once."""
    probs = mx.softmax(logprobs, axis=-1)
    least_above = mx.where(probs > settings.xtc_threshold, probs, mx.inf).min(axis=-1, keepdims=True)
    is_excluded = probs > least_above
    if special_tokens := [token for token in settings.xtc_special_tokens if token < logprobs.shape[-1]]:
        is_excluded[..., special_tokens] = False
    return mx.where(is_excluded & (uniforms <= settings.xtc_probability), -mx.inf, logprobs)
