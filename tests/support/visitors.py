"""Users of the page in a real browser. They use the browser's own input; every error in the page is seen."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import browser
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Locator, Page, Request, expect, sync_playwright

# Ends a hang; not an expectation.
HANGS_MS = 60_000

expect.set_options(timeout=HANGS_MS)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser. Playwright occupies this thread's asyncio loop until it is closed."""
    found = browser.find()
    assert found is not None, f"no Chromium was found; install it, or say in {browser.VARIABLE} where it is"
    arguments = ["--no-sandbox"] if sys.platform == "linux" and os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=arguments)
        yield started
        started.close()


class Tab:
    """A browser tab with the page."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.page.set_default_timeout(HANGS_MS)
        self.url = url
        self._wrong: list[str] = []
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self._wrong.append(str(error)))
        self.page.on("request", self._see)

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type != "error":
            return
        # The browser reports failed requests whatever the page does. Any other error is the page's own; violations of
        # its policy are reported here too.
        if "Failed to load resource" not in message.text:
            self._wrong.append(message.text)

    def _see(self, request: Request) -> None:
        if not request.url.startswith((self.url, "data:")):
            self._wrong.append(f"asks another host: {request.url}")

    def check(self) -> None:
        assert self._wrong == [], self._wrong

    # --- what the page shows ----------------------------------------------------------------------

    def __getitem__(self, id: str) -> Locator:
        return self.page.locator(f"#{id}")

    def expect_state(self, state: str) -> None:
        expect(self["state"]).to_have_attribute("data-state", state)

    def expect_text(self, text: str) -> None:
        """Wait until the answer, with its prompt, is exactly this text."""
        expect(self["text"]).to_have_js_property("innerText", text)

    def expect_failed(self, message: str) -> None:
        self.expect_state("failed")
        expect(self["problem-text"]).to_have_text(message)

    @property
    def runs(self) -> list[list[str]]:
        """The parts of the answer: (kinds, words) of each."""
        told: list[list[str]] = self.page.locator("#text span").evaluate_all(
            "spans => spans.map((e) => [`${e.parentNode.className} ${e.className}`.trim(), e.textContent])"
        )
        return told

    @property
    def sideways(self) -> int:
        """CSS pixels by which the page is wider than the window."""
        wider: int = self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        return wider

    # --- what the user does -----------------------------------------------------------------------

    def load(self) -> None:
        """Go to the page, and wait until it has reached the server."""
        self.page.goto(self.url)
        expect(self["models"]).to_be_visible()

    def press(self, *keys: str) -> None:
        """Press keys one after another, wherever the focus is."""
        for key in keys:
            self.page.keyboard.press(key)

    def type(self, text: str) -> None:
        """Type a text, wherever the focus is; a new line is Shift+Enter."""
        for i, line in enumerate(text.split("\n")):
            if i:
                self.press("Shift+Enter")
            self.page.keyboard.insert_text(line)

    def ask(self, prompt: str) -> None:
        """Replace the contents of the prompt box, and send it."""
        self["prompt"].focus()
        self.press("ControlOrMeta+a", "Backspace")
        self.type(prompt)
        self.press("Enter")


Open = Callable[..., Tab]
"""Opens a tab at the page; options as of `visitor`."""


@contextlib.contextmanager
def visitor(chromium: Browser, **options: Any) -> Iterator[BrowserContext]:
    """A user with a browser context of their own; options as in `Browser.new_context`."""
    context = chromium.new_context(**options)
    try:
        yield context
    finally:
        context.close()
