"""What a trained drafter has read of a text comes back, from files and between turns: it drafts as if never away."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from architectures import build
from drafted_runtime import PROMPTS, drafted
from models import greedy, prompt_of
from polling import until_in_trio
from saved_texts import load_text, save_text
from scripted import ids
from sweeps import sweep
from trained_drafters import KINDS, make, write_eagle3

import runtime
from actors.drafters.drafter import policy_by_settings
from actors.mlx import sequence_state
from actors.persistence import saved_sequence
from actors.target.drafter_link import DrafterLink
from protocol.tensor import Tensor
from protocol.trace import Events
from runtime.engine import sessions
from runtime.persistence import session_file
from runtime.persistence.session_file import Contents

NUM_TOKENS = 14
ASKED: dict[str, Any] = {"max_tokens": NUM_TOKENS, "lookahead": 3, "ignore_eos": True}
Proposals = list[tuple[int, ...]]
# Others have texts of the same classes.
SELDOM = dict.fromkeys(("peagle", "mtp", "dspark", "dflash2"), pytest.mark.slow)


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the models finish a short text before its first token is read."""
    monkeypatch.setattr(sessions, "BUFFERED_ROUNDS", 1)


@asynccontextmanager
async def noted(folder: Path, target: Any, **options: Any) -> AsyncIterator[tuple[Any, Proposals]]:
    """A runtime, and what its drafter proposes; each time on fresh features."""
    events, proposals = Events(), Proposals()

    def note(event: runtime.Event) -> None:
        if isinstance(event, runtime.Instant) and event.kind == "proposal":
            proposals.append(event.tokens)

    events.listen(note)
    make_policy = partial(policy_by_settings, work_ahead="never")
    async with drafted(folder, target, events=events, make_policy=make_policy, **options) as rt:
        yield rt, proposals


async def save(
    folder: Path, file: Path, *, kind: str = "eagle3", **asked: Any
) -> tuple[Any, list[int], list[int], Proposals]:
    """Save a text. Returns: the target, a prompt that continues the text, and what follows it with what is proposed."""
    target = make(kind, folder)
    async with noted(folder, target) as (rt, proposals):
        first = await rt.generate(PROMPTS[1], **ASKED | asked, reuse_prefix=True)
        text = [*PROMPTS[1], *ids(first.tokens)]
        await save_text(rt, file, text)
        proposals.clear()
        prompt = [*text, *PROMPTS[0][:3]]
        second = await rt.generate(prompt, **ASKED | asked, reuse_prefix=True)
        return target, prompt, ids(second.tokens), proposals


async def resume(
    folder: Path, file: Path, target: Any, prompt: list[int], **asked: Any
) -> tuple[list[int], Proposals, runtime.Statistics]:
    """What follows the prompt once the text is loaded, what is proposed, and the statistics."""
    async with noted(folder, target) as (rt, proposals):
        await load_text(rt, file)
        completion = await rt.generate(prompt, **ASKED | asked, reuse_prefix=True)
        return ids(completion.tokens), proposals, completion.statistics


def rewritten(file: Path, change: Callable[[Any], None]) -> None:
    contents = session_file.read(file)
    change(contents.content)
    session_file.write(file, Contents(contents.content, contents.tensors))


# --- saved texts --------------------------------------------------------------------------------


@sweep(
    ("kind", "temperature"),
    [pytest.param(kind, float(index % 2), marks=SELDOM.get(kind, ())) for index, kind in enumerate(KINDS)],
)
async def test_a_loaded_text_is_drafted_at_once_as_it_would_have_been(
    kind: str, temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient_targets: Any
) -> None:
    folder, file, asked = tmp_path / "drafter", tmp_path / "text", {"temperature": temperature, "seed": 3}
    target, prompt, text, expected = await save(folder, file, kind=kind, **asked)
    rest, found, statistics = await resume(folder, file, target, prompt, **asked)
    assert (rest, found) == (text, expected)
    assert len(found) > 3
    assert (statistics.draft_failures, statistics.cached_tokens > 0) == (0, True)
    # Without that part of the file, the drafter misses what came before, and the target does not wait for it.
    monkeypatch.setattr(DrafterLink, "timeout_s", patient_targets)
    rewritten(file, lambda content: content.update(draft=None))
    rest, without, _ = await resume(folder, file, target, prompt, **asked)
    assert rest == text
    # Medusa's guesses depend on the last hidden state alone, which the target may have to compute anew.
    assert without != found or kind == "medusa"


async def test_what_is_saved_is_bounded_and_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_state, "MAX_FEATURES", 4)
    folder, file = tmp_path / "drafter", tmp_path / "text"
    target, prompt, text, expected = await save(folder, file)
    contents = session_file.read(file)
    described = contents.content["draft"]["line"]
    tensors = {name: tensor.shape for name, tensor in contents.tensors.items() if name.startswith("draft.")}
    num_tokens = contents.tensors[described["tokens"]["tensor"]].shape[0]
    # One layer, whose first token is in no cache. The last one is read with what follows, and has no features yet.
    assert sorted(tensors.values()) == [(1, 2, num_tokens - 2, 8)] * 2 + [(4, 32), (num_tokens,)]
    assert described["features"]["start"] + 4 == num_tokens - 1
    assert (await resume(folder, file, target, prompt))[:2] == (text, expected)


