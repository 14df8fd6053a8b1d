"""mlx-lm's models and caches, as the actors see them: the only module that knows their classes."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx_lm
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import maybe_set_recommended_wired_limit

from protocol.errors import ModelError, RewindError

Rewind = Literal["auto", "trim", "none"]


def load(path_or_hub_id: str | Path) -> tuple[Module, TokenizerWrapper]:
    """A model and its tokenizer, weights evaluated on the calling thread.

    Raises: what mlx-lm raises, which is of many kinds; a worker's `JobError` gathers them.
    """
    model, tokenizer, *_ = mlx_lm.load(str(path_or_hub_id))
    return model, tokenizer


def tokenizer_wrapper(tokenizer: Any) -> TokenizerWrapper:
    """mlx-lm's wrapper around a Hugging Face tokenizer, or the wrapper itself."""
    return tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)


class MLXModel:
    """An mlx-lm model on its own thread.

    While it is open, its layers evaluate what they compute when asked to; see `_evaluating_layers`.
    Close it to have the model back as it was.
    """

    def __init__(self, model: Module, rewind: Rewind = "auto") -> None:
        """Wrap a model whose weights are evaluated.

        Args:
            model: an mlx-lm language model.
            rewind: "auto" trims caches where they can be trimmed and else feeds one token at a time;
                "trim" insists on trimming; "none" never rewinds.

        Raises: ModelError: `rewind` is "trim" and some layer's cache cannot be trimmed.
        """
        self._model = model
        self._rewind = rewind
        # One forward pass of one token, since no attribute names the width of the logits in all
        # architectures.
        cache = make_prompt_cache(model)
        self._vocab_size: int = model(mx.array([[0]]), cache=cache).shape[-1]
        if rewind == "trim" and (fixed := sorted({type(c).__name__ for c in cache if not _can_trim_after(c, 1)})):
            raise ModelError(f'rewind="trim" needs caches that can be trimmed, and this model has {fixed}; use "auto"')
        self._restore_layers = _evaluating_layers(model)

    def close(self) -> None:
        """Undo what opening did to the model."""
        self._restore_layers()

    @property
    def vocab_size(self) -> int:
        """See `Model.vocab_size`."""
        return self._vocab_size

    @property
    def context_length(self) -> int | None:
        """See `Model.context_length`."""
        return _context_length(getattr(self._model, "args", None))

    def open_line(self, *, beside_another: bool) -> MLXLine:
        """See `Model.open_line`."""
        # Slices would break the pipelining that a GPU lives from, and the throttle that they avoid
        # is one of MLX's CPU scheduler.
        on_cpu = mx.default_device().type == mx.DeviceType.cpu
        return MLXLine(
            self._model,
            can_rewind=self._rewind != "none",
            in_slices=beside_another and on_cpu,
        )


class MLXLine:
    """One text in the caches of an mlx-lm model."""

    def __init__(self, model: Module, *, can_rewind: bool, in_slices: bool) -> None:
        self._model = model
        self._cache = make_prompt_cache(model)
        self._can_rewind = can_rewind
        self._in_slices = in_slices
        self._length = 0

    def feed(self, tokens: tuple[int, ...], num_logits: int) -> mx.array | None:
        """See `Line.feed`."""
        with _evaluate_in_slices(self._in_slices):
            logits: mx.array = self._model(mx.array([tokens]), cache=self._cache)
        self._grow(len(tokens))
        if num_logits:
            return logits[0, -num_logits:, :]
        mx.eval([layer.state for layer in self._cache])
        mx.clear_cache()
        return None

    def feed_lazy(self, token: mx.array) -> mx.array:
        """See `Line.feed_lazy`."""
        self._grow(1)
        logits: mx.array = self._model(token[None], cache=self._cache)
        return logits[0]

    def _grow(self, num_tokens: int) -> None:
        before, self._length = self._length, self._length + num_tokens
        # Caches grow in steps of 256, and MLX would keep each outgrown buffer for later.
        if before // 256 != self._length // 256:
            mx.clear_cache()

    def can_rewind_after(self, num_tokens: int) -> bool:
        """See `Line.can_rewind_after`."""
        return self._can_rewind and all(_can_trim_after(layer, num_tokens) for layer in self._cache)

    def rewind(self, length: int) -> None:
        """See `Line.rewind`."""
        if length == self._length:
            return
        if length > self._length or not self.can_rewind_after(0):
            raise RewindError(f"asked to rewind to {length} tokens a cache that holds {self._length} and cannot")
        for layer in self._cache:
            layer.trim(self._length - length)
        self._length = length
        self.check(length)

    def check(self, length: int) -> None:
        """See `Line.check`."""
        for i, layer in enumerate(self._cache):
            for have in _lengths(layer):
                if have != length:
                    raise RewindError(
                        f"layer {i} ({type(layer).__name__}) should hold {length} tokens, it holds {have}"
                    )

    def close(self) -> None:
        """See `Line.close`."""
        self._cache = []


