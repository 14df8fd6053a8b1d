"""Request validation: from a prompt and settings to the message that opens a session."""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs
from mlx_lm.tokenizer_utils import TokenizerWrapper

from actors.mlx.model import MLXModel
from actors.model import Model
from actors.sampling.user_code import name_of
from protocol.errors import PromptError, PromptTooLongError, SessionFileError, SettingsError
from protocol.logits_processors import Stateless, can_be_speculated_with
from protocol.messages import Open
from protocol.randomness import seed_of_prediction
from protocol.reprs import shown, shown_path
from protocol.settings import MAX_SEED, Settings, SettingsLike, check_vocabulary_size, settings_from, with_overrides
from runtime.generation.answers.message_format import message_starts
from runtime.generation.grammar import Grammar
from runtime.generation.many_prompts import CheckPrompt, Generation, ManyPrompt, with_settings
from runtime.generation.reasoning import ReasoningTracker, marks_of
from runtime.generation.text import Prompt, check_prompt_length, encode_prompt
from runtime.generation.tool_calls.call_grammar import call_grammar
from runtime.generation.tool_calls.tools import TOOL_ARGUMENTS, Tools, check_callable, split_tools, taken_tools
from runtime.persistence.prompt_cache_file import read_header

logger = logging.getLogger("outrider")

_warned_of: set[str] = set()  # names of logits processors and samplers that this process has warned of


