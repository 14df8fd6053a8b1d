"""What `outrider bench` measures models of its own for: shapes of real ones, and its overhead. No speed is asserted."""

import json
from typing import Any

import mlx.core as mx
import pytest
from command_line import json_of, ran
from mlx.utils import tree_flatten
from models import greedy
from sweeps import sweep

import runtime
from runtime.bench.overhead import Overhead
from runtime.bench.shapes import DRAFTER, MAX_PART_OF_MEMORY, SHAPES, STRIDE, shaped_pair

# Billions of parameters that the published models have. Gemma's output layer is its embedding, which is here twice.
BILLIONS = {"8b": 8.03, "30b-a3b": 30.53, "hybrid": 4.21, "sliding": 3.88 + 0.67, "drafter": 0.494}


def num_bytes(model) -> int:
    return sum(weight.nbytes for _, weight in tree_flatten(model.parameters()))


@sweep(("name", "billions"), BILLIONS.items())
def test_a_shape_has_as_many_weights_as_the_model_that_it_is_named_for(name, billions):
    shape = SHAPES.get(name, DRAFTER)
    weights = tree_flatten(shape.lazy_model(0, "bfloat16", None).parameters())
    assert sum(weight.size for _, weight in weights) / 1e9 == pytest.approx(billions, rel=0.003)
    assert {weight.dtype for _, weight in weights} <= {mx.bfloat16, mx.float32}
    quantized = shape.lazy_model(0, "bfloat16", {"bits": 4, "group_size": 64, "mode": "affine"})
    assert num_bytes(quantized) < 0.29 * sum(2 * weight.size for _, weight in weights)


@sweep("acceptance", [0.0, 0.75, 1.0])
def test_the_drafter_knows_the_targets_next_token_as_often_as_it_should(acceptance):
    target, draft = shaped_pair("tiny", acceptance)
    tokens = list(range(512))
    logits = [mx.argmax(model(mx.array([tokens])), axis=-1)[0].tolist() for model in (target, draft)]
    assert logits[0] == [(token + STRIDE) % 512 for token in tokens]
    agreed = sum(a == b for a, b in zip(*logits, strict=True))
    assert agreed / 512 == pytest.approx(acceptance, abs=0.06 if 0 < acceptance < 1 else 0)


def test_a_target_that_does_not_fit_has_fewer_layers_and_says_so():
    target, draft = shaped_pair("tiny", 0.5)
    whole, draft_bytes = num_bytes(target), num_bytes(draft)
    cut, _ = shaped_pair("tiny", 0.5, memory_bytes=int((whole + draft_bytes - 1) / MAX_PART_OF_MEMORY))
    assert (len(cut.layers), len(target.layers)) == (1, 2)
    assert "1 of 2 layers, for lack of memory" in cut.source_name
    with pytest.raises(runtime.ModelError, match="one layer of tiny needs"):
        shaped_pair("tiny", 0.5, memory_bytes=1000)


@pytest.mark.slow
def test_every_contender_writes_a_shapes_text_with_the_given_acceptance(capsys):
    asked = ["--shape", "tiny", "--acceptance", "0.8", "--quantize", "4", "--repeats", "1", "--max-tokens", "48"]
    result = json_of(capsys, "bench", *asked, "--num-draft-tokens", "1", "--lookahead", "1,auto", "--json")
    assert result["target"] == "tiny (4 bits, random weights)"
    assert result["draft"] == "tiny (bfloat16, random weights, guesses right with probability 0.8)"
    for row in result["rows"]:
        assert (row["same_texts"], row["failure"]) == (3, None)
    acceptance = {row["name"]: row["acceptance"] for row in result["rows"]}
    assert acceptance["mlx-lm speculative 1"] == pytest.approx(0.8, abs=0.15)
    assert acceptance["outrider lookahead 1"] == pytest.approx(0.8, abs=0.15)


def test_a_drafter_may_be_one_layer_of_its_target():
    for name, shape in SHAPES.items():
        layers = {"num_hidden_layers": 1} | ({"full_attention_interval": 1} if name == "hybrid" else {})
        one_layer = shape.lazy_model(1, "bfloat16", None, **layers)
        assert num_bytes(one_layer) < num_bytes(shape.lazy_model(0, "bfloat16", None))
    target, draft = shaped_pair("tiny", 1.0, drafter="layer")
    assert (len(draft.layers), len(target.layers)) == (1, 2)
    assert draft.source_name.startswith("one layer (")
    text = greedy(draft, [3, 5], 9)
    assert text == greedy(target, [3, 5], 9)


# --- overhead ------------------------------------------------------------------------------------

OURS = ["outrider plain", "outrider resting", "outrider lookahead 2"]


@pytest.mark.slow
def test_the_command_measures_each_way_with_each_number_of_streams(capsys):
    command = ["bench", "--overhead", "--streams", "1,3", "--max-tokens", "16", "--repeats", "1"]
    out, err = ran(capsys, *command, "--json")
    assert "the target is" not in err  # it has models of its own
    said = json.loads(out)
    names = ["mlx-lm generate_step", "mlx-lm BatchGenerator", *OURS, "mlx-lm BatchGenerator", *OURS]
    assert [row["name"] for row in said["rows"]] == names
    assert said["is_complete"]
    assert all(row["median"] > 0 for row in said["rows"])


def test_without_numbers_of_streams_the_command_measures_its_defaults(monkeypatch, capsys):
    streams: list[tuple[int, ...]] = []

    async def measure(self: Overhead, *_: Any, **__: Any) -> None:
        streams.append(self.streams)

    monkeypatch.setattr(Overhead, "measure", measure)
    assert json_of(capsys, "bench", "--overhead", "--json")["repeats_done"] == 0
    assert streams == [Overhead().streams]
