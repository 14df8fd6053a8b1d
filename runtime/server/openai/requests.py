"""The bodies of requests for chats, completions and fill-in-the-middle, in OpenAI's format.

Some fields are also accepted under other names. Any other field is ignored and named
in a header of the response; a strict server refuses unknown ones. A value that has the wrong type, is out of bounds, or
asks for something unsupported is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from runtime.generation.text import Prompt
from runtime.server.answers.body import Body, NoEffect, SentBack
from runtime.server.answers.chat import Chat, ChatMessage
from runtime.server.answers.request import MaxTokens, Request
from runtime.server.answers.setting_fields import Ids
from runtime.server.errors import ErrorResponse

# Most answers of one request, to all of its prompts.
MAX_ANSWERS = 128

# Number of answers to one prompt.
Number = Annotated[int, Field(ge=1, le=16)]
_ListOfTexts = Annotated[list[str], Field(max_length=128, fail_fast=True)]
_ListOfIds = Annotated[list[Ids], Field(max_length=128, fail_fast=True)]


class StreamOptions(Body):
    """Options of a streamed response.

    Attributes:
        include_usage: add a last chunk with the usage.
        continuous_usage_stats: add the usage so far to each chunk, unless `include_usage` is false.
        include_obfuscation: OpenAI's option; it has no effect, since chunks are never padded.
        include_speculation: add to each chunk its tokens, which of them the drafter proposed, the statistics so far,
            and what the models did; send at least four chunks a second, also while the prompt is read.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: NoEffect = None
    include_speculation: bool | None = None

    @property
    def gives_usage_in_each(self) -> bool:
        """Whether each chunk has the usage so far."""
        return bool(self.continuous_usage_stats) and self.include_usage is not False


class OpenAIRequest(Request):
    """The fields that requests for chats and for completions share, besides those of every request."""

    stream_options: StreamOptions | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None,
        description="vLLM's field: return the log-probability of each token of the prompt, and those of this many of "
        "the most probable tokens at its position",
    )
    timings_per_token: bool | None = Field(
        None, description="llama.cpp's field: include the `timings` so far in every chunk, not only in the last"
    )
    n: Number | None = Field(None, description="number of answers, which are generated side by side")
    user: NoEffect = None
    metadata: NoEffect = None
    store: NoEffect = None
    service_tier: NoEffect = None
    prompt_cache_key: NoEffect = None
    safety_identifier: NoEffect = None
    prompt_cache_retention: NoEffect = None

    def check(self) -> None:
        super().check()
        if self.stream_options is not None and not self.stream:
            raise _error("stream_options need stream: true; add it or leave them out", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise _error("prompt_logprobs are not for streams; leave one of them out", "prompt_logprobs")
        if self.options.include_speculation and not self.is_for_one_text:
            raise _error("include_speculation is for one answer; leave it out, or ask for one", "stream_options")

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def is_for_one_text(self) -> bool:
        """Whether only one text is generated."""
        return self.num_prompts * self.num_choices == 1

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    @property
    def options(self) -> StreamOptions:
        """The options of the stream."""
        return self.stream_options or StreamOptions()


# --- chats ----------------------------------------------------------------------------------------

# The id of the one call of a message in the older form, which has no ids; the newer form needs one.
_OLD_CALL_ID = "call_0"


class Message(ChatMessage):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]  # type: ignore[assignment]
    function_call: dict[str, Any] | None = None
    prefix: bool | None = Field(
        None, description="Mistral's field: whether the answer continues this message, if it is the last one"
    )
    refusal: SentBack = None
    audio: SentBack = None
    annotations: SentBack = None

    @property
    def has_calls(self) -> bool:
        return bool(self.tool_calls or self.function_call)

    @property
    def may_go_on(self) -> bool:
        return super().may_go_on and self.prefix is not False

    def plain(self) -> dict[str, Any]:
        """The message for a chat template, with calls and results in the newer form, which templates know."""
        plain = super().plain()
        if self.function_call is not None and not self.tool_calls:
            plain["tool_calls"] = [{"id": _OLD_CALL_ID, "type": "function", "function": self.function_call}]
        if self.role == "function":
            plain |= {"role": "tool", "tool_call_id": self.tool_call_id or _OLD_CALL_ID}
            plain |= {} if self.name is None else {"name": self.name}
        return plain


class ChatRequest(OpenAIRequest, Chat):
    """The body of a request to `/v1/chat/completions`: a chat to continue."""

    messages: list[Message] = Field(min_length=1, max_length=10_000, fail_fast=True)  # type: ignore[assignment]
    max_completion_tokens: MaxTokens | None = Field(None, description="OpenAI's newer name for `max_tokens`")

    @property
    def max_answer_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def max_answer_tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


# --- completions ----------------------------------------------------------------------------------


class CompletionRequest(OpenAIRequest):
    """The body of a request to `/v1/completions`: a text to continue, or several."""

    prompt_field = "prompt"
    prompt: str | Ids | _ListOfTexts | _ListOfIds = Field(
        description="a text or a list of token ids; for several prompts, a list of texts or of lists of token ids"
    )
    max_tokens: Annotated[int, Field(ge=-1)] | None = Field(
        None,
        description="maximum number of tokens in the answer, -1 for as many as fit into the context, 0 with `echo` for "
        "none",
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = Field(
        None, description="begin the answer with the prompt, and with its log-probabilities if `logprobs` is set"
    )
    suffix: str | None = Field(
        None, description="the text after the answer, for models that were trained to fill in the middle"
    )

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise _error("max_tokens must be at least 1, got 0; only with echo: true it may be 0", "max_tokens")
        if self.max_tokens == 0 and self.options.include_speculation:
            raise _error(
                "include_speculation is for an answer, and max_tokens: 0 asks for none; leave one out", "stream_options"
            )
        if self.num_prompts * self.num_choices > MAX_ANSWERS:
            raise _error(
                f"{self.num_prompts} prompts with {self.num_choices} texts each are too many: a request has at most "
                f"{MAX_ANSWERS}; send several requests",
                self.prompt_field,
            )
        if self.suffix_text is not None and self.echo:
            raise _error("echo gives a prompt that is continued, and this one has a suffix; leave one out", "echo")
        if self.suffix_text is not None and not all(isinstance(prompt, str) for prompt in self.prompts()):
            raise _error("a suffix needs prompts that are texts, not token ids", "suffix")

    def prompts(self, *, has_template: bool = False) -> Sequence[Prompt]:
        if isinstance(self.prompt, list) and self.prompt and isinstance(self.prompt[0], (str, list)):
            return self.prompt
        return [self.prompt]  # type: ignore[list-item]  # the check above has excluded lists of prompts

    @property
    def suffix_text(self) -> str | None:
        return self.suffix or None

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def num_prompts(self) -> int:
        return len(self.prompts())

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompt_length(self) -> int:
        return sum(len(prompt) for prompt in self.prompts()) + len(self.suffix or "")


class FimRequest(CompletionRequest):
    """The body of a request to `/v1/fim/completions`, in Mistral's form: fill in between `prompt` and `suffix`."""

    prompt: str

    @property
    def suffix_text(self) -> str:
        """As for a completion, but never None: "" if the text ends with the answer."""
        return self.suffix or ""


def _error(message: str, param: str) -> ErrorResponse:
    return ErrorResponse(400, message, param=param)
