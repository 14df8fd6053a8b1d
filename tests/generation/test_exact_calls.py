"""Calls are read exactly as they were written, in every format, or they are text."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import sweep
from tool_call_cases import FORMATS, call_format

from runtime.generation.tool_calls.answer_reader import AnswerReader
from runtime.generation.tool_calls.argument_values import is_json
from runtime.generation.tool_calls.call_format import written_calls
from runtime.generation.tool_calls.events import Answer

THINK: dict[str, Any] = {"tags": ("<think>", "</think>")}


def function(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TEXT = {"type": "string"}
TOOLS = [
    function("write", path=TEXT, content=TEXT),
    function("run", command=TEXT, flags={"type": "array"}, n={"type": "integer"}, yes={"type": "boolean"}),
    function("post", body={"type": "object"}, **{"max-results": {"type": "integer"}}),
    function("set", key=TEXT, value=True),
    function("ls"),
    function("fs.read", path=TEXT),
]


def read(format: str, text: str, tools: Any = TOOLS, *, size: int = 1, is_complete: bool = True, **how: Any) -> Answer:
    reader, answer = AnswerReader(format=call_format(format), tools=tools, **how), Answer()
    events = [event for i in range(0, len(text), size) for event in reader.add(text[i : i + size])]
    events += reader.finish(is_complete=is_complete)
    assert "".join(event.source for event in events) == text
    answer.add(events)
    return answer


def calls_in(answer: Answer) -> list[tuple[str, Any]]:
    return [(call.name, call.values) for call in answer.calls]


def written(format: str, *calls: tuple[str, dict[str, Any]]) -> str:
    """Calls as the format's layout has them."""
    known = call_format(format)
    return written_calls(known, known.layout, calls)


TEXT_FORMATS = [name for name in FORMATS if (layout := call_format(name).layout) and layout.values == "text"]


@sweep("format", FORMATS)
@sweep(
    "content",
    [
        *("    return x\n", "\treturn y", "", " ", "\n\n", "a\r\n"),
        *("null", "5", 'it\'s "x"\\', "{a: [1, 2)", "é日本\u2028"),
        *("Ends with </parameter>", "</function> or </tool_call>, <tool_call> too", "</arg_value>\n</tool_call>\nso"),
        *("</parameter>\n</function>\n</tool_call>", "x</param></function>", "<|tool_call_end|> is a token, <escape>"),
    ],
)
def test_a_text_comes_as_it_was_written(format, content):
    """sgl-project/sglang PR #20543, raullenchai/Rapid-MLX #1515, vllm-project/vllm PR #33965."""
    arguments = {"path": "a.md", "content": content}
    assert calls_in(read(format, written(format, ("write", arguments)))) == [("write", arguments)]


@sweep("format", FORMATS)
def test_calls_are_read_as_they_are_written(format):
    values = {"command": 'it\'s "x"\n', "flags": ["a", 1, None], "n": -5, "yes": False}
    wanted: list[tuple[str, Any]] = [("run", values), ("ls", {}), ("post", {"body": {"a": {"b": [True, 0.5]}}})]
    answer = read(format, written(format, *wanted))
    assert (calls_in(answer), answer.content) == (wanted, "")


@sweep("format", TEXT_FORMATS)
def test_the_beginning_of_an_argument_in_a_text_is_a_word_unless_it_may_be_one(format):
    layout = call_format(format).layout
    opening = layout.key.replace("{type}", "string").replace("\0", "")
    for key, is_call in (("x", True), ("content", False)):
        arguments = {"path": f"use {opening.replace('{key}', key)} here", "content": "c"}
        text = written(format, ("write", arguments)).replace("<![CDATA[", "").replace("]]>", "")
        assert calls_in(read(format, text)) == ([("write", arguments)] if is_call else [])


@sweep("format", TEXT_FORMATS)
def test_a_file_that_has_a_whole_call_in_it_is_one_call(format):
    inner = written(format, ("run", {"command": "rm -r /"}))
    for content in (f"Write:\n{inner}\nand wait.\n", f"{inner}\n{inner}", f"So {inner}"):
        arguments = {"path": "a.md", "content": content}
        assert calls_in(read(format, written(format, ("write", arguments)))) == [("write", arguments)]
        malformed = written(format, ("write", arguments)).replace("a.md", content, 1)
        assert ("run", {"command": "rm -r /"}) not in calls_in(read(format, malformed))


