"""The memory that caches take is never more than what is reserved for them: measured at each pass, for each kind."""

import weakref
from typing import Any

import pytest
from architectures import build
from every_drafter import MTP_VOCAB_SIZE, at_work
from hypothesis import given, settings
from hypothesis import strategies as st
from models import gemma3_text, llama, mamba, near, prompt_of
from sweeps import sweep
from trained_drafters import KINDS as TRAINED

import runtime
from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import MLXModel
from actors.mlx.sequence import MLXSequence
from actors.mlx.shared_passes import SharedPasses
from actors.model import Feed
from actors.rows import _fitting
from actors.trained.trained_sequence import TrainedSequence
from protocol.cache_size import CacheSize, TextSize

QUANTIZED = {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 200}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "full attention": (llama, {}),
    "sliding windows": (lambda: gemma3_text(window=100), {}),
    "hybrid": (lambda: build("lfm2"), {}),
    "recurrent": (mamba, {}),
    "chunks": (lambda: build("llama4"), {}),
    "quantised": (lambda: build("qwen3", head_dim=32), QUANTIZED),
    "turns": (llama, {"max_batch": 1}),
}


class Watch:
    """Compares the bytes of all sequences of a model with a bound, after each of its passes."""

    def __init__(self) -> None:
        self.sequences: weakref.WeakSet[MLXSequence] = weakref.WeakSet()
        self.budget: Any = None
        self.largest = 0.0  # part of what was reserved

    def compare(self) -> None:
        batches = {id(each.batch): each.batch for each in self.sequences if each.batch is not None}
        measured = sum(batch.num_bytes for batch in batches.values())
        measured += sum(each.num_bytes for each in self.sequences if each.batch is None)
        if self.budget is not None:
            assert measured <= self.budget.reserved_bytes
            self.largest = max(self.largest, measured / max(1, self.budget.reserved_bytes))


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """A watch over each sequence that is made."""
    watch = Watch()

    def watched(kind: type, name: str) -> None:
        original = getattr(kind, name)

        def call(self: Any, *args: Any, **keywords: Any) -> Any:
            if isinstance(self, MLXSequence):
                watch.sequences.add(self)
            result = original(self, *args, **keywords)
            watch.compare()
            return result

        monkeypatch.setattr(kind, name, call)

    for name in ("feed_together", "feed_ahead", "read_together"):
        watched(SharedPasses, name)
    for name in ("feed", "prepare", "rewind", "join"):
        watched(MLXSequence, name)
    return watch


@sweep(
    ("kind", "drafts", "reuse_prefix"),
    [
        *((kind, True, True) for kind in MODELS),
        *(pytest.param(kind, False, False, marks=pytest.mark.slow) for kind in MODELS),
    ],
)
async def test_no_cache_takes_more_than_is_reserved_for_it_at_any_pass(kind, drafts, reuse_prefix, watch):
    make, options = MODELS[kind]
    draft = "ngram" if drafts else None
    settings = {"lookahead": 4 if drafts else 0, "reuse_prefix": reuse_prefix}
    lengths = enumerate((3, 40, 400, 41))
    requests = [(prompt_of(length, seed=n, vocab_size=60), {"max_tokens": 15 + 5 * n}) for n, length in lengths]
    async with runtime.open((make(), None), draft, prefix_cache_bytes=0, **options) as rt:
        watch.sequences.clear()
        watch.budget = rt._sessions.memory
        completions = await rt.generate_many(requests, max_concurrent=4, **settings)
        watch.budget = None
    assert [len(each.tokens) for each in completions] == [15, 20, 25, 30]
    assert 0.02 < watch.largest <= 1


@sweep(
    ("lengths", "leaves"),
    [
        ([900, 300, 300, 300], True),  # the longest row ends, and the others need fewer slots
        ([2000, *[100] * 23], False),  # too many rows for the longest, which takes part in no more passes
    ],
)
def test_rows_take_no_more_than_their_size_when_the_longest_takes_no_part(lengths: list[int], leaves: bool) -> None:
    model = MLXModel(llama(), CacheOptions())
    texts = [model.open_sequence(alongside_model=False) for _ in lengths]
    for text, length in zip(texts, lengths, strict=True):
        text.feed(tuple(prompt_of(length, vocab_size=60)), 0)
    model.feed_together([Feed(text, (1,), 1) for text in texts[:4]])
    assert texts[0].is_row
    first, *others = texts
    if leaves:
        first.close()
    kept = others if leaves else texts
    size = model.cache_size.of([TextSize(length + 10) for length in lengths[leaves:]])
    for _ in range(6):
        model.feed_together([Feed(text, (1,), 1) for text in others])
        batches = {id(text.batch): text.batch.num_bytes for text in kept if text.batch is not None}
        assert sum(batches.values()) + sum(text.num_bytes for text in kept if text.batch is None) <= size


