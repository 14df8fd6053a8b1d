"""Browsers at the page of a scripted server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page
from scripted_server import ScriptedServer
from visitors import Open, Tab, chromium, visitor


@pytest.fixture(scope="module")
def started() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def shared_page(started: Browser) -> Iterator[Page]:
    """A page in which tests follow one another: to make one takes the browser longer than most of them."""
    with visitor(started) as context:
        yield context.new_page()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer().serving() as serving:
        yield serving


@pytest.fixture
def opened(server: ScriptedServer, started: Browser) -> Iterator[Open]:
    """Opens tabs at the page, each with a browser of its own unless it is told whose; in them nothing may go wrong."""
    tabs: list[Tab] = []
    with contextlib.ExitStack() as stack:

        def open_tab(context: BrowserContext | None = None, *, loaded: bool = True, **options: Any) -> Tab:
            page = (context or stack.enter_context(visitor(started, **options))).new_page()
            if context is not None:
                stack.callback(page.close)
            tab = Tab(page, server.url)
            tabs.append(tab)
            if loaded:
                tab.load()
            return tab

        yield open_tab
        for tab in tabs:
            tab.check()


@pytest.fixture
def tab(shared_page: Page, server: ScriptedServer) -> Iterator[Tab]:
    """A tab at the page, which nothing is left in of the tests before: each server is at another port."""
    shared_page.bring_to_front()  # behind a page that was opened since, it draws but once a second
    tab = Tab(shared_page, server.url)
    tab.load()
    yield tab
    tab.check()
    tab.leave()
