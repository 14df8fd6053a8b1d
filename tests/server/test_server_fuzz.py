"""The running server against its own description: whatever schemathesis makes of it."""

import zlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from command_line import HANGS_S
from hypothesis import HealthCheck, settings
from raw_http import ACCESS_LINE
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.generation.meta import TestPhase
from served_command import MODEL, Server, serving

from runtime.server.app import OPERATIONS
from runtime.server.operations import description

pytestmark = pytest.mark.slow

load_all_checks()
# A description cannot say all: what fits it may still be too long for the context, or name a token that there is not.
CHECKED = [check for check in CHECKS.get_all() if check.__name__ != "positive_data_acceptance"]


SAID: dict[str, Any] = {
    "/v1/completions": {"prompt": "def f"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "def f"}]},
    "/v1/responses": {"input": "def f"},
    "/v1/messages": {"messages": [{"role": "user", "content": "def f"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "def f"}]},
}

# Each so-manieth of the hundreds of cases that schemathesis lists for the fields of an operation; others in each
# operation, since most of them have the same fields.
SHARE = 25


def is_left_out(case: schemathesis.Case) -> bool:
    if case.meta is None or case.meta.phase.name != TestPhase.COVERAGE:
        return False
    listed = f"{case.path} {getattr(case.meta.phase.data, 'description', '')}"
    return zlib.crc32(listed.encode()) % SHARE != 0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    # Short answers, as many of them as it takes.
    with serving("--max-tokens", "2", "--max-tokens-limit", "2", "--max-prompt-tokens", "64") as one:
        yield one


described = schemathesis.openapi.from_dict(description(OPERATIONS, MODEL, has_key=False))


@described.parametrize()
@settings(
    max_examples=3,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
def test_nothing_that_can_be_asked_gets_what_is_not_described(case, server):
    if is_left_out(case):
        return
    # Most of what fits the description has nothing to say, and would be refused for that alone.
    if case.meta is not None and case.meta.generation.mode.is_positive and case.path in SAID:
        case.body = {**case.body, **SAID[case.path]}
    response = case.call(base_url=server.url, timeout=HANGS_S)
    # A body that is too long is refused unread; for the check, 413 would not say that its list is too long.
    is_unread = response.status_code == 413
    checks = [check for check in CHECKED if not is_unread or check.__name__ != "negative_data_rejection"]
    case.validate_response(response, checks=checks)


# The cases above come from this process's description. test_server_description.py compares it with responses.
def test_the_server_says_of_itself_what_was_tried(server):
    assert httpx.get(f"{server.url}openapi.json").json() == description(OPERATIONS, MODEL, has_key=False)


def test_the_server_is_as_well_as_before(server):
    server.until_idle()
    assert server.health()["ok"] is True
    first, *lines = server.said
    assert "is served at" in first
    assert [line for line in lines if not ACCESS_LINE.fullmatch(line.rstrip("\n"))] == []
