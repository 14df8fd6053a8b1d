"""Settings of one generation, checked before any model work."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, Final, Literal, get_args

import attrs

from protocol.argument_aliases import ALIASES, INSTEAD, meant
from protocol.errors import SettingsError
from protocol.logits_processors import Forcing, LogitsProcessor, Sampler
from protocol.open_options import OpenOptions
from protocol.options import option
from protocol.reprs import brief, shown
from protocol.validation import check_number, flag, integer, is_integer, is_number, must_be, number, one_of, validator

Acceptance = Literal["auto", "match", "rejection"]

MAX_LOOKAHEAD = 64
MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 128
# The limit of an answer for people and agents, where they set none: the server's, and the command line's. The text
# mostly ends itself, or with the context; the limit ends a model that repeats itself. The library's default is that of
# `Settings`.
MAX_ANSWER_TOKENS = 2**15
MAX_STOP_LENGTH = 1000
MIN_REPETITION_PENALTY = 0.01  # logits are divided by it. If it were smaller, they might overflow in float16.

# Words in place of a draft model; a directory of such a name is "./ngram".
NGRAM: Final = "ngram"  # prompt lookup
MTP: Final = "mtp"  # the MTP layer that a target's own files bring
AUTO_DRAFT: Final = "auto"  # whatever is on this disk and fits the target, or nothing
DRAFT_WORDS: Final = (NGRAM, MTP, AUTO_DRAFT)

_LARGEST = sys.float_info.max


def _tupled(value: Any) -> tuple[Any, ...]:
    """A tuple of an iterable's values; () for None, as in mlx-lm. Other values are left to the validator."""
    if value is None:
        return ()
    is_list = hasattr(value, "__iter__") and not isinstance(value, (str, bytes, Mapping))
    return tuple(value) if is_list else value


