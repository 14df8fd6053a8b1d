"""Files of prompts, and the prompts that come with Outrider."""

from __future__ import annotations

import json

import pytest
from sweeps import sweep

import runtime
from runtime.bench.prompt_files import BenchPrompt, read_prompts


@sweep(
    ("name", "content", "prompts"),
    [
        ("prompts.txt", "one\n\n  two\n", ["one", "  two"]),
        ("prompts.json", '["one\\nand more", "two"]', ["one\nand more", "two"]),
    ],
)
def test_prompts_come_from_a_file(name, content, prompts, tmp_path):
    (tmp_path / name).write_text(content)
    assert read_prompts(str(tmp_path / name)) == [BenchPrompt((prompt,)) for prompt in prompts]


def test_a_line_may_have_the_fields_of_spec_bench_or_a_prompt_or_messages(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
        {"prompt": "c", "category": "edit", "source": "somewhere"},
        {"messages": messages},
    ]
    (tmp_path / "question.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    found = read_prompts(str(tmp_path / "question.jsonl"))
    assert found == [
        BenchPrompt(("a", "b"), "writing", is_chat=True),
        BenchPrompt(("c",), "edit"),
        BenchPrompt((messages,)),
    ]
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "b"}]
    assert found[0].at(1, ["x"], has_template=True) == said
    assert found[0].at(1, ["x"], has_template=False) == "a\n\nx\n\nb"
    (tmp_path / "question.jsonl").write_text('{"turns": []}')
    with pytest.raises(runtime.PromptError, match=r"line 1 of .* is no prompt"):
        read_prompts(str(tmp_path / "question.jsonl"))


def test_a_prompt_of_any_form_may_have_a_schema(tmp_path):
    file, schema = tmp_path / "prompts.jsonl", {"type": "object"}
    named = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    for line in ({"turns": ["a"]}, {"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}):
        for response_format, expected in ((named, schema), ({"type": "text"}, None), (None, None)):
            file.write_text(json.dumps(line | {"response_format": response_format}))
            (prompt,) = read_prompts(str(file))
            assert prompt.schema == expected
    for response_format in ({"type": "json_object"}, schema, {"type": "json_schema", "json_schema": {"name": "a"}}):
        file.write_text(json.dumps({"prompt": "a", "response_format": response_format}))
        with pytest.raises(runtime.PromptError, match=r"line 1 of .* has another response_format"):
            read_prompts(str(file))


@sweep(
    ("name", "content", "complaint"),
    [
        ("prompts.txt", b"\n\n", "there is no prompt in"),
        ("prompts.txt", b"\xff", "cannot read prompts from"),
        ("prompts.json", b"[", "cannot read prompts from"),
        ("prompts.json", b'{"a": 1}', "must hold a JSON list of texts"),
        ("prompts.json", b"[1]", "must hold a JSON list of texts"),
    ],
)
def test_a_file_without_prompts_is_refused(name, content, complaint, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(runtime.PromptError, match=complaint):
        read_prompts(str(tmp_path / name))
    with pytest.raises(runtime.PromptError, match="cannot read prompts from"):
        read_prompts(str(tmp_path / "missing.txt"))
