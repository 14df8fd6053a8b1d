"""Models on disk that several test modules of the commands use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from command_line import save_model
from models import llama, near, save
from served_caller import serving_caller
from served_command import Server


@pytest.fixture(scope="session")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose target can call tools. Each test leaves it idle."""
    with serving_caller(tmp_path_factory.mktemp("models")) as one:
        yield one


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target with a context of 32 tokens."""
    return str(save_model(tmp_path_factory.mktemp("models") / "short", context=32))


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """A target, and a drafter that is often right."""
    target = llama()
    return target, near(target, noise=0.02)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target and a drafter as `mlx_lm.load` finds them."""
    where, target = tmp_path_factory.mktemp("models"), llama()
    return save(where / "target", target), save(where / "draft", near(target, noise=0.02))