async def test_another_drafter_is_refused_or_begins_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, file = tmp_path / "drafter", tmp_path / "text"
    target, prompt, text, _ = await save(folder, file)
    others = {
        "its weights differ": lambda place: write_eagle3(place, target),
        "its architecture is Medusa, not Eagle3": lambda place: make("medusa", place) and place,
        "its configuration differs": lambda place: write_eagle3(place, target, norm_before_residual=True),
    }
    for index, (why, write) in enumerate(others.items()):
        other = write(tmp_path / str(index))
        if why == "its weights differ":
            weights = mx.load(str(other / "model.safetensors"))
            weights["lm_head.weight"] = 2 * weights["lm_head.weight"]
            mx.save_safetensors(str(other / "model.safetensors"), weights)
        async with drafted(other, target) as rt:
            with pytest.raises(runtime.SessionFileError, match="another draft model") as refused:
                await load_text(rt, file)
            assert why in str(refused.value)
            assert (len(rt._target.prefix_cache), len(rt._draft.prefix_cache)) == (0, 0)
            with caplog.at_level(logging.INFO, "outrider"):
                await load_text(rt, file, any_draft=True)
            assert "what another draft model had cached" in caplog.text
            completion = await rt.generate(prompt, **ASKED, reuse_prefix=True)
            assert (ids(completion.tokens), completion.statistics.draft_failures) == (text, 0)


async def test_a_drafter_of_another_target_is_another_drafter(tmp_path: Path) -> None:
    target, found = make("mtp", tmp_path), []
    for of_target in (target, target, make("mtp", tmp_path)):
        async with drafted(tmp_path, of_target) as rt:
            found.append(await saved_sequence.identify(rt._draft))
    assert found[0] == found[1] == found[2]
    projection = target.model.layers[0].self_attn.o_proj
    projection.weight = 2 * projection.weight
    mx.eval(projection.weight)
    async with drafted(tmp_path, target) as rt:
        assert found[0].difference(await saved_sequence.identify(rt._draft)) == "its configuration differs"


