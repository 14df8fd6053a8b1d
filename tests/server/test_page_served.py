"""The page of `outrider serve` in a real browser, with the server that it is for and the demo pair."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from command_line import HANGS_S
from load import exact_copy
from playwright.sync_api import expect
from scripted_server import POLICY
from served_command import until
from served_thread import num_streams, serving_in_thread
from visitors import Open, Tab

from runtime.loading.demo import DEMO_DRAFT, DEMO_TARGET
from runtime.server.app import Service
from runtime.server.limits import Limits

# The models and the browser take a few seconds to be there; test_page_conversation.py has a scripted server.
pytestmark = [pytest.mark.browser, pytest.mark.slow]

PROMPT = "class Stack:\n    def __init__(self):\n"
OTHER = "def read_config(path):\n"
LONG = 900  # tokens: longer than it takes a test to interrupt


class Served:
    """A server that is at work: two answers at a time, and nobody waits."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=headers, timeout=HANGS_S)

    def answer(self, prompt: str, **settings: Any) -> str:
        """The whole text at once."""
        response = httpx.post(f"{self.url}v1/completions", json={"prompt": prompt, **settings}, timeout=HANGS_S)
        return str(response.json()["choices"][0]["text"])

    @property
    def num_cancelled(self) -> int:
        metrics = self.get("metrics").text
        found = re.search(r'^outrider_requests_total{outcome="cancelled"} (\S+)$', metrics, re.MULTILINE)
        assert found is not None
        return int(float(found[1]))

    def wait_until_cancelled(self, num_cancelled: int, *, num_left: int = 0) -> None:
        """Wait until so many answers were cancelled in all, and no more than `num_left` are generated."""
        until(lambda: self.num_cancelled >= num_cancelled and num_streams(self.url) <= num_left)
        assert self.num_cancelled == num_cancelled


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    # In float32: in bfloat16 on a CPU, a text depends on how many tokens each pass had, and so on how busy the machine
    # is.
    folder = tmp_path_factory.mktemp("models")
    target, draft = (exact_copy(model, folder / model.name) for model in (DEMO_TARGET, DEMO_DRAFT))
    service = Service(Limits(max_waiting=0, grace_s=0))
    with serving_in_thread(target, draft, service, max_streams=2) as url:
        yield Served(url)


@pytest.fixture
def opened(opened: Open) -> Open:
    """Opens tabs at the page, whose answers may be long."""

    def open_tab(*given: Any, **options: Any) -> Tab:
        tab = opened(*given, **options)
        tab["settings-button"].click()
        tab.page.get_by_label("Max tokens").fill(str(LONG))
        tab["settings-button"].click()
        return tab

    return open_tab


def writing(tab: Tab, prompt: str) -> None:
    tab.ask(prompt)
    tab.expect_state("writing")


def shown(tab: Tab, prompt: str) -> str:
    """What was answered to a prompt."""
    text: str = tab["text"].evaluate("text => text.innerText")
    assert text.startswith(prompt)
    return text.removeprefix(prompt)


def check_kept(server: Served, tab: Tab, prompt: str) -> None:
    """That the beginning of the answer is there, as far as it came."""
    kept, num_tokens = shown(tab, prompt), int(tab["tokens"].inner_text())
    assert kept
    assert server.answer(prompt, max_tokens=num_tokens).startswith(kept)


def test_an_answer_is_the_servers_text(server: Served, opened: Open) -> None:
    tab = opened(viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True)
    tab["settings-button"].click()
    tab.page.get_by_label("Max tokens").fill("120")
    tab["settings-button"].click()
    # On a busy machine, a lookahead of "auto" may leave the drafter out, and nothing of the text would be drafted.
    tab.page.route(
        "**/v1/completions",
        lambda route, request: route.continue_(post_data=json.dumps({**request.post_data_json, "lookahead": 3})),
    )
    tab.ask(PROMPT)
    tab.expect_state("done")
    assert shown(tab, PROMPT) == server.answer(PROMPT, max_tokens=120)
    kinds = {kind.removesuffix(" blank") for kind, _ in tab.runs}
    assert kinds == {"prompt", "", "drafted"}
    for figure in ("acceptance", "speed", "tokens", "first", "read", "beside"):
        expect(tab[figure]).to_have_text(re.compile(r"^\d"))
    assert tab.sideways == 0


def test_the_page_comes_with_its_policy_and_is_cached(server: Served) -> None:
    for path in ("", "page/index.html", "page/app.js", "page/style.css"):
        part = server.get(path)
        assert part.headers.get_list("Content-Security-Policy") == [POLICY]
        assert part.headers.get_list("Cache-Control") == ["no-cache"]
    again = server.get("page/style.css", **{"If-None-Match": part.headers["ETag"]})
    assert (again.status_code, again.headers["Cache-Control"]) == (304, "no-cache")


def test_the_timeline_of_an_answer_opens(opened: Open) -> None:
    tab = opened()
    writing(tab, PROMPT)
    tab.press("Escape")
    with tab.page.expect_popup() as popup:
        tab["timeline"].click()
    expect(popup.value).to_have_title("Outrider timeline")
    expect(popup.value.locator("#text .t").first).to_be_attached()


def test_whatever_ends_an_answer_in_the_page_ends_its_generation(server: Served, opened: Open) -> None:
    tab, before = opened(), server.num_cancelled
    writing(tab, PROMPT)
    writing(tab, OTHER)  # in its place
    server.wait_until_cancelled(before + 1, num_left=1)
    tab["stop"].click()
    assert tab["state"].get_attribute("data-state") == "stopped"
    server.wait_until_cancelled(before + 2)
    check_kept(server, tab, OTHER)
    writing(tab, PROMPT)
    tab.page.reload()
    server.wait_until_cancelled(before + 3)
    expect(tab["prompt"]).to_have_value(PROMPT)
    writing(tab, PROMPT)
    tab.page.close()
    server.wait_until_cancelled(before + 4)
