"""Where the text of a seed is exact, and where it depends on rounding: passes of several tokens against passes of one.

`longcat_flash` shows both kinds of rounding. Its latent attention uses another formula for one token than for several,
so logits differ more between widths than elsewhere. Its router picks experts by scores that may nearly tie.
"""

from __future__ import annotations

from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn
import pytest
from architectures import VOCAB_SIZE, build
from mlx_lm.models import longcat_flash
from mlx_lm.models.cache import make_prompt_cache

NUM_TEXTS, NUM_TOKENS, WIDTH = 32, 48, 4
TOP_K = 2
# How far rounding moves logits (of about 2) and a router's scores (which sum to 1) in these models.
LOGITS_ROUNDING, SCORES_ROUNDING = 5e-3, 1e-4


@attrs.frozen
class Read:
    """A model's outputs for some texts.

    Attributes:
        logits: (texts, tokens, V).
        scores: (texts, tokens, layers, experts) scores by which its routers pick experts.
    """

    logits: mx.array
    scores: mx.array

    @property
    def picks(self) -> mx.array:
        """(texts, tokens, layers, experts) bool: which experts each router picks."""
        return self.scores >= mx.sort(self.scores, axis=-1)[..., -TOP_K][..., None]

    @property
    def margins(self) -> mx.array:
        """(texts, tokens, layers) lead of the last picked expert over the first that is not picked."""
        ordered = mx.sort(self.scores, axis=-1)
        return ordered[..., -TOP_K] - ordered[..., -TOP_K - 1]


@pytest.fixture
def routed(monkeypatch: pytest.MonkeyPatch) -> list[mx.array]:
    """The scores of every router call, in order."""
    seen: list[mx.array] = []
    ask = longcat_flash.LongcatFlashTopkRouter.__call__

    def asked(self: Any, hidden: mx.array) -> Any:
        seen.append(mx.softmax(self.classifier(hidden), axis=-1) + self.e_score_correction_bias)
        return ask(self, hidden)

    monkeypatch.setattr(longcat_flash.LongcatFlashTopkRouter, "__call__", asked)
    return seen


def read(model: nn.Module, texts: mx.array, width: int, routed: list[mx.array]) -> Read:
    cache, logits, scores = make_prompt_cache(model), [], []
    for begin in range(0, texts.shape[1], width):
        routed.clear()
        logits.append(model(texts[:, begin : begin + width], cache=cache))
        scores.append(mx.stack(routed, axis=2))
        mx.eval(logits[-1], scores[-1])
    return Read(mx.concatenate(logits, axis=1), mx.concatenate(scores, axis=1))


def random_texts(seed: int, num_texts: int, num_tokens: int) -> mx.array:
    return mx.random.randint(0, VOCAB_SIZE, (num_texts, num_tokens), key=mx.random.key(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_widths_differ_by_rounding_alone_unless_a_router_was_to_choose_between_equals(
    seed: int, routed: list[mx.array]
) -> None:
    model = build("longcat_flash", seed=seed)
    texts = random_texts(seed, NUM_TEXTS, NUM_TOKENS)
    alone, together = read(model, texts, 1, routed), read(model, texts, WIDTH, routed)
    differ = (alone.picks != together.picks).any(axis=-1)
    assert mx.where(differ, alone.margins, 0).max().item() < SCORES_ROUNDING
    # After a different expert was picked, all that follows in the text has read other keys and values.
    is_after = mx.cumsum(differ.any(axis=-1).astype(mx.int32), axis=1) > 0
    moved = mx.abs(alone.logits - together.logits).max(axis=-1)
    assert mx.where(is_after, 0, moved).max().item() < LOGITS_ROUNDING


@pytest.mark.slow
def test_a_router_that_has_to_choose_between_equals_may_choose_otherwise_at_another_width(
    routed: list[mx.array],
) -> None:
    model = build("longcat_flash")
    router = model.model.layers[-1].mlp.router
    jumps = []
    for seed in range(60):
        text = random_texts(seed, 1, WIDTH)
        router.e_score_correction_bias = mx.zeros_like(router.e_score_correction_bias)
        scores = read(model, text, 1, routed).scores[0, -1, -1]
        last, first_left = (int(mx.argsort(scores)[-i].item()) for i in (TOP_K, TOP_K + 1))
        router.e_score_correction_bias[first_left] = scores[last] - scores[first_left]
        alone, together = read(model, text, 1, routed), read(model, text, WIDTH, routed)
        moved = mx.abs(alone.logits - together.logits)[0, -1].max().item()
        if (alone.picks != together.picks)[0, -1, -1].any().item():
            jumps.append(moved)
        else:
            assert moved < LOGITS_ROUNDING
    # Rounding decides in some of these texts. What follows differs by more than rounding.
    assert jumps
    assert max(jumps) > 10 * LOGITS_ROUNDING
