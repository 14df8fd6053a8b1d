"""The file of a server's models: what it may have, and errors that name file, table and key."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import ROOT, save_model
from sweeps import sweep

from runtime.cli import main as cli
from runtime.loading.model_spec import ModelSpec
from runtime.server.models.served_model import ConfigFileError, num_bytes_of, read_models

SHARED = {"max_streams": 4, "max_batch": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models, "large" and "small"."""
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "large", context=512)
    shutil.copytree(folder / "large", folder / "small")
    return folder


def read(folder: Path, content: str) -> Any:
    path = folder / "models.toml"
    path.write_text(content)
    return read_models(str(path), SHARED, {"top_k": 5})


def test_a_word_in_place_of_a_drafter_is_no_folder_beside_the_file(folder):
    (folder / "auto").mkdir()
    (model,) = read(folder, '[models.x]\ntarget = "large"\ndraft = "auto"')
    assert (model.draft, model.draft_name) == ("auto", "auto")


def test_a_file_has_a_table_for_each_model(folder):
    one, other, remote = read(
        folder,
        """
idle_seconds = 600

[models.coder]
target = "large"
draft = "small"
kv_bits = 8
max_streams = 2
settings = { temperature = 0.7, stop = ["\\n\\n"] }

[models."org/writer"]
target = "small"
draft = "ngram"
idle_seconds = 0.5

[models.remote]
target = "some-org/some-model"
""",
    )
    assert (one.name, one.target, one.draft) == ("coder", str(folder / "large"), str(folder / "small"))
    assert (one.draft_name, one.idle_s, one.is_pinned) == ("small", 600.0, False)
    assert one.options == {"max_streams": 2, "max_batch": 8, "kv_bits": 8}
    assert one.settings == {"top_k": 5, "temperature": 0.7, "stop": ["\n\n"]}
    assert one.num_bytes == 2 * (folder / "large" / "model.safetensors").stat().st_size
    assert (other.name, other.draft, other.idle_s, other.options) == ("org/writer", "ngram", 0.5, SHARED)
    assert other.num_bytes == num_bytes_of(folder / "small") > 0
    assert (remote.target, remote.draft, remote.num_bytes) == ("some-org/some-model", None, 0)
    assert remote.settings == {"top_k": 5}


LARGE = '[models.x]\ntarget = "large"\n'


@sweep(
    ("content", "expected"),
    [
        ("", "'…/models.toml', models: must be tables such as [models.coder], at least one, got None"),
        ("models = 3", "'…/models.toml', models: must be tables such as [models.coder], at least one, got 3"),
        ("[models]\nx = 3", "'…/models.toml', models.x: must be a table, got 3"),
        ("[models.x\n", "'…/models.toml' cannot be read: Expected ']' at the end of a table declaration"),
        ("[model.x]\n", "'…/models.toml', model: there is no such key; did you mean 'models'?"),
        (f"idle_seconds = -1\n{LARGE}", "'…/models.toml', idle_seconds: must be a number of seconds"),
        ("[models.x]\n", "'…/models.toml', [models.x], target: is missing; give a path or a hub id"),
        ("[models.x]\ntarget = 3", "'…/models.toml', [models.x], target: must be a path or a hub id, or a table"),
        ('[models."x y"]\ntarget = "./no"', "'…/models.toml', [models.'x y'], target: target './no' does not exist"),
        (LARGE + 'draft = "./no"', "[models.x], draft: draft './no' does not exist"),
        (LARGE + 'draft = "n-gram"', "[models.x], draft: draft 'n-gram' is not a model; did you"),
        (LARGE + "kv_bits = 7", "[models.x], kv_bits: kv_bits must be 2, 3, 4, 5, 6, 8 or None"),
        (LARGE + "max_streams = 0", "[models.x], max_streams: max_streams must be a whole"),
        (
            LARGE + "kv_bits = 8\nmax_kv_size = 100",
            "[models.x], max_kv_size: kv_bits and max_kv_size exclude each other",
        ),
        (LARGE + "kv_bit = 8", "[models.x], kv_bit: there is no such key; did you mean 'kv_bits"),
        (LARGE + 'trace = "t"', "[models.x], trace: is not a model's; the server keeps"),
        (LARGE + "idle_seconds = nan", "[models.x], idle_seconds: must be a number of seconds"),
        (LARGE + "settings = 3", "[models.x], settings: must be a table of settings, got 3"),
        (LARGE + "settings = { temperature = -1 }", "[models.x], settings: temperature must be"),
        (LARGE + "settings = { warmth = 1 }", "[models.x], settings: there is no setting 'warmth'"),
        (
            '[models.x]\ntarget = { path = "large", adapter = "y" }',
            "[models.x], target, adapter: there is no such key; did you mean 'adapter_path'?",
        ),
        ('[models.x]\ntarget = { path = "large", quantize = 7 }', "[models.x], target: quantize takes 2, 3, 4"),
        ('[models.x]\ntarget = { revision = "y" }', "[models.x], target: must be a path or a hub id, or a table"),
        ('[models.""]\ntarget = "large"', "models: a name must have 1 to 200 printable characters, got ''"),
    ],
)
def test_what_is_wrong_is_said_with_file_table_and_key(folder, content, expected):
    with pytest.raises(ConfigFileError) as caught:
        read(folder, content)
    assert expected in str(caught.value).replace(str(folder), "…")


def test_a_table_says_how_a_model_is_loaded(folder):
    [model] = read(folder, '[models.x]\ntarget = { path = "large", quantize = 8, model_config = { rope_theta = 1e6 } }')
    assert model.target == ModelSpec(str(folder / "large"), quantize=8, model_config={"rope_theta": 1e6})
    assert model.num_bytes > 0


def test_the_file_in_the_guide_is_one(folder):
    guide = (ROOT / "docs" / "server.md").read_text()
    example = guide.partition("## Several models")[2].partition("```text\n")[2].partition("```")[0]
    coder, writer = read(folder, example.replace("path/or/hub-id", "large"))
    assert (coder.name, coder.idle_s, writer.idle_s) == ("coder", 900.0, 60.0)


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigFileError, match=r"models\.toml' cannot be read: No such file or directory; give a TOML"):
        read_models(str(tmp_path / "models.toml"), SHARED, {})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--target", "x"], "--config names the models; leave out --target"),
        (["--draft", "none", "--kv-bits", "8"], "leave out --draft"),
        (["--quantize", "4"], "leave out adapters, quantisation and the like"),
        (["--model-name", "x"], "leave out --model-name"),
        (["--memory-limit", "much"], "--memory-limit must be a whole number of at least 1, or \"auto\", got 'much'"),
        (["--memory-limit", "0GB"], "--memory-limit must be a whole number of at least 1"),
        ([], "[models.x], kv_bits: kv_bits must be"),
    ],
)
def test_the_command_line_says_so_too(folder, arguments, expected, capfd):
    path = folder / "wrong.toml"
    path.write_text(LARGE + "kv_bits = 7")
    assert cli.main(["serve", "--port", "0", "--config", str(path), *arguments]) == 2
    assert expected in capfd.readouterr().err