def _strings_tupled(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else _tupled(value)


def _real(value: Any) -> Any:
    """An int as a float, because MLX takes no ints beyond 64 bits; other values are left to the validator."""
    return float(value) if type(value) is int and -_LARGEST <= value <= _LARGEST else value


def _copied(value: Any) -> Mapping[int, float]:
    """A copy of a mapping; an empty one for None. Other values are left to the validator."""
    if isinstance(value, Mapping):
        return {token: _real(bias) for token, bias in value.items()}
    return {} if value is None else value


@validator
def _ids(name: str, value: Any) -> None:
    if not isinstance(value, tuple):
        raise must_be(name, "a sequence of token ids", value)
    for i in value:
        if not is_integer(i) or i < 0:
            raise must_be(name, "token ids of at least 0", i, among=True)


@validator
def _strings(name: str, value: Any) -> None:
    if not isinstance(value, tuple):
        raise must_be(name, "a text or a sequence of texts", value)
    for text in value:
        if not isinstance(text, str):
            raise must_be(name, "texts", text, "ids go into stop_tokens", among=True)
        if not 0 < len(text) <= MAX_STOP_LENGTH:
            raise SettingsError(f"a text in {name} must have 1 to {MAX_STOP_LENGTH} characters, got one of {len(text)}")


@validator
def _bias(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise SettingsError(f"{name} must map token ids to numbers, got {shown(value)}")
    for id, bias in value.items():
        if not is_integer(id) or id < 0:
            raise SettingsError(f"{name} must have token ids of at least 0 for keys, got {shown(id)} among them")
        # -inf forbids a token; +inf and NaN would make the choice meaningless.
        if not is_number(bias) or not (bias == -math.inf or -_LARGEST <= bias <= _LARGEST):
            raise SettingsError(f"{name} must have numbers for values, or -inf, got {shown(bias)} for {id}")


def _check_repetition_penalty(name: str, value: Any, low: float) -> None:
    check_number(name, value, low, remedy="1 changes nothing", or_none="no penalty")
    if value is not None and 0 < value < MIN_REPETITION_PENALTY:
        raise must_be(name, f"0 for no penalty, or at least {MIN_REPETITION_PENALTY}", value, "1 changes nothing")


@validator
def _processors(name: str, value: Any) -> None:
    if not isinstance(value, tuple):
        raise must_be(name, "a sequence of functions f(tokens, logits)", value)
    for processor in value:
        if not callable(processor):
            raise must_be(name, "functions f(tokens, logits)", processor, among=True)
        if hasattr(processor, "save") != hasattr(processor, "restore"):
            raise SettingsError(f"{shown(processor)} in {name} must have both save() and restore(state), or neither")


@validator
def _sampler(name: str, value: Any) -> None:
    if value is not None and not callable(value):
        raise must_be(name, "a function f(logprobs), or None for the temperature", value)


def _path(value: Any) -> Any:
    return value.__fspath__() if hasattr(value, "__fspath__") else value


@validator
def _file(name: str, value: Any) -> None:
    if value is not None and (not isinstance(value, str) or not value):
        raise must_be(name, "the path of a file or None", value)


# The settings that a user's sampler replaces.
_OF_SAMPLING = (
    *("temperature", "draft_temperature", "top_p", "min_p", "min_tokens_to_keep", "top_k"),
    *("xtc_probability", "xtc_threshold", "xtc_special_tokens", "seed"),
)


def _number(default: float | None, form: str, group: str, *bounds: float, short: str = "", **options: Any) -> Any:
    """A field for a number; `bounds` and `options` are those of `check_number`."""
    metadata = option(form, group, short=short)
    return attrs.field(default=default, converter=_real, validator=number(*bounds, **options), metadata=metadata)


# Headings of flags.
_BASIC, _ENDS, _FILTERS, _PENALTIES = "settings", "where the text ends", "filters, above temperature 0", "penalties"


@attrs.frozen(kw_only=True)
class Settings:
    """Settings of one generation.

    Names, defaults and the order in which they take effect are mlx-lm's: the logits go through `logit_bias`, the
    penalties and `logits_processors`; the resulting log-probabilities go through `top_p`, `min_p`, XTC and `top_k`;
    then the temperature is applied.

    Attributes:
        max_tokens: maximum number of tokens to generate, >= 1; None for no limit. A text also ends where the target's
            context does.
        temperature: sampling temperature, >= 0; 0 is greedy. Then the filters (`top_p` to `xtc_special_tokens`) do
            nothing.
        draft_temperature: the drafter's temperature, >= 0, if `temperature` is above 0; None for the same. At 0 it
            drafts its likeliest tokens. It changes how many drafted tokens are accepted, never the distribution of the
            text.
        top_p: nucleus sampling: keep the likeliest tokens that together have this probability, in [0, 1]; 0 and 1 keep
            all.
        min_p: keep tokens at least this likely, as a fraction of the likeliest token's probability, in [0, 1]; 0 keeps
            all.
        min_tokens_to_keep: minimum number of tokens that `min_p` keeps, >= 1.
        top_k: keep this many of the likeliest tokens, >= 0; 0 keeps all.
        xtc_probability: probability, in [0, 1], that XTC removes a position's top choices: all tokens above
            `xtc_threshold` except the least likely of them.
        xtc_threshold: probability above which a token is a top choice for XTC, in [0, 0.5].
        xtc_special_tokens: token ids that XTC never removes, such as 1,2.
        seed: seed that makes sampled text repeatable, in [0, 2**64); None for a fresh one. With a seed,
            `acceptance="auto"` takes the match rule, under which the text depends on target, prompt, settings and seed
            alone. Under the other rules, the random numbers depend on `prediction`, too.
        thinking_budget: maximum number of tokens of reasoning, >= 0, without its tags; the tag that closes it is
            forced then, and the answer follows. None for no limit; without effect where the model does not reason.
        stop: text at which the generation ends, and which is left out; several may be given. A single one may be given
            without a list. Needs a tokenizer.
        stop_tokens: token ids that end the text, besides the tokenizer's end-of-text ids, such as 1,2.
        ignore_eos: do not end at the tokenizer's end-of-text ids; `stop_tokens` still end the text.
        logit_bias: numbers to add to the logits of tokens, by id, such as 12=-1.5,7=-inf; -inf forbids a token.
        repetition_penalty: number, >= 0.01, that divides positive logits of tokens among the last
            `repetition_context_size`, and multiplies negative ones; None or 0 for no penalty, and 1 has no effect.
        presence_penalty: number subtracted from the logits of tokens among the last `presence_context_size`; None for
            no penalty.
        frequency_penalty: number subtracted from a token's logit for each time that the token is among the last
            `frequency_context_size`; None for no penalty.
        repetition_context_size, presence_context_size, frequency_context_size: number of latest tokens that the penalty
            considers, prompt included, >= 1; None for the whole text.
        logits_processors: functions `f(tokens, logits)` as in mlx-lm: they take (n,) ids of the text so far, prompt
            included, and (1, V) logits of the target's width, and return (1, V) logits. One that is marked with
            `runtime.stateless`, or has `save()` and `restore(state)` (see `protocol.logits_processors.Checkpointed`),
            runs on the models' threads, in any order of texts, and also for texts that are never committed. Any other
            is assumed to keep a state and is called on committed text only, which means a lookahead of 0.
        sampler: a function `f(logprobs)` as in mlx-lm, which chooses in place of the temperature, the filters and the
            seed: it takes (1, V) log-probabilities of the target, after `logits_processors`, and returns (1,) ids. A
            drafted token is accepted if it is the function's choice. A function marked with `runtime.stateless` also
            chooses for drafts, on both models' threads. Any other is called only once for each token of the text, which
            means a lookahead of 0.
        logprobs: number of likeliest tokens at each position whose log-probabilities to give, in [0, 128], besides that
            of the token itself; 0 gives none at all. They are the target's, after `logits_processors` and before the
            filters and the temperature.
        prefill_step_size: prompt tokens per forward pass during prefill, >= 1; "auto" to choose by measured times, with
            at most 0.2 s a pass. (Where the text depends on it, as with `kv_bits`: 2048.) Between two passes a
            cancellation takes effect, and other streams have their turn.
        acceptance: acceptance rule for drafted tokens: "match", "rejection", or "auto", which is match at
            temperature 0 or with a seed, else rejection. At temperature 0 all rules are the same.
        lookahead: maximum number of tokens in one proposal, in [0, 64], or "auto" by measured prices; 0 is plain
            decoding.
        prediction: token ids of a text that the answer may resemble, such as a file being edited. Prompt lookup drafts
            from it, as from the prompt; a drafter that has a model does so after a miss, with `lookahead="auto"`. It
            changes how many drafted tokens are accepted, never the distribution of the text.
        reuse_prefix: begin with the cached tokens of an earlier text that shares a prefix with this one, and keep this
            text's cached tokens for later ones.
        prompt_cache_file: path of a file written by `mlx_lm.cache_prompt`, or by mlx-lm's `save_prompt_cache`, with
            this target and the same cache options; the prompt continues the text that is cached in it. As in mlx-lm,
            penalties and logits processors do not see the tokens before the prompt, whose ids the file does not have.
            None for none.

    Raises: SettingsError: a value is of the wrong type, out of its range or not finite; or there is no such setting.
    """

    max_tokens: int | None = attrs.field(
        default=256, validator=integer(1, or_none="no limit"), metadata=option("N", _BASIC, short="-m")
    )
    temperature: float = _number(0.0, "T", _BASIC, 0, short="-t", remedy="use 0 for greedy decoding")
    draft_temperature: float | None = _number(
        None, "T", _BASIC, 0, remedy="0 drafts greedily", or_none="the temperature"
    )
    top_p: float = _number(0.0, "P", _FILTERS, 0, 1, remedy="0 and 1 keep all tokens")
    min_p: float = _number(0.0, "P", _FILTERS, 0, 1, remedy="0 keeps all tokens")
    min_tokens_to_keep: int = attrs.field(
        default=1, validator=integer(1), metadata=option("N", _FILTERS, in_requests=False)
    )
    top_k: int = attrs.field(default=0, validator=integer(0), metadata=option("K", _FILTERS))
    xtc_probability: float = _number(0.0, "P", _FILTERS, 0, 1, remedy="0 turns XTC off")
    xtc_threshold: float = _number(0.1, "P", _FILTERS, 0, 0.5, remedy="above a half it could not act")
    xtc_special_tokens: tuple[int, ...] = attrs.field(
        default=(), converter=_tupled, validator=_ids, metadata=option("IDS", _FILTERS, in_requests=False)
    )
    seed: int | None = attrs.field(
        default=None,
        validator=integer(0, MAX_SEED, or_none="a fresh seed"),
        metadata=option("N", _BASIC, fields=("random_seed",)),
    )
    thinking_budget: int | None = attrs.field(
        default=None,
        validator=integer(0, or_none="no limit"),
        metadata=option("N", _BASIC, fields=("thinking_token_budget", "thinking_budget_tokens")),
    )
    stop: tuple[str, ...] = attrs.field(
        default=(), converter=_strings_tupled, validator=_strings, metadata=option("TEXT", _ENDS)
    )
    stop_tokens: tuple[int, ...] = attrs.field(
        default=(), converter=_tupled, validator=_ids, metadata=option("IDS", _ENDS, fields=("stop_token_ids",))
    )
    ignore_eos: bool = attrs.field(default=False, validator=flag, metadata=option("", _ENDS))
    logit_bias: Mapping[int, float] = attrs.field(
        factory=dict, hash=False, converter=_copied, validator=_bias, metadata=option("ID=B,...", _PENALTIES)
    )
    repetition_penalty: float | None = attrs.field(
        default=None,
        converter=_real,
        validator=validator(_check_repetition_penalty, 0),
        metadata=option("X", _PENALTIES, fields=("repeat_penalty",)),
    )
    repetition_context_size: int | None = attrs.field(
        default=20, validator=integer(1, or_none="the whole text"), metadata=option("N", _PENALTIES)
    )
    presence_penalty: float | None = _number(None, "X", _PENALTIES, remedy="0 changes nothing", or_none="no penalty")
    presence_context_size: int | None = attrs.field(
        default=20, validator=integer(1, or_none="the whole text"), metadata=option("N", _PENALTIES)
    )
    frequency_penalty: float | None = _number(None, "X", _PENALTIES, remedy="0 changes nothing", or_none="no penalty")
    frequency_context_size: int | None = attrs.field(
        default=20, validator=integer(1, or_none="the whole text"), metadata=option("N", _PENALTIES)
    )
    logits_processors: tuple[LogitsProcessor, ...] = attrs.field(
        default=(), converter=_tupled, validator=_processors, metadata=option(in_requests=False)
    )
    sampler: Sampler | None = attrs.field(default=None, validator=_sampler, metadata=option(in_requests=False))
    logprobs: int = attrs.field(default=0, validator=integer(0, MAX_LOGPROBS), metadata=option("N"))
    prefill_step_size: int | Literal["auto"] = attrs.field(
        default="auto", validator=integer(1, or_auto=True), metadata=option("N", _BASIC, in_requests=False)
    )
    acceptance: Acceptance = attrs.field(
        default="auto",
        validator=one_of(*get_args(Acceptance), spelled='"auto", "match" or "rejection"'),
        metadata=option("RULE", _BASIC),
    )
    lookahead: int | Literal["auto"] = attrs.field(
        default="auto",
        validator=integer(0, MAX_LOOKAHEAD, or_auto=True, remedy="use 0 for plain decoding"),
        metadata=option("N", _BASIC, fields=("num_draft_tokens",)),
    )
    prediction: tuple[int, ...] = attrs.field(
        default=(), converter=_tupled, validator=_ids, metadata=option(in_requests=False)
    )
    reuse_prefix: bool = attrs.field(default=False, validator=flag, metadata=option(in_requests=False))
    prompt_cache_file: str | None = attrs.field(
        default=None, converter=_path, validator=_file, metadata=option("FILE", in_requests=False)
    )

    def __attrs_post_init__(self) -> None:
        if self.prompt_cache_file is not None and self.reuse_prefix:
            raise SettingsError(
                "a text either continues prompt_cache_file or reuses a prefix; leave out prompt_cache_file or "
                "reuse_prefix (a conversation always reuses what it has read)"
            )
        if self.sampler is None:
            return
        defaults = attrs.fields_dict(Settings)
        if void := [name for name in _OF_SAMPLING if getattr(self, name) != defaults[name].default]:
            raise SettingsError(
                f"a sampler chooses by itself, so {', '.join(void)} would do nothing; leave out one or the other"
            )
        if self.acceptance == "rejection":
            raise SettingsError(
                "a sampler says what it chooses and not how likely that was, so "
                'acceptance="rejection" cannot judge by it; leave it at "auto", or use '
                "temperature and the filters"
            )

    def __repr__(self) -> str:
        """The settings that differ from their defaults."""
        usual = {field.name: field.default for field in attrs.fields(Settings)} | {"logit_bias": {}}
        changed = {name: getattr(self, name) for name, default in usual.items() if getattr(self, name) != default}
        return brief("Settings", changed)

    @property
    def rule(self) -> Literal["match", "rejection"]:
        """The acceptance rule in force, with "auto" resolved."""
        if self.temperature == 0:
            return "match"
        if self.acceptance == "auto":
            return "rejection" if self.seed is None else "match"
        return self.acceptance

    @property
    def drafting_temperature(self) -> float:
        """The temperature at which the drafter chooses."""
        if self.draft_temperature is None or self.temperature == 0:
            return self.temperature
        return self.draft_temperature

    @property
    def calibration_key(self) -> tuple[object, ...]:
        """What tells apart the settings that have a calibration of their own; see `Prices.calibration`."""
        temperatures = round(self.temperature, 1), round(self.drafting_temperature, 1)
        return self.rule, *temperatures, self.sampler is not None

    @property
    def forces_text(self) -> bool:
        """Whether there is a grammar, whose forced text can be drafted without a drafter."""
        return any(isinstance(processor, Forcing) for processor in self.logits_processors)


SettingsLike = Settings | Mapping[str, Any]


def keywords_of(settings: Any, what: str) -> dict[str, Any]:
    """Settings as keyword arguments: all of a `Settings`, those that a mapping names, none for None.

    Raises: SettingsError: as `settings_from`, and for another type, which is called `what`.
    """
    if settings is None:
        return {}
    if isinstance(settings, Settings):
        return attrs.asdict(settings, recurse=False)
    if not isinstance(settings, Mapping):
        raise SettingsError(f"{what} must be runtime.Settings or a mapping of settings, got {shown(settings)}")
    keywords = dict(settings)
    settings_from(keywords)
    return keywords


def with_overrides(settings: SettingsLike | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as keyword arguments, where those in `overrides`, which are not checked, replace those of `settings`."""
    return {**keywords_of(settings, "settings"), **overrides}


def settings_from(keywords: dict[str, Any], beside: Sequence[str] = ()) -> Settings:
    """Settings from keyword arguments of a function that has others `beside` them.

    Raises: SettingsError: as `Settings`; the hint for an unknown name may be one of the others.
    """
    _check_names(keywords, beside)
    return Settings(**keywords)


def _check_names(keywords: Iterable[str], beside: Sequence[str] = ()) -> None:
    known = [field.name for field in attrs.fields(Settings)]
    for name in keywords:
        if name not in known:
            if (argument := ALIASES.get(name, name)) in attrs.fields_dict(OpenOptions):
                hint = f"it is {argument}= of open()"
            elif name in INSTEAD:
                hint = INSTEAD[name]
            elif near := meant(name, [*known, *beside], cutoff=0.7):
                hint = f"did you mean {near!r}?"
            else:
                hint = f"the settings are {', '.join(known)}"
            raise SettingsError(f"there is no setting {shown(name)}; {hint}")


def _with_hints(init: Callable[..., None]) -> Callable[..., None]:
    """Attrs' constructor of `Settings`, whose error for an unknown name has a hint."""

    @wraps(init)
    def checked(self: Settings, **keywords: Any) -> None:
        _check_names(keywords)
        init(self, **keywords)

    return checked


Settings.__init__ = _with_hints(Settings.__init__)  # type: ignore[method-assign]


def check_vocabulary_size(settings: Settings, vocab_size: int) -> None:
    """Check the ids and numbers of tokens in settings against the target's vocabulary.

    Raises: SettingsError: an id is outside the vocabulary, or more tokens are to be kept than it has.
    """
    for name in ("stop_tokens", "logit_bias", "xtc_special_tokens", "prediction"):
        if outside := [token for token in getattr(settings, name) if token >= vocab_size]:
            raise SettingsError(f"{name} {shown(outside)} are outside the target's vocabulary of {vocab_size} ids")
    for name in ("top_k", "min_tokens_to_keep"):
        if getattr(settings, name) > vocab_size:
            bound = f"at most the target's vocabulary of {vocab_size} ids"
            raise must_be(name, bound, getattr(settings, name))
