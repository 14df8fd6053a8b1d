"""`outrider batch`: every prompt has one line in the file of answers, however often the command was ended before."""

import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from command_line import at_a_terminal, ran, refusal
from models import prompt_of
from sweeps import sweep

import runtime
from runtime.cli.batch import command, files
from runtime.server.answers.body import _WithoutEffect
from runtime.server.openai.requests import CompletionRequest

FORMS: list[Any] = [
    {"prompt": "w1 w2 w3"},
    {"id": "a", "prompt": "w4", "max_tokens": 3},
    {"id": 17, "prompt": [5, 6, 7]},
    {"custom_id": "r", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "w9"}},
    {"custom_id": "s", "body": {"prompt": "w9", "max_completion_tokens": 2}},
]
FAULTY: list[tuple[Any, dict[str, Any], str]] = [
    ({"id": "b", "prompt": "w1", "max_token": 3}, {"id": "b"}, "did you mean 'max_tokens'?"),
    ({"id": "c", "max_tokens": 3}, {"id": "c"}, 'either a "prompt" or "messages"'),
    ({"id": "d", "prompt": "w1", "messages": []}, {"id": "d"}, 'either a "prompt" or "messages"'),
    ({"id": "e", "messages": [{"role": "user", "content": "w1"}]}, {"id": "e"}, "no chat template"),
    ({"id": True, "prompt": "w1"}, {"id": 10}, "id must be a text or a whole number, got True"),
    ("no object", {"id": 11}, "line 11 must be an object, got 'no object'"),
]


