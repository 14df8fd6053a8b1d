"""Saved conversations: a loaded conversation continues as if it had never been in a file, or there is a clear error."""

import io
import itertools
import logging
import os
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import mlx.nn as nn
import pytest
import trio
import trio.testing
from architectures import ARCHITECTURES, build
from chat_models import QUIET, ROLES, TEMPLATE, VOCAB_SIZE, demo_with, tokenizer
from command_line import piped, save_model
from completions import ids
from models import gemma3_text, llama, near
from sweeps import sweep

import runtime
from actors.persistence import saved_sequence
from actors.workers.worker import JobError
from runtime.persistence import saved_session, session_file

LLAMA4: dict[str, Any] = ARCHITECTURES["llama4"].args["text_config"]
SAID = ("The cat sat on the mat.", " And then?", " What else did it do all day?")
GREEDY: dict[str, Any] = {"max_tokens": 12, "logit_bias": QUIET, "lookahead": 3}
SEEDED: dict[str, Any] = {**GREEDY, "temperature": 0.8, "seed": 11}


@attrs.frozen
class Pair:
    """Two models, built anew for each runtime, as in another process."""

    make: Callable[..., nn.Module]
    options: dict[str, Any] = attrs.Factory(dict)
    reuses: bool = True  # whether the next turn can reuse the cache of a turn

    def open(self, template: str | None = TEMPLATE, *, drafted: bool = True, **options: Any) -> Any:
        target = self.make()
        draft = (near(target, noise=0.05), None) if drafted else None
        return runtime.open((target, tokenizer(template)), draft, **self.options | options)


PAIRS = {
    "llama": Pair(lambda: llama(vocab_size=VOCAB_SIZE)),
    "sliding window": Pair(lambda: gemma3_text(window=16, vocab_size=VOCAB_SIZE)),
    "hybrid": Pair(lambda: build("lfm2", vocab_size=VOCAB_SIZE)),
    "hybrid with a window": Pair(lambda: build("recurrent_gemma", vocab_size=VOCAB_SIZE)),
    "lists of caches": Pair(lambda: build("falcon_h1", vocab_size=VOCAB_SIZE)),
    "chunks": Pair(lambda: build("llama4", text_config=LLAMA4 | {"vocab_size": VOCAB_SIZE})),
    "quantised": Pair(
        lambda: build("qwen3", head_dim=32, vocab_size=VOCAB_SIZE),
        {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 10},
        reuses=False,
    ),
    "bounded": Pair(lambda: build("qwen3", vocab_size=VOCAB_SIZE), {"max_kv_size": 24}, reuses=False),
}
LLAMA = PAIRS["llama"]
LAST_LOOK = 24


@asynccontextmanager
async def talking(pair: Pair = LLAMA, **options: Any) -> AsyncIterator[tuple[runtime.Runtime, runtime.Conversation]]:
    """A runtime, and a conversation of one turn in it."""
    async with pair.open(**options) as rt:
        conversation = rt.conversation(**GREEDY)
        await conversation.generate(SAID[0])
        yield rt, conversation


