"""The runner in virtual time: who is sent when, what counts from when, and how a run ends early."""

from __future__ import annotations

import asyncio

import pytest
from fake_target import FakeTarget, Script
from virtual_time import block, clock, run_virtually

from octavo.bench.figures import figures_of
from octavo.bench.records import CANCELLED, OK, BenchRequest, RequestFailed
from octavo.bench.runner import Runner, RunResult


def closed(count: int) -> list[BenchRequest]:
    """Requests without arrival times."""
    return [BenchRequest([1, 2, 3], 3) for _ in range(count)]


def arriving(*arrivals: float) -> list[BenchRequest]:
    """Requests at these times."""
    return [BenchRequest([1, 2, 3], 3, arrival) for arrival in arrivals]


def test_a_closed_loop_keeps_its_number_live() -> None:
    """With requests of 0.7 s each and 3 at once, 9 take 3 rounds: never more than 3 live, never fewer."""
    target = FakeTarget()

    async def main() -> RunResult:
        return await Runner(target, clock).run_closed(closed(9), 3)

    result = run_virtually(main())
    assert target.most_live == 3
    assert result.ended - result.origin == pytest.approx(2.1)
    assert figures_of(result).mean_concurrency == pytest.approx(3.0)
    assert [record.status for record in result.records] == [OK] * 9


def test_a_closed_loop_counts_from_the_sending() -> None:
    """The fourth request had no schedule to be late for: its TTFT is the server's."""
    target = FakeTarget()

    async def main() -> RunResult:
        return await Runner(target, clock).run_closed(closed(4), 1)

    result = run_virtually(main())
    assert [record.ttft for record in result.records] == [pytest.approx(0.5)] * 4
    assert figures_of(result).lag is None


def test_arrivals_do_not_wait_for_answers() -> None:
    """A server that takes 100 s for each request is still sent one every second."""
    target = FakeTarget(Script(pauses=(100.0,)))
    arrivals = [float(second) for second in range(20)]

    async def main() -> RunResult:
        return await Runner(target, clock).run_open(arriving(*arrivals))

    result = run_virtually(main())
    assert [record.sent - result.origin for record in result.records] == pytest.approx(arrivals)
    assert target.most_live == 20
    assert figures_of(result).lag is not None


def test_a_stalled_generator_does_not_hide_the_wait() -> None:
    """While request 0 blocks everything for 3 s, 1 and 2 arrive: their latencies contain the wait, and it is told."""
    target = FakeTarget(scripts={0: Script(on_start=lambda: block(3.0))})

    async def main() -> RunResult:
        return await Runner(target, clock).run_open(arriving(0.0, 1.0, 2.0))

    result = run_virtually(main())
    assert [record.lag for record in result.records] == pytest.approx([0.0, 2.0, 1.0])
    assert [record.ttft for record in result.records] == pytest.approx([3.5, 2.5, 1.5])
    lag = figures_of(result).lag
    assert lag is not None
    assert lag.max == pytest.approx(2.0)


def test_a_failure_ends_its_own_request_alone() -> None:
    """Its code and words are in its record; the others go on, in both loops."""
    failure = RequestFailed("RESOURCE_EXHAUSTED", "full")
    for is_open in (True, False):
        target = FakeTarget(scripts={1: Script(failure=failure)})

        async def main(target: FakeTarget = target, is_open: bool = is_open) -> tuple[RunResult, Runner]:
            runner = Runner(target, clock)
            if is_open:
                return await runner.run_open(arriving(0.0, 0.1, 0.2)), runner
            return await runner.run_closed(closed(3), 2), runner

        result, runner = run_virtually(main())
        assert [record.status for record in result.records] == [OK, "RESOURCE_EXHAUSTED", OK]
        assert result.records[1].message == "full"
        counters = runner.counters
        assert (counters.total, counters.ok, counters.failed, counters.live) == (3, 2, 1, 0)


@pytest.mark.parametrize("is_open", [True, False])
def test_stop_cancels_what_is_live_and_keeps_what_ended(is_open: bool) -> None:
    """At 1 s one request has ended, others live and more are to come: these are never sent, the live ones cancelled."""
    target = FakeTarget(Script(pauses=(30.0,)), {0: Script(pauses=(0.2, 0.2))})

    async def main() -> RunResult:
        runner = Runner(target, clock)
        sending = runner.run_open(arriving(0.0, 0.1, 0.2, 50.0)) if is_open else runner.run_closed(closed(9), 2)
        running = asyncio.create_task(sending)
        await asyncio.sleep(1.0)
        runner.stop()
        return await running

    result = run_virtually(main())
    assert result.was_stopped
    assert [record.status for record in result.records] == [OK, CANCELLED, CANCELLED]
    assert sorted(target.cancelled) == [1, 2]
    assert target.live == 0
    assert result.ended - result.origin == pytest.approx(1.0)


def test_the_callers_own_cancellation_is_not_swallowed() -> None:
    """Cancelling the run is not stopping it: the caller gets its CancelledError, and no request stays live."""
    target = FakeTarget()

    async def main() -> None:
        running = asyncio.create_task(Runner(target, clock).run_closed(closed(4), 2))
        await target.first_request.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    run_virtually(main())
    assert sorted(target.cancelled) == [0, 1]
    assert target.live == 0


def test_a_defect_is_not_taken_for_an_outcome() -> None:
    """What is no RequestFailed ends the run with its traceback."""
    target = FakeTarget(scripts={1: Script(on_start=lambda: 1 // 0)})  # type: ignore[arg-type, return-value]

    async def main() -> None:
        await Runner(target, clock).run_closed(closed(3), 2)

    with pytest.raises(ExceptionGroup) as raised:
        run_virtually(main())
    assert raised.group_contains(ZeroDivisionError)


def test_cpu_time_is_that_of_the_run() -> None:
    """The generator's CPU clock is read at both ends and nowhere else."""
    readings = iter([5.0, 7.5])

    async def main() -> RunResult:
        return await Runner(FakeTarget(), clock, lambda: next(readings)).run_closed(closed(2), 1)

    assert run_virtually(main()).cpu_seconds == 2.5
