"""mlx-lm's models, as the actors see them."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import attrs
import mlx.core as mx
import mlx_lm
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from actors.mlx.cache_options import CacheOptions
from actors.mlx.cache_rewind import (
    can_checkpoint,
    can_trim_after,
    checkpoint_bytes,
    kind,
    lengths,
    window,
)
from actors.mlx.layer_evaluation import evaluating_layers
from actors.mlx.sequence import MLXSequence
from actors.model import RewindMode
from actors.probe import PROBED, check_logits
from protocol.errors import ModelError

logger = logging.getLogger("outrider")

_warned_of: set[str] = set()  # cache classes and families, once a process

# Families in which a pass over several tokens gives other logits than a pass for each: what one verify pass
# says of a proposal is then not what plain decoding would say. phi3small adds its mask of yes and no to the scores
# instead of masking them, so tokens see those after them; in plamo3 a window is one token wider in such a pass.
_ONE_BY_ONE = {"mlx_lm.models.phi3small", "mlx_lm.models.plamo3"}

# phi3small forbids ids that have no meaning by writing to their logits, the last of them 100351, whatever the size of
# its vocabulary (mlx-lm 0.32.2). MLX checks no bounds: with a smaller one, it writes over somebody else's memory, and
# the process dies sooner or later. The published models have so many ids.
_LEAST_OF_PHI3SMALL = 100_352


def load(path_or_hub_id: str | Path) -> tuple[Module, TokenizerWrapper]:
    """A model and its tokenizer, weights evaluated on the calling thread.

    Raises: ModelError: the model would crash the process, by what its configuration says. And what mlx-lm raises, which
        is of many kinds; a worker's `JobError` gathers them.
    """
    _check_config(path_or_hub_id)
    model, tokenizer, *_ = mlx_lm.load(str(path_or_hub_id))
    return model, tokenizer


def tokenizer_wrapper(tokenizer: Any) -> TokenizerWrapper:
    """mlx-lm's wrapper around a Hugging Face tokenizer, or the wrapper itself."""
    return tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)


class MLXModel:
    """An mlx-lm model on its own thread.

    Made on that thread.
    """

    def __init__(self, model: Module, options: CacheOptions, named: str = "the model") -> None:
        """Wrap a model whose weights are evaluated. Two tokens are fed to see what it is.

        Args:
            model: an mlx-lm language model.
            options: of its caches.
            named: what messages call it.

        Raises:
            ModelError: it would crash the process, gives something else than logits, or leaves a cache that it is given
                as it is; or the options insist on a way to rewind that some layer's cache does not have.
            What the model raises.
        """
        self._model = model
        for part in model.modules():
            if type(part).__module__ == "mlx_lm.models.phi3small" and hasattr(part, "args"):
                _check_phi3small(named, part.args.vocab_size)
        one_by_one = any(type(part).__module__ in _ONE_BY_ONE for part in model.modules())
        self._options = attrs.evolve(options, one_by_one=one_by_one)
        # A forward pass, since no attribute names the width of the logits in all architectures.
        cache = options.make_cache(model)
        logits = model(mx.array([PROBED]), cache=cache)
        self._vocab_size = check_logits(named, logits, (1, len(PROBED), None))
        mx.eval(logits)
        if others := {have for layer in cache for have in lengths(layer)} - {len(PROBED)}:
            raise ModelError(
                f"{named} leaves {max(others)} tokens in its cache after {len(PROBED)}; a language model must hand the "
                "`cache` that it is called with on to its layers"
            )
        self._check_rewind_modes(options.make_cache(model))
        self._check_quantisation(cache)

    def evaluating_layers(self) -> AbstractContextManager[None]:
        """While in force, the model's layers evaluate what they compute where a line asks for that.

        Not for two threads at a time: a model may be target and drafter in one.
        """
        return evaluating_layers(self._model)

    @property
    def module(self) -> Module:
        """mlx-lm's own model."""
        return self._model

    @property
    def vocab_size(self) -> int:
        """See `Model.vocab_size`."""
        return self._vocab_size

    @property
    def context_length(self) -> int | None:
        """See `Model.context_length`."""
        return _context_length(getattr(self._model, "args", None))

    @property
    def cache_options(self) -> dict[str, int | None]:
        """By name, the options that decide what is in its caches."""
        options = self._options
        named: dict[str, int | None] = {"max_kv_size": options.max_kv_size, "kv_bits": options.kv_bits}
        if options.kv_bits is not None:
            named |= {"kv_group_size": options.kv_group_size, "quantized_kv_start": options.quantized_kv_start}
        return named

    def open_sequence(self, *, beside_another: bool) -> MLXSequence:
        """See `Model.open_sequence`."""
        # Slices would break the pipelining that a GPU lives from, and the throttle that they avoid
        # is one of MLX's CPU scheduler.
        on_cpu = mx.default_device().type == mx.DeviceType.cpu
        return MLXSequence(self._model, self._options, vocab_size=self._vocab_size, in_slices=beside_another and on_cpu)

    def anatomy(self) -> Anatomy:
        """What the model is made of, and how its caches can be rewound; feeds a few tokens to see."""
        weights = [cast(mx.array, pair[1]) for pair in tree_flatten(self._model.parameters())]
        sequence = MLXSequence(self._model, self._options, vocab_size=self._vocab_size, in_slices=False)
        sequence.feed((0,) * 8, 0)
        windows = [size for layer in sequence.cache if (size := window(layer)) is not None]
        limit = min(windows, default=None)
        return Anatomy(
            family=str(getattr(getattr(self._model, "args", None), "model_type", type(self._model).__module__)),
            num_parameters=sum(leaf.size for leaf in weights),
            num_bytes=sum(leaf.nbytes for leaf in weights),
            dtypes=tuple(sorted({str(leaf.dtype).removeprefix("mlx.core.") for leaf in weights})),
            cache_kinds=dict(Counter(kind(layer) for layer in sequence.cache)),
            rewind_mode=self._options.rewind_mode(sequence.cache, 8, 4),
            window=limit,
            rewind_mode_beyond_window=None if limit is None else self._options.rewind_mode(sequence.cache, 8, limit),
            checkpoint_bytes=sum(checkpoint_bytes(layer) for layer in sequence.cache),
        )

    def _check_quantisation(self, cache: list[Any]) -> None:
        """Refuse groups that the model's heads cannot be divided into; a cache that holds something is quantised."""
        try:
            maybe_quantize_kv_cache(cache, 0, self._options.kv_group_size, self._options.kv_bits)
        except ValueError as error:
            raise ModelError(
                f"kv_bits={self._options.kv_bits} with kv_group_size={self._options.kv_group_size} does not fit this "
                f"model: {error}; use a kv_group_size that divides the size of its heads"
            ) from error

    def _check_rewind_modes(self, cache: list[Any]) -> None:
        """Refuse a rung that was insisted on and is not there; warn of caches that nothing is known of."""
        wanted = self._options.rewind
        if self._options.one_by_one:
            family = type(self._model).__module__.rpartition(".")[2]
            why = f"mlx-lm's {family} reads several tokens at once otherwise than one by one"
            if wanted in ("trim", "checkpoint"):
                raise ModelError(f'rewind="{wanted}" is of no use here: {why}; use "auto" or "none"')
            if wanted == "auto" and family not in _warned_of:
                _warned_of.add(family)
                logger.warning("%s: the model is fed one token at a time", why)
        if wanted == "trim" and (fixed := _names(layer for layer in cache if not can_trim_after(layer, 1))):
            raise ModelError(f'rewind="trim" needs caches that can be trimmed, and this model has {fixed}; use "auto"')
        rotating = _names(layer for layer in cache if window(layer) is not None and hasattr(layer, "to_quantized"))
        if self._options.kv_bits is not None and rotating:
            raise ModelError(f"kv_bits cannot quantise {rotating}, which mlx-lm has no way to do; leave it None")
        unknown = _names(layer for layer in cache if not can_checkpoint(layer))
        if wanted == "checkpoint" and unknown:
            raise ModelError(f'rewind="checkpoint" cannot keep the state of {unknown}; use "auto" or "none"')
        for name in unknown:
            if wanted == "auto" and name not in _warned_of:
                _warned_of.add(name)
                logger.warning("nothing is known of cache class %s: its model is fed one token at a time", name)


