"""Saved streams: a text that is saved in its middle goes on as if it had never been in a file."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn
import pytest
import trio
import trio.testing
from architectures import build
from chat_models import THINKING_TEMPLATE, says
from chat_models import tokenizer as thinker
from hypothesis import given, settings
from hypothesis import strategies as st
from models import VOCAB_SIZE, gemma3_text, llama, near
from polling import until_in_trio
from sample_tokenizers import byte_level
from save_interrupts import cancel_at
from sweeps import sweep

import runtime
from actors.drafters.draft_actor import DraftActor
from actors.persistence import saved_sequence
from actors.workers.worker import Job
from protocol.replay import ReplayDebt
from protocol.settings import Settings
from protocol.tensor import Tensor
from runtime.engine import sessions
from runtime.persistence import saved_session, session_file
from runtime.persistence.session_file import Contents

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
NUM_TOKENS = 16
CUTS = (0, 7, 15)


@attrs.frozen
class Pair:
    """Two models, built anew for each runtime, as in another process."""

    make: Callable[[], nn.Module]

    def open(self, *, tokenizer: Any = None, drafted: bool = True, **options: Any) -> Any:
        target = self.make()
        draft = (near(target, noise=0.05), tokenizer) if drafted else None
        return runtime.open((target, tokenizer), draft, **options)


PAIRS = {
    "attention": Pair(llama),
    "sliding window": Pair(lambda: gemma3_text(window=16)),
    "recurrent": Pair(lambda: build("mamba", vocab_size=VOCAB_SIZE)),
    "hybrid": Pair(lambda: build("lfm2", vocab_size=VOCAB_SIZE)),
}
LLAMA = PAIRS["attention"]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 11},
    "rejection": {"temperature": 1.0, "seed": 11, "acceptance": "rejection"},
    "rejection of a seed that nobody named": {"temperature": 1.0},
}


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the models finish a short text before its first token is read."""
    monkeypatch.setattr(sessions, "BUFFERED_ROUNDS", 1)


async def read(stream: runtime.TokenStream, max_tokens: int = 10**9) -> list[runtime.Token]:
    got: list[runtime.Token] = []
    while len(got) < max_tokens:
        try:
            got.append(await anext(stream))
        except StopAsyncIteration:
            break
    return got


def ids_of(tokens: Iterable[runtime.Token]) -> list[int]:
    return [token.id for token in tokens]


def content(tokens: list[runtime.Token]) -> list[runtime.Token]:
    """Tokens without their origin, which depends on where rounds begin, and so on time."""
    return [attrs.evolve(token, drafted_by=None) for token in tokens]


async def check(
    path: Path, pair: Pair, cuts: tuple[int, ...] = CUTS, *, again: dict[str, Any] | None = None, **options: Any
) -> list[runtime.TokenStream]:
    """Assert that a stream that is saved at each cut, and one that continues from each file, have the same tokens."""
    opened = {name: options.pop(name) for name in ("tokenizer", "drafted") if name in options}
    asked = {"max_tokens": NUM_TOKENS, "lookahead": 3, **options}
    got: list[runtime.Token] = []
    async with pair.open(**opened) as rt, rt.stream(PROMPT, **asked) as stream:
        for cut in cuts:
            got += await read(stream, cut - len(got))
            size = await stream.save(path.with_suffix(f".{cut}"))
            assert path.with_suffix(f".{cut}").stat().st_size == size
        got += await read(stream)
        assert stream.finish_reason is not None
        if Settings(**asked).rule == "match":
            # Saving did not change the stream.
            alone = await rt.generate(PROMPT, **asked)
            assert content(list(alone.tokens)) == content(got)
    loaded = []
    async with pair.open(**opened) as rt:
        for cut in cuts:
            resumed = await rt.load_stream(path.with_suffix(f".{cut}"), **again or {})
            assert not resumed.is_closed
            assert content(await read(resumed)) == content(got[cut:])
            assert (resumed.finish_reason, resumed.stop_reason) == (stream.finish_reason, stream.stop_reason)
            assert resumed.answer.text == stream.answer.text
            loaded.append(resumed)
    return loaded


# --- going on -------------------------------------------------------------------------------------


