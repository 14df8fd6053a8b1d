"""The doctor's report on a drafter that was trained for its target."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from models import greedy
from sweeps import sweep

import runtime
from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import MLXModel
from actors.trained.drafter_model import TrainedDrafter
from runtime.doctor.agreement import BEGINNINGS, agreement, agreement_rows
from runtime.doctor.report import described_layers, examine, report
from runtime.measuring.pass_times import time_passes


@sweep(
    ("layers", "said"),
    [
        ((2,), "what enters layer 2 of 6"),
        ((0, 2, 5), "what enters layers 0, 2 and 5 of 6"),
        ((6,), "what the last of 6 layers gives"),
        ((1, 6), "what enters layer 1 of 6, what the last of 6 layers gives"),
    ],
)
def test_what_it_reads_is_said(layers, said):
    assert described_layers(layers, 6) == said


def test_a_slow_target_is_not_made_to_write_for_minutes():
    nothing: Any = None
    rows = agreement_rows(nothing, [(1, 2), (3,)], nothing, decode_s=1.0)
    assert rows == (("agrees", "not measured: 120 tokens of the target take 120 s"),)


@pytest.mark.slow
async def test_the_bundled_trained_drafter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("runtime.doctor.report.BEGINNINGS", BEGINNINGS[:1])
    monkeypatch.setattr("runtime.doctor.agreement.NUM_TOKENS", 40)
    monkeypatch.setitem(time_passes.__kwdefaults__, "repeats", 2)
    diagnosis = await examine(runtime.DEMO_TARGET, runtime.DEMO_TRAINED_DRAFT)
    found = diagnosis.draft
    rows = dict(found.rows)
    assert (rows["kind"], rows["reads"]) == ("EAGLE-3", "what enters layers 2, 3 and 4 of 7")
    assert rows["proposes"] == "2,048 of the target's 4,096 tokens"
    assert rows["weights"].startswith("5.")
    assert " MB, " in rows["weights"]
    assert rows["a draft step"].startswith("T_d(1) = ")
    assert rows["reading 9 tokens"].startswith("T_d(9) = ")
    agreed = {name: row for name, row in rows.items() if name.startswith("agrees")}
    shares = {name: int(row.removeprefix("with ").partition("%")[0]) for name, row in agreed.items()}
    assert list(shares) == [
        "agrees", "agrees, read a layer earlier", "agrees, read a layer later", "agrees at 8 bits", "agrees at 4 bits",
    ]  # fmt: skip
    assert shares["agrees"] > 50
    assert abs(shares["agrees"] - shares["agrees at 8 bits"]) < 10
    assert all(" ms" in row for name, row in agreed.items() if "bits" in name)
    # Wider passes read hidden states of the target, and so are real passes.
    assert found.passes[9].median > 0
    assert diagnosis.findings.suggestions == ()
    sections = dict(report(diagnosis))
    assert [name for name, _ in sections["pair"]] == ["cost ratio"]
    assert sections["conclusion"][-1][0] == "in short"


def test_a_drafter_agrees_less_where_it_reads_other_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    num_tokens = 30
    monkeypatch.setattr("runtime.doctor.agreement.NUM_TOKENS", num_tokens)
    built, _ = mlx_lm.load(str(runtime.DEMO_TARGET))
    target = MLXModel(built, CacheOptions())
    drafter = TrainedDrafter(runtime.DEMO_TRAINED_DRAFT, built, target.vocab_size)
    text = tuple(int(token) for token in mx.random.randint(1, 4000, (num_tokens + 9,), key=mx.random.key(1)).tolist())
    # Of a text at random nothing is named; of the target's own, most is.
    assert agreement(drafter, target, [text], drafter.feature_layers) < 0.1
    prompt = [5, 6, 7, 8]
    own = (*prompt, *greedy(built, prompt, num_tokens))
    assert (
        agreement(drafter, target, [own], drafter.feature_layers) > agreement(drafter, target, [own], (5, 6, 7)) + 0.1
    )


@pytest.mark.slow
async def test_an_mtp_layer_that_the_target_does_not_have_is_refused():
    with pytest.raises(runtime.ModelError):
        await examine(runtime.DEMO_TARGET, "mtp")
