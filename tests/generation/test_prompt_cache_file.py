"""Prompt cache files of mlx-lm: a text continues from one as mlx-lm continues it."""

import functools
import json
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from architectures import build
from drafted_runtime import drafted, features_of
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_lm.sample_utils import make_logits_processors
from models import Failing, gemma3_text, greedy, llama, mamba, near, prompt_of
from sweeps import sweep
from trained_drafters import make

import runtime
from protocol.prefill_chunks import PrefillChunkSize
from runtime.persistence.prompt_cache_file import read_header

CACHED, SUFFIX = prompt_of(41, seed=3, vocab_size=64), prompt_of(2, seed=4, vocab_size=64)
NUM_TOKENS = 30


def cache_prompt(file: Path, model: nn.Module, *, max_kv_size: int | None = None, **options: Any) -> Path:
    """Write a file as `mlx_lm.cache_prompt` does."""
    cache = make_prompt_cache(model, max_kv_size)
    for _ in generate_step(mx.array(CACHED), model, max_tokens=0, prompt_cache=cache, **options):
        pass
    save_prompt_cache(str(file), cache, {"model": "org/model", "tokenizer_config": json.dumps({"eos_token": "w7"})})
    return file


async def continued(file: Path, model: Any, draft: Any = None, *, options: Any = None, **settings: Any) -> list[int]:
    async with runtime.open((model, None), draft=draft, **options or {}) as rt:
        settings = {"max_tokens": NUM_TOKENS, **settings}
        completion = await rt.generate(SUFFIX, prompt_cache_file=file, **settings)
        assert completion.statistics.prompt_tokens == len(SUFFIX)
    return [token.id for token in completion.tokens]


QUANTIZED = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
MODELS: dict[str, Any] = {
    "attention": (llama, {}),
    "a window that is full": (functools.partial(gemma3_text, window=16), {}),
    "a window that is not": (functools.partial(gemma3_text, window=64), {}),
    "recurrent": (mamba, {}),
    "a bounded cache": (llama, {"max_kv_size": 24}),
    "a quantised cache": (functools.partial(build, "qwen3", head_dim=32), QUANTIZED),
}


@pytest.mark.slow
@sweep(
    ("named", "drafted"),
    [
        *((named, "drafted") for named in MODELS),
        *((named, ("plain", "looked up")[i % 2]) for i, named in enumerate([*MODELS][::2])),
    ],
)
async def test_a_text_goes_on_as_in_mlx_lm(tmp_path, named, drafted):
    make, options = MODELS[named]
    model = make()
    file = cache_prompt(tmp_path / "prompt.safetensors", model, **options)
    quantised = {name: value for name, value in options.items() if name != "max_kv_size"}
    expected = greedy(model, SUFFIX, NUM_TOKENS, prompt_cache=load_prompt_cache(str(file)), **quantised)
    # Without what is cached, the text is another one.
    assert expected != greedy(model, SUFFIX, NUM_TOKENS, clear_lead=0)
    draft = {"plain": None, "drafted": (near(model, noise=0.1), None), "looked up": "ngram"}[drafted]
    lookahead = 0 if draft is None else 3
    assert await continued(file, model, draft, options=options, lookahead=lookahead) == expected


async def test_a_file_is_continued_as_often_as_one_likes_and_beside_other_texts(tmp_path, monkeypatch):
    monkeypatch.setattr(PrefillChunkSize, "__call__", lambda _: 512)  # all prompts fit into one pass
    model = llama()
    file = cache_prompt(tmp_path / "prompt.safetensors", model)
    expected = greedy(model, SUFFIX, NUM_TOKENS, prompt_cache=load_prompt_cache(str(file)))
    other = greedy(model, CACHED, NUM_TOKENS)
    async with runtime.open((model, None), draft=(near(model, noise=0.1), None)) as rt:
        prompts = [(SUFFIX, {"prompt_cache_file": file}), CACHED, (SUFFIX, {"prompt_cache_file": file}), CACHED]
        texts = await rt.generate_many(prompts, max_tokens=NUM_TOKENS)
        assert [[token.id for token in text.tokens] for text in texts] == [expected, other, expected, other]


async def test_penalties_see_what_they_see_in_mlx_lm(tmp_path):
    model = llama()
    file = cache_prompt(tmp_path / "prompt.safetensors", model)
    processors = make_logits_processors(repetition_penalty=1.4, repetition_context_size=100)
    options = {"prompt_cache": load_prompt_cache(str(file)), "logits_processors": processors}
    expected = greedy(model, SUFFIX, NUM_TOKENS, clear_lead=0, **options)
    assert expected != greedy(model, SUFFIX, NUM_TOKENS, clear_lead=0, prompt_cache=load_prompt_cache(str(file)))
    settings = {"repetition_penalty": 1.4, "repetition_context_size": 100, "lookahead": 3}
    assert await continued(file, model, (near(model, noise=0.1), None), **settings) == expected


async def test_a_drafter_proposes_though_it_has_not_read_what_is_cached(tmp_path):
    model = llama()
    file = cache_prompt(tmp_path / "prompt.safetensors", model)
    async with runtime.open((model, None), draft="ngram") as rt:
        prompt = [*SUFFIX, 5, *SUFFIX]
        completion = await rt.generate(prompt, prompt_cache_file=file, max_tokens=NUM_TOKENS, lookahead=2)
    assert completion.statistics.proposed > 0


