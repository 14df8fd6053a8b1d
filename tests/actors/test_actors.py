"""Two actors on one text: whatever the drafter says and however far ahead it is, the text is the target's."""

from typing import Any

import pytest
from scripted import (
    VOCAB_SIZE,
    ScriptedModel,
    agreeing,
    always,
    continuation,
    ids,
    never,
    next_token,
    priced,
    prompt_with_distinct_continuation,
    simulated,
    spike,
    text_of,
    truthful,
    within,
)
from sweeps import sweep

LOOKAHEADS = [0, 1, 3, 8, "auto"]
AGREEMENTS = [0.0, 0.7, 1.0]
PROMPT = [5, 6, 7]
NUM_TOKENS = 24


# --- the greedy text ------------------------------------------------------------------------------


@sweep("lookahead", LOOKAHEADS)
async def test_a_stop_token_ends_the_text_wherever_in_a_proposal_it_stands(lookahead: Any, autojump_clock: Any) -> None:
    prompt = prompt_with_distinct_continuation(12)
    text = continuation(prompt, 12)
    for agreement in AGREEMENTS[1:]:
        async with simulated(ScriptedModel(truthful), ScriptedModel(agreeing(agreement))) as simulation:
            for num_tokens in range(1, 13):
                completion = await simulation.runtime.generate(
                    prompt,
                    # The last token allowed may be a stop, too.
                    max_tokens=30 if agreement < 1 else num_tokens,
                    # The tokens behind the first stop token are never reached.
                    stop_tokens=text[num_tokens - 1 : num_tokens + 2],
                    lookahead=lookahead,
                )
                assert ids(completion.tokens) == text[:num_tokens]
                assert completion.finish_reason == "stop"
                assert completion.tokens[-1].finish_reason == "stop"


@sweep("lookahead", [1, 2, 3, 5, "auto"])
async def test_a_stop_token_that_only_the_drafter_believes_in_ends_nothing(lookahead: Any, autojump_clock: Any) -> None:
    text = continuation(PROMPT, 12)
    stop = next(token for token in range(VOCAB_SIZE) if token not in text)
    for wrong_at in range(12):

        def believes(history: Any, wrong_at: int = wrong_at) -> Any:
            return spike(stop if len(history) - len(PROMPT) == wrong_at else next_token(history))

        async with simulated(ScriptedModel(truthful), ScriptedModel(believes)) as simulation:
            got = await text_of(simulation, PROMPT, max_tokens=12, stop_tokens=[stop], lookahead=lookahead)
            assert got == text


async def test_a_prompt_that_ends_with_a_stop_token_still_has_a_continuation(autojump_clock: Any) -> None:
    prompt = prompt_with_distinct_continuation(8)
    text = continuation(prompt, 8)
    assert prompt[-1] not in text
    async with simulated(ScriptedModel(truthful), ScriptedModel(truthful)) as simulation:
        assert await text_of(simulation, prompt, max_tokens=8, stop_tokens=[prompt[-1]], lookahead=3) == text
        assert len(simulation.instants("hit")) > 0


# --- the ends of contexts -------------------------------------------------------------------------


@sweep("lookahead", LOOKAHEADS)
async def test_a_text_ends_with_the_targets_context_and_not_with_the_drafters(lookahead, autojump_clock):
    for context_length in range(1, 18):
        draft = ScriptedModel(agreeing((0.5, 1.0)[context_length % 2]))
        if context_length > len(PROMPT):
            target = ScriptedModel(truthful, context_length=context_length)
            async with simulated(target, draft) as simulation:
                completion = await simulation.runtime.generate(PROMPT, max_tokens=None, lookahead=lookahead)
                assert ids(completion.tokens) == continuation(PROMPT, context_length - 3)
                assert completion.finish_reason == "length"
        if lookahead != 0:
            draft = ScriptedModel(agreeing((1.0, 0.5)[context_length % 2]), context_length=context_length)
            async with simulated(ScriptedModel(truthful), draft) as simulation:
                completion = await simulation.runtime.generate(PROMPT, max_tokens=20, lookahead=lookahead)
                assert ids(completion.tokens) == continuation(PROMPT, 20)
                assert completion.statistics.draft_failures == 0


