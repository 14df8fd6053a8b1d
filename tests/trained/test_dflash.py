"""DFlash: the logits of Speculators' torch classes (0.9.0), as `make_speculators_cases.py` wrote them; its texts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from drafted_runtime import NUM_TOKENS, PROMPTS, drafted
from sweeps import sweep
from trained_drafters import close, dflash_reader, expected_of, make

from actors.trained.drafter_files import DrafterFiles
from actors.trained.kinds.dflash import Anchor, DFlashReader, load_dflash, read_config
from protocol.calibration import Calibration
from protocol.errors import ModelError
from protocol.lookahead_tree import Guess

CASES = sorted(path for path in (Path(__file__).parent / "dflash").iterdir() if path.is_dir())


def case_of(name: str) -> Path:
    return next(case for case in CASES if case.name == name)


def after(reader: DFlashReader, tokens: Sequence[int], anchor: int, cache: list[Any], begin: int = 0) -> mx.array:
    """The logits after an anchor and after each token that follows it in a text, as far as a block goes."""
    given = reader.alone(Anchor(tokens[anchor], anchor, cache, anchor - begin))
    block_tokens = tokens[anchor : anchor + reader.num_foreseen]
    return reader.read_after(given, block_tokens, len(block_tokens))


def check_acceptance(
    reader: DFlashReader, expected: dict[str, mx.array], row: int, anchor: int, tokens: Sequence[int], cache: list[Any]
) -> None:
    """Compare the estimates after an anchor with a row of those in a case, all at once and one by one."""
    block = reader.alone(Anchor(tokens[0], anchor, cache, anchor))
    found = reader.acceptance_after(block, tokens[: reader.num_foreseen], reader.num_foreseen)
    assert (found is None) == ("acceptance" not in expected)
    if found is not None:
        assert mx.allclose(found, expected["acceptance"][row], rtol=0, atol=1e-4)
        for index in range(reader.num_foreseen):
            alone = reader.acceptance_after(block, tokens[: index + 1], 1)
            assert mx.allclose(alone, found[index : index + 1], rtol=0, atol=1e-5)


@sweep("case", [case for case in CASES if "paths" not in expected_of(case)])
def test_the_logits_are_those_of_the_torch_classes(case: Path) -> None:
    expected, reader = expected_of(case), dflash_reader(case)
    model, target_ids = load_dflash(DrafterFiles.read(case))
    num_blocks, num_foreseen, _ = expected["logits"].shape
    assert num_foreseen == reader.num_foreseen == model.config.num_foreseen
    cache = reader.make_cache()
    reader.read_context(expected["features"], 0, cache)
    for anchor in range(1, num_blocks):
        found = after(reader, expected["tokens"].tolist(), anchor, cache)
        if target_ids is not None:
            assert int(mx.isfinite(found).sum()) == num_foreseen * 40
            found = found[:, target_ids]
        assert close(found, expected["logits"][anchor]), anchor
        check_acceptance(reader, expected, anchor, anchor, expected["tokens"].tolist()[anchor:], cache)


@sweep("case", [case for case in CASES if "paths" in expected_of(case)])
def test_the_path_and_its_logits_are_those_of_mlx_vlm(case: Path) -> None:
    expected, reader = expected_of(case), dflash_reader(case)
    cache = reader.make_cache()
    reader.read_context(expected["features"], 0, cache)
    num_seen = expected["ordered_logits"].shape[-1]
    for index, path in enumerate(expected["paths"].tolist()):
        anchor = index + 1
        tokens = [int(expected["tokens"][anchor].item()), *path]
        assert len(path) == reader.num_foreseen
        given = reader.alone(Anchor(tokens[0], anchor, cache, anchor))
        together = reader.read_after(given, tokens[:-1], len(path))
        assert mx.argmax(together, axis=-1).tolist() == path
        assert int(mx.isfinite(together).sum()) == num_seen * len(path)
        assert close(mx.sort(together, axis=-1)[:, -num_seen:], expected["ordered_logits"][index])
        for row in range(len(path)):
            assert close(reader.read_after(given, tokens[: row + 1], 1)[0], together[row])
        check_acceptance(reader, expected, index, anchor, tokens, cache)


def test_one_that_reads_what_the_targets_last_layer_gives_is_refused() -> None:
    authors = json.loads((case_of("authors") / "config.json").read_text())
    with pytest.raises(ModelError, match="normalised output"):
        read_config(authors | {"num_target_layers": 4})


# --- a runtime ------------------------------------------------------------------------------------


@sweep("settings", [{}, {"temperature": 1.0, "acceptance": "rejection"}])
async def test_what_dspark_estimates_stands_for_its_confidence_in_what_it_drafts(settings, tmp_path, monkeypatch):
    target, seen, estimate = make("dspark", tmp_path), set[float](), 0.375
    observe, unjudged = Calibration.observe, Calibration.observe_unjudged

    def observed(calibration: Calibration, guess: Guess, was_right: bool) -> None:
        if guess.copy_kind is None:
            seen.add(guess.raw)
        observe(calibration, guess, was_right)

    def observed_unjudged(calibration: Calibration, raw: float) -> None:
        seen.add(raw)
        unjudged(calibration, raw)

    monkeypatch.setattr(Calibration, "observe", observed)
    monkeypatch.setattr(Calibration, "observe_unjudged", observed_unjudged)
    monkeypatch.setattr(DFlashReader, "acceptance_after", lambda _reader, _block, _tokens, n: mx.full(n, estimate))
    async with drafted(tmp_path, target) as rt:
        for prompt in PROMPTS:
            await rt.generate(prompt, max_tokens=NUM_TOKENS, lookahead="auto", ignore_eos=True, **settings)
    assert seen == {estimate}
