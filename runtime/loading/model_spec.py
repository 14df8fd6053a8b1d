"""A model in files, and how it is loaded: the arguments of `mlx_lm.load`, by its names. Imports no mlx."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from protocol.errors import ModelError, SettingsError
from protocol.reprs import shown, shown_path
from protocol.validation import flag, integer, must_be, validator

# mlx-lm's modes of quantisation, and the bits and group sizes that MLX has kernels for in each.
_AFFINE_BITS = (2, 3, 4, 5, 6, 8)
_AFFINE_GROUPS = (32, 64, 128)
_FIXED = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}

# The files of an adapter, as mlx_lm.lora writes them.
_ADAPTER_FILES = ("adapter_config.json", "adapters.safetensors")


@validator
def _by_name(name: str, value: Any) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise must_be(name, "a mapping from names to values", value)


@attrs.frozen
class ModelSpec:
    """A model in files, and how it is loaded; stands where `open` takes the path of a target or a draft model.

    Attributes:
        path: a directory in Hugging Face layout, a GGUF file, or a hub id.
        adapter_path: a directory with a LoRA, DoRA or full adapter of `mlx_lm.lora`, which is applied to the model.
        revision: branch, tag or commit of a hub id; None for the default branch.
        trust_remote_code: whether code in the model's files may run: that of its tokenizer, and of its architecture if
            its config.json names a `model_file`.
        tokenizer_config: keyword arguments of the tokenizer, such as `{"eos_token": "<|im_end|>"}` or
            `{"chat_template": "..."}`.
        model_config: values that replace those of config.json, such as `{"rope_theta": 1e6}`.
        quantize: quantises the weights after they were read, as `mlx_lm.convert` does: the number of bits; or a
            mapping with `bits`, `group_size` and `mode`, each of them optional; None leaves them as they are. The mode
            is "affine" (2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128), "mxfp4", "nvfp4" or "mxfp8".
        draft_vocabulary: for a draft model: how many of the first ids of the vocabulary it drafts, >= 1, besides single
            characters and the tokenizer's added tokens; None for all. Drafting gets faster as the head gets smaller,
            and tokens that are left out are always the target's own; texts stay exact.

    Raises: SettingsError: a value is of the wrong type or out of its range.
    """

    path: str | os.PathLike[str]
    adapter_path: str | os.PathLike[str] | None = attrs.field(default=None, kw_only=True)
    revision: str | None = attrs.field(default=None, kw_only=True)
    trust_remote_code: bool = attrs.field(default=False, kw_only=True, validator=flag)
    tokenizer_config: Mapping[str, Any] = attrs.field(factory=dict, kw_only=True, hash=False, validator=_by_name)
    model_config: Mapping[str, Any] = attrs.field(factory=dict, kw_only=True, hash=False, validator=_by_name)
    quantize: int | Mapping[str, Any] | None = attrs.field(default=None, kw_only=True, hash=False)
    draft_vocabulary: int | None = attrs.field(default=None, kw_only=True, validator=integer(1, or_none="all tokens"))

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.path, (str, os.PathLike)) or not os.fspath(self.path):
            raise SettingsError(f"the path of a ModelSpec must be a path or a hub id, got {shown(self.path)}")
        if self.adapter_path is not None and not isinstance(self.adapter_path, (str, os.PathLike)):
            raise must_be("adapter_path", "the path of a directory or None", self.adapter_path)
        if self.revision is not None and (not isinstance(self.revision, str) or not self.revision):
            raise must_be("revision", "a branch, a tag, a commit or None", self.revision)
        _quantization(self.quantize)

    def __str__(self) -> str:
        """The path, which names the model in messages."""
        return os.fspath(self.path)

    @property
    def is_plain(self) -> bool:
        """Whether it sets nothing but the path."""
        return self == ModelSpec(self.path)

    @property
    def quantization(self) -> dict[str, Any] | None:
        """`bits`, `group_size` and `mode` of `quantize`, defaults filled in; None if the weights stay as they are."""
        return _quantization(self.quantize)

    def checked_adapter(self, role: str) -> Path | None:
        """The directory of the adapter, if any. Raises: ModelError: there is no adapter in it."""
        if self.adapter_path is None:
            return None
        path = Path(self.adapter_path).expanduser()
        missing = [name for name in _ADAPTER_FILES if not (path / name).is_file()]
        if missing:
            raise ModelError(
                f"the adapter of the {role}, {shown_path(str(self.adapter_path))}, has no {' and no '.join(missing)}; "
                "give a directory that mlx_lm.lora has written"
            )
        return path


def _quantization(given: Any) -> dict[str, Any] | None:
    if given is None:
        return None
    if isinstance(given, Mapping):
        wanted = dict(given)
    elif isinstance(given, int) and not isinstance(given, bool):
        wanted = {"bits": given}
    else:
        raise must_be("quantize", "a number of bits, a mapping or None", given)
    if unknown := set(wanted) - {"bits", "group_size", "mode"}:
        raise SettingsError(f"quantize has bits, group_size and mode, got {shown(min(map(str, unknown)))} as well")
    mode = wanted.get("mode", "affine")
    if mode != "affine" and mode not in _FIXED:
        raise SettingsError(f"the mode of quantize must be affine, {', '.join(_FIXED)}, got {shown(mode)}")
    default = _FIXED.get(mode, (4, 64))
    bits, group_size = wanted.get("bits", default[0]), wanted.get("group_size", default[1])
    if mode == "affine" and bits not in _AFFINE_BITS:
        raise SettingsError(f"quantize takes 2, 3, 4, 5, 6 or 8 bits, got {shown(bits)}")
    if mode == "affine" and group_size not in _AFFINE_GROUPS:
        raise SettingsError(f"the group_size of quantize must be 32, 64 or 128, got {shown(group_size)}")
    if mode != "affine" and (bits, group_size) != default:
        raise SettingsError(
            f"quantize with mode {mode!r} has {default[0]} bits in groups of {default[1]}, "
            f"got {shown(bits)} and {shown(group_size)}; leave them out"
        )
    return {"bits": bits, "group_size": group_size, "mode": mode}