async def saved(path: Path, pair: Pair = LLAMA) -> None:
    """Save such a conversation."""
    async with talking(pair) as (_, conversation):
        await conversation.save(path)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a conversation of one turn."""
    path = tmp_path_factory.mktemp("saved") / "session"
    trio.run(saved, path)
    return path


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    """A copy of the file."""
    return Path(shutil.copy(original, tmp_path))


# --- going on -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), [*((name, GREEDY) for name in PAIRS), ("llama", SEEDED)])
async def test_a_conversation_goes_on_as_it_would_have(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    pair, path = PAIRS[name], tmp_path / "session"
    async with pair.open() as rt:
        conversation = rt.conversation("You are kind.", **settings)
        await conversation.generate(SAID[0])
        await conversation.save(path)
        messages = conversation.messages
        expected = [await conversation.generate(text) for text in SAID[1:]]
    async with pair.open() as rt:
        loaded = await rt.load(path)
        assert loaded.messages == messages
        found = [await loaded.generate(text) for text in SAID[1:]]
        assert loaded.messages == conversation.messages
    assert [ids(completion) for completion in found] == [ids(completion) for completion in expected]
    for one, other in zip(found, expected, strict=True):
        # Nothing is read again that would have been cached without the file.
        assert one.statistics.cached_tokens == other.statistics.cached_tokens
        assert (one.statistics.cached_tokens > 0) == pair.reuses


@pytest.mark.parametrize("name", ["llama", "hybrid"])
async def test_what_the_drafter_has_cached_is_there_again(tmp_path: Path, name: str) -> None:
    pair, path, read = PAIRS[name], tmp_path / "session", []

    def note(event: runtime.Event) -> None:
        if isinstance(event, runtime.Span) and event.actor == "draft" and event.kind == "prefill":
            read.append(event.num_tokens)

    async with talking(pair, trace=note) as (rt, conversation):
        await conversation.save(path)
        read.clear()
        await conversation.generate(SAID[1])
        expected = sum(read)
        await rt.generate(conversation.messages[:-1], **GREEDY)
        anew = sum(read) - expected
    read.clear()
    async with pair.open(trace=note) as rt:
        await (await rt.load(path)).generate(SAID[1])
    assert sum(read) == expected < anew


async def test_a_conversation_can_be_saved_after_every_turn_and_loaded_twice(tmp_path: Path) -> None:
    path = tmp_path / "session"
    async with LLAMA.open() as rt:
        conversation = rt.conversation(**SEEDED)
        sizes = []
        for text in SAID:
            await conversation.generate(text)
            sizes.append(await conversation.save(path))
        assert sizes == sorted(sizes)
        assert path.stat().st_size == sizes[-1]
        first, second = await rt.load(path), await rt.load(path)
        assert first.messages == second.messages == conversation.messages
        expected = ids(await conversation.generate("More!"))
        assert ids(await first.generate("More!")) == expected
        assert ids(await second.generate("More!")) == expected
        assert first is not second
    assert os.listdir(tmp_path) == ["session"]


async def test_an_answer_that_was_broken_off_is_saved_as_far_as_it_was_given(tmp_path: Path) -> None:
    path = tmp_path / "session"
    async with LLAMA.open() as rt:
        conversation = rt.conversation(**GREEDY)
        async with conversation.stream(SAID[0], max_tokens=200) as stream:
            async for token in stream:
                if token.index == 5:
                    break
            with pytest.raises(runtime.ConversationBusyError, match="while an answer is under way"):
                await conversation.save(path)
        # At once, while the models may still work.
        await conversation.save(path)
        expected = await conversation.generate(SAID[1])
    assert ids(await next_turn(path)) == ids(expected)


async def test_a_conversation_goes_to_and_from_bytes_whatever_is_in_its_messages() -> None:
    async with LLAMA.open() as rt:
        conversation = rt.conversation('Quotes ", \\, \n\t and \x00, 日本語, 🐈‍⬛', **GREEDY)
        await conversation.generate("{{ messages }} <|user|> \u2028")
        file = io.BytesIO()
        assert await conversation.save(file) == len(file.getvalue())
        messages = conversation.messages
        expected = await conversation.generate(SAID[1])
        loaded = await rt.load(io.BytesIO(file.getvalue()))
        assert loaded.messages == messages
        assert ids(await loaded.generate(SAID[1])) == ids(expected)
        with pytest.raises(runtime.SettingsError, match="give the path of a file, or io"):
            await conversation.save(io.StringIO())
        with pytest.raises(runtime.SessionFileError, match="session file <BytesIO> is damaged"):
            await rt.load(io.BytesIO(file.getvalue()[:-1]))


# --- mismatches -----------------------------------------------------------------------------------


async def refusal(rt: runtime.Runtime, path: Path, **settings: Any) -> str:
    """The error of a load; asserts that the load changed nothing."""
    before = (len(rt._target.prefix_cache), len(rt._draft.prefix_cache) if rt._draft is not None else 0)
    with pytest.raises(runtime.SessionFileError) as refused:
        await rt.load(path, **settings)
    assert str(path) in str(refused.value)
    assert (len(rt._target.prefix_cache), len(rt._draft.prefix_cache) if rt._draft is not None else 0) == before
    assert rt.num_streams == 0
    return str(refused.value)


async def test_another_target_is_refused_and_named(path: Path) -> None:
    others = {
        "its weights differ": llama(1, vocab_size=VOCAB_SIZE),
        "its architecture is lfm2, not llama": build("lfm2", vocab_size=VOCAB_SIZE),
        "parameters, not": llama(num_hidden_layers=3, vocab_size=VOCAB_SIZE),
        "its configuration differs": llama(rope_theta=20_000.0, vocab_size=VOCAB_SIZE),
    }
    for why, model in others.items():
        async with runtime.open((model, tokenizer())) as rt:
            message = await refusal(rt, path)
            assert "another target model" in message
            assert why in message
            # The runtime works as before.
            assert len((await rt.generate("Hello", max_tokens=3, ignore_eos=True)).tokens) == 3


async def next_turn(path: Path | io.BytesIO, **options: Any) -> runtime.Completion:
    """What a loaded conversation goes on with."""
    async with LLAMA.open(**options) as rt:
        return await (await rt.load(path)).generate(SAID[1])


async def test_another_draft_is_refused_and_named_unless_any_will_do(path, caplog):
    model, expected = llama(vocab_size=VOCAB_SIZE), ids(await next_turn(path))
    async with runtime.open((model, tokenizer()), (llama(7, vocab_size=VOCAB_SIZE), None)) as rt:
        message = await refusal(rt, path)
        assert "another draft model: its weights differ" in message
        assert "any_draft=True" in message
        with caplog.at_level(logging.INFO, "outrider"):
            loaded = await rt.load(path, any_draft=True)
        assert "left out" in caplog.text
        assert ids(await loaded.generate(SAID[1])) == expected


@sweep("draft", [None, "ngram"])
async def test_without_a_draft_model_its_cache_is_left_out(path, draft, caplog):
    expected = await next_turn(path)
    async with runtime.open((llama(vocab_size=VOCAB_SIZE), tokenizer()), draft) as rt:
        with caplog.at_level(logging.INFO, "outrider"):
            loaded = await rt.load(path)
        assert "left out: there is none" in caplog.text
        found = await loaded.generate(SAID[1])
        assert ids(found) == ids(expected)
        assert found.statistics.cached_tokens == expected.statistics.cached_tokens > 0


async def test_a_draft_model_that_comes_later_reads_the_text_anew(tmp_path: Path) -> None:
    path = tmp_path / "session"
    async with talking(drafted=False) as (_, conversation):
        await conversation.save(path)
        expected = await conversation.generate(SAID[1])
    found = await next_turn(path)
    assert ids(found) == ids(expected)
    assert found.statistics.cached_tokens == expected.statistics.cached_tokens
    assert found.statistics.accepted > 0


async def test_another_vocabulary_is_refused(path: Path) -> None:
    more = demo_with(*ROLES, "<|more|>", template=TEMPLATE)
    async with runtime.open((llama(vocab_size=VOCAB_SIZE), more)) as rt:
        assert "tokenizer of another vocabulary" in await refusal(rt, path)
    async with runtime.open((llama(vocab_size=VOCAB_SIZE), None)) as rt:
        assert "with a tokenizer, and this runtime has none" in await refusal(rt, path)


async def test_caches_that_are_made_otherwise_are_refused(tmp_path: Path) -> None:
    quantised, path = PAIRS["quantised"], tmp_path / "session"
    await saved(path, quantised)
    for name, value, saved_with in (("kv_bits", None, 8), ("kv_bits", 4, 8), ("quantized_kv_start", 0, 10)):
        async with quantised.open(**{name: value}) as rt:
            assert f"was saved with {name}={saved_with}, and this runtime has {value}" in await refusal(rt, path)
    async with quantised.open() as rt:
        await rt.load(path)


# --- hostile files --------------------------------------------------------------------------------


async def test_a_damaged_file_changes_nothing(path: Path) -> None:
    whole = path.read_bytes()
    async with LLAMA.open() as rt:
        for i in range(0, len(whole), len(whole) // 7):
            path.write_bytes(whole[:i] + bytes([whole[i] ^ 0x10]) + whole[i + 1 :])
            await refusal(rt, path)
            path.write_bytes(whole[:i])
            await refusal(rt, path)
        path.write_bytes(b"")
        await refusal(rt, path)
        for other in (path.parent, path.parent / "nowhere", Path(runtime.DEMO_TARGET) / "model.safetensors"):
            await refusal(rt, other)
        path.write_bytes(whole)
        await rt.load(path)


async def test_tokens_beyond_the_vocabulary_are_refused(path: Path) -> None:
    contents = session_file.read(path)
    tokens = contents.tensors["tokens"]
    tokens.data[0:4] = (VOCAB_SIZE).to_bytes(4, "little")
    session_file.write(path, contents)
    async with LLAMA.open() as rt:
        assert f"token {VOCAB_SIZE}, outside the target's vocabulary" in await refusal(rt, path)


# --- contents of a file ---------------------------------------------------------------------------


async def test_nothing_of_another_conversation_gets_into_a_file(tmp_path: Path) -> None:
    async with LLAMA.open() as rt:
        secret = rt.conversation("You are kind.", **GREEDY)
        await secret.generate("My number is 12345.")
        other = rt.conversation("You are kind.", **GREEDY)
        await other.save(tmp_path / "before")
        told = await secret.generate("Forget it.")
        del told
        await other.generate("Hello!")
        await other.save(tmp_path / "after")
    words = tokenizer().encode("My number is 12345.", add_special_tokens=False)
    for name in ("before", "after"):
        session = await saved_session.read(tmp_path / name)
        for model in (session.target, session.draft):
            description = model.sequence.description
            tokens = model.sequence.tensors[description["tokens"]["tensor"]].array().tolist()
            assert tokens == list(session.tokens[: len(tokens)])
            assert str(words)[1:-1] not in str(tokens)
            for layer in description["layers"]:
                keys, values, offset = layer["state"]
                assert offset == len(tokens)
                assert model.sequence.tensors[keys["tensor"]].shape[2] == len(tokens)
                assert model.sequence.tensors[values["tensor"]].shape[2] == len(tokens)


async def test_where_nothing_is_cached_the_text_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "session"
    async with talking(prefix_cache_bytes=0) as (rt, conversation):
        small = await conversation.save(path)
        expected = ids(await conversation.generate(SAID[1]))
        found = await (await rt.load(path)).generate(SAID[1])
        assert ids(found) == expected
        assert found.statistics.cached_tokens == 0
    await saved(path)
    assert path.stat().st_size > small
    found = await next_turn(path, prefix_cache_bytes=0)
    assert ids(found) == expected
    assert found.statistics.cached_tokens == 0


# --- moments --------------------------------------------------------------------------------------


async def test_files_are_written_and_read_beside_the_event_loop(tmp_path, monkeypatch):
    """Each save waits here for something that only another task can do."""
    path, entered, go_on = tmp_path / "session", trio.Event(), trio.Event()
    for name in ("write", "read"):
        real = getattr(session_file, name)

        def slow(*args: Any, real: Any = real) -> Any:
            trio.from_thread.run_sync(entered.set)
            trio.from_thread.run(go_on.wait)
            return real(*args)

        monkeypatch.setattr(session_file, name, slow)
    async with talking() as (rt, conversation):
        for call in (conversation.save, rt.load):
            entered, go_on = trio.Event(), trio.Event()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(call, path)
                await entered.wait()
                assert len((await rt.generate("Hello", **GREEDY | {"max_tokens": 2})).tokens) == 2
                go_on.set()


def cancel_at(scope: trio.CancelScope, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancel `scope` at the `step`-th point of a save or load: jobs of a model, calls in a thread, checks in it."""
    steps, check = itertools.count(), trio.from_thread.check_cancelled

    def count() -> None:
        if next(steps) == step:
            scope.cancel()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        async def call(*args: Any) -> Any:
            count()
            return await function(*args)

        return call

    def counted_check() -> None:
        trio.from_thread.run_sync(count)
        check()

    monkeypatch.setattr(saved_sequence, "_run", counted(saved_sequence._run))
    monkeypatch.setattr(trio.to_thread, "run_sync", counted(trio.to_thread.run_sync))
    monkeypatch.setattr(trio.from_thread, "check_cancelled", counted_check)