# --- caches ---------------------------------------------------------------------------------------


def _can_trim_after(layer: Any, num_tokens: int) -> bool:
    """Whether a layer's cache could take `num_tokens` more now and lose them again.

    By class, since `is_trimmable` speaks of the moment only: a rotating cache that fills in mid-round
    cannot go back, and some classes that say they can cannot (`ConcatenateKVCache` forgets the number,
    not the tokens).
    """
    if type(layer) in (KVCache, QuantizedKVCache):
        return True
    if type(layer) is RotatingKVCache:
        return bool(layer.offset + num_tokens < layer.max_size)
    if type(layer) is CacheList:
        return all(_can_trim_after(part, num_tokens) for part in layer.caches)
    return False


def _lengths(layer: Any) -> Iterator[int]:
    """The numbers of tokens that a layer's cache says it has processed; none where it keeps no count."""
    if isinstance(layer, CacheList):
        for part in layer.caches:
            yield from _lengths(part)
    elif isinstance(offset := getattr(layer, "offset", None), int):
        yield offset


# --- evaluation in slices -------------------------------------------------------------------------

# A context variable: each thread has its own, and the same model may serve on two.
_in_slices = contextvars.ContextVar("in_slices", default=False)


@contextmanager
def _evaluate_in_slices(wanted: bool) -> Iterator[None]:
    reset = _in_slices.set(wanted)
    try:
        yield
    finally:
        _in_slices.reset(reset)


def _evaluating_layers(model: Module) -> Any:
    """Make the model's layers evaluate what they return, while `_in_slices` says so.

    MLX's scheduler counts the active tasks of the whole process and stalls every evaluating thread above
    ten. A target that is evaluated in one go keeps the count there, and a small drafter beside it runs
    three times slower. Evaluated layer by layer, it leaves room and is itself no slower.

    A layer gets a class of its own, made from its class; its attributes and parameters stay in place.

    Returns: a function that gives the layers their classes back.
    """
    layers = [
        layer
        for layer in getattr(model, "layers", ())
        # A model that is target and drafter in one has them already.
        if isinstance(layer, Module) and not type(layer).__name__.startswith(_SLICED)
    ]
    before = [type(layer) for layer in layers]
    sliced: dict[type, type] = {}
    for layer in layers:
        layer.__class__ = sliced.setdefault(type(layer), _evaluating_class(type(layer)))

    def restore() -> None:
        for layer, kind in zip(layers, before, strict=True):
            layer.__class__ = kind

    return restore


_SLICED = "Sliced"


def _evaluating_class(base: type) -> type:
    def call(self: Module, *args: Any, **kwargs: Any) -> Any:
        out = base.__call__(self, *args, **kwargs)
        if _in_slices.get():
            mx.eval(out)
        return out

    return type(_SLICED + base.__name__, (base,), {"__call__": call})


# --- memory and bounds ----------------------------------------------------------------------------


@contextmanager
def wired_memory() -> Iterator[None]:
    """Let Metal keep the models resident while in force, as mlx-lm does while it generates."""
    before = maybe_set_recommended_wired_limit()
    try:
        yield
    finally:
        if before is not None:
            mx.set_wired_limit(before)


def peak_memory() -> int:
    """Most bytes that MLX has held at once in this process."""
    return mx.get_peak_memory()


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
