"""Processes that stream and then exit, in every possible way: the exit status is right, and stderr is clean.

A process whose threads ran models may abort as it exits, or report what it left behind; neither is visible from inside.
Parent and child synchronise by lines: the child prints where it is, and a forward pass that is to be interrupted waits
for a line from the parent.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

# For a child that hangs; nothing else waits that long.
PATIENCE_SECONDS = 300

CHILD = '''
import asyncio
import contextlib
import logging
import sys
import threading

import mlx.core as mx
import trio
from models import Wrapped, llama, near, prompt_of

import runtime

# In debug mode, asyncio complains of what holds up its loop, as importing does, or another program on a busy machine.
logging.getLogger("asyncio").addFilter(lambda record: "took" not in record.msg)


def say(line):
    print(line, flush=True)


class Held(Wrapped):
    """Says when its nth forward pass begins, and goes on with it when it is told to.

    Passes are counted from the first of the prompt on; or, for one as it is opened, from the first there is.
    """

    def __init__(self, model, nth):
        super().__init__(model)
        self._passes_left = nth
        self._counts = nth == OPENING
        self._is_in = threading.Event()

    async def is_in(self):
        await trio.to_thread.run_sync(self._is_in.wait)

    def __call__(self, inputs, cache=None):
        self._counts = self._counts or inputs.tolist()[0][:2] == PROMPT[:2]
        self._passes_left -= self._counts
        if self._passes_left == 0:
            say("in a forward pass")
            self._is_in.set()
            sys.stdin.readline()
        return super().__call__(inputs, cache)


def pair(held=None, nth=0):
    target, draft = llama(), near(llama(), noise=0.05)
    # Once in a process, when it first compiles something, MLX asks for the version of the compiler, by
    # system(3), which has the whole process ignore SIGINT until it returns. Not while we interrupt it.
    mx.eval(target(mx.array([[1]])))
    if held == "target":
        target = Held(target, nth)
    if held == "draft":
        draft = Held(draft, nth)
    return (target, None), (draft, None)


PROMPT = prompt_of(33)
LONG = {"max_tokens": 400, "prefill_step_size": 8, "lookahead": 3}
# Forward passes of a model: some as it is opened; with the prompt, four of prefill, and then those that decode.
OPENING, IN_DECODE = 1, 8


async def stream_to_the_end(target, draft):
    async with runtime.open(target, draft) as rt:
        say(len([token async for token in rt.stream(PROMPT, max_tokens=24)]))


async def break_off(target, draft):
    async with runtime.open(target, draft) as rt:
        async for _ in rt.stream(PROMPT, **LONG):
            break


async def time_out(target, draft):
    async with runtime.open(target, draft) as rt:
        with trio.move_on_after(0):
            await rt.generate(PROMPT, **LONG)


# What outlives its runtime, and its event loop.
kept = []


async def leave_a_stream_half_read(target, draft):
    async with runtime.open(target, draft) as rt:
        kept.append(rt.stream(PROMPT, **LONG))
        await anext(kept[-1])
        await anext(kept[-1])


async def exit_in_the_body(target, draft):
    async with runtime.open(target, draft) as rt:
        async for _ in rt.stream(PROMPT, **LONG):
            sys.exit(3)


async def be_interrupted(target, draft):
    before = layer_classes(target, draft)
    try:
        async with runtime.open(target, draft) as rt:
            try:
                async for _ in rt.stream(PROMPT, **LONG):
                    pass
            except KeyboardInterrupt:
                say("interrupted")
                raise
    finally:
        say("left" if layer_classes(target, draft) == before else "left with models that are not as they were")


def layer_classes(*pair):
    return [type(layer) for model, _ in pair for layer in model.layers]


async def be_interrupted_while_leaving(target, draft):
    async with runtime.open(target, draft) as rt:
        stream = rt.stream(PROMPT, **LONG)
        await target[0].is_in()
        await stream.aclose()
        say("leaving")


def one_after_another(*pair):
    for way in (stream_to_the_end, break_off, time_out, leave_a_stream_half_read):
        trio.run(way, *pair)
    asyncio.run(asyncio_half_read(*pair))
    sync_twice(*pair)
    trio.run(exit_in_the_body, *pair)


def left_open(*pair):
    """The process ends with runtimes open on each face, and streams under way."""
    for way in (asyncio_never_left, asyncio_in_a_daemon, sync_never_closed):
        way(*pair)


class Failing(Wrapped):
    has_failed = False

    def __call__(self, inputs, cache=None):
        # Not yet at two tokens, by which a model is looked at when it is opened.
        self.has_failed = self.has_failed or inputs.shape[1] > 2
        if self.has_failed:
            raise RuntimeError("no such kernel")
        return super().__call__(inputs, cache)


async def a_target_that_fails(target, draft):
    async with runtime.open((Failing(target[0]), None), draft) as rt:
        await rt.generate(PROMPT, **LONG)


async def asyncio_half_read(*pair):
    async with runtime.aio.open(*pair) as rt:
        kept.append(rt.stream(PROMPT, **LONG))
        await anext(kept[-1])


async def asyncio_interrupted(*pair):
    async with runtime.aio.open(*pair) as rt:
        try:
            await rt.generate(PROMPT, **LONG)
        except asyncio.CancelledError:
            say("interrupted")
            raise


def asyncio_never_left(*pair):
    """The loop is closed, and the process ends, with the runtime open."""
    loop, opening = asyncio.new_event_loop(), runtime.aio.open(*pair)

    async def begin():
        rt = await opening.__aenter__()
        kept.extend(rt.stream(PROMPT, **LONG) for _ in range(3))
        await anext(kept[-1])

    loop.run_until_complete(begin())
    loop.close()


def asyncio_in_a_daemon(*pair):
    """The loop goes on in a daemon's thread, and the process ends, with the runtime open."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    opening = runtime.aio.open(*pair)

    async def begin():
        rt = await opening.__aenter__()
        return await rt.generate(PROMPT, max_tokens=24)

    say(len(asyncio.run_coroutine_threadsafe(begin(), loop).result().tokens))
    kept.extend([loop, opening])


