"""The file of a saved session: it is complete or does not exist, and only an unaltered file is accepted."""

import errno
import hashlib
import io
import json
import os
import stat
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sweeps import sweep

from protocol.errors import SessionFileError
from protocol.tensor import DTYPES, Tensor
from runtime.persistence import session_file
from runtime.persistence.session_file import VERSION, Contents, read, write

CONTENT = {"messages": [{"role": "user", "content": "Ünïcode \ud800 and \x00"}], "number": 2**64 - 1, "none": None}


def some_tensors() -> dict[str, Tensor]:
    return {
        "one": Tensor.of(mx.arange(12).reshape(3, 4).astype(mx.bfloat16)),
        "empty": Tensor.of(mx.zeros((2, 0, 3))),
        "single": Tensor.of(mx.array(7, mx.uint32)),
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "session"


@pytest.fixture
def written(path: Path) -> Path:
    write(path, Contents(CONTENT, some_tensors()))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(SessionFileError) as refused:
        read(path)
    assert str(path) in str(refused.value)
    return str(refused.value)


def forged(header: Any, data: bytes = b"") -> bytes:
    """A file with a valid checksum, whatever its header says."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = len(encoded).to_bytes(8, "little") + encoded + data
    return body + hashlib.sha256(body).digest()


def header_for(num_bytes: int = 0, content: str = "{}", version: str = "1", **tensors: Any) -> dict[str, Any]:
    return {
        "__metadata__": {"outrider_session": version, "content": content},
        **tensors,
        "checksum": {"dtype": "U8", "shape": [32], "data_offsets": [num_bytes, num_bytes + 32]},
    }


# --- write and read -------------------------------------------------------------------------------


def test_what_is_written_is_read(written: Path) -> None:
    contents = read(written)
    assert contents.content == CONTENT
    assert list(contents.tensors) == ["one", "empty", "single"]
    for name, tensor in some_tensors().items():
        assert contents.tensors[name].shape == tensor.shape
        assert contents.tensors[name].dtype == tensor.dtype
        assert bytes(contents.tensors[name].data) == bytes(tensor.data)


@sweep("dtype", DTYPES)
def test_an_array_of_any_number_format_comes_back_bit_by_bit(path: Path, dtype: str) -> None:
    raw = bytes(range(48)) if dtype != "BOOL" else bytes(i % 2 for i in range(48))
    tensor = Tensor(dtype, (2, 24 // DTYPES[dtype]), memoryview(raw))
    array = tensor.array()
    again = Tensor.of(array)
    assert (again.dtype, again.shape, bytes(again.data)) == (dtype, tensor.shape, raw)


def test_the_file_is_a_safetensors_file_to_others(written: Path) -> None:
    tensors, metadata = mx.load(str(written), format="safetensors", return_metadata=True)
    assert set(tensors) == {"one", "empty", "single", "checksum"}
    assert mx.array_equal(tensors["one"], mx.arange(12).reshape(3, 4).astype(mx.bfloat16))
    assert metadata["outrider_session"] == str(VERSION)


# --- atomic writes --------------------------------------------------------------------------------


class Stop(BaseException):
    """Like a cancellation, not an `Exception`."""


def stop() -> None:
    raise Stop


def at_call(number: int, do: Callable[[], None]) -> Callable[[], None]:
    """A `check_cancelled` that does something at its `number`-th call."""
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            do()

    return check


def big() -> Contents:
    return Contents({}, {"big": Tensor("U8", (9 << 20,), memoryview(bytes(9 << 20)))})


@sweep("number", [1, 2, 4, 5])
@sweep("exists", [False, True])
def test_a_write_that_is_cancelled_changes_nothing(path: Path, number: int, exists: bool) -> None:
    path.write_bytes(b"what was there")
    if not exists:
        path.unlink()
    with pytest.raises(Stop):
        write(path, big(), at_call(number, stop))
    assert os.listdir(path.parent) == (["session"] if exists else [])
    assert not exists or path.read_bytes() == b"what was there"


def test_a_read_can_be_cancelled(path: Path) -> None:
    write(path, big())
    for number in (1, 3, 5):
        with pytest.raises(Stop):
            read(path, at_call(number, stop))


@sweep("function", ["fsync", "replace", "fchmod"])
@sweep("number", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS])
def test_a_system_that_refuses_leaves_what_was_there(written, monkeypatch, function, number):
    before = written.read_bytes()

    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(session_file.os, function, refuse)
    with pytest.raises(SessionFileError, match=os.strerror(number)) as refused:
        write(written, Contents({}, {}))
    assert isinstance(refused.value.__cause__, OSError)
    assert str(written) in str(refused.value)
    assert os.listdir(written.parent) == ["session"]
    assert written.read_bytes() == before


def test_the_directory_is_told_of_a_new_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        order.append("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def note_replace(*names: Any) -> None:
        order.append("replace")
        replace(*names)

    monkeypatch.setattr(session_file.os, "fsync", note_fsync)
    monkeypatch.setattr(session_file.os, "replace", note_replace)
    write(path, Contents({}, {}))
    assert order == ["file", "replace", "directory"]


def test_a_new_file_is_its_owners_alone_and_an_old_one_keeps_its_permissions(path: Path) -> None:
    write(path, Contents({}, {}))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    write(path, Contents({}, {}))
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_file_that_is_read_only_stays(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = written.read_bytes()
    # The tests may run as root, who can write everything.
    monkeypatch.setattr(session_file.os, "access", lambda place, mode: not (Path(place) == written and mode == os.W_OK))
    with pytest.raises(SessionFileError, match="it is read-only"):
        write(written, Contents({}, {}))
    assert written.read_bytes() == before
    assert os.listdir(written.parent) == ["session"]


def test_a_link_is_followed(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    write(link, Contents({"here": 1}, {}))
    assert link.is_symlink()
    assert read(path).content == {"here": 1}


def test_there_is_no_writing_where_no_file_can_be(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere" / "session", f"{tmp_path}/with\0null", tmp_path / ("x" * 300)):
        with pytest.raises(SessionFileError, match="cannot write"):
            write(place, Contents({}, {}))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SessionFileError, match="no ordinary file"):
        write(tmp_path / "pipe", Contents({}, {}))
    assert os.listdir(tmp_path) == ["pipe"]


# --- open files -----------------------------------------------------------------------------------


class Dripping(io.BytesIO):
    """A file that reads and writes a few bytes at a time, as an unbuffered one may."""

    def write(self, data: Any) -> int:
        return super().write(bytes(data[:7]))

    def read(self, most: int | None = -1) -> bytes:
        return super().read(min(most, 5))


@sweep("make", [io.BytesIO, Dripping, tempfile.SpooledTemporaryFile])
def test_an_open_file_is_written_and_read_from_its_position_on(make: Callable[[], Any], written: Path) -> None:
    with make() as file:
        file.write(b"before")
        assert write(file, Contents(CONTENT, some_tensors())) == written.stat().st_size
        assert file.tell() == 6 + written.stat().st_size
        file.seek(6)
        contents = read(file)
        assert contents.content == CONTENT
        for name, tensor in some_tensors().items():
            assert bytes(contents.tensors[name].data) == bytes(tensor.data)
        file.seek(0)
        with pytest.raises(SessionFileError, match=f"session file <{make.__name__}> is no saved session"):
            read(file)


def test_an_open_file_that_cannot_be_used_is_told_as_such(written: Path) -> None:
    closed = io.BytesIO(written.read_bytes())
    closed.close()
    with pytest.raises(SessionFileError, match="cannot read session file <"):
        read(closed)
    ends = os.pipe()
    with os.fdopen(ends[0], "rb") as pipe, pytest.raises(SessionFileError, match="cannot read session file <"):
        read(pipe)
    os.close(ends[1])
    with open(written, "rb") as file, pytest.raises(SessionFileError, match="cannot write session file <"):
        write(file, Contents({}, {}))


# --- other files ----------------------------------------------------------------------------------


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "nowhere")
    assert "no ordinary file" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "no ordinary file" in refusal(tmp_path / "pipe")


@sweep("data", [b"", b"\0" * 7, b"hello world, this is a text file of somebody's\n" * 9, b"\0" * 400])
def test_another_kind_of_file_is_no_saved_session(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    assert "is no saved session" in refusal(path)


def test_foreign_files_and_newer_versions_are_no_saved_sessions(path: Path) -> None:
    mx.save_safetensors(str(path), {"weight": mx.zeros((40, 40))})
    path.with_suffix(".safetensors").rename(path)
    assert "a safetensors file of something else" in refusal(path)
    path.write_bytes(forged(header_for(version=str(VERSION + 1))))
    assert f"version {VERSION + 1}, and this Outrider reads up to {VERSION}; update Outrider" in refusal(path)


def test_a_file_with_any_byte_cut_added_or_changed_is_refused(written: Path) -> None:
    whole = written.read_bytes()
    written.write_bytes(whole + b"\0")
    assert "damaged" in refusal(written)
    for i in range(len(whole)):
        for changed in (b"", *(bytes([whole[i] ^ change]) + whole[i + 1 :] for change in (0x01, 0x80))):
            written.write_bytes(whole[:i] + changed)
            refusal(written)


HOSTILE = {
    "no table": [1, 2],
    "no checksum": {"__metadata__": {"outrider_session": "1", "content": "{}"}},
    "huge shape": header_for(8, a={"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]}),
    "huge shape that multiplies to nothing": header_for(
        0, a={"dtype": "F32", "shape": [2**40, 0], "data_offsets": [0, 0]}
    ),
    "huge offsets": header_for(8, a={"dtype": "U8", "shape": [2**31 - 1], "data_offsets": [0, 2**31 - 1]}),
    "negative offsets": header_for(8, a={"dtype": "U8", "shape": [8], "data_offsets": [-8, 0]}),
    "overlapping": header_for(
        8,
        a={"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
        b={"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
    ),
    "a gap": header_for(16, a={"dtype": "U8", "shape": [8], "data_offsets": [8, 16]}),
    "an unknown number format": header_for(8, a={"dtype": "object", "shape": [8], "data_offsets": [0, 8]}),
    "a shape of truths": header_for(8, a={"dtype": "U8", "shape": [True, 8], "data_offsets": [0, 8]}),
    "a tensor that is none": header_for(8, a=3),
    "many dimensions": header_for(8, a={"dtype": "U8", "shape": [1] * 1000, "data_offsets": [0, 1]}),
    "deep nesting": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "deep content": header_for(content="[" * 100_000 + "]" * 100_000),
    "a long number": b'{"a":' + b"9" * 5000 + b"}",
    "no number": header_for(content="NaN"),
    "a name twice": b'{"__metadata__":{"outrider_session":"1","content":"{}"},"__metadata__":{}}',
    "no text": b'{"\xff\xfe":1}      ',
    "a version of letters": header_for(version="one"),
    "version nought": header_for(version="0"),
    "content that is none": {**header_for(), "__metadata__": {"outrider_session": "1", "content": 3}},
}


def refusal_without_memory(path: Path) -> str:
    tracemalloc.start()
    try:
        why = refusal(path)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()
    return why


@sweep("name", HOSTILE)
def test_a_hostile_header_is_refused_and_takes_no_memory(path: Path, name: str) -> None:
    path.write_bytes(forged(HOSTILE[name], b"\0" * 16))
    refusal_without_memory(path)


def test_a_header_longer_than_the_file_is_not_waited_for(path: Path) -> None:
    for length in (2**63, 2**64 - 1, 10**8, 10**8 + 1, 1000):
        path.write_bytes(length.to_bytes(8, "little") + b"{" + b" " * 100)
        refusal(path)


def test_a_file_that_is_mostly_a_hole_takes_no_memory(path: Path) -> None:
    hole = 64 << 20
    header = json.dumps(header_for(hole, a={"dtype": "U8", "shape": [hole], "data_offsets": [0, hole]})).encode()
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + hole + 32)
    assert "checksum does not match" in refusal_without_memory(path)


# The first and last piece of the checksum, the tensor, and what is in memory by then.
@sweep("call", range(1, 10))
def test_a_file_altered_while_it_is_read_is_refused_or_was_read_already(path: Path, call: int) -> None:
    write(path, big())
    size = path.stat().st_size

    def alter() -> None:
        with open(path, "r+b") as file:
            file.seek(size - 33 - (call % 2) * (8 << 20))
            file.write(b"\x01")

    try:
        contents = read(path, at_call(call, alter))
    except SessionFileError:
        return
    assert not any(contents.tensors["big"].data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "F8", ""]) | json_values,
        "shape": st.lists(st.integers(-1, 2**33) | json_values, max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-1, 200) | json_values, max_size=3) | json_values,
    }
)


@settings(max_examples=60)
@given(
    tensors=st.dictionaries(st.text(max_size=6), entries | json_values, max_size=3),
    metadata=st.fixed_dictionaries(
        {"outrider_session": st.just("1") | json_values, "content": st.text() | json_values}
    ),
    data=st.binary(max_size=80),
)
@example(tensors={}, metadata={"outrider_session": "1", "content": "{}"}, data=b"")
def test_whatever_a_header_says_it_is_read_or_refused(tmp_path_factory, tensors, metadata, data):
    path = tmp_path_factory.mktemp("fuzz") / "session"
    checksum = header_for(len(data))["checksum"]
    path.write_bytes(forged({"__metadata__": metadata, **tensors, "checksum": checksum}, data))
    try:
        contents = read(path)
    except SessionFileError:
        return
    assert sum(len(tensor.data) for tensor in contents.tensors.values()) == len(data)
