"""mlx-lm's models and caches, as the actors see them: the only module that knows their classes."""

from __future__ import annotations

import contextvars
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

import attrs
import mlx.core as mx
import mlx_lm
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import maybe_set_recommended_wired_limit

from actors.line_state import LineState, PinState
from actors.mlx_cache import (
    Restore,
    can_always_trim,
    can_checkpoint,
    can_read_at_once,
    can_trim_after,
    checkpoint_bytes,
    kind,
    lengths,
    reads_alike,
    snapshot,
    trim,
    window,
)
from actors.mlx_cache_state import MisfitError, can_take_state, put_pin, put_state, take_pin, take_state
from actors.mlx_memory import release_buffers
from actors.model import Rung
from protocol.errors import ModelError, RewindError

logger = logging.getLogger("outrider")

Rewind = Literal["auto", "trim", "checkpoint", "none"]

_warned_of: set[str] = set()  # cache classes and families, once a process

# Families in which a pass over several tokens gives other logits than a pass for each: what one verify pass
# says of a proposal is then not what plain decoding would say. phi3small adds its mask of yes and no to the scores
# instead of masking them, so tokens see those after them; in plamo3 a window is one token wider in such a pass.
_ONE_BY_ONE = {"mlx_lm.models.phi3small", "mlx_lm.models.plamo3"}


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

    Made on that thread.
    """

    def __init__(self, model: Module, options: CacheOptions) -> None:
        """Wrap a model whose weights are evaluated.

        Args:
            model: an mlx-lm language model.
            options: of its caches.

        Raises: ModelError: the options insist on a way to rewind that some layer's cache does not have.
        """
        self._model = model
        one_by_one = any(type(part).__module__ in _ONE_BY_ONE for part in model.modules())
        self._options = attrs.evolve(options, one_by_one=one_by_one)
        # One forward pass of one token, since no attribute names the width of the logits in all
        # architectures.
        cache = options.make_cache(model)
        self._vocab_size: int = model(mx.array([[0]]), cache=cache).shape[-1]
        self._check_ladder(options.make_cache(model))
        self._check_quantisation(cache)

    def evaluating_layers(self) -> AbstractContextManager[None]:
        """While in force, the model's layers evaluate what they compute where a line asks for that.

        Not for two threads at a time: a model may be target and drafter in one.
        """
        return _evaluating_layers(self._model)

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

    def open_line(self, *, beside_another: bool) -> MLXLine:
        """See `Model.open_line`."""
        # Slices would break the pipelining that a GPU lives from, and the throttle that they avoid
        # is one of MLX's CPU scheduler.
        on_cpu = mx.default_device().type == mx.DeviceType.cpu
        return MLXLine(self._model, self._options, vocab_size=self._vocab_size, in_slices=beside_another and on_cpu)

    def anatomy(self) -> Anatomy:
        """What the model is made of, and how its caches can be rewound; feeds a few tokens to see."""
        weights = [cast(mx.array, pair[1]) for pair in tree_flatten(self._model.parameters())]
        line = MLXLine(self._model, self._options, vocab_size=self._vocab_size, in_slices=False)
        line.feed((0,) * 8, 0)
        windows = [size for layer in line.cache if (size := window(layer)) is not None]
        limit = min(windows, default=None)
        return Anatomy(
            family=str(getattr(getattr(self._model, "args", None), "model_type", type(self._model).__module__)),
            num_parameters=sum(leaf.size for leaf in weights),
            num_bytes=sum(leaf.nbytes for leaf in weights),
            dtypes=tuple(sorted({str(leaf.dtype).removeprefix("mlx.core.") for leaf in weights})),
            cache_kinds=dict(Counter(kind(layer) for layer in line.cache)),
            rung=self._options.rung(line.cache, 8, 4),
            window=limit,
            rung_beyond_window=None if limit is None else self._options.rung(line.cache, 8, limit),
            checkpoint_bytes=sum(checkpoint_bytes(layer) for layer in line.cache),
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

    def _check_ladder(self, cache: list[Any]) -> None:
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
    rung: Rung
    window: int | None
    rung_beyond_window: Rung | None
    checkpoint_bytes: int


class MLXLine:
    """One text in the caches of an mlx-lm model."""

    def __init__(self, model: Module, options: CacheOptions, *, vocab_size: int, in_slices: bool) -> None:
        """An empty line; its caches are in `cache`, a layer each, or less or more as the model has it.

        Args:
            model: whose caches to make.
            options: of the caches, and how they may be rewound.
            vocab_size: ids below it are known to the model.
            in_slices: whether to evaluate layer by layer.
        """
        self._model = model
        self._options = options
        self._vocab_size = vocab_size
        self.cache = options.make_cache(model)
        self._in_slices = in_slices
        self._length = 0
        self._checkpoints: list[Checkpoint] = []  # by length, ascending
        self._pins: list[Checkpoint] = []  # likewise; not for rounds, but for other texts
        self._is_quantized = False

    def feed(self, tokens: tuple[int, ...], num_logits: int) -> mx.array | None:
        """See `Line.feed`."""
        if num_logits == 0:
            self._forward(tokens)
            mx.eval([layer.state for layer in self.cache])
            release_buffers()
            return None
        parts = [self._forward(part) for part in self._options.passes(self.cache, self._length, tokens)]
        logits = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        return logits[-num_logits:]

    def feed_lazy(self, token: mx.array) -> mx.array:
        """See `Line.feed_lazy`."""
        logits: mx.array = self._model(token[None], cache=self.cache)
        self._grow(1)
        return logits[0]

    def _forward(self, tokens: tuple[int, ...]) -> mx.array:
        """(len(tokens), V) logits, lazy."""
        # A drafter may be narrower than its target. What it has no embedding for it reads as its last id: its
        # guess will be poor there, where an index out of bounds would read somebody else's memory.
        known = [min(token, self._vocab_size - 1) for token in tokens]
        with _evaluate_in_slices(self._in_slices):
            logits: mx.array = self._model(mx.array([known]), cache=self.cache)
        self._grow(len(tokens))
        return logits[0]

    def prepare(self, num_tokens: int, settled: int) -> Rung:
        """See `Line.prepare`."""
        rung = self._options.rung(self.cache, self._length, num_tokens, settled)
        if rung is Rung.CHECKPOINT and (not self._checkpoints or self._checkpoints[-1].length < self._length):
            self._checkpoints.append(self._checkpoint())
        self._forget_below(settled)
        return rung

    def rewind(self, length: int) -> int:
        """See `Line.rewind`."""
        if length > self._length:
            raise RewindError(f"asked to rewind to {length} tokens a cache that holds {self._length}")
        if length < self._length:
            if self._options.can_trim(self.cache, 0, length):
                self._trim(length)
            else:
                self._restore(length)
        self._drop_what_is_ahead()
        self.check(self._length)
        return self._length

    def check(self, length: int) -> None:
        """See `Line.check`."""
        for i, layer in enumerate(self.cache):
            for have in lengths(layer):
                if have != length:
                    raise RewindError(
                        f"layer {i} ({type(layer).__name__}) should hold {length} tokens, it holds {have}"
                    )

    def take_state(self, tokens: tuple[int, ...]) -> LineState | None:
        """What it holds, for a file; None where some cache is of a class of which nothing is known.

        Args:
            tokens: that it has processed.

        Raises: RewindError: it holds another number of tokens.
        """
        self.check(len(tokens))
        if not tokens or not all(can_take_state(layer) for layer in self.cache):
            return None
        return LineState(tokens, tuple(take_state(layer) for layer in self.cache), tuple(self._take_pins()))

    def _take_pins(self) -> Iterator[PinState]:
        now = self._checkpoint()
        for length, checkpoint in sorted({c.length: c for c in (*self._checkpoints, *self._pins)}.items()):
            self._put_back(checkpoint)
            yield PinState(length, tuple(take_pin(layer) for layer in self.cache))
        self._put_back(now)

    def put_state(self, state: LineState) -> None:
        """Have an empty line hold what another one of the same model held.

        Raises: MisfitError, RewindError: the state is none of this model's; the line is empty still.
        """
        if any(len(layers) != len(self.cache) for layers in (state.layers, *(pin.layers for pin in state.pins))):
            raise MisfitError(f"it has {len(state.layers)} layers where the model has {len(self.cache)}")
        bounds = [0, *(pin.length for pin in state.pins), len(state.tokens) + 1]
        if any(length >= after for length, after in pairwise(bounds)):
            raise MisfitError(f"its pins are at {bounds[1:-1]}, and it has {len(state.tokens)} tokens")
        is_quantized = any(layer.kind == "QuantizedKVCache" for layer in state.layers)
        like = [*zip(*(self._grown_cache(n, quantized=is_quantized) for n in (1, 8)), strict=True)]
        empty = self.cache
        try:
            self.cache = [put_state(taken, *pair) for taken, pair in zip(state.layers, like, strict=True)]
            self.check(len(state.tokens))
            for pin in state.pins:
                layers = zip(pin.layers, self.cache, like, strict=True)
                restores = [put_pin(taken, pin.length, layer, *pair) for taken, layer, pair in layers]
                self._pins.append(Checkpoint(pin.length, restores))
        except (MisfitError, RewindError):
            self.cache, self._pins = empty, []
            raise
        self._length = len(state.tokens)
        self._is_quantized = is_quantized

    def _grown_cache(self, num_tokens: int, *, quantized: bool) -> list[Any]:
        """What the caches are like with some tokens in them; of shapes alone, since nothing of it is computed."""
        cache = self._options.make_cache(self._model)
        self._model(mx.zeros((1, num_tokens), mx.int32), cache=cache)
        if quantized:
            attrs.evolve(self._options, quantized_kv_start=0).quantize(cache, num_tokens)
        return cache

    def close(self) -> None:
        """See `Line.close`."""
        self.cache = []
        self._checkpoints = []
        self._pins = []

    @property
    def num_bytes(self) -> int:
        """See `Line.num_bytes`."""
        in_checkpoints = sum(checkpoint_bytes(layer) for layer in self.cache)
        num_checkpoints = len(self._checkpoints) + len(self._pins)
        return sum(int(layer.nbytes) for layer in self.cache) + num_checkpoints * in_checkpoints

    @property
    def needs_pins(self) -> bool:
        """See `Line.needs_pins`."""
        # A prefill is cut where a pin is set. Where that makes a difference (caches are quantised at the end of a pass,
        # or read several tokens otherwise than one) there are none.
        if self._options.kv_bits is not None or not self._options.reads_alike(self.cache, sys.maxsize):
            return False
        return not all(can_always_trim(layer) for layer in self.cache) and self._options.can_checkpoint(self.cache)

    def pin(self) -> None:
        """See `Line.pin`."""
        if not self._pins or self._pins[-1].length < self._length:
            self._pins.append(self._checkpoint())

    def reach(self, length: int, num_tokens: int) -> int:
        """See `Line.reach`."""
        # What is quantised was read otherwise from the moment on at which it was, and that is another one in
        # another text.
        if self._is_quantized or not self._options.reads_alike(self.cache, num_tokens):
            return 0
        if self._length <= length:
            return self._length
        if self._options.can_trim(self.cache, 0, length):
            return length
        return max((c.length for c in (*self._checkpoints, *self._pins) if c.length <= length), default=0)

    def resume(self, length: int) -> None:
        """See `Line.resume`."""
        if length < self._length:
            if self._options.can_trim(self.cache, 0, length):
                self._trim(length)
            else:
                self._put_back(next(c for c in (*self._checkpoints, *self._pins) if c.length == length))
        self._checkpoints.clear()
        self._drop_what_is_ahead()
        self.check(length)

    def _checkpoint(self) -> Checkpoint:
        return Checkpoint(self._length, [snapshot(layer) for layer in self.cache])

    def _put_back(self, checkpoint: Checkpoint) -> None:
        for restore in checkpoint.layers:
            restore()
        self._length = checkpoint.length

    def _drop_what_is_ahead(self) -> None:
        self._checkpoints = [checkpoint for checkpoint in self._checkpoints if checkpoint.length <= self._length]
        self._pins = [pin for pin in self._pins if pin.length <= self._length]

    def _restore(self, length: int) -> None:
        """Go back to the last checkpoint at or below a length."""
        below = [checkpoint for checkpoint in self._checkpoints if checkpoint.length <= length]
        # Where there is none below, tokens were fed that could still be trimmed then: a cache that has lost
        # the ability since (a rotating one that filled) has it again in the state before.
        found = below[-1:] or self._checkpoints[:1]
        if found:
            self._put_back(found[0])
        if self._length > length:
            if not self._options.can_trim(self.cache, 0, length):
                raise RewindError(
                    f"asked to rewind to {length} tokens a cache that holds {self._length}, which cannot be trimmed "
                    f"and has checkpoints at {[checkpoint.length for checkpoint in self._checkpoints]}"
                )
            self._trim(length)

    def _trim(self, length: int) -> None:
        for layer in self.cache:
            trim(layer, self._length - length)
        self._length = length

    def _forget_below(self, settled: int) -> None:
        """Drop checkpoints that no rewind can need: all below the last that is at or below `settled`."""
        while len(self._checkpoints) > 1 and self._checkpoints[1].length <= settled:
            del self._checkpoints[0]

    def _grow(self, num_tokens: int) -> None:
        before, self._length = self._length, self._length + num_tokens
        if self._options.quantize(self.cache, self._length):
            self._is_quantized = True
            # They speak of the caches that were there before.
            self._checkpoints.clear()
            self._pins.clear()
        # Caches grow in steps of 256, and MLX would keep each outgrown buffer for later.
        if before // 256 != self._length // 256:
            release_buffers()


@attrs.frozen
class Checkpoint:
    """The state of a line's caches when they held `length` tokens."""

    length: int
    layers: list[Restore]


