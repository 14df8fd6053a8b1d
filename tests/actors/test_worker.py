"""The worker's thread: it does jobs in order, returns results and errors, and leaves nothing behind."""

import itertools
import math
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import mlx.core as mx
import pytest
import trio
import trio.testing
from our_threads import outrider_thread_names, outrider_threads
from sweeps import sweep

from actors.workers.thread_worker import ThreadWorker, _QueuedJob
from actors.workers.worker import Job, JobError, Step, Steps
from protocol.trace import Event, Span


class Gate:
    """A job that signals that it has begun, and waits until it is released."""

    def __init__(self, result: Any = None) -> None:
        self._result = result
        self._begun = threading.Event()
        self._may_go_on = threading.Event()
        self.is_done = False

    def __call__(self) -> Any:
        self._begun.set()
        self._may_go_on.wait()
        self.is_done = True
        return self._result

    async def begun(self) -> None:
        await trio.to_thread.run_sync(self._begun.wait)

    def let_go_on(self) -> None:
        self._may_go_on.set()


def job(call: Callable[[], Any], **more: Any) -> Job[Any]:
    return Job("verify", call, **more)


# --- doing jobs -----------------------------------------------------------------------------------


async def test_jobs_run_in_order_and_each_caller_gets_its_result() -> None:
    done: list[int] = []
    results: dict[int, int] = {}

    def square(number: int) -> int:
        done.append(number)
        return number * number

    async def ask(number: int) -> None:
        results[number] = await worker.run(job(lambda: square(number)))

    first = Gate()
    async with ThreadWorker("target") as worker, trio.open_nursery() as nursery:
        nursery.start_soon(worker.run, job(first))
        await first.begun()
        for number in range(20):
            nursery.start_soon(ask, number)
            # Wait until it is in the queue: tasks of a nursery start in any order.
            await trio.testing.wait_all_tasks_blocked()
        first.let_go_on()
    assert done == list(range(20))
    assert results == {number: number * number for number in range(20)}


@sweep("error", [ZeroDivisionError("no"), SystemExit(3)])
async def test_an_error_comes_back_wrapped_with_itself_as_the_cause(error: BaseException) -> None:
    def fail() -> None:
        raise error

    async with ThreadWorker("target") as worker:
        with pytest.raises(JobError, match=f"verify failed: {type(error).__name__}: {error}") as raised:
            await worker.run(job(fail))
        assert raised.value.__cause__ is error
        assert await worker.run(job(lambda: "the next job")) == "the next job"


