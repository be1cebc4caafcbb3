"""What bench/overhead.py counts, and that its direct way loses nothing between scheduler and executor."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from bench_scripts import load_script
from fakes_executor import RecallModel, make_limits, make_runner

from executor_svc.batch import RowStatus, StepBatch, StepFailure, StepFailureReason, StepResult
from executor_svc.model_runner import ModelRunner
from executor_svc.worker import Worker
from scheduler_svc.batch import RowStatus as SchedulerRowStatus

overhead = load_script("overhead")
direct = load_script("direct_cell")
workloads = load_script("workloads")
recorded = load_script("recorded_executor")


def _step(at: float, rows: int, tokens: int, idle: float | None, busy: float = 0.5) -> dict[str, Any]:
    return {"at": at, "rows": rows, "tokens": tokens, "idle": idle, "busy": busy}


def test_gaps_are_those_of_steps_that_decode_everything() -> None:
    """Steps with prompts, with fewer sequences or with nothing to go on with do not count."""
    steps = [_step(1, 4, 4, 0.001), _step(2, 4, 60, 0.002), _step(3, 3, 3, 0.003), _step(4, 4, 4, None)]
    assert overhead.gaps_of(steps, 4) == [0.001]


def _round(start: float, direct_s: float, services_s: float, streaming_s: float) -> dict[str, Any]:
    return {
        "direct": {"total_s": direct_s},
        "services": {"total_s": services_s, "span": (start, start + 10)},
        "streaming": {"total_s": streaming_s, "span": (start + 10.1, start + 20)},
        "gap_span": (start + 20.5, start + 30),
    }


def test_figures_are_medians_over_rounds_and_exact_percentiles_over_all_gaps() -> None:
    """Each run is charged with the steps in its own span; one slow round does not move the fractions."""
    times = ((10.0, 10.4, 11.0), (10.0, 10.2, 12.0), (10.0, 30.0, 40.0))
    rounds, steps = [], []
    for number, seconds in enumerate(times):
        start = 100.0 * number
        rounds.append(_round(start, *seconds))
        steps += [_step(start + 1, 2, 9, None), _step(start + 2, 2, 2, 0.25), _step(start + 3, 0, 0, None)]
        steps += [_step(start + 11, 2, 2, 0.125)]
        steps += [_step(start + 21 + place, 2, 2, (1 + place + number) / 1e3) for place in range(3)]
    figures = overhead.summarize(rounds, steps, 2)
    assert figures["services_cost_fraction"] == pytest.approx(0.04)
    assert figures["streaming_cost_fraction"] == pytest.approx(0.2)
    assert figures["num_gaps"] == 9
    # 1 2 2 3 3 3 4 4 5 milliseconds.
    assert figures["step_gap_ms_p50"] == pytest.approx(3.0)
    assert figures["step_gap_ms_p99"] == pytest.approx(4.92)
    for made in figures["rounds"]:
        assert [made["services"][name] for name in ("num_steps", "busy_s", "idle_s")] == [2, 1.0, 0.25]
        assert [made["streaming"][name] for name in ("num_steps", "busy_s", "idle_s")] == [1, 0.5, 0.125]
    with pytest.raises(SystemExit, match="decoded 2 sequences"):
        overhead.summarize([_round(0.0, 1.0, 1.0, 1.0)], [], 2)


def test_gap_workload_is_short_prompts_of_their_own() -> None:
    """All different, also from those of other repeats, so that nothing is cached and every output has one length."""
    first, second = (overhead.gap_workload(repeat, 8, 40, 300) for repeat in range(2))
    prompts = {request.prompt for request in (*first.requests, *second.requests)}
    assert len(prompts) == 16
    assert {(len(each.prompt), each.num_output_tokens) for each in first.requests} == {(16, 40)}


def test_a_step_is_written_down_with_what_it_cost() -> None:
    """Rows, tokens, the gap and the time of the device, at the moment at which its result came."""
    batch = StepBatch(1, 7, handles=(1, 2), num_scheduled_tokens=(5, 1))
    result = StepResult(1, 7, handles=(1, 2), statuses=(RowStatus.OK, RowStatus.OK))
    assert recorded.step_record(2.5, batch, result) == {"at": 2.5, "rows": 2, "tokens": 6, "idle": None, "busy": 0.0}


def test_results_cross_with_their_statuses_and_a_failure_ends_the_run() -> None:
    """Rows without a token take none from others; what is not OK is told by row."""
    result = StepResult(3, 1, (4, 5, 6), (RowStatus.OK, RowStatus.SKIPPED, RowStatus.OK), sampled=(9, None, 8))
    rows = direct.batch_result(result, 3).rows
    assert [(row.handle, row.status, row.token_ids) for row in rows] == [
        (4, SchedulerRowStatus.OK, (9,)),
        (5, SchedulerRowStatus.SKIPPED, ()),
        (6, SchedulerRowStatus.OK, (8,)),
    ]
    failed = StepResult(3, 2, failure=StepFailure(StepFailureReason.INTERNAL, "a fault"))
    with pytest.raises(RuntimeError, match="step 2 failed: a fault"):
        direct.batch_result(failed, 3)


@pytest_asyncio.fixture(name="worker")
async def _worker() -> AsyncIterator[tuple[Worker, ModelRunner]]:
    worker = Worker(check_invariants=True)
    limits = make_limits(num_blocks=40, max_num_seqs=4, max_num_batched_tokens=24, max_model_len=256, vocab_size=400)
    runner = await worker.start(lambda: make_runner(limits, RecallModel(400)))
    yield worker, runner
    await worker.stop()


@pytest.mark.asyncio
async def test_the_direct_way_gives_every_request_its_tokens(worker: tuple[Worker, ModelRunner]) -> None:
    """With chunked prompts, more requests than rows, and memory that does not hold all; run after run."""
    device, runner = worker
    cell = direct.DirectCell(device, runner.limits)
    for number in range(2):
        requests = tuple(
            workloads.Request(tuple(range(1 + index, 31 + 7 * index)), 5 + index) for index in range(number, number + 6)
        )
        figures = await cell.run(workloads.Workload("mixed", requests))
        assert figures["num_steps"] > 10
        assert 0 < figures["busy_s"] < figures["total_s"]
    assert runner.num_sequences <= 4


@pytest.mark.asyncio
async def test_a_fault_of_the_device_ends_the_direct_run(worker: tuple[Worker, ModelRunner]) -> None:
    """The run does not wait for tokens that never come."""
    device, runner = worker
    cell = direct.DirectCell(device, runner.limits)
    runner._model.forward = None  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="step 1 failed"):
        await cell.run(workloads.Workload("one", (workloads.Request((5, 6, 7), 2),)))
