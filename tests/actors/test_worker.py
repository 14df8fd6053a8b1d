"""The worker's thread: it does jobs in order, returns results and errors, and leaves nothing behind."""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

import attrs
import mlx.core as mx
import pytest
import trio
import trio.testing
from our_threads import outrider_thread_names, outrider_threads

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


async def test_jobs_are_done_on_one_thread_that_is_not_the_callers() -> None:
    async with ThreadWorker("target") as worker:
        threads = {await worker.run(job(threading.current_thread)) for _ in range(3)}
        (thread,) = threads
        assert thread is not threading.current_thread()
        assert thread.name == "outrider-target"


async def test_jobs_are_done_in_the_order_in_which_they_were_handed_in() -> None:
    done: list[int] = []
    first = Gate()
    async with ThreadWorker("target") as worker, trio.open_nursery() as nursery:
        nursery.start_soon(worker.run, job(first))
        await first.begun()
        for number in range(20):
            nursery.start_soon(worker.run, job(lambda number=number: done.append(number)))
            # Wait until it is in the queue: tasks of a nursery start in any order.
            await trio.testing.wait_all_tasks_blocked()
        first.let_go_on()
    assert done == list(range(20))


async def test_each_caller_gets_the_result_of_its_own_job() -> None:
    results: dict[int, int] = {}

    async def ask(number: int) -> None:
        results[number] = await worker.run(job(lambda: number * number))

    async with ThreadWorker("target") as worker, trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(ask, number)
    assert results == {number: number * number for number in range(20)}


async def test_the_event_loop_goes_on_while_a_job_runs() -> None:
    gate = Gate("done")
    async with ThreadWorker("target") as worker, trio.open_nursery() as nursery:

        @nursery.start_soon
        async def wait() -> None:
            assert await worker.run(job(gate)) == "done"

        await gate.begun()
        for _ in range(3):
            await trio.lowlevel.checkpoint()
        assert not gate.is_done
        gate.let_go_on()


async def test_an_error_comes_back_wrapped_with_itself_as_the_cause() -> None:
    error = ZeroDivisionError("no")

    def fail() -> None:
        raise error

    async with ThreadWorker("target") as worker:
        with pytest.raises(JobError, match="verify failed: ZeroDivisionError: no") as raised:
            await worker.run(job(fail))
        assert raised.value.__cause__ is error
        assert await worker.run(job(lambda: "the next job")) == "the next job"


async def test_a_job_may_even_raise_system_exit() -> None:
    def leave() -> None:
        raise SystemExit(3)

    async with ThreadWorker("target") as worker:
        with pytest.raises(JobError) as raised:
            await worker.run(job(leave))
        assert isinstance(raised.value.__cause__, SystemExit)
        assert await worker.run(job(lambda: "the next job")) == "the next job"


async def test_a_finished_job_is_announced_with_its_time_in_trios_thread() -> None:
    events: list[tuple[Event, threading.Thread]] = []
    async with ThreadWorker(
        "draft", on_event=lambda event: events.append((event, threading.current_thread()))
    ) as worker:
        before = worker.clock()
        await worker.run(Job("prefill", lambda: None, session=7, num_tokens=5))
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


async def test_arrays_that_are_evaluated_come_back() -> None:
    def compute() -> mx.array:
        x = mx.arange(4) * 2
        mx.eval(x)
        return x

    async with ThreadWorker("target") as worker:
        x = await worker.run(job(compute))
    assert (x + 1).tolist() == [1, 3, 5, 7]


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


async def test_a_job_that_waits_is_taken_back_and_never_runs() -> None:
    gate = Gate()
    ran: list[str] = []
    async with ThreadWorker("target") as worker, trio.open_nursery() as nursery:
        nursery.start_soon(worker.run, job(gate))
        await gate.begun()
        with trio.CancelScope() as scope:
            scope.cancel()
            await worker.run(job(lambda: ran.append("cancelled before it was handed in")))
        assert scope.cancelled_caught
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as waiting:
                waiting.start_soon(worker.run, job(lambda: ran.append("cancelled while it waited")))
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
        # Cancellation returns at once, while the first job still runs.
        assert scope.cancelled_caught
        assert not gate.is_done
        gate.let_go_on()
        await worker.run(job(lambda: ran.append("a later one")))
    assert ran == ["a later one"]


