"""What a rank shards, orders and compares, in one process: the groups here exchange nothing."""

import architectures
import attrs
import models
import pytest
import rank_programs
from sweeps import sweep

import runtime
from actors.distributed import sharding
from actors.distributed.sharding import difference, load_shard, shard_in_place
from actors.trained.kinds.target_parts import head_of
from protocol.errors import ModelError
from runtime.ranks.sharded_target import check_drafter


@attrs.frozen
class Ranks:
    """As much of MLX's group as sharding takes."""

    own: int = 0
    number: int = 2

    def rank(self) -> int:
        return self.own

    def size(self) -> int:
        return self.number


@sweep("name", [None, "up_proj", "o_proj", "embed_tokens", "input_layernorm"])
def test_a_model_with_one_other_weight_is_another_model(name):
    first, second = rank_programs.family("llama"), rank_programs.family("llama")
    if name is not None:
        changed = next(module for path, module in second.named_modules() if path.endswith(name))
        changed.weight = changed.weight + 1
    found = difference(shard_in_place(first, None, Ranks(0)).parts, shard_in_place(second, None, Ranks(1)).parts)
    assert found is None if name is None else name in found


def test_a_trained_drafter_cannot_read_a_head_that_is_sharded():
    model = rank_programs.family("qwen3_5")
    head_of(model, "the drafter")
    shard_in_place(model, None, Ranks())
    with pytest.raises(
        ModelError, match=r"the drafter reads its target's head, and that of .* is sharded over several"
    ):
        head_of(model, "the drafter")


def test_heads_are_checked_where_a_hub_id_is_given(tmp_path, monkeypatch):
    models.save(tmp_path / "model", rank_programs.family("llama"))
    monkeypatch.setattr(sharding, "sharded_load", lambda *_: (rank_programs.family("llama"), None))
    with pytest.raises(ModelError, match="has num_attention_heads=4, which cannot be divided among 3 ranks"):
        load_shard("owner/name", Ranks(0, 3), lambda: tmp_path / "model")


def test_heads_of_a_pipeline_need_not_be_divided(tmp_path, monkeypatch):
    models.save(tmp_path / "model", rank_programs.family("llama"))
    pipeline = architectures.build("qwen3_next")
    assert not hasattr(pipeline, "shard")
    monkeypatch.setattr(sharding, "sharded_load", lambda *_: (pipeline, None))
    assert load_shard("owner/name", Ranks(0, 3), lambda: tmp_path / "model").model is pipeline


def test_a_module_that_is_sharded_is_no_draft_model():
    model, other = rank_programs.family("llama"), rank_programs.family("llama")
    check_drafter((other, None), (model, None))
    check_drafter((model, None))
    with pytest.raises(runtime.SettingsError, match="the draft model is a module that is sharded over several ranks"):
        check_drafter((model, None), (model, None))
    shard_in_place(model, None, Ranks())
    with pytest.raises(runtime.SettingsError, match="the draft model is a module that is sharded over several ranks"):
        check_drafter((model, None))
