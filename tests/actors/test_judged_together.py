"""Texts of one pass that are judged in one set of array operations: each is judged as it is alone."""

from typing import Any

import mlx.core as mx
from scripted import ScriptedModel, agreeing, run, simulated, texts_of, truthful
from sweeps import sweep

from actors.sampling.logits_pipeline import LogitsPipeline
from actors.target import passes
from protocol.acceptance import choices_together, distribution, draw, scores
from protocol.messages import Open
from protocol.randomness import Purpose, key_for, keys_for
from protocol.settings import settings_from

VOCAB_SIZE = 1000
DECISIONS = [(3, 17), (2**64 - 1, 0), (3, 18), (0, 5000), (12345678901234567, 17)]


def logits(seed: int) -> mx.array:
    return 3 * mx.random.normal((len(DECISIONS), VOCAB_SIZE), key=mx.random.key(seed))


def opened(**settings: Any) -> Open:
    return Open(0, (1, 2), settings_from(settings), seed=0, stop_tokens=frozenset())


def test_keys_of_several_decisions_are_those_of_each() -> None:
    for purpose in Purpose:
        keys = keys_for(purpose, DECISIONS)
        for row, decision in enumerate(DECISIONS):
            assert (keys[row] == key_for(decision[0], purpose, decision[1])).all()


@sweep("dtype", [mx.float32, mx.bfloat16, mx.float16])
@sweep(
    "rule, temperature", [*(("match", t) for t in (0.0, 0.3, 1.0, 2.5)), *(("rejection", t) for t in (0.3, 1.0, 2.5))]
)
def test_choices_of_several_texts_are_those_of_each(rule: Any, temperature: float, dtype: mx.Dtype) -> None:
    for seed in range(8):
        rows = logits(seed).astype(dtype if rule == "match" else mx.float32)
        if rule == "match":
            each = [scores(rows[i : i + 1], temperature, [own], VOCAB_SIZE) for i, own in enumerate(DECISIONS)]
            alone = [mx.argmax(one) for one in each]
        else:
            keys = [key_for(own, Purpose.RECOVER, position) for own, position in DECISIONS]
            alone = [draw(distribution(rows[i], temperature), key) for i, key in enumerate(keys)]
        together = choices_together(rows, rule, temperature, DECISIONS)
        assert together.tolist() == [one.item() for one in alone]


ALONE = [
    {"logit_bias": {3: 1.0}},
    {"repetition_penalty": 1.2},
    {"temperature": 1.0, "xtc_probability": 0.5},
    {"logits_processors": [lambda tokens, logits: logits]},
    {"sampler": lambda logprobs: mx.argmax(logprobs, axis=-1)},
]
KINDS = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.8},
    {"temperature": 0.8, "acceptance": "match"},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 9},
    {"temperature": 0.8, "min_p": 0.1},
]


def test_texts_of_a_kind_are_those_with_the_same_sampling_settings() -> None:
    kinds = [LogitsPipeline(opened(**settings)).kind for settings in KINDS]
    assert None not in kinds
    assert len(set(kinds)) == len(kinds)
    assert kinds == [LogitsPipeline(opened(**settings)).kind for settings in KINDS]
    # Filters do nothing at temperature 0.
    assert LogitsPipeline(opened(top_k=3)).kind == kinds[0]


@sweep("settings", ALONE)
def test_what_sees_the_text_or_is_the_users_is_judged_by_itself(settings: dict[str, Any]) -> None:
    assert LogitsPipeline(opened(**settings)).kind is None


FILTERED = {"temperature": 0.8, "top_p": 0.9, "min_p": 0.05, "top_k": 7}


@sweep("settings, lookahead", [({}, 0), (FILTERED, 0), (KINDS[1], 3), (KINDS[3], 3), (FILTERED, 3)])
def test_texts_are_what_they_are_alone(lookahead, settings, monkeypatch):
    sizes: list[int] = []
    monkeypatch.setattr(passes, "_judged_together", counting(sizes, passes._judged_together))
    prompts = [[5, 6, 7], [9, 2], [1, 1, 3, 8], [4]]

    async def texts(num_at_once: int) -> list[list[int]]:
        async with simulated(ScriptedModel(truthful), ScriptedModel(agreeing(0.7))) as simulation:
            asked = {"max_concurrent": num_at_once, "max_tokens": 16, "seed": 7, "lookahead": lookahead}
            return await texts_of(simulation, prompts, **asked, **settings)

    alone = run(texts, 1)
    assert set(sizes) <= {1}
    assert [len(text) for text in alone] == [16] * len(prompts)
    assert run(texts, 4) == alone
    assert max(sizes) >= 2


def counting(sizes: list[int], call: Any) -> Any:
    """The function, with the numbers of texts that it is called with kept."""

    def counted(parts: Any, *rest: Any) -> Any:
        sizes.append(len(parts))
        return call(parts, *rest)

    return counted
