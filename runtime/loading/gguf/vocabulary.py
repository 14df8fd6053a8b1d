"""The tokenizer of a GGUF file, in mlx-lm's wrapper: tokens, special tokens, chat template and end tokens."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from protocol.errors import ModelError
from protocol.reprs import shown
from runtime.loading.gguf.container import AGAIN, Container
from runtime.loading.gguf.pre_tokenizers import PRE_TOKENIZERS

# Types of tokens.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

# Control tokens that end an answer in whichever vocabulary they are, as llama.cpp has it: many files name only the one
# that ends a text. (Its "<|return|>" and "<|call|>" are of architectures that cannot be loaded from GGUF.)
_ENDS = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
    "<EOT>", "_<EOT>", "[EOT]", "<end_of_utterance>", "<｜end▁of▁sentence｜>",
}  # fmt: skip

_SPACE = "▁"


def tokenizer_of(container: Container, options: Mapping[str, Any] | None = None) -> TokenizerWrapper:
    """The tokenizer of a model, made by mlx-lm's loader. Raises: ModelError: it is of an unknown kind, or damaged."""
    vocabulary = _vocabulary(container)
    try:
        backend = _backend(container, vocabulary)
    except ModelError:
        raise
    except Exception as error:  # tokenizers raises plain Exception for whatever does not fit together
        raise ModelError(f"the tokenizer in {container.named} cannot be used: {error}; {AGAIN}") from error
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": _templates(container),
        "model_max_length": container.metadata.get(f"{container.metadata.get('general.architecture')}.context_length"),
        **{f"{name}_token": vocabulary.tokens[id] for name, id in vocabulary.special.items()},
    }
    # mlx-lm's loader and transformers' know only folders.
    with tempfile.TemporaryDirectory(prefix="outrider-gguf-") as folder:
        backend.save(str(Path(folder) / "tokenizer.json"), pretty=False)
        file = Path(folder) / "tokenizer_config.json"
        file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}), "utf-8")
        wrapper = load_tokenizer(Path(folder), dict(options or {}), eos_token_ids=sorted(vocabulary.ends))
    wrapper.name_or_path = str(container.path)
    return wrapper


@attrs.frozen
class _Vocabulary:
    tokens: list[str]
    types: list[int]
    special: dict[str, int]  # ids by name, such as "bos"
    ends: set[int]  # ids that end an answer

    def of_type(self, kind: int) -> list[str]:
        return [token for token, type in zip(self.tokens, self.types, strict=True) if type == kind]


