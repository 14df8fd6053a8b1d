"""Medusa: the logits of the authors' definition in torch, as `make_medusa_cases.py` wrote them down; its texts."""

from __future__ import annotations

import json
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from architectures import ARCHITECTURES, build
from drafted_runtime import check_greedy, check_reuse, check_seeded, drafted, features_of, fresh_proposals
from sweeps import sweep
from trained_drafters import write_medusa

import runtime
from actors.mlx.layer_evaluation import evaluating_layers
from actors.trained.drafter_files import DrafterFiles
from actors.trained.features import FeatureRecorder, recording
from actors.trained.head_sequence import HeadSequence
from actors.trained.kinds.medusa import Medusa, load_medusa
from actors.trained.kinds.target_parts import final_norm_of, head_of, width_of
from actors.trained.kinds.torch_file import load_torch_file
from protocol.errors import ModelError, RewindError

CASES = sorted(path for path in (Path(__file__).parent / "medusa").iterdir() if path.is_dir())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_logits_are_those_of_the_authors_definition(case: Path) -> None:
    expected: dict[str, mx.array] = mx.load(str(case / "expected.npz"))  # type: ignore[assignment]
    model = load_medusa(DrafterFiles.read(case))
    assert len(model.heads) == len(expected["logits"])
    for head, logits in zip(model.heads, expected["logits"], strict=True):
        assert mx.allclose(head(expected["hidden"]), logits, rtol=1e-4, atol=1e-4)


def test_whole_models_with_heads_are_read_too(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "one_block")
    weights: dict[str, mx.array] = mx.load(str(case / "medusa_lm_head.safetensors"))  # type: ignore[assignment]
    whole = {f"medusa_head.{name}": value for name, value in weights.items()} | {"model.norm.weight": mx.ones(16)}
    mx.save_safetensors(str(tmp_path / "model-00001.safetensors"), whole)
    shutil.copy(case / "config.json", tmp_path)
    expected: dict[str, mx.array] = mx.load(str(case / "expected.npz"))  # type: ignore[assignment]
    [head, *_] = load_medusa(DrafterFiles.read(tmp_path)).heads
    assert mx.allclose(head(expected["hidden"]), expected["logits"][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"medusa_num_heads": 5}, "asks for 5 heads of 1 blocks, and the weights have 3 of 1"),
        ({"medusa_num_layers": 2}, "asks for 3 heads of 2 blocks, and the weights have 3 of 1"),
    ],
)
def test_weights_that_do_not_fit_are_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "one_block")
    shutil.copytree(case, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(json.loads((case / "config.json").read_text()) | changes))
    with pytest.raises(ModelError, match=said):
        load_medusa(DrafterFiles.read(tmp_path))


