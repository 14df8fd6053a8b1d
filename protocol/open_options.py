"""The options of `runtime.open`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import attrs

from protocol.argument_aliases import MISSING
from protocol.errors import SettingsError
from protocol.options import option
from protocol.validation import flag, integer, one_of

WorkAhead = Literal["auto", "always", "never"]  # when the drafter drafts; see `OpenOptions.work_ahead`
WORK_AHEAD: tuple[WorkAhead, ...] = get_args(WorkAhead)
MAX_BATCH = 64  # default of the most streams that share one forward pass of the target
# Streams at work at once if that is "auto": of streams that share passes, which bounds the memory for their caches, and
# of streams that take turns.
AUTO_STREAMS, AUTO_TURNS = 16, 4
# Default bounds of one model's prefix cache, and of the target's on disk, in bytes.
PREFIX_CACHE_BYTES, PREFIX_CACHE_DIR_BYTES = 2 * 1024**3, 16 * 1024**3

_CACHES = "caches and devices"


@attrs.frozen(kw_only=True)
class OpenOptions:
    """The arguments of `runtime.open`, checked as far as that is possible without the models.

    Attributes:
        target: a path or hub id for `mlx_lm.load`, or "smollm2" or "demo"; a `ModelSpec`, for a model with an adapter,
            a revision or other options of `mlx_lm.load`; or a pair `(model, tokenizer)`. If the tokenizer is None,
            prompts are token ids and texts stay empty.
        draft: likewise, also with another vocabulary; or the folder of a drafter that was trained for the target
            (EAGLE-3, Medusa, an MTP layer); or "mtp" for the MTP layer in the target's own files; or "auto" for one of
            these that is on this disk and fits the target (`runtime.suggest_draft`), or none, which is logged; or
            "ngram" for prompt lookup, which proposes what followed the same tokens earlier in the prompt and the text;
            or None for plain decoding by the same actors.
        rewind: how caches are rewound after a rejection: "trim", "checkpoint", "none" or "auto". *trim* drops the tail;
            *checkpoint* restores the state from before the round and feeds the accepted tokens again in front of the
            next window; *none* feeds one committed token at a time. "auto" takes, before each round, the first of them
            that every layer's cache supports at that moment.
        max_kv_size: maximum number of tokens that a cache keeps, >= 5, for models that make no caches of their own;
            None for no limit. All but the first four are forgotten, oldest first.
        kv_bits: quantise key-value caches to 2, 3, 4, 5, 6 or 8 bits; None for no quantisation.
        kv_group_size: group size of quantised caches: 32, 64 or 128.
        quantized_kv_start: quantise a cache once it has this many tokens, >= 0.
        max_streams: maximum number of streams that the models work on at the same time, >= 1, which bounds the memory
            for caches; further streams wait, first come, first served. "auto" for 16 if streams of the target share
            passes, or `max_batch` if that is less, and for 4 if they take turns. None for no limit.
        max_batch: maximum number of streams that share one pass of the target, >= 1. With 1 each has its own: in low
            precision, a pass over several texts rounds differently from a pass over one.
        prefix_cache_bytes: maximum size of each model's prefix cache in bytes, such as 2GB; 0 for none. It has cached
            sequences of finished texts, for streams with `reuse_prefix`; the least recently used one goes first.
        idle_reading: whether what the next turn of a conversation, or of a chat on a server, will begin with is read
            while no stream is at work, unless the machine runs on battery. A stream that begins waits for at most one
            pass of that reading.
        prefix_cache_dir: a directory for cached sequences that are evicted from the models' prefix caches, or are in
            them at the end, so that they outlive a restart. None stores nothing. It is made if it is missing, and
            several runtimes may share it. Its files have the tokens of texts, and can be used only with this model and
            these cache options.
        prefix_cache_dir_bytes: maximum size of `prefix_cache_dir` in bytes, such as 40GB. The least recently used files
            are deleted.
        memory_limit: bytes that the models and the caches of all streams may take together in this process, such as
            24GB. A stream whose caches do not fit waits, first come, first served, once prefix caches have made room
            for it. A text that does not fit alone ends where the memory does, as with the context. "auto" for 90 % of
            what the device recommends to use, or 75 % of the memory of a CPU's machine or container. None for no limit.
        wire_memory: whether Metal keeps the models resident, by MLX's wired limit, while the runtime is open. False
            leaves that limit alone.
        defaults: settings for streams that do not set them: a `Settings`, or a mapping of some by name. A logits
            processor among them is shared by all streams.
        generation_config: "auto": the sampling settings in the target's generation_config.json are defaults, too, where
            `defaults` does not name them; "none": they are ignored.
        chat_template_args: variables of the chat template, such as {"enable_thinking": false}, for prompts that are
            messages; a conversation's `thinking` and the fields of a request override them.
        trace: the path of a file to write: Chrome trace JSON, for Perfetto or chrome://tracing, or the timeline as a
            page if the name ends in .html. The file is complete once the block is left, for whatever reason. Or a
            function that is called in trio's thread with each `Span` and `Instant`, and should return quickly.
        group: the ranks that the target is sharded over, from `runtime.join_ranks`; the others call `runtime.follow`
            with the same target. This process is rank 0. None for one process.
        draft_rank: the rank (see mlx.launch) that runs the drafter alone, without a part of the target; None or 0 for
            rank 0, which then also runs its part of the target. The drafter's rank calls `runtime.follow` with it, too.
        draft_process: whether the draft model works in a process of its own on this machine, which loads it from a path
            or hub id. The target then has its processor time and Python's lock to itself, but each proposal takes a
            trip between the processes. If the process ends, streams go on without it.
        draft_device: MLX's default device in the draft model's process, "cpu" or "gpu", so that the target can use the
            other one; implies `draft_process`. None for MLX's own choice.
        work_ahead: whether the drafter drafts while the target verifies: "always", "never", or "auto" to decide by
            measured prices. Drafting then slows down a target on the same device, but the next proposal is ready
            sooner. "never" drafts after the verdict, and "always" does not ask the prices at a fixed `lookahead`.

    Raises: SettingsError: a value is of the wrong type or out of its range.
    """

    target: Any = attrs.field(default=MISSING, metadata=option("MODEL"))
    draft: Any = attrs.field(default=None, metadata=option("MODEL"))
    rewind: str = attrs.field(
        default="auto", validator=one_of("auto", "trim", "checkpoint", "none"), metadata=option("HOW", _CACHES)
    )
    max_kv_size: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(integer(5)), metadata=option("N", _CACHES)
    )
    kv_bits: int | None = attrs.field(
        default=None,
        validator=one_of(2, 3, 4, 5, 6, 8, None, spelled="2, 3, 4, 5, 6, 8 or None"),
        metadata=option("N", _CACHES),
    )
    kv_group_size: int = attrs.field(
        default=64, validator=one_of(32, 64, 128, spelled="32, 64 or 128"), metadata=option("N", _CACHES)
    )
    quantized_kv_start: int = attrs.field(default=5000, validator=integer(0), metadata=option("N", _CACHES))
    max_streams: int | Literal["auto"] | None = attrs.field(
        default=None, validator=attrs.validators.optional(integer(1, or_auto=True)), metadata=option("N")
    )
    max_batch: int = attrs.field(default=MAX_BATCH, validator=integer(1), metadata=option("N"))
    prefix_cache_bytes: int = attrs.field(
        default=PREFIX_CACHE_BYTES, validator=integer(0), metadata=option("SIZE", _CACHES)
    )
    idle_reading: bool = attrs.field(default=True, validator=flag, metadata=option("", _CACHES))
    prefix_cache_dir: Any = attrs.field(default=None, metadata=option("DIR", _CACHES))
    prefix_cache_dir_bytes: int = attrs.field(
        default=PREFIX_CACHE_DIR_BYTES, validator=integer(0), metadata=option("SIZE", _CACHES)
    )
    memory_limit: int | Literal["auto"] | None = attrs.field(
        default="auto", validator=attrs.validators.optional(integer(1, or_auto=True)), metadata=option("SIZE", _CACHES)
    )
    wire_memory: bool = attrs.field(default=True, validator=flag, metadata=option("", _CACHES))
    defaults: Any = attrs.field(default=None, metadata=option())
    generation_config: str = attrs.field(default="none", validator=one_of("auto", "none"), metadata=option("HOW"))
    chat_template_args: Mapping[str, Any] | None = attrs.field(default=None, metadata=option("JSON", _CACHES))
    trace: Any = attrs.field(default=None, metadata=option("FILE"))
    group: Any = attrs.field(default=None, metadata=option())
    draft_rank: int | None = attrs.field(default=None, metadata=option("R", _CACHES))
    draft_process: bool = attrs.field(default=False, validator=flag, metadata=option("", _CACHES))
    draft_device: str | None = attrs.field(
        default=None,
        validator=one_of("cpu", "gpu", None, spelled='"cpu", "gpu" or None'),
        metadata=option("DEVICE", _CACHES),
    )
    work_ahead: WorkAhead = attrs.field(default="auto", validator=one_of(*WORK_AHEAD), metadata=option("WHEN", _CACHES))

    def __attrs_post_init__(self) -> None:
        if self.kv_bits is not None and self.max_kv_size is not None:
            raise SettingsError("kv_bits and max_kv_size exclude each other: mlx-lm cannot quantise a rotating cache")
        if self.has_draft_process and self.draft_rank:
            raise SettingsError(
                "draft_process and draft_rank exclude each other: the drafter is in one process; leave one out"
            )

    @property
    def has_draft_process(self) -> bool:
        """Whether a draft model works in a process of its own."""
        return self.draft_process or self.draft_device is not None