@sweep("format", TEXT_FORMATS)
def test_no_text_takes_in_a_call_after_it(format):
    known = call_format(format)
    layout = known.layout
    wanted: list[tuple[str, Any]] = [("fs.read", {"path": "a"}), ("run", {"command": "a"})]
    first, second = (written(format, call) for call in wanted)
    without_end = first[: -len(known.end)] if known.end else first[: -len(layout.value_end)]
    without_value_end = first.replace(layout.value_end.strip("\n\0"), "")
    odd = second.replace("run", "run it")
    for calls in ((first, odd), (without_end, second), (without_end, odd), (without_value_end, second)):
        text = "\n".join(calls)
        for answer in (read(format, text), read(format, f"So: {text}</think>\n{odd}", **THINK, is_thinking=True)):
            assert all(call in wanted for call in calls_in(answer))


@sweep("format", TEXT_FORMATS)
def test_a_call_without_a_text_at_its_end_is_a_call_before_anything(format):
    call, other = written(format, ("run", {"n": 1})), written(format, ("list files", {"path": "b"}))
    answer = read(format, f"{call}\n{other}")
    assert (calls_in(answer), answer.content) == ([("run", {"n": 1})], f"\n{other}")


PIECES = st.sampled_from(
    [
        *("\n", " ", "a", "é", "<", ">", "{", "}", "[", "]", "(", ")", ",", ":", "=", '"', "'", "\\", "null", "1"),
        *("START", "END", "VALUE_END", "TAIL", "KEY", "OTHER_KEY", "HEAD", "CLOSE"),
    ]
)


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=120)
@given(data=st.data())
def test_whatever_is_in_a_text_it_is_that_call_or_none(format: str, data: st.DataObject) -> None:
    known = call_format(format)
    layout = known.layout
    key = layout.key.replace("{type}", "string")
    markers = {
        **{"START": known.start, "END": known.end, "VALUE_END": layout.value_end.strip(), "TAIL": layout.tail},
        **{"KEY": key.replace("{key}", "path"), "OTHER_KEY": key.replace("{key}", "x")},
        **{"HEAD": layout.head.replace("{name}", "ls"), "CLOSE": layout.value_end + layout.tail + known.end},
    }

    def text() -> str:
        parts = data.draw(st.lists(PIECES, max_size=6))
        return "".join(markers.get(part, part) for part in parts).replace("\0", "").replace("{number}", "1")

    first = {"path": text(), "content": text()}
    second = {"flags": [text()], "n": data.draw(st.integers(-(2**70), 2**70)), "yes": data.draw(st.booleans())}
    said = written(format, ("write", first)) + "\n" + written(format, ("run", second))
    wanted = [("write", first), ("run", second)]
    answers = [read(format, said, size=size) for size in (data.draw(st.integers(1, 9)), len(said))]
    assert calls_in(answers[0]) == calls_in(answers[1])
    assert answers[0].content == answers[1].content
    for call in calls_in(answers[0]):
        assert call in wanted


@sweep("format", ["glm47", "longcat"])
def test_a_value_in_which_another_call_seems_to_begin_does_not_end_the_call(format):
    layout = call_format(format).layout
    begin = layout.key.replace("{key}", "path")
    call = ("write", {"path": "", "content": f"{layout.value_end}ls{begin}".replace("\0", "")})
    assert all(each == call for each in calls_in(read(format, written(format, call))))


# --- types --------------------------------------------------------------------------------------------

NULLABLE = {
    "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "ratio": {"oneOf": [{"type": "number"}, {"type": "null"}]},
    "code": {"type": ["string", "null"]},
    "flag": {"allOf": [{"$ref": "#/$defs/flag"}]},
    "level": {"enum": ["1.0", "2.0"]},
    "word": {"type": "string"},
    "either": {"anyOf": [{"type": "string"}, {"type": "array"}]},
    "only": {"const": 3},
    "any": True,
    "map": {"type": "object"},
}


