"""Models as `ModelSpec` says: the text is that of the same model as mlx-lm loads it."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import quantize_model
from models import greedy, llama, prompt_of, save
from sweeps import sweep

import runtime
from actors.persistence.fingerprint import fingerprint

LORA = {"rank": 4, "scale": 10.0, "dropout": 0.0}
PROMPT = prompt_of(9)
NUM_TOKENS = 24


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """A model on the disk whose layers are wide enough to be quantised."""
    return Path(save(tmp_path / "model", wide()))


def wide(seed: int = 0) -> nn.Module:
    return llama(seed, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)


def an_adapter(where: Path, *, kind: str = "lora", scale: float = 10.0, seed: int = 5) -> Path:
    """An adapter for `wide`, made by mlx-lm's tuner, with weights that change the text."""
    model, config = wide(), LORA | {"scale": scale}
    model.freeze()
    linear_to_lora_layers(model, 2, config, use_dora=kind == "dora")
    trainable = tree_flatten(model.trainable_parameters())
    keys = mx.random.split(mx.random.key(seed), len(trainable))
    pairs = zip(trainable, keys, strict=True)
    weights = {name: weight + 0.1 * mx.random.normal(weight.shape, key=key) for (name, weight), key in pairs}
    where.mkdir()
    adapter = {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": config}
    (where / "adapter_config.json").write_text(json.dumps(adapter))
    mx.save_safetensors(str(where / "adapters.safetensors"), weights)
    return where


def text_of_mlx_lm(path: Path, **options: Any) -> list[int]:
    model, _ = mlx_lm.load(str(path), **options)
    return greedy(model, PROMPT, NUM_TOKENS)


async def text(target: Any, draft: Any = None, **options: Any) -> list[int]:
    async with runtime.open(target, draft=draft, **options) as rt:
        completion = await rt.generate(PROMPT, max_tokens=NUM_TOKENS, lookahead=3 if draft else "auto")
    return [token.id for token in completion.tokens]


@sweep("kind", ["lora", "dora"])
async def test_an_adapter_changes_the_text_as_it_does_in_mlx_lm(where: Path, tmp_path: Path, kind: str) -> None:
    adapter = an_adapter(tmp_path / "adapter", kind=kind)
    expected = text_of_mlx_lm(where, adapter_path=str(adapter))
    assert expected != text_of_mlx_lm(where)
    assert await text(runtime.ModelSpec(where, adapter_path=adapter)) == expected
    assert await text(runtime.ModelSpec(where, adapter_path=adapter), draft=where) == expected


async def test_a_draft_model_with_the_targets_adapter_is_always_right(where: Path, tmp_path: Path) -> None:
    spec = runtime.ModelSpec(where, adapter_path=an_adapter(tmp_path / "adapter"))
    async with runtime.open(spec, draft=spec) as rt:
        completion = await rt.generate(PROMPT, max_tokens=NUM_TOKENS, lookahead=3)
        assert completion.statistics.accepted == completion.statistics.proposed > 0
        await rt.detach_draft()
        await rt.attach_draft(spec)
        again = await rt.generate(PROMPT, max_tokens=NUM_TOKENS, lookahead=3)
    assert [token.id for token in again.tokens] == [token.id for token in completion.tokens]


@sweep("quantize", [4, {"bits": 8, "group_size": 32}, {"mode": "mxfp4"}])
async def test_weights_are_quantised_as_mlx_lm_quantises_them(where: Path, quantize: Any) -> None:
    plain, _, config = mlx_lm.load(str(where), return_config=True)
    given = quantize if isinstance(quantize, dict) else {"bits": quantize}
    wanted = {"bits": None, "group_size": None, "mode": "affine"} | given
    with redirect_stdout(io.StringIO()):
        quantised, _ = quantize_model(plain, config, wanted["group_size"], wanted["bits"], mode=wanted["mode"])
    expected = greedy(quantised, PROMPT, NUM_TOKENS, clear_lead=0)
    assert await text(runtime.ModelSpec(where, quantize=quantize)) == expected


async def test_an_adapter_on_quantised_weights_is_on_them_after_they_were_quantised(where, tmp_path):
    adapter = an_adapter(tmp_path / "adapter")
    model, _, config = mlx_lm.load(str(where), return_config=True)
    with redirect_stdout(io.StringIO()):
        quantize_model(model, config, 32, 8)
    model = mlx_lm.utils.load_adapters(model, str(adapter))
    model.eval()
    expected = greedy(model, PROMPT, NUM_TOKENS, clear_lead=0)
    spec = runtime.ModelSpec(where, adapter_path=adapter, quantize={"bits": 8, "group_size": 32})
    assert await text(spec) == expected


async def test_nothing_is_quantised_twice(tmp_path: Path) -> None:
    model = wide()
    nn.quantize(model, group_size=32, bits=8)
    where = Path(save(tmp_path / "model", model))
    config = json.loads((where / "config.json").read_text())
    (where / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": 32, "bits": 8}}))
    with pytest.raises(runtime.ModelError, match="quantised already; leave quantize out"):
        await text(runtime.ModelSpec(where, quantize=4))


async def test_values_replace_those_of_the_configuration(where: Path) -> None:
    changed = {"rope_theta": 3.0}
    expected = text_of_mlx_lm(where, model_config=changed)
    assert expected != text_of_mlx_lm(where)
    assert await text(runtime.ModelSpec(where, model_config=changed)) == expected


async def test_options_of_the_tokenizer_reach_it(where: Path) -> None:
    spec = runtime.ModelSpec(where, tokenizer_config={"eos_token": "w7", "chat_template": "{{ messages[0].content }}"})
    async with runtime.open(spec) as rt:
        assert rt.tokenizer.eos_token_id == 7
        assert rt.encode([{"role": "user", "content": "w3 w4"}]) == (3, 4)


async def test_code_of_a_model_runs_only_where_it_is_trusted(where: Path) -> None:
    (where / "own.py").write_text("from mlx_lm.models.llama import Model, ModelArgs\n")
    config = json.loads((where / "config.json").read_text())
    (where / "config.json").write_text(json.dumps(config | {"model_file": "own.py"}))
    with pytest.raises(runtime.ModelError, match="trust_remote_code=True"):
        await text(where)
    expected = greedy(wide(), PROMPT, NUM_TOKENS)
    assert await text(runtime.ModelSpec(where, trust_remote_code=True)) == expected


async def test_variables_of_the_chat_template_are_for_all_messages_that_do_not_say_otherwise(where: Path) -> None:
    template = "{{ messages[0].content }} {{ word }}{% if add_generation_prompt %} w9{% endif %}"
    spec = runtime.ModelSpec(where, tokenizer_config={"chat_template": template})
    messages = [{"role": "user", "content": "w1"}]
    async with runtime.open(spec, chat_template_args={"word": "w5"}) as rt:
        assert rt.encode(messages) == (1, 5, 9)
        assert rt.encode(messages, word="w6") == (1, 6, 9)
        stream = rt.conversation(max_tokens=2).stream("w1")
        await stream.aclose()
        assert stream.statistics().prompt_tokens == 3


# --- what tells models apart ----------------------------------------------------------------------


def test_adapted_and_quantised_models_have_fingerprints_of_their_own(where: Path, tmp_path: Path) -> None:
    adapters = [
        an_adapter(tmp_path / "one"),
        an_adapter(tmp_path / "stronger", scale=20.0),
        an_adapter(tmp_path / "other", seed=6),
        an_adapter(tmp_path / "dora", kind="dora"),
    ]
    specs = [{}, *({"adapter_path": str(adapter)} for adapter in adapters), {"model_config": {"rope_theta": 3.0}}]
    found = [fingerprint(mlx_lm.load(str(where), **options)[0]) for options in specs]
    quantised = wide()
    nn.quantize(quantised, group_size=32, bits=4)
    assert len({*found, fingerprint(quantised)}) == len(specs) + 1
    # What was saved before adapters could be loaded is still that of the plain model.
    assert found[0] == fingerprint(wide())
    stronger = found[1].difference(found[2])
    assert stronger == "its configuration differs"


async def test_a_conversation_that_was_saved_with_an_adapter_is_not_loaded_without(where: Path, tmp_path: Path) -> None:
    spec = runtime.ModelSpec(where, adapter_path=an_adapter(tmp_path / "adapter"))
    async with runtime.open(spec) as rt:
        conversation = rt.conversation(max_tokens=4)
        await conversation.generate("w1 w2")
        await conversation.save(tmp_path / "session")
    for other in (where, runtime.ModelSpec(where, quantize=4)):
        async with runtime.open(other) as rt:
            with pytest.raises(runtime.SessionFileError):
                await rt.load(tmp_path / "session")
    async with runtime.open(spec) as rt:
        loaded = await rt.load(tmp_path / "session")
        assert (await loaded.generate("w3")).statistics.cached_tokens > 0


# --- errors ---------------------------------------------------------------------------------------


@sweep(
    ("options", "said"),
    [
        ({"adapter_path": 3}, "adapter_path must be the path of a directory or None, got 3"),
        ({"revision": ""}, "revision must be a branch, a tag, a commit or None, got ''"),
        ({"trust_remote_code": "yes"}, "trust_remote_code must be True or False, got 'yes'"),
        ({"tokenizer_config": [1]}, "tokenizer_config must be a mapping from names to values"),
        ({"model_config": {1: 2}}, "model_config must be a mapping from names to values"),
        ({"quantize": True}, "quantize must be a number of bits, a mapping or None, got True"),
        ({"quantize": 7}, "quantize takes 2, 3, 4, 5, 6 or 8 bits, got 7"),
        ({"quantize": {"group_size": 48}}, "the group_size of quantize must be 32, 64 or 128, got 48"),
        ({"quantize": {"mode": "int4"}}, "the mode of quantize must be affine, mxfp4, nvfp4, mxfp8, got 'int4'"),
        ({"quantize": {"mode": "mxfp4", "bits": 8}}, "has 4 bits in groups of 32, got 8 and 32; leave them out"),
        ({"quantize": {"bit": 4}}, "quantize has bits, group_size and mode, got 'bit' as well"),
    ],
)
def test_a_spec_says_what_is_wrong_with_it(options: dict[str, Any], said: str) -> None:
    with pytest.raises(runtime.SettingsError) as refusal:
        runtime.ModelSpec("org/model", **options)
    assert said in str(refusal.value)


@sweep(
    ("options", "error", "said"),
    [
        ({"adapter_path": "/no/such"}, runtime.ModelError, "has no adapter_config.json and no adapters.safetensors"),
        ({"revision": "main"}, runtime.SettingsError, "revision is of a hub id"),
    ],
)
async def test_what_is_not_there_is_said_before_anything_is_loaded(where, options, error, said):
    (where / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")  # no weights
    for models in ((runtime.ModelSpec(where, **options),), (where, runtime.ModelSpec(where, **options))):
        with pytest.raises(error, match=said):
            await text(*models)


async def test_a_drafter_made_for_its_target_takes_no_options_but_of_its_weights() -> None:
    draft = runtime.ModelSpec(runtime.DEMO_TRAINED_DRAFT, model_config={"rope_theta": 1e6})
    with pytest.raises(runtime.SettingsError, match="takes no adapter"):
        await text(runtime.DEMO_TARGET, draft)
