"""The options of `open` as keyword arguments, for type checkers and completion."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from protocol.settings_keywords import SettingsArguments

if TYPE_CHECKING:
    from protocol.settings import SettingsLike
    from runtime.tracing.trace_files import Trace


class OpenOptions(TypedDict, total=False):
    """The options of `open`, which says what they mean, beside `target` and `draft`."""

    rewind: str
    max_kv_size: int | None
    kv_bits: int | None
    kv_group_size: int
    quantized_kv_start: int
    max_streams: int | None
    max_batch: int
    prefix_cache_bytes: int
    defaults: SettingsLike | None
    trace: Trace
    tune_mlx: bool


class OpenOptionsAndSettings(OpenOptions, SettingsArguments, total=False):
    """Options of `open` and settings side by side, as `generate_sync` takes them."""