@sweep(
    ("name", "kind"),
    [
        *(("attention", kind) for kind in KINDS),
        ("recurrent", "greedy"),
        ("hybrid", "rejection"),
        ("sliding window", "seeded"),
    ],
)
async def test_a_stream_goes_on_as_it_would_have(
    tmp_path: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind.startswith("rejection"):
        # Samples depend on the rounds, and when a replayed token is settled depends on measured times.
        monkeypatch.setattr(ReplayDebt, "should_settle", lambda *_: False)
    await check(tmp_path / "stream", PAIRS[name], **KINDS[kind])


@pytest.mark.parametrize(("name", "kind"), [("attention", "rejection"), ("recurrent", "greedy")])
async def test_so_does_one_that_is_not_drafted(tmp_path: Path, name: str, kind: str) -> None:
    await check(tmp_path / "stream", PAIRS[name], drafted=False, **KINDS[kind])


@sweep("drafted", [True, False])
@sweep("name", ["attention", "recurrent"])
async def test_what_both_models_have_cached_is_in_the_file(tmp_path: Path, name: str, drafted: bool) -> None:
    read_by: dict[str, int] = {"target": 0, "draft": 0}

    def note(event: runtime.Event) -> None:
        if isinstance(event, runtime.Span) and event.kind == "prefill":
            read_by[event.actor] += event.num_tokens

    prompt = PROMPT * 20
    async with PAIRS[name].open(drafted=drafted) as rt, rt.stream(prompt, max_tokens=60, lookahead=3) as stream:
        await read(stream, 9)
        await stream.save(tmp_path / "stream")
    session = await saved_session.read(tmp_path / "stream")
    for model in (session.target, session.draft):
        # A recurrent drafter that has drafted since its last checkpoint has no state to save but that of no token.
        if model is not None and (model.sequence is not None or model is session.target or name != "recurrent"):
            assert model.sequence is not None
            tokens = model.sequence.tensors[model.sequence.description["tokens"]["tensor"]].array().tolist()
            # And no token that was only drafted.
            assert tuple(tokens) == session.tokens[: len(tokens)]
    async with PAIRS[name].open(drafted=drafted, trace=note) as rt:
        resumed = await rt.load_stream(tmp_path / "stream")
        await read(resumed)
        assert resumed.statistics().cached_tokens >= len(prompt) - 1
    assert read_by["target"] < 20
    # A recurrent drafter may have read everything that was decided, and can continue only from there.
    assert read_by["draft"] < 20 or name == "recurrent"


# --- the state of a text --------------------------------------------------------------------------


async def test_stop_strings_and_characters_may_be_half_there(tmp_path: Path) -> None:
    async with LLAMA.open(tokenizer=byte_level()) as rt:
        whole = await rt.generate(PROMPT, max_tokens=NUM_TOKENS)
    text, ids = whole.text, ids_of(whole.tokens)
    almost = [text[i : i + 4] + "☂" for i in range(len(text))]
    stop = byte_level().decode(ids[:12])[len(byte_level().decode(ids[:6])) :]
    assert text.find(stop) == text.rfind(stop) > 0
    cuts = tuple(range(0, 12, 3))
    streams = await check(tmp_path / "stream", LLAMA, cuts, tokenizer=byte_level(), stop=[*almost, stop], lookahead=1)
    assert {stream.stop_reason for stream in streams} == {stop}


async def test_logprobs_and_what_nobody_has_read_are_not_lost(tmp_path: Path) -> None:
    await check(tmp_path / "stream", LLAMA, tokenizer=byte_level(), logprobs=3, logit_bias={7: -math.inf})


class Once:
    """Bans tokens that have come before. It has a state, which can be restored."""

    def __init__(self) -> None:
        self.seen: tuple[int, ...] | None = None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.seen = () if self.seen is None else (*self.seen, tokens[-1].item())
        return mx.where(mx.array([i in self.seen for i in range(logits.shape[-1])])[None], -mx.inf, logits)

    def save(self) -> Any:
        return self.seen

    def restore(self, state: Any) -> None:
        self.seen = state


async def test_processors_are_given_again_and_find_their_state(tmp_path: Path) -> None:
    path = tmp_path / "stream"
    await check(path, LLAMA, logits_processors=[Once()], again={"logits_processors": [Once()]})
    async with LLAMA.open() as rt:
        with pytest.raises(runtime.SettingsError, match="had 1 logits_processors"):
            await rt.load_stream(path.with_suffix(".7"))


async def test_thinking_goes_on_where_it_was(tmp_path: Path) -> None:
    wrapped = thinker(THINKING_TEMPLATE, thinks=True)
    processor = says(wrapped, "<think>Hm, os</think>import os")
    path, prompt = tmp_path / "stream", [{"role": "user", "content": "What now?"}]
    async with runtime.open((llama(vocab_size=4103), wrapped)) as rt:
        stream = rt.stream(prompt, logits_processors=[processor], stop="</think>?")
        got = await read(stream, 3)
        assert got[-1].is_thinking
        await stream.save(path)
        got += await read(stream)
        resumed = await rt.load_stream(path, logits_processors=[processor])
        assert content(await read(resumed)) == content(got[3:])
        assert (resumed.answer.thinking, resumed.answer.said) == ("Hm, os", "import os")


async def test_settings_may_be_given_anew(tmp_path: Path) -> None:
    path = tmp_path / "stream"
    async with LLAMA.open() as rt:
        stream = rt.stream(PROMPT, max_tokens=9, lookahead=0)
        got = await read(stream, 4)
        await stream.save(path)
        longer = ids_of((await rt.generate(PROMPT, max_tokens=20)).tokens)
        num_decided = len((await saved_session.read(path)).tokens) - len(PROMPT)
        assert num_decided < 9
        assert ids_of(got) + ids_of(await read(await rt.load_stream(path, max_tokens=20))) == longer
        with pytest.raises(runtime.SettingsError, match=f"max_tokens must be above the {num_decided} tokens"):
            await rt.load_stream(path, max_tokens=num_decided)
        with pytest.raises(runtime.SettingsError, match="did you mean 'max_tokens'"):
            await rt.load_stream(path, max_token=20)
        seeded = await read(await rt.load_stream(path, temperature=1.0, seed=5))
        assert ids_of(seeded) == ids_of(await read(await rt.load_stream(path, temperature=1.0, seed=5)))
        assert len(seeded) == 5


# --- when a stream is saved -----------------------------------------------------------------------


@pytest.mark.parametrize("reuse_prefix", [False, True])
async def test_a_stream_that_was_closed_goes_on(tmp_path: Path, reuse_prefix: bool) -> None:
    path = tmp_path / "stream"
    async with LLAMA.open() as rt:
        stream = rt.stream(PROMPT * 9, max_tokens=200, reuse_prefix=reuse_prefix)
        got = await read(stream, 5)
        await stream.aclose()
        await stream.save(path)
        expected = ids_of((await rt.generate(PROMPT * 9, max_tokens=30)).tokens)
    async with LLAMA.open() as rt:
        resumed = await rt.load_stream(path, max_tokens=30)
        assert ids_of(got) + ids_of(await read(resumed)) == expected
        assert resumed.statistics().cached_tokens > 0 or not reuse_prefix


async def test_a_stream_that_failed_goes_on_without_what_failed(tmp_path: Path) -> None:
    @runtime.stateless
    def fails(tokens: mx.array, logits: mx.array) -> mx.array:
        if len(tokens) > len(PROMPT) + 6:
            raise ValueError("no more")
        return logits

    async with LLAMA.open() as rt:
        stream = rt.stream(PROMPT, max_tokens=20, lookahead=0, logits_processors=[fails])
        got = await read(stream, 4)
        with pytest.raises(runtime.ProcessorError):
            await read(stream)
        await stream.save(tmp_path / "stream")
        resumed = await rt.load_stream(tmp_path / "stream", logits_processors=[])
        expected = await rt.generate(PROMPT, max_tokens=20)
        rest = ids_of(await read(resumed))
        num_given = 20 - len(rest)
        assert num_given > 4
        assert ids_of(got) == ids_of(expected.tokens[:4])
        assert rest == ids_of(expected.tokens[num_given:])


async def test_a_stream_that_is_over_stays_over(tmp_path: Path) -> None:
    path = tmp_path / "stream"
    async with LLAMA.open(tokenizer=byte_level()) as rt:
        stream = rt.stream(PROMPT, max_tokens=8)
        got = await read(stream)
        await stream.save(path)
        resumed = await rt.load_stream(path)
        assert resumed.is_closed
        assert await read(resumed) == []
        assert (resumed.finish_reason, resumed.answer.text) == ("length", stream.answer.text)
        await resumed.save(path)
        assert (await rt.load_stream(path)).answer.text == "".join(token.text for token in got)
        del resumed
        await trio.testing.wait_all_tasks_blocked()
        assert rt.num_streams == 0


async def test_the_first_token_of_a_resumed_stream_is_not_timed(tmp_path: Path) -> None:
    async with LLAMA.open(drafted=False) as rt:
        async with rt.stream(PROMPT, max_tokens=20) as stream:
            await read(stream, 4)
            await stream.save(tmp_path / "stream")
        async with await rt.load_stream(tmp_path / "stream") as resumed:
            await anext(resumed)
            assert resumed.statistics().generation_tps is None


async def test_what_is_cached_is_left_out_where_it_is_not_known_of_which_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_looks = 0

    async def busy() -> None:
        """Some job always ends in between."""
        nonlocal num_looks
        num_looks += 1
        await rt._target.worker.run(Job("save", lambda: None))

    async with LLAMA.open(drafted=False) as rt, rt.stream(PROMPT, max_tokens=NUM_TOKENS) as stream:
        await read(stream, 5)
        with monkeypatch.context() as patch:
            patch.setattr(saved_sequence, "trio", SimpleNamespace(lowlevel=SimpleNamespace(checkpoint=busy)))
            await stream.save(tmp_path / "stream")
        assert num_looks == 3
        assert (await saved_session.read(tmp_path / "stream")).target.sequence is None
        rest = ids_of(await read(stream))
        assert ids_of(await read(await rt.load_stream(tmp_path / "stream"))) == rest


async def test_a_save_that_is_cancelled_leaves_the_stream_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LLAMA.open() as rt:
        expected = ids_of((await rt.generate(PROMPT, max_tokens=NUM_TOKENS)).tokens)
        was_cancelled = []
        for step in (0, 1, 2, 3, 4, 8, 1000):
            stream = rt.stream(PROMPT, max_tokens=NUM_TOKENS)
            got = await read(stream, 5)
            with monkeypatch.context() as patch, trio.CancelScope() as scope:
                cancel_at(scope, step, patch)
                await stream.save(tmp_path / "stream")
            was_cancelled.append(scope.cancelled_caught)
            assert os.listdir(tmp_path) == ([] if scope.cancelled_caught else ["stream"])
            assert ids_of(got + await read(stream)) == expected
        assert was_cancelled == [True] * 6 + [False]


@pytest.mark.parametrize("name", ["attention", "recurrent"])
async def test_a_stream_that_nobody_reads_is_saved_with_all_that_is_decided(tmp_path: Path, name: str) -> None:
    path, num_verdicts = tmp_path / "stream", 0
    is_full = trio.Event()

    def note(event: runtime.Event) -> None:
        nonlocal num_verdicts
        num_verdicts += isinstance(event, runtime.Instant) and event.kind == "verdict"
        if num_verdicts > 2 + sessions.BUFFERED_ROUNDS:
            is_full.set()

    async with PAIRS[name].open(drafted=False, trace=note) as rt:
        stream = rt.stream(PROMPT, max_tokens=60)
        got = await read(stream, 2)
        await is_full.wait()
        for _ in range(9):
            await stream.save(path)
        num_decided = len((await saved_session.read(path)).tokens) - len(PROMPT)
        assert 2 + sessions.BUFFERED_ROUNDS < num_decided <= 2 + 4 * (1 + sessions.BUFFERED_ROUNDS)
        resumed = await rt.load_stream(path)
        rest = ids_of(await read(resumed))
        assert rest == ids_of(await read(stream))
        assert len(got) + len(rest) == 60


async def test_a_stream_can_be_saved_again_and_again(tmp_path: Path) -> None:
    path, got = tmp_path / "stream", []
    async with LLAMA.open() as rt:
        expected = await rt.generate(PROMPT, max_tokens=NUM_TOKENS, temperature=1.0, seed=3)
        await rt.stream(PROMPT, max_tokens=NUM_TOKENS, temperature=1.0, seed=3).save(path)
        while True:
            resumed = await rt.load_stream(path)
            if not (some := await read(resumed, 5)):
                break
            got += some
            await resumed.save(path)
    assert content(got) == content(list(expected.tokens))


@sweep("draft", ["ngram", (near(llama(), noise=0.05), None)])
async def test_a_lookup_or_a_drafter_that_is_no_longer_there_keeps_nobody_from_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draft: Any
) -> None:
    async with runtime.open((llama(), None), draft) as rt:
        stream = rt.stream(PROMPT * 5, max_tokens=NUM_TOKENS, temperature=1.0, seed=3)
        await read(stream, 5)
        with monkeypatch.context() as patch:
            patch.setattr(DraftActor, "is_alive", False)
            await stream.save(tmp_path / "stream")
        assert (await saved_session.read(tmp_path / "stream")).draft is None
        rest = ids_of(await read(stream))
        assert ids_of(await read(await rt.load_stream(tmp_path / "stream"))) == rest


