"""Bad input: the documented error, with the value, the bound and the remedy, before any model work."""

import json
import re
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
import trio
import trio.testing
from greedy_pair import drafter, target
from models import VOCAB_SIZE, prompt_of
from our_threads import outrider_threads
from sample_tokenizers import word_tokenizer
from sweeps import sweep

import runtime
from protocol.trace import Event
from runtime.doctor.report import examine

pytestmark = pytest.mark.usefixtures("no_thread_left")


WORDS = ["<unk>", "user", "assistant", "hello", "world", ":"]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make models that are not on this machine an error at once."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


# --- prompts --------------------------------------------------------------------------------------

BAD_PROMPTS = [
    *((empty, "at least one token") for empty in ([], (), mx.array([], dtype=mx.int32))),
    ([VOCAB_SIZE], f"prompt token {VOCAB_SIZE} is outside the target's vocabulary of {VOCAB_SIZE} ids"),
    ([1, 2, -1], f"prompt token -1 is outside the target's vocabulary of {VOCAB_SIZE} ids"),
    *(([1, odd], f"whole numbers, got {odd!r}") for odd in (True, 2.0, None, "2")),
    (mx.array([1.0, 2.0]), "whole numbers, got 1.0"),
    (mx.array([[1, 2]]), "whole numbers, got [1, 2]"),
    (mx.array(3), "text, token ids or chat messages, got array"),
    (3, "text, token ids or chat messages, got int"),
    (None, "text, token ids or chat messages, got NoneType"),
    (b"bytes", "text, token ids or chat messages, got bytes"),
    ({"role": "user", "content": "hello"}, "text, token ids or chat messages, got dict"),
    *((text, "opened without a tokenizer, so a prompt must be token ids, not text") for text in ("text", "")),
    ([{"role": "user", "content": "hello"}], "opened without a tokenizer, so a prompt must be token ids, not messages"),
    (prompt_of(512), "prompt is too long: 512 tokens > 511 maximum; this model's maximum context length is 512 tokens"),
    (prompt_of(700), "700 tokens > 511 maximum"),
]


async def test_prompts_that_cannot_be_are_refused_before_any_model_work():
    events: list[Event] = []
    async with runtime.open((target(), None), (drafter(), None), trace=events.append) as rt:
        del events[:]
        for prompt, says in BAD_PROMPTS:
            with pytest.raises(runtime.PromptError, match=re.escape(says)) as raised:
                rt.stream(prompt)
            assert isinstance(raised.value, ValueError)
        await trio.testing.wait_all_tasks_blocked()
        assert events == []
        assert rt.num_streams == 0


async def test_the_longest_prompt_that_fits_leaves_room_for_one_token():
    async with runtime.open((target(), None), (drafter(), None)) as rt:
        completion = await rt.generate(prompt_of(511), max_tokens=None)
    assert len(completion.tokens) == 1
    assert completion.finish_reason == "length"


async def test_chat_messages_need_a_chat_template_and_a_text_needs_a_token():
    messages = [{"role": "user", "content": "hello"}]
    async with runtime.open((target(), word_tokenizer(WORDS))) as rt:
        for prompt in ("", "   "):
            with pytest.raises(runtime.PromptError, match="at least one token"):
                rt.stream(prompt)
        with pytest.raises(runtime.PromptError, match="no chat template; give the prompt as text or token ids"):
            rt.stream(messages)


# --- options of open ------------------------------------------------------------------------------


async def test_quantisation_groups_that_do_not_fit_the_model_are_refused_when_it_is_opened():
    # Heads of 16 cannot be quantised in groups of 32.
    with pytest.raises(runtime.ModelError, match=r"^kv_bits=4 with kv_group_size=32 does not fit this model"):
        async with runtime.open((target(), None), kv_bits=4, kv_group_size=32):
            raise AssertionError("should not be reached")


OF_SPECS = ("adapter_path", "revision", "tokenizer_config", "model_config", "trust_remote_code")


