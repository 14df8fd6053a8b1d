"""The options of `open` as keyword arguments, for type checkers and completion."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from protocol.settings_keywords import SettingsArguments

if TYPE_CHECKING:
    from actors.distributed.rank_group import RankGroup
    from protocol.open_options import WorkAhead
    from protocol.settings import SettingsLike
    from runtime.tracing.trace_files import Trace


class OpenArguments(TypedDict, total=False):
    """The options of `open` beside `target` and `draft`; `protocol.open_options.OpenOptions` says what they mean."""

    rewind: str
    max_kv_size: int | None
    kv_bits: int | None
    kv_group_size: int
    quantized_kv_start: int
    max_streams: int | Literal["auto"] | None
    max_batch: int
    prefix_cache_bytes: int
    prefix_cache_dir: str | os.PathLike[str] | None
    prefix_cache_dir_bytes: int
    copy_corpus: int
    defaults: SettingsLike | None
    chat_template_args: Mapping[str, Any] | None
    trace: Trace
    tune_mlx: bool
    group: RankGroup | None
    draft_rank: int | None
    draft_process: bool
    draft_device: str | None
    work_ahead: WorkAhead


class OpenArgumentsAndSettings(OpenArguments, SettingsArguments, total=False):
    """Options of `open` and settings side by side, as `generate_sync` takes them."""
