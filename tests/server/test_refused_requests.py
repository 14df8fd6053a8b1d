"""Requests that are refused before any model works on them: what is wrong is named, with its bound and a remedy."""

from typing import Any

from asgi import BOTH, CHAT, COMPLETIONS, DEF, FIM, HELLO, MESSAGES, MODEL, RESPONSES, on_server
from sweeps import sweep
from tool_letters import ASKED, TOOLS, ToolLetters

from runtime.server.limits import Limits

# --- in both of OpenAI's older APIs ---------------------------------------------------------------

FIELDS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"draft_temperature": -1}, "draft_temperature", "draft_temperature must be at least 0, got -1"),
    ({"temperature": -1}, "temperature", "temperature must be at least 0, got -1"),
    ({"temperature": "hot"}, "temperature", 'temperature must be a number, got "hot"'),
    ({"temperature": True}, "temperature", "must be a number, got true"),
    ({"top_p": 1.5}, "top_p", "top_p must be at most 1.0, got 1.5"),
    ({"max_tokens": 3.5}, "max_tokens", "max_tokens must be a whole number, got 3.5"),
    ({"seed": 2**64}, "seed", f"seed must be at most {2**64 - 1}, got {2**64}"),
    ({"seed": -2}, "seed", "seed must be at least -1, got -2"),
    ({"max_tokens": -2}, "max_tokens", "max_tokens must be at least -1, got -2"),
    ({"min_tokens": -1}, "min_tokens", "min_tokens must be at least 0, got -1"),
    ({"stop": ["a", "b" * 1001]}, "stop.1", "stop.1 must be text of at most 1000 characters"),
    ({"stop": 3}, "stop", "stop must be text or a list, got 3"),
    ({"stop": ["x"] * 17}, "stop", "stop must be a list of at most 16"),
    ({"logit_bias": {"": 1}}, "logit_bias.", "must be text of at least 1 character"),
    ({"logit_bias": {"64": 1}}, None, "outside the target's vocabulary of 64 ids"),
    ({"stop_tokens": [64]}, None, "outside the target's vocabulary of 64 ids"),
    ({"top_k": 65}, None, "top_k must be at most the target's vocabulary of 64 ids"),
    ({"repetition_penalty": 1e-300}, None, "repetition_penalty must be 0 for no penalty, or at least 0.01"),
    ({"n": 17}, "n", "n must be at most 16, got 17"),
    ({"n": 0}, "n", "n must be at least 1, got 0"),
    ({"n": True}, "n", "n must be a whole number, got true"),
    ({"stream": "yes"}, "stream", 'stream must be true or false, got "yes"'),
    ({"stream_options": {}}, "stream_options", "need stream: true"),
    ({"lookahead": "far"}, "lookahead", "lookahead must be a whole number or 'auto', got \"far\""),
    ({"logit_bias": {str(i): 1 for i in range(10_001)}}, "logit_bias", "must be an object of at most 10000 entries"),
    ({"logit_bias": {str(i): "a" for i in range(1001)}}, None, "errors, too many to look at"),
    ({"response_format": {"type": "xml"}}, "response_format", "whose type is one of 'text', 'json_object'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing; add it"),
]

# --- in one of the APIs ---------------------------------------------------------------------------

