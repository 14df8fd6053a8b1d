"""Draft models of another vocabulary than their target: tokenizers and models made of the demo pair's, and scripts."""

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from scripted import Script, ScriptedModel
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import runtime
from actors.translated.translated_model import TokenTables, TranslatedSequence
from protocol.vocabulary_map import VocabularyMap


@attrs.frozen(eq=False)
class OtherVocabulary:
    """A tokenizer, and the token of the demo pair that each of its ids was made of."""

    tokenizer: TokenizerWrapper
    sources: tuple[int, ...]

    def given_to(self, model: Any) -> Any:
        """A copy of one of the demo pair's models, with this vocabulary."""
        copy = type(model)(dataclasses.replace(model.args, vocab_size=len(self.sources)))
        weights = dict(tree_flatten(model.parameters()))
        weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][mx.array(self.sources)]
        copy.update(tree_unflatten(list(weights.items())))
        mx.eval(copy.parameters())
        return copy


@functools.cache
def _demo() -> tuple[list[str], list[tuple[str, str]]]:
    """The names of the demo pair's tokens by id, and its merges."""
    model = json.loads((runtime.DEMO_TARGET / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    names = sorted(model["vocab"], key=model["vocab"].get)
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    return names, merges


@functools.cache
def byte_level(num_tokens: int = 4096) -> OtherVocabulary:
    """The first tokens of the demo pair, in another order; what ends a text has another name."""
    names, all_merges = _demo()
    known = set(names[:num_tokens])
    merges = [merge for merge in all_merges if {*merge, "".join(merge)} <= known]
    # 7 has no divisor in common with the sizes used here, so that this is a permutation.
    sources = [(7 * i + 3) % num_tokens for i in range(num_tokens)]
    vocab = {names[source] if source else "</s>": i for i, source in enumerate(sources)}
    assert len(vocab) == num_tokens
    end = vocab.pop("</s>")
    tokenizer = Tokenizer(models.BPE(vocab=vocab | {"</s>": end}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    return OtherVocabulary(TokenizerWrapper(fast), tuple(sources))


@functools.cache
def sentencepiece(num_tokens: int = 2500) -> OtherVocabulary:
    """A tokenizer like SentencePiece's: tokens for bytes, and the demo pair's first ones that are whole characters."""
    names, all_merges = _demo()
    demo = Tokenizer.from_file(str(runtime.DEMO_TARGET / "tokenizer.json"))
    special = ["<unk>", "<s>", "</s>"]
    single_bytes = {demo.token_to_id(name): value for value, name in _names_of_bytes().items()}
    vocab = {name: i for i, name in enumerate(special)}
    sources = [0] * len(special)
    for value, source in sorted((value, id) for id, value in single_bytes.items()):
        vocab[f"<0x{value:02X}>"] = len(vocab)
        sources.append(source)
    pieces: dict[str, str] = {}
    for source, name in enumerate(names[:num_tokens]):
        text = demo.decode([source], skip_special_tokens=False)
        if source and "\ufffd" not in text:
            pieces[name] = text.replace(" ", "▁")
            if pieces[name] not in vocab:
                vocab[pieces[name]] = len(vocab)
                sources.append(source)
    merges = [
        (pieces[a], pieces[b]) for a, b in all_merges if a in pieces and b in pieces and pieces[a] + pieces[b] in vocab
    ]
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return OtherVocabulary(TokenizerWrapper(fast), tuple(sources))


def _names_of_bytes() -> dict[int, str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


class TranslatedScript(ScriptedModel):
    """A scripted model of another vocabulary: the script is about its own tokens."""

    def __init__(self, script: Script, vocabulary_map: VocabularyMap, **changes: Any) -> None:
        super().__init__(script, vocab_size=len(vocabulary_map.readings), **changes)
        self._tables = TokenTables(vocabulary_map)

    def open_sequence(self, *, alongside_model: bool) -> Any:
        own = super().open_sequence(alongside_model=alongside_model)
        return TranslatedSequence(own, self._tables, self.context_length)


def own_texts(vocabulary_map: VocabularyMap, text: Sequence[int]) -> list[int]:
    """A text of the target's in the draft model's tokens."""
    return [own for i, token in enumerate(text) for own in vocabulary_map.read(token, is_first=i == 0)]