def test_missing_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        load_medusa(DrafterFiles.read(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="there are no weights"):
        load_medusa(DrafterFiles.read(tmp_path))
    mx.save_safetensors(str(tmp_path / "medusa_lm_head.safetensors"), {"0.0.linear.weight": mx.ones((4, 4))})
    with pytest.raises(ModelError, match="has no output"):
        load_medusa(DrafterFiles.read(tmp_path))


# --- files of torch.save --------------------------------------------------------------------------


class _Runs:
    def __reduce__(self) -> Any:
        return print, ("this must not run",)


@pytest.mark.parametrize("content", [_Runs(), {"a": 1}, [1]], ids=["code", "number", "list"])
def test_a_file_of_torch_with_anything_but_tensors_is_refused(
    content: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with zipfile.ZipFile(tmp_path / "file.pt", "w") as archive:
        archive.writestr("file/data.pkl", pickle.dumps(content))
    with pytest.raises(ValueError, match=r"file\.pt"):
        load_torch_file(tmp_path / "file.pt")
    assert capsys.readouterr().out == ""


def test_a_damaged_file_of_torch_is_an_error_of_the_drafter(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "two_blocks")
    shutil.copytree(case, tmp_path, dirs_exist_ok=True)
    content = (case / "medusa_lm_head.pt").read_bytes()
    (tmp_path / "medusa_lm_head.pt").write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError, match="cannot be read"):
        load_medusa(DrafterFiles.read(tmp_path))


# --- what the heads read --------------------------------------------------------------------------

# What enters their layers is not one vector a token, or some part is not a module of its own.
WITHOUT_PARTS = {
    "deepseek_v41",
    "gemma3n",
    "iquestloopcoder",
    "longcat_flash_ngram",
    "nanochat",
    "phixtral",
    "talkie",
}


@sweep("name", ARCHITECTURES)
def test_norm_and_head_of_every_family_give_its_logits_or_are_said_to_be_missing(name: str) -> None:
    model = build(name)
    tokens = mx.array([[3, 1, 4, 1, 5]])
    recorder = FeatureRecorder(model, (len(model.layers),))
    with evaluating_layers(model), recording(recorder):
        logits = model(tokens)
    try:
        hidden = final_norm_of(model, "the drafter")(recorder.take((1, 5)))
        found = head_of(model, "the drafter")(hidden)
        width = width_of(model, "the drafter")
    except ModelError:
        assert name in WITHOUT_PARTS
        return
    assert name not in WITHOUT_PARTS
    assert width == hidden.shape[-1]
    # Some families scale or bound the logits of their head.
    order = mx.argsort(logits[0], axis=-1)[:, -3:]
    assert mx.array_equal(order, mx.argsort(found[0], axis=-1)[:, -3:])


# --- a text ---------------------------------------------------------------------------------------

FEATURES = mx.random.normal((100, 16), key=mx.random.key(3))


def doubled(hidden: mx.array) -> mx.array:
    return hidden * 2


@pytest.fixture(scope="module")
def heads() -> Medusa:
    return load_medusa(DrafterFiles.read(CASES[0]))


def text(heads: Medusa) -> HeadSequence:
    return HeadSequence(doubled, heads.heads, 16, 40)


def test_each_position_is_drafted_by_its_head_on_the_last_features(heads: Medusa) -> None:
    sequence = text(heads)
    sequence.give(0, FEATURES[:9])
    # The token at position 9 is the last of the text, and has no features yet.
    assert sequence.foreseen == 13
    logits = sequence.feed(tuple(range(10)), 1)
    for i, head in enumerate(heads.heads):
        assert logits is not None
        assert mx.allclose(logits, head(2 * FEATURES[8:9]))
        logits = sequence.feed_lazy(mx.array([7])) if i % 2 else sequence.feed((7,), 1)
    # Nothing is foreseen further on.
    assert logits is not None
    assert not logits.any()
    sequence.check(13)
    assert sequence.rewind(11) == 11
    sequence.give(9, FEATURES[9:12])
    assert sequence.foreseen == 16
    logits = sequence.feed((1, 2), 1)
    assert logits is not None
    assert mx.allclose(logits, heads.heads[0](2 * FEATURES[11:12]))
    with pytest.raises(RewindError, match="asked to rewind to 14"):
        sequence.rewind(14)
    with pytest.raises(RewindError, match="should have 12 tokens, it has 13"):
        sequence.check(12)


@pytest.mark.parametrize("chunks", [(90,), (30, 60), (80, 5, 5), (89, 1)])
def test_several_rows_at_once_are_those_of_one_at_a_time(heads: Medusa, chunks: tuple[int, ...]) -> None:
    sequence = text(heads)
    begin = 0
    for size in chunks:
        sequence.give(begin, FEATURES[begin : begin + size])
        begin += size
    sequence.feed((0,) * 70, 0)
    together = sequence.feed((0,) * 24, 24)
    assert together is not None
    for i, row in enumerate(together):
        # After the token at position 70 + i; the last features are those of position 89.
        position = min(69 + i, 89)
        head = 69 + i - position
        if head < len(heads.heads):
            assert mx.allclose(row, heads.heads[head](2 * FEATURES[position]), atol=1e-5)
        else:
            assert not row.any()


def test_another_text_does_not_read_the_features_of_the_first(heads: Medusa) -> None:
    sequence = text(heads)
    sequence.give(0, FEATURES[:9])
    sequence.feed((0,) * 10, 1)
    assert sequence.reusable_length(7, 12) == 7
    sequence.reuse(7)
    assert (sequence.length, sequence.awaits_features, sequence.num_given) == (7, True, 7)
    logits = sequence.feed((1, 2), 1)
    assert logits is not None
    assert mx.allclose(logits, heads.heads[1](2 * FEATURES[6:7]))
    sequence.give(7, FEATURES[20:21])
    logits = sequence.feed((1,), 1)
    assert logits is not None
    assert mx.allclose(logits, heads.heads[1](2 * FEATURES[20:21]))


# --- a runtime ------------------------------------------------------------------------------------


@pytest.mark.slow
@sweep("lookahead", [1, 3, 8, "auto"])
@sweep("name", ["llama", "lfm2"])
async def test_greedy_texts_are_the_targets(name: str, lookahead: Any, tmp_path: Path) -> None:
    built = build(name)
    async with drafted(write_medusa(tmp_path, built), built) as rt:
        statistics = await check_greedy(rt, built, lookahead)
        if lookahead == 8:
            # There are no more heads.
            assert statistics.proposed <= 3 * statistics.rounds


async def test_seeded_texts_are_those_without_a_drafter(tmp_path: Path) -> None:
    built = build("gemma3_text")
    async with drafted(write_medusa(tmp_path, built), built, max_batch=8) as rt:
        await check_seeded(rt, lookahead=2)


async def test_a_text_may_go_on_from_an_earlier_one(tmp_path: Path) -> None:
    built = build("llama")
    async with drafted(write_medusa(tmp_path, built), built) as rt:
        await check_reuse(rt, built)


async def test_open_takes_a_folder(tmp_path: Path) -> None:
    built = build("llama")
    async with runtime.open((built, None), write_medusa(tmp_path, built)) as rt:
        await check_greedy(rt, built, 2)
        assert rt.estimates.draft_seconds > 0
        await rt.detach_draft()
        await rt.attach_draft(tmp_path)
        await check_greedy(rt, built, 2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 48}, "reads hidden states of a width of 48, and those of this target have 32"),
        ({"vocab_size": 65}, "made for a target with 65 tokens, and this one has 64"),
    ],
)
async def test_another_target_is_refused_with_what_differs(changes: dict[str, int], said: str, tmp_path: Path) -> None:
    built = build("llama")
    write_medusa(tmp_path, built, **changes)
    with pytest.raises(ModelError, match=said):
        async with runtime.open((built, None), tmp_path):
            raise AssertionError("should not be reached")


async def test_what_is_drafted_after_a_miss_follows_from_the_targets_last_hidden_state(tmp_path: Path) -> None:
    built = build("llama")
    text, proposals = await fresh_proposals(write_medusa(tmp_path, built), built, lookahead=2)
    features, model = features_of(built, text), load_medusa(DrafterFiles.read(tmp_path))
    for position, tokens in proposals:
        hidden = built.model.norm(features[position - 2])
        assert tokens == tuple(mx.argmax(head(hidden)).item() for head in model.heads[: len(tokens)])
