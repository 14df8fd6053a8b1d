"""The training of an EAGLE-3 drafter, from its target's hidden states and logits of batches of text."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any, cast

import attrs
import mlx.core as mx
import mlx.optimizers as optimizers
from mlx.nn.utils import value_and_grad
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from actors.mlx.model import weights_of
from actors.trained.drafter_files import split_heads
from actors.trained.kinds.eagle3 import Eagle3
from runtime.distill.evaluation import TEMPERATURE, DraftAgreement
from runtime.distill.hidden_states import HiddenStates
from runtime.distill.writing import replacing

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
class TrainingProgress:
    """How far the training has come; kept in checkpoints."""

    num_batches: int = 0
    num_tokens: int = 0  # learnt from; a token counts each time
    seconds: float = 0.0  # spent on learning and evaluations
    learning_rate: float = 1e-3
    best: float = 0.0  # tokens of `NUM_STEPS` drafts that are accepted on held-out text, of the best evaluation
    num_without_gain: int = 0  # evaluations since then, and since the last reduction of the learning rate
    num_reductions: int = 0  # how often the learning rate was reduced
    num_since: int = 0  # batches since the last evaluation; and the sums of their losses and times
    loss_since: float = 0.0
    seconds_since: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether lower learning rates no longer help."""
        return self.num_reductions > MAX_REDUCTIONS

    def evaluated(self, accepted: float) -> TrainingProgress:
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
        states: HiddenStates,
        drafter: Eagle3,
        embedding: mx.array,
        target_ids: mx.array | None,
        *,
        learning_rate: float = 1e-3,
    ) -> None:
        """Begin, or continue after `restore`. The target and the (vocab_size, hidden size) embedding, which the drafter
        reads, do not change. `target_ids` has the target's id of each of the drafter's tokens; None for the same.
        """
        self._states = states
        self.drafter = drafter
        self._embedding = embedding
        self._target_ids = target_ids
        self._optimizer = optimizers.AdamW(learning_rate=learning_rate, betas=[0.9, 0.95], weight_decay=0.0)
        self.progress = TrainingProgress(learning_rate=learning_rate)
        self._added: _Added | None = None

    def add(self, tokens: mx.array, last_decay: float | None = None) -> float:
        """Add the gradient of a part of a batch, (B, L) ids, L > `NUM_STEPS` + 1; the last part has a `last_decay`,
        with which the batch is learnt. Returns: the seconds that it took.
        """
        began = time.monotonic()
        features, embedded, logits = self._read(tokens)
        probs, num_windows = mx.softmax(self._of_drafter(logits), axis=-1), tokens.shape[0]
        mx.eval(features, embedded, probs)
        del logits  # the memory of the whole vocabulary
        lesson = features, embedded, probs
        loss, gradients = value_and_grad(self.drafter, lambda: num_windows * _loss(self.drafter, *lesson))()
        if self._added is not None:
            gradients = tree_map(mx.add, gradients, self._added.gradients)
            loss = loss + self._added.loss
        mx.eval(gradients, loss)
        before = (0, 0) if self._added is None else (self._added.num_windows, self._added.num_tokens)
        self._added = _Added(gradients, loss, before[0] + num_windows, before[1] + tokens.size)
        if last_decay is not None:
            self.learn(last_decay)
        seconds = time.monotonic() - began
        self._count(seconds=seconds, seconds_since=seconds)
        return seconds

    @property
    def has_added(self) -> bool:
        """Whether there are gradients that the drafter has not learnt from."""
        return self._added is not None

    def learn(self, decay: float = 1.0) -> float:
        """Learn from the batch that was added, with a factor in [0, 1] on the learning rate. Returns: its mean loss."""
        assert self._added is not None
        added, self._added = self._added, None
        gradients = tree_map(lambda gradient: gradient / added.num_windows, added.gradients)
        gradients, _ = optimizers.clip_grad_norm(gradients, MAX_GRADIENT_NORM)
        warm_up = min(1.0, (self.progress.num_batches + 1) / NUM_WARM_UP)
        self._optimizer.learning_rate = warm_up * decay * self.progress.learning_rate
        self._optimizer.update(self.drafter, gradients)
        mx.eval(self.drafter.state, self._optimizer.state)
        value = cast(float, added.loss.item()) / added.num_windows
        self._count(num_batches=1, num_tokens=added.num_tokens, num_since=1, loss_since=value)
        return value

    def _count(self, **more: float) -> None:
        """Add to figures of the progress."""
        grown = {name: getattr(self.progress, name) + value for name, value in more.items()}
        self.progress = attrs.evolve(self.progress, **grown)

    def draft(self, tokens: mx.array) -> list[DraftAgreement]:
        """Draft `NUM_STEPS` tokens at each position of windows, (B, L). What the drafter cannot propose is rejected."""
        began = time.monotonic()
        features, embedded, target_logits = self._read(tokens)
        likeliest = mx.argmax(target_logits, axis=-1)
        target_probs = self._of_drafter(mx.softmax(target_logits / TEMPERATURE, axis=-1))
        mx.eval(features, embedded, likeliest, target_probs)
        del target_logits  # the memory of the whole vocabulary
        length = features.shape[1]
        alive = mx.ones((tokens.shape[0], length), mx.bool_)
        agreeing, sampled = [alive.sum(axis=1)], list[mx.array]()
        for step, logits in enumerate(logits_of_steps(self.drafter, features, embedded, NUM_STEPS)):
            drafted = mx.argmax(logits, axis=-1)
            if self._target_ids is not None:
                drafted = self._target_ids[drafted]
            own_probs = mx.softmax(logits / TEMPERATURE, axis=-1)
            overlap = mx.minimum(own_probs, target_probs[:, step : step + length]).sum(axis=-1)
            sampled.append((overlap * alive).sum(axis=1))
            alive = alive & (drafted == likeliest[:, step : step + length])
            agreeing.append(alive.sum(axis=1))
            mx.eval(agreeing, sampled, alive)
        found = [
            DraftAgreement(tuple(of_agreeing), tuple(of_sampled))
            for of_agreeing, of_sampled in zip(
                cast("list[list[int]]", mx.stack(agreeing, axis=1).tolist()),
                cast("list[list[float]]", mx.stack(sampled, axis=1).tolist()),
                strict=True,
            )
        ]
        self._count(seconds=time.monotonic() - began)
        return found

    def _read(self, tokens: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """From (B, L) tokens, lazy: (B, T, width) features of positions 0 … T - 1, where T is L - `NUM_STEPS`;
        embeddings of the tokens after them, (B, T + steps - 1, hidden size); and as many logits, from position 2 on.
        """
        length = tokens.shape[1] - NUM_STEPS
        features, logits = self._states.read(tokens)
        embedded = self._embedding[tokens[:, 1 : length + NUM_STEPS]]
        # The logits at position p are for the token at p + 1, and the first step predicts that at position 2.
        return features[:, :length].astype(mx.float32), embedded, logits[:, 1 : length + NUM_STEPS].astype(mx.float32)

    def _of_drafter(self, values: mx.array) -> mx.array:
        """(…, V) to (…, draft_vocab_size): those of the tokens that the drafter can propose."""
        return values if self._target_ids is None else mx.take(values, self._target_ids, axis=-1)

    def save(self, folder: Path) -> None:
        """Write a checkpoint. A crash leaves the last one. Raises: SettingsError: it cannot be written."""
        state = cast("list[tuple[str, mx.array]]", tree_flatten(self._optimizer.state))
        arrays = {f"drafter.{name}": value for name, value in weights_of(self.drafter).items()}
        arrays |= {f"optimizer.{name}": value for name, value in state}
        with replacing(folder / "checkpoint.safetensors") as partial:
            mx.save_safetensors(str(partial), arrays, {"progress": json.dumps(attrs.asdict(self.progress))})

    def restore(self, folder: Path) -> bool:
        """Continue from a checkpoint. Returns: whether there is one."""
        file = folder / "checkpoint.safetensors"
        if not file.exists():
            return False
        loaded: Any = mx.load(str(file), return_metadata=True)
        arrays, metadata = loaded
        own = [(n.removeprefix("drafter."), v) for n, v in arrays.items() if n.startswith("drafter.")]
        state = [(n.removeprefix("optimizer."), v) for n, v in arrays.items() if n.startswith("optimizer.")]
        self.drafter.load_weights(own)
        self._optimizer.init(self.drafter.trainable_parameters())  # type: ignore[no-untyped-call]
        self._optimizer.state = tree_unflatten(state)
        self.progress = TrainingProgress(**json.loads(metadata["progress"]))
        mx.eval(self.drafter.state, self._optimizer.state)
        return True


def _loss(drafter: Eagle3, features: mx.array, embedded: mx.array, probs: mx.array) -> mx.array:
    length = features.shape[1]
    total, weights = mx.array(0.0), 0.0
    for step, logits in enumerate(logits_of_steps(drafter, features, embedded, NUM_STEPS)):
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        weight = STEP_DECAY**step
        total = total - weight * (probs[:, step : step + length] * logprobs).sum(axis=-1).mean()
        weights += weight
    return total / weights


# --- training-time test: the logits of several draft steps at every position of a text at once ---------------
#
# At step s the drafter has read s of its own hidden states. The query at position t attends to the keys of step 0 at
# positions up to t, and to those of steps 1 … s at t, which led there: all positions are computed in one pass a step.
# Source: Li, Wei, Zhang and Zhang 2025, arXiv 2503.01840, section 3.2.

# Keys and values of one layer, (B, heads, T, width of a head) for each step so far.
_LayerSteps = list[tuple[mx.array, mx.array]]


def logits_of_steps(model: Eagle3, features: mx.array, embedded: mx.array, num_steps: int) -> list[mx.array]:
    """For each step s, (B, T, draft_vocab_size) logits for the tokens at positions 2 + s … T + 1 + s; lazy.

    From (B, T, layers · target's hidden size) features of positions 0 … T - 1, and (B, T + num_steps - 1, hidden size)
    embeddings of the tokens at positions 1 … T + num_steps - 1.
    """
    length = features.shape[1]
    hidden = model.project(features)
    caches: list[_LayerSteps] = [[] for _ in model.layers]

    def attend(index: int, inputs: mx.array) -> mx.array:
        return _attend(model.layers[index].self_attn, inputs, caches[index])

    given = []
    for step in range(num_steps):
        hidden, logits = model.step(hidden, embedded[:, step : step + length], attend)
        given.append(logits)
    return given


def _attend(attention: Any, inputs: mx.array, cache: _LayerSteps) -> mx.array:
    batch, length, _ = inputs.shape
    step = len(cache)
    queries = split_heads(attention.q_proj(inputs), attention.n_heads, getattr(attention, "q_norm", None))
    keys = split_heads(attention.k_proj(inputs), attention.n_kv_heads, getattr(attention, "k_norm", None))
    values = split_heads(attention.v_proj(inputs), attention.n_kv_heads)
    groups = attention.n_heads // attention.n_kv_heads
    # For the rotary embedding, step s at position t is at position t + s.
    queries = attention.rope(queries, offset=step)
    cache.append((mx.repeat(attention.rope(keys, offset=step), groups, axis=1), mx.repeat(values, groups, axis=1)))
    (text_keys, text_values), *own = cache
    is_later = mx.arange(length)[:, None] < mx.arange(length)
    text_scores = mx.where(is_later, -math.inf, attention.scale * (queries @ text_keys.swapaxes(-1, -2)))
    own_scores = [attention.scale * (queries * own_keys).sum(axis=-1, keepdims=True) for own_keys, _ in own]
    weights = mx.softmax(mx.concatenate([text_scores, *own_scores], axis=-1), axis=-1, precise=True)
    attended = weights[..., :length] @ text_values
    for i, (_, own_values) in enumerate(own, length):
        attended = attended + weights[..., i : i + 1] * own_values
    merged = attended.swapaxes(1, 2).reshape(batch, length, -1)
    result: mx.array = attention.o_proj(merged)
    return result
