"""Texts of a trained drafter that share passes: each gets what it gets alone, whatever the others do."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import pytest
import trio
from every_drafter import at_work
from models import greedy, prompt_of
from scripted import ids
from sweeps import sweep
from trained_drafters import KINDS, close, make

from actors.model import Feed
from actors.rows import Rows
from actors.trained.drafter_model import TrainedDrafter
from actors.trained.kinds.eagle3 import Eagle3Reader
from actors.trained.kinds.mtp import MTPReader
from actors.trained.trained_sequence import TrainedSequence
from protocol.trace import Events, Span

VOCAB_SIZE = 48
SHARING = ("eagle3", "peagle", "medusa", "mtp", "mtp_deep", "dflash", "dspark", "dflash2")
# Their rows are those of caches that a pass writes.
ROWS = ("eagle3", "peagle", "mtp", "mtp_deep")
MTP_CASES = sorted(path.name for path in (Path(__file__).parent / "mtp").iterdir() if path.is_dir())
NUM_TEXTS = 4


def made(kind: str, folder: Path, **given: Any) -> TrainedDrafter:
    target = make(kind, folder, vocab_size=VOCAB_SIZE, **given)
    mx.eval(target.parameters())
    return TrainedDrafter(folder, target, VOCAB_SIZE)


@sweep("kind", KINDS)
def test_a_kind_shares_passes_or_says_why_not(kind: str, tmp_path: Path) -> None:
    obstacle = made(kind, tmp_path).sharing_obstacle()
    assert obstacle == (None if kind in SHARING else "drafters of this kind read one text at a time")


@sweep("family", MTP_CASES)
def test_the_layers_of_every_family_share_passes(family: str, tmp_path: Path) -> None:
    kind = "mtp_deep" if family.endswith("_deep") else "mtp"
    assert made(kind, tmp_path, family=family).sharing_obstacle() is None


class Fault(Exception):
    pass


@attrs.define
class Text:
    """A text in rows, and its twin, which is fed by itself."""

    sequence: TrainedSequence
    twin: TrainedSequence
    tokens: tuple[int, ...]
    features: mx.array
    given: int = 0

    def both(self, do: Callable[[TrainedSequence], Any]) -> None:
        for each in (self.sequence, self.twin):
            do(each)

    def give(self, end: int) -> None:
        begin, end = self.given, min(end, len(self.tokens))
        if end > begin:
            self.both(lambda sequence: sequence.give(begin, self.features[begin:end]))
            self.given = end

    def next_feed(self, draws: random.Random, *, alone: bool) -> Feed:
        length = self.sequence.length
        length -= draws.randint(0, min(3, length - 1)) if draws.random() < 0.4 and length > 1 else 0
        self.both(lambda sequence: sequence.rewind(length))
        # What was drafted may be wrong.
        wrong = (7,) if draws.random() < 0.3 else ()
        fed = (*self.tokens[length : length + draws.randint(1, 4)], *wrong)
        return Feed(self.sequence, fed, draws.randint(1, len(fed)), alone)


def begun(drafter: TrainedDrafter, draws: random.Random) -> Text:
    tokens = tuple(draws.randrange(VOCAB_SIZE) for _ in range(400))
    pair = [drafter.open_sequence(alongside_model=False) for _ in range(2)]
    shape = (len(tokens), pair[0].feature_width)
    text = Text(pair[0], pair[1], tokens, mx.random.normal(shape, key=mx.random.key(draws.randrange(1000))))
    num_read = draws.randint(1, 12)
    if draws.random() < 0.7:  # else its features come later
        text.give(num_read)
    text.both(lambda sequence: sequence.feed(tokens[:num_read], 0))
    return text


@sweep("kind", [*SHARING, "eagle3 quantised", "eagle3 reduced"])
@sweep("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_each_text_has_the_logits_that_it_has_alone_whatever_the_others_do(kind, seed, tmp_path, monkeypatch):
    kind, _, variant = kind.partition(" ")
    if variant == "reduced":
        target = make(kind, tmp_path, vocab_size=VOCAB_SIZE, draft_vocab_size=20)
        weights: dict[str, mx.array] = mx.load(str(tmp_path / "model.safetensors"))
        mx.save_safetensors(str(tmp_path / "model.safetensors"), weights | {"d2t": mx.arange(20)})
        drafter = TrainedDrafter(tmp_path, target, VOCAB_SIZE)
        assert drafter.num_draft_tokens == 20
    else:
        drafter = made(kind, tmp_path)
    if variant == "quantised":
        drafter = drafter.quantized({"bits": 8, "group_size": 32, "mode": "affine"})
    num_rows, run, fails = [], Rows.run, False

    def counting(rows: Rows, widths: Any, forward: Any) -> Any:
        num_rows.append(len(widths))
        if fails:
            raise Fault
        return run(rows, widths, forward)

    monkeypatch.setattr(Rows, "run", counting)
    draws = random.Random(seed)
    texts = [begun(drafter, draws) for _ in range(NUM_TEXTS)]
    for _ in range(40):
        chosen = draws.sample(texts, draws.choice((1, 2, NUM_TEXTS, NUM_TEXTS)))
        for text in chosen:
            if draws.random() < 0.5:
                text.give(text.sequence.length - 1 + draws.randint(0, 1))
        feeds = [text.next_feed(draws, alone=draws.random() < 0.05) for text in chosen]
        for text, feed, found in zip(chosen, feeds, drafter.feed_together(feeds), strict=True):
            expected = text.twin.feed(feed.tokens, feed.num_logits)
            assert close(found, expected)
            assert text.sequence.staleness == text.twin.staleness
            text.sequence.check(text.twin.length)
        match draws.randint(0, 9):
            case 0:  # one leaves, and another comes
                texts.remove(left := draws.choice(texts))
                left.both(lambda sequence: sequence.close())
                texts.append(begun(drafter, draws))
            case 1:  # what one has read is saved, and its text goes on
                text = draws.choice(texts)
                cached = text.sequence.length
                states = [each.take_state((1,) * cached) for each in (text.sequence, text.twin)]
                assert (states[0] is None) == (states[1] is None)
                arrays = [[array for layer in state.layers for array in layer.arrays] for state in states if state]
                pairs = [pair for pair in zip(*arrays, strict=True) if isinstance(pair[0], mx.array)]
                assert all(mx.allclose(*pair, atol=1e-4) for pair in pairs)
                assert text.sequence.num_bytes > 0 or kind == "medusa"
            case 2:  # a pass fails, which loses its rows and no other text
                sharing, others = texts[:2], [text for text in texts[2:] if not text.sequence.is_row]
                for text in sharing:
                    text.give(text.sequence.length)
                fails = kind in ROWS
                with pytest.raises(Fault) if fails else nullcontext():
                    drafter.feed_together([Feed(text.sequence, (1,), 1) for text in sharing])
                fails = False
                drafter.abandon_shared()
                assert kind not in ROWS or [text.sequence.length for text in sharing] == [0, 0]
                assert all(text.sequence.length > 0 for text in others)
                for text in texts:
                    if text.sequence.length == 0:
                        text.twin.forget()
                    text.sequence.rewind(text.twin.length)
    if kind in ROWS:
        assert num_rows.count(NUM_TEXTS) >= 3


@sweep("kind", SHARING)
def test_a_text_whose_shared_pass_has_failed_goes_on_without_anything_of_it(kind, tmp_path, monkeypatch):
    drafter, draws = made(kind, tmp_path), random.Random(3)
    texts = [begun(drafter, draws) for _ in range(2)]
    for text in texts:
        text.give(text.sequence.length - 1)
    # Its logits are lazy, so a pass that is too large fails only when they are evaluated.
    drafter.feed_together([Feed(text.sequence, (1,), 1) for text in texts])
    drafter.abandon_shared()
    for text in texts:
        text.sequence.forget()
    of_kind, num_alone = type(drafter._passes[0]), 0
    alone = of_kind.alone

    def counting(*given: Any) -> Any:
        nonlocal num_alone
        num_alone += 1
        return alone(*given)

    monkeypatch.setattr(of_kind, "alone", counting)
    for number, text in enumerate(texts, 1):
        drafter.feed_together([Feed(text.sequence, (*text.tokens[: text.twin.length], 1), 1, alone=True)])
        assert num_alone >= number


@sweep(("kind", "num_texts", "mean_rows"), [("eagle3", 4, 3.5), pytest.param("mtp", 16, 12.0, marks=pytest.mark.slow)])
async def test_a_draft_pass_is_shared_by_nearly_all_streams(kind, num_texts, mean_rows, tmp_path, autojump_clock):
    spans: list[Span] = []
    events = Events()
    events.listen(lambda event: spans.append(event) if isinstance(event, Span) else None)
    prompts = [prompt_of(4 + seed % 5, seed=seed, vocab_size=VOCAB_SIZE) for seed in range(num_texts)]
    asked: dict[str, Any] = {"lookahead": 3, "ignore_eos": True, "max_concurrent": num_texts}
    options = {"max_batch": num_texts, "max_streams": num_texts, "events": events}
    async with at_work(kind, tmp_path, **options) as (rt, target):
        await rt.generate_many(prompts, max_tokens=12, **asked)  # to learn the prices
        spans.clear()
        completions = await rt.generate_many(prompts, max_tokens=24, **asked)
        assert rt.statistics().draft_failures == 0
    for prompt, completion in zip(prompts[:4], completions, strict=False):
        assert [token.id for token in completion.tokens] == greedy(target, prompt, 24)
    steps = [span for span in spans if span.actor == "draft" and span.kind == "draft"]
    sessions = {session for step in steps for session in step.sessions}
    first = {session: min(step.began for step in steps if session in step.sessions) for session in sessions}
    last = {session: max(step.ended for step in steps if session in step.sessions) for session in first}
    assert len(first) == num_texts
    begin, end = max(first.values()), min(last.values())
    rows = [len(step.sessions) for step in steps if begin <= step.began and step.ended <= end]
    assert sum(rows) / len(rows) >= mean_rows


@sweep(
    ("reader", "settings"),
    [
        (Eagle3Reader, {}),
        (MTPReader, {"temperature": 0.8, "acceptance": "match"}),
        pytest.param(Eagle3Reader, {"temperature": 0.8, "acceptance": "rejection"}, marks=pytest.mark.slow),
    ],
)
async def test_streams_go_on_when_shared_passes_fail_and_others_are_cancelled(
    reader: Any, settings: dict[str, Any], tmp_path: Path, autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, num_shared, num_failures = reader.read, 0, 0

    def failing(self: Any, hidden: mx.array, *given: Any) -> Any:
        nonlocal num_shared, num_failures
        num_shared += hidden.shape[0] > 1
        if hidden.shape[0] > 1 and num_shared % 3 == 0:
            num_failures += 1
            raise Fault
        return read(self, hidden, *given)

    prompts = [prompt_of(5, seed=seed, vocab_size=VOCAB_SIZE) for seed in range(4)]
    asked: dict[str, Any] = {"ignore_eos": True, "max_tokens": 24, "seed": 5, **settings}
    found: dict[int, list[int]] = {}
    kind = "eagle3" if reader is Eagle3Reader else "mtp"
    async with at_work(kind, tmp_path, max_batch=4) as (rt, _):
        plain = [ids((await rt.generate(prompt, lookahead=0, **asked)).tokens) for prompt in prompts]
        monkeypatch.setattr(reader, "read", failing)

        async def generate(index: int) -> None:
            async with rt.stream(prompts[index], lookahead=3, **asked) as stream:
                tokens = []
                async for token in stream:
                    tokens.append(token.id)
                    if index == 1 and len(tokens) == 7:
                        break
            found[index] = tokens

        async with trio.open_nursery() as nursery:
            for index in range(4):
                nursery.start_soon(generate, index)
        assert rt.statistics().draft_failures == 0
    assert num_shared > num_failures >= 1
    assert [len(found[index]) for index in range(4)] == [24, 7, 24, 24]
    if settings.get("acceptance") != "rejection":  # under which a text depends on what is proposed when
        assert [found[index] for index in range(4)] == [plain[0], plain[1][:7], plain[2], plain[3]]
