"""Reading a model and its tokenizer from files: in Hugging Face layout, by mlx-lm, or from a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, model_info
from mlx.nn.layers.base import Module
from mlx_lm.tokenizer_utils import TokenizerWrapper

from actors.mlx.model import load
from runtime.loading.gguf.names import in_repository, is_gguf, only_model, parts_of


def read_model(
    path_or_hub_id: str | Path, *, revision: str | None = None, is_lazy: bool = False, **options: Any
) -> tuple[Module, TokenizerWrapper]:
    """As `actors.mlx.model.load`, for a GGUF file as well, which is always read at once: its path,
    "owner/name/file.gguf" on the hub, or a hub id with one and no model in Hugging Face layout. Raises: as `load`;
    ModelError: it cannot be loaded.
    """
    name = str(path_or_hub_id)
    if is_gguf(name):
        file = Path(name).expanduser()
        return _read_gguf(file if file.exists() else _from_the_hub(*in_repository(name), revision), options)
    try:
        return load(name, revision=revision, is_lazy=is_lazy, **options)
    # mlx-lm finds no config.json, or no safetensors.
    except FileNotFoundError:
        if Path(name).exists() or (found := _only_on_the_hub(name, revision)) is None:
            raise
    return _read_gguf(_from_the_hub(name, found, revision), options)


def _read_gguf(file: Path, options: dict[str, Any]) -> tuple[Module, TokenizerWrapper]:
    # PyPI `gguf` takes a quarter of a second to import.
    from runtime.loading.gguf.weights import load_gguf

    return load_gguf(file, **{name: value for name, value in options.items() if name != "trust_remote_code"})


def _only_on_the_hub(repository: str, revision: str | None) -> str | None:
    names: Sequence[str] = ()
    # `list_repo_files` would try for half a minute without a network. Errors come from several libraries; mlx-lm's own,
    # which is raised then, says more.
    with suppress(Exception):
        names = [file.rfilename for file in model_info(repository, revision=revision).siblings or ()]
    return only_model(f"the hub repository {repository}", names, prefix=f"{repository}/")


def _from_the_hub(repository: str, name: str, revision: str | None) -> Path:
    files = [hf_hub_download(repository, part, revision=revision) for part in parts_of(name)]
    return Path(files[0])
