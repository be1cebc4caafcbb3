"""The device thread: order, sessions, refusal, death and stop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from executor_svc.batch import (
    NewSequence,
    SamplingParams,
    StepBatch,
    StepFailure,
    StepFailureReason,
    StepResult,
    StoppingParams,
)
from executor_svc.worker import SessionEvent, SessionReady, Worker

TIMEOUT = 10.0


class ScriptedRunner:
    """Records every call and the thread it came on. Steps in `gates` wait for theirs; those in `failing` fail."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.threads: set[str] = set()
        self.announced: list[int] = []
        self.gates: dict[int, threading.Event] = {}
        self.running = threading.Event()
        self.failing: set[int] = set()
        self.load_error: Exception | None = None
        self.fatal_step = 0
        self.is_broken = False

    def load(self) -> ScriptedRunner:
        self._note("load", 0)
        if self.load_error is not None:
            raise self.load_error
        return self

    def reset(self) -> None:
        self._note("reset", 0)

    def check_invariants(self) -> None:
        assert not self.is_broken, "broken"

    def announce(self, batch: StepBatch) -> None:
        self.announced.append(batch.step)

    def run(self, batch: StepBatch) -> StepResult:
        self._note("run", batch.step)
        self.running.set()
        if batch.step in self.gates:
            assert self.gates[batch.step].wait(TIMEOUT)
        if batch.step == self.fatal_step:
            raise SystemError("the device is gone")
        failure = StepFailure(StepFailureReason.INTERNAL, "scripted") if batch.step in self.failing else None
        return StepResult(batch.session, batch.step, failure=failure)

    def refuse(self, batch: StepBatch) -> StepResult:
        self._note("refuse", batch.step)
        return StepResult(batch.session, batch.step, failure=StepFailure(StepFailureReason.REFUSED, ""))

    def _note(self, call: str, step: int) -> None:
        self.calls.append((call, step))
        self.threads.add(threading.current_thread().name)


@pytest.fixture(name="runner")
def _runner() -> ScriptedRunner:
    return ScriptedRunner()


@pytest_asyncio.fixture(name="worker")
async def _worker(runner: ScriptedRunner) -> AsyncIterator[Worker]:
    worker = Worker()
    assert await worker.start(runner.load) is runner
    yield worker
    for gate in runner.gates.values():
        gate.set()
    await worker.stop()


async def _next(events: asyncio.Queue[SessionEvent]) -> SessionEvent:
    return await asyncio.wait_for(events.get(), TIMEOUT)


async def _running(runner: ScriptedRunner) -> None:
    assert await asyncio.to_thread(runner.running.wait, TIMEOUT)
    runner.running.clear()


@pytest.mark.asyncio
async def test_events_come_in_order_from_one_thread(runner: ScriptedRunner, worker: Worker) -> None:
    """Ready comes first, then one result a step in order, with the time it queued; all work was done on the device
    thread.
    """
    events: asyncio.Queue[SessionEvent] = asyncio.Queue()
    session = worker.open(4, events.put_nowait)
    for step in (1, 2, 3):
        session.submit(StepBatch(4, step))
    assert await _next(events) == SessionReady(4)
    results = [await _next(events) for _ in range(3)]
    assert [result.step for result in results if isinstance(result, StepResult)] == [1, 2, 3]
    assert all(result.timings.queue > 0 for result in results if isinstance(result, StepResult))
    assert runner.calls == [("load", 0), ("reset", 0), ("run", 1), ("run", 2), ("run", 3)]
    assert runner.threads == {"device"}
    assert runner.announced == [1, 2, 3]


