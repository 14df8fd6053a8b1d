"""Browsers at the page of a scripted server."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser
from scripted_server import ScriptedServer
from visitors import Open, Tab, chromium, visitor


@pytest.fixture(scope="module")
def started() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer().serving() as serving:
        yield serving


@pytest.fixture
def opened(server: ScriptedServer, started: Browser) -> Iterator[Open]:
    """Opens tabs at the page, each for a user of its own; in them nothing may go wrong."""
    tabs: list[Tab] = []
    with contextlib.ExitStack() as stack:

        def open_tab(*, loaded: bool = True, **options: Any) -> Tab:
            tab = Tab(stack.enter_context(visitor(started, **options)).new_page(), server.url)
            tabs.append(tab)
            if loaded:
                tab.load()
            return tab

        yield open_tab
        for tab in tabs:
            tab.check()


@pytest.fixture
def tab(opened: Open) -> Tab:
    return opened()
