"""What `outrider distill` trains, and how. Imports nothing that needs mlx."""

from __future__ import annotations

from pathlib import Path

import attrs

from protocol.errors import SettingsError
from protocol.options import option
from protocol.validation import check_integer, integer, number, one_of

DTYPES = ("float32", "bfloat16", "float16")

_optional = attrs.validators.optional
WHAT, HOW = "what to train", "how to train"


@attrs.frozen
class DistillOptions:
    """What is trained, and how.

    Attributes:
        target: path or hub id of the model that the drafter is for.
        data: files of text; see `read_texts`.
        out: folder of the drafter; the state of the training is in its subfolder `training`.
        init: folder of an EAGLE-3 drafter to begin with; None for a new one.
        draft_vocab_size: number of tokens that the drafter can propose, the most frequent ones of the texts; None for
            the target's whole vocabulary, but at most 32,768.
        intermediate_size: width of the drafter's feed-forward part; None for the target's.
        dtype: type of the drafter's weights: float32, bfloat16 or float16.
        window: length in tokens of the windows that texts are cut into, >= 8.
        continuations: number of windows for the target itself to write and the drafter to learn from as well; they
            help, since acceptance is measured on what the target writes.
        batch_tokens: maximum number of tokens in a batch.
        features_gb: gigabytes of disk for the target's hidden states, which later passes over the data read in place of
            computing them, >= 0; 0 for none. They are in `out` and are deleted when the training is over.
        learning_rate: initial learning rate, > 0.
        max_minutes: minutes of learning and evaluating after which to stop, > 0; the learning rate falls in the last
            third of them; None to learn until it no longer helps.
        seed: seed of the drafter's first weights, the order of texts and the continuations.
    """

    target: str
    data: tuple[Path, ...] = attrs.field(converter=tuple)
    out: Path
    init: Path | None = None
    draft_vocab_size: int | None = attrs.field(
        default=None, validator=_optional(integer(1)), metadata=option("N", WHAT)
    )
    intermediate_size: int | None = attrs.field(
        default=None, validator=_optional(integer(1)), metadata=option("N", WHAT)
    )
    dtype: str = attrs.field(
        default="bfloat16",
        validator=one_of(*DTYPES, spelled=f"one of {', '.join(DTYPES)}"),
        metadata=option("TYPE", WHAT),
    )
    window: int = attrs.field(default=256, validator=integer(8), metadata=option("N", HOW))
    continuations: int = attrs.field(default=0, validator=integer(0), metadata=option("N", HOW))
    batch_tokens: int = attrs.field(default=4096, metadata=option("N", HOW))
    features_gb: float = attrs.field(default=10.0, validator=number(0), metadata=option("GB", HOW))
    learning_rate: float = attrs.field(default=1e-3, validator=number(above=0), metadata=option("R", HOW))
    max_minutes: float | None = attrs.field(
        default=None, validator=_optional(number(above=0)), metadata=option("N", HOW)
    )
    seed: int = attrs.field(default=0, validator=integer(0), metadata=option("N", HOW))

    def __attrs_post_init__(self) -> None:
        check_integer("batch_tokens", self.batch_tokens, self.window)
        for name in ("draft_vocab_size", "intermediate_size"):
            if self.init is not None and getattr(self, name) is not None:
                raise SettingsError(f"{name} is that of the drafter that init names; leave one of them out")
        if not self.data:
            raise SettingsError("data is missing; give files of text to learn from")
