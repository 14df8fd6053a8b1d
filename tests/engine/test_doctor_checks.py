"""The checks of `outrider doctor --check`: each passes here, and fails on a runtime that was broken on purpose."""

import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from command_line import ran
from device_tables import all_tables
from fixed_lookaheads import auto
from models import llama, save
from scenario import Scenario
from simulation import run_simulation

import protocol.acceptance
from actors.mlx.row_caches import RowKVCache
from actors.mlx.shared_passes import RowBatch
from runtime.doctor import checks
from runtime.doctor.checks import Subject
from runtime.doctor.report import NUMBERS_OF_TEXTS, REPORT_WIDTHS

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def less(monkeypatch: Patch) -> None:
    """Less than a device is checked with, which is enough here."""
    monkeypatch.setattr(checks, "MAX_TOKENS", 16)
    monkeypatch.setattr(checks, "ROW_LENGTHS", (5, 12, 21))
    monkeypatch.setattr(checks, "ROW_FAMILIES", ("gemma3_text", "lfm2"))
    monkeypatch.setattr(checks, "NUM_DRAWN_TEXTS", 250)


@pytest.fixture
def subject() -> Subject:
    """Two tiny models in place of a user's."""
    prompts = [tuple(1 + i % 60 for i in range(length)) for length in (9, 23)]
    return Subject((llama(), None), (llama(1), None), prompts)


@pytest.mark.parametrize("check", checks.CHECKS.values(), ids=lambda check: check.__name__)
def test_a_check_passes_here(check: Callable[[Subject], Any], subject: Subject) -> None:
    assert list(check(subject)) == []


# --- broken on purpose ----------------------------------------------------------------------------


def accept_everything(patch: Patch) -> None:
    patch.setattr(protocol.acceptance, "count_matches", lambda chosen, drafted: len(drafted))


def forget_the_key(patch: Patch) -> None:
    draws = itertools.count()
    patch.setattr(
        protocol.acceptance, "keys_for", lambda _, decisions: mx.stack([mx.random.key(next(draws)) for _ in decisions])
    )


def draw_at_another_temperature(patch: Patch) -> None:
    distribution = protocol.acceptance.distribution
    patch.setattr(protocol.acceptance, "distribution", lambda logits, temp: distribution(logits, temp / 2))


def overlook_nan(patch: Patch) -> None:
    largest = mx.max

    def largest_number(array: mx.array, **named: Any) -> mx.array:
        return largest(mx.where(mx.isnan(array), mx.array(0, array.dtype), array), **named)

    patch.setattr(mx, "max", largest_number)


def mix_up_rows(patch: Patch) -> None:
    """Of three rows or more, each gets another one's logits. The probe, which has two, sees nothing of it."""
    feed = RowBatch.feed

    def feed_and_mix_up(self: RowBatch, tokens: Any, recorder: Any = None) -> dict[object, mx.array]:
        logits = feed(self, tokens, recorder)
        if len(logits) < 3:
            return logits
        lengths = {key: len(rows) for key, rows in logits.items()}
        keys = [*list(logits)[1:], next(iter(logits))]
        pairs = zip(logits, keys, strict=True)
        return {key: mx.repeat(logits[other][:1], lengths[key], axis=0) for key, other in pairs}

    patch.setattr(RowBatch, "feed", feed_and_mix_up)