@sweep("format", TEXT_FORMATS)
@sweep(
    ("key", "said", "value"),
    [
        *[("count", "5", 5), ("count", "null", None), ("count", str(2**63 + 1), 2**63 + 1), ("ratio", "0.5", 0.5)],
        *[("code", "01234", "01234"), ("code", "123", "123"), ("code", "null", None), ("code", " null", " null")],
        *[("flag", "true", True), ("flag", "True", True), ("level", "2.0", "2.0"), ("word", "null", "null")],
        *[("either", "[1]", [1]), ("either", "[1", "[1"), ("only", "3", 3)],
        *[("any", "1_000", "1_000"), ("any", "True", "True"), ("any", "7", 7)],
        ("map", "{'a': (1, True), 'b': ['c']}", {"a": [1, True], "b": ["c"]}),
        # No such value: text.
        *(("map", said, ...) for said in ("{1: 2, '1': 3}", "{'a': 1, 'a': 2}", "{'a': ['a' 'b']}", "{'a': 1} 2")),
        *[("count", "1_000", ...), ("count", "five", ...), ("flag", "yes", ...), ("ratio", "NaN", ...)],
    ],
)
def test_a_text_is_a_value_of_the_schemas_type(format, key, said, value):
    """vllm-project/vllm PR #37831."""
    definitions = {"flag": {"type": ["boolean", "null"]}}
    parameters = {"type": "object", "properties": NULLABLE, "$defs": definitions}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    text = written(format, ("f", {key: said}))
    if format == "kimi_k3" and not isinstance(value, str):
        text = text.replace('type="string"', 'type="number"')
    if format == "kimi_k3" and value in ("01234", "123", "2.0", "1_000", "True", "[1"):
        assert calls_in(read(format, text, tools)) == [("f", {key: said})]
        return
    answer = read(format, text, tools)
    assert calls_in(answer) == ([] if value is ... else [("f", {key: value})])
    assert answer.content == (text if value is ... else "")


def test_schemas_that_refer_to_themselves_many_times_are_read_once():
    names = [f"d{i}" for i in range(20)]
    nested = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names]}
    tools = [function("f", a={"$ref": "#/$defs/d0"}, n={"$ref": "#/$defs/n"})]
    tools[0]["function"]["parameters"]["$defs"] = {"n": {"type": "integer"}, **{name: dict(nested) for name in names}}
    assert calls_in(read("glm47", written("glm47", ("f", {"a": "x", "n": 1})), tools)) == [("f", {"a": "x", "n": 1})]


# --- what stands where a call could -------------------------------------------------------------------

C, G, Q = "<tool_call>", "<|tool_call>call:", '<|"|>'
LFM = ("<|tool_call_start|>[", "]<|tool_call_end|>")
LS = '{"name": "ls", "arguments": {}}'


