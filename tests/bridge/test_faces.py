"""What a runtime does alike in trio, on asyncio and in plain threads, with real threads and tiny real models.

To show that a call returns at once, a model blocks in the middle of a forward pass until after the call: a call that
waited for the model would hang.
"""

import gc
import warnings
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import chat_models
import mlx.core as mx
import pytest
import trio
from blocking_models import BlockingModel, released_on_exit
from completions import ids
from faces import Face, all_of, closed, got, next_of, on_every_face, within
from garbage import collect_garbage
from greedy_pair import LONG, PROMPT, SETTINGS, drafter, target, text, the_next_text_is_right
from models import VOCAB_SIZE, Failing, llama, prompt_of, save

import runtime
import runtime.aio
from protocol.trace import Event, Instant, Span

PROMPTS = [tuple(prompt_of(9, seed=seed)) for seed in range(5)]


def opened(open: Any, ours: Any = None, **options: Any) -> Any:
    return within(open((ours or target(), None), (drafter(), None), **options))


def talking(open: Any) -> Any:
    """A runtime over models of text, whose texts do not end by themselves."""
    return within(open(*chat_models.pair(template=None), defaults={"logit_bias": chat_models.QUIET}))


async def completions_of(rt: Any, prompts: Any, **settings: Any) -> list[runtime.Completion]:
    return await got(rt.generate_many(prompts, **settings))


def passes(events: list[Event]) -> list[Event]:
    kinds = ("prefill", "verify", "decode")
    return [e for e in events if isinstance(e, Span) and e.session is not None and e.kind in kinds]


@on_every_face
async def test_streams_and_completions_are_what_they_are_in_trio(open: Any) -> None:
    async with opened(open) as rt:
        async with within(rt.stream(PROMPT, max_tokens=24, **SETTINGS)) as stream:
            tokens = await all_of(stream)
            assert await all_of(stream) == []
        completion = await got(rt.generate(PROMPT, max_tokens=24, **SETTINGS))
        assert [token.id for token in tokens] == ids(completion) == text(24)
        assert [token.index for token in tokens] == list(range(24))
        assert tokens[-1].finish_reason == stream.finish_reason == completion.finish_reason == "length"
        assert stream.statistics().generated_tokens == 24
        assert stream.statistics().accepted == sum(token.from_draft for token in tokens) > 0
        assert rt.statistics().generated_tokens == 48
        assert rt.health() == runtime.Health(target=True, draft=True)
        assert rt.tokenizer is None
    assert rt.health() == runtime.Health(target=False, draft=False)
    assert rt.statistics().generated_tokens == 48
    with pytest.raises(runtime.RuntimeClosedError):
        rt.stream(PROMPT)


@on_every_face
async def test_a_prompt_that_was_read_before_is_not_read_again(open: Any) -> None:
    async with talking(open) as rt:
        messages, tokens = [{"role": "user", "content": "w1 w2"}], tuple(prompt_of(30))
        for prompt in ("w1 w2 w3 w4 w5", tokens):
            warmed = await got(rt.warm(prompt))
            assert (warmed.cached_tokens, warmed.generated_tokens) == (0, 0)
            found = await got(rt.generate(prompt, max_tokens=4, reuse_prefix=True))
            assert found.statistics.cached_tokens == warmed.prompt_tokens - 1
        with pytest.raises(runtime.PromptError, match="template"):
            await got(rt.warm(messages))
        with pytest.raises(runtime.PromptError, match="empty"):
            await got(rt.warm([]))


@on_every_face
async def test_reasoning_ends_with_its_budget_or_on_demand(open: Any) -> None:
    pair = chat_models.pair(thinks=True, template=chat_models.BEGUN_TEMPLATE)
    messages = [{"role": "user", "content": "why"}]
    asked = {"max_tokens": 20, "lookahead": 3, "logit_bias": chat_models.QUIET}
    async with within(open(*pair)) as rt:
        completion = await got(rt.generate(messages, thinking_budget=5, **asked))
        assert [token.index for token in completion.tokens if token.text == "</think>"] == [5]
        assert [token.is_thinking for token in completion.tokens] == [True] * 6 + [False] * 14
        stream = rt.stream(messages, **asked)
        begun = [await next_of(stream) for _ in range(3)]
        stream.end_thinking()
        tokens = begun + await all_of(stream)
        (tag,) = [token.index for token in tokens if token.text == "</think>"]
        assert 3 <= tag < 19
        # The text is the model's own but for the tag.
        same = await got(rt.generate(messages, thinking_budget=tag, **asked))
        assert [token.id for token in tokens] == ids(same)
        stream.end_thinking()


