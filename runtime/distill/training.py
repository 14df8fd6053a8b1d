"""The training of an EAGLE-3 drafter, from its target's hidden states and logits of batches of text.

Nothing of a batch is kept: the target computes each one again, so that no hidden states are stored on disk.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import attrs
import mlx.core as mx
import mlx.optimizers as optimizers
from mlx.nn.layers.base import Module
from mlx.nn.utils import value_and_grad
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from actors.mlx.layer_evaluation import evaluating_layers
from actors.trained.eagle3_training import logits_of_steps
from actors.trained.features import FeatureRecorder, recording
from actors.trained.kinds.eagle3 import Eagle3
from protocol.errors import SettingsError
from protocol.reprs import shown, shown_path

# Draft steps that are trained at once, and the weight of each relative to the one before.
NUM_STEPS, STEP_DECAY = 3, 0.8
# The largest norm of a gradient.
MAX_GRADIENT_NORM = 0.5
# Batches in which the learning rate rises to its value.
NUM_WARM_UP = 50
# After PATIENCE evaluations that gain less than LEAST_GAIN drafts, the learning rate is multiplied by REDUCTION; after
# MAX_REDUCTIONS of those, training is over.
PATIENCE, LEAST_GAIN, REDUCTION, MAX_REDUCTIONS = 4, 0.004, 0.3, 3


@attrs.frozen
class Progress:
    """How far the training has come; kept in checkpoints.

    Attributes:
        num_since, loss_since, seconds_since: batches since the last evaluation; sums of their losses and times.
    """

    num_batches: int = 0
    num_tokens: int = 0  # learnt from; a token counts each time
    seconds: float = 0.0  # spent on learning and evaluations
    learning_rate: float = 1e-3
    best: float = 0.0  # tokens of `NUM_STEPS` drafts that are accepted on held-out text, of the best evaluation
    num_without_gain: int = 0  # evaluations since then, and since the last reduction of the learning rate
    num_reductions: int = 0  # how often the learning rate was reduced
    num_since: int = 0
    loss_since: float = 0.0
    seconds_since: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether lower learning rates no longer help."""
        return self.num_reductions > MAX_REDUCTIONS

    def evaluated(self, accepted: float) -> Progress:
        """The progress after an evaluation in which so many tokens of `NUM_STEPS` drafts were accepted."""
        after = attrs.evolve(self, num_since=0, loss_since=0.0, seconds_since=0.0)
        if accepted > self.best + LEAST_GAIN:
            return attrs.evolve(after, best=accepted, num_without_gain=0)
        if self.num_without_gain + 1 < PATIENCE:
            return attrs.evolve(after, num_without_gain=self.num_without_gain + 1)
        return attrs.evolve(
            after,
            num_without_gain=0,
            num_reductions=self.num_reductions + 1,
            learning_rate=self.learning_rate * REDUCTION,
        )


