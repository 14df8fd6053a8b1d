"""GGUF files as files: which one is meant, split ones, damage, and the commands and options that take one."""

import re
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf_files
import mlx.core as mx
import pytest
from sweeps import sweep

import runtime
from runtime.cli.serve_command import _name
from runtime.loading.drafters import suggest_draft
from runtime.loading.gguf.container import read
from runtime.loading.gguf.names import models_among, only_model, parts_of, stem_of
from runtime.loading.model_files import config_in, num_bytes_in
from runtime.loading.model_sources import check_source


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A tiny model, to be damaged."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return gguf_files.write_model(path, "llama", gguf_files.model_of("llama")).read_bytes()


def end_of(data: bytes, text: str) -> int:
    return data.index(text.encode()) + len(text)


CUT = None  # there


@sweep(
    "place, further, written, complaint",
    [
        (None, 0, CUT, "is not a GGUF file: it begins with b''"),
        (None, 3, CUT, "is not a GGUF file: it begins with b'GGU'"),
        (None, 6, CUT, "cut off or damaged: its header goes on beyond its end at byte 6"),
        ("llama.block_count", 6, CUT, "the metadata llama.block_count goes on beyond its end"),
        ("tokenizer.ggml.tokens", 100, CUT, "the metadata tokenizer.ggml.tokens goes on beyond its end"),
        ("tokenizer.ggml.token_type", 30, CUT, "the metadata tokenizer.ggml.token_type goes on"),
        ("blk.0.attn_q.weight", 10, CUT, "the table of tensors after .* goes on beyond its end"),
        (None, -100, CUT, r"is cut off: tensor output.weight ends at byte [\d,]+, and the file has [\d,]+; download"),
        ("GGUF", 0, struct.pack("<I", 1), "version 1 of GGUF"),
        ("GGUF", 0, struct.pack(">I", 3), "or is big-endian"),
        ("llama.block_count", 0, struct.pack("<I", 99), "llama.block_count has a value of the unknown type 99"),
        ("tokenizer.ggml.tokens", 8, struct.pack("<Q", 2**60), "tokenizer.ggml.tokens goes on beyond its end"),
        ("tokenizer.ggml.token_type", 8, struct.pack("<Q", 2**61), "tokenizer.ggml.token_type goes on beyond"),
        ("tokenizer.ggml.tokens", 4, struct.pack("<I", 77), "an array of the unknown type 77"),
        ("blk.0.attn_q.weight", 0, struct.pack("<I", 9), "tensor blk.0.attn_q.weight has 9 dimensions"),
        ("blk.0.attn_q.weight", 4, struct.pack("<Q", 2**50), "is cut off: tensor blk.0.attn_q.weight ends at"),
        ("blk.0.attn_q.weight", 20, struct.pack("<I", 200), "tensor blk.0.attn_q.weight in the unknown type 200"),
        ("blk.0.attn_q.weight", 20, struct.pack("<I", 12), r"the shape \[64, 64\], in blocks of 256 \(Q4_K\)"),
    ],
)
def test_a_file_that_is_cut_off_or_damaged_says_where(place, further, written, complaint, whole, tmp_path):
    begin = further if place is None else end_of(whole, place) + further
    changed = b"" if written is CUT else written + whole[begin + len(written) :]
    (file := tmp_path / "bad.gguf").write_bytes(whole[:begin] + changed)
    with pytest.raises(runtime.ModelError, match=rf"bad\.gguf' .*{complaint}"):
        read(file)


def test_damage_of_any_byte_of_the_header_is_an_error_of_ours_or_none(whole: bytes, tmp_path: Path) -> None:
    header = end_of(whole, "blk.1.ffn_norm.weight")
    file = tmp_path / "bad.gguf"
    for i in range(4, header, 23):
        file.write_bytes(whole[:i] + bytes([whole[i] ^ 0xFF]) + whole[i + 1 :])
        try:
            read(file)
        except runtime.ModelError as error:
            assert "bad.gguf" in str(error)  # noqa: PT017 (most bytes do no harm)


