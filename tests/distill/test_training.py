"""A drafter learns from its target, and goes on from a checkpoint as if it had not been interrupted."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from architectures import VOCAB_SIZE, build
from sweeps import sweep

from actors.trained.kinds.eagle3 import Eagle3, read_config
from runtime.distill.evaluation import ALL, TEMPERATURE, DraftAgreement, acceptance_by_category, acceptance_of
from runtime.distill.hidden_states import HiddenStates, StateFiles
from runtime.distill.training import (
    LEAST_GAIN,
    MAX_REDUCTIONS,
    NUM_STEPS,
    PATIENCE,
    REDUCTION,
    Training,
    TrainingProgress,
    logits_of_steps,
)

DRAFT_IDS = mx.arange(0, VOCAB_SIZE, 2)


def drafter_config(target: Any, draft_vocab_size: int) -> dict[str, Any]:
    return {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": [0, 1, len(target.layers)],
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 1,
            "vocab_size": VOCAB_SIZE,
            "rms_norm_eps": 1e-5,
        },
    }


def training(target: Any, target_ids: mx.array | None = None, files: StateFiles | None = None) -> Training:
    size = VOCAB_SIZE if target_ids is None else target_ids.size
    mx.random.seed(7)
    drafter = Eagle3(read_config(drafter_config(target, size)))
    mx.eval(drafter.parameters())
    states = HiddenStates(target, drafter.config.feature_layers_of(len(target.layers)), files)
    return Training(states, drafter, target.model.embed_tokens.weight, target_ids, learning_rate=3e-3)


def learnt(training: Training, *parts: mx.array) -> float:
    """The loss of a batch in some parts, which is learnt from."""
    for part in parts:
        training.add(part)
    return training.learn()


BATCHES = [mx.random.randint(0, VOCAB_SIZE, (4, 24), key=mx.random.key(i)) for i in range(4)]


def test_the_learning_rate_falls_where_evaluations_gain_nothing() -> None:
    progress = TrainingProgress(learning_rate=1.0).evaluated(0.5)
    assert progress.best == 0.5
    assert progress.evaluated(0.5 + 2 * LEAST_GAIN).best == 0.5 + 2 * LEAST_GAIN
    for reductions in range(1, MAX_REDUCTIONS + 2):
        assert not progress.is_over
        for _ in range(PATIENCE):
            progress = progress.evaluated(0.5 + LEAST_GAIN / 2)
        assert (progress.best, progress.num_reductions) == (0.5, reductions)
        assert progress.learning_rate == pytest.approx(REDUCTION**reductions)
    assert progress.is_over


@pytest.mark.slow
@sweep("name, target_ids", [("llama", DRAFT_IDS), ("lfm2", None)])
def test_a_drafter_learns(name: str, target_ids: mx.array | None) -> None:
    learning = training(build(name), target_ids)
    before = acceptance_of([each for batch in BATCHES for each in learning.draft(batch)]).greedy
    losses = [learnt(learning, BATCHES[i % len(BATCHES)]) for i in range(90)]
    after = acceptance_of([each for batch in BATCHES for each in learning.draft(batch)]).greedy
    assert losses[-1] < losses[0]
    assert len(before) == NUM_STEPS
    # With half of the vocabulary, about half of the tokens cannot be proposed.
    assert after[0] > before[0] + (0.2 if target_ids is None else 0.1)
    assert all(0.0 <= rate <= 1.0 for rate in after)


def test_it_goes_on_from_a_checkpoint_as_if_it_had_not_been_interrupted(tmp_path: Path) -> None:
    target = build("llama")
    straight = training(target)
    expected = [learnt(straight, BATCHES[i % 4]) for i in range(8)]
    interrupted = training(target)
    assert not interrupted.restore(tmp_path)
    first = [learnt(interrupted, BATCHES[i % 4]) for i in range(4)]
    interrupted.save(tmp_path)
    resumed = training(target)
    assert resumed.restore(tmp_path)
    assert resumed.progress.num_batches == 4
    rest = [learnt(resumed, BATCHES[i % 4]) for i in range(4, 8)]
    assert [*first, *rest] == pytest.approx(expected, rel=1e-5)


def test_a_batch_in_parts_teaches_what_it_teaches_as_a_whole() -> None:
    target = build("llama")
    whole, in_parts = training(target), training(target)
    for batch in BATCHES:
        assert learnt(in_parts, batch[:1], batch[1:3], batch[3:]) == pytest.approx(learnt(whole, batch), rel=1e-5)
    assert (in_parts.progress.num_batches, in_parts.progress.num_tokens) == (4, 4 * 4 * 24)
    assert mx.allclose(whole.drafter.lm_head.weight, in_parts.drafter.lm_head.weight, atol=1e-5)


@sweep("kept_windows", [0, 6, 100])
def test_losses_are_the_same_with_hidden_states_from_files(kept_windows: int, tmp_path: Path) -> None:
    target = build("llama")
    # Three feature layers, of which the last is also the last hidden state.
    files = StateFiles(tmp_path, kept_windows * 24 * 3 * 32 * 2, "llama")
    computed, kept = training(target), training(target, files=files)
    for _ in range(3):
        for batch in BATCHES:
            assert learnt(kept, batch) == pytest.approx(learnt(computed, batch), rel=1e-3)
    assert len([*tmp_path.iterdir()]) == min(kept_windows, 4 * len(BATCHES))
    one, other = (acceptance_of(each.draft(BATCHES[0])) for each in (computed, kept))
    assert other.greedy == pytest.approx(one.greedy, abs=0.05)
    assert other.sampled == pytest.approx(one.sampled, abs=0.01)


def test_drafts_are_counted_as_their_distributions_say() -> None:
    target = build("llama")
    learning = training(target, DRAFT_IDS)
    window = mx.random.randint(0, VOCAB_SIZE, (1, 12), key=mx.random.key(5))
    features, wanted = learning._states.read(window)
    length = 12 - NUM_STEPS
    embedded = learning._embedding[window[:, 1 : length + NUM_STEPS]]
    alive = [True] * length
    agreeing, sampled = [length], []
    for step, logits in enumerate(logits_of_steps(learning.drafter, features[:, :length], embedded, NUM_STEPS)):
        sums = 0.0
        for t in range(length):
            of_target = wanted[0, t + 1 + step]
            probs = mx.softmax(of_target / TEMPERATURE)[DRAFT_IDS]
            own = mx.softmax(logits[0, t] / TEMPERATURE)
            sums += alive[t] * float(mx.minimum(own, probs).sum().item())
            drafted = DRAFT_IDS[mx.argmax(logits[0, t])]
            alive[t] = alive[t] and drafted.item() == mx.argmax(of_target).item()
        sampled.append(sums)
        agreeing.append(sum(alive))
    (found,) = learning.draft(window)
    assert found.num_agreeing == tuple(agreeing)
    assert found.num_sampled == pytest.approx(sampled, rel=1e-4)


def test_the_targets_weights_stay_as_they_are() -> None:
    target = build("llama")
    before = mx.array(target.model.layers[0].self_attn.q_proj.weight)
    learnt(training(target), BATCHES[0])
    assert mx.array_equal(before, target.model.layers[0].self_attn.q_proj.weight)


# --- the acceptance of drafts, by depth, category and temperature ---------------------------------


ONE, OTHER = DraftAgreement((10, 5, 2, 1), (6.0, 2.0, 1.5)), DraftAgreement((10, 10, 0, 0), (8.0, 6.0, 0.0))


def test_each_step_counts_where_those_before_it_agree() -> None:
    found = acceptance_of([ONE])
    assert found.greedy == (0.5, 0.4, 0.5)
    assert found.sampled == (0.6, 0.4, 0.75)
    assert found.num_accepted == pytest.approx(0.5 + 0.2 + 0.1)
    assert acceptance_of([ONE, OTHER]).greedy == (0.75, round(2 / 15, 4), 0.5)


def test_categories_are_shown_if_there_are_several() -> None:
    found = acceptance_by_category([ONE, OTHER, ONE], ["code", "", "code"])
    assert [*found] == [ALL, "none", "code"]
    assert found["code"] == acceptance_of([ONE, ONE])
    assert found["none"] == acceptance_of([OTHER])
    assert found[ALL] == acceptance_of([ONE, OTHER, ONE])
    assert [*acceptance_by_category([ONE], [""])] == [ALL]
