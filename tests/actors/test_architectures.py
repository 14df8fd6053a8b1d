"""Every architecture of mlx-lm: its text is plain greedy decoding's in every rewind mode and at every lookahead."""

import importlib
import pkgutil
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import pytest
from architectures import (
    ARCHITECTURES,
    FOR_METAL,
    LEFT_OUT,
    NO_IMPORT,
    NO_MODEL,
    OF_ALL_CACHES,
    VOCAB_SIZE,
    Architecture,
    build,
    kinds,
)
from completions import ids, open_and_close
from greedy_pair import CLEAR_LEAD, greedy_text
from greedy_pair import SHORT_PROMPT as PROMPT
from mlx_lm.models.cache import make_prompt_cache
from models import assert_leads
from scripted import ScriptedModel
from simulated_worker import SimulatedWorker
from sweeps import sweep

import runtime
from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import MLXModel
from actors.probe import probe
from actors.workers.thread_worker import ThreadWorker
from actors.workers.worker import Job
from protocol.errors import ModelError
from runtime.engine.opening import running
from runtime.engine.runtime import Runtime

LOOKAHEADS = (1, 3, 6)
# With the prompt, more than two of the widest window; and, without a drafter, more than one.
NUM_TOKENS, NUM_UNDRAFTED = 32, 16
# Positions at which the drafter is right.
RIGHT = [random.Random(7 * position).random() < 0.7 for position in range(len(PROMPT) + NUM_TOKENS)]


def rewind_options(architecture: Architecture) -> set[str]:
    """The values of `rewind` that a model with these caches takes."""
    classes = " ".join(architecture.kinds)
    found = {"auto", "none"}
    if architecture.is_stepwise or "LayerCache" in classes:
        return found
    return found | ({"checkpoint"} if "ArraysCache" in classes else {"checkpoint", "trim"})


def lookahead_for(*case: str) -> int:
    """One of `LOOKAHEADS`, chosen by the case, so that each cache class is tested with all of them."""
    return LOOKAHEADS[sum(map(ord, "".join(case))) % len(LOOKAHEADS)]


def corrupted(text: Sequence[int], vocab_size: int) -> list[int]:
    """A text with a wrong token at each position where `RIGHT` is false."""
    return [token if right else (token + 1) % vocab_size for token, right in zip(text, RIGHT, strict=True)]


def guessed(model: nn.Module) -> list[int]:
    """A text on which a model's greedy guesses are right exactly where `RIGHT` says so."""
    text, cache = list(PROMPT), make_prompt_cache(model)
    logits = model(mx.array([PROMPT[:-1]]), cache=cache)
    for right in RIGHT[len(PROMPT) :]:
        logits = model(mx.array([text[-1:]]), cache=cache)[0, -1]
        assert_leads(logits, CLEAR_LEAD)
        guess = int(mx.argmax(logits).item())
        text.append(guess if right else (guess + 1) % logits.shape[0])
    return text


@asynccontextmanager
async def with_a_fake(
    model: nn.Module, knows: Sequence[int], *, is_target: bool, rewind: Any
) -> AsyncIterator[Runtime]:
    """A runtime of a real model on its thread, and of a model that knows a text."""
    async with ThreadWorker("target" if is_target else "draft") as worker:
        real = await worker.run(Job("load", partial(MLXModel, model, CacheOptions(rewind=rewind))))
        # The probe leaves nothing behind that affects a text.
        await worker.run(Job("load", partial(probe, real)))
        rows = [[10.0 * (token == known) for token in range(real.vocab_size)] for known in knows]
        fake = ScriptedModel(lambda history: rows[min(len(history), len(rows) - 1)], vocab_size=real.vocab_size)
        fake_worker = SimulatedWorker("draft" if is_target else "target", price=lambda _: 0.0)
        models = ((real, worker), (fake, fake_worker))
        with real.evaluating_layers():
            # The fake computes nothing, so there is nothing to launch ahead.
            async with running(*(models if is_target else models[::-1]), chains=False) as rt:
                yield rt


# --- the registry ---------------------------------------------------------------------------------


def test_every_module_of_mlx_lm_is_built_or_left_out_for_a_reason() -> None:
    modules = [module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)]
    assert sorted([*ARCHITECTURES, *LEFT_OUT]) == sorted(modules)
    assert len(ARCHITECTURES) > 80


