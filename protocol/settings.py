"""What a user can ask of one generation, checked before any model work."""

from __future__ import annotations

import difflib
import sys
from typing import Any, Final, Literal, get_args

import attrs

from protocol.errors import SettingsError

Acceptance = Literal["auto", "match", "rejection"]

MAX_LOOKAHEAD = 64
MAX_SEED = 2**64 - 1

# What stands for prompt lookup where a draft model could be named; a directory of that name is "./ngram".
NGRAM: Final = "ngram"


def _integer(low: int, high: int | None = None, *, or_none: str | None = None, or_auto: bool = False) -> Any:
    """A validator for whole numbers; `or_none` says what None means where it is allowed."""

    def check(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if (value is None and or_none) or (value == "auto" and or_auto):
            return
        allowed = f"a whole number of at least {low}" if high is None else f"a whole number in [{low}, {high}]"
        if or_none:
            allowed += f", or None for {or_none}"
        if or_auto:
            allowed += ', or "auto"'
        # bool is an int to Python, and never what was meant here.
        if not isinstance(value, int) or isinstance(value, bool):
            raise SettingsError(f"{attribute.name} must be {allowed}, got {value!r}")
        if value < low or (high is not None and value > high):
            raise SettingsError(f"{attribute.name} must be {allowed}, got {value}")

    return check


def _temperature(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    # Compared and not asked with isfinite, which a whole number too large for a float would break.
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= sys.float_info.max:
        raise SettingsError(
            f"temperature must be a finite number of at least 0, got {value!r}; use 0 for greedy decoding"
        )


def _flag(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, bool):
        raise SettingsError(f"{attribute.name} must be True or False, got {value!r}")


def _rule(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value not in get_args(Acceptance):
        raise SettingsError(f'acceptance must be "auto", "match" or "rejection", got {value!r}')


def _ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
        raise SettingsError(f"stop_tokens must be a sequence of token ids, got {value!r}")
    ids = tuple(value)
    for i in ids:
        if not isinstance(i, int) or isinstance(i, bool) or i < 0:
            raise SettingsError(f"stop_tokens must be token ids of at least 0, got {i!r} among them")
    return ids


@attrs.frozen(kw_only=True)
class Settings:
    """Settings of one generation.

    Attributes:
        max_tokens: most tokens to generate, >= 1; None goes on until a stop or the end of the
            context. A generation never runs past the target's context either way.
        temperature: >= 0; 0 is greedy.
        seed: in [0, 2**64), or None for a fresh one. With a seed, `acceptance="auto"` takes the match
            rule, under which the text depends on target, prompt, settings and seed alone.
        stop_tokens: ids that end the text, beside the tokenizer's own end-of-text ids.
        ignore_eos: do not end at the tokenizer's end-of-text ids; `stop_tokens` still count.
        prefill_step_size: prompt tokens per forward pass during prefill, >= 1. A cancellation takes
            effect between two such passes.
        acceptance: "match", "rejection", or "auto": match at temperature 0 or with a seed, else
            rejection. At temperature 0 the two rules are the same.
        lookahead: most tokens in one proposal, in [0, 64], or "auto"; 0 is plain decoding.

    Raises: SettingsError: a value is of the wrong type, out of its range or not finite.
    """

    max_tokens: int | None = attrs.field(default=256, validator=_integer(1, or_none="no limit"))
    temperature: float = attrs.field(default=0.0, validator=_temperature)
    seed: int | None = attrs.field(default=None, validator=_integer(0, MAX_SEED, or_none="a fresh seed"))
    stop_tokens: tuple[int, ...] = attrs.field(default=(), converter=_ids)
    ignore_eos: bool = attrs.field(default=False, validator=_flag)
    prefill_step_size: int = attrs.field(default=2048, validator=_integer(1))
    acceptance: Acceptance = attrs.field(default="auto", validator=_rule)
    lookahead: int | Literal["auto"] = attrs.field(default="auto", validator=_integer(0, MAX_LOOKAHEAD, or_auto=True))

    @property
    def rule(self) -> Literal["match", "rejection"]:
        """The acceptance rule in force, with "auto" resolved."""
        if self.temperature == 0:
            return "match"
        if self.acceptance == "auto":
            return "rejection" if self.seed is None else "match"
        return self.acceptance


def settings_from(keywords: dict[str, Any]) -> Settings:
    """Settings from keyword arguments.

    Raises: SettingsError: as `Settings`, and for a name that is not a setting.
    """
    known = [field.name for field in attrs.fields(Settings)]
    for name in keywords:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the settings are {', '.join(known)}"
            raise SettingsError(f"there is no setting {name!r}; {hint}")
    return Settings(**keywords)