def _vocabulary(container: Container) -> _Vocabulary:
    named = container.named
    tokens: list[str] = container.get("tokenizer.ggml.tokens", list)
    if not tokens or not all(isinstance(token, str) for token in tokens):
        raise ModelError(f"{named} has no tokens (tokenizer.ggml.tokens); give a model with its tokenizer")
    if len(set(tokens)) != len(tokens):
        [(twice, _)] = Counter(tokens).most_common(1)
        raise ModelError(f"{named} has the token {shown(twice)} twice; give another conversion of the model")
    types: list[int] = container.get("tokenizer.ggml.token_type", list, [_NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise ModelError(f"{named} has {len(types)} token types for {len(tokens)} tokens; {AGAIN}")
    ids = {}
    for name in ("bos", "eos", "unknown", "padding", "eot", "eom"):
        id = container.get(f"tokenizer.ggml.{name}_token_id", int)
        if id is not None and 0 <= id < len(tokens):  # some files have -1 for none
            ids[name] = id
    controls = {token: id for id, (token, type) in enumerate(zip(tokens, types, strict=True)) if type == _CONTROL}
    ends = {controls[token] for token in _ENDS & controls.keys()}
    ends |= {ids[name] for name in ("eos", "eot", "eom") if name in ids}
    special = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return _Vocabulary(tokens, types, {name: ids[key] for name, key in special.items() if key in ids}, ends)


def _templates(container: Container) -> str | list[dict[str, str]] | None:
    """The chat template; with others by name if there are some, as transformers takes them."""
    prefix = "tokenizer.chat_template"
    default: str | None = container.get(prefix, str)
    others = {
        key.removeprefix(f"{prefix}."): value
        for key, value in container.metadata.items()
        if key.startswith(f"{prefix}.") and isinstance(value, str)
    }
    if not others or default is None:
        return default
    return [{"name": name, "template": template} for name, template in ({"default": default} | others).items()]


def _backend(container: Container, vocabulary: _Vocabulary) -> Tokenizer:
    kind = container.get("tokenizer.ggml.model", str)
    if kind == "gpt2":
        backend, adds_bos = _byte_level(container, vocabulary)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(container, vocabulary), True
    else:
        raise ModelError(
            f"{container.named} has a tokenizer of the kind {shown(kind)} (tokenizer.ggml.model), and "
            'known are "gpt2" and "llama"; give the model in Hugging Face layout'
        )
    # llama.cpp likewise: the special tokens of Phi-3 swallow what white space follows, and the model was trained so.
    strips = container.metadata.get("general.architecture") == "phi3" and kind == "llama"
    kept = {"<unk>", "<s>", "<|endoftext|>"}
    backend.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False, rstrip=strips and token not in kept)
            for token in vocabulary.of_type(_CONTROL)
        ]
    )
    own = [AddedToken(token, special=False, normalized=False) for token in vocabulary.of_type(_USER_DEFINED)]
    backend.add_tokens(own)
    special, tokens = vocabulary.special, vocabulary.tokens

    def added(name: str, by_default: bool) -> list[str]:
        is_added = container.get(f"tokenizer.ggml.add_{name}_token", bool, by_default)
        return [tokens[special[name]]] if is_added and name in special else []

    begin, end = added("bos", adds_bos), added("eos", False)
    if begin or end:
        parts = ((*begin, text, *end) for text in ("$A", "$B"))
        first, second = ([f"{part}:{number}" for part in each] for number, each in enumerate(parts))
        backend.post_processor = processors.TemplateProcessing(
            single=first,
            pair=[*first, *second],
            special_tokens=[(token, backend.token_to_id(token)) for token in {*begin, *end}],
        )
    return backend


def _byte_level(container: Container, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether texts begin with a token for that."""
    named = container.named
    name = container.get("tokenizer.ggml.pre", str)
    if (pre := PRE_TOKENIZERS.get(name)) is None:
        raise ModelError(
            f"{named} has the pre-tokenizer {shown(name)} (tokenizer.ggml.pre), and known are "
            f"{', '.join(sorted(PRE_TOKENIZERS))}; give the model in Hugging Face layout"
        )
    merges = container.get("tokenizer.ggml.merges", list)
    if merges is None:
        raise ModelError(f"{named} has no tokenizer.ggml.merges; give another conversion of the model")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    ids = {token: id for id, token in enumerate(vocabulary.tokens)}
    backend = Tokenizer(models.BPE(vocab=ids, merges=pairs, ignore_merges=pre.ignores_merges))
    if pre.composes:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, pre.adds_bos


def _sentencepiece(container: Container, vocabulary: _Vocabulary) -> Tokenizer:
    """SentencePiece's BPE, which merges whatever gives the token with the highest score, and falls back to bytes."""
    tokens = vocabulary.tokens
    scores = container.get("tokenizer.ggml.scores", list)
    if scores is None or len(scores) != len(tokens):
        raise ModelError(f"{container.named} has {len(scores or ())} scores for {len(tokens)} tokens; {AGAIN}")
    ids = {token: id for id, token in enumerate(tokens)}
    symbols = {token for token, type in zip(tokens, vocabulary.types, strict=True) if type == _NORMAL}
    ranked = sorted((token for token in symbols if len(token) > 1), key=lambda token: (-scores[ids[token]], ids[token]))
    merges = [
        (token[:i], token[i:])
        for token in ranked
        for i in range(1, len(token))
        if token[:i] in symbols and token[i:] in symbols
    ]
    unknown = vocabulary.special.get("unk")
    backend = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = container.get("tokenizer.ggml.add_space_prefix", bool, True)
    replace = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if has_prefix else replace
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return backend