@pytest.mark.asyncio
async def test_a_gap_is_told_where_a_sequence_was_there(runner: ScriptedRunner, worker: Worker) -> None:
    """From the end of a step to the start of the next; none before the first, or where all sequences are new."""
    events: asyncio.Queue[SessionEvent] = asyncio.Queue()
    session = worker.open(1, events.put_nowait)
    new = [NewSequence(handle, (5,), 1, 0, SamplingParams(0.0), StoppingParams(4)) for handle in (1, 2, 3)]
    rows = ([1], [1], [2], [2, 3], [1, 2], [])
    for step, (handles, fresh) in enumerate(zip(rows, (new[:1], [], new[1:2], new[2:], [], []), strict=True), start=1):
        session.submit(StepBatch(1, step, new_sequences=tuple(fresh), handles=tuple(handles)))
    results = [await _next(events) for _ in range(7)][1:]
    gaps = [result.timings.idle for result in results if isinstance(result, StepResult)]
    assert [gap is not None for gap in gaps] == [False, True, False, True, True, False]
    assert all(gap > 0 for gap in gaps if gap is not None)
    # Another session begins anew.
    again = worker.open(2, events.put_nowait)
    again.submit(StepBatch(2, 1, handles=(1,)))
    again.submit(StepBatch(2, 2, handles=(1,)))
    results = [await _next(events) for _ in range(3)][1:]
    assert [result.timings.idle is None for result in results if isinstance(result, StepResult)] == [True, False]


@pytest.mark.asyncio
async def test_session_change_waits_for_the_running_step(runner: ScriptedRunner, worker: Worker) -> None:
    """A new session is reset and ready only after the running step; steps queued behind it and its result are
    dropped.
    """
    runner.gates[1] = threading.Event()
    old_events: asyncio.Queue[SessionEvent] = asyncio.Queue()
    new_events: asyncio.Queue[SessionEvent] = asyncio.Queue()
    old = worker.open(1, old_events.put_nowait)
    old.submit(StepBatch(1, 1))
    old.submit(StepBatch(1, 2))
    assert await _next(old_events) == SessionReady(1)
    await _running(runner)
    old.close()
    new = worker.open(2, new_events.put_nowait)
    new.submit(StepBatch(2, 1))
    assert new_events.empty()
    assert runner.calls[-1] == ("run", 1)
    runner.gates.pop(1).set()
    assert await _next(new_events) == SessionReady(2)
    result = await _next(new_events)
    assert isinstance(result, StepResult)
    assert (result.session, result.step) == (2, 1)
    assert runner.calls[1:] == [("reset", 0), ("run", 1), ("reset", 0), ("run", 1)]
    assert old_events.empty()


@pytest.mark.asyncio
async def test_steps_received_before_a_failure_was_told_are_refused(runner: ScriptedRunner, worker: Worker) -> None:
    """Behind a failed step every step that came before its result was sent is refused; the first one after runs."""
    runner.failing = {2}
    events: asyncio.Queue[SessionEvent] = asyncio.Queue()
    session = worker.open(1, events.put_nowait)
    for step in (1, 2, 3):
        session.submit(StepBatch(1, step))
    results = [await _next(events) for _ in range(4)][1:]
    # The failure is known on the loop but not yet being sent.
    session.submit(StepBatch(1, 4))
    results.append(await _next(events))
    for result in results:
        assert isinstance(result, StepResult)
        session.answering(result)
    session.submit(StepBatch(1, 5))
    assert isinstance(await _next(events), StepResult)
    assert runner.calls[2:] == [("run", 1), ("run", 2), ("refuse", 3), ("refuse", 4), ("run", 5)]


@pytest.mark.asyncio
async def test_two_failures_in_flight(runner: ScriptedRunner, worker: Worker) -> None:
    """A step that fails after an earlier failure was told starts a refusal of its own; a new session starts clean."""
    runner.failing = {1, 3}
    events: asyncio.Queue[SessionEvent] = asyncio.Queue()
    session = worker.open(1, events.put_nowait)
    for step in (1, 2):
        session.submit(StepBatch(1, step))
    for _ in range(3):
        event = await _next(events)
        if isinstance(event, StepResult):
            session.answering(event)
    for step in (3, 4):
        session.submit(StepBatch(1, step))
    assert runner.calls[2:4] == [("run", 1), ("refuse", 2)]
    await _next(events)
    await _next(events)
    assert runner.calls[4:] == [("run", 3), ("refuse", 4)]
    session.close()
    worker.open(2, events.put_nowait).submit(StepBatch(2, 6))
    await _next(events)
    await _next(events)
    assert runner.calls[-1] == ("run", 6)