@attrs.frozen
class Anatomy:
    """What is to be known of a model before it speculates.

    Attributes:
        family: its architecture, as its configuration names it.
        num_parameters, num_bytes: of its weights; quantised ones count as they are packed.
        dtypes: in which they are held.
        cache_kinds: how many layers have which kind of cache.
        rung: how a round can be undone at first.
        window: tokens after which some cache begins to forget, or None.
        rung_beyond_window: how a round can be undone from there on, or None where there is no window.
        checkpoint_bytes: what one checkpoint keeps in memory, at a short text.
    """

    family: str
    num_parameters: int
    num_bytes: int
    dtypes: tuple[str, ...]
    cache_kinds: dict[str, int]
    rewind_mode: RewindMode
    window: int | None
    rewind_mode_beyond_window: RewindMode | None
    checkpoint_bytes: int


# --- what would crash -----------------------------------------------------------------------------


def _check_config(path_or_hub_id: str | Path) -> None:
    """Refuse a directory with a model that would crash the process; one on the hub is known once it is loaded."""
    try:
        config = json.loads((Path(path_or_hub_id) / "config.json").read_text())
        family, vocab_size = config["model_type"], config["vocab_size"]
    # There is none, or what is wrong with it mlx-lm will say, too.
    except (OSError, ValueError, TypeError, KeyError):
        return
    if family == "phi3small" and isinstance(vocab_size, int):
        _check_phi3small(repr(str(path_or_hub_id)), vocab_size)


def _check_phi3small(named: str, vocab_size: int) -> None:
    if vocab_size < _LEAST_OF_PHI3SMALL:
        raise ModelError(
            f"{named} is a phi3small with a vocab_size of {vocab_size}, and mlx-lm's phi3small writes to the logits of "
            f"ids up to {_LEAST_OF_PHI3SMALL - 1} in any case, which crashes the process; its vocab_size must be at "
            f"least {_LEAST_OF_PHI3SMALL}, as that of the published models is"
        )


# --- memory and bounds ----------------------------------------------------------------------------


def _context_length(args: Any) -> int | None:
    text = getattr(args, "text_config", None)
    if isinstance(text, dict):
        args = text
    get = args.get if isinstance(args, dict) else lambda name: getattr(args, name, None)
    for name in ("max_position_embeddings", "max_sequence_length", "max_seq_len", "n_positions"):
        if isinstance(length := get(name), int) and length > 0:  # type: ignore[no-untyped-call]
            break
    else:
        return None
    scaling = get("rope_scaling")  # type: ignore[no-untyped-call]
    if isinstance(scaling, dict):
        original = scaling.get("original_max_position_embeddings")
        factor = scaling.get("factor")
        if isinstance(original, (int, float)) and isinstance(factor, (int, float)):
            length = max(length, int(original * factor))
    return length


def _names(layers: Iterable[Any]) -> list[str]:
    return sorted({type(layer).__name__ for layer in layers})