async def test_a_finished_job_is_announced_with_its_time_in_trios_thread() -> None:
    events: list[tuple[Event, threading.Thread]] = []

    def note(event: Event) -> None:
        events.append((event, threading.current_thread()))

    async with ThreadWorker("draft", on_event=note) as worker:
        before = worker.clock()
        await worker.run(Job("prefill", lambda: 4, session=7, num_tokens=3, count=lambda result: result + 1))
        after = worker.clock()
        with pytest.raises(JobError):
            await worker.run(Job("draft", lambda: 1 // 0, session=7))
        busy_seconds = worker.busy_seconds
    (span, thread), (failed, _) = events
    assert thread is threading.current_thread()
    assert isinstance(span, Span)
    assert isinstance(failed, Span)
    assert attrs.evolve(span, began=0, ended=0) == Span("draft", "prefill", 7, 0, 0, 5)
    assert before <= span.began <= span.ended <= after
    assert failed.kind == "draft"
    assert busy_seconds == pytest.approx(span.ended - span.began + failed.ended - failed.began)


async def test_jobs_compute_on_the_default_device_in_a_stream_of_their_own() -> None:
    device = mx.default_device()
    async with ThreadWorker("target") as worker:
        assert await worker.run(job(mx.default_device)) == device
        assert await worker.run(job(lambda: mx.default_stream(device))) != mx.default_stream(device)


async def test_a_result_is_not_held_until_the_next_job() -> None:
    class Result:
        pass

    async with ThreadWorker("target") as worker:
        result = weakref.ref(await worker.run(job(Result)))
        # The thread drops the result before it takes the next job.
        assert await worker.run(job(result)) is None


# --- cancellation ---------------------------------------------------------------------------------


@sweep("are_steps", [False, True])
async def test_what_waits_is_taken_back_and_never_runs(are_steps: bool) -> None:
    gate, ran = Gate(), list[str]()

    async def work(name: str) -> None:
        if are_steps:
            await worker.run_steps(steps_of(counting(lambda number: ran.append(name), 1), []))
        else:
            await worker.run(job(lambda: ran.append(name)))

    async with ThreadWorker("target") as worker, trio.open_nursery() as nursery:
        nursery.start_soon(worker.run, job(gate))
        await gate.begun()
        with trio.CancelScope() as scope:
            scope.cancel()
            await work("cancelled before it was handed in")
        assert scope.cancelled_caught
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as waiting:
                waiting.start_soon(work, "cancelled while it waited")
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
        # Cancellation returns at once, while the first job still runs.
        assert scope.cancelled_caught
        assert not gate.is_done
        gate.let_go_on()
        await work("a later one")
    assert ran == ["a later one"]


async def cancelled(call: Callable[[], Awaitable[Any]], gate: Gate, heard: list[Any]) -> None:
    """Cancel a call, from which somebody is to hear nothing before its job or step has ended."""
    scope = trio.CancelScope()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def wait() -> None:
            with scope:
                try:
                    heard.append(await call())
                except JobError as error:
                    heard.append(str(error))
                await trio.lowlevel.checkpoint()
                heard.append("went on")

        await gate.begun()
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert heard == []
        gate.let_go_on()
    assert gate.is_done


@sweep("fails", [False, True])
async def test_a_job_that_runs_is_not_abandoned_and_its_outcome_arrives(fails: bool) -> None:
    gate, heard = Gate("result"), list[Any]()
    async with ThreadWorker("target") as worker:
        call = (lambda: gate().no_attribute) if fails else gate
        await cancelled(lambda: worker.run(job(call)), gate, heard)
    said = "verify failed: AttributeError: 'str' object has no attribute 'no_attribute'"
    assert heard == [said if fails else "result"]


# --- runs of steps --------------------------------------------------------------------------------


def counting(do: Callable[[int], Any], num_steps: int, number: int = 0) -> Callable[[], Step[Any]]:
    """A step that calls `do` with its number; the next one follows, up to the last."""

    def step() -> Step[Any]:
        result = do(number)
        following = counting(do, num_steps, number + 1) if number + 1 < num_steps else None
        return Step(result, following, num_tokens=number + 1)

    return step


def steps_of(begin: Callable[[], Step[Any]], heard: list[Any], **more: Any) -> Steps[Any]:
    return Steps("draft", begin, lambda job, result, goes_on: heard.append((result, goes_on)), **more)


async def test_steps_are_done_in_a_row_and_each_is_heard_of_in_trios_thread() -> None:
    heard: list[tuple[Job[Any], threading.Thread, bool, threading.Thread]] = []
    spans: list[Event] = []
    async with ThreadWorker("draft", on_event=spans.append) as worker:
        steps = Steps(
            "draft",
            counting(lambda number: threading.current_thread(), 4),
            lambda job, result, goes_on: heard.append((job, result, goes_on, threading.current_thread())),
            session=3,
            num_tokens=7,
            round=2,
        )
        await worker.run_steps(steps)
        assert [goes_on for _, _, goes_on, _ in heard] == [True, True, True, False]
        assert {thread.name for _, thread, _, _ in heard} == {"outrider-draft"}
        assert {thread for _, _, _, thread in heard} == {threading.current_thread()}
        jobs = [job for job, _, _, _ in heard]
        assert worker.busy_seconds == pytest.approx(sum(job.seconds for job in jobs))
    assert [attrs.evolve(span, began=0, ended=0) for span in spans if isinstance(span, Span)] == [
        Span("draft", "draft", 3, 0, 0, num_tokens, 2) for num_tokens in (7, 1, 2, 3)
    ]
    assert all(before.ended <= after.began for before, after in itertools.pairwise(jobs))


@sweep("how", ["interrupted", "a job waits"])
async def test_steps_end_after_the_one_that_is_running(how: str) -> None:
    gate, done, heard = Gate(), list[Any](), list[Any]()
    async with ThreadWorker("draft") as worker, trio.open_nursery() as nursery:

        def do(number: int) -> int:
            done.append(number)
            if number == 2:
                gate()
            return number

        steps = steps_of(counting(do, 10), heard)
        nursery.start_soon(worker.run_steps, steps)
        await gate.begun()
        if how == "interrupted":
            steps.interrupt()
        else:
            nursery.start_soon(worker.run, job(lambda: done.append("another")))
            await trio.testing.wait_all_tasks_blocked()
        gate.let_go_on()
    assert done == [0, 1, 2, *(["another"] if how == "a job waits" else [])]
    assert heard == [(0, True), (1, True), (2, False)]


async def test_steps_of_a_call_that_is_cancelled_end_after_the_one_that_is_running() -> None:
    gate, heard = Gate("result"), list[Any]()
    async with ThreadWorker("draft") as worker:
        steps = steps_of(counting(lambda number: gate(), 10), heard)
        await cancelled(lambda: worker.run_steps(steps), gate, heard)
    assert heard == [("result", False), None]


async def test_an_error_in_a_step_comes_back_after_what_came_before_it() -> None:
    heard: list[Any] = []
    async with ThreadWorker("draft") as worker:
        with pytest.raises(JobError, match="draft failed: ZeroDivisionError") as raised:
            await worker.run_steps(steps_of(counting(lambda number: 6 // (2 - number), 5), heard))
        assert isinstance(raised.value.__cause__, ZeroDivisionError)
        assert await worker.run(job(lambda: "the next job")) == "the next job"
    assert heard == [(3, True), (6, True)]


async def test_an_error_in_the_callback_of_a_step_ends_the_steps() -> None:
    error, gate, heard = KeyError("unheard of"), Gate(), list[int]()

    def hear(job: Job[Any], result: int, goes_on: bool) -> None:
        heard.append(result)
        gate.let_go_on()
        raise error

    async with ThreadWorker("draft") as worker:
        with pytest.raises(KeyError) as raised:
            await worker.run_steps(Steps("draft", counting(lambda number: gate() if number else number, 10), hear))
        assert raised.value is error
        assert await worker.run(job(lambda: "the next job")) == "the next job"
    assert heard == [0]


# --- leaving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("the body's"), KeyboardInterrupt(), SystemExit(1)])
async def test_an_error_in_the_body_passes_and_the_thread_is_gone(error: BaseException) -> None:
    async def body() -> None:
        async with ThreadWorker("target") as worker:
            await worker.run(job(lambda: None))
            raise error

    with pytest.raises(type(error)) as raised:
        await body()
    assert raised.value is error
    assert outrider_threads() == []


@sweep("are_steps", [False, True])
async def test_leaving_under_cancellation_waits_for_the_running_job_only(are_steps: bool) -> None:
    gate, left, done = Gate(), trio.Event(), list[int]()
    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        @nursery.start_soon
        async def body() -> None:
            with scope:
                async with ThreadWorker("target") as worker:
                    if are_steps:
                        step = counting(lambda number: done.append(number) or gate(), 10)
                        await worker.run_steps(steps_of(step, []))
                    else:
                        await worker.run(job(gate))
            left.set()

        await gate.begun()
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert not left.is_set()
        assert outrider_thread_names() == ["outrider-target"]
        gate.let_go_on()
    assert left.is_set()
    assert gate.is_done
    assert done == [0] * are_steps
    assert outrider_threads() == []


async def test_workers_that_follow_each_other_share_one_thread_that_is_not_the_callers() -> None:
    threads: set[threading.Thread] = set()
    for number in range(50):
        async with ThreadWorker("target") as worker, ThreadWorker("draft"):
            assert sorted(outrider_thread_names()) == ["outrider-draft", "outrider-target"]
            assert await worker.run(job(lambda number=number: (mx.ones(2) * number).tolist())) == [number, number]
            threads |= {await worker.run(job(threading.current_thread)) for _ in range(3)}
        assert outrider_threads() == []
    assert len(threads) <= 2
    assert threading.current_thread() not in threads


# --- a job that hangs -----------------------------------------------------------------------------


@pytest.fixture
def impatience(monkeypatch: Any) -> None:
    monkeypatch.setattr("actors.workers.thread_worker.HANG_TIMEOUT_S", 0.0)


async def is_given_up(worker: ThreadWorker, call: Callable[[], Any]) -> None:
    with pytest.raises(JobError, match="draft's thread has died of HangError"):
        await worker.run(job(call))


@pytest.mark.usefixtures("impatience")
async def test_a_cancelled_job_that_hangs_is_given_up_where_the_worker_may_be(caplog: Any) -> None:
    gate, scope = Gate(), trio.CancelScope()

    async def hang() -> None:
        with scope:
            await is_given_up(worker, gate)

    async with ThreadWorker("draft", may_be_given_up=True) as worker:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hang)
            await gate.begun()
            nursery.start_soon(is_given_up, worker, lambda: None)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
        assert not worker.is_alive
        await is_given_up(worker, lambda: None)
    assert "the draft model hangs" in caplog.text
    # What the thread reports at its end is ignored.
    gate.let_go_on()


@pytest.mark.usefixtures("impatience")
async def test_a_worker_left_with_a_hanging_job_is_given_up(caplog: Any) -> None:
    gate = Gate()
    hung: list[threading.Thread] = []
    with trio.CancelScope() as scope:
        async with ThreadWorker("draft", may_be_given_up=True) as worker:
            hung.append(await worker.run(job(threading.current_thread)))
            # Nobody waits for this job, as if its task had already ended.
            worker._jobs.put(_QueuedJob(job(gate), trio.lowlevel.current_task()))
            await gate.begun()
            scope.cancel()
    assert "hangs" in caplog.text
    async with ThreadWorker("draft") as worker:
        assert await worker.run(job(threading.current_thread)) is not hung[0]
    gate.let_go_on()


@pytest.mark.usefixtures("impatience")
async def test_a_cancelled_job_is_awaited_unless_its_worker_may_be_given_up() -> None:
    gate, heard = Gate("result"), list[Any]()
    async with ThreadWorker("target") as worker:
        await cancelled(lambda: worker.run(job(gate)), gate, heard)
        assert worker.is_alive
    assert heard == ["result"]


@pytest.mark.usefixtures("impatience")
async def test_a_job_that_hangs_is_given_up_where_another_waits_behind_it(caplog: Any) -> None:
    gate = Gate()
    behind: list[Any] = []
    async with ThreadWorker("draft", may_be_given_up=True) as worker:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(is_given_up, worker, gate)
            await gate.begun()
            nursery.start_soon(is_given_up, worker, lambda: behind.append("done"))
        assert not worker.is_alive
        thread = worker._thread
    assert "hangs" in caplog.text
    # If the thread returns after all, it does not do the job that was reported as not done.
    gate.let_go_on()
    thread.end()
    assert behind == []


async def test_neither_loading_nor_a_long_pass_counts_as_hanging() -> None:
    async with ThreadWorker("draft", may_be_given_up=True) as worker:
        worker._longest_job_s = worker._longest_token_s = 0.01
        worker._running = job(lambda: None, num_tokens=2048)
        assert worker._hang_timeout_s == pytest.approx(10.0 + 4.0 * 20.48)
        worker._running = Job("load", lambda: None)
        assert worker._hang_timeout_s == math.inf
        worker._running = None


async def test_a_failed_job_keeps_nothing_of_what_it_had_in_memory() -> None:
    class Large:
        pass

    kept: list[weakref.ref[Large]] = []

    def fail() -> None:
        large = Large()
        kept.append(weakref.ref(large))
        raise ValueError("no room")

    async with ThreadWorker("target") as worker:
        with pytest.raises(JobError) as raised:
            await worker.run(job(fail))
    assert isinstance(raised.value.__cause__, ValueError)
    assert kept[0]() is None


# --- a thread that dies ---------------------------------------------------------------------------


def deadly() -> Any:
    """An error that ends the thread, and not only the job."""
    return "no step"


async def test_a_thread_that_dies_at_work_fails_waiting_and_later_jobs() -> None:
    gate, errors = Gate(), list[JobError]()

    async def fail(call: Callable[[], Any]) -> None:
        with pytest.raises(JobError, match="has died of AttributeError") as raised:
            await call()
        errors.append(raised.value)

    async with ThreadWorker("draft") as worker:
        assert worker.is_alive
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.run, job(gate))
            await gate.begun()
            for call in (lambda: worker.run_steps(steps_of(deadly, [])), lambda: worker.run(job(lambda: None))):
                nursery.start_soon(fail, call)
                await trio.testing.wait_all_tasks_blocked()
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as waiting:
                    waiting.start_soon(worker.run, job(lambda: None))
                    await trio.testing.wait_all_tasks_blocked()
                    scope.cancel()
            gate.let_go_on()
        await fail(lambda: worker.run(job(lambda: None)))
        assert not worker.is_alive
    assert len(errors) == 3
    assert all(isinstance(error.__cause__, AttributeError) for error in errors)
    assert outrider_threads() == []


async def test_a_job_behind_the_last_one_of_a_worker_is_an_error() -> None:
    last, worker = Gate(), ThreadWorker("target")
    await worker.__aenter__()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run, job(last))
        await last.begun()
        nursery.start_soon(worker.__aexit__)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(trio.to_thread.run_sync, last.let_go_on)
        with trio.fail_after(60), pytest.raises(JobError, match="thread has ended"):
            await worker.run(job(lambda: None))


async def test_a_job_for_a_worker_that_was_left_is_an_error() -> None:
    async with ThreadWorker("target") as worker:
        pass
    assert not worker.is_alive
    with pytest.raises(JobError, match="thread has ended"):
        await worker.run(job(lambda: None))
