"""Texts that continue a prompt cache file of mlx-lm, which has the state of a prompt's caches and not its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import load_prompt_cache

from actors.mlx.cache_kinds import MisfitError, kind_of, kinds_of, lengths_of
from actors.mlx.model import MLXModel
from actors.mlx.sequence import MLXSequence
from actors.mlx.sequence_state import SequenceState
from actors.model import Model, RewindMode
from protocol.errors import RewindError, SessionFileError
from protocol.reprs import shown_path


class ContinuedSequence(MLXSequence):
    """A text in caches that held tokens before it, whose ids are not known, so that no other text may reuse them.

    To all callers it begins with its own first token: lengths and positions do not count those before.
    """

    _num_before = 0
    _beginning: SequenceState | None = None

    def begin(self, state: SequenceState) -> None:
        """Take the state of the tokens before; once, while the sequence is empty. Raises: as `put_state`."""
        self.put_state(state)
        self._num_before, self._beginning = len(state.tokens), state

    @property
    def length(self) -> int:
        return super().length - self._num_before

    # The caches of a batch begin with their texts, and a copy or another text would need the ids of the tokens before.
    reads_with_others = False
    reusable = None

    @property
    def can_be_row(self) -> bool:
        return False

    def prepare(self, num_tokens: int, settled: int) -> RewindMode:
        return super().prepare(num_tokens, settled + self._num_before)

    def rewind(self, length: int) -> int:
        return super().rewind(length + self._num_before) - self._num_before

    def check(self, length: int) -> None:
        self.check_caches(length + self._num_before)

    def forget(self) -> None:
        """The tokens before the text stay."""
        beginning = self._beginning
        self._num_before = 0
        super().forget()
        if beginning is not None:
            self.begin(beginning)

    def take_state(self, tokens: tuple[int, ...]) -> SequenceState | None:
        """None: a file would need the ids of the tokens before."""
        return None


def open_continued(model: Model, path: str, *, alongside_model: bool) -> ContinuedSequence:
    """A sequence that continues a prompt cache file. To be called on the model's thread.

    Raises: SessionFileError: the file cannot be read, or is not one of this model with these options of its caches.
    """
    assert isinstance(model, MLXModel)
    sequence = model.open_sequence_of(ContinuedSequence, alongside_model=alongside_model)
    try:
        sequence.begin(_read(Path(path).expanduser()))
    except (MisfitError, RewindError) as error:
        sequence.close()
        raise SessionFileError(
            f"the prompt cache file {shown_path(path)} does not fit the target: {error}; open the model that it was "
            "made with, and with the same kv_bits, kv_group_size and max_kv_size"
        ) from error
    return sequence


def _read(path: Path) -> SequenceState:
    """The state in a prompt cache file, with zeros in place of the unknown tokens."""
    # mlx and mlx-lm raise errors of many kinds for a file that is damaged.
    try:
        caches: list[Any] = load_prompt_cache(str(path))
    except Exception as error:
        raise SessionFileError(f"cannot read the prompt cache file {shown_path(str(path))}: {error}") from error
    unknown = {type(layer).__name__ for kind, layer in kinds_of(caches) if not kind.can_keep_state}
    if unknown:
        raise MisfitError(f"it has caches of classes that are not known, {', '.join(sorted(unknown))}")
    counts = lengths_of(caches)
    if len(counts) > 1:
        raise MisfitError(f"its caches hold different numbers of tokens, {', '.join(map(str, sorted(counts)))}")
    layers = tuple(kind_of(layer).take_state(layer) for layer in caches)
    mx.eval([layer.state for layer in caches])
    return SequenceState((0,) * next(iter(counts), 0), layers)
