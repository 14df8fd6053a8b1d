"""The settings in a saved session: they come back unchanged, and files with anything else are rejected."""

import json
import math
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import sweep

from actors.mlx.sequence_state import SequenceRecord
from actors.persistence.fingerprint import Fingerprint
from actors.persistence.saved_sequence import SavedModelState
from protocol.errors import SessionFileError, SettingsError
from protocol.settings import MAX_SEED, Settings, settings_from
from protocol.tensor import Tensor
from runtime.persistence import saved_session
from runtime.persistence.saved_session import SavedSession, settings_for_json, settings_of
from runtime.persistence.session_file import Contents, read, write

PRINT = Fingerprint("llama", 1000, "aa", "bb", "cc")
OTHER = Fingerprint("llama", 1000, "aa", "bb", "dd")


def a_session(**changes: Any) -> SavedSession:
    values: dict[str, Any] = {
        "messages": ({"role": "user", "content": "hello"},),
        "thinking": None,
        "tokens": (5, 0, 4_000_000_000),
        "settings": settings_for_json(Settings()),
        "num_processors": 0,
        "cache_options": {"kv_bits": None, "max_kv_size": None},
        "vocabulary": "abc",
        "target": SavedModelState(PRINT, None),
        "draft": None,
    }
    return SavedSession(**values | changes)


finite = st.floats(allow_nan=False, allow_infinity=False)
some_settings = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.none() | st.integers(1, 10**12),
        "temperature": st.floats(0, 1e300) | st.integers(0, 3),
        "top_p": st.floats(0, 1),
        "seed": st.none() | st.integers(0, MAX_SEED),
        "stop": st.lists(st.text(min_size=1, max_size=9), max_size=3) | st.text(min_size=1, max_size=9),
        "stop_tokens": st.lists(st.integers(0, 2**31), max_size=3),
        "ignore_eos": st.booleans(),
        "logit_bias": st.dictionaries(st.integers(0, 2**31), finite | st.just(-math.inf) | st.integers(-9, 9)),
        "presence_penalty": st.none() | finite,
        "acceptance": st.sampled_from(["auto", "match", "rejection"]),
        "lookahead": st.just("auto") | st.integers(0, 64),
        "reuse_prefix": st.booleans(),
    },
)


@settings(max_examples=50)
@given(keywords=some_settings)
def test_settings_come_back_as_they_were(keywords: dict[str, Any]) -> None:
    before = settings_from(keywords)
    described = json.loads(json.dumps(settings_for_json(before), allow_nan=False))
    assert settings_from(settings_of(a_session(settings=described), "x", {})) == before


def test_every_setting_but_functions_and_files_is_in_the_file() -> None:
    names = {field.name for field in attrs.fields(Settings)}
    assert set(settings_for_json(Settings())) == names - {"logits_processors", "prompt_cache_file"}


def test_functions_must_be_given_again() -> None:
    def function(*arrays: Any) -> Any:
        return arrays[-1]

    sampled = settings_for_json(Settings(sampler=function, max_tokens=9))
    for session, name, value, none, complaint in (
        (a_session(num_processors=2), "logits_processors", (function,), (), r"had 2 .*=\[\.\.\.\] again, or \[\]"),
        (a_session(settings=sampled), "sampler", function, None, r"had a sampler.*=\.\.\. again, or None"),
    ):
        with pytest.raises(SettingsError, match=complaint):
            settings_of(session, "x", {})
        for given_ in (value, none):
            assert getattr(settings_from(settings_of(session, "x", {name: given_})), name) == given_


@sweep(
    "described",
    [
        {"temperature": -1},
        {"of_the_future": 1},
        {"logit_bias": 3},
        {"logit_bias": [[1]]},
        {"logit_bias": [[[1], 2]]},
        {"logit_bias": [["a", 2]]},
        {"logits_processors": ["os.system"]},
        {"seed": True},
    ],
)
def test_settings_that_a_file_has_wrong_are_the_files(described: dict[str, Any]) -> None:
    with pytest.raises(SessionFileError, match="settings that this Outrider does not take"):
        settings_of(a_session(settings=described), "x", {})


async def test_a_session_and_what_is_cached_come_back_as_they_were(tmp_path: Path) -> None:
    session = a_session(draft=SavedModelState(OTHER, None))
    size = await saved_session.write(tmp_path / "session", session)
    assert size == (tmp_path / "session").stat().st_size
    assert await saved_session.read(tmp_path / "session") == session
    raw = memoryview(bytes(range(8)))
    line = SequenceRecord({"tokens": {"tensor": "target.0"}}, {"target.0": Tensor("U32", (2,), raw)})
    await saved_session.write(tmp_path / "session", a_session(target=SavedModelState(PRINT, line)))
    found = (await saved_session.read(tmp_path / "session")).target.sequence
    assert found.description == line.description
    assert bytes(found.tensors["target.0"].data) == bytes(raw)


async def test_a_file_of_a_running_stream_is_told_from_a_conversation(tmp_path: Path) -> None:
    await saved_session.write(path := tmp_path / "session", a_session())
    content, tensors = attrs.astuple(read(path), recurse=False)
    write(path, Contents({**content, "stream": {"seed": 3}}, tensors))
    with pytest.raises(SessionFileError, match="has a running stream, not a conversation"):
        await saved_session.read(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**33) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = ["messages", "thinking", "settings", "num_processors", "cache_options", "vocabulary", "target", "draft"]


@settings(max_examples=60)
@given(
    changes=st.dictionaries(st.sampled_from(NAMES), json_values), missing=st.sets(st.sampled_from(NAMES), max_size=1)
)
async def test_whatever_a_file_says_it_is_read_or_refused(tmp_path_factory, changes, missing):
    path = tmp_path_factory.mktemp("fuzz") / "session"
    sound = {
        "messages": [],
        "thinking": True,
        "settings": {},
        "num_processors": 0,
        "cache_options": {},
        "vocabulary": None,
        "target": {"fingerprint": attrs.asdict(PRINT), "line": None},
        "draft": None,
    }
    content = {name: value for name, value in (sound | changes).items() if name not in missing}
    write(path, Contents(content, {"tokens": Tensor("U32", (0,), memoryview(b""))}))
    try:
        session = await saved_session.read(path)
        settings_of(session, path, {"logits_processors": []})
        saved_session.check_cache_options(path, session.cache_options, {})
    except SessionFileError:
        return
    assert not missing
