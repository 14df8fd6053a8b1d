"""Request validation: from a prompt and settings to the message that opens a session."""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from actors.model import Model
from actors.sampling.user_code import name_of
from protocol.errors import SessionFileError, SettingsError
from protocol.logits_processors import Stateless, can_be_speculated_with
from protocol.messages import Open
from protocol.reprs import shown
from protocol.settings import (
    MAX_SEED,
    Settings,
    SettingsLike,
    check_vocabulary_size,
    keywords_of,
    settings_from,
)
from runtime.generation.grammar import Grammar
from runtime.generation.text import Prompt, check_prompt_length, encode_prompt
from runtime.persistence.saved_session import SavedSession, SavedStream

logger = logging.getLogger("outrider")

_warned_of: set[str] = set()  # names of logits processors and samplers: one warning each a process


class RequestValidation:
    """Checks prompts and settings against one target; runs nothing on the models."""

    def __init__(
        self,
        model: Model,
        tokenizer: TokenizerWrapper | None,
        *,
        has_drafter: Callable[[], bool],
        defaults: SettingsLike | None = None,
    ) -> None:
        """Of one runtime.

        Args:
            model: the target's.
            tokenizer: the target's, or None.
            has_drafter: whether a session that begins now would have a drafter.
            defaults: see `open`.

        Raises: SettingsError: the defaults cannot be used with this target.
        """
        self._model = model
        self._tokenizer = tokenizer
        self._has_drafter = has_drafter
        self._has_warned = False  # that a lookahead has no effect without a drafter
        self._ids = itertools.count()
        self._defaults = keywords_of(defaults, "defaults")
        self.checked({})

    def keywords(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings as keyword arguments, completed by the defaults."""
        return {**self._defaults, **settings}

    def checked(self, settings: Mapping[str, Any]) -> Settings:
        """The settings of keyword arguments, completed by the defaults.

        Raises: SettingsError: one is unknown, out of its range, or cannot be used with this target.
        """
        checked = settings_from(self.keywords(settings))
        check_vocabulary_size(checked, self._model.vocab_size)
        if checked.ignore_eos and any(isinstance(processor, Grammar) for processor in checked.logits_processors):
            raise SettingsError("ignore_eos=True leaves a grammar's text without an end; leave it False")
        if checked.stop and self._tokenizer is None:
            raise SettingsError(
                f"stop {shown(list(checked.stop))} needs text, and the target was opened without a tokenizer; "
                "name ids in stop_tokens instead"
            )
        return checked

    def opened(self, prompt: Prompt, settings: Settings) -> Open:
        """The message that opens a session, with a new session id.

        Raises: PromptError: the prompt is empty, longer than the context, or not encodable.
        """
        model = self._model
        ids = self.encode(prompt)
        if model.context_length is not None:
            check_prompt_length(len(ids), model.context_length)
        return Open(
            session=next(self._ids),
            prompt=ids,
            settings=settings,
            seed=secrets.randbelow(MAX_SEED) if settings.seed is None else settings.seed,
            stop_tokens=self._stop_tokens(settings),
            context_length=model.context_length,
            drafted=self.is_drafted(settings),
        )

    def resumed(self, session: SavedSession, stream: SavedStream, settings: Settings, seed: int) -> Open:
        """The message that opens a session which resumes a saved stream, with a new session id.

        Args:
            session: the saved session; its tokens are in the vocabulary.
            stream: its stream.
            settings: of the resumed stream.
            seed: of its randomness.

        Raises:
            SettingsError: `max_tokens` leaves nothing to generate.
            SessionFileError: the text does not fit in the context.
        """
        num_resumed = len(session.tokens) - stream.progress.num_prompt
        context_length = self._model.context_length
        if not stream.is_over:
            if settings.max_tokens is not None and settings.max_tokens <= num_resumed:
                raise SettingsError(
                    f"max_tokens must be above the {num_resumed} tokens that the stream has already, got "
                    f"{settings.max_tokens}"
                )
            if context_length is not None and len(session.tokens) >= context_length:
                raise SessionFileError(
                    f"the saved stream has {len(session.tokens)} tokens, and the target's context is {context_length}; "
                    "open the target that it was saved with"
                )
        return Open(
            session=next(self._ids),
            prompt=session.tokens,
            settings=settings,
            seed=seed,
            stop_tokens=self._stop_tokens(settings),
            context_length=context_length,
            drafted=self.is_drafted(settings),
            num_resumed=num_resumed,
        )

    def _stop_tokens(self, settings: Settings) -> frozenset[int]:
        ends = set(settings.stop_tokens)
        if self._tokenizer is not None and not settings.ignore_eos:
            ends |= set(self._tokenizer.eos_token_ids)
        return frozenset(ends)

    def is_drafted(self, settings: Settings) -> bool:
        """Whether a session with these settings is drafted; logs once what prevents it."""
        if not self._has_drafter() and settings.lookahead not in (0, "auto") and not self._has_warned:
            self._has_warned = True
            logger.warning(
                'lookahead=%d has no effect, since there is no draft; open with draft="ngram" or a draft model',
                settings.lookahead,
            )
        return self._has_drafter() and settings.lookahead != 0 and _can_be_speculated(settings)

    def encode(self, prompt: Prompt, **switches: Any) -> tuple[int, ...]:
        """The token ids of a prompt; `switches` are further variables of the chat template.

        Raises: PromptError: the prompt is empty, not encodable, or was seen to fill the context.
        """
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
            logger.warning(
                "the %s %s may keep a state, so nothing is drafted for streams that use it; mark it with %s",
                kind,
                name,
                remedy,
            )
    return not careful