def sync_twice(target, draft):
    for _ in range(2):
        say(len(runtime.generate_sync(PROMPT, target=target, draft=draft, max_tokens=24).tokens))


def sync_stream_interrupted(target, draft):
    with runtime.open_sync(target, draft) as rt:
        try:
            for _ in rt.stream(PROMPT, **LONG):
                pass
        except KeyboardInterrupt:
            say("interrupted")
            raise


def sync_never_closed(target, draft):
    """The process ends with the runtime open, a stream under way, and another thread that waits for a token."""
    rt = runtime.open_sync(target, draft)
    stream = rt.stream(PROMPT, **LONG)
    next(stream)
    kept.extend([rt, stream])

    def read():
        with contextlib.suppress(runtime.RuntimeClosedError):
            list(rt.stream(PROMPT, **LONG))

    threading.Thread(target=read, daemon=True).start()


def run(way, who, nth):
    target, draft = pair(who, globals()[nth]) if who else pair()
    main = globals()[way]
    if way in ("one_after_another", "left_open", "sync_stream_interrupted"):
        main(target, draft)
    elif way.startswith("asyncio"):
        asyncio.run(main(target, draft))
    else:
        trio.run(main, target, draft)


run(*sys.argv[1:])
'''


@attrs.frozen
class Ended:
    status: int
    said: list[str]
    errors: str


def end_of(way: str, directory: Path, *held: str, steps: str = "") -> Ended:
    """How a process ends that runs a function of the script above.

    Args:
        held: which model is held, in which forward pass.
        steps: what happens meanwhile, separated by semicolons: lines that it prints; or "Ctrl-C", which it gets then,
            and "go on", by which the pass goes on.
    """
    (directory / "child.py").write_text(CHILD)
    command = [sys.executable, "-X", "dev", "-W", "error", str(directory / "child.py"), way, *(held or ("", ""))]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    with (
        (directory / "stderr").open("w") as errors,
        subprocess.Popen(command, stderr=errors, cwd=directory, env=environment, **pipes) as process,
        killed_after_a_while(process),
    ):
        for step in steps.split("; ") if steps else ():
            if step == "Ctrl-C":
                process.send_signal(signal.SIGINT)
            elif step == "go on":
                process.stdin.write("go on\n")
                process.stdin.flush()
            else:
                assert process.stdout.readline() == f"{step}\n"
        said, _ = process.communicate()
    return Ended(process.returncode, said.splitlines(), (directory / "stderr").read_text())


@contextmanager
def killed_after_a_while(process: subprocess.Popen[str]) -> Iterator[None]:
    """End a process that is left, or that hangs, which is a failure."""
    watchdog = threading.Timer(PATIENCE_SECONDS, process.kill)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()
        watchdog.join()
        process.kill()


ODD = ("terminate called", "Warning", "never awaited", "Exception ignored", "Fatal", "ExceptionGroup")


def is_one_traceback_of(error: str, errors: str) -> bool:
    """Whether stderr has exactly one traceback, of this exception by itself and not in a group."""
    lines = errors.splitlines()
    begins_and_ends = lines[0] == "Traceback (most recent call last):", lines[-1] == error
    return all(begins_and_ends) and not any(word in errors for word in ODD)


@pytest.mark.parametrize(
    ("way", "status", "said"), [("one_after_another", 3, ["24", "24", "24"]), ("left_open", 0, ["24"])]
)
def test_a_process_that_ends_well_or_exits_in_mid_stream_says_nothing_odd(way, status, said, tmp_path):
    assert end_of(way, tmp_path) == Ended(status, said, "")


def test_a_process_that_dies_of_an_exception_shows_that_and_no_more(tmp_path):
    error = "protocol.errors.RuntimeBrokenError: the target model failed, and the runtime with it: no such kernel"
    ended = end_of("a_target_that_fails", tmp_path)
    assert ended.status == 1
    assert is_one_traceback_of(error, ended.errors), ended.errors


@pytest.mark.parametrize(
    ("way", "held", "steps", "said"),
    [
        # The consumer is cancelled at once; the runtime waits for the forward pass.
        ("be_interrupted", ("draft", "IN_DECODE"), "in a forward pass; Ctrl-C; interrupted; Ctrl-C; go on", ["left"]),
        ("be_interrupted", ("target", "OPENING"), "in a forward pass; Ctrl-C; go on", ["left"]),
        ("sync_stream_interrupted", ("target", "IN_DECODE"), "in a forward pass; Ctrl-C; interrupted; go on", []),
        ("be_interrupted_while_leaving", ("target", "IN_DECODE"), "in a forward pass; leaving; Ctrl-C; go on", []),
        ("asyncio_interrupted", ("target", "IN_DECODE"), "in a forward pass; Ctrl-C; interrupted; go on", []),
    ],
)
def test_an_interrupted_process_finishes_its_pass_and_dies_of_it(way, held, steps, said, tmp_path):
    ended = end_of(way, tmp_path, *held, steps=steps)
    # A process that dies of Ctrl-C tells its parent so; then a shell's loop stops with it.
    assert (ended.status, ended.said) == (-signal.SIGINT, said)
    assert is_one_traceback_of("KeyboardInterrupt", ended.errors), ended.errors
