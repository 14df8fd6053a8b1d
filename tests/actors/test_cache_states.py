"""A cache's state, moved into another cache: that one reads on as if nothing had happened. Nothing else fits."""

import json
from collections.abc import Callable
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn
import pytest
from architectures import ARCHITECTURES, OF_ALL_CACHES, build
from cache_subjects import ATOL, SUBJECTS, TEXT, WINDOW, Subject, subject
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache, make_prompt_cache
from models import gemma3_text, llama, mamba
from sweeps import sweep

from actors.mlx.cache_kinds import LayerState, MisfitError, kind_of, kinds_of
from actors.mlx.cache_options import CacheOptions
from actors.mlx.sequence import MLXSequence
from actors.mlx.sequence_state import PrefixCheckpointState, SequenceRecord, SequenceState, StateRecorder, recall
from actors.model import RewindMode
from protocol.errors import RewindError

VOCAB_SIZE = 64
LLAMA4: dict[str, Any] = ARCHITECTURES["llama4"].args["text_config"]
LENGTHS = [1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 3]
# One subject of each cache class.
SAME_CLASSES = {"QuantizedKVCache in mid-text", "ArraysCache, lfm2", "ArraysCache, qwen3_next"}
OF_EACH_CLASS = [name for name in SUBJECTS if name not in SAME_CLASSES | {"ArraysCache and SlidingWindowCache"}]


def record(sequence: SequenceState, name: str) -> SequenceRecord:
    """The state of a sequence, for a file, in one go."""
    recorder = StateRecorder(sequence, name)
    while (recorded := recorder.step()) is None:
        pass
    return recorded


def through_a_file(state: SequenceState) -> SequenceState:
    """A recorded sequence after writing and reading a file."""
    recorded = record(state, "target")
    return recall(SequenceRecord(json.loads(json.dumps(recorded.description)), recorded.tensors))


def copied(sequence: MLXSequence, tokens: list[int], of: Subject, *, rewind: str = "auto") -> MLXSequence:
    """A new sequence with the state of another, moved through a file."""
    other = of.open_sequence(rewind)
    other.put_state(through_a_file(taken(sequence, tokens)))
    return other


def read_on(sequence: MLXSequence, tokens: list[int]) -> mx.array:
    rows = [sequence.feed((token,), 1) for token in tokens]
    return mx.concatenate(rows)


def read(of: Subject, length: int, *, at_once: bool = True) -> tuple[MLXSequence, list[int]]:
    """A sequence that has read the beginning of the text, and what it has read."""
    sequence, tokens = of.open_sequence("auto"), TEXT[:length]
    if at_once:
        sequence.feed(tuple(tokens), 1)
    else:
        read_on(sequence, tokens)
    return sequence, tokens


def taken(sequence: MLXSequence, tokens: list[int]) -> SequenceState:
    state = sequence.take_state(tuple(tokens))
    assert state is not None
    return state


# --- write and read, by class ---------------------------------------------------------------------


@sweep(
    "at_once, length",
    [
        pytest.param(n % 2 == 0, length, marks=() if length == WINDOW + 1 else pytest.mark.slow)
        for n, length in enumerate(LENGTHS)
    ],
)
@sweep("name", SUBJECTS)
def test_a_cache_reads_on_from_a_file_bit_by_bit(name: str, at_once: bool, length: int) -> None:
    of = subject(name)
    sequence, cached_tokens = read(of, length, at_once=at_once)
    other = copied(sequence, cached_tokens, of)
    other.check(length)
    assert [type(layer) for layer in other.cache] == [type(layer) for layer in sequence.cache]
    # Long enough to go round a window and to grow buffers; then several at once, as in a verify.
    after = TEXT[length : length + 2 * WINDOW + 1]
    assert mx.array_equal(read_on(sequence, after), read_on(other, after))
    assert mx.array_equal(sequence.feed(tuple(TEXT[90:93]), 3), other.feed(tuple(TEXT[90:93]), 3))
    sequence.check(length + len(after) + 3)
    other.check(length + len(after) + 3)


@sweep("name", SUBJECTS)
def test_a_state_does_not_change_with_the_cache_that_it_was_taken_from(name: str) -> None:
    sequence, cached_tokens = read(subject(name), WINDOW + 3)
    state = taken(sequence, cached_tokens)
    expected = record(state, "x")
    read_on(sequence, TEXT[40:60])
    again = record(state, "x")
    assert again.description == expected.description
    for key, tensor in expected.tensors.items():
        assert bytes(again.tensors[key].data) == bytes(tensor.data)