@sweep("kind", ["sliding windows", "hybrid", "recurrent", "chunks"])
def test_prefix_checkpoints_take_no_more_than_is_reserved_for_them(kind: str) -> None:
    model = MLXModel(MODELS[kind][0](), CacheOptions())
    sequence = model.open_sequence(alongside_model=False)
    for length in range(15, 400, 15):
        sequence.feed(tuple(prompt_of(15, seed=length, vocab_size=60)), 0)
        if sequence.needs_prefix_checkpoints:
            sequence.add_prefix_checkpoint()
        assert sequence.num_bytes <= model.cache_size.of([TextSize(length, 15, keeps_prefixes=True)])
    state = sequence.take_state((0,) * sequence.length)
    assert len(state.prefix_checkpoints) > 10 or not sequence.needs_prefix_checkpoints


async def test_a_draft_models_caches_are_reserved_too(watch: Watch) -> None:
    target = llama()
    async with runtime.open((target, None), (near(target, noise=0.05), None), prefix_cache_bytes=0) as rt:
        watch.sequences.clear()
        watch.budget = rt._sessions.memory
        await rt.generate_many([prompt_of(30 + n, seed=n, vocab_size=60) for n in range(4)], max_tokens=20)
        watch.budget = None
    assert watch.largest > 0.05


@sweep("kind", TRAINED)
async def test_a_trained_drafters_text_takes_no_more_than_its_size_says(kind, tmp_path, monkeypatch, autojump_clock):
    largest, original = 0, TrainedSequence.feed

    def feed(self: TrainedSequence, *args: Any) -> Any:
        nonlocal largest
        result = original(self, *args)
        largest = max(largest, self.num_bytes)
        return result

    async with at_work(kind, tmp_path) as (rt, _):
        monkeypatch.setattr(TrainedSequence, "feed", feed)
        await rt.generate(prompt_of(90, vocab_size=MTP_VOCAB_SIZE), max_tokens=12, lookahead=3)
        size = rt._draft.model.cache_size.of([TextSize(102)])
    assert 0 < largest <= size


@settings(max_examples=300)
@given(
    lengths=st.lists(st.integers(1, 20_000), min_size=1, max_size=20),
    size=st.builds(
        CacheSize,
        slot_bytes=st.integers(0, 100),
        windows=st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 100)), max_size=2).map(tuple),
        fixed_bytes=st.integers(0, 1000),
        num_spare=st.integers(0, 400),
        are_rows=st.booleans(),
    ),
    num_kept=st.integers(0, 3),
)
def test_more_or_longer_texts_never_take_less_and_rows_hold_as_many_slots_as_fit(lengths, size, num_kept):
    texts = [TextSize(length, 1, num_kept, num_kept > 0) for length in lengths]
    num_bytes = size.of(texts)
    assert num_bytes >= max(size.of([text]) for text in texts)
    assert num_bytes >= size.of(texts[1:])
    longer = [TextSize(lengths[0] + 1, 1, num_kept, num_kept > 0), *texts[1:]]
    assert size.of(longer) >= num_bytes
    # The slots of those texts that the model lets be rows, and of the others, each by itself.
    rows = _fitting(dict(enumerate(lengths)))
    num_slots = len(rows) * max((lengths[row] for row in rows), default=0)
    num_slots += sum(length for text, length in enumerate(lengths) if text not in rows)
    if size.are_rows:
        assert num_bytes >= size.slot_bytes * num_slots


@sweep("kind", [*MODELS])
def test_sizes_by_shapes_are_those_of_a_long_text(kind: str) -> None:
    make, options = MODELS[kind]
    caches = CacheOptions(**{name: value for name, value in options.items() if name != "max_batch"})
    model = MLXModel(make(), caches)
    # A pass over as many tokens at once, which is wide.
    sequence = model.open_sequence(alongside_model=False)
    sequence.feed(tuple(prompt_of(1000, vocab_size=60)), 0)
    size, measured = model.cache_size.of([TextSize(1000, 1000)]), sequence.num_bytes
    assert measured <= size
    # Apart from slots to spare, and from what is dense before it is quantised, it is not much more.
    if model.cache_size.windows == () and model.cache_size.dense_slots == 0:
        assert size <= 1.4 * measured
