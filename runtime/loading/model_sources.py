"""Model sources: checks what a user names as a model, and its options, and loads it on its thread."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import attrs
import mlx.core as mx
import trio
from huggingface_hub import snapshot_download
from mlx.nn.layers.base import Module
from mlx_lm.tokenizer_utils import TokenizerWrapper

from actors.mlx.cache_options import CacheOptions
from actors.mlx.layer_evaluation import LayerEvaluation
from actors.mlx.model import MLXModel, weights_of
from actors.trained.drafter_model import SUPPORTED, TrainedDrafter
from actors.trained.kinds.recognition import kind_of, nearest_to
from actors.translated.reduced_head import reduce_head
from actors.translated.translated_model import TranslatedModel
from actors.workers.worker import Job, JobError, Worker
from protocol.argument_aliases import ALIASES, INSTEAD, MISSING, NOTES, meant
from protocol.errors import ModelError, OutriderError, SettingsError, VocabularyMismatchError
from protocol.open_options import OpenOptions
from protocol.reprs import shown, shown_path
from protocol.settings import AUTO_DRAFT, MTP, NGRAM, Settings
from runtime.loading.blas import advice_for_float32
from runtime.loading.drafters import suggest_draft
from runtime.loading.gguf.names import is_gguf, model_in
from runtime.loading.model_files import check_folder, config_in, folder_of, load_error, load_errors, name_of
from runtime.loading.model_reading import read_model
from runtime.loading.model_spec import ModelSpec
from runtime.loading.named_models import named_model
from runtime.loading.tokenizers import vocabulary_map, wrapped

logger = logging.getLogger("outrider")
# What "auto" takes as a drafter; commands print it.
choice_logger = logging.getLogger("outrider.auto_draft")

# Float32 parameters of a model that is slow without a fast BLAS.
MIN_ADVISED_PARAMETERS = 10**7
_ADVISED: list[str] = []

T = TypeVar("T")

ModelSource = str | os.PathLike[str] | ModelSpec | tuple[Module, Any]

# When the layers of a pass are evaluated while another model may work; see `LayerEvaluation`.
LAYER_EVALUATION_VARIABLE = "OUTRIDER_LAYER_EVALUATION"

# Attributes that mlx-lm's tokenizer wrapper and the encoding of prompts rely on.
_TOKENIZER_ATTRIBUTES = ("encode", "decode", "get_vocab", "eos_token_id")


@attrs.frozen
class Loaded:
    """A model on its thread, its tokenizer if it has one, and the folder that it was loaded from, if it was."""

    model: MLXModel
    tokenizer: TokenizerWrapper | None
    folder: Path | None = None

    @property
    def drafted(self) -> DraftedTarget:
        """The model as the target of a drafter."""
        model = self.model
        return DraftedTarget(model.module, model.vocab_size, self.tokenizer, self.folder, model.record_features)


@attrs.frozen
class LoadedDraft:
    """A drafter on its thread, its tokenizer if it has one, and the kind of a trained drafter, such as "EAGLE-3"."""

    model: MLXModel | TranslatedModel | TrainedDrafter
    tokenizer: TokenizerWrapper | None
    kind: str | None = None


@attrs.frozen
class DraftedTarget:
    """What loading a drafter needs of its target, which may be in another process."""

    module: Module | None  # mlx-lm's model; None if it is elsewhere, and was given as a model
    vocab_size: int
    tokenizer: TokenizerWrapper | None
    folder: Path | None
    record_features: Callable[[Sequence[int]], None]  # see `MLXModel.record_features`


def check_source(role: str, source: Any) -> ModelSource:
    """A model source, checked as far as possible without loading it. Raises: SettingsError: it is missing, or neither a
    path, a hub id nor a pair (model, tokenizer). ModelError: there is no model at the path.
    """
    if source is MISSING:
        raise SettingsError(f"{role} is missing; give a path, a hub id or a pair (model, tokenizer)")
    if isinstance(source, tuple):
        if len(source) != 2 or not isinstance(source[0], Module):
            raise SettingsError(f"{role} as a tuple must be (model, tokenizer or None), got {shown(source)}")
        if source[1] is not None and any(not hasattr(source[1], name) for name in _TOKENIZER_ATTRIBUTES):
            raise SettingsError(
                f"the tokenizer in {role} must be one of transformers', mlx-lm's wrapper of one, or None, "
                f"got {shown(source[1])}; mlx_lm.load gives (model, tokenizer)"
            )
        return source
    if isinstance(source, ModelSpec):
        return _check_spec(role, source)
    if not isinstance(source, (str, os.PathLike)) or not os.fspath(source):
        raise SettingsError(
            f"{role} must be a path, a hub id, a ModelSpec or a pair (model, tokenizer), got {shown(source)}"
        )
    if (named := named_model(source)) is not None:
        return named.target
    if source == NGRAM:
        raise SettingsError(f'{role} must be a model here, and "ngram" has none: it is how to draft without one')
    path = Path(source).expanduser()
    try:
        if path.is_dir() and (file := model_in(path, role)) is not None:
            return file
        if exists := path.exists():
            if is_gguf(path):
                return path
            check_folder(role, str(source), path)
    except OSError as error:
        raise ModelError(
            f"{role} {shown_path(str(source))} cannot be looked at: {error.strerror}; "
            "give a directory with a model, or a hub id"
        ) from error
    if exists:
        if role == "draft":
            check_trained_drafter(ModelSpec(source), path)
        return path
    is_word = isinstance(source, str) and "/" not in source  # with a slash it is a path, or a hub id
    if role == "draft" and is_word:
        near = difflib.get_close_matches(str(source).lower(), (NGRAM, "n-gram", AUTO_DRAFT), n=1, cutoff=0.75)
        if near:
            meant_word = f'"{NGRAM}" (prompt lookup)' if near != [AUTO_DRAFT] else f'"{AUTO_DRAFT}"'
            raise SettingsError(f"draft {str(source)!r} is not a model; did you mean {meant_word}?")
    # "owner/name" and "owner/name/file.gguf" may be on the hub; anything else could only have been a path.
    name = os.fspath(source)
    may_be_on_the_hub = name.count("/") >= 2 if is_gguf(name) else name.count("/") <= 1
    if isinstance(source, os.PathLike) or name.startswith((".", "/", "~")) or not may_be_on_the_hub:
        raise ModelError(f"{role} {shown_path(name)} does not exist; give a directory with a model, or a hub id")
    return name


def _check_spec(role: str, spec: ModelSpec) -> ModelSource:
    path = check_source(role, spec.path)
    assert not isinstance(path, tuple | ModelSpec)
    if spec.is_plain:
        return path
    if role == "target" and spec.draft_vocabulary is not None:
        raise SettingsError("draft_vocabulary is of a draft model: a target needs its whole vocabulary; leave it out")
    if isinstance(path, Path):
        if spec.revision is not None:
            raise SettingsError(
                f"revision is of a hub id, and {role} {shown_path(str(path))} is a directory; leave it out"
            )
        check_trained_drafter(spec, path)
    return attrs.evolve(spec, path=path, adapter_path=spec.checked_adapter(role))


def check_draft_source(source: Any, target: ModelSource | None) -> ModelSource:
    """As `check_source` for a draft, which may also be the MTP layer in the target's files, or "auto". The name of
    the target, which was checked and is None where it is not known, stands for its own drafter.
    """
    spec = source if isinstance(source, ModelSpec) else None
    word = source if spec is None else spec.path
    if word == MTP:
        if spec is not None:
            check_of_weights(spec, MTP)
        return MTP if spec is None else spec
    if word == AUTO_DRAFT:
        if spec is not None and not spec.is_plain:
            raise SettingsError(
                f'draft "{AUTO_DRAFT}" takes a drafter as its files are; leave out all else, or name the drafter'
            )
        return AUTO_DRAFT
    if target is not None and (named := named_model(source)) is not None and named.target == folder_of(target):
        return check_source("draft", named.draft)
    return check_source("draft", source)


def trained_drafter_at(directory: Path) -> str | None:
    """The kind of trained drafter in a directory; None for a language model, or if the config cannot be read."""
    config = config_in(directory)
    return None if config is None else kind_of(config)


def _trained_drafter_on_the_hub(spec: ModelSpec) -> Path | None:
    """Download the trained drafter that a hub id names; None for a language model, or if the hub cannot be asked."""
    download = partial(snapshot_download, str(spec), revision=spec.revision)
    try:
        # `hf_hub_download` would try again for half a minute without a network.
        folder = Path(download(allow_patterns=["config.json"]))
    except (OSError, ValueError):
        return None  # loading the model reports what is wrong
    if check_trained_drafter(spec, folder) is None:
        return None
    return Path(download(allow_patterns=["*.json", "*.safetensors", "*.pt"]))


def check_trained_drafter(spec: ModelSpec, directory: Path) -> str | None:
    """The kind of the trained drafter in a directory; None for a language model. Raises: ModelError, SettingsError."""
    if (kind := trained_drafter_at(directory)) is None:
        return None
    if kind not in SUPPORTED:
        raise ModelError(
            f"draft {str(spec)!r} is a drafter trained for its target, of the kind {kind}, which cannot be used; "
            f'nearest to it is {nearest_to(kind)}; or draft with "ngram"'
        )
    check_of_weights(spec, kind)
    return kind


def check_of_weights(spec: ModelSpec, kind: str) -> None:
    """Raises: SettingsError: a trained drafter is given options that only a language model has."""
    # No code comes with a drafter, so it may be trusted as the target's is.
    plain = attrs.evolve(spec, revision=None, quantize=None, trust_remote_code=False)
    if not plain.is_plain:
        raise SettingsError(
            f"draft {shown_path(str(spec))} is a drafter trained for its target ({kind}), and takes no adapter and no "
            "options of mlx-lm; leave out all but revision and quantize"
        )


def caches_of(options: OpenOptions) -> CacheOptions:
    """The options of caches among those of `open`."""
    names = attrs.fields_dict(CacheOptions).keys() & attrs.fields_dict(OpenOptions).keys()
    return CacheOptions(**{name: getattr(options, name) for name in names})


def check_unknown(
    options: Mapping[str, Any],
    known: Collection[str],
    *,
    positional: Collection[str] = ("target", "draft"),
    function: str = "open",
) -> None:
    """Raises: SettingsError: a function does not have some of the `options`; with a hint at what was meant, among its
    keyword-only options (`known`) and its other arguments (`positional`).
    """
    settings = attrs.fields_dict(Settings)
    for name in options:
        here = ALIASES.get(name)
        note = f" ({NOTES[name]})" if name in NOTES else ""
        if name in settings:
            hint = "it is a setting of stream() and the like"
        elif here in {*known, *positional}:
            hint = f"it is {here}= here{note}"
        elif here in settings:
            hint = f"it is {here}=, a setting of stream() and the like{note}"
        elif name in INSTEAD:
            hint = INSTEAD[name]
        elif near := meant(name, [*known, *positional]):
            hint = f"did you mean {near!r}?"
        else:
            hint = f"the options are {', '.join(known)}"
        raise SettingsError(f"{function}() has no option {shown(name)}; {hint}")


def layer_evaluation_by_environment() -> LayerEvaluation | None:
    """The value of `OUTRIDER_LAYER_EVALUATION`, if it is set. Raises: SettingsError: it is set to something else."""
    value = os.environ.get(LAYER_EVALUATION_VARIABLE)
    values = [evaluation.value for evaluation in LayerEvaluation]
    if value and value not in values:
        raise SettingsError(f"{LAYER_EVALUATION_VARIABLE} must be one of {', '.join(values)}, got {shown(value)}")
    return LayerEvaluation(value) if value else None


async def load_onto(worker: Worker, role: str, source: ModelSource, options: CacheOptions) -> Loaded:
    """Load a model on a worker's thread. Raises: ModelError: it cannot be loaded (mlx-lm's error is the cause), or is
    no language model. SettingsError: `OUTRIDER_LAYER_EVALUATION` is not one of its values.
    """
    layer_evaluation = layer_evaluation_by_environment()
    named = f"{role} {name_of(source)!r}"
    if isinstance(source, tuple):
        # On the caller's thread: a lazy array can only be evaluated on the thread that made it. The whole model, since
        # arrays that are no parameters (the frequencies of a scaled rotary embedding) may be lazy, too.
        mx.eval(source[0])
    with load_errors(role, source):
        built, tokenizer = await worker.run(Job("load", partial(_read, source)))
        wrapper = await worker.run(Job("load", partial(wrapped, tokenizer, named)))
        if isinstance(source, ModelSpec) and (num_tokens := source.draft_vocabulary) is not None:
            await worker.run(Job("load", partial(reduce_head, built, wrapper, num_tokens, named)))
        _advise_on_blas(built)
        model = await worker.run(Job("load", partial(MLXModel, built, options, named, layer_evaluation)))
    return Loaded(model, wrapper, folder_of(source))


def _advise_on_blas(module: Module) -> None:
    """Advise on a faster BLAS, once in a process, if a model's matrices are float32 and computed on a CPU."""
    if mx.default_device().type != mx.DeviceType.cpu or _ADVISED:
        return
    matrices = [weight for weight in weights_of(module).values() if weight.ndim > 1 and weight.dtype == mx.float32]
    num_parameters = sum(matrix.size for matrix in matrices)
    if num_parameters >= MIN_ADVISED_PARAMETERS and (advice := advice_for_float32()) is not None:
        _ADVISED.append(advice)
        logger.warning("%s", advice)