@sweep("name", [name for name in SUBJECTS if "Array" not in name and "Rotating" not in name])
def test_what_was_taken_back_is_not_in_the_file(name: str) -> None:
    of = subject(name)
    sequence, _ = read(of, WINDOW - 2)
    sequence.rewind(3)
    other = copied(sequence, TEXT[:3], of)
    for _, layer in kinds_of(other.cache):
        assert {part.shape[2] for _, part in tree_flatten(layer.state) if isinstance(part, mx.array)} == {3}
    assert mx.array_equal(read_on(sequence, TEXT[50:60]), read_on(other, TEXT[50:60]))


@sweep("name", SUBJECTS)
def test_a_cache_from_a_file_can_be_put_right_as_the_other_can(name: str) -> None:
    of = subject(name)
    sequence, cached_tokens = read(of, 2 * WINDOW)
    other = copied(sequence, cached_tokens, of)
    for one in (sequence, other):
        num_fed = 1 if one.prepare(3, 2 * WINDOW) is RewindMode.SINGLE else 3
        one.feed(tuple(TEXT[70 : 70 + num_fed]), num_fed)
        length = one.rewind(2 * WINDOW + 1)
        if length < 2 * WINDOW + 1:
            one.feed((TEXT[70],), 1)
        one.check(2 * WINDOW + 1)
    assert mx.array_equal(read_on(sequence, TEXT[80:90]), read_on(other, TEXT[80:90]))


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_ALL_CACHES)
def test_the_caches_of_every_architecture_come_back_or_are_said_to_be_unknown(name: str) -> None:
    of = Subject(build(name))
    sequence, cached_tokens = of.open_sequence("auto"), [token % VOCAB_SIZE for token in TEXT[:40]]
    sequence.feed(tuple(cached_tokens), 1)
    if name == "deepseek_v41":
        assert sequence.take_state(tuple(cached_tokens)) is None
        return
    other = copied(sequence, cached_tokens, of)
    assert mx.array_equal(read_on(sequence, TEXT[60:80]), read_on(other, TEXT[60:80]))


# --- windows in the caches of mlx-lm, as in files of earlier versions -----------------------------

WINDOWED = ["SlidingWindowCache", "ArraysCache and SlidingWindowCache"]


def state_of_mlx_lms_caches(of: Subject, tokens: list[int], *, at_once: bool, checkpoint_at: int) -> SequenceState:
    cache = make_prompt_cache(of.model)
    assert any(type(layer) is RotatingKVCache for layer in cache)
    checkpoints = []
    for begin, end in ((0, checkpoint_at), (checkpoint_at, len(tokens))):
        for part in [tokens[begin:end]] if at_once else [[token] for token in tokens[begin:end]]:
            mx.eval(of.model(mx.array([part]), cache=cache))
        kinds = [(kind_of(layer), layer) for layer in cache]
        is_end = end == len(tokens)
        layers = [kind.take_state(layer) if is_end else kind.take_prefix_checkpoint(layer) for kind, layer in kinds]
        checkpoints.append(PrefixCheckpointState(end, tuple(layers)))
    return SequenceState(tuple(tokens), checkpoints[1].layers, (checkpoints[0],))


@sweep("at_once, length", [(True, 5), (False, WINDOW), (True, WINDOW + 1), (False, 3 * WINDOW + 3)])
@sweep("name", WINDOWED)
def test_a_file_of_an_earlier_version_is_read_on(name: str, at_once: bool, length: int) -> None:
    of, back_to = subject(name), length - 4
    (sequence, cached_tokens), other = read(of, length), of.open_sequence("auto")
    other.put_state(through_a_file(state_of_mlx_lms_caches(of, cached_tokens, at_once=at_once, checkpoint_at=back_to)))
    assert [type(layer) for layer in other.cache] == [type(layer) for layer in sequence.cache]
    after = TEXT[length : length + 2 * WINDOW + 1]
    assert mx.allclose(read_on(sequence, after), read_on(other, after), rtol=0, atol=ATOL)
    assert other.reusable_length(back_to, length) == back_to
    other.reuse(back_to)
    fresh, _ = read(of, back_to)
    assert mx.allclose(read_on(fresh, after), read_on(other, after), rtol=0, atol=ATOL)


# --- rewinds after a restore ----------------------------------------------------------------------

CHECKPOINTS = [4, WINDOW + 2, 2 * WINDOW + 1]


