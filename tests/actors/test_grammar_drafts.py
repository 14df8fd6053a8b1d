"""Drafts from a grammar in simulated time: forced text, then a model or a copy, then forced text again.

The vocabulary has an end token, eight letters and eight pairs of them, so forced text has several tokenisations. The
target's distribution under a grammar is known, token by token.
"""

import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import mlx.core as mx
import pytest
import trio
from distributions import SIGNIFICANCE, pooled_p_value, random_price
from scripted import Script, ScriptedModel, Simulation, ids, priced, run, simulated, text_of
from simulated_worker import SimulatedWorker
from sweeps import sweep
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from protocol.trace import Events
from runtime import Grammar
from runtime.engine.drafter_slot import LoadedDrafter

LETTERS = "abcdefgh"
PAIRS = [("a", "b"), ("b", "c"), ("c", "d"), ("d", "e"), ("e", "f"), ("f", "g"), ("g", "h"), ("h", "a")]
TOKENS = ["<eos>", *LETTERS, *map("".join, PAIRS)]
END, VOCAB_SIZE = 0, len(TOKENS)
PROMPT = (1, 2)


def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(BPE(vocab={token: id for id, token in enumerate(TOKENS)}, merges=PAIRS))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


TOKENIZER = tokenizer()


def grammar(seed: int) -> Grammar:
    """Twice one of five letters: after two of them letters are forced, after two any letter may follow."""
    dice, pattern = random.Random(seed), ""
    for _ in range(2):
        first, second, *letters = dice.sample(LETTERS, 5)
        forced = (each + "".join(dice.choices(LETTERS, k=dice.randint(1, 3))) for each in (first, second))
        pattern += f"({'|'.join(forced)}|[{letters[0]}{letters[1]}][a-h]|{letters[2]})"
    return Grammar.from_regex(pattern, TOKENIZER)


def scripted(seed: int) -> Script:
    """Logits that depend on the last token."""
    dice = random.Random(seed)
    table = [[dice.gauss(0.0, 1.0) for _ in TOKENS] for _ in TOKENS]
    return lambda history: table[history[-1]]


def outcomes(script: Script, seed: int) -> dict[tuple[int, ...], float]:
    """The probability of each text under a grammar, at temperature 1."""
    processor, probs, open_ends = grammar(seed), dict[tuple[int, ...], float](), [((), 1.0, None)]
    while open_ends:
        text, p, state = open_ends.pop()
        processor.restore(state)
        row = processor(mx.array([*PROMPT, *text]), mx.array([script([*PROMPT, *text])]))[0].tolist()
        after, weights = processor.save(), [math.exp(logit) for logit in row]
        for token, weight in enumerate(weights):
            if weight > 0.0:
                found = (*text, token), p * weight / sum(weights)
                if token == END:
                    probs[found[0]] = found[1]
                else:
                    open_ends.append((*found, after))
    return probs


async def sample(
    num_sessions: int, draft: Any, seed: int, *, target: int = 1, draft_part: float = 0.1, **settings: Any
) -> list[Any]:
    """Completions under one grammar, with the seeds 0, 1, …; eight at a time."""
    asked = {"temperature": 1.0, "stop_tokens": (END,), "logits_processors": [grammar(seed)], **settings}
    model = ScriptedModel(scripted(draft), vocab_size=VOCAB_SIZE) if isinstance(draft, int) else draft
    prices = {"price": random_price(seed), "draft_price": random_price(seed + 1, draft_part)}
    async with simulated(ScriptedModel(scripted(target), vocab_size=VOCAB_SIZE), model, **prices) as simulation:
        requests = [(PROMPT, {"seed": each}) for each in range(num_sessions)]
        return await simulation.runtime.generate_many(requests, max_concurrent=8, **asked)