def read_lazily(source: ModelSource) -> tuple[Module, TokenizerWrapper | None]:
    """Load a model and its tokenizer on this thread. Weights in files are read when they are first used."""
    try:
        built, tokenizer = _read(source, is_lazy=True)
    except OutriderError:
        raise
    # mlx-lm raises errors of many kinds.
    except Exception as error:
        raise load_error("target", source, error) from error
    return built, wrapped(tokenizer, f"target {name_of(source)!r}")


async def load_draft_onto(
    worker: Worker, source: ModelSource, options: CacheOptions, target: DraftedTarget
) -> LoadedDraft:
    """Load a drafter on a worker's thread: a language model, translated if it has another vocabulary, or a drafter that
    was trained for the target, which then records what that reads.

    Raises: as `load_onto`, and ModelError: it was trained for another target. VocabularyMismatchError: its vocabulary
    differs, and cannot be translated.
    """
    is_targets_own = not isinstance(source, tuple) and str(source) == MTP
    folder = target.folder if is_targets_own else await folder_of_trained_drafter(worker, source)
    if folder is None and is_targets_own:
        raise ModelError(
            f'draft "{MTP}" is the MTP layer in the target\'s files, and the target was given as a model; give the '
            "folder of the original model, or one with the layer alone, as draft"
        )
    if folder is None:
        loaded = await load_onto(worker, "draft", source, options)
        return LoadedDraft(await _with_the_targets_tokens(worker, target, loaded), loaded.tokenizer)
    if target.module is None:
        raise ModelError(
            "a drafter that was trained for its target reads weights of the target, which was given as a model; "
            "give the folder of the target, or draft in the target's process"
        )
    named, sizes = f"draft {str(source)!r}", (target.module, target.vocab_size)
    quantize = source.quantization if isinstance(source, ModelSpec) else None
    make = partial(TrainedDrafter, folder, *sizes, named, is_targets_own=is_targets_own, quantize=quantize)
    with load_errors("draft", source):
        drafter = await worker.run(Job("load", make))
    target.record_features(drafter.feature_layers)
    return LoadedDraft(drafter, None, "MTP" if is_targets_own else trained_drafter_at(folder))