@sweep("name", SUBJECTS)
def test_the_ways_back_come_back_too(name: str) -> None:
    of = subject(name)
    sequence, length = of.open_sequence("checkpoint"), 0
    for end in CHECKPOINTS:
        read_on(sequence, TEXT[length:end])
        sequence.add_prefix_checkpoint()
        length = end
    cached_tokens = TEXT[: 3 * WINDOW + 2]
    read_on(sequence, cached_tokens[length:])
    sequences = [copied(sequence, cached_tokens, of, rewind="checkpoint") for _ in range(2)] + [sequence]
    reaches = []
    for back_to in reversed(CHECKPOINTS):
        reaches.append({one.reusable_length(back_to, back_to) for one in sequences})
        if reaches[-1] == {0}:
            continue
        for one in sequences:
            one.reuse(back_to)
        # What is read from here must not show further back.
        rows = [read_on(one, TEXT[100:103]) for one in sequences]
        assert all(mx.array_equal(row, rows[-1]) for row in rows)
    # A window that keeps its first tokens is not reused beyond its size; a quantised cache is never reused.
    never = CHECKPOINTS[1:] if "keeps its first" in name else CHECKPOINTS if "Quantized" in name else []
    assert reaches == [{0} if back_to in never else {back_to} for back_to in reversed(CHECKPOINTS)]


def with_a_checkpoint_at_5(of: Subject) -> SequenceState:
    sequence, _ = read(of, 5)
    sequence.add_prefix_checkpoint()
    sequence.feed(tuple(TEXT[5:20]), 1)
    return taken(sequence, TEXT[:20])


def test_impossible_prefix_checkpoints_are_refused() -> None:
    of = subject("ArraysCache and SlidingWindowCache")
    state = with_a_checkpoint_at_5(of)
    (checkpoint,) = state.prefix_checkpoints
    for prefix_checkpoints in (
        (checkpoint, checkpoint),
        (attrs.evolve(checkpoint, length=6),),
        (attrs.evolve(checkpoint, length=0),),
        (attrs.evolve(checkpoint, length=21),),
        (attrs.evolve(checkpoint, layers=checkpoint.layers[:-1]),),
        (attrs.evolve(checkpoint, layers=checkpoint.layers[::-1]),),
        (attrs.evolve(checkpoint, layers=state.layers),),
    ):
        other = of.open_sequence("auto")
        with pytest.raises((MisfitError, RewindError)):
            other.put_state(attrs.evolve(state, prefix_checkpoints=prefix_checkpoints))
        assert mx.array_equal(read_on(other, TEXT[:5]), read_on(of.open_sequence("auto"), TEXT[:5]))


# --- states of another shape ----------------------------------------------------------------------


def test_of_a_cache_of_another_class_nothing_is_taken() -> None:
    class Mine(KVCache):
        pass

    sequence = subject("KVCache").open_sequence("auto")
    sequence.cache = [Mine() for _ in sequence.cache]
    sequence.feed((1, 2, 3), 1)
    assert [kind.can_keep_state for kind, _ in kinds_of([CacheList(KVCache(), Mine())])] == [True, False]
    assert sequence.take_state((1, 2, 3)) is None


def test_a_sequence_that_disagrees_with_its_tokens_is_not_taken() -> None:
    sequence, _ = read(subject("KVCache"), 3)
    with pytest.raises(RewindError, match="should hold 2 tokens, it holds 3"):
        sequence.take_state((1, 2))


# Recurrent state does not record its length.
@sweep("name", [name for name in OF_EACH_CLASS if name != "ArraysCache, mamba"])
def test_a_state_of_another_length_than_its_tokens_is_refused(name: str) -> None:
    of = subject(name)
    state, other = taken(*read(of, 5)), of.open_sequence("auto")
    before = list(other.cache)
    with pytest.raises(RewindError, match=r"layer \d+ \(\w+\) should hold 4 tokens, it holds 5"):
        other.put_state(attrs.evolve(state, tokens=tuple(TEXT[:4])))
    assert all(one is another for one, another in zip(other.cache, before, strict=True))
    # The sequence is as good as new.
    assert mx.array_equal(read_on(other, TEXT[:5]), read_on(of.open_sequence("auto"), TEXT[:5]))


FITS_NOT: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "another class": ("KVCache", mamba),
    "more layers": ("KVCache", lambda: llama(num_hidden_layers=4)),
    "more heads": ("KVCache", lambda: llama(num_key_value_heads=2)),
    "another window": ("SlidingWindowCache", lambda: gemma3_text(window=WINDOW + 1)),
    "another chunk": ("ChunkedKVCache", lambda: build("llama4", text_config=LLAMA4 | {"attention_chunk_size": 16})),
}


@sweep("what", FITS_NOT)
def test_a_state_of_another_model_is_refused(what: str) -> None:
    name, build_other = FITS_NOT[what]
    state = taken(*read(subject(name), 5))
    with pytest.raises(MisfitError):
        Subject(build_other()).open_sequence("auto").put_state(state)