@pytest.mark.slow
@pytest.mark.parametrize(("draft", "lookahead"), [(None, 3), ("ngram", "auto"), (2, 1)], ids=str)
def test_under_rejection_texts_have_the_targets_distribution_whatever_is_forced(draft: Any, lookahead: Any) -> None:
    by_whom = Counter[str | None]()
    by_length: dict[int, list[tuple[Counter[Any], Counter[Any]]]] = {1: [], 2: [], 4: [], 12: []}
    settings = {"acceptance": "rejection", "lookahead": lookahead, "max_tokens": 12}
    num_sessions = 300 if lookahead == 1 else 150
    for seed in range(4):
        completions = run(lambda seed=seed: sample(num_sessions, draft, seed, **settings))
        by_whom.update(token.drafted_by for completion in completions for token in completion.tokens)
        expected = outcomes(scripted(1), seed)
        for length, samples in by_length.items():
            probs = Counter[tuple[int, ...]]()
            for text, p in expected.items():
                probs[text[:length]] += p
            counts = Counter(tuple(ids(completion.tokens)[:length]) for completion in completions)
            assert counts.keys() <= probs.keys()
            samples.append((counts, probs))
    for length, samples in by_length.items():
        assert pooled_p_value(samples) > SIGNIFICANCE, length
    assert by_whom["grammar"] > 100, by_whom
    if draft == 2:
        assert by_whom["model"] > 100, by_whom


@sweep(
    "seed, draft, lookahead",
    [
        (2 * half + (i + j) % 2, draft, lookahead)
        for half in range(2)
        for i, draft in enumerate([None, "ngram", 2])
        for j, lookahead in enumerate([1, 4, "auto"])
    ],
)
def test_by_match_the_text_is_the_one_without_drafts(seed: int, draft: Any, lookahead: Any) -> None:
    settings, num_forced = {"acceptance": "match", "max_tokens": 12}, 0
    for temperature in (0.0, 1.0):
        asked = {**settings, "temperature": temperature}
        plain = run(lambda asked=asked: sample(6, None, seed, lookahead=0, **asked))
        drafted = run(lambda asked=asked: sample(6, draft, seed, lookahead=lookahead, **asked))
        assert [ids(each.tokens) for each in drafted] == [ids(each.tokens) for each in plain]
        assert not any(token.from_draft for each in plain for token in each.tokens)
        num_forced += sum(each.statistics.accepted_grammar for each in drafted)
    if draft != 2 or lookahead == "auto":  # else a draft model may be faster with what is not much in doubt
        assert num_forced > 0


# --- what is proposed, and by whom ----------------------------------------------------------------

# After each choice of a letter, three letters of which the tokenisation is usual, and one of which it may not be.
CHAIN = "(bcde|efgh)(abcd|dddd)(hghg|gfed)"


def drafters(simulation: Simulation) -> list[str]:
    """For each proposal that was judged, a letter for each of its tokens: who drafted it."""
    commits = [instant.commit for instant in simulation.instants("verdict") if instant.commit is not None]
    return ["".join(drafter[0] for drafter in commit.drafters) for commit in commits]


async def generated(simulation: Simulation, *processors: Any, **settings: Any) -> Any:
    asked = {"temperature": 0.0, "stop_tokens": (END,), "max_tokens": 20, "logits_processors": processors}
    return await simulation.runtime.generate(PROMPT, **{**asked, **settings})


async def test_forced_text_goes_on_where_a_model_has_chosen(autojump_clock: Any) -> None:
    script = scripted(1)
    models = [ScriptedModel(script, vocab_size=VOCAB_SIZE) for _ in range(2)]
    async with simulated(*models, price=priced(draft=0.125)) as simulation:
        completion = await generated(simulation, Grammar.from_regex(CHAIN, TOKENIZER))
    assert re.fullmatch(CHAIN, TOKENIZER.decode(ids(completion.tokens)[:-1]))
    assert any("mgm" in each or "gmg" in each for each in drafters(simulation)), drafters(simulation)
    assert completion.statistics.rounds < 4