@attrs.define(eq=False)
class RequestValidation:
    """Checks prompts and settings against one target; runs nothing on the models.

    Raises: SettingsError: the defaults cannot be used with this target.
    """

    _model: Model
    _tokenizer: TokenizerWrapper | None
    _defaults: Mapping[str, Any]
    _has_drafter: Callable[[], bool]  # whether a session that begins now would have a drafter
    _has_warned: bool = attrs.field(init=False, default=False)  # that a lookahead has no effect without a drafter
    _ids: Iterator[int] = attrs.field(init=False, factory=itertools.count)

    def __attrs_post_init__(self) -> None:
        self.checked({})

    def keywords(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings as keyword arguments, completed by the defaults."""
        return {**self._defaults, **settings}

    def checked(self, settings: Mapping[str, Any], beside: Sequence[str] = TOOL_ARGUMENTS) -> Settings:
        """The settings of keyword arguments, completed by the defaults, of a function that has others `beside` them.

        Raises: SettingsError: one is unknown, out of its range, or cannot be used with this target.
        """
        checked = settings_from(self.keywords(settings), beside)
        check_vocabulary_size(checked, self._model.vocab_size)
        if checked.ignore_eos and any(isinstance(processor, Grammar) for processor in checked.logits_processors):
            raise SettingsError("ignore_eos=True leaves a grammar's text without an end; leave it out")
        if checked.stop and self._tokenizer is None:
            raise SettingsError(
                f"stop {shown(list(checked.stop))} needs text, and the target was opened without a tokenizer; name ids "
                "in stop_tokens instead"
            )
        return checked

    def generation(self, prompt: Prompt, settings: SettingsLike | None, arguments: Mapping[str, Any]) -> Generation:
        """What begins a stream; `arguments` are settings by name, and arguments about tools.

        Raises: as `checked`, `opened` and `taken_tools`.
        """
        tools = taken_tools(keywords := dict(arguments))
        checked = self.checked(with_overrides(settings, keywords))
        return self.opened(prompt, checked, tools), tools

    def of_many(self, settings: SettingsLike | None, arguments: Mapping[str, Any]) -> CheckPrompt:
        """A check of prompts that share settings and tools; see `Runtime.generate_many`. Raises: as `generation`."""
        about_tools, overrides = split_tools(arguments)
        keywords = with_overrides(settings, overrides)
        shared = self.checked(keywords, (*TOOL_ARGUMENTS, "max_concurrent", "on_error"))
        shared_tools = taken_tools(dict(about_tools))

        def check(index: int, prompt: ManyPrompt) -> Generation:
            try:
                alone, own = with_settings(prompt)
                own_about_tools, own = split_tools(own)
                tools = taken_tools({**about_tools, **own_about_tools}) if own_about_tools else shared_tools
                return self.opened(alone, self.checked({**keywords, **own}) if own else shared, tools), tools
            except (PromptError, SettingsError) as error:
                kind = PromptError if isinstance(error, PromptError) else SettingsError
                raise kind(f"prompts[{index}]: {error}") from error.__cause__

        return check

    def opened(self, prompt: Prompt, settings: Settings, tools: Tools | None = None) -> Open:
        """The message that opens a session, with a new session id. Tools are given to the chat template, and to a
        grammar if they need one.

        Raises:
            PromptError: the prompt is empty, longer than the context, or not encodable; or it is text although there
                are tools; or the model must call a tool, and has no format for calls.
            SettingsError: a grammar cannot hold the model to the tools.
            SessionFileError: the prompt cache file is not one, or not of this target.
        """
        if tools is not None and isinstance(prompt, str):
            raise PromptError(
                "the chat template describes tools to the model, and this prompt is text; give chat messages, or the "
                "token ids of a prompt that has the tools"
            )
        context_length = self._model.context_length
        if context_length is not None:
            context_length -= self._num_cached(settings)
        ids = self.encode(prompt, **({} if tools is None else tools.template_variables))
        settings = attrs.evolve(settings, logits_processors=(*self.grammar(tools, ids), *settings.logits_processors))
        check_prompt_length(len(ids), context_length)
        seed = secrets.randbelow(MAX_SEED) if settings.seed is None else settings.seed
        if settings.prediction and settings.rule != "match":
            # It may be an earlier answer of this seed, which was drawn with the numbers that would judge it.
            seed = seed_of_prediction(seed, settings.prediction)
        ends = set(settings.stop_tokens)
        if self._tokenizer is not None and not settings.ignore_eos:
            ends |= set(self._tokenizer.eos_token_ids)
        return Open(
            session=next(self._ids),
            prompt=ids,
            settings=settings,
            seed=seed,
            stop_tokens=frozenset(ends),
            context_length=context_length,
            drafted=self.is_drafted(settings),
            message_starts=() if self._tokenizer is None else message_starts(self._tokenizer, ids),
        )

    def _num_cached(self, settings: Settings) -> int:
        """Tokens in the prompt cache file, if the settings name one. Raises: SessionFileError: it does not fit."""
        if settings.prompt_cache_file is None:
            return 0
        file = read_header(settings.prompt_cache_file)
        named = f"the prompt cache file {shown_path(settings.prompt_cache_file)}"
        options = self._model.cache_options if isinstance(self._model, MLXModel) else {}
        quantisation = {"kv_bits": file.kv_bits, "kv_group_size": file.kv_group_size}
        if file.kv_bits is not None and any(options.get(name) != value for name, value in quantisation.items()):
            raise SessionFileError(
                f"{named} has quantised key-value caches; open the target with kv_bits={file.kv_bits} and "
                f"kv_group_size={file.kv_group_size}"
            )
        length = self._model.context_length
        if length is not None and file.num_tokens >= length - 1:
            raise PromptTooLongError(
                f"{named} has {file.num_tokens} tokens, and the target's context of {length} must hold them, a prompt "
                "and at least one more token; give a file of a shorter prompt"
            )
        return file.num_tokens

    def to_score(
        self,
        prompt: Prompt,
        continuation: str | Sequence[int],
        *,
        logprobs: int = 0,
        reuse_prefix: bool = True,
        prefill_step_size: int | Literal["auto"] | None = None,
    ) -> Open:
        """The message that opens a session which scores a continuation; see `Runtime.score`, also for errors."""
        if prefill_step_size is None:
            prefill_step_size = self._defaults.get("prefill_step_size", "auto")
        settings = Settings(logprobs=logprobs, reuse_prefix=reuse_prefix, prefill_step_size=prefill_step_size)
        ids, rest = self._encode_both(prompt, continuation)
        context_length = self._model.context_length
        if context_length is not None and len(ids) + len(rest) > context_length:
            bound = f"the prompt has {len(ids)} and the continuation {len(rest)}, and the target's context holds both"
            raise PromptTooLongError.by(len(ids) + len(rest), context_length, bound)
        return Open(
            session=next(self._ids),
            prompt=ids + rest,
            settings=settings,
            seed=0,
            stop_tokens=frozenset(),
            context_length=context_length,
            drafted=False,
            num_scored=len(rest),
        )

    def _encode_both(
        self, prompt: Prompt, continuation: str | Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if isinstance(continuation, str) and isinstance(prompt, str) and continuation:
            # A tokenizer has few words that end with a space, and many that begin with one.
            ids = self.encode(prompt.rstrip() or prompt)
            whole = self.encode(prompt + continuation)
            if len(whole) <= len(ids):
                raise PromptError(
                    f"the continuation {shown(continuation)} has no token of its own, because it joins the "
                    "prompt's last token; begin it earlier in the text, or give token ids"
                )
            return whole[: len(ids)], whole[len(ids) :]
        ids = self.encode(prompt)
        if isinstance(continuation, str):
            if self._tokenizer is None:
                raise PromptError("the target was opened without a tokenizer, so a continuation must be token ids")
            continuation = self._tokenizer.encode(continuation, add_special_tokens=False, verbose=False)
        elif hasattr(continuation, "__iter__") and any(isinstance(item, Mapping) for item in continuation):
            raise PromptError("a continuation is text or token ids, got chat messages; put them into the prompt")
        try:
            return ids, self.encode(continuation)
        except PromptError as error:
            raise type(error)(f"as a continuation, {error}") from error

    def grammar(self, tools: Tools | None, prompt: tuple[int, ...]) -> tuple[Grammar, ...]:
        """The grammar of an answer to a prompt that holds the model to its tools; empty if they need none.

        Raises: as `opened`.
        """
        if tools is None or (format := check_callable(tools, self._tokenizer)) is None or not tools.needs_grammar:
            return ()
        reasoning = ReasoningTracker(self._tokenizer, prompt)
        written = call_grammar(tools, format, self._tokenizer, **marks_of(reasoning))
        return (Grammar(written, self._tokenizer, what="the grammar of the tools"),)

    def is_drafted(self, settings: Settings) -> bool:
        """Whether a session with these settings is drafted; logs once what prevents it."""
        has_drafter = self._has_drafter() or settings.forces_text
        if not has_drafter and settings.lookahead not in (0, "auto") and not self._has_warned:
            self._has_warned = True
            logger.warning(
                'lookahead=%d has no effect, since there is no draft; open with draft="ngram" or a draft model',
                settings.lookahead,
            )
        return has_drafter and settings.lookahead != 0 and _can_be_speculated(settings)

    def encode(self, prompt: Prompt, /, **switches: Any) -> tuple[int, ...]:
        """See `Runtime.encode`."""
        model = self._model
        return encode_prompt(prompt, self._tokenizer, model.vocab_size, model.context_length, switches)


def _can_be_speculated(settings: Settings) -> bool:
    """Whether all logits processors and the sampler may be called on drafted text; logs once for each that may not."""
    careful: list[tuple[str, object, str]] = [
        ("logits processor", processor, "runtime.stateless if it keeps none, or give it save() and restore(state)")
        for processor in settings.logits_processors
        if not can_be_speculated_with(processor)
    ]
    # A sampler does not see the text, so it cannot be restored to an earlier position in it.
    if settings.sampler is not None and not isinstance(settings.sampler, Stateless):
        careful.append(("sampler", settings.sampler, "runtime.stateless if it keeps none"))
    for kind, code, remedy in careful:
        if (name := name_of(code)) not in _warned_of:
            _warned_of.add(name)
            says = "the %s %s may keep a state, so nothing is drafted for streams that use it; mark it with %s"
            logger.warning(says, kind, name, remedy)
    return not careful