async def test_a_job_that_runs_is_not_abandoned_and_its_result_arrives() -> None:
    gate = Gate("result")
    results: list[str] = []
    async with ThreadWorker("target") as worker, trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        @nursery.start_soon
        async def wait() -> None:
            with scope:
                results.append(await worker.run(job(gate)))
                await trio.lowlevel.checkpoint()
                results.append("went on")

        await gate.begun()
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert results == []
        gate.let_go_on()
    assert gate.is_done
    assert results == ["result"]
    assert scope.cancelled_caught


async def test_an_error_of_a_job_that_was_cancelled_while_it_ran_arrives_too() -> None:
    gate = Gate()
    async with ThreadWorker("target") as worker, trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        def fail() -> None:
            gate()
            raise ValueError("after all")

        @nursery.start_soon
        async def wait() -> None:
            with scope, pytest.raises(JobError, match="after all"):
                await worker.run(job(fail))

        await gate.begun()
        scope.cancel()
        gate.let_go_on()


# --- runs of steps --------------------------------------------------------------------------------


def counting(do: Callable[[int], Any], num_steps: int, number: int = 0) -> Callable[[], Step[Any]]:
    """A step that calls `do` with its number; the next one follows, up to the last."""

    def step() -> Step[Any]:
        result = do(number)
        return Step(
            result, counting(do, num_steps, number + 1) if number + 1 < num_steps else None, num_tokens=number + 1
        )

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


async def test_a_step_is_heard_of_while_the_next_one_runs() -> None:
    gate, heard = Gate(), trio.Event()
    async with ThreadWorker("draft") as worker, trio.open_nursery() as nursery:
        begin = counting(lambda number: gate() if number == 1 else None, 2)
        nursery.start_soon(worker.run_steps, Steps("draft", begin, lambda job, result, goes_on: heard.set()))
        await heard.wait()
        await gate.begun()
        assert not gate.is_done
        gate.let_go_on()


async def test_steps_that_are_interrupted_end_after_the_one_that_is_running() -> None:
    gate, done, heard = Gate(), list[int](), list[Any]()
    async with ThreadWorker("draft") as worker, trio.open_nursery() as nursery:

        def do(number: int) -> int:
            done.append(number)
            if number == 2:
                gate()
            return number

        steps = steps_of(counting(do, 10), heard)
        nursery.start_soon(worker.run_steps, steps)
        await gate.begun()
        steps.interrupt()
        gate.let_go_on()
    assert done == [0, 1, 2]
    assert heard == [(0, True), (1, True), (2, False)]


async def test_a_job_that_waits_has_its_turn_after_the_step_that_is_running() -> None:
    gate, done, heard = Gate(), list[Any](), list[Any]()
    async with ThreadWorker("draft") as worker, trio.open_nursery() as nursery:

        def do(number: int) -> None:
            done.append(number)
            if number == 1:
                gate()

        nursery.start_soon(worker.run_steps, steps_of(counting(do, 10), heard))
        await gate.begun()
        nursery.start_soon(worker.run, job(lambda: done.append("another")))
        await trio.testing.wait_all_tasks_blocked()
        gate.let_go_on()
    assert done == [0, 1, "another"]
    assert heard == [(None, True), (None, False)]


async def test_steps_of_a_call_that_is_cancelled_end_after_the_one_that_is_running() -> None:
    gate, heard = Gate("result"), list[Any]()
    async with ThreadWorker("draft") as worker, trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        @nursery.start_soon
        async def wait() -> None:
            with scope:
                await worker.run_steps(steps_of(counting(lambda number: gate(), 10), heard))
                heard.append("returned")
                await trio.lowlevel.checkpoint()

        await gate.begun()
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert heard == []
        gate.let_go_on()
    assert heard == [("result", False), "returned"]
    assert scope.cancelled_caught


async def test_steps_that_wait_are_taken_back() -> None:
    gate, heard = Gate(), list[Any]()
    async with ThreadWorker("draft") as worker, trio.open_nursery() as nursery:
        nursery.start_soon(worker.run, job(gate))
        await gate.begun()
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as waiting:
                waiting.start_soon(worker.run_steps, steps_of(counting(lambda number: number, 3), heard))
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
        assert scope.cancelled_caught
        gate.let_go_on()
        await worker.run(job(lambda: None))
    assert heard == []