@sweep(("kind", "is_hybrid"), [("eagle3", True), ("dflash", False)])
async def test_a_trained_drafter_gets_the_features_of_the_text_after_the_file(tmp_path, monkeypatch, kind, is_hybrid):
    folder = tmp_path / "drafter"
    model = make(kind, folder, is_hybrid=is_hybrid, vocab_size=64)
    file = cache_prompt(tmp_path / "prompt.safetensors", model)
    expected = greedy(model, SUFFIX, NUM_TOKENS, prompt_cache=load_prompt_cache(str(file)))
    given: list[tuple[int, mx.array]] = []
    async with drafted(folder, model) as rt:
        layers = rt._draft.model.feature_layers
        sequences = type(rt._draft.model.open_sequence(alongside_model=False))
        give = sequences.give

        def noted(sequence: Any, start: int, features: mx.array) -> None:
            given.append((start, features))
            give(sequence, start, features)

        monkeypatch.setattr(sequences, "give", noted)
        completion = await rt.generate(SUFFIX, prompt_cache_file=file, max_tokens=NUM_TOKENS, lookahead=3)
    assert [token.id for token in completion.tokens] == expected
    assert completion.statistics.proposed > 0
    assert completion.statistics.draft_failures == 0
    # Positions are those of the text, and what the target has computed is of all before it.
    whole = features_of(model, (*CACHED, *SUFFIX, *expected), layers)[len(CACHED) :]
    assert given[0][0] == 0
    assert given[-1][0] + given[-1][1].shape[0] > NUM_TOKENS - 4
    for start, features in given:
        assert mx.allclose(features, whole[start : start + features.shape[0]], atol=1e-4)


async def test_the_context_holds_what_is_cached_too(tmp_path):
    model = llama(max_position_embeddings=len(CACHED) + len(SUFFIX) + 4)
    file = cache_prompt(tmp_path / "prompt.safetensors", model)
    assert len(await continued(file, model)) == 4
    async with runtime.open((model, None)) as rt:
        with pytest.raises(runtime.PromptTooLongError, match=rf"context length is {len(SUFFIX) + 4} tokens"):
            rt.stream(prompt_of(len(SUFFIX) + 4), prompt_cache_file=file)
    small = llama(max_position_embeddings=len(CACHED) + 1)
    async with runtime.open((small, None)) as rt:
        with pytest.raises(runtime.PromptTooLongError, match=f"has {len(CACHED)} tokens, and the target's context"):
            rt.stream([1], prompt_cache_file=file)


async def test_a_file_that_cannot_be_read_on_ends_its_stream_alone(tmp_path):
    other = cache_prompt(tmp_path / "other.safetensors", llama(num_key_value_heads=2))
    cut_off = cache_prompt(tmp_path / "cut.safetensors", llama())
    cut_off.write_bytes(cut_off.read_bytes()[:-100])
    async with runtime.open((llama(), None)) as rt:
        for file, says in (
            (other, r"does not fit the target: .*; open the model that it was"),
            (cut_off, "cannot read the prompt cache file"),
        ):
            with pytest.raises(runtime.SessionFileError, match=says):
                await rt.generate(SUFFIX, prompt_cache_file=file)
            assert len((await rt.generate(SUFFIX, max_tokens=3)).tokens) == 3


# --- the header -----------------------------------------------------------------------------------


@sweep("named", MODELS)
def test_the_header_says_what_is_in_the_file(tmp_path, named):
    make, options = MODELS[named]
    model = make()
    found = read_header(cache_prompt(tmp_path / "prompt.safetensors", model, **options))
    assert found.num_tokens == (0 if named == "recurrent" else len(CACHED))
    assert (found.kv_bits, found.kv_group_size) == (options.get("kv_bits"), options.get("kv_group_size"))
    assert (found.model, found.tokenizer_config) == ("org/model", {"eos_token": "w7"})


async def test_quantised_caches_need_a_target_that_quantises_likewise(tmp_path):
    make, options = MODELS["a quantised cache"]
    file = cache_prompt(tmp_path / "prompt.safetensors", make(), **options)
    async with runtime.open((make(), None)) as rt:
        with pytest.raises(runtime.SessionFileError, match=r"open the target with kv_bits=8 and kv_group_size=32"):
            rt.stream(SUFFIX, prompt_cache_file=file)


def _no_caches() -> bytes:
    header = json.dumps({"__metadata__": {"format": "mlx"}}).encode()
    return struct.pack("<Q", len(header)) + header


@sweep(
    ("content", "said"),
    [
        *((text, "is no prompt cache file") for text in (b"", b"no such file, but a text of some length")),
        *((struct.pack("<Q", 2) + json, r"is no prompt cache file \(it has no metadata\)") for json in (b"{}", b"[]")),
        (_no_caches(), "it names no caches"),
        (struct.pack("<Q", 2**40), "its header is too long"),
        (None, "cannot read the prompt cache file"),
    ],
)
async def test_a_file_that_is_none_is_refused_before_any_work(tmp_path, content, said):
    file = tmp_path / "prompt.safetensors"
    if content is not None:
        file.write_bytes(content)
    async with runtime.open((Failing(llama()), None)) as rt:
        with pytest.raises(runtime.SessionFileError, match=said):
            rt.stream(SUFFIX, prompt_cache_file=file)
        with pytest.raises(runtime.SettingsError, match="leave out prompt_cache_file or reuse_prefix"):
            rt.stream(SUFFIX, prompt_cache_file=file, reuse_prefix=True)
