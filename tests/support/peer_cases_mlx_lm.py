"""Cases of mlx-lm's server tests."""

from __future__ import annotations

from functools import partial

from asgi import COMPLETIONS
from peer_cases import HELLO, Asked, Case, all_answered, answered, chat, choice, choices_of_chunks, completion, user

of = partial(Case, "mlx-lm", "test_server.py")

# Any name is that of the only model.
SAMPLED = completion(
    model="default_model",
    max_tokens=10,
    temperature=0.5,
    top_p=0.9,
    repetition_penalty=1.1,
    repetition_context_size=20,
    seed=999,
    stop="stop sequence",
)
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "id": "123", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}],
}
FRAGMENTS = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in HELLO]
PENALISED = {"model": "chat_model", "temperature": 0.7, "top_p": 0.85, "repetition_penalty": 1.2}

CASES = [
    of(
        "test_handle_completions",
        "a seeded sample with a repetition penalty is the same text twice",
        [SAMPLED, SAMPLED],
        lambda answers: answered(*answers) and answers[0].text == answers[1].text != "",
    ),
    of(
        "test_handle_chat_completions_with_content_fragments",
        "messages in parts are taken",
        [chat(*FRAGMENTS, **PENALISED)],
        all_answered,
    ),
    of(
        "test_handle_chat_completions_with_null_tool_content",
        "a history with a call, whose content is null, and its result is taken",
        [chat(user("what is 2+3?"), CALLED, {"role": "tool", "content": "5", "tool_call_id": "123"}, **PENALISED)],
        all_answered,
    ),
    of(
        "test_handle_models",
        "a list of models with `id`, `object` and `created`",
        [Asked("/v1/models")],
        lambda answers: (
            answers[0].json["object"] == "list"
            and [model["object"] for model in answers[0].json["data"]] == ["model"]
            and {"id", "created"} <= set(answers[0].json["data"][0])
        ),
    ),
    of(
        "test_handle_completions_with_draft_model",
        "tokens in the usage, with a draft model",
        [Asked(COMPLETIONS, {"prompt": "Once upon a time", "max_tokens": 10, "temperature": 0.0, "top_p": 1.0})],
        lambda answers: answers[0].json["usage"]["completion_tokens"] > 0,
    ),
    of(
        "test_streaming_with_draft_model",
        "each chunk has one choice with a delta",
        [chat(max_tokens=10, temperature=0.0, stream=True)],
        lambda answers: (
            all(len(event["choices"]) == 1 for event in answers[0].events)
            and all("delta" in each for each in choices_of_chunks(answers[0]))
        ),
    ),
    of(
        "test_prompt_cache_with_draft_model",
        "two chats that begin alike both have content",
        [chat(HELLO[0], user(f"Tell me a story about{more}"), max_tokens=5) for more in ("", " dragons.")],
        lambda answers: all(choice(answer)["message"]["content"] is not None for answer in answers),
    ),
]
