"""The page of `outrider serve` in a real browser, with the server that it is for and the demo pair."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from load import exact_copy
from playwright.sync_api import Browser, BrowserContext, expect
from scripted_server import POLICY
from visitors import Tab, chromium, visitor

from runtime.loading.demo import DEMO_DRAFT, DEMO_TARGET

# The models take a few seconds to be there.
pytestmark = pytest.mark.browser

PROMPT = "class Stack:\n    def __init__(self):\n"
OTHER = "def read_config(path):\n"
LONG = 900  # tokens: longer than it takes a test to interrupt


class Served:
    """A server that is at work: two answers at a time, and nobody waits."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"http://\S+/", line):
                self.url = found[0]
                return
        raise AssertionError("the server never said where it is")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path) as response:
            return str(response.read().decode())

    def answer(self, prompt: str, **settings: Any) -> str:
        """The whole text at once."""
        request = urllib.request.Request(
            self.url + "v1/completions",
            json.dumps(
                {"model": json.loads(self.get("v1/models"))["data"][0]["id"], "prompt": prompt, **settings}
            ).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            return str(json.load(response)["choices"][0]["text"])

    @property
    def num_cancelled(self) -> int:
        found = re.search(r'^outrider_requests_total{outcome="cancelled"} (\S+)$', self.get("metrics"), re.MULTILINE)
        assert found is not None
        return int(float(found[1]))

    def wait_until_cancelled(self, num_cancelled: int, *, num_streams: int = 0) -> None:
        """Wait until so many answers were cancelled in all, and no more than `num_streams` are generated."""
        while self.num_cancelled < num_cancelled or json.loads(self.get("health"))["streams"] > num_streams:
            pass
        assert self.num_cancelled == num_cancelled


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    # In float32: in bfloat16 on a CPU, a text depends on how many tokens each pass had, and so on how busy the machine
    # is.
    folder = tmp_path_factory.mktemp("models")
    target, draft = (exact_copy(model, folder / model.name) for model in (DEMO_TARGET, DEMO_DRAFT))
    command = [sys.executable, "-m", "runtime", "serve", "--port", "0", "--max-streams", "2", "--max-waiting", "0"]
    # Nobody reads stderr after the address: an access log would fill the pipe, and the server would wait for ever.
    command += ["--target", str(target), "--draft", str(draft), "--no-access-log"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield Served(process)
        finally:
            process.terminate()
            process.communicate()
    assert process.returncode == 0


@pytest.fixture(scope="module")
def started() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


Open = Callable[..., Tab]


@pytest.fixture
def opened(served: Served, started: Browser) -> Iterator[Open]:
    """Opens tabs at the page, whose answers may be long; in them nothing may go wrong."""
    tabs: list[Tab] = []
    with contextlib.ExitStack() as stack:

        def open_tab(context: BrowserContext | None = None, **options: Any) -> Tab:
            tab = Tab(context or stack.enter_context(visitor(started, served.url, **options)), served.url)
            tabs.append(tab)
            tab.load()
            tab["settings-button"].click()
            tab.page.get_by_label("Max tokens").fill(str(LONG))
            tab["settings-button"].click()
            return tab

        yield open_tab
        for tab in tabs:
            tab.check()


def writing(tab: Tab, prompt: str) -> None:
    tab.ask(prompt)
    tab.expect_state("writing")


def shown(tab: Tab, prompt: str) -> str:
    """What was answered to a prompt."""
    text: str = tab["text"].evaluate("text => text.innerText")
    assert text.startswith(prompt)
    return text.removeprefix(prompt)


def check_kept(served: Served, tab: Tab, prompt: str) -> None:
    """That the beginning of the answer is there, as far as it came."""
    kept, num_tokens = shown(tab, prompt), int(tab["tokens"].inner_text())
    assert kept
    assert served.answer(prompt, max_tokens=num_tokens).startswith(kept)


@pytest.mark.slow
def test_an_answer_is_the_servers_text(served: Served, opened: Open) -> None:
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
    assert shown(tab, PROMPT) == served.answer(PROMPT, max_tokens=120)
    kinds = {kind.removesuffix(" blank") for kind, _ in tab.runs}
    assert kinds == {"prompt", "", "drafted"}
    for figure in ("acceptance", "speed", "tokens", "first", "read", "beside"):
        expect(tab[figure]).to_have_text(re.compile(r"^\d"))
    assert tab.sideways == 0


@pytest.mark.slow
@pytest.mark.parametrize("path", ["", "page/index.html", "page/app.js", "page/style.css"])
def test_the_page_comes_with_its_policy_and_is_asked_for_anew(served: Served, path: str) -> None:
    with urllib.request.urlopen(served.url + path) as response:
        assert response.headers.get_all("Content-Security-Policy") == [POLICY]
        assert response.headers.get_all("Cache-Control") == ["no-cache"]


@pytest.mark.slow
def test_a_part_of_the_page_that_has_not_changed_is_not_sent_again(served: Served) -> None:
    with urllib.request.urlopen(served.url + "page/app.js") as response:
        known = response.headers["ETag"]
    again = urllib.request.Request(served.url + "page/app.js", headers={"If-None-Match": known})
    with pytest.raises(urllib.error.HTTPError) as told:
        urllib.request.urlopen(again)
    told.value.close()
    assert (told.value.code, told.value.headers["Cache-Control"]) == (304, "no-cache")


@pytest.mark.slow
def test_the_timeline_of_an_answer_opens(opened: Open) -> None:
    tab = opened()
    writing(tab, PROMPT)
    tab.press("Escape")
    with tab.page.expect_popup() as popup:
        tab["timeline"].click()
    expect(popup.value).to_have_title("Outrider timeline")
    expect(popup.value.locator("#text .t").first).to_be_attached()


def test_whatever_ends_an_answer_in_the_page_ends_its_generation(served: Served, opened: Open) -> None:
    tab, before = opened(), served.num_cancelled
    writing(tab, PROMPT)
    writing(tab, OTHER)  # in its place
    served.wait_until_cancelled(before + 1, num_streams=1)
    tab["stop"].click()
    assert tab["state"].get_attribute("data-state") == "stopped"
    served.wait_until_cancelled(before + 2)
    check_kept(served, tab, OTHER)
    writing(tab, PROMPT)
    tab.page.reload()
    served.wait_until_cancelled(before + 3)
    expect(tab["prompt"]).to_have_value(PROMPT)
    writing(tab, PROMPT)
    tab.page.close()
    served.wait_until_cancelled(before + 4)


@pytest.mark.slow
def test_two_tabs_have_an_answer_each_and_a_third_is_told_to_wait(served: Served, opened: Open) -> None:
    tab, before = opened(), served.num_cancelled
    other, third = opened(tab.page.context), opened()
    writing(tab, PROMPT)
    writing(other, OTHER)
    third.ask(PROMPT)
    third.expect_state("failed")
    expect(third["problem-when"]).to_have_text(re.compile(r"^Try again"))
    tab.press("Escape")
    tab.expect_state("stopped")
    assert other["state"].get_attribute("data-state") == "writing"
    # The page has stopped before the server knows of it.
    served.wait_until_cancelled(before + 1, num_streams=1)
    third["retry"].click()
    third.expect_state("writing")
    for one in (other, third):
        one.press("Escape")
    served.wait_until_cancelled(before + 3)
    check_kept(served, other, OTHER)
