"""Responses of `/v1/responses`: items of output, each added, continued and done by numbered events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from protocol.statistics import Statistics
from runtime.generation.tokens import Token
from runtime.generation.tool_calls.events import Delta, ToolCall
from runtime.server.answers.api import (
    BegunAnswer,
    Serializer,
    ServerSentEvent,
    TokenLogprob,
    end_reason,
    event_json,
    token_logprobs,
)
from runtime.server.errors import ErrorResponse
from runtime.server.responses.requests import GIVEN_BACK, ITEM, OfferedTool, ParsedRequest, messages_of
from runtime.server.responses.store import ResponseStore, StoredResponse

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(TypedDict):
    """Text of the answer; `logprobs` is empty unless the request includes them."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class ReasoningContent(TypedDict):
    """Text of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


class _Item(TypedDict):
    id: str
    status: ItemStatus


class OutputMessage(_Item):
    """The answer."""

    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(_Item):
    """The reasoning before the answer."""

    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningContent]


class OutputFunctionCall(_Item):
    """A call of a function."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: NotRequired[str]
    arguments: str


class OutputCustomCall(_Item):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: NotRequired[str]
    input: str


class ShellAction(TypedDict):
    """A command for the shell on the client's machine."""

    type: Literal["exec"]
    command: list[str]
    env: dict[str, str]
    working_directory: NotRequired[str | None]
    timeout_ms: NotRequired[int | None]
    user: NotRequired[str | None]


class OutputShellCall(_Item):
    """A call of the shell on the client's machine."""

    type: Literal["local_shell_call"]
    call_id: str
    action: ShellAction


OutputItem = OutputMessage | OutputReasoning | OutputFunctionCall | OutputCustomCall | OutputShellCall


class InputDetails(TypedDict):
    """Number of prompt tokens that were already cached."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(TypedDict):
    """Number of answer tokens that are reasoning."""

    reasoning_tokens: int


class ResponsesUsage(TypedDict):
    """Token counts of a request and its answer."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(TypedDict):
    """Why the answer was cut off."""

    reason: Literal["max_output_tokens", "cancelled"]


class ResponseFailure(TypedDict):
    """Why the generation failed."""

    code: str
    message: str