@sweep("lookahead", [1, 2, 3, 8])
async def test_a_drafter_goes_as_far_as_its_context_reaches(lookahead: int, autojump_clock: Any) -> None:
    # After n tokens it says the token at position n, so a context of ten tokens reaches position 10.
    draft = ScriptedModel(truthful, context_length=10)
    async with simulated(ScriptedModel(truthful), draft) as simulation:
        completion = await simulation.runtime.generate(PROMPT, max_tokens=20, lookahead=lookahead)
        assert max(len(sequence.tokens) for sequence in draft.sequences) == 10
        # Position 10 is the eighth generated token.
        assert not any(token.from_draft for token in completion.tokens[8:])


# --- vocabularies of different widths -------------------------------------------------------------


@sweep("width", [VOCAB_SIZE - 7, VOCAB_SIZE + 9])
@sweep("temperature", [0.0, 1.0])
async def test_rows_that_only_one_of_the_two_models_has_change_no_token(width, temperature, autojump_clock):
    settings = {"max_tokens": 40, "lookahead": 3, "temperature": temperature, "seed": 7}

    def padded(history: Any) -> Any:
        # The target must not look at rows that it does not have: they would win.
        return [*spike(next_token(history)), *[99.0] * 9][:width]

    async with simulated(ScriptedModel(truthful)) as simulation:
        alone = await text_of(simulation, PROMPT, **settings)
    async with simulated(ScriptedModel(truthful), ScriptedModel(padded, vocab_size=width)) as simulation:
        completion = await simulation.runtime.generate(PROMPT, **settings)
    assert ids(completion.tokens) == alone
    assert completion.statistics.accepted > 0


# --- prefill --------------------------------------------------------------------------------------


@sweep("prompt_length", [1, 2, 3, 7, 8, 9, 30])
async def test_a_prompt_of_any_length_goes_in_by_chunks_of_any_size(prompt_length: int, autojump_clock: Any) -> None:
    prompt = list(range(prompt_length))
    for step in (1, 2, 3, 8, 2048):
        async with simulated(ScriptedModel(truthful), ScriptedModel(agreeing(0.6))) as simulation:
            got = await text_of(simulation, prompt, max_tokens=10, lookahead=2, prefill_step_size=step)
            assert got == continuation(prompt, 10)
            for actor in ("target", "draft"):
                chunks = [span.num_tokens for span in simulation.spans(actor, "prefill")]
                # The last token of the prompt is left to the first round, which needs its logits.
                assert sum(chunks) == prompt_length - 1
                assert max(chunks, default=0) <= step


async def test_both_models_prefill_at_the_same_time(autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(truthful), ScriptedModel(truthful), price=priced(prefill=4)) as simulation:
        await text_of(simulation, list(range(9)), max_tokens=1, lookahead=1, prefill_step_size=4)
        for actor in ("target", "draft"):
            assert [(s.began, s.ended) for s in simulation.spans(actor, "prefill")] == [(0, 4), (4, 8)]


# --- caches that cannot be rewound: the N=1 fallback ----------------------------------------------


LOOKAHEADS_AND_AGREEMENTS = [(1, 0.0), (1, 1.0), (3, 0.7), (8, 0.0), (8, 1.0), ("auto", 0.7), ("auto", 1.0)]


