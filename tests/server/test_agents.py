"""What coding agents send: parts and tools of any type, headers in prompts, compressed bodies, halves of characters."""

import gzip
import json
import zlib
from typing import Any

import pytest
import trio
from asgi import CHAT, COUNT_TOKENS, HELLO, JSON, MESSAGES, RESPONSES, Served, on_server, watched_streams
from assembled import assembled_response
from sweeps import sweep
from tool_call_cases import call_format
from tool_letters import TOOLS, USER, on_calling_server

from runtime.generation.tokens import Token
from runtime.generation.tool_calls.answer_reader import AnswerReader
from runtime.generation.tool_calls.events import Delta, ToolCall
from runtime.server.answers.api import AnswerSplitter
from runtime.server.limits import Limits
from runtime.server.responses.requests import OfferedTools, ResponsesRequest

HEADER = "x-outrider-ignored"
SHORT = Limits(max_tokens=3)

# --- parts that cannot be read --------------------------------------------------------------------


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def text(said: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": said}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBOR"}}
URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBOR"}}
INPUT = {"type": "input_image", "image_url": "data:image/png;base64,iVBOR"}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBER"}}
FOUND = {"type": "search_result", "title": "T", "source": "url", "content": [text("found")]}
USED = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "shot", "input": {}}]}
SAID = {"role": "assistant", "content": "no"}
CALLED = {"type": "function_call", "call_id": "c", "name": "shot", "arguments": "{}"}


def said(*parts: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(parts)}


def result(*parts: Any) -> dict[str, Any]:
    return user({"type": "tool_result", "tool_use_id": "t", "content": list(parts)})


def output(*parts: Any, kind: str = "function_call_output") -> dict[str, Any]:
    return {"type": kind, "call_id": "c", "output": list(parts)}


# The conversation, the content of one of its messages as the template gets it, and what is named.
HISTORIES: list[tuple[str, list[Any], str, str | None]] = [
    # lmstudio-ai/localization #425, anthropics/claude-code #58330
    (MESSAGES, [HELLO["messages"][0], USED, result(text("taken"), IMAGE)], "taken\n[image omitted]", "image"),
    (MESSAGES, [user(text("see"), IMAGE, text("it")), SAID, user(text("on"))], "see\n[image omitted]\nit", "image"),
    (MESSAGES, [USED, user(*result(text("a"))["content"], PDF)], "[document omitted]", ""),
    (MESSAGES, [user(FOUND)], "T\nurl\nfound", None),
    (MESSAGES, [user(text("see"), FOUND, text(""), FOUND, text("which?"), text(" a"))],
     "see\nT\nurl\nfound\nT\nurl\nfound\nwhich? a", None),
    (MESSAGES, [said({"type": "server_tool_use", "id": "s", "name": "x", "input": {}}), user(text("a"))],
     "[server_tool_use omitted]", "server_tool_use"),
    # jundot/omlx #3754
    (MESSAGES, [user({"type": "tool_addition", "tool": {}}, text("a"))], "[tool_addition omitted]\na", ""),
    (MESSAGES, [said({"type": "redacted_thinking", "data": "x"}, text("b")), user(text("a"))], "b", None),
    (CHAT, [user(text("see"), URL), SAID, user(text("on"))], "see\n[image omitted]", "image_url"),
    (CHAT, [user({"type": "input_audio", "input_audio": {"data": ""}}), SAID, user(text("on"))], "[audio omitted]", ""),
    (CHAT, [{"role": "tool", "tool_call_id": "t", "content": [URL]}, user(text("on"))], "[image omitted]", "image_url"),
    # A chat's results can only be text, so clients put images behind them.
    (CHAT, [{"role": "tool", "tool_call_id": "t", "content": "below"}, user(URL)], "[image omitted]", "image_url"),
    (CHAT, [said({"type": "refusal", "refusal": "never"}), user(text("why"))], "never", None),
    (CHAT, [said({"type": "strange", "text": 3}), user(text("why"))], "[strange omitted]", "strange"),
    (CHAT, [{**SAID, "tool_calls": [{"id": "c", "type": "computer", "computer": {}}]}, user(text("why"))],
     "no\n[computer omitted]", "tool_calls.computer"),
    # Some clients join what is said after an error to the message that was refused.
    *((path, [user(image, text("what? "), text("never mind"))], "[image omitted]\nwhat? never mind", image["type"])
      for path, image in ((CHAT, URL), (MESSAGES, IMAGE), (RESPONSES, INPUT))),
    (RESPONSES, [{"type": "reasoning", "content": [{"type": "sealed", "data": 3}]}, user(text("on"))], "", "sealed"),
    (RESPONSES, [user(text("a")), CALLED, output(INPUT), user(text("on"))], "[image omitted]", "input_image"),
    (RESPONSES, [user(text("a")), CALLED, output(text("b", "input_text"), INPUT)], "b\n[image omitted]", "input_image"),
    (RESPONSES, [user(text("a")), CALLED, output(text("b")), user(INPUT)], "[image omitted]", "input_image"),
    (RESPONSES, [user({"type": "input_file", "file_id": "f"}), SAID, user(text("on"))], "[file omitted]", "input_file"),
    (RESPONSES, [user(text("a")), {"type": "web_search_call", "status": "completed", "action": {}}, user(text("on"))],
     "[web_search_call omitted]", "web_search_call"),
    (RESPONSES, [{"type": "compaction", "encrypted_content": "x"}, user(text("on"))], "[compaction omitted]", ""),
]  # fmt: skip


