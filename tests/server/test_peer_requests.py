"""Requests of other servers' test-suites: those that are meant to pass here do; the others are answered as they say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peer_cases_llama_cpp
import peer_cases_mlx_lm
import peer_cases_vllm
import pytest
import trio
from asgi import JSON, Exchange, ask, pool_of
from calling_models import calling_pair
from outcome import Outcome, acapture
from peer_cases import Asked, Case

import runtime
from runtime.server.app import Service, application
from runtime.server.timelines import Timelines

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CASES = [*peer_cases_mlx_lm.CASES, *peer_cases_vllm.CASES, *peer_cases_llama_cpp.CASES]

Answers = dict[str, Outcome[Sequence[Exchange]]]


async def one_answer(asked: Asked, app: Any, before: Sequence[Exchange]) -> Exchange:
    path, body = (part(before) if callable(part) else part for part in (asked.path, asked.body))
    method = asked.method or ("GET" if body is None else "POST")
    headers = {**(JSON if method == "POST" else {}), **asked.headers}
    content = b"" if body is None else json.dumps(body).encode()
    return await ask(app, path, content, method=method, headers=headers)


async def answers_of(case: Case, app: Any) -> Sequence[Exchange]:
    answers: list[Exchange] = []
    for asked in case.asked:
        answers.append(await one_answer(asked, app, answers))
    return answers


@pytest.fixture(scope="module")
def answers() -> Answers:
    """The answers to the requests of all cases, from one pair of models."""

    async def main() -> Answers:
        timelines = Timelines()
        pair = calling_pair(thinks=False)
        async with runtime.open(*pair, max_streams=4, trace=timelines) as rt, pool_of(rt, "tiny", timelines) as models:
            apps = {key: application(models, Service(api_key=key)) for key in {case.key for case in CASES}}
            return {case.id: await acapture(answers_of, case, apps[case.key]) for case in CASES}

    return trio.run(main)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in CASES])
def test_a_request_of_another_server_s_test_is_answered_as_its_case_says(case: Case, answers: Answers) -> None:
    given = answers[case.id].unwrap()
    assert case.holds(given), [(answer.status, answer.body) for answer in given]


def test_the_guide_counts_the_cases() -> None:
    assert len({case.id for case in CASES}) == len(CASES)
    num_passing = sum(case.instead is None for case in CASES)
    guide = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    assert f"{num_passing} of {len(CASES)} are" in " ".join(guide.split())
