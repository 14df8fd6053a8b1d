"""An mlx-lm model behind the interface of `actors.model`, and a description of it, its `Anatomy`."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import attrs
import mlx.core as mx
import mlx_lm
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from mlx.nn.layers.quantized import quantize as quantize_modules
from mlx.utils import tree_flatten
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_adapters

from actors.mlx.cache_kinds import kind_of, kinds_of, lengths_of
from actors.mlx.cache_options import CacheOptions
from actors.mlx.layer_evaluation import LayerEvaluation, evaluating_layers
from actors.mlx.sequence import MLXSequence
from actors.mlx.shared_passes import SharedPasses
from actors.model import RewindMode
from actors.probe import PROBED, check_logits
from actors.trained.features import FeatureRecorder
from protocol.cache_size import CacheSize
from protocol.errors import ModelError

logger = logging.getLogger("outrider")

S = TypeVar("S", bound=MLXSequence)

_warned_of: set[str] = set()  # cache classes and model families that this process has warned of

# Families that are fed one token at a time, because a pass over several tokens gives other logits than a pass for each:
# phi3small adds its boolean mask to the scores instead of masking them, so tokens see later tokens; in plamo3, the
# window of such a pass is one token wider.
_ONE_BY_ONE = {"mlx_lm.models.phi3small", "mlx_lm.models.plamo3"}

# phi3small forbids meaningless ids by writing to their logits, up to id 100351, whatever the size of its vocabulary
# (mlx-lm 0.32.2). MLX checks no bounds, so with a smaller vocabulary than that of the published models it overwrites
# other memory, and sooner or later the process crashes.
_MIN_PHI3SMALL_VOCAB_SIZE = 100_352


def dtypes_of(module: Module) -> tuple[str, ...]:
    """The types of a module's weights, by name."""
    return tuple(sorted({str(weight.dtype).removeprefix("mlx.core.") for weight in weights_of(module).values()}))


def weights_of(module: Module) -> dict[str, mx.array]:
    """The weights of a module, by name."""
    return dict(cast(list[tuple[str, mx.array]], tree_flatten(module.parameters())))


def load(
    path_or_hub_id: str | Path,
    *,
    adapter: Path | None = None,
    quantize: Mapping[str, Any] | None = None,
    is_lazy: bool = False,
    **mlx_lm_options: Any,
) -> tuple[Module, TokenizerWrapper]:
    """Load a model and its tokenizer, by `mlx_lm.load` and its options. The weights are evaluated on the calling
    thread; if `is_lazy`, each stays in its file until it is first used, on the same thread.

    Weights are quantised to `bits`, `group_size` and `mode` before an adapter, given by its directory, is applied.

    Raises: ModelError: the model would crash the process, or `quantize` is given for one that is quantised already; and
    whatever mlx-lm raises, which is of many kinds. A worker wraps it in a `JobError`.
    """
    _check_config(path_or_hub_id)
    # Lazily, so that weights which quantisation replaces are not loaded into memory first.
    model, tokenizer, *_ = mlx_lm.load(str(path_or_hub_id), lazy=is_lazy or quantize is not None, **mlx_lm_options)
    if quantize is not None:
        quantize_weights(model, **quantize)
    if adapter is not None:
        model = load_adapters(model, str(adapter))
        model.eval()
    if not is_lazy:
        mx.eval(model.parameters())
    return model, tokenizer


def is_quantized(model: Module) -> bool:
    """Whether some weights of a model are quantised."""
    return any(hasattr(module, "bits") and hasattr(module, "group_size") for module in model.modules())


