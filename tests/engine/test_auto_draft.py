"""The draft "auto": a drafter from the disk that fits the target, or none, and the line that says which and why."""

import json
import logging
import shutil
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import scan_cache_dir
from models import greedy, llama, prompt_of, save
from sweeps import sweep
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from trained_drafters import make, write_eagle3

import runtime
from runtime.cli import main as cli
from runtime.cli.serve_command import _name_drafter
from runtime.loading import drafters
from runtime.loading.model_sources import check_draft_source
from runtime.loading.named_models import SMOLLM2_DRAFT
from runtime.server.models.served_model import ServedModel

pytestmark = pytest.mark.usefixtures("no_thread_left")

PROMPT = prompt_of(17)
NONE = 'draft "auto" takes none: nothing on this disk fits the target'


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hugging Face's cache, which is empty."""
    (made := tmp_path / "cache").mkdir()
    monkeypatch.setattr(drafters, "scan_cache_dir", lambda given: scan_cache_dir(given or made))
    return made


@pytest.fixture
def target(tmp_path: Path) -> str:
    """The folder of a target, four times as large as `llama()`, and with nothing beside it."""
    (tmp_path / "models").mkdir()
    return save(tmp_path / "models" / "target", large())


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged about the choice."""
    caplog.set_level(logging.INFO, "outrider.auto_draft")
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("outrider.auto_draft"), "handle", lambda one: said.append(one.getMessage()))
    return said


def snapshot(cache: Path, name: str) -> Path:
    """The folder of a model in Hugging Face's cache, which is to be made."""
    repository = cache / f"models--{name.replace('/', '--')}"
    for folder in ("refs", "snapshots"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    return repository / "snapshots" / ("a" * 40)


def large() -> Any:
    return llama(hidden_size=256)


async def is_drafted(rt: runtime.Runtime, model: Any) -> bool:
    """Whether a text is drafted; asserts that it is the target's."""
    completion = await rt.generate(PROMPT, max_tokens=12, lookahead=2, ignore_eos=True)
    assert [token.id for token in completion.tokens] == greedy(model, PROMPT, 12)
    assert completion.statistics.draft_failures == 0
    return completion.statistics.proposed > 0


def broken(folder: Path) -> Path:
    """Have a model's weights end early."""
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return folder


# --- what is taken --------------------------------------------------------------------------------


async def test_the_drafter_trained_for_the_demo_target_is_taken(lines: list[str]) -> None:
    async with runtime.open(runtime.DEMO_TARGET, draft="auto") as rt:
        completion = await rt.generate("def quicksort(items):", max_tokens=12, lookahead=2)
        assert completion.statistics.proposed > 0
    (line,) = lines
    assert line.startswith(f'draft "auto" takes {runtime.DEMO_TRAINED_DRAFT} (')
    assert line.endswith("on this disk, EAGLE-3, trained for a model of this shape)")


async def test_a_model_in_the_cache_is_taken_and_nobody_asks_the_network(target, cache, lines, monkeypatch):
    save(snapshot(cache, "org/small"), llama())

    def connect(*_: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", connect)
    async with runtime.open(target, draft="auto") as rt:
        assert await is_drafted(rt, large())
    (line,) = lines
    assert line.startswith('draft "auto" takes org/small (')
    assert line.endswith("on this disk, the same vocabulary)")


async def test_what_cannot_be_loaded_is_passed_over_and_leaves_nothing_behind(target: str, lines: list[str]) -> None:
    beside = Path(target).parent
    trained = broken(write_eagle3(beside / "trained", large(), vocab_size=80))
    first = broken(Path(save(beside / "first", llama(num_hidden_layers=1))))
    second = save(beside / "second", llama())
    async with runtime.open(target, draft="auto") as rt:
        assert await is_drafted(rt, large())
    (line,) = lines
    assert line.startswith(f'draft "auto" takes {second} (')
    passed_over = line.split("; passed over: ")[1:]
    assert passed_over[0].startswith(f"draft '{trained}' in {trained} cannot be read: ")
    assert passed_over[1].startswith(f"cannot load draft '{first}': ")


async def test_the_mtp_layer_in_the_targets_own_files_is_taken(tmp_path: Path, lines: list[str]) -> None:
    model = make("mtp", tmp_path / "layer", vocab_size=80)
    folder = Path(save(tmp_path / "target", model))
    shutil.move(tmp_path / "layer" / "model.safetensors", folder / "mtp.safetensors")
    assert runtime.suggest_draft(folder)[0].model == "mtp"
    async with runtime.open(folder, draft="auto") as rt:
        assert await is_drafted(rt, model)
    assert lines == ['draft "auto" takes mtp (the MTP layer in the model\'s own files)']
    (folder / "mtp.safetensors").unlink()
    assert runtime.suggest_draft(folder) == ()


@pytest.mark.slow
async def test_a_process_of_its_own_loads_what_is_taken(target: str, lines: list[str]) -> None:
    second = save(Path(target).parent / "second", llama())
    async with runtime.open(target, draft="auto", draft_process=True) as rt:
        assert await is_drafted(rt, large())
    assert lines[0].startswith(f'draft "auto" takes {second} (')


# --- none -----------------------------------------------------------------------------------------


async def test_where_nothing_fits_or_nothing_that_fits_can_be_loaded_texts_are_plain(target, lines):
    save(Path(target).parent / "other", llama(), word="v")
    save(Path(target).parent / "as-large", large())
    for name in ("small", "smaller"):
        async with runtime.open(target, draft="auto") as rt:
            assert not await is_drafted(rt, large())
            assert rt.health().draft is None
        broken(Path(save(Path(target).parent / name, llama())))
    assert lines[0] == NONE
    passed_over = 'draft "auto" takes none: nothing that fits the target can be loaded; passed over: cannot load'
    assert lines[1].startswith(passed_over)
    assert len(lines) == 2


async def test_one_that_is_known_on_the_hub_is_named_and_not_downloaded(tmp_path: Path, lines: list[str]) -> None:
    folder = save(tmp_path / "Qwen3-8B-4bit", large())
    async with runtime.open(folder, draft="auto") as rt:
        assert rt.health().draft is None
    (line,) = lines
    assert line.startswith(f"{NONE}; there is RedHatAI/Qwen3-8B-speculator.dflash (DFlash, trained for this model, ")


# --- attaching, and what does not go with it ------------------------------------------------------


async def test_it_is_attached_to_an_open_runtime_or_nothing_is(target: str, lines: list[str]) -> None:
    async with runtime.open(target) as rt:
        await rt.attach_draft("auto")
        assert rt.health().draft is None
        save(Path(target).parent / "small", llama())
        await rt.attach_draft("auto")
        assert await is_drafted(rt, large())
        with pytest.raises(runtime.DrafterAttachedError):
            await rt.attach_draft("auto")
    assert lines[0] == NONE
    assert len(lines) == 2


def test_a_folder_of_that_name_is_given_as_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "auto", llama())
    monkeypatch.chdir(tmp_path)
    as_words = [check_draft_source(draft, runtime.DEMO_TARGET) for draft in ("auto", runtime.ModelSpec("auto"))]
    assert as_words == ["auto", "auto"]
    as_paths = [check_draft_source(draft, runtime.DEMO_TARGET) for draft in ("./auto", Path("auto"))]
    assert as_paths == [Path("auto"), Path("auto")]


@sweep(
    ("draft", "complaint"),
    [
        (runtime.ModelSpec("auto", quantize=4), 'draft "auto" takes a drafter as its files are'),
        ("Auto", "draft 'Auto' is not a model; did you mean \"auto\""),
        ("atuo", "draft 'atuo' is not a model; did you mean \"auto\""),
    ],
)
def test_options_of_loading_and_misspelt_words_are_refused(draft: Any, complaint: str) -> None:
    with pytest.raises(runtime.SettingsError, match=complaint):
        check_draft_source(draft, runtime.DEMO_TARGET)


# --- commands -------------------------------------------------------------------------------------


def test_generate_says_which_it_takes(target: str, capfd: Any) -> None:
    generate = ["generate", "w1 w2", "--target", target, "--draft", "auto", "-m", "4", "--json", "--ignore-eos"]
    assert cli.main(generate) == 0
    assert capfd.readouterr().err == f"outrider: {NONE}\n"
    small = save(Path(target).parent / "small", llama())
    assert cli.main(generate) == 0
    assert capfd.readouterr().err.startswith(f'outrider: draft "auto" takes {small} (')
    assert cli.main([*generate, "--draft-quantize", "4"]) == 2
    assert "--draft-quantize is of a draft model, and none is named" in capfd.readouterr().err
    assert logging.getLogger("outrider.auto_draft").handlers == []


def test_bench_measures_what_is_taken_and_needs_one(target: str, capfd: Any) -> None:
    bench = ["bench", "--target", target, "--draft", "auto", "-p", "w1 w2", "-m", "16", "--repeats", "1", "--json"]
    bench += ["--num-draft-tokens", "none", "--lookahead", "2"]
    assert cli.main(bench) == 1
    assert 'draft "auto" finds none that fits the target, and one is measured; name one' in capfd.readouterr().err
    small = save(Path(target).parent / "small", llama())
    assert cli.main(bench) == 0
    said = json.loads(capfd.readouterr().out)
    assert (said["draft"], [row["draft"] for row in said["rows"]]) == (small, [None, small])


def test_serve_names_a_drafter_for_a_target_without_one(target: str, capfd: Any) -> None:
    name_drafter = partial(_name_drafter, ServedModel("coder", target))
    name_drafter()
    _name_drafter(ServedModel("elsewhere", "org/elsewhere"))
    assert capfd.readouterr().err == ""
    small = save(Path(target).parent / "small", llama())
    name_drafter()
    said = capfd.readouterr().err
    assert said.startswith(f"outrider: coder decodes without a drafter; {small} (")
    assert said.endswith("the same vocabulary) could draft for it\n")
    _name_drafter(ServedModel("drafted", target, "ngram"))
    assert capfd.readouterr().err == ""


# --- suggestions ----------------------------------------------------------------------------------

FAMILIES = drafters._table("small_models")
QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936}


