"""Answers that events add up to, as the clients of each API assemble them."""

import functools
import json
from typing import Any

from asgi import CHAT, MESSAGES, Exchange
from pydantic import TypeAdapter


@functools.cache
def adapter(type: Any) -> TypeAdapter[Any]:
    """What validates values of a type; pydantic takes a while to make one."""
    return TypeAdapter(type)


def assembled_message(events: list[Any]) -> Any:
    """The message that events add up to, as Anthropic's clients assemble it; asserts the order of the events."""
    events = [event for event in events if event["type"] != "ping"]
    start, *body, delta, stop = events
    assert (start["type"], delta["type"], stop["type"]) == ("message_start", "message_delta", "message_stop")
    message = start["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    is_open, inputs = False, {}
    for event in body:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            is_open = True
            continue
        assert is_open
        assert event["index"] == len(message["content"]) - 1
        if event["type"] == "content_block_stop":
            is_open = False
            continue
        block = message["content"][-1]
        if block["type"] == "tool_use":
            # The input is complete where its text is JSON, as clients see it.
            inputs[event["index"]] = inputs.get(event["index"], "") + event["delta"]["partial_json"]
            continue
        field = event["delta"]["type"].removesuffix("_delta")
        assert event["delta"][field] or field == "signature"
        block[field] += event["delta"][field]
    assert not is_open
    for index, text in inputs.items():
        message["content"][index]["input"] = partial(text)
    return {**message, **delta["delta"], "usage": delta["usage"]}


def partial(text: str) -> Any:
    """A JSON object, or the text of one that was broken off."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def text_of_message(message: Any) -> str:
    return "".join(block["text"] for block in message["content"] if block["type"] == "text")


def assembled_response(events: list[Any]) -> Any:
    """The output that events add up to; asserts their order and numbers, and that each says what came before."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, in_progress, *body, last = events
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == in_progress["response"]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    output: list[Any] = []
    for event in body:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == len(output) - (kind != "output_item.added")
        if kind == "output_item.added":
            output.append(event["item"])
            continue
        item = output[-1]
        if kind == "output_item.done":
            assert item["status"] == "in_progress" != event["item"]["status"]
            item["status"] = event["item"]["status"]
            assert item == event["item"]
            continue
        assert event["item_id"] == item["id"]
        if kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
            continue
        if kind == "function_call_arguments.done":
            assert (item["name"], item["arguments"]) == (event["name"], event["arguments"])
            continue
        if kind == "custom_tool_call_input.delta":
            item["input"] += event["delta"]
            continue
        if kind == "custom_tool_call_input.done":
            assert item["input"] == event["input"]
            continue
        assert event["content_index"] == 0
        if kind == "content_part.added":
            item["content"].append(event["part"])
        elif kind.endswith(".delta"):
            assert event["delta"]
            item["content"][0]["text"] += event["delta"]
            if "logprobs" in event:
                item["content"][0]["logprobs"] += event["logprobs"]
        elif kind == "content_part.done":
            assert item["content"] == [event["part"]]
        else:
            assert item["content"][0]["text"] == event["text"]
            assert item["content"][0].get("logprobs") == event.get("logprobs")
    assert last["type"] == f"response.{last['response']['status']}"
    # A call that turned out malformed has no end, and is left out.
    assert last["response"]["output"] == [item for item in output if item["status"] != "in_progress"]
    return last["response"]


def text_of_response(response: Any) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def assembled_chat(events: list[Any]) -> Any:
    """The body that the chunks of a chat with one choice add up to, as clients assemble it."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    calls = message["tool_calls"]
    reason, usage = None, None
    for event in events:
        usage = event.get("usage", usage)
        for choice in event["choices"]:
            assert reason is None
            assert choice["delta"] or choice["finish_reason"]
            reason = choice["finish_reason"]
            for name in ("content", "reasoning_content"):
                if name in choice["delta"]:
                    message[name] = message.get(name, "") + choice["delta"][name]
            for call in choice["delta"].get("tool_calls", ()):
                if call["index"] == len(calls):
                    assert call["type"] == "function"
                    calls.append({"id": call["id"], "function": {**call["function"], "arguments": ""}})
                else:
                    assert call.keys() == {"index", "function"}
                    assert call["function"].keys() == {"arguments"}
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return {**events[0], "choices": [{"message": message, "finish_reason": reason}], "usage": usage}


def body_of(answer: Exchange) -> Any:
    """The body of an answer of any API of conversations, from one body or from events."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json
    if answer.scope["path"] == CHAT:
        return assembled_chat(answer.events)
    assemble = assembled_message if answer.scope["path"] == MESSAGES else assembled_response
    return assemble(answer.named_events)


def text_of(answer: Exchange) -> str:
    """What an answer of any API says, in one body or streamed."""
    match answer.scope["path"]:
        case "/v1/messages":
            return text_of_message(body_of(answer))
        case "/v1/responses":
            return text_of_response(body_of(answer))
        case _:
            return answer.text
