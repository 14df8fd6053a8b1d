"""The bodies of requests to `/v1/completions` and `/v1/fim/completions`."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import AliasChoices, Field

from runtime.server.errors import ErrorResponse
from runtime.server.openai.requests.field_types import Ids, ListOfIds, ListOfTexts, Number
from runtime.server.openai.requests.request import Request

# Most answers of one request, to all of its prompts.
MAX_ANSWERS = 128


class CompletionRequest(Request):
    """The body of a request to `/v1/completions`: a text to continue, or several."""

    prompt_field = "prompt"
    prompt: str | Ids | ListOfTexts | ListOfIds = Field(description="a text or token ids; or a list of texts or of ids")
    max_tokens: Annotated[int, Field(ge=-1)] | None = Field(
        None,
        validation_alias=AliasChoices("max_tokens", "n_predict"),
        description="maximum number of tokens of the answer, -1 for as many as fit into the context, 0 with `echo` for "
        "none; also `n_predict`",
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = Field(
        None, description="begin the answer with the prompt, and with its log-probabilities if `logprobs` are asked for"
    )
    best_of: Number | None = Field(
        None,
        description="generate so many texts, and answer with those of the highest mean log-probability; at least n",
    )
    suffix: str | None = Field(
        None, description="the text after the answer, for models that were trained to fill in the middle"
    )

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise _error("max_tokens must be at least 1, got 0; only with echo: true it may be 0", "max_tokens")
        if self.max_tokens == 0 and self.speculation:
            raise _error(
                "include_speculation is for an answer, and max_tokens: 0 asks for none; leave one out", "stream_options"
            )
        if self.num_candidates < self.num_choices:
            raise _error(f"best_of must be at least n = {self.num_choices}, got {self.best_of}", "best_of")
        if self.stream and self.num_candidates > self.num_choices:
            raise _error("the best of several texts is known at their end; leave out best_of or stream", "best_of")
        if self.num_prompts * self.num_candidates > MAX_ANSWERS:
            raise _error(
                f"{self.num_prompts} prompts with {self.num_candidates} texts each are too many: a request has at most "
                f"{MAX_ANSWERS}; send several requests",
                self.prompt_field,
            )
        if self.fills_in and self.echo:
            raise _error("echo gives a prompt that is continued, and this one has a suffix; leave one out", "echo")
        if self.fills_in and not all(isinstance(prompt, str) for prompt in self.prompts):
            raise _error("a suffix needs prompts that are texts, not token ids", "suffix")

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts: texts or token ids."""
        if isinstance(self.prompt, list) and self.prompt and isinstance(self.prompt[0], (str, list)):
            return self.prompt  # type: ignore[return-value]  # the check above has excluded plain ids
        return [self.prompt]  # type: ignore[list-item]

    @property
    def fills_in(self) -> bool:
        """Whether the answers stand between the prompt and a suffix."""
        return bool(self.suffix)

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def num_candidates(self) -> int:
        return self.num_choices if self.best_of is None else self.best_of

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_scored(self) -> int | None:
        asked = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max((number for number in asked if number is not None), default=None)

    @property
    def prompt_length(self) -> int:
        return sum(map(len, self.prompts)) + len(self.suffix or "")


class FimRequest(CompletionRequest):
    """The body of a request to `/v1/fim/completions`, in Mistral's form: what stands between two texts."""

    prompt: str
    # What a chat's response has.
    has_functions: ClassVar[bool] = False

    @property
    def fills_in(self) -> bool:
        """See `CompletionRequest`: also in front of nothing."""
        return True


def _error(message: str, param: str) -> ErrorResponse:
    return ErrorResponse(400, message, param=param)