async def load_auto_onto(
    stack: AsyncExitStack, target: Path | None, load: Callable[[AsyncExitStack, ModelSource], Awaitable[T]]
) -> T | None:
    """Load the best drafter on this disk for a target in a folder, for the draft "auto", and log which one, and why.
    `load` gets the MTP layer in the target's own files, or a folder. Where it raises ModelError or
    VocabularyMismatchError, what it has put on its stack is released, and the next drafter is tried.

    Returns: what `load` has returned; None if no drafter fits.
    """
    candidates, none = await trio.to_thread.run_sync(_fitting, target)
    passed_over = ""
    for source, described in candidates:
        async with AsyncExitStack() as attempt:
            try:
                loaded = await load(attempt, source)
            except (ModelError, VocabularyMismatchError) as error:
                passed_over += f"; passed over: {error}"
                continue
            stack.push_async_exit(attempt.pop_all())
        choice_logger.info('draft "%s" takes %s%s', AUTO_DRAFT, described, passed_over)
        return loaded
    choice_logger.info('draft "%s" takes none: %s%s', AUTO_DRAFT, none, passed_over)
    return None


def _fitting(target: Path | None) -> tuple[list[tuple[ModelSource, str]], str]:
    """What on this disk fits a target: the sources with descriptions, the best first; and what to say if none is taken.
    Reads many files.
    """
    if target is None:
        return [], "the target was given as a model, and drafters are looked for beside the target's folder"
    suggestions = suggest_draft(target)
    fitting: list[tuple[ModelSource, str]] = [
        (MTP if each.model == MTP else each.folder, each.described) for each in suggestions if each.folder is not None
    ]
    known = next((each.described for each in suggestions if not each.is_on_disk), None)
    none = "nothing on this disk fits the target" if not fitting else "nothing that fits the target can be loaded"
    return fitting, none if known is None else f"{none}; there is {known}"


