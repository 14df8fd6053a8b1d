"""Cases of vLLM's tests of its entry points."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import jsonschema
from asgi import CHAT, MESSAGES, RESPONSES, Exchange
from peer_cases import (
    HELLO,
    Asked,
    Case,
    Holds,
    all_answered,
    answered,
    chat,
    choice,
    choices_of_chunks,
    completion,
    refused,
    user,
)

basic = partial(Case, "vLLM", "openai/basic/test_basic.py")
chats = partial(Case, "vLLM", "openai/chat_completion/test_chat.py")
bodies = partial(Case, "vLLM", "openai/chat_completion/test_non_object_body_validation.py")
bias = partial(Case, "vLLM", "openai/chat_completion/test_chat_logit_bias_validation.py")
stop_ids = partial(Case, "vLLM", "openai/chat_completion/test_chat_stop_token_ids_validation.py")
echoing = partial(Case, "vLLM", "openai/chat_completion/test_chat_echo.py")
null_choice = partial(Case, "vLLM", "openai/chat_completion/test_tool_choice_null.py")
calling = partial(Case, "vLLM", "openai/chat_completion/test_completion_with_function_calling.py")
texts = partial(Case, "vLLM", "openai/completion/test_completion.py")
prompts = partial(Case, "vLLM", "openai/completion/test_prompt_validation.py")
empty = partial(Case, "vLLM", "openai/completion/test_empty_prompt_list.py")
responses = partial(Case, "vLLM", "openai/responses/test_basic.py")
stateful = partial(Case, "vLLM", "openai/responses/test_stateful.py")
structured = partial(Case, "vLLM", "openai/responses/test_structured_output.py")
functions = partial(Case, "vLLM", "openai/responses/test_function_call.py")
messages = partial(Case, "vLLM", "anthropic/test_messages.py")

SUM = [{"role": "system", "content": "you are a helpful assistant"}, user("what is 1+1?")]
IDS = [0, 0, 0, 0, 0]
VOCABULARY = 4102
# The greedy text of random weights would not end.
DRAWN = {"temperature": 1.0, "seed": 7}


def asks(**fields: Any) -> Asked:
    return chat(*SUM, **{"max_completion_tokens": 5, "temperature": 0.0, **fields})


def logprobs_of(answer: Exchange) -> Any:
    return choice(answer)["logprobs"]


# --- chats ------------------------------------------------------------------------------------------


def usage_comes_last(answers: Sequence[Exchange]) -> bool:
    without, with_usage = answers
    *chunks, last = with_usage.events
    usage = last["usage"]
    return (
        not any(event.get("usage") for event in (*without.events, *chunks))
        and last["choices"] == []
        and usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > usage["prompt_tokens"] > 0
    )


def streams_alike(answers: Sequence[Exchange]) -> bool:
    whole, stream = answers
    reasons = [each["finish_reason"] for each in choices_of_chunks(stream) if each["finish_reason"] is not None]
    return stream.text == whole.text and reasons == [choice(whole)["finish_reason"]]


def prompts_are_scored(answers: Sequence[Exchange]) -> bool:
    one, two, none = (answer.json["prompt_logprobs"] for answer in answers)
    return none is None and one[0] is None and len(one[3]) in (1, 2) and len(two[3]) in (2, 3)


def counted_all_along(answers: Sequence[Exchange]) -> bool:
    usages = [event["usage"] for event in answers[0].events]
    counts = [usage["completion_tokens"] for usage in usages]
    return (
        all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
        and counts == sorted(counts)
        and counts[-1] == 10
    )


def said_by(answer: Exchange, index: int) -> str:
    """What a stream says with one of its answers."""
    return "".join(texts_of(answer, index))


def texts_of(answer: Exchange, index: int) -> list[str]:
    """The texts of the chunks of one of a stream's answers."""
    chunks = [each for each in choices_of_chunks(answer) if each["index"] == index]
    return [each["text"] if "text" in each else each["delta"].get("content") or "" for each in chunks]


