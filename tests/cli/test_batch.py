"""`outrider batch`: every prompt has one line in the file of answers, however often the command was ended before."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.lowlevel
from command_line import at_a_terminal, outrider, ran, read_all, refusal
from models import prompt_of
from sweeps import sweep

import runtime

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


@sweep(
    ("lines", "answers", "complaint"),
    [
        (None, None, "cannot read the prompts from"),
        ([], None, "has no prompts; give one a line"),
        ([{"id": "a", "prompt": "w"}] * 2, None, 'two lines with {"id": "a"}'),
        ([{"id": 2, "prompt": "w"}, {"prompt": "w"}], None, 'two lines with {"id": 2}'),
        ([{"prompt": "w"}], "notes of mine", "its line 1 is not an answer; give another file"),
        ([{"prompt": "w"}], '{"id": 1}\n', "its line 1 is not an answer; give another file"),
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


def test_places_that_cannot_be_written_and_wrong_numbers_are_refused_before_a_model_is_loaded(tmp_path, capfd):
    prompts = written(tmp_path / "prompts.jsonl", [{"prompt": "w"}])
    for arguments, complaint in (
        (["--out", str(prompts)], "is the file with the prompts"),
        (["--out", str(tmp_path)], "is a directory"),
        (["--out", str(tmp_path / "no" / "where")], "is in no directory that exists"),
        (["--out", str(tmp_path / "a"), "--max-concurrent", "0"], "--max-concurrent must be a whole number"),
    ):
        assert complaint in refusal(capfd, "batch", str(prompts), *arguments, "--target", "./no/such/model")


@pytest.mark.slow
async def test_ctrl_c_leaves_a_file_from_which_the_same_command_goes_on(endless, tmp_path):
    prompts = written(tmp_path / "prompts.jsonl", [{"prompt": [n % 60]} for n in range(400)])
    out = tmp_path / "answers.jsonl"
    asked = ["batch", str(prompts), "--out", str(out), "--target", endless, "-m", "8"]
    async with outrider(*asked, stderr=-1) as process:
        while not out.exists() or out.stat().st_size == 0:
            await trio.lowlevel.checkpoint()
        process.send_signal(signal.SIGINT)
        await process.wait()
        assert process.returncode == 130
    num_answered = out.read_bytes().count(b"\n")
    assert 0 < num_answered < 400
    async with outrider(*asked, stderr=-1) as process:
        assert f"{400 - num_answered} answers were added" in await read_all(process.stderr)
    assert len(by_label(out)) == 400


def test_a_terminal_shows_how_many_are_answered_and_nothing_of_it_stays(endless, tmp_path, capfd, monkeypatch):
    prompts = written(tmp_path / "prompts.jsonl", [{"prompt": [n]} for n in range(3)])
    asked = ["batch", str(prompts), "--out", str(tmp_path / "answers.jsonl"), "--target", endless, "-m", "2"]
    with at_a_terminal(monkeypatch, "stderr") as screen:
        ran(capfd, *asked)
    for number in range(4):
        assert f"{number} of 3" in screen.text
    assert screen.text.rstrip().endswith(f"3 answers were added to {tmp_path / 'answers.jsonl'}")