@pytest.mark.asyncio
async def test_a_failed_load_is_raised(runner: ScriptedRunner) -> None:
    """An error of the load comes out of start, the worker is not alive, and its thread has ended."""
    runner.load_error = RuntimeError("no such device")
    worker = Worker()
    with pytest.raises(RuntimeError, match="no such device"):
        await worker.start(runner.load)
    assert not worker.alive
    assert "device" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.asyncio
async def test_a_state_that_contradicts_itself_ends_the_thread(runner: ScriptedRunner) -> None:
    """With check_invariants a broken state ends the device thread after the step that broke it."""
    worker = Worker(check_invariants=True)
    await worker.start(runner.load)
    events: asyncio.Queue[SessionEvent] = asyncio.Queue()
    session = worker.open(1, events.put_nowait)
    session.submit(StepBatch(1, 1))
    await _next(events)
    await _next(events)
    runner.is_broken = True
    session.submit(StepBatch(1, 2))
    error = await asyncio.wait_for(worker.wait_ended(), TIMEOUT)
    assert "broken" in str(error)
    await worker.stop()


@pytest.mark.asyncio
async def test_a_cancelled_start_leaves_no_thread(runner: ScriptedRunner) -> None:
    """Cancelling start while the load runs lets the load end, then the thread, then start."""
    gate, loading = threading.Event(), threading.Event()

    def load() -> ScriptedRunner:
        loading.set()
        assert gate.wait(TIMEOUT)
        return runner

    start = asyncio.create_task(Worker().start(load))
    assert await asyncio.to_thread(loading.wait, TIMEOUT)
    start.cancel()
    await asyncio.sleep(0)
    assert not start.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert "device" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.asyncio
async def test_death_is_told(runner: ScriptedRunner) -> None:
    """An exception outside a step's own errors ends the thread; whoever waits learns of it, and stop still returns."""
    runner.fatal_step = 1
    worker = Worker()
    await worker.start(runner.load)
    assert worker.alive
    worker.open(1, lambda event: None).submit(StepBatch(1, 1))
    error = await asyncio.wait_for(worker.wait_ended(), TIMEOUT)
    assert isinstance(error, SystemError)
    assert not worker.alive
    await worker.stop()


@pytest.mark.asyncio
async def test_stop_joins_the_thread(runner: ScriptedRunner) -> None:
    """stop waits for the running step, then no device thread is left and nothing died."""
    runner.gates[1] = threading.Event()
    worker = Worker()
    await worker.start(runner.load)
    session = worker.open(1, lambda event: None)
    session.submit(StepBatch(1, 1))
    session.submit(StepBatch(1, 2))
    await _running(runner)
    session.close()
    stop = asyncio.create_task(worker.stop())
    await asyncio.sleep(0)
    assert not stop.done()
    runner.gates[1].set()
    await asyncio.wait_for(stop, TIMEOUT)
    assert await worker.wait_ended() is None
    assert ("run", 2) not in runner.calls
    assert "device" not in {thread.name for thread in threading.enumerate()}


def test_the_thread_outlives_a_closed_loop(runner: ScriptedRunner) -> None:
    """A loop that is gone when a step ends does not kill the thread with an unhandled error: it drops the event and
    ends.
    """
    runner.gates[1] = threading.Event()

    async def leave() -> Worker:
        worker = Worker()
        await worker.start(runner.load)
        worker.open(1, lambda event: None).submit(StepBatch(1, 1))
        await _running(runner)
        return worker

    worker = asyncio.run(leave())
    worker._queue.put(None)
    runner.gates[1].set()
    worker._thread.join(TIMEOUT)
    assert not worker._thread.is_alive()
    assert worker._error is None