# The steps: each model's caches, found and copied a layer at a time, and its fingerprint; the vocabulary, the writing
# thread, a check before the header and before each tensor, and one before the file is moved into place.
@pytest.mark.slow
@sweep("step", [0, 2, 4, 10, LAST_LOOK, LAST_LOOK + 1])
async def test_a_save_that_is_cancelled_leaves_the_old_file_or_the_new_one(path, step, monkeypatch):
    before = path.read_bytes()
    async with LLAMA.open() as rt:
        conversation = await rt.load(path)
        await conversation.generate(SAID[1])
        with trio.CancelScope() as scope:
            cancel_at(scope, step, monkeypatch)
            await conversation.save(path)
        monkeypatch.undo()
        assert os.listdir(path.parent) == ["session"]
        assert scope.cancelled_caught == (step <= LAST_LOOK)
        if scope.cancelled_caught:
            assert path.read_bytes() == before
        else:
            assert (await rt.load(path)).messages == conversation.messages
        # The conversation and the models work as before.
        await conversation.save(path)
        assert (await rt.load(path)).messages == conversation.messages


@pytest.mark.slow
@sweep("step", [0, 10, 14, 18, 20])
async def test_a_load_that_is_cancelled_leaves_nothing(path: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with LLAMA.open() as rt:
        loaded = None
        with trio.CancelScope() as scope:
            cancel_at(scope, step, monkeypatch)
            loaded = await rt.load(path)
        monkeypatch.undo()
        assert (loaded is None) == scope.cancelled_caught
        again = await rt.load(path)
        assert (await again.generate(SAID[1])).statistics.cached_tokens > 0


async def test_a_runtime_that_closes_ends_what_is_under_way(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, entered, go_on = session_file.read, trio.Event(), trio.Event()

    async def wait() -> None:
        entered.set()
        with trio.CancelScope(shield=True):
            await go_on.wait()

    def slow(*args: Any) -> Any:
        trio.from_thread.run(wait)
        return read(*args)

    monkeypatch.setattr(session_file, "read", slow)
    ended = []

    async def load() -> None:
        with pytest.raises(runtime.RuntimeClosedError):
            await rt.load(path)
        ended.append(True)

    before = path.read_bytes()
    async with trio.open_nursery() as nursery:
        async with LLAMA.open() as rt:
            conversation = rt.conversation()
            nursery.start_soon(load)
            await entered.wait()
        go_on.set()
    assert ended == [True]
    for use in (rt.load, conversation.save):
        with pytest.raises(runtime.RuntimeClosedError):
            await use(path)
    assert path.read_bytes() == before


# --- in the chat ----------------------------------------------------------------------------------


def a_chat_with(model: str) -> list[str]:
    return ["--target", model, "--max-tokens", "6"]


@pytest.mark.slow
def test_a_chat_can_be_saved_and_gone_on_with_in_another(tmp_path: Path, capfd: Any, monkeypatch: Any) -> None:
    model, path = str(save_model(tmp_path / "model", context=10_000)), tmp_path / "with spaces.session"
    status, out, err = piped(capfd, monkeypatch, *a_chat_with(model), lines=f"w1 w2\n/save {path}\nw3\n")
    assert status == 0
    assert f"outrider: saved to {path}, {path.stat().st_size / 1e3:,.0f} kB\n" in err
    _, expected = out.splitlines()
    status, out, err = piped(capfd, monkeypatch, *a_chat_with(model), lines=f"/load {path}\nw3\n")
    assert (status, out) == (0, f"{expected}\n")
    assert err.startswith(f"outrider: loaded {path}, a conversation of 2 messages\n")
    # Given settings and another drafter replace the saved ones.
    changed = ["--max-tokens", "2", "--draft", model]
    status, out, _ = piped(capfd, monkeypatch, *a_chat_with(model), *changed, lines=f"/load {path}\nw3\n")
    assert status == 0
    assert 0 < len(out) < len(expected)
    assert expected.strip().startswith(out.strip())


# --- the system says no ---------------------------------------------------------------------------


async def test_a_load_that_finds_the_models_gone_says_that_the_runtime_is_closed(path, monkeypatch):
    async with LLAMA.open() as rt:

        async def close_first(*_: Any) -> None:
            await rt.aclose()
            raise JobError("load was not run: the target's thread has ended")

        monkeypatch.setattr(saved_sequence, "keep", close_first)
        with pytest.raises(runtime.RuntimeClosedError, match="this runtime was closed"):
            await rt.load(path)


# --- beside drafters that hang --------------------------------------------------------------------

LONG_S = 30.0  # after which a hang ends, so that whoever waits for it fails
# What is asked of a model on its thread, when a conversation is saved or loaded.
SAVING, LOADING = ("_find", "_fingerprint"), ("_fingerprint", "_fill")


@attrs.define
class Hang:
    """A function of the drafter's thread that does not return before it is released."""

    has_begun: trio.Event = attrs.field(factory=trio.Event)
    release: threading.Event = attrs.field(factory=threading.Event)
    was_waited_for: bool = False


@asynccontextmanager
async def hanging(monkeypatch: pytest.MonkeyPatch, rt: runtime.Runtime, name: str) -> AsyncIterator[Hang]:
    """Have a function hang on the drafter's thread."""
    drafter = rt._draft
    hang, token, real = Hang(), trio.lowlevel.current_trio_token(), getattr(saved_sequence, name)

    def hanging(model: Any, *arguments: Any, **keywords: Any) -> Any:
        if model is drafter.model:
            token.run_sync_soon(hang.has_begun.set)
            hang.was_waited_for = not hang.release.wait(LONG_S)
        return real(model, *arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(saved_sequence, name, hanging)
        try:
            yield hang
        finally:
            hang.release.set()
    assert not hang.was_waited_for


@sweep("name", LOADING)
async def test_a_conversation_is_loaded_beside_a_drafter_that_hangs(name, path, monkeypatch, caplog):
    expected = ids(await next_turn(path))
    monkeypatch.setattr("runtime.persistence.saved_session.DRAFTER_WAIT_S", 0.05)
    async with LLAMA.open() as rt:
        async with hanging(monkeypatch, rt, name):
            conversation = await rt.load(path)
        answer = await conversation.generate(SAID[1])
        assert ids(answer) == expected
        assert answer.statistics.cached_tokens > 0
        assert (await rt.generate(SAID[0], **GREEDY)).statistics.proposed > 0
    assert "what the draft model has cached is left out" in caplog.text


@sweep("name", LOADING)
async def test_a_load_that_waits_for_the_drafter_is_cancelled_at_once(name: str, path: Path, monkeypatch: Any) -> None:
    async with LLAMA.open() as rt, hanging(monkeypatch, rt, name) as hang, trio.open_nursery() as nursery:
        nursery.start_soon(rt.load, path)
        await hang.has_begun.wait()
        nursery.cancel_scope.cancel()


@sweep("name", LOADING)
async def test_a_conversation_is_loaded_while_the_drafter_is_detached(name: str, path: Path, monkeypatch: Any) -> None:
    expected = ids(await next_turn(path))
    monkeypatch.setattr("runtime.engine.drafter_slot.RELEASE_TIMEOUT_S", 0.05)
    monkeypatch.setattr("runtime.persistence.saved_session.DRAFTER_WAIT_S", 0.5)
    loaded: list[Any] = []
    async with LLAMA.open() as rt:
        async with hanging(monkeypatch, rt, name) as hang:

            async def load() -> None:
                loaded.append(await rt.load(path))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(load)
                await hang.has_begun.wait()
                await rt.detach_draft()
        assert ids(await loaded[0].generate(SAID[1])) == expected


@sweep("name", SAVING)
async def test_a_conversation_is_saved_beside_a_drafter_that_hangs(name: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("runtime.persistence.saved_session.DRAFTER_WAIT_S", 0.05)
    async with talking() as (rt, conversation):
        async with hanging(monkeypatch, rt, name):
            await conversation.save(file := io.BytesIO())
        expected = ids(await conversation.generate(SAID[1]))
    answer = await next_turn(io.BytesIO(file.getvalue()))
    assert (ids(answer), answer.statistics.cached_tokens > 0) == (expected, True)
