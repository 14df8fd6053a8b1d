"""Distillation of a drafter for a target: cutting texts into windows, training until it no longer helps, writing files.

Progress is kept in the output folder, so that the same call continues where another was interrupted.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import attrs
import mlx.core as mx
import trio
from mlx.nn.layers.base import Module

from actors.mlx.model import context_length_of, is_quantized, weights_of
from actors.trained.drafter_files import DrafterFiles
from actors.trained.kinds.eagle3 import Eagle3, LoadedEagle3, load_eagle3, read_config
from actors.trained.kinds.target_parts import embedding_of
from actors.workers.thread_worker import ThreadWorker
from actors.workers.worker import Job, JobError
from protocol.errors import ModelError, OutriderError, SettingsError
from protocol.reprs import shown, shown_path
from protocol.validation import must_be
from runtime.distill.continuations import Continuations, Continuing
from runtime.distill.data import Windows, read_texts
from runtime.distill.evaluation import ALL, DraftAgreement, Evaluation, acceptance_by_category
from runtime.distill.hidden_states import HiddenStates, StateFiles, check_states
from runtime.distill.options import DistillOptions
from runtime.distill.output import config_for, feature_layers, model_card, write_drafter
from runtime.distill.training import Training
from runtime.distill.writing import replacing, writing
from runtime.loading.model_files import load_errors
from runtime.loading.model_reading import read_model
from runtime.loading.tokenizers import wrapped

T = TypeVar("T")

# The file that says which training a folder has.
IDENTITY = "identity.json"
# The folder of the target's hidden states.
STATES = "states"
# Most logits in a batch, 512 MiB in float32; this decides how many windows are in one.
MAX_LOGITS = 1 << 27
# Seconds that a part of a batch takes, as far as the machine allows: progress is told, and a cancellation heard, after
# each. The first part is a single window, whose time is measured.
PART_S = 4.0
# An evaluation is due after so many batches or minutes, if learning has taken so many times as long as one takes.
BATCHES_PER_EVALUATION, MINUTES_PER_EVALUATION = 100, 5.0
LEARNING_PER_EVALUATION = 10.0
# The part of a limited time that an evaluation takes at most: after that it ends, even if held-out text is left.
EVALUATION_SHARE = 0.1
# The part of a limited time in which the learning rate falls to nothing: the schedule of Hu et al. 2024, "MiniCPM",
# arXiv 2404.06395, section 4.2.
DECAY_SHARE = 0.3


async def distill(
    options: DistillOptions, *, on_progress: Callable[[str], None], on_evaluation: Callable[[Evaluation], None]
) -> None:
    """Train a drafter until it learns nothing more, and write it to `options.out`.

    Cancellation: ends the training after the current batch, and saves its state: the same call continues from there.
    Raises: ModelError, SettingsError: see `Distillation`; or a model cannot be loaded, or the folder not be written.
    """
    async with ThreadWorker("target") as worker:

        async def run(call: Callable[[], T]) -> T:
            try:
                return await worker.run(Job("load", call))
            except JobError as error:
                if isinstance(error.__cause__, OutriderError):
                    raise error.__cause__ from None
                raise

        on_progress(f"loading {Path(options.target).name}")
        with load_errors("target", options.target):
            target, tokenizer = await worker.run(Job("load", partial(load_target, options.target)))
        on_progress("reading texts")
        work = await run(partial(Distillation, options, target, tokenizer))
        began, missing_then = trio.current_time(), 0.0
        while num_missing := await run(work.continue_some):
            missing_then = missing_then or num_missing
            done = missing_then - num_missing
            left = f", about {_minutes(num_missing * (trio.current_time() - began) / done)} left" if done else ""
            on_progress(f"the target is writing: {math.ceil(num_missing):,} windows left{left}")
        on_progress("preparing the drafter")
        goes_on = await run(work.begin)

        async def evaluate() -> None:
            while (share := work.held_out_share) < 1.0:
                on_progress(f"drafting for held-out text: {share:.0%}")
                await run(work.draft)
            on_evaluation(await run(work.evaluate))

        try:
            if options.init is not None and not goes_on:
                await evaluate()
            while not work.is_over:
                on_progress(_learning(work))
                await run(work.learn)
                if work.is_evaluation_due:
                    await evaluate()
            await run(work.end_batch)
            if work.training.progress.num_since > 0:
                await evaluate()
            await run(work.end)
        finally:
            # An evaluation has saved the state already.
            if work.training.progress.num_since > 0:
                with trio.CancelScope(shield=True):
                    await run(work.save)


class Distillation:
    """The training of one drafter. Every method is one job for the thread on which it is made."""

    def __init__(self, options: DistillOptions, target: Module, tokenizer: Any) -> None:
        """Read the texts.

        Raises: ModelError: the target's hidden states cannot be recorded, or it has no embedding that is known.
        SettingsError: an option does not fit, a file cannot be read, or the output folder has another training.
        """
        if options.init is None:
            check_states(target, feature_layers(len(target.layers)))
        embedding_of(target, "the drafter")
        limit = context_length_of(target)
        if limit is not None and options.window > limit:
            raise must_be("window", f"at most the target's context of {limit} tokens", options.window, "shorten it")
        self._options, self._target = options, target
        self._windows = Windows(read_texts(options.data, tokenizer), tokenizer, options.window)
        self._folder = options.out / "training"
        self._check_identity()
        with writing(self._folder / IDENTITY):
            pass  # A folder that cannot be made is told before anything is computed.
        self._continuations = Continuations(self._folder)
        self._continuing: Continuing | None = None
        self._batch_size = self._part_size = 1
        self._left: mx.array | None = None  # windows of the present batch that are still to be added
        self._training: Training | None = None
        self._made: LoadedEagle3 | None = None
        self._config: dict[str, Any] = {}
        self._has_drafted = False
        self._drafted: list[DraftAgreement] = []  # results of `draft` since the last evaluation
        self._seconds_per_window = 0.0  # of learning; once held-out text was drafted for, of that

    # --- preparation ------------------------------------------------------------------------------

    def continue_some(self) -> float:
        """Have the target write for some seconds. Returns: how many windows are still to be written."""
        written, options = self._continuations, self._options
        if (missing := options.continuations - written.num_windows) <= 0:
            return 0.0
        if self._continuing is None:
            # Decoding computes one token of each window at a time, so a batch can have more windows than in learning.
            num_at_once = 4 * max(1, options.batch_tokens // options.window)
            index = len(written.batches)
            beginnings = self._windows.batch(index, num_at_once, options.seed)[:missing]
            self._num_continuing = beginnings.shape[0]
            self._continuing = Continuing(
                self._target, beginnings, temperature=written.temperature, seed=options.seed + index
            )
        if (batch := self._continuing.write(PART_S)) is None:
            return missing - self._continuing.share * self._num_continuing
        self._continuing = None
        self._keep_identity()
        written.add(batch)
        return missing - batch.shape[0]

    def begin(self) -> bool:
        """Make the drafter, or continue its training. Returns: whether it had begun. Raises: ModelError: none fits."""
        options = self._options
        if batches := self._continuations.batches:
            self._windows.add(mx.concatenate(batches))
        embed = embedding_of(self._target, "the drafter")
        probe = self._target(mx.array([[0]]))
        vocab_size, hidden_size = int(probe.shape[-1]), int(embed(mx.array([0])).shape[-1])
        if options.init is not None:
            files = DrafterFiles.read(options.init)
            self._made, self._config = load_eagle3(files), dict(files.config)
            if is_quantized(self._made.model):
                raise ModelError(f"the drafter in {options.init} is quantised; begin with one that is not")
        else:
            self._config, self._made = self._new(vocab_size, hidden_size)
        model = self._made.model
        if (model.config.vocab_size, model.config.target_hidden_size) != (vocab_size, hidden_size):
            raise ModelError(
                f"the drafter in {options.init} is for a target with {model.config.vocab_size} tokens and a width of "
                f"{model.config.target_hidden_size}; this one has {vocab_size} and {hidden_size}"
            )
        of_drafter = embed if self._made.embedding is None else self._made.embedding
        embedding = of_drafter(mx.arange(vocab_size)).astype(mx.float32)  # it may be quantised
        model.set_dtype(mx.float32)
        mx.eval(model.state, embedding)
        tokens = min(options.batch_tokens, MAX_LOGITS // vocab_size)
        self._batch_size = max(1, tokens // options.window)
        layers = model.config.feature_layers_of(len(self._target.layers))
        bound = int(options.features_gb * 1e9)
        kept = StateFiles(self._folder / STATES, bound, f"{options.target} {layers}") if bound else None
        states = HiddenStates(self._target, layers, kept)
        ids = self._made.target_ids
        self._training = Training(states, model, embedding, ids, learning_rate=options.learning_rate)
        return self._training.restore(self._folder)

    def _new(self, vocab_size: int, hidden_size: int) -> tuple[dict[str, Any], LoadedEagle3]:
        config = config_for(self._options, self._target, hidden_size=hidden_size, vocab_size=vocab_size)
        model = Eagle3(read_config(config))
        initialize(model, self._options.seed)
        ids = None
        if (draft_vocab_size := model.config.draft_vocab_size) < vocab_size:
            ids = mx.array(self._windows.most_frequent(draft_vocab_size, vocab_size), mx.int32)
        return config, LoadedEagle3(model, ids, None)

    def _identity(self) -> dict[str, Any]:
        options = self._options
        return {
            "target": options.target,
            "texts": self._windows.digest,
            "continuations": options.continuations,
            "seed": options.seed,
            "initial drafter": None if options.init is None else str(options.init),
            "draft vocabulary": options.draft_vocab_size,
            "width": options.intermediate_size,
        }

    def _check_identity(self) -> None:
        if not (file := self._folder / IDENTITY).exists():
            return
        kept = json.loads(file.read_text(encoding="utf-8"))
        for name, value in self._identity().items():
            if kept.get(name) != value:
                raise SettingsError(
                    f"the training in {shown_path(str(self._folder))} has the {name} {shown(kept.get(name))}, and this "
                    f"one {shown(value)}; give another folder, or delete that one"
                )

    def _keep_identity(self) -> None:
        """Write what this training is, before anything else of it is written."""
        with replacing(self._folder / IDENTITY) as partial:
            partial.write_text(json.dumps(self._identity()), encoding="utf-8")

    # --- training ---------------------------------------------------------------------------------

    @property
    def training(self) -> Training:
        """The training, once it has begun."""
        assert self._training is not None
        return self._training

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be learnt, or the time is up."""
        return self.training.progress.is_over or self.seconds_left <= 0.0

    @property
    def seconds_left(self) -> float:
        """Seconds for which learning may go on, so that an evaluation still fits; infinite without a limit."""
        return self._learning_ends_s - self.training.progress.seconds

    @property
    def _learning_ends_s(self) -> float:
        if (limit := self._options.max_minutes) is None:
            return math.inf
        return 60 * limit - min(60 * limit * EVALUATION_SHARE, self._evaluation_s)

    @property
    def _evaluation_s(self) -> float:
        """Seconds that an evaluation is expected to take: at first, those of learning from as many windows."""
        return self._seconds_per_window * self._windows.held_out.shape[0]

    @property
    def is_evaluation_due(self) -> bool:
        """Whether enough was learnt since the last evaluation."""
        progress = self.training.progress
        much = progress.num_since >= BATCHES_PER_EVALUATION or progress.seconds_since >= 60 * MINUTES_PER_EVALUATION
        return much and progress.seconds_since >= LEARNING_PER_EVALUATION * self._evaluation_s

    def learn(self) -> None:
        """Compute the gradient of a part of a batch, and learn from the batch if that was the last one."""
        if self._left is None:
            self._left = self._windows.batch(self.training.progress.num_batches, self._batch_size, self._options.seed)
        part, left = self._left[: self._part_size], self._left[self._part_size :]
        is_last = left.shape[0] == 0
        seconds_per_window = self.training.add(part, self._decay if is_last else None) / part.shape[0]
        if not self._has_drafted:
            self._seconds_per_window = seconds_per_window
        self._part_size = max(1, min(self._batch_size, int(PART_S / max(seconds_per_window, 1e-9))))
        self._left = None if is_last else left

    @property
    def batch_share(self) -> float:
        """The part of the present batch whose gradient is computed, in [0, 1)."""
        num_windows = min(self._batch_size, self._windows.learnt.shape[0])
        return 0.0 if self._left is None else 1.0 - self._left.shape[0] / num_windows

    def end_batch(self) -> None:
        """Learn from what was added of a batch whose other parts are no longer wanted."""
        self._left = None
        if self.training.has_added:
            self.training.learn(self._decay)

    @property
    def _decay(self) -> float:
        """The factor in [0, 1] by which the learning rate falls as a limited time ends."""
        return min(1.0, max(0.0, 1.0 - self.training.progress.seconds / self._learning_ends_s) / DECAY_SHARE)

    @property
    def held_out_share(self) -> float:
        """The part of the held-out text that an evaluation has drafted for, in [0, 1]; 1 if its time is up."""
        num_drafted = len(self._drafted)
        limit, seconds = self._options.max_minutes, num_drafted * self._seconds_per_window
        if limit is not None and seconds >= 60 * limit * EVALUATION_SHARE:
            return 1.0
        return num_drafted / len(self._windows.held_out)

    def draft(self) -> None:
        """Draft for a part of the held-out text."""
        before, begin = self.training.progress.seconds, len(self._drafted)
        windows = self._windows.held_out[begin : begin + self._part_size]
        self._drafted += self.training.draft(windows)
        if begin == 0:  # the last part may be smaller
            self._seconds_per_window = (self.training.progress.seconds - before) / len(windows)
            self._has_drafted = True

    def evaluate(self) -> Evaluation:
        """Write the drafter if it is the best so far on held-out text, and save the state of the training."""
        assert self._made is not None
        options, windows, before = self._options, self._windows, self.training.progress
        acceptance = acceptance_by_category(self._drafted, windows.held_out_categories[: len(self._drafted)])
        accepted, self._drafted = acceptance[ALL].num_accepted, []
        is_best = accepted > before.best or not (options.out / "config.json").exists()
        if is_best:
            card = model_card(options, acceptance, before.num_tokens, windows.learnt.shape[0])
            write_drafter(options.out, self._made, self._config, getattr(mx, options.dtype), card)
        self.training.progress = progress = before.evaluated(accepted)
        evaluation = Evaluation(
            batches=progress.num_batches,
            tokens=progress.num_tokens,
            minutes=round(progress.seconds / 60, 2),
            loss=round(before.loss_since / before.num_since, 4) if before.num_since else None,
            acceptance=acceptance,
            accepted=round(accepted, 4),
            learning_rate=progress.learning_rate,
            is_best=is_best,
        )
        self.save()
        file = self._folder / "log.jsonl"
        with writing(file), file.open("a", encoding="utf-8") as log:
            log.write(json.dumps(attrs.asdict(evaluation)) + "\n")
        return evaluation

    def save(self) -> None:
        """Save the state of the training."""
        self._keep_identity()
        self.training.save(self._folder)

    def end(self) -> None:
        """Delete the target's hidden states: they are large, and a training that goes on computes them again."""
        shutil.rmtree(self._folder / STATES, ignore_errors=True)


