"""Cases of llama.cpp's server tests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from asgi import CHAT, COMPLETIONS, COUNT_TOKENS, MESSAGES, RESPONSES, Exchange
from assembled import assembled_message
from peer_cases import (
    HELLO,
    KEY,
    Asked,
    Case,
    all_answered,
    answered,
    chat,
    choice,
    choices_of_chunks,
    completion,
    refused,
    user,
)

basic = partial(Case, "llama.cpp", "test_basic.py")
chats = partial(Case, "llama.cpp", "test_chat_completion.py")
texts = partial(Case, "llama.cpp", "test_completion.py")
secure = partial(Case, "llama.cpp", "test_security.py")
responses = partial(Case, "llama.cpp", "test_compat_oai_responses.py")
messages = partial(Case, "llama.cpp", "test_compat_anthropic.py")
tools = partial(Case, "llama.cpp", "test_tool_call.py")
tokenizing = partial(Case, "llama.cpp", "test_tokenize.py")
infill = partial(Case, "llama.cpp", "test_infill.py")

BOOK = [{"role": "system", "content": "Book"}, user("What is the best book")]
PARTS = user([{"type": "text", "text": "What is "}, {"type": "text", "text": "the best book"}])
LIFE = "I believe the meaning of life is"


# --- completions and chats --------------------------------------------------------------------------


def usual_chunks(answers: Sequence[Exchange]) -> bool:
    """The first chunk has the role and nothing else, the last the reason and no content; all have one id."""
    [answer] = answers
    first, *middle, last = choices_of_chunks(answer)
    return (
        first["delta"]["role"] == "assistant"
        and not first["delta"].get("content")
        and not any(each["delta"].get("role") for each in (*middle, last))
        and last["finish_reason"] == "length"
        and not last["delta"].get("content")
        and all(each["finish_reason"] is None for each in middle)
        and len({event["id"] for event in answer.events}) == 1
        and answer.events[-1]["usage"]["completion_tokens"] == 8
    )


def good_logprobs(content: Any) -> bool:
    return bool(content) and all(
        token["logprob"] <= 0 and token["bytes"] is not None and len(token["top_logprobs"]) == 10 for token in content
    )


def logprobs_of_text(answers: Sequence[Exchange]) -> bool:
    content = choice(answers[0])["logprobs"]["content"]
    return (
        good_logprobs(content)
        and b"".join(bytes(token["bytes"]) for token in content).decode(errors="replace")
        == (choice(answers[0])["message"]["content"])
    )


def logprobs_of_chunks(answers: Sequence[Exchange]) -> bool:
    chunks = choices_of_chunks(answers[0])[1:]
    content = [token for each in chunks if each["logprobs"] for token in each["logprobs"]["content"]]
    said = b"".join(bytes(token["bytes"]) for token in content).decode(errors="replace")
    return good_logprobs(content) and said == answers[0].text


def formatted(kind: str, **more: Any) -> Asked:
    return chat(*BOOK, response_format={"type": kind, **more}, max_tokens=20)


def never(role: Any) -> list[Any]:
    """Lists of messages that are none."""
    return [
        None,
        "string",
        [123],
        [{}],
        [{"role": role}],
        [{"role": "system", "content": 123}],
        [{"role": "system", "content": "test"}, {}],
    ]


COMPLETION = [
    basic("test_server_start_simple", "`/health` is 200", [Asked("/health")], lambda answers: answers[0].status == 200),
    basic(
        "test_server_props",
        "`/props` has `model_path`, `total_slots` and the context",
        [Asked("/props")],
        lambda answers: (
            answers[0].json["total_slots"] == 4
            and answers[0].json["default_generation_settings"]["n_ctx"] == 512
            and "model_path" in answers[0].json
        ),
    ),
    basic(
        "test_server_slots",
        "`/slots` shows what each slot does",
        [Asked("/slots")],
        refused(404),
        "there are no slots: requests share passes; `/health` and `/metrics` count them",
    ),
    basic(
        "test_no_webui",
        "`/` is a page",
        [Asked("/")],
        lambda answers: "<!doctype html>" in answers[0].body.decode().lower(),
    ),
    chats(
        "test_chat_completion",
        "usage, role, `length` as the reason",
        [chat(*BOOK), chat(BOOK[0], PARTS)],
        lambda answers: (
            answered(*answers)
            and all("cmpl" in answer.json["id"] for answer in answers)
            and {choice(answer)["finish_reason"] for answer in answers} == {"length"}
            and {choice(answer)["message"]["role"] for answer in answers} == {"assistant"}
            and {answer.json["usage"]["completion_tokens"] for answer in answers} == {8}
            and answers[0].text == answers[1].text
        ),
    ),
    chats(
        "test_chat_completion_stream",
        "a first chunk with the role, a last one with the reason and no content, one id",
        [chat(*BOOK, stream=True, stream_options={"include_usage": True})],
        usual_chunks,
    ),
    chats(
        "test_chat_completion_with_openai_library",
        "`system_fingerprint` begins with the build's `b`",
        [chat(*BOOK, model="gpt-3.5-turbo-instruct", seed=42, temperature=0.8)],
        lambda answers: answered(*answers) and answers[0].json["system_fingerprint"].startswith("outrider-"),
        "it is Outrider's version",
    ),
    chats(
        "test_chat_template",
        "`__verbose` has the prompt",
        [chat(*BOOK)],
        lambda answers: answered(*answers) and "__verbose" not in answers[0].json,
        "a prompt is never sent back; this needs the server's debug mode there, too",
    ),
    chats(
        "test_apply_chat_template",
        "`/apply-template` gives the prompt of messages",
        [Asked("/apply-template", {"messages": BOOK}, method="POST")],
        refused(404),
        "no such path",
    ),
    chats(
        "test_completion_with_response_format",
        "a constant by its JSON schema",
        [formatted("json_schema", json_schema={"schema": {"const": "foooooo"}})],
        lambda answers: answers[0].text == '"foooooo"',
    ),
    chats(
        "test_completion_with_response_format",
        "`json_object` with a schema follows it",
        [formatted("json_object", schema={"const": "42"})],
        lambda answers: answers[0].text == '"42"',
    ),
    chats(
        "test_completion_with_grammar",
        "`grammar` in GBNF",
        [Asked("/chat/completions", {"messages": BOOK, "max_tokens": 8, "grammar": 'root ::= "a"{5,5}'})],
        lambda answers: answers[0].text == "aaaaa",
    ),
    chats(
        "test_completion_with_response_format",
        "`json_object` begins as an object does",
        [formatted("json_object")],
        lambda answers: answers[0].text.lstrip().startswith("{"),
    ),
    chats(
        "test_completion_with_response_format", "an unknown type of format is refused", [formatted("sound")], refused()
    ),
    chats(
        "test_completion_with_response_format",
        "schemas that are none are refused",
        [
            formatted("json_schema", json_schema={"schema": schema})
            for schema in (123, {"type": 123}, {"type": "hiccup"})
        ]
        + [formatted("json_object", schema=schema) for schema in (123, {"type": "hiccup"})],
        refused(),
    ),
    chats(
        "test_invalid_chat_completion_req",
        "messages that are none are refused",
        [Asked(CHAT, {"messages": bad}) for bad in never(123)],
        refused(),
    ),
    chats(
        "test_invalid_chat_completion_req",
        "two messages of the assistant at the end are refused",
        [chat(user("test"), *[{"role": "assistant", "content": "test"}] * 2)],
        all_answered,
        "the chat template decides which orders of roles are allowed",
    ),
    chats(
        "test_chat_completion_with_timings_per_token",
        "`timings` in the chunks",
        [chat(*BOOK, stream=True, max_tokens=10, timings_per_token=True)],
        lambda answers: all(
            event["timings"].keys() >= {"prompt_per_second", "predicted_per_second"}
            and event["timings"]["predicted_n"] <= 10
            for event in answers[0].events
        ),
    ),
    chats("test_logprobs", "of the text's tokens", [chat(*BOOK, logprobs=True, top_logprobs=10)], logprobs_of_text),
    chats(
        "test_logprobs_stream",
        "likewise in chunks",
        [chat(*BOOK, logprobs=True, top_logprobs=10, stream=True)],
        logprobs_of_chunks,
    ),
    chats(
        "test_logit_bias",
        "tokens of `/tokenize` that are banned are not in the text",
        [
            Asked("/tokenize", {"content": " the def x"}),
            Asked(
                CHAT,
                lambda before: {
                    "messages": BOOK,
                    "max_tokens": 8,
                    "logit_bias": {str(token): -100 for token in before[0].json["tokens"]},
                },
            ),
        ],
        lambda answers: answered(answers[1]) and not any(word in answers[1].text for word in (" the", " def", " x")),
    ),
    texts(
        "test_logit_bias",
        "by text",
        [completion(LIFE, logit_bias={" the": -100})],
        lambda answers: answered(*answers) and " the" not in answers[0].text,
    ),
    texts(
        "test_logit_bias",
        "a list of pairs",
        [completion(LIFE, logit_bias=[[" the", -100]])],
        lambda answers: answered(*answers) and " the" not in answers[0].text,
    ),
    chats(
        "test_context_size_exceeded",
        "400 with the type `exceed_context_size_error`",
        [chat(*BOOK * 100), chat(*BOOK * 100, stream=True)],
        lambda answers: all(answer.fault["code"] == "context_length_exceeded" for answer in answers),
        "400 with OpenAI's code, `context_length_exceeded`",
    ),
    chats(
        "test_return_progress",
        "`prompt_progress` while a prompt is read",
        [chat(*BOOK, stream=True, stream_options={"include_speculation": True})],
        lambda answers: all("prompt_tokens" in event["speculation"]["statistics"] for event in answers[0].events),
        "progress comes with `include_speculation`",
    ),
    texts(
        "test_completion",
        "`/completion`, llama.cpp's own format",
        [Asked("/completion", {"prompt": LIFE, "n_predict": 8}, method="POST")],
        refused(404),
        "not OpenAI's; `/v1/completions` is",
    ),
    texts(
        "test_completion_stream_vs_non_stream",
        "the same text streamed and not",
        [completion(LIFE), completion(LIFE, stream=True)],
        lambda answers: answers[0].text == answers[1].text,
    ),
    texts(
        "test_different_result_different_seed",
        "another text with another seed",
        [completion(LIFE, seed=seed, temperature=1.0) for seed in range(4)],
        lambda answers: len({answer.text for answer in answers}) == 4,
    ),
    texts(
        "test_nocache_long_input_prompt",
        "a prompt beyond the context is refused",
        [completion(LIFE * 200)],
        refused(400, "context"),
    ),
    texts(
        "test_completion_with_tokens_input",
        "texts and lists of ids in one list of prompts",
        [completion([[5, 6, 7], LIFE])],
        refused(400, "prompt"),
        "a list is of texts or of ids, as with OpenAI",
    ),
    texts(
        "test_completion_with_tokens_input",
        "texts among the ids of one prompt",
        [completion([1, 2, 3, LIFE, 4])],
        refused(),
        "a prompt is a text or ids, as with OpenAI",
    ),
]

# --- the tokenizer ----------------------------------------------------------------------------------

FRANCE = "What is the capital of France ?"

TOKENIZER = [
    tokenizing(
        "test_tokenize_detokenize",
        "there and back",
        [
            Asked("/tokenize", {"content": FRANCE}),
            Asked("/detokenize", lambda before: {"tokens": before[0].json["tokens"]}),
        ],
        lambda answers: len(answers[0].json["tokens"]) > 5 and answers[1].json["content"] == FRANCE,
    ),
    tokenizing(
        "test_tokenize_with_pieces",
        "an id and a piece for each token",
        [Asked("/tokenize", {"content": "unicode 媽 and emoji 🤗", "with_pieces": True})],
        lambda answers: all(token["id"] > 0 and len(token["piece"]) > 0 for token in answers[0].json["tokens"]),
    ),
]

# --- keys and origins -------------------------------------------------------------------------------


def with_key(path: str, key: str | None = KEY, header: str = "Authorization", scheme: str = "Bearer ") -> Asked:
    headers = {} if key is None else {header: scheme + key}
    body = {"prompt": LIFE, "max_tokens": 4} if path == COMPLETIONS else None
    return Asked(path, body, {**headers, **({"content-type": "application/json"} if body else {})})


SECURITY = [
    secure(
        "test_access_public_endpoint",
        "`/health` needs no key",
        [with_key("/health", None)],
        lambda answers: answers[0].status == 200,
        key=KEY,
    ),
    secure(
        "test_access_public_endpoint",
        "`/models` needs no key",
        [with_key("/models", None)],
        refused(401),
        "with a key, all of `/v1` needs it",
        KEY,
    ),
    secure(
        "test_access_static_assets_without_api_key",
        "the page needs no key",
        [with_key("/", None)],
        lambda answers: answers[0].status == 200,
        key=KEY,
    ),
    secure(
        "test_incorrect_api_key",
        "401 for no key and for a wrong one",
        [with_key(COMPLETIONS, key) for key in (None, "invalid-key")],
        refused(401, "key"),
        key=KEY,
    ),
    secure("test_correct_api_key", "200 with the key", [with_key(COMPLETIONS)], all_answered, key=KEY),
    secure(
        "test_correct_api_key_anthropic_header",
        "the key as `X-Api-Key`",
        [with_key(COMPLETIONS, header="X-Api-Key", scheme="")],
        all_answered,
        key=KEY,
    ),
    secure(
        "test_cors_options",
        "pages of every origin may ask",
        [
            Asked(
                COMPLETIONS,
                headers={"Origin": "https://web.mydomain.fr", "Access-Control-Request-Method": "POST"},
                method="OPTIONS",
            )
        ],
        lambda answers: "access-control-allow-origin" not in answers[0].headers,
        "only those that `--allow-origin` names: a page could use the server of its visitor otherwise",
    ),
]

# --- /v1/responses ----------------------------------------------------------------------------------


def response(**fields: Any) -> Asked:
    return Asked(RESPONSES, {"input": "Write an example", "max_output_tokens": 20, **fields})


def formatted_response(kind: str, **more: Any) -> Asked:
    return response(text={"format": {"type": kind, **more}})


def consistent_ids(answers: Sequence[Exchange]) -> bool:
    events = answers[0].named_events
    response_ids = {event["response"]["id"] for event in events if "response" in event}
    [added] = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    said = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    last = events[-1]["response"]
    return (
        len(response_ids) == 1
        and response_ids.pop().startswith("resp_")
        and added.startswith("msg_")
        and {event["item_id"] for event in events if "item_id" in event} == {added}
        and last["output"][0]["id"] == added
        and last["output"][0]["content"][0]["text"] == said
    )


RESPONSE = [
    responses(
        "test_responses_with_text_format",
        "a constant by its JSON schema",
        [formatted_response("json_schema", name="test", schema={"const": "foooooo"})],
        lambda answers: answers[0].json["output"][0]["content"][0]["text"] == '"foooooo"',
    ),
    responses(
        "test_responses_with_text_format",
        "`json_object` begins as an object does; `text` is free",
        [formatted_response("json_object"), formatted_response("text")],
        lambda answers: (
            answers[0].json["output"][0]["content"][0]["text"].lstrip().startswith("{") and answers[1].status == 200
        ),
    ),
    responses(
        "test_responses_with_text_format",
        "a format without its schema is refused",
        [formatted_response("json_schema", name="test")],
        refused(400, "schema"),
    ),
    responses(
        "test_responses_with_openai_library",
        "ids of response and message",
        [response(input=BOOK, temperature=0.8)],
        lambda answers: (
            answers[0].json["id"].startswith("resp_") and answers[0].json["output"][0]["id"].startswith("msg_")
        ),
    ),
    responses(
        "test_responses_stream_with_openai_library",
        "the same ids in all events, and the same text at the end",
        [response(input=BOOK, temperature=0.8, stream=True)],
        consistent_ids,
    ),
    responses(
        "test_responses_stream_with_llama_telemetry",
        "`timings` and `prompt_progress` in events",
        [response(stream=True)],
        lambda answers: not any("timings" in event for event in answers[0].named_events),
        "events are OpenAI's; chats have `timings`",
    ),
]

# --- /v1/messages -----------------------------------------------------------------------------------

WEATHER = {
    "name": "get_weather",
    "description": "Get the current weather in a location",
    "input_schema": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "City name"}},
        "required": ["location"],
    },
}


def message(*said: Any, **fields: Any) -> Asked:
    return Asked(MESSAGES, {"model": "tiny", "max_tokens": 8, "messages": list(said or [user("Say hello")]), **fields})


def count(**fields: Any) -> Asked:
    return Asked(COUNT_TOKENS, {"model": "tiny", "messages": [user("Hello world")], **fields})


def with_result(result: Any, *before: Any) -> Asked:
    call = {"type": "tool_use", "id": "test123", "name": "get_weather", "input": {"location": "Paris"}}
    given = {"type": "tool_result", "tool_use_id": "test123", **result}
    return message(user("What's the weather?"), {"role": "assistant", "content": [call]}, user([*before, given]))


def whole_messages(answers: Sequence[Exchange]) -> bool:
    return all(
        answer.json["type"] == "message"
        and answer.json["role"] == "assistant"
        and [block["type"] for block in answer.json["content"]] == ["text"]
        and answer.json["stop_reason"] in ("end_turn", "max_tokens", "stop_sequence")
        and answer.json["usage"]["output_tokens"] > 0
        and {"input_tokens", "cache_read_input_tokens"} <= set(answer.json["usage"])
        for answer in answers
    )


def message_events(answers: Sequence[Exchange]) -> bool:
    events = answers[0].named_events
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    start = events[0]["message"]
    return (
        kinds[:2] == ["message_start", "content_block_start"]
        and kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        and set(kinds[2:-3]) == {"content_block_delta"}
        and (start["role"], start["content"]) == ("assistant", [])
        and sum(start["usage"][name] for name in ("input_tokens", "cache_read_input_tokens")) > 0
        and [block["type"] for block in assembled_message(events)["content"]] == ["text"]
    )


def with_input_tokens(answers: Sequence[Exchange]) -> bool:
    return all(answer.json["input_tokens"] > 0 and "output_tokens" not in answer.json for answer in answers)


PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}

MESSAGE = [
    messages("test_anthropic_messages_basic", "blocks, reason and usage", [message()], whole_messages),
    messages("test_anthropic_messages_multipart_content", "content in parts", [message(PARTS)], whole_messages),
    messages(
        "test_anthropic_messages_conversation",
        "several turns",
        [message(user("Hello"), {"role": "assistant", "content": "Hi there!"}, user("How are you?"))],
        whole_messages,
    ),
    messages("test_anthropic_messages_streaming", "events in order", [message(stream=True)], message_events),
    messages("test_anthropic_count_tokens", "`input_tokens` alone", [count()], with_input_tokens),
    messages("test_anthropic_count_tokens_with_system", "with `system`", [count(system="Help.")], with_input_tokens),
    messages("test_anthropic_tool_use_basic", "tools", [message(tools=[WEATHER])], whole_messages),
    messages("test_anthropic_tool_result", "results", [with_result({"content": "sunny, 25°C"})], whole_messages),
    messages(
        "test_anthropic_tool_result_with_text",
        "a text before the result",
        [with_result({"content": "sunny, 25°C"}, {"type": "text", "text": "Here are the results:"})],
        whole_messages,
    ),
    messages(
        "test_anthropic_tool_result_error",
        "a result that is an error",
        [with_result({"content": "City not found", "is_error": True})],
        whole_messages,
    ),
    messages("test_anthropic_tool_streaming", "events", [message(tools=[WEATHER], stream=True)], message_events),
    messages(
        "test_anthropic_vision_format_accepted",
        "500: this model takes no images",
        [message(user([PICTURE, {"type": "text", "text": "What is this?"}]))],
        refused(400, "image"),
        "400: the request cannot be answered however often it is sent",
    ),
    messages(
        "test_anthropic_temperature, test_anthropic_top_p, test_anthropic_top_k, test_anthropic_metadata",
        "settings",
        [message(**each) for each in ({"temperature": 0.5}, {"top_p": 0.9}, {"top_k": 40}, {"metadata": {}})],
        whole_messages,
    ),
    messages(
        "test_anthropic_thinking",
        "`thinking`",
        [message(thinking={"type": "enabled", "budget_tokens": 50})],
        whole_messages,
    ),
    messages(
        "test_anthropic_missing_messages",
        "no `messages` is an error",
        [Asked(MESSAGES, {"model": "tiny", "max_tokens": 50})],
        refused(400, "messages"),
    ),
    messages(
        "test_anthropic_empty_messages",
        "an empty list of messages is answered",
        [Asked(MESSAGES, {"model": "tiny", "max_tokens": 50, "messages": []})],
        refused(400, "messages"),
        "refused, as by Anthropic",
    ),
    messages(
        "test_anthropic_vs_openai_different_response_format",
        "each API has its own form",
        [chat(), message()],
        lambda answers: answers[0].json["object"] == "chat.completion" and answers[1].json["type"] == "message",
    ),
]

# --- tools ------------------------------------------------------------------------------------------


def function(name: str, required: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [required]}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


SUCCESS = function("test", "success", success={"type": "boolean", "const": True})

TOOL = [
    tools(
        "test_completion_without_tool_call_fast",
        "no call without tools, nor with `tool_choice: none`",
        [chat(*HELLO, tools=[]), chat(*HELLO, tools=[SUCCESS], tool_choice="none")],
        lambda answers: not any(choice(answer)["message"].get("tool_calls") for answer in answers),
    ),
    infill(
        "test_infill_without_input_extra",
        "`/infill`, llama.cpp's own",
        [Asked("/infill", {"input_prefix": "int main() {", "prompt": "", "input_suffix": "}"}, method="POST")],
        refused(404),
        "not OpenAI's; `/v1/completions` with `suffix` is",
    ),
]

CASES = [*COMPLETION, *TOKENIZER, *SECURITY, *RESPONSE, *MESSAGE, *TOOL]