def test_a_state_of_other_options_is_refused() -> None:
    bounded, quantized = subject("RotatingKVCache that keeps its first"), subject("QuantizedKVCache")
    plain, wider = Subject(bounded.model), Subject(bounded.model, CacheOptions(max_kv_size=WINDOW + 1))
    otherwise = Subject(quantized.model, CacheOptions(kv_bits=4, kv_group_size=32, quantized_kv_start=0))
    unquantized = Subject(quantized.model)
    pairs = ((plain, bounded), (bounded, plain), (bounded, wider), (quantized, otherwise), (quantized, unquantized))
    for one, other in pairs:
        with pytest.raises(MisfitError):
            other.open_sequence("auto").put_state(taken(*read(one, 5)))


numbers = st.integers(-3, 30) | st.just(2**40) | st.none()


@sweep("name", OF_EACH_CLASS)
def test_a_state_with_other_numbers_is_refused_or_can_be_read_on(name: str) -> None:
    """Whatever numbers a file contains, a model that accepts them can execute every step."""
    of = subject(name)
    sequence, _ = read(of, WINDOW + 2)
    sequence.feed((TEXT[WINDOW + 2],), 1)
    recorded = record(taken(sequence, TEXT[: WINDOW + 3]), "target")

    @settings(max_examples=25)
    @given(data=st.data(), length=st.integers(1, 16))
    def play(data: st.DataObject, length: int) -> None:
        def altered(part: Any) -> Any:
            if isinstance(part, list):
                return [altered(one) for one in part]
            if isinstance(part, dict):
                return {key: value if key == "tensor" else altered(value) for key, value in part.items()}
            if part is None or type(part) is int:
                return data.draw(numbers) if data.draw(st.booleans()) else part
            return part

        description = json.loads(json.dumps(recorded.description))
        layers = [altered(layer) for layer in description["layers"]]
        tokens = SequenceRecord({**description, "layers": layers}, recorded.tensors)
        other = of.open_sequence("auto")
        try:
            read = recall(tokens)
            other.put_state(attrs.evolve(read, tokens=read.tokens[:length]))
        except (MisfitError, RewindError):
            return
        mx.eval(read_on(other, TEXT[60:64]), other.feed(tuple(TEXT[64:67]), 3))

    play()


json_trees = st.recursive(
    st.none() | st.integers() | st.text(max_size=9) | st.floats() | st.booleans(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["kind", "state", "parts", "tensor", "length", "layers"]), inner, max_size=3)
    ),
    max_leaves=10,
)


@settings(max_examples=60)
@given(
    description=json_trees
    | st.fixed_dictionaries(
        {
            "tokens": st.just({"tensor": "t.0"}) | json_trees,
            "layers": st.lists(json_trees),
            "pins": st.lists(json_trees),
        }
    )
)
def test_whatever_a_description_says_it_is_recalled_or_refused(description: Any) -> None:
    tokens = record(SequenceState((1, 2, 3), ()), "t").tensors
    try:
        state = recall(SequenceRecord(description, tokens))
    except MisfitError:
        return
    assert state.tokens == (1, 2, 3)


def test_a_description_nested_without_end_is_refused() -> None:
    nested: Any = []
    for _ in range(5000):
        nested = [nested]
    parts: Any = {"kind": "CacheList", "parts": []}
    for _ in range(5000):
        parts = {"kind": "CacheList", "parts": [parts]}
    recorded = record(SequenceState((1,), ()), "t")
    for layer in ({"kind": "KVCache", "state": nested}, parts):
        with pytest.raises(MisfitError):
            recall(SequenceRecord({**recorded.description, "layers": [layer]}, recorded.tensors))


def test_a_prefix_checkpoint_of_full_attention_is_a_number() -> None:
    of = subject("ArraysCache, lfm2")
    state = with_a_checkpoint_at_5(of)
    (pin,) = state.prefix_checkpoints
    i = next(i for i, layer in enumerate(pin.layers) if layer.kind == "KVCache")
    assert pin.layers[i].state == (None, None, 5)
    array = mx.zeros((1, 2, 3, 4))
    for other in ((None, None, 4), (None, None, 21), (None, None), (array, array, array), (None, None, None), None):
        layers = tuple(attrs.evolve(one, state=other) if j == i else one for j, one in enumerate(pin.layers))
        changed = attrs.evolve(state, prefix_checkpoints=(attrs.evolve(pin, layers=layers),))
        with pytest.raises(MisfitError, match="another length in a prefix checkpoint"):
            of.open_sequence("auto").put_state(changed)


def test_only_known_classes_are_made_whatever_a_file_names() -> None:
    kind = kind_of(KVCache())
    two, like = (KVCache.from_state((mx.zeros((1, 1, n, 4)), mx.zeros((1, 1, n, 4)), n)) for n in (2, 1))
    layer = kind.take_state(two)
    assert type(kind.put_state(layer, like, like)) is KVCache
    for name in ("BatchKVCache", "mx", "__import__", "os.system", "CacheList"):
        with pytest.raises(MisfitError):
            kind.put_state(LayerState(name, layer.state), like, like)
