"""What threads may do at any moment: read statistics, and use the tokenizer; and not write the default device."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from greedy_pair import target
from models import llama, prompt_of, save

import runtime
from protocol.statistics import Counts
from runtime.loading.tokenizers import copy_of

PROMPT = tuple(prompt_of(9))


async def test_no_thread_sees_fewer_tokens_than_there_were(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    add = Counts.add
    async with runtime.open((target(), None)) as rt:

        def add_while_somebody_looks(self: Counts, other: Counts) -> None:
            if self is rt._sessions.past and not seen:
                looking.start()
                # At this moment the session is neither among the running nor among the past ones. A reader of the
                # statistics has to wait until it is; so this join times out if all is well.
                looking.join(0.2)
            add(self, other)

        looking = threading.Thread(target=lambda: seen.append(rt.statistics().generated_tokens))
        monkeypatch.setattr(Counts, "add", add_while_somebody_looks)
        await rt.generate(PROMPT, max_tokens=8)
    looking.join()
    assert seen == [8]


@pytest.fixture
def restless_threads() -> Iterator[None]:
    """Switch between threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless_threads")
async def test_what_others_do_with_the_tokenizer_has_no_effect_on_prompts_and_texts(tmp_path: Path) -> None:
    path = save(tmp_path / "model", target())
    async with runtime.open(path) as rt:
        tokenizer: Any = rt.tokenizer
        text = " ".join(f"w{i}" for i in range(60))
        expected, is_over = rt.encode(text), threading.Event()
        alone = await rt.generate(text, max_tokens=12)

        def truncate() -> None:
            while not is_over.is_set():
                assert len(tokenizer.encode(text, truncation=True, max_length=3)) == 3

        other = threading.Thread(target=truncate)
        other.start()
        try:
            for _ in range(2000):
                assert rt.encode(text) == expected
            assert (await rt.generate(text, max_tokens=12)).text == alone.text
        finally:
            is_over.set()
            other.join()


def test_a_tokenizer_that_truncates_by_its_file_does_not_once_it_is_copied(tmp_path: Path) -> None:
    from mlx_lm.tokenizer_utils import load

    path = save(tmp_path / "model", target())
    tokenizer = load(Path(path))
    tokenizer._tokenizer._tokenizer.enable_truncation(max_length=3)
    own = copy_of(tokenizer)
    assert own._tokenizer._tokenizer.truncation is None
    assert tokenizer._tokenizer._tokenizer.truncation is not None
    assert len(own.encode("w1 w2 w3 w4 w5")) == 5


def test_a_tokenizer_that_cannot_be_copied_is_used_as_it_is() -> None:
    class Inner:
        def __deepcopy__(self, memo: object) -> None:
            raise TypeError("not this one")

    class Wrapper:
        _tokenizer = Inner()

    wrapper: Any = Wrapper()
    assert copy_of(wrapper) is wrapper
    assert copy_of(None) is None


# --- the default device, which is one for the whole process ------------------------------------------


class FakeDevices:
    """MLX's functions that read and write the process-wide default device, and who wrote it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writers: list[str] = []
        monkeypatch.setattr(mx, "set_default_device", lambda _: self._write())
        monkeypatch.setattr(mx, "set_default_stream", lambda _: self._write())
        monkeypatch.setattr(mx, "stream", lambda _: self)

    def _write(self) -> None:
        self.writers.append(threading.current_thread().name)

    # As `mx.stream(device)`, which sets the default device on entry and back on exit.
    def __enter__(self) -> None:
        self._write()

    def __exit__(self, *_: object) -> None:
        self._write()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "acceptance": "rejection"}], ids=["match", "rejection"])
async def test_no_thread_of_a_runtime_writes_the_default_device(options, monkeypatch):
    target, draft = llama(), llama(seed=1)
    devices = FakeDevices(monkeypatch)
    async with runtime.open((target, None), (draft, None)) as rt:
        before = mx.default_device()
        async for _ in rt.stream(PROMPT, max_tokens=12, **options):
            assert mx.default_device() == before
        await rt.detach_draft()
        await rt.attach_draft((draft, None))
        await rt.generate(PROMPT, max_tokens=12, **options)
    assert devices.writers == []
