"""`lookahead="auto"` on real texts: what a trained drafter said, replayed with the pass times of real devices.

`acceptance_traces/smollm2.jsonl` was written by `outrider bench --trace-acceptance` for SmolLM2-135M-Instruct with its
bundled drafter, in float32; `docs/speed.md` has its figures. The texts of the kind "schema" answer
`acceptance_traces/schemas.jsonl`, those of the other kinds the bundled prompts.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from device_tables import FILES, all_tables
from scenario import Scenario
from traced_models import Texts, TracedForcedText, read_trace, replay

from actors.drafters.drafter import DrafterSession

TRACE = Path(__file__).parent / "acceptance_traces" / "smollm2.jsonl"
# The time of the drafter's step, where the device's table has none of a draft model: as of SmolLM2's on a CPU.
COST_RATIO = 0.14


def scenario_of(path: Path) -> Scenario:
    table = all_tables(path)[0]
    target, draft = table["target"], table.get("draft", ())
    cost_ratio = draft[0][1] / target[0][1] if draft else COST_RATIO
    return Scenario(0.5, cost_ratio, contention=0.3, draft_slope=0.1, verify_table=target, draft_table=draft)


def texts_of(kind: str) -> Texts:
    return Texts([text for text in read_trace(TRACE) if text.category == kind])


each_device = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


@pytest.mark.slow
@each_device
def test_auto_is_near_the_best_fixed_lookahead_on_every_kind_of_text(path: Path) -> None:
    scenario, ratios = scenario_of(path), {}
    # In summaries and texts that are rewritten, most is copied, in which no fixed lookahead comes near. Each device has
    # JSON by a schema and two of the other kinds, so that each kind is replayed on three devices or more.
    at = FILES.index(path)
    for kind in ("schema", *itertools.islice(itertools.cycle(("chat", "code", "json")), at, at + 2)):
        texts = texts_of(kind)
        fixed = [replay(texts, scenario, lookahead) for lookahead in (1, 2, 4)]
        ratios[kind] = replay(texts, scenario, "auto") / max(1.0, *fixed)  # plain decoding has 1
    assert {kind: ratio for kind, ratio in ratios.items() if ratio < 0.97} == {}


@pytest.mark.slow
@each_device
def test_copies_make_summaries_faster(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, scenario = texts_of("summary"), scenario_of(path)
    with_copies = replay(texts, scenario, "auto")
    monkeypatch.setattr(DrafterSession, "copies", False)
    assert with_copies >= 1.25 * replay(texts, scenario, "auto")


@pytest.mark.slow
@each_device
def test_what_a_schema_forces_makes_its_texts_faster(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, scenario = texts_of("schema"), scenario_of(path)
    with_forced = replay(texts, scenario, "auto")
    monkeypatch.setattr(TracedForcedText, "after", lambda self, beyond: [])
    assert with_forced >= 1.03 * replay(texts, scenario, "auto")