@sweep(
    ("options", "says"),
    [
        ({"rewind": "sometimes"}, "rewind must be one of 'auto', 'trim', 'checkpoint', 'none', got 'sometimes'"),
        *(({"rewind": odd}, "rewind must be one of") for odd in (None, ["auto"])),
        ({"trace": 7}, "trace must be a function of one event or the path of a file to write, got 7"),
        *(({"target": odd}, "target must be a path, a hub id, a ModelSpec or a pair") for odd in (None, "", 5)),
        ({"target": ("a path", None)}, "must be (model, tokenizer or None)"),
        ({"target": (target(), "x")}, "the tokenizer in target must be one of transformers', mlx-lm's wrapper"),
        ({"draft": (target(), object())}, "the tokenizer in draft must be one of transformers', mlx-lm's wrapper"),
        ({"draft": (None,)}, "must be (model, tokenizer or None)"),
        ({"draft": ["owner/name"]}, "draft must be a path, a hub id, a ModelSpec or a pair"),
        *(({name: "x"}, f"runtime.ModelSpec(path, {name}=...)") for name in OF_SPECS),
        ({"chat_template_args": "enable_thinking"}, "chat_template_args must be a mapping"),
        ({"chat_template_args": {"tokenize": True}}, "chat_template_args cannot have tokenize"),
        ({"prefix_cache_dir": 3}, "prefix_cache_dir must be the path of a directory or None, got 3"),
        ({"prefix_cache_dir": "/dev/null/x"}, "cannot be made: Not a directory; give another directory"),
        ({"prefix_cache_dir_bytes": -1}, "prefix_cache_dir_bytes must be a whole number of at least 0"),
        ({"defaults": "warm"}, "defaults must be runtime.Settings or a mapping of settings, got 'warm'"),
        ({"defaults": [("max_tokens", 5)]}, "defaults must be runtime.Settings or a mapping"),
        ({"defaults": {"max_tokens": 0}}, "max_tokens must be a whole number of at least 1"),
        ({"defaults": {"temp": 1}}, "there is no setting 'temp'; did you mean 'temperature'?"),
    ],
)
async def test_options_that_cannot_be_are_refused_before_any_model_work(options, says):
    events: list[Event] = []
    keywords = {"target": (target(), None), "trace": events.append} | options
    with pytest.raises(runtime.SettingsError, match=re.escape(says)):
        async with runtime.open(**keywords):
            raise AssertionError("should not be reached")
    assert events == []


# --- missing and damaged models -------------------------------------------------------------------


async def opening_is_refused(kind: type[Exception], says: str, *pair: Any) -> Exception:
    events: list[Event] = []
    with pytest.raises(kind, match=says) as raised:
        async with runtime.open(*pair, trace=events.append):
            raise AssertionError("should not be reached")
    assert outrider_threads() == []
    return raised.value


@sweep("role", ["target", "draft"])
@sweep("path", ["/no/such/model", "./no-such-model", "~/no/such/model", Path("no/such"), "a/b/c"])
async def test_a_path_that_does_not_exist(path, role):
    pair = [path] if role == "target" else [(target(), None), path]
    await opening_is_refused(runtime.ModelError, f"{role} .*does not exist; give a directory", *pair)