def see_other_rows_padding(patch: Patch) -> None:
    """A row sees what lies behind its text. The probe notices, so that texts take turns."""

    def everything(self: RowKVCache, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        return mx.ones((self.offset.shape[0], 1, N, self._end), mx.bool_)

    patch.setattr(RowKVCache, "make_mask", everything)


@pytest.mark.parametrize(
    ("check", "break_it"),
    [
        (checks.greedy_texts, accept_everything),
        (checks.seeded_texts, forget_the_key),
        (checks.first_tokens, draw_at_another_temperature),
        (checks.rewinds, accept_everything),
        (checks.shared_passes, mix_up_rows),
        (checks.shared_passes, see_other_rows_padding),
        (checks.not_a_number, overlook_nan),
    ],
    ids=lambda each: each.__name__,
)
def test_a_check_fails_on_a_runtime_that_is_broken(check, break_it, subject, monkeypatch):
    for families in ("FAMILIES", "ROW_FAMILIES"):
        monkeypatch.setattr(checks, families, ("llama",))
    with monkeypatch.context() as patch:
        break_it(patch)
        assert list(check(subject))


def test_draws_are_as_far_from_a_law_as_their_counts_say() -> None:
    law = [0.5, 0.3, 0.2]
    assert checks.chi_square_deviation(Counter({0: 50, 1: 30, 2: 20}), law) == pytest.approx(-1.0)
    assert checks.chi_square_deviation(Counter({0: 20, 1: 30, 2: 50}), law) > checks.MAX_DEVIATION
    # Tokens that the law hardly has are counted together, and one that it does not have at all is noticed.
    assert checks.chi_square_deviation(Counter({0: 99, 2: 1}), [0.99, 0.005, 0.005]) < 1
    assert checks.chi_square_deviation(Counter({0: 90, 1: 10}), [1.0, 0.0]) > checks.MAX_DEVIATION


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: Patch) -> list[str]:
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    target, draft = (save(tmp_path / name, llama(seed)) for seed, name in enumerate(("target", "draft")))
    return ["doctor", target, "--draft", draft]


def right(_: Subject) -> Iterator[str]:
    yield from ()


def wrong(_: Subject) -> Iterator[str]:
    yield "text 1 differs at token 3"
    raise RuntimeError("no such kernel at /home/somebody/model")


def test_a_check_that_fails_is_named_and_the_status_says_so(pair, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checks, "CHECKS", {"texts are right": right, "bits are right": wrong})
    printed = ran(capsys, *pair, "--check", "--report", str(tmp_path / "mine"), status=1)
    assert "passed  texts are right\nFAILED  bits are right; the check ended with RuntimeError" in printed.out
    assert printed.err == "outrider: error: 1 of 2 checks failed; paste --report FILE into an issue\n"
    said = json.loads((tmp_path / "mine.json").read_text())
    assert (said["kind"], said["results"]["checks"][0]) == ("doctor", ["passed", "texts are right"])
    assert said["results"]["checks"][1][1].endswith("RuntimeError: no such kernel at <path>")


def test_auto_is_simulated_with_a_reports_price_tables(pair, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUTRIDER_API_KEY", "s3cret")
    ran(capsys, *pair, "--report", str(tmp_path / "my.mac"))
    read = all_tables(tmp_path / "my.json")
    assert [sorted(table) for table in read] == [["draft", "target"], ["target"]]
    assert [tuple(width for width, _ in table["target"]) for table in read] == [REPORT_WIDTHS, NUMBERS_OF_TEXTS]
    for table in read:
        scenario = Scenario(0.8, 0.1, verify_table=table["target"], draft_table=table.get("draft", ()))
        assert run_simulation(scenario, num_tokens=20, make_policy=auto).speed > 0
    said, page = json.loads((tmp_path / "my.json").read_text()), (tmp_path / "my.md").read_text()
    assert page.startswith(f"## outrider doctor\n\n{said['contents']}\n\n### this machine\n\n- processor: ")
    assert "| target, 64 tokens of text |" in page
    assert {"processor", "memory", "system", "packages"} < said["machine"].keys()
    assert said["versions"]["mlx"] in said["machine"]["packages"]
    for written in (page, json.dumps(said)):
        assert not [secret for secret in (pair[1], pair[3], str(Path.home()), "s3cret") if secret in written]


def test_a_target_that_is_too_large_in_float32_is_refused(pair: list[str], monkeypatch: Patch, capsys: Any) -> None:
    monkeypatch.setattr(checks, "recommended_working_set", lambda: 1000)
    assert "the checks need the target in float32, which takes 0.0 GB" in ran(capsys, *pair, "--check", status=1).err