def body_of(path: str, conversation: list[Any]) -> dict[str, Any]:
    return {"input" if path == RESPONSES else "messages": conversation}


@on_server(limits=SHORT)
async def test_an_earlier_part_of_any_type_is_a_line_in_its_place_and_is_named(server):
    for path, conversation, content, named in HISTORIES:
        answer = await server.ask(path, body_of(path, conversation))
        assert answer.status == 200, conversation
        seen = [message["content"] for message in server.tokenizer.seen[-1]]
        assert content in seen, conversation
        ignored = answer.headers.get(HEADER)
        assert ignored is None if named is None else ignored is not None and named in ignored


@on_server(limits=SHORT)
@sweep(
    ("path", "part", "said"),
    [
        (CHAT, URL, "images cannot be read"),
        (MESSAGES, IMAGE, "images cannot be read"),
        (COUNT_TOKENS, PDF, "document cannot be read"),
        (RESPONSES, INPUT, "images cannot be read"),
        (RESPONSES, {"type": "input_file", "file_id": "f"}, "files cannot be read"),
    ],
)
async def test_an_image_in_what_the_user_asks_is_an_error_that_says_so_first(server, path, part, said):
    question, blank = text("what is this?"), text(" \n")
    for parts, more in (
        ([question, part], []),
        # Claude Code's instructions may follow what the user asks.
        ([question, part], [{"role": "system", "content": "be kind"}]),
        ([part, question, blank], []),
        ([part, question, question, part, question], []),
    ):
        answer = await server.ask(path, body_of(path, [user(*parts), *more]))
        assert answer.status == 400
        assert answer.json["error"]["message"].startswith(said)


@on_server(limits=SHORT)
async def test_reasoning_of_a_history_is_known_by_its_other_name_and_as_a_part(server):
    for thought in ({"reasoning": "hm"}, {"content": [{"type": "thinking", "thinking": [text("hm")]}, text("no")]}):
        asked = [USER, {**SAID, **thought}, USER]
        assert (await server.ask(CHAT, {"messages": asked})).headers.get(HEADER) is None
        assert server.tokenizer.seen[-1][1] == {"role": "assistant", "content": "no", "reasoning_content": "hm"}


@on_server(limits=SHORT)
@sweep(
    ("given", "arguments"), [('{"a": "some', '{"a": "some'), ("", {}), (None, {}), ('{"a": 1}', {"a": 1}), ([1], [1])]
)
async def test_the_input_of_an_earlier_call_may_be_anything(server, given, arguments):
    call = {"type": "tool_use", "id": "t", "name": "shot", "input": given}
    answer = await server.ask(MESSAGES, {"messages": [user(text("a")), said(call), result(text("Invalid JSON"))]})
    assert answer.status == 200
    assert server.tokenizer.seen[-1][1]["tool_calls"][0]["function"]["arguments"] == arguments
    if given is not None:  # which is a field that is missing
        called = {**CALLED, "arguments": given}
        assert (await server.ask(RESPONSES, {"input": [user(text("a")), called, output(text("b"))]})).status == 200
        assert server.tokenizer.seen[-1][1]["tool_calls"][0]["function"]["arguments"] == arguments


