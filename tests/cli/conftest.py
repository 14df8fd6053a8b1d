"""Models on disk, and served commands, that several test modules of the commands use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from command_line import save_model
from models import llama, near, save
from served_command import KEY, PROMPT, Server, serving, serving_caller

import runtime
import runtime.engine.opening
import runtime.server.models.loaded_model

if TYPE_CHECKING:
    import openai


@pytest.fixture(scope="session")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose target can call tools. Each test leaves it idle."""
    with serving_caller(tmp_path_factory.mktemp("models")) as one:
        yield one


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A server of the demo pair. Each test leaves it idle."""
    with serving("--api-key", KEY, "--strict") as one:
        yield one


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as one:
        yield one


@pytest.fixture(scope="session")
def expected() -> str:
    """The demo pair's text after the prompt."""
    return runtime.generate_sync(PROMPT, target=runtime.DEMO_TARGET, draft=runtime.DEMO_DRAFT, max_tokens=24).text


@pytest.fixture(scope="session")
def short(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target with a context of 32 tokens."""
    return str(save_model(tmp_path_factory.mktemp("models") / "short", context=32))


@pytest.fixture(scope="session")
def pair() -> tuple[Any, Any]:
    """A target, and a drafter that is often right."""
    target = llama()
    return target, near(target, noise=0.02)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target and a drafter as `mlx_lm.load` finds them."""
    where, target = tmp_path_factory.mktemp("models"), llama()
    return save(where / "target", target), save(where / "draft", near(target, noise=0.02))


class OpenedError(runtime.OutriderError):
    """Raised instead of opening a runtime."""


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a command would open a runtime with: target, draft and options; opening it raises `OpenedError`."""
    given: dict[str, Any] = {}

    def open(target: Any, draft: Any, **options: Any) -> Any:
        given.update(options, target=target, draft=draft)
        raise OpenedError

    monkeypatch.setattr(runtime.engine.opening, "open", open)
    monkeypatch.setattr(runtime.server.models.loaded_model, "open_runtime", open)
    return given