@on_every_face
async def test_models_and_prompts_belong_to_the_caller_until_the_call_and_may_be_lazy(open: Any) -> None:
    model = llama()
    model.model.norm.weight = model.model.norm.weight * 1.0  # only this thread can evaluate it
    async with opened(open, model) as rt:
        prompt = list(PROMPT)
        stream = rt.stream(prompt, max_tokens=8)
        prompt.clear()
        assert [token.id for token in await all_of(stream)] == text(8)
        assert ids(await got(rt.generate(mx.array(PROMPT) + 0, max_tokens=8))) == text(8)
        await the_next_text_is_right(rt)


# A dropped stream whose prompt had been checked and rejected by then gets no warning.
@pytest.mark.filterwarnings("ignore:.* was dropped unread:ResourceWarning")
@on_every_face
async def test_bad_input_is_an_error_before_any_model_work(open: Any) -> None:
    events: list[Event] = []
    async with opened(open, trace=events.append) as rt:
        for name, value in {"max_tokens": 0, "logit_bias": {VOCAB_SIZE: 1.0}}.items():
            for method in (rt.stream, lambda prompt, **given: rt.generate_many([prompt], **given)):
                with pytest.raises(runtime.SettingsError, match=name):
                    method(PROMPT, **{name: value})
        for prompt, complaint in (([], "empty"), ("no tokenizer", "text"), ([VOCAB_SIZE], "vocabulary")):
            with pytest.raises(runtime.PromptError, match=complaint):
                await next_of(rt.stream(prompt))
            with pytest.raises(runtime.PromptError, match=complaint):
                async with within(rt.stream(prompt)):
                    raise AssertionError("should not be reached")
        with pytest.raises(runtime.PromptError, match="tokenizer"):
            await got(rt.conversation().generate("hello"))
        for prompts, settings, complaint in (
            ([PROMPT, []], {}, r"prompts\[1\].*empty"),
            ("one", {}, "sequence of prompts"),
            ([PROMPT], {"max_concurrent": 0}, "max_concurrent"),
        ):
            with pytest.raises(runtime.OutriderError, match=complaint):
                await completions_of(rt, prompts, **settings)
        assert passes(events) == []
        await the_next_text_is_right(rt)
        assert passes(events) != []
    async with talking(open) as rt:
        with pytest.raises(runtime.SettingsError, match="max_tokens"):
            rt.conversation(max_tokens=0)