@on_server(limits=SHORT)
@sweep(
    ("given", "content"),
    [
        *[({"a": [1, None]}, '{"a": [1, null]}'), (["x", "é"], '["x", "é"]'), ([{"text": "x"}], '[{"text": "x"}]')],
        *[(5, "5"), (None, "")],
    ],
)
async def test_the_result_of_a_tool_may_be_any_json(server, given, content):
    for path, conversation in (
        (CHAT, [{"role": "tool", "tool_call_id": "t", "content": given}]),
        (MESSAGES, [USED, user({"type": "tool_result", "tool_use_id": "t", "content": given})]),
        (RESPONSES, [CALLED, {"type": "function_call_output", "call_id": "c", "output": given}]),
    ):
        assert (await server.ask(path, body_of(path, conversation))).status == 200
        assert server.tokenizer.seen[-1][-1]["content"] == content
    # What people say is text.
    assert (await server.ask(CHAT, {"messages": [{"role": "user", "content": given or 5}]})).status == 400


@on_server(limits=SHORT)
async def test_a_text_behind_a_call_does_not_part_it_from_its_result(server):
    items = [user(text("a")), CALLED, SAID, output(text("b")), user(text("on"))]
    assert (await server.ask(RESPONSES, {"input": items})).status == 200
    _, answer, result, _ = server.tokenizer.seen[-1]
    assert (answer["content"], len(answer["tool_calls"]), result["role"]) == ("no", 1, "tool")


# --- Claude Code's header in the system's message -------------------------------------------------

BILLING = "x-anthropic-billing-header: cc_version=2.1; cch={};"


@on_server(limits=SHORT)
async def test_the_billing_header_of_claude_code_is_no_part_of_the_prompt(server):
    # vllm-mlx #277, anthropics/claude-code #68900, claude-code-router #1342
    plain = {"role": "system", "content": "be kind"}
    counted = (await server.ask(COUNT_TOKENS, {**HELLO, "system": "be kind"})).json
    for number in (1, 22):
        billing = BILLING.format(number)
        for system in ([text(billing), text("be kind")], f"{billing}\nbe kind", [text(f"{billing}\n\nbe kind")]):
            assert (await server.ask(COUNT_TOKENS, {**HELLO, "system": system})).json == counted
            for path, body in (
                (MESSAGES, {**HELLO, "system": system}),
                (CHAT, {"messages": [{"role": "system", "content": system}, *HELLO["messages"]]}),
                (MESSAGES, {"messages": [{"role": "system", "content": system}, *HELLO["messages"]]}),
                (RESPONSES, {"input": [{"role": "developer", "content": system}, *HELLO["messages"]]}),
            ):
                assert (await server.ask(path, body)).status == 200
                assert server.tokenizer.seen[-1][0] == plain
        for path in (MESSAGES, CHAT):
            assert (await server.ask(path, {"messages": [user(text(billing))]})).status == 200
            assert server.tokenizer.seen[-1] == [{"role": "user", "content": billing}]


# --- tools ----------------------------------------------------------------------------------------


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}}


