"""From a request to what needs the tokenizer: its prompts, and its biases."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from protocol.errors import PromptError
from runtime.server.errors import ErrorResponse, short_json
from runtime.server.openai.requests import ChatRequest, CompletionRequest, Request
from runtime.server.openai.tool_fields import tools_of_request

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from runtime.engine.runtime import Runtime
    from runtime.server.models.loaded_model import LoadedModel
    from runtime.server.openai.fill_in_middle import FillInMiddle


# Tokens of a prediction, which is indexed as a prompt is, and costs as much memory.
_MAX_PREDICTED_TOKENS = 2**15

# Characters of a prompt in whose time a key of `logit_bias` is tokenised: each is a call of its own.
_CHARACTERS_OF_KEY = 128


@attrs.frozen
class Encoded:
    """What the tokenizer makes of a request.

    Attributes:
        prompts: the prompts as token ids, at least one; a chat is one.
        logit_bias: biases by token id.
        ends: ids of tokens that end the answers beside the end of text, where a model fills in the middle.
    """

    prompts: list[tuple[int, ...]]
    logit_bias: dict[int, float]
    ends: tuple[int, ...] = ()


def tokenizer_of(runtime: Runtime) -> TokenizerWrapper:
    """The target's tokenizer."""
    assert runtime.tokenizer is not None, "a server's target has a tokenizer"
    return runtime.tokenizer


def encoding_length(request: Request) -> int:
    """The length of a prompt that takes as long as `encode_all`, in characters."""
    return request.prompt_length + _CHARACTERS_OF_KEY * sum(not _is_id(key) for key in request.logit_bias or ())


def encode_all(request: Request, model: LoadedModel) -> Encoded:
    """What the tokenizer makes of a request; to be called in a thread.

    Raises:
        PromptError: a prompt is empty, or cannot be encoded.
        ErrorResponse: a tool or the choice among them is invalid, the model cannot fill in the middle, or a key of
            `logit_bias` stands for no token.
    """
    tokenizer = tokenizer_of(model.runtime)
    biases = _biases(request.logit_bias or {}, tokenizer)
    if isinstance(request, CompletionRequest) and request.fills_in:
        fill = _fill_in_middle(model)
        texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
        prompts = [fill.prompt(text, request.suffix or "", tokenizer) for text in texts]
        return Encoded(prompts, biases, fill.stop_tokens)
    return Encoded(_encode_prompts(request, model.runtime), biases)


def _fill_in_middle(model: LoadedModel) -> FillInMiddle:
    """Raises: ErrorResponse: the model has no tokens for it."""
    if (fill := model.fill_in_middle) is None:
        raise ErrorResponse(
            400,
            f"the tokenizer of {model.name!r} has no fill-in-the-middle tokens, so nothing can be written in front of "
            "a suffix; leave it out, or ask a model that was trained for it",
            param="suffix",
        )
    return fill


def _encode_prompts(request: Request, runtime: Runtime) -> list[tuple[int, ...]]:
    if not isinstance(request, CompletionRequest):
        return [encode_request(request, runtime)]
    if request.num_prompts == 1:
        return [runtime.encode(request.prompts[0])]
    encoded = []
    for index, prompt in enumerate(request.prompts):
        try:
            encoded.append(runtime.encode(prompt))
        except PromptError as error:
            raise type(error)(f"prompt[{index}]: {error}") from error
    return encoded


def encode_request(request: Request, runtime: Runtime) -> tuple[int, ...]:
    """The prompt of a chat as token ids.

    Raises:
        PromptError: it cannot be encoded.
        ErrorResponse: a tool or the choice among them is invalid.
    """
    assert isinstance(request, ChatRequest)
    messages = [message.plain() for message in request.messages]
    if tokenizer_of(runtime).has_chat_template:
        messages[-1] |= {"prefix": request.continues}
        tools = tools_of_request(request)
        variables = {**request.template_variables, **({} if tools is None else tools.template_variables)}
        if request.constraint is not None:
            # An answer that is JSON from its first token has no reasoning. Templates without this switch ignore it.
            variables = {**variables, "enable_thinking": False}
        return runtime.encode(messages, **variables)
    # Without a template, the messages are one running text, as in a conversation with a base model.
    return runtime.encode("".join(message["content"] for message in messages))


def encode_prediction(text: str, tokenizer: TokenizerWrapper) -> list[int]:
    """A text that an answer may resemble as token ids: the first 32,768, of which at most as many are of use."""
    # Of text that is no code, a token has some five characters.
    tokens: list[int] = tokenizer.encode(text[: 16 * _MAX_PREDICTED_TOKENS], add_special_tokens=False)
    return tokens[:_MAX_PREDICTED_TOKENS]


def _biases(by_key: dict[str, float], tokenizer: TokenizerWrapper) -> dict[int, float]:
    """Biases by token id, from biases by id or by text. Those of one token add up."""
    biases: dict[int, float] = {}
    for key, bias in by_key.items():
        tokens = [int(key)] if _is_id(key) else tokenizer.encode(key, add_special_tokens=False)
        if not tokens:
            raise ErrorResponse(
                400,
                f"the key {short_json(key)} of logit_bias stands for no token; give token ids or texts",
                param="logit_bias",
            )
        for token in tokens:
            biases[token] = biases.get(token, 0.0) + bias
    return biases


def _is_id(key: str) -> bool:
    return key.isascii() and key.isdigit()
