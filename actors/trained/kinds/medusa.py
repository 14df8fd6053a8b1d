"""Medusa: heads on a target's last hidden state, each of which predicts one token further on.

Head i reads the hidden state that the target's own head reads at position t, and predicts the token at position
t + 2 + i. No head knows what another one predicts.

Source: Cai, Li, Geng, Peng, Lee, Chen and Dao 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple
Decoding Heads", arXiv 2401.10774. Files: those of the authors (https://github.com/FasterDecoding/Medusa).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import mlx.core as mx
from mlx.nn.layers.activations import silu
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear

from actors.mlx.sequence_state import SequenceState
from actors.trained.drafter_files import DrafterFiles
from actors.trained.kinds.target_parts import Attached, Layer, check_target, final_norm_of
from actors.trained.kinds.torch_file import load_torch_file
from actors.trained.shared_reading import ReadingPart, SharedPass, SharedReading
from actors.trained.trained_sequence import TrainedSequence, check_features, check_state
from protocol.errors import ModelError
from protocol.messages import Features

# "<head>.<layer>.linear.weight" of a block, "<head>.<layer>.weight" of the last layer; whole models have a prefix.
_WEIGHT = re.compile(
    r"(?:medusa_head\.)?(?P<head>\d+)\.(?P<layer>\d+)\.(?P<rest>(?:linear\.)?(?:weight|bias|scales|biases))"
)
_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
NUM_KEPT = 64  # positions whose features are kept: a drafter that catches up reads at most as many at a time


class MedusaBlock(Module):
    """A residual block."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.linear = Linear(hidden_size, hidden_size)

    def __call__(self, hidden: mx.array) -> mx.array:
        result: mx.array = hidden + silu(self.linear(hidden))
        return result