@sweep("lookahead, agreement", LOOKAHEADS_AND_AGREEMENTS)
async def test_a_target_that_cannot_rewind_is_fed_committed_tokens_only(lookahead, agreement, autojump_clock):
    target = ScriptedModel(truthful, undo=never)
    async with simulated(target, ScriptedModel(agreeing(agreement))) as simulation:
        completion = await simulation.runtime.generate(PROMPT, max_tokens=30, lookahead=lookahead)
    assert ids(completion.tokens) == continuation(PROMPT, 30)
    (sequence,) = target.sequences
    assert sequence.rewinds == []
    assert sequence.tokens == (PROMPT + continuation(PROMPT, 30))[: len(sequence.tokens)]
    assert all(len(tokens) == 1 for at, tokens in sequence.fed if at >= len(PROMPT) - 1)
    # While it rests, the target decodes one token ahead. That token is committed, so it is never lost. A drafter never
    # does.
    is_ahead = completion.statistics.resting_rounds > 0
    assert not is_ahead or lookahead == "auto"
    assert simulation.target_worker.max_ahead == (1 if is_ahead else 0)
    with_proposal = [instant for instant in simulation.instants("proposal") if instant.num_tokens > 0]
    statistics = completion.statistics
    assert statistics.n1_rounds == len(with_proposal) == statistics.proposed
    assert statistics.rounds == 30
    assert statistics.bonus == 0
    # The guess is compared nevertheless, so that the acceptance rate is known.
    assert statistics.accepted == sum(token.from_draft for token in completion.tokens)
    assert statistics.acceptance_rate == pytest.approx(agreement, abs=0.0 if agreement == 1 else 0.25)
    assert agreement < 1 or lookahead == "auto" or statistics.lookahead_misses == 0


@pytest.mark.parametrize("undo", ["nothing", "by checkpoint"])
async def test_a_span_says_how_many_tokens_went_through_the_model(undo: str, autojump_clock: Any) -> None:
    # With checkpoints, accepted tokens are sometimes fed again in a pass of their own, which settles them.
    target = ScriptedModel(truthful, undo=never, keeps_states=undo == "by checkpoint")
    async with simulated(target, ScriptedModel(agreeing(0.5))) as simulation:
        assert await text_of(simulation, PROMPT, max_tokens=40, lookahead=3) == continuation(PROMPT, 40)
        spans = simulation.spans("target", "prefill", "verify")
    assert [span.num_tokens for span in spans] == [len(tokens) for _, tokens in target.sequences[0].fed]
    assert any(span.num_tokens == 1 for span in spans) is (undo == "nothing")


@sweep("lookahead, agreement", LOOKAHEADS_AND_AGREEMENTS)
async def test_a_drafter_that_cannot_rewind_is_never_fed_an_uncommitted_token(lookahead, agreement, autojump_clock):
    text = PROMPT + continuation(PROMPT, 30)
    draft = ScriptedModel(agreeing(agreement), undo=never)
    async with simulated(ScriptedModel(truthful), draft) as simulation:
        completion = await simulation.runtime.generate(PROMPT, max_tokens=30, lookahead=lookahead)
    assert PROMPT + ids(completion.tokens) == text
    (sequence,) = draft.sequences
    assert sequence.rewinds == []
    assert sequence.tokens == text[: len(sequence.tokens)]
    assert simulation.draft_worker.max_ahead == 0
    # One token can be guessed beyond the committed text, and it is.
    assert {instant.num_tokens for instant in simulation.instants("proposal")} <= {0, 1}
    assert completion.statistics.draft_failures == 0
    if agreement == 1:
        assert completion.statistics.tokens_per_round == 2
        assert completion.statistics.acceptance_rate == 1


WHO = ["target", "draft", "both"]


@sweep(
    "lookahead, agreement, window, who",
    [
        (lookahead, agreement, window, WHO[(i + n) % 3])
        for i, lookahead in enumerate(LOOKAHEADS[1:])
        for n, (agreement, window) in enumerate([(0.3, 2), (1.0, 9), (0.3, 16)])
    ],
)
async def test_a_cache_that_rewinds_until_full_gives_the_same_text_beyond(
    agreement: float, window: int, lookahead: Any, who: str, autojump_clock: Any
) -> None:
    target = ScriptedModel(truthful, undo=within(window) if who != "draft" else always)
    draft = ScriptedModel(agreeing(agreement), undo=within(window) if who != "target" else always)
    async with simulated(target, draft) as simulation:
        completion = await simulation.runtime.generate(PROMPT, max_tokens=40, lookahead=lookahead)
    assert ids(completion.tokens) == continuation(PROMPT, 40)
    assert completion.statistics.draft_failures == 0
    # A round takes single steps if the text and the proposal would fill the target's cache.
    length, num_single_steps = len(PROMPT), 0
    proposed = {proposal.round: proposal.num_tokens for proposal in simulation.instants("proposal")}
    for verdict in simulation.instants("verdict"):
        num_proposed = proposed.get(verdict.round, 0)  # none in a resting round
        fills = who != "draft" and num_proposed > 0 and length + num_proposed >= window
        num_single_steps += fills
        length += 1 if fills else verdict.num_tokens + 1
    assert completion.statistics.n1_rounds == num_single_steps
    assert length == len(PROMPT) + 40