def model(where: Path, num_bytes: int, *, word: str = "w", **config: Any) -> Path:
    """A directory that looks like a model, as far as suggestions look at it."""
    where.mkdir(parents=True)
    (where / "config.json").write_text(json.dumps(QWEN3 | config))
    (where / "model.safetensors").write_bytes(b"\0" * num_bytes)
    Tokenizer(WordLevel({f"{word}{i}": i for i in range(8)}, unk_token=f"{word}0")).save(str(where / "tokenizer.json"))
    return where


def cached(cache: Path, name: str, num_bytes: int, **config: Any) -> Path:
    """A model in Hugging Face's cache."""
    return model(snapshot(cache, name), num_bytes, **config)


def named(target: str | Path, cache: Path) -> list[str]:
    return [suggestion.model for suggestion in runtime.suggest_draft(target, cache_dir=cache)]


def test_trained_drafters_are_proposed_first_then_models_by_size_and_those_on_the_hub_last(cache, monkeypatch):
    # A family of small models of which one is larger than the target allows.
    (family,) = [family for family in FAMILIES if "qwen3" in family["model_types"]]
    sized = zip(family["models"].items(), (0, 9), strict=True)
    tiny = {name: facts | {"megabytes": size} for (name, facts), size in sized}
    tables = {"small_models": [family | {"models": tiny}], "known_drafters": drafters._table("known_drafters")}
    monkeypatch.setattr(drafters, "_table", tables.__getitem__)
    cached(cache, "Qwen/Qwen3-8B", 3000, hidden_size=64)
    layer = {"hidden_size": 64, "vocab_size": 151_936}
    assistant = {"model_type": "gemma4_assistant", "backbone_hidden_size": 64}
    for name in ("org/another", "z-lab/Qwen3-8B-DFlash-b16"):  # the latter is known
        cached(cache, name, 5000, architectures=["DFlashDraftModel"], transformer_layer_config=layer)
    cached(cache, "org/layer", 200, model_type="qwen3_5_mtp", text_config=layer)
    cached(cache, "org/reader", 200, text_config=layer | {"hidden_size": 16}, **assistant)
    cached(cache, "org/small", 900, hidden_size=32)
    cached(cache, "org/smaller", 300, hidden_size=32)
    # What does not fit, or cannot be read.
    cached(cache, "org/as-large", 2000)
    cached(cache, "org/other-words", 300, word="v")
    cached(cache, "org/shapeless", 300, speculators_model_type="eagle3")
    cached(cache, "org/wide", 300, speculators_model_type="eagle3", hidden_size=96)
    cached(cache, "org/other", 300, speculators_model_type="hydra", hidden_size=64)
    (cached(cache, "org/no-weights", 300) / "model.safetensors").unlink()
    (cached(cache, "org/no-tokenizer", 300) / "tokenizer.json").write_text("{")
    (cached(cache, "org/no-config", 300) / "config.json").write_text("[]")
    found = runtime.suggest_draft("Qwen/Qwen3-8B", cache_dir=cache)
    assert [(each.model, each.kind, each.is_on_disk, each.is_checked) for each in found] == [
        ("z-lab/Qwen3-8B-DFlash-b16", "DFlash", True, False),
        ("org/another", "DFlash", True, False),
        ("org/layer", "MTP", True, False),
        ("org/reader", "Gemma 4's assistant", True, False),
        ("org/smaller", None, True, True),
        ("org/small", None, True, True),
        ("RedHatAI/Qwen3-8B-speculator.dflash", "DFlash", False, False),
        ("RedHatAI/Qwen3-8B-speculator.eagle3", "EAGLE-3", False, False),
        (min(tiny), None, False, False),
    ]
    assert [each.num_bytes for each in found[4:6]] == [300, 900]
    for place, said in ((0, "on this disk, DFlash"), (5, "on this disk"), (-1, "from the hub")):
        assert said in found[place].described