def written(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def answers_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_label(path: Path) -> dict[str, dict[str, Any]]:
    """The answers by their ids; no id occurs twice."""
    found = {json.dumps({name: line.pop(name) for name in ("id", "custom_id") if name in line}): line
             for line in answers_in(path)}  # fmt: skip
    assert len(found) == len(answers_in(path))
    return found


def test_each_form_of_line_has_the_answer_or_the_error_that_the_library_gives(endless, tmp_path, capfd):
    prompts = written(tmp_path / "prompts.jsonl", [*FORMS, *(line for line, _, _ in FAULTY)])
    prompts.write_text(prompts.read_text() + "\nnot json\n")
    asked = ["batch", str(prompts), "--out", str(out := tmp_path / "answers.jsonl"), "--target", endless, "-m", "5"]
    err = ran(capfd, *asked, status=1).err
    assert f'error: {len(FAULTY) + 1} of 12 prompts failed; see the lines with "error" in {out}' in err
    found = by_label(out)
    for label, prompt, num_tokens in (
        ({"id": 1}, "w1 w2 w3", 5),
        ({"id": "a"}, "w4", 3),
        ({"id": 17}, [5, 6, 7], 5),
        ({"custom_id": "r"}, "w9", 5),
        ({"custom_id": "s"}, "w9", 2),
    ):
        whole = runtime.generate_sync(prompt, target=endless, max_tokens=num_tokens)
        counts = {"prompt_tokens": whole.statistics.prompt_tokens, "generated_tokens": num_tokens}
        assert found[json.dumps(label)] == {"text": whole.text, "finish_reason": "length", **counts}
    for _, label, complaint in [*FAULTY, (None, {"id": 13}, "line 13 is not JSON")]:
        (error,) = found[json.dumps(label)].values()
        assert complaint in error
        assert "prompts[" not in error
    # Nothing is left to do, and no model is loaded.
    assert "every prompt has its answer" in ran(capfd, *asked[:4], "--target", "./no/such/model").err


@sweep("kept", [0.0, 0.3, 0.5, 0.77, 0.99])
def test_a_file_that_was_cut_anywhere_is_completed_and_then_whole(kept, endless, tmp_path, capfd):
    prompts = written(tmp_path / "prompts.jsonl", [{"id": f"ä{n}", "prompt": prompt_of(5, seed=n)} for n in range(6)])
    asked = ["batch", str(prompts), "--target", endless, "-m", "4", "--out"]
    ran(capfd, *asked, str(whole := tmp_path / "whole.jsonl"))
    (cut := tmp_path / "cut.jsonl").write_bytes(whole.read_bytes()[: int(whole.stat().st_size * kept)])
    kept_lines = cut.read_bytes().rpartition(b"\n")[0]
    ran(capfd, *asked, str(cut))
    assert cut.read_bytes().startswith(kept_lines)
    assert by_label(cut) == by_label(whole)


def test_a_last_line_without_its_line_break_is_kept(endless, tmp_path, capfd):
    prompts = written(tmp_path / "prompts.jsonl", [{"prompt": "w1"}, {"prompt": "w2"}])
    (out := tmp_path / "answers.jsonl").write_text('{"id": 1, "text": "mine"}')
    ran(capfd, "batch", str(prompts), "--out", str(out), "--target", endless, "-m", "2")
    assert by_label(out)['{"id": 1}'] == {"text": "mine"}
    assert len(answers_in(out)) == 2


NO_ANSWER = "its line 1 is not an answer; give another file"


@sweep(
    ("lines", "answers", "complaint"),
    [
        (None, None, "cannot read the prompts from"),
        ([], None, "has no prompts; give one a line"),
        ([{"id": "a", "prompt": "w"}] * 2, None, 'two lines with {"id": "a"}'),
        ([{"id": 2, "prompt": "w"}, {"prompt": "w"}], None, 'two lines with {"id": 2}'),
        *(([{"prompt": "w"}], odd, NO_ANSWER) for odd in ("notes of mine", '{"id": 1}\n')),
        ([{"prompt": "w"}], '{"id": 7, "text": ""}\n', 'has an answer to {"id": 7}, which is not in'),
    ],
)
def test_files_that_do_not_go_together_are_refused_and_stay_as_they_are(lines, answers, complaint, tmp_path, capfd):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    if lines is not None:
        written(prompts, lines)
    if answers is not None:
        out.write_text(answers)
    asked = ["batch", str(prompts), "--out", str(out), "--target", "./no/such/model"]
    assert complaint in refusal(capfd, *asked)
    assert (out.read_text() if out.exists() else "") == (answers or "")


def test_what_cannot_be_read_again_or_gone_on_with_is_refused_before_a_model_is_loaded(tmp_path, capfd):
    prompts = written(tmp_path / "prompts.jsonl", [{"prompt": "w"}])
    read_end, write_end = os.pipe()
    with open(read_end, "rb") as reader, open(write_end, "wb") as writer:
        writer.write(prompts.read_bytes())
        writer.flush()
        pipe = f"/dev/fd/{reader.fileno()}"
        for given, out, complaint in (
            (prompts, prompts, "is the file with the prompts"),
            (prompts, tmp_path, "is a directory"),
            (prompts, "no/where", "is in no directory that exists"),
            (pipe, "answers", "PROMPTS must be a regular file, got a pipe; write it to a file first"),
            (prompts, f"/dev/fd/{writer.fileno()}", "--out must be a regular file, got a pipe"),
            ("/dev/null", "answers", "PROMPTS must be a regular file, got a device"),
            (prompts, "/dev/null", "--out must be a regular file, got a device"),
        ):
            asked = ["batch", str(given), "--out", str(tmp_path / out), "--target", "./no/such/model"]
            assert complaint in refusal(capfd, *asked)
    assert not (tmp_path / "answers").exists()


def test_prompts_that_have_gone_meanwhile_are_no_completion(endless, tmp_path, capfd, monkeypatch):
    prompts = written(tmp_path / "prompts.jsonl", [{"prompt": "w1"}, {"prompt": "w2"}])
    few = list(itertools.islice(files.questions_in(prompts), 1))
    monkeypatch.setattr(command, "questions_in", lambda _: iter(few))
    asked = ["batch", str(prompts), "--out", str(tmp_path / "answers.jsonl"), "--target", endless, "-m", "2"]
    err = ran(capfd, *asked, status=1).err
    assert "only 1 of 2 prompts were answered" in err
    assert "answers were added" not in err


def test_lines_with_too_many_brackets_are_errors(endless, tmp_path, capfd):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("[" * 100_000 + '\n{"prompt": "w1"}\n')
    asked = ["batch", str(prompts), "--out", str(out), "--target", endless, "-m", "2"]
    assert "1 of 2 prompts failed" in ran(capfd, *asked, status=1).err
    assert "too many brackets" in by_label(out)['{"id": 1}']["error"]
    out.write_text("[" * 100_000 + "\n")
    assert "its line 1 is not an answer" in refusal(capfd, *asked)


def test_a_line_with_half_a_surrogate_in_its_id_is_answered_once(endless, tmp_path, capfd):
    prompts = written(tmp_path / "prompts.jsonl", [{"id": "a\ud800", "prompt": "w1"}])
    asked = ["batch", str(prompts), "--out", str(out := tmp_path / "answers.jsonl"), "--target", endless, "-m", "2"]
    ran(capfd, *asked)
    assert [line["id"] for line in answers_in(out)] == ["a\ud800"]
    assert "every prompt has its answer" in ran(capfd, *asked).err


def question(body: Any, **fields: Any) -> files.Question:
    """The question of a line of OpenAI's."""
    return files._question(1, json.dumps({"custom_id": "a", "body": body, **fields}).encode())


def test_what_has_no_effect_in_a_request_of_openais_has_none_here():
    fields = CompletionRequest.model_fields.items()
    ignored = {name: "x" for name, each in fields if any(isinstance(it, _WithoutEffect) for it in each.metadata)}
    assert len(ignored) > 5
    as_always = {"n": 1, "response_format": {"type": "text"}}
    nulls = dict.fromkeys(("logprobs", "stop", "seed", "temperature", "messages", "tools"))
    asked = question({"model": "m", "prompt": "w", **nulls, **ignored, **as_always, "seed": 4})
    assert (asked.fault, asked.prompt, asked.settings) == (None, "w", {"seed": 4})


OBJECT: dict[str, Any] = {"response_format": {"type": "json_object"}}


@sweep(
    ("body", "settings"),
    [
        *((same, same) for same in ({"max_tokens": None}, {"logprobs": 3}, {"n": 2}, OBJECT)),
        *(({"max_tokens": a, "max_completion_tokens": b}, {"max_tokens": 5}) for a, b in ((None, 5), (5, None))),
        *[({"logprobs": True, "top_logprobs": 2}, {"logprobs": 2}), ({"logprobs": True}, {"logprobs": 1})],
        ({"logprobs": False, "top_logprobs": None}, {}),
    ],
)
def test_fields_of_openais_requests_become_settings(body, settings):
    assert question({"prompt": "w", **body}).settings == settings


def test_a_url_that_is_not_understood_is_named():
    assert "or \"/v1/completions\", got '/v1/responses'" in question({"input": "w"}, url="/v1/responses").fault
    assert question({"messages": []}, url="/v1/chat/completions").fault is None


def test_log_probabilities_that_were_asked_for_are_in_the_answer(endless, tmp_path, capfd):
    body = {"prompt": "w9", "max_tokens": 2, "logprobs": 3}
    prompts = written(tmp_path / "prompts.jsonl", [{"custom_id": "r", "body": body}, {"prompt": "w9"}])
    ran(capfd, "batch", str(prompts), "--out", str(out := tmp_path / "answers.jsonl"), "--target", endless, "-m", "2")
    whole = runtime.generate_sync("w9", target=endless, max_tokens=2, logprobs=3)
    found = by_label(out)
    assert "logprobs" not in found['{"id": 2}']
    for line, token in zip(found['{"custom_id": "r"}']["logprobs"], whole.tokens, strict=True):
        assert (line["id"], line["logprob"]) == (token.id, pytest.approx(token.logprob, abs=1e-4))
        assert [top["id"] for top in line["top_logprobs"]] == [top.id for top in token.top_logprobs]


def test_ctrl_c_leaves_a_file_from_which_the_same_command_goes_on(endless, tmp_path, capfd, monkeypatch):
    prompts = written(tmp_path / "prompts.jsonl", [{"prompt": [n]} for n in range(40)])
    asked = ["batch", str(prompts), "--out", str(out := tmp_path / "answers.jsonl"), "--target", endless, "-m", "2"]
    with monkeypatch.context() as patch:
        add = files.AnswerFile.add
        patch.setattr(files.AnswerFile, "add", lambda *added: (add(*added), signal.raise_signal(signal.SIGINT)))
        err = ran(capfd, *asked, status=130).err
    num_answered = out.read_bytes().count(b"\n")
    assert 0 < num_answered < 40
    assert err == f"outrider: answered {num_answered} of 40; the same command goes on from here\n"
    assert f"{40 - num_answered} answers were added" in ran(capfd, *asked).err
    assert len(by_label(out)) == 40


def test_a_terminal_shows_how_many_are_answered_and_nothing_of_it_stays(endless, tmp_path, capfd, monkeypatch):
    prompts = written(tmp_path / "prompts.jsonl", [{"prompt": [n]} for n in range(3)])
    asked = ["batch", str(prompts), "--out", str(tmp_path / "answers.jsonl"), "--target", endless, "-m", "2"]
    with at_a_terminal(monkeypatch, "stderr") as screen:
        ran(capfd, *asked)
    for number in range(4):
        assert f"{number} of 3" in screen.text
    assert screen.text.rstrip().endswith(f"3 answers were added to {tmp_path / 'answers.jsonl'}")