def load_target(name: str) -> tuple[Module, Any]:
    """The target and its tokenizer. On the CPU in float32, in which MLX multiplies faster there. Raises: as mlx-lm."""
    model, tokenizer = read_model(name)
    if mx.default_device() == mx.Device(mx.cpu):
        model.set_dtype(mx.float32)
    mx.eval(model)
    return model, wrapped(tokenizer, f"target {name!r}")


def initialize(model: Eagle3, seed: int) -> None:
    """Give a drafter random weights, drawn as MLX's layers draw theirs, but from a seed of their own."""
    weights = weights_of(model)
    for i, (name, value) in enumerate(weights.items()):
        if value.ndim == 2:
            bound, key = value.shape[1] ** -0.5, mx.random.key(seed * len(weights) + i)
            weights[name] = mx.random.uniform(-bound, bound, value.shape, key=key)
    model.load_weights([*weights.items()])
    mx.eval(model.state)


def _learning(work: Distillation) -> str:
    progress = work.training.progress
    said = f"learning: batch {progress.num_batches + 1:,}"
    if work.batch_share > 0.0:
        said += f" ({work.batch_share:.0%} of it)"
    if progress.num_since:
        loss = progress.loss_since / progress.num_since
        rate = progress.num_tokens / progress.seconds
        said += f", {rate:,.0f} tokens/s ({rate * 3600 / 1e6:,.2f} million an hour), loss {loss:.3f}"
    return said if math.isinf(work.seconds_left) else f"{said}, {_minutes(work.seconds_left)} left"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"