def test_a_split_model_is_read_from_any_of_its_parts(tmp_path: Path) -> None:
    model = gguf_files.model_of("llama")
    gguf_files.write_model(tmp_path / "m.gguf", "llama", model, split=8)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert [part.name for part in parts] == parts_of(parts[1].name)
    assert len(parts) == 3
    for part in parts:
        assert sum(1 for _ in read(part).tensors) == 21
    assert num_bytes_in(parts[0]) == sum(part.stat().st_size for part in parts)
    assert check_source("target", parts[1]) == parts[1]
    parts[2].unlink()
    with pytest.raises(runtime.ModelError, match=r"m-00003-of-00003.gguf' cannot be read: No such file"):
        read(parts[0])
    parts[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(runtime.ModelError, match="is one of 3 parts of a model, and is not named as such"):
        read(tmp_path / "renamed.gguf")


def test_names_of_parts_and_models() -> None:
    names = ["README.md", "b-00002-of-00002.gguf", "b-00001-of-00002.gguf", "a.Q4_0.GGUF", "mmproj-a.gguf"]
    assert models_among(names) == ["a.Q4_0.GGUF", "b-00001-of-00002.gguf"]
    assert [stem_of(name) for name in ("x/y/a.Q4_0.gguf", "b-00001-of-00002.gguf")] == ["a.Q4_0", "b"]
    assert only_model("it", ["a.gguf", "config.json"], prefix="") == "a.gguf"
    assert only_model("it", ["config.json"], prefix="") is None
    with pytest.raises(runtime.ModelError, match=r"^it has 2 GGUF models: a\.Q4_0\.GGUF, .*name one, as in o/n/a\."):
        only_model("it", names, prefix="o/n/")


def test_a_folder_with_one_file_is_that_model(whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "one.gguf").write_bytes(whole)
    assert check_source("target", tmp_path) == tmp_path / "one.gguf"
    assert check_source("target", str(tmp_path)) == tmp_path / "one.gguf"
    assert check_source("draft", runtime.ModelSpec(tmp_path)) == tmp_path / "one.gguf"
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')  # such as many repositories of GGUF files have
    assert check_source("target", tmp_path) == tmp_path / "one.gguf"
    (tmp_path / "two.gguf").write_bytes(whole)
    with pytest.raises(runtime.ModelError, match=r"has 2 GGUF models: one\.gguf, two\.gguf; name one, as in .*one\.g"):
        check_source("target", tmp_path)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"weight": mx.zeros(1)})
    assert check_source("target", tmp_path) == tmp_path


class Hub:
    """A hub with files in one repository, in place of huggingface_hub's functions."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.fetched = folder, list[str]()
        for name, function in (("model_info", self.info), ("hf_hub_download", self.fetch)):
            monkeypatch.setattr(f"runtime.loading.model_reading.{name}", function)
        monkeypatch.setattr("runtime.loading.model_reading.load", self.without_config)

    def info(self, repository: str, revision: str | None) -> Any:
        names = sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*.*"))
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in names])

    def fetch(self, repository: str, name: str, revision: str | None) -> str:
        self.fetched.append(f"{repository}@{revision}:{name}")
        return str(self.folder / name)

    def without_config(self, name: str, **options: Any) -> None:
        raise FileNotFoundError("config.json")


async def test_a_repository_with_one_file_is_that_model(whole, tmp_path, monkeypatch):
    hub = Hub(tmp_path, monkeypatch)
    (tmp_path / "one.gguf").write_bytes(whole)
    async with runtime.open(runtime.ModelSpec("owner/name", revision="v1")) as rt:
        assert len((await rt.generate([1, 2, 3], max_tokens=2, ignore_eos=True)).tokens) == 2
    assert hub.fetched == ["owner/name@v1:one.gguf"]
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "two.gguf").write_bytes(whole)
    with pytest.raises(runtime.ModelError, match=r"owner/name has 2 GGUF models: deep/two.gguf, one.gguf; name "):
        async with runtime.open("owner/name"):
            pass
    async with runtime.open("owner/name/deep/two.gguf") as rt:
        assert len((await rt.generate([1, 2, 3], max_tokens=2, ignore_eos=True)).tokens) == 2
    assert hub.fetched[-1] == "owner/name@None:deep/two.gguf"


async def test_a_pair_of_files_speculates_and_is_named_by_its_stem(whole: bytes, tmp_path: Path) -> None:
    (file := tmp_path / "Tiny-1M.Q8_0.gguf").write_bytes(whole)
    async with runtime.open(file) as plain, runtime.open(str(file), file) as drafted:
        expected = await plain.generate("abc", max_tokens=12, ignore_eos=True)
        found = await drafted.generate("abc", max_tokens=12, lookahead=2, ignore_eos=True)
        assert [token.id for token in found.tokens] == [token.id for token in expected.tokens]
        assert found.statistics.accepted > 0
    assert _name(str(file)) == "Tiny-1M.Q8_0"
    assert config_in(file)["model_type"] == "llama"
    (beside := tmp_path / "small.gguf").write_bytes(whole)
    big = gguf_files.write_model(
        tmp_path / "big.gguf",
        "llama",
        gguf_files.model_of("llama", num_hidden_layers=12),
        changes={"llama.block_count": 12},
    )
    assert [each.folder for each in suggest_draft(big)[:2]] == [file, beside]


@sweep("name", ["./no.gguf", "/no/such.gguf", "~/no-such.gguf", "no.gguf", "no/such.gguf"])
def test_a_file_that_does_not_exist_is_said_before_loading(name: str) -> None:
    with pytest.raises(runtime.ModelError, match=rf"target '.*{re.escape(name.lstrip('~'))}' does not exist"):
        check_source("target", name)