def quantize_weights(model: Module, *, bits: int, group_size: int, mode: str, is_partly: bool = False) -> None:
    """Quantise what `mlx_lm.convert` does. Raises: ModelError: some are already; or all are, if `is_partly`."""
    modules = [module for module in model.modules() if hasattr(module, "to_quantized")]
    if is_quantized(model) and not (is_partly and modules):
        raise ModelError("its weights are quantised already; leave quantize out, or give the original model")
    predicate = getattr(model, "quant_predicate", None)

    def wanted(path: str, module: Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % group_size != 0:
            return False
        return True if predicate is None else cast(bool | dict[str, Any], predicate(path, module))

    quantize_modules(model, group_size, bits, mode=mode, class_predicate=wanted)


class MLXModel(SharedPasses):
    """An mlx-lm model on its own thread, on which it must also be made."""

    def __init__(
        self,
        model: Module,
        options: CacheOptions,
        named: str = "the model",
        layer_evaluation: LayerEvaluation | None = None,
    ) -> None:
        """Wrap a model whose weights are evaluated, and feed it two tokens to check it. Messages call it `named`.

        Raises: ModelError: it would crash the process, gives no logits or does not fill its cache; or its caches cannot
        do what the options demand. And whatever the model raises.
        """
        self._layer_evaluation = layer_evaluation
        for module in model.modules():
            if type(module).__module__ == "mlx_lm.models.phi3small" and hasattr(module, "args"):
                _check_phi3small(named, module.args.vocab_size)
        one_by_one = any(type(module).__module__ in _ONE_BY_ONE for module in model.modules())
        # A forward pass tells the width of the logits, which no attribute has in all architectures.
        cache = options.make_cache(model)
        logits = model(mx.array([PROBED]), cache=cache)
        vocab_size = check_logits(named, logits, (1, len(PROBED), None))
        mx.eval(logits)
        if wrong_lengths := lengths_of(cache) - {len(PROBED)}:
            raise ModelError(
                f"{named} leaves {max(wrong_lengths)} tokens in its cache after {len(PROBED)}; a language model must "
                "pass the `cache` that it is called with to its layers"
            )
        super().__init__(model, attrs.evolve(options, one_by_one=one_by_one), vocab_size=vocab_size)
        self.context_length = context_length_of(model)
        self._check_rewind_modes(options.make_cache(model))
        self._check_quantisation(cache)
        self.cache_size = CacheSize()
        with suppress(Exception):  # of any kind: what the model's own code raises, its first pass reports
            self.cache_size = options.size(model, are_rows=self._obstacle is None)

    def evaluating_layers(self) -> AbstractContextManager[None]:
        """While in force, the model's layers evaluate their results for sequences that ask for it."""
        return evaluating_layers(self.module)

    @property
    def cache_options(self) -> dict[str, int | None]:
        """The options that affect the cached values, by name."""
        options = self._options
        by_name: dict[str, int | None] = {"max_kv_size": options.max_kv_size, "kv_bits": options.kv_bits}
        if options.kv_bits is not None:
            by_name |= {"kv_group_size": options.kv_group_size, "quantized_kv_start": options.quantized_kv_start}
        return by_name

    def open_sequence(self, *, alongside_model: bool) -> MLXSequence:
        return self.open_sequence_of(MLXSequence, alongside_model=alongside_model)

    def open_sequence_of(self, kind: type[S], *, alongside_model: bool) -> S:
        """As `open_sequence`, with a class of the caller's choice."""
        on_cpu = mx.default_device().type == mx.DeviceType.cpu
        by_device = LayerEvaluation.WAITING if on_cpu else LayerEvaluation.WHOLE
        layer_evaluation = (self._layer_evaluation or by_device) if alongside_model else LayerEvaluation.WHOLE
        return kind(
            self.module,
            self._options,
            vocab_size=self.vocab_size,
            layer_evaluation=layer_evaluation,
            recorder_slot=self.recorder_slot,
        )

    @property
    def records_features(self) -> bool:
        return self.recorder_slot.recorder is not None

    def record_features(self, layer_ids: Sequence[int] | None) -> None:
        """From the next pass on, record the inputs of these layers (their number stands for the last one's output).

        None records nothing. `evaluating_layers` must be in force. See also `TextFeatures.want`.
        """
        self.recorder_slot.recorder = None if layer_ids is None else FeatureRecorder(self.module, layer_ids)

    @property
    def num_ranks(self) -> int:
        """How many ranks the model is sharded over."""
        return 1

    @cached_property
    def num_bytes(self) -> int:
        return sum(weight.nbytes for weight in weights_of(self.module).values())

    def anatomy(self) -> Anatomy:
        """What the model consists of, and what its caches can do. Feeds it some tokens to find out."""
        weights = weights_of(self.module).values()
        sequence = MLXSequence(self.module, self._options, vocab_size=self.vocab_size)
        sequence.feed((0,) * 8, 0)
        kinds = list(kinds_of(sequence.cache))
        windows = [size for kind, layer in kinds if (size := kind.window(layer)) is not None]
        shortest_window = min(windows, default=None)
        return Anatomy(
            family=str(getattr(getattr(self.module, "args", None), "model_type", type(self.module).__module__)),
            num_parameters=sum(leaf.size for leaf in weights),
            num_bytes=self.num_bytes,
            dtypes=dtypes_of(self.module),
            cache_kinds=dict(Counter(kind_of(layer).name(layer) for layer in sequence.cache)),
            rewind_mode=self._options.rewind_mode(sequence.cache, 8, 4),
            window=shortest_window,
            rewind_mode_beyond_window=(
                None if shortest_window is None else self._options.rewind_mode(sequence.cache, 8, shortest_window)
            ),
            checkpoint_bytes=sum(kind.checkpoint_bytes(layer) for kind, layer in kinds),
            sharing_obstacle=self.sharing_obstacle(),
            num_layers=len(getattr(self.module, "layers", ())),
        )

    def _check_quantisation(self, cache: list[Any]) -> None:
        try:
            maybe_quantize_kv_cache(cache, 0, self._options.kv_group_size, self._options.kv_bits)
        except ValueError as error:
            raise ModelError(
                f"kv_bits={self._options.kv_bits} with kv_group_size={self._options.kv_group_size} does not fit this "
                f"model: {error}; use a kv_group_size that divides the size of its heads"
            ) from error

    def _check_rewind_modes(self, cache: list[Any]) -> None:
        wanted = self._options.rewind
        if self._options.one_by_one:
            family = type(self.module).__module__.rpartition(".")[2]
            why = f"mlx-lm's {family} gives other logits for several tokens at once than one by one"
            if wanted in ("trim", "checkpoint"):
                raise ModelError(f'rewind="{wanted}" is not possible: {why}; use "auto" or "none"')
            if wanted == "auto" and family not in _warned_of:
                _warned_of.add(family)
                logger.warning("%s: the model is fed one token at a time", why)
        if wanted == "trim" and (
            fixed := _names(layer for kind, layer in kinds_of(cache) if not kind.can_trim_after(layer, 1))
        ):
            raise ModelError(f'rewind="trim" needs caches that can be trimmed, and this model has {fixed}; use "auto"')
        bounded = [layer for kind, layer in kinds_of(cache) if kind.window(layer) is not None]
        rotating = _names(layer for layer in bounded if hasattr(layer, "to_quantized"))
        if self._options.kv_bits is not None and rotating:
            raise ModelError(f"kv_bits cannot quantise {rotating}: mlx-lm does not support that; leave it out")
        unknown = _names(layer for kind, layer in kinds_of(cache) if not kind.can_keep_state)
        if wanted == "checkpoint" and unknown:
            raise ModelError(f'rewind="checkpoint" cannot keep the state of {unknown}; use "auto" or "none"')
        for name in unknown:
            if wanted == "auto" and name not in _warned_of:
                _warned_of.add(name)
                logger.warning("the cache class %s is not known: its model is fed one token at a time", name)


@attrs.frozen
class Anatomy:
    """What a model consists of, and what its caches can do."""

    family: str
    num_parameters: int  # elements of the weights; quantised ones count as they are packed
    num_bytes: int  # of the weights
    dtypes: tuple[str, ...]
    cache_kinds: dict[str, int]  # the number of layers, by `CacheKind.name`
    rewind_mode: RewindMode  # in a short text
    window: int | None  # tokens after which some cache begins to forget
    rewind_mode_beyond_window: RewindMode | None
    checkpoint_bytes: int  # of one checkpoint in a short text
    sharing_obstacle: str | None = None  # why texts cannot share a pass
    num_layers: int = 0


# --- what would crash -----------------------------------------------------------------------------


def _check_config(path_or_hub_id: str | Path) -> None:
    """Check a local model. One on the hub has no configuration here yet; `MLXModel` checks it once it is loaded."""
    try:
        config = json.loads((Path(path_or_hub_id) / "config.json").read_text())
        family, vocab_size = config["model_type"], config["vocab_size"]
    # There is no configuration, or mlx-lm will report what is wrong with it.
    except (OSError, ValueError, TypeError, KeyError):
        return
    if family == "phi3small" and isinstance(vocab_size, int):
        _check_phi3small(repr(str(path_or_hub_id)), vocab_size)


def _check_phi3small(named: str, vocab_size: int) -> None:
    if vocab_size < _MIN_PHI3SMALL_VOCAB_SIZE:
        raise ModelError(
            f"{named} is a phi3small with a vocab_size of {vocab_size}, and mlx-lm's phi3small writes to the logits of "
            f"ids up to {_MIN_PHI3SMALL_VOCAB_SIZE - 1}, which crashes the process; use a model whose vocab_size is at "
            f"least {_MIN_PHI3SMALL_VOCAB_SIZE}, as the published ones"
        )


# --- memory and bounds ----------------------------------------------------------------------------


def context_length_of(model: Module) -> int | None:
    """The largest number of positions of a model by its configuration; None if that names no bound."""
    args = getattr(model, "args", None)
    text = getattr(args, "text_config", None)
    given = text if isinstance(text, dict) else getattr(args, "__dict__", {})
    for name in ("max_position_embeddings", "max_sequence_length", "max_seq_len", "n_positions"):
        if isinstance(length := given.get(name), int) and length > 0:
            break
    else:
        return None
    # mlx-lm may apply the scaling of a configuration. For some models it reads no more than the base.
    ropes = [module for module in model.modules() if re.search("rope|rotary", type(module).__name__, re.IGNORECASE)]
    if not ropes or any(type(rope) is not RoPE or rope.scale != 1 for rope in ropes):
        lengths = [_scaled_length(each) for each in (given.get("rope_scaling"), given.get("rope_parameters"))]
        length = max(length, *lengths)
    return length


def _scaled_length(scaling: Any) -> int:
    """The length to which a rotary embedding of this configuration is scaled; 0 if it is not."""
    if not isinstance(scaling, dict):
        return 0
    if by_layer := {name: each for name, each in scaling.items() if isinstance(each, dict)}:
        return min((_scaled_length(each) for name, each in by_layer.items() if "sliding" not in name), default=0)
    original, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
    is_scaled = (scaling.get("type") or scaling.get("rope_type")) != "default"
    is_given = isinstance(original, (int, float)) and isinstance(factor, (int, float))
    return int(original * factor) if is_scaled and is_given else 0  # type: ignore[operator]


def _names(layers: Iterable[Any]) -> list[str]:
    return sorted({type(layer).__name__ for layer in layers})
