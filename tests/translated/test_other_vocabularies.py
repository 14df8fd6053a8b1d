"""A runtime whose draft model has another vocabulary: the texts are the target's, and drafts are accepted."""

import logging
from typing import Any

import attrs
import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from models import greedy
from other_vocabularies import byte_level, sentencepiece

import runtime
from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import MLXModel
from actors.translated.translated_model import TranslatedModel
from runtime.loading.demo import DEMO_PROMPTS, STREAM_PROMPTS
from runtime.loading.tokenizers import vocabulary_map

pytestmark = pytest.mark.slow

VOCABULARIES = {"byte-level": lambda: byte_level(2500), "SentencePiece": sentencepiece}
NUM_TOKENS = 24

Pair = tuple[tuple[Module, Any], tuple[Module, Any]]


@pytest.fixture(scope="module")
def pairs(demo_pair: Pair) -> dict[str, Pair]:
    """The demo draft model, which is quick, drafting for itself in other vocabularies."""
    _, (model, tokenizer) = demo_pair
    return {name: ((model, tokenizer), (new().given_to(model), new().tokenizer)) for name, new in VOCABULARIES.items()}


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target waits for each draft, however long it takes."""
    monkeypatch.setattr("protocol.deadlines.MIN_PROPOSAL_WAIT_S", 1e9)


@pytest.mark.parametrize(("name", "lookahead"), [("byte-level", 2), ("SentencePiece", "auto")])
async def test_one_can_be_attached_and_greedy_texts_are_the_targets(pairs, name, lookahead, caplog):
    (target, tokenizer), draft = pairs[name]
    async with runtime.open((target, tokenizer)) as rt:
        with caplog.at_level(logging.INFO, "outrider"):
            await rt.attach_draft(draft)
        assert name == "SentencePiece" or "can propose 2,500 of the target's 4,096 tokens" in caplog.text
        accepted = proposed = 0
        for prompt in DEMO_PROMPTS[:2]:
            given = tokenizer.encode(prompt)
            completion = await rt.generate(given, max_tokens=NUM_TOKENS, lookahead=lookahead, ignore_eos=True)
            assert [token.id for token in completion.tokens] == greedy(target, given, NUM_TOKENS, clear_lead=0.0)
            assert completion.statistics.draft_failures == 0
            accepted, proposed = accepted + completion.statistics.accepted, proposed + completion.statistics.proposed
    if lookahead == 2:
        assert accepted > 0.5 * proposed > 0


async def test_a_saved_conversation_goes_on_and_the_drafter_reads_it_again(pairs, tmp_path):
    target, draft = pairs["byte-level"]
    settings: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "lookahead": 2, "ignore_eos": True}
    async with runtime.open(target, draft) as rt:
        conversation = rt.conversation("def f(x):\n", **settings)
        await conversation.generate("    return x")
        await conversation.save(tmp_path / "session")
        expected = await conversation.generate("\n\n\nclass A:\n")
    async with runtime.open(target, draft) as rt:
        found = await (await rt.load(tmp_path / "session")).generate("\n\n\nclass A:\n")
    assert found.text == expected.text
    assert found.statistics.proposed > 0
    assert found.statistics.cached_tokens > 0


def test_longer_tokens_of_the_draft_model_stand_for_what_the_target_begins_them_with(demo_pair: Pair) -> None:
    _, (model, tokenizer) = demo_pair
    smaller = byte_level(1200)
    found = vocabulary_map(smaller.tokenizer, 1200, tokenizer, 4096)
    assert len(found.shared) + len(found.beginnings) == 4096
    text = smaller.tokenizer.encode("".join(STREAM_PROMPTS))
    num_foreseen = []
    for vocabularies in (found, attrs.evolve(found, beginnings={})):
        sequence = TranslatedModel(MLXModel(model, CacheOptions()), vocabularies).open_sequence(alongside_model=False)
        rows = sequence.feed(tuple(text[:-1]), len(text) - 1)
        num_foreseen.append(int(mx.sum(mx.argmax(rows, axis=-1) == mx.array(text[1:])).item()))
    assert num_foreseen[0] > num_foreseen[1]