class MedusaHead(Module):
    """The head of one position."""

    def __init__(self, num_blocks: int, hidden_size: int, vocab_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks = [MedusaBlock(hidden_size) for _ in range(num_blocks)]
        self.output = Linear(hidden_size, vocab_size, bias=False)

    def __call__(self, hidden: mx.array) -> mx.array:
        """(…, hidden size) normalised hidden states of the target to (…, V) logits; lazy."""
        for block in self.blocks:
            hidden = block(hidden)
        logits: mx.array = self.output(hidden)
        return logits


class Medusa(Module):
    """The heads. The hidden states that they read are the target's."""

    def __init__(self, num_heads: int, num_blocks: int, hidden_size: int, vocab_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.heads = [MedusaHead(num_blocks, hidden_size, vocab_size) for _ in range(num_heads)]


class HeadPass(SharedPass[mx.array]):
    """The pass of a head: a text's part is (n, hidden size) that it reads, and the result (n, V) logits."""

    def __init__(self, head: Layer) -> None:
        self._head = head

    def together(self, parts: Sequence[mx.array]) -> list[mx.array]:
        ends = [*accumulate(part.shape[0] for part in parts)]
        return list(mx.split(self._head(mx.concatenate([*parts])), ends[:-1]))


class HeadSequence(TrainedSequence):
    """See `TrainedSequence`. Predictions depend only on the last features, and on the distance to them."""

    def __init__(self, project: Layer, heads: Sequence[HeadPass], feature_width: int, vocab_size: int) -> None:
        """Make an empty sequence. `project` turns features into what the heads read; the nearest head is first."""
        super().__init__(feature_width)
        self._project, self._heads, self._vocab_size = project, heads, vocab_size
        self._num_kept = NUM_KEPT
        # What the heads read of the last positions, the first of which is `_begin`.
        self._begin = 0
        self._hidden: mx.array | None = None
        self._rows: dict[int, mx.array] = {}  # logits by head, at the last position: siblings in the tree have the same

    def give_nothing(self, num_tokens: int) -> None:
        """All positions are kept, so that each timed pass runs a head."""
        self._num_kept = num_tokens
        super().give_nothing(num_tokens)

    @property
    def _num_known(self) -> int:
        return self._begin + (0 if self._hidden is None else self._hidden.shape[0])

    @property
    def foreseen(self) -> int:
        return self.num_given + 1 + len(self._heads)

    def feed_lazy(self, token: mx.array) -> mx.array:
        """Does not read the token, since nothing depends on it."""
        return super().feed_lazy(mx.array([0]))

    def forget(self) -> None:
        super().forget()
        self._rows.clear()

    def close(self) -> None:
        super().close()
        self._hidden = None

    @property
    def num_bytes(self) -> int:
        return 0 if self._hidden is None else int(self._hidden.nbytes)

    def reuse(self, length: int) -> None:
        """Drops the features of what the texts do not share, which were the other text's."""
        super().reuse(length)
        num_kept = min(self._num_common, self._num_known) - self._begin
        self._hidden = None if self._hidden is None or num_kept <= 0 else self._hidden[:num_kept]
        self.num_given = 0 if self._hidden is None else self._num_known
        self._rows.clear()

    def take_state(self, tokens: tuple[int, ...]) -> SequenceState | None:
        """None also without features."""
        self._look_at_arrived()
        if self._hidden is None or not tokens:
            return None
        return SequenceState(tokens, (), features=Features(self._begin, self._hidden))

    def put_state(self, state: SequenceState) -> None:
        check_state(state, num_layers=0, has_features=True)
        assert state.features is not None
        check_features(state.features, self._project(mx.zeros((1, self.feature_width))))
        self._begin, self._hidden = state.features.start, state.features.values
        self._tokens, self.num_given = [*state.tokens], self._num_known

    def _logits(self, position: int) -> SharedReading[mx.array]:
        if position <= self._begin or self._hidden is None:
            return mx.zeros((1, self._vocab_size))
        # The token at position p + 1 is predicted by the first head from the features of position p - 1.
        first, end = position - 1 - self._begin, min(len(self._tokens), self._num_known + 1) - 1 - self._begin
        last = self._hidden.shape[0] - 1
        if first < last:
            logits: mx.array = yield ReadingPart(self._heads[0], self._hidden[first : max(first + 1, end)])
            return logits
        head = first - last
        if head >= len(self._heads):
            return mx.zeros((1, self._vocab_size))
        if head not in self._rows:
            self._rows[head] = yield ReadingPart(self._heads[head], self._hidden[last:])
        return self._rows[head]

    def _look_at(self, start: int, features: mx.array) -> None:
        start, features = max(start, start + features.shape[0] - self._num_kept), features[-self._num_kept :]
        hidden = self._project(features)
        if self._hidden is not None and self._begin <= start <= self._num_known:
            # Some may come a second time, if the target has lost its cache.
            hidden = mx.concatenate([self._hidden[: start - self._begin], hidden])[-self._num_kept :]
        end = start + features.shape[0]
        # A copy: a slice would keep the features of a whole prompt.
        self._hidden, self._begin = mx.contiguous(hidden), end - hidden.shape[0]
        mx.eval(self._hidden)
        self._rows.clear()


def load_medusa(files: DrafterFiles) -> Medusa:
    """Heads from their folder. The weights say how many there are: some of the authors' configurations have a smaller
    number. Raises: ModelError: a file is missing or damaged, or does not fit.
    """
    found, config = _weights(files), files.config
    num_heads = 1 + max(int(key["head"]) for key in found)
    num_layers = max(int(key["layer"]) for key in found)  # the one after the blocks is the output
    wanted_heads, wanted_layers = config.get("medusa_num_heads", num_heads), config.get("medusa_num_layers", num_layers)
    if wanted_heads > num_heads or wanted_layers != num_layers:
        raise ModelError(
            f"the configuration in {files.folder} asks for {wanted_heads} heads of {wanted_layers} blocks, and the "
            f"weights have {num_heads} of {num_layers}"
        )
    weights = {}
    for key, value in found.items():
        part = "output" if int(key["layer"]) == num_layers else f"blocks.{key['layer']}"
        weights[f"heads.{key['head']}.{part}.{key['rest']}"] = value
    output = weights.get("heads.0.output.weight")
    if output is None or output.ndim != 2:
        raise ModelError(f"the Medusa heads in {files.folder} are damaged: the first one has no output")
    # A quantised output has another width; the blocks have biases of the width of what they read.
    hidden_size = weights.get("heads.0.blocks.0.linear.bias", output).shape[-1]
    model = Medusa(num_heads, num_layers, hidden_size, output.shape[0])
    files.fill(model, weights)
    return model


def attach_medusa(files: DrafterFiles, target: Module, target_vocab_size: int) -> Attached:
    """See `TrainedDrafter`."""
    model = load_medusa(files)
    hidden_size, vocab_size = model.hidden_size, model.vocab_size
    check_target(files, target, target_vocab_size, hidden_size=hidden_size, vocab_size=vocab_size)
    # The heads read what the target's own head reads.
    final_norm = final_norm_of(target, files.named)
    passes = [HeadPass(head) for head in model.heads]
    open_sequence = partial(HeadSequence, final_norm, passes, hidden_size, vocab_size)
    return Attached((len(target.layers),), vocab_size, open_sequence, model, vocab_size, passes=passes)


def _weights(files: DrafterFiles) -> dict[re.Match[str], mx.array]:
    """The weights of all heads, by the parts of their names in the files."""
    safe, other = (files.folder / name for name in _FILES)
    try:
        loaded = load_torch_file(other) if other.exists() and not safe.exists() else None
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{files.named} in {files.folder} cannot be read: {error}") from error
    if loaded is None:
        loaded = files.weights(safe.name if safe.exists() else "*.safetensors")
    weights = {key: value for name, value in loaded.items() if (key := _WEIGHT.fullmatch(name))}
    if not weights:
        raise ModelError(f"there are no weights of Medusa heads ({' or '.join(_FILES)}) in {files.folder}")
    return weights