@sweep("name", ["no-such-owner/no-such-model", "no-such-model"])
async def test_a_hub_id_that_cannot_be_resolved(name):
    says = f"target '{name}': there is no such folder, and from the Hugging Face hub it could not be fetched"
    error = await opening_is_refused(runtime.ModelError, says, name)
    assert error.__cause__ is not None


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of a model, to be damaged."""
    return Path(shutil.copytree(runtime.DEMO_DRAFT, tmp_path / "copy"))


async def test_a_path_with_no_config(copy):
    (copy / "config.json").unlink()
    await opening_is_refused(runtime.ModelError, "has no config.json; give a directory", copy)
    await opening_is_refused(runtime.ModelError, "is a file; give a directory", copy / "model.safetensors")


@sweep("role", ["target", "draft"])
async def test_a_checkpoint_that_is_cut_off_or_not_there(copy, role):
    weights = copy / "model.safetensors"
    pair = [copy] if role == "target" else [runtime.DEMO_DRAFT, copy]
    whole = (runtime.DEMO_DRAFT / weights.name).read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    for content, says in (
        (whole[:-1], f"model.safetensors' is cut off: it has {len(whole) - 1:,} of {len(whole):,} bytes; copy"),
        (whole[: len(whole) // 2], f"model.safetensors' is cut off: it has {len(whole) // 2:,} of"),
        (whole[:20], "model.safetensors' is cut off: it has 20 bytes, and its header alone"),
        (b"", "model.safetensors' is empty, with 0 bytes; copy or download it again"),
        (pointer, "model.safetensors' is a pointer of Git LFS .* run `git lfs pull`"),
        (b"PK" * 100, "model.safetensors' is not a file of safetensors"),
        (whole[:8] + b"x" * 9000, "model.safetensors' is not a file of safetensors"),
    ):
        weights.write_bytes(content)
        await opening_is_refused(runtime.ModelError, f"cannot load {role} .*copy': .*{says}", *pair)
    weights.rename(copy / "pytorch_model.bin")
    says = f"cannot load {role} .*copy': it has no weights: .* only pytorch_model.bin, which mlx-lm does not read"
    await opening_is_refused(runtime.ModelError, says, *pair)
    (copy / "pytorch_model.bin").unlink()
    says = r"it has no weights: no file model\*\.safetensors; copy or download them"
    await opening_is_refused(runtime.ModelError, says, *pair)
    weights.symlink_to(copy / "gone")
    await opening_is_refused(runtime.ModelError, "cannot be read: No such file or directory", *pair)
    weights.unlink()


CONFIG = json.loads((runtime.DEMO_DRAFT / "config.json").read_text())


@sweep(
    ("text", "says"),
    [
        (json.dumps(CONFIG | {"hidden_size": 128}), "copy"),  # not that of the weights
        ("", "copy/config.json' cannot be read as JSON: Expecting value"),
        ("{", "copy/config.json' cannot be read as JSON: Expecting property name"),
        *((text, 'copy/config.json\' has no "model_type"') for text in ("[]", "{}")),
        ('{"model_type": "new"}', rf"its model_type is 'new', which mlx-lm {version('mlx-lm')}, the version"),
    ],
)
async def test_a_config_that_is_damaged(copy, text, says):
    (copy / "config.json").write_text(text)
    await opening_is_refused(runtime.ModelError, f"cannot load target .*{says}", copy)


# For some families, and with these classes, transformers makes an empty tokenizer; for others it fails.
@sweep(("role", "config"), [("target", None), ("draft", '{"tokenizer_class": "Qwen2Tokenizer"}')])
async def test_a_model_without_its_tokenizer(copy, role, config):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).unlink(missing_ok=True)
    if config is not None:
        (copy / "tokenizer_config.json").write_text(config)
    pair = [copy] if role == "target" else [runtime.DEMO_DRAFT, copy]
    says = f"cannot load {role} .*copy': it has no tokenizer; copy tokenizer.json"
    await opening_is_refused(runtime.ModelError, says, *pair)
    with pytest.raises(runtime.ModelError, match=says):
        await examine(*pair)


async def test_a_model_that_is_no_language_model():
    await opening_is_refused(runtime.ModelError, "cannot load target 'Linear'", (nn.Linear(4, 4), None))


# --- vocabularies ---------------------------------------------------------------------------------


@sweep(
    ("theirs", "says"),
    [
        (["<unk>", "user", "hello", "assistant", "world", ":"], "2 of 6 ids differ (id 2 is 'assistant' and 'hello'"),
        (["a", "b", "c", "d", "e", "f"], "6 of 6 ids differ"),
        ([*WORDS[:-1], ";"], "1 of 6 ids differ (id 5 is ':' and ';'"),
    ],
)
async def test_vocabularies_that_differ(theirs, says):
    pair = (target(), word_tokenizer(WORDS)), (drafter(), word_tokenizer(theirs))
    error = await opening_is_refused(runtime.VocabularyMismatchError, re.escape(says), *pair)
    assert isinstance(error, runtime.ModelError)
    assert "use a draft model with the target's tokenizer" in str(error)


@sweep(
    ("ours", "theirs"),
    [
        # They agree where they overlap, or cannot be compared.
        (word_tokenizer(WORDS), word_tokenizer([*WORDS, "more", "words"])),
        (word_tokenizer([*WORDS, "more", "words"]), word_tokenizer(WORDS)),
        (word_tokenizer(WORDS), None),
    ],
)
async def test_vocabularies_that_may_be_used_together(ours, theirs):
    async with runtime.open((target(), ours), (drafter(), theirs)) as rt:
        assert len((await rt.generate("hello", max_tokens=4)).tokens) == 4


# --- at the wrong time ----------------------------------------------------------------------------


async def test_a_stream_where_no_runtime_is_open():
    with pytest.raises(runtime.NoRuntimeError, match=r"use this inside .async with runtime\.open"):
        runtime.stream([1])
    async with runtime.open((target(), None)):
        assert len([token async for token in runtime.stream([1], max_tokens=3)]) == 3
    with pytest.raises(runtime.NoRuntimeError):
        runtime.stream([1])
