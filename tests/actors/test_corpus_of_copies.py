"""`copy_corpus` in simulated time: the same text, sooner where it was written before; and one client's for no other."""

from __future__ import annotations

from typing import Any

import pytest
from asgi import COMPLETIONS, JSON, served, watched_streams
from scripted import ScriptedModel, digest, ids, run, simulated, spike

from protocol.errors import PromptError, SettingsError

PROMPT = [1, 2, 3]


def reciting(history: Any) -> Any:
    """A text without a repetition of two tokens: it depends on the position."""
    return spike(digest("recited", [len(history), history[-1]]) % 64)


async def generated(simulation: Any) -> Any:
    return await simulation.runtime.generate(PROMPT, max_tokens=60, temperature=0)


@pytest.mark.parametrize("has_model", [False, True])
def test_an_answer_that_was_given_before_is_copied_and_the_same(has_model: bool) -> None:
    async def both(num_bytes: int) -> list[Any]:
        draft: Any = ScriptedModel(lambda history: spike(0)) if has_model else "ngram"
        async with simulated(ScriptedModel(reciting), draft, copy_corpus=num_bytes) as simulation:
            return [await generated(simulation) for _ in range(2)]

    plain, kept = run(both, 0), run(both, 2**22)
    assert len({tuple(ids(each.tokens)) for each in (*plain, *kept)}) == 1
    before, again = (each.statistics.accepted_copied for each in kept)
    assert again > before + 20
    assert plain[1].statistics.accepted_copied <= before


def test_a_document_is_copied_from() -> None:
    async def main() -> None:
        async with simulated(ScriptedModel(reciting), "ngram") as simulation:
            text = ids((await generated(simulation)).tokens)
            with pytest.raises(SettingsError, match="copy_corpus"):
                await simulation.runtime.add_corpus([text])
        async with simulated(ScriptedModel(reciting), "ngram", copy_corpus=2**22) as simulation:
            with pytest.raises(PromptError, match="in the corpus"):
                await simulation.runtime.add_corpus([[10**6]])
            await simulation.runtime.add_corpus([text])
            answer = await generated(simulation)
            assert ids(answer.tokens) == text
            assert answer.statistics.accepted_copied > 20

    run(main)


def test_what_one_client_was_answered_is_copied_for_no_other() -> None:
    clients = [("a", "192.0.2.1"), ("b", "192.0.2.1"), ("a", "192.0.2.2"), ("a", "192.0.2.1")]

    async def copied(num_bytes: int) -> list[tuple[int, int]]:
        """How many copied tokens were accepted and rejected, by request: all are the same."""
        async with served(ScriptedModel(reciting), "ngram", copy_corpus=num_bytes) as server:
            seen = watched_streams(server)
            for key, address in clients:
                body = {"prompt": "def f", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
                await server.ask(COMPLETIONS, body, address=address, headers={**JSON, "authorization": f"Bearer {key}"})
            every = [stream.statistics() for _, stream in seen]
            return [(each.accepted_copied, each.rejected_copied) for each in every]

    without, kept = run(copied, 0), run(copied, 2**22)
    assert kept[:3] == without[:3]
    assert kept[3][0] > without[3][0] + 20