OF_28_LAYERS = {"num_hidden_layers": 28, "hidden_size": 1024}


@sweep(
    ("sizes", "others"),
    [
        (OF_28_LAYERS, {"num_hidden_layers": 14, "hidden_size": 1024}),
        ({"n_layer": 12, "n_embd": 768}, {"n_layer": 12, "n_embd": 512}),
        ({"num_hidden_layers": 24, "d_model": 2560}, {"num_hidden_layers": 24, "d_model": 768}),
        ({"text_config": OF_28_LAYERS}, {"text_config": OF_28_LAYERS | {"num_hidden_layers": 6}}),
    ],
)
def test_a_quantised_copy_of_the_target_under_any_name_is_no_drafter(sizes: Any, others: Any, tmp_path: Path) -> None:
    (cache := tmp_path / "cache").mkdir()
    target = model(tmp_path / "models" / "large", 3000, **sizes)
    model(tmp_path / "models" / "mine", 400, **sizes)
    cached(cache, "org/large-4bit", 500, **sizes)
    cached(cache, "org/small", 300, **others)
    assert named(target, cache) == ["org/small"]


def test_the_bundled_drafter_is_found_for_copies_of_its_target(tmp_path: Path, cache: Path) -> None:
    target = model(tmp_path / "SmolLM2-135M-Instruct-4bit", 3000, hidden_size=576, vocab_size=49152)
    wider = model(tmp_path / "SmolLM2-360M-Instruct", 3000, hidden_size=960, vocab_size=49152)
    (found,) = runtime.suggest_draft(target, cache_dir=cache)
    assert (found.folder, found.kind) == (SMOLLM2_DRAFT, "EAGLE-3")
    assert named(wider, cache) == []