# --- other files ----------------------------------------------------------------------------------


@pytest.fixture
async def saved(tmp_path: Path) -> Path:
    async with LLAMA.open() as rt, rt.stream(PROMPT, max_tokens=NUM_TOKENS, logprobs=2) as stream:
        await read(stream, 5)
        # Until something has arrived that was not read, so that the file has commits.
        await until_in_trio(lambda: stream.arrivals._commits.statistics().current_buffer_used > 0)
        await stream.save(tmp_path / "stream")
    return tmp_path / "stream"


async def refusal(rt: runtime.Runtime, path: Path) -> str:
    """The error of a load; asserts that the load changed nothing."""
    with pytest.raises(runtime.SessionFileError) as refused:
        await rt.load_stream(path)
    assert (len(rt._target.prefix_cache), rt.num_streams) == (0, 0)
    return str(refused.value)


async def test_a_conversation_is_no_stream_and_another_model_goes_on_with_none(saved: Path, tmp_path: Path) -> None:
    async with runtime.open((llama(vocab_size=4101), thinker())) as rt:
        await rt.conversation().save(tmp_path / "conversation")
        assert "has a conversation, not what was asked for; use load()" in await refusal(rt, tmp_path / "conversation")
    assert "stream" not in session_file.read(tmp_path / "conversation").content  # as before streams could be saved
    async with runtime.open((llama(1), None)) as rt:
        assert "another target model: its weights differ" in await refusal(rt, saved)


