"""DFlash: the logits of Speculators' torch classes (0.9.0), as `make_dflash_cases.py` wrote them; its texts."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from architectures import build
from drafted_runtime import (
    NUM_TOKENS,
    PROMPTS,
    check_greedy,
    check_reuse,
    check_seeded,
    drafted,
    features_of,
    fresh_proposals,
)
from sweeps import sweep
from trained_drafters import BLOCK_SIZE, make, write_dflash

import runtime
from actors.trained.block_sequence import BlockSequence
from actors.trained.drafter_files import DrafterFiles
from actors.trained.kinds.dflash import DFlashReader, load_dflash, read_config
from actors.trained.kinds.target_parts import embedding_of, head_of
from protocol.calibration import Calibration
from protocol.errors import ModelError, RewindError
from protocol.lookahead_tree import Guess

CASES = sorted(path for path in (Path(__file__).parent / "dflash").iterdir() if path.is_dir())
VOCAB_SIZE = 96


def case_of(name: str) -> Path:
    return next(case for case in CASES if case.name == name)


def expected_of(case: Path) -> dict[str, mx.array]:
    expected: dict[str, mx.array] = mx.load(str(case / "expected.npz"))  # type: ignore[assignment]
    return expected


def reader_of(case: Path) -> DFlashReader:
    expected = expected_of(case)
    model, target_ids = load_dflash(DrafterFiles.read(case))
    own_head = None if target_ids is None else model.lm_head
    return DFlashReader(
        model,
        target_ids,
        VOCAB_SIZE,
        lambda tokens: expected["embedding"][tokens],
        own_head or (lambda hidden: hidden @ expected["head"].T),
    )


def close(found: mx.array, expected: mx.array) -> bool:
    """Whether logits are the same, those of ids that the drafter lacks included."""
    return bool(mx.all((found == expected) | (mx.abs(found - expected) < 1e-4 * (1 + mx.abs(expected)))))


def after(reader: DFlashReader, tokens: Sequence[int], anchor: int, cache: list[Any], begin: int = 0) -> mx.array:
    """The logits after an anchor and after each token that follows it in a text, as far as a block goes."""
    given = reader.read_block(tokens[anchor], anchor, cache, anchor - begin)
    block_tokens = tokens[anchor : anchor + reader.num_foreseen]
    return reader.read_after(given, block_tokens, len(block_tokens))


def check_acceptance(
    reader: DFlashReader, expected: dict[str, mx.array], row: int, anchor: int, tokens: Sequence[int], cache: list[Any]
) -> None:
    """Compare the estimates after an anchor with a row of those in a case, all at once and one by one."""
    block = reader.read_block(tokens[0], anchor, cache, anchor)
    found = reader.acceptance_after(block, tokens[: reader.num_foreseen], reader.num_foreseen)
    assert (found is None) == ("acceptance" not in expected)
    if found is not None:
        assert mx.allclose(found, expected["acceptance"][row], rtol=0, atol=1e-4)
        for index in range(reader.num_foreseen):
            alone = reader.acceptance_after(block, tokens[: index + 1], 1)
            assert alone is not None
            assert mx.allclose(alone, found[index : index + 1], rtol=0, atol=1e-5)


@sweep("case", [case for case in CASES if "paths" not in expected_of(case)])
def test_the_logits_are_those_of_the_torch_classes(case: Path) -> None:
    expected, reader = expected_of(case), reader_of(case)
    model, target_ids = load_dflash(DrafterFiles.read(case))
    num_blocks, num_foreseen, _ = expected["logits"].shape
    assert num_foreseen == reader.num_foreseen == model.config.num_foreseen
    cache = reader.make_cache()
    reader.read_context(expected["features"], 0, cache)
    for anchor in range(1, num_blocks):
        found = after(reader, expected["tokens"].tolist(), anchor, cache)  # type: ignore[arg-type]
        if target_ids is not None:
            assert int(mx.isfinite(found).sum()) == num_foreseen * 40
            found = found[:, target_ids]
        assert close(found, expected["logits"][anchor]), anchor
        check_acceptance(reader, expected, anchor, anchor, expected["tokens"].tolist()[anchor:], cache)


@sweep("case", [case for case in CASES if "paths" in expected_of(case)])
def test_the_path_and_its_logits_are_those_of_mlx_vlm(case: Path) -> None:
    expected, reader = expected_of(case), reader_of(case)
    cache = reader.make_cache()
    reader.read_context(expected["features"], 0, cache)
    num_seen = expected["ordered_logits"].shape[-1]
    for index, path in enumerate(expected["paths"].tolist()):  # type: ignore[arg-type]
        anchor = index + 1
        tokens = [int(expected["tokens"][anchor].item()), *path]
        assert len(path) == reader.num_foreseen
        given = reader.read_block(tokens[0], anchor, cache, anchor)
        together = reader.read_after(given, tokens[:-1], len(path))
        assert mx.argmax(together, axis=-1).tolist() == path
        assert int(mx.isfinite(together).sum()) == num_seen * len(path)
        assert close(mx.sort(together, axis=-1)[:, -num_seen:], expected["ordered_logits"][index])
        for row in range(len(path)):
            assert close(reader.read_after(given, tokens[: row + 1], 1)[0], together[row])
        check_acceptance(reader, expected, index, anchor, tokens, cache)


def test_features_may_come_in_pieces() -> None:
    case = case_of("sliding")
    expected, reader = expected_of(case), reader_of(case)
    cache = reader.make_cache()
    for begin, end in ((0, 3), (3, 4), (4, 9)):
        reader.read_context(expected["features"][begin:end], begin, cache)
    assert close(after(reader, expected["tokens"].tolist(), 9, cache), expected["logits"][9])  # type: ignore[arg-type]


def changed(case: Path, folder: Path, **changes: Any) -> Path:
    """A copy of a case with another configuration."""
    shutil.copytree(case, folder, dirs_exist_ok=True)
    config = json.loads((case / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))
    return folder


@sweep(
    ("changes", "said"),
    [
        ({"mask_token_id": "absent"}, "has no 'mask_token_id'"),
        ({"mask_token_id": None}, "cannot be read"),
        ({"aux_hidden_state_layer_ids": [1, 2]}, "is not what its configuration says"),
        ({"block_size": 1}, "must have 2 tokens or more"),
        ({"draft_vocab_size": 40}, "which is which"),
    ],
)
def test_what_cannot_be_is_said(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said):
        load_dflash(DrafterFiles.read(changed(case_of("whole"), tmp_path, **changes)))


def test_layers_that_are_not_known_are_refused() -> None:
    config = json.loads((case_of("whole") / "config.json").read_text())
    layer = config["transformer_layer_config"]
    with pytest.raises(ModelError, match="activation 'gelu'"):
        read_config(config | {"transformer_layer_config": layer | {"hidden_act": "gelu"}})
    rope = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6}}
    with pytest.raises(ModelError, match="different rotary embeddings"):
        read_config(config | {"transformer_layer_config": layer | {"rope_parameters": rope}})
    authors = json.loads((case_of("authors") / "config.json").read_text())
    with pytest.raises(ModelError, match="normalised output"):
        read_config(authors | {"num_target_layers": 4})


def test_ids_that_the_target_lacks_are_refused(tmp_path: Path) -> None:
    folder = changed(case_of("reduced"), tmp_path)
    weights: dict[str, mx.array] = mx.load(str(folder / "model.safetensors"))  # type: ignore[assignment]
    mx.save_safetensors(str(folder / "model.safetensors"), weights | {"d2t": weights["d2t"] + 60})
    with pytest.raises(ModelError, match="names ids that its target, with 96, does not have"):
        load_dflash(DrafterFiles.read(folder))


def test_a_folder_without_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        load_dflash(DrafterFiles.read(tmp_path))


# --- a text -------------------------------------------------------------------------------------------

FEATURES = mx.random.normal((60, 96), key=mx.random.key(2))
TOKENS = tuple(int(token) for token in mx.random.randint(0, 95, (60,), key=mx.random.key(3)).tolist())  # type: ignore[union-attr]


@pytest.fixture(scope="module", params=["whole", "reduced", "from_anchor", "dflash2", "dspark_authors"])
def reader(request: pytest.FixtureRequest) -> DFlashReader:
    return reader_of(case_of(request.param))


def block(reader: DFlashReader, tokens: Sequence[int], anchor: int, begin: int = 0) -> mx.array:
    """What is predicted for the positions after an anchor, from features of the positions from `begin` on."""
    cache = reader.make_cache()
    reader.read_context(FEATURES[begin:anchor], begin, cache)
    return after(reader, tokens, anchor, cache, begin)


@pytest.mark.parametrize("seed", range(6))
def test_a_block_follows_what_is_committed_however_it_came(reader: DFlashReader, seed: int) -> None:
    draws = random.Random(seed)
    sequence = BlockSequence(reader)
    committed = draws.randint(2, 8)
    given = 0
    while committed < 40:
        if draws.random() < 0.8:
            sequence.give(given, FEATURES[given : committed - 1])
            given = committed - 1
        keep = min(sequence.length, sequence.rewind(min(sequence.length, committed)))
        logits = sequence.feed(TOKENS[keep:committed], 1) if keep < committed else None
        sequence.check(committed)
        # Ahead, rightly or wrongly: the tokens between change nothing that was computed.
        text = [*TOKENS[:committed]]
        for ahead in range(draws.randint(1, 6)):
            index = committed + ahead - 1 - given
            if given and logits is not None:
                expected = block(reader, text, given)
                if index < reader.num_foreseen:
                    assert close(logits[0], expected[index])
                else:
                    assert not logits.any()
                assert sequence.foreseen == given + 1 + reader.num_foreseen
            text.append(draws.randrange(95))
            logits = sequence.feed_lazy(mx.array([text[-1]]))
        committed += draws.randint(1, 5)
        sequence.rewind(min(sequence.length, given + 1))
    sequence.close()


def test_rows_of_a_text_that_is_caught_up_with_come_block_by_block(reader: DFlashReader) -> None:
    sequence = BlockSequence(reader)
    sequence.give(0, FEATURES[:29])
    sequence.feed(TOKENS[:10], 0)
    rows = sequence.feed(TOKENS[10:30], 20)
    assert rows is not None
    assert rows.shape == (20, VOCAB_SIZE)
    for i, row in enumerate(rows):
        # After the token at position 10 + i.
        anchor = 10 + i // reader.num_foreseen * reader.num_foreseen
        assert close(row, block(reader, TOKENS, anchor)[i % reader.num_foreseen])


def test_nothing_is_foreseen_without_features(reader: DFlashReader) -> None:
    sequence = BlockSequence(reader)
    logits = sequence.feed(TOKENS[:4], 2)
    assert logits is not None
    assert not logits.any()
    assert sequence.awaits_features
    with pytest.raises(RewindError, match="asked to rewind to 5"):
        sequence.rewind(5)
    with pytest.raises(RewindError, match="should have 3 tokens"):
        sequence.check(3)


def test_a_text_whose_beginning_has_no_features_is_read_from_where_they_begin(reader: DFlashReader) -> None:
    sequence = BlockSequence(reader)
    sequence.give(3, FEATURES[3:10])
    logits = sequence.feed(TOKENS[:11], 1)
    assert logits is not None
    assert close(logits[0], block(reader, TOKENS, 10, begin=3)[0])
    # Features between are missing.
    sequence.give(15, FEATURES[15:20])
    logits = sequence.feed(TOKENS[11:21], 1)
    assert logits is not None
    assert close(logits[0], block(reader, TOKENS, 20, begin=15)[0])
    # Some come a second time.
    sequence.give(17, FEATURES[17:22])
    logits = sequence.feed(TOKENS[21:23], 1)
    assert logits is not None
    assert close(logits[0], block(reader, TOKENS, 22, begin=15)[0])


@pytest.mark.parametrize("start", [5, 7, 9])
def test_another_text_is_read_with_its_own_features(reader: DFlashReader, start: int) -> None:
    sequence = BlockSequence(reader)
    sequence.give(0, FEATURES[:15])
    sequence.feed(TOKENS[:16], 1)
    sequence.give(15, FEATURES[30:32])
    assert sequence.num_bytes > 0
    assert sequence.reusable_length(9, 19) == 9
    sequence.reuse(7)
    assert (sequence.length, sequence.awaits_features) == (7, True)
    tokens = (*TOKENS[:9], *TOKENS[40:50])
    sequence.give(start, FEATURES[start:12])
    logits = sequence.feed(tokens[7:13], 1)
    assert logits is not None
    assert close(logits[0], block(reader, tokens, 12)[0])


# --- a runtime ------------------------------------------------------------------------------------


@pytest.mark.slow
@sweep("name, lookahead", [("llama", 1), ("llama", 8), ("lfm2", 3), ("lfm2", "auto")])
async def test_greedy_texts_are_the_targets(name: str, lookahead: Any, tmp_path: Path) -> None:
    built = build(name)
    async with drafted(write_dflash(tmp_path, built), built) as rt:
        statistics = await check_greedy(rt, built, lookahead)
        if lookahead == 8:
            # A block has no more.
            assert statistics.proposed <= (BLOCK_SIZE - 1) * statistics.rounds


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next"])
async def test_seeded_texts_are_those_without_a_drafter(name: str, tmp_path: Path) -> None:
    built = build(name)
    async with drafted(write_dflash(tmp_path, built), built, max_batch=8) as rt:
        await check_seeded(rt, lookahead=2)


async def test_a_text_may_go_on_from_an_earlier_one(tmp_path: Path) -> None:
    built = build("llama")
    async with drafted(write_dflash(tmp_path, built), built) as rt:
        await check_reuse(rt, built)


async def test_open_takes_a_folder(tmp_path: Path) -> None:
    built = build("llama")
    async with runtime.open((built, None), write_dflash(tmp_path, built)) as rt:
        await check_greedy(rt, built, 2)
        assert rt.estimates.draft_seconds > 0
        await rt.detach_draft()
        await rt.attach_draft(tmp_path)
        await check_greedy(rt, built, 2)


@sweep("settings", [{}, {"temperature": 1.0, "acceptance": "rejection"}, {"temperature": 1.0, "acceptance": "block"}])
async def test_what_dspark_estimates_stands_for_its_confidence_in_what_it_drafts(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, seen, estimate = make("dspark", tmp_path), list[tuple[int, float]](), 0.375
    observe, unjudged = Calibration.observe, Calibration.observe_unjudged

    def observed(calibration: Calibration, guess: Guess, was_right: bool) -> None:
        seen.append((guess.rank, guess.raw))
        observe(calibration, guess, was_right)

    def observed_unjudged(calibration: Calibration, raw: float) -> None:
        seen.append((0, raw))
        unjudged(calibration, raw)

    monkeypatch.setattr(Calibration, "observe", observed)
    monkeypatch.setattr(Calibration, "observe_unjudged", observed_unjudged)
    monkeypatch.setattr(DFlashReader, "acceptance_after", lambda _reader, _block, _tokens, n: mx.full(n, estimate))
    async with drafted(tmp_path, target) as rt:
        for prompt in PROMPTS:
            await rt.generate(prompt, max_tokens=NUM_TOKENS, lookahead="auto", ignore_eos=True, **settings)
    assert {raw for rank, raw in seen if rank == 0} == {estimate}
    assert {raw for rank, raw in seen if rank > 0} - {estimate}


async def test_what_is_drafted_after_a_miss_is_a_block_on_the_targets_features(tmp_path: Path) -> None:
    built = build("llama")
    folder = write_dflash(tmp_path, built)
    text, proposals = await fresh_proposals(folder, built, lookahead=3)
    features = features_of(built, text, load_dflash(DrafterFiles.read(folder))[0].config.feature_layers)
    reader = DFlashReader(
        load_dflash(DrafterFiles.read(folder))[0],
        None,
        64,
        embedding_of(built, "the drafter"),
        head_of(built, "the drafter"),
    )
    for position, tokens in proposals:
        cache = reader.make_cache()
        reader.read_context(features[: position - 1], 0, cache)
        logits = after(reader, [*text[:position], *tokens], position - 1, cache)
        assert tokens == tuple(mx.argmax(logits[: len(tokens)], axis=-1).tolist())  # type: ignore[arg-type]


@sweep(
    ("changes", "said"),
    [
        ({"hidden_size": 48}, "reads hidden states of a width of 48, and those of this target have 32"),
        ({"vocab_size": 65}, "made for a target with 65 tokens, and this one has 64"),
        ({"mask_token_id": 64}, "made for a target with 65 tokens, and this one has 64"),
        ({"aux_hidden_state_layer_ids": [0, 1, 9]}, "it was made for another one"),
    ],
)
async def test_another_target_is_refused_with_what_differs(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    built = build("llama")
    write_dflash(tmp_path, built, **changes)
    with pytest.raises(ModelError, match=said):
        async with runtime.open((built, None), tmp_path):
            raise AssertionError("should not be reached")
