"""Requests of other servers' test-suites: those that are meant to pass here do, and the guide lists them all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import trio
from asgi import JSON, Exchange, ask, pool_of
from calling_models import calling_pair
from outcome import Outcome, acapture
from peer_cases import Asked, Case
from peer_table import CASES, in_guide, table

import runtime
from runtime.server.app import Service, application
from runtime.server.timelines import Timelines

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
def test_a_request_of_another_server_s_test_is_answered_as_the_guide_says(case: Case, answers: Answers) -> None:
    given = answers[case.id].unwrap()
    assert case.holds(given), [(answer.status, answer.body) for answer in given]


def test_the_guide_lists_the_cases() -> None:
    assert len({case.id for case in CASES}) == len(CASES)
    assert in_guide() == table(), "python tests/support/peer_table.py writes the table again"
