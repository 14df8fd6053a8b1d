"""Medusa: the logits of the authors' definition in torch, as `make_medusa_cases.py` wrote them down; its texts."""

import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from sweeps import sweep
from trained_drafters import expected_of

from actors.trained.drafter_files import DrafterFiles
from actors.trained.kinds.medusa import HeadPass, HeadSequence, load_medusa
from actors.trained.kinds.torch_file import load_torch_file
from protocol.errors import ModelError

CASES = sorted(path for path in (Path(__file__).parent / "medusa").iterdir() if path.is_dir())


@sweep("case", CASES)
def test_the_logits_are_those_of_the_authors_definition(case: Path) -> None:
    expected, model = expected_of(case), load_medusa(DrafterFiles.read(case))
    assert len(model.heads) == len(expected["logits"])
    for head, logits in zip(model.heads, expected["logits"], strict=True):
        assert mx.allclose(head(expected["hidden"]), logits, rtol=1e-4, atol=1e-4)


def test_whole_models_with_heads_are_read_too(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "one_block")
    weights: dict[str, mx.array] = mx.load(str(case / "medusa_lm_head.safetensors"))
    whole = {f"medusa_head.{name}": value for name, value in weights.items()} | {"model.norm.weight": mx.ones(16)}
    mx.save_safetensors(str(tmp_path / "model-00001.safetensors"), whole)
    shutil.copy(case / "config.json", tmp_path)
    expected = expected_of(case)
    [head, *_] = load_medusa(DrafterFiles.read(tmp_path)).heads
    assert mx.allclose(head(expected["hidden"]), expected["logits"][0], rtol=1e-4, atol=1e-4)


# --- files of torch.save --------------------------------------------------------------------------


class _Runs:
    def __reduce__(self) -> Any:
        return print, ("this must not run",)


@sweep("content", [_Runs(), {"a": 1}, [1]])
def test_a_file_of_torch_with_anything_but_tensors_is_refused(content, tmp_path, capsys):
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


# --- a text ---------------------------------------------------------------------------------------

FEATURES = mx.random.normal((90, 16), key=mx.random.key(3))


@sweep("chunks", [(90,), (30, 60), (80, 5, 5), (89, 1)])
def test_each_position_is_drafted_by_its_head_on_the_last_features(chunks: tuple[int, ...]) -> None:
    heads = load_medusa(DrafterFiles.read(CASES[0])).heads
    sequence = HeadSequence(lambda hidden: 2 * hidden, [*map(HeadPass, heads)], 16, 40)
    begin = 0
    for size in chunks:
        sequence.give(begin, FEATURES[begin : begin + size])
        begin += size
    sequence.feed((0,) * 70, 0)
    together = sequence.feed((0,) * 24, 24)
    for i, row in enumerate(together):
        # After the token at position 70 + i; the last features are those of position 89.
        position = min(69 + i, 89)
        head = 69 + i - position
        if head < len(heads):
            assert mx.allclose(row, heads[head](2 * FEATURES[position]), atol=1e-5)
        else:
            assert not row.any()