def test_drafters_that_are_known_are_named_for_conversions_of_their_target_too(cache: Path) -> None:
    snapshot = cached(cache, "mlx-community/Qwen3.5-4B-4bit", 10)
    cached(cache, "org/Qwen3.5-4B-Something", 10)
    found = runtime.suggest_draft("mlx-community/Qwen3.5-4B-4bit", cache_dir=cache)
    known = {each.model: each for each in found if not each.is_on_disk}
    assert known["mlx-community/Qwen3.5-4B-MTP-4bit"].kind == "MTP"
    described = known["z-lab/Qwen3.5-4B-DFlash"].described
    assert described.endswith("(DFlash, trained for this model, 0.5B parameters, from the hub)")
    assert named(snapshot, cache) == [each.model for each in found]
    assert named("org/Qwen3.5-4B-Something", cache) == []


def test_what_cannot_be_read_hides_nothing_else(tmp_path: Path) -> None:
    target = model(tmp_path / "models" / "large", 3000)
    beside = model(tmp_path / "models" / "small", 300)
    half = model(tmp_path / "models" / "half", 300)
    (half / "model-00002.safetensors").symlink_to(half / "gone")
    (no_cache := tmp_path / "file").write_text("")
    assert named(target, no_cache) == [str(half), str(beside)]


@pytest.mark.parametrize(
    ("target", "error", "complaint"),
    [
        ("org/nowhere", runtime.ModelError, "is not on this disk"),
        ("not an id", runtime.ModelError, "is not on this disk"),
        ("", runtime.SettingsError, "must be a path or a hub id"),
        (7, runtime.SettingsError, "must be a path or a hub id"),
        ("x" * 5000, runtime.ModelError, "^.{,1020}is not on this disk"),
        (list(range(10**6)), runtime.SettingsError, "must be a path or a hub id, got .{,200}$"),
    ],
)
def test_a_target_that_is_not_there_is_refused(target: Any, error: type, complaint: str, cache: Path) -> None:
    with pytest.raises(error, match=complaint):
        runtime.suggest_draft(target, cache_dir=cache)