@attrs.frozen
class CacheOptions:
    """How a model's caches are made, and how they may be put right.

    Attributes:
        rewind: "auto" takes the first of trim, checkpoint and N=1 that all layers have at the moment;
            "trim" and "checkpoint" insist on one of them where there is one; "none" never rewinds.
        max_kv_size: most tokens that a cache keeps, for models that do not make caches of their own;
            None for no bound. As in mlx-lm, the first four are kept for good.
        kv_bits: quantise key-value caches to so many bits, or None.
        kv_group_size: quantisation group.
        quantized_kv_start: quantise once a cache holds so many tokens.
        one_by_one: whether a model's passes over several tokens are not to be trusted; see `_ONE_BY_ONE`.
    """

    rewind: Rewind = "auto"
    max_kv_size: int | None = None
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 5000
    one_by_one: bool = False

    def make_cache(self, model: Module) -> list[Any]:
        """Empty caches for one text."""
        caches: list[Any] = make_prompt_cache(model, max_kv_size=self.max_kv_size)
        return caches

    def can_trim(self, cache: list[Any], num_tokens: int, back_to: int | None = None) -> bool:
        """Whether every layer could take so many tokens more and drop its tail; see `can_trim_after`."""
        return self.rewind in ("auto", "trim") and all(can_trim_after(layer, num_tokens, back_to) for layer in cache)

    def can_checkpoint(self, cache: list[Any]) -> bool:
        """Whether every layer's state can be kept and restored."""
        return self.rewind in ("auto", "checkpoint") and all(can_checkpoint(layer) for layer in cache)

    def reads_alike(self, cache: list[Any], num_tokens: int) -> bool:
        """Whether a text of so many tokens is read the same way, however it is divided into passes."""
        return not self.one_by_one and all(reads_alike(layer, num_tokens) for layer in cache)

    def rung(self, cache: list[Any], length: int, num_tokens: int, back_to: int | None = None) -> Rung:
        """How a feed of so many tokens, from a length, could be undone; see `can_trim_after`."""
        # Quantising cannot be undone. Only committed tokens may bring it about, and then at the same place as
        # in plain decoding.
        if self.kv_bits is not None and length < self._quantized_from <= length + num_tokens:
            return Rung.SINGLE
        if num_tokens > 1 and self._goes_one_by_one(cache, num_tokens):
            return Rung.SINGLE
        if self.can_trim(cache, num_tokens, back_to):
            return Rung.TRIM
        return Rung.CHECKPOINT if self.can_checkpoint(cache) else Rung.SINGLE

    def passes(self, cache: list[Any], length: int, tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
        """How to divide a feed, from a length, into passes, so that each gives what plain decoding would give."""
        if self._goes_one_by_one(cache, len(tokens)):
            return [(token,) for token in tokens]
        if self.kv_bits is not None and length < self._quantized_from < length + len(tokens):
            # The rest reads quantised keys.
            cut = self._quantized_from - length
            return [tokens[:cut], tokens[cut:]]
        return [tokens]

    @property
    def _quantized_from(self) -> int:
        """The least length at which caches are quantised: an empty one is not, and its first pass reads as it is."""
        return max(1, self.quantized_kv_start)

    def _goes_one_by_one(self, cache: list[Any], num_tokens: int) -> bool:
        """Whether so many tokens more need a pass each to be read as plain decoding reads them."""
        return self.one_by_one or not all(can_read_at_once(layer, num_tokens) for layer in cache)

    def quantize(self, cache: list[Any], length: int) -> bool:
        """Quantise what is due after a feed; returns whether something was."""
        if self.kv_bits is None or length < self.quantized_kv_start:
            return False
        before = list(cache)
        maybe_quantize_kv_cache(cache, self.quantized_kv_start, self.kv_group_size, self.kv_bits)
        return any(new is not old for new, old in zip(cache, before, strict=True))


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


@contextmanager
def _evaluating_layers(model: Module) -> Iterator[None]:
    """Make the model's layers evaluate what they return, while `_in_slices` says so.

    MLX's scheduler counts the active tasks of the whole process and stalls every evaluating thread above
    ten. A target that is evaluated in one go keeps the count there, and a small drafter beside it runs
    three times slower. Evaluated layer by layer, it leaves room and is itself no slower.

    A layer gets a class of its own, made from its class; its attributes and parameters stay in place.
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
    try:
        yield
    finally:
        for layer, own_class in zip(layers, before, strict=True):
            layer.__class__ = own_class


_SLICED = "Sliced"


def _evaluating_class(base: type) -> type:
    def call(self: Module, *args: Any, **kwargs: Any) -> Any:
        out = base.__call__(self, *args, **kwargs)
        if _in_slices.get():
            mx.eval(out)
        return out

    return type(_SLICED + base.__name__, (base,), {"__call__": call})


# --- memory and bounds ----------------------------------------------------------------------------


def _names(layers: Iterable[Any]) -> list[str]:
    return sorted({type(layer).__name__ for layer in layers})


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