async def test_a_copy_goes_as_far_as_the_grammar_allows_and_forced_text_goes_on(autojump_clock: Any) -> None:
    def repeating(history: Sequence[int]) -> Sequence[float]:
        return [float(token == history[-3]) for token in range(VOCAB_SIZE)]

    prompt = [TOKENS.index(letter) for letter in "acgacg"]
    async with simulated(ScriptedModel(repeating, vocab_size=VOCAB_SIZE), "ngram") as simulation:
        constraint = Grammar.from_regex("[acg]{5}bbbb", TOKENIZER)
        asked: dict[str, Any] = {"temperature": 0.0, "stop_tokens": (END,), "logits_processors": [constraint]}
        completion = await simulation.runtime.generate(prompt, lookahead=12, **asked)
    assert TOKENIZER.decode(ids(completion.tokens)[:-1]) == "acgacbbbb"
    assert drafters(simulation) == ["cccccgggg"]


async def test_without_a_drafter_only_streams_with_a_grammar_are_drafted(autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(scripted(1), vocab_size=VOCAB_SIZE)) as simulation:
        constraint = Grammar.from_regex(CHAIN, TOKENIZER)
        free = await generated(simulation)
        constrained = await generated(simulation, constraint)
        off = await generated(simulation, constraint, lookahead=0)
        proposals = {instant.session for instant in simulation.instants("proposal")}
        assert simulation.runtime.health().draft is None
    assert (free.statistics.proposed, off.statistics.proposed) == (0, 0)
    assert proposals == {1}
    assert constrained.statistics.accepted_grammar > 0
    assert constrained.statistics.draft_failures == 0
    assert ids(constrained.tokens) == ids(off.tokens)
    assert constrained.statistics.rounds < off.statistics.rounds


async def test_a_drafter_that_is_attached_and_detached_leaves_texts_with_a_grammar_as_they_are(autojump_clock):
    script, constraint = scripted(1), Grammar.from_regex(f"({CHAIN})+", TOKENIZER)
    asked: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "logits_processors": [constraint]}
    async with simulated(ScriptedModel(script, vocab_size=VOCAB_SIZE)) as simulation:
        rt = simulation.runtime
        plain = await text_of(simulation, PROMPT, **asked, lookahead=0)

        async def load(stack: AsyncExitStack, source: Any) -> LoadedDrafter:
            worker = await stack.enter_async_context(SimulatedWorker("draft", priced(), Events()))
            return ScriptedModel(script, vocab_size=VOCAB_SIZE), worker

        rt._drafter._load = load
        for num_before in (0, 1, 5, 24):
            async with rt.stream(PROMPT, **asked) as stream, trio.open_nursery() as nursery:
                begun = [(await anext(stream)) for _ in range(num_before)]
                nursery.start_soon(rt.attach_draft, "a draft model")
                rest = [token async for token in stream]
            assert ids([*begun, *rest]) == plain
            assert await text_of(simulation, PROMPT, **asked) == plain
            await rt.detach_draft()
        assert rt.statistics().draft_failures == 0
        assert (await rt.generate(PROMPT, **asked)).statistics.accepted_grammar > 0


async def test_a_token_that_the_model_lacks_is_not_proposed(autojump_clock: Any) -> None:
    # The target's last row is the token before "ha", which the grammar forces.
    width = VOCAB_SIZE - 1
    script = scripted(1)
    async with simulated(ScriptedModel(lambda history: script(history)[:width], vocab_size=width)) as simulation:
        completion = await generated(simulation, Grammar.from_regex("bchabc", TOKENIZER), lookahead=8)
    assert TOKENIZER.decode(ids(completion.tokens)[:-1]) == "bchabc"
    assert width not in {token for instant in simulation.instants("proposal") for token in instant.tokens}
    assert completion.statistics.accepted_grammar > 0
