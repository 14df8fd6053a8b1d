"""The fields that requests for a chat and for a completion share, and the runtime's settings that they stand for."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, Field

from protocol.settings import MAX_LOOKAHEAD, MAX_SEED
from runtime.server.answers.body import Body, NoEffect
from runtime.server.errors import ErrorResponse
from runtime.server.openai.requests.field_types import (
    Biases,
    ContextSize,
    Id,
    Ids,
    MaxTokens,
    Number,
    Penalty,
    Probability,
    Stop,
)
from runtime.server.openai.requests.formats import CONSTRAINTS, ConstrainedRequest


class StreamOptions(Body):
    """Options of a streamed response.

    Attributes:
        include_usage: add a last chunk with the usage.
        continuous_usage_stats: add the usage so far to each chunk, unless `include_usage` is false.
        include_obfuscation: an option of OpenAI's without effect here: chunks are never padded.
        include_speculation: add to each chunk its tokens, which of them the drafter proposed, the statistics, and what
            the models did; send at least four chunks a second, also while the prompt is read.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: NoEffect = None
    include_speculation: bool | None = None


class Request(ConstrainedRequest):
    """The fields of both types of request.

    Fields that OpenAI has too have the same type and meaning; the others are settings of the runtime. A field that is
    missing or null has the runtime's default: the temperature is 0, for instance. Only for a context size null is a
    value, the whole text.

    Attributes:
        prompt_field: the name of the field that has the prompt.
    """

    model: str | None = Field(None, description="the name in `/v1/models`; any name, where there is one model")
    stream: bool | None = Field(None, description="send the text while it is generated, as server-sent events")
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens | None = Field(
        None,
        validation_alias=AliasChoices("max_tokens", "n_predict"),
        description="maximum number of tokens of the answer, -1 for as many as fit into the context; also `n_predict`",
    )
    min_tokens: Id | None = Field(
        None, description="number of tokens before which no end-of-text or stop token can end the answer"
    )
    temperature: float | None = Field(None, ge=0, le=1e6, description="0, the default, is greedy decoding")
    top_p: Probability | None = None
    seed: Annotated[int, Field(ge=-1, le=MAX_SEED)] | None = Field(
        None,
        validation_alias=AliasChoices("seed", "random_seed"),
        description="makes the text reproducible at any temperature, -1 for a fresh one; also `random_seed`",
    )
    stop: Stop | Annotated[list[Stop], Field(max_length=16, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = Field(None, description="end the text with what has stopped it")
    skip_special_tokens: bool | None = Field(
        None, description="true: leave special tokens out of the text, except those around reasoning and calls"
    )
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Biases | None = Field(
        None,
        description="added to the logits of tokens, by token id, or by text for each of its tokens; -100 practically "
        "forbids a token; also a list of pairs of a token and its bias",
    )
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None,
        description="vLLM's field: give the log-probabilities of the prompt's tokens, and of so many of the most "
        "probable others",
    )
    n: Number | None = Field(None, description="number of answers, which are worked on side by side")
    user: NoEffect = None
    metadata: NoEffect = None
    store: NoEffect = None
    service_tier: NoEffect = None
    prompt_cache_key: NoEffect = None
    safety_identifier: NoEffect = None
    prompt_cache_retention: NoEffect = None
    keep_alive: NoEffect = None
    priority: NoEffect = None
    request_id: NoEffect = None

    # Settings of the runtime.
    top_k: int | None = Field(None, ge=-1, description="0 and -1 keep all tokens")
    min_p: Probability | None = None
    draft_temperature: float | None = Field(
        None, ge=0, le=1e6, description="temperature of the drafter; by default the same as the target's"
    )
    xtc_probability: Probability | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0, le=1e6)] | None = Field(
        None, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty"), description="also `repeat_penalty`"
    )
    repetition_context_size: ContextSize = 20
    presence_context_size: ContextSize = 20
    frequency_context_size: ContextSize = 20
    stop_tokens: Ids | None = Field(
        None, validation_alias=AliasChoices("stop_tokens", "stop_token_ids"), description="also `stop_token_ids`"
    )
    ignore_eos: bool | None = None
    lookahead: Annotated[int, Field(ge=0, le=MAX_LOOKAHEAD)] | Literal["auto"] | None = Field(
        None, validation_alias=AliasChoices("lookahead", "num_draft_tokens"), description="also `num_draft_tokens`"
    )
    acceptance: Literal["auto", "match", "rejection"] | None = None
    cache_prompt: bool | None = Field(
        None, description="false: neither reuse what is cached of the prompt, nor keep it for later requests"
    )

    prompt_field: ClassVar[str]

    def check(self) -> None:
        super().check()
        if self.stream_options is not None and not self.stream:
            raise ErrorResponse(
                400, "stream_options need stream: true; add it or leave them out", param="stream_options"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise ErrorResponse(
                400, "prompt_logprobs are not for streams; leave one of them out", param="prompt_logprobs"
            )
        if self.speculation and self.num_prompts * self.num_candidates > 1:
            raise ErrorResponse(
                400, "include_speculation is for one answer; leave it out, or ask for one", param="stream_options"
            )

    @property
    def num_prompts(self) -> int:
        """Number of prompts, each of which has its answers."""
        return 1

    @property
    def num_choices(self) -> int:
        """Number of answers to each prompt."""
        return self.n or 1

    @property
    def num_candidates(self) -> int:
        """Number of texts of which the best are the answers to a prompt."""
        return self.num_choices

    @property
    def num_logprobs(self) -> int | None:
        """How many of the most probable tokens to return beside each token; None to return no log-probabilities."""
        raise NotImplementedError

    @property
    def num_scored(self) -> int | None:
        """How many of the most probable tokens to return beside each of the prompt; None not to score the prompt."""
        return self.prompt_logprobs

    @property
    def max_answer_tokens(self) -> int | None:
        """Maximum number of tokens of the answer; -1 for as many as there may be, None if the request does not say."""
        return self.max_tokens

    @property
    def max_answer_tokens_field(self) -> str:
        """The name of the field that has `max_answer_tokens`."""
        return "max_tokens"

    @property
    def prompt_length(self) -> int:
        """Number of characters or token ids of the prompt."""
        raise NotImplementedError

    @property
    def speculation(self) -> bool:
        """Whether the chunks have `speculation`."""
        return self.stream_options is not None and bool(self.stream_options.include_speculation)

    @property
    def usage(self) -> bool:
        """Whether there is a last chunk with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk has the usage so far."""
        options = self.stream_options
        return options is not None and bool(options.continuous_usage_stats) and options.include_usage is not False

    @property
    def predicted_text(self) -> str:
        """A text that the answer may resemble; "" for none."""
        return ""

    @property
    def template_variables(self) -> dict[str, Any]:
        """Further variables of the chat template."""
        return {}

    def settings(self) -> dict[str, Any]:
        """Settings for `Runtime.stream`, without those that need the tokenizer: `runtime.server.openai.prompts`."""
        settings = {name: value for name in _SETTINGS if (value := getattr(self, name)) is not None}
        # None is a value of these.
        settings |= {name: getattr(self, name) for name in _CONTEXT_SIZES if name in self.model_fields_set}
        # Penalties without effect would still cost time.
        for name, neutral in (("presence_penalty", 0), ("frequency_penalty", 0), ("repetition_penalty", 1)):
            if settings.get(name) == neutral:
                del settings[name]
        if self.seed == -1:
            settings["seed"] = None
        if self.top_k == -1:
            settings["top_k"] = 0
        if self.stop is not None:
            settings["stop"] = [text for text in ([self.stop] if isinstance(self.stop, str) else self.stop) if text]
        if self.cache_prompt is not None:
            settings["reuse_prefix"] = self.cache_prompt
        # For OpenAI, 0 keeps only the most probable token; for the runtime, it turns the filter off.
        if settings.get("top_p") == 0:
            del settings["top_p"]
            settings["top_k"] = 1
        if self.num_logprobs is not None:
            # For the runtime, 0 would turn off the log-probability of the token itself, too.
            settings["logprobs"] = max(1, self.num_logprobs)
        elif self.num_candidates > self.num_choices:
            settings["logprobs"] = 1  # by which the best are told
        return settings


# Fields that are settings of the same name and meaning.
_SETTINGS = (
    "temperature",
    "top_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "draft_temperature",
    "xtc_probability",
    "xtc_threshold",
    "repetition_penalty",
    "stop_tokens",
    "ignore_eos",
    "lookahead",
    "acceptance",
)
_CONTEXT_SIZES = ("repetition_context_size", "presence_context_size", "frequency_context_size")
# Fields beyond OpenAI's and Anthropic's own, which mean the same in every API.
PASSED_ON = frozenset(
    (
        *_SETTINGS,
        *_CONTEXT_SIZES,
        *("logit_bias", "stop", "min_tokens", "cache_prompt"),
        *("include_stop_str_in_output", "skip_special_tokens"),
        *CONSTRAINTS,
        *("continue_final_message", "add_generation_prompt"),
        *("reasoning_effort", "enable_thinking", "chat_template_kwargs", "chat_template_args"),
        *("prediction", "random_seed", "repeat_penalty", "stop_token_ids", "num_draft_tokens"),
    )
)
