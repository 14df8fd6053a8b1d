"""The interactive description of the API at `/docs`, in a real browser, with the real server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect
from served_command import KEY, until
from served_thread import num_streams, serving_in_thread
from visitors import Tab, chromium, visitor

from runtime.loading.demo import DEMO_DRAFT, DEMO_TARGET
from runtime.server.app import Service

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving_in_thread(DEMO_TARGET, DEMO_DRAFT, Service(api_key=KEY)) as url:
        yield url


@pytest.fixture(scope="module")
def tab(url: str) -> Iterator[Tab]:
    """A narrow one, with the key typed in; nothing may go wrong in it, and nothing be fetched from elsewhere."""
    with chromium() as browser, visitor(browser, viewport={"width": 320, "height": 800}) as context:
        one = Tab(context.new_page(), url)
        one.page.goto(f"{url}docs")
        expect(one["complete"]).to_be_visible()
        yield one
        one.check()


def unfold(page: Page, id: str) -> None:
    """Show the fields of an operation, whether they were shown before or not: the tests share a tab."""
    page.locator(f"#{id}").evaluate("details => { details.open = true }")


def endings(name: str) -> list[str]:
    """The operations that end an answer."""
    return [f"cancel_{name}", f"end_thinking_{name}"]


def tried(page: Page, id: str) -> Page:
    """Open an operation and send its request as it stands."""
    unfold(page, id)
    page.locator(f"#{id} button").click()
    return page


def test_every_operation_is_there_with_its_fields_and_nothing_runs_over_the_edge(tab: Tab) -> None:
    page = tab.page
    ids = page.locator("details").evaluate_all("all => all.map((one) => one.id)")
    completions = ["complete", "fill_in", "chat", *endings("completion"), *endings("chat")]
    responses = ["respond", *endings("response"), "response", "delete_response"]
    apis = [*completions, *responses, "message", *endings("message"), "count_tokens"]
    others = ["tokenize", "detokenize", "version", "models", "model", "health", "metrics", "timeline"]
    assert ids == [*apis, *others]
    unfold(page, "chat")
    row = page.locator("#chat tr", has=page.locator("td code", has_text=re.compile("^top_p$")))
    expect(row).to_have_text(re.compile("number"))
    assert page.evaluate("document.documentElement.scrollWidth") == 320


def test_a_request_that_needs_the_key_says_so_and_with_it_streams_its_answer(tab: Tab) -> None:
    page = tried(tab.page, "complete")
    output = page.locator("#complete pre")
    expect(output).to_have_text(re.compile("^401 application/json.*API key", re.DOTALL))
    page.get_by_label("API key").fill(KEY)
    page.locator("#complete button").click()
    expect(output).to_have_text(re.compile(r"^200 text/event-stream.*data: \[DONE\]\s*$", re.DOTALL))


def test_stop_ends_the_generation(tab: Tab, url: str) -> None:
    page = tab.page
    unfold(page, "chat")
    page.get_by_label("API key").fill(KEY)
    page.locator("#chat textarea").fill(
        json.dumps(
            {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 900, "ignore_eos": True}
        )
    )
    page.locator("#chat button").click()
    expect(page.locator("#chat pre")).to_have_text(re.compile("data: "))
    page.locator("#chat button").click()
    expect(page.locator("#chat pre")).to_have_text(re.compile(r"\(stopped\)$"))
    until(lambda: num_streams(url) == 0)