WATCHED = {"stream": True, "stream_options": {"include_speculation": True}}
SCORED = {"prompt": ["abc", "a"], "max_tokens": 0, "echo": True, "logprobs": 1}
TOO_LONG = "the most is 1048576; ask for fewer answers"
NO_MIDDLE = f"the tokenizer of '{MODEL}' has no fill-in-the-middle tokens"
OF_COMPLETIONS: list[tuple[dict[str, Any], str | None, str]] = [
    ({}, "prompt", "prompt is missing"),
    ({"prompt": ""}, "prompt", "the prompt is empty"),
    ({"prompt": []}, "prompt", "the prompt is empty"),
    ({"prompt": ["a", 1]}, "prompt.0", "or a list of up to 128 texts or of up to 128 lists"),
    ({"prompt": [64]}, "prompt", "outside the target's vocabulary"),
    ({"prompt": [-1]}, "prompt.0", "lists of token ids, got -1"),
    ({"prompt": ["a", ""]}, "prompt", "prompt[1]: the prompt is empty"),
    ({"prompt": [[1], [64]]}, "prompt", "prompt[1]: prompt token 64 is outside"),
    ({"prompt": ["a"] * 9, "n": 16}, "prompt", "9 prompts with 16 texts each are too many"),
    ({"prompt": ["abcd"] * 8, "n": 16, "logprobs": 5, "max_tokens": 1366}, "max_tokens", TOO_LONG),
    ({"prompt": "abc" * 20_000, "n": 16, "logprobs": 1, "max_tokens": 1, "echo": True}, "max_tokens", TOO_LONG),
    ({"prompt": "abc" * 20_000, "prompt_logprobs": 20, "max_tokens": 1}, "max_tokens", TOO_LONG),
    ({**DEF, "echo": 1}, "echo", "echo must be true or false, got 1"),
    ({**DEF, "logprobs": 21}, "logprobs", "at most 20, got 21"),
    ({**SCORED, "stream": True, "prompt_logprobs": 3}, "prompt_logprobs", "prompt_logprobs are not for streams"),
    ({**SCORED, "prompt_logprobs": -1}, "prompt_logprobs", ""),
    ({**DEF, "max_tokens": 0, "echo": True, **WATCHED}, "stream_options", "max_tokens: 0 asks for none"),
    ({**DEF, "suffix": 1}, "suffix", "suffix must be text, got 1"),
    ({**DEF, "suffix": "b"}, "suffix", NO_MIDDLE),
    ({**DEF, "suffix": "b", "echo": True}, "echo", "this one has a suffix"),
    ({"prompt": [1], "suffix": "b"}, "suffix", "a suffix needs prompts that are texts"),
]


def calling(*names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {**ASKED, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}}


