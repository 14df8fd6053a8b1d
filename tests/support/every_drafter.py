"""Every kind of drafter, at work for a tiny target in simulated time."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from drafted_runtime import drafted
from models import VOCAB_SIZE, gemma3_text, llama, mamba, near
from scripted import priced
from trained_drafters import KINDS as TRAINED
from trained_drafters import make

from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import MLXModel
from actors.translated.translated_model import TranslatedModel
from protocol.vocabulary_map import VocabularyMap

# Of the cases of MTP layers, some of which have an embedding of their own.
MTP_VOCAB_SIZE = 48
PRICE = priced(draft=1.0, verify=4.0, load=0.0)


def _translated(target: Any) -> TranslatedModel:
    """A draft model with the target's tokens by other ids, but for the last one, which it spells with two others."""
    draft, last = near(target, noise=0.05), VOCAB_SIZE - 1
    own_ids = [(7 * token + 3) % VOCAB_SIZE for token in range(VOCAB_SIZE)]
    tokens = sorted(range(VOCAB_SIZE), key=own_ids.__getitem__)
    draft.model.embed_tokens.weight = draft.model.embed_tokens.weight[mx.array(tokens)]
    readings = (*((own,) for own in own_ids[:last]), (own_ids[0], own_ids[1]))
    shared = dict(enumerate(own_ids[:last]))
    return TranslatedModel(MLXModel(draft, CacheOptions()), VocabularyMap(shared, readings, None, VOCAB_SIZE))


# Makes the drafter's model from its target.
UNTRAINED: dict[str, Callable[[Any], Any]] = {
    "draft model": lambda target: MLXModel(near(target, noise=0.05), CacheOptions()),
    "recurrent": lambda _: MLXModel(mamba(), CacheOptions()),
    "sliding window": lambda _: MLXModel(gemma3_text(window=16), CacheOptions()),
    "another vocabulary": _translated,
    "elsewhere": lambda target: MLXModel(near(target, noise=0.05), CacheOptions()),
    "lookup": lambda _: "ngram",
}
KINDS = (*UNTRAINED, *TRAINED)
# The others draft by the same code.
OFTEN = ("draft model", "another vocabulary", "elsewhere", "lookup", "eagle3")


@asynccontextmanager
async def at_work(kind: str, folder: Path, *, family: str | None = None, **options: Any) -> AsyncIterator[Any]:
    """A runtime with a drafter of a kind, and its target's module.

    Args:
        folder: an empty one.
        family: of the target of a trained drafter; see `trained_drafters.make`.
        **options: see `drafted`.
    """
    source: Any = folder
    if kind in UNTRAINED:
        target = llama()
        source = UNTRAINED[kind]
    else:
        target = make(kind, folder, family=family, vocab_size=MTP_VOCAB_SIZE)
    options = {"max_batch": 1, "price": PRICE} | options
    async with drafted(source, target, is_elsewhere=kind == "elsewhere", **options) as rt:
        yield rt, target
