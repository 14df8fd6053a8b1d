"""A last message of the assistant's, which the answer continues, in every API."""

from typing import Any

from asgi import CHAT, COUNT_TOKENS, MESSAGES, RESPONSES, Letters, Served, looping, on_server
from assembled import text_of, text_of_response
from sweeps import sweep

HELLO: dict[str, Any] = {"role": "user", "content": "hello"}
BEGUN: dict[str, Any] = {"role": "assistant", "content": "well, yes"}
CALL = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLING: dict[str, Any] = {**BEGUN, "tool_calls": [CALL]}
GOES_ON, NO_PROMPT = {"continue_final_message": True}, {"add_generation_prompt": False}
PARTS = [{"type": "text", "text": "well, yes"}]
CONTINUED, ANSWERED = "user:hello.assistant:well, yes", "user:hello.assistant:well, yes.assistant:"


async def prompt_of(server: Served, **chat: Any) -> str:
    """The prompt that a chat is."""
    answer = await server.ask("/v1/tokenize", chat)
    assert answer.status == 200, answer.body
    return Letters().decode(answer.json["tokens"])


@sweep("stream", [False, True])
@sweep("path", [CHAT, MESSAGES, RESPONSES])
@on_server(looping)
async def test_the_answer_goes_on_where_the_message_ends(server, path, stream):
    expected = await server.simulation.runtime.generate(server.tokenizer.encode(CONTINUED), max_tokens=9)
    asked = {"messages": [HELLO, BEGUN], "input": [HELLO, BEGUN], "max_tokens": 9, "max_output_tokens": 9}
    answer = await server.ask(path, {**asked, "stream": stream})
    # Without what it continues, which the client has.
    assert text_of(answer) == expected.text
    assert server.tokenizer.seen[-1] == [HELLO, {**BEGUN, "content": "answerone"}]  # a mark in place of the text


@on_server()
@sweep(
    ("last", "fields", "prompt"),
    [
        *((BEGUN, fields, CONTINUED) for fields in ({}, GOES_ON, {**GOES_ON, **NO_PROMPT}, NO_PROMPT)),
        *(({**BEGUN, **more}, {}, CONTINUED) for more in ({"content": PARTS}, {"prefix": True})),
        ({**BEGUN, "content": ""}, {}, "user:hello.assistant:"),
        # As it is with vLLM, and as llama.cpp does where it is told to.
        *((BEGUN, fields, ANSWERED) for fields in ({"continue_final_message": False}, {"add_generation_prompt": True})),
        (BEGUN, {"continue_final_message": False, **NO_PROMPT}, CONTINUED + "."),
        # A call is complete.
        (CALLING, {}, ANSWERED),
        (HELLO, {}, "user:hello.user:hello.assistant:"),
        (HELLO, NO_PROMPT, "user:hello.user:hello."),
    ],
)
async def test_a_request_says_whether_a_new_message_begins(server, last, fields, prompt):
    assert await prompt_of(server, messages=[HELLO, last], **fields) == prompt
    answer = await server.ask(CHAT, {"messages": [HELLO, last], **fields, "max_tokens": 1})
    assert (answer.status, answer.headers.get("x-outrider-ignored")) == (200, None)
    assert answer.json["usage"]["prompt_tokens"] == len(prompt)


@on_server()
@sweep("content", ["well, ", [{"type": "text", "text": "well,\n"}]])
async def test_the_beginning_of_a_message_ends_with_no_white_space_in_anthropics_api(server, content):
    asked = {"messages": [HELLO, {"role": "assistant", "content": content}], "max_tokens": 3}
    answer = await server.ask(MESSAGES, asked)
    assert answer.status == 400
    assert "final assistant content cannot end with trailing whitespace" in answer.json["error"]["message"]
    assert (await server.ask(COUNT_TOKENS, asked)).status == 200
    # In the middle, and in other APIs, it may.
    asked["messages"].append(HELLO)
    assert (await server.ask(MESSAGES, asked)).status == 200


@on_server(looping)
async def test_a_response_that_continues_a_message_is_kept_as_one_message_with_it(server):
    first = (await server.ask(RESPONSES, {"input": [HELLO, BEGUN], "max_output_tokens": 5})).json
    asked = {"input": [], "previous_response_id": first["id"], "max_output_tokens": 5}
    second = (await server.ask(RESPONSES, asked)).json
    said = "well, yes" + text_of_response(first) + text_of_response(second)
    asked = {"input": [HELLO], "previous_response_id": second["id"], "max_output_tokens": 1}
    assert (await server.ask(RESPONSES, asked)).status == 200
    assert server.tokenizer.seen[-1] == [HELLO, {"role": "assistant", "content": said}, HELLO]


@on_server()
async def test_a_call_at_the_end_is_not_continued_in_anthropics_api(server):
    call = {"type": "tool_use", "id": "toolu_0", "name": "f", "input": {}}
    content = [{"type": "text", "text": "well, "}, call]
    asked = {"messages": [HELLO, {"role": "assistant", "content": content}], "max_tokens": 1}
    answer = await server.ask(MESSAGES, asked)
    assert answer.json["usage"]["input_tokens"] == len(ANSWERED.replace("yes", ""))