OTHER_TOOLS = "the allowed tools must be some of the tools ('weather', 'clock'), got ['x']"
BEGUN = [*HELLO["messages"], {"role": "assistant", "content": "yes"}]
CALL = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLING = [*HELLO["messages"], {"role": "assistant", "content": "yes", "tool_calls": [CALL]}]
GBNF = 'root ::= "a"'
OF_CHATS: list[tuple[dict[str, Any], str | None, str]] = [
    ({}, "messages", "messages is missing"),
    ({"messages": []}, "messages", "messages must be a list of at least 1, got []"),
    ({"messages": [{"role": "tools", "content": ""}]}, "messages.0.role", "'tool' or 'function'"),
    ({**HELLO, "top_logprobs": 21}, "top_logprobs", "at most 20"),
    ({**HELLO, "n": 16, "logprobs": True, "top_logprobs": 20, "max_tokens": 3121}, "max_tokens", TOO_LONG),
    ({**HELLO, "n": 2, **WATCHED}, "stream_options", "include_speculation is for one answer"),
    ({**HELLO, "max_completion_tokens": -2}, "max_completion_tokens", "at least -1"),
    ({**HELLO, "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "cannot have chat_template"),
    ({**HELLO, "prediction": {"type": "content"}}, "prediction.content", "prediction"),
    ({**HELLO, "prediction": {"type": "other", "content": "a"}}, "prediction.type", "prediction"),
    ({**HELLO, "prediction": "a"}, "prediction", "prediction"),
    ({**HELLO, "structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "leave one out"),
    (
        {**HELLO, "response_format": {"type": "json_object"}, "structured_outputs": {"grammar": GBNF}},
        "structured_outputs",
        "both response_format and structured_outputs",
    ),
    ({**HELLO, "structured_outputs": {"choice": []}}, "structured_outputs.choice", "must be a list of at least 1"),
    ({**HELLO, "structured_outputs": {"choice": [3]}}, "structured_outputs.choice.0", "must be text, got 3"),
    ({**HELLO, "structured_outputs": {"regex": 3}}, "structured_outputs.regex", "must be text, got 3"),
    ({**HELLO, "tools": [{"type": "function"}]}, "tools", "tools[0] has no function"),
    ({**HELLO, "tool_choice": "required"}, "tools", "tool_choice 'required' needs tools"),
    ({**ASKED, "tools": [{"function": {}}]}, "tools", "tools[0] must have a name of 1 to 128 letters"),
    ({**ASKED, "tools": [{"function": {"name": "a b"}}]}, "tools", "got 'a b'"),
    ({**ASKED, "tools": [TOOLS[0], TOOLS[0]]}, "tools", "two tools have the name 'weather'"),
    ({**ASKED, "tools": [{"function": {"name": "f", "parameters": 5}}]}, "tools", "parameters must be a JSON schema"),
    ({**ASKED, "tools": [], "tool_choice": "required"}, "tools", "tool_choice 'required' needs tools"),
    ({**ASKED, "tool_choice": "some"}, "tools", 'must be "none", "auto", "required" or the name of a tool'),
    ({**ASKED, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tools", "got 'x'"),
    ({**ASKED, "tool_choice": {"type": "function"}}, "tools", "tool_choice must be"),
    ({**ASKED, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice", "tool_choice must be"),
    (calling("x"), "tools", OTHER_TOOLS),
    (calling(), "tools", "got []"),
]
NOT_STORED = "is not stored, or no longer"
OF_RESPONSES: list[tuple[dict[str, Any], str | None, str]] = [
    ({"max_output_tokens": -2}, "max_output_tokens", "max_output_tokens must be at least -1, got -2"),
    ({"input": []}, "input", "input must have at least one message"),
    ({"input": [{"role": "user"}]}, "input.0.content", "input.0.content is missing"),
    ({"input": [{"type": "item_reference", "id": "msg_0"}]}, "input", NOT_STORED),
    ({"input": [{"type": None, "id": "msg_0"}]}, "input", NOT_STORED),
    ({"input": [{"id": "msg_0"}]}, "input", NOT_STORED),
    ({"previous_response_id": "resp_0"}, "previous_response_id", NOT_STORED),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "text.format.schema is missing"),
    ({"background": True}, "background", "background is not supported"),
    ({"top_logprobs": 21}, "top_logprobs", "top_logprobs must be at most 20, got 21"),
    ({"metadata": {"a": [float("inf")]}}, "metadata", "metadata must be JSON"),
    ({"tools": [{"type": "x", "parameters": {"a": float("nan")}}]}, "tools", "tools must be JSON"),
    ({"conversation": "conv_1"}, "conversation", "conversation is not supported"),
]
OF_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": -2}, "max_tokens must be at least -1, got -2"),
    ({"temperature": -1}, "temperature must be at least 0, got -1"),
    ({"messages": []}, "messages must be a list of at least 1"),
    ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "0.content.0 must be an object with a type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text is missing"),
    ({"messages": [{"role": "tool", "content": ""}]}, "messages.0.role must be 'user', 'assistant' or 'system'"),
    ({"seed": -7}, "seed must be at least"),
    ({"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
]
CONTINUED: list[tuple[dict[str, Any], str]] = [
    ({"messages": BEGUN, "add_generation_prompt": True}, "cannot go together with add_generation_prompt: true"),
    (HELLO, "needs a last message of the assistant's, got one of 'user'"),
    ({"messages": CALLING}, "cannot continue a message with calls"),
]
REFUSED: list[tuple[str, Any, str | None, str]] = [
    *((COMPLETIONS, {**DEF, **fields}, param, said) for fields, param, said in FIELDS),
    *((CHAT, {**HELLO, **fields}, param, said) for fields, param, said in FIELDS),
    *((COMPLETIONS, *row) for row in OF_COMPLETIONS),
    (FIM, DEF, "suffix", NO_MIDDLE),
    *((CHAT, *row) for row in OF_CHATS),
    *((RESPONSES, {"input": "hello", **fields}, param, said) for fields, param, said in OF_RESPONSES),
    *((MESSAGES, {**HELLO, "max_tokens": 20, **fields}, None, said) for fields, said in OF_MESSAGES),
    *(
        (path, {"continue_final_message": True, **fields}, "continue_final_message", said)
        for path in (CHAT, "/v1/tokenize")
        for fields, said in CONTINUED
    ),
    ("/tokenize", {}, "prompt", ""),
    ("/tokenize", {"messages": []}, "messages", ""),
    ("/tokenize", {**HELLO, "prompt": "b"}, "prompt", ""),
    ("/tokenize", {**HELLO, "tools": [{}]}, "tools", ""),
    ("/detokenize", {"tokens": [64]}, "tokens", ""),
    ("/detokenize", {"tokens": [2**40]}, "tokens", ""),
    ("/detokenize", {"tokens": [-1]}, "tokens.0", ""),
    ("/detokenize", {}, "tokens", ""),
    # Bodies that are no objects of JSON.
    (COMPLETIONS, b"", None, "EOF"),
    (COMPLETIONS, b"{", None, "EOF"),
    (COMPLETIONS, b"[]", None, "must be an object"),
    (COMPLETIONS, b"\xff", None, "not JSON"),
    (COMPLETIONS, b'"a"', None, "must be an object"),
    (COMPLETIONS, b"[" * 100_000, None, "not JSON"),
    (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', "temperature", "finite"),
]


class Plain(ToolLetters):
    """Has no fill-in-the-middle tokens."""

    def get_vocab(self) -> dict[str, int]:
        return {letter: i for i, letter in enumerate(self.ALPHABET)}


@on_server(tokenizer=Plain())
@sweep(("path", "body", "param", "said"), REFUSED)
async def test_what_is_wrong_is_named_with_its_bound(server, path, body, param, said):
    answer = await server.ask(path, body)
    assert answer.status == 400 or (answer.status, said) == (404, NOT_STORED)
    if path == MESSAGES:
        assert (set(answer.json), answer.json["type"]) == ({"type", "error"}, "error")
        error = answer.json["error"]
    else:
        error = answer.fault
        assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert said in error["message"]
    assert len(error["message"]) < 400
    assert (server.simulation.runtime.num_streams, server.simulation.target_worker.handed) == (0, [])


STRICT: list[tuple[dict[str, Any], str, str]] = [
    ({"temprature": 1}, "temprature", "no field \"temprature\" here; did you mean 'temperature'?"),
    ({"max_new_tokens": 1}, "max_new_tokens", "did you mean 'max_tokens'?"),
    ({"look_ahead": 1}, "look_ahead", "did you mean 'lookahead'?"),
    ({"zzz": 1}, "zzz", "leave it out"),
    ({"web_search_options": {}}, "web_search_options", "the server searches nothing; leave it out"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", 'no field "x" here'),
    ({"response_format": {"type": "text", "x": 1}}, "response_format.x", "leave it out"),
    ({"x" * 5000: 1}, "x" * 100, "…"),
    ({"max_tokens": 21}, "max_tokens", "at most 20 here, got 21"),
    ({"model": "gpt"}, "model", f"no model \"gpt\" here; use '{MODEL}'"),
]


@on_server(is_strict=True, limits=Limits(max_tokens_limit=20))
@BOTH
async def test_a_strict_server_refuses_what_others_ignore(server, path, body):
    for fields, param, said in STRICT:
        answer = await server.ask(path, {**body, **fields})
        status, code = (404, "model_not_found") if param == "model" else (400, None)
        assert (answer.status, answer.fault["param"], answer.fault["code"]) == (status, param, code)
        assert said in answer.fault["message"]
    assert server.simulation.target_worker.handed == []