def acceptance_of(counts: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """How often, in [0, 1], each step's token is the target's if those before it are. `counts`: of `Training.draft`."""
    totals = [sum(each) for each in zip(*counts, strict=True)]
    return tuple(right / max(1, asked) for asked, right in pairwise(totals))


def num_accepted(acceptance: Sequence[float]) -> float:
    """Drafts that are accepted on average, from the acceptance of each step where those before it were accepted."""
    reached, total = 1.0, 0.0
    for rate in acceptance:
        reached *= rate
        total += reached
    return total


@attrs.frozen
class Lesson:
    """The target's hidden states and probabilities for a batch.

    Attributes:
        probs: (B, T + steps - 1, draft_vocab_size) the target's distribution of the tokens at positions 2 …, among
            those that the drafter can propose.
    """

    features: mx.array  # (B, T, width) of positions 0 … T - 1
    embedded: mx.array  # (B, T + steps - 1, hidden size) of the tokens after them
    probs: mx.array
    likeliest: mx.array  # (B, T + steps - 1) the target's likeliest tokens at these positions, among all tokens


@attrs.frozen
class _Added:
    """The sums over the windows of a batch that were added so far."""

    gradients: Any
    loss: mx.array
    num_windows: int
    num_tokens: int


class Training:
    """A drafter that learns. All methods run on one thread."""

    def __init__(
        self,
        target: Module,
        drafter: Eagle3,
        embedding: mx.array,
        target_ids: mx.array | None,
        *,
        learning_rate: float = 1e-3,
    ) -> None:
        """Begin, or continue after `restore`. The weights of mlx-lm's `target` do not change, nor does the (vocab_size,
        hidden size) embedding that the drafter reads. `target_ids` has the target's id of each of the drafter's tokens;
        None if they are the same.
        """
        self._target = target
        self.drafter = drafter
        self._embedding = embedding
        self._target_ids = target_ids
        self._recorder = FeatureRecorder(target, drafter.config.feature_layers_of(len(target.layers)))
        self._optimizer = optimizers.AdamW(learning_rate=learning_rate, betas=[0.9, 0.95], weight_decay=0.0)
        self.progress = Progress(learning_rate=learning_rate)
        self._added: _Added | None = None

    def add(self, tokens: mx.array, last_decay: float | None = None) -> float:
        """Add the gradient of a part of a batch. Returns: the seconds that it took.

        Args:
            tokens: (B, L) ids, L > `NUM_STEPS` + 1.
            last_decay: of the last part: then the batch is learnt, as by `learn`; None for others.
        """
        began = time.monotonic()
        lesson, num_windows = self._lesson(tokens), tokens.shape[0]
        loss, gradients = value_and_grad(self.drafter, lambda: num_windows * _loss(self.drafter, lesson))()
        if self._added is not None:
            gradients = tree_map(mx.add, gradients, self._added.gradients)
            loss = loss + self._added.loss
        mx.eval(gradients, loss)
        before = (0, 0) if self._added is None else (self._added.num_windows, self._added.num_tokens)
        self._added = _Added(gradients, loss, before[0] + num_windows, before[1] + tokens.size)
        if last_decay is not None:
            self.learn(last_decay)
        seconds = time.monotonic() - began
        self.progress = attrs.evolve(
            self.progress,
            seconds=self.progress.seconds + seconds,
            seconds_since=self.progress.seconds_since + seconds,
        )
        return seconds

    @property
    def has_added(self) -> bool:
        """Whether there are gradients that the drafter has not learnt from."""
        return self._added is not None

    def learn(self, decay: float = 1.0) -> float:
        """Learn from the batch that was added. Returns: its mean loss.

        Args:
            decay: factor on the learning rate, in [0, 1].
        """
        assert self._added is not None
        added, self._added = self._added, None
        gradients = tree_map(lambda gradient: gradient / added.num_windows, added.gradients)
        gradients, _ = optimizers.clip_grad_norm(gradients, MAX_GRADIENT_NORM)
        warm_up = min(1.0, (self.progress.num_batches + 1) / NUM_WARM_UP)
        self._optimizer.learning_rate = warm_up * decay * self.progress.learning_rate
        self._optimizer.update(self.drafter, gradients)
        mx.eval(self.drafter.state, self._optimizer.state)
        value = cast(float, added.loss.item()) / added.num_windows
        self.progress = attrs.evolve(
            self.progress,
            num_batches=self.progress.num_batches + 1,
            num_tokens=self.progress.num_tokens + added.num_tokens,
            num_since=self.progress.num_since + 1,
            loss_since=self.progress.loss_since + value,
        )
        return value

    def draft(self, tokens: mx.array) -> list[int]:
        """The number of drafts of a batch, and after each of `NUM_STEPS` steps how many agree with the target so far.

        A draft agrees if each of its tokens, the drafter's likeliest, is also the target's. A token that the drafter
        cannot propose counts as rejected. `tokens` are as for `learn`.
        """
        began = time.monotonic()
        lesson = self._lesson(tokens)
        length = lesson.features.shape[1]
        alive = mx.ones((tokens.shape[0], length), mx.bool_)
        counts = [alive.size]
        for step, logits in enumerate(logits_of_steps(self.drafter, lesson.features, lesson.embedded, NUM_STEPS)):
            drafted = mx.argmax(logits, axis=-1)
            if self._target_ids is not None:
                drafted = self._target_ids[drafted]
            alive = alive & (drafted == lesson.likeliest[:, step : step + length])
            counts.append(cast(int, alive.sum().item()))
        self.progress = attrs.evolve(self.progress, seconds=self.progress.seconds + time.monotonic() - began)
        return counts

    def _lesson(self, tokens: mx.array) -> Lesson:
        length = tokens.shape[1] - NUM_STEPS
        with evaluating_layers(self._target), recording(self._recorder):
            logits = self._target(tokens)
        features = self._recorder.take((tokens.shape[0], tokens.shape[1]))[:, :length]
        # The logits at position p are for the token at p + 1, and the first step predicts that at position 2.
        logits = logits[:, 1 : length + NUM_STEPS].astype(mx.float32)
        likeliest = mx.argmax(logits, axis=-1)
        if self._target_ids is not None:
            logits = mx.take(logits, self._target_ids, axis=-1)
        lesson = Lesson(
            features.astype(mx.float32),
            self._embedding[tokens[:, 1 : length + NUM_STEPS]],
            mx.softmax(logits, axis=-1),
            likeliest,
        )
        mx.eval(lesson.features, lesson.embedded, lesson.probs, lesson.likeliest)
        return lesson

    def save(self, folder: Path, identity: Mapping[str, Any]) -> None:
        """Write a checkpoint, with the identity that a training must share to continue. A crash leaves the last one."""
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {f"drafter.{name}": value for name, value in _flat(self.drafter.parameters())}  # type: ignore[no-untyped-call]
        arrays |= {f"optimizer.{name}": value for name, value in _flat(self._optimizer.state)}
        partial = folder / "checkpoint.partial.safetensors"
        metadata = {"progress": json.dumps(attrs.asdict(self.progress)), "identity": json.dumps(dict(identity))}
        mx.save_safetensors(str(partial), arrays, metadata)
        os.replace(partial, folder / "checkpoint.safetensors")

    def restore(self, folder: Path, identity: Mapping[str, Any]) -> bool:
        """Continue from a checkpoint. Returns: whether there is one.

        Raises: SettingsError: the checkpoint is of another training; the message says what differs.
        """
        file = folder / "checkpoint.safetensors"
        if not file.exists():
            return False
        loaded: Any = mx.load(str(file), return_metadata=True)
        arrays, metadata = loaded
        saved = json.loads(metadata["identity"])
        for name, value in identity.items():
            if saved.get(name) != value:
                raise SettingsError(
                    f"the training in {shown_path(str(folder))} has the {name} {shown(saved.get(name))}, and this one "
                    f"{shown(value)}; give another folder, or delete that one"
                )
        own = [(n.removeprefix("drafter."), v) for n, v in arrays.items() if n.startswith("drafter.")]
        state = [(n.removeprefix("optimizer."), v) for n, v in arrays.items() if n.startswith("optimizer.")]
        self.drafter.load_weights(own)
        self._optimizer.init(self.drafter.trainable_parameters())  # type: ignore[no-untyped-call]
        self._optimizer.state = tree_unflatten(state)
        self.progress = Progress(**json.loads(metadata["progress"]))
        mx.eval(self.drafter.state, self._optimizer.state)
        return True


def _loss(drafter: Eagle3, lesson: Lesson) -> mx.array:
    length = lesson.features.shape[1]
    total, weights = mx.array(0.0), 0.0
    for step, logits in enumerate(logits_of_steps(drafter, lesson.features, lesson.embedded, NUM_STEPS)):
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        weight = STEP_DECAY**step
        total = total - weight * (lesson.probs[:, step : step + length] * logprobs).sum(axis=-1).mean()
        weights += weight
    return total / weights


def _flat(tree: Any) -> list[tuple[str, mx.array]]:
    return cast("list[tuple[str, mx.array]]", tree_flatten(tree))
