"""Layer evaluation, held against a scheduler that stalls everybody above ten active tasks, as MLX's does."""

from contextlib import ExitStack
from typing import Any

import attrs
import mlx.core as mx
import pytest
from architectures import ARCHITECTURES, build
from cache_subjects import ATOL
from completions import open_and_close
from models import greedy, llama, prompt_of
from sweeps import sweep

import runtime
from actors.mlx import layer_evaluation
from actors.mlx.cache_options import CacheOptions
from actors.mlx.layer_evaluation import MAX_LAYERS_IN_FLIGHT, LayerEvaluation, evaluating
from actors.mlx.model import MLXModel
from actors.workers.core_sharing import CORES
from runtime.loading.model_sources import LAYER_EVALUATION_VARIABLE

MAX_ACTIVE_TASKS = 10  # mlx/transforms.cpp
NUM_LAYERS = 24


@attrs.define
class FakeScheduler:
    """The active tasks of one thread that evaluates. `waits` counts how often it waited while the device had nothing to
    do.
    """

    tasks_a_layer: int
    num_active: int = 0
    most_active: int = 0
    waits: int = 0
    _submitted: list[Any] = attrs.field(factory=list)

    def async_eval(self, array: Any) -> None:
        self._submitted.append(array)
        self.num_active += self.tasks_a_layer
        self.most_active = max(self.most_active, self.num_active)

    def eval(self, array: Any) -> None:
        if not any(array is each for each in self._submitted):
            self.async_eval(array)
        while self._submitted:
            done = self._submitted.pop(0)
            self.num_active -= self.tasks_a_layer
            if done is array:
                break
        self.waits += not self._submitted


def run_layers(evaluation: LayerEvaluation) -> None:
    """What the layers of one pass do with their results."""
    with evaluating(evaluation):
        for number in range(NUM_LAYERS):
            if (on_layer := layer_evaluation._on_layer.get()) is not None:
                on_layer([number])


@sweep("tasks_a_layer", [0, 1, 2])
def test_passes_stay_below_the_throttle_and_pipelined_ones_keep_busy(tasks_a_layer, monkeypatch):
    in_flight = MAX_LAYERS_IN_FLIGHT * tasks_a_layer
    for how, num_computing, most_active, waits in (
        (LayerEvaluation.PIPELINED, 2, in_flight, 0),
        (LayerEvaluation.WAITING, 1, in_flight, 0),
        (LayerEvaluation.WAITING, 2, tasks_a_layer, NUM_LAYERS),
        (LayerEvaluation.WHOLE, 2, 0, 0),
    ):
        scheduler = FakeScheduler(tasks_a_layer)
        monkeypatch.setattr(mx, "eval", scheduler.eval)
        monkeypatch.setattr(mx, "async_eval", scheduler.async_eval)
        with ExitStack() as stack:
            for _ in range(num_computing):
                stack.enter_context(CORES.computing())
            run_layers(how)
        assert (scheduler.most_active, scheduler.waits) == (most_active, waits)
        assert scheduler.most_active + 2 <= MAX_ACTIVE_TASKS  # a drafter's pass beside it


@sweep(
    ("device", "wanted", "expected"),
    [
        (mx.cpu, None, LayerEvaluation.WAITING),
        (mx.gpu, None, LayerEvaluation.WHOLE),
        (mx.cpu, LayerEvaluation.WHOLE, LayerEvaluation.WHOLE),
        (mx.gpu, LayerEvaluation.PIPELINED, LayerEvaluation.PIPELINED),
    ],
)
def test_the_device_decides_unless_somebody_else_does(device, wanted, expected, monkeypatch):
    model = MLXModel(llama(), CacheOptions(), layer_evaluation=wanted)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(device))
    assert model.open_sequence(alongside_model=True).layer_evaluation is expected
    assert model.open_sequence(alongside_model=False).layer_evaluation is LayerEvaluation.WHOLE


@sweep("evaluation", LayerEvaluation)
async def test_the_text_is_the_same_however_layers_are_evaluated(evaluation, monkeypatch):
    monkeypatch.setenv(LAYER_EVALUATION_VARIABLE, evaluation.value)
    target, prompt = llama(num_hidden_layers=6), prompt_of(17)
    expected = greedy(target, prompt, 12)
    async with runtime.open((target, None), (llama(seed=1), None)) as rt:
        completion = await rt.generate(prompt, max_tokens=12, lookahead=3)
    assert [token.id for token in completion.tokens] == expected


def test_a_pass_waits_for_its_layers_from_the_moment_when_another_model_computes(monkeypatch):
    scheduler = FakeScheduler(tasks_a_layer=1)
    monkeypatch.setattr(mx, "eval", scheduler.eval)
    monkeypatch.setattr(mx, "async_eval", scheduler.async_eval)
    num_active = []
    with CORES.computing(), evaluating(LayerEvaluation.WAITING), ExitStack() as another:
        for number in range(NUM_LAYERS):
            if number == 10:
                another.enter_context(CORES.computing())
            if number == 15:
                another.close()
            on_layer = layer_evaluation._on_layer.get()
            on_layer([number])
            num_active.append(scheduler.num_active)
    ahead = MAX_LAYERS_IN_FLIGHT - 1
    assert num_active == [1, *[ahead] * 9, *[0] * 5, 1, *[ahead] * 8]


def test_reading_a_prompt_leaves_out_the_last_layers_result(monkeypatch: pytest.MonkeyPatch) -> None:
    submitted = []
    monkeypatch.setattr(mx, "async_eval", submitted.append)
    model = MLXModel(llama(num_hidden_layers=6), CacheOptions(), layer_evaluation=LayerEvaluation.PIPELINED)
    sequence = model.open_sequence(alongside_model=True)
    with model.evaluating_layers():
        sequence.feed((1, 2, 3), 0)
    assert len(submitted) == 5


async def test_a_wrong_value_of_the_variable_is_an_error_before_anything_is_loaded(monkeypatch):
    monkeypatch.setenv(LAYER_EVALUATION_VARIABLE, "sliced")
    with pytest.raises(runtime.SettingsError, match="OUTRIDER_LAYER_EVALUATION must be one of whole, waiting"):
        await open_and_close(runtime.DEMO_TARGET)


# --- the last position alone ------------------------------------------------------------------------

# Their last layer is run several times, or returns more than one array, or one of more dimensions.
COMPUTE_ALL_LOGITS = {"deepseek_v41", "gemma3n", "gemma4", "gemma4_text", "hunyuan", "iquestloopcoder", "kimi_k3"}
COMPUTE_ALL_LOGITS |= {"nanbeige", "rwkv7"}


@sweep("name", ARCHITECTURES)
def test_logits_of_the_last_token_alone_are_those_among_all(name: str) -> None:
    model = MLXModel(build(name), CacheOptions())
    tokens = tuple(prompt_of(9, vocab_size=model.vocab_size))
    with model.evaluating_layers():
        among_all, alone = (model.open_sequence(alongside_model=False) for _ in range(2))
        assert alone.computes_all_logits  # nothing is known before the first pass
        expected = among_all.feed(tokens, len(tokens))
        assert alone.computes_all_logits == (name in COMPUTE_ALL_LOGITS)
        found = alone.feed(tokens, 1)
        assert expected is not None
        assert found.shape == (1, model.vocab_size)
        assert mx.allclose(found, expected[-1:], atol=ATOL)
        next_ones = [sequence.feed((3,), 1) for sequence in (alone, among_all)]
        assert mx.allclose(*next_ones, atol=ATOL)
    assert alone.computes_all_logits