@sweep("name", LEFT_OUT)
def test_the_reason_holds_for_which_a_module_is_left_out(name: str) -> None:
    if LEFT_OUT[name] == NO_IMPORT:
        with pytest.raises(SystemExit):
            importlib.import_module(f"mlx_lm.models.{name}")
    elif LEFT_OUT[name] == NO_MODEL:
        module = importlib.import_module(f"mlx_lm.models.{name}")
        assert not hasattr(module, "Model")
        assert not hasattr(module, "ModelArgs")
    else:
        model = build(name)
        assert kinds(model) == FOR_METAL[name].kinds
        if not mx.metal.is_available():
            with pytest.raises(RuntimeError, match="No Metal back-end"):
                mx.eval(model(mx.array([PROMPT])))


# --- one model under test, and one that knows the text --------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
async def test_the_greedy_text_is_plain_decodings_in_every_rewind_mode(name: str) -> None:
    architecture, model = ARCHITECTURES[name], build(name)
    assert kinds(model) == architecture.kinds
    # The runtime comes first: nothing of the model has been computed on its thread yet.
    async with runtime.open((model, None)) as rt:
        undrafted = ids(await rt.generate(PROMPT, max_tokens=NUM_UNDRAFTED))
    text = greedy_text(model)[: len(PROMPT) + NUM_TOKENS]
    continuation = text[len(PROMPT) :]
    assert undrafted == continuation[:NUM_UNDRAFTED]
    for rewind in ("auto", "trim", "checkpoint", "none"):
        if rewind not in rewind_options(architecture):
            with pytest.raises(ModelError, match=rewind):
                await open_and_close((model, None), rewind=rewind)
            continue
        # "auto" trims where that is possible, and makes checkpoints elsewhere. One token at a time is the same code for
        # every cache, and so are checkpoints of caches that are only trimmed.
        is_auto = rewind == "trim" or (rewind == "checkpoint" and "trim" not in rewind_options(architecture))
        is_repetition = rewind == "none" or (rewind == "checkpoint" and name not in OF_ALL_CACHES)
        if is_auto or (is_repetition and sum(map(ord, name)) % 6):
            continue
        drafts = corrupted(text, VOCAB_SIZE)
        async with with_a_fake(model, drafts, is_target=True, rewind=rewind) as rt:
            lookahead = lookahead_for(name, rewind)
            completion = await rt.generate(PROMPT, max_tokens=NUM_TOKENS, lookahead=lookahead)
            assert ids(completion) == continuation, f"rewind {rewind}, lookahead {lookahead}"
            _assert_rewound(architecture, rewind, completion.statistics)


def _assert_rewound(architecture: Architecture, rewind: str, statistics: runtime.Statistics) -> None:
    """Assert that the expected rewind mode was used, and that there was something to rewind."""
    assert statistics.draft_failures == 0
    assert 0 < statistics.accepted < statistics.proposed
    options = rewind_options(architecture)
    if rewind == "none" or "checkpoint" not in options:
        assert statistics.n1_rounds >= statistics.rounds - 1
        assert statistics.replayed_tokens == 0
    elif rewind == "auto" and "trim" in options:
        assert statistics.n1_rounds == statistics.replayed_tokens == 0
    else:
        assert statistics.n1_rounds == 0
        assert statistics.replayed_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_ALL_CACHES)
async def test_a_rewound_drafter_guesses_as_a_fresh_one(name: str) -> None:
    architecture, model = ARCHITECTURES[name], build(name)
    text = guessed(model)
    # "auto" trims where it can, and makes checkpoints elsewhere; `test_cache_rewind.py` has checkpoints of all caches.
    async with with_a_fake(model, text, is_target=False, rewind="auto") as rt:
        lookahead = lookahead_for(name, "auto")
        completion = await rt.generate(PROMPT, max_tokens=NUM_TOKENS, lookahead=lookahead)
        assert ids(completion) == text[len(PROMPT) :]
        assert completion.statistics.draft_failures == 0
        # With an unknown cache class the drafter is fed committed tokens only, and guesses one token beyond them.
        num_guessed = 1 if "LayerCache" in architecture.kinds else lookahead
        drafted = [token.from_draft for token in completion.tokens]
        assert drafted == share_of_a_drafter(RIGHT[len(PROMPT) :], num_guessed), f"lookahead {lookahead}"


def share_of_a_drafter(right: Sequence[bool], lookahead: int) -> list[bool]:
    """Which tokens of a text come from a drafter with a fixed lookahead, by whether its guess for each is right."""
    drafted: list[bool] = []
    while (remaining := len(right) - len(drafted)) > 0:
        window = right[len(drafted) :][: min(lookahead, remaining - 1)]
        num_accepted = next((i for i, is_right in enumerate(window) if not is_right), len(window))
        drafted += [True] * num_accepted + [False]
    return drafted