HOSTILE: dict[str, dict[str, Any]] = {
    "no prompt": {"num_prompt": 0},
    "a prompt longer than the text": {"num_prompt": 10**6},
    "more given than there is": {"num_given": 10**6},
    "less than there is": {"commits": []},
    "a negative number": {"num_given": -1},
    "a seed that is none": {"seed": 2**64},
    "a commit of nothing": {"commits": [{}]},
    "an end of another kind": {"finish_reason": "error"},
    "an end in the middle": {"finish_reason": "stop"},
    "a list": {"commits": {}},
}


async def test_a_hostile_stream_changes_nothing(saved: Path) -> None:
    contents = session_file.read(saved)
    stream = contents.content["stream"]
    assert stream["commits"]
    async with LLAMA.open() as rt:
        for name, change in HOSTILE.items():
            session_file.write(saved, Contents(contents.content | {"stream": stream | change}, contents.tensors))
            assert "damaged: what it says of" in await refusal(rt, saved), name
        stream["commits"][0]["likelihoods"][0][1][0][0] = VOCAB_SIZE
        session_file.write(saved, contents)
        assert f"token {VOCAB_SIZE}, outside the target's vocabulary" in await refusal(rt, saved)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 40) | st.floats() | st.sampled_from(["stop", "length"]),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)
COMMIT = ("num_tokens", "num_from_draft", "copied", "finish_reason", "stop_reason", "likelihoods")
NAMES = ("num_prompt", "seed", "num_given", "commits", "finish_reason", "stop_reason")


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    described=st.fixed_dictionaries(
        {name: json_values | st.integers(0, 9) for name in NAMES}
        | {"commits": st.lists(st.fixed_dictionaries(dict.fromkeys(COMMIT, json_values)), max_size=3) | json_values}
    ),
    tokens=st.lists(st.integers(0, 9), max_size=12),
)
def test_whatever_a_file_says_of_a_stream_it_is_read_or_refused(described: Any, tokens: list[int]) -> None:
    tensor = Tensor("U32", (len(tokens),), memoryview(array("I", tokens)).cast("B"))
    try:
        found = saved_session._stream(Contents({"stream": described}, {"tokens": tensor}))
    except saved_session._Unexpected:
        return
    assert found is not None
    progress = found.progress
    decided = [token for commit in progress.commits for token in commit.tokens]
    assert [*progress.given, *decided] == tokens[progress.num_prompt :]
    assert 0 < progress.num_prompt <= len(tokens)