async def folder_of_trained_drafter(worker: Worker, source: ModelSource) -> Path | None:
    """The folder of a trained drafter, downloaded if it is on the hub; None for a language model."""
    if isinstance(source, tuple):
        return None
    spec = source if isinstance(source, ModelSpec) else ModelSpec(source)
    if isinstance(spec.path, Path):
        return spec.path if trained_drafter_at(spec.path) is not None else None
    with load_errors("draft", source):
        return await worker.run(Job("load", partial(_trained_drafter_on_the_hub, spec)))


def _read(source: ModelSource, *, is_lazy: bool = False) -> tuple[Module, Any]:
    if isinstance(source, tuple):
        return source
    if not isinstance(source, ModelSpec):
        return read_model(str(source), is_lazy=is_lazy)
    trust = {"trust_remote_code": True} if source.trust_remote_code else {}
    return read_model(
        str(source),
        is_lazy=is_lazy,
        adapter=None if source.adapter_path is None else Path(source.adapter_path),
        quantize=source.quantization,
        revision=source.revision,
        tokenizer_config={**trust, **source.tokenizer_config},
        model_config=dict(source.model_config),
        **trust,
    )


async def _with_the_targets_tokens(worker: Worker, target: DraftedTarget, draft: Loaded) -> MLXModel | TranslatedModel:
    """A draft model with its target's tokens: itself, unless its vocabulary is another one."""
    if target.tokenizer is None or draft.tokenizer is None:
        return draft.model
    compare = partial(vocabulary_map, target.tokenizer, target.vocab_size, draft.tokenizer, draft.model.vocab_size)
    try:
        if (found := await worker.run(Job("load", compare))) is None:
            return draft.model
        logger.info("the draft model has a vocabulary of its own, and can propose %s", found.described)
        return await worker.run(Job("load", partial(TranslatedModel, draft.model, found)))
    except JobError as error:
        raise (error.__cause__ or error) from None