async def test_an_error_in_a_step_comes_back_after_what_came_before_it() -> None:
    heard: list[Any] = []
    async with ThreadWorker("draft") as worker:
        with pytest.raises(JobError, match="draft failed: ZeroDivisionError") as raised:
            await worker.run_steps(steps_of(counting(lambda number: 6 // (2 - number), 5), heard))
        assert isinstance(raised.value.__cause__, ZeroDivisionError)
        assert await worker.run(job(lambda: "the next job")) == "the next job"
    assert heard == [(3, True), (6, True)]


async def test_an_error_of_the_one_who_hears_of_a_step_ends_them_and_comes_back_as_it_is() -> None:
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


async def test_leaving_under_cancellation_waits_for_the_step_that_runs_and_for_no_other() -> None:
    gate, done = Gate(), list[int]()
    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        @nursery.start_soon
        async def body() -> None:
            with scope:
                async with ThreadWorker("draft") as worker:
                    await worker.run_steps(steps_of(counting(lambda number: done.append(number) or gate(), 10), []))

        await gate.begun()
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        gate.let_go_on()
    assert done == [0]
    assert outrider_threads() == []


# --- leaving --------------------------------------------------------------------------------------


async def test_the_thread_is_gone_after_leaving() -> None:
    async with ThreadWorker("target"), ThreadWorker("draft"):
        assert sorted(outrider_thread_names()) == ["outrider-draft", "outrider-target"]
    assert outrider_threads() == []


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


async def test_leaving_under_cancellation_waits_for_the_job_that_runs() -> None:
    gate = Gate()
    left = trio.Event()
    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        @nursery.start_soon
        async def body() -> None:
            with scope:
                async with ThreadWorker("target") as worker:
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
    assert outrider_threads() == []


async def test_leaving_takes_back_the_jobs_that_wait() -> None:
    gate = Gate()
    ran: list[str] = []
    with trio.CancelScope() as scope:
        async with ThreadWorker("target") as worker, trio.open_nursery() as nursery:
            nursery.start_soon(worker.run, job(gate))
            await gate.begun()
            nursery.start_soon(worker.run, job(lambda: ran.append("waited")))
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
            gate.let_go_on()
    assert scope.cancelled_caught
    assert ran == []
    assert outrider_threads() == []


async def test_workers_that_follow_each_other_share_one_thread() -> None:
    threads: set[threading.Thread] = set()
    for number in range(50):
        async with ThreadWorker("target") as worker:
            assert await worker.run(job(lambda number=number: (mx.ones(2) * number).tolist())) == [number, number]
            threads.add(await worker.run(job(threading.current_thread)))
    assert len(threads) == 1


async def test_workers_at_the_same_time_have_a_thread_each() -> None:
    async with ThreadWorker("target") as target, ThreadWorker("draft") as draft:
        threads = {await worker.run(job(threading.current_thread)) for worker in (target, draft)}
    assert len(threads) == 2


async def test_a_thread_that_died_at_work_is_not_used_again() -> None:
    async with ThreadWorker("draft") as worker:
        dead = await worker.run(job(threading.current_thread))
        with pytest.raises(JobError, match="has died"):
            await worker.run_steps(steps_of(deadly, []))
    async with ThreadWorker("draft") as worker:
        assert await worker.run(job(threading.current_thread)) is not dead


# --- a job that hangs -----------------------------------------------------------------------------


@pytest.fixture
def impatience(monkeypatch: Any) -> None:
    monkeypatch.setattr("actors.workers.thread_worker.HANG_TIMEOUT_S", 0.0)


@pytest.mark.usefixtures("impatience")
async def test_a_cancelled_job_that_hangs_is_given_up_where_the_worker_may_be(caplog: Any) -> None:
    gate = Gate()
    waited: list[JobError] = []
    async with ThreadWorker("draft", may_be_given_up=True) as worker:
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()

            @nursery.start_soon
            async def hang() -> None:
                with scope, pytest.raises(JobError, match="draft's thread has died of HangError"):
                    await worker.run(job(gate))

            await gate.begun()

            @nursery.start_soon
            async def wait() -> None:
                with pytest.raises(JobError, match="HangError") as raised:
                    await worker.run(job(lambda: None))
                waited.append(raised.value)

            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
        assert len(waited) == 1
        assert not worker.is_alive
        with pytest.raises(JobError, match="HangError"):
            await worker.run(job(lambda: None))
    assert "the draft model hangs" in caplog.text
    # What the thread reports at its end is ignored.
    gate.let_go_on()


@pytest.mark.usefixtures("impatience")
async def test_a_worker_that_is_left_while_a_job_hangs_is_given_up_and_its_thread_too(
    caplog: Any,
) -> None:
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
async def test_a_cancelled_job_of_a_worker_that_may_not_be_given_up_is_waited_for() -> None:
    gate = Gate()
    async with ThreadWorker("target") as worker, trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        @nursery.start_soon
        async def work() -> None:
            with scope:
                assert await worker.run(job(gate)) is None

        await gate.begun()
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert worker.is_alive
        gate.let_go_on()
    assert gate.is_done


@pytest.mark.usefixtures("impatience")
async def test_a_job_that_hangs_is_given_up_where_another_waits_behind_it(caplog: Any) -> None:
    gate = Gate()
    behind: list[Any] = []
    async with ThreadWorker("draft", may_be_given_up=True) as worker:
        async with trio.open_nursery() as nursery:

            async def fail(call: Callable[[], Any]) -> None:
                with pytest.raises(JobError, match="HangError"):
                    await worker.run(job(call))

            nursery.start_soon(fail, gate)
            await gate.begun()
            nursery.start_soon(fail, lambda: behind.append("done"))
        assert not worker.is_alive
        thread = worker._thread
    assert "hangs" in caplog.text
    # If the thread returns after all, it does not do the job that was reported as not done.
    gate.let_go_on()
    thread.end()
    assert behind == []


async def test_loading_never_hangs_and_a_long_pass_may_take_as_long_as_its_tokens_should() -> None:
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


async def test_how_many_tokens_went_through_is_told_by_the_result() -> None:
    spans: list[Any] = []
    async with ThreadWorker("target", on_event=spans.append) as worker:
        await worker.run(job(lambda: 3, num_tokens=5, count=lambda result: result + 1))
    assert spans[0].num_tokens == 4


# --- a thread that dies ---------------------------------------------------------------------------


def deadly() -> Any:
    """An error that ends the thread, and not only the job."""
    return "no step"


class DeadWorker(ThreadWorker):
    """A worker whose thread dies before it takes a job."""

    def _run_jobs(self) -> None:
        raise RuntimeError("no such device")


async def test_a_thread_that_dies_before_it_takes_a_job_is_an_error_and_not_a_wait() -> None:
    async with DeadWorker("target") as worker:
        for _ in range(2):
            with pytest.raises(JobError, match="target's thread has died of") as raised:
                await worker.run(job(lambda: None))
            assert raised.value.__cause__ is not None
        with pytest.raises(JobError, match="has died"):
            await worker.run_steps(steps_of(counting(lambda number: number, 3), []))
        assert not worker.is_alive
    assert outrider_threads() == []


async def test_a_thread_that_dies_at_work_is_an_error_for_who_waits_and_for_who_comes() -> None:
    gate = Gate()
    errors: list[JobError] = []
    async with ThreadWorker("draft") as worker:
        assert worker.is_alive
        async with trio.open_nursery() as nursery:

            async def fail(call: Callable[[], Any]) -> None:
                with pytest.raises(JobError, match="has died of AttributeError") as raised:
                    await call()
                errors.append(raised.value)

            nursery.start_soon(worker.run, job(gate))
            await gate.begun()
            nursery.start_soon(fail, lambda: worker.run_steps(steps_of(deadly, [])))
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(fail, lambda: worker.run(job(lambda: None)))
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


async def test_a_job_for_a_worker_that_was_left_is_an_error() -> None:
    async with ThreadWorker("target") as worker:
        pass
    assert not worker.is_alive
    with pytest.raises(JobError, match="thread has ended"):
        await worker.run(job(lambda: None))