class ResponseBody(TypedDict):
    """A response of `/v1/responses`, with settings of the request as they were sent; `usage` comes at the end."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: ResponseStatus
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: NotRequired[ResponsesUsage]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    background: Literal[False]
    user: NotRequired[str]


class DeletedResponse(TypedDict):
    """A response that is no longer stored."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseSerializer(Serializer):
    """Serializer for `/v1/responses`, which also keeps the response for later ones.

    Each method that yields events changes the output, and the events say how.
    """

    def __init__(self, parsed: ParsedRequest, store: ResponseStore, answer: BegunAnswer) -> None:
        super().__init__(answer)
        self.id = f"resp_{secrets.token_hex(24)}"
        self._parsed = parsed
        self._store = store
        self._num_events = 0
        self._encodes_events = True
        self._index = -1  # of the last item that events have begun
        self._is_open = False
        self._num_logprobs = parsed.generation.num_logprobs
        # Kept only for log-probabilities: tokens whose text is withheld, and those of the call that is being written.
        self._withheld: list[Token] = []
        self._of_call: list[Token] = []
        self._called: OfferedTool | None = None  # the tool of the current call, if it is one of the request's
        self._response = _begun(self.id, parsed, answer)

    def whole(self, tokens: Sequence[Token], statistics: Statistics) -> ResponseBody:
        self._encodes_events = False
        for _ in (*self._added(tokens), *self._ended(statistics)):
            pass
        return self._response

    def first_events(self, statistics: Statistics) -> Sequence[ServerSentEvent]:
        return [self._whole_event("response.created"), self._whole_event("response.in_progress")]

    def events(self, tokens: Sequence[Token], statistics: Statistics) -> Sequence[ServerSentEvent]:
        return list(self._added(tokens))

    def last_events(self, statistics: Statistics) -> Sequence[ServerSentEvent]:
        events = list(self._ended(statistics))
        return [*events, self._whole_event(f"response.{self._response['status']}")]

    def error_events(self, error: ErrorResponse) -> Sequence[ServerSentEvent]:
        self._response["status"] = "failed"
        self._response["error"] = {"code": "server_error", "message": error.detail["message"]}
        return [self._whole_event("response.failed")]

    # --- the output -------------------------------------------------------------------------------

    def _added(self, tokens: Sequence[Token]) -> Iterator[ServerSentEvent]:
        # For log-probabilities, one token at a time, to know which tokens make up a text.
        for some in [tokens] if self._num_logprobs is None else [[token] for token in tokens]:
            if self._num_logprobs is not None:
                # Tokens of the reasoning, its tags included, are never part of the text.
                self._withheld += [token for token in some if not self._answer.splitter.is_reasoning(token)]
            for part in self._parts(some):
                yield from self._add(part)

    def _add(self, part: Delta) -> Iterator[ServerSentEvent]:
        match part:
            case Delta("content", text):
                yield from self._text("message", text)
            case Delta("reasoning", text):
                self._withheld.clear()
                yield from self._text("reasoning", text)
            case Delta("call_began", call=ToolCall(id, name)):
                self._of_call, self._withheld = self._withheld, []
                self._called = self._parsed.tools.by_name.get(name)
                if self._other_tool is None:
                    place = {"name": name} if self._called is None else self._called.place
                    yield from self._begin("fc", type="function_call", call_id=id, **place, arguments="")
            case Delta("call_arguments", text):
                self._of_call += self._withheld
                self._withheld.clear()
                if self._other_tool is None:
                    self._item["arguments"] += text
                    yield self._event("response.function_call_arguments.delta", **self._place, delta=text)
            case Delta("call_ended" | "call_broken" as kind, call=ToolCall() as call):
                self._withheld.clear()
                status: ItemStatus = "completed" if kind == "call_ended" else "incomplete"
                if (tool := self._other_tool) is not None:
                    yield from self._other_call(tool, call, status)
                else:
                    yield from self._done(status)
            case Delta("call_broken", given):
                if self._other_tool is None:
                    # Events cannot be taken back, but a client does not answer a call whose last event is missing.
                    self._is_open = False
                    self._output.pop()
                self._withheld = self._of_call + self._withheld
                yield from self._text("message", given)

    def _other_call(self, tool: OfferedTool, call: ToolCall, status: ItemStatus) -> Iterator[ServerSentEvent]:
        """A call of a tool that is no function, known only at its end: its arguments are no JSON in this API."""
        if (found := tool.item(call, is_whole=status == "completed")) is None:
            yield from self._text("message", json.dumps({"name": call.name, "arguments": call.arguments}))
            return
        prefix, fields = found
        text = fields.get("input")
        yield from self._begin(prefix, **(fields if text is None else {**fields, "input": ""}))
        if text is not None and status == "completed":
            self._item["input"] = text
            yield self._event("response.custom_tool_call_input.delta", **self._place, delta=text)
            yield self._event("response.custom_tool_call_input.done", **self._place, input=text)
        yield from self._done(status)

    def _ended(self, statistics: Statistics) -> Iterator[ServerSentEvent]:
        """Complete the response, and keep it if it is to be stored."""
        assert self._last_token is not None, "the last token of a stream has a finish reason"
        reason = end_reason(self._last_token)
        is_cut = reason != "stop"
        if not self._output or (self._item["type"] == "reasoning" and not is_cut):
            # Clients look for a message in every answer, even if it is empty.
            yield from self._begin_text("message")
        yield from self._done("incomplete" if is_cut else "completed")
        response = self._response
        response["status"] = "incomplete" if is_cut else "completed"
        if is_cut:
            response["incomplete_details"] = {"reason": "cancelled" if reason == "cancelled" else "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        response["usage"] = self._usage(statistics)
        if response["store"]:
            self._keep()

    def _text(self, item_type: Literal["message", "reasoning"], text: str) -> Iterator[ServerSentEvent]:
        if not self._is_open or self._item["type"] != item_type:
            yield from self._begin_text(item_type)
        content = self._item["content"][0]
        content["text"] += text
        added = {}
        if item_type == "message":
            added["logprobs"] = token_logprobs(self._withheld, self._answer.tokenizer, self._num_logprobs) or []
            self._withheld.clear()
            content["logprobs"] += added["logprobs"]
        yield self._event(f"response.{content['type']}.delta", **self._text_place, delta=text, **added)

    def _begin_text(self, item_type: Literal["message", "reasoning"]) -> Iterator[ServerSentEvent]:
        part: OutputText | ReasoningContent
        if item_type == "reasoning":
            part = {"type": "reasoning_text", "text": ""}
            yield from self._begin("rs", type="reasoning", summary=[], content=[])
        else:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield from self._begin("msg", type="message", role="assistant", content=[])
        self._item["content"].append(part)
        yield self._event("response.content_part.added", **self._text_place, part=part)

    def _begin(self, prefix: str, **fields: Any) -> Iterator[ServerSentEvent]:
        yield from self._done("completed")
        self._index += 1
        self._is_open = True
        item: Any = {"id": f"{prefix}_{secrets.token_hex(24)}", "status": "in_progress", **fields}
        self._output.append(item)
        yield self._event("response.output_item.added", output_index=self._index, item=item)

    def _done(self, status: ItemStatus) -> Iterator[ServerSentEvent]:
        if not self._is_open:
            return
        self._is_open = False
        item = self._item
        if item["type"] == "function_call" and status == "completed":
            called = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **self._place, **called)
        elif "content" in item:
            content = item["content"][0]
            whole = {name: content[name] for name in ("text", "logprobs") if name in content}
            yield self._event(f"response.{content['type']}.done", **self._text_place, **whole)
            yield self._event("response.content_part.done", **self._text_place, part=content)
        item["status"] = status
        yield self._event("response.output_item.done", output_index=self._index, item=item)

    @property
    def _other_tool(self) -> OfferedTool | None:
        """The tool of the current call, if it is no function."""
        return None if self._called is None or self._called.type == "function" else self._called

    @property
    def _output(self) -> list[OutputItem]:
        return self._response["output"]

    @property
    def _item(self) -> Any:
        return self._output[-1]

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item["id"], "output_index": self._index}

    @property
    def _text_place(self) -> dict[str, Any]:
        return {**self._place, "content_index": 0}

    # --- events, usage and storage ----------------------------------------------------------------

    def _event(self, type: str, **fields: Any) -> ServerSentEvent:
        event = {"type": type, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        # Encoded now, because items and the response keep growing.
        return ServerSentEvent(event_json(event) if self._encodes_events else "", type)

    def _whole_event(self, type: str) -> ServerSentEvent:
        return self._event(type, response=self._response)

    def _usage(self, statistics: Statistics) -> ResponsesUsage:
        return {
            "input_tokens": statistics.prompt_tokens,
            "input_tokens_details": {"cached_tokens": statistics.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": statistics.generated_tokens,
            "output_tokens_details": {"reasoning_tokens": self._answer.splitter.num_reasoning_tokens},
            "total_tokens": statistics.prompt_tokens + statistics.generated_tokens,
        }

    def _keep(self) -> None:
        items = {item["id"]: event_json(item).encode() for item in self._output}
        # Nobody answers a call that was cut off.
        whole = [item for item in self._output if "content" in item or item["status"] == "completed"]
        answer = messages_of(map(ITEM.validate_python, whole), self._parsed.tools)
        if (begun := self._parsed.begun) is not None:
            answer = answer or [{"content": ""}]
            answer[0] = {**begun, **answer[0], "content": begun["content"] + answer[0]["content"]}
        # The earlier messages are a JSON list already; the answer is appended without parsing it.
        before = [self._parsed.messages[1:-1]] if self._parsed.messages != b"[]" else []
        added = [json.dumps(message, ensure_ascii=False).encode() for message in answer]
        messages = b"[" + b", ".join(before + added) + b"]"
        self._store.put(self.id, StoredResponse(event_json(self._response).encode(), messages, items))


def _begun(id: str, parsed: ParsedRequest, answer: BegunAnswer) -> ResponseBody:
    request, settings = parsed.request, dict(answer.defaults)
    settings |= {name: value for name, value in request.given_settings().items() if value is not None}
    given = request.model_dump(mode="json", include=set(GIVEN_BACK), by_alias=True, exclude_none=True)
    begun: ResponseBody = {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": answer.model,
        "output": [],
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": given.get("reasoning", {}),
        "store": request.store is not False,
        "temperature": settings.get("temperature", 0.0),
        "text": {"format": {"type": "text"}} | given.get("text", {}),
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": given.get("tools", []),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": settings.get("top_p", 1.0),
        "truncation": "disabled",
        "background": False,
    }
    # Clients' schemas do not allow null for it.
    return begun if request.user is None else {**begun, "user": request.user}