def _features(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda line: line.update(features=change(line["features"]))


BROKEN: dict[str, tuple[str, Callable[[Any], None]]] = {
    "no features": ("eagle3", _features(lambda _: None)),
    "features of another form": ("eagle3", _features(lambda _: [])),
    "features of nothing": ("eagle3", _features(lambda old: {"start": 0})),
    "a start that is none": ("eagle3", _features(lambda old: old | {"start": "0"})),
    "features before the text": ("eagle3", _features(lambda old: old | {"start": -1})),
    "features after it": ("eagle3", _features(lambda old: old | {"start": 10**6})),
    "too few features": ("eagle3", lambda line: line["features"].update(start=-5 + line["features"]["start"])),
    "features that are tokens": ("eagle3", lambda line: line["features"].update(values=line["tokens"])),
    "a tensor that is not there": ("eagle3", lambda line: line["features"].update(values={"tensor": "x"})),
    "a layer more": ("eagle3", lambda line: line["layers"].append(line["layers"][0])),
    "no layer": ("eagle3", lambda line: line["layers"].clear()),
    "more rows": ("eagle3", lambda line: line["layers"][0]["state"].__setitem__(2, 10**6)),
    "another class": ("eagle3", lambda line: line["layers"][0].update(kind="ArraysCache")),
    "a prefix checkpoint": ("eagle3", lambda line: line.update(pins=[{"length": 3, "layers": line["layers"]}])),
    "no tokens": ("eagle3", lambda line: line.pop("tokens")),
    "heads without features": ("medusa", _features(lambda _: None)),
    "heads with layers": ("medusa", lambda line: line["layers"].append({"kind": "KVCache", "state": [None]})),
    "heads before the text": ("medusa", _features(lambda old: old | {"start": -1})),
    "blocks with features": (
        "dflash",
        lambda line: line.update(features={"start": 0, "values": line["layers"][0]["state"][0]}),
    ),
    "blocks of different lengths": ("dflash", lambda line: line["layers"][0]["state"].__setitem__(2, 1)),
    "blocks of no layer": ("dflash", lambda line: line["layers"].clear()),
    "depths of no layer": ("mtp_deep", lambda line: line["layers"].clear()),
    "depths before features": ("mtp_deep", _features(lambda old: old | {"start": 10**6})),
    "depths without features": ("mtp_deep", _features(lambda _: None)),
}


async def test_a_file_that_is_broken_in_this_part_changes_nothing(tmp_path: Path) -> None:
    for kind in ("eagle3", "medusa", "dflash", "mtp_deep"):
        folder, file = tmp_path / kind, tmp_path / f"{kind}.text"
        target, prompt, text, _ = await save(folder, file, kind=kind)
        async with drafted(folder, target) as rt:
            for name, (of_kind, change) in BROKEN.items():
                if of_kind != kind:
                    continue
                broken = tmp_path / "broken"
                broken.write_bytes(file.read_bytes())
                rewritten(broken, lambda content, change=change: change(content["draft"]["line"]))
                with pytest.raises(runtime.SessionFileError, match="does not fit"):
                    await load_text(rt, broken)
                assert (len(rt._target.prefix_cache), len(rt._draft.prefix_cache)) == (0, 0), name
            await load_text(rt, file)
            completion = await rt.generate(prompt, **ASKED, reuse_prefix=True)
            assert (ids(completion.tokens), completion.statistics.cached_tokens > 0) == (text, True)


async def test_features_of_another_width_are_refused(tmp_path: Path) -> None:
    folder, file = tmp_path / "drafter", tmp_path / "text"
    target, *_ = await save(folder, file)
    contents = session_file.read(file)
    name = contents.content["draft"]["line"]["features"]["values"]["tensor"]
    narrow = contents.tensors[name].array()[:, 1:]
    session_file.write(file, Contents(contents.content, {**contents.tensors, name: Tensor.of(narrow)}))
    async with drafted(folder, target) as rt:
        with pytest.raises(runtime.SessionFileError, match="not rows of a width of 32"):
            await load_text(rt, file)


# --- from turn to turn ----------------------------------------------------------------------------


@sweep("kind", [pytest.param(kind, marks=SELDOM.get(kind, ())) for kind in KINDS])
async def test_a_longer_text_is_drafted_alike_from_memory_from_disk_and_anew(kind: str, tmp_path: Path) -> None:
    folder, disk = tmp_path / "drafter", tmp_path / "disk"
    target, prompt = make(kind, folder), prompt_of(36, vocab_size=48)
    asked = ASKED | {"reuse_prefix": True}
    text = greedy(target, prompt, NUM_TOKENS)
    longer = [*prompt, *text, *prompt_of(5, seed=3, vocab_size=48)]
    expected = greedy(target, longer, NUM_TOKENS)

    async def proposed(rt: Any, proposals: Proposals, asked_for: list[int]) -> tuple[Proposals, int]:
        proposals.clear()
        completion = await rt.generate(asked_for, **asked)
        assert ids(completion.tokens) == (text if asked_for is prompt else expected)
        assert completion.statistics.draft_failures == 0
        return [*proposals], completion.statistics.cached_tokens

    async with noted(folder, target) as (rt, proposals):
        anew = await proposed(rt, proposals, longer)
    async with noted(folder, target, prefix_cache_dir=disk) as (rt, proposals):
        await proposed(rt, proposals, prompt)
        in_memory = await proposed(rt, proposals, longer)
    async with noted(folder, target, prefix_cache_dir=disk) as (rt, proposals):
        for actor in (rt._target, rt._draft):
            await until_in_trio(lambda actor=actor: actor.prefix_cache.store._stored != {})
        # The beginning of what is stored.
        from_disk = await proposed(rt, proposals, longer)
    num_cached = len(prompt) + NUM_TOKENS - 1
    assert (anew[1], in_memory[1]) == (0, num_cached)
    assert from_disk[1] > num_cached
    assert anew[0] == in_memory[0] == from_disk[0]


async def test_what_parts_from_a_stored_text_before_its_features_is_read_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(sequence_state, "MAX_FEATURES", 4)
    folder, disk = tmp_path / "drafter", tmp_path / "disk"
    target, prompt = make("eagle3", folder), prompt_of(60, vocab_size=48)
    asked = ASKED | {"reuse_prefix": True, "max_tokens": 30}
    async with noted(folder, target, prefix_cache_dir=disk) as (rt, _):
        await rt.generate(prompt, **asked)
    async with noted(folder, target, prefix_cache_dir=disk) as (rt, _):
        # Each model looks for what is on the disk.
        await until_in_trio(lambda: all(actor.prefix_cache.store._stored for actor in (rt._target, rt._draft)))
        [stored] = rt._draft.prefix_cache.store._stored.values()
        assert not stored.can_be_cut
        assert stored.lengths == tuple(range(len(stored.tokens) - 4, len(stored.tokens) + 1))
        other = [*prompt[:50], *prompt_of(20, seed=8, vocab_size=48)]
        completion = await rt.generate(other, **asked)
        assert ids(completion.tokens) == greedy(target, other, 30)
        assert (completion.statistics.draft_failures, completion.statistics.cached_tokens) == (0, 50)
        assert completion.statistics.proposed > 0


async def test_a_detached_drafter_is_freed_and_its_texts_are_on_disk(tmp_path: Path) -> None:
    folder, disk = tmp_path / "drafter", tmp_path / "disk"
    target = build("llama")
    write_eagle3(folder, target)
    prompt = prompt_of(60, vocab_size=48)
    async with runtime.open((target, None), folder, prefix_cache_dir=disk) as rt:
        await rt.generate(prompt, **ASKED | {"reuse_prefix": True})
        assert list(disk.glob("*.outrider-prefix")) == []
        actor = rt._draft
        await rt.detach_draft()
        await until_in_trio(lambda: len(list(disk.glob("*.outrider-prefix"))) == 1)
        await until_in_trio(lambda: actor.prefix_cache.store is None)