@on_every_face
async def test_an_error_in_opening_comes_out_as_itself(open: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    for given, options, kind, complaint in (
        ("/no/such/model", {}, runtime.ModelError, "does not exist"),
        (3, {}, runtime.SettingsError, "target"),
        (runtime.DEMO_TARGET, {"max_streams": 0}, runtime.SettingsError, "max_streams"),
        (runtime.DEMO_TARGET, {"no_such_option": 0}, runtime.SettingsError, "no_such_option"),
        (tmp_path, {}, runtime.ModelError, "config.json"),
    ):
        with pytest.raises(kind, match=complaint) as raised:
            async with within(open(given, **options)):
                raise AssertionError("should not be reached")
        assert (raised.value.__cause__ is not None) == (given is tmp_path)


@on_every_face
async def test_a_target_that_fails_ends_every_stream_with_its_error_as_the_cause(open: Any) -> None:
    async with opened(open, failing := Failing(target())) as rt:
        streams = [rt.stream(PROMPT, **LONG) for _ in range(3)]
        failing.fails = True
        for stream in streams:
            with pytest.raises(runtime.RuntimeBrokenError, match="out of memory") as raised:
                await all_of(stream)
            assert isinstance(raised.value.__cause__, ValueError)
        with pytest.raises(runtime.RuntimeBrokenError):
            rt.stream(PROMPT)


def target_passes(events: list[Event]) -> list[Event]:
    return [event for event in passes(events) if event.actor == "target"]


# --- ways to end a stream -------------------------------------------------------------------------

Way = Callable[[Face, Callable[[], Any], Callable[[], Awaitable[None]]], Awaitable[None]]


async def by_closing(face: Face, begin: Callable[[], Any], due: Callable[[], Awaitable[None]]) -> None:
    stream = begin()
    await due()
    await closed(stream)
    await closed(stream)
    with pytest.raises(runtime.RuntimeClosedError, match="this stream was closed"):
        await next_of(stream)


async def by_closing_while_another_waits(
    face: Face, begin: Callable[[], Any], due: Callable[[], Awaitable[None]]
) -> None:
    stream = begin()
    waiting = face.start(partial(all_of, stream))
    await due()
    await closed(stream)
    with pytest.raises(runtime.RuntimeClosedError, match="this stream was closed"):
        await face.result(waiting)


async def by_leaving(face: Face, begin: Callable[[], Any], due: Callable[[], Awaitable[None]]) -> None:
    async with within(begin()):
        await due()


async def by_dropping(face: Face, begin: Callable[[], Any], due: Callable[[], Awaitable[None]]) -> None:
    stream = begin()
    await due()
    with pytest.warns(ResourceWarning, match="dropped unread"):
        del stream


async def by_breaking_out(face: Face, begin: Callable[[], Any], due: Callable[[], Awaitable[None]]) -> None:
    stream = begin()
    await next_of(stream)
    await due()


async def by_raising(face: Face, begin: Callable[[], Any], due: Callable[[], Awaitable[None]]) -> None:
    error = ValueError("the consumer's own")

    async def read() -> None:
        async with within(begin()) as stream:
            await next_of(stream)
            await due()
            raise error

    with pytest.raises(ValueError, match="the consumer's own") as raised:
        await read()
    assert raised.value is error


WAYS: list[Way] = [by_closing, by_closing_while_another_waits, by_leaving, by_dropping, by_breaking_out, by_raising]
WAYS_IN_THE_PROMPT = (by_leaving, by_dropping)


def streams() -> list[object]:
    """The streams that there are, on any face."""
    collect_garbage()
    kinds = (runtime.TokenStream, runtime.aio.TokenStream, runtime.sync.TokenStream)
    return [each for each in gc.get_objects() if isinstance(each, kinds)]


@on_every_face
async def test_ending_a_stream_returns_while_a_forward_pass_runs_and_begins_no_other(face: Face) -> None:
    held, events, of_others = BlockingModel(target()), list[Event](), streams()
    async with opened(face.open, held, trace=events.append, prefix_cache_bytes=0) as rt:
        for after in (1, 6):  # in the middle of the prompt, and past it
            for way in WAYS if after == 6 else WAYS_IN_THE_PROMPT:
                with released_on_exit(held):
                    events.clear()
                    held.block(after=after)
                    await way(face, partial(rt.stream, PROMPT, **LONG), partial(face.until, held.is_blocked))
                    await face.until(lambda: rt.num_streams == 0)
                    before = target_passes(events)
                    held.release()
                    collect_garbage()
                    await the_next_text_is_right(rt)
                    session = before[0].session
                    ours = [event for event in target_passes(events) if event.session == session]
                    # At most the running one: one job of the target may make two forward passes.
                    assert len(ours) <= len(before) + 1, way
    assert [left for left in streams() if all(left is not other for other in of_others)] == []


@on_every_face
async def test_a_stream_has_one_consumer(face: Face) -> None:
    held = BlockingModel(target())
    async with opened(face.open, held) as rt:
        with released_on_exit(held):
            held.block()
            stream = rt.stream(PROMPT, max_tokens=12)
            assert stream.statistics().generated_tokens == 0
            waiting = face.start(partial(all_of, stream))
            await face.until(held.is_blocked)
            await face.until(lambda: is_being_read(stream))
            with pytest.raises(runtime.StreamBusyError, match=r"another (task|thread) is waiting"):
                await next_of(stream)
            held.release()
            assert [token.id for token in await face.result(waiting)] == text(12)


def is_being_read(stream: Any) -> bool:
    if isinstance(stream, runtime.TokenStream):
        return stream._is_waiting
    return getattr(stream, "_handle", stream)._in_use.locked()


@on_every_face
async def test_several_streams_at_once_have_each_their_own_text(face: Face) -> None:
    async with opened(face.open, max_streams=2) as rt:
        tasks = [face.start(partial(read_ids, rt, prompt)) for prompt in PROMPTS]
        found = [await face.result(task) for task in tasks]
        assert found == [text(12, prompt) for prompt in PROMPTS]
        assert rt.statistics().generated_tokens == 12 * len(PROMPTS)


async def read_ids(rt: Any, prompt: Any) -> list[int]:
    return [token.id for token in await all_of(rt.stream(prompt, max_tokens=12))]


async def read_into(found: list[int], stream: Any) -> None:
    while True:
        found.append((await next_of(stream)).id)


@partial(on_every_face, uvloop=True)
async def test_leaving_tells_whoever_waits_and_what_was_committed_can_still_be_read(face: Face) -> None:
    held = BlockingModel(target())
    async with opened(face.open, held) as rt:
        with released_on_exit(held):
            unread, read = rt.stream(PROMPT, **LONG), rt.stream(PROMPT, **LONG)
            for _ in range(5):
                await next_of(read)
            held.block()
            waiting = face.start(partial(read_ids, rt, prompt_of(401)))
            await face.until(held.is_blocked)
            closing = face.start(partial(closed, rt))
            held.release()
            await face.result(closing)
    for stream, first in ((unread, 0), (read, 5)):
        found: list[int] = []
        with pytest.raises(runtime.RuntimeClosedError, match="runtime was closed"):
            await read_into(found, stream)
        assert found == text(100)[first : first + len(found)]
    with pytest.raises(runtime.RuntimeClosedError, match="runtime was closed"):
        await face.result(waiting)
    await closed(rt)
    for use in (rt.stream, rt.generate, lambda prompt: rt.generate_many([prompt])):
        with pytest.raises(runtime.RuntimeClosedError, match="open another"):
            await got(use(PROMPT))


# --- many prompts ---------------------------------------------------------------------------------


@on_every_face
async def test_many_prompts_are_completed_in_their_order(open: Any) -> None:
    events: list[Event] = []
    async with opened(open, trace=events.append) as rt:
        for prompts in (PROMPTS, iter(PROMPTS)):
            completions = await completions_of(rt, prompts, max_concurrent=2, max_tokens=12)
            assert [ids(completion) for completion in completions] == [text(12, prompt) for prompt in PROMPTS]
        assert await completions_of(rt, []) == []
    # Streams begin in the order of the calls.
    began = [e.session for e in events if isinstance(e, Instant) and (e.actor, e.kind) == ("target", "open")]
    assert began == sorted(began) == list(range(10))


@on_every_face
async def test_errors_of_prompts_are_given_in_the_place_of_completions_where_asked_for(open: Any) -> None:
    def fail(tokens: mx.array, logits: mx.array) -> mx.array:
        raise ValueError("no such word")

    async with opened(open) as rt:
        prompts = [PROMPTS[0], [], (PROMPT, {"logits_processors": [fail]}), (PROMPT, {"max_tokens": 0}), PROMPTS[1]]
        found = await completions_of(rt, prompts, on_error="return", max_concurrent=2, max_tokens=6)
        assert [type(each) for each in found] == [
            runtime.Completion,
            runtime.PromptError,
            runtime.ProcessorError,
            runtime.SettingsError,
            runtime.Completion,
        ]
        assert [str(found[index]).partition(":")[0] for index in (1, 3)] == ["prompts[1]", "prompts[3]"]
        assert [ids(found[index]) for index in (0, 4)] == [text(6, prompt) for prompt in PROMPTS[:2]]
        with pytest.raises(runtime.SettingsError, match='on_error must be "raise" or "return", got'):
            rt.generate_many([PROMPT], on_error="ignore")


@on_every_face
async def test_the_first_of_many_that_fails_ends_the_others_with_its_error(open: Any) -> None:
    def fail(tokens: mx.array, logits: mx.array) -> mx.array:
        raise ValueError("no such word")

    async with opened(open) as rt:
        with pytest.raises(runtime.ProcessorError, match="no such word") as raised:
            await completions_of(rt, [PROMPT, (PROMPT, {"logits_processors": [fail]})], **LONG)
        assert "prompts[1] failed" in raised.value.__notes__[0]
        await the_next_text_is_right(rt)


# --- conversations and saved sessions --------------------------------------------------------------


async def talk(rt: Any) -> Any:
    """A conversation of three turns, of which one is ended early, and another one is dropped."""
    conversation = rt.conversation("w5", max_tokens=8, ignore_eos=True, temperature=0.8, seed=3)
    assert conversation.messages == [{"role": "system", "content": "w5"}]
    answer = await got(conversation.generate("w1 w2"))
    assert conversation.messages[2]["content"] == answer.text != ""
    async with within(conversation.stream(" w3", max_tokens=40)) as stream:
        given = [(await next_of(stream)).text for _ in range(3)]
        for use in (conversation.stream, conversation.generate, lambda _: conversation.reset(), conversation.save):
            with pytest.raises(runtime.ConversationBusyError, match=r"close\(\)"):
                await got(use("too early"))
    assert conversation.messages[-1]["content"] == "".join(given)
    with pytest.warns(ResourceWarning, match="dropped unread"):
        conversation.stream("never heard")
    await got(conversation.generate(" w4"))
    return conversation


@on_every_face
async def test_a_conversation_goes_on_as_in_trio_and_when_it_was_saved(open: Any, tmp_path: Path) -> None:
    model, path = save(tmp_path / "model", target()), tmp_path / "session"

    async def in_trio() -> Any:
        async with runtime.open(model) as rt:
            return (await talk(rt)).messages

    async with within(open(model)) as rt:
        conversation = await talk(rt)
        messages = conversation.messages
        assert await got(conversation.save(path)) == path.stat().st_size
        expected = await got(conversation.generate(" w6"))
    async with within(open(model)) as rt:
        loaded = await got(rt.load(path))
        assert loaded.messages == messages
        found = await got(loaded.generate(" w6"))
        assert ids(found) == ids(expected)
        assert found.statistics.cached_tokens == expected.statistics.cached_tokens > 0
        # `reset` forgets the messages, not the settings and the system message.
        loaded.reset()
        assert loaded.messages == messages[:1]
        anew = await got(loaded.generate("w1 w2"))
        assert anew.text == messages[2]["content"]
    with ThreadPoolExecutor(1) as pool:  # uvloop and trio would both handle this thread's signals
        assert messages == pool.submit(trio.run, in_trio).result()


@on_every_face
async def test_what_cannot_be_saved_or_loaded_is_said(open: Any, tmp_path: Path) -> None:
    path = tmp_path / "session"
    async with talking(open) as rt:
        conversation = rt.conversation("Be kind.", max_tokens=5)
        for where in (None, 3, "", b"session", ["a"]):
            for use in (conversation.save, rt.load):
                with pytest.raises(runtime.SettingsError, match="give the path of a file"):
                    await got(use(where))
        for use in (conversation.save, rt.load):
            with pytest.raises(runtime.SessionFileError, match="no/such"):
                await got(use(tmp_path / "no/such"))
        await got(conversation.save(path))
        for wrong in ({"max_tokens": 0}, {"max_token": 3}):
            with pytest.raises(runtime.SettingsError, match="max_tokens"):
                await got(rt.load(path, **wrong))
        assert len((await got((await got(rt.load(path))).generate(" I am"))).tokens) == 5
        loaded = await got(rt.load(path, max_tokens=3))
        assert [message["content"] for message in loaded.messages] == ["Be kind."]
        assert len((await got(loaded.generate(" I am"))).tokens) == 3
    for use in (lambda: conversation.save(tmp_path / "later"), lambda: rt.load(path)):
        with pytest.raises(runtime.RuntimeClosedError):
            await got(use())
    assert [each.name for each in tmp_path.iterdir()] == ["session"]


# --- streams that are dropped unread -------------------------------------------------------------


@pytest.fixture
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
        # Recorded warnings may hold references to the streams.
        caught.clear()


@on_every_face
async def test_a_stream_that_nobody_reads_warns_and_ends_and_no_other_warns(open, caught):
    caught.clear()
    async with within(open((target(), None))) as rt:
        stream = rt.stream(PROMPT)
        if isinstance(stream, runtime.aio.TokenStream):
            await stream.opened()
        del stream
        collect_garbage()
        (warning,) = caught
        assert warning.category is ResourceWarning
        assert str(warning.message) == (
            "a token stream was dropped unread, which ended its generation; read it, or close it with "
            + ("close()" if open is runtime.open_sync else "aclose()")
        )
        del warning
        assert not isinstance(rt, runtime.Runtime) or rt.num_streams == 0
        # Read, closed, left, or of a runtime that was closed meanwhile.
        await next_of(rt.stream(PROMPT))
        await closed(rt.stream(PROMPT))
        async with within(rt.stream(PROMPT)):
            pass
        await got(rt.generate(PROMPT, max_tokens=3))
        await got(rt.generate_many([PROMPT] * 2, max_tokens=3))
        stream = rt.stream(PROMPT)
    del stream
    collect_garbage()
    assert len(caught) == 1
