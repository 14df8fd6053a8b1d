"""The doctor's report on a drafter that was trained for its target."""

from __future__ import annotations

import mlx.core as mx
import mlx_lm
import pytest
from models import greedy
from sweeps import sweep

import runtime
from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import MLXModel
from actors.trained.drafter_model import TrainedDrafter
from runtime.doctor.agreement import BEGINNINGS, agreement
from runtime.doctor.report import ExaminedDrafter, examine, report
from runtime.measuring.figures import spread
from runtime.measuring.pass_times import Passes, time_passes

PASSES = Passes({1: spread([0.001, 0.002, 0.004]), 3: spread([0.004, 0.005, 0.007])})


def rows_of(*layers: int) -> dict[str, str]:
    drafter = ExaminedDrafter("EAGLE-3", layers, 6, 500, 1000, 2_500_000, ("bfloat16",), PASSES)
    return dict(drafter.rows)


def test_what_it_is_and_what_it_costs_is_said():
    assert rows_of(1, 2) == {
        "kind": "EAGLE-3",
        "reads": "what enters layers 1 and 2 of 6",
        "proposes": "500 of the target's 1,000 tokens",
        "weights": "2.5 MB, bfloat16",
        "a draft step": "T_d(1) = 2.00 ms (1.00–4.00)",
        "a refresh of 3": "T_d(3) = 5.00 ms (4.00–7.00)",
    }


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
    assert rows_of(*layers)["reads"] == said


@pytest.mark.slow
async def test_the_bundled_trained_drafter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("runtime.doctor.report.BEGINNINGS", BEGINNINGS[:1])
    monkeypatch.setitem(time_passes.__kwdefaults__, "repeats", 2)
    diagnosis = await examine(runtime.DEMO_TARGET, runtime.DEMO_TRAINED_DRAFT)
    found = diagnosis.draft
    assert isinstance(found, ExaminedDrafter)
    assert (found.kind, found.feature_layers, found.num_layers) == ("EAGLE-3", (2, 3, 4), 7)
    assert (found.num_draft_tokens, found.vocab_size) == (2048, 4096)
    assert found.num_bytes == pytest.approx(5.5e6, rel=0.05)
    shares = {name: int(row.removeprefix("with ").partition("%")[0]) for name, row in found.agreement}
    assert list(shares) == [
        "agrees", "agrees, read a layer earlier", "agrees, read a layer later", "agrees at 8 bits", "agrees at 4 bits",
    ]  # fmt: skip
    assert shares["agrees"] > 50
    assert abs(shares["agrees"] - shares["agrees at 8 bits"]) < 10
    assert all(" ms" in row for name, row in found.agreement if "bits" in name)
    # Wider passes read hidden states of the target, and so are real passes.
    assert found.passes.seconds[9] > 0
    assert diagnosis.suggestions == ()
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
