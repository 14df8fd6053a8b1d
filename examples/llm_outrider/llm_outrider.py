"""A plugin of the command line tool `llm` (https://llm.datasette.io): the models of a running `outrider serve`.

Run with llm 0.32.1. `llm install -e examples/llm_outrider`, start `outrider serve`, then `llm -m outrider/NAME "…"`;
`llm models` lists the names. OUTRIDER_URL is the server's address, OUTRIDER_API_KEY its key.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import llm
from llm.default_plugins.openai_models import AsyncChat, Chat

URL = os.environ.get("OUTRIDER_URL", "http://127.0.0.1:8000").rstrip("/")
KEY = os.environ.get("OUTRIDER_API_KEY", "none")


@llm.hookimpl
def register_models(register: Callable[..., Any]) -> None:
    request = urllib.request.Request(f"{URL}/v1/models", headers={"Authorization": f"Bearer {KEY}"})
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:
            names = [model["id"] for model in json.load(answer)["data"]]
    except (OSError, ValueError, urllib.error.URLError):
        return  # no server is running: `llm` has its other models
    for name in names:
        options = {"model_name": name, "api_base": f"{URL}/v1"}
        chat, async_chat = (kind(f"outrider/{name}", **options) for kind in (Chat, AsyncChat))
        for model in (chat, async_chat):
            model.needs_key, model.key = None, KEY
        register(chat, async_chat)