@sweep(
    ("format", "text", "calls"),
    [
        # ml-explore/mlx-lm #1639
        ("mistral", "[TOOL_CALLS]ls[CALL_ID]abc123def[ARGS]{}[TOOL_CALLS]fs.read[ARGS]{}", ["ls", "fs.read"]),
        ("mistral", '[TOOL_CALLS]run [ARGS] {"command": "x"}', ["run"]),
        # ollama/ollama #16686
        ("qwen3_coder", "<function=ls>\n</function>\n</tool_call>", ["ls"]),
        ("minimax_m2", '<invoke name="ls">\n</invoke>', ["ls"]),
        ("qwen3_coder", f"{C}\n<function=ls>\n</function>\n<function=ls>\n</function>\n</tool_call>", ["ls", "ls"]),
        ("longcat", "<longcat_tool_call>ls\n</longcat_tool_call>", ["ls"]),
        # jundot/omlx #2565, ollama/ollama #12174: Qwen2.5-Coder leaves out its markers.
        ("json_tools", LS, ["ls"]),
        ("json_tools", '\n{\n  "name": "fs.read",\n  "parameters": {"path": "a"}\n}\n</tool_call>', ["fs.read"]),
        ("json_tools", '{"name": "ls", "arguments": {}}\n{"name": "run", "arguments": {"n": 1}}\n', ["ls", "run"]),
        ("json_tools", '{"name": "run", "arguments": "{\\"n\\": 1}"}', ["run"]),
        # mistralai/mistral-common #73; ardanlabs/kronk PR #950, vllm-project/vllm #32926.
        ("mistral", '[{"name": "ls", "arguments": {}},\n{"name": "run", "arguments": {"n": 1}}]', ["ls", "run"]),
        ("json_tools", '```json\n{"name": "ls", "arguments": {}}\n```\n', ["ls"]),
        ("json_tools", '```\n[{"name": "ls", "arguments": {}}]', ["ls"]),
        ("json_tools", f'```json\n{LS}\n{{"name": "run", "arguments": {{"command": "```"}}}}```', ["ls", "run"]),
        ("json_tools", f'{C}{{"name": "ls"}}</tool_call>', ["ls"]),
        ("json_tools", f'{C}{{"name": "ls", "parameters": {{}}}}</tool_call>', ["ls"]),
        ("json_tools", f'{C}{{"name": "ls", "arguments": "{{}}"}}</tool_call>', ["ls"]),
        # jundot/omlx PR #1854
        ("gemma4", f"{G}fs.read{{path:{Q}a{Q}}}<tool_call|>", ["fs.read"]),
        ("gemma4", f"{G}post{{body: {{Content-Type: {Q}a{Q}, b: 1,}}, max-results: 2}}<tool_call|>", ["post"]),
        # vllm-project/vllm PR #48171
        ("pythonic", LFM[0] + "run(command='a\nb', flags=(1, 'x')), ls()" + LFM[1], ["run", "ls"]),
        ("pythonic", LFM[0] + 'run(command="""a "b" c""", n=-1, yes=true)' + LFM[1], ["run"]),
        # Text.
        ("glm47", f"{C}I think I should list them.\n<arg_key>a</arg_key><arg_value>.</arg_value></tool_call>", []),
        *(("glm47", f"{C}{text}</tool_call>", []) for text in ("ls -la dir=src", "unheard_of\n")),
        ("qwen3_coder", "<function=other>\n</function>", []),
        ("qwen3_coder", f"{C}<function=run><parameter=n>1<parameter=yes>true</parameter></function></tool_call>", []),
        ("json_tools", f'{C}{{"type": "function", "id": "1", "name": "ls"}}</tool_call>', ["ls"]),
        *(("json_tools", f"{C}{text}</tool_call>", []) for text in (
            '{"name": "fs.read", "args": {"path": "a"}}', '{"input": {"path": "a"}, "name": "fs.read"}',
            '{"name": "fs.read", "arguments": null, "path": "a"}', '{"name": "I think", "arguments": {}}',
            '{"name": "ls", "arguments": {}, "arguments": {}}')),
        *(("json_tools", text, []) for text in (
            '{"name": "Anna", "arguments": {}}', '{"name": "ls", "size": 1}', '{"name": "ls", "arguments": "none"}',
            '{"size": 1, "name": "ls", "arguments": {}}', f"Such as {LS}", f"[{LS}, 1]", f"[{LS}", f"<think>{LS}",
            '{"name": "ls", "arguments": {}, "size": 1}', '{"name": "run", "arguments": "{\\"n\\": }"}',
            f"```json\n{LS}\n```\nSuch is a call.", '```json\n{"name": "ls", "arguments": {}, "size": 1}\n```',
            f"Such as:\n```json\n{LS}\n```", '```json\n{"name": "Anna", "arguments": {}}\n```',
            '{"name": "ls", "arguments": {}, 1}')),
        *(("pythonic", LFM[0] + text + LFM[1], []) for text in (
            "run('ls')", "ls(), run(command=x)", "run(command=https://a.b/c,d)", "run(command='it's')")),
        ("gemma4", f"{G}run{{command:ls}}<tool_call|>", []),
    ],
)  # fmt: skip
def test_a_call_is_all_that_was_written_or_text(format, text, calls):
    answer = read(format, text)
    assert [call.name for call in answer.calls] == calls
    assert answer.content == ("" if calls else text)


@sweep(
    ("arguments", "is_call"),
    [('{"n": 1, "command": "\\u00e9"}', True), ('{"n": "1"}', False), ('{"n": 1, "size": 2}', False)],
)
def test_without_a_marker_the_arguments_of_a_strict_tool_follow_its_schema(arguments, is_call):
    strict = {"type": "function", "function": {**TOOLS[1]["function"], "strict": True}}
    call = f'{{"name": "run", "arguments": {arguments}}}'
    answer = read("json_tools", call, [strict])
    assert calls_in(answer) == ([("run", json.loads(arguments))] if is_call else [])
    assert answer.content == ("" if is_call else call)


BARE = '{"name": "run", "arguments": {"command": "ls"}}'