async def test_a_drafter_that_can_rewind_until_it_is_full_looks_ahead_until_then(autojump_clock: Any) -> None:
    draft = ScriptedModel(truthful, undo=within(16))
    async with simulated(ScriptedModel(truthful), draft) as simulation:
        await text_of(simulation, PROMPT, max_tokens=40, lookahead=3)
    sizes = [instant.num_tokens for instant in simulation.instants("proposal")]
    assert sizes[:2] == [3, 3]
    assert set(sizes[5:-1]) == {1}


# --- statistics -----------------------------------------------------------------------------------


@sweep("agreement", AGREEMENTS)
@sweep("lookahead", [*LOOKAHEADS, 64])
async def test_the_text_is_the_targets_and_counts_add_up(lookahead: Any, agreement: float, autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(truthful), ScriptedModel(agreeing(agreement))) as simulation:
        completion = await simulation.runtime.generate(PROMPT, max_tokens=NUM_TOKENS, lookahead=lookahead)
        statistics = completion.statistics
        verdicts = simulation.instants("verdict")
        proposals = simulation.instants("proposal")
    assert ids(completion.tokens) == continuation(PROMPT, NUM_TOKENS)
    assert completion.finish_reason == "length"
    assert [token.index for token in completion.tokens] == list(range(NUM_TOKENS))
    assert [token.finish_reason for token in completion.tokens] == [None] * (NUM_TOKENS - 1) + ["length"]
    # Each job of both workers compares the sequence with the session state.
    assert simulation.target_worker.num_comparisons >= statistics.rounds
    assert statistics.prompt_tokens == 3
    assert statistics.generated_tokens == NUM_TOKENS
    assert statistics.rounds == statistics.passes == len(verdicts) == len(simulation.rounds())
    assert statistics.accepted == sum(instant.num_tokens for instant in verdicts)
    assert statistics.accepted == sum(token.from_draft for token in completion.tokens)
    assert statistics.proposed == sum(instant.num_tokens for instant in proposals)
    assert statistics.proposed == statistics.accepted + statistics.rejected
    # Each round's verdict adds a token of the target's own.
    assert statistics.accepted + statistics.rounds == NUM_TOKENS
    sizes = {instant.round: instant.num_tokens for instant in proposals}
    assert len(sizes) == len(proposals)
    assert statistics.bonus == sum(sizes.get(v.round, 0) == v.num_tokens > 0 for v in verdicts)
    assert statistics.n1_rounds == statistics.stale_proposals == statistics.draft_failures == 0
    assert statistics.lookahead_hits == len(simulation.instants("hit"))
    assert statistics.lookahead_misses == len(simulation.instants("miss"))
    if lookahead != 0:
        # Each round has a proposal or is a resting round. The last verdict is neither hit nor miss.
        assert statistics.resting_rounds == statistics.rounds - len(proposals)
        going_on = [round for round in sizes if round < statistics.rounds - 1]
        assert statistics.lookahead_hits + statistics.lookahead_misses == len(going_on)
    if lookahead != "auto":
        assert statistics.resting_rounds == 0
    if agreement == 1:
        assert statistics.rejected == statistics.lookahead_misses == 0
    if agreement == 0:
        assert statistics.accepted == statistics.bonus == 0


async def test_tokens_proposed_beyond_the_end_of_the_text_are_not_counted(autojump_clock: Any) -> None:
    prompt = prompt_with_distinct_continuation(12)
    stop = continuation(prompt, 2)[-1:]
    async with simulated(ScriptedModel(truthful), ScriptedModel(truthful)) as simulation:
        statistics = (await simulation.runtime.generate(prompt, stop_tokens=stop, lookahead=8)).statistics
    assert (statistics.accepted, statistics.rejected, statistics.bonus, statistics.rounds) == (2, 0, 0, 1)
    assert statistics.acceptance_rate == 1