def namespace(name: str, *tools: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": "d", "tools": list(tools)}


LARK = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
PATCH = {"type": "custom", "name": "apply_patch", "description": "edit files", "format": LARK}
EXECUTES_LS = {"type": "exec", "env": {}, "command": ["ls"]}
# openai/codex #33263, jundot/omlx #3371, llama.cpp #23229
SERVERS = [namespace("mcp__docs__", function("search")), namespace("mcp__web", function("search")), function("search")]


def calls(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


@pytest.mark.parametrize(
    ("says", "fields"),
    [
        (calls("mcp__docs__search"), {"type": "function_call", "name": "search", "namespace": "mcp__docs__"}),
        (calls("mcp__web__search"), {"type": "function_call", "name": "search", "namespace": "mcp__web"}),
        (calls("search", '{"a": "b"}'), {"type": "function_call", "name": "search", "arguments": '{"a": "b"}'}),
        (calls("apply_patch", '{"input": "a b"}'), {"type": "custom_tool_call", "name": "apply_patch", "input": "a b"}),
        (calls("apply_patch", '{"diff": "a"}'), {"type": "custom_tool_call", "input": '{"diff": "a"}'}),
        (calls("local_shell", '{"command": ["ls"]}'), {"type": "local_shell_call", "action": EXECUTES_LS}),
        (calls("local_shell", '{"command": "ls"}'), {"type": "message"}),
    ],
)
def test_a_call_goes_back_in_the_form_of_its_tool_and_is_understood_again(says, fields):
    @on_calling_server(says)
    async def converse(server: Served) -> None:
        asked = {"input": [USER], "tools": [*SERVERS, PATCH, {"type": "local_shell"}], "max_output_tokens": 300}
        response = (await server.ask(RESPONSES, asked)).json
        streamed = assembled_response((await server.ask(RESPONSES, {**asked, "stream": True})).named_events)
        for each in (response, streamed):
            assert fields.items() <= each["output"][0].items()
            assert (each["status"], each["tools"]) == ("completed", asked["tools"])
        names = [tool["function"]["name"] for tool in server.tokenizer.told[-1]]
        assert names == ["mcp__docs__search", "mcp__web__search", "search", "apply_patch", "local_shell"]
        if fields["type"] == "message":
            return
        call = response["output"][0]
        done = output(text("done"), kind=call["type"] + "_output")
        for more in ([USER, call, {**done, "call_id": call["call_id"]}], [{**done, "call_id": call["call_id"]}]):
            before = {} if len(more) > 1 else {"previous_response_id": response["id"]}
            answer = await server.ask(RESPONSES, {**asked, **before, "input": more, "max_output_tokens": 3})
            assert (answer.status, answer.headers.get(HEADER)) == (200, None)
            *_, called, returned = server.tokenizer.seen[-1]
            (same,) = called["tool_calls"]
            assert (same["id"], same["function"]["name"]) == (call["call_id"], json.loads(says[11:-12])["name"])
            assert (returned["role"], returned["tool_call_id"], returned["content"]) == ("tool", same["id"], "done")

    converse()


def test_names_of_functions_are_unique_and_fit_for_any_namespaces():
    mine = [namespace(f"my server{mark}", function("x")) for mark in "!?"]
    others = [namespace("a", function("b")), namespace("n" * 200, function("y"), function("z"))]
    tools = [*mine, function("a__b"), *others]
    request = ResponsesRequest.model_validate({"input": "a", "tools": tools})
    offered = OfferedTools.of(request.tools or ())
    assert list(offered.by_name)[:4] == ["my_server___x", "my_server___x_2", "a__b", "a__b_2"]
    assert [tool.name for tool in offered.by_name.values()] == ["x", "x", "a__b", "b", "y", "z"]
    assert max(map(len, offered.by_name)) <= 128
    assert (offered.name_of("b", "a"), offered.name_of("gone", "old")) == ("a__b_2", "old__gone")


# The tools, the choice, what the answer's header names, and the beginning of an error.
HOSTED = [{"type": "web_search"}]
SEARCH = [{"type": "web_search_20250305", "name": "web_search"}]
CUSTOM = {"type": "custom", "custom": {"name": "p"}}
CHOICES: list[tuple[str, Any, Any, str | None, str | None]] = [
    (RESPONSES, HOSTED, "auto", "tools.web_search", None),
    (RESPONSES, [*HOSTED, function("f")], "auto", "tools.web_search", None),
    (RESPONSES, HOSTED, "required", None, "web_search cannot be called here"),
    (RESPONSES, [*HOSTED, function("f")], {"type": "web_search"}, None, "web_search cannot be called here"),
    (RESPONSES, [{"type": "mcp", "server_label": "m"}], {"type": "mcp"}, None, "mcp cannot be called here"),
    (RESPONSES, [function("f")], {"type": "function", "name": "g"}, None, "tool_choice must be"),
    (RESPONSES, HOSTED, {"type": "allowed_tools", "mode": "required", "tools": HOSTED}, None, "web_search cannot be"),
    (MESSAGES, SEARCH, {"type": "auto"}, "tools.web_search_20250305", None),
    (MESSAGES, SEARCH, {"type": "any"}, None, "web_search_20250305 cannot"),
    (MESSAGES, [{"type": "mcp_toolset", "mcp_server_name": "m"}], {"type": "any"}, None, "mcp_toolset cannot be"),
    (MESSAGES, [{"type": "code_execution_20250825", "name": "run"}], {"type": "tool", "name": "run"}, None,
     "code_execution_20250825.run cannot be called here"),
    (CHAT, [{"type": "browser_search"}], "auto", "tools.browser_search", None),
    (CHAT, [{"type": "browser_search"}], {"type": "auto"}, "tools.browser_search", None),
    (CHAT, [{"type": "browser_search"}], "any", None, "browser_search cannot be called here"),
    (CHAT, [CUSTOM], CUSTOM, None, "custom.p cannot be called here"),
]  # fmt: skip


@on_server(limits=SHORT)
async def test_a_tool_that_is_left_out_is_named_and_its_call_is_not_forgotten(server):
    for path, tools, choice, named, error in CHOICES:
        answer = await server.ask(path, {**body_of(path, [USER]), "tools": tools, "tool_choice": choice})
        assert (answer.status, answer.headers.get(HEADER)) == (200 if error is None else 400, named), (tools, choice)
        if error is not None:
            assert answer.json["error"]["message"].startswith(error)


@on_calling_server(calls("bash", '{"command": "ls"}'))
async def test_tools_that_anthropic_defines_and_the_client_runs_are_functions(server):
    types = {"bash_20250124": "bash", "text_editor_20250728": "edit"}
    types |= {"text_editor_20241022": "old", "memory_20250818": "m"}
    tools = [{"type": kind, "name": name} for kind, name in types.items()]
    answer = await server.ask(MESSAGES, {"messages": [USER], "tools": tools, "max_tokens": 300})
    assert (answer.json["content"][0]["name"], answer.json["content"][0]["input"]) == ("bash", {"command": "ls"})
    told = [tool["function"] for tool in server.tokenizer.told[-1]]
    offered = {each["name"]: each["parameters"] for each in told}
    assert list(offered["bash"]["properties"]) == ["command", "restart"]
    assert "undo_edit" in offered["old"]["properties"]["command"]["enum"]
    assert "undo_edit" not in offered["edit"]["properties"]["command"]["enum"]
    assert "insert_text" in offered["m"]["properties"]


def test_a_required_call_that_is_cut_in_its_name_is_one_of_the_function_so_begun():
    required = [ToolCall(id, name, "") for id, name in (("c", "weather"), ("d", "wealth"), ("e", "clock"))]

    def events_of(written: str) -> list[Delta]:
        splitter = AnswerSplitter(AnswerReader(format=call_format("json_tools"), tools=TOOLS), required)
        return splitter.add([Token(0, written, 0, drafted_by=None, finish_reason="length")])

    for begun, call in (("weat", required[0]), ('clock"', required[2]), ("wea", None), ("", None)):
        head = f'<tool_call>\n{{"name": "{begun}'
        events = events_of(head)
        if call is None:
            assert {event.kind for event in events} == {"content"}
        else:
            assert events == [Delta("call_began", "", head, 0, call), Delta("call_broken", head, "", 0, call)]
    assert events_of(calls("weather"))[-1].kind == "call_ended"


# --- bodies ---------------------------------------------------------------------------------------

RAW = json.dumps({**HELLO, "max_tokens": 3}).encode()
BARE = zlib.compressobj(wbits=-15)


def encoded(encoding: str) -> dict[str, str]:
    return {**JSON, "content-encoding": encoding}


@on_server(limits=Limits(max_body_bytes=200_000))
@sweep(
    ("encoding", "body", "status"),
    [
        # teleport #68859, new-api #4913, ollama #12386
        ("gzip", gzip.compress(RAW), 200),
        ("GZip", gzip.compress(RAW[:9]) + gzip.compress(RAW[9:]), 200),
        ("x-gzip", gzip.compress(RAW + b" " * 199_000), 200),
        ("deflate", zlib.compress(RAW), 200),
        ("deflate", BARE.compress(RAW) + BARE.flush(), 200),
        ("identity", RAW, 200),
        *[("gzip", gzip.compress(RAW + b" " * 200_000), 413), ("deflate", zlib.compress(bytes(10**7)), 413)],
        *[("gzip", gzip.compress(RAW)[:-9], 400), ("gzip", RAW, 400), ("deflate", b"", 400)],
        *[("zstd", RAW, 415), ("br", RAW, 415)],
        ("gzip, gzip", gzip.compress(gzip.compress(RAW)), 415),
    ],
)
async def test_a_compressed_body_is_read_within_the_bound_of_bodies(server, encoding, body, status):
    for size in (len(body) or 1, 7 if len(body) < 1000 else 1000):
        async with server.exchange(CHAT, headers=encoded(encoding)) as one:
            for start in range(0, len(body), size):
                one.give(body[start : start + size], more=True)
            one.give(b"")
        assert one.status == status
    if status == 415:
        assert one.headers["accept-encoding"] == "gzip, deflate"
        assert encoding in one.fault["message"]


@on_server(limits=Limits(max_body_bytes=100_000, max_bodies_bytes=100_000))
async def test_a_compressed_body_takes_memory_only_once_it_is_long(server):
    long = gzip.compress(RAW.ljust(90_000))
    async with server.exchange(COUNT_TOKENS, headers=encoded("gzip")) as idle:
        await trio.sleep(1)
        async with server.exchange(COUNT_TOKENS, headers=encoded("gzip")) as begun:
            begun.give(long[:-1], more=True)
            await trio.sleep(1)
            short = await server.ask(COUNT_TOKENS, gzip.compress(RAW.ljust(10_000)), headers=encoded("gzip"))
            assert short.status == 200
            async with server.exchange(COUNT_TOKENS, headers=encoded("gzip")) as waiting:
                waiting.give(long)
                await trio.sleep(1)
                assert not waiting.sent
                begun.give(long[-1:])
            assert (begun.status, waiting.status) == (200, 200)
        idle.give(gzip.compress(RAW))
    assert idle.status == 200


@on_server(limits=SHORT)
async def test_half_a_surrogate_pair_is_a_replacement_character(server):
    # anthropics/claude-code #56064, #69440
    for written, meant in (
        (b"cut \\ud83d off", "cut \ufffd off"),
        (b"\\udE00\\uD83D\\ude00\\ud83d", "\ufffd\U0001f600\ufffd"),
        (b"\\\\ud83d \\n\\ud83d\\\\ude00", "\\ud83d \n\ufffd\\ude00"),
    ):
        for path, name in ((CHAT, "messages"), (MESSAGES, "messages"), (RESPONSES, "input")):
            body = b'{"%s": [{"role": "user", "content": "%s"}]}' % (name.encode(), written)
            assert (await server.ask(path, body)).status == 200
            assert server.tokenizer.seen[-1] == [{"role": "user", "content": meant}]
    # Arguments are JSON in a text.
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud83d"}'}}
    assert (await server.ask(CHAT, {"messages": [USER, {**SAID, "tool_calls": [call]}, USER]})).status == 200
    assert server.tokenizer.seen[-1][1]["tool_calls"][0]["function"]["arguments"] == {"a": "\ufffd"}


# --- limits, models and paths ---------------------------------------------------------------------


@pytest.mark.slow
@on_server(limits=SHORT)
async def test_anthropics_clients_get_the_models_in_their_form(server):
    from anthropic.types import ModelInfo

    listed = (await server.ask("/v1/models", headers={"anthropic-version": "2023-06-01"})).json
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "scripted", "scripted")
    page = ModelInfo.model_validate(listed["data"][0])
    assert (page.type, page.display_name, page.created_at.tzinfo is None) == ("model", "scripted", False)
    one = await server.ask("/v1/models/scripted", headers={"anthropic-version": "2023-06-01"})
    assert one.json == listed["data"][0]
    assert (await server.ask("/v1/models")).json["object"] == "list"


@on_server()
async def test_an_answer_without_a_limit_ends_with_its_text_or_the_context(server):
    # ROCm/FastFlowLM #749, omlx #1759
    seen = watched_streams(server)
    for path, body in ((CHAT, HELLO), (CHAT, {**HELLO, "n": 2, "logprobs": True, "top_logprobs": 20})):
        async with server.exchange(path, {**body, "stream": True}) as one:
            await one.until(lambda one: bool(one.sent))
            one.leave()
    limits = [settings.max_tokens for settings, _ in seen]
    assert limits == [2**15, 2**20 // 42, 2**20 // 42]