def reasons_of(answer: Exchange) -> int:
    """Number of chunks of a stream that have a reason."""
    return sum(each["finish_reason"] is not None for each in choices_of_chunks(answer))


def ignores(name: str) -> Holds:
    """Each is answered, and the header says that the field was ignored."""
    return lambda answers: (
        answered(*answers) and all(name in answer.headers["x-outrider-ignored"].split(", ") for answer in answers)
    )


LANGUAGES = ["Python", "Java", "C++"]
IP = r"((25[0-5]|(2[0-4]|1[0-9]|[1-9]|)[0-9])\.){3}(25[0-5]|(2[0-4]|1[0-9]|[1-9]|)[0-9])"
IGNORED = "ignored, and named in `X-Outrider-Ignored`"
OF_RESULT = {
    "type": "object",
    "properties": {"result": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["result"],
}

CHATS = [
    basic("test_show_version", "`/version`", [Asked("/version")], lambda answers: list(answers[0].json) == ["version"]),
    basic(
        "test_request_wrong_content_type",
        "a form is refused",
        [chat(headers={"content-type": "application/x-www-form-urlencoded"})],
        refused(415),
    ),
    basic(
        "test_server_load",
        "`/load` counts requests at work",
        [Asked("/load")],
        refused(404),
        "`/health` and `/metrics` count them",
    ),
    chats(
        "test_no_logprobs_chat",
        "none for `logprobs: false`",
        [asks(logprobs=False)],
        lambda answers: logprobs_of(answers[0]) is None,
    ),
    chats(
        "test_zero_logprobs_chat",
        "no others for `top_logprobs: 0`",
        [asks(logprobs=True, top_logprobs=0)],
        lambda answers: logprobs_of(answers[0])["content"][0]["top_logprobs"] == [],
    ),
    chats(
        "test_some_logprobs_chat",
        "five for `top_logprobs: 5`",
        [asks(logprobs=True, top_logprobs=5)],
        lambda answers: len(logprobs_of(answers[0])["content"][0]["top_logprobs"]) == 5,
    ),
    chats(
        "test_too_many_chat_logprobs",
        "more than 20 are refused, streamed and not",
        [asks(logprobs=True, top_logprobs=21, stream=True), asks(logprobs=True, top_logprobs=30)],
        refused(400, "top_logprobs"),
    ),
    chats(
        "test_single_chat_session",
        "usage, and a second turn",
        [asks(), asks(max_completion_tokens=6)],
        lambda answers: (
            answered(*answers)
            and [answer.json["usage"]["completion_tokens"] for answer in answers] == [5, 6]
            and all(
                answer.json["usage"]["total_tokens"]
                == answer.json["usage"]["prompt_tokens"] + answer.json["usage"]["completion_tokens"]
                for answer in answers
            )
        ),
    ),
    chats("test_chat_streaming", "the same text in chunks, and one reason", [asks(), asks(stream=True)], streams_alike),
    chats(
        "test_chat_streaming",
        "the chunk with the reason has content, too",
        [asks(stream=True)],
        lambda answers: not choices_of_chunks(answers[0])[-1]["delta"].get("content"),
        "the text is in the chunks before, since some clients do not look for text beside a reason",
    ),
    chats(
        "test_chat_completion_stream_options",
        "usage in a last chunk where `include_usage` is true",
        [asks(stream=True, stream_options={"include_usage": each}) for each in (False, True)],
        usage_comes_last,
    ),
    chats(
        "test_chat_completion_stream_options",
        "`stream_options` without `stream` are refused",
        [asks(stream=False, stream_options={"include_usage": each}) for each in (None, True)],
        refused(400, "stream_options"),
    ),
    chats(
        "test_chat_completion_stream_options",
        "usage in every chunk for `continuous_usage_stats`, and `min_tokens`",
        [
            asks(
                max_completion_tokens=10,
                min_tokens=10,
                stream=True,
                stream_options={"include_usage": True, "continuous_usage_stats": True},
            )
        ],
        counted_all_along,
    ),
    chats(
        "test_prompt_logprobs_chat, test_more_than_one_prompt_logprobs_chat",
        "log-probabilities of the prompt for `prompt_logprobs`",
        [asks(prompt_logprobs=1), asks(prompt_logprobs=2), asks()],
        prompts_are_scored,
    ),
    chats(
        "test_prompt_logprobs_chat",
        "-1 of them are refused",
        [asks(prompt_logprobs=-1)],
        refused(400, "prompt_logprobs"),
    ),
    chats(
        "test_structured_outputs_choice_chat",
        "one of a list",
        [asks(max_completion_tokens=10, temperature=0.7, structured_outputs={"choice": LANGUAGES})],
        lambda answers: answers[0].text in LANGUAGES,
    ),
    chats(
        "test_structured_outputs_json_chat",
        "matches the schema",
        [asks(max_completion_tokens=100, structured_outputs={"json": OF_RESULT})],
        lambda answers: jsonschema.validate(json.loads(answers[0].text), OF_RESULT) is None,
    ),
    chats(
        "test_structured_outputs_regex_chat",
        "matches the regular expression",
        [asks(max_completion_tokens=40, structured_outputs={"regex": IP})],
        lambda answers: re.fullmatch(IP, answers[0].text) is not None,
    ),
    chats(
        "test_structured_outputs_type_error",
        "an expression that is no text is refused",
        [asks(structured_outputs={"regex": {"1": "Python", "2": "C++"}})],
        refused(400, "regex"),
    ),
    chats(
        "test_structured_outputs_choice_chat_logprobs",
        "no log-probability is below -9999",
        [asks(logprobs=True, top_logprobs=5, structured_outputs={"choice": LANGUAGES})],
        lambda answers: all(top["logprob"] >= -9999 for top in logprobs_of(answers[0])["content"][0]["top_logprobs"]),
    ),
    chats(
        "test_extra_fields_allowed",
        "a message may have further fields",
        [chat({**SUM[1], "extra_field": "0"})],
        ignores("messages.extra_field"),
    ),
    chats(
        "test_custom_role",
        "a role that nobody knows",
        [chat({"role": "my-custom-role", "content": "what is 1+1?"})],
        refused(400, "role"),
        "refused: most chat templates leave such a message out",
    ),
    chats("test_long_seed", "seeds beyond 64 bits are refused", [asks(seed=2**64)], refused(400, "seed")),
    chats(
        "test_invocations",
        "`/invocations` answers chats",
        [Asked("/invocations", {"messages": SUM})],
        refused(404),
        "SageMaker's path; a proxy can rewrite it",
    ),
    chats(
        "test_chat_completion_n_parameter_non_streaming, test_chat_completion_n_with_seed",
        "other answers for `n: 3`, in order",
        [asks(n=3, temperature=0.7, seed=42)],
        lambda answers: (
            [each["index"] for each in answers[0].json["choices"]] == [0, 1, 2]
            and len({each["message"]["content"] for each in answers[0].json["choices"]}) == 3
        ),
    ),
    chats(
        "test_chat_completion_n_parameter_streaming",
        "chunks for each of two answers",
        [asks(n=2, temperature=0.7, stream=True)],
        lambda answers: all(said_by(answers[0], index) for index in (0, 1)),
    ),
    bodies(
        "test_chat_completion_request_rejects_non_object_body",
        "what is no object is refused",
        [Asked(CHAT, body) for body in ("this is not valid json{{{", ["not", "an", "object"], 42)],
        refused(),
    ),
    bias(
        "test_chat_logit_bias_invalid",
        "a token beyond the vocabulary is refused, with both numbers",
        [chat(logit_bias={str(VOCABULARY + 1): 1.0})],
        refused(400, str(VOCABULARY + 1), str(VOCABULARY)),
    ),
    bias(
        "test_chat_logit_bias_non_integer_key, test_chat_logit_bias_multiple_non_integer_keys",
        "a key that is no number is refused",
        [chat(logit_bias={"not_a_token_id": 50})],
        all_answered,
        "it is read as a text, and its tokens are biased, as in llama.cpp",
    ),
    stop_ids(
        "test_chat_stop_token_ids_valid",
        "the last token of the vocabulary",
        [chat(stop_token_ids=[VOCABULARY - 1])],
        all_answered,
    ),
    stop_ids(
        "test_chat_stop_token_ids_out_of_vocab",
        "a token beyond the vocabulary is refused, with both numbers",
        [chat(stop_token_ids=[VOCABULARY + 1])],
        refused(400, str(VOCABULARY + 1), str(VOCABULARY)),
    ),
    echoing(
        "test_chat_session_with_echo_and_continue_final_message",
        "the last message is continued, and sent back for `echo`",
        [
            chat(
                *(user("tell me a saying"), {"role": "assistant", "content": "An apple"}),
                **{"continue_final_message": True, "add_generation_prompt": False, "echo": True},
            )
        ],
        ignores("echo"),
        f"it is continued; `echo` is for completions: {IGNORED}",
    ),
    echoing(
        "test_top_logprobs",
        "the whole vocabulary for `top_logprobs: -1`",
        [chat(logprobs=True, top_logprobs=-1)],
        refused(400, "top_logprobs"),
        "20 at most, as with OpenAI",
    ),
    bias(
        "test_chat_logit_bias_non_numeric_value",
        "a value that is no number is refused",
        [chat(logit_bias={"1": "not_a_number"})],
        refused(400, "logit_bias"),
    ),
]

# --- tools ------------------------------------------------------------------------------------------

UNITS = {"type": "string", "enum": ["celsius", "fahrenheit"]}
OPTIONS = {"type": "object", "additionalProperties": False, "properties": {"unit": UNITS, "daily": {"type": "boolean"}}}
CITY = {"type": "string", "enum": ["Vienna", "Berlin"]}
WEATHER_SCHEMA = {
    "type": "object",
    "properties": {"country": CITY, "unit": UNITS, "options": {"$ref": "#/$defs/WeatherOptions"}},
    "required": ["country", "unit"],
    "$defs": {"WeatherOptions": OPTIONS},
    "additionalProperties": False,
}
WEATHER = {"name": "get_current_weather", "description": "Get the weather", "parameters": WEATHER_SCHEMA}
FORECAST_SCHEMA = {
    "type": "object",
    "properties": {"country": CITY, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["country", "days"],
    "additionalProperties": False,
}
FORECAST = {"name": "get_forecast", "parameters": FORECAST_SCHEMA}
TOOLS = [{"type": "function", "function": each} for each in (WEATHER, FORECAST)]
SCHEMAS = {"get_current_weather": WEATHER_SCHEMA, "get_forecast": FORECAST_SCHEMA}
NAMED = {"type": "function", "function": {"name": "get_current_weather"}}


def told(*tools: Any, **fields: Any) -> Asked:
    return chat(user("The weather in Berlin?"), **{"tools": list(tools or TOOLS), "max_tokens": 300, **DRAWN, **fields})


def checked_call(name: str, arguments: str) -> str:
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    return name


def calls_of(answer: Exchange) -> list[str]:
    """Names of the calls of a response, streamed or not, whose arguments match their schemas."""
    if not answer.headers["content-type"].startswith("text/event"):
        calls = choice(answer)["message"]["tool_calls"]
        return [checked_call(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    said: dict[int, list[str]] = {}
    for each in choices_of_chunks(answer):
        for part in each["delta"].get("tool_calls", ()):
            name, arguments = part["function"].get("name"), part["function"].get("arguments", "")
            said.setdefault(part["index"], [name, ""])[1] += arguments
    return [checked_call(*call) for call in said.values()]


CALLING = [
    calling(
        "test_function_tool_use",
        "`required`, and a named tool, streamed: calls that match their schemas",
        [
            told(tool_choice="required", parallel_tool_calls=False),
            told(tool_choice=NAMED, parallel_tool_calls=False, stream=True),
        ],
        lambda answers: len(calls_of(answers[0])) == 1 and calls_of(answers[1]) == ["get_current_weather"],
    ),
    calling(
        "test_no_args_tool_call",
        'a call in the history whose arguments are `{}` or `""`',
        [
            chat(
                user("What time is it now?"),
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {"id": "a", "type": "function", "function": {"name": "get_current_time", "arguments": given}}
                    ],
                },
                {"role": "tool", "tool_call_id": "a", "content": "noon"},
            )
            for given in ("{}", "")
        ],
        all_answered,
    ),
    calling(
        "test_inconsistent_tool_choice_and_tools",
        "a tool that there is not, or none, is refused",
        [chat(tool_choice=NAMED), told(TOOLS[1], tool_choice=NAMED), told(tool_choice={})],
        refused(400, "tool"),
    ),
    calling(
        "test_max_tokens_with_tool_choice_required",
        "one token is no call: `length` is the reason, and there are no calls",
        [told(tool_choice="required", max_tokens=1), told(tool_choice=NAMED, max_tokens=1)],
        lambda answers: all(
            choice(answer)["finish_reason"] == "length" and not choice(answer)["message"].get("tool_calls")
            for answer in answers
        ),
    ),
    null_choice(
        "test_null_tool_choice_defaults_to_auto_like_an_absent_one",
        "`tool_choice: null` is as none given",
        [told(max_tokens=8), told(max_tokens=8, tool_choice=None), chat(tool_choice=None)],
        lambda answers: answered(*answers) and answers[0].text == answers[1].text,
    ),
    null_choice(
        "test_null_tool_choice_does_not_conflict_with_structured_outputs",
        "nor is it in the way of `structured_outputs`",
        [chat(tool_choice=None, structured_outputs={"json": {"type": "object"}})],
        lambda answers: answers[0].text.startswith("{"),
    ),
    null_choice(
        "test_invalid_tool_choice_is_still_rejected",
        "an unknown choice is refused",
        [told(tool_choice="bogus")],
        refused(400, "tool_choice"),
    ),
]

# --- completions ------------------------------------------------------------------------------------


def text_logprobs(num: int) -> Any:
    return lambda answers: (
        len(logprobs_of(answers[0])["token_logprobs"]) == 5
        and num <= len(logprobs_of(answers[0])["top_logprobs"][0]) <= num + 1
    )


def good_echo(logprobs: Any) -> bool:
    return (
        len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(logprobs["token_logprobs"]) > 5
        and logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        and all(1 <= len(top) <= 2 for top in logprobs["top_logprobs"][1:])
    )


COMPLETIONS = [
    texts(
        "test_single_completion",
        "usage, and a prompt of token ids",
        [completion("Hello, my name is", max_tokens=5), completion(IDS, max_tokens=5)],
        lambda answers: (
            answered(*answers) and [answer.json["usage"]["completion_tokens"] for answer in answers] == [5, 5]
        ),
    ),
    texts(
        "test_no_logprobs",
        "none for `logprobs: null`",
        [completion(IDS, logprobs=None)],
        lambda answers: logprobs_of(answers[0]) is None,
    ),
    texts("test_some_logprobs", "five or six", [completion(IDS, max_tokens=5, logprobs=5)], text_logprobs(5)),
    texts(
        "test_too_many_completion_logprobs",
        "more than 20 are refused, streamed and not",
        [completion(IDS, logprobs=21), completion(IDS, logprobs=30, stream=True)],
        refused(400, "logprobs"),
    ),
    texts(
        "test_zero_logprobs",
        "`top_logprobs` with the token itself for `logprobs: 0`",
        [completion(IDS, logprobs=0)],
        lambda answers: [len(top) for top in logprobs_of(answers[0])["top_logprobs"]] == [1] * 8,
    ),
    texts(
        "test_prompt_logprobs_completion",
        "log-probabilities of each prompt for `prompt_logprobs`",
        [completion(["A robot may not injure another robot", "My name is"], prompt_logprobs=n) for n in (0, 1, None)],
        lambda answers: (
            [[bool(each["prompt_logprobs"]) for each in answer.json["choices"]] for answer in answers]
            == [[True, True], [True, True], [False, False]]
        ),
    ),
    texts(
        "test_prompt_logprobs_completion",
        "-1 of them are refused",
        [completion(IDS, prompt_logprobs=-1)],
        refused(400, "prompt_logprobs"),
    ),
    texts(
        "test_completion_truncation_side_controls_prompt_truncation",
        "`truncate_prompt_tokens`",
        [completion([1, 2, 3, 4, 5, 6], truncate_prompt_tokens=4)],
        ignores("truncate_prompt_tokens"),
        f"{IGNORED}: a prompt is never shortened",
    ),
    texts(
        "test_invalid_json_schema, test_invalid_regex, test_invalid_grammar",
        "what cannot be followed is refused",
        [
            completion(structured_outputs=each)
            for each in (
                {"json": {"type": "object", "properties": {"foo": "bar"}}},
                {"regex": "[.*"},
                {"grammar": "root ::= select_statementinvalidsyntax"},
            )
        ],
        refused(400, "structured_outputs"),
    ),
    texts(
        "test_completion_stream_options",
        "`stream_options` may be empty; without `stream` they are refused",
        [completion(stream=True, stream_options={}), completion(stream_options={"include_usage": True})],
        lambda answers: answers[0].is_done and answers[1].status == 400,
    ),
    texts(
        "test_parallel_no_streaming",
        "other texts for `n: 3`, in order",
        [completion("What is an LLM?", n=3, temperature=1.0, logprobs=0, seed=42)],
        lambda answers: (
            [each["index"] for each in answers[0].json["choices"]] == [0, 1, 2]
            and len({each["text"] for each in answers[0].json["choices"]}) == 3
        ),
    ),
    texts(
        "test_parallel_streaming",
        "likewise in one stream",
        [completion("What is an LLM?", n=3, temperature=1.0, seed=42, stream=True)],
        lambda answers: len({said_by(answers[0], index) for index in range(3)}) == reasons_of(answers[0]) == 3,
    ),
    texts(
        "test_parallel_streaming",
        "a chunk for each token, the last with the reason",
        [completion("What is an LLM?", n=3, stream=True)],
        lambda answers: all(
            0 < len(texts_of(answers[0], index)[:-1]) <= 8 and texts_of(answers[0], index)[-1] == ""
            for index in range(3)
        ),
        "a chunk has the tokens of a round, and the reason is in a chunk of its own",
    ),
    texts(
        "test_batch_completions",
        "a list of two texts, or of two lists of ids: two answers",
        [completion(["Hello, my name is"] * 2), completion([IDS] * 2), completion([IDS] * 2, stream=True)],
        lambda answers: (
            all(len({each["text"] for each in answer.json["choices"]}) == 1 for answer in answers[:2])
            and [len(answer.json["choices"]) for answer in answers[:2]] == [2, 2]
            and said_by(answers[2], 0) == said_by(answers[2], 1) != ""
        ),
    ),
    texts(
        "test_batch_completions",
        "`use_beam_search` with `n: 2`: two texts for each prompt",
        [completion(["Hello, my name is"] * 2, n=2, use_beam_search=True)],
        lambda answers: (
            len(answers[0].json["choices"]) == 4 and "use_beam_search" in answers[0].headers["x-outrider-ignored"]
        ),
        f"there is no beam search: {IGNORED}",
    ),
    texts(
        "test_echo_logprob_completion",
        "the prompt with its log-probabilities in front of the text",
        [completion(prompt, max_tokens=5, echo=True, logprobs=1) for prompt in ("Hello, my name is", IDS)],
        lambda answers: (
            answers[0].text.startswith("Hello, my name is")
            and all(good_echo(logprobs_of(answer)) for answer in answers)
        ),
    ),
    prompts(
        "test_out_of_vocab_token_ids",
        "ids beyond the vocabulary are refused",
        [completion([999_999])],
        refused(400, "999999"),
    ),
    empty("test_empty_prompt_list_rejected", "an empty list is refused", [completion([])], refused(400)),
]

# --- /v1/responses ----------------------------------------------------------------------------------


def response(**fields: Any) -> Asked:
    return Asked(RESPONSES, {"input": "Hello!", "max_output_tokens": 8, **fields})


def after(what: str = "Go on.", **fields: Any) -> Any:
    return lambda before: {
        "input": what,
        "max_output_tokens": 8,
        "previous_response_id": before[0].json["id"],
        **fields,
    }


def text_of(answer: Exchange) -> str:
    text: str = answer.json["output"][-1]["content"][0]["text"]
    return text


EVENT_SCHEMA = {
    "type": "object",
    "properties": {
        "event_name": {"type": "string", "maxLength": 9},
        "people": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["event_name", "people"],
    "additionalProperties": False,
}
AS_EVENT = {"format": {"type": "json_schema", "name": "calendar_event", "schema": EVENT_SCHEMA, "strict": True}}
FUNCTIONS = [{"type": "function", **WEATHER}, {"type": "function", **FORECAST}]
OPENED_BY = {
    "response.output_item.done": "response.output_item.added",
    "response.output_text.done": "response.output_text.delta",
    "response.content_part.done": "response.content_part.added",
    "response.reasoning_text.done": "response.reasoning_text.delta",
    "response.function_call_arguments.done": "response.function_call_arguments.delta",
}


def closes_what_it_opens(answers: Sequence[Exchange]) -> bool:
    """Whether events are nested, each "done" closing what was opened last."""
    kinds = [event["type"] for event in answers[0].named_events]
    opened: list[str] = []
    for kind in kinds:
        if kind.endswith(".done"):
            if opened.pop() != OPENED_BY[kind]:
                return False
        elif kind.endswith(".added") or (kind.endswith(".delta") and opened[-1] != kind):
            opened.append(kind)
    return not opened and kinds[0] == "response.created" and "response.function_call_arguments.done" in kinds


def function_calls(answer: Exchange) -> list[Any]:
    return [item for item in answer.json["output"] if item["type"] == "function_call"]


MUST_CALL = {
    **DRAWN,
    "tools": FUNCTIONS,
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_output_tokens": 300,
}

RESPONSES_CASES = [
    responses(
        "test_simple_input, test_instructions, test_chat_with_input_type",
        "input as a text and in parts, and `instructions`",
        [
            response(),
            response(instructions="Finish with QED."),
            response(input=[user([{"type": "input_text", "text": "Hello!"}])]),
        ],
        lambda answers: all(text_of(answer) for answer in answers) and text_of(answers[0]) == text_of(answers[2]),
    ),
    responses(
        "test_chat",
        "input of several turns",
        [response(input=[*HELLO, {"role": "assistant", "content": "15. QED."}, user("Multiply it by 2.")])],
        lambda answers: text_of(answers[0]) != "",
    ),
    responses(
        "test_streaming",
        "the first event and the last",
        [response(stream=True)],
        lambda answers: (
            [answers[0].named_events[at]["type"] for at in (0, -1)] == ["response.created", "response.incomplete"]
        ),
    ),
    stateful(
        "test_store",
        "a response can be read, unless `store` is false",
        [
            response(),
            Asked(lambda before: f"{RESPONSES}/{before[0].json['id']}"),
            response(store=False),
            Asked(lambda before: f"{RESPONSES}/{before[2].json['id']}"),
        ],
        lambda answers: answers[1].json == answers[0].json and [answer.status for answer in answers[2:]] == [200, 404],
    ),
    stateful(
        "test_background",
        "`background` answers at once",
        [response(background=True)],
        refused(400, "background"),
        "not supported: an answer is worked on while its client waits",
    ),
    stateful(
        "test_previous_response_id, test_two_responses_with_same_prev_id",
        "two responses continue the same one",
        [response(), Asked(RESPONSES, after()), Asked(RESPONSES, after()), Asked(RESPONSES, after("Stop."))],
        lambda answers: (
            text_of(answers[1]) == text_of(answers[2])
            and answers[1].json["usage"]["input_tokens"] > answers[0].json["usage"]["input_tokens"]
            and all(answer.json["previous_response_id"] == answers[0].json["id"] for answer in answers[1:])
        ),
    ),
    structured(
        "test_structured_output",
        "matches the schema",
        [response(text=AS_EVENT, max_output_tokens=200)],
        lambda answers: jsonschema.validate(json.loads(text_of(answers[0])), EVENT_SCHEMA) is None,
    ),
    functions(
        "test_function_tool_use",
        "`required`: a call that matches its schema",
        [response(**MUST_CALL)],
        lambda answers: (
            [checked_call(call["name"], call["arguments"]) in SCHEMAS for call in function_calls(answers[0])] == [True]
        ),
    ),
    functions(
        "test_max_tokens_with_tool_choice_required",
        "too few tokens for a call are none",
        [response(**{**MUST_CALL, "max_output_tokens": 1})],
        lambda answers: (
            not function_calls(answers[0]) and answers[0].json["incomplete_details"] == {"reason": "max_output_tokens"}
        ),
    ),
    functions(
        "test_named_tool_use",
        "a named tool, and its result",
        [
            response(**{**MUST_CALL, "tool_choice": {"type": "function", "name": "get_forecast"}}),
            Asked(
                RESPONSES,
                lambda before: {
                    "input": [
                        user("Hello!"),
                        *before[0].json["output"],
                        {
                            "type": "function_call_output",
                            "call_id": function_calls(before[0])[0]["call_id"],
                            "output": "20°C",
                        },
                    ],
                    "max_output_tokens": 8,
                },
            ),
        ],
        lambda answers: (
            [call["name"] for call in function_calls(answers[0])] == ["get_forecast"] and text_of(answers[1]) != ""
        ),
    ),
    functions(
        "test_function_calling_with_streaming_types",
        "each event of an end closes what was opened last",
        [response(**MUST_CALL, stream=True)],
        closes_what_it_opens,
    ),
]

# --- /v1/messages -----------------------------------------------------------------------------------


def message(**fields: Any) -> Asked:
    return Asked(MESSAGES, {"max_tokens": 8, "messages": [user("how are you!")], **fields})


MESSAGE_TOOL = {"name": "get_current_weather", "description": "weather", "input_schema": WEATHER_SCHEMA}
ANY_TOOL = {**DRAWN, "tools": [MESSAGE_TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}

MESSAGE_CASES = [
    messages(
        "test_anthropic_tool_call",
        "a call of a tool, streamed and not (here it must be called)",
        [message(**ANY_TOOL, max_tokens=300), message(**ANY_TOOL, max_tokens=300, stream=True)],
        lambda answers: (
            answers[0].json["stop_reason"] == "tool_use"
            and [event["delta"]["stop_reason"] for event in answers[1].named_events if event["type"] == "message_delta"]
            == ["tool_use"]
        ),
    )
]

CASES = [*CHATS, *CALLING, *COMPLETIONS, *RESPONSES_CASES, *MESSAGE_CASES]