@sweep("text", [BARE, f"[{BARE}]", f"```json\n{BARE}\n```", f'{{"name": "run", "arguments": {json.dumps(BARE)}}}'])
def test_what_begins_as_a_call_without_a_marker_is_that_call_or_all_of_it_is_text(text):
    calls = calls_in(read("json_tools", text))
    assert len(calls) == 1
    for end in range(len(text)):
        for is_complete in (True, False):
            answer = read("json_tools", text[:end], is_complete=is_complete)
            found = answer.content, calls_in(answer), answer.cut_call
            assert found == (text[:end], [], None) or (is_complete and found == ("", calls, None))


@sweep("text", ["{", "[", "```json\n{", '{"name": "', '{"name": "run", "', '```json\n[{"name": "run", "arguments": "'])
def test_text_is_withheld_only_while_a_call_may_follow(text):
    reader = AnswerReader(format=call_format("json_tools"), tools=TOOLS)
    assert reader.add(text) == []
    assert "".join(delta.text for delta in reader.add("so!")) == f"{text}so!"


@sweep("text", ["{0}{0}", "{1}\n{0}", "{0}\n{1}", "{0}\n[{0}]", "```json\n{0}\n{0}\n```"])
def test_without_parallel_calls_what_follows_a_call_is_text(text):
    said = text.format(BARE, f"<tool_call>{BARE}</tool_call>")
    format, answer = attrs.evolve(call_format("json_tools"), is_parallel=False), Answer()
    reader = AnswerReader(format=format, tools=TOOLS)
    answer.add([*reader.add(said), *reader.finish(is_complete=True)])
    assert len(answer.calls) + answer.content.count('"run"') == 2
    assert len(answer.calls) == (0 if "```" in said else 1)


def test_a_call_has_the_id_that_the_model_gave_it():
    [call] = read("mistral", "[TOOL_CALLS]ls[CALL_ID]abc123def[ARGS]{}").calls
    assert call.id == "abc123def"


@sweep("format", FORMATS)
@sweep("is_thinking", [True, False])
def test_a_marker_that_no_call_follows_is_a_word(format, is_thinking):
    """noonghunna/club-3090 #72."""
    known = call_format(format)
    for prose in (f"I could write {known.start} here. ", f"`{known.start}` and `{known.end}`: no. "):
        call = written(format, ("run", {"command": "ls"}))
        answer = read(format, f"{prose}Well.</think>Yes.\n{call}", **THINK, is_thinking=True)
        assert (answer.reasoning, answer.content) == (f"{prose}Well.", "Yes.")
        assert calls_in(answer) == [("run", {"command": "ls"})]
        reader, given = AnswerReader(format=known, tools=TOOLS, **THINK, is_thinking=is_thinking), Answer()
        for character in prose + "one two three " * 20:
            given.add(reader.add(character))
        assert len(given.content + given.reasoning) > len(prose) + 270


@sweep(
    ("text", "reasoning", "content"),
    [
        ("Qwen opens it with `<think>` and closes it with `</think>`.", "", ...),
        ("Use <think> in it. It is a token.", "", ...),
        ("<think>hm</think>Use <think> in it.", "hm", "Use <think> in it."),
        ("\n<think>hm</think>\n<think>so</think>yes", "hmso", "yes"),
        ('<think>hm\n<tool_call>{"name": "ls", "arguments": {}}</tool_call></think>yes', "hm", "yes"),
    ],
)
def test_a_tag_of_the_reasoning_counts_where_an_answer_begins(text, reasoning, content):
    answer = read("json_tools", text, **THINK)
    assert (answer.reasoning, answer.content.strip()) == (reasoning, text if content is ... else content)


@sweep("format", TEXT_FORMATS)
def test_a_call_that_is_cut_off_in_a_text_has_the_text_so_far(format):
    text = written(format, ("write", {"path": "a.md", "content": "one two three"}))
    answer = read(format, text[: text.index(" three")], is_complete=False)
    assert (answer.content, answer.calls) == ("", [])
    assert (answer.cut_call.name, answer.cut_call.arguments) == ("write", '{"path": "a.md", "content": "one two')


@sweep("format", TEXT_FORMATS)
def test_a_call_that_is_cut_off_between_its_arguments_does_not_look_complete(format):
    text = written(format, ("run", {"command": "a", "n": 1, "yes": True}))
    for end in range(text.index("run") + 4, text.rindex("true")):
        cut = read(format, text[:end], is_complete=False).cut_call
        assert cut is None or not is_json(cut.arguments)
